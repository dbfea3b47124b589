//! Completion queues.
//!
//! Entries are read in batches. An entry that a call did not ask for is stored for the next
//! call, so waiting for one operation loses no others.
#![allow(unsafe_code)]

mod completion;
mod drained;
mod failure;
mod shared;
mod table;
mod wait;

pub use completion::{Completion, CompletionKind, Failure, Outcome};
use drained::{DrainedEntry, widened};
use threads::lock;

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::num::NonZeroU32;
use std::os::fd::RawFd;
use std::os::raw::c_void;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use libfabric_sys as sys;

use crate::handle::Handle;
use crate::memory::MappedKey;
use crate::quirks::polling_blocks_peers;
use crate::waiting::{Backoff, PollPause};
use crate::{
    AddressVector, Caps, Domain, EndpointKind, Error, ErrorKind, MemoryRegion, Peer, Result,
    Version, WaitStrategy,
};
use table::Table;

/// The result of a read that found nothing.
const WOULD_BLOCK: isize = -(sys::FI_EAGAIN as isize);
/// The result of a read that found a failure, which another call reads.
const FAILURE: isize = -(crate::error::number::AVAILABLE as isize);

/// Entries read from the provider at a time: enough to drain a burst with few calls, few enough
/// to stay in the first-level cache (16 × 48 bytes).
const BATCH: usize = 16;

/// A completion queue. Posts and polls take `&mut`, so that one owner at a time does both
/// without a lock. It owns the memory of all operations in flight until the provider releases
/// it, even if the queue is dropped first.
///
/// There are three ways to get results: [`poll`](Self::poll) returns at once,
/// [`wait`](Self::wait) takes the next result of any operation, and
/// [`complete`](Self::complete) waits for one operation and stores the others.
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
    /// Declared before the queue itself: the address vectors of the members are closed first.
    members: Vec<Arc<Member>>,
    shared: Arc<QueueShared>,
    /// Only `drop` takes it out.
    table: ManuallyDrop<Box<Table>>,
    ready: VecDeque<Outcome>,
    batch: Box<[sys::fi_cq_tagged_entry; BATCH]>,
    /// True for providers without tags, which have a shorter form of entry.
    untagged: Option<Box<[sys::fi_cq_data_entry; BATCH]>>,
    sources: Box<[u64; BATCH]>,
    filled: usize,
    next: usize,
    waiting: WaitStrategy,
    pace: PollPause,
    max_pause: Duration,
    wait_fd: Option<RawFd>,
    reports_source: bool,
    /// Reading it is guarded by the [deregistration lock](Domain::deregistration_lock).
    needs_deregistration_lock: bool,
    closed_endpoints_seen: u32,
    /// Closed members, whose last entries may still be in the queue.
    closed_members: Vec<u32>,
    sweep_due: bool,
    /// A read of the queue itself failed since [`complete`](Self::complete) reset this.
    is_broken: bool,
    /// Requested entries; 0: the provider's default.
    size: usize,
}

// SAFETY: entries are plain data; contexts in them are only compared.
unsafe impl Send for CompletionQueue {}

/// The options of a queue.
#[derive(Debug, Clone, Copy, Default)]
pub struct QueueOptions {
    /// Capacity in entries that the provider must have (`fi_cq_attr::size`); 0 leaves it to the
    /// provider. Keep fewer operations in flight: beyond it a queue may overrun.
    pub size: usize,
    /// How the queue waits. `Busy` opens it with `FI_WAIT_NONE`, which saves some providers the
    /// cost of a file descriptor; otherwise `FI_WAIT_FD` is tried first.
    pub waiting: WaitStrategy,
}

