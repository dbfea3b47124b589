//! Ends a program that does not end by itself: waits of MPI have no deadline.

use std::time::Duration;

/// Exit code after the deadline.
const OVERDUE: i32 = 3;

/// Ends this process after `limit`; the launcher then ends the other ranks.
pub(crate) fn start(limit: Duration) {
    std::thread::spawn(move || {
        std::thread::sleep(limit);
        eprintln!("program failed: not done within {limit:?}. Set a longer --deadline");
        std::process::exit(OVERDUE);
    });
}
