//! Everything about the transport that an operator may turn, with its bounds.
//!
//! Start at [`TransportSettings::validate`]: it refuses settings that contradict each other, naming both values,
//! before any socket is opened.

use std::time::Duration;

/// Longest keep-alive interval: mappings in home and mobile routers are forgotten after about 30 s of silence.
pub(crate) const KEEP_ALIVE_MAX: Duration = Duration::from_secs(15);

/// How many keep-alives must fit into one idle timeout, so that one lost packet does not end a session.
pub(crate) const KEEP_ALIVES_PER_IDLE: u32 = 3;

/// Smallest packet size that QUIC demands of every path, in bytes.
const MTU_MIN: u16 = 1_200;

/// Which rule decides how fast to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Congestion {
    /// CUBIC: the usual choice.
    Cubic,
    /// BBR: for links that lose packets without being full.
    Bbr,
}

/// Limits and timers of an endpoint and its sessions. Times are wall-clock durations, sizes are bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransportSettings {
    /// A session ends when nothing was heard for this long; the smaller of the two sides' values holds.
    pub idle_timeout: Duration,
    /// Longest silence before a keep-alive is sent; `None` derives it from `idle_timeout`.
    pub keep_alive: Option<Duration>,
    /// From the first packet to the answered hello.
    pub handshake_timeout: Duration,
    /// How long one address is tried before it counts as failed.
    pub dial_timeout: Duration,
    /// How long an address may stay silent before the next one is tried beside it.
    pub dial_stagger: Duration,
    /// Unread bytes accepted on one stream.
    pub stream_receive_window: u32,
    /// Unread bytes accepted on all streams of a session.
    pub receive_window: u32,
    /// Unacknowledged bytes held for one session.
    pub send_window: u64,
    /// Bidirectional streams the peer may have open at once.
    pub bi_streams_max: u32,
    /// Unidirectional streams the peer may have open at once.
    pub uni_streams_max: u32,
    /// Bytes of datagrams held in each direction; older ones are dropped first.
    pub datagram_buffer: usize,
    /// Asked of the kernel for the UDP socket in each direction; see [`crate::SocketReport`] for what was granted.
    pub socket_buffer: usize,
    /// Whether one system call may carry several packets. Turn off where a driver advertises it wrongly.
    pub segmentation_offload: bool,
    /// Packet size to begin with; every path carries 1200.
    pub mtu_initial: u16,
    /// Whether larger packets are probed for.
    pub mtu_discovery: bool,
    /// Which rule decides how fast to send.
    pub congestion: Congestion,
    /// Peers in the middle of connecting above which a newcomer has to prove its address first.
    pub half_open_unvalidated_max: usize,
    /// Peers in the middle of connecting above which newcomers are refused.
    pub half_open_max: usize,
}

impl Default for TransportSettings {
    fn default() -> Self {
        Self {
            idle_timeout: Duration::from_secs(30),
            keep_alive: None,
            handshake_timeout: Duration::from_secs(10),
            dial_timeout: Duration::from_secs(5),
            dial_stagger: Duration::from_millis(250),
            // A 100 Mbit/s path of 200 ms holds 2.5 MB; a session may hold four such streams.
            stream_receive_window: 2_500_000,
            receive_window: 10_000_000,
            send_window: 10_000_000,
            bi_streams_max: 64,
            // One unidirectional stream per frame in flight, on all edges between two nodes.
            uni_streams_max: 512,
            datagram_buffer: 64 * 1024,
            // Default kernel buffers drop packets at eight busy sessions; none were lost at 4 MB.
            socket_buffer: 4 << 20,
            segmentation_offload: true,
            mtu_initial: MTU_MIN,
            mtu_discovery: true,
            congestion: Congestion::Cubic,
            half_open_unvalidated_max: 64,
            half_open_max: 1_024,
        }
    }
}

/// Settings that cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// The keep-alive would not keep the session alive.
    #[error(
        "keep-alive of {keep_alive:?} contradicts the idle timeout of {idle_timeout:?}: it must be at most {limit:?} (a third of the idle timeout, and {KEEP_ALIVE_MAX:?})"
    )]
    KeepAlive {
        /// As set.
        keep_alive: Duration,
        /// As set.
        idle_timeout: Duration,
        /// The largest keep-alive that would do.
        limit: Duration,
    },
    /// A value that must not be zero, or not below another.
    #[error("{name} of {value} is too small: at least {least}")]
    TooSmall {
        /// The setting.
        name: &'static str,
        /// As set.
        value: u64,
        /// The smallest value that would do.
        least: u64,
    },
}

