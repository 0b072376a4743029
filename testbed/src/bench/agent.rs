//! `bench agent`: memory and CPU of an agent that has joined, has a session and no query.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use compass_shared::api::NodeView;
use serde::Serialize;

use super::{AgentArguments, Circumstances, show};
use crate::cluster::{Cluster, ProcessSpec, Program};

const NODE: &str = "idle-1";
/// Only met when something is broken.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(200);
/// Joining and the first readings belong to its start, not to its idling.
const SETTLE: Duration = Duration::from_secs(5);
/// What is aimed at.
const AIM_RSS_MB: f64 = 20.0;
const AIM_CPU_PERCENT: f64 = 0.5;

/// What came out.
#[derive(Debug, Serialize)]
struct Figures {
    circumstances: Circumstances,
    program: PathBuf,
    seconds: f64,
    /// Of one core, children included.
    cpu_percent: f64,
    aim_cpu_percent: f64,
    /// Largest seen, in 10^6 bytes, children included.
    rss_mb: f64,
    aim_rss_mb: f64,
    processes: usize,
    /// Of the agent's own process at the end.
    memory: Memory,
    /// Threads by the CPU they used meanwhile, most first.
    threads: Vec<ThreadCpu>,
}

/// Parts of resident memory, in 10^6 bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
struct Memory {
    /// Heap and stacks.
    anonymous_mb: f64,
    /// The program's and libraries' pages, which the kernel can drop and read again.
    file_mb: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct ThreadCpu {
    name: String,
    cpu_percent: f64,
    /// Times it was put on a core, per second.
    wakeups_per_s: f64,
}

pub(super) fn run(arguments: &AgentArguments) -> anyhow::Result<()> {
    let mut cluster = Cluster::temporary(Program::this()?)?;
    let program = match &arguments.program {
        Some(program) => std::path::absolute(program)?,
        None => beside_this("compass-agent")?,
    };
    start(&mut cluster, &program)?;
    // Idling is a matter of time: this is what is measured, not a wait for something.
    std::thread::sleep(SETTLE);
    let figures = watch(&cluster, program, Duration::from_secs(arguments.seconds))?;
    show(arguments.json.as_deref(), &figures, print)
}

/// A program beside this one; this one where there is none.
fn beside_this(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let other = own.with_file_name(name);
    Ok(if other.exists() { other } else { own })
}

/// How the coordinator is asked, as its administrator.
struct Access {
    http: String,
    token_file: PathBuf,
}

impl Access {
    /// Runs `compass` with these arguments and gives its output.
    fn compass(&self, cluster: &Cluster, arguments: &[&str]) -> anyhow::Result<String> {
        let spec = ProcessSpec::role("compass", "compass", arguments.iter().copied())
            .variable("COMPASS_ADDR", &self.http)
            .variable("COMPASS_TOKEN_FILE", &self.token_file);
        let finished = cluster.run(&spec)?;
        ensure!(
            finished.status.success(),
            "compass {}: {}",
            arguments.join(" "),
            finished.stderr
        );
        Ok(finished.stdout)
    }

