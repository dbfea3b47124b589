//! Another agent, as this one knows it.

use std::collections::{HashMap, VecDeque};
use std::fs;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path as FilePath;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gpu::{DeviceName, Memory, WeakMemory};
use ipc::{Channel, ChannelError, Doorbell, Life, MappedWords, Message};

use super::board::ReadOnlyBoard;
use super::card::AgentCard;
use super::deferred::DeferredOperation;
use super::doorplate;
use super::home::{self, Home, Visitor};
use super::lane::Ticket;
use super::operations::{Operations, Token};
use super::order::Order;
use super::protocol::{Reply, Request};
use super::visit::{Guest, Host};
use crate::error::{Error, ErrorKind, Result};
use crate::host::HostBuffer;
use crate::lock;
use crate::path::Locality;
use crate::region::{RegionDescriptor, Registered};

pub(super) const CONNECT: &str = "connect to an agent";
/// Rests between attempts to connect where nobody listens yet.
const RESTS: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(100));

/// What a visit to an agent of this machine is made of.
#[derive(Debug)]
pub(super) struct Visit {
    /// Before the tie: it says goodbye, and whoever sees the end of the connection knows of that.
    pub(super) guest: Guest,
    pub(super) tie: Tie,
    pub(super) life: Life,
    pub(super) board: ReadOnlyBoard,
    pub(super) bell: Doorbell<MappedWords>,
    /// Its process is gone: seen at the last look.
    is_gone: bool,
    /// The connection to it has ended: seen at the last look. Its owner reads no notices any more.
    is_cut: bool,
}

/// How another agent of this machine is reached.
#[derive(Debug)]
pub(super) enum Tie {
    /// It belongs to this process.
    Here { home: Arc<Home>, visitor: Arc<Visitor> },
    /// It belongs to another process, with which descriptors can be exchanged.
    Channel(Arc<Channel>),
}

impl Drop for Tie {
    fn drop(&mut self) {
        if let Self::Here { home, visitor } = self {
            visitor.has_left.store(true, Ordering::Release);
            home.has_changed();
        }
    }
}

/// Another agent.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) card: AgentCard,
    pub(super) locality: Locality,
    /// None: it is reached by a fabric, or not at all.
    pub(super) visit: Option<Box<Visit>>,
    /// Notices for which there was no room, in the order in which their data was there.
    pub(super) unsent: VecDeque<Ticket>,
    pub(super) order: Order,
    /// Operations that wait for earlier ones, in order.
    pub(super) deferred: VecDeque<DeferredOperation>,
    /// What is mapped of its regions, by number and device.
    devices: HashMap<(u64, DeviceName), WeakMemory>,
    /// The same of the host's, by number and whether it can be written.
    hosts: HashMap<(u64, bool), HostBuffer>,
    /// By which rails it is known, and by which of them it is told things.
    pub(super) links: Vec<u32>,
    pub(super) speaker: Option<u32>,
    /// Why it is not to be reached by a fabric, where that was tried.
    pub(super) no_fabric: Option<Error>,
}

/// The machine's kernel, as it was started: the same in all of its containers.
pub(super) fn machine() -> [u8; 16] {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mut digits = text.bytes().filter_map(|byte| char::from(byte).to_digit(16));
    std::array::from_fn(|_| {
        let (high, low) = (digits.next().unwrap_or(0), digits.next().unwrap_or(0));
        (high << 4 | low) as u8
    })
}

