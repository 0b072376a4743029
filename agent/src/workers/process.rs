//! One worker process as the agent sees it: started, spoken to, killed, buried.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use compass_shared::model::catalogue::Runtime;
use compass_shared::model::cluster::Resources;
use compass_shared::model::plan::InstanceTarget;
use compass_shared::model::telemetry::Enforcement;
use rustix::process::{Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions};
use serde::Serialize;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::task::JoinHandle;

use super::pace::Pace;
use super::protocol::{self, Answer, PROTOCOL, Request, Start};
use super::{Purpose, WorkerError, WorkerSettings};
use crate::limits::group::WorkerGroup;

/// What a foreign program may find in its environment, and nothing else.
const ENVIRONMENT: [(&str, &str); 2] = [
    ("PATH", "/usr/local/bin:/usr/bin:/bin"),
    ("LANG", "C.UTF-8"),
];
/// Memory of an instance whose share states none, in MiB.
const MEMORY_MIB_DEFAULT: u32 = 256;
/// A camera frame should pass in one go; the kernel's usual limit for one pipe.
const PIPE_BYTES: usize = 1 << 20;
/// How much niceness trials get: they yield to live work, but do not starve beside it.
const TRIAL_NICENESS: i32 = 5;
/// Lines of standard error kept as last words, and bytes per line.
const LAST_LINES: usize = 6;
const LINE_BYTES_MAX: u64 = 1000;
/// How long one that has closed its streams may take to end by itself.
const LAST_MOMENTS: Duration = Duration::from_millis(500);
/// After a kill, how long to wait for the last of standard error and for the body.
const BURIAL_WITHIN: Duration = Duration::from_secs(2);

/// A running worker.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    /// `None` once it is to end.
    stdin: Option<ChildStdin>,
    stdout: ChildStdout,
    last_lines: Arc<Mutex<VecDeque<String>>>,
    stderr_reader: JoinHandle<()>,
    pid: u32,
    /// The kernel's hold on its CPU share. Removed after the process.
    group: Option<WorkerGroup>,
    cpu_enforced: bool,
    /// The bound on its memory in bytes, and the share in MiB it was set for.
    memory: Option<(u64, u32)>,
    /// How fast it may work.
    pub(super) pace: Pace,
    /// Whether it wants to see payloads.
    pub(super) wants_payload: bool,
}

impl Process {
    /// Starts a worker and waits until it is warm.
    pub(super) async fn start(
        settings: &WorkerSettings,
        target: &InstanceTarget,
        artifact: Option<&Path>,
        purpose: Purpose,
    ) -> Result<Self, WorkerError> {
        let folder = settings.data_dir.join("workers");
        std::fs::create_dir_all(&folder)
            .map_err(|e| WorkerError::Spawn(format!("{}: {e}", folder.display())))?;
        let group = group_for(settings, target);
        let mut command = Command::new(&settings.self_command.program);
        command
            .args(arguments(settings, target, purpose, group.as_ref()))
            .current_dir(folder)
            .env_clear()
            .envs(ENVIRONMENT)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        let child = spawn(command).await.map_err(|e| {
            WorkerError::Spawn(format!("{}: {e}", settings.self_command.program.display()))
        })?;
        let pace = Pace::new(settings.emulated_speed, &target.share, false);
        let mut process = Self::attach(child, target, group, pace)?;
        let start = Request::Start(Start {
            protocol: PROTOCOL,
            kind: target.kind.to_string(),
            configuration: protocol::knobs(&target.configuration),
            artifact: artifact.map(Path::to_owned),
            runtime: match target.runtime {
                Runtime::Process { .. } => None,
                ref runtime => Some(runtime.clone()),
            },
        });
        let begin = async {
            let confined = process.confined(target).await?;
            process.cpu_enforced = confined;
            process.pace = Pace::new(settings.emulated_speed, &target.share, confined);
            process.ask(&start, &[]).await
        };
        match tokio::time::timeout(settings.start_within, begin).await {
            Ok(Ok((Answer::Ready { payload }, _))) => {
                process.wants_payload = payload;
                Ok(process)
            }
            Ok(Ok((Answer::Error { message }, _))) => {
                process.kill().await;
                Err(WorkerError::Refused(message))
            }
            Ok(Ok((other, _))) => {
                process.kill().await;
                Err(WorkerError::Refused(format!(
                    "the worker answered its start with {other:?}"
                )))
            }
            Ok(Err(error)) => Err(WorkerError::Crashed(process.bury(&error).await)),
            Err(_) => {
                process.kill().await;
                Err(WorkerError::TooSlow(settings.start_within))
            }
        }
    }

