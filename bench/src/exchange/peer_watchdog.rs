//! Detects that the other side exited, failed or makes no progress.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::frame::Frame;
use super::frame_channel::{FrameChannel, Received};
use super::plan::{STALL_TIMEOUT, Wait};
use crate::process::reset_stall_alarm;
use crate::worker::Worker;
use command::exit::{Exit, Failure};

/// Maximum number of queued frames. More violate the protocol.
const MAX_PENDING: usize = 8;
/// Polls between two checks of the clock, while busy-polling.
const POLLS_PER_TICK: u32 = 1024;
const TICK: Duration = Duration::from_millis(100);
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// The role of this side.
#[derive(Debug)]
pub(crate) enum Role {
    /// Started the other side.
    Initiator(Worker),
    /// Was started by the other side.
    Target,
    /// The other side may be on another machine.
    Remote {
        /// Did this side send the plan?
        is_initiator: bool,
    },
}

/// State of the other side, apart from the fabric.
#[derive(Debug)]
pub(crate) struct PeerWatchdog {
    /// What is awaited, for the message of a deadline.
    pub(crate) waiting_for: &'static str,
    pub(crate) waiting: Wait,
    provider: String,
    polls: u32,
    progress: Progress,
    frame_channel: FrameChannel,
    pending: VecDeque<Frame>,
    role: Option<Role>,
}

/// Progress of either side. A side that only serves reads sees no events for long, so both send
/// heartbeats.
#[derive(Debug)]
struct Progress {
    events: u64,
    seen: u64,
    announced: u64,
    ticked: Instant,
    last_progress: Instant,
    announced_at: Instant,
}

impl PeerWatchdog {
    pub(crate) fn new(
        frame_channel: FrameChannel,
        role: Role,
        provider: String,
        waiting: Wait,
    ) -> Self {
        let now = Instant::now();
        Self {
            waiting_for: "the other process",
            waiting,
            provider,
            polls: 0,
            progress: Progress {
                events: 0,
                seen: 0,
                announced: 0,
                ticked: now,
                last_progress: now,
                announced_at: now,
            },
            frame_channel,
            pending: VecDeque::with_capacity(MAX_PENDING),
            role: Some(role),
        }
    }

    pub(crate) fn is_initiator(&self) -> bool {
        matches!(self.role, Some(Role::Initiator(_) | Role::Remote { is_initiator: true }))
    }

    /// Records an event of the fabric.
    #[inline(always)]
    pub(crate) fn record_progress(&mut self) {
        self.progress.events += 1;
    }

    /// Call after each poll of the fabric.
    #[inline(always)]
    pub(crate) fn check_peer(&mut self) -> Result<(), Failure> {
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(POLLS_PER_TICK) { self.tick() } else { Ok(()) }
    }

    #[cold]
    pub(crate) fn failed(&self, error: fabric::Error) -> Failure {
        Failure::from(error).with_operation(format!("waiting for {}", self.waiting_for))
    }

    /// The rare part of every wait: deadlines and exits.
    #[cold]
    pub(crate) fn tick(&mut self) -> Result<(), Failure> {
        let now = Instant::now();
        if now - self.progress.ticked < TICK {
            return Ok(());
        }
        self.progress.ticked = now;
        reset_stall_alarm();
        if self.progress.events != self.progress.announced
            && now - self.progress.announced_at >= HEARTBEAT_INTERVAL
        {
            self.progress.announced = self.progress.events;
            self.progress.announced_at = now;
            // If the other side is gone, the next poll reports it.
            self.frame_channel.send(&Frame::Heartbeat)?;
        }
        while let Some(frame) = self.poll_frame()? {
            self.queue_frame(frame)?;
        }
        if self.progress.events != self.progress.seen {
            self.progress.seen = self.progress.events;
            self.progress.last_progress = now;
        } else if now.saturating_duration_since(self.progress.last_progress) > STALL_TIMEOUT {
            return Err(Failure::new(
                Exit::Deadline,
                format!(
                    "no progress for {STALL_TIMEOUT:?} on {} while waiting for {}",
                    self.provider, self.waiting_for,
                ),
            ));
        }
        Ok(())
    }

    fn queue_frame(&mut self, frame: Frame) -> Result<(), Failure> {
        if self.pending.len() == MAX_PENDING {
            return Err(unexpected(frame));
        }
        self.pending.push_back(frame);
        Ok(())
    }

    /// The next frame except heartbeats.
    fn poll_frame(&mut self) -> Result<Option<Frame>, Failure> {
        loop {
            match self.frame_channel.poll()? {
                Received::Frame(Frame::Heartbeat) => self.progress.last_progress = Instant::now(),
                Received::Frame(Frame::Failed { exit, message }) => {
                    return Err(Failure::new(
                        Exit::from_code(exit),
                        format!("the other side failed: {message}"),
                    ));
                }
                Received::Frame(frame) => return Ok(Some(frame)),
                Received::Nothing => return Ok(None),
                // A side may exit after its last frame, which is still queued.
                Received::Closed if !self.pending.is_empty() => return Ok(None),
                Received::Closed => return Err(self.peer_gone()),
            }
        }
    }

    #[cold]
    fn peer_gone(&mut self) -> Failure {
        match self.role.take() {
            Some(Role::Initiator(target)) => target.exit_failure(),
            Some(Role::Remote { .. }) => Failure::failed("the other side has exited"),
            _ => Failure::failed("the initiator has exited"),
        }
    }

    pub(crate) fn send(&mut self, frame: &Frame) -> Result<(), Failure> {
        if self.frame_channel.send(frame)? { Ok(()) } else { Err(self.peer_gone()) }
    }

    /// The next frame, if one has arrived.
    pub(crate) fn receive(&mut self) -> Result<Option<Frame>, Failure> {
        let frame = match self.pending.pop_front() {
            Some(frame) => Some(frame),
            None => self.poll_frame()?,
        };
        if frame.is_some() {
            self.progress.events += 1;
        }
        Ok(frame)
    }

    /// Turns between two polls of the frame channel.
    pub(crate) fn turns_per_poll(&self) -> u32 {
        if self.waiting == Wait::Poll { 256 } else { 1 }
    }

    /// Ends the exchange: waits for the exit of the target, if it was started here.
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
            Failure::failed(format!("unexpected frame from the other process: {text}"))
        }
    }
}
