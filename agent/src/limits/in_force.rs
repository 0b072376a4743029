//! Whether the limits a worker was promised are in force in it.
//!
//! A limit that is only inherited (by environment, by a parent's group) can be lost on the way, in a nested container for example, and
//! then nobody notices. So a worker is told its limits, and reads back at its start what the kernel applies to it. Of a limit that is
//! not in force it says so, and its share counts as not enforced.

use compass_shared::model::telemetry::Enforcement;
use rustix::process::{Resource, getrlimit};

use crate::telemetry::Root;
use crate::telemetry::cgroup::Cgroups;

/// Quotas are rounded to microseconds per period.
const CORES_TOLERANCE: f64 = 1.01;

/// What a worker was promised.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PromisedLimits {
    /// CPU quota in cores of the host, where the kernel is to hold it.
    pub cpu_cores: Option<f64>,
    /// Bound on its memory, in bytes.
    pub memory_bytes: Option<u64>,
}

/// What the kernel applies to the calling process.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct AppliedLimits {
    /// CPUs it may use, where that is less than the host has.
    pub cpu_cores: Option<f64>,
    /// The least bound on its memory, in bytes.
    pub memory_bytes: Option<u64>,
}

/// A limit that does not hold.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum NotInForce {
    /// The CPU quota.
    #[error("limit not in force: {promised_cores} cores were promised, {} hold", or_none(*.applied_cores))]
    Cpu {
        /// What was promised, in cores.
        promised_cores: f64,
        /// What holds, in cores.
        applied_cores: Option<f64>,
    },
    /// The bound on memory.
    #[error("limit not in force: {promised_bytes} bytes of memory were promised, {} hold", or_none(*.applied_bytes))]
    Memory {
        /// What was promised, in bytes.
        promised_bytes: u64,
        /// What holds, in bytes.
        applied_bytes: Option<u64>,
    },
}

impl AppliedLimits {
    /// Reads them back from the kernel.
    pub fn read(root: &Root) -> Self {
        let groups = Cgroups::locate(root);
        // Asked for a host of any size, so that each limit counts; also one above what this host has.
        let cpu = groups.cpu_limit(u32::MAX);
        let group_bytes = groups.memory_limit(1 << 62).map(|limit| limit.limit_bytes);
        let bounds = [Resource::Data, Resource::As].map(|resource| getrlimit(resource).current);
        Self {
            cpu_cores: cpu.is_limited.then_some(cpu.cores),
            memory_bytes: bounds.into_iter().chain([group_bytes]).flatten().min(),
        }
    }
}

/// Compares what was promised with what holds; empty when all is well.
pub fn compare(promised: &PromisedLimits, applied: &AppliedLimits) -> Vec<NotInForce> {
    let mut broken = Vec::new();
    if let Some(promised_cores) = promised.cpu_cores
        && applied
            .cpu_cores
            .is_none_or(|cores| cores > promised_cores * CORES_TOLERANCE)
    {
        broken.push(NotInForce::Cpu {
            promised_cores,
            applied_cores: applied.cpu_cores,
        });
    }
    if let Some(promised_bytes) = promised.memory_bytes
        && applied
            .memory_bytes
            .is_none_or(|bytes| bytes > promised_bytes)
    {
        broken.push(NotInForce::Memory {
            promised_bytes,
            applied_bytes: applied.memory_bytes,
        });
    }
    broken
}

/// How a CPU share holds after the worker has looked: what it found broken is not enforced, whatever the agent arranged.
pub fn enforcement(arranged: Enforcement, broken: &[NotInForce]) -> Enforcement {
    let is_cpu_broken = broken
        .iter()
        .any(|limit| matches!(limit, NotInForce::Cpu { .. }));
    if is_cpu_broken && arranged == Enforcement::Enforced {
        Enforcement::BestEffort
    } else {
        arranged
    }
}

fn or_none<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "none".to_owned(), |value| value.to_string())
}
