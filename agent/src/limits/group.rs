//! Control groups of workers, version 1 and version 2.
//!
//! All groups lie in one folder below the agent's own group, named after the node. Foreign groups and processes are never touched:
//! folders are removed only when empty, and only ever the agent's own process is moved.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Unavailable;
use super::quota::Quota;
use crate::telemetry::Root;
use crate::telemetry::cgroup::{Cgroups, keyed};

/// The folder in which the groups of this node's workers are made.
#[derive(Debug)]
pub struct Groups {
    folder: PathBuf,
    version: Version,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

impl Groups {
    /// Makes the folder and tries it out.
    pub(super) fn prepare(root: &Root, tag: &str) -> Result<Self, Unavailable> {
        let own = Cgroups::locate(root);
        if let Some(group) = &own.cpu {
            return Self::prepare_v1(&group.leaf, tag);
        }
        let group = own.unified.as_ref().ok_or(Unavailable::NoController)?;
        Self::prepare_v2(&group.leaf, group.leaf == group.mount, tag)
    }

    fn prepare_v1(own: &Path, tag: &str) -> Result<Self, Unavailable> {
        let groups = Self {
            folder: own.join(folder_name(tag)),
            version: Version::V1,
        };
        groups.make_folder()?;
        Ok(groups)
    }

    /// In version 2 a group has either processes or divided children, but for the root.
    fn prepare_v2(own: &Path, is_root: bool, tag: &str) -> Result<Self, Unavailable> {
        let controllers = fs::read_to_string(own.join("cgroup.controllers")).unwrap_or_default();
        if !controllers
            .split_whitespace()
            .any(|controller| controller == "cpu")
        {
            return Err(Unavailable::NoController);
        }
        if !is_root {
            leave_for_child(own)?;
        }
        write(&own.join("cgroup.subtree_control"), "+cpu")?;
        let groups = Self {
            folder: own.join(folder_name(tag)),
            version: Version::V2,
        };
        groups.make_folder()?;
        write(&groups.folder.join("cgroup.subtree_control"), "+cpu")?;
        Ok(groups)
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn make_folder(&self) -> Result<(), Unavailable> {
        make(&self.folder)?;
        // What a killed agent of this node left behind; the kernel refuses to remove groups that are in use.
        for left_over in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let _ = fs::remove_dir(left_over.path());
        }
        // Some kernels and containers allow making groups, but not limiting them.
        let trial = self.folder.join("trial");
        make(&trial)?;
        let outcome = self.limit(&trial, Quota::for_cores(1.0));
        let _ = fs::remove_dir(&trial);
        outcome
    }

    fn limit(&self, group: &Path, quota: Quota) -> Result<(), Unavailable> {
        match self.version {
            Version::V1 => {
                // Old quota and new period could together be more than the kernel takes.
                write(&group.join("cpu.cfs_quota_us"), "-1")?;
                write(
                    &group.join("cpu.cfs_period_us"),
                    &quota.period_us.to_string(),
                )?;
                write(&group.join("cpu.cfs_quota_us"), &quota.quota_us.to_string())
            }
            Version::V2 => write(
                &group.join("cpu.max"),
                &format!("{} {}", quota.quota_us, quota.period_us),
            ),
        }
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        // Refused while a worker is still in it; the next agent of this node uses it again.
        let _ = fs::remove_dir(&self.folder);
    }
}

/// The group of one worker. Dropping it removes it once its processes are gone.
#[derive(Debug)]
pub struct WorkerGroup {
    groups: Arc<Groups>,
    folder: PathBuf,
    quota: Quota,
}

/// How often a group ran into its quota, since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Throttling {
    /// Periods in which it had work.
    pub periods: u64,
    /// Periods in which it was held back.
    pub throttled_periods: u64,
}

impl WorkerGroup {
    pub(super) fn make(groups: Arc<Groups>, name: &str, cores: f64) -> Result<Self, Unavailable> {
        let folder = groups.folder.join(folder_name(name));
        let quota = Quota::for_cores(cores);
        make(&folder)?;
        let group = Self {
            groups,
            folder,
            quota,
        };
        group.groups.limit(&group.folder, quota)?;
        Ok(group)
    }

    /// The folder that the worker passes to [`join`].
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The share that the kernel holds the group to, in cores of the host.
    pub fn cores(&self) -> f64 {
        self.quota.cores()
    }

    /// Changes the share.
    ///
    /// # Errors
    /// When the kernel refuses; what held before may then not hold any more.
    pub fn set_cores(&mut self, cores: f64) -> Result<(), Unavailable> {
        let quota = Quota::for_cores(cores);
        self.groups.limit(&self.folder, quota)?;
        self.quota = quota;
        Ok(())
    }

    /// How often it ran into its quota; none where the kernel does not say.
    pub fn throttling(&self) -> Option<Throttling> {
        let file = self.folder.join("cpu.stat");
        Some(Throttling {
            periods: keyed(&file, "nr_periods")?,
            throttled_periods: keyed(&file, "nr_throttled")?,
        })
    }
}

impl Drop for WorkerGroup {
    fn drop(&mut self) {
        // Refused while its processes are still there; removed at the agent's next start.
        let _ = fs::remove_dir(&self.folder);
    }
}

/// Moves the calling process into a group; for a worker, before it starts a thread or another program.
///
/// # Errors
/// When the kernel refuses.
pub fn join(folder: &Path) -> io::Result<()> {
    // 0 stands for the writing process.
    fs::write(folder.join("cgroup.procs"), "0")
}

/// Moves this process, if it is alone, into a child of its group.
fn leave_for_child(own: &Path) -> Result<(), Unavailable> {
    let members =
        fs::read_to_string(own.join("cgroup.procs")).map_err(|error| refused(own, &error))?;
    let pid = std::process::id().to_string();
    let mut others = members
        .lines()
        .map(str::trim)
        .filter(|member| !member.is_empty() && *member != pid);
    if others.next().is_some() {
        return Err(Unavailable::Shared(own.to_owned()));
    }
    let child = own.join("compass-agent");
    make(&child)?;
    write(&child.join("cgroup.procs"), "0")
}

/// A folder's name for a node or an instance: nothing in it can lead elsewhere or clash with the kernel's own files.
fn folder_name(tag: &str) -> String {
    let safe: String = tag
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .take(64)
        .collect();
    format!("compass-{safe}")
}

fn make(folder: &Path) -> Result<(), Unavailable> {
    match fs::create_dir(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(refused(folder, &error)),
        _ => Ok(()),
    }
}

fn write(file: &Path, text: &str) -> Result<(), Unavailable> {
    fs::write(file, text).map_err(|error| refused(file, &error))
}

fn refused(folder: &Path, error: &io::Error) -> Unavailable {
    Unavailable::Refused {
        folder: folder.to_owned(),
        reason: error.to_string(),
    }
}
