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

use fabric::ring::{NotifyMode, ReceiverId, SenderId};

use super::event_loop::{WorkerLoop, nanoseconds};
use super::topic_table::OutboundConnection;
use super::{NodeId, WorkerEvent};
use crate::replication::connection_messages::ConnectionMessage;

/// How often it is looked at all connections.
const STALL_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Without movement for so long, a writer says what there should be; and again after as long.
const SENDER_STALL_AFTER: Duration = Duration::from_millis(600);
/// A difference that stays for so long is no delay. Twice as long each time that it was of no use to
/// begin anew, up to 16 s: the way may be slow.
const RECEIVER_STALL_AFTER: Duration = Duration::from_millis(1000);
const MAX_DOUBLINGS: u32 = 4;
/// After the writer's last word, what it is about has so long to arrive.
const IN_FLIGHT_ALLOWANCE: Duration = Duration::from_millis(200);

/// What a writer knows of a connection, and since when that did not change.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct SendProgress {
    known: RingCounts,
    since: u64,
    reported: u64,
}

/// Chunks that were written, and up to where the reader is known to be done with them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct RingCounts {
    chunks: u64,
    read: u64,
}

impl SendProgress {
    /// Is something to be said? `waits` if something is to be read, or to be written and cannot be.
    fn poll(&mut self, now: u64, (chunks, read): (u64, u64), waits: bool) -> bool {
        let known = RingCounts { chunks, read };
        if known != self.known || !waits {
            *self = Self { known, since: now, reported: 0 };
            return false;
        }
        let last = self.since.max(self.reported);
        let is_due = now.saturating_sub(last) >= nanoseconds(SENDER_STALL_AFTER);
        if is_due {
            self.reported = now;
        }
        is_due
    }
}

/// How a reader finds a difference, until it is over.
#[derive(Debug, Clone, Copy)]
pub(super) struct StallSuspicion {
    /// What should have come, and what had.
    chunks: u64,
    came: u64,
    /// What the writer had been told, and what it had heard of that.
    told: u64,
    read: u64,
    /// Since when, and when the writer was heard last.
    since: u64,
    last_heard: u64,
}

/// What a reader makes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StallVerdict {
    /// All is well, or moves.
    Resolved,
    Pending,
    /// The connection moves nothing.
    Stalled,
}

impl StallSuspicion {
    /// What a writer says of a connection, of which this many chunks came, and so much was told.
    fn update(
        before: Option<Self>,
        now: u64,
        (chunks, read): (u64, u64),
        (came, told): (u64, u64),
    ) -> Self {
        match before {
            Some(before) => Self { read, last_heard: now, ..before },
            None => Self { chunks, came, told, read, since: now, last_heard: now },
        }
    }

    fn poll(&self, now: u64, came: u64, doublings: u32) -> StallVerdict {
        let has_all = came >= self.chunks || came > self.came;
        let is_heard = self.read >= self.told;
        if has_all && is_heard {
            return StallVerdict::Resolved;
        }
        let timeout = nanoseconds(RECEIVER_STALL_AFTER) << doublings;
        // The writer is at work, and says the same again.
        let is_confirmed = self.last_heard >= self.since + nanoseconds(SENDER_STALL_AFTER) / 2;
        let is_late = now.saturating_sub(self.since) >= timeout
            && now.saturating_sub(self.last_heard) >= nanoseconds(IN_FLIGHT_ALLOWANCE);
        if is_late && is_confirmed { StallVerdict::Stalled } else { StallVerdict::Pending }
    }
}

impl WorkerLoop {
    /// Looks at all connections, if it is time.
    pub(super) fn check_connections(&mut self) {
        if self.now.monotonic < self.next_stall_check {
            return;
        }
        self.next_stall_check = self.now.monotonic + nanoseconds(STALL_CHECK_INTERVAL);
        self.send_stall_checks();
        for place in 0..self.inbound_topics.len() {
            self.evaluate_suspicion(place);
        }
    }

    /// As a writer: says what there should be where nothing moves.
    fn send_stall_checks(&mut self) {
        let now = self.now.monotonic;
        let mut reported = Vec::new();
        for place in 0..self.outbound_topics.len() {
            let Some(topic) = self.outbound_topics.get(place) else { continue };
            for (node, OutboundConnection { connection, requested_since, send_progress }) in
                &mut topic.connections
            {
                let ring: Option<SenderId> = topic.outbound.ring_of(*node);
                let Some(ring) = ring.filter(|_| requested_since.is_none()) else { continue };
                let Ok(sender) = self.transport.port.sender(ring) else { continue };
                let (chunks, read) = (sender.statistics().chunks, sender.writer().known_head());
                let (is_unread, is_busy) =
                    (sender.writer().unread() > 0, topic.outbound.is_busy(*node));
                if send_progress.poll(now, (chunks, read), is_unread || is_busy) {
                    // One more would have come if there had been room for it.
                    let chunks = chunks + u64::from(!is_unread);
                    let terms =
                        ConnectionMessage::StallCheck { connection: *connection, chunks, read };
                    reported.push(WorkerEvent::ControlMessage {
                        key: topic.key,
                        node: *node,
                        terms,
                    });
                }
            }
        }
        reported.into_iter().for_each(|letter| self.events.tell(letter));
    }