impl Peer {
    /// Finds out what the two can give each other, by trying.
    pub(super) fn meet(
        home: &Home,
        card: &AgentCard,
        takes_for_remote: bool,
        (patience, meanwhile): (Duration, ProgressCallback<'_>),
    ) -> Result<Self> {
        let time = (patience, meanwhile);
        let (locality, visit) = Self::visit(home, card, takes_for_remote, time)?;
        Ok(Self {
            card: card.clone(),
            locality,
            visit,
            unsent: VecDeque::new(),
            order: Order::default(),
            deferred: VecDeque::new(),
            devices: HashMap::new(),
            hosts: HashMap::new(),
            links: Vec::new(),
            speaker: None,
            no_fabric: None,
        })
    }

    fn visit(
        home: &Home,
        card: &AgentCard,
        takes_for_remote: bool,
        (patience, meanwhile): (Duration, ProgressCallback<'_>),
    ) -> Result<(Locality, Option<Box<Visit>>)> {
        if takes_for_remote {
            return Ok((Locality::ToldRemote, None));
        }
        if let Some(other) = home::found(card.identity) {
            let visit = Visit::within(home, other)?;
            return Ok((Locality::SameProcess, Some(Box::new(visit))));
        }
        let is_here = card.machine == machine();
        let why = match &card.socket {
            None if is_here => "it has no socket".to_owned(),
            Some(path) => match Visit::begin(home, card, path, (patience, meanwhile)) {
                Ok(visit) => return Ok((Locality::SameMachine, Some(Box::new(visit)))),
                // Somebody is there, and says no: that is no matter of paths.
                Err(error) if error.kind() != ErrorKind::Failed => return Err(error),
                Err(_) if is_here && doorplate::is_socket_gone(path) => format!(
                    "agent \"{}\" has ended, or its card is from an earlier start: its socket {} is \
                     gone. Take a new card",
                    card.label.escape_debug(),
                    path.display()
                ),
                Err(error) => error.to_string(),
            },
            None => String::new(),
        };
        let locality = if is_here { Locality::NoWay { why } } else { Locality::OtherMachine };
        Ok((locality, None))
    }

    /// Leaves notices, in order, as long as there is room for them.
    pub(super) fn send_notices(&mut self, operations: &mut Operations) {
        let Some(visit) = &self.visit else { return };
        let mut has_sent = false;
        while let Some(Ticket { token, notice: Some(notice), epoch, .. }) = self.unsent.front() {
            let left = match visit.end() {
                None => visit.guest.leave(notice, &visit.life),
                Some(end) => {
                    let detail = format!("{end}, and it did not hear of it");
                    Err(Error::new("notify", ErrorKind::Closed, detail))
                }
            };
            let outcome = match left {
                Ok(true) => Ok(()),
                Ok(false) => break,
                Err(error) => Err(error.with(&self.card.label)),
            };
            has_sent |= outcome.is_ok();
            finish((*token, *epoch), outcome, &mut self.order, operations);
            self.unsent.pop_front();
        }
        if has_sent {
            visit.bell.ring();
        }
    }

    /// An operation is over, also for those that wait for it.
    pub(super) fn finish(
        &mut self,
        ticket: &Ticket,
        outcome: Result<()>,
        operations: &mut Operations,
    ) {
        finish((ticket.token, ticket.epoch), outcome, &mut self.order, operations);
    }

    /// The next operation that waited for others and waits no more, and what of them failed.
    pub(super) fn take_deferred(&mut self) -> Option<(DeferredOperation, Option<String>)> {
        let after = self.deferred.front()?.after();
        if !self.order.is_over_before(after) {
            return None;
        }
        let failure = self.order.failure_before(after).map(str::to_owned);
        Some((self.deferred.pop_front()?, failure))
    }

    /// Why nothing can be begun with it, or with a region that was there when it was joined.
    pub(super) fn obstacle(
        &mut self,
        region: Option<&RegionDescriptor>,
    ) -> Option<(ErrorKind, &'static str)> {
        let visit = self.visit.as_mut()?;
        visit.look();
        if let Some(end) = visit.end() {
            return Some((ErrorKind::Closed, end));
        }
        let is_gone = region.is_some_and(|region| !visit.board.is_there(region.number));
        is_gone.then_some((ErrorKind::Stale, "the region was withdrawn"))
    }

    /// Looks whether it is there, and ends what it will not hear of.
    pub(super) fn look_after(&mut self, operations: &mut Operations) {
        let Some(visit) = &mut self.visit else { return };
        visit.look();
        self.send_notices(operations);
    }

    /// What is mapped of a region for a device of this process.
    pub(super) fn mapped(&self, region: u64, device: DeviceName) -> Option<Memory> {
        self.devices.get(&(region, device)).and_then(WeakMemory::upgrade)
    }

    pub(super) fn remember(&mut self, region: u64, memory: &Memory) {
        self.devices.retain(|_, memory| memory.upgrade().is_some());
        self.devices.insert((region, memory.mapped_for().name()), memory.downgrade());
    }

    /// What is mapped of a region in host memory. A mapping that can only be read is of no use to
    /// whoever has more rights.
    pub(super) fn mapped_host(&self, region: u64, is_writable: bool) -> Option<HostBuffer> {
        self.hosts.get(&(region, is_writable)).cloned()
    }

    pub(super) fn remember_host(&mut self, region: u64, buffer: HostBuffer) {
        self.hosts.insert((region, !buffer.is_read_only()), buffer);
    }

    /// By which its regions are asked for, if it belongs to another process.
    pub(super) fn channel(&self) -> Option<Arc<Channel>> {
        match &self.visit.as_deref()?.tie {
            Tie::Channel(channel) => Some(Arc::clone(channel)),
            Tie::Here { .. } => None,
        }
    }

    /// A region of its, if it belongs to this process.
    pub(super) fn region_here(&self, region: &RegionDescriptor) -> Option<Arc<Registered>> {
        match &self.visit.as_deref()?.tie {
            Tie::Here { home, visitor } => {
                let found = home.region(region.number, region.ticket)?;
                visitor.opens(&found);
                Some(found)
            }
            Tie::Channel(_) => None,
        }
    }

    /// Lets go of what is mapped of regions that are gone.
    pub(super) fn sweep(&mut self) {
        let Some(visit) = &self.visit else { return };
        self.hosts.retain(|(number, _), _| visit.board.is_there(*number));
    }
}

fn finish(
    (token, epoch): (Token, u64),
    outcome: Result<()>,
    order: &mut Order,
    operations: &mut Operations,
) {
    match &outcome {
        Ok(()) => order.finish(epoch),
        Err(error) => {
            let name = operations.begun(token).map_or("operation", |begun| begun.operation);
            order.fail(epoch, || format!("{name} {token} failed: {}", error.reason()));
        }
    }
    operations.finish(token, outcome);
}

/// Makes progress during a wait, and gives for how long the next wait may last without it.
pub(super) type ProgressCallback<'a> = &'a mut dyn FnMut() -> Duration;

/// Receives a message, and goes on with other things until it comes.
pub(super) fn receive(
    channel: &Channel,
    end: Instant,
    meanwhile: ProgressCallback<'_>,
) -> std::result::Result<Message, ChannelError> {
    loop {
        let longest = meanwhile();
        match channel.receive(left(end).min(longest)) {
            Err(ChannelError::DeadlineExceeded { .. }) if left(end) > Duration::ZERO => {}
            outcome => return outcome,
        }
    }
}

pub(super) fn left(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now())
}

pub(super) fn of_channel(operation: &'static str) -> impl Fn(ChannelError) -> Error {
    move |error| Error::of_channel(operation, error)
}

impl Visit {
    /// Looks whether its process is there, and the connection to it.
    pub(super) fn look(&mut self) {
        self.is_gone = self.is_gone || self.life.is_over();
        self.is_cut = self.is_cut
            || match &self.tie {
                Tie::Channel(channel) => channel.has_ended(),
                Tie::Here { .. } => false,
            };
    }

