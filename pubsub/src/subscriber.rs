//! Reading.

mod account;
mod departures;
mod ordered;
mod readiness;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gpu::Stream;
use ipc::{Caller, Place, QueueError, Seat, Spin};

use crate::below;
use crate::error::{Error, ErrorKind, Result};
use crate::event::Event;
use crate::house::Desk;
use crate::pool::{Direction, Rest};
use crate::publisher::PublisherId;
use crate::sample::Sample;
use crate::settings::Reliability;
use crate::text;
use crate::topic::{Entry, LostPublisher, MOST_LOST, PublishedElsewhere};

pub(crate) use self::account::{Account, Arrival};
pub(crate) use self::departures::Departure;
use self::departures::Departures;
use self::readiness::{News, Readiness};

/// Reads the messages of one topic: all that are published, on this node or others, from when
/// it subscribed.
///
/// Messages of one publisher come in order; those of different ones may come in any, and those
/// of other nodes are taken in turn with those of this one.
///
/// What it has pulled it holds until the [`Sample`] is dropped, also after the subscriber is.
/// One that holds samples which are in the way of publishers for longer than
/// [`release_deadline`](crate::TopicSettings::release_deadline) is evicted: then nothing more
/// can be pulled ([`Evicted`](ErrorKind::Evicted)), not even what it had still to read, and the
/// samples that it holds [are not valid](Sample::is_valid) any more.
///
/// On a topic that drops messages one that lags misses its own messages and no others. It may hold
/// 16 samples more than the topic's depth, and pulls no more until it drops one of them
/// ([`TooManySamples`](ErrorKind::TooManySamples)): so others have room beside it. It is in the way
/// only where several subscribers hold all messages that there may be.
#[derive(Debug)]
pub struct Subscriber {
    here: ipc::Subscriber,
    arrivals: ipc::Subscriber,
    shared: Arc<Subscription>,
    /// Whose turn it is.
    next: Direction,
    spin: Spin,
    /// Messages that were taken, of either direction, and lie in memory that this process was
    /// not given yet, or are still being written by a stream.
    ahead: [Option<(u64, Entry)>; 2],
    /// What it missed.
    account: Account,
    /// Losses of publishers that were told of: here, and at other nodes.
    losses: [u64; 2],
    is_eviction_told: bool,
    /// Samples that it may hold.
    most_samples: usize,
    /// Its descriptor, once it was asked for.
    readiness: OnceLock<Readiness>,
    /// What the descriptor was made readable for, beside messages.
    announced: News,
}

/// Samples of a topic that drops messages that one subscriber may hold, beyond its depth: half of what
/// may be held, so that others have the other half.
const MORE_SAMPLES: usize = 16;

/// A subscription, as its samples know it; ends with the last of them.
#[derive(Debug)]
pub(crate) struct Subscription {
    pub(crate) desk: Desk,
    here: Seat,
    arrivals: Seat,
    departures: Arc<Departures>,
}

impl Subscription {
    #[inline]
    pub(crate) fn seat(&self, direction: Direction) -> Seat {
        match direction {
            Direction::Here => self.here,
            Direction::Arrivals => self.arrivals,
        }
    }

    #[inline]
    pub(crate) fn is_seated(&self, direction: Direction) -> bool {
        self.desk.topic.queue(direction).is_seated(self.seat(direction))
    }

    /// What was read before was read while it was held.
    #[inline]
    pub(crate) fn was_seated(&self, direction: Direction) -> bool {
        self.desk.topic.queue(direction).was_seated(self.seat(direction))
    }

    #[inline]
    pub(crate) fn release(&self, direction: Direction, position: u64) {
        let Desk { house, topic, .. } = &self.desk;
        let seat = (direction, self.seat(direction));
        topic.release_in(&house.caller(), seat, position, self.desk.pool(direction).ledger());
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if self.desk.house.born.is_current() && self.has_nothing_more_to_release() {
            end(&self.desk, [self.here, self.arrivals]);
        }
    }
}

/// What a subscription gives up of a queue.
#[derive(Debug, Clone, Copy)]
enum End {
    /// All but what its samples hold.
    Unread,
    /// All.
    Everything,
}

