//! Keeps idle cores from sleeping while short times are measured.
//!
//! A core that has gone to sleep takes tens of microseconds to wake, a virtual one often more than a hop takes. How often that is met
//! depends on where the kernel puts which thread, so it would be the kernel's habits that are compared.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Gives way to everything else.
const NICE_LAST: i32 = 19;

/// One thread per core that does nothing, at the lowest priority, until this is dropped.
pub(super) struct Awake {
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Awake {
    pub(super) fn start() -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spin = |_| {
            let is_over = Arc::clone(&is_over);
            std::thread::spawn(move || {
                // On Linux a priority is the thread's own. Without it this thread would be in the way.
                if rustix::process::setpriority_process(None, NICE_LAST).is_err() {
                    return;
                }
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        };
        let threads = (0..cores).map(spin).collect();
        Self { is_over, threads }
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A panic there has been reported already.
            let _ = thread.join();
        }
    }
}