    /// Why nothing more can be begun with it, if so.
    #[inline]
    pub(super) fn end(&self) -> Option<&'static str> {
        if self.board.has_ended() {
            return Some("the agent has ended");
        }
        if self.is_gone {
            return Some("its process is gone");
        }
        self.is_cut.then_some("the connection to it has ended; connect to it again")
    }

    /// With another agent of this process.
    fn within(home: &Home, other: Arc<Home>) -> Result<Self> {
        let failed = |why: &dyn ToString| Error::new(CONNECT, ErrorKind::Failed, why.to_string());
        let copy = |file: BorrowedFd<'_>| file.try_clone_to_owned().map_err(|e| failed(&e));
        let life = || Life::of_this_process().map_err(|error| failed(&error));
        let host = Host::create()?;
        let board = other.board.read_only().map_err(|error| failed(&error))?;
        let board = ReadOnlyBoard::open(board).map_err(|error| failed(&error))?;
        let bell = Home::open_bell(copy(other.bell.as_fd())?)?;
        let guest = Guest::open(copy(host.as_fd())?)?;
        let who = (home.identity, home.label.clone());
        let visitor = Arc::new(Visitor::new(who, life()?, host, true));
        lock(&other.visitors).push(Arc::clone(&visitor));
        other.has_changed();
        let tie = Tie::Here { home: other, visitor };
        Ok(Self { guest, tie, life: life()?, board, bell, is_gone: false, is_cut: false })
    }

