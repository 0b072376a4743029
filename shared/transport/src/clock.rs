//! The wall clock with a floor, for judging certificates on devices that may have no battery-backed clock.
//!
//! Start at [`WallClock`]. A board that boots in 1970 would take every certificate for "not yet valid"; it is never
//! earlier than the time this program was built or the last time it saved, so those are the floor. A wrong clock is a
//! temporary condition: nothing here stops local work.
//!
//! Deliberately absent: latencies (they are measured on monotonic clocks) and setting the system's clock.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use rustls_pki_types::UnixTime;

/// When this program was built, in seconds since 1970.
pub fn build_unix_s() -> u64 {
    // An unreadable stamp costs only the floor.
    env!("COMPASS_BUILD_UNIX_S").parse().unwrap_or(0)
}

#[derive(Debug)]
enum Source {
    System { offset_s: i64 },
    Manual(AtomicU64),
}

/// Wall time in seconds since 1970, never below its floor.
#[derive(Debug)]
pub struct WallClock {
    source: Source,
    floor_unix_s: AtomicU64,
}

impl WallClock {
    /// The system's clock, with the build time as the floor.
    pub fn system() -> Arc<Self> {
        Self::system_with_offset(0)
    }

    /// The system's clock read wrongly by `offset_s` seconds: emulates nodes whose clocks are hours apart.
    pub fn system_with_offset(offset_s: i64) -> Arc<Self> {
        Arc::new(Self {
            source: Source::System { offset_s },
            floor_unix_s: AtomicU64::new(build_unix_s()),
        })
    }

    /// A clock that moves only by [`WallClock::set`], without a floor.
    pub fn manual(unix_s: u64) -> Arc<Self> {
        Arc::new(Self {
            source: Source::Manual(AtomicU64::new(unix_s)),
            floor_unix_s: AtomicU64::new(0),
        })
    }

    /// Sets a manual clock; without effect on a system clock.
    pub fn set(&self, unix_s: u64) {
        if let Source::Manual(now) = &self.source {
            now.store(unix_s, Ordering::Relaxed);
        }
    }

    /// Seconds since 1970, at least the floor.
    pub fn now_unix_s(&self) -> u64 {
        self.raw_unix_s()
            .max(self.floor_unix_s.load(Ordering::Relaxed))
    }

    /// Whether the underlying clock reads less than a time known to have passed: samples are then "clock unsynced".
    pub fn is_behind_floor(&self) -> bool {
        self.raw_unix_s() < self.floor_unix_s.load(Ordering::Relaxed)
    }

    /// States a time that has certainly passed; the floor only rises.
    pub fn raise_floor(&self, unix_s: u64) {
        self.floor_unix_s.fetch_max(unix_s, Ordering::Relaxed);
    }

    /// Raises the floor to the time saved in a file by [`WallClock::save`]; a missing or damaged file costs only the
    /// floor and is not an error.
    pub fn load(&self, path: &Path) {
        let saved = std::fs::read_to_string(path)
            .ok()
            .and_then(|text| text.trim().parse().ok());
        if let Some(unix_s) = saved {
            self.raise_floor(unix_s);
        }
    }

    /// Saves the present time for the next start. Call it now and then while the clock is believed right.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: &Path) -> std::io::Result<()> {
        crate::identity::files::replace(
            path,
            format!("{}\n", self.now_unix_s()).as_bytes(),
            crate::identity::files::Access::Public,
        )
    }

    fn raw_unix_s(&self) -> u64 {
        match &self.source {
            Source::System { offset_s } => SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_secs())
                .saturating_add_signed(*offset_s),
            Source::Manual(now) => now.load(Ordering::Relaxed),
        }
    }
}

impl rustls::time_provider::TimeProvider for WallClock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(std::time::Duration::from_secs(
            self.now_unix_s(),
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_only_rises_and_survives_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("clock");
        let clock = WallClock::manual(1_900_000_000);
        clock.save(&path).unwrap();

        let rebooted = WallClock::manual(0);
        rebooted.load(&path);
        assert_eq!(rebooted.now_unix_s(), 1_900_000_000);
        assert!(rebooted.is_behind_floor());
        rebooted.raise_floor(5);
        assert_eq!(rebooted.now_unix_s(), 1_900_000_000);
        rebooted.set(1_900_000_001);
        assert_eq!(rebooted.now_unix_s(), 1_900_000_001);
        assert!(!rebooted.is_behind_floor());
    }

    #[test]
    fn damaged_files_cost_only_the_floor() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("clock");
        let clock = WallClock::manual(7);
        clock.load(&path);
        for content in [&b""[..], b"\0\0\0", b"-3", b"99999999999999999999999"] {
            std::fs::write(&path, content).unwrap();
            clock.load(&path);
            assert_eq!(clock.now_unix_s(), 7);
        }
    }

    #[test]
    fn a_clock_in_1970_reads_the_build_time() {
        let clock = WallClock::system_with_offset(i64::MIN / 2);
        assert_eq!(clock.now_unix_s(), build_unix_s());
        assert!(clock.is_behind_floor());
    }
}
