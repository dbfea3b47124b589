//! Watching over the other side: is it there, does it get anything done, what does it say.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::frame::Frame;
use super::link::{Link, Look};
use super::plan::{STALL, Wait};
use crate::process::still_alive;
use crate::worker::Worker;
use command::exit::{Exit, Failure};

/// Frames that may be waiting to be looked at. More means that the other side
/// does not keep to the protocol.
const MOST_PENDING: usize = 8;
/// How often the clock is looked at, in polls, while polling all the time.
const POLLS_PER_TICK: u32 = 1024;
const TICK: Duration = Duration::from_millis(100);
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);

/// Which side this is.
#[derive(Debug)]
pub(crate) enum Role {
    /// It started the other one.
    Initiator(Worker),
    /// It was started.
    Target,
    /// The other one is on another machine, or might be.
    Remote {
        /// Did this side bring the plan?
        is_initiator: bool,
    },
}

/// What one side knows of the other, besides what comes by the fabric.
#[derive(Debug)]
pub(crate) struct Vigil {
    /// What the other side is waited for: for the message of a deadline.
    pub(crate) waiting_for: &'static str,
    pub(crate) waiting: Wait,
    provider: String,
    polls: u32,
    pulse: Pulse,
    link: Link,
    pending: VecDeque<Frame>,
    role: Option<Role>,
}

/// Did anybody get anything done lately? A side that only serves sees nothing
/// happen for long, so both tell each other.
#[derive(Debug)]
struct Pulse {
    events: u64,
    seen: u64,
    told: u64,
    ticked: Instant,
    changed: Instant,
    spoken: Instant,
}

impl Vigil {
    pub(crate) fn new(link: Link, role: Role, provider: String, waiting: Wait) -> Self {
        let now = Instant::now();
        Self {
            waiting_for: "the other process",
            waiting,
            provider,
            polls: 0,
            pulse: Pulse { events: 0, seen: 0, told: 0, ticked: now, changed: now, spoken: now },
            link,
            pending: VecDeque::with_capacity(MOST_PENDING),
            role: Some(role),
        }
    }

    pub(crate) fn is_initiator(&self) -> bool {
        matches!(self.role, Some(Role::Initiator(_) | Role::Remote { is_initiator: true }))
    }

    /// Something came by the fabric.
    #[inline(always)]
    pub(crate) fn has_moved(&mut self) {
        self.pulse.events += 1;
    }

    /// To be called at each look for something, whether or not there was something.
    #[inline(always)]
    pub(crate) fn look_up(&mut self) -> Result<(), Failure> {
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(POLLS_PER_TICK) { self.tick() } else { Ok(()) }
    }

    #[cold]
    pub(crate) fn failed(&self, error: fabric::Error) -> Failure {
        Failure::from(error).while_doing(format!("waiting for {}", self.waiting_for))
    }

    /// The rare part of every wait: deadlines and deaths.
    #[cold]
    pub(crate) fn tick(&mut self) -> Result<(), Failure> {
        let now = Instant::now();
        if now - self.pulse.ticked < TICK {
            return Ok(());
        }
        self.pulse.ticked = now;
        still_alive();
        if self.pulse.events != self.pulse.told && now - self.pulse.spoken >= SIGN_OF_LIFE {
            self.pulse.told = self.pulse.events;
            self.pulse.spoken = now;
            // Whether anybody is there to hear it, the next look tells.
            self.link.send(&Frame::Alive)?;
        }
        while let Some(frame) = self.look()? {
            self.keep(frame)?;
        }
        if self.pulse.events != self.pulse.seen {
            self.pulse.seen = self.pulse.events;
            self.pulse.changed = now;
        } else if now.saturating_duration_since(self.pulse.changed) > STALL {
            return Err(Failure::new(
                Exit::Deadline,
                format!(
                    "nothing happened for {STALL:?} on {}, waiting for {}",
                    self.provider, self.waiting_for,
                ),
            ));
        }
        Ok(())
    }

    fn keep(&mut self, frame: Frame) -> Result<(), Failure> {
        if self.pending.len() == MOST_PENDING {
            return Err(unexpected(frame));
        }
        self.pending.push_back(frame);
        Ok(())
    }

    /// A frame that is there, leaving out signs of life.
    fn look(&mut self) -> Result<Option<Frame>, Failure> {
        loop {
            match self.link.look()? {
                Look::Frame(Frame::Alive) => self.pulse.changed = Instant::now(),
                Look::Frame(Frame::Failed { exit, message }) => {
                    return Err(Failure::new(
                        Exit::from_code(exit),
                        format!("the other side failed: {message}"),
                    ));
                }
                Look::Frame(frame) => return Ok(Some(frame)),
                Look::Nothing => return Ok(None),
                // Who has said the last word may go; it is still to be heard.
                Look::Closed if !self.pending.is_empty() => return Ok(None),
                Look::Closed => return Err(self.gone()),
            }
        }
    }

    #[cold]
    fn gone(&mut self) -> Failure {
        match self.role.take() {
            Some(Role::Initiator(target)) => target.explain_end(),
            Some(Role::Remote { .. }) => Failure::failed("the other side is gone"),
            _ => Failure::failed("the initiator is gone"),
        }
    }

    pub(crate) fn send(&mut self, frame: &Frame) -> Result<(), Failure> {
        if self.link.send(frame)? { Ok(()) } else { Err(self.gone()) }
    }

    /// The next frame, if there is one.
    pub(crate) fn receive(&mut self) -> Result<Option<Frame>, Failure> {
        let frame = match self.pending.pop_front() {
            Some(frame) => Some(frame),
            None => self.look()?,
        };
        if frame.is_some() {
            self.pulse.events += 1;
        }
        Ok(frame)
    }

    /// How often to move data between two looks at the pipe.
    pub(crate) fn turns_per_look(&self) -> u32 {
        if self.waiting == Wait::Busy { 256 } else { 1 }
    }

    /// The last word: waits for the other side's end, if that was started here.
    pub(crate) fn end(self) -> Result<(), Failure> {
        match self.role {
            Some(Role::Initiator(target)) => target.finish(),
            _ => Ok(()),
        }
    }
}

pub(crate) fn unexpected(frame: Frame) -> Failure {
    match frame {
        Frame::Failed { exit, message } => {
            Failure::new(Exit::from_code(exit), format!("the other side failed: {message}"))
        }
        frame => {
            let text: String = format!("{frame:?}").chars().take(200).collect();
            Failure::failed(format!("the other process sent what was not expected: {text}"))
        }
    }
}
