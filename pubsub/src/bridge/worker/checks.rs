//! Connections that are up and move nothing.
//!
//! A provider may say nothing of a connection that is gone: a link was down, or another process
//! pretended to be the peer and has its connection now. Then a writer waits for credit, and the reader
//! for messages, without an error. That cannot be told from a reader that takes its time by one side
//! alone. So a writer that does not get on says by a letter how many chunks it wrote and up to where it
//! knows them to be read; the reader compares that with what it has and with what it told. If the
//! difference stays, the connections of that node have a [fault](super::faults). The writer may
//! have made it up.

use std::time::Duration;

use fabric::ring::{Notify, ReceiverId, SenderId};

use super::engine::{Engine, nanoseconds};
use super::topics::Link;
use super::{NodeIdentity, Report};
use crate::bridge::terms::Terms;

/// How often it is looked at all connections.
const LOOK: Duration = Duration::from_millis(200);
/// Without movement for so long, a writer says what there should be; and again after as long.
const UNMOVED: Duration = Duration::from_millis(600);
/// A difference that stays for so long is no delay. Twice as long each time that it was of no use to
/// begin anew, up to 16 s: the way may be slow.
const PATIENCE: Duration = Duration::from_millis(1000);
const MOST_DOUBLINGS: u32 = 4;
/// After the writer's last word, what it is about has so long to arrive.
const ARRIVAL: Duration = Duration::from_millis(200);

/// What a writer knows of a connection, and since when that did not change.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Movement {
    known: Known,
    since: u64,
    said: u64,
}

/// Chunks that were written, and up to where the reader is known to be done with them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Known {
    chunks: u64,
    read: u64,
}

impl Movement {
    /// Is something to be said? `waits` if something is to be read, or to be written and cannot be.
    fn look(&mut self, now: u64, (chunks, read): (u64, u64), waits: bool) -> bool {
        let known = Known { chunks, read };
        if known != self.known || !waits {
            *self = Self { known, since: now, said: 0 };
            return false;
        }
        let last = self.since.max(self.said);
        let is_due = now.saturating_sub(last) >= nanoseconds(UNMOVED);
        if is_due {
            self.said = now;
        }
        is_due
    }
}

/// How a reader finds a difference, until it is over.
#[derive(Debug, Clone, Copy)]
pub(super) struct Difference {
    /// What should have come, and what had.
    chunks: u64,
    came: u64,
    /// What the writer had been told, and what it had heard of that.
    told: u64,
    read: u64,
    /// Since when, and when the writer was heard last.
    since: u64,
    heard: u64,
}

/// What a reader makes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// All is well, or moves.
    Over,
    Stays,
    /// The connection moves nothing.
    Broken,
}

impl Difference {
    /// What a writer says of a connection, of which this many chunks came, and so much was told.
    fn hear(
        before: Option<Self>,
        now: u64,
        (chunks, read): (u64, u64),
        (came, told): (u64, u64),
    ) -> Self {
        match before {
            Some(before) => Self { read, heard: now, ..before },
            None => Self { chunks, came, told, read, since: now, heard: now },
        }
    }

    fn look(&self, now: u64, came: u64, doublings: u32) -> Verdict {
        let has_all = came >= self.chunks || came > self.came;
        let is_heard = self.read >= self.told;
        if has_all && is_heard {
            return Verdict::Over;
        }
        let patience = nanoseconds(PATIENCE) << doublings;
        // The writer is at work, and says the same again.
        let is_confirmed = self.heard >= self.since + nanoseconds(UNMOVED) / 2;
        let is_late = now.saturating_sub(self.since) >= patience
            && now.saturating_sub(self.heard) >= nanoseconds(ARRIVAL);
        if is_late && is_confirmed { Verdict::Broken } else { Verdict::Stays }
    }
}

impl Engine {
    /// Looks at all connections, if it is time.
    pub(super) fn look_at_connections(&mut self) {
        if self.now.steady < self.next_look_at_connections {
            return;
        }
        self.next_look_at_connections = self.now.steady + nanoseconds(LOOK);
        self.look_at_links();
        for place in 0..self.ins.len() {
            self.look_at_difference(place);
        }
    }

    /// As a writer: says what there should be where nothing moves.
    fn look_at_links(&mut self) {
        let now = self.now.steady;
        let mut said = Vec::new();
        for place in 0..self.outs.len() {
            let Some(topic) = self.outs.get(place) else { continue };
            for (node, Link { connection, wished, movement }) in &mut topic.links {
                let ring: Option<SenderId> = topic.outbound.ring_of(*node);
                let Some(ring) = ring.filter(|_| wished.is_none()) else { continue };
                let Ok(sender) = self.deck.port.sender(ring) else { continue };
                let (chunks, read) = (sender.statistics().chunks, sender.writer().known_head());
                let (is_unread, is_busy) =
                    (sender.writer().unread() > 0, topic.outbound.is_busy(*node));
                if movement.look(now, (chunks, read), is_unread || is_busy) {
                    // One more would have come if there had been room for it.
                    let chunks = chunks + u64::from(!is_unread);
                    let terms = Terms::Check { connection: *connection, chunks, read };
                    said.push(Report::Letter { key: topic.key, node: *node, terms });
                }
            }
        }
        said.into_iter().for_each(|letter| self.reports.tell(letter));
    }

