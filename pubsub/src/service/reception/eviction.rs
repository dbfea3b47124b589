//! Subscribers that are in somebody's way.
//!
//! A topic's settings say how long a message may be held. That counts from the moment at
//! which a publisher waits: who holds messages that nobody needs the room of may keep them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use ipc::{Participant, Seat};

use super::{IN_A_ROW, LOOK, Reception};
use crate::pool::Direction;
use crate::text;

/// For how long a topic is looked at when nobody seems to wait any more: longer than it takes until
/// it is said again that somebody does.
const LINGERING: Duration = Duration::from_secs(2);

/// How soon it is looked again after one was evicted.
const SOON: Duration = Duration::from_millis(10);

/// What is looked at again and again: topics that somebody waits at, as far as it was said. Who waits
/// says so when that begins and each second; and where somebody takes part, or its service has
/// ended, it is looked for.
#[derive(Debug, Default)]
pub(super) struct Watches {
    watched: BTreeMap<(u32, Direction), Watch>,
    /// One was evicted the last time: others may be in the way next.
    has_evicted: bool,
    /// How often a topic was looked at.
    #[cfg(test)]
    pub(super) looks: u64,
}

/// One topic: what each of its subscribers holds, and for how long.
#[derive(Debug, Default)]
struct Watch {
    /// Each with the position of its oldest message, and for how long publishers or other nodes have waited
    /// since it is that.
    holders: Vec<(Seat, u64, Duration)>,
    /// When it was looked at last, if there was a wait then and no room.
    seen: Option<Instant>,
    /// Until then it is looked at, also if nobody waits.
    until: Option<Instant>,
}

/// What is found at a topic at which publishers or other nodes wait.
struct Waiting {
    /// Those that hold messages, with the position of the oldest.
    holders: Vec<(Seat, u64)>,
    /// For how long one may be held meanwhile.
    deadline: Duration,
}

impl Watch {
    /// Takes note of who holds what now; gives those that hold the oldest message of all, and for how
    /// long each has held it during waits, if that is too long. So several that stopped at
    /// different messages are too late at the same time, though there is some room after each.
    fn look(&mut self, now: Instant, found: Option<&Waiting>) -> Vec<(Seat, Duration)> {
        let Some(found) = found.filter(|found| !found.holders.is_empty()) else {
            self.seen = None;
            return Vec::new();
        };
        let passed = self.seen.map_or(Duration::ZERO, |seen| now.saturating_duration_since(seen));
        let held = |(seat, position): &(Seat, u64)| {
            let same = |it: &&(Seat, u64, Duration)| (it.0, it.1) == (*seat, *position);
            let before = self.holders.iter().find(same);
            let held_for = before.map_or(Duration::ZERO, |(_, _, held_for)| *held_for + passed);
            (*seat, *position, held_for)
        };
        self.holders = found.holders.iter().map(held).collect();
        self.seen = Some(now);
        let oldest = self.holders.iter().map(|(_, position, _)| *position).min();
        let holders = self.holders.iter().filter(|(_, position, _)| Some(*position) == oldest);
        let late = holders.filter(|(_, _, held_for)| *held_for >= found.deadline);
        late.map(|(seat, _, held_for)| (*seat, *held_for)).collect()
    }
}

impl Watches {
    /// Somebody waits, or did a moment ago.
    pub(super) fn begin(&mut self, now: Instant, which: (u32, Direction)) {
        self.watched.entry(which).or_default().until = Some(now + LINGERING);
    }

    /// Looks at one, and what is found if there is a wait. Gives who has held what is in the way for too
    /// long. Without a wait for a while it is not looked at again.
    fn look(
        &mut self,
        now: Instant,
        which: (u32, Direction),
        found: Option<&Waiting>,
    ) -> Vec<(Seat, Duration)> {
        #[cfg(test)]
        {
            self.looks += 1;
        }
        let Some(watch) = self.watched.get_mut(&which) else { return Vec::new() };
        let late = watch.look(now, found);
        if found.is_some() {
            watch.until = Some(now + LINGERING);
        } else if watch.until.is_none_or(|until| now >= until) {
            self.watched.remove(&which);
        }
        late
    }

    pub(super) fn forget(&mut self, number: u32) {
        for direction in Direction::BOTH {
            self.watched.remove(&(number, direction));
        }
    }

