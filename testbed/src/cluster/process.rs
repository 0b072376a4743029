//! One process of a cluster: how it is started, how its readiness is awaited, how it ends.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, pidfd_open,
    waitid,
};

use super::ready::Ready;

/// Long for a loaded host; only met when something is broken.
pub const READY_DEADLINE: Duration = Duration::from_secs(60);

/// Lines of a log that an error message quotes.
const QUOTED_LINES: usize = 15;

/// The program that roles are started from.
#[derive(Debug, Clone)]
pub struct Program {
    executable: PathBuf,
}

impl Program {
    /// The program that is running; right for `compass-testbed`, wrong in a test, whose program is the test's own.
    pub fn this() -> anyhow::Result<Self> {
        Ok(Self {
            executable: std::env::current_exe().context("cannot find this program's own file")?,
        })
    }

    /// A `compass-testbed` elsewhere; a test gives `env!("CARGO_BIN_EXE_compass-testbed")`.
    pub fn at(executable: impl Into<PathBuf>) -> Self {
        Self {
            executable: executable.into(),
        }
    }
}

/// How a process is started (again).
#[derive(Debug, Clone)]
pub struct ProcessSpec {
    pub(super) name: String,
    launch: Launch,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    lines: Option<Sender<String>>,
    is_commanded: bool,
    pub(super) deadline: Duration,
}

#[derive(Debug, Clone)]
enum Launch {
    Role(String),
    Program(PathBuf),
}

impl ProcessSpec {
    /// A role of `compass-testbed`. It ends when this process does, however this ends.
    pub fn role<A: Into<OsString>>(
        name: &str,
        role: &str,
        arguments: impl IntoIterator<Item = A>,
    ) -> Self {
        Self::new(name, Launch::Role(role.to_owned()), arguments)
    }

    /// Any other program.
    pub fn program<A: Into<OsString>>(
        name: &str,
        program: impl Into<PathBuf>,
        arguments: impl IntoIterator<Item = A>,
    ) -> Self {
        Self::new(name, Launch::Program(program.into()), arguments)
    }

    fn new<A: Into<OsString>>(
        name: &str,
        launch: Launch,
        arguments: impl IntoIterator<Item = A>,
    ) -> Self {
        Self {
            name: name.to_owned(),
            launch,
            arguments: arguments.into_iter().map(Into::into).collect(),
            environment: Vec::new(),
            lines: None,
            is_commanded: false,
            deadline: READY_DEADLINE,
        }
    }

    /// Adds a variable to the inherited environment.
    #[must_use]
    pub fn variable(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Also sends every line of its standard output here.
    #[must_use]
    pub fn lines_to(mut self, lines: Sender<String>) -> Self {
        self.lines = Some(lines);
        self
    }

    /// It reads its standard input itself, for lines given to [`Process::tell`], and ends by itself when that does.
    #[must_use]
    pub fn commanded(mut self) -> Self {
        self.is_commanded = true;
        self
    }

    /// Another bound on the wait for its readiness, or for the end of a command.
    #[must_use]
    pub fn ready_within(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The command of a process that lives as long as this one.
    fn lasting_command(&self, program: &Program) -> Command {
        let leading: &[&str] = if self.is_commanded {
            &["role"]
        } else {
            &["role", "--exit-with-parent"]
        };
        self.command(program, leading)
    }

    /// The command of a process that ends by itself.
    pub(super) fn ending_command(&self, program: &Program) -> Command {
        self.command(program, &["role"])
    }

    fn command(&self, program: &Program, leading: &[&str]) -> Command {
        let mut command = match &self.launch {
            Launch::Role(role) => {
                let mut command = Command::new(&program.executable);
                command.args(leading).arg(role);
                command
            }
            Launch::Program(path) => Command::new(path),
        };
        command
            .args(&self.arguments)
            .envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }
}

/// A started process. Its group is killed when this is dropped.
#[derive(Debug)]
pub struct Process {
    spec: ProcessSpec,
    log: PathBuf,
    child: Child,
    /// Held open: its end tells the process that this one is gone.
    stdin: Option<ChildStdin>,
    pidfd: OwnedFd,
    ready: Readiness,
}

#[derive(Debug)]
enum Readiness {
    Awaited(Receiver<Ready>),
    Known(Ready),
}

impl Process {
    /// Starts a process in its own group, in `folder`, with its output appended to `log`.
    pub fn spawn(
        program: &Program,
        spec: ProcessSpec,
        folder: &Path,
        log: &Path,
    ) -> anyhow::Result<Self> {
        let log_file = OpenOptions::new().create(true).append(true).open(log);
        let mut log_file = log_file.with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = spec.lasting_command(program);
        command.current_dir(folder).process_group(0);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log_file.try_clone()?);
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot start `{}` ({command:?})", spec.name))?;
        writeln!(log_file, "--- pid {}: {command:?}", child.id())?;
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("standard output is piped")?;
        let (found, ready) = mpsc::channel();
        let (log_file, lines) = (log_file.try_clone()?, spec.lines.clone());
        std::thread::Builder::new()
            .name(format!("{} output", spec.name))
            .spawn(move || copy_output(stdout, log_file, &found, lines.as_ref()))?;
        Ok(Self {
            spec,
            log: log.to_owned(),
            child,
            stdin,
            pidfd,
            ready: Readiness::Awaited(ready),
        })
    }

    /// Its name in the cluster.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Its process id, which is also that of its group.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// How it was started.
    pub fn spec(&self) -> &ProcessSpec {
        &self.spec
    }

    /// Writes a line to its standard input.
    pub fn tell(&mut self, line: &str) -> anyhow::Result<()> {
        let stdin = self.stdin.as_mut().context("standard input is piped")?;
        writeln!(stdin, "{line}")
            .and_then(|()| stdin.flush())
            .with_context(|| format!("`{}` no longer listens", self.spec.name))
    }

    /// Waits for its readiness line; an error quotes the end of its log.
    pub fn ready(&mut self) -> anyhow::Result<Ready> {
        let awaited = match &self.ready {
            Readiness::Known(ready) => return Ok(ready.clone()),
            Readiness::Awaited(awaited) => awaited,
        };
        match awaited.recv_timeout(self.spec.deadline) {
            Ok(ready) => {
                self.ready = Readiness::Known(ready.clone());
                Ok(ready)
            }
            Err(RecvTimeoutError::Timeout) => {
                bail!(
                    "`{}` was not ready within {:?}{}",
                    self.spec.name,
                    self.spec.deadline,
                    self.quoted_log()
                )
            }
            Err(RecvTimeoutError::Disconnected) => {
                let ended = match self.wait(self.spec.deadline)? {
                    Some(status) => format!("ended with {status}"),
                    None => "closed its standard output".to_owned(),
                };
                bail!(
                    "`{}` {ended} before it was ready{}",
                    self.spec.name,
                    self.quoted_log()
                )
            }
        }
    }

    /// Waits for its end, but no longer than this.
    pub fn wait(&self, deadline: Duration) -> anyhow::Result<Option<ExitStatus>> {
        await_end(&self.pidfd, deadline)
    }

    /// How it ended, if it has.
    pub fn exit_status(&self) -> anyhow::Result<Option<ExitStatus>> {
        await_end(&self.pidfd, Duration::ZERO)
    }

    /// `kill -9` of this one process, as a crash would end it; what it has started lives on.
    pub fn kill(&self) -> anyhow::Result<()> {
        self.signal(Signal::KILL)?;
        if self.wait(READY_DEADLINE)?.is_none() {
            bail!(
                "`{}` did not die of kill -9 within {READY_DEADLINE:?}",
                self.spec.name
            );
        }
        Ok(())
    }

    /// Sends a signal to this one process.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        kill_process(self.pid(), signal)
            .with_context(|| format!("cannot send {signal:?} to `{}`", self.spec.name))
    }

