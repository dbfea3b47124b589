//! A topic, as it lies in shared memory: what it is like, who publishes, what other nodes sent,
//! and two queues of messages.

mod alarm;
mod burial;
mod census;
mod entry;
mod intent;
mod layout;
mod origins;
mod pressure;
mod publishers;
#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

use ipc::{
    Caller, Layout, MappedWords, Owner, Part, Participant, Published, Queue, QueueError,
    QueueSetup, Seat, Segment, WhenFull, Words,
};

use self::alarm::{Alarm, Losses};
use self::intent::{HandOver, Intent};
use crate::below;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::{Direction, Ledger, Pool, origin_words};
use crate::settings::{LONGEST_TOPIC, Reliability, SharedPlace, SharedSettings};

pub(crate) use self::census::{Census, SubscriberSeen};
pub(crate) use self::entry::Entry;
pub(crate) use self::origins::Delivery;
pub(crate) use self::publishers::{PublisherLine, PublisherSeen};

const LAYOUT: Layout = Layout::new("fabricast topic", 1);

/// A topic's queue.
pub(crate) type Line<W = MappedWords> = Queue<Part<W>, { entry::WORDS }>;

/// One process's view of a topic.
#[derive(Debug)]
pub(crate) struct Topic<W = MappedWords> {
    words: W,
    segment: Option<Segment>,
    number: u32,
    name: String,
    settings: SharedSettings,
    owner: Owner,
    here: Line<W>,
    arrivals: Line<W>,
}

impl Topic {
    /// Makes one. Its number is its node's to give, below 2²⁹, and is not given again while
    /// messages of the one that had it before may be about.
    pub(crate) fn create(number: u32, name: &str, settings: &SharedSettings) -> Result<Self> {
        let count = Self::words_needed(settings);
        let segment = Segment::create(LAYOUT, count * size_of::<u64>())
            .map_err(|cause| below::of_segment("make a topic", cause).on(name))?;
        let mut topic = Self::format(segment.words(), number, name, settings)?;
        segment.mark_ready();
        topic.segment = Some(segment);
        Ok(topic)
    }

    /// What another process made.
    pub(crate) fn open(file: OwnedFd) -> Result<Self> {
        let segment = Segment::open(file, LAYOUT);
        let segment = segment.map_err(|cause| below::of_segment("open a topic", cause))?;
        let mut topic = Self::attach(segment.words())?;
        topic.segment = Some(segment);
        Ok(topic)
    }

    /// For others to open. None of one that is not in a segment of its own.
    pub(crate) fn segment(&self) -> Option<BorrowedFd<'_>> {
        self.segment.as_ref().map(Segment::as_fd)
    }

    /// Cleans up after one who is dead, or leaves: publishers, subscriptions, and what it was
    /// about to hand over. Afterwards its loans are [reclaimed](Pool::reclaim), pool by pool,
    /// when that was done for all topics. May be done again, if it was cut short.
    pub(crate) fn bury(
        &self,
        caller: &Caller<'_>,
        who: Participant,
        here: &Pool,
        arrivals: &Pool,
    ) -> Result<()> {
        self.bury_in(caller, who, here.ledger(), arrivals.ledger())
    }

    /// Removes a subscriber, found by a seat at one of the queues, and tells it so.
    pub(crate) fn evict(
        &self,
        caller: &Caller<'_>,
        (direction, seat): (Direction, Seat),
        held_for: Duration,
        here: &Pool,
        arrivals: &Pool,
    ) -> Result<()> {
        self.evict_in(caller, (direction, seat), held_for, [here.ledger(), arrivals.ledger()])
    }

    /// As [`deliver_in`](Self::deliver_in).
    pub(crate) fn deliver(
        &self,
        caller: &Caller<'_>,
        origin: (&[u8; 16], u64),
        entry: Entry,
        arrivals: &Pool,
    ) -> Result<Delivery> {
        self.deliver_in(caller, origin, entry, arrivals.ledger())
    }

    /// As [`pass_over_in`](Self::pass_over_in).
    pub(crate) fn pass_over(
        &self,
        caller: &Caller<'_>,
        origin: (&[u8; 16], u64),
        arrivals: &Pool,
    ) -> Result<()> {
        self.pass_over_in(caller, origin, arrivals.ledger())
    }

    /// Ends what is carried in the name of this role.
    pub(crate) fn stop_carrying(
        &self,
        caller: &Caller<'_>,
        role: Participant,
        here: &Pool,
    ) -> Result<()> {
        let dispose = |words| {
            self.dispose(caller, here.ledger(), words);
        };
        let expelled = self.here.expel(caller, role, dispose);
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
        if let Some(resumed) = self.here.resume(caller, role).map_err(refused)? {
            return Ok(resumed);
        }
        // One whose making or ending was cut short.
        self.stop_carrying(caller, role, here)?;
        self.here.subscribe_as(caller, role).map_err(refused)
    }

    /// Lets go of a message that was taken from one of the queues; frees it, if nobody else
    /// has it. By whoever took it, or any other thread.
    #[inline]
    pub(crate) fn release(
        &self,
        caller: &Caller<'_>,
        (direction, seat): (Direction, Seat),
        position: u64,
        pool: &Pool,
    ) {
        self.release_in(caller, (direction, seat), position, pool.ledger());
    }
}

