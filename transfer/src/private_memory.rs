//! Memory that is private to this process and was allocated by its caller.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::ManuallyDrop;

/// Bytes of this process, which other processes cannot map.
#[derive(Debug)]
pub(crate) struct PrivateMemory {
    start: *mut u8,
    length: usize,
    /// The capacity of the vector that it was made of; None for memory that an owner keeps.
    capacity: Option<usize>,
    _owner: Option<Box<dyn fmt::Debug + Send + Sync>>,
}

// SAFETY: any thread accesses the bytes by copies through the pointer only; the caller that
// provided them keeps no reference to them.
unsafe impl Send for PrivateMemory {}
// SAFETY: as above.
unsafe impl Sync for PrivateMemory {}

impl PrivateMemory {
    pub(crate) fn of_vec(bytes: Vec<u8>) -> Self {
        let mut bytes = ManuallyDrop::new(bytes);
        let capacity = Some(bytes.capacity());
        Self { start: bytes.as_mut_ptr(), length: bytes.len(), capacity, _owner: None }
    }

    /// # Safety
    /// The bytes stay readable and writable, and unreferenced, as long as the owner exists.
    pub(crate) unsafe fn of_pointer(
        start: *mut u8,
        length: usize,
        owner: Box<dyn fmt::Debug + Send + Sync>,
    ) -> Self {
        Self { start, length, capacity: None, _owner: Some(owner) }
    }

    pub(crate) fn start(&self) -> *const u8 {
        self.start
    }

    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// The vector, if it was made of one.
    pub(crate) fn into_vec(self) -> Result<Vec<u8>, Self> {
        let Some(capacity) = self.capacity else { return Err(self) };
        let this = ManuallyDrop::new(self);
        // SAFETY: these are the parts of a vector, which is rebuilt once: `drop` does not run.
        Ok(unsafe { Vec::from_raw_parts(this.start, this.length, capacity) })
    }
}

impl Drop for PrivateMemory {
    fn drop(&mut self) {
        if let Some(capacity) = self.capacity {
            // SAFETY: as in `into_vec`; no other owner of the pointer exists.
            drop(unsafe { Vec::from_raw_parts(self.start, self.length, capacity) });
        }
    }
}
