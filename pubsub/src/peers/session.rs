//! One connection, without its socket: hello, frames, heartbeats.

use std::time::Duration;

use super::framing::{Arrivals, Departures};
use super::protocol::{self, Frame, Hello, LONGEST_DETAIL, LONGEST_FRAME, LONGEST_INTRODUCTION};
use super::reason::{Parting, Reason};

/// How patient a node is. Moments are told as the time since it began.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timing {
    /// Who was not heard for so long is lost.
    pub(super) lost_after: Duration,
    /// By when it must be agreed that a connection is a session.
    pub(super) introducing: Duration,
    /// The pause before dialling again, which grows from one to the other.
    pub(super) first_pause: Duration,
    pub(super) longest_pause: Duration,
    /// The pause where the next attempt would most likely end like the last.
    pub(super) lasting_pause: Duration,
    /// Who was told of, and cannot be reached for so long, is forgotten.
    pub(super) forgotten_after: Duration,
}

impl Timing {
    pub(super) fn new(lost_after: Duration) -> Self {
        Self {
            lost_after,
            introducing: lost_after.clamp(Duration::from_secs(2), Duration::from_secs(10)),
            first_pause: Duration::from_millis(100),
            // A link that is back is noticed within it.
            longest_pause: Duration::from_millis(250),
            lasting_pause: Duration::from_secs(10),
            forgotten_after: Duration::from_secs(600),
        }
    }
}

/// The longest pause between heartbeats: how soon it is noticed that a connection moves nothing.
const SLOWEST_PACE: Duration = Duration::from_millis(500);
/// No sooner: a busy machine is no reason for another connection.
const SOONEST_STALE: Duration = Duration::from_millis(500);

/// Bytes that may wait for one peer before one more letter is refused.
const MOST_WAITING: usize = 8 << 20;
/// What else may wait beside them.
const MOST_NOTES: usize = 2 << 20;

/// What came.
#[derive(Debug)]
pub(super) enum Came {
    Hello(Hello),
    Frame(Frame),
}

#[derive(Debug)]
pub(super) struct Session {
    arrivals: Arrivals,
    departures: Departures,
    was_greeted: bool,
    is_established: bool,
    /// When something was heard last, and something sent.
    heard: Duration,
    spoke: Duration,
    /// By when it must be established.
    until: Duration,
    /// A heartbeat each so often.
    pace: Duration,
    lost_after: Duration,
    /// Nothing is read meanwhile, so nobody can be heard.
    is_deaf: bool,
}

impl Session {
    /// One that says hello as this.
    pub(super) fn new(me: &Hello, timing: &Timing, now: Duration) -> Self {
        let mut departures = Departures::default();
        departures.add(&me.encode());
        Self {
            arrivals: Arrivals::default(),
            departures,
            was_greeted: false,
            is_established: false,
            heard: now,
            spoke: now,
            until: now + timing.introducing,
            pace: (timing.lost_after / 4).min(SLOWEST_PACE),
            lost_after: timing.lost_after,
            is_deaf: false,
        }
    }

    /// Bytes came from the other side.
    pub(super) fn receive(&mut self, bytes: &[u8], now: Duration) {
        self.heard = now;
        self.arrivals.add(bytes);
    }

    /// The next that is whole.
    pub(super) fn next(&mut self) -> Result<Option<Came>, Reason> {
        let longest = if self.is_established { LONGEST_FRAME } else { LONGEST_INTRODUCTION };
        let Some(body) = self.arrivals.next(longest)? else { return Ok(None) };
        if !self.was_greeted {
            let hello = Hello::decode(body)?;
            self.was_greeted = true;
            let theirs = Duration::from_millis(u64::from(hello.lost_after));
            self.pace = self.pace.min(theirs / 4);
            return Ok(Some(Came::Hello(hello)));
        }
        let frame = protocol::decode(body)?;
        let is_first_of_all = matches!(frame, Frame::Claim { .. } | Frame::Accept { .. });
        if is_first_of_all == self.is_established && !matches!(frame, Frame::Goodbye { .. }) {
            return Err(protocol::malformed("a frame out of its turn"));
        }
        Ok(Some(Came::Frame(frame)))
    }

    /// It is agreed that this is the session of these two nodes.
    pub(super) fn establish(&mut self, now: Duration) {
        self.is_established = true;
        self.heard = now;
    }

    pub(super) fn is_established(&self) -> bool {
        self.is_established
    }

    /// Puts a frame behind what waits already; refused if that is too much.
    pub(super) fn send(&mut self, frame: &Frame) -> Result<(), Reason> {
        let body = protocol::encode(frame);
        let room = match frame {
            Frame::Letter(_) => MOST_WAITING,
            _ => MOST_WAITING + MOST_NOTES,
        };
        if self.departures.bytes() + body.len() > room {
            return Err(Reason::Ended(Parting::Backlog));
        }
        self.departures.add(&body);
        Ok(())
    }

    /// The rest of what is to be sent, with a goodbye behind it if there is still something to say.
    pub(super) fn farewell(&mut self, reason: Option<Parting>, detail: &str) -> Vec<u8> {
        if let Some(why) = reason {
            let detail = crate::text::shortened(detail, LONGEST_DETAIL).to_owned();
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
        self.spoke = now;
    }

    /// Nothing is read from now on; or again.
    pub(super) fn set_deaf(&mut self, is_deaf: bool, now: Duration) {
        if self.is_deaf && !is_deaf {
            self.heard = now;
        }
        self.is_deaf = is_deaf;
    }

    /// Time passed: sends a heartbeat when it is time, and ends when nothing was heard.
    pub(super) fn tick(&mut self, now: Duration) -> Result<(), Reason> {
        if !self.is_established {
            return if now >= self.until { Err(Reason::Ended(Parting::Late)) } else { Ok(()) };
        }
        if !self.is_deaf && now >= self.heard + self.lost_after {
            return Err(Reason::Ended(Parting::Silent));
        }
        // While bytes wait, one more would be of no use.
        if now >= self.spoke + self.pace && self.departures.bytes() == 0 {
            self.spoke = now;
            return self.send(&Frame::Heartbeat);
        }
        Ok(())
    }

    /// Since when another connection would be better, if nothing is heard until then: the link may
    /// have been down, and what the system retransmits is the later the longer it was.
    pub(super) fn stale_at(&self) -> Option<Duration> {
        let longest = (self.pace * 5 / 2).max(SOONEST_STALE);
        (self.is_established && !self.is_deaf).then(|| self.heard + longest)
    }

    /// Was nothing heard for longer than it should take?
    pub(super) fn is_stale(&self, now: Duration) -> bool {
        self.stale_at().is_some_and(|at| now >= at)
    }

    /// When `tick` has something to do next.
    pub(super) fn deadline(&self) -> Option<Duration> {
        if !self.is_established {
            return Some(self.until);
        }
        let silence = (!self.is_deaf).then(|| self.heard + self.lost_after);
        let heartbeat = (self.departures.bytes() == 0).then(|| self.spoke + self.pace);
        silence.into_iter().chain(heartbeat).min()
    }
}
