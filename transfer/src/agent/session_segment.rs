//! Shared memory of a local session: counters of the initiator's copies, and its queue of notices.
//!
//! ```text
//! word 0   copies that the initiator has started
//! word 4   1 after a clean close by the initiator
//! word 8   all copies before this one are done; after a clean close all of them, unless a
//!          device may still be copying
//! word 16  a queue of notices: a tag, a length, and up to 64 bytes
//! ```
//!
//! The target creates it, and it ends with the connection. Only the initiator writes the first
//! three words and publishes; only the target reads. An initiator that writes garbage harms only
//! its own session.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Release, SeqCst};
use std::time::Duration;

use ipc::{
    Caller, ForkGeneration, Layout, Liveness, MappedWords, OverflowPolicy, Participant, PidFd,
    Queue, QueueError, QueueSetup, Segment, Subscriber, WordRange, Words,
};

use crate::error::{Result, failed};
use crate::notice::{MAX_NOTICE_LENGTH, Notice};

const LAYOUT: Layout = Layout::new("agent session", 1);
const BEGUN_WORD: usize = 0;
const CLOSED_WORD: usize = 4;
const SETTLED_WORD: usize = 8;
const QUEUE_WORD: usize = 16;
/// Maximum of unread notices.
const DEPTH: u32 = 1024;
/// A tag, a length, 64 bytes.
const ENTRY: usize = 2 + MAX_NOTICE_LENGTH / 8;
/// Operations under the queue's lock are short.
const LOCK_TIMEOUT: Duration = Duration::from_millis(200);

type Notices = Queue<WordRange<MappedWords>, ENTRY>;

fn setup() -> QueueSetup {
    QueueSetup { depth: DEPTH, overflow_policy: OverflowPolicy::Reject }
}

fn target() -> Participant {
    Participant::new(0, 1).unwrap_or_else(|| unreachable!("a valid name"))
}

fn initiator() -> Participant {
    Participant::new(1, 1).unwrap_or_else(|| unreachable!("a valid name"))
}

/// The queue has two participants; the caller is one of them.
struct OtherSide<'a> {
    name: Participant,
    pidfd: &'a PidFd,
}

impl Liveness for OtherSide<'_> {
    fn is_dead(&self, participant: Option<Participant>) -> bool {
        match participant {
            Some(name) if name == self.name => self.pidfd.has_exited(),
            Some(name) => name != target() && name != initiator(),
            None => true,
        }
    }
}

fn notices(operation: &'static str, segment: &Segment, is_new: bool) -> Result<Notices> {
    let words = segment.words();
    let count = words.count().saturating_sub(QUEUE_WORD);
    let part = WordRange::new(words, QUEUE_WORD, count)
        .ok_or("the segment is truncated")
        .map_err(failed(operation))?;
    let queue = if is_new { Queue::format(part, setup()) } else { Queue::attach(part) };
    queue.map_err(failed(operation))
}

#[derive(Debug)]
pub(super) struct TargetSegment {
    segment: Segment,
    words: MappedWords,
    queue: Notices,
    subscriber: Subscriber,
}

impl TargetSegment {
    pub(super) fn create() -> Result<Self> {
        let operation = "accept local initiator";
        let length = (QUEUE_WORD + Notices::required_words(setup())) * size_of::<u64>();
        let segment = Segment::create(LAYOUT, length).map_err(failed(operation))?;
        let queue = notices(operation, &segment, true)?;
        // Not shared with another process yet.
        let caller = Caller::new(target(), &ipc::AlwaysAlive);
        let subscriber = queue.subscribe(&caller).map_err(failed(operation))?;
        segment.mark_ready();
        Ok(Self { words: segment.words(), segment, queue, subscriber })
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.segment.as_fd()
    }

    /// The next notice.
    #[inline]
    pub(super) fn take(&mut self) -> Option<Notice> {
        let taken = self.queue.take(&mut self.subscriber)?;
        let notice = Notice::from(taken.entry);
        let _ = self.queue.release(&self.subscriber, taken.position);
        Some(notice)
    }

    /// The remaining notices of a disconnected initiator: at most one queue full, even if it
    /// continues to send.
    pub(super) fn take_rest(&mut self) -> impl Iterator<Item = Notice> {
        std::iter::from_fn(|| self.take()).take(DEPTH as usize)
    }

    /// Number of copies that the initiator has started.
    pub(super) fn begun(&self) -> u64 {
        self.words.load(BEGUN_WORD, SeqCst)
    }

    /// Did the initiator close cleanly? Its process may have ended since.
    pub(super) fn left_cleanly(&self) -> bool {
        self.words.load(CLOSED_WORD, Acquire) == 1
    }

    /// Have all copies completed that were started when `begun` was read?
    pub(super) fn is_settled(&self, begun: u64) -> bool {
        self.words.load(SETTLED_WORD, Acquire) >= begun
    }
}

#[derive(Debug)]
pub(super) struct InitiatorSegment {
    words: MappedWords,
    queue: Notices,
    begun: u64,
    /// Completion of the copies, from the oldest incomplete one.
    done: VecDeque<bool>,
    fork_generation: ForkGeneration,
}

