//! CPU, memory and disk of the host within its limits, and the use of Compass's own processes.
//!
//! `sysinfo` is asked for two things only, the CPUs' busy time and a given list of processes, because its wider refreshes walk all of
//! `/proc`. Where a control group limits the CPU, "busy" is the group's use in percent of its limit: on a host with 64 CPUs a group
//! that uses the 4 it may is 100 % busy.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use compass_shared::model::telemetry::{HostTelemetry, Note, ProcessTelemetry, Reading, Source};
use compass_shared::time::{Moment, ms};
use sysinfo::{Pid, ProcessRefreshKind, ProcessesToUpdate, System};

use super::cgroup::{Cgroups, CpuLimit};
use super::meminfo;
use super::root::Root;

/// A process can be moved to another group, but seldom is: its groups are looked up again after this many samples.
const SAMPLES_PER_LOOKUP: u64 = 30;

/// One sample of the host.
#[derive(Debug, Clone, Default)]
pub(super) struct HostSample {
    pub(super) host: HostTelemetry,
    pub(super) agent: ProcessTelemetry,
    pub(super) children: Vec<ProcessTelemetry>,
    pub(super) notes: Vec<Note>,
}

/// Reads the host. Blocks as long as the kernel does.
pub(super) struct HostSampler {
    root: Root,
    data_folder: Option<PathBuf>,
    system: Option<System>,
    cgroups: Cgroups,
    samples: u64,
    /// When, and how much CPU time the limited group had used, in nanoseconds.
    group_usage: Option<(Moment, u64)>,
    /// When, and how much CPU time each process had used, in milliseconds.
    process_usage: BTreeMap<u32, (Moment, u64)>,
    children: Arc<Mutex<Vec<u32>>>,
}

impl HostSampler {
    /// `children` are the processes to watch beside this one; the list may change between samples.
    pub(super) fn new(
        root: Root,
        data_folder: Option<PathBuf>,
        children: Arc<Mutex<Vec<u32>>>,
    ) -> Self {
        Self {
            root,
            data_folder,
            system: None,
            cgroups: Cgroups::default(),
            samples: 0,
            group_usage: None,
            process_usage: BTreeMap::new(),
            children,
        }
    }

    /// Takes a sample.
    pub(super) fn sample(&mut self, now: Moment) -> HostSample {
        if self.samples.is_multiple_of(SAMPLES_PER_LOOKUP) {
            self.cgroups = Cgroups::locate(&self.root);
        }
        self.samples += 1;
        // sysinfo cannot be had on some systems at first; it is asked for again.
        self.system = self.system.take().or_else(|| System::new().ok());
        if let Some(system) = &mut self.system {
            system.refresh_cpu_usage();
        }
        let mut sample = HostSample::default();
        self.read_cpu(now, &mut sample);
        self.read_memory(&mut sample);
        self.read_disk(&mut sample);
        self.read_processes(now, &mut sample);
        sample
    }

    fn read_cpu(&mut self, now: Moment, sample: &mut HostSample) {
        let host = &mut sample.host;
        host.cores = self.cores();
        let Some(cores) = host.cores.value else {
            return;
        };
        let limit = self.cgroups.cpu_limit(cores);
        if !limit.is_limited {
            host.cpu_capacity_cores = Reading {
                value: Some(limit.cores),
                source: host.cores.source.clone(),
            };
            host.cpu_busy_percent = self.host_busy();
            self.group_usage = None;
            return;
        }
        host.cpu_capacity_cores = Reading::new(limit.cores, Source::Cgroup);
        host.cpu_busy_percent = self.group_busy(now, &limit);
        let text = format!("limited to {} of {cores} CPUs", limit.cores);
        sample.notes.push(Note {
            topic: "cpu".to_owned(),
            is_warning: false,
            text,
        });
    }

    /// CPUs of the host.
    fn cores(&self) -> Reading<u32> {
        if let Some(len) = self
            .root
            .read("/sys/devices/system/cpu/online")
            .and_then(|text| super::cgroup::cpu_list_len(&text))
        {
            return Reading::new(len, Source::Sysfs);
        }
        let len = self.system.as_ref().map_or(0, |system| system.cpus().len());
        u32::try_from(len)
            .ok()
            .filter(|&len| len > 0)
            .map_or_else(Reading::none, |len| Reading::new(len, Source::Sysinfo))
    }

