//! CPU time and memory of processes and everything they have started, from `/proc`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What a process of the cluster has used, its children (dead ones too) included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// User and system time since its start, over all its restarts.
    pub cpu: Duration,
    /// Memory resident now (shared pages count once per process).
    pub resident_bytes: u64,
    /// Processes alive now.
    pub processes: usize,
}

/// One line of `/proc/PID/stat`, as far as it is needed. Times are in clock ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stat {
    pid: i32,
    is_zombie: bool,
    parent: i32,
    group: i32,
    /// Its own time and that of its children that were waited for.
    ticks: u64,
    resident_pages: u64,
}

/// All processes of the host at one moment.
#[derive(Debug)]
pub struct Snapshot {
    processes: BTreeMap<i32, Stat>,
}

impl Snapshot {
    /// Reads every process; those that end meanwhile are skipped.
    pub fn take() -> std::io::Result<Self> {
        let mut processes = BTreeMap::new();
        for entry in std::fs::read_dir("/proc")?.flatten() {
            let is_process = entry
                .file_name()
                .to_string_lossy()
                .bytes()
                .all(|byte| byte.is_ascii_digit());
            if let Some(stat) = is_process.then(|| read_stat(&entry.path())).flatten() {
                processes.insert(stat.pid, stat);
            }
        }
        Ok(Self { processes })
    }

    /// The usage of these processes (each the leader of its group), their groups and their descendants.
    pub fn usage(&self, leaders: &[i32]) -> Usage {
        let members: Vec<&Stat> = self
            .members(leaders)
            .iter()
            .filter_map(|pid| self.processes.get(pid))
            .collect();
        let ticks: u64 = members.iter().map(|stat| stat.ticks).sum();
        let pages: u64 = members.iter().map(|stat| stat.resident_pages).sum();
        Usage {
            cpu: Duration::from_secs_f64(
                ticks as f64 / rustix::param::clock_ticks_per_second() as f64,
            ),
            resident_bytes: pages * rustix::param::page_size() as u64,
            processes: members.iter().filter(|stat| !stat.is_zombie).count(),
        }
    }

    /// Orphans stay in their group, grandchildren may have left it: both count.
    fn members(&self, leaders: &[i32]) -> BTreeSet<i32> {
        let in_group = |stat: &&Stat| leaders.contains(&stat.pid) || leaders.contains(&stat.group);
        let mut members: BTreeSet<i32> = self
            .processes
            .values()
            .filter(in_group)
            .map(|stat| stat.pid)
            .collect();
        loop {
            let is_new_child =
                |stat: &&Stat| members.contains(&stat.parent) && !members.contains(&stat.pid);
            let children: Vec<i32> = self
                .processes
                .values()
                .filter(is_new_child)
                .map(|stat| stat.pid)
                .collect();
            if children.is_empty() {
                return members;
            }
            members.extend(children);
        }
    }
}

fn read_stat(folder: &Path) -> Option<Stat> {
    parse_stat(&std::fs::read_to_string(folder.join("stat")).ok()?)
}

/// The second field, the program's name, is in parentheses and may itself hold spaces and parentheses.
fn parse_stat(line: &str) -> Option<Stat> {
    let (head, tail) = line.rsplit_once(')')?;
    let pid = head.split_whitespace().next()?.parse().ok()?;
    // From here on the n-th field of the manual is at n - 3.
    let fields: Vec<&str> = tail.split_whitespace().collect();
    let number = |field: usize| fields.get(field - 3)?.parse::<i64>().ok();
    let ticks: i64 = [14, 15, 16, 17]
        .into_iter()
        .map(number)
        .sum::<Option<i64>>()?;
    Some(Stat {
        pid,
        is_zombie: fields.first() == Some(&"Z"),
        parent: i32::try_from(number(4)?).ok()?,
        group: i32::try_from(number(5)?).ok()?,
        ticks: u64::try_from(ticks).ok()?,
        resident_pages: u64::try_from(number(24)?).unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(pid: i32, parent: i32, group: i32) -> Stat {
        Stat {
            pid,
            is_zombie: false,
            parent,
            group,
            ticks: 100,
            resident_pages: 1,
        }
    }

    #[test]
    fn a_stat_line_is_read_past_a_nasty_name() {
        let line = "42 (a) (b c) Z 7 41 41 0 -1 4194560 1 2 0 0 10 20 3 4 20 0 5 0 123 1000000 250 184467 1 1 0\n";
        let expected = Stat {
            pid: 42,
            is_zombie: true,
            parent: 7,
            group: 41,
            ticks: 37,
            resident_pages: 250,
        };
        assert_eq!(parse_stat(line), Some(expected));
        assert_eq!(parse_stat("42 (a"), None);
        assert_eq!(parse_stat("42 (a) S 1"), None);
    }

    #[test]
    fn this_process_is_in_the_snapshot() {
        let own = i32::try_from(std::process::id()).unwrap();
        let usage = Snapshot::take().unwrap().usage(&[own]);
        assert!(
            usage.processes >= 1 && usage.resident_bytes > 100_000,
            "{usage:?}"
        );
    }

    #[test]
    fn orphans_of_the_group_and_descendants_outside_it_count_once() {
        let all = [
            stat(10, 1, 10),
            stat(11, 10, 10),
            stat(12, 1, 10),
            stat(13, 11, 13),
            stat(14, 1, 14),
        ];
        let snapshot = Snapshot {
            processes: all.map(|stat| (stat.pid, stat)).into(),
        };
        assert_eq!(snapshot.members(&[10]), BTreeSet::from([10, 11, 12, 13]));
        assert_eq!(snapshot.usage(&[10]).processes, 4);
        assert_eq!(snapshot.usage(&[10, 14]).cpu, snapshot.usage(&[14]).cpu * 5);
    }
}
