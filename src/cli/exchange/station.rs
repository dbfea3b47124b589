//! One side of an exchange: an endpoint with its queue and memory, the other
//! side's, and the rules of waiting that hold for all of it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fabric::{
    Access, AddressVector, Capabilities, Completion, CompletionQueue, Domain, Endpoint, ErrorKind,
    HostMemory, MemoryRegion, MrMode, Offer, Outcome, Peer, QueueOptions, RemoteMemory,
};

use super::frame::Frame;
use super::initiator::Target;
use super::link::{Link, Look};
use super::plan::{Exchange, Plan, STALL, WaitingMode};
use super::{measurement::Layout, ring};
use crate::cli::exit::{Exit, Failure};
use crate::cli::process::{still_alive, stop_watching, watch_over};

/// Frames that may be waiting to be looked at. More means that the other side
/// does not keep to the protocol.
const MOST_PENDING: usize = 8;
/// How often the clock is looked at, in polls, while polling all the time.
const POLLS_PER_TICK: u32 = 1024;
/// How long a sleep for completions may take before the pipe is looked at.
const NAP: Duration = Duration::from_millis(10);
const TICK: Duration = Duration::from_millis(100);
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);

/// Which side this is.
#[derive(Debug)]
pub(crate) enum Role {
    /// It started the other one.
    Initiator(Target),
    /// It was started.
    Target,
}

/// One side. Its fields are what exchanges post with; waiting goes through
/// [`turn`](Self::turn).
#[derive(Debug)]
pub(crate) struct Station {
    pub(crate) endpoint: Endpoint,
    pub(crate) queue: CompletionQueue,
    pub(crate) peer: Peer,
    pub(crate) region: MemoryRegion,
    pub(crate) remote: RemoteMemory,
    /// What the other side is waited for: for the message of a deadline.
    pub(crate) waiting_for: &'static str,
    waiting: WaitingMode,
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

impl Station {
    /// Opens everything and gets to know the other side.
    pub(crate) fn open(
        plan: &Plan,
        offer: &Offer,
        mut link: Link,
        role: Role,
    ) -> Result<Self, Failure> {
        watch_over()?;
        let domain = Domain::open(offer)?;
        let (length, entries) = match &plan.exchange {
            Exchange::Measure(measure) => {
                check_size(domain.capabilities(), measure.size)?;
                (Layout::new(measure).length(), measure.slots * 4)
            }
            // Rings bring their own memory.
            Exchange::Flow(_) => (4096, 4096),
            Exchange::Ring => (ring::LENGTH, ring::SLOTS * 4),
        };
        let options = QueueOptions { size: entries.max(256), waiting: plan.waiting.waiting() };
        let mut queue = CompletionQueue::open_with(&domain, options)?;
        let addresses = AddressVector::open(&domain)?;
        let endpoint = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
        let region = domain.register(HostMemory::zeroed(length)?, Access::ALL)?;
        if domain.capabilities().mr_mode.contains(MrMode::ENDPOINT) {
            region.bind_endpoint(&endpoint)?;
        }
        region.enable()?;
        // Pages are not to be made while the clock runs.
        region.fill(0..length, 0)?;

        let hello = Frame::Hello { address: endpoint.address()?, region: region.describe()? };
        let hello = if link.send(&hello)? {
            link.wait_for("the other side's address", STALL)?
        } else {
            Look::Closed
        };
        let (address, remote) = match hello {
            Look::Frame(Frame::Hello { address, region }) => (address, region),
            Look::Frame(frame) => return Err(unexpected(frame)),
            Look::Closed | Look::Nothing => {
                return Err(match role {
                    Role::Initiator(target) => target.explain_end(),
                    Role::Target => Failure::failed("the initiator is gone"),
                });
            }
        };
        let now = Instant::now();
        Ok(Self {
            peer: addresses.insert(&address)?,
            remote: domain.attach(&remote)?,
            endpoint,
            queue,
            region,
            waiting_for: "the other process",
            waiting: plan.waiting,
            polls: 0,
            pulse: Pulse { events: 0, seen: 0, told: 0, ticked: now, changed: now, spoken: now },
            link,
            pending: VecDeque::with_capacity(MOST_PENDING),
            role: Some(role),
        })
    }

    pub(crate) fn capabilities(&self) -> &Capabilities {
        self.region.domain().capabilities()
    }

    pub(crate) fn is_initiator(&self) -> bool {
        matches!(self.role, Some(Role::Initiator(_)))
    }

    /// Moves data, and says what completed, if anything did. All waiting is done
    /// by calling this again; it fails once nothing has happened for too long.
    #[inline(always)] // what polls is measured: a call and a copy less each time
    pub(crate) fn turn(&mut self) -> Result<Option<Completion>, Failure> {
        let outcome = match self.waiting {
            WaitingMode::Busy => {
                let outcome = self.queue.poll();
                if outcome.is_none() {
                    self.queue.pause();
                }
                outcome
            }
            WaitingMode::Adaptive | WaitingMode::Block => self.nap()?,
        };
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(POLLS_PER_TICK) {
            self.tick()?;
        }
        match outcome {
            Some(Ok(completion)) => {
                self.pulse.events += 1;
                Ok(Some(completion))
            }
            None => Ok(None),
            Some(Err(failure)) => Err(self.operation_failed(failure)),
        }
    }

    /// Waits in the way the queue was opened with, for a short while.
    #[inline(never)]
    fn nap(&mut self) -> Result<Option<Outcome>, Failure> {
        match self.queue.wait(NAP) {
            Err(failure)
                if failure.operation.is_none()
                    && failure.error.kind() == ErrorKind::DeadlineExceeded
                    && failure.error.code().is_none() =>
            {
                self.tick()?;
                Ok(None)
            }
            outcome => Ok(Some(outcome)),
        }
    }

    #[cold]
    fn operation_failed(&self, failure: fabric::Failure) -> Failure {
        Failure::from(failure.error).while_doing(format!("waiting for {}", self.waiting_for))
    }

    /// The rare part of every wait: deadlines and deaths.
    #[cold]
    fn tick(&mut self) -> Result<(), Failure> {
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
                    "nothing happened for {STALL:?} on {}, waiting for {}; {} operations are in flight",
                    self.capabilities().provider,
                    self.waiting_for,
                    self.queue.in_flight()
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
                        format!("the target process failed: {message}"),
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
        if self.waiting == WaitingMode::Busy { 256 } else { 1 }
    }

    /// Ends the exchange: with the other side's own end, for the initiator.
    pub(crate) fn finish(self) -> Result<(), Failure> {
        let Self { endpoint, role, .. } = self;
        if let Some(Role::Initiator(target)) = role {
            target.finish()?;
        }
        endpoint.close()?;
        stop_watching();
        Ok(())
    }
}

fn check_size(capabilities: &Capabilities, size: usize) -> Result<(), Failure> {
    let most = capabilities.max_message_size;
    if size > most {
        let provider = &capabilities.provider;
        return Err(Failure::new(
            Exit::Usage,
            format!("{provider} transfers at most {most} bytes at once"),
        ));
    }
    Ok(())
}

pub(crate) fn unexpected(frame: Frame) -> Failure {
    match frame {
        Frame::Failed { exit, message } => {
            Failure::new(Exit::from_code(exit), format!("the target process failed: {message}"))
        }
        frame => {
            let text: String = format!("{frame:?}").chars().take(200).collect();
            Failure::failed(format!("the other process sent what was not expected: {text}"))
        }
    }
}