impl<W: Words + Clone> Topic<W> {
    fn setup(settings: &SharedSettings) -> QueueSetup {
        let when_full = match settings.reliability {
            Reliability::Reliable | Reliability::DropNewest => WhenFull::Refuse,
            Reliability::DropOldest => WhenFull::DropOldest,
        };
        QueueSetup { depth: settings.depth, when_full }
    }

    fn queue_words(settings: &SharedSettings) -> usize {
        Line::<W>::words_needed(Self::setup(settings)).next_multiple_of(layout::LINE)
    }

    pub(crate) fn words_needed(settings: &SharedSettings) -> usize {
        layout::QUEUES + 2 * Self::queue_words(settings)
    }

    /// A topic over zeroed words.
    pub(crate) fn format(
        words: W,
        number: u32,
        name: &str,
        settings: &SharedSettings,
    ) -> Result<Self> {
        let operation = "make a topic";
        let invalid = |detail: String| {
            Error::new(operation, ErrorKind::InvalidArgument, detail).on(name.escape_debug())
        };
        if name.is_empty() || name.len() > LONGEST_TOPIC {
            let detail = format!("a name of {} bytes: 1 to {LONGEST_TOPIC}", name.len());
            return Err(invalid(detail));
        }
        if Owner::other(number).is_none() {
            return Err(invalid(format!("the number {number}")));
        }
        for part in Self::queues(&words, settings)? {
            Line::format_zeroed(part, Self::setup(settings))
                .map_err(|cause| below::of_queue(operation, cause).on(name))?;
        }
        for (at, bytes) in name.as_bytes().chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            words.store(layout::NAME + at, u64::from_le_bytes(word), Relaxed);
        }
        let (place, uuid) = match settings.place {
            SharedPlace::Host => (1, [0; 16]),
            SharedPlace::Device(uuid) => (2, uuid),
        };
        let [low, high] = origin_words(&uuid);
        for (at, word) in [
            (layout::NAME_LENGTH, name.len() as u64),
            (layout::UUID, low),
            (layout::UUID + 1, high),
            (layout::RELIABILITY, settings.reliability as u64),
            (layout::DEPTH, u64::from(settings.depth)),
            (layout::LARGEST, settings.largest),
            (layout::RELEASE, settings.release_microseconds),
            (layout::NUMBER, u64::from(number)),
            (layout::PLACE, place),
        ] {
            words.store(at, word, Release);
        }
        Self::attach(words)
    }

    fn queues(words: &W, settings: &SharedSettings) -> Result<[Part<W>; 2]> {
        let count = Self::queue_words(settings);
        let part = |number| Part::new(words.clone(), layout::QUEUES + number * count, count);
        match (part(0), part(1)) {
            (Some(here), Some(arrivals)) => Ok([here, arrivals]),
            _ => Err(malformed("it is cut off")),
        }
    }

    /// What is in these words, which anybody may have written.
    pub(crate) fn attach(words: W) -> Result<Self> {
        let word = |at| words.load(at, Acquire);
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&word(layout::UUID).to_le_bytes());
        uuid[8..].copy_from_slice(&word(layout::UUID + 1).to_le_bytes());
        let place = match word(layout::PLACE) {
            1 => SharedPlace::Host,
            2 => SharedPlace::Device(uuid),
            _ => return Err(malformed("its memory is nowhere")),
        };
        let kinds = [Reliability::Reliable, Reliability::DropOldest, Reliability::DropNewest];
        let reliability = word(layout::RELIABILITY);
        let reliability = kinds.into_iter().find(|kind| *kind as u64 == reliability);
        let settings = SharedSettings {
            place,
            reliability: reliability.ok_or_else(|| malformed("of no known reliability"))?,
            depth: u32::try_from(word(layout::DEPTH))
                .ok()
                .filter(|depth| (1..=crate::TopicSettings::MOST_DEPTH).contains(depth))
                .ok_or_else(|| malformed("its depth makes no sense"))?,
            largest: word(layout::LARGEST),
            release_microseconds: word(layout::RELEASE),
        };
        let length = usize::try_from(word(layout::NAME_LENGTH)).unwrap_or(usize::MAX);
        if length == 0 || length > LONGEST_TOPIC {
            return Err(malformed("its name is of no length"));
        }
        let bytes = (0..length.div_ceil(8)).flat_map(|at| word(layout::NAME + at).to_le_bytes());
        let name = String::from_utf8(bytes.take(length).collect());
        let name = name.map_err(|_| malformed("its name is no text"))?;
        let number = u32::try_from(word(layout::NUMBER)).unwrap_or(u32::MAX);
        let owner = Owner::other(number).ok_or_else(|| malformed("its number is too large"))?;
        let [here, arrivals] = Self::queues(&words, &settings)?.map(|part| {
            let queue = Line::attach(part);
            queue.map_err(|cause| below::of_queue("open a topic", cause).on(&name))
        });
        let (here, arrivals) = (here?, arrivals?);
        Ok(Self { words, segment: None, number, name, settings, owner, here, arrivals })
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

    /// To whom blocks belong that were published.
    pub(crate) fn owner(&self) -> Owner {
        self.owner
    }

    /// What is published on this node.
    #[inline]
    pub(crate) fn here(&self) -> &Line<W> {
        &self.here
    }

    /// What comes from other nodes.
    #[inline]
    pub(crate) fn arrivals(&self) -> &Line<W> {
        &self.arrivals
    }

    #[inline]
    pub(crate) fn queue(&self, direction: Direction) -> &Line<W> {
        match direction {
            Direction::Here => &self.here,
            Direction::Arrivals => &self.arrivals,
        }
    }

    fn words(&self) -> &W {
        &self.words
    }

    fn queue_error(&self, operation: &'static str, cause: QueueError) -> Error {
        below::of_queue(operation, cause).on(&self.name)
    }

    fn hand_over<'a>(
        &self,
        intent: Intent<'a, W>,
        queue: &'a Line<W>,
        ledger: &'a Ledger<W>,
    ) -> HandOver<'a, W> {
        HandOver { intent, queue, ledger, topic: self.owner }
    }

    // --------------------------------------------------------- publishing

    /// A line in the publishers' table; gives the publisher's id.
    pub(crate) fn claim(&self, me: Participant) -> Result<u64> {
        let (line, serial) =
            publishers::claim(&self.words, me).map_err(|error| error.on(&self.name))?;
        Ok(line.id(serial))
    }

    /// The line of a publisher.
    #[inline]
    pub(crate) fn publisher(&self, id: u64) -> PublisherLine<'_, W> {
        PublisherLine::of(&self.words, id)
    }

    /// Publishes on this node a message whose block is the caller's. Nobody else may publish
    /// by the same line meanwhile.
    #[inline]
    pub(crate) fn publish_in(
        &self,
        caller: &Caller<'_>,
        entry: Entry,
        here: &Ledger<W>,
    ) -> std::result::Result<Published, QueueError> {
        let line = self.publisher(entry.publisher);
        let published =
            self.hand_over(line.intent(), &self.here, here).publish(caller, entry, |_| {})?;
        line.count(entry.sequence, entry.length);
        Ok(published)
    }

    /// Frees what nobody reads any more.
    #[inline]
    pub(crate) fn dispose(
        &self,
        caller: &Caller<'_>,
        ledger: &Ledger<W>,
        words: [u64; entry::WORDS],
    ) -> bool {
        ledger.dispose(caller, Entry::from_words(words).block, self.owner)
    }

    #[inline]
    pub(crate) fn release_in(
        &self,
        caller: &Caller<'_>,
        (direction, seat): (Direction, Seat),
        position: u64,
        ledger: &Ledger<W>,
    ) {
        let queue = self.queue(direction);
        if let Some(words) = queue.release_by(seat, position)
            && self.dispose(caller, ledger, words)
        {
            queue.settle(position);
        }
    }

    // ------------------------------------------------------- subscribing

    /// Joins a subscriber's seats at the two queues.
    pub(crate) fn enrol(&self, here: Seat, arrivals: Seat) {
        Alarm::of(&self.words, here).enrol(here, arrivals);
    }

    /// How long a subscriber was in somebody's way, if it was removed for that.
    pub(crate) fn evicted(&self, here: Seat) -> Option<Duration> {
        Alarm::of(&self.words, here).evicted(here)
    }

    /// How many publishers were lost so far.
    #[inline]
    pub(crate) fn publishers_lost(&self) -> u64 {
        Losses(&self.words).count()
    }

    /// Which was lost as the `number`th, if that is still known.
    pub(crate) fn publisher_lost(&self, number: u64) -> Option<u64> {
        Losses(&self.words).get(number)
    }
}

fn malformed(detail: &'static str) -> Error {
    Error::new("open a topic", ErrorKind::Malformed, detail)
}
