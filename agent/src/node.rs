//! Carries out targets: fetches artifacts, starts and stops instances, hands both to the data plane, and knows how far it is.
//!
//! Start at [`Node::apply`]. Targets come from the coordinator or, after a start without it, from disk; what runs does not depend on a
//! session being alive. Decisions are `reconcile`'s; this module performs them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use compass_shared::ids::{Commit, InstanceId};
use compass_shared::model::plan::{ArtifactRef, InstanceTarget, NodeTarget};
use compass_shared::wire::v1::{InstanceReport, InstanceState, InstanceStatus};
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::artifacts::{ArtifactCache, ArtifactError, ArtifactSource};
use crate::dataplane::DataPlane;
use crate::reconcile::{Action, reconcile};
use crate::store::AgentStore;
use crate::workers::{Instance, Purpose, Workers};

/// Between attempts to start an instance that could not be started (no session to fetch its model over, say).
const RETRY_EVERY: Duration = Duration::from_secs(2);

/// What became of a target that was handed over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Applied {
    /// It is being carried out.
    Accepted,
    /// It is not newer than what the node has.
    NotNewer,
    /// It is for another node, or could not be kept on disk.
    Refused(String),
}

/// An instance that is wanted.
struct Slot {
    target: InstanceTarget,
    /// The task that starts it; ends when it runs.
    starting: Option<AbortHandle>,
    /// It, once it runs; while it is replaced, its predecessor.
    running: Option<Arc<Instance>>,
    /// Why the last attempt to start it failed.
    failure: Option<String>,
}

#[derive(Default)]
struct State {
    commit: Option<Commit>,
    slots: BTreeMap<InstanceId, Slot>,
    /// What is fetched ahead, and the task that does it.
    standby: (Vec<ArtifactRef>, Option<AbortHandle>),
}

/// See the module.
pub struct Node {
    store: AgentStore,
    workers: Arc<Workers>,
    artifacts: Arc<ArtifactCache>,
    source: Arc<dyn ArtifactSource>,
    data_plane: Arc<DataPlane>,
    state: Mutex<State>,
    changed: watch::Sender<u64>,
}

impl Node {
    /// Nothing runs yet.
    pub fn new(
        store: AgentStore,
        workers: Arc<Workers>,
        artifacts: Arc<ArtifactCache>,
        source: Arc<dyn ArtifactSource>,
        data_plane: Arc<DataPlane>,
    ) -> Arc<Self> {
        Arc::new(Self {
            store,
            workers,
            artifacts,
            source,
            data_plane,
            state: Mutex::default(),
            changed: watch::Sender::new(0),
        })
    }

    /// Changes whenever an instance changes its state.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Newest commit that is being carried out.
    pub fn commit(&self) -> Option<Commit> {
        self.state().commit
    }

    /// How every wanted instance is.
    pub fn statuses(&self) -> Vec<InstanceStatus> {
        let state = self.state();
        let status =
            |(id, slot): (&InstanceId, &Slot)| match (&slot.running, &slot.starting, &slot.failure)
            {
                (_, Some(_), None) => InstanceStatus {
                    instance: *id,
                    state: InstanceState::Starting,
                    pid: None,
                    restarts: 0,
                },
                (Some(instance), _, _) => instance.status(),
                (None, _, Some(reason)) => InstanceStatus {
                    instance: *id,
                    state: InstanceState::Failed(reason.clone()),
                    pid: None,
                    restarts: 0,
                },
                (None, None, None) => InstanceStatus {
                    instance: *id,
                    state: InstanceState::Starting,
                    pid: None,
                    restarts: 0,
                },
            };
        state.slots.iter().map(status).collect()
    }

    /// What was measured of live instances since the last call.
    pub fn reports(&self) -> Vec<InstanceReport> {
        let running: Vec<_> = self
            .state()
            .slots
            .values()
            .filter_map(|slot| slot.running.clone())
            .collect();
        running.iter().map(|instance| instance.report()).collect()
    }

