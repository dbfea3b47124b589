//! Subscribers that are in somebody's way.
//!
//! A topic's settings say how long a message may be held. That counts from the moment at
//! which a publisher waits: who holds messages that nobody needs the room of may keep them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ipc::Participant;

use super::Reception;
use crate::pool::Direction;
use crate::text;

/// For how long a topic is looked at when nobody seems to wait any more: longer than it takes until
/// it is said again that somebody does.
const LINGERING: Duration = Duration::from_secs(2);

/// What is looked at again and again: topics that somebody waits at, as far as it was said. Who waits
/// says so when that begins and each second; and where somebody takes part, or its service has
/// ended, it is looked for.
#[derive(Debug, Default)]
pub(super) struct Watches {
    watched: BTreeMap<(u32, Direction), Watch>,
    /// How often a topic was looked at.
    #[cfg(test)]
    pub(super) looks: u64,
}

/// One topic: which position is in the way, and since when.
#[derive(Debug, Default, Clone, Copy)]
struct Watch {
    in_the_way: Option<(u64, Instant)>,
    /// Until then it is looked at, also if nobody waits.
    until: Option<Instant>,
}

impl Watch {
    /// Takes note of what is in the way now; gives for how long, if that is too long.
    fn look(&mut self, now: Instant, found: Option<u64>, deadline: Duration) -> Option<Duration> {
        self.in_the_way = match (self.in_the_way, found) {
            (_, None) => None,
            (Some((position, since)), Some(found)) if position == found => Some((position, since)),
            (_, Some(found)) => Some((found, now)),
        };
        let since = self.in_the_way.map(|(_, since)| now.saturating_duration_since(since));
        since.filter(|since| *since >= deadline)
    }
}

impl Watches {
    /// Somebody waits, or did a moment ago.
    pub(super) fn begin(&mut self, now: Instant, which: (u32, Direction)) {
        self.watched.entry(which).or_default().until = Some(now + LINGERING);
    }

    /// Looks at one: is there somebody who waits, and what is in the way now? Gives for how long
    /// that has been, if that is too long. Where nobody has waited for a while it is not looked at
    /// again.
    fn look(
        &mut self,
        now: Instant,
        which: (u32, Direction),
        found: Option<(Option<u64>, Duration)>,
    ) -> Option<Duration> {
        #[cfg(test)]
        {
            self.looks += 1;
        }
        let watch = self.watched.get_mut(&which)?;
        let (position, deadline) = found.unwrap_or_default();
        let too_long = watch.look(now, position, deadline);
        if found.is_some() {
            watch.until = Some(now + LINGERING);
        } else if watch.until.is_none_or(|until| now >= until) {
            self.watched.remove(&which);
        }
        too_long
    }

    pub(super) fn forget(&mut self, number: u32) {
        for direction in Direction::BOTH {
            self.watched.remove(&(number, direction));
        }
    }

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
        let Some(seat) = &self.seat else { return };
        let now = Instant::now();
        for number in self.carrying.crowded() {
            self.watches.begin(now, (number, Direction::Arrivals));
        }
        // What nobody uses is there for other nodes only, and cannot be there for ever.
        for number in self.registry.unused() {
            self.watches.begin(now, (number, Direction::Here));
        }
        let (mut changed, mut stalled) = (Vec::new(), Vec::new());
        for which in self.watches.watched.keys().copied().collect::<Vec<_>>() {
            let (number, direction) = which;
            let Some((topic, [here, arrivals])) = self.registry.desk(number) else {
                self.watches.forget(number);
                continue;
            };
            // Only while somebody waits is anything in the way.
            let waits = match direction {
                Direction::Here => topic.pressure().is_some() || self.registry.is_unused(number),
                Direction::Arrivals => {
                    self.carrying.carrier.as_ref().is_some_and(|it| it.waits(number))
                }
            };
            let found = if waits { topic.in_the_way(direction) } else { None };
            let found = found.filter(|(position, _)| {
                direction == Direction::Arrivals
                    || !topic.is_being_written(*position, here.ledger())
            });
            let position = found.as_ref().map(|(position, _)| *position);
            let deadline = topic.settings().release_deadline();
            let seen = waits.then_some((position, deadline));
            let Some(held_for) = self.watches.look(now, which, seen) else { continue };
            for holder in found.into_iter().flat_map(|(_, holders)| holders) {
                // Other nodes are waited for by those who carry the messages there, who know which
                // of them it is; and for longer, since there is more that may take time.
                if holder.who().is_some_and(Participant::is_role) {
                    if self
                        .carrying
                        .carrier
                        .as_ref()
                        .is_some_and(|it| held_for >= it.patience(number))
                    {
                        stalled.push(number);
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
                        changed.push(number);
                    }
                    Err(error) => tracing::debug!(%error, "cannot evict a subscriber yet"),
                }
            }
        }
        for number in changed {
            self.has_changed(number);
        }
        for number in stalled {
            if let Some(carrier) = &mut self.carrying.carrier {
                carrier.is_in_the_way(number);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_position_for_the_whole_deadline_is_too_long() {
        let (start, deadline) = (Instant::now(), Duration::from_secs(1));
        let mut watch = Watch::default();
        let mut look = |tenths, found| watch.look(start + deadline / 10 * tenths, found, deadline);
        assert_eq!(look(0, Some(7)), None);
        assert_eq!(look(9, Some(7)), None);
        // It moved on: somebody is slow, but lets go.
        assert_eq!(look(10, Some(8)), None);
        assert_eq!(look(19, Some(8)), None);
        // Nobody waited for a moment.
        assert_eq!(look(20, None), None);
        assert_eq!(look(21, Some(8)), None);
        assert_eq!(look(32, Some(8)), Some(deadline / 10 * 11));
    }

    #[test]
    fn where_nobody_waits_nothing_is_looked_at() {
        let (start, deadline) = (Instant::now(), Duration::from_secs(1));
        let which = (7, Direction::Here);
        let mut watches = Watches::default();
        watches.begin(start, which);
        assert!(watches.has_any());
        // Nobody waited when it was looked at first; but that may be said again before long.
        assert_eq!(watches.look(start, which, None), None);
        let again = start + LINGERING / 2;
        assert_eq!(watches.look(again, which, Some((Some(3), deadline))), None);
        let late = again + LINGERING;
        assert_eq!(watches.look(late, which, Some((Some(3), deadline))), Some(LINGERING));
        // What is in the way of somebody is, however long ago that was said.
        for seconds in 1..100 {
            let now = late + Duration::from_secs(seconds);
            assert!(watches.look(now, which, Some((Some(3), deadline))).is_some());
        }
        let end = late + Duration::from_secs(99);
        assert_eq!(watches.look(end + LINGERING / 2, which, None), None);
        assert!(watches.has_any());
        assert_eq!(watches.look(end + LINGERING, which, None), None);
        assert!(!watches.has_any());
        assert_eq!(watches.look(end + LINGERING, which, Some((Some(3), deadline))), None);
        watches.begin(end, which);
        watches.forget(7);
        assert!(!watches.has_any());
    }
}