    /// Reads what every worker says first; gives whether the kernel holds its CPU share.
    async fn confined(&mut self, target: &InstanceTarget) -> io::Result<bool> {
        match protocol::receive(&mut self.stdout).await?.0 {
            Answer::Confined {
                broken,
                cpu_enforced,
                memory_bytes,
            } => {
                self.memory = memory_bytes.map(|bytes| (bytes, memory_mib(&target.share)));
                for limit in broken {
                    tracing::warn!(kind = %target.kind, instance = %target.instance, "{limit}");
                }
                Ok(cpu_enforced)
            }
            other => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("it began with {other:?}"),
            )),
        }
    }

    fn attach(
        mut child: Child,
        target: &InstanceTarget,
        group: Option<WorkerGroup>,
        pace: Pace,
    ) -> Result<Self, WorkerError> {
        let missing = || WorkerError::Spawn("the worker has no streams".to_owned());
        let stdin = child.stdin.take().ok_or_else(missing)?;
        let stdout = child.stdout.take().ok_or_else(missing)?;
        let stderr = child.stderr.take().ok_or_else(missing)?;
        let pid = child.id().ok_or_else(missing)?;
        // Smaller pipes (a host's limit on pipe memory is used up) only cost more switches.
        let _ = rustix::pipe::fcntl_setpipe_size(&stdin, PIPE_BYTES);
        let _ = rustix::pipe::fcntl_setpipe_size(&stdout, PIPE_BYTES);
        let last_lines = Arc::new(Mutex::new(VecDeque::new()));
        let stderr_reader = tokio::spawn(read_stderr(
            stderr,
            last_lines.clone(),
            format!("{}/{}", target.kind, target.instance),
        ));
        Ok(Self {
            child,
            stdin: Some(stdin),
            stdout,
            last_lines,
            stderr_reader,
            pid,
            group,
            cpu_enforced: false,
            memory: None,
            pace,
            wants_payload: true,
        })
    }

    pub(super) const fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends a request and waits for the answer. Not to be used again after an error, nor when this was not awaited to its end.
    pub(super) async fn ask(
        &mut self,
        request: &impl Serialize,
        payload: &[Bytes],
    ) -> io::Result<(Answer, Bytes)> {
        let stdin = self.stdin.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        protocol::send(stdin, request, payload).await?;
        protocol::receive(&mut self.stdout).await
    }

    /// Changes its share; the process goes on.
    pub(super) fn set_share(&mut self, settings: &WorkerSettings, share: &Resources) {
        if let Some(group) = &mut self.group
            && let Err(error) = group.set_cores(share.cpu.cores())
        {
            tracing::warn!(pid = self.pid, "its new CPU share is paced only: {error}");
            self.cpu_enforced = false;
        }
        self.pace = Pace::new(settings.emulated_speed, share, self.cpu_enforced);
        let wanted_mib = memory_mib(share);
        if let Some((bytes, set_for_mib)) = self.memory
            && wanted_mib != set_for_mib
        {
            let mib = |mib: u32| u64::from(mib) * 1024 * 1024;
            let bytes = bytes
                .saturating_sub(mib(set_for_mib))
                .saturating_add(mib(wanted_mib));
            let limit = Rlimit {
                current: Some(bytes),
                maximum: Some(bytes),
            };
            match rustix::process::prlimit(as_pid(self.pid), Resource::Data, limit) {
                Ok(_) => self.memory = Some((bytes, wanted_mib)),
                // Only a privileged agent may raise it; what it has worked with so far will mostly do.
                Err(error) => tracing::info!(pid = self.pid, "its memory bound stays: {error}"),
            }
        }
    }

    /// Returns when the process has ended or says something unasked; both mean its end. Cancel safe.
    pub(super) async fn ended(&mut self) -> io::Error {
        match self.stdout.read(&mut [0]).await {
            Ok(0) => io::ErrorKind::UnexpectedEof.into(),
            Ok(_) => io::Error::new(io::ErrorKind::InvalidData, "it spoke without being asked"),
            Err(error) => error,
        }
    }

    /// Lets it end by itself (its input ends), and kills what is left.
    pub(super) async fn close(mut self) {
        self.stdin = None;
        let _ = tokio::time::timeout(BURIAL_WITHIN, self.child.wait()).await;
        kill_group(self.pid);
        let _ = tokio::time::timeout(BURIAL_WITHIN, self.child.wait()).await;
    }

    /// Kills it with everything it started.
    pub(super) async fn kill(mut self) {
        kill_group(self.pid);
        let _ = tokio::time::timeout(BURIAL_WITHIN, self.child.wait()).await;
    }

    /// Kills what is left of it and says why it ended, as well as can be known.
    pub(super) async fn bury(mut self, error: &io::Error) -> String {
        // One that closed its streams is about to exit, and its own exit status says more than our signal would.
        let is_ending = !matches!(
            error.kind(),
            io::ErrorKind::InvalidData | io::ErrorKind::TimedOut
        );
        let ended_itself = is_ending && self.ends_itself().await;
        kill_group(self.pid);
        let status = tokio::time::timeout(BURIAL_WITHIN, self.child.wait()).await;
        let _ = tokio::time::timeout(BURIAL_WITHIN, &mut self.stderr_reader).await;
        let status = status.ok().and_then(Result::ok).filter(|_| ended_itself);
        let how = match status.map(|status| (status.code(), status.signal())) {
            Some((_, Some(signal))) => format!("ended by signal {signal}"),
            Some((Some(code), _)) => format!("exit status {code}"),
            _ => format!("killed: {error}"),
        };
        let lines = self
            .last_lines
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let words: Vec<_> = lines.iter().map(String::as_str).collect();
        if words.is_empty() {
            how
        } else {
            format!("{how}: {}", words.join(" | "))
        }
    }

    /// Waits a moment for it to end. It is not reaped, so that its group's number still means its group.
    async fn ends_itself(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let Some(pid) = as_pid(self.pid) else {
            return false;
        };
        let begun = Instant::now();
        while begun.elapsed() < LAST_MOMENTS {
            match rustix::process::waitid(WaitId::Pid(pid), options) {
                Ok(None) => tokio::time::sleep(Duration::from_millis(2)).await,
                Ok(Some(_)) => return true,
                Err(_) => return false,
            }
        }
        false
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.child.id().is_some() {
            kill_group(self.pid);
        }
        self.stderr_reader.abort();
    }
}

