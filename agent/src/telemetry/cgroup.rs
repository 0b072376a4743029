//! What this node may use: limits of its control group and of every ancestor, version 1 and version 2.
//!
//! A leaf group often says "no limit" while an ancestor has one, so every figure is the least over the way up to the mount point.
//! Start at [`Cgroups::locate`]. Figures are read afresh on each call; the folders are looked up once, because a process is seldom
//! moved. Deliberately absent: writing limits (see `limits::cgroup`).

use std::path::{Path, PathBuf};

use super::root::{Root, read_number, read_text, trimmed};

#[cfg(test)]
mod tests;

/// Where a process's group lies in one hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Group {
    /// The mount point, below the root in use.
    pub(crate) mount: PathBuf,
    /// The group's own folder, at or below the mount point.
    pub(crate) leaf: PathBuf,
}

impl Group {
    /// The folders from the group's own up to the mount point.
    fn ancestry(&self) -> impl Iterator<Item = &Path> {
        self.leaf
            .ancestors()
            .take_while(|folder| folder.starts_with(&self.mount))
    }
}

/// The groups that limit this process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cgroups {
    pub(crate) unified: Option<Group>,
    pub(crate) cpu: Option<Group>,
    cpuacct: Option<Group>,
    cpuset: Option<Group>,
    pub(crate) memory: Option<Group>,
    allowed_cpus: Option<u32>,
}

/// What limits CPU use.
#[derive(Debug, Clone, PartialEq)]
pub struct CpuLimit {
    /// CPUs that may be used.
    pub cores: f64,
    /// Whether that is less than the host has.
    pub is_limited: bool,
    /// The folder of the group that limits, where one with a quota does.
    binding: Option<PathBuf>,
}

/// What limits memory use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimit {
    /// The least limit, in bytes.
    pub limit_bytes: u64,
    /// What the limited group holds and the kernel could not simply drop, in bytes.
    pub used_bytes: Option<u64>,
}

impl Cgroups {
    /// Finds the groups of this process below a root.
    pub fn locate(root: &Root) -> Self {
        let memberships = root.read("/proc/self/cgroup").unwrap_or_default();
        let mounts = mounts(root);
        let group = |controller: &str| -> Option<Group> {
            let mount = mounts.iter().find(|mount| mount.has(controller))?;
            let path = membership(&memberships, controller)?;
            Some(mount.group(root, path))
        };
        let allowed_cpus = root.read("/proc/self/status").and_then(|status| {
            cpu_list_len(
                status
                    .lines()
                    .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?,
            )
        });
        Self {
            unified: group(""),
            cpu: group("cpu"),
            cpuacct: group("cpuacct"),
            cpuset: group("cpuset"),
            memory: group("memory"),
            allowed_cpus,
        }
    }

    /// CPUs that may be used on a host with this many.
    pub fn cpu_limit(&self, host_cores: u32) -> CpuLimit {
        let host_cores = f64::from(host_cores);
        let mut limit = CpuLimit {
            cores: host_cores,
            is_limited: false,
            binding: None,
        };
        let sets = [self.cpuset_len(), self.allowed_cpus];
        for set in sets.into_iter().flatten().map(f64::from) {
            limit.cores = limit.cores.min(set);
        }
        let v2 = self
            .unified
            .iter()
            .flat_map(Group::ancestry)
            .map(|folder| (quota_v2(folder), folder));
        let v1 = self
            .cpu
            .iter()
            .flat_map(Group::ancestry)
            .map(|folder| (quota_v1(folder), folder));
        for (quota, folder) in v2.chain(v1) {
            if let Some(cores) = quota.filter(|&cores| cores < limit.cores) {
                limit.cores = cores;
                limit.binding = Some(folder.to_owned());
            }
        }
        limit.is_limited = limit.cores < host_cores;
        limit
    }

