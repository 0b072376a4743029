//! What the fleet and the host have used, read at two moments and subtracted.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Context;
use compass_shared::api::NodeView;

use super::fleet::Fleet;
use crate::cluster::{Snapshot, Usage};
use crate::relay::{Lateness, RelayControl, RelayCounters};

/// Everything that is counted, at one moment.
#[derive(Debug, Clone)]
pub(crate) struct Reading {
    at: Instant,
    usage: BTreeMap<String, Usage>,
    own: Usage,
    host: HostTicks,
    pub(crate) relay: RelayCounters,
    pub(crate) lateness: Lateness,
    pub(crate) nodes: Vec<NodeView>,
}

/// `/proc/stat`'s first line, in clock ticks over all cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HostTicks {
    busy: u64,
    total: u64,
}

impl Reading {
    pub(crate) fn take(fleet: &Fleet) -> anyhow::Result<Self> {
        let own = i32::try_from(std::process::id())?;
        let stat = std::fs::read_to_string("/proc/stat")?;
        Ok(Self {
            at: Instant::now(),
            usage: fleet.cluster.usage()?,
            own: Snapshot::take()?.usage(&[own]),
            host: HostTicks::parse(&stat).context("/proc/stat is not understood")?,
            relay: fleet.relay.counters()?,
            lateness: fleet.relay.lateness()?,
            // A coordinator that was just killed has nothing to say.
            nodes: fleet.api.get("/v1/nodes").unwrap_or_default(),
        })
    }

    pub(crate) fn since(&self, earlier: &Self) -> Duration {
        self.at.duration_since(earlier.at)
    }

    /// CPU time of a process of the cluster and its children since then, in seconds.
    pub(crate) fn cpu_s(&self, name: &str, earlier: &Self) -> f64 {
        let cpu = |reading: &Self| reading.usage.get(name).map_or(Duration::ZERO, |u| u.cpu);
        cpu(self).saturating_sub(cpu(earlier)).as_secs_f64()
    }

    /// Memory of a process of the cluster and its children, in MiB.
    pub(crate) fn resident_mib(&self, name: &str) -> f64 {
        let usage = self.usage.get(name);
        usage.map_or(0.0, |usage| {
            usage.resident_bytes as f64 / f64::from(1 << 20)
        })
    }

    /// Cores that the whole demo, this process included, has used on average since then.
    pub(crate) fn own_cores(&self, earlier: &Self) -> f64 {
        let used = self.own.cpu.saturating_sub(earlier.own.cpu);
        used.as_secs_f64() / self.since(earlier).as_secs_f64().max(1e-9)
    }

    /// Part of the host's cores that was busy since then, whoever used it.
    pub(crate) fn host_busy(&self, earlier: &Self) -> f64 {
        let busy = self.host.busy.saturating_sub(earlier.host.busy);
        let total = self.host.total.saturating_sub(earlier.host.total);
        busy as f64 / total.max(1) as f64
    }

    /// Bytes that a machine has sent since then, as the relay counted them.
    pub(crate) fn relay_sent_bytes(&self, machine: &str, earlier: &Self) -> u64 {
        let sent = |counters: &RelayCounters| {
            let links = counters.links.iter().filter(|link| link.from == machine);
            links.map(|link| link.counters.offered.bytes).sum::<u64>()
        };
        sent(&self.relay).saturating_sub(sent(&earlier.relay))
    }

    /// The same as the machine's agent says, if it was there at both moments and has not been started anew.
    pub(crate) fn own_sent_bytes(&self, node: &str, earlier: &Self) -> Option<u64> {
        let sent = |reading: &Self| {
            let mut nodes = reading.nodes.iter();
            let view = nodes.find(|view| view.id.as_str() == node && view.online);
            view.map(|view| view.sent_bytes)
        };
        sent(self)?.checked_sub(sent(earlier)?)
    }
}

impl HostTicks {
    fn parse(stat: &str) -> Option<Self> {
        let fields: Vec<u64> = stat
            .lines()
            .next()?
            .strip_prefix("cpu ")?
            .split_whitespace()
            .map_while(|field| field.parse().ok())
            .collect();
        // user nice system idle iowait irq softirq steal; guest times are within user's.
        let idle = fields.get(3)? + fields.get(4)?;
        let total = fields.iter().take(8).sum();
        Some(Self {
            busy: total - idle,
            total,
        })
    }
}

/// Model name of the processor.
pub(crate) fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut names = text
        .lines()
        .filter(|line| line.starts_with("model name"))
        .filter_map(|line| line.split_once(':'));
    names
        .next()
        .map_or_else(|| "unknown".to_owned(), |(_, name)| name.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_time_is_busy_unless_idle_or_waiting_for_a_disk() {
        let stat = "cpu  10 1 5 80 4 0 1 2 3 0\ncpu0 1 1 1 1\n";
        let expected = HostTicks {
            busy: 19,
            total: 103,
        };
        assert_eq!(HostTicks::parse(stat), Some(expected));
        assert_eq!(HostTicks::parse("intr 1 2 3"), None);
    }
}
