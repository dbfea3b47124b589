//! Waiting for completions.
//!
//! Providers differ most in how they sleep. Some have no file descriptor, some keep it readable
//! without an entry, some lose a wake-up. So every sleep is bounded (50 ms), and `fi_trywait`
//! is called before each. A signal that stays is cleared by a short sleep inside the provider.
//! After eight empty wake-ups in a row, the queue changes to growing pauses.
#![allow(unsafe_code)]

use std::os::fd::RawFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libfabric_sys as sys;
use threads::lock;

use super::{BATCH, Completion, CompletionKind, CompletionQueue, OperationId, Outcome};
use crate::waiting::{Backoff, Deadline};
use crate::{Error, ErrorKind, Result, WaitStrategy};

/// Longest uninterrupted sleep on a file descriptor: layered providers have been seen to lose a
/// wake-up.
const MAX_SLEEP: Duration = Duration::from_millis(50);
/// The shortest sleep inside a provider, whose unit is milliseconds.
const PROVIDER_SLEEP: Duration = Duration::from_millis(1);

impl CompletionQueue {
    /// Waits for the next result, with the strategy that the queue was opened with.
    ///
    /// # Errors
    /// The error of a failed operation; or, without an operation, `DeadlineExceeded`.
    pub fn wait(&mut self, timeout: Duration) -> Outcome {
        if let Some(outcome) = self.ready.pop_front() {
            return outcome;
        }
        self.wait_fresh(&Deadline::after(timeout), timeout)
    }

    /// Pauses between two empty polls in a caller's loop, as [`wait`](Self::wait) does. The
    /// pause is short, but long enough that polling does not slow the peers down: with some
    /// providers (shm before libfabric 1.18) messages arrive *sooner* if the queue is polled
    /// less often.
    #[inline]
    pub fn pause(&self) {
        self.pace.pause();
    }

    /// The longest pause while the queue waits without a usable file descriptor: 200 µs by
    /// default. Longer pauses use less CPU time, and delay messages by as much.
    pub fn set_max_pause(&mut self, longest: Duration) {
        self.max_pause = longest;
    }

    /// Like [`wait`](Self::wait); None if a thread [woke](super::Waker::wake) this one, now or
    /// since the last wait, or the deadline passed.
    pub fn wait_or_wake(&mut self, timeout: Duration) -> Option<Outcome> {
        match self.ready.pop_front() {
            Some(outcome) => Some(outcome),
            None => self.poll_and_sleep(&Deadline::after(timeout), true),
        }
    }

    fn wait_fresh(&mut self, deadline: &Deadline, timeout: Duration) -> Outcome {
        self.poll_and_sleep(deadline, false).unwrap_or_else(|| {
            let in_flight = self.in_flight();
            let detail =
                format!("no completion within {timeout:?}, {in_flight} operations in flight");
            let kind = ErrorKind::DeadlineExceeded;
            Err(self.unsolicited(Error::new(kind, "wait for completion", detail)))
        })
    }

    /// The next result of the provider. None if the deadline passed, or, if requested, if
    /// another thread woke this one.
    fn poll_and_sleep(&mut self, deadline: &Deadline, may_be_woken: bool) -> Option<Outcome> {
        let spin_end = match self.waiting {
            WaitStrategy::Busy => None,
            WaitStrategy::Adaptive { spin } => Instant::now().checked_add(spin),
            WaitStrategy::Block => Some(Instant::now()),
        };
        let mut backoff = Backoff::sleeping(self.max_pause);
        let (mut empty_wakeups, mut polls) = (0, 0_u32);
        loop {
            if let Some(outcome) = self.poll_fresh() {
                return Some(outcome);
            }
            if may_be_woken && self.shared.wake_up.swap(false, Ordering::AcqRel) {
                return None;
            }
            // Reading the clock costs as much as a poll: read it every eighth time, and the
            // first.
            let reads_clock = polls.is_multiple_of(8) || self.waiting == WaitStrategy::Block;
            polls = polls.wrapping_add(1);
            if !reads_clock {
                self.pause();
                continue;
            }
            if deadline.has_passed() {
                return None;
            }
            if spin_end.is_some_and(|end| Instant::now() >= end) {
                self.sleep(deadline, &mut backoff, &mut empty_wakeups, may_be_woken);
            }
        }
    }