impl Desk {
    /// Ends what a subscription has of a queue: now or, as long as a process that is stopped holds
    /// the queue's lock, later. One that was removed has nothing.
    fn ends(&self, direction: Direction, seat: Seat, end: End) {
        let pool = match direction {
            Direction::Here => Arc::clone(&self.here),
            Direction::Arrivals => Arc::clone(&self.arrivals),
        };
        let topic = Arc::clone(&self.topic);
        let attempt = move |caller: &Caller<'_>| {
            let dispose = |words| {
                topic.dispose(caller, pool.ledger(), words);
            };
            let ended = match end {
                End::Unread => topic.queue(direction).stop_seat(caller, seat, dispose).map(drop),
                End::Everything => topic.queue(direction).unseat(caller, seat, dispose),
            };
            !matches!(ended, Err(QueueError::Held(_)))
        };
        if !attempt(&self.house.brief_caller()) {
            self.house.office.retry(self.topic.number(), Box::new(attempt));
        }
    }
}

/// Ends a subscription of this process, of which nothing is held any more.
fn end(desk: &Desk, seats: [Seat; 2]) {
    for (direction, seat) in Direction::BOTH.into_iter().zip(seats) {
        desk.ends(direction, seat, End::Everything);
    }
}

impl Subscriber {
    pub(crate) fn new(desk: Desk) -> Result<Self> {
        let operation = "subscribe";
        desk.house.check(operation)?;
        let topic = &desk.topic;
        let losses = Direction::BOTH.map(|direction| topic.publishers_lost(direction));
        let refused = |cause| below::of_queue(operation, cause).on(topic.name());
        let caller = desk.house.caller();
        // Before it subscribes: what is noted later is looked at then.
        let changes = topic.changes_elsewhere();
        let elsewhere = topic.published_elsewhere();
        let arrivals = topic.arrivals().subscribe(&caller).map_err(refused)?;
        let here = match topic.here().subscribe(&caller) {
            Ok(here) => here,
            Err(cause) => {
                let dispose = |words| {
                    topic.dispose(&caller, desk.arrivals.ledger(), words);
                };
                topic.arrivals().unsubscribe(&caller, &arrivals, dispose).map_err(refused)?;
                return Err(refused(cause));
            }
        };
        topic.enrol(here.seat(), arrivals.seat());
        // Now that all that comes later is for this one.
        let drops = topic.drops();
        let elsewhere = (&*elsewhere, changes);
        let account = Account::new(&topic.published(), drops, elsewhere, arrivals.position());
        desk.changed();
        let spin = desk.house.waiting;
        let most_samples = match topic.settings().reliability {
            // As many as there can be.
            Reliability::Reliable => usize::MAX,
            _ => topic.settings().depth as usize + MORE_SAMPLES,
        };
        let seats = (here.seat(), arrivals.seat());
        let departures = Arc::new(Departures::new(&desk, seats.0, seats.1));
        let shared = Subscription { here: seats.0, arrivals: seats.1, desk, departures };
        Ok(Self {
            here,
            arrivals,
            shared: Arc::new(shared),
            next: Direction::Here,
            spin,
            ahead: [None; 2],
            account,
            losses,
            is_eviction_told: false,
            most_samples,
            readiness: OnceLock::new(),
            announced: News::default(),
        })
    }

    /// The topic's name.
    #[must_use]
    pub fn topic(&self) -> &str {
        self.shared.desk.topic.name()
    }

    /// How it waits from now on.
    pub fn set_spin(&mut self, spin: Spin) {
        self.spin = spin;
    }