    /// Busy part of the whole host. The first figure has no interval behind it and means nothing.
    fn host_busy(&self) -> Reading<f64> {
        let value = self
            .system
            .as_ref()
            .filter(|_| self.samples > 1)
            .map(|system| f64::from(system.global_cpu_usage()));
        Reading {
            value: value.map(|percent| percent.min(100.0)),
            source: Source::Sysinfo,
        }
    }

    /// Busy part of what the limited group may use.
    fn group_busy(&mut self, now: Moment, limit: &CpuLimit) -> Reading<f64> {
        let usage_ns = self.cgroups.cpu_usage_ns(limit);
        let previous = self.group_usage.take();
        self.group_usage = usage_ns.map(|ns| (now, ns));
        let value = previous
            .zip(usage_ns)
            .and_then(|((then, before_ns), after_ns)| {
                let used_ms = after_ns.checked_sub(before_ns)? as f64 / 1e6;
                percent_of(used_ms, ms(now.since(then)) * limit.cores)
            });
        // A group may have used a little more than its quota within one interval.
        Reading {
            value: value.map(|percent| percent.min(100.0)),
            source: Source::Cgroup,
        }
    }

    fn read_memory(&self, sample: &mut HostSample) {
        let Some(memory) = meminfo::read(&self.root) else {
            return;
        };
        let host = &mut sample.host;
        host.memory_available_bytes = Reading {
            value: memory.available_bytes,
            source: Source::Procfs,
        };
        let Some(limit) = self.cgroups.memory_limit(memory.total_bytes) else {
            host.memory_total_bytes = Reading::new(memory.total_bytes, Source::Procfs);
            return;
        };
        host.memory_total_bytes = Reading::new(limit.limit_bytes, Source::Cgroup);
        if let Some(used_bytes) = limit.used_bytes {
            let left_bytes = limit.limit_bytes.saturating_sub(used_bytes);
            if memory
                .available_bytes
                .is_none_or(|available_bytes| left_bytes < available_bytes)
            {
                host.memory_available_bytes = Reading::new(left_bytes, Source::Cgroup);
            }
        }
        let text = format!(
            "limited to {} of {} MiB",
            limit.limit_bytes >> 20,
            memory.total_bytes >> 20
        );
        sample.notes.push(Note {
            topic: "memory".to_owned(),
            is_warning: false,
            text,
        });
    }

    fn read_disk(&self, sample: &mut HostSample) {
        let Some(folder) = &self.data_folder else {
            return;
        };
        let free_bytes = rustix::fs::statvfs(folder)
            .ok()
            .and_then(|disk| disk.f_bavail.checked_mul(disk.f_frsize));
        sample.host.disk_free_bytes = Reading {
            value: free_bytes,
            source: Source::Sysinfo,
        };
    }

    fn read_processes(&mut self, now: Moment, sample: &mut HostSample) {
        let own = std::process::id();
        let mut pids = self
            .children
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        pids.sort_unstable();
        pids.dedup();
        let Some(system) = &mut self.system else {
            return;
        };
        let listed: Vec<Pid> = pids
            .iter()
            .chain([&own])
            .map(|&pid| Pid::from_u32(pid))
            .collect();
        let figures = ProcessRefreshKind::nothing().with_memory().with_cpu();
        system.refresh_processes_specifics(ProcessesToUpdate::Some(&listed), true, figures);
        self.process_usage
            .retain(|pid, _| *pid == own || pids.binary_search(pid).is_ok());
        sample.agent = self.process(now, own);
        sample.children = pids
            .into_iter()
            .filter(|&pid| pid != own)
            .map(|pid| self.process(now, pid))
            .collect();
    }