    /// Sleeps until there may be an entry to read, for a bounded time.
    ///
    /// `empty_wakeups` counts empty wake-ups in a row: some providers refuse to sleep, or keep
    /// their file descriptor readable, for as long as a connection is open. Then pauses are
    /// better than a loop around `poll`.
    fn sleep(
        &mut self,
        deadline: &Deadline,
        backoff: &mut Backoff,
        empty_wakeups: &mut u32,
        may_be_woken: bool,
    ) {
        let Some(fd) = self.wait_fd else {
            backoff.pause(deadline);
            return;
        };
        *empty_wakeups += 1;
        if *empty_wakeups > 8 {
            backoff.pause(deadline);
            return;
        }
        // Repeated once for the wake-up request, and once for the signal itself; then check
        // whether that helped.
        if *empty_wakeups > 1 && *empty_wakeups % 3 != 1 {
            // Inside the provider a sleep lasts at least a millisecond, whatever time is left.
            if deadline.left() < PROVIDER_SLEEP {
                backoff.pause(deadline);
            } else {
                self.clear_signal();
            }
            return;
        }
        let fabric = self.shared.domain.fabric().as_ptr();
        let mut fid = self.shared.handle.as_fid();
        // SAFETY: one live object. Sleeping without the permission of this call can miss an
        // earlier arrival.
        let code = unsafe { sys::fi_trywait(fabric, &mut fid, 1) };
        if code != 0 {
            // -FI_EAGAIN: there is an entry to read first.
            std::thread::yield_now();
            return;
        }
        // This call consumed the signal of a thread that woke this one just now.
        if may_be_woken && self.shared.wake_up.load(Ordering::SeqCst) {
            return;
        }
        let left = deadline.left().min(MAX_SLEEP);
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // With nanosecond resolution: a caller that also drives device copies must return in
        // far less than a millisecond.
        let longest =
            libc::timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos().into() };
        // SAFETY: one valid entry, and a time; the descriptor belongs to the queue.
        if unsafe { libc::ppoll(&mut poll, 1, &longest, ptr::null()) } == 0 {
            *empty_wakeups = 0;
        }
    }

    /// Handles a wake-up without an entry. Some providers (`net`) clear a signal, of
    /// [`Waker::wake`](super::Waker::wake) or of a completion read long ago, only during a
    /// sleep inside the provider: until then their file descriptor stays readable.
    fn clear_signal(&mut self) {
        const MILLISECONDS: i32 = PROVIDER_SLEEP.as_millis() as i32;
        let (queue, buffer) = (self.shared.handle.as_ptr(), self.buffer());
        let shared = Arc::clone(&self.shared);
        let progress_guard = shared.domain.deregistration_lock().lock_progress();
        // SAFETY: space for BATCH values.
        let got = unsafe {
            if self.reports_source {
                let sources = self.sources.as_mut_ptr();
                sys::fi_cq_sreadfrom(queue, buffer, BATCH, sources, ptr::null(), MILLISECONDS)
            } else {
                sys::fi_cq_sread(queue, buffer, BATCH, ptr::null(), MILLISECONDS)
            }
        };
        drop(progress_guard);
        // The next poll reports a failure, or a broken queue.
        self.fill(usize::try_from(got).unwrap_or(0));
    }

    /// Returns a result that was stored.
    fn take_ready(&mut self, fits: impl FnMut(&Outcome) -> bool) -> Option<Outcome> {
        let at = self.ready.iter().position(fits)?;
        self.ready.remove(at)
    }

    /// Waits for one operation; results of others stay for [`poll`](Self::poll).
    ///
    /// If the deadline passes, the operation is abandoned as by [`abandon`](Self::abandon).
    ///
    /// # Errors
    /// The error of the operation; `DeadlineExceeded`; `InvalidArgument` if it is not in
    /// flight.
    pub fn complete(&mut self, operation: OperationId, timeout: Duration) -> Result<Completion> {
        let is_it = |outcome: &Outcome| {
            let id = match outcome {
                Ok(completion) => completion.operation,
                Err(failure) => failure.operation,
            };
            id == Some(operation)
        };
        if let Some(outcome) = self.take_ready(is_it) {
            return outcome.map_err(Error::from);
        }
        let target = self.table.by_id(operation).map(|slot| (slot.member, slot.peer));
        // A deadline error does not name the peer by itself.
        let named = |queue: &Self, error: Error| {
            error.with_known_peer(target.and_then(|(member, peer)| queue.name_of(member, peer)))
        };
        let deadline = Deadline::after(timeout);
        loop {
            // Its result may have arrived together with others.
            if self.table.by_id(operation).is_none() {
                return self.take_ready(is_it).map_or_else(
                    || {
                        let detail = "it is not in flight: its outcome was already handed out";
                        Err(Error::new(ErrorKind::InvalidArgument, "wait for operation", detail))
                    },
                    |outcome| outcome.map_err(Error::from),
                );
            }
            self.is_broken = false;
            let outcome = self.wait_fresh(&deadline, timeout);
            if is_it(&outcome) {
                return outcome.map_err(Error::from);
            }
            let late = matches!(&outcome, Err(f) if f.operation.is_none()
                && f.error.kind() == ErrorKind::DeadlineExceeded && deadline.has_passed());
            if late {
                self.abandon(operation);
                return outcome.map_err(|failure| named(self, failure.error));
            }
            // A broken queue reports this at every poll: do not collect it.
            if self.is_broken {
                self.abandon(operation);
                return outcome.map_err(Error::from);
            }
            self.ready.push_back(outcome);
            // Results of other operations must not extend the wait without a bound.
            if deadline.has_passed() {
                self.abandon(operation);
                let detail =
                    format!("no completion within {timeout:?}, other operations completed");
                let kind = ErrorKind::DeadlineExceeded;
                return Err(named(self, self.domain().error(kind, "wait for operation", detail)));
            }
        }
    }

    /// Stops waiting for an operation. A receive is cancelled. A transfer on the wire cannot be
    /// cancelled: its memory is quarantined, that is, retained until the provider completes it
    /// or its endpoint is closed. Its result will not be reported.
    ///
    /// ```
    /// use std::time::Duration;
    /// use fabric::*;
    /// # let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
    /// # let domain = Domain::open(&offer)?;
    /// # let addresses = AddressVector::open(&domain)?;
    /// # let mut queue = CompletionQueue::open(&domain)?;
    /// # let mut endpoint =
    /// #     Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
    /// # let inbox = domain.register(HostMemory::zeroed(64)?, Access::ALL)?;
    /// let receive = endpoint.receive(&mut queue, &inbox.all(), 0)?;
    /// queue.abandon(receive);
    /// // The receive is abandoned; its memory is safe until the provider releases it.
    /// assert!(queue.complete(receive, Duration::from_millis(5)).is_err());
    /// endpoint.close()?;
    /// while queue.poll().is_some() {}
    /// assert_eq!((queue.in_flight(), queue.quarantined()), (0, 0));
    /// # Ok::<(), fabric::Error>(())
    /// ```
    pub fn abandon(&mut self, operation: OperationId) {
        let Some(slot) = self.table.by_id(operation) else { return };
        let (member, kind, context) = (slot.member, slot.kind, slot.context());
        self.table.abandon(operation.index);
        if kind == CompletionKind::Receive
            && let Some(member) = self.members.get(member as usize)
        {
            let endpoint = lock(&member.endpoint);
            if let Some(endpoint) = *endpoint {
                // SAFETY: the endpoint is not closed while its lock is held; the context is a
                // slot in flight. If the provider refuses, the operation stays quarantined.
                unsafe { sys::fi_cancel(endpoint as *mut sys::fid, context) };
            }
        }
    }

    /// How the queue waits: `busy`, `fd` (sleeps on the provider's file descriptor) or `pauses`
    /// (the provider has none).
    #[must_use]
    pub fn wait_method(&self) -> &'static str {
        match (self.waiting, self.wait_fd) {
            (WaitStrategy::Busy, _) => "busy",
            (_, Some(_)) => "fd",
            (_, None) => "pauses",
        }
    }

    /// The file descriptor to wait on in the caller's own event loop, if the provider has one.
    /// Call [`may_sleep`](Self::may_sleep) right before each sleep, and [`poll`](Self::poll)
    /// until it returns nothing after it.
    ///
    /// ```
    /// use fabric::*;
    /// let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
    /// let mut queue = CompletionQueue::open(&Domain::open(&offer)?)?;
    /// if let Some(descriptor) = queue.wait_descriptor() {
    ///     assert!(descriptor >= 0);
    ///     if queue.may_sleep() { /* wait for it with poll or epoll */ }
    /// }
    /// # Ok::<(), fabric::Error>(())
    /// ```
    #[must_use]
    pub fn wait_descriptor(&self) -> Option<RawFd> {
        self.wait_fd
    }

    /// May the caller sleep on the descriptor now, or is there work to poll for?
    pub fn may_sleep(&mut self) -> bool {
        let has_news = !self.ready.is_empty()
            || self.next < self.filled
            || self.sweep_due
            || self.closed_endpoints_seen != self.shared.closed_endpoints.load(Ordering::Acquire);
        let fabric = self.shared.domain.fabric().as_ptr();
        let mut fid = self.shared.handle.as_fid();
        // SAFETY: one live object.
        !has_news && unsafe { sys::fi_trywait(fabric, &mut fid, 1) } == 0
    }
}