/// A control group for one process, where the kernel is to hold its share.
fn group_for(settings: &WorkerSettings, target: &InstanceTarget) -> Option<WorkerGroup> {
    static GROUPS: AtomicU64 = AtomicU64::new(0);
    if settings.emulated_speed.is_some()
        || target.share.cpu.0 == 0
        || settings.limiter.enforcement() != Enforcement::Enforced
    {
        return None;
    }
    // Successor and predecessor may overlap, so the instance alone does not name the group.
    let number = GROUPS.fetch_add(1, Ordering::Relaxed);
    let name = format!("{}-{number}", target.instance);
    match settings.limiter.group(&name, target.share.cpu.cores()) {
        Ok(group) => Some(group),
        Err(error) => {
            tracing::warn!(kind = %target.kind, instance = %target.instance, "its CPU share is paced only: {error}");
            None
        }
    }
}

/// The worker's command line after the program.
fn arguments(
    settings: &WorkerSettings,
    target: &InstanceTarget,
    purpose: Purpose,
    group: Option<&WorkerGroup>,
) -> Vec<OsString> {
    let mut all = settings.self_command.leading_arguments.clone();
    let mut add = |argument: &str| all.push(argument.into());
    add("worker");
    add("--memory-mib");
    add(&memory_mib(&target.share).to_string());
    add("--parent");
    add(&std::process::id().to_string());
    if purpose == Purpose::Trial {
        add("--nice");
        add(&TRIAL_NICENESS.to_string());
    }
    if let Some(group) = group {
        add("--cgroup");
        add(&group.folder().to_string_lossy());
        add("--cpu-cores");
        add(&group.cores().to_string());
    }
    if let Runtime::Process { command } = &target.runtime {
        add("--exec");
        command.iter().for_each(|argument| add(argument));
    }
    all
}

