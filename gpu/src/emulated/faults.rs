//! Faults that tests ask a emulated for.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::{COUNT, state};

/// How a emulated behaves, for all its streams in this process from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultConfig {
    /// Time that each operation takes, whatever its length.
    pub delay: Duration,
    /// Can stand-ins reach each other's memory?
    pub are_peers: bool,
}

impl Default for FaultConfig {
    fn default() -> Self {
        Self { delay: Duration::ZERO, are_peers: true }
    }
}

/// What a emulated was told.
pub(super) struct Faults {
    /// In nanoseconds.
    delay: AtomicU64,
    are_not_peers: AtomicBool,
    /// Operations until one fails; below 0 for never.
    until_failure: AtomicI64,
    refuses_words: AtomicBool,
    refuses_points: AtomicBool,
    refuses_records: AtomicBool,
    refuses_read_only: AtomicBool,
}

impl Faults {
    pub(super) const fn new() -> Self {
        Self {
            delay: AtomicU64::new(0),
            are_not_peers: AtomicBool::new(false),
            until_failure: AtomicI64::new(-1),
            refuses_words: AtomicBool::new(false),
            refuses_points: AtomicBool::new(false),
            refuses_records: AtomicBool::new(false),
            refuses_read_only: AtomicBool::new(false),
        }
    }

    pub(super) fn delay(&self) -> Duration {
        Duration::from_nanos(self.delay.load(Relaxed))
    }

    pub(super) fn fails_now(&self) -> bool {
        self.until_failure.load(Relaxed) >= 0 && self.until_failure.fetch_sub(1, Relaxed) == 0
    }

    pub(super) fn are_not_peers(&self) -> bool {
        self.are_not_peers.load(Relaxed)
    }

    pub(super) fn refuses_words(&self) -> bool {
        self.refuses_words.load(Relaxed)
    }

    pub(super) fn refuses_points(&self) -> bool {
        self.refuses_points.load(Relaxed)
    }

    pub(super) fn refuses_records(&self) -> bool {
        self.refuses_records.load(Relaxed)
    }

    pub(super) fn refuses_read_only(&self) -> bool {
        self.refuses_read_only.load(Relaxed)
    }
}

/// Makes a emulated behave so. Numbers that none has are ignored.
pub fn configure_faults(number: u32, behaviour: FaultConfig) {
    if number < COUNT {
        let faults = &state(number).faults;
        let nanoseconds = behaviour.delay.as_nanos().min(u128::from(u64::MAX)) as u64;
        faults.delay.store(nanoseconds, Relaxed);
        faults.are_not_peers.store(!behaviour.are_peers, Relaxed);
    }
}

/// Lets the emulated's next copy, fill, checksum or list of copies but `operations` fail, and
/// with it all that follow on its stream.
pub fn fail_after(number: u32, operations: u32) {
    if number < COUNT {
        state(number).faults.until_failure.store(i64::from(operations), Relaxed);
    }
}

/// Lets the emulated's driver refuse to begin the writing of words, until it is told otherwise;
/// all else goes on.
pub fn refuse_words(number: u32, refuses: bool) {
    if number < COUNT {
        state(number).faults.refuses_words.store(refuses, Relaxed);
    }
}

/// Lets the emulated's driver refuse to tell whether a stream has come past a point, until it is
/// told otherwise; all else goes on.
pub fn refuse_points(number: u32, refuses: bool) {
    if number < COUNT {
        state(number).faults.refuses_points.store(refuses, Relaxed);
    }
}

/// Lets the emulated's driver refuse to record events, until it is told otherwise; all else goes on.
pub fn refuse_records(number: u32, refuses: bool) {
    if number < COUNT {
        state(number).faults.refuses_records.store(refuses, Relaxed);
    }
}

/// Lets the emulated's driver refuse to register memory that can only be read, as devices do that
/// have no such registrations, until it is told otherwise.
pub fn refuse_read_only_registrations(number: u32, refuses: bool) {
    if number < COUNT {
        state(number).faults.refuses_read_only.store(refuses, Relaxed);
    }
}