    fn process(&mut self, now: Moment, pid: u32) -> ProcessTelemetry {
        let found = self
            .system
            .as_ref()
            .and_then(|system| system.process(Pid::from_u32(pid)));
        let Some(process) = found else {
            self.process_usage.remove(&pid);
            return ProcessTelemetry {
                pid,
                ..ProcessTelemetry::default()
            };
        };
        let cpu_time_ms = process.accumulated_cpu_time();
        let cpu_percent =
            self.process_usage
                .insert(pid, (now, cpu_time_ms))
                .and_then(|(then, before_ms)| {
                    // Less than before means that another process has the number now.
                    percent_of(
                        cpu_time_ms.checked_sub(before_ms)? as f64,
                        ms(now.since(then)),
                    )
                });
        ProcessTelemetry {
            pid,
            resident_bytes: Reading::new(process.memory(), Source::Sysinfo),
            cpu_time_ms: Reading::new(cpu_time_ms, Source::Sysinfo),
            cpu_percent: Reading {
                value: cpu_percent,
                source: Source::Sysinfo,
            },
        }
    }
}

fn percent_of(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| 100.0 * part / whole)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::test_tree::Tree;

    fn at(second: u64) -> Moment {
        Moment(second * 1_000_000)
    }

    #[test]
    fn field_089_a_group_that_uses_all_it_may_is_100_percent_busy() {
        let tree = Tree::new()
            .file("/sys/devices/system/cpu/online", "0-63\n")
            .file("/proc/self/cgroup", "3:cpuset:/a\n2:cpu,cpuacct:/a\n")
            .file("/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "-1\n")
            .file("/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n")
            .file("/sys/fs/cgroup/cpuset/a/cpuset.cpus", "0-3\n")
            .file("/sys/fs/cgroup/cpuacct/a/cpuacct.usage", "1000000000\n");
        let mut sampler = HostSampler::new(tree.root(), None, Arc::default());
        let first = sampler.sample(at(1)).host;
        assert_eq!(
            first.cpu_busy_percent.value, None,
            "nothing to compare with yet"
        );
        tree.set("/sys/fs/cgroup/cpuacct/a/cpuacct.usage", "5000000000\n");
        let host = sampler.sample(at(2)).host;
        assert_eq!(host.cpu_capacity_cores, Reading::new(4.0, Source::Cgroup));
        assert_eq!(host.cpu_busy_percent, Reading::new(100.0, Source::Cgroup));
    }

    #[test]
    fn memory_is_what_the_group_may_still_take() {
        let tree = Tree::new()
            .file(
                "/proc/meminfo",
                "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n",
            )
            .file("/proc/self/cgroup", "0::/a\n")
            .file("/sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
            .file("/sys/fs/cgroup/a/memory.max", "4294967296\n")
            .file("/sys/fs/cgroup/a/memory.current", "1073741824\n");
        let host = HostSampler::new(tree.root(), None, Arc::default())
            .sample(at(1))
            .host;
        assert_eq!(
            host.memory_total_bytes,
            Reading::new(4 << 30, Source::Cgroup)
        );
        assert_eq!(
            host.memory_available_bytes,
            Reading::new(3 << 30, Source::Cgroup)
        );
    }

    #[test]
    fn own_processes_are_watched_and_a_dead_one_has_no_figures() {
        let children = Arc::new(Mutex::new(vec![u32::MAX - 1]));
        let folder = tempfile::tempdir().unwrap();
        let mut sampler =
            HostSampler::new(Root::default(), Some(folder.path().to_owned()), children);
        sampler.sample(at(1));
        let sample = sampler.sample(at(2));
        assert_eq!(sample.agent.pid, std::process::id());
        assert!(
            sample
                .agent
                .resident_bytes
                .value
                .is_some_and(|bytes| bytes > 0)
        );
        assert!(sample.agent.cpu_percent.value.is_some());
        assert_eq!(sample.children.len(), 1);
        assert_eq!(sample.children[0].resident_bytes, Reading::none());
        assert!(sample.host.memory_total_bytes.value.is_some());
        assert!(
            sample
                .host
                .cpu_capacity_cores
                .value
                .is_some_and(|cores| cores > 0.0)
        );
        assert!(sample.host.disk_free_bytes.value.is_some());
    }
}
