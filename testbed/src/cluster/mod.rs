//! Clusters of real processes: starts them, waits until they are ready, watches what they use, kills them.
//!
//! Start at [`Cluster`]. Processes are roles of `compass-testbed` itself, so nothing has to be installed; each has a folder
//! and a log of its own below the cluster's folder. A process says that it serves by a line `ready key=value …` on
//! its standard output; nothing here sleeps. Every process leads a group that is killed with the cluster, and holds the
//! other end of a pipe whose closing ends it should this process be killed itself.
//!
//! Deliberately absent: what the processes are told (their arguments) and what they say to each other.

pub mod process;
pub mod ready;
pub mod usage;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};

use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use crate::relay::{ControlClient, RelayConfig};
pub use process::{Process, ProcessSpec, Program};
pub use ready::Ready;
pub use usage::{Snapshot, Usage};

/// A set of processes with a folder. Dropping it kills them all and removes the folder, unless it is kept.
#[derive(Debug)]
pub struct Cluster {
    program: Program,
    /// Before the folder: processes are gone when it is removed.
    processes: BTreeMap<String, Incarnations>,
    folder: Folder,
}

#[derive(Debug)]
enum Folder {
    Temporary(tempfile::TempDir),
    Kept(PathBuf),
}

/// A process and those that went before it under its name: what they used still counts, and what they started may live.
#[derive(Debug)]
struct Incarnations {
    current: Process,
    earlier: Vec<Process>,
}

/// Runs commands in a cluster's folder.
#[derive(Debug, Clone)]
pub struct Runner {
    program: Program,
    folder: PathBuf,
}

/// What a command that ran to its end has said.
#[derive(Debug, Clone)]
pub struct Finished {
    /// How it ended.
    pub status: ExitStatus,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Cluster {
    /// An empty cluster in a new temporary folder.
    pub fn temporary(program: Program) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("compass-")
            .tempdir()
            .context("cannot make a temporary folder")?;
        Ok(Self {
            program,
            processes: BTreeMap::new(),
            folder: Folder::Temporary(folder),
        })
    }

    /// An empty cluster in a folder that stays.
    pub fn kept(program: Program, folder: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(Self {
            program,
            processes: BTreeMap::new(),
            folder: Folder::Kept(std::path::absolute(folder)?),
        })
    }

    /// The folder of the whole cluster; logs are `NAME.log` in it.
    pub fn folder(&self) -> &Path {
        match &self.folder {
            Folder::Temporary(folder) => folder.path(),
            Folder::Kept(folder) => folder,
        }
    }

    /// The working folder of a process (made on demand), there for its files.
    pub fn folder_of(&self, name: &str) -> anyhow::Result<PathBuf> {
        let folder = self.folder().join(name);
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(folder)
    }

    /// The log of a process: its standard output and error, over all its restarts.
    pub fn log_of(&self, name: &str) -> PathBuf {
        self.folder().join(format!("{name}.log"))
    }

    /// Starts a process without waiting for it; names are used once.
    pub fn spawn(&mut self, spec: ProcessSpec) -> anyhow::Result<()> {
        let name = spec.name.clone();
        ensure!(
            !self.processes.contains_key(&name),
            "there is already a process `{name}`"
        );
        let current = self.launch(spec)?;
        self.processes.insert(
            name,
            Incarnations {
                current,
                earlier: Vec::new(),
            },
        );
        Ok(())
    }

    /// Waits until a process is ready.
    pub fn ready(&mut self, name: &str) -> anyhow::Result<Ready> {
        self.processes
            .get_mut(name)
            .with_context(|| no_process(name))?
            .current
            .ready()
    }

    /// Starts a process and waits until it is ready.
    pub fn start(&mut self, spec: ProcessSpec) -> anyhow::Result<Ready> {
        let name = spec.name.clone();
        self.spawn(spec)?;
        self.ready(&name)
    }

    /// Starts a relay as the process `relay` and connects to its control.
    pub fn start_relay(&mut self, config: &RelayConfig) -> anyhow::Result<ControlClient> {
        config.check()?;
        let file = self.folder_of("relay")?.join("relay.toml");
        std::fs::write(&file, config.to_toml()?)
            .with_context(|| format!("cannot write {}", file.display()))?;
        let arguments = [OsString::from("--config"), file.into()];
        let ready = self.start(ProcessSpec::role("relay", "relay", arguments))?;
        ControlClient::connect(ready.address("control")?)
    }

    /// `kill -9` of a process, as a crash would end it; what it has started lives on until the cluster ends.
    pub fn kill(&self, name: &str) -> anyhow::Result<()> {
        self.process(name)?.kill()
    }

