//! Subscribers that are in somebody's way.
//!
//! A topic's settings say how long a message may be held. That counts from the moment at
//! which a publisher waits: who holds messages that nobody needs the room of may keep them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ipc::Participant;

use super::Reception;
use crate::pool::Direction;

/// What is looked at again and again: topics that somebody publishes to.
#[derive(Debug, Default)]
pub(super) struct Watches(BTreeMap<(u32, Direction), Watch>);

/// One topic: which position is in the way, and since when.
#[derive(Debug, Default, Clone, Copy)]
struct Watch {
    in_the_way: Option<(u64, Instant)>,
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
    fn watch(&mut self, number: u32, is_wanted: bool) {
        for direction in [Direction::Here, Direction::Arrivals] {
            if is_wanted {
                self.0.entry((number, direction)).or_default();
            } else {
                self.0.remove(&(number, direction));
            }
        }
    }

    pub(super) fn forget(&mut self, number: u32) {
        self.watch(number, false);
    }

    pub(super) fn has_any(&self) -> bool {
        !self.0.is_empty()
    }
}

impl Reception {
    /// Looks after a topic as long as there may be messages that somebody is in the way of.
    pub(super) fn watch(&mut self, number: u32) {
        let kept = self.registry.topics.get(&number);
        let is_wanted = kept.is_some_and(|kept| kept.publishes || self.carrying.is_on());
        self.watches.watch(number, is_wanted);
    }

    /// Removes those that hold for too long what others wait for.
    pub(super) fn evict(&mut self) {
        let Some(seat) = &self.seat else { return };
        let now = Instant::now();
        let (mut changed, mut stalled) = (Vec::new(), Vec::new());
        for ((number, direction), watch) in &mut self.watches.0 {
            let Some((topic, [here, arrivals])) = self.registry.desk(*number) else { continue };
            // Only while somebody waits is anything in the way.
            let waits = match direction {
                Direction::Here => topic.pressure().is_some(),
                Direction::Arrivals => self.carrying.waits(*number),
            };
            // What nobody uses is there for other nodes only, and cannot be there for ever.
            let kept = self.registry.topics.get(number);
            let is_unused =
                *direction == Direction::Here && kept.is_some_and(|kept| kept.users.is_empty());
            let found = if waits || is_unused { topic.in_the_way(*direction) } else { None };
            let position = found.as_ref().map(|(position, _)| *position);
            let deadline = topic.settings().release_deadline();
            let Some(held_for) = watch.look(now, position, deadline) else { continue };
            for holder in found.into_iter().flat_map(|(_, holders)| holders) {
                // Other nodes are waited for by those who carry the messages there, who know which
                // of them it is; and for longer, since there is more that may take time.
                if holder.who().is_some_and(Participant::is_role) {
                    if self.carrying.patience(*number).is_some_and(|longest| held_for >= longest) {
                        stalled.push(*number);
                    }
                    continue;
                }
                let at = (*direction, holder);
                match topic.evict(&seat.caller(), at, held_for, here, arrivals) {
                    Ok(()) => {
                        tracing::warn!(
                            topic = topic.name(),
                            holder = ?holder.who(),
                            ?position,
                            "a subscriber was removed: it held a message for too long"
                        );
                        changed.push(*number);
                    }
                    Err(error) => tracing::debug!(%error, "cannot remove a subscriber yet"),
                }
            }
        }
        for number in changed {
            self.has_changed(number);
        }
        for number in stalled {
            self.carrying.is_in_the_way(number);
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
}