    /// Messages that it does not get, of all that were published since it subscribed.
    ///
    /// Publishers number their messages, and each number that is skipped counts, whatever became of that
    /// message: dropped here or on the way from another node, never written, or published while the
    /// other node had [given up](crate::NetworkOptions::lost_after) this one. It counts when the next
    /// message of the same publisher is pulled. What is missing behind the last message counts when
    /// nothing is left to be pulled, of publishers at other nodes a second or two after the last message
    /// was published. One that was [evicted](ErrorKind::Evicted) missed all that was published on
    /// this node until [`poll_event`](Self::poll_event) says so.
    ///
    /// Of a publisher at another node, messages that are missing before the first one that came are
    /// counted only if that node has told when it began to keep messages for this one.
    #[must_use]
    pub fn missed(&self) -> u64 {
        let here = self.missing_behind().map_or(0, |(last, _)| self.account.missing_behind(&last));
        let elsewhere = self.missing_elsewhere();
        let elsewhere = elsewhere.map_or(0, |(told, _)| self.account.missing_elsewhere(&told));
        self.account.missed().wrapping_add(here).wrapping_add(elsewhere)
    }

    /// Can no message be pulled of those that were there before this call?
    fn has_all(&self, direction: Direction) -> bool {
        let is_ahead = self.ahead[direction as usize].is_some();
        !is_ahead && !self.has_more(direction) && self.shared.is_seated(direction)
    }

    /// The last messages of publishers of this node, if some are missing behind those that can be pulled.
    fn missing_behind(&self) -> Option<(Vec<(u64, u64)>, u64)> {
        let topic = &self.shared.desk.topic;
        // First: what is dropped afterwards is looked for again.
        let drops = topic.drops();
        if !self.account.is_behind(drops) {
            return None;
        }
        let last = topic.settled()?;
        // Then: what is settled and not to be had here is missing.
        self.has_all(Direction::Here).then_some((last, drops))
    }

    /// What other nodes have published, if that is news and nothing of them can be pulled.
    fn missing_elsewhere(&self) -> Option<(Vec<PublishedElsewhere>, u64)> {
        let topic = &self.shared.desk.topic;
        // First: what is noted afterwards is looked at again.
        let changes = topic.changes_elsewhere();
        if !self.account.is_behind_elsewhere(changes) {
            return None;
        }
        let told = topic.published_elsewhere();
        // Then: all that was to come of it had been delivered when it was noted.
        self.has_all(Direction::Arrivals).then_some((told, changes))
    }

    /// Counts those that are missing behind the last one.
    fn look_behind(&mut self) {
        let missed = self.account.missed();
        if let Some((last, drops)) = self.missing_behind() {
            self.account.settles(&last, drops);
        }
        if let Some((told, changes)) = self.missing_elsewhere() {
            self.account.settles_elsewhere(&told, changes);
        }
        if self.account.missed() != missed {
            self.says_missed();
        }
    }

    /// For reports of the node.
    #[cold]
    fn says_missed(&self) {
        self.shared.desk.topic.says_missed(self.here.seat(), self.account.missed());
    }

    /// The next message, if there is one. One that a [stream writes](crate::Loan::publish_on) is
    /// there when it is written; those that come after it wait, as it does. If it never will be,
    /// since its publisher was lost, it is passed over, and counts as [missed](Self::missed).
    ///
    /// # Errors
    /// [`Evicted`](ErrorKind::Evicted), [`TooManySamples`](ErrorKind::TooManySamples),
    /// [`Closed`](ErrorKind::Closed), [`Forked`](ErrorKind::Forked).
    #[inline]
    pub fn try_pull(&mut self) -> Result<Option<Sample>> {
        self.try_pull_with(None)
    }

    /// If there is a stream, it waits for what is not written yet.
    #[inline]
    fn try_pull_with(&mut self, stream: Option<&Stream>) -> Result<Option<Sample>> {
        match self.take_next(stream) {
            Ok(None) if self.is_readable() => self.take_last(stream),
            pulled => pulled,
        }
    }

    #[inline]
    fn take_next(&mut self, stream: Option<&Stream>) -> Result<Option<Sample>> {
        self.shared.desk.house.check_fork("pull")?;
        for _ in 0..2 {
            let direction = self.next;
            self.next = match direction {
                Direction::Here => Direction::Arrivals,
                Direction::Arrivals => Direction::Here,
            };
            if let Some(sample) = self.try_pull_from(direction, stream)? {
                return Ok(Some(sample));
            }
            if !self.shared.is_seated(direction) {
                // Removed from one queue: nothing comes from the other one either.
                break;
            }
        }
        self.check_seat()?;
        Ok(None)
    }

