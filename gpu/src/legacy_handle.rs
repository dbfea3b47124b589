//! Legacy handles: 64 bytes that name `cuMemAlloc` memory of another process.
//!
//! A process may open such a handle once. Opening it again fails, and closing it while it is in
//! use breaks its users. So a table counts the users of each allocation, and closes it with the
//! last one.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use threads::lock;

use crate::driver::DeviceDriver;
use crate::error::{Error, ErrorKind, Result};

/// A range of another process's allocation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct LegacyHandle {
    /// The driver's handle of the allocation.
    pub bytes: [u8; 64],
    /// The offset of the memory in the allocation, in bytes.
    pub offset: u64,
    /// Length of the memory in bytes.
    pub length: u64,
}

impl fmt::Debug for LegacyHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LegacyHandle({} bytes at {})", self.length, self.offset)
    }
}

/// Allocations that are open for one device of this process.
#[derive(Debug, Default)]
pub(crate) struct Table {
    open: HashMap<[u8; 64], Entry>,
}

#[derive(Debug)]
struct Entry {
    address: u64,
    length: u64,
    users: u64,
    /// A thread is going to close it, unless it gets users before.
    is_unused: bool,
}

/// Handles that this process exported. A peer may send them back; they must not be taken for
/// another process's, whatever process id they contain.
static OWN_HANDLES: Mutex<BTreeSet<[u8; 64]>> = Mutex::new(BTreeSet::new());

pub(crate) fn remember_own_handle(bytes: [u8; 64]) {
    lock(&OWN_HANDLES).insert(bytes);
}

/// Number of open handles in the whole process.
static OPEN: AtomicU64 = AtomicU64::new(0);

/// The number of legacy handles that this process has open.
#[must_use]
pub fn open_legacy_handles() -> u64 {
    OPEN.load(Ordering::Relaxed)
}

impl Table {
    /// Adds a user of another process's allocation, and opens it if it is not open. Returns its
    /// address and length.
    pub(crate) fn open(
        &mut self,
        bytes: [u8; 64],
        driver: &dyn DeviceDriver,
    ) -> Result<(u64, u64)> {
        self.acquire(bytes, || {
            let opened = driver.legacy_open(bytes);
            if opened.is_err() && lock(&OWN_HANDLES).contains(&bytes) {
                let detail = "it is cudaMalloc memory of this process, which only others open";
                return Err(Error::new("open legacy handle", ErrorKind::InvalidHandle, detail));
            }
            let otherwise = || with_other_pid(bytes, std::process::id());
            match opened.is_err().then(otherwise).flatten() {
                Some(bytes) => driver.legacy_open(bytes).or(opened),
                None => opened,
            }
        })
    }

    /// Adds a user of an allocation, and calls `open` if it is not open. Returns its address
    /// and length.
    fn acquire(
        &mut self,
        bytes: [u8; 64],
        open: impl FnOnce() -> Result<(u64, u64)>,
    ) -> Result<(u64, u64)> {
        if let Some(entry) = self.open.get_mut(&bytes) {
            entry.users += 1;
            return Ok((entry.address, entry.length));
        }
        let (address, length) = open()?;
        OPEN.fetch_add(1, Ordering::Relaxed);
        self.open.insert(bytes, Entry { address, length, users: 1, is_unused: false });
        Ok((address, length))
    }

    /// Removes a user; true for the last one, which must [close](Self::close) the allocation,
    /// once.
    pub(crate) fn release(&mut self, bytes: &[u8; 64]) -> bool {
        self.open.get_mut(bytes).is_some_and(|entry| {
            entry.users -= 1;
            entry.users == 0 && !std::mem::replace(&mut entry.is_unused, true)
        })
    }

    /// The address to close, unless the allocation was closed already or has new users.
    pub(crate) fn close(&mut self, bytes: &[u8; 64]) -> Option<u64> {
        let entry = self.open.get_mut(bytes)?;
        entry.is_unused = false;
        if entry.users > 0 {
            return None;
        }
        OPEN.fetch_sub(1, Ordering::Relaxed);
        self.open.remove(bytes).map(|entry| entry.address)
    }
}

/// The handle with another process id, if it contains the id of this process. CUDA refuses to
/// open handles of the own process, and recognises them by the process id alone (seen with driver
/// 580): two containers whose processes have the same id could not open each other's handles.
/// Nothing else depends on the id.
fn with_other_pid(mut bytes: [u8; 64], own: u32) -> Option<[u8; 64]> {
    const PID_BYTES: std::ops::Range<usize> = 8..12;
    /// Above the largest process id of Linux.
    const UNUSED_PID: u32 = 1 << 30;
    let is_own = lock(&OWN_HANDLES).contains(&bytes);
    if is_own || bytes[PID_BYTES] != own.to_ne_bytes() {
        return None;
    }
    bytes[PID_BYTES].copy_from_slice(&(own | UNUSED_PID).to_ne_bytes());
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_own_process_id_is_replaced() {
        let mut bytes = [7; 64];
        assert_eq!(with_other_pid(bytes, 1), None);
        bytes[8..12].copy_from_slice(&1_u32.to_ne_bytes());
        let other = with_other_pid(bytes, 1).unwrap();
        assert_eq!((other[..8].to_vec(), other[12..].to_vec()), (vec![7; 8], vec![7; 52]));
        assert_ne!(other[8..12], bytes[8..12]);
        assert_eq!(with_other_pid(other, 1), None);
        // A handle that this process made after all.
        remember_own_handle(bytes);
        assert_eq!(with_other_pid(bytes, 1), None);
    }

    #[test]
    fn allocation_is_opened_once_and_closed_by_its_last_user() {
        let mut table = Table::default();
        let bytes = [7; 64];
        assert_eq!(table.acquire(bytes, || Ok((0x1000, 64))).unwrap(), (0x1000, 64));
        let again = table.acquire(bytes, || panic!("the allocation is open"));
        assert_eq!(again.unwrap(), (0x1000, 64));
        assert!(!table.release(&bytes));
        assert_eq!(table.close(&bytes), None, "the allocation has a user");
        assert!(table.release(&bytes));
        // Opened again before it was closed.
        table.acquire(bytes, || panic!("the allocation is still open")).unwrap();
        assert_eq!(table.close(&bytes), None);
        assert!(table.release(&bytes));
        assert_eq!(table.close(&bytes), Some(0x1000));
        assert_eq!(table.close(&bytes), None, "nothing is closed twice");
        // A failed open is not counted.
        let refused = || Err(Error::new("test", ErrorKind::InvalidHandle, ""));
        assert!(table.acquire(bytes, refused).is_err());
        assert!(table.acquire(bytes, || Ok((0x2000, 64))).is_ok(), "a failed open can be retried");
    }
}
