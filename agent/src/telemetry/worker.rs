//! A thread that does one blocking job when asked and keeps the latest result; asking never blocks.
//!
//! A call into a driver can hang for ever, uninterruptibly. So each device has one such thread; a job that runs past its deadline
//! makes the worker *hung*, nobody waits for it and no second thread is started. Time is the caller's: the deadline is measured on
//! the clock that [`Worker::poke`] is told.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use compass_shared::time::Moment;

/// Enough for a driver's library; only touched pages count.
const STACK_BYTES: usize = 1 << 20;

/// How a worker stands after a poke.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkerState {
    /// The poke was taken; the last job had ended.
    Ready,
    /// A job is running and within its deadline.
    Running,
    /// A job has been running past its deadline.
    Hung,
    /// The thread ended: its job panicked.
    Ended,
}

struct Slot<T> {
    /// Set by a poke, taken by the thread.
    request: Option<Moment>,
    /// From the poke until the job has ended.
    running_since: Option<Moment>,
    latest: Option<(Moment, T)>,
    is_stopping: bool,
    has_ended: bool,
}

struct Shared<T> {
    slot: Mutex<Slot<T>>,
    changed: Condvar,
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, Slot<T>> {
        // Jobs run outside the lock, so a poisoned slot is still whole.
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The owner's end. Dropping it lets the thread end after its current job, without waiting for that.
pub(super) struct Worker<T> {
    shared: Arc<Shared<T>>,
    deadline: Duration,
}

impl<T: Send + 'static> Worker<T> {
    /// Starts the thread. `live` counts the threads that have not ended.
    ///
    /// # Errors
    /// When the operating system has no thread left.
    pub(super) fn spawn(
        name: &str,
        deadline: Duration,
        live: Arc<AtomicUsize>,
        job: impl FnMut(Moment) -> T + Send + 'static,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            slot: Mutex::new(Slot {
                request: None,
                running_since: None,
                latest: None,
                is_stopping: false,
                has_ended: false,
            }),
            changed: Condvar::new(),
        });
        live.fetch_add(1, Ordering::SeqCst);
        let end = EndGuard {
            shared: Arc::clone(&shared),
            live,
        };
        // The guard moves into the closure, so a thread that could not start is counted down as well.
        thread::Builder::new()
            .name(name.to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || run(end, job))?;
        Ok(Self { shared, deadline })
    }
}

impl<T> Worker<T> {
    /// Asks for a new result unless one is being worked on, and tells how the worker stands.
    pub(super) fn poke(&self, now: Moment) -> WorkerState {
        let mut slot = self.shared.lock();
        if slot.has_ended {
            return WorkerState::Ended;
        }
        if let Some(since) = slot.running_since {
            return if now.since(since) >= self.deadline {
                WorkerState::Hung
            } else {
                WorkerState::Running
            };
        }
        slot.request = Some(now);
        slot.running_since = Some(now);
        self.shared.changed.notify_all();
        WorkerState::Ready
    }

    /// A copy of the latest result.
    pub(super) fn latest(&self) -> Option<T>
    where
        T: Clone,
    {
        self.shared
            .lock()
            .latest
            .as_ref()
            .map(|(_, result)| result.clone())
    }

    /// Takes the latest result out.
    pub(super) fn take(&self) -> Option<T> {
        self.shared.lock().latest.take().map(|(_, result)| result)
    }

    /// Waits until no job is running, at most this long in real time; false when one still is.
    pub(super) fn wait_idle(&self, timeout: Duration) -> bool {
        self.wait_until(timeout, |slot| {
            slot.running_since.is_none() || slot.has_ended
        })
    }

    /// Asks the thread to end after its current job.
    pub(super) fn stop(&self) {
        self.shared.lock().is_stopping = true;
        self.shared.changed.notify_all();
    }

    /// Waits until the thread has ended, at most this long in real time; false when it has not.
    pub(super) fn wait_ended(&self, timeout: Duration) -> bool {
        self.wait_until(timeout, |slot| slot.has_ended)
    }

    fn wait_until(&self, timeout: Duration, is_reached: impl Fn(&Slot<T>) -> bool) -> bool {
        let until = Instant::now() + timeout;
        let mut slot = self.shared.lock();
        while !is_reached(&slot) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            (slot, _) = self
                .shared
                .changed
                .wait_timeout(slot, left)
                .unwrap_or_else(PoisonError::into_inner);
        }
        true
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Marks the end of the thread, however it ends.
struct EndGuard<T> {
    shared: Arc<Shared<T>>,
    live: Arc<AtomicUsize>,
}

impl<T> Drop for EndGuard<T> {
    fn drop(&mut self) {
        self.shared.lock().has_ended = true;
        self.live.fetch_sub(1, Ordering::SeqCst);
        self.shared.changed.notify_all();
    }
}

fn run<T>(end: EndGuard<T>, mut job: impl FnMut(Moment) -> T) {
    let shared = &end.shared;
    loop {
        let asked_at = {
            let mut slot = shared.lock();
            loop {
                if slot.is_stopping {
                    // The job goes first: what it holds (a driver's library) is closed before the end is announced.
                    drop(slot);
                    drop(job);
                    return;
                }
                if let Some(asked_at) = slot.request.take() {
                    break asked_at;
                }
                slot = shared
                    .changed
                    .wait(slot)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        };
        let result = job(asked_at);
        let mut slot = shared.lock();
        slot.latest = Some((asked_at, result));
        slot.running_since = None;
        shared.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    const LONG: Duration = Duration::from_secs(30);

    fn seconds(n: u64) -> Moment {
        Moment(n * 1_000_000)
    }

    #[test]
    fn a_result_is_kept_until_the_next_one() {
        let worker = Worker::spawn("test", LONG, Arc::default(), |now: Moment| now.0).unwrap();
        assert_eq!(worker.latest(), None);
        assert_eq!(worker.poke(seconds(1)), WorkerState::Ready);
        assert!(worker.wait_idle(LONG));
        assert_eq!(worker.latest(), Some(1_000_000));
        assert_eq!(worker.poke(seconds(2)), WorkerState::Ready);
        assert!(worker.wait_idle(LONG));
        assert_eq!(worker.take(), Some(2_000_000));
        assert_eq!(worker.take(), None);
    }

    #[test]
    fn a_job_past_its_deadline_is_hung_and_recovers() {
        let (entered, has_entered) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let live = Arc::new(AtomicUsize::new(0));
        let worker = Worker::spawn(
            "test",
            Duration::from_secs(3),
            Arc::clone(&live),
            move |_| {
                entered.send(()).unwrap();
                let _ = released.recv();
            },
        )
        .unwrap();
        assert_eq!(worker.poke(seconds(1)), WorkerState::Ready);
        has_entered.recv().unwrap();
        assert_eq!(worker.poke(seconds(2)), WorkerState::Running);
        assert_eq!(worker.poke(seconds(4)), WorkerState::Hung);
        release.send(()).unwrap();
        assert!(worker.wait_idle(LONG));
        assert_eq!(worker.poke(seconds(5)), WorkerState::Ready);
        drop(release);
        worker.stop();
        assert!(worker.wait_ended(LONG));
        assert_eq!(live.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_panicking_job_ends_its_worker_only() {
        let worker = Worker::spawn("test", LONG, Arc::default(), |_| -> u32 {
            panic!("a broken driver binding")
        })
        .unwrap();
        worker.poke(seconds(1));
        assert!(worker.wait_ended(LONG));
        assert_eq!(worker.poke(seconds(2)), WorkerState::Ended);
        assert_eq!(worker.latest(), None);
    }
}
