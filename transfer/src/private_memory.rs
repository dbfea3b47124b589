//! Memory of this process alone, which its owner had before.
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;

use gpu::HostMapping;

/// Bytes of this process, which other processes cannot map.
#[derive(Debug)]
pub(crate) struct PrivateMemory {
    start: *mut u8,
    length: usize,
    /// The capacity of the vector that they came in; None: they stay the caller's.
    capacity: Option<usize>,
}

// SAFETY: the bytes are reached by copies through the pointer only, from whatever thread; whoever
// gave them away keeps no reference to them.
unsafe impl Send for PrivateMemory {}
// SAFETY: as above.
unsafe impl Sync for PrivateMemory {}

impl PrivateMemory {
    pub(crate) fn of_vec(bytes: Vec<u8>) -> Self {
        let mut bytes = ManuallyDrop::new(bytes);
        let capacity = Some(bytes.capacity());
        Self { start: bytes.as_mut_ptr(), length: bytes.len(), capacity }
    }

    /// # Safety
    /// The bytes can be read and written as long as this lives, and there are no references to
    /// them meanwhile.
    pub(crate) unsafe fn of_pointer(start: *mut u8, length: usize) -> Self {
        Self { start, length, capacity: None }
    }

    pub(crate) fn start(&self) -> *const u8 {
        self.start
    }

    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// The vector, if they came in one.
    pub(crate) fn into_vec(self) -> Result<Vec<u8>, Self> {
        let Some(capacity) = self.capacity else { return Err(self) };
        let this = ManuallyDrop::new(self);
        // SAFETY: these are the parts of a vector, which is made of them again once: `drop` does
        // not run.
        Ok(unsafe { Vec::from_raw_parts(this.start, this.length, capacity) })
    }
}

impl Drop for PrivateMemory {
    fn drop(&mut self) {
        if let Some(capacity) = self.capacity {
            // SAFETY: as in `into_vec`; nobody has the pointer any more.
            drop(unsafe { Vec::from_raw_parts(self.start, self.length, capacity) });
        }
    }
}

/// The same for a device, as long as that has it registered.
#[derive(Debug)]
pub(crate) struct PinnedPrivateMemory(pub(crate) std::sync::Arc<PrivateMemory>);

// SAFETY: the bytes stay where they are as long as this has its part of them.
unsafe impl HostMapping for PinnedPrivateMemory {
    fn address(&self) -> u64 {
        self.0.start as u64
    }

    fn length(&self) -> u64 {
        self.0.length as u64
    }
}
