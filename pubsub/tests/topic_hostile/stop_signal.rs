//! The signal by which the supervisor ends its children.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use testkit::children::wait_for_end_of_input;

const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Longer than any phase. A child ends after this time even if its input stays open.
const MAX_LIFETIME: Duration = Duration::from_secs(3600);

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
        let thread_flag = Arc::clone(&flag);
        std::thread::spawn(move || {
            wait_for_end_of_input();
            thread_flag.store(true, Relaxed);
        });
        Self { flag, deadline: Instant::now() + MAX_LIFETIME }
    }

    pub fn is_over(&self) -> bool {
        self.flag.load(Relaxed) || Instant::now() >= self.deadline
    }

    /// Sleeps, at most until the phase is over. False if the phase is over.
    pub fn sleep(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_over() {
                return !self.is_over();
            }
            std::thread::sleep(left.min(POLL_INTERVAL));
        }
    }
}