/// The bound on memory that a share means, in MiB.
const fn memory_mib(share: &Resources) -> u32 {
    match share.memory_mib {
        0 => MEMORY_MIB_DEFAULT,
        stated => stated,
    }
}

/// Starts a process from a thread that lives as long as this program does: a worker asks the kernel to be killed when the thread
/// that started it ends, and threads of a runtime come and go.
async fn spawn(mut command: Command) -> io::Result<Child> {
    type Job = Box<dyn FnOnce() + Send>;
    static SPAWNER: OnceLock<mpsc::Sender<Job>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (jobs, inbox) = mpsc::channel::<Job>();
        let thread = std::thread::Builder::new().name("spawner".to_owned());
        if let Err(error) = thread.spawn(move || inbox.iter().for_each(|job| job())) {
            tracing::error!(%error, "no thread for starting workers");
        }
        jobs
    });
    let runtime = tokio::runtime::Handle::current();
    let (reply, child) = tokio::sync::oneshot::channel();
    let job = Box::new(move || {
        let _entered = runtime.enter();
        // When nobody waits any more, the child is dropped here, which kills it.
        let _ = reply.send(command.spawn());
    });
    let gone = || io::Error::other("the thread that starts workers is gone");
    spawner.send(job).map_err(|_| gone())?;
    child.await.map_err(|_| gone())?
}

fn as_pid(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}

fn kill_group(pid: u32) {
    if let Some(group) = as_pid(pid) {
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
}

async fn read_stderr(stderr: ChildStderr, last: Arc<Mutex<VecDeque<String>>>, name: String) {
    let mut reader = BufReader::new(stderr);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut reader)
            .take(LINE_BYTES_MAX)
            .read_until(b'\n', &mut line)
            .await
        {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let text = String::from_utf8_lossy(&line).trim().to_owned();
        if text.is_empty() {
            continue;
        }
        tracing::debug!(worker = %name, "{text}");
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.len() == LAST_LINES {
            last.pop_front();
        }
        last.push_back(text);
    }
}

/// Resident memory of a process in MiB.
pub(super) fn resident_mib(pid: u32) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = text.split_whitespace().nth(1)?.parse().ok()?;
    u32::try_from(pages * rustix::param::page_size() as u64 / (1024 * 1024)).ok()
}

/// CPU time that all threads of a process have used so far.
pub(super) fn cpu_time(pid: u32) -> Option<Duration> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let mut nanoseconds = 0;
    for thread in threads.flatten() {
        let text = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
        nanoseconds += text.split_whitespace().next()?.parse::<u64>().ok()?;
    }
    Some(Duration::from_nanos(nanoseconds))
}
