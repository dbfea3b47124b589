//! Measurements take turns, also where each test is a process of its own: two processes that poll
//! need a core each.

use std::fs::File;
use std::path::Path;

use nix::fcntl::{Flock, FlockArg};

/// Until it is dropped nobody else measures.
pub(crate) fn alone() -> Flock<File> {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("measurements.lock");
    Flock::lock(File::create(path).unwrap(), FlockArg::LockExclusive).unwrap()
}
