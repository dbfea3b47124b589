//! Faults that tests inject into an emulated device.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::{COUNT, Fault, state};

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
    /// The number of operations until one fails; below 0: none fails.
    until_failure: AtomicI64,
    /// One for each [`Fault`].
    switches: [AtomicBool; 7],
}

impl Faults {
    pub(super) const fn new() -> Self {
        Self {
            delay: AtomicU64::new(0),
            until_failure: AtomicI64::new(-1),
            switches: [const { AtomicBool::new(false) }; 7],
        }
    }

    pub(super) fn delay(&self) -> Duration {
        Duration::from_nanos(self.delay.load(Relaxed))
    }

    pub(super) fn fails_now(&self) -> bool {
        self.until_failure.load(Relaxed) >= 0 && self.until_failure.fetch_sub(1, Relaxed) == 0
    }

    pub(super) fn has(&self, fault: Fault) -> bool {
        self.switches[fault as usize].load(Relaxed)
    }

    fn switch(&self, fault: Fault, is_on: bool) {
        self.switches[fault as usize].store(is_on, Relaxed);
    }
}

/// Sets the behaviour of an emulated device. Unknown numbers are ignored.
pub fn configure_faults(number: u32, behaviour: FaultConfig) {
    if number < COUNT {
        let faults = &state(number).faults;
        let nanoseconds = behaviour.delay.as_nanos().min(u128::from(u64::MAX)) as u64;
        faults.delay.store(nanoseconds, Relaxed);
        faults.switch(Fault::NoPeers, !behaviour.are_peers);
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
        state(number).faults.switch(Fault::Words, refuses);
    }
}

/// Lets the device's driver refuse to query whether a stream has passed a point, until it is
/// switched off; other operations work.
pub fn refuse_points(number: u32, refuses: bool) {
    if number < COUNT {
        state(number).faults.switch(Fault::Points, refuses);
    }
}

/// Lets the device's driver refuse to record events, until it is switched off; other operations
/// work.
pub fn refuse_records(number: u32, refuses: bool) {
    if number < COUNT {
        state(number).faults.switch(Fault::Records, refuses);
    }
}

/// Lets the device's driver refuse to register read-only memory, as some devices do, until it
/// is switched off.
pub fn refuse_read_only_registrations(number: u32, refuses: bool) {
    if number < COUNT {
        state(number).faults.switch(Fault::ReadOnly, refuses);
    }
}

/// Lets the device's driver refuse to flush remote writes, until it is switched off.
pub fn refuse_flushes(number: u32, refuses: bool) {
    if number < COUNT {
        state(number).faults.switch(Fault::Flushes, refuses);
    }
}

/// Hides the device from this process, as `CUDA_VISIBLE_DEVICES` hides one of CUDA, until it is
/// shown again. Devices that are open stay so.
pub fn hide_device(number: u32, hides: bool) {
    if number < COUNT {
        state(number).faults.switch(Fault::Hidden, hides);
    }
}

/// How often remote writes to the device were flushed in this process.
#[must_use]
pub fn flushes(number: u32) -> u64 {
    if number < COUNT { state(number).flushes.load(Relaxed) } else { 0 }
}
