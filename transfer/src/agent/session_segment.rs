//! Shared memory of a local session: counters of the initiator's copies, and its queue of notices.
//!
//! ```text
//! word 0   copies that the initiator has started
//! word 4   1 after a clean close by the initiator
//! word 8   all copies before this one are done; after a clean close all of them, unless a
//!          device may still be copying
//! word 16  a queue of notices: a tag, a length, and the first 64 bytes; an entry for each further
//!          64 bytes, whose length is the offset of its bytes, marked as a continuation
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

const LAYOUT: Layout = Layout::new("agent session", 2);
const BEGUN_WORD: usize = 0;
const CLOSED_WORD: usize = 4;
const SETTLED_WORD: usize = 8;
const QUEUE_WORD: usize = 16;
/// Maximum of unread notices.
const DEPTH: u32 = 1024;
/// A tag, a length, 64 bytes.
const ENTRY: usize = 2 + ENTRY_BYTES / 8;
/// Bytes of a notice in one entry.
const ENTRY_BYTES: usize = 64;
/// Marks an entry that continues a notice.
const CONTINUES: u64 = 1 << 63;
/// Operations under the queue's lock are short.
const LOCK_TIMEOUT: Duration = Duration::from_millis(200);

type Notices = Queue<WordRange<MappedWords>, ENTRY>;

fn setup() -> QueueSetup {
    QueueSetup { depth: DEPTH, max_held: 1, overflow_policy: OverflowPolicy::Reject }
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
    /// A notice of which entries are missing: its tag, its length, and its bytes so far.
    partial: Option<(u64, usize, Vec<u8>)>,
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
        Ok(Self { words: segment.words(), segment, queue, subscriber, partial: None })
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.segment.as_fd()
    }

    /// The next notice that has arrived whole.
    #[inline]
    pub(super) fn take(&mut self) -> Option<Notice> {
        // At most one queue full of entries, whatever the initiator writes.
        for _ in 0..DEPTH {
            let taken = self.queue.take(&mut self.subscriber)?;
            let notice = self.assemble(&taken.entry);
            let _ = self.queue.release(&self.subscriber, taken.position);
            if notice.is_some() {
                return notice;
            }
        }
        None
    }

    /// The notice that an entry completes. An entry that continues no notice is dropped; one that
    /// begins another notice ends an incomplete one.
    fn assemble(&mut self, entry: &[u64; ENTRY]) -> Option<Notice> {
        let [tag, length, words @ ..] = entry;
        let mut bytes = [0; ENTRY_BYTES];
        for (target, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
            *target = word.to_le_bytes();
        }
        let (tag, length, mut data) = match length & CONTINUES {
            0 => (*tag, (*length).min(MAX_NOTICE_LENGTH as u64) as usize, Vec::new()),
            _ => {
                let partial = self.partial.take();
                partial.filter(|(_, _, data)| data.len() as u64 == length & !CONTINUES)?
            }
        };
        let part = &bytes[..(length - data.len()).min(ENTRY_BYTES)];
        if data.is_empty() && part.len() == length {
            self.partial = None;
            return Notice::new(tag, part).ok();
        }
        data.extend_from_slice(part);
        if data.len() == length {
            return Notice::new(tag, &data).ok();
        }
        self.partial = Some((tag, length, data));
        None
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
    /// Bytes of the next notice that are in the queue already.
    sent: usize,
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
        Ok(Self { words, queue, begun: 0, done: VecDeque::new(), sent: 0, fork_generation })
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

    /// Sends a notice. False if the queue is full: then the same notice is to be sent again, or
    /// [given up](Self::give_up_notice).
    pub(super) fn send_notice(&mut self, notice: &Notice, pidfd: &PidFd) -> Result<bool> {
        let operation = "send notice";
        let liveness = OtherSide { name: target(), pidfd };
        let caller = Caller { timeout: LOCK_TIMEOUT, ..Caller::new(initiator(), &liveness) };
        loop {
            match self.queue.publish(&caller, entry_of(notice, self.sent), |_| {}) {
                Err(QueueError::Full) => return Ok(false),
                Err(error) => {
                    self.give_up_notice();
                    return Err(failed(operation)(error));
                }
                Ok(_) => {}
            }
            self.sent += ENTRY_BYTES;
            if self.sent >= notice.data().len() {
                self.sent = 0;
                return Ok(true);
            }
        }
    }

    /// The rest of a notice will not be sent: the target drops its first part.
    pub(super) fn give_up_notice(&mut self) {
        self.sent = 0;
    }
}

/// The entry of a notice with the bytes from an offset on.
fn entry_of(notice: &Notice, offset: usize) -> [u64; ENTRY] {
    let data = notice.data();
    let mut entry = [0; ENTRY];
    entry[0] = notice.tag;
    entry[1] = match offset {
        0 => data.len() as u64,
        _ => CONTINUES | offset as u64,
    };
    let mut bytes = [0; ENTRY_BYTES];
    let part = &data[offset..data.len().min(offset + ENTRY_BYTES)];
    bytes[..part.len()].copy_from_slice(part);
    for (word, bytes) in entry[2..].iter_mut().zip(bytes.as_chunks().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    entry
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
        let (mut target, mut initiator_side, pidfd) = both();
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
    fn long_notices_arrive_whole_whatever_the_room() {
        let (mut target, mut initiator_side, pidfd) = both();
        let notice = |tag: u64, length: usize| {
            let data: Vec<_> = (0..length).map(|at| (at as u64 * 31 + tag) as u8).collect();
            Notice::new(tag, &data).unwrap()
        };
        let lengths = [0, 64, 65, 127, 128, 129, 4095, MAX_NOTICE_LENGTH];
        let mut next = 0;
        // More than fit: each time as much as there is room for.
        for tag in 0..400 {
            let sent = notice(tag, lengths[tag as usize % lengths.len()]);
            while !initiator_side.send_notice(&sent, &pidfd).unwrap() {
                let taken = target.take().unwrap();
                assert_eq!(taken, notice(next, lengths[next as usize % lengths.len()]));
                next += 1;
            }
        }
        while let Some(taken) = target.take() {
            assert_eq!(taken, notice(next, lengths[next as usize % lengths.len()]));
            next += 1;
        }
        assert_eq!(next, 400);
    }

    #[test]
    fn incomplete_notices_and_false_entries_are_dropped() {
        let (mut target, mut initiator_side, pidfd) = both();
        let long = Notice::new(1, &[5; 4096]).unwrap();
        let short = Notice::new(2, b"next").unwrap();
        while initiator_side.send_notice(&long, &pidfd).unwrap() {}
        initiator_side.give_up_notice();
        while target.take().is_some() {}
        assert!(initiator_side.send_notice(&short, &pidfd).unwrap());
        assert_eq!(target.take(), Some(short.clone()), "the incomplete one is dropped");
        let liveness = OtherSide { name: super::target(), pidfd: &pidfd };
        let caller = Caller::new(initiator(), &liveness);
        for words in [[7, CONTINUES | 64], [7, CONTINUES], [7, u64::MAX], [7, u64::MAX >> 1]] {
            let mut entry = [0; ENTRY];
            entry[..2].copy_from_slice(&words);
            initiator_side.queue.publish(&caller, entry, |_| {}).unwrap();
            assert_eq!(target.take(), None, "{words:?}");
        }
        assert!(initiator_side.send_notice(&short, &pidfd).unwrap());
        assert_eq!(target.take(), Some(short));
    }

    #[test]
    fn notices_after_the_end_are_taken_only_once() {
        let (mut target, mut initiator_side, pidfd) = both();
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