    /// Starts a process again as it was started first, without waiting for it; one that still lives is killed.
    pub fn respawn(&mut self, name: &str) -> anyhow::Result<()> {
        let spec = self.process(name)?.spec().clone();
        self.respawn_as(name, spec)
    }

    /// Starts a process again under other arguments, without waiting for it; one that still lives is killed.
    pub fn respawn_as(&mut self, name: &str, spec: ProcessSpec) -> anyhow::Result<()> {
        ensure!(
            spec.name == name,
            "`{}` cannot take the place of `{name}`",
            spec.name
        );
        self.kill(name)?;
        let next = self.launch(spec)?;
        let incarnations = self
            .processes
            .get_mut(name)
            .with_context(|| no_process(name))?;
        let before = std::mem::replace(&mut incarnations.current, next);
        incarnations.earlier.push(before);
        Ok(())
    }

    /// Starts a process again and waits until it is ready.
    pub fn restart(&mut self, name: &str) -> anyhow::Result<Ready> {
        self.respawn(name)?;
        self.ready(name)
    }

    /// Asks a process to end and waits; kills its group when it does not within the deadline (then there is no status).
    pub fn stop(&self, name: &str, deadline: Duration) -> anyhow::Result<Option<ExitStatus>> {
        self.process(name)?.stop(deadline)
    }

    /// A process.
    pub fn process(&self, name: &str) -> anyhow::Result<&Process> {
        self.processes
            .get(name)
            .map(|process| &process.current)
            .with_context(|| no_process(name))
    }

    /// Writes a line to a process's standard input.
    pub fn tell(&mut self, name: &str, line: &str) -> anyhow::Result<()> {
        self.processes
            .get_mut(name)
            .with_context(|| no_process(name))?
            .current
            .tell(line)
    }

    /// The processes that have ended, with how.
    pub fn ended(&self) -> anyhow::Result<Vec<(String, ExitStatus)>> {
        let mut ended = Vec::new();
        for (name, process) in &self.processes {
            if let Some(status) = process.current.exit_status()? {
                ended.push((name.clone(), status));
            }
        }
        Ok(ended)
    }

    /// What each process has used so far, its children and earlier incarnations included.
    pub fn usage(&self) -> anyhow::Result<BTreeMap<String, Usage>> {
        let snapshot = Snapshot::take()?;
        let usage_of = |process: &Incarnations| {
            let all = process.earlier.iter().chain([&process.current]);
            let leaders: Vec<i32> = all
                .map(|process| process.pid().as_raw_nonzero().get())
                .collect();
            snapshot.usage(&leaders)
        };
        Ok(self
            .processes
            .iter()
            .map(|(name, process)| (name.clone(), usage_of(process)))
            .collect())
    }

    /// Runs a command to its end, in the cluster's folder; for command lines such as `compass token create`.
    pub fn run(&self, spec: &ProcessSpec) -> anyhow::Result<Finished> {
        self.runner().run(spec)
    }

    /// Runs commands as [`Self::run`] does, from other threads too.
    pub fn runner(&self) -> Runner {
        Runner {
            program: self.program.clone(),
            folder: self.folder().to_owned(),
        }
    }

    fn launch(&self, spec: ProcessSpec) -> anyhow::Result<Process> {
        let (folder, log) = (self.folder_of(&spec.name)?, self.log_of(&spec.name));
        Process::spawn(&self.program, spec, &folder, &log)
    }
}

impl Runner {
    /// See [`Cluster::run`].
    pub fn run(&self, spec: &ProcessSpec) -> anyhow::Result<Finished> {
        let (mut stdout, mut stderr) = (tempfile::tempfile()?, tempfile::tempfile()?);
        let mut command = spec.ending_command(&self.program);
        command
            .current_dir(&self.folder)
            .stdin(Stdio::null())
            .process_group(0);
        command
            .stdout(stdout.try_clone()?)
            .stderr(stderr.try_clone()?);
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot start `{}` ({command:?})", spec.name))?;
        let id = Pid::from_child(&child);
        let in_time =
            process::await_end(&pidfd_open(id, PidfdFlags::empty())?, spec.deadline)?.is_some();
        // Nothing it may have started outlives it; an empty group is as good.
        let _empty = kill_process_group(id, Signal::KILL);
        let status = child.wait()?;
        ensure!(
            in_time,
            "`{}` did not end within {:?}",
            spec.name,
            spec.deadline
        );
        Ok(Finished {
            status,
            stdout: whole(&mut stdout)?,
            stderr: whole(&mut stderr)?,
        })
    }
}

/// What has been written to a file, as text.
fn whole(file: &mut File) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0))?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn no_process(name: &str) -> String {
    format!("there is no process `{name}`")
}
