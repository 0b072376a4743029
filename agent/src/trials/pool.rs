//! Workers kept warm between stages: the next stage often runs the same operator on other frames.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use compass_shared::model::plan::InstanceTarget;

use super::lock;
use crate::workers::{Instance, Purpose, WorkerError, Workers};

/// Idle workers at most.
const IDLE_MAX: usize = 4;
/// After this long without work a worker is let go.
const IDLE_FOR: Duration = Duration::from_secs(30);

/// Idle workers with the time they became idle, longest idle first.
#[derive(Debug, Default)]
pub(super) struct Pool {
    idle: Mutex<Vec<(Instant, Arc<Instance>)>>,
}

impl Pool {
    pub(super) async fn start(
        workers: &Workers,
        target: &InstanceTarget,
        artifact: Option<&Path>,
    ) -> Result<Arc<Instance>, WorkerError> {
        workers.start(target, artifact, Purpose::Trial).await
    }

    /// A warm worker for this instance, with the share wanted now.
    pub(super) fn take(&self, target: &InstanceTarget) -> Option<Arc<Instance>> {
        let mut idle = lock(&self.idle);
        let fits = |worker: &Instance| {
            let mut own = worker.target();
            own.share = target.share;
            own == *target
        };
        let index = idle.iter().rposition(|(_, worker)| fits(worker))?;
        let worker = idle.remove(index).1;
        worker.set_share(target.share);
        Some(worker)
    }

    /// Keeps a worker that has done its work well. One that is not given back is dropped, which ends it.
    pub(super) fn give_back(self: &Arc<Self>, worker: Arc<Instance>) {
        let mut idle = lock(&self.idle);
        if idle.len() == IDLE_MAX {
            idle.remove(0);
        }
        idle.push((Instant::now(), worker));
        let pool = Arc::downgrade(self);
        tokio::spawn(async move {
            tokio::time::sleep(IDLE_FOR).await;
            if let Some(pool) = pool.upgrade() {
                lock(&pool.idle).retain(|(since, _)| since.elapsed() < IDLE_FOR);
            }
        });
    }

    /// Lets idle workers go, longest idle first, until they need no more memory than this.
    pub(super) fn shrink_to(&self, memory_mib: u32) {
        let mut idle = lock(&self.idle);
        let needed = |idle: &[(Instant, Arc<Instance>)]| -> u64 {
            let each = idle
                .iter()
                .map(|(_, worker)| worker.target().share.memory_mib);
            each.map(u64::from).sum()
        };
        while needed(&idle) > u64::from(memory_mib) {
            idle.remove(0);
        }
    }
}
