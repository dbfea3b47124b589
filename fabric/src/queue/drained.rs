//! Entries that were read before their time.
//!
//! Some providers cannot stand an endpoint that is closed while its queue has entries that nobody
//! has read. So they are read then, by whoever closes it, and kept for the queue's owner.
#![allow(unsafe_code)]

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use libfabric_sys as sys;

use super::{BATCH, CompletionQueue, QueueShared};

/// An entry that was read before its time.
#[derive(Debug)]
pub(super) struct DrainedEntry(pub(super) sys::fi_cq_tagged_entry);

// SAFETY: plain data; its pointers are only compared, by the queue's owner.
unsafe impl Send for DrainedEntry {}

impl QueueShared {
    /// Reads what there is, and keeps it for the queue's owner: before an endpoint is closed
    /// whose provider cannot stand entries that nobody has read. Entries are few, or the owner
    /// has not looked for long.
    #[cold]
    pub(crate) fn drain_entries(&self) {
        const MAX_DRAINED: usize = 1 << 16;
        /// For what is in sockets still: of a peer that died in the middle of a write, which
        /// rxm 1.17 takes better while the endpoint is open.
        const DRAIN_TIME: Duration = Duration::from_millis(5);
        let end = Instant::now() + DRAIN_TIME;
        // A lock that this holds is poisoned by no panic.
        let mut drained = self.drained.lock().unwrap_or_else(PoisonError::into_inner);
        while drained.len() < MAX_DRAINED {
            let mut tagged = [sys::fi_cq_tagged_entry::default(); BATCH];
            let mut plain = [sys::fi_cq_data_entry::default(); BATCH];
            let buffer = match self.has_tags {
                true => tagged.as_mut_ptr().cast(),
                false => plain.as_mut_ptr().cast(),
            };
            let _turn = self
                .domain
                .deregistration_lock()
                .map(|deregistration_lock| deregistration_lock.lock_progress());
            // SAFETY: the queue is alive, and the buffer has room for so many entries of its format.
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
    /// Takes over entries that were read when an endpoint was closed.
    pub(super) fn take_drained(&mut self) -> bool {
        let mut drained = self.shared.drained.lock().unwrap_or_else(PoisonError::into_inner);
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

/// An entry of the short form in the form of those with tags.
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
