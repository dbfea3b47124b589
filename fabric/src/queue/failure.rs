//! Reading the error entries of a queue.
#![allow(unsafe_code)]

use libfabric_sys as sys;
use threads::lock;

use super::{CompletionKind, CompletionQueue, Failure, ReadOutcome, State};
use crate::offer::string;
use crate::{Error, ErrorKind};

impl CompletionQueue {
    #[cold]
    pub(super) fn read_failure(&mut self) -> ReadOutcome {
        // Newer libraries append fields: leave space for them.
        #[repr(C)]
        struct Roomy {
            entry: sys::fi_cq_err_entry,
            room: [u64; 8],
        }
        // SAFETY: all bytes zero is a valid entry.
        let mut roomy: Roomy = unsafe { std::mem::zeroed() };
        let queue = self.shared.handle.as_ptr();
        // SAFETY: the entry is at least as large as in the negotiated version.
        let got = unsafe { sys::fi_cq_readerr(queue, &mut roomy.entry, 0) };
        if got == -(sys::FI_EAGAIN as isize) || got == 0 {
            // The provider announced a failure but has none: do not loop.
            return ReadOutcome::Done(None);
        }
        if got < 0 {
            let error = Error::from_code("fi_cq_readerr", got as i64);
            return ReadOutcome::Done(Some(Err(self.unsolicited(error))));
        }
        let entry = &roomy.entry;
        let text = self.failure_text(entry);
        let domain = &self.shared.domain;
        let failed = |operation| {
            let mut error = Error::from_code(operation, entry.err)
                .with_provider_text(entry.prov_errno, text.clone());
            if error.kind() == ErrorKind::Truncated {
                error = error.with_detail(format!("{} bytes did not fit the buffer", entry.olen));
            }
            domain.add_provider(error)
        };
        let Some(slot) = self.table.by_context(entry.op_context) else {
            return ReadOutcome::Done(Some(Err(self.unsolicited(failed("progress")))));
        };
        let abandoned = slot.state == State::Abandoned;
        let (index, kind, token, operation) = (slot.index, slot.kind, slot.token, slot.id());
        let (member, peer) = (slot.member, slot.peer);
        let name = match kind {
            CompletionKind::Send => "fi_send",
            CompletionKind::Receive => "fi_recv",
            CompletionKind::Write => "fi_write",
            CompletionKind::Read => "fi_read",
            CompletionKind::Atomic => "fi_atomic",
            CompletionKind::RemoteWrite => "fi_writedata",
        };
        self.table.release(index);
        if abandoned {
            return ReadOutcome::Retry;
        }
        let error = failed(name).with_known_peer(self.name_of(member, peer));
        let (kind, operation) = (Some(kind), Some(operation));
        ReadOutcome::Done(Some(Err(Failure { kind, operation, token, error })))
    }

    /// The provider's own text for a failure. Layered providers look it up through an endpoint
    /// of the queue, and crash if none is left. So one is held open during the call, or the
    /// call is skipped.
    fn failure_text(&self, entry: &sys::fi_cq_err_entry) -> Option<String> {
        let _open = self.members.iter().find_map(|member| {
            let endpoint = lock(&member.endpoint);
            endpoint.is_some().then_some(endpoint)
        })?;
        let mut buffer = [0_u8; 256];
        // SAFETY: the entry was just read, the buffer's length is passed, and an
        // endpoint of the queue is open.
        unsafe {
            let text = sys::fi_cq_strerror(
                self.shared.handle.as_ptr(),
                entry.prov_errno,
                entry.err_data,
                buffer.as_mut_ptr().cast(),
                buffer.len(),
            );
            string(text)
        }
    }
}