    fn is_online(&self, cluster: &Cluster) -> anyhow::Result<bool> {
        let listed = self.compass(cluster, &["node", "list", "-o", "json"])?;
        let nodes: Vec<NodeView> =
            serde_json::from_str(&listed).context("the list of nodes cannot be read")?;
        Ok(nodes.iter().any(|node| node.online))
    }
}

/// A coordinator, and one agent that has joined it and is seen by it.
fn start(cluster: &mut Cluster, program: &std::path::Path) -> anyhow::Result<()> {
    let coordinator = ["run", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"];
    let data = ["--data-dir", "data"];
    let arguments = coordinator.into_iter().chain(data);
    let ready = cluster.start(ProcessSpec::role("coordinator", "coordinator", arguments))?;
    let (quic, http) = (ready.address("quic")?, ready.address("http")?);
    let admin = cluster
        .folder_of("coordinator")?
        .join(ready.value("admin_token_file")?);
    let access = Access {
        http: http.to_string(),
        token_file: admin,
    };
    let token = cluster.folder().join("join.token");
    std::fs::write(
        &token,
        access.compass(cluster, &["token", "create", "--node", NODE])?,
    )?;
    let data = cluster.folder_of(NODE)?.join("data").display().to_string();
    let common = ["--data", &data, "--listen", "127.0.0.1:0"];
    let is_own = program == std::env::current_exe()?;
    let leading: &[&str] = if is_own { &["role", "agent"] } else { &[] };
    let quic = quic.to_string();
    let token = token.display().to_string();
    let join = ["join", &quic, "--token-file", &token];
    let arguments = leading.iter().copied().chain(join).chain(common);
    let joined = cluster.run(&ProcessSpec::program("join", program, arguments))?;
    ensure!(
        joined.status.success(),
        "the agent could not join: {}{}",
        joined.stdout,
        joined.stderr
    );
    let arguments = leading.iter().copied().chain(["run"]).chain(common);
    cluster.start(ProcessSpec::program(NODE, program, arguments))?;
    let give_up = Instant::now() + PATIENCE;
    while !access.is_online(cluster)? {
        if Instant::now() > give_up {
            bail!("the agent was not online within {PATIENCE:?}");
        }
        std::thread::sleep(POLL);
    }
    Ok(())
}

fn watch(cluster: &Cluster, program: PathBuf, time: Duration) -> anyhow::Result<Figures> {
    let pid = cluster.process(NODE)?.pid().as_raw_nonzero().get();
    let usage = || {
        let all = cluster.usage()?;
        all.get(NODE)
            .copied()
            .context("the agent is in the cluster")
    };
    let (began, first, threads_before) = (Instant::now(), usage()?, threads_of(pid)?);
    let mut largest = first.resident_bytes;
    while began.elapsed() < time {
        let left = time.saturating_sub(began.elapsed());
        std::thread::sleep(left.min(Duration::from_secs(1)));
        largest = largest.max(usage()?.resident_bytes);
    }
    let (last, took) = (usage()?, began.elapsed());
    ensure!(
        cluster.process(NODE)?.exit_status()?.is_none(),
        "the agent has ended"
    );
    let cpu = last.cpu.saturating_sub(first.cpu);
    Ok(Figures {
        circumstances: Circumstances::now(),
        program,
        seconds: took.as_secs_f64(),
        cpu_percent: 100.0 * cpu.as_secs_f64() / took.as_secs_f64(),
        aim_cpu_percent: AIM_CPU_PERCENT,
        rss_mb: largest as f64 / 1e6,
        aim_rss_mb: AIM_RSS_MB,
        processes: last.processes,
        memory: memory_of(&std::fs::read_to_string(format!("/proc/{pid}/status"))?),
        threads: used_between(&threads_before, &threads_of(pid)?, took),
    })
}

/// A thread's account with the scheduler.
#[derive(Debug, Clone, PartialEq)]
struct ThreadState {
    id: String,
    name: String,
    on_cpu_ns: u64,
    /// How often it was put on a core.
    times: u64,
}

fn threads_of(pid: i32) -> anyhow::Result<Vec<ThreadState>> {
    let mut threads = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/task"))?.flatten() {
        let read = |file: &str| std::fs::read_to_string(entry.path().join(file));
        // A thread may end meanwhile, and a kernel may keep no such account.
        let (Ok(name), Ok(account)) = (read("comm"), read("schedstat")) else {
            continue;
        };
        let id = entry.file_name().to_string_lossy().into_owned();
        threads.extend(parse_schedstat(&id, name.trim(), &account));
    }
    Ok(threads)
}

/// `schedstat` holds time on a core (ns), time waiting for one (ns) and the number of times it got one.
fn parse_schedstat(id: &str, name: &str, text: &str) -> Option<ThreadState> {
    let mut numbers = text.split_whitespace().map(|word| word.parse().ok());
    let (on_cpu_ns, _waited, times) = (numbers.next()??, numbers.next()??, numbers.next()??);
    Some(ThreadState {
        id: id.to_owned(),
        name: name.to_owned(),
        on_cpu_ns,
        times,
    })
}

fn used_between(before: &[ThreadState], after: &[ThreadState], time: Duration) -> Vec<ThreadCpu> {
    let since = |now: &ThreadState| {
        let then = before.iter().find(|then| then.id == now.id);
        let (ns, times) = then.map_or((0, 0), |then| (then.on_cpu_ns, then.times));
        ThreadCpu {
            name: now.name.clone(),
            cpu_percent: now.on_cpu_ns.saturating_sub(ns) as f64 / time.as_nanos() as f64 * 100.0,
            wakeups_per_s: now.times.saturating_sub(times) as f64 / time.as_secs_f64(),
        }
    };
    let mut used: Vec<ThreadCpu> = after.iter().map(since).collect();
    used.sort_by(|a, b| b.cpu_percent.total_cmp(&a.cpu_percent));
    used
}

/// From `/proc/PID/status`.
fn memory_of(status: &str) -> Memory {
    let mb = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key));
        let kib: Option<f64> = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        kib.map_or(0.0, |kib| kib * 1024.0 / 1e6)
    };
    Memory {
        anonymous_mb: mb("RssAnon:"),
        file_mb: mb("RssFile:") + mb("RssShmem:"),
    }
}

