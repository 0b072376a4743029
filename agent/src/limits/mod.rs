//! Holding operators within their CPU share by the kernel, and noticing when a limit does not hold.
//!
//! Start at [`CpuLimiter::detect`]: where this process may make control groups, each worker gets one with a quota
//! ([`group::WorkerGroup`]) and its share is `enforced`; elsewhere the limiter says why not, workers are paced by the agent instead
//! (`workers`), and the share is `best-effort`. A worker joins its group itself before it starts anything, and then checks
//! ([`in_force`]) that what it was promised is what the kernel applies to it.
//!
//! Deliberately absent: pacing and memory caps (`workers`), GPU shares, deciding who gets what.

pub mod group;
pub mod in_force;
pub mod quota;

use std::path::PathBuf;
use std::sync::Arc;

use compass_shared::model::telemetry::Enforcement;

use crate::telemetry::Root;
use group::{Groups, WorkerGroup};

#[cfg(test)]
mod tests;

/// Makes control groups for workers, where that is allowed.
#[derive(Debug, Clone)]
pub struct CpuLimiter {
    groups: Result<Arc<Groups>, Unavailable>,
}

/// Why shares are not enforced by the kernel on this node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// Its owner does not want it, or the device is emulated and paces its operators anyway.
    #[error("switched off")]
    SwitchedOff,
    /// The kernel has no CPU controller here.
    #[error("no CPU controller for control groups")]
    NoController,
    /// Other programs live in this process's group, so that it cannot be divided.
    #[error("other programs share the agent's control group {0}")]
    Shared(PathBuf),
    /// A group could not be made or written.
    #[error("control group {folder}: {reason}")]
    Refused {
        /// The folder.
        folder: PathBuf,
        /// The operating system's reason.
        reason: String,
    },
}

impl CpuLimiter {
    /// A limiter that limits nothing.
    pub const fn switched_off() -> Self {
        Self {
            groups: Err(Unavailable::SwitchedOff),
        }
    }

    /// Tries to make a group below this process's own; `tag` (the node's name) keeps several agents of one host apart. On a version 2
    /// host this moves the agent itself, and nobody else, into a group below its own, because only then may that one be divided.
    pub fn detect(root: &Root, tag: &str) -> Self {
        Self {
            groups: Groups::prepare(root, tag).map(Arc::new),
        }
    }

    /// How shares hold on this node.
    pub fn enforcement(&self) -> Enforcement {
        if self.groups.is_ok() {
            Enforcement::Enforced
        } else {
            Enforcement::BestEffort
        }
    }

    /// Why shares are not enforced, when they are not.
    pub fn unavailable(&self) -> Option<&Unavailable> {
        self.groups.as_ref().err()
    }

    /// One line for people.
    pub fn summary(&self) -> String {
        match &self.groups {
            Ok(groups) => format!(
                "CPU shares enforced by control group {}",
                groups.folder().display()
            ),
            Err(reason) => format!("CPU shares best-effort, paced by the agent ({reason})"),
        }
    }

    /// A group for a worker, with a quota of this many of the host's cores.
    ///
    /// # Errors
    /// When the kernel cannot hold workers here, or refuses this one.
    pub fn group(&self, name: &str, cores: f64) -> Result<WorkerGroup, Unavailable> {
        let groups = self.groups.as_ref().map_err(Clone::clone)?;
        WorkerGroup::make(Arc::clone(groups), name, cores)
    }
}
