//! Waiting for completions.
//!
//! Sleeping is where providers differ most. Some have no descriptor, some keep it
//! readable while nothing comes, some lose a wake-up. So every sleep is bounded
//! (50 ms), `fi_trywait` is asked before each, a signal that stays is taken back by a
//! short sleep inside of the provider, and after eight wake-ups in a row that brought
//! nothing the queue goes over to growing pauses.
#![allow(unsafe_code)]

use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use libfabric_sys as sys;

use super::{BATCH, Completion, CompletionKind, CompletionQueue, OperationId, Outcome};
use crate::error::{Error, ErrorKind, Result};
use crate::waiting::{Backoff, Deadline, WaitStrategy};

/// Longest uninterrupted sleep on a file descriptor: providers with several
/// layers have been seen to lose a wake-up.
const MAX_SLEEP: Duration = Duration::from_millis(50);
/// The shortest sleep inside of a provider, which counts in milliseconds.
const PROVIDER_SLEEP: Duration = Duration::from_millis(1);

impl CompletionQueue {
    /// Waits for the next outcome, in the way the queue was opened with.
    ///
    /// # Errors
    /// A failed operation; or, without an operation, `DeadlineExceeded`.
    pub fn wait(&mut self, timeout: Duration) -> Outcome {
        if let Some(outcome) = self.ready.pop_front() {
            return outcome;
        }
        self.wait_fresh(&Deadline::after(timeout), timeout)
    }

    /// What to do between two polls that find nothing, in a loop that polls all the
    /// time, as [`wait`](Self::wait) does by itself. Short, and as long as it must be
    /// for peers not to be held up by the polling: with some providers (shm before
    /// libfabric 1.18) messages come *sooner* to who looks less often.
    #[inline]
    pub fn pause(&self) {
        self.pace.pause();
    }

    /// How long a pause may be while it waits where a provider has nothing to sleep on, or does not
    /// let us: 200 µs unless one says otherwise. Longer ones take less of a processor, and come
    /// late by as much.
    pub fn set_max_pause(&mut self, longest: Duration) {
        self.max_pause = longest;
    }

    /// As [`wait`](Self::wait); None if somebody [woke](super::Waker::wake) the sleeper, now or
    /// since the last wait, or the time is over.
    pub fn wait_or_wake(&mut self, timeout: Duration) -> Option<Outcome> {
        match self.ready.pop_front() {
            Some(outcome) => Some(outcome),
            None => self.poll_and_sleep(&Deadline::after(timeout), true),
        }
    }

    fn wait_fresh(&mut self, deadline: &Deadline, timeout: Duration) -> Outcome {
        self.poll_and_sleep(deadline, false).unwrap_or_else(|| {
            let late = Error::new(
                ErrorKind::DeadlineExceeded,
                "wait for completion",
                format!(
                    "no completion within {timeout:?}, {} operations in flight",
                    self.in_flight()
                ),
            );
            Err(self.unsolicited(self.shared.domain.add_provider(late)))
        })
    }