    /// How soon it is to be looked again; None if there is nothing to look at.
    pub(super) fn longest_wait(&self) -> Option<Duration> {
        let any = self.watched.keys().next();
        any.map(|_| if self.has_evicted { SOON } else { LOOK })
    }

    #[cfg(test)]
    pub(super) fn has_any(&self) -> bool {
        !self.watched.is_empty()
    }
}

impl Reception {
    /// Somebody came or went, or has come back: was it said to the last service that it waits?
    pub(super) fn watch(&mut self, number: u32) {
        let now = Instant::now();
        let kept = self.registry.topics.get(&number);
        if kept.is_some_and(|kept| kept.topic.pressure().is_some()) {
            self.watches.begin(now, (number, Direction::Here));
        }
        if self.carrying.carrier.as_ref().is_some_and(|it| it.waits(number)) {
            self.watches.begin(now, (number, Direction::Arrivals));
        }
    }

    /// Evicts those that hold for too long what others wait for.
    pub(super) fn evict(&mut self) {
        let now = Instant::now();
        for number in self.carrying.crowded() {
            self.watches.begin(now, (number, Direction::Arrivals));
        }
        // What nobody uses is there for other nodes only, and cannot be there for ever.
        for number in self.registry.unused() {
            self.watches.begin(now, (number, Direction::Here));
        }
        let (mut changed, mut stalled) = (BTreeSet::new(), BTreeSet::new());
        for which in self.watches.watched.keys().copied().collect::<Vec<_>>() {
            // Where one was evicted another one may be in the way, and has been for long enough.
            for _ in 0..IN_A_ROW {
                if !self.evict_from(now, which, &mut stalled) {
                    break;
                }
                changed.insert(which.0);
            }
        }
        self.watches.has_evicted = !changed.is_empty();
        for number in changed {
            self.has_changed(number);
        }
        for number in stalled {
            if let Some(carrier) = &mut self.carrying.carrier {
                carrier.is_in_the_way(number);
            }
        }
    }

