//! The bounded pool for planning: as many calls at once as there are cores but one, so that sessions and timers always find a free core.

use std::sync::Arc;

use tokio::sync::Semaphore;

/// Why a call gave no result.
#[derive(Debug, Clone, thiserror::Error)]
#[error("planning panicked: {0}")]
pub struct Panicked(pub String);

/// See the module's head.
#[derive(Debug, Clone)]
pub struct ComputePool {
    permits: Arc<Semaphore>,
}

impl ComputePool {
    /// A pool for this machine.
    pub fn for_this_machine() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self::new(cores.saturating_sub(1))
    }

    /// A pool with at least one place.
    pub fn new(places: usize) -> Self {
        Self {
            permits: Arc::new(Semaphore::new(places.max(1))),
        }
    }

    /// Runs a call on a thread of its own once there is a place.
    ///
    /// # Errors
    /// When the call panics; nobody else is disturbed.
    pub async fn run<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Panicked> {
        let _place = self
            .permits
            .acquire()
            .await
            .expect("the semaphore is never closed");
        tokio::task::spawn_blocking(call)
            .await
            .map_err(|error| Panicked(reason(error)))
    }
}

fn reason(error: tokio::task::JoinError) -> String {
    match error.try_into_panic() {
        Ok(panic) => panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "without a message".to_owned()),
        Err(error) => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn no_more_calls_run_at_once_than_there_are_places() {
        let pool = ComputePool::new(2);
        let running = Arc::new(AtomicUsize::new(0));
        let most = Arc::new(AtomicUsize::new(0));
        let mut calls = tokio::task::JoinSet::new();
        for _ in 0..16 {
            let (pool, running, most) = (pool.clone(), running.clone(), most.clone());
            calls.spawn(async move {
                pool.run(move || {
                    most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    std::thread::yield_now();
                    running.fetch_sub(1, Ordering::SeqCst);
                })
                .await
            });
        }
        while let Some(done) = calls.join_next().await {
            done.unwrap().unwrap();
        }
        assert!(most.load(Ordering::SeqCst) <= 2);
    }

    #[tokio::test]
    async fn a_panic_is_an_answer_and_frees_its_place() {
        let pool = ComputePool::new(1);
        let panicked = pool.run(|| panic!("division by {}", 0)).await;
        let Err(Panicked(text)) = panicked.map(|(): ()| ()) else {
            panic!("it panicked");
        };
        assert_eq!(text, "division by 0");
        assert_eq!(pool.run(|| 7).await.unwrap(), 7);
    }
}
