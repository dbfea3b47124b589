//! A topic's words: creation, access, publishing and subscribing.

use std::sync::Mutex;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Duration;

use ipc::{Caller, Owner, Participant, Published, QueueError, SubscriptionId, WordRange, Words};

use super::TopicWords;
use super::entry::{self, Entry, TopicQueue};
use super::layout::{self, store_all};
use super::publishers::{self, PublisherSlot};
use super::subscribers::{self, SubscriberSlot};
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::{During, On};
use crate::ids::{bytes_to_words, serials_before};
use crate::pool::{Direction, OWNED_BY_STREAMS, PoolControl};
use crate::settings::{MAX_TOPIC_NAME, Reliability, SharedLocation, SharedSettings, TopicSettings};
use crate::type_name::TypeName;

impl<W: Words + Clone> TopicWords<W> {
    fn queue_words(settings: &SharedSettings) -> usize {
        TopicQueue::<W>::required_words(settings.queue_setup())
            .next_multiple_of(layout::CACHE_LINE_WORDS)
    }

    pub(crate) fn required_words(settings: &SharedSettings) -> usize {
        layout::QUEUES + 2 * Self::queue_words(settings)
    }

    /// Formats zeroed words.
    pub(crate) fn format(
        words: W,
        number: u32,
        name: &str,
        settings: &SharedSettings,
    ) -> Result<Self> {
        let operation = "create topic";
        let invalid =
            |detail: String| Error::new(operation, ErrorKind::InvalidArgument, detail).on(name);
        if name.is_empty() || name.len() > MAX_TOPIC_NAME {
            let detail = format!("a name of {} bytes: 1 to {MAX_TOPIC_NAME}", name.len());
            return Err(invalid(detail));
        }
        if Owner::other(number).is_none_or(|owner| owner == OWNED_BY_STREAMS) {
            return Err(invalid(format!("the topic number {number} is out of range")));
        }
        for part in Self::queues(&words, settings)? {
            TopicQueue::format_zeroed(part, settings.queue_setup()).during(operation).on(name)?;
        }
        store_all(&words, layout::NAME, bytes_to_words(name.as_bytes()));
        if let Some(name) = settings.type_name {
            let (length, name) = name.words();
            words.store(layout::TYPE_LENGTH, length, Release);
            store_all(&words, layout::TYPE, name);
        }
        let [place, low, high] = settings.place.words();
        for (at, word) in [
            (layout::NAME_LENGTH, name.len() as u64),
            (layout::UUID, low),
            (layout::UUID + 1, high),
            (layout::RELIABILITY, settings.reliability as u64),
            (layout::DEPTH, u64::from(settings.depth)),
            (layout::MAX_HELD, u64::from(settings.max_held)),
            (layout::LARGEST, settings.largest),
            (layout::LOANS, u64::from(settings.loans)),
            (layout::RELEASE, settings.release_microseconds),
            (layout::NUMBER, u64::from(number)),
            (layout::SERIAL, serials_before(number)),
            (layout::PLACE, place),
        ] {
            words.store(at, word, Release);
        }
        Self::attach(words)
    }

    fn queues(words: &W, settings: &SharedSettings) -> Result<[WordRange<W>; 2]> {
        let count = Self::queue_words(settings);
        let part = |number| WordRange::new(words.clone(), layout::QUEUES + number * count, count);
        match (part(0), part(1)) {
            (Some(local), Some(inbound)) => Ok([local, inbound]),
            _ => Err(malformed("the segment is truncated")),
        }
    }

