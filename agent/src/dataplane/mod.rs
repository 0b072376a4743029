//! The data plane: frames in, through operators, out, over one QUIC connection per pair of nodes.
//!
//! Start at [`DataPlane`], the handle the rest of the agent holds. Behind it runs one task, the hub: it owns the [`core`] (all
//! decisions about frames) and one [`link`] estimator per neighbour, performs the core's effects and feeds back what comes of them.
//! Around the hub stand small tasks that wait for the network or for operators, none of which decides anything.
//!
//! Deliberately absent: which instances run (the node's business), accepting connections (the owner of the endpoint hands them over),
//! and anything that reads the wall clock.

mod connection;
mod content;
pub mod core;
mod hub;
pub mod link;
mod neighbours;
mod pace;
mod peer_requests;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use compass_shared::ids::{Digest, FrameId, Generation, InstanceId, NodeId, QueryId, SampleSetId};
use compass_shared::model::plan::{NodeTarget, Peer};
use compass_shared::time::ms;
use compass_shared::wire::v1::{AgentEvent, ContentReport, LinkReport};
use compass_transport::{Endpoint, Principal, Session};
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;

use crate::trials::{SampleStore, StageFetch, StageOutputs, Trials};
use crate::workers::{Instance, Payload, ProcessError, Processed};

use content::ContentWatch;
use hub::{Command, Hub};

/// What a data plane is made of.
#[derive(Clone)]
pub struct DataPlaneConfig {
    /// This node.
    pub node: NodeId,
    /// Dials neighbours; its owner accepts and hands sessions over with [`DataPlane::accept`].
    pub endpoint: Arc<Endpoint>,
    /// Is shown every frame that enters here.
    pub samples: Arc<SampleStore>,
    /// Serves other nodes' requests for stage outputs.
    pub trials: Arc<Trials>,
    /// Breaches go here at once; what does not fit is tried again a little later.
    pub events: mpsc::Sender<AgentEvent>,
}

/// Bounds that tests turn.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tuning {
    /// Of the core.
    pub limits: core::Limits,
    /// Of link measurement.
    pub links: link::LinkPolicy,
}

/// An operator as the data plane sees it: a running [`Instance`], or a stand-in in tests.
#[async_trait]
pub trait Operator: Send + Sync {
    /// Runs one frame.
    async fn process(
        &self,
        query: &QueryId,
        frame: FrameId,
        inputs: Vec<Payload>,
        deadline: Duration,
    ) -> Result<Processed, ProcessError>;

    /// Takes out what it remembers of a query.
    async fn snapshot(&self, query: &QueryId) -> Result<Vec<u8>, ProcessError>;

    /// Puts in what another one remembered.
    async fn restore(&self, query: &QueryId, state: Vec<u8>) -> Result<(), ProcessError>;
}

#[async_trait]
impl Operator for Instance {
    async fn process(
        &self,
        query: &QueryId,
        frame: FrameId,
        inputs: Vec<Payload>,
        deadline: Duration,
    ) -> Result<Processed, ProcessError> {
        Self::process(self, query, frame, inputs, deadline).await
    }

    async fn snapshot(&self, query: &QueryId) -> Result<Vec<u8>, ProcessError> {
        Self::snapshot(self, query).await
    }

    async fn restore(&self, query: &QueryId, state: Vec<u8>) -> Result<(), ProcessError> {
        Self::restore(self, query, state).await
    }
}

/// What the hub lets others read.
#[derive(Debug, Default)]
struct Shown {
    links: Vec<LinkReport>,
    in_flight: Vec<(QueryId, Generation, u32)>,
    queue_ages: BTreeMap<InstanceId, Duration>,
    content: ContentWatch,
}

/// Shared by the handle and the hub.
#[derive(Debug, Default)]
struct Board {
    shown: Mutex<Shown>,
    sessions: watch::Sender<BTreeMap<NodeId, Arc<dyn Session>>>,
    drained: watch::Sender<u64>,
}

impl Board {
    fn shown(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The handle of a node's data plane; it ends when the handle is dropped.
pub struct DataPlane {
    commands: mpsc::UnboundedSender<Command>,
    board: Arc<Board>,
    hub: AbortHandle,
}

impl DataPlane {
    /// Starts the data plane; must be called within a tokio runtime.
    pub fn start(config: DataPlaneConfig) -> Arc<Self> {
        Self::start_with(config, Tuning::default())
    }

    /// The same with other bounds.
    pub fn start_with(config: DataPlaneConfig, tuning: Tuning) -> Arc<Self> {
        let (commands, inbox) = mpsc::unbounded_channel();
        let board = Arc::new(Board::default());
        let hub = Hub::new(config, tuning, commands.clone(), Arc::clone(&board));
        let hub = tokio::spawn(hub.run(inbox)).abort_handle();
        Arc::new(Self {
            commands,
            board,
            hub,
        })
    }

    /// Takes over an accepted session of the data protocol. It is closed when the newest target does not name its peer.
    pub fn accept(&self, principal: Principal, session: Arc<dyn Session>) {
        self.tell(Command::Accepted(principal, session));
    }

    /// Takes the routes, queries and peers of a newer target.
    pub fn apply(&self, target: &NodeTarget) {
        self.tell(Command::Apply(Box::new(target.clone())));
    }

    /// Frames for this instance go to this operator from now on.
    pub fn instance_ready(&self, instance: InstanceId, operator: Arc<dyn Operator>) {
        self.tell(Command::InstanceReady(instance, operator));
    }

    /// The instance takes no frames for now; those that come wait until they expire.
    pub fn instance_stopped(&self, instance: InstanceId) {
        self.tell(Command::InstanceStopped(instance));
    }

    /// Nodes to keep a connection to and to measure links to, beyond those of the target.
    pub fn peers(&self, peers: Vec<Peer>) {
        self.tell(Command::Peers(peers));
    }

    /// Links to neighbours as last measured.
    pub fn link_reports(&self) -> Vec<LinkReport> {
        self.board.shown().links.clone()
    }

    /// What the frames looked like that entered here since the last call; meant for one caller, once a second.
    pub fn content_reports(&self) -> Vec<ContentReport> {
        self.board.shown().content.take_reports()
    }

    /// Frames that entered here and have not ended, per query and generation.
    pub fn in_flight(&self) -> Vec<(QueryId, Generation, u32)> {
        self.board.shown().in_flight.clone()
    }

    /// Changes whenever the last frame of a generation that entered here has ended.
    pub fn drained(&self) -> watch::Receiver<u64> {
        self.board.drained.subscribe()
    }

    /// Age in the queue of the oldest frame that waits for an instance, in ms; 0 when none does.
    pub fn queue_age_ms(&self, instance: InstanceId) -> f64 {
        let shown = self.board.shown();
        shown.queue_ages.get(&instance).copied().map_or(0.0, ms)
    }

    fn tell(&self, command: Command) {
        // Fails only when the hub has ended, and with it everything that could be told.
        let _ = self.commands.send(command);
    }
}

impl Drop for DataPlane {
    fn drop(&mut self) {
        self.hub.abort();
    }
}

impl fmt::Debug for DataPlane {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("DataPlane").finish_non_exhaustive()
    }
}

#[async_trait]
impl StageFetch for DataPlane {
    async fn fetch(
        &self,
        holder: &NodeId,
        query: &QueryId,
        set: SampleSetId,
        prefix: Digest,
        frames: &[FrameId],
    ) -> Result<StageOutputs, String> {
        let session = peer_requests::session_to(&self.board, holder).await?;
        peer_requests::fetch_stage(&session, query, set, prefix, frames).await
    }
}