impl Drop for InitiatorSegment {
    fn drop(&mut self) {
        // A forked child does not close the parent's session.
        if self.fork_generation.is_current() {
            self.words.store(CLOSED_WORD, 1, Release);
        }
    }
}

impl InitiatorSegment {
    pub(super) fn open(file: OwnedFd) -> Result<Self> {
        let operation = "open local session";
        let segment = Segment::open(file, LAYOUT).map_err(failed(operation))?;
        let queue = notices(operation, &segment, false)?;
        let (words, fork_generation) = (segment.words(), ForkGeneration::current());
        Ok(Self { words, queue, begun: 0, done: VecDeque::new(), fork_generation })
    }

    /// Records the start of a copy. Called *before* checking that its region exists.
    pub(super) fn begin(&mut self) -> u64 {
        let number = self.begun;
        self.begun += 1;
        self.done.push_back(false);
        // Checking the region table orders this store before it.
        self.words.store(BEGUN_WORD, self.begun, Release);
        number
    }

    /// Records that a copy completed or did not start.
    pub(super) fn end(&mut self, number: u64) {
        let oldest = self.begun - self.done.len() as u64;
        if let Some(index) = number.checked_sub(oldest)
            && let Some(done) = self.done.get_mut(index as usize)
        {
            *done = true;
        }
        while self.done.front() == Some(&true) {
            self.done.pop_front();
        }
        self.words.store(SETTLED_WORD, self.begun - self.done.len() as u64, Release);
    }

    /// Records that all copies have completed, and that none will start.
    pub(super) fn settle(&mut self) {
        if self.fork_generation.is_current() {
            self.done.clear();
            self.words.store(SETTLED_WORD, self.begun, Release);
        }
    }

    /// Sends a notice. False if the queue is full.
    pub(super) fn send_notice(&self, notice: &Notice, pidfd: &PidFd) -> Result<bool> {
        let operation = "send notice";
        let liveness = OtherSide { name: target(), pidfd };
        let caller = Caller { timeout: LOCK_TIMEOUT, ..Caller::new(initiator(), &liveness) };
        match self.queue.publish(&caller, (*notice).into(), |_| {}) {
            Err(QueueError::Full) => Ok(false),
            published => published.map(|_| true).map_err(failed(operation)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both() -> (TargetSegment, InitiatorSegment, PidFd) {
        let target = TargetSegment::create().unwrap();
        let initiator_side =
            InitiatorSegment::open(target.as_fd().try_clone_to_owned().unwrap()).unwrap();
        (target, initiator_side, PidFd::of_this_process().unwrap())
    }

    #[test]
    fn notices_arrive_in_order_until_there_is_no_room() {
        let (mut target, initiator_side, pidfd) = both();
        let notice = |tag| Notice::new(tag, &[7; 3]).unwrap();
        for tag in 0..u64::from(DEPTH) {
            assert!(initiator_side.send_notice(&notice(tag), &pidfd).unwrap());
        }
        assert!(!initiator_side.send_notice(&notice(0), &pidfd).unwrap(), "queue full");
        for tag in 0..u64::from(DEPTH) {
            let taken = target.take().unwrap();
            assert_eq!((taken.tag, taken.data()), (tag, &[7; 3][..]));
        }
        assert_eq!(target.take(), None);
        assert!(initiator_side.send_notice(&notice(9), &pidfd).unwrap());
    }

    #[test]
    fn notices_after_the_end_are_taken_only_once() {
        let (mut target, initiator_side, pidfd) = both();
        let notice = Notice::new(1, b"more").unwrap();
        assert!(initiator_side.send_notice(&notice, &pidfd).unwrap());
        // The initiator sends one more for each that is taken.
        let taken = target
            .take_rest()
            .inspect(|_| assert!(initiator_side.send_notice(&notice, &pidfd).unwrap()));
        assert_eq!(taken.count(), DEPTH as usize);
    }

    #[test]
    fn only_a_clean_close_is_recorded() {
        let (target, initiator_side, _) = both();
        assert!(!target.left_cleanly());
        drop(initiator_side);
        assert!(target.left_cleanly());
        let (target, initiator_side, _) = both();
        // Its destructor never runs.
        std::mem::forget(initiator_side);
        assert!(!target.left_cleanly());
    }

    #[test]
    fn copy_is_settled_when_all_earlier_ones_are_done() {
        let (target, mut initiator_side, _) = both();
        let [first, second, third] =
            [initiator_side.begin(), initiator_side.begin(), initiator_side.begin()];
        let begun = target.begun();
        assert!(!target.is_settled(begun));
        initiator_side.end(third);
        initiator_side.end(first);
        assert!(target.is_settled(1) && !target.is_settled(begun));
        let later = initiator_side.begin();
        initiator_side.end(second);
        assert!(target.is_settled(begun) && !target.is_settled(target.begun()));
        initiator_side.end(later);
        initiator_side.end(later);
        assert!(target.is_settled(target.begun()));
    }

    #[test]
    fn settle_completes_all_copies() {
        let (target, mut initiator_side, _) = both();
        let first = initiator_side.begin();
        initiator_side.begin();
        initiator_side.end(first);
        assert!(!target.is_settled(target.begun()));
        initiator_side.settle();
        initiator_side.end(initiator_side.begun);
        drop(initiator_side);
        assert!(target.is_settled(target.begun()));
    }
}