    fn begin(
        home: &Home,
        card: &AgentCard,
        path: &FilePath,
        (patience, meanwhile): (Duration, ProgressCallback<'_>),
    ) -> Result<Self> {
        let end = ipc::deadline(patience);
        let mut rest = RESTS.0;
        let channel = loop {
            let longest = meanwhile();
            match Channel::connect(path, left(end).min(longest)) {
                Ok(channel) => break channel,
                Err(ChannelError::DeadlineExceeded { .. }) if left(end) > Duration::ZERO => {}
                // The lock of its card ends with its process, for all that share the kernel.
                Err(_) if card.is_of_this_machine() && card.was_left_behind() => {
                    let detail = format!(
                        "{}: connection refused, and its card is not locked: its process has ended",
                        path.display()
                    );
                    return Err(Error::new(CONNECT, ErrorKind::Closed, detail));
                }
                // It may be about to start: then its card hangs there already.
                Err(_) if left(end) > rest && doorplate::is_hung(path) => {
                    let until = Instant::now() + rest;
                    while left(until) > Duration::ZERO {
                        std::thread::sleep(left(until).min(meanwhile()));
                    }
                }
                Err(error) => {
                    let error = Error::of_channel_at(CONNECT, path, error);
                    return Err(error.and_kind(ErrorKind::Failed));
                }
            }
            rest = (2 * rest).min(RESTS.1);
        };
        let who = channel.credentials().map_err(of_channel(CONNECT))?;
        let is_trusted = who.user == 0 || home.admission.users.contains(&who.user);
        if !is_trusted {
            let detail = format!("user {} listens there, whom we do not trust", who.user);
            return Err(Error::new(CONNECT, ErrorKind::Denied, detail));
        }
        let hello = Request::Hello(home.introduction()).encode();
        channel.send(&hello, &[home.life.as_fd()], left(end)).map_err(of_channel(CONNECT))?;
        let message = receive(&channel, end, meanwhile).map_err(of_channel(CONNECT))?;
        let (it, [life, board, bell, visit]) = Reply::read_welcome(CONNECT, message)?;
        if it.identity != card.identity {
            let detail = format!("another agent (\"{}\") listens there now", it.label);
            return Err(Error::new(CONNECT, ErrorKind::Stale, detail));
        }
        let malformed =
            |why: &dyn ToString| Error::new(CONNECT, ErrorKind::Malformed, why.to_string());
        Ok(Self {
            tie: Tie::Channel(Arc::new(channel)),
            life: Life::from_fd(life).map_err(|error| malformed(&error))?,
            board: ReadOnlyBoard::open(board).map_err(|error| malformed(&error))?,
            bell: Home::open_bell(bell)?,
            guest: Guest::open(visit)?,
            is_gone: false,
            is_cut: false,
        })
    }
}
