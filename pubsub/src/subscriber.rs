//! Reading.

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
use crate::text;
use crate::topic::{Entry, LostPublisher, MOST_LOST};

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
/// On a reliable topic, one who holds samples that are in the way of publishers for longer than
/// [`release_deadline`](crate::TopicSettings::release_deadline) is removed: then nothing more
/// can be pulled ([`Evicted`](ErrorKind::Evicted)), not even what it had still to read, and the
/// samples that it holds [are not valid](Sample::is_valid) any more.
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
    /// Messages that were missed, and not told of yet.
    gap: u64,
    /// Messages that were never written, since their publishers were lost, and those of other nodes
    /// that did not come here.
    lost: u64,
    /// Losses of publishers that were told of: here, and at other nodes.
    losses: [u64; 2],
    is_eviction_told: bool,
    /// Its descriptor, once it was asked for.
    readiness: OnceLock<Readiness>,
    /// What the descriptor was made readable for, beside messages.
    announced: News,
}

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
        if !self.desk.house.born.is_current() || !self.has_nothing_more_to_release() {
            return;
        }
        for direction in Direction::BOTH {
            self.desk.ends(direction, self.seat(direction), End::Everything);
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

impl Subscriber {
    pub(crate) fn new(desk: Desk) -> Result<Self> {
        let operation = "subscribe";
        desk.house.check(operation)?;
        let topic = &desk.topic;
        let losses = Direction::BOTH.map(|direction| topic.publishers_lost(direction));
        let refused = |cause| below::of_queue(operation, cause).on(topic.name());
        let caller = desk.house.caller();
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
        desk.changed();
        let spin = desk.house.waiting;
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
            gap: 0,
            lost: 0,
            losses,
            is_eviction_told: false,
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

    /// Messages that were dropped before it came to read them, or never written, in all.
    ///
    /// Those of another node are counted with the next one that comes from there, from when that node
    /// began to keep messages for this one; and so are those that this node itself dropped for want of
    /// room. So what is missing behind the last one that came is not counted: where the oldest are
    /// dropped that is only what found no room here since readers held as much as there can be. Nor is,
    /// where messages are dropped, what was dropped while the two nodes were not connected, or until the
    /// first message came after either node's service was another one. Who subscribes between two
    /// messages is told what is missing between them, though part of it was before its time. One that
    /// was [evicted](ErrorKind::Evicted) is not told what it would have got.
    #[must_use]
    pub fn missed(&self) -> u64 {
        let dropped = self.here.missed().wrapping_add(self.arrivals.missed());
        dropped.wrapping_add(self.lost)
    }

    /// The next message, if there is one. One that a [stream writes](crate::Loan::publish_on) is
    /// there when it is written; those that come after it wait, as it does. If it never will be,
    /// since its publisher was lost, it is passed over, and counts as [missed](Self::missed).
    ///
    /// # Errors
    /// [`Evicted`](ErrorKind::Evicted), [`Closed`](ErrorKind::Closed),
    /// [`Forked`](ErrorKind::Forked).
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
    /// [`Closed`](ErrorKind::Closed), [`Forked`](ErrorKind::Forked).
    pub fn pull(&mut self, patience: Duration) -> Result<Sample> {
        self.pull_in_time("pull", patience, None)
    }

    fn pull_in_time(
        &mut self,
        operation: &'static str,
        patience: Duration,
        stream: Option<&Stream>,
    ) -> Result<Sample> {
        self.pull_within(patience, stream)?.ok_or_else(|| {
            let detail = format!("no message within {patience:?}");
            Error::new(operation, ErrorKind::DeadlineExceeded, detail).on(self.topic())
        })
    }

    /// None once the patience is over.
    fn pull_within(
        &mut self,
        patience: Duration,
        stream: Option<&Stream>,
    ) -> Result<Option<Sample>> {
        if let Some(sample) = self.try_pull_with(stream)? {
            return Ok(Some(sample));
        }
        let mut spin = self.spin;
        let topic = Arc::clone(&self.shared.desk.topic);
        let deadline = ipc::deadline(patience);
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
        let lost = u64::from(entry.lost);
        self.lost = self.lost.wrapping_add(lost);
        self.gap = self.gap.wrapping_add(taken.missed).wrapping_add(lost);
        Some((taken.position, entry))
    }

    #[inline]
    fn try_pull_from(
        &mut self,
        direction: Direction,
        stream: Option<&Stream>,
    ) -> Result<Option<Sample>> {
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
        if self.gap > 0 {
            return Some(Event::Gap { missed: std::mem::take(&mut self.gap) });
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
