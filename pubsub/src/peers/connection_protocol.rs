//! One connection, without its socket: hello, frames, heartbeats.

use std::time::Duration;

use super::close_reason::{CloseReason, GoodbyeReason};
use super::framing::{ReceiveBuffer, SendBuffer};
use super::protocol::{
    self, Frame, Hello, MAX_DETAIL_LENGTH, MAX_FRAME_LENGTH, MAX_HANDSHAKE_FRAME_LENGTH,
};

/// How patient a node is. Moments are told as the time since it began.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timing {
    /// Who was not heard for so long is lost.
    pub(super) lost_after: Duration,
    /// By when it must be agreed that a connection is a session.
    pub(super) handshake_timeout: Duration,
    /// The pause before dialling again, which grows from one to the other.
    pub(super) min_backoff: Duration,
    pub(super) max_backoff: Duration,
    /// The pause where the next attempt would most likely end like the last.
    pub(super) permanent_backoff: Duration,
    /// Who was told of, and cannot be reached for so long, is forgotten.
    pub(super) forget_after: Duration,
}

impl Timing {
    pub(super) fn new(lost_after: Duration) -> Self {
        Self {
            lost_after,
            handshake_timeout: lost_after.clamp(Duration::from_secs(2), Duration::from_secs(10)),
            min_backoff: Duration::from_millis(100),
            // A link that is back is noticed within it.
            max_backoff: Duration::from_millis(250),
            permanent_backoff: Duration::from_secs(10),
            forget_after: Duration::from_secs(600),
        }
    }
}

/// The longest pause between heartbeats: how soon it is noticed that a connection moves nothing.
const MAX_HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);
/// No sooner: a busy machine is no reason for another connection.
const MIN_STALE_AFTER: Duration = Duration::from_millis(500);

/// Bytes that may wait for one peer before one more letter is refused.
const MAX_QUEUED_BYTES: usize = 8 << 20;
/// What else may wait beside them.
const PROTOCOL_FRAME_RESERVE: usize = 2 << 20;

/// What came.
#[derive(Debug)]
pub(super) enum ReceivedFrame {
    Hello(Hello),
    Frame(Frame),
}

#[derive(Debug)]
pub(super) struct ConnectionProtocol {
    arrivals: ReceiveBuffer,
    departures: SendBuffer,
    received_hello: bool,
    is_established: bool,
    /// When something was heard last, and something sent.
    last_received: Duration,
    last_sent: Duration,
    /// By when it must be established.
    handshake_deadline: Duration,
    /// A heartbeat each so often.
    heartbeat_interval: Duration,
    lost_after: Duration,
    /// Nothing is read meanwhile, so nobody can be heard.
    reading_paused: bool,
}

impl ConnectionProtocol {
    /// One that says hello as this.
    pub(super) fn new(me: &Hello, timing: &Timing, now: Duration) -> Self {
        let mut departures = SendBuffer::default();
        departures.add(&me.encode());
        Self {
            arrivals: ReceiveBuffer::default(),
            departures,
            received_hello: false,
            is_established: false,
            last_received: now,
            last_sent: now,
            handshake_deadline: now + timing.handshake_timeout,
            heartbeat_interval: (timing.lost_after / 4).min(MAX_HEARTBEAT_INTERVAL),
            lost_after: timing.lost_after,
            reading_paused: false,
        }
    }

    /// Bytes came from the other side.
    pub(super) fn receive(&mut self, bytes: &[u8], now: Duration) {
        self.last_received = now;
        self.arrivals.add(bytes);
    }

    /// The next that is whole.
    pub(super) fn next(&mut self) -> Result<Option<ReceivedFrame>, CloseReason> {
        let longest =
            if self.is_established { MAX_FRAME_LENGTH } else { MAX_HANDSHAKE_FRAME_LENGTH };
        let Some(body) = self.arrivals.next(longest)? else { return Ok(None) };
        if !self.received_hello {
            let hello = Hello::decode(body)?;
            self.received_hello = true;
            let theirs = Duration::from_millis(u64::from(hello.lost_after));
            self.heartbeat_interval = self.heartbeat_interval.min(theirs / 4);
            return Ok(Some(ReceivedFrame::Hello(hello)));
        }
        let frame = protocol::decode(body)?;
        let is_first_of_all = matches!(frame, Frame::Claim { .. } | Frame::Accept { .. });
        if is_first_of_all == self.is_established && !matches!(frame, Frame::Goodbye { .. }) {
            return Err(protocol::malformed("unexpected frame"));
        }
        Ok(Some(ReceivedFrame::Frame(frame)))
    }