    /// Takes up the target kept on disk, if any: after a power cut a node works on without its coordinator.
    ///
    /// # Errors
    /// When the record is damaged.
    pub fn resume(self: &Arc<Self>) -> Result<Option<Commit>, crate::store::StoreError> {
        let Some(target) = self.store.target()? else {
            return Ok(None);
        };
        let commit = target.commit;
        self.carry_out(target);
        Ok(Some(commit))
    }

    /// Takes a target: durable first, then carried out.
    pub fn apply(
        self: &Arc<Self>,
        target: NodeTarget,
        own: &compass_shared::ids::NodeId,
    ) -> Applied {
        if target.node != *own {
            return Applied::Refused(format!("the target is for node {}", target.node));
        }
        if self.commit().is_some_and(|commit| target.commit <= commit) {
            return Applied::NotNewer;
        }
        if let Err(error) = self.store.set_target(&target) {
            return Applied::Refused(error.to_string());
        }
        self.carry_out(target);
        Applied::Accepted
    }

    /// A worker came back or went down by itself.
    pub fn worker_changed(&self, instance: InstanceId) {
        let running = self
            .state()
            .slots
            .get(&instance)
            .and_then(|slot| slot.running.clone());
        if let Some(running) = running {
            match running.status().state {
                InstanceState::Ready => self.data_plane.instance_ready(instance, running),
                _ => self.data_plane.instance_stopped(instance),
            }
        }
        self.note_change();
    }

    /// Ends everything that runs.
    pub async fn shut_down(&self) {
        if let Some(task) = self.state().standby.1.take() {
            task.abort();
        }
        let slots = std::mem::take(&mut self.state().slots);
        for slot in slots.into_values() {
            if let Some(task) = slot.starting {
                task.abort();
            }
            if let Some(instance) = slot.running {
                instance.kill().await;
            }
        }
    }

    fn carry_out(self: &Arc<Self>, target: NodeTarget) {
        tracing::info!(commit = %target.commit, instances = target.instances.len(), queries = target.queries.len(), "target");
        self.artifacts.protect(
            target
                .instances
                .iter()
                .filter_map(|i| i.artifact.as_ref().map(|a| a.digest))
                .collect(),
        );
        let actions = {
            let mut state = self.state();
            state.commit = Some(target.commit);
            let current = state
                .slots
                .iter()
                .map(|(id, slot)| (*id, slot.target.clone()))
                .collect();
            reconcile(&current, &target)
        };
        // Routes first: frames of a new generation wait for their instance rather than find none.
        self.data_plane.apply(&target);
        for action in actions {
            match action {
                Action::Start(instance) => self.start(instance),
                Action::Replace(instance) => self.replace(instance),
                Action::Stop(id) => self.stop(id),
            }
        }
        self.note_change();
        self.fetch_ahead(target.standby);
    }

    /// Models for plans that may come: a task fetches them one by one while nothing that is to run waits for its own. They are not
    /// protected: whatever runs may push them out.
    fn fetch_ahead(self: &Arc<Self>, wanted: Vec<ArtifactRef>) {
        let mut state = self.state();
        if state.standby.0 == wanted {
            return;
        }
        if let Some(task) = state.standby.1.take() {
            task.abort();
        }
        let node = Arc::clone(self);
        let list = wanted.clone();
        let task = (!list.is_empty()).then(|| {
            tokio::spawn(async move {
                for artifact in &list {
                    node.fetch_one_ahead(artifact).await;
                }
            })
            .abort_handle()
        });
        state.standby = (wanted, task);
    }