    /// The next outcome that the provider has. None if the time is over; or, where that is wanted,
    /// if another thread woke us.
    fn poll_and_sleep(&mut self, deadline: &Deadline, may_be_woken: bool) -> Option<Outcome> {
        let spin_end = match self.waiting {
            WaitStrategy::Busy => None,
            WaitStrategy::Adaptive { spin } => Instant::now().checked_add(spin),
            WaitStrategy::Block => Some(Instant::now()),
        };
        let mut backoff = Backoff::sleeping().with_max_pause(self.max_pause);
        let (mut empty_wakeups, mut looks) = (0, 0_u32);
        loop {
            if let Some(outcome) = self.poll_fresh() {
                return Some(outcome);
            }
            if may_be_woken && self.shared.wake_up.swap(false, Ordering::AcqRel) {
                return None;
            }
            // The clock costs as much as a look: read it every eighth time, and the first.
            let is_time_to_look = looks.is_multiple_of(8) || self.waiting == WaitStrategy::Block;
            looks = looks.wrapping_add(1);
            if !is_time_to_look {
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

    /// Sleeps until there may be something to read, for a bounded while.
    ///
    /// `empty_wakeups` counts wake-ups in a row that brought nothing: some providers
    /// refuse to let us sleep, or keep their descriptor readable, for as long as a
    /// connection is open. Then pauses are better than a loop around `poll`.
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
        // Once for the wish to wake somebody, and once for the signal itself; then it is seen
        // whether that helped.
        if *empty_wakeups > 1 && *empty_wakeups % 3 != 1 {
            // Inside of the provider it lasts a millisecond, whatever is left.
            if deadline.left() < PROVIDER_SLEEP {
                backoff.pause(deadline);
            } else {
                self.clear_signal();
            }
            return;
        }
        let fabric = self.shared.domain.fabric().as_ptr();
        let mut fid = self.shared.handle.as_fid();
        // SAFETY: one live object. Sleeping without this call's permission can
        // miss what arrived before.
        let code = unsafe { sys::fi_trywait(fabric, &mut fid, 1) };
        if code != 0 {
            // -FI_EAGAIN: there is something to do first.
            std::thread::yield_now();
            return;
        }
        // Asking took back the signal of whoever woke us just now.
        if may_be_woken && self.shared.wake_up.load(Ordering::SeqCst) {
            return;
        }
        let left = deadline.left().min(MAX_SLEEP);
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // To the nanosecond: who looks after a device's copies meanwhile comes back in far less than
        // a millisecond.
        let longest =
            libc::timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos().into() };
        // SAFETY: one valid entry, and a time; the descriptor belongs to the queue.
        if unsafe { libc::ppoll(&mut poll, 1, &longest, ptr::null()) } == 0 {
            *empty_wakeups = 0;
        }
    }

    /// After a wake-up that brought nothing. Some providers (`net`) take back what was signalled,
    /// by [`Waker::wake`](super::Waker::wake) or a completion that was read long ago, only
    /// from who sleeps inside of them: until then their descriptor stays readable.
    fn clear_signal(&mut self) {
        const MILLISECONDS: i32 = PROVIDER_SLEEP.as_millis() as i32;
        let (queue, buffer) = (self.shared.handle.as_ptr(), self.buffer());
        let shared = Arc::clone(&self.shared);
        let lock_progress = shared
            .domain
            .deregistration_lock()
            .map(|deregistration_lock| deregistration_lock.lock_progress());
        // SAFETY: room for BATCH entries.
        let got = unsafe {
            if self.reports_source {
                let sources = self.sources.as_mut_ptr();
                sys::fi_cq_sreadfrom(queue, buffer, BATCH, sources, ptr::null(), MILLISECONDS)
            } else {
                sys::fi_cq_sread(queue, buffer, BATCH, ptr::null(), MILLISECONDS)
            }
        };
        drop(lock_progress);
        // A failure is there for the next look, and so is a queue that is broken.
        self.fill(usize::try_from(got).unwrap_or(0));
    }

    /// An outcome that was put back.
    fn take_ready(&mut self, fits: impl FnMut(&Outcome) -> bool) -> Option<Outcome> {
        let at = self.ready.iter().position(fits)?;
        self.ready.remove(at)
    }

    /// Waits for one operation; outcomes of others stay for [`poll`](Self::poll).
    ///
    /// If the deadline passes the operation is given up as by
    /// [`abandon`](Self::abandon).
    ///
    /// # Errors
    /// Why the operation failed; `DeadlineExceeded`; `InvalidArgument` if it is
    /// not in flight.
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
        let of_whom = self.table().by_id(operation).map(|slot| (slot.member, slot.peer));
        // A deadline names nobody by itself.
        let named = |queue: &Self, error: Error| match of_whom
            .and_then(|(member, peer)| queue.name_of(member, peer))
        {
            Some(peer) => error.with_peer(peer),
            None => error,
        };
        let deadline = Deadline::after(timeout);
        loop {
            // Its outcome may have come together with others'.
            if self.table().by_id(operation).is_none() {
                return match self.take_ready(is_it) {
                    Some(outcome) => outcome.map_err(Error::from),
                    None => Err(Error::new(
                        ErrorKind::InvalidArgument,
                        "wait for operation",
                        "it is not in flight: its outcome was already handed out",
                    )),
                };
            }
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
            // A queue that is broken says so at every look: do not collect that.
            let broken = matches!(&outcome, Err(f) if f.operation.is_none()
                && f.error.operation() == "fi_cq_read");
            if broken {
                self.abandon(operation);
                return outcome.map_err(Error::from);
            }
            self.ready.push_back(outcome);
            // Others' outcomes must not keep this one waiting for ever.
            if deadline.has_passed() {
                self.abandon(operation);
                let error = self.shared.domain.add_provider(Error::new(
                    ErrorKind::DeadlineExceeded,
                    "wait for operation",
                    format!("no completion within {timeout:?}, other operations completed"),
                ));
                return Err(named(self, error));
            }
        }
    }

    /// Stops wait for operation. A receive is cancelled. What is on the
    /// wire cannot be called back: its memory is quarantined, that is kept until
    /// the provider completes it or its endpoint is closed. Its outcome will not
    /// be reported.
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
    /// // Nobody waits for it now; its memory is safe until the provider lets go.
    /// assert!(queue.complete(receive, Duration::from_millis(5)).is_err());
    /// endpoint.close()?;
    /// while queue.poll().is_some() {}
    /// assert_eq!((queue.in_flight(), queue.quarantined()), (0, 0));
    /// # Ok::<(), fabric::Error>(())
    /// ```
    pub fn abandon(&mut self, operation: OperationId) {
        let Some(slot) = self.table().by_id(operation) else {
            return;
        };
        let (member, kind, context) = (slot.member, slot.kind, slot.context());
        self.table().abandon(operation.index);
        if kind == CompletionKind::Receive
            && let Some(member) = self.members.get(member as usize)
        {
            let endpoint = member.endpoint.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(endpoint) = *endpoint {
                // SAFETY: the endpoint is not closed while its lock is held; the
                // context is a slot in flight. A refusal leaves it quarantined.
                unsafe { sys::fi_cancel(endpoint as *mut sys::fid, context) };
            }
        }
    }

    /// How waiting is done: `busy`, `fd` (sleeps on the provider's descriptor) or
    /// `pauses` (the provider has none).
    #[must_use]
    pub fn wait_method(&self) -> &'static str {
        match (self.waiting, self.wait_fd) {
            (WaitStrategy::Busy, _) => "busy",
            (_, Some(_)) => "fd",
            (_, None) => "pauses",
        }
    }

    /// The file descriptor to sleep on in an event loop of the caller's own, where the provider has
    /// one. Ask [`may_sleep`](Self::may_sleep) right before each sleep, and [`poll`](Self::poll) until
    /// there is nothing after it.
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
