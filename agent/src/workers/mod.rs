//! Workers: every operator runs in a process of its own, never in the agent's.
//!
//! Start at [`Workers::start`]. The agent starts itself as `compass-agent worker` (or, for a `process` operator, has that command
//! execute the foreign program after it has taken on its limits) and speaks length-prefixed messages with it over its standard
//! streams; `PROTOCOL.md` beside this file describes them. An [`Instance`] is one such process with its queue: requests are served
//! one after another, a stuck or dead process is replaced with growing pauses, and what happens to it happens to nobody else.
//!
//! Deliberately absent: which instances to run (`reconcile`), where frames go (`dataplane`), what operators compute (`operators`).

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use compass_shared::ids::InstanceId;

use crate::limits::CpuLimiter;

mod child;
mod instance;
mod pace;
mod process;
pub(crate) mod protocol;
mod supervisor;

pub use child::worker_main;
pub use instance::{Instance, Workers};

/// How to start this program again as `… worker`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelfCommand {
    /// The executable.
    pub program: PathBuf,
    /// Arguments that come before `worker`.
    pub leading_arguments: Vec<OsString>,
}

/// What workers are started with.
#[derive(Debug, Clone)]
pub struct WorkerSettings {
    /// How to start a worker.
    pub self_command: SelfCommand,
    /// The agent's folder; workers get a subfolder as their working directory.
    pub data_dir: PathBuf,
    /// Speed of this node's core relative to the host's when the device is emulated.
    pub emulated_speed: Option<f64>,
    /// A worker that does not answer for this long is taken for stuck and is killed.
    pub stall_after: Duration,
    /// A worker must be warm within this time.
    pub start_within: Duration,
    /// Lets the kernel hold CPU shares; where it cannot (or is switched off), the agent paces workers. Not for emulated devices.
    pub limiter: CpuLimiter,
}

impl WorkerSettings {
    /// Settings with the usual bounds.
    pub fn new(self_command: SelfCommand, data_dir: PathBuf, emulated_speed: Option<f64>) -> Self {
        Self {
            self_command,
            data_dir,
            emulated_speed,
            // Far above any operator's time per frame, far below a person's patience.
            stall_after: Duration::from_secs(10),
            // A large model on a slow disk takes seconds.
            start_within: Duration::from_secs(60),
            limiter: CpuLimiter::switched_off(),
        }
    }
}

/// What an instance is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Frames of a query.
    Live,
    /// A trial: yields to live work.
    Trial,
}

/// Bytes with the way to read them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Payload {
    /// As in `FrameHeader::content`: `rgb8 640x480`, `jpeg`, `detections`, `tracks`, `answer`, `bytes`.
    pub content: String,
    /// The bytes.
    pub bytes: Bytes,
}

/// What an operator makes of a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// This.
    Payload(Payload),
    /// Nothing, on purpose (a knob).
    Skipped,
}

/// A frame that went through an instance.
#[derive(Debug, Clone, PartialEq)]
pub struct Processed {
    /// What came out.
    pub output: Output,
    /// Time in the operator as this node takes it: an emulated device's hold included, the queue excluded.
    pub wall: Duration,
    /// CPU time really used on the host.
    pub cpu: Duration,
}

/// Why an instance could not be started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorkerError {
    /// The process could not be started at all.
    #[error("the worker cannot be started: {0}")]
    Spawn(String),
    /// The operator refused its configuration or model.
    #[error("{0}")]
    Refused(String),
    /// The process died or was killed before it was warm; its last words.
    #[error("the worker ended before it was ready: {0}")]
    Crashed(String),
    /// It was not warm in time.
    #[error("the worker was not ready within {0:?}")]
    TooSlow(Duration),
}

/// Why a frame (or a state) did not come out of an instance.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProcessError {
    /// The operator cannot read this input; the worker lives on.
    #[error("{0}")]
    BadInput(String),
    /// The frame's deadline passed while it waited or was served.
    #[error("the deadline passed")]
    Expired,
    /// The worker died or was killed over this frame; its last words.
    #[error("the worker crashed: {0}")]
    Crashed(String),
    /// The instance keeps failing and takes no frames now; why.
    #[error("the instance is down: {0}")]
    Down(String),
    /// The instance was stopped.
    #[error("the instance was stopped")]
    Stopped,
}

/// Something that happened to an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerEvent {
    /// The instance.
    pub instance: InstanceId,
    /// What it is for.
    pub purpose: Purpose,
    /// What happened.
    pub what: WorkerEventKind,
}

/// See [`WorkerEvent`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerEventKind {
    /// It is warm (again).
    Ready,
    /// Its process died or was killed and will be replaced; why.
    Crashed(String),
    /// It has failed so often that it counts as down; it is still tried again, rarely.
    Failed(String),
}