    async fn fetch_one_ahead(&self, artifact: &ArtifactRef) {
        let mut changes = self.changes();
        loop {
            while self.state().slots.values().any(|s| s.starting.is_some()) {
                if changes.changed().await.is_err() {
                    return;
                }
            }
            let fetched = self
                .artifacts
                .ensure(artifact.digest, artifact.bytes, &*self.source)
                .await;
            match fetched {
                Ok(_) => {
                    tracing::info!(artifact = %artifact.name, "at hand");
                    return;
                }
                Err(ArtifactError::Fetch { reason, .. }) => {
                    tracing::debug!(artifact = %artifact.name, reason, "not fetched ahead yet");
                    tokio::time::sleep(RETRY_EVERY).await;
                }
                Err(error) => {
                    tracing::warn!(artifact = %artifact.name, %error, "not kept at hand");
                    return;
                }
            }
        }
    }

    fn start(self: &Arc<Self>, target: InstanceTarget) {
        let id = target.instance;
        let task = tokio::spawn(Arc::clone(self).start_until_it_runs(target.clone()));
        let mut state = self.state();
        let predecessor = state.slots.remove(&id);
        let running = predecessor.and_then(|slot| {
            if let Some(task) = slot.starting {
                task.abort();
            }
            slot.running
        });
        state.slots.insert(
            id,
            Slot {
                target,
                starting: Some(task.abort_handle()),
                running,
                failure: None,
            },
        );
    }

    /// An instance that runs takes another share as it is, and keeps what it remembers; everything else needs a successor.
    fn replace(self: &Arc<Self>, target: InstanceTarget) {
        let mut state = self.state();
        if let Some(slot) = state.slots.get_mut(&target.instance)
            && let Some(running) = &slot.running
            && slot.starting.is_none()
        {
            let with_its_share = InstanceTarget {
                share: slot.target.share,
                ..target.clone()
            };
            if with_its_share == slot.target {
                running.set_share(target.share);
                slot.target = target;
                return;
            }
        }
        drop(state);
        self.start(target);
    }

    async fn start_until_it_runs(self: Arc<Self>, target: InstanceTarget) {
        let id = target.instance;
        loop {
            match self.start_once(&target).await {
                Ok(instance) => {
                    let predecessor = {
                        let mut state = self.state();
                        let Some(slot) = state
                            .slots
                            .get_mut(&id)
                            .filter(|slot| slot.target == target)
                        else {
                            return;
                        };
                        slot.starting = None;
                        slot.failure = None;
                        slot.running.replace(Arc::clone(&instance))
                    };
                    tracing::info!(instance = %id, kind = %target.kind, configuration = %target.configuration, "instance ready");
                    self.data_plane.instance_ready(id, instance);
                    self.note_change();
                    if let Some(predecessor) = predecessor {
                        predecessor.stop().await;
                    }
                    return;
                }
                Err(reason) => {
                    tracing::warn!(instance = %id, kind = %target.kind, reason, "instance not started");
                    if let Some(slot) = self.state().slots.get_mut(&id) {
                        slot.failure = Some(reason);
                    }
                    self.note_change();
                    tokio::time::sleep(RETRY_EVERY).await;
                }
            }
        }
    }

    async fn start_once(&self, target: &InstanceTarget) -> Result<Arc<Instance>, String> {
        let model = match &target.artifact {
            Some(artifact) => {
                let path = self
                    .artifacts
                    .ensure(artifact.digest, artifact.bytes, &*self.source)
                    .await;
                Some(path.map_err(|error| error.to_string())?)
            }
            None => None,
        };
        self.workers
            .start(target, model.as_deref(), Purpose::Live)
            .await
            .map_err(|error| error.to_string())
    }

    fn stop(self: &Arc<Self>, id: InstanceId) {
        let Some(slot) = self.state().slots.remove(&id) else {
            return;
        };
        if let Some(task) = slot.starting {
            task.abort();
        }
        self.data_plane.instance_stopped(id);
        if let Some(instance) = slot.running {
            tokio::spawn(async move { instance.stop().await });
        }
        tracing::info!(instance = %id, "instance stopped");
    }

    fn note_change(&self) {
        self.changed.send_modify(|count| *count += 1);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
