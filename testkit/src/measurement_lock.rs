//! Serialises measurements, also between test processes: two processes that poll need a core
//! each.

use std::fs::File;

use nix::fcntl::{Flock, FlockArg};

/// While it is held, no other test that was built into the same directory measures.
///
/// # Panics
/// The directory of the test cannot be written to.
#[must_use]
pub fn lock_measurements() -> Flock<File> {
    let path = std::env::current_exe().unwrap().with_file_name("measurements.lock");
    Flock::lock(File::create(path).unwrap(), FlockArg::LockExclusive).unwrap()
}