    /// CPU time used so far by the group that a limit binds (by this process's own group where the limit is a set of CPUs), in
    /// nanoseconds.
    pub fn cpu_usage_ns(&self, limit: &CpuLimit) -> Option<u64> {
        let v1_folder = || {
            let group = self.cpuacct.as_ref()?;
            let same_place = limit.binding.as_ref().and_then(|binding| {
                let inside = binding.strip_prefix(&self.cpu.as_ref()?.mount).ok()?;
                Some(group.mount.join(inside))
            });
            Some(
                same_place
                    .filter(|folder| folder.exists())
                    .unwrap_or_else(|| group.leaf.clone()),
            )
        };
        if let Some(folder) = v1_folder()
            && let Some(ns) = read_number(&folder.join("cpuacct.usage"))
        {
            return Some(ns);
        }
        let unified = self.unified.as_ref()?;
        let folder = limit
            .binding
            .as_ref()
            .filter(|binding| binding.starts_with(&unified.mount))
            .unwrap_or(&unified.leaf);
        keyed(&folder.join("cpu.stat"), "usage_usec")?.checked_mul(1000)
    }

    /// The memory limit on a host with this much; none when there is none below that.
    pub fn memory_limit(&self, host_total_bytes: u64) -> Option<MemoryLimit> {
        let v2 = self.unified.iter().flat_map(Group::ancestry).map(|folder| {
            let limits =
                ["memory.max", "memory.high"].map(|file| read_number::<u64>(&folder.join(file)));
            (limits.into_iter().flatten().min(), folder, Version::V2)
        });
        let v1 = self.memory.iter().flat_map(Group::ancestry).map(|folder| {
            (
                read_number::<u64>(&folder.join("memory.limit_in_bytes")),
                folder,
                Version::V1,
            )
        });
        v2.chain(v1)
            .filter_map(|(limit, folder, version)| Some((limit?, folder, version)))
            // "No limit" is the word `max` in version 2 and a number beyond any memory in version 1.
            .filter(|&(limit_bytes, ..)| limit_bytes > 0 && limit_bytes < host_total_bytes)
            .min_by_key(|&(limit_bytes, ..)| limit_bytes)
            .map(|(limit_bytes, folder, version)| MemoryLimit {
                limit_bytes,
                used_bytes: version.memory_used(folder),
            })
    }

    fn cpuset_len(&self) -> Option<u32> {
        let v1 = ["cpuset.effective_cpus", "cpuset.cpus"];
        let v2 = ["cpuset.cpus.effective", "cpuset.cpus"];
        let read = |group: &Option<Group>, files: [&str; 2]| {
            let group = group.as_ref()?;
            group.ancestry().find_map(|folder| {
                files
                    .iter()
                    .find_map(|file| cpu_list_len(&read_text(&folder.join(file))?))
            })
        };
        [read(&self.cpuset, v1), read(&self.unified, v2)]
            .into_iter()
            .flatten()
            .min()
    }
}

#[derive(Clone, Copy)]
enum Version {
    V1,
    V2,
}

impl Version {
    /// Memory that counts against the limit and cannot simply be dropped, in bytes.
    fn memory_used(self, folder: &Path) -> Option<u64> {
        let (usage, droppable) = match self {
            Self::V1 => ("memory.usage_in_bytes", "total_inactive_file"),
            Self::V2 => ("memory.current", "inactive_file"),
        };
        let usage: u64 = read_number(&folder.join(usage))?;
        Some(usage.saturating_sub(keyed(&folder.join("memory.stat"), droppable).unwrap_or(0)))
    }
}

/// A mounted hierarchy.
#[derive(Debug)]
struct Mount {
    /// Controllers of a version 1 hierarchy; empty for version 2.
    controllers: Vec<String>,
    /// The group that the mount point shows.
    shown: PathBuf,
    point: PathBuf,
}

impl Mount {
    fn has(&self, controller: &str) -> bool {
        if controller.is_empty() {
            self.controllers.is_empty()
        } else {
            self.controllers.iter().any(|mine| mine == controller)
        }
    }

