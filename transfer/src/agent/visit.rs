//! What two agents of one machine share as long as one visits the other: what the visitor
//! has begun, and the notices that it leaves.
//!
//! ```text
//! word 0   copies that the visitor has ever begun
//! word 4   1 when the visitor has left in order
//! word 8   of them, all before this one are done; all of them when the visitor leaves, unless a
//!          device may still be copying
//! word 16  a queue of notices: a tag, a length, and up to 64 bytes
//! ```
//!
//! The host makes it, so it goes with the connection. Only the visitor writes the first three
//! words and publishes; only the host reads. Nothing here is believed further than that: a
//! visitor that scribbles harms what it tells, and nothing else.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Release, SeqCst};
use std::time::Duration;

use ipc::{
    Caller, Fate, Incarnation, Layout, Life, MappedWords, Part, Participant, Queue, QueueError,
    QueueSetup, Segment, Subscriber, WhenFull, Words,
};

use super::notice::{LONGEST_NOTICE, Notice};
use crate::error::{Error, ErrorKind, Result};

const LAYOUT: Layout = Layout::new("agent visit", 1);
const BEGUN: usize = 0;
const GOODBYE: usize = 4;
const OLDEST: usize = 8;
const QUEUE: usize = 16;
/// Notices that wait to be read.
const DEPTH: u32 = 1024;
/// A tag, a length, 64 bytes.
const ENTRY: usize = 2 + LONGEST_NOTICE / 8;
/// Nothing is done under the queue's lock that takes time.
const PATIENCE: Duration = Duration::from_millis(200);

type Notices = Queue<Part<MappedWords>, ENTRY>;

fn setup() -> QueueSetup {
    QueueSetup { depth: DEPTH, when_full: WhenFull::Refuse }
}

fn host() -> Participant {
    Participant::new(0, 1).unwrap_or_else(|| unreachable!("a valid name"))
}

fn visitor() -> Participant {
    Participant::new(1, 1).unwrap_or_else(|| unreachable!("a valid name"))
}

/// There are two, and one of them calls.
struct TheOther<'a> {
    name: Participant,
    life: &'a Life,
}

impl Fate for TheOther<'_> {
    fn is_dead(&self, participant: Option<Participant>) -> bool {
        match participant {
            Some(name) if name == self.name => self.life.is_over(),
            Some(name) => name != host() && name != visitor(),
            None => true,
        }
    }
}

fn failed(operation: &'static str, why: impl ToString) -> Error {
    Error::new(operation, ErrorKind::Failed, why.to_string())
}

fn notices(operation: &'static str, segment: &Segment, is_new: bool) -> Result<Notices> {
    let words = segment.words();
    let count = words.count().saturating_sub(QUEUE);
    let part = Part::new(words, QUEUE, count).ok_or_else(|| failed(operation, "it is cut off"))?;
    let queue = if is_new { Queue::format(part, setup()) } else { Queue::attach(part) };
    queue.map_err(|error| failed(operation, error))
}

/// At the agent that is visited.
#[derive(Debug)]
pub(super) struct Host {
    segment: Segment,
    words: MappedWords,
    queue: Notices,
    subscriber: Subscriber,
}

impl Host {
    pub(super) fn create() -> Result<Self> {
        let operation = "receive a visitor";
        let length = (QUEUE + Notices::words_needed(setup())) * size_of::<u64>();
        let segment = Segment::create(LAYOUT, length).map_err(|error| failed(operation, error))?;
        let queue = notices(operation, &segment, true)?;
        // Nobody else knows of it yet.
        let caller = Caller::new(host(), &ipc::Immortal);
        let subscriber = queue.subscribe(&caller).map_err(|error| failed(operation, error))?;
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

    /// What is left of the notices of a visitor that has left: as many as there can be, even if it
    /// goes on leaving some.
    pub(super) fn take_rest(&mut self) -> impl Iterator<Item = Notice> {
        std::iter::from_fn(|| self.take()).take(DEPTH as usize)
    }

    /// What the visitor has begun so far.
    pub(super) fn begun(&self) -> u64 {
        self.words.load(BEGUN, SeqCst)
    }

    /// Did the visitor leave in order? Its process may have ended since.
    pub(super) fn heard_goodbye(&self) -> bool {
        self.words.load(GOODBYE, Acquire) == 1
    }

    /// Is everything done that was begun when `begun` was that?
    pub(super) fn is_settled(&self, begun: u64) -> bool {
        self.words.load(OLDEST, Acquire) >= begun
    }
}

/// At the agent that visits.
#[derive(Debug)]
pub(super) struct Guest {
    words: MappedWords,
    queue: Notices,
    begun: u64,
    /// From the oldest on that is not done: which are?
    done: VecDeque<bool>,
    born: Incarnation,
}

impl Drop for Guest {
    fn drop(&mut self) {
        // A forked child is not the one to leave.
        if self.born.is_current() {
            self.words.store(GOODBYE, 1, Release);
        }
    }
}

impl Guest {
    pub(super) fn open(file: OwnedFd) -> Result<Self> {
        let operation = "visit an agent";
        let segment = Segment::open(file, LAYOUT).map_err(|error| failed(operation, error))?;
        let queue = notices(operation, &segment, false)?;
        let (words, born) = (segment.words(), Incarnation::current());
        Ok(Self { words, queue, begun: 0, done: VecDeque::new(), born })
    }