    /// Reads these words, which any process may have written.
    pub(crate) fn attach(words: W) -> Result<Self> {
        let word = |at| words.load(at, Acquire);
        let place = [layout::PLACE, layout::UUID, layout::UUID + 1].map(word);
        let place = SharedLocation::from_words(place);
        let place = place.ok_or_else(|| malformed("unknown memory location"))?;
        let reliability = word(layout::RELIABILITY);
        let reliability = Reliability::ALL.into_iter().find(|kind| *kind as u64 == reliability);
        let number_in = |at, most: u32| {
            u32::try_from(word(at)).ok().filter(|number| (1..=most).contains(number))
        };
        let settings = SharedSettings {
            place,
            reliability: reliability.ok_or_else(|| malformed("unknown reliability"))?,
            depth: number_in(layout::DEPTH, TopicSettings::MAX_DEPTH)
                .ok_or_else(|| malformed("depth out of range"))?,
            max_held: number_in(layout::MAX_HELD, TopicSettings::MAX_DEPTH)
                .ok_or_else(|| malformed("number of held samples out of range"))?,
            largest: word(layout::LARGEST),
            loans: number_in(layout::LOANS, TopicSettings::MAX_LOANS)
                .ok_or_else(|| malformed("number of loans out of range"))?,
            release_microseconds: word(layout::RELEASE),
            type_name: match word(layout::TYPE_LENGTH) {
                0 => None,
                length => {
                    let name = std::array::from_fn(|at| word(layout::TYPE + at));
                    let name = TypeName::from_words(length, name);
                    Some(name.ok_or_else(|| malformed("type name is not UTF-8"))?)
                }
            },
        };
        let length = usize::try_from(word(layout::NAME_LENGTH)).unwrap_or(usize::MAX);
        if length == 0 || length > MAX_TOPIC_NAME {
            return Err(malformed("name is empty or too long"));
        }
        let bytes = (0..length.div_ceil(8)).flat_map(|at| word(layout::NAME + at).to_le_bytes());
        let name = String::from_utf8(bytes.take(length).collect());
        let name = name.map_err(|_| malformed("name is not UTF-8"))?;
        let number = u32::try_from(word(layout::NUMBER)).unwrap_or(u32::MAX);
        let owner = Owner::other(number).ok_or_else(|| malformed("topic number out of range"))?;
        let [local, inbound] = Self::queues(&words, &settings)?
            .map(|part| TopicQueue::attach(part).during("open topic").on(&name));
        Ok(Self {
            words,
            number,
            name,
            settings,
            owner,
            local: local?,
            inbound: inbound?,
            tracked_origins: Mutex::default(),
            accounts_lock: Mutex::default(),
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    pub(crate) fn settings(&self) -> &SharedSettings {
        &self.settings
    }

    /// The queue of messages that are published on this node.
    #[inline]
    pub(crate) fn local(&self) -> &TopicQueue<W> {
        &self.local
    }

    /// The queue of messages of other nodes.
    #[inline]
    pub(crate) fn inbound(&self) -> &TopicQueue<W> {
        &self.inbound
    }

    #[inline]
    pub(crate) fn queue(&self, direction: Direction) -> &TopicQueue<W> {
        direction.of(&self.local, &self.inbound)
    }

    pub(super) fn words(&self) -> &W {
        &self.words
    }

    /// Claims a publisher slot; returns the publisher's identifier.
    pub(crate) fn claim(&self, me: Participant) -> Result<u64> {
        let (slot, serial) = publishers::claim(&self.words, me).on(&self.name)?;
        Ok(slot.id(serial))
    }

    pub(crate) fn reserved_publishers(&self) -> u64 {
        publishers::slots(&self.words).filter(PublisherSlot::has_reservation).count() as u64
    }

    #[inline]
    pub(crate) fn publisher(&self, id: u64) -> PublisherSlot<'_, W> {
        PublisherSlot::of(&self.words, id)
    }

    /// Publishes a message on this node whose block is the caller's. No other thread may publish
    /// with the same slot at that time.
    #[inline]
    pub(crate) fn publish_in(
        &self,
        caller: &Caller<'_>,
        entry: Entry,
        local: &PoolControl<W>,
    ) -> std::result::Result<Published, QueueError> {
        let slot = self.publisher(entry.publisher);
        // First: a subscriber that subscribes in the meantime then does not expect the message.
        slot.begin(entry.sequence);
        let published =
            self.handoff(slot.intent(), &self.local, local).publish(caller, entry, |_| {})?;
        slot.count(entry.length);
        Ok(published)
    }

    /// Frees a message without readers.
    #[inline]
    pub(crate) fn dispose(
        &self,
        caller: &Caller<'_>,
        control: &PoolControl<W>,
        words: [u64; entry::WORDS],
    ) -> bool {
        control.retire(caller, Entry::from_words(words).block, self.owner)
    }

    /// Releases a message that was taken from one of the queues, and frees it if it was the last
    /// holder. Any thread may call this.
    #[inline]
    pub(crate) fn release_in(
        &self,
        caller: &Caller<'_>,
        (direction, subscription_id): (Direction, SubscriptionId),
        position: u64,
        control: &PoolControl<W>,
    ) {
        let queue = self.queue(direction);
        if let Some(words) = queue.release_by(subscription_id, position)
            && self.dispose(caller, control, words)
        {
            queue.mark_disposed(position);
        }
    }

    pub(crate) fn join_subscriptions(&self, local: SubscriptionId, inbound: SubscriptionId) {
        SubscriberSlot::of(&self.words, local).join_subscriptions(local, inbound);
    }

    /// Stores a subscriber's number of missed messages, for reports.
    pub(crate) fn report_missed(&self, local: SubscriptionId, count: u64) {
        SubscriberSlot::of(&self.words, local).report_missed(count);
    }

    /// How long a subscriber blocked publishers, if it was evicted for that.
    pub(crate) fn evicted(&self, local: SubscriptionId) -> Option<Duration> {
        SubscriberSlot::of(&self.words, local).evicted(local)
    }

    pub(crate) fn evictions(&self) -> u64 {
        subscribers::evictions(&self.words)
    }
}

fn malformed(detail: &'static str) -> Error {
    Error::new("open topic", ErrorKind::Malformed, detail)
}
