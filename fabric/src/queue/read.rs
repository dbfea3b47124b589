//! Reading a queue.
#![allow(unsafe_code)]

use std::sync::Arc;

use libfabric_sys as sys;

use super::{BATCH, CompletionQueue};

impl CompletionQueue {
    #[inline]
    pub(super) fn read(&mut self) -> isize {
        if self.takes_turns {
            return self.read_in_turn();
        }
        self.read_now()
    }

    #[cold]
    fn read_in_turn(&mut self) -> isize {
        let shared = Arc::clone(&self.shared);
        let _turn = shared.domain.closing().map(|closing| closing.turn());
        self.read_now()
    }

    #[inline]
    fn read_now(&mut self) -> isize {
        let queue = self.shared.handle.as_ptr();
        let buffer = self.buffer();
        // SAFETY: the buffers have room for BATCH entries of the format that the
        // queue was opened with.
        unsafe {
            if self.tells_source {
                sys::fi_cq_readfrom(queue, buffer, BATCH, self.sources.as_mut_ptr())
            } else {
                sys::fi_cq_read(queue, buffer, BATCH)
            }
        }
    }
}