impl TransportSettings {
    /// Longest silence before a keep-alive is sent: as set, or derived from the idle timeout.
    pub fn keep_alive_interval(&self) -> Duration {
        self.keep_alive.unwrap_or_else(|| self.keep_alive_limit())
    }

    /// Checks that the settings can work together.
    ///
    /// # Errors
    /// The first contradiction, naming the values.
    pub fn validate(&self) -> Result<(), SettingsError> {
        // QUIC carries the idle timeout in milliseconds, and below this no keep-alive interval makes sense.
        at_least("idle_timeout (ms)", millis(self.idle_timeout), 30)?;
        let limit = self.keep_alive_limit();
        if let Some(keep_alive) = self.keep_alive {
            if keep_alive > limit {
                return Err(SettingsError::KeepAlive {
                    keep_alive,
                    idle_timeout: self.idle_timeout,
                    limit,
                });
            }
            at_least("keep_alive (ms)", millis(keep_alive), 1)?;
        }
        at_least("handshake_timeout (ms)", millis(self.handshake_timeout), 1)?;
        at_least("dial_timeout (ms)", millis(self.dial_timeout), 1)?;
        at_least(
            "stream_receive_window",
            self.stream_receive_window.into(),
            MTU_MIN.into(),
        )?;
        at_least(
            "receive_window",
            self.receive_window.into(),
            self.stream_receive_window.into(),
        )?;
        at_least("send_window", self.send_window, MTU_MIN.into())?;
        // The hello needs one.
        at_least("bi_streams_max", self.bi_streams_max.into(), 1)?;
        at_least("mtu_initial", self.mtu_initial.into(), MTU_MIN.into())?;
        at_least("half_open_max", self.half_open_max as u64, 1)?;
        Ok(())
    }

    fn keep_alive_limit(&self) -> Duration {
        (self.idle_timeout / KEEP_ALIVES_PER_IDLE).min(KEEP_ALIVE_MAX)
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn at_least(name: &'static str, value: u64, least: u64) -> Result<(), SettingsError> {
    if value < least {
        return Err(SettingsError::TooSmall { name, value, least });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(idle_s: u64, keep_alive_s: Option<u64>) -> TransportSettings {
        TransportSettings {
            idle_timeout: Duration::from_secs(idle_s),
            keep_alive: keep_alive_s.map(Duration::from_secs),
            ..TransportSettings::default()
        }
    }

    /// Field report 19: contradictory timers are refused at start, naming both numbers.
    #[test]
    fn field_019_contradictory_keep_alive_is_refused() {
        let message = with(30, Some(40)).validate().unwrap_err().to_string();
        assert!(
            message.contains("40s") && message.contains("30s"),
            "{message}"
        );
        assert!(with(30, Some(10)).validate().is_ok());
        assert!(with(30, Some(11)).validate().is_err());
        assert!(
            with(600, Some(20)).validate().is_err(),
            "routers forget after 30 s"
        );
    }

    #[test]
    fn the_derived_keep_alive_fits() {
        assert_eq!(
            with(30, None).keep_alive_interval(),
            Duration::from_secs(10)
        );
        assert_eq!(with(600, None).keep_alive_interval(), KEEP_ALIVE_MAX);
        assert_eq!(
            with(6, Some(1)).keep_alive_interval(),
            Duration::from_secs(1)
        );
        assert!(TransportSettings::default().validate().is_ok());
    }

    #[test]
    fn each_impossible_value_is_named() {
        let base = TransportSettings::default();
        let cases = [
            (
                TransportSettings {
                    receive_window: 2_000,
                    ..base.clone()
                },
                "receive_window",
            ),
            (
                TransportSettings {
                    bi_streams_max: 0,
                    ..base.clone()
                },
                "bi_streams_max",
            ),
            (
                TransportSettings {
                    mtu_initial: 500,
                    ..base.clone()
                },
                "mtu_initial",
            ),
            (
                TransportSettings {
                    half_open_max: 0,
                    ..base.clone()
                },
                "half_open_max",
            ),
            (
                TransportSettings {
                    idle_timeout: Duration::ZERO,
                    ..base
                },
                "idle_timeout",
            ),
        ];
        for (settings, name) in cases {
            let message = settings.validate().unwrap_err().to_string();
            assert!(message.contains(name), "{message}");
        }
    }
}
