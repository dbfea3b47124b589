//! Measurements take turns, also where each test is a process of its own: two processes that poll
//! need a core each.

use std::fs::File;

use nix::fcntl::{Flock, FlockArg};

/// Until it is dropped nobody else measures, of the tests that were built into the same directory.
///
/// # Panics
/// The directory of the test cannot be written to.
#[must_use]
pub fn lock_measurements() -> Flock<File> {
    let path = std::env::current_exe().unwrap().with_file_name("measurements.lock");
    Flock::lock(File::create(path).unwrap(), FlockArg::LockExclusive).unwrap()
}
