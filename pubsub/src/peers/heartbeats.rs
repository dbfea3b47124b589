//! One connection, without its socket: hello, frames, heartbeats.

use std::time::Duration;

use super::close_reason::{CloseReason, GoodbyeReason, malformed};
use super::framing::{ReceiveBuffer, SendBuffer};
use super::node_protocol::{self, Frame};
use super::protocol_limits::{MAX_DETAIL_LENGTH, MAX_FRAME_LENGTH, MAX_HANDSHAKE_FRAME_LENGTH};
use super::{Hello, Timing};

impl Timing {
    pub(super) fn new(lost_after: Duration) -> Self {
        Self {
            lost_after,
            handshake_timeout: lost_after.clamp(Duration::from_secs(2), Duration::from_secs(10)),
            min_backoff: Duration::from_millis(100),
            // A restored link is detected within it.
            max_backoff: Duration::from_millis(250),
            permanent_backoff: Duration::from_secs(10),
            forget_after: Duration::from_secs(600),
        }
    }
}

/// The longest interval of heartbeats: it bounds how soon a stalled connection is detected.
const MAX_HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);
/// Minimum: a busy machine alone must not cause another connection.
const MIN_STALE_AFTER: Duration = Duration::from_millis(500);

/// Limit of bytes queued for one peer; above it control messages are refused.
const MAX_QUEUED_BYTES: usize = 8 << 20;
/// Reserve for other frames.
const PROTOCOL_FRAME_RESERVE: usize = 2 << 20;

#[derive(Debug)]
pub(super) enum ReceivedFrame {
    Hello(Hello),
    Frame(Frame),
}

#[derive(Debug)]
pub(super) struct ConnectionProtocol {
    receive_buffer: ReceiveBuffer,
    send_buffer: SendBuffer,
    received_hello: bool,
    is_established: bool,
    last_received: Duration,
    last_sent: Duration,
    /// By when it must be a session.
    handshake_deadline: Duration,
    heartbeat_interval: Duration,
    lost_after: Duration,
    /// Nothing is read meanwhile, so silence proves nothing.
    reading_paused: bool,
}

impl ConnectionProtocol {
    /// A connection that sends this hello.
    pub(super) fn new(me: &Hello, timing: &Timing, now: Duration) -> Self {
        let mut send_buffer = SendBuffer::default();
        send_buffer.add(&me.encode());
        Self {
            receive_buffer: ReceiveBuffer::default(),
            send_buffer,
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

    pub(super) fn receive(&mut self, bytes: &[u8], now: Duration) {
        self.last_received = now;
        self.receive_buffer.add(bytes);
    }

    /// The next complete frame.
    pub(super) fn next(&mut self) -> Result<Option<ReceivedFrame>, CloseReason> {
        let longest =
            if self.is_established { MAX_FRAME_LENGTH } else { MAX_HANDSHAKE_FRAME_LENGTH };
        let Some(body) = self.receive_buffer.next(longest)? else { return Ok(None) };
        if !self.received_hello {
            let hello = Hello::decode(body)?;
            self.received_hello = true;
            let theirs = Duration::from_millis(u64::from(hello.lost_after));
            self.heartbeat_interval = self.heartbeat_interval.min(theirs / 4);
            return Ok(Some(ReceivedFrame::Hello(hello)));
        }
        let frame = node_protocol::decode(body)?;
        let is_handshake = matches!(frame, Frame::Claim { .. } | Frame::Accept { .. });
        if is_handshake == self.is_established && !matches!(frame, Frame::Goodbye { .. }) {
            return Err(malformed("unexpected frame"));
        }
        Ok(Some(ReceivedFrame::Frame(frame)))
    }

    /// Both sides agreed that this is their session.
    pub(super) fn establish(&mut self, now: Duration) {
        self.is_established = true;
        self.last_received = now;
    }

    pub(super) fn is_established(&self) -> bool {
        self.is_established
    }

    /// Queues a frame; refused if the queue is full.
    pub(super) fn send(&mut self, frame: &Frame) -> Result<(), CloseReason> {
        let body = node_protocol::encode(frame);
        let room = match frame {
            Frame::ControlMessage(_) => MAX_QUEUED_BYTES,
            _ => MAX_QUEUED_BYTES + PROTOCOL_FRAME_RESERVE,
        };
        if self.send_buffer.bytes() + body.len() > room {
            return Err(CloseReason::Closed(GoodbyeReason::SendQueueFull));
        }
        self.send_buffer.add(&body);
        Ok(())
    }

    /// The rest of the queue, with a goodbye behind it if there is a reason to send.
    pub(super) fn take_final_bytes(
        &mut self,
        reason: Option<GoodbyeReason>,
        detail: &str,
    ) -> Vec<u8> {
        if let Some(why) = reason {
            let detail = crate::text::shortened(detail, MAX_DETAIL_LENGTH).to_owned();
            self.send_buffer.add(&node_protocol::encode(&Frame::Goodbye { why, detail }));
        }
        self.send_buffer.take()
    }

    /// Some of the queued bytes, if any.
    pub(super) fn output(&self) -> &[u8] {
        self.send_buffer.front()
    }

    /// Number of queued bytes.
    pub(super) fn waiting(&self) -> usize {
        self.send_buffer.bytes()
    }

    /// Removes sent bytes from the queue.
    pub(super) fn sent(&mut self, count: usize, now: Duration) {
        self.send_buffer.remove(count);
        self.last_sent = now;
    }

    pub(super) fn pause_reading(&mut self, reading_paused: bool, now: Duration) {
        if self.reading_paused && !reading_paused {
            self.last_received = now;
        }
        self.reading_paused = reading_paused;
    }

    /// Sends a due heartbeat; fails if the peer was silent for too long.
    pub(super) fn tick(&mut self, now: Duration) -> Result<(), CloseReason> {
        if !self.is_established {
            let is_late = now >= self.handshake_deadline;
            let late = CloseReason::Closed(GoodbyeReason::HandshakeTimeout);
            return if is_late { Err(late) } else { Ok(()) };
        }
        if !self.reading_paused && now >= self.last_received + self.lost_after {
            return Err(CloseReason::Closed(GoodbyeReason::HeartbeatTimeout));
        }
        // While bytes are queued, a heartbeat would be of no use.
        if now >= self.last_sent + self.heartbeat_interval && self.send_buffer.bytes() == 0 {
            self.last_sent = now;
            return self.send(&Frame::Heartbeat);
        }
        Ok(())
    }

    /// When the connection becomes stale unless bytes arrive: then another one is better. The link
    /// may have been down, and the system's retransmission delay grows with the outage.
    pub(super) fn stale_at(&self) -> Option<Duration> {
        let longest = (self.heartbeat_interval * 5 / 2).max(MIN_STALE_AFTER);
        (self.is_established && !self.reading_paused).then(|| self.last_received + longest)
    }

    /// Returns true if no bytes arrived for longer than expected.
    pub(super) fn is_stale(&self, now: Duration) -> bool {
        self.stale_at().is_some_and(|at| now >= at)
    }

    /// When `tick` has work next.
    pub(super) fn deadline(&self) -> Option<Duration> {
        if !self.is_established {
            return Some(self.handshake_deadline);
        }
        let silence = (!self.reading_paused).then(|| self.last_received + self.lost_after);
        let heartbeat =
            (self.send_buffer.bytes() == 0).then(|| self.last_sent + self.heartbeat_interval);
        silence.into_iter().chain(heartbeat).min()
    }
}
