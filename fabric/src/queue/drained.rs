//! Entries that were read ahead of their owner.
//!
//! Some providers crash if an endpoint is closed while its queue has unread entries. So the
//! thread that closes it reads them, and stores them for the queue's owner.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use libfabric_sys as sys;
use threads::lock;

use super::{BATCH, CompletionQueue, QueueShared};

#[derive(Debug)]
pub(super) struct DrainedEntry(sys::fi_cq_tagged_entry);

// SAFETY: plain data; only the queue's owner uses its pointers, and only compares them.
unsafe impl Send for DrainedEntry {}

impl QueueShared {
    /// Reads the entries, which are few unless the queue's owner has not polled for long.
    #[cold]
    pub(crate) fn drain_entries(&self) {
        const MAX_DRAINED: usize = 1 << 16;
        /// Data that is still in sockets, of a peer that died during a write: rxm 1.17 handles
        /// it better while the endpoint is open.
        const DRAIN_TIME: Duration = Duration::from_millis(5);
        let end = Instant::now() + DRAIN_TIME;
        // No code under this lock panics, so it cannot be poisoned.
        let mut drained = lock(&self.drained);
        while drained.len() < MAX_DRAINED {
            let mut tagged = [sys::fi_cq_tagged_entry::default(); BATCH];
            let mut plain = [sys::fi_cq_data_entry::default(); BATCH];
            let buffer = match self.has_tags {
                true => tagged.as_mut_ptr().cast(),
                false => plain.as_mut_ptr().cast(),
            };
            let _guard = self.domain.deregistration_lock().lock_progress();
            // SAFETY: the queue is alive, and the buffer has space for this many entries of its
            // format.
            let got = unsafe { sys::fi_cq_read(self.handle.as_ptr(), buffer, BATCH) };
            let got = match usize::try_from(got) {
                Ok(got @ 1..) => got,
                _ if got == -(sys::FI_EAGAIN as isize) && Instant::now() < end => continue,
                _ => return,
            };
            if !self.has_tags {
                for (to, from) in tagged.iter_mut().zip(&plain) {
                    *to = widened(from);
                }
            }
            drained.extend(tagged.into_iter().take(got).map(DrainedEntry));
        }
    }
}

impl CompletionQueue {
    /// Takes the entries that were drained when an endpoint was closed.
    pub(super) fn take_drained(&mut self) -> bool {
        let mut drained = lock(&self.shared.drained);
        let count = drained.len().min(BATCH);
        for (to, from) in self.batch.iter_mut().zip(drained.drain(..count)) {
            *to = from.0;
        }
        drop(drained);
        self.sources.fill(sys::FI_ADDR_UNSPEC);
        (self.next, self.filled) = (0, count);
        count > 0
    }
}

/// Converts an entry of the short form to the form with tags.
pub(super) fn widened(from: &sys::fi_cq_data_entry) -> sys::fi_cq_tagged_entry {
    sys::fi_cq_tagged_entry {
        op_context: from.op_context,
        flags: from.flags,
        len: from.len,
        buf: from.buf,
        data: from.data,
        tag: 0,
    }
}
