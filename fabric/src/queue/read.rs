//! Reading a queue.
#![allow(unsafe_code)]

use std::sync::Arc;

use libfabric_sys as sys;

use super::{BATCH, CompletionQueue};

impl CompletionQueue {
    #[inline]
    pub(super) fn read(&mut self) -> isize {
        if self.needs_deregistration_lock {
            return self.read_with_lock();
        }
        self.read_entries()
    }

    #[cold]
    fn read_with_lock(&mut self) -> isize {
        let shared = Arc::clone(&self.shared);
        let _guard = shared.domain.deregistration_lock().lock_progress();
        self.read_entries()
    }

    #[inline]
    fn read_entries(&mut self) -> isize {
        let queue = self.shared.handle.as_ptr();
        let buffer = self.buffer();
        // SAFETY: the buffers have space for BATCH entries of the queue's format.
        unsafe {
            if self.reports_source {
                sys::fi_cq_readfrom(queue, buffer, BATCH, self.sources.as_mut_ptr())
            } else {
                sys::fi_cq_read(queue, buffer, BATCH)
            }
        }
    }
}
