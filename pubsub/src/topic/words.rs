//! What stands in a topic's words, whatever they are words of.

use std::sync::Mutex;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

use ipc::{
    Caller, Owner, Part, Participant, Published, Queue, QueueError, QueueSetup, Seat, WhenFull,
    Words,
};

use super::alarm::{self, Alarm};
use super::entry::{self, Entry};
use super::intent::{HandOver, Intent};
use super::layout;
use super::origins::OriginId;
use super::publishers::{self, PublisherLine};
use crate::below;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::{Direction, LEFT_TO_STREAMS, Ledger};
use crate::settings::{LONGEST_TOPIC, Reliability, SharedPlace, SharedSettings};
use crate::type_name::TypeName;

/// A topic's queue.
pub(crate) type Line<W> = Queue<Part<W>, { entry::WORDS }>;

/// A topic.
#[derive(Debug)]
pub(crate) struct TopicWords<W> {
    words: W,
    number: u32,
    name: String,
    settings: SharedSettings,
    owner: Owner,
    here: Line<W>,
    arrivals: Line<W>,
    /// What this process receives from: nobody else gets the line of one of these.
    pub(super) received: Mutex<Vec<OriginId>>,
}

impl<W: Words + Clone> TopicWords<W> {
    fn setup(settings: &SharedSettings) -> QueueSetup {
        let when_full = match settings.reliability {
            Reliability::Reliable => WhenFull::Refuse,
            Reliability::DropOldest => WhenFull::DropOldest,
            Reliability::DropNewest => WhenFull::DropNewest,
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
        if Owner::other(number).is_none_or(|owner| owner == LEFT_TO_STREAMS) {
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
        if let Some(name) = settings.type_name {
            let (length, name) = name.words();
            words.store(layout::TYPE_LENGTH, length, Release);
            for (at, word) in (layout::TYPE..).zip(name) {
                words.store(at, word, Release);
            }
        }
        let [place, low, high] = settings.place.words();
        for (at, word) in [
            (layout::NAME_LENGTH, name.len() as u64),
            (layout::UUID, low),
            (layout::UUID + 1, high),
            (layout::RELIABILITY, settings.reliability as u64),
            (layout::DEPTH, u64::from(settings.depth)),
            (layout::LARGEST, settings.largest),
            (layout::LOANS, u64::from(settings.loans)),
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
        let place = [layout::PLACE, layout::UUID, layout::UUID + 1].map(word);
        let place = SharedPlace::from_words(place);
        let place = place.ok_or_else(|| malformed("its memory is nowhere"))?;
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
            loans: u32::try_from(word(layout::LOANS))
                .ok()
                .filter(|loans| (1..=crate::TopicSettings::MOST_LOANS).contains(loans))
                .ok_or_else(|| malformed("its loans make no sense"))?,
            release_microseconds: word(layout::RELEASE),
            type_name: match word(layout::TYPE_LENGTH) {
                0 => None,
                length => {
                    let name = std::array::from_fn(|at| word(layout::TYPE + at));
                    let name = TypeName::from_words(length, name);
                    Some(name.ok_or_else(|| malformed("the name of its type is no text"))?)
                }
            },
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
            Line::attach(part).map_err(|cause| below::of_queue("open a topic", cause).on(&name))
        });
        let (here, arrivals) = (here?, arrivals?);
        let received = Mutex::default();
        Ok(Self { words, number, name, settings, owner, here, arrivals, received })
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

    pub(super) fn words(&self) -> &W {
        &self.words
    }

    pub(super) fn queue_error(&self, operation: &'static str, cause: QueueError) -> Error {
        below::of_queue(operation, cause).on(&self.name)
    }

    pub(super) fn hand_over<'a>(
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

    /// For how many publishers' loans memory is reserved.
    pub(crate) fn promised(&self) -> u64 {
        publishers::lines(&self.words).filter(PublisherLine::is_promised).count() as u64
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
        // First: one that subscribes meanwhile and does not get it knows that it came before.
        line.begin(entry.sequence);
        let published =
            self.hand_over(line.intent(), &self.here, here).publish(caller, entry, |_| {})?;
        line.count(entry.length);
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
        ledger.retire(caller, Entry::from_words(words).block, self.owner)
    }

    /// Lets go of a message that was taken from one of the queues; frees it, if nobody else
    /// has it. By whoever took it, or any other thread.
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

    /// A subscriber says how many messages it missed, for reports.
    pub(crate) fn says_missed(&self, here: Seat, count: u64) {
        Alarm::of(&self.words, here).says_missed(count);
    }

    /// How long a subscriber was in somebody's way, if it was evicted for that.
    pub(crate) fn evicted(&self, here: Seat) -> Option<Duration> {
        Alarm::of(&self.words, here).evicted(here)
    }

    /// How many subscribers were evicted so far since they were in somebody's way.
    pub(crate) fn evictions(&self) -> u64 {
        alarm::evictions(&self.words)
    }
}

fn malformed(detail: &'static str) -> Error {
    Error::new("open a topic", ErrorKind::Malformed, detail)
}