    /// What came by a ring, and what its writer was told.
    fn seen(&self, ring: ReceiverId) -> Option<(u64, u64)> {
        let receiver = self.deck.port.receiver(ring).ok()?;
        // One that looks does not know what came before it has taken it.
        let is_told = receiver.notify() != Notify::Polling;
        is_told.then(|| (receiver.reader().came(), receiver.reader().told()))
    }

    /// As a reader: what the writer says.
    pub(super) fn hear_check(&mut self, place: usize, connection: u64, said: (u64, u64)) {
        let now = self.now.steady;
        let ring = self.ins.get(place).and_then(|topic| topic.tap.as_ref()).map(|tap| tap.ring);
        let Some(seen) = ring.and_then(|ring| self.seen(ring)) else { return };
        let Some(topic) = self.ins.get(place) else { return };
        let Some(tap) = topic.tap.as_mut() else { return };
        if tap.is_connected && tap.wish.connection == connection {
            tap.difference = Some(Difference::hear(tap.difference, now, said, seen));
        }
    }

    fn look_at_difference(&mut self, place: usize) {
        let now = self.now.steady;
        let Some(topic) = self.ins.get(place) else { return };
        let (node, doublings) = (topic.origin, topic.doublings);
        let Some((ring, difference)) =
            topic.tap.as_ref().and_then(|tap| Some((tap.ring, tap.difference?)))
        else {
            return;
        };
        let Some((came, _)) = self.seen(ring) else { return };
        let verdict = difference.look(now, came, doublings);
        let Some(topic) = self.ins.get(place) else { return };
        let Some(tap) = topic.tap.as_mut() else { return };
        match verdict {
            Verdict::Stays => {}
            Verdict::Over => {
                tap.difference = None;
                topic.doublings = 0;
            }
            Verdict::Broken => {
                tap.difference = None;
                topic.doublings = (doublings + 1).min(MOST_DOUBLINGS);
                self.connection_moves_nothing(place, node);
            }
        }
    }

    fn connection_moves_nothing(&mut self, place: usize, node: NodeIdentity) {
        let topic = self.ins.get(place).map(|topic| topic.key);
        tracing::warn!(?topic, %node, "a connection with a node moves nothing");
        self.has_fault(node, super::renewal::MOVES_NOTHING);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn writers_speak_up_only_where_something_waits_and_nothing_moves() {
        let mut movement = Movement::default();
        let mut said = Vec::new();
        for tenth in 0..50 {
            let now = tenth * SECOND / 10;
            // It moves until then.
            let known = (tenth.min(10), 0);
            if movement.look(now, known, true) {
                said.push(tenth);
            }
        }
        assert_eq!(said, [16, 22, 28, 34, 40, 46]);
        assert!(!movement.look(60 * SECOND, (10, 0), false));
        assert!(!movement.look(60 * SECOND, (10, 0), true));
        assert!(movement.look(61 * SECOND, (10, 0), true));
    }

    /// What a reader decides, and when, of a writer that says this every 600 ms.
    fn decided(said: (u64, u64), seen: impl Fn(u64) -> (u64, u64)) -> Option<u64> {
        let mut difference = None;
        for tick in 0..100 {
            let now = tick * SECOND / 10;
            if tick % 6 == 0 {
                difference = Some(Difference::hear(difference, now, said, seen(tick)));
            }
            match difference.map(|it| it.look(now, seen(tick).0, 0)) {
                Some(Verdict::Broken) => return Some(tick),
                Some(Verdict::Over) => difference = None,
                Some(Verdict::Stays) | None => {}
            }
        }
        None
    }

    #[test]
    fn a_reader_that_takes_its_time_is_not_a_connection_that_moves_nothing() {
        // All came, and nothing was released of it.
        assert_eq!(decided((7, 0), |_| (7, 0)), None);
        // It comes slowly.
        assert_eq!(decided((7, 0), |tick| (tick / 9, 0)), None);
        // The writer has heard all.
        assert_eq!(decided((7, 512), |_| (7, 512)), None);
    }

    #[test]
    fn lost_chunks_and_lost_credit_are_noticed_within_two_seconds() {
        let chunks = decided((7, 0), |_| (3, 0)).unwrap();
        let credit = decided((7, 0), |_| (7, 512)).unwrap();
        // And the writer speaks up after 600 ms.
        assert!(chunks <= 14 && credit <= 14, "{chunks} {credit}");
    }

    #[test]
    fn difference_is_not_judged_before_what_was_said_last_could_arrive() {
        // A process that was stopped for long hears of both at once.
        let first = Difference::hear(None, 0, (7, 0), (3, 0));
        let late = Difference::hear(Some(first), 20 * SECOND, (7, 0), (3, 0));
        assert_eq!(late.look(20 * SECOND, 3, 0), Verdict::Stays);
        assert_eq!(late.look(20 * SECOND + SECOND / 10, 7, 0), Verdict::Over);
        assert_eq!(late.look(20 * SECOND + SECOND / 2, 3, 0), Verdict::Broken);
    }

    #[test]
    fn where_beginning_anew_was_of_no_use_it_is_waited_longer() {
        let first = Difference::hear(None, 0, (7, 0), (3, 0));
        let again = Difference::hear(Some(first), SECOND / 2, (7, 0), (3, 0));
        for doublings in 0..=MOST_DOUBLINGS {
            let patience = SECOND << doublings;
            assert_eq!(again.look(patience - 1, 3, doublings), Verdict::Stays);
            assert_eq!(again.look(patience, 3, doublings), Verdict::Broken);
            // Its writer may not be at work any more.
            assert_eq!(first.look(patience, 3, doublings), Verdict::Stays);
        }
    }
}
