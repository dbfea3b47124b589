//! Completion queues.
//!
//! A queue does more than report: it owns everything that operations in flight may
//! still touch. The provider is handed a piece of scratch space as the operation's
//! context; the slot beside it holds the memory, and is freed when the completion
//! comes, or when the endpoint is closed. Dropping the queue first changes nothing of that.
//!
//! Entries are read in batches. An entry that one call did not ask for is kept for
//! the next, so waiting for one operation loses nothing of the others.
#![allow(unsafe_code)]

mod completion;
mod drained;
mod failure;
mod read;
mod shared;
mod table;
mod wait;

pub use completion::{Completion, CompletionKind, Failure, OperationId, Outcome};
use drained::widened;
use failure::FailureRead;
pub use shared::Waker;
pub(crate) use shared::{Member, QueueShared};
pub(crate) use table::Slot;

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::os::fd::RawFd;
use std::os::raw::c_void;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use libfabric_sys as sys;

use crate::address::{AddressVector, Peer};
use crate::capabilities::EndpointKind;
use crate::choice::polling_blocks_peers;
use crate::domain::Domain;
use crate::error::{Error, ErrorKind, Result};
use crate::flags::Caps;
use crate::handle::Handle;
use crate::version::Version;
use crate::waiting::{Backoff, PollPause, WaitStrategy};
use table::{State, Table};

/// What a read answers that found nothing.
const WOULD_BLOCK: isize = -(sys::FI_EAGAIN as isize);
/// What a read answers that found a failure, which is read by another call.
const FAILURE: isize = -(crate::error::number::AVAILABLE as isize);

/// Entries taken from the provider at a time: enough to drain a burst with few
/// calls, few enough to stay in the first-level cache (16 × 48 bytes).
const BATCH: usize = 16;

/// A completion queue: posts and polls go through `&mut`, so that one owner at a
/// time does both and no lock is needed. It owns the memory of all operations in
/// flight, and keeps it until the provider lets go, even if it is dropped first.
///
/// There are three ways to get outcomes: [`poll`](Self::poll) returns at once,
/// [`wait`](Self::wait) takes the next of any operation, and
/// [`complete`](Self::complete) waits for one operation and keeps the others.
///
/// ```
/// use std::time::Duration;
/// use fabric::*;
/// let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
/// let domain = Domain::open(&offer)?;
/// let mut queue = CompletionQueue::open(&domain)?;
/// assert!(queue.poll().is_none());
/// let failure = queue.wait(Duration::from_millis(5)).unwrap_err();
/// assert_eq!(failure.error.kind(), ErrorKind::DeadlineExceeded);
/// assert!(failure.operation.is_none(), "the deadline belongs to no operation");
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug)]
pub struct CompletionQueue {
    /// Before the queue itself: what they hold of their peers is closed first.
    members: Vec<Arc<Member>>,
    shared: Arc<QueueShared>,
    /// Taken out by `drop`, and by nothing else.
    table: ManuallyDrop<Box<Table>>,
    ready: VecDeque<Outcome>,
    batch: Box<[sys::fi_cq_tagged_entry; BATCH]>,
    /// For providers without tags, which have a shorter form of entry.
    untagged: Option<Box<[sys::fi_cq_data_entry; BATCH]>>,
    sources: Box<[u64; BATCH]>,
    filled: usize,
    next: usize,
    waiting: WaitStrategy,
    pace: PollPause,
    max_pause: Duration,
    wait_fd: Option<RawFd>,
    reports_source: bool,
    /// Reading it takes [turns](crate::memory::Closing) with closing registrations.
    needs_deregistration_lock: bool,
    closed_endpoints_seen: u32,
    /// Members seen closed, whose last entries may still be in the queue.
    closed_members: Vec<u32>,
    sweep_due: bool,
    /// Entries that were asked for; 0: as many as the provider likes.
    size: usize,
}

// SAFETY: entries are plain data; contexts in them are only compared.
unsafe impl Send for CompletionQueue {}

