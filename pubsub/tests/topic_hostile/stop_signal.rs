//! When a child of the supervisor is to end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use testkit::children::wait_for_end_of_input;

/// Between two looks whether the phase is over.
const LOOK: Duration = Duration::from_millis(20);
/// Longer than any phase: a child ends then even if its input stays open.
const LONGEST: Duration = Duration::from_secs(3600);

/// The end of the phase: the supervisor closes the input of this process.
#[derive(Debug, Clone)]
pub struct StopSignal {
    flag: Arc<AtomicBool>,
    deadline: Instant,
}

impl StopSignal {
    /// Watches the input of this process, in a thread that ends with the process.
    pub fn watch() -> Self {
        let flag = Arc::new(AtomicBool::new(false));
        let of_thread = Arc::clone(&flag);
        std::thread::spawn(move || {
            wait_for_end_of_input();
            of_thread.store(true, Relaxed);
        });
        Self { flag, deadline: Instant::now() + LONGEST }
    }

    pub fn is_over(&self) -> bool {
        self.flag.load(Relaxed) || Instant::now() >= self.deadline
    }

    /// Sleeps for so long, or until the phase is over. True while the phase goes on.
    pub fn sleep(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_over() {
                return !self.is_over();
            }
            std::thread::sleep(left.min(LOOK));
        }
    }
}