    /// Waits for the next message, and until it is written, as [`try_pull`](Self::try_pull) does not.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded), [`Evicted`](ErrorKind::Evicted),
    /// [`TooManySamples`](ErrorKind::TooManySamples), [`Closed`](ErrorKind::Closed),
    /// [`Forked`](ErrorKind::Forked).
    pub fn pull(&mut self, patience: Duration) -> Result<Sample> {
        self.pull_in_time("pull", patience, None)
    }

    fn pull_in_time(
        &mut self,
        operation: &'static str,
        patience: Duration,
        stream: Option<&Stream>,
    ) -> Result<Sample> {
        self.pull_within(operation, patience, stream)?.ok_or_else(|| {
            let detail = format!("no message within {patience:?}");
            Error::new(operation, ErrorKind::DeadlineExceeded, detail).on(self.topic())
        })
    }

    /// None once the patience is over.
    fn pull_within(
        &mut self,
        operation: &'static str,
        patience: Duration,
        stream: Option<&Stream>,
    ) -> Result<Option<Sample>> {
        if let Some(sample) = self.try_pull_with(stream)? {
            return Ok(Some(sample));
        }
        let mut spin = self.spin;
        let topic = Arc::clone(&self.shared.desk.topic);
        let deadline = ipc::deadline(patience);
        let interruption = self.shared.desk.house.interruption();
        let mut rest = Rest::NEW;
        loop {
            // What a stream does rings no bell.
            let is_watched = self.waits_for_streams();
            if is_watched {
                self.shared.tend();
            }
            let end = if is_watched { rest.next(deadline) } else { deadline };
            // Who delivers what arrives rings there, too.
            let waited = topic.here().wait_with(&mut spin, end, || {
                match self.try_pull_with(stream).transpose() {
                    None if !is_watched && self.waits_for_streams() => Some(None),
                    None => {
                        let ended = interruption.check(operation).err();
                        ended.map(|error| Some(Err(error.on(topic.name()))))
                    }
                    pulled => pulled.map(Some),
                }
            });
            match waited {
                Some(Some(pulled)) => {
                    self.spin = spin;
                    return pulled.map(Some);
                }
                None if end >= deadline => {
                    self.spin = spin;
                    return Ok(None);
                }
                None | Some(None) => {}
            }
        }
    }

    #[cold]
    fn check_seat(&self) -> Result<()> {
        if self.shared.is_seated(Direction::Here) && self.shared.is_seated(Direction::Arrivals) {
            return self.shared.desk.house.office.check();
        }
        let detail = match self.evicted() {
            Some(held_for) => {
                format!("its messages were in the way for {}", text::plain_time(held_for))
            }
            None => "its process was taken for dead, or left its node".to_owned(),
        };
        Err(Error::new("pull", ErrorKind::Evicted, detail).on(self.topic()))
    }

    fn evicted(&self) -> Option<Duration> {
        self.shared.desk.topic.evicted(self.here.seat())
    }

    /// Where messages are dropped one subscriber may not hold all of them. What it does not take it may
    /// come to miss.
    #[inline]
    fn check_samples(&self, direction: Direction) -> Result<()> {
        // Each sample has a share of it; so have this, and what makes its descriptor readable.
        let others = 1 + usize::from(self.readiness.get().is_some());
        let held = Arc::strong_count(&self.shared).saturating_sub(others);
        if held < self.most_samples || !self.has_more(direction) {
            return Ok(());
        }
        let detail = format!(
            "it holds {held} and may hold {}. Drop samples, or make the topic deeper",
            self.most_samples
        );
        Err(Error::new("pull", ErrorKind::TooManySamples, detail).on(self.topic()))
    }

    fn has_more(&self, direction: Direction) -> bool {
        let queue = self.shared.desk.topic.queue(direction);
        self.shared.is_seated(direction) && queue.has_more(self.shared.seat(direction))
    }