    /// Evicts those that have held the oldest message of a topic for too long. True if one was.
    fn evict_from(
        &mut self,
        now: Instant,
        which: (u32, Direction),
        stalled: &mut BTreeSet<u32>,
    ) -> bool {
        let (number, direction) = which;
        let Some(seat) = &self.seat else { return false };
        let Some((topic, [here, arrivals])) = self.registry.desk(number) else {
            self.watches.forget(number);
            return false;
        };
        let carrier = self.carrying.carrier.as_ref();
        // Only while somebody waits is anything in the way.
        let waits = match direction {
            Direction::Here => topic.pressure().is_some() || self.registry.is_unused(number),
            Direction::Arrivals => carrier.is_some_and(|it| it.waits(number)),
        };
        let found = waits.then(|| {
            let mut holders = topic.holders(direction);
            if direction == Direction::Here {
                holders.retain(|(_, it)| !topic.is_being_written(*it, here.ledger()));
            }
            Waiting { holders, deadline: topic.settings().release_deadline() }
        });
        let holders = found.iter().flat_map(|found| &found.holders);
        let position = holders.map(|(_, position)| *position).min();
        let mut has_evicted = false;
        for (holder, held_for) in self.watches.look(now, which, found.as_ref()) {
            // Other nodes are waited for by those who carry the messages there, who know which
            // of them it is; and for longer, since there is more that may take time.
            if holder.who().is_some_and(Participant::is_role) {
                if carrier.is_some_and(|it| held_for >= it.patience(number)) {
                    stalled.insert(number);
                }
                continue;
            }
            let at = (direction, holder);
            let ledgers = [here.ledger(), arrivals.ledger()];
            match topic.evict_in(&seat.caller(), at, held_for, ledgers) {
                Ok(()) => {
                    let who = holder.who();
                    let guest = who.and_then(|who| self.guests.get(&who));
                    tracing::warn!(
                        topic = topic.name(),
                        process = guest.map(|guest| guest.process),
                        label = guest.map(|guest| guest.label.as_str()),
                        participant = who.map(tracing::field::display),
                        position,
                        held_for = %text::plain_time(held_for),
                        "a subscriber was evicted: it held a message for too long"
                    );
                    has_evicted = true;
                }
                Err(error) => tracing::debug!(%error, "cannot evict a subscriber yet"),
            }
        }
        has_evicted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seats of a queue.
    fn seats<const N: usize>() -> [Seat; N] {
        let setup = ipc::QueueSetup { depth: 4, when_full: ipc::WhenFull::Refuse };
        let words = ipc::LocalWords::zeroed(ipc::Queue::<ipc::LocalWords, 1>::words_needed(setup));
        let queue = ipc::Queue::<_, 1>::format(words, setup).unwrap();
        let me = Participant::new(1, 1).unwrap();
        let caller = ipc::Caller::new(me, &ipc::Immortal);
        std::array::from_fn(|_| queue.subscribe(&caller).unwrap().seat())
    }

    fn waiting(holders: &[(Seat, u64)], deadline: Duration) -> Waiting {
        Waiting { holders: holders.to_vec(), deadline }
    }

    #[test]
    fn only_the_same_message_for_the_whole_deadline_is_too_long() {
        let [seat] = seats();
        let (start, deadline) = (Instant::now(), Duration::from_secs(1));
        let which = (7, Direction::Here);
        let mut watches = Watches::default();
        watches.begin(start, which);
        let mut look = |tenths, found: Option<u64>| {
            let found = found.map(|position| waiting(&[(seat, position)], deadline));
            watches.look(start + deadline / 10 * tenths, which, found.as_ref())
        };
        assert_eq!(look(0, Some(7)), []);
        assert_eq!(look(9, Some(7)), []);
        // It is slow, but lets go.
        assert_eq!(look(10, Some(8)), []);
        assert_eq!(look(19, Some(8)), []);
        // While nobody waits it may be held.
        assert_eq!(look(20, None), []);
        assert_eq!(look(30, Some(8)), []);
        assert_eq!(look(31, Some(8)), [(seat, deadline)]);
    }

    #[test]
    fn those_that_hold_different_messages_are_too_late_at_the_same_time() {
        let [first, second, slow] = seats();
        let (start, deadline) = (Instant::now(), Duration::from_secs(1));
        let mut watch = Watch::default();
        let mut look = |tenths, holders: &[(Seat, u64)]| {
            watch.look(start + deadline / 10 * tenths, Some(&waiting(holders, deadline)))
        };
        assert_eq!(look(0, &[(first, 4), (second, 5), (slow, 5)]), []);
        assert_eq!(look(6, &[(first, 4), (second, 5), (slow, 6)]), []);
        assert_eq!(look(10, &[(first, 4), (second, 5), (slow, 6)]), [(first, deadline)]);
        // There is room for a moment, which does not count.
        assert_eq!(look(10, &[]), []);
        assert_eq!(look(15, &[(second, 5), (slow, 6)]), [(second, deadline)]);
        assert_eq!(look(15, &[]), []);
        assert_eq!(look(17, &[(slow, 6)]), []);
        assert_eq!(look(23, &[(slow, 6)]), [(slow, deadline)]);
    }

    #[test]
    fn where_nobody_waits_nothing_is_looked_at() {
        let [seat] = seats();
        let (start, deadline) = (Instant::now(), Duration::from_secs(1));
        let which = (7, Direction::Here);
        let mut watches = Watches::default();
        let found = waiting(&[(seat, 3)], deadline);
        watches.begin(start, which);
        assert!(watches.has_any());
        // Nobody waited when it was looked at first; but that may be said again before long.
        assert_eq!(watches.look(start, which, None), []);
        let again = start + LINGERING / 2;
        assert_eq!(watches.look(again, which, Some(&found)), []);
        let late = again + LINGERING;
        assert_eq!(watches.look(late, which, Some(&found)), [(seat, LINGERING)]);
        // What is in the way of somebody is, however long ago that was said.
        for seconds in 1..100 {
            let now = late + Duration::from_secs(seconds);
            assert!(!watches.look(now, which, Some(&found)).is_empty());
        }
        let end = late + Duration::from_secs(99);
        assert_eq!(watches.look(end + LINGERING / 2, which, None), []);
        assert!(watches.has_any());
        assert_eq!(watches.look(end + LINGERING, which, None), []);
        assert!(!watches.has_any());
        assert_eq!(watches.look(end + LINGERING, which, Some(&found)), []);
        watches.begin(end, which);
        watches.forget(7);
        assert!(!watches.has_any());
    }
}
