//! The handle of one instance, and the place where instances are started.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use compass_shared::ids::{FrameId, QueryId};
use compass_shared::model::plan::InstanceTarget;
use compass_shared::wire::v1::{InstanceReport, InstanceState, InstanceStatus};
use tokio::sync::broadcast;

use super::{Payload, ProcessError, Processed, Purpose, WorkerError, WorkerEvent, WorkerSettings};

/// Starts instances.
#[derive(Debug)]
pub struct Workers {
    settings: WorkerSettings,
    events: broadcast::Sender<WorkerEvent>,
}

impl Workers {
    /// Nothing runs yet.
    pub fn new(settings: WorkerSettings) -> Self {
        Self {
            settings,
            events: broadcast::channel(256).0,
        }
    }

    /// What happens to instances from now on; a receiver that lags misses the oldest.
    pub fn events(&self) -> broadcast::Receiver<WorkerEvent> {
        self.events.subscribe()
    }

    /// Starts an instance and returns when it is warm. From then on it is kept running until it is stopped or dropped.
    ///
    /// # Errors
    /// See [`WorkerError`].
    pub async fn start(
        &self,
        target: &InstanceTarget,
        artifact: Option<&Path>,
        purpose: Purpose,
    ) -> Result<Arc<Instance>, WorkerError> {
        let _ = (&self.settings, artifact.map(PathBuf::from), purpose);
        Err(WorkerError::Spawn(format!(
            "{} is not supported yet",
            target.kind
        )))
    }
}

/// One operator in one configuration in a process of its own.
#[derive(Debug)]
pub struct Instance {
    target: InstanceTarget,
}

impl Instance {
    /// What it was started as.
    pub fn target(&self) -> &InstanceTarget {
        &self.target
    }

    /// Runs one frame through the operator; frames are served one after another in the order of these calls.
    ///
    /// `deadline` counts from the call. When it passes while the worker is at work, the result is dropped and the worker lives on.
    ///
    /// # Errors
    /// See [`ProcessError`].
    pub async fn process(
        &self,
        query: &QueryId,
        frame: FrameId,
        inputs: Vec<Payload>,
        deadline: Duration,
    ) -> Result<Processed, ProcessError> {
        let _ = (query, frame, inputs, deadline);
        Err(ProcessError::Stopped)
    }

    /// Takes out what the operator remembers of a query.
    ///
    /// # Errors
    /// See [`ProcessError`].
    pub async fn snapshot(&self, query: &QueryId) -> Result<Vec<u8>, ProcessError> {
        let _ = query;
        Err(ProcessError::Stopped)
    }

    /// Puts in what an operator of the same kind remembered of a query.
    ///
    /// # Errors
    /// See [`ProcessError`].
    pub async fn restore(&self, query: &QueryId, state: Vec<u8>) -> Result<(), ProcessError> {
        let _ = (query, state);
        Err(ProcessError::Stopped)
    }

    /// Makes the operator forget a query.
    ///
    /// # Errors
    /// See [`ProcessError`].
    pub async fn reset(&self, query: &QueryId) -> Result<(), ProcessError> {
        let _ = query;
        Err(ProcessError::Stopped)
    }

    /// How it is.
    pub fn status(&self) -> InstanceStatus {
        InstanceStatus {
            instance: self.target.instance,
            state: InstanceState::Starting,
            pid: None,
            restarts: 0,
        }
    }

    /// What was measured since the last call; meant for one caller, once a second.
    pub fn report(&self) -> InstanceReport {
        InstanceReport {
            instance: self.target.instance,
            frames: 0,
            service_ms: None,
            queue_age_ms: 0.0,
            busy_cores: 0.0,
            granted_cores: self.target.share.cpu.cores(),
            memory_mib: None,
        }
    }

    /// Age of the oldest frame that waits for its turn; zero when none does.
    pub fn queue_age(&self) -> Duration {
        Duration::ZERO
    }

    /// Ends it: no new frames, the one being served finishes, then the process is gone when this returns.
    pub async fn stop(&self) {}
}
