//! Faults that tests inject into an emulated device.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::{COUNT, state};

/// The behaviour of an emulated device, for all its streams in this process from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultConfig {
    /// Time that each operation takes, whatever its length.
    pub delay: Duration,
    /// Can emulated devices access each other's memory?
    pub are_peers: bool,
}

impl Default for FaultConfig {
    fn default() -> Self {
        Self { delay: Duration::ZERO, are_peers: true }
    }
}

/// The injected faults of an emulated device.
pub(super) struct Faults {
    /// In nanoseconds.
    delay: AtomicU64,
    are_not_peers: AtomicBool,
    /// The number of operations until one fails; below 0: none fails.
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

/// Sets the behaviour of an emulated device. Unknown numbers are ignored.
pub fn configure_faults(number: u32, behaviour: FaultConfig) {
    if number < COUNT {
        let faults = &state(number).faults;
        let nanoseconds = behaviour.delay.as_nanos().min(u128::from(u64::MAX)) as u64;
        faults.delay.store(nanoseconds, Relaxed);
        faults.are_not_peers.store(!behaviour.are_peers, Relaxed);
    }
}

/// Lets the device's next copy, fill, checksum or list of copies fail after `operations`
/// successful ones, and with it all later operations of its stream.
pub fn fail_after(number: u32, operations: u32) {
    if number < COUNT {
        state(number).faults.until_failure.store(i64::from(operations), Relaxed);
    }
}

/// Lets the device's driver refuse to write words, until it is switched off; other operations
/// work.
pub fn refuse_words(number: u32, refuses: bool) {
    if number < COUNT {
        state(number).faults.refuses_words.store(refuses, Relaxed);
    }
}

/// Lets the device's driver refuse to query whether a stream has passed a point, until it is
/// switched off; other operations work.
pub fn refuse_points(number: u32, refuses: bool) {
    if number < COUNT {
        state(number).faults.refuses_points.store(refuses, Relaxed);
    }
}

/// Lets the device's driver refuse to record events, until it is switched off; other operations
/// work.
pub fn refuse_records(number: u32, refuses: bool) {
    if number < COUNT {
        state(number).faults.refuses_records.store(refuses, Relaxed);
    }
}

/// Lets the device's driver refuse to register read-only memory, as some devices do, until it
/// is switched off.
pub fn refuse_read_only_registrations(number: u32, refuses: bool) {
    if number < COUNT {
        state(number).faults.refuses_read_only.store(refuses, Relaxed);
    }
}