/// How a queue is made.
#[derive(Debug, Clone, Copy, Default)]
pub struct QueueOptions {
    /// Entries that the provider shall have room for (`fi_cq_attr::size`); 0 leaves
    /// it to the provider. Keep fewer operations in flight: beyond it a queue may overrun.
    pub size: usize,
    /// How it waits. `Busy` opens the queue with `FI_WAIT_NONE`, which spares some
    /// providers the upkeep of a descriptor; all else asks for `FI_WAIT_FD` first.
    pub waiting: WaitStrategy,
}

impl CompletionQueue {
    /// Opens a queue that waits adaptively.
    ///
    /// # Errors
    /// What the provider says.
    pub fn open(domain: &Domain) -> Result<Self> {
        Self::open_with(domain, QueueOptions::default())
    }

    /// Opens a queue.
    ///
    /// # Errors
    /// What the provider says.
    pub fn open_with(domain: &Domain, options: QueueOptions) -> Result<Self> {
        let mut attributes = sys::fi_cq_attr {
            size: options.size,
            format: sys::FI_CQ_FORMAT_TAGGED,
            wait_obj: if options.waiting == WaitStrategy::Busy {
                sys::FI_WAIT_NONE
            } else {
                sys::FI_WAIT_FD
            },
            ..Default::default()
        };
        let mut queue = ptr::null_mut();
        // Not every provider has tags, and not every one can be slept on.
        let waits: &[u32] = match options.waiting {
            WaitStrategy::Busy => &[sys::FI_WAIT_NONE],
            _ => &[sys::FI_WAIT_FD, sys::FI_WAIT_NONE],
        };
        // Connected endpoints mostly have none: to ask such a provider for them first
        // would cost two sockets, which verbs loses when it refuses.
        let facts = domain.capabilities();
        let formats = match facts.endpoint {
            EndpointKind::Msg if !facts.caps.contains(Caps::TAGGED) => {
                [sys::FI_CQ_FORMAT_DATA, sys::FI_CQ_FORMAT_TAGGED]
            }
            _ => [sys::FI_CQ_FORMAT_TAGGED, sys::FI_CQ_FORMAT_DATA],
        };
        let mut code = -sys::FI_ENOSYS;
        'open: for format in formats {
            for wait in waits {
                (attributes.format, attributes.wait_obj) = (format, *wait);
                // SAFETY: the domain is alive, `queue` receives the object.
                code = unsafe {
                    sys::fi_cq_open(domain.as_ptr(), &mut attributes, &mut queue, ptr::null_mut())
                };
                if code >= 0 {
                    break 'open;
                }
            }
        }
        Error::check("fi_cq_open", i64::from(code)).map_err(|e| domain.add_provider(e))?;
        // SAFETY: just opened, and ours.
        let handle = unsafe { Handle::adopt("fi_cq_open", queue)? };
        let untagged = (attributes.format == sys::FI_CQ_FORMAT_DATA)
            .then(|| Box::new([sys::fi_cq_data_entry::default(); BATCH]));
        let mut wait_fd = None;
        if attributes.wait_obj == sys::FI_WAIT_FD {
            let mut fd = -1;
            // SAFETY: the queue is alive and was opened with a wait descriptor.
            let code = unsafe { sys::wait_descriptor(handle.as_fid(), &mut fd) };
            wait_fd = (code == 0 && fd >= 0).then_some(fd);
        }
        Ok(Self {
            shared: Arc::new(QueueShared {
                handle,
                orphaned_table: Mutex::new(None),
                closed_endpoints: AtomicU32::new(0),
                domain: domain.clone(),
                wake_up: AtomicBool::new(false),
                can_signal: wait_fd.is_some(),
                has_tags: untagged.is_none(),
                drained: Mutex::new(VecDeque::new()),
            }),
            table: ManuallyDrop::new(Box::new(Table::new())),
            ready: VecDeque::new(),
            batch: Box::new([sys::fi_cq_tagged_entry::default(); BATCH]),
            untagged,
            sources: Box::new([sys::FI_ADDR_UNSPEC; BATCH]),
            filled: 0,
            next: 0,
            waiting: options.waiting,
            max_pause: Backoff::MAX_PAUSE,
            pace: if polling_blocks_peers(&facts.provider, Version::running()) {
                PollPause::spaced()
            } else {
                PollPause::minimal()
            },
            wait_fd,
            reports_source: domain.offer().reports_source,
            needs_deregistration_lock: domain.deregistration_lock().is_some(),
            members: Vec::new(),
            closed_endpoints_seen: 0,
            closed_members: Vec::new(),
            sweep_due: false,
            size: options.size,
        })
    }

    /// Entries that it was opened for; 0: as many as the provider likes.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// The next outcome, if there is one. Also moves data where the provider
    /// leaves that to the application.
    #[inline]
    pub fn poll(&mut self) -> Option<Outcome> {
        if !self.ready.is_empty() {
            return self.ready.pop_front();
        }
        self.poll_fresh()
    }

    /// As `poll`, leaving aside what was put back.
    #[inline]
    fn poll_fresh(&mut self) -> Option<Outcome> {
        // Polls that find nothing are the most, and wait for those that do.
        if self.next == self.filled {
            let got = self.read();
            if got <= 0 {
                return self.retry_read(got);
            }
            self.fill(got as usize);
        }
        self.next_entry()
    }

    /// The next of the entries that were read, of which there is at least one.
    fn next_entry(&mut self) -> Option<Outcome> {
        let at = self.next;
        self.next += 1;
        // Built once, where it goes to: a copy just after would wait for the stores.
        let outcome = self.translate(at);
        if outcome.is_some() { outcome } else { self.poll_slowly() }
    }

    /// As `poll_fresh`, in a loop: thousands of ends that nobody waits for may come in
    /// a row.
    #[cold]
    fn poll_slowly(&mut self) -> Option<Outcome> {
        loop {
            while self.next < self.filled {
                let at = self.next;
                self.next += 1;
                let outcome = self.translate(at);
                if outcome.is_some() {
                    return outcome;
                }
            }
            let got = self.read();
            if got > 0 {
                self.fill(got as usize);
            } else if let ReadOutcome::Done(outcome) = self.handle_read_code(got) {
                return outcome;
            }
        }
    }

    /// What a read means that brought no entry.
    #[inline]
    fn retry_read(&mut self, code: isize) -> Option<Outcome> {
        let has_news = self.sweep_due
            || self.shared.closed_endpoints.load(Ordering::Relaxed) != self.closed_endpoints_seen;
        if (code == WOULD_BLOCK || code == 0) && !has_news {
            return None;
        }
        match self.handle_read_code(code) {
            ReadOutcome::Done(outcome) => outcome,
            ReadOutcome::Retry => self.poll_slowly(),
        }
    }

    /// Nothing, or an endpoint left, or something failed.
    #[cold]
    fn handle_read_code(&mut self, code: isize) -> ReadOutcome {
        if code == WOULD_BLOCK || code == 0 {
            if self.take_drained() {
                return ReadOutcome::Retry;
            }
            if self.shared.closed_endpoints.load(Ordering::Relaxed) == self.closed_endpoints_seen {
                if self.sweep_due {
                    self.sweep();
                }
                return ReadOutcome::Done(self.ready.pop_front());
            }
            // Entries of the endpoints that left may have come in since the read:
            // sweep those that are known to have left by now, and no others, at
            // the next empty read.
            self.closed_endpoints_seen = self.shared.closed_endpoints.load(Ordering::Acquire);
            for (number, member) in self.members.iter().enumerate() {
                if member.closed.load(Ordering::Acquire) {
                    self.closed_members.push(number as u32);
                }
            }
            self.sweep_due = true;
            return ReadOutcome::Retry;
        }
        if code != FAILURE {
            let error = Error::from_code("fi_cq_read", code as i64);
            return ReadOutcome::Done(Some(Err(
                self.unsolicited(self.shared.domain.add_provider(error))
            )));
        }
        match self.read_failure() {
            FailureRead::Failure(failure) => ReadOutcome::Done(Some(Err(*failure))),
            FailureRead::Abandoned => ReadOutcome::Retry,
            // It said there was one, and there is none: no loop over that.
            FailureRead::Nothing => ReadOutcome::Done(None),
        }
    }

    /// Where the provider writes entries, in the form it has.
    #[inline]
    fn buffer(&mut self) -> *mut c_void {
        match &mut self.untagged {
            Some(entries) => entries.as_mut_ptr().cast(),
            None => self.batch.as_mut_ptr().cast(),
        }
    }

    /// Takes note of entries that the provider wrote.
    #[inline]
    fn fill(&mut self, count: usize) {
        self.next = 0;
        self.filled = count.min(BATCH);
        if self.untagged.is_some() {
            self.widen();
        }
    }

    /// Gives entries without tags the form of those with.
    #[cold]
    fn widen(&mut self) {
        if let Some(entries) = &self.untagged {
            for (to, from) in self.batch.iter_mut().zip(entries.iter()).take(self.filled) {
                *to = widened(from);
            }
        }
    }

    #[inline]
    fn table(&mut self) -> &mut Table {
        &mut self.table
    }

    /// None: the end of an operation nobody waits for any more.
    #[inline(always)]
    fn translate(&mut self, at: usize) -> Option<Outcome> {
        let (entry, source) = (&self.batch[at], self.sources[at]);
        let (flags, length, tag) = (entry.flags, entry.len, entry.tag);
        let is_receive = flags & sys::FI_RECV != 0;
        let has_data = flags & sys::FI_REMOTE_CQ_DATA != 0;
        let data = has_data.then_some(entry.data);
        // An immediate that came with a write: the receive bit is clear
        // (providers differ in which other bits they set).
        let is_arrival = has_data && !is_receive;
        let Some(info) = self.table.take_info(entry.op_context) else {
            if !is_arrival {
                log_unknown_completion(flags);
                return None;
            }
            return Some(Ok(Completion {
                kind: CompletionKind::RemoteWrite,
                operation: None,
                token: 0,
                length,
                data,
                tag,
                source,
            }));
        };
        // Only a receive can be used up by a peer's immediate.
        let kind = if is_arrival && info.kind == CompletionKind::Receive {
            CompletionKind::RemoteWrite
        } else {
            info.kind
        };
        // A peer's data is news even if the receive it used up was given up.
        if info.is_abandoned && kind != CompletionKind::RemoteWrite {
            return None;
        }
        // sockets repeats the immediate to the one who sent it.
        let is_ours = matches!(kind, CompletionKind::Receive | CompletionKind::RemoteWrite);
        Some(Ok(Completion {
            kind,
            operation: Some(info.operation),
            token: info.token,
            length,
            data: if is_ours { data } else { None },
            tag,
            source,
        }))
    }

    fn unsolicited(&self, error: Error) -> Failure {
        Failure { kind: None, operation: None, token: 0, error }
    }

    /// Releases what endpoints that are closed left behind.
    #[cold]
    fn sweep(&mut self) {
        self.sweep_due = false;
        for number in std::mem::take(&mut self.closed_members) {
            for index in self.table().of_member(number) {
                let Some(slot) = self.table().slot(index) else {
                    continue;
                };
                let (state, kind, token, peer) = (slot.state, slot.kind, slot.token, slot.peer);
                let operation = slot.id();
                self.table().release(index);
                if state == State::InFlight {
                    let mut error = self.shared.domain.add_provider(Error::new(
                        ErrorKind::Closed,
                        "closing an endpoint",
                        "the operation was still in flight",
                    ));
                    if let Some(name) = self.name_of(number, peer) {
                        error = error.with_peer(name);
                    }
                    self.ready.push_back(Err(Failure {
                        kind: Some(kind),
                        operation: Some(operation),
                        token,
                        error,
                    }));
                }
            }
        }
    }

    /// Operations that were posted and have not completed.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.table.in_flight()
    }

    /// Operations that were given up and whose memory is still kept.
    #[must_use]
    pub fn quarantined(&self) -> usize {
        self.table.abandoned()
    }

    /// What other threads wake a sleeper in this queue with.
    #[must_use]
    pub fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.shared))
    }

    /// The domain it belongs to.
    #[must_use]
    pub fn domain(&self) -> &Domain {
        &self.shared.domain
    }

    /// Makes progress while a post waits for room; what completes stays for `poll`.
    pub(crate) fn progress(&mut self) {
        for _ in 0..BATCH {
            match self.poll_fresh() {
                Some(outcome) => self.ready.push_back(outcome),
                None => break,
            }
        }
    }

    /// The address of the peer of a member's operation, for messages.
    #[cold]
    fn name_of(&self, member: u32, peer: Peer) -> Option<String> {
        self.members.get(member as usize)?.name_of(peer)
    }

    pub(crate) fn join(
        &mut self,
        endpoint: *mut sys::fid,
        addresses: Option<AddressVector>,
    ) -> (u32, Arc<Member>) {
        let member = Arc::new(Member {
            endpoint: Mutex::new(Some(endpoint as usize)),
            closed: AtomicBool::new(false),
            addresses,
            connected_to: OnceLock::new(),
        });
        // A place whose endpoint is closed and swept can be taken again.
        for number in 0..self.members.len() {
            if self.members[number].closed.load(Ordering::Acquire)
                && !self.closed_members.contains(&(number as u32))
                && self.closed_endpoints_seen
                    == self.shared.closed_endpoints.load(Ordering::Acquire)
                && self.table.of_member(number as u32).is_empty()
            {
                self.members[number] = Arc::clone(&member);
                return (number as u32, member);
            }
        }
        self.members.push(Arc::clone(&member));
        ((self.members.len() - 1) as u32, member)
    }

    #[inline]
    pub(crate) fn is(&self, shared: &Arc<QueueShared>) -> bool {
        Arc::ptr_eq(&self.shared, shared)
    }

    pub(crate) fn shared_handle(&self) -> Arc<QueueShared> {
        Arc::clone(&self.shared)
    }

    /// Takes a slot for an operation that is about to be posted.
    #[inline]
    pub(crate) fn take(
        &mut self,
        member: u32,
        kind: CompletionKind,
        peer: Peer,
        token: u64,
    ) -> Result<&mut Slot> {
        match self.table().take() {
            Some(slot) => {
                slot.member = member;
                slot.kind = kind;
                slot.peer = peer;
                slot.token = token;
                Ok(slot)
            }
            None => Err(Error::new(
                ErrorKind::ResourceExhausted,
                "post operation",
                "a million operations are in flight on this queue",
            )),
        }
    }

    /// Puts into a slot in flight what must stay alive.
    pub(crate) fn keep(&mut self, id: OperationId, keep: impl FnOnce(&mut Slot)) {
        if let Some(slot) = self.table().by_id(id) {
            keep(slot);
        }
    }

    /// Gives back the slot of an operation that could not be posted.
    pub(crate) fn put_back(&mut self, index: u32) {
        self.table().release(index);
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        if self.shared.handle.is_inherited() {
            // A forked child: the operations are the parent's.
            return;
        }
        // Endpoints may outlive their queue's owner: then the memory of their
        // operations must live on until they are closed.
        // SAFETY: nothing uses the table after this.
        let table = unsafe { ManuallyDrop::take(&mut self.table) };
        *self.shared.orphaned_table.lock().unwrap_or_else(PoisonError::into_inner) = Some(table);
    }
}

#[cold]
fn log_unknown_completion(flags: u64) {
    tracing::debug!(flags, "dropped the completion of an unknown operation");
}

/// What came of a closer look at a read that brought no entry.
enum ReadOutcome {
    /// This, or nothing.
    Done(Option<Outcome>),
    /// Nothing that anybody waits for; there may be more.
    Retry,
}