    /// Asks it to end (`SIGTERM`) and kills its group if it has not within the deadline. Gives the exit status of a process
    /// that ended by itself.
    pub fn stop(&self, deadline: Duration) -> anyhow::Result<Option<ExitStatus>> {
        if self.exit_status()?.is_none() {
            self.signal(Signal::TERM)?;
        }
        let status = self.wait(deadline)?;
        if status.is_none() {
            self.kill_group();
        }
        Ok(status)
    }

    fn kill_group(&self) {
        // Only this process's drop takes its leader out of the process table, so the id is still its own.
        let _empty = kill_process_group(self.pid(), Signal::KILL);
    }

    fn quoted_log(&self) -> String {
        let tail = log_tail(&self.log, QUOTED_LINES);
        format!("; the end of {}:\n{tail}", self.log.display())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill_group();
        // It cannot outlive a kill, and what it said no longer matters.
        let _ended = self.child.wait();
    }
}

/// Waits for the end of a process, but no longer than this. It stays in the process table, so that its id cannot be given to
/// another meanwhile and its CPU time can still be read.
pub(super) fn await_end(pidfd: &OwnedFd, deadline: Duration) -> anyhow::Result<Option<ExitStatus>> {
    let until = Instant::now() + deadline;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: i64::try_from(left.as_secs())?,
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return Ok(None),
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let status =
        waitid(WaitId::PidFd(pidfd.as_fd()), options)?.context("an ended process has a status")?;
    let raw = match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => code << 8,
        (None, signal) => signal.unwrap_or_default(),
    };
    Ok(Some(ExitStatus::from_raw(raw)))
}

fn copy_output(
    stdout: ChildStdout,
    mut log: File,
    found: &Sender<Ready>,
    lines: Option<&Sender<String>>,
) {
    let mut reader = BufReader::new(stdout);
    let mut line = Vec::new();
    while matches!(reader.read_until(b'\n', &mut line), Ok(bytes) if bytes > 0) {
        // The log is for people; a full disk must not stop the process that writes to it.
        let _written = log.write_all(&line);
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end_matches(['\n', '\r']);
        if let Some(ready) = Ready::parse(text) {
            // Nobody waits for a second one.
            let _awaited = found.send(ready);
        }
        if let Some(lines) = lines {
            let _wanted = lines.send(text.to_owned());
        }
        line.clear();
    }
}

/// The last lines of a log; empty if it cannot be read.
pub fn log_tail(log: &Path, lines: usize) -> String {
    let text = String::from_utf8_lossy(&std::fs::read(log).unwrap_or_default()).into_owned();
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