    /// It is agreed that this is the session of these two nodes.
    pub(super) fn establish(&mut self, now: Duration) {
        self.is_established = true;
        self.last_received = now;
    }

    pub(super) fn is_established(&self) -> bool {
        self.is_established
    }

    /// Puts a frame behind what waits already; refused if that is too much.
    pub(super) fn send(&mut self, frame: &Frame) -> Result<(), CloseReason> {
        let body = protocol::encode(frame);
        let room = match frame {
            Frame::ControlMessage(_) => MAX_QUEUED_BYTES,
            _ => MAX_QUEUED_BYTES + PROTOCOL_FRAME_RESERVE,
        };
        if self.departures.bytes() + body.len() > room {
            return Err(CloseReason::Closed(GoodbyeReason::SendQueueFull));
        }
        self.departures.add(&body);
        Ok(())
    }

    /// The rest of what is to be sent, with a goodbye behind it if there is still something to say.
    pub(super) fn take_final_bytes(
        &mut self,
        reason: Option<GoodbyeReason>,
        detail: &str,
    ) -> Vec<u8> {
        if let Some(why) = reason {
            let detail = crate::text::shortened(detail, MAX_DETAIL_LENGTH).to_owned();
            self.departures.add(&protocol::encode(&Frame::Goodbye { why, detail }));
        }
        self.departures.take()
    }

    /// Bytes that wait to be sent: some of them, if any.
    pub(super) fn output(&self) -> &[u8] {
        self.departures.front()
    }

    /// All bytes that wait to be sent.
    pub(super) fn waiting(&self) -> usize {
        self.departures.bytes()
    }

    /// So many bytes were sent.
    pub(super) fn sent(&mut self, count: usize, now: Duration) {
        self.departures.remove(count);
        self.last_sent = now;
    }

    /// Nothing is read from now on; or again.
    pub(super) fn pause_reading(&mut self, reading_paused: bool, now: Duration) {
        if self.reading_paused && !reading_paused {
            self.last_received = now;
        }
        self.reading_paused = reading_paused;
    }

    /// Time passed: sends a heartbeat when it is time, and ends when nothing was heard.
    pub(super) fn tick(&mut self, now: Duration) -> Result<(), CloseReason> {
        if !self.is_established {
            return if now >= self.handshake_deadline {
                Err(CloseReason::Closed(GoodbyeReason::HandshakeTimeout))
            } else {
                Ok(())
            };
        }
        if !self.reading_paused && now >= self.last_received + self.lost_after {
            return Err(CloseReason::Closed(GoodbyeReason::HeartbeatTimeout));
        }
        // While bytes wait, one more would be of no use.
        if now >= self.last_sent + self.heartbeat_interval && self.departures.bytes() == 0 {
            self.last_sent = now;
            return self.send(&Frame::Heartbeat);
        }
        Ok(())
    }

    /// Since when another connection would be better, if nothing is heard until then: the link may
    /// have been down, and what the system retransmits is the later the longer it was.
    pub(super) fn stale_at(&self) -> Option<Duration> {
        let longest = (self.heartbeat_interval * 5 / 2).max(MIN_STALE_AFTER);
        (self.is_established && !self.reading_paused).then(|| self.last_received + longest)
    }

    /// Was nothing heard for longer than it should take?
    pub(super) fn is_stale(&self, now: Duration) -> bool {
        self.stale_at().is_some_and(|at| now >= at)
    }

    /// When `tick` has something to do next.
    pub(super) fn deadline(&self) -> Option<Duration> {
        if !self.is_established {
            return Some(self.handshake_deadline);
        }
        let silence = (!self.reading_paused).then(|| self.last_received + self.lost_after);
        let heartbeat =
            (self.departures.bytes() == 0).then(|| self.last_sent + self.heartbeat_interval);
        silence.into_iter().chain(heartbeat).min()
    }
}