    /// The folder of a group; the mount point itself when the group lies outside of what is mounted (as in containers).
    fn group(&self, root: &Root, path: &str) -> Group {
        let mount = root.path(&self.point);
        let inside = Path::new(path)
            .strip_prefix(&self.shown)
            .unwrap_or(Path::new(""));
        let climbs = inside
            .components()
            .any(|part| matches!(part, std::path::Component::ParentDir));
        let leaf = if climbs {
            mount.clone()
        } else {
            mount.join(inside)
        };
        Group {
            leaf: if leaf.is_dir() { leaf } else { mount.clone() },
            mount,
        }
    }
}

/// The mounted hierarchies; the usual places where the mount table cannot be read.
fn mounts(root: &Root) -> Vec<Mount> {
    let table = root.read("/proc/self/mountinfo").unwrap_or_default();
    let mounts: Vec<Mount> = table.lines().filter_map(parse_mount).collect();
    if !mounts.is_empty() {
        return mounts;
    }
    let base = Path::new("/sys/fs/cgroup");
    let usual = |controllers: &[&str], point: PathBuf| Mount {
        controllers: controllers.iter().map(|&name| name.to_owned()).collect(),
        shown: PathBuf::from("/"),
        point,
    };
    if root.path("/sys/fs/cgroup/cgroup.controllers").exists() {
        return vec![usual(&[], base.to_owned())];
    }
    ["cpu", "cpuacct", "cpuset", "memory"]
        .iter()
        .map(|&name| usual(&[name], base.join(name)))
        .collect()
}

/// One line of the mount table, if it is of a control group hierarchy.
fn parse_mount(line: &str) -> Option<Mount> {
    let (place, kind) = line.split_once(" - ")?;
    let mut place = place.split(' ').skip(3);
    let shown = unescape(place.next()?);
    let point = unescape(place.next()?);
    let mut kind = kind.split(' ');
    let controllers = match kind.next()? {
        "cgroup2" => Vec::new(),
        "cgroup" => kind.nth(1)?.split(',').map(str::to_owned).collect(),
        _ => return None,
    };
    Some(Mount {
        controllers,
        shown: shown.into(),
        point: point.into(),
    })
}

/// Blanks in the mount table are written as octal escapes.
fn unescape(text: &str) -> String {
    text.replace("\\040", " ")
        .replace("\\011", "\t")
        .replace("\\134", "\\")
}

/// The path of this process's group in the hierarchy of a controller (of version 2 for the empty name).
fn membership<'a>(memberships: &'a str, controller: &str) -> Option<&'a str> {
    memberships.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let controllers = parts.next()?;
        let path = parts.next()?;
        controllers
            .split(',')
            .any(|mine| mine == controller)
            .then_some(path)
    })
}

/// CPUs that a version 2 quota allows; none when unlimited or unreadable.
fn quota_v2(folder: &Path) -> Option<f64> {
    let text = read_text(&folder.join("cpu.max"))?;
    let mut numbers = trimmed(&text)
        .split(' ')
        .map(|number| number.parse::<u64>().ok());
    cores(
        numbers.next()??,
        numbers.next().flatten().unwrap_or(100_000),
    )
}

/// CPUs that a version 1 quota allows; −1 is unlimited.
fn quota_v1(folder: &Path) -> Option<f64> {
    let quota_us: i64 = read_number(&folder.join("cpu.cfs_quota_us"))?;
    cores(
        u64::try_from(quota_us).ok()?,
        read_number(&folder.join("cpu.cfs_period_us"))?,
    )
}

fn cores(quota_us: u64, period_us: u64) -> Option<f64> {
    (quota_us > 0 && period_us > 0).then(|| quota_us as f64 / period_us as f64)
}

/// Number of CPUs in a list such as `0-3,8`; none when it is empty or not such a list.
pub(super) fn cpu_list_len(text: &str) -> Option<u32> {
    let text = trimmed(text);
    let mut len = 0_u32;
    for range in text.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        len = len.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    (len > 0).then_some(len)
}

/// The number after a key in a file of `key number` lines.
pub(crate) fn keyed(path: &Path, key: &str) -> Option<u64> {
    let text = read_text(path)?;
    text.lines().find_map(|line| {
        line.strip_prefix(key)?
            .strip_prefix(' ')?
            .trim()
            .parse()
            .ok()
    })
}