    /// What came by a ring, and what its writer was told.
    fn received_counts(&self, ring: ReceiverId) -> Option<(u64, u64)> {
        let receiver = self.transport.port.receiver(ring).ok()?;
        // One that looks does not know what came before it has taken it.
        let is_told = receiver.notify() != NotifyMode::Polling;
        is_told.then(|| (receiver.reader().came(), receiver.reader().credited_head()))
    }

    /// As a reader: what the writer says.
    pub(super) fn handle_stall_check(
        &mut self,
        place: usize,
        connection: u64,
        reported: (u64, u64),
    ) {
        let now = self.now.monotonic;
        let ring = self
            .inbound_topics
            .get(place)
            .and_then(|topic| topic.inbound_ring.as_ref())
            .map(|inbound_ring| inbound_ring.ring);
        let Some(received_counts) = ring.and_then(|ring| self.received_counts(ring)) else {
            return;
        };
        let Some(topic) = self.inbound_topics.get(place) else { return };
        let Some(inbound_ring) = topic.inbound_ring.as_mut() else { return };
        if inbound_ring.is_connected && inbound_ring.request.connection == connection {
            inbound_ring.suspicion = Some(StallSuspicion::update(
                inbound_ring.suspicion,
                now,
                reported,
                received_counts,
            ));
        }
    }

    fn evaluate_suspicion(&mut self, place: usize) {
        let now = self.now.monotonic;
        let Some(topic) = self.inbound_topics.get(place) else { return };
        let (node, doublings) = (topic.origin, topic.doublings);
        let Some((ring, suspicion)) = topic
            .inbound_ring
            .as_ref()
            .and_then(|inbound_ring| Some((inbound_ring.ring, inbound_ring.suspicion?)))
        else {
            return;
        };
        let Some((came, _)) = self.received_counts(ring) else { return };
        let verdict = suspicion.poll(now, came, doublings);
        let Some(topic) = self.inbound_topics.get(place) else { return };
        let Some(inbound_ring) = topic.inbound_ring.as_mut() else { return };
        match verdict {
            StallVerdict::Pending => {}
            StallVerdict::Resolved => {
                inbound_ring.suspicion = None;
                topic.doublings = 0;
            }
            StallVerdict::Stalled => {
                inbound_ring.suspicion = None;
                topic.doublings = (doublings + 1).min(MAX_DOUBLINGS);
                self.report_stall(place, node);
            }
        }
    }

    fn report_stall(&mut self, place: usize, node: NodeId) {
        let topic = self.inbound_topics.get(place).map(|topic| topic.key);
        tracing::warn!(?topic, %node, "a connection with a node is stalled: it moves nothing");
        self.handle_fault(node, super::renewal::CONNECTION_STALLED);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn writers_speak_up_only_where_something_waits_and_nothing_moves() {
        let mut send_progress = SendProgress::default();
        let mut reported = Vec::new();
        for tenth in 0..50 {
            let now = tenth * SECOND / 10;
            // It moves until then.
            let known = (tenth.min(10), 0);
            if send_progress.poll(now, known, true) {
                reported.push(tenth);
            }
        }
        assert_eq!(reported, [16, 22, 28, 34, 40, 46]);
        assert!(!send_progress.poll(60 * SECOND, (10, 0), false));
        assert!(!send_progress.poll(60 * SECOND, (10, 0), true));
        assert!(send_progress.poll(61 * SECOND, (10, 0), true));
    }

    /// What a reader decides, and when, of a writer that says this every 600 ms.
    fn decided(reported: (u64, u64), received_counts: impl Fn(u64) -> (u64, u64)) -> Option<u64> {
        let mut suspicion = None;
        for tick in 0..100 {
            let now = tick * SECOND / 10;
            if tick % 6 == 0 {
                suspicion =
                    Some(StallSuspicion::update(suspicion, now, reported, received_counts(tick)));
            }
            match suspicion.map(|it| it.poll(now, received_counts(tick).0, 0)) {
                Some(StallVerdict::Stalled) => return Some(tick),
                Some(StallVerdict::Resolved) => suspicion = None,
                Some(StallVerdict::Pending) | None => {}
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
        let first = StallSuspicion::update(None, 0, (7, 0), (3, 0));
        let late = StallSuspicion::update(Some(first), 20 * SECOND, (7, 0), (3, 0));
        assert_eq!(late.poll(20 * SECOND, 3, 0), StallVerdict::Pending);
        assert_eq!(late.poll(20 * SECOND + SECOND / 10, 7, 0), StallVerdict::Resolved);
        assert_eq!(late.poll(20 * SECOND + SECOND / 2, 3, 0), StallVerdict::Stalled);
    }

    #[test]
    fn where_beginning_anew_was_of_no_use_it_is_waited_longer() {
        let first = StallSuspicion::update(None, 0, (7, 0), (3, 0));
        let again = StallSuspicion::update(Some(first), SECOND / 2, (7, 0), (3, 0));
        for doublings in 0..=MAX_DOUBLINGS {
            let timeout = SECOND << doublings;
            assert_eq!(again.poll(timeout - 1, 3, doublings), StallVerdict::Pending);
            assert_eq!(again.poll(timeout, 3, doublings), StallVerdict::Stalled);
            // Its writer may not be at work any more.
            assert_eq!(first.poll(timeout, 3, doublings), StallVerdict::Pending);
        }
    }
}