fn print(figures: &Figures) {
    println!(
        "an idle agent over {:.0} s ({}); {}",
        figures.seconds,
        figures.program.display(),
        figures.circumstances
    );
    println!(
        "  memory {:>6.1} MB (aim < {AIM_RSS_MB:.0}): {:.1} of its own, {:.1} of files; {} process(es)",
        figures.rss_mb, figures.memory.anonymous_mb, figures.memory.file_mb, figures.processes
    );
    println!(
        "  CPU    {:>6.2} % of a core (aim < {AIM_CPU_PERCENT})",
        figures.cpu_percent
    );
    for thread in &figures.threads {
        println!(
            "    {:<16} {:>5.2} %  {:>6.1} wake-ups/s",
            thread.name, thread.cpu_percent, thread.wakeups_per_s
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_told_apart_by_id_and_sorted_by_use() {
        let state = |id: &str, text: &str| parse_schedstat(id, "worker", text).unwrap();
        let before = [state("1", "1000000 5 10\n"), state("2", "0 0 0\n")];
        let after = [
            state("1", "2000000 5 20\n"),
            state("2", "50000000 0 5\n"),
            state("3", "4000000 0 1\n"),
        ];
        let used = used_between(&before, &after, Duration::from_secs(1));
        let percents: Vec<f64> = used.iter().map(|thread| thread.cpu_percent).collect();
        for (found, expected) in percents.iter().zip([5.0, 0.4, 0.1]) {
            assert!((found - expected).abs() < 1e-9, "{percents:?}");
        }
        assert!((used[2].wakeups_per_s - 10.0).abs() < 1e-9);
        assert_eq!(parse_schedstat("1", "worker", "12 x 3"), None);
        assert_eq!(parse_schedstat("1", "worker", ""), None);
    }

    #[test]
    fn memory_is_read_from_status() {
        let status = "Name:\tcompass-agent\nVmRSS:\t   3000 kB\nRssAnon:\t    1000 kB\nRssFile:\t    2000 kB\nRssShmem:\t       0 kB\n";
        let memory = memory_of(status);
        assert!((memory.anonymous_mb - 1.024).abs() < 1e-9);
        assert!((memory.file_mb - 2.048).abs() < 1e-9);
        assert_eq!(memory_of("garbage"), Memory::default());
    }
}