    /// The next message, whether it can be read yet or not.
    #[inline]
    fn take_from(&mut self, direction: Direction) -> Option<(u64, Entry)> {
        if let Some(ahead) = self.ahead[direction as usize].take() {
            return Some(ahead);
        }
        let topic = &self.shared.desk.topic;
        let taken = match direction {
            Direction::Here => topic.here().take(&mut self.here),
            Direction::Arrivals => topic.arrivals().take(&mut self.arrivals),
        }?;
        let entry = Entry::from_words(taken.entry);
        let is_behind_others = match direction {
            Direction::Here => self.account.takes(entry.publisher, entry.sequence),
            Direction::Arrivals => {
                let note = self.shared.desk.arrivals.ledger().note(entry.block);
                self.account.takes_arrival(Arrival::of(&note), entry.publisher, entry.sequence)
            }
        };
        if is_behind_others {
            self.says_missed();
        }
        Some((taken.position, entry))
    }

    #[inline]
    fn try_pull_from(
        &mut self,
        direction: Direction,
        stream: Option<&Stream>,
    ) -> Result<Option<Sample>> {
        self.check_samples(direction)?;
        let Some((position, entry)) = self.take_from(direction) else { return Ok(None) };
        let (position, entry) = match entry.turn {
            None => (position, entry),
            Some(_) => match self.take_in_order(direction, (position, entry), stream)? {
                Some(taken) => taken,
                None => return Ok(None),
            },
        };
        let pool = self.shared.desk.pool(direction);
        let place = Place { offset: entry.offset, length: entry.length };
        match pool.slice(place, entry.length) {
            Ok(slice) => {
                let shared = Arc::clone(&self.shared);
                Ok(Some(Sample::new(shared, direction, position, entry, slice)))
            }
            // The service is about to give this process that memory.
            Err(cause) if cause.kind() == ErrorKind::WouldBlock => {
                self.ahead[direction as usize] = Some((position, entry));
                Ok(None)
            }
            // It was removed, and what it had is gone.
            Err(_) if !self.shared.is_seated(direction) => Ok(None),
            Err(cause) => {
                self.shared.release(direction, position);
                let error = Error::because("pull", ErrorKind::Malformed, cause);
                Err(error.on(self.topic()))
            }
        }
    }

    /// What happened beside messages, since it was asked last.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.look_behind();
        if self.account.untold() > 0 {
            return Some(Event::Gap { missed: self.account.tell() });
        }
        let topic = &self.shared.desk.topic;
        for (direction, told) in Direction::BOTH.into_iter().zip(&mut self.losses) {
            let lost = topic.publishers_lost(direction);
            // Of very many only the last are known.
            *told = (*told).max(lost.saturating_sub(MOST_LOST));
            while *told < lost {
                *told += 1;
                if let Some(LostPublisher { node, publisher }) =
                    topic.publisher_lost(direction, *told - 1)
                {
                    let publisher = PublisherId(publisher);
                    return Some(match direction {
                        Direction::Here => Event::PublisherLost { publisher },
                        Direction::Arrivals => Event::PublisherLostElsewhere { node, publisher },
                    });
                }
            }
        }
        let is_seated =
            self.shared.is_seated(Direction::Here) && self.shared.is_seated(Direction::Arrivals);
        if !is_seated && !self.is_eviction_told && self.shared.desk.house.born.is_current() {
            self.is_eviction_told = true;
            let topic = &self.shared.desk.topic;
            self.account.settles(&topic.last_of_all(), topic.drops());
            self.says_missed();
            return Some(Event::Evicted { held_for: self.evicted() });
        }
        None
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        if !self.shared.desk.house.born.is_current() {
            return;
        }
        for direction in Direction::BOTH {
            if let Some((position, _)) = self.ahead[direction as usize] {
                self.shared.release(direction, position);
            }
        }
        for seat in
            [(Direction::Here, self.here.seat()), (Direction::Arrivals, self.arrivals.seat())]
        {
            self.shared.desk.ends(seat.0, seat.1, End::Unread);
        }
        self.shared.desk.changed();
    }
}