/// The part of a queue that its endpoints hold.
#[derive(Debug)]
pub(crate) struct QueueShared {
    handle: Handle<sys::fid_cq>,
    /// The operations that were in flight when the queue's owner dropped it. Freed with the
    /// queue itself: after the last endpoint is closed.
    orphaned_table: Mutex<Option<Box<Table>>>,
    closed_endpoints: AtomicU32,
    domain: Domain,
    has_tags: bool,
    /// Entries that were drained when an endpoint was closed, for the next reader of the queue.
    drained: Mutex<VecDeque<DrainedEntry>>,
    wake_up: AtomicBool,
    /// Was the queue opened with a wait object? libfabric 1.17 crashes if a queue without one
    /// is signalled.
    can_signal: bool,
}

/// Wakes the thread that sleeps in a completion queue, from any thread.
///
/// ```
/// use fabric::*;
/// # let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
/// # let domain = Domain::open(&offer)?;
/// let queue = CompletionQueue::open(&domain)?;
/// let waker = queue.waker();
/// std::thread::spawn(move || match waker.wake() {
///     Ok(()) => {}
///     Err(refused) => assert_eq!(refused.kind(), ErrorKind::NotSupported),
/// });
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Waker(Arc<QueueShared>);

/// One endpoint, as its queues see it.
#[derive(Debug)]
pub(crate) struct Member {
    /// The address of the endpoint, to cancel receives on; none once it is being closed.
    endpoint: Mutex<Option<usize>>,
    closed: AtomicBool,
    /// Used to name the peers of failed operations.
    addresses: Option<AddressVector>,
    /// The peer of a connected endpoint, once it is known.
    connected_to: OnceLock<String>,
}

/// Names one posted operation, within the queue that reports it. The name is stale after the
/// result was returned: a later operation in the same slot has another name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OperationId {
    index: u32,
    generation: NonZeroU32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    InFlight,
    /// The caller stopped waiting; the memory stays until the provider releases it.
    Abandoned,
}

/// An object that must live until an operation is done.
#[allow(dead_code)] // retained, never read
enum Retained {
    Region(MemoryRegion),
    MappedKey(Arc<MappedKey>),
}

/// Objects after the first. At most four local buffers, a result, a comparand, and a mapped
/// key.
const MAX_RETAINED: usize = 6;

/// Ordered so that the fields of most operations are in one cache line.
#[repr(C)]
pub(crate) struct Slot {
    /// The operation's context: the address of the entry.
    context: *mut c_void,
    token: u64,
    peer: Peer,
    /// Never zero, so that an optional operation id needs no extra space.
    generation: NonZeroU32,
    index: u32,
    /// The only retained object of most operations.
    region: Option<MemoryRegion>,
    member: u32,
    state: State,
    kind: CompletionKind,
    retained_count: u8,
    keep: [Option<Retained>; MAX_RETAINED],
}

/// The fields of an operation that its completion needs.
struct SlotInfo {
    operation: OperationId,
    token: u64,
    kind: CompletionKind,
    is_abandoned: bool,
}

impl CompletionQueue {
    /// Opens a queue that waits adaptively.
    ///
    /// # Errors
    /// The provider's error.
    pub fn open(domain: &Domain) -> Result<Self> {
        Self::open_with(domain, QueueOptions::default())
    }

