//! A topic, as it lies in shared memory: what it is like, who publishes, what other nodes sent,
//! and two queues of messages.

mod backpressure;
mod destinations;
mod entry;
mod given_up;
mod intent;
mod layout;
mod losses;
mod origins;
mod participants;
mod publishers;
mod reclaim;
mod remote_heartbeats;
mod subscribers;
#[cfg(test)]
mod tests;
mod words;

use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};

use ipc::{Caller, Layout, MappedWords, Participant, Segment};

use crate::error::Result;
use crate::error_mapping;
use crate::pool::Pool;
use crate::settings::SharedSettings;

pub(crate) use self::entry::Entry;
pub(crate) use self::layout::PUBLISHER_SLOTS;
pub(crate) use self::losses::LostPublisher;
pub(crate) use self::origins::{Delivery, OriginId};
pub(crate) use self::publishers::{Published, PublisherSlot};
pub(crate) use self::remote_heartbeats::RemoteHeartbeat;
pub(crate) use self::words::{TopicQueue, TopicWords};

/// Of so many publishers that died, the last, a topic remembers who they were.
pub(crate) const MAX_REMEMBERED_LOSSES: u64 = layout::MAX_REMEMBERED_LOSSES as u64;
pub(crate) const LAYOUT: Layout = Layout::new("fabricast topic", 9);

/// One process's view of a topic.
#[derive(Debug)]
pub(crate) struct Topic {
    segment: Segment,
    words: TopicWords<MappedWords>,
    /// The service is told again and again that publishers of this process wait.
    is_blocked: AtomicBool,
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
        let count = TopicWords::<MappedWords>::required_words(settings);
        let segment = Segment::create(LAYOUT, count * size_of::<u64>())
            .map_err(|cause| error_mapping::from_segment("make a topic", cause).on(name))?;
        let words = TopicWords::format(segment.words(), number, name, settings)?;
        segment.mark_ready();
        Ok(Self { segment, words, is_blocked: AtomicBool::new(false) })
    }

    /// What another process made.
    pub(crate) fn open(file: OwnedFd) -> Result<Self> {
        let segment = Segment::open(file, LAYOUT);
        let segment =
            segment.map_err(|cause| error_mapping::from_segment("open a topic", cause))?;
        let words = TopicWords::attach(segment.words())?;
        Ok(Self { segment, words, is_blocked: AtomicBool::new(false) })
    }

    /// For others to open.
    pub(crate) fn segment(&self) -> BorrowedFd<'_> {
        self.segment.as_fd()
    }

    /// Said after the pressure of a publisher has begun. True if the service has to be told.
    pub(crate) fn mark_blocked(&self) -> bool {
        // Either this sees that nobody tells it any more, or that one sees the pressure.
        fence(Ordering::SeqCst);
        !self.is_blocked.load(Ordering::Relaxed) && !self.is_blocked.swap(true, Ordering::SeqCst)
    }

    /// True if nobody waits: then the service is told no more, until somebody
    /// [begins](Self::mark_blocked) to.
    pub(crate) fn clear_if_unblocked(&self) -> bool {
        if self.backpressure().is_some() {
            return false;
        }
        self.is_blocked.store(false, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        // If another one has seen that meanwhile, it tells.
        self.backpressure().is_none() || self.is_blocked.swap(true, Ordering::SeqCst)
    }

    /// From here on nothing is kept in the name of this role; what was stays.
    pub(crate) fn halt(&self, caller: &Caller<'_>, role: Participant) -> Result<()> {
        let halted = self.local().halt(caller, role);
        halted.map_err(|cause| self.queue_error("keep no more for other nodes", cause))
    }

    /// Ends what is carried in the name of this role. Who was [to have](Self::give_up) what is left
    /// is counted before.
    pub(crate) fn stop_replication(
        &self,
        caller: &Caller<'_>,
        role: Participant,
        local: &Pool,
    ) -> Result<()> {
        let dispose = |words| {
            self.dispose(caller, local.control(), words);
        };
        let expelled = self.local().remove_participant(caller, role, dispose);
        expelled.map(drop).map_err(|cause| self.queue_error("stop carrying a topic", cause))
    }

    /// The subscription in the name of this role to what is published here: the one that
    /// there is, from the oldest message on that it has not released, or a new one.
    pub(crate) fn subscribe_for_replication(
        &self,
        caller: &Caller<'_>,
        role: Participant,
        local: &Pool,
    ) -> Result<ipc::Subscriber> {
        let refused = |cause| self.queue_error("carry a topic", cause);
        let dispose = |words| {
            self.dispose(caller, local.control(), words);
        };
        if let Some(resumed) = self.local().resume(caller, role, dispose).map_err(refused)? {
            return Ok(resumed);
        }
        // One whose making or ending was cut short.
        self.stop_replication(caller, role, local)?;
        self.local().subscribe_as(caller, role).map_err(refused)
    }
}
