//! A topic, as it lies in shared memory: what it is like, who publishes, what other nodes sent,
//! and two queues of messages.

mod alarm;
mod burial;
mod census;
mod destinations;
mod entry;
mod given_up;
mod intent;
mod layout;
mod losses;
mod origins;
mod pressure;
mod published_elsewhere;
mod publishers;
#[cfg(test)]
mod tests;
mod words;

use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};

use ipc::{Caller, Layout, MappedWords, Participant, Segment};

use crate::below;
use crate::error::Result;
use crate::pool::Pool;
use crate::settings::SharedSettings;

pub(crate) use self::entry::Entry;
pub(crate) use self::layout::MOST_PUBLISHERS;
pub(crate) use self::losses::LostPublisher;
pub(crate) use self::origins::{Delivery, OriginId};
pub(crate) use self::published_elsewhere::PublishedElsewhere;
pub(crate) use self::publishers::{Published, PublisherLine};
pub(crate) use self::words::{Line, TopicWords};

/// Of so many publishers that died, the last, a topic remembers who they were.
pub(crate) const MOST_LOST: u64 = layout::MOST_LOST as u64;
pub(crate) const LAYOUT: Layout = Layout::new("fabricast topic", 9);

/// One process's view of a topic.
#[derive(Debug)]
pub(crate) struct Topic {
    segment: Segment,
    words: TopicWords<MappedWords>,
    /// The service is told again and again that publishers of this process wait.
    is_waited_at: AtomicBool,
}

impl Deref for Topic {
    type Target = TopicWords<MappedWords>;

    #[inline]
    fn deref(&self) -> &TopicWords<MappedWords> {
        &self.words
    }
}

impl Topic {
    /// Makes one. Its number is its node's to give, below 2²⁹, and is not given again while
    /// messages of the one that had it before may be about.
    pub(crate) fn create(number: u32, name: &str, settings: &SharedSettings) -> Result<Self> {
        let count = TopicWords::<MappedWords>::words_needed(settings);
        let segment = Segment::create(LAYOUT, count * size_of::<u64>())
            .map_err(|cause| below::of_segment("make a topic", cause).on(name))?;
        let words = TopicWords::format(segment.words(), number, name, settings)?;
        segment.mark_ready();
        Ok(Self { segment, words, is_waited_at: AtomicBool::new(false) })
    }

    /// What another process made.
    pub(crate) fn open(file: OwnedFd) -> Result<Self> {
        let segment = Segment::open(file, LAYOUT);
        let segment = segment.map_err(|cause| below::of_segment("open a topic", cause))?;
        let words = TopicWords::attach(segment.words())?;
        Ok(Self { segment, words, is_waited_at: AtomicBool::new(false) })
    }

    /// For others to open.
    pub(crate) fn segment(&self) -> BorrowedFd<'_> {
        self.segment.as_fd()
    }

    /// Said after the pressure of a publisher has begun. True if the service has to be told.
    pub(crate) fn begins_to_wait(&self) -> bool {
        // Either this sees that nobody tells it any more, or that one sees the pressure.
        fence(Ordering::SeqCst);
        !self.is_waited_at.load(Ordering::Relaxed)
            && !self.is_waited_at.swap(true, Ordering::SeqCst)
    }

    /// True if nobody waits: then the service is told no more, until somebody
    /// [begins](Self::begins_to_wait) to.
    pub(crate) fn has_stopped_waiting(&self) -> bool {
        if self.pressure().is_some() {
            return false;
        }
        self.is_waited_at.store(false, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        // If another one has seen that meanwhile, it tells.
        self.pressure().is_none() || self.is_waited_at.swap(true, Ordering::SeqCst)
    }

    /// From here on nothing is kept in the name of this role; what was stays.
    pub(crate) fn halt(&self, caller: &Caller<'_>, role: Participant) -> Result<()> {
        let halted = self.here().halt(caller, role);
        halted.map_err(|cause| self.queue_error("keep no more for other nodes", cause))
    }

    /// Ends what is carried in the name of this role. Who was [to have](Self::give_up) what is left
    /// is counted before.
    pub(crate) fn stop_carrying(
        &self,
        caller: &Caller<'_>,
        role: Participant,
        here: &Pool,
    ) -> Result<()> {
        let dispose = |words| {
            self.dispose(caller, here.ledger(), words);
        };
        let expelled = self.here().expel(caller, role, dispose);
        expelled.map(drop).map_err(|cause| self.queue_error("stop carrying a topic", cause))
    }

    /// The subscription in the name of this role to what is published here: the one that
    /// there is, from the oldest message on that it has not released, or a new one.
    pub(crate) fn carry(
        &self,
        caller: &Caller<'_>,
        role: Participant,
        here: &Pool,
    ) -> Result<ipc::Subscriber> {
        let refused = |cause| self.queue_error("carry a topic", cause);
        let dispose = |words| {
            self.dispose(caller, here.ledger(), words);
        };
        if let Some(resumed) = self.here().resume(caller, role, dispose).map_err(refused)? {
            return Ok(resumed);
        }
        // One whose making or ending was cut short.
        self.stop_carrying(caller, role, here)?;
        self.here().subscribe_as(caller, role).map_err(refused)
    }
}