    /// Opens a queue.
    ///
    /// # Errors
    /// The provider's error.
    pub fn open_with(domain: &Domain, options: QueueOptions) -> Result<Self> {
        let mut attributes = sys::fi_cq_attr { size: options.size, ..Default::default() };
        // Not every provider supports tags, or waiting on a file descriptor.
        let waits: &[u32] = match options.waiting {
            WaitStrategy::Busy => &[sys::FI_WAIT_NONE],
            _ => &[sys::FI_WAIT_FD, sys::FI_WAIT_NONE],
        };
        // Most providers of connected endpoints have no tags. Trying tags first would cost two
        // sockets, which verbs leaks when it refuses.
        let facts = domain.capabilities();
        let formats = match facts.endpoint {
            EndpointKind::Msg if !facts.caps.contains(Caps::TAGGED) => {
                [sys::FI_CQ_FORMAT_DATA, sys::FI_CQ_FORMAT_TAGGED]
            }
            _ => [sys::FI_CQ_FORMAT_TAGGED, sys::FI_CQ_FORMAT_DATA],
        };
        let forms = formats.iter().flat_map(|format| waits.iter().map(|wait| (*format, *wait)));
        // SAFETY: the domain is alive; the object is owned here.
        let handle = unsafe {
            Handle::open("fi_cq_open", &facts.provider, |queue| {
                let mut code = -sys::FI_ENOSYS;
                for (format, wait) in forms {
                    (attributes.format, attributes.wait_obj) = (format, wait);
                    code =
                        sys::fi_cq_open(domain.as_ptr(), &mut attributes, queue, ptr::null_mut());
                    if code >= 0 {
                        break;
                    }
                }
                code
            })?
        };
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
            pace: PollPause::new(polling_blocks_peers(&facts.provider, Version::running())),
            wait_fd,
            reports_source: domain.offer().reports_source,
            needs_deregistration_lock: domain.deregistration_lock().is_needed(),
            members: Vec::new(),
            closed_endpoints_seen: 0,
            closed_members: Vec::new(),
            sweep_due: false,
            is_broken: false,
            size: options.size,
        })
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// The next result, if there is one. Also makes progress where the provider leaves that to
    /// the application.
    #[inline]
    pub fn poll(&mut self) -> Option<Outcome> {
        if !self.ready.is_empty() {
            return self.ready.pop_front();
        }
        self.poll_fresh()
    }

    /// Like `poll`, without the stored results.
    #[inline]
    fn poll_fresh(&mut self) -> Option<Outcome> {
        // Most polls find nothing, and they are the ones that matter for latency.
        if self.next == self.filled {
            let got = self.read();
            if got <= 0 {
                return self.retry_read(got);
            }
            self.fill(got as usize);
        }
        self.next_entry()
    }

    /// The next of the entries that were read; there must be at least one.
    fn next_entry(&mut self) -> Option<Outcome> {
        let at = self.next;
        self.next += 1;
        // Built in place: a copy directly afterwards would wait for the stores.
        let outcome = self.translate(at);
        if outcome.is_some() { outcome } else { self.poll_slowly() }
    }

    /// Like `poll_fresh`, in a loop: thousands of abandoned operations may complete in a row.
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

    /// Handles a read that returned no entry.
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

    /// Nothing, or an endpoint was closed, or an operation failed.
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
            // Entries of closed endpoints may have arrived since the read: at the next empty
            // read, sweep exactly the endpoints that are known to be closed now.
            self.closed_endpoints_seen = self.shared.closed_endpoints.load(Ordering::Acquire);
            let members = (0..).zip(&self.members);
            let closed = members.filter(|(_, member)| member.closed.load(Ordering::Acquire));
            self.closed_members.extend(closed.map(|(number, _)| number));
            self.sweep_due = true;
            return ReadOutcome::Retry;
        }
        if code != FAILURE {
            self.is_broken = true;
            let error = Error::from_code("fi_cq_read", code as i64);
            return ReadOutcome::Done(Some(Err(self.unsolicited(error))));
        }
        self.read_failure()
    }

    #[inline]
    fn read(&mut self) -> isize {
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

    /// The buffer for the provider's entries, in the queue's format.
    #[inline]
    fn buffer(&mut self) -> *mut c_void {
        match &mut self.untagged {
            Some(entries) => entries.as_mut_ptr().cast(),
            None => self.batch.as_mut_ptr().cast(),
        }
    }

    /// Records entries that the provider wrote.
    #[inline]
    fn fill(&mut self, count: usize) {
        self.next = 0;
        self.filled = count.min(BATCH);
        if self.untagged.is_some() {
            self.widen();
        }
    }

    #[cold]
    fn widen(&mut self) {
        if let Some(entries) = &self.untagged {
            for (to, from) in self.batch.iter_mut().zip(entries.iter()).take(self.filled) {
                *to = widened(from);
            }
        }
    }

    /// None: the completion of an abandoned operation.
    #[inline(always)]
    fn translate(&mut self, at: usize) -> Option<Outcome> {
        let (entry, source) = (&self.batch[at], self.sources[at]);
        let (flags, length, tag) = (entry.flags, entry.len, entry.tag);
        let is_receive = flags & sys::FI_RECV != 0;
        let has_data = flags & sys::FI_REMOTE_CQ_DATA != 0;
        let data = has_data.then_some(entry.data);
        // An immediate of a write: the receive bit is clear (providers differ in the other
        // bits).
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
        // A peer's immediate can only consume a receive.
        let kind = if is_arrival && info.kind == CompletionKind::Receive {
            CompletionKind::RemoteWrite
        } else {
            info.kind
        };
        // A peer's data is reported even if the consumed receive was abandoned.
        if info.is_abandoned && kind != CompletionKind::RemoteWrite {
            return None;
        }
        // sockets also reports the immediate to its sender.
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
        let error = self.shared.domain.add_provider(error);
        Failure { kind: None, operation: None, token: 0, error }
    }

    /// Releases the operations that closed endpoints left behind.
    #[cold]
    fn sweep(&mut self) {
        self.sweep_due = false;
        for number in std::mem::take(&mut self.closed_members) {
            for index in self.table.of_member(number) {
                let Some(slot) = self.table.at(index) else { continue };
                let (state, kind, token, peer) = (slot.state, slot.kind, slot.token, slot.peer);
                let operation = slot.id();
                self.table.release(index);
                if state == State::InFlight {
                    let detail = "the operation was still in flight";
                    let error = self.domain().error(ErrorKind::Closed, "close endpoint", detail);
                    let error = error.with_known_peer(self.name_of(number, peer));
                    let (kind, operation) = (Some(kind), Some(operation));
                    self.ready.push_back(Err(Failure { kind, operation, token, error }));
                }
            }
        }
    }

    /// Operations that were posted and have not completed.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.table.in_flight()
    }

    /// Abandoned operations whose memory is still retained.
    #[must_use]
    pub fn quarantined(&self) -> usize {
        self.table.abandoned()
    }

    /// A handle by which other threads wake a thread that sleeps in this queue.
    #[must_use]
    pub fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.shared))
    }

    /// The domain of the queue.
    #[must_use]
    pub fn domain(&self) -> &Domain {
        &self.shared.domain
    }

    /// Makes progress while a post waits for space; completions stay for `poll`.
    pub(crate) fn progress(&mut self) {
        for _ in 0..BATCH {
            match self.poll_fresh() {
                Some(outcome) => self.ready.push_back(outcome),
                None => break,
            }
        }
    }

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
        // The index of an endpoint that is closed and swept can be reused.
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
        let Some(slot) = self.table.take() else {
            let detail = "a million operations are in flight on this queue";
            return Err(Error::new(ErrorKind::ResourceExhausted, "post operation", detail));
        };
        slot.member = member;
        slot.kind = kind;
        slot.peer = peer;
        slot.token = token;
        Ok(slot)
    }

    /// Stores references in a slot in flight.
    pub(crate) fn keep(&mut self, id: OperationId, keep: impl FnOnce(&mut Slot)) {
        if let Some(slot) = self.table.by_id(id) {
            keep(slot);
        }
    }

    /// Frees the slot of an operation whose post failed.
    pub(crate) fn put_back(&mut self, id: OperationId) {
        self.table.release(id.index);
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        if self.shared.handle.is_inherited() {
            // In a forked child: the operations belong to the parent.
            return;
        }
        // Endpoints may outlive the queue's owner: then the memory of their operations must
        // live until they are closed. SAFETY: nothing uses the table after this.
        let table = unsafe { ManuallyDrop::take(&mut self.table) };
        *lock(&self.shared.orphaned_table) = Some(table);
    }
}

#[cold]
fn log_unknown_completion(flags: u64) {
    tracing::debug!(flags, "dropped the completion of an unknown operation");
}

/// The result of handling a read that returned no entry.
enum ReadOutcome {
    /// This result, or nothing.
    Done(Option<Outcome>),
    /// Only abandoned operations; there may be more entries.
    Retry,
}