    /// Says that a copy begins; to be called *before* looking whether its region is there.
    pub(super) fn begin(&mut self) -> u64 {
        let number = self.begun;
        self.begun += 1;
        self.done.push_back(false);
        // Looking at the board orders it before that.
        self.words.store(BEGUN, self.begun, Release);
        number
    }

    /// Says that it is done, or was not begun after all.
    pub(super) fn end(&mut self, number: u64) {
        let oldest = self.begun - self.done.len() as u64;
        if let Some(done) = number.checked_sub(oldest).and_then(|at| self.done.get_mut(at as usize))
        {
            *done = true;
        }
        while self.done.front() == Some(&true) {
            self.done.pop_front();
        }
        self.words.store(OLDEST, self.begun - self.done.len() as u64, Release);
    }

    /// Says that all copies are done that were ever begun: nothing makes them any more.
    pub(super) fn settle(&mut self) {
        if self.born.is_current() {
            self.done.clear();
            self.words.store(OLDEST, self.begun, Release);
        }
    }

    /// Leaves a notice. False if there is no room for it now.
    pub(super) fn leave(&self, notice: &Notice, life: &Life) -> Result<bool> {
        let operation = "leave a notice";
        let fate = TheOther { name: host(), life };
        let caller = Caller { patience: PATIENCE, ..Caller::new(visitor(), &fate) };
        match self.queue.publish(&caller, (*notice).into(), |_| {}) {
            Ok(_) => Ok(true),
            Err(QueueError::Full) => Ok(false),
            Err(error) => Err(failed(operation, error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both() -> (Host, Guest, Life) {
        let host = Host::create().unwrap();
        let guest = Guest::open(host.as_fd().try_clone_to_owned().unwrap()).unwrap();
        (host, guest, Life::of_this_process().unwrap())
    }

    #[test]
    fn notices_arrive_in_order_until_there_is_no_room() {
        let (mut host, guest, life) = both();
        let notice = |tag| Notice::new(tag, &[7; 3]).unwrap();
        for tag in 0..u64::from(DEPTH) {
            assert!(guest.leave(&notice(tag), &life).unwrap());
        }
        assert!(!guest.leave(&notice(0), &life).unwrap(), "no room");
        for tag in 0..u64::from(DEPTH) {
            let taken = host.take().unwrap();
            assert_eq!((taken.tag, taken.data()), (tag, &[7; 3][..]));
        }
        assert_eq!(host.take(), None);
        assert!(guest.leave(&notice(9), &life).unwrap());
    }

    #[test]
    fn notices_left_after_the_end_are_not_taken_without_end() {
        let (mut host, guest, life) = both();
        let notice = Notice::new(1, b"more").unwrap();
        assert!(guest.leave(&notice, &life).unwrap());
        // One more for each that is taken.
        let taken = host.take_rest().inspect(|_| assert!(guest.leave(&notice, &life).unwrap()));
        assert_eq!(taken.count(), DEPTH as usize);
    }

    #[test]
    fn one_who_leaves_says_so_and_one_who_is_killed_does_not() {
        let (host, guest, _) = both();
        assert!(!host.heard_goodbye());
        drop(guest);
        assert!(host.heard_goodbye());
        let (host, guest, _) = both();
        // It never comes to its end.
        std::mem::forget(guest);
        assert!(!host.heard_goodbye());
    }

    #[test]
    fn what_was_begun_is_settled_when_all_before_it_is_done() {
        let (host, mut guest, _) = both();
        let [first, second, third] = [guest.begin(), guest.begin(), guest.begin()];
        let begun = host.begun();
        assert!(!host.is_settled(begun));
        guest.end(third);
        guest.end(first);
        assert!(host.is_settled(1) && !host.is_settled(begun));
        let later = guest.begin();
        guest.end(second);
        assert!(host.is_settled(begun) && !host.is_settled(host.begun()));
        guest.end(later);
        guest.end(later);
        assert!(host.is_settled(host.begun()));
    }

    #[test]
    fn all_is_settled_when_the_visitor_says_so() {
        let (host, mut guest, _) = both();
        let first = guest.begin();
        guest.begin();
        guest.end(first);
        assert!(!host.is_settled(host.begun()));
        guest.settle();
        guest.end(guest.begun);
        drop(guest);
        assert!(host.is_settled(host.begun()));
    }
}
