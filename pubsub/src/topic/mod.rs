//! A topic in shared memory: settings, publishers, subscribers, origins, and two queues of
//! messages.

mod backpressure;
mod destinations;
mod entry;
mod eviction;
mod given_up;
mod intent;
mod label;
mod layout;
mod losses;
mod origins;
mod participants;
mod presence;
mod publishers;
mod reclaim;
mod remote_accounts;
mod remote_last_sequences;
mod subscribers;
#[cfg(test)]
mod tests;
mod words;

use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use ipc::{Caller, Layout, MappedWords, Owner, Participant, Segment};

use crate::error::Result;
use crate::error_mapping::{During, On};
use crate::pool::Pool;
use crate::settings::SharedSettings;

pub(crate) use self::entry::{Entry, TopicQueue};
pub(crate) use self::layout::PUBLISHER_SLOTS;
pub(crate) use self::losses::LostPublisher;
pub(crate) use self::origins::{Delivery, OriginId};
pub(crate) use self::presence::{Presence, PublishingNode};
pub(crate) use self::publishers::{Published, PublisherSlot};
pub(crate) use self::remote_accounts::{PublisherStart, RemotePublisher, TopicStart};
pub(crate) use self::remote_last_sequences::RemoteLastSequence;

/// Number of last lost publishers that a topic remembers.
pub(crate) const MAX_REMEMBERED_LOSSES: u64 = layout::MAX_REMEMBERED_LOSSES as u64;
pub(crate) const LAYOUT: Layout = Layout::new("fabricast topic", 11);

/// A topic in words of any kind of memory.
#[derive(Debug)]
pub(crate) struct TopicWords<W> {
    words: W,
    number: u32,
    name: String,
    settings: SharedSettings,
    owner: Owner,
    local: TopicQueue<W>,
    inbound: TopicQueue<W>,
    /// Origins that this process receives from: their slots are not reused.
    tracked_origins: Mutex<Vec<OriginId>>,
    /// Held while this process writes accounts of publishers on other nodes.
    accounts_lock: Mutex<()>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PublisherInfo {
    pub(crate) participant: Participant,
    /// Identifier among all publishers that the topic ever had on this node.
    pub(crate) id: u64,
    /// Sequence of its last message; 0 before the first.
    sequence: u64,
    pub(crate) messages: u64,
    pub(crate) bytes: u64,
    /// Messages that were dropped for lack of room.
    pub(crate) dropped: u64,
    /// Since when it waits for room; None while it does not.
    pub(crate) waits_since: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SubscriberInfo {
    /// The subscription's process; None for an invalid number.
    participant: Option<Participant>,
    /// The position that it reads next.
    cursor: u64,
    /// Unread messages of this node and of others, and held ones.
    unread: u32,
    pub(crate) held: u32,
    /// True for one that gets no more messages, and is known as long as it holds some.
    is_evicted: bool,
    /// Missed messages, as the subscriber reports itself.
    missed: u64,
}

/// One process's view of a topic.
#[derive(Debug)]
pub(crate) struct Topic {
    segment: Segment,
    words: TopicWords<MappedWords>,
    /// Waiting publishers of this process are being reported to the service.
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
    /// Creates a topic. The node assigns the number, below 2²⁹, and does not reuse it while
    /// messages of an earlier topic may exist.
    pub(crate) fn create(number: u32, name: &str, settings: &SharedSettings) -> Result<Self> {
        let count = TopicWords::<MappedWords>::required_words(settings);
        let segment =
            Segment::create(LAYOUT, count * size_of::<u64>()).during("create topic").on(name)?;
        let words = TopicWords::format(segment.words(), number, name, settings)?;
        segment.mark_ready();
        Ok(Self { segment, words, is_blocked: AtomicBool::new(false) })
    }

    /// Maps a topic of another process.
    pub(crate) fn open(file: OwnedFd) -> Result<Self> {
        let segment = Segment::open(file, LAYOUT).during("open topic")?;
        let words = TopicWords::attach(segment.words())?;
        Ok(Self { segment, words, is_blocked: AtomicBool::new(false) })
    }

    pub(crate) fn segment(&self) -> BorrowedFd<'_> {
        self.segment.as_fd()
    }

    /// Called after the backpressure of a publisher has begun. True if the service needs a report.
    pub(crate) fn mark_blocked(&self) -> bool {
        // Either this sees that reports have stopped, or the reporting thread sees the
        // backpressure.
        fence(Ordering::SeqCst);
        !self.is_blocked.load(Ordering::Relaxed) && !self.is_blocked.swap(true, Ordering::SeqCst)
    }

    /// True if no publisher waits: then reports stop, until [`mark_blocked`](Self::mark_blocked).
    pub(crate) fn clear_if_unblocked(&self) -> bool {
        if self.backpressure().is_some() {
            return false;
        }
        self.is_blocked.store(false, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        // If another thread has seen that in the meantime, it reports.
        self.backpressure().is_none() || self.is_blocked.swap(true, Ordering::SeqCst)
    }

    /// No later messages are retained for this role; earlier ones stay.
    pub(crate) fn halt(&self, caller: &Caller<'_>, role: Participant) -> Result<()> {
        let halted = self.local().halt(caller, role);
        halted.during("stop retaining messages of topic").on(self.name())
    }

    /// Ends the replication in the name of this role. Its remaining messages were
    /// [counted](Self::give_up) before.
    pub(crate) fn stop_replication(
        &self,
        caller: &Caller<'_>,
        role: Participant,
        local: &Pool,
    ) -> Result<()> {
        let dispose = |words| _ = self.dispose(caller, local.control(), words);
        let expelled = self.local().remove_participant(caller, role, dispose);
        expelled.map(drop).during("stop replicating topic").on(self.name())
    }

    /// The local subscription in the name of this role: the existing one, from its oldest
    /// unreleased message on, or a new one.
    pub(crate) fn subscribe_for_replication(
        &self,
        caller: &Caller<'_>,
        role: Participant,
        local: &Pool,
    ) -> Result<ipc::Subscriber> {
        let operation = "replicate topic";
        let dispose = |words| _ = self.dispose(caller, local.control(), words);
        let resumed =
            self.local().resume(caller, role, dispose).during(operation).on(self.name())?;
        if let Some(resumed) = resumed {
            return Ok(resumed);
        }
        // The creation or end of a subscription was interrupted.
        self.stop_replication(caller, role, local)?;
        self.local().subscribe_as(caller, role).during(operation).on(self.name())
    }
}
