//! Another agent, as this one knows it.

use std::collections::{HashMap, VecDeque};
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path as FilePath;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gpu::{Device, DeviceName, LegacyHandle, Memory, WeakMemory};
use ipc::{Channel, ChannelError, Doorbell, Life, MappedWords};

use super::board::Board;
use super::card::AgentCard;
use super::doorplate;
use super::home::{self, Home, Visitor};
use super::lane::Ticket;
use super::operations::Operations;
use super::protocol::{Reply, Request};
use super::visit::{Guest, Host};
use crate::error::{Error, ErrorKind, Result};
use crate::host::HostBuffer;
use crate::lock;
use crate::path::{Leaving, Locality, Place};
use crate::region::RegionDescriptor;
use crate::share::check_device;

pub(super) const CONNECT: &str = "connect to an agent";
const OPEN: &str = "open a region";
/// Rests between attempts to connect where nobody listens yet.
const RESTS: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(100));

/// What a visit to an agent of this machine is made of.
#[derive(Debug)]
pub(super) struct Visit {
    pub(super) tie: Tie,
    pub(super) life: Life,
    pub(super) board: Board,
    pub(super) bell: Doorbell<MappedWords>,
    pub(super) guest: Guest,
}

/// How another agent of this machine is reached.
#[derive(Debug)]
pub(super) enum Tie {
    /// It belongs to this process.
    Here { home: Arc<Home>, visitor: Arc<Visitor> },
    /// It belongs to another process, with which descriptors can be exchanged.
    Channel(Channel),
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
    /// Its process is gone: seen at the last look.
    pub(super) is_gone: bool,
    /// Notices for which there was no room, in the order in which their data was there.
    pub(super) unsent: VecDeque<Ticket>,
    /// What is mapped of its regions, by number and device.
    devices: HashMap<(u64, DeviceName), WeakMemory>,
    hosts: HashMap<u64, HostBuffer>,
    /// By which rails it is known, and by which of them it is told things.
    pub(super) links: Vec<u32>,
    pub(super) speaker: Option<u32>,
    /// Why it is not to be reached by a fabric, where that was tried.
    pub(super) no_fabric: Option<String>,
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
        patience: Duration,
    ) -> Result<Self> {
        let (locality, visit) = Self::visit(home, card, takes_for_remote, patience)?;
        Ok(Self {
            card: card.clone(),
            locality,
            visit,
            is_gone: false,
            unsent: VecDeque::new(),
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
        patience: Duration,
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
            Some(path) => match Visit::begin(home, card, path, patience) {
                Ok(visit) => return Ok((Locality::SameMachine, Some(Box::new(visit)))),
                // Somebody is there, and says no: that is no matter of paths.
                Err(error) if error.kind() != ErrorKind::Failed => return Err(error),
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
        while let Some(Ticket { token, notice: Some(notice), .. }) = self.unsent.front() {
            let outcome = match visit.guest.leave(notice, &visit.life) {
                Ok(true) => Ok(()),
                Ok(false) => break,
                Err(error) => Err(error.with(&self.card.label)),
            };
            has_sent |= outcome.is_ok();
            operations.finish(*token, outcome);
            self.unsent.pop_front();
        }
        if has_sent {
            visit.bell.ring();
        }
    }

    /// Looks whether its process is there, and ends what it will not hear of.
    pub(super) fn look_after(&mut self, operations: &mut Operations) {
        self.is_gone =
            self.is_gone || self.visit.as_ref().is_some_and(|visit| visit.life.is_over());
        if !self.is_gone {
            return;
        }
        for ticket in self.unsent.drain(..) {
            let detail = "its process is gone, and did not hear of it";
            let error = Error::new("tell a peer", ErrorKind::Closed, detail);
            operations.finish(ticket.token, Err(error.with(&self.card.label)));
        }
    }

    /// Maps a region of its for a device of this process, once.
    pub(super) fn map_for(
        &mut self,
        region: &RegionDescriptor,
        device: &Device,
        end: Instant,
    ) -> Result<Memory> {
        let key = (region.number, device.name());
        if let Some(memory) = self.devices.get(&key).and_then(WeakMemory::upgrade) {
            return Ok(memory);
        }
        let memory = match (&mut self.visit, region.place) {
            (Some(visit), Place::Device(Leaving::ByDescriptors)) => {
                visit.import(region, device, end)?
            }
            (Some(visit), Place::Device(Leaving::ByLegacyHandle)) => {
                visit.import_legacy(region, device, end)?
            }
            _ => {
                let detail = "it is not memory of a device that can be mapped";
                return Err(Error::new(OPEN, ErrorKind::NoPath, detail));
            }
        };
        self.devices.retain(|_, memory| memory.upgrade().is_some());
        self.devices.insert(key, memory.downgrade());
        Ok(memory)
    }

    /// Maps a region of its in host memory, once.
    pub(super) fn map_host(
        &mut self,
        region: &RegionDescriptor,
        end: Instant,
    ) -> Result<HostBuffer> {
        if let Some(buffer) = self.hosts.get(&region.number) {
            return Ok(buffer.clone());
        }
        let (Some(visit), Place::Host(Leaving::ByDescriptors)) = (&mut self.visit, region.place)
        else {
            let detail = "it is not memory of the host that can be mapped";
            return Err(Error::new(OPEN, ErrorKind::NoPath, detail));
        };
        let buffer = visit.open_host(region, end)?;
        self.hosts.insert(region.number, buffer.clone());
        Ok(buffer)
    }

    /// Lets go of what is mapped of regions that are gone.
    pub(super) fn sweep(&mut self) {
        let Some(visit) = &self.visit else { return };
        self.hosts.retain(|number, _| visit.board.is_there(*number));
    }
}

fn left(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now())
}

fn of_channel(operation: &'static str) -> impl Fn(ChannelError) -> Error {
    move |error| Error::of_channel(operation, error)
}

impl Visit {
    /// With another agent of this process.
    fn within(home: &Home, other: Arc<Home>) -> Result<Self> {
        let failed = |why: &dyn ToString| Error::new(CONNECT, ErrorKind::Failed, why.to_string());
        let copy = |file: BorrowedFd<'_>| file.try_clone_to_owned().map_err(|e| failed(&e));
        let life = || Life::of_this_process().map_err(|error| failed(&error));
        let host = Host::create()?;
        let board = Board::open(copy(other.board.as_fd())?).map_err(|error| failed(&error))?;
        let bell = Home::open_bell(copy(other.bell.as_fd())?)?;
        let guest = Guest::open(copy(host.as_fd())?)?;
        let visitor = Arc::new(Visitor::new(home.identity, home.label.clone(), life()?, host));
        lock(&other.visitors).push(Arc::clone(&visitor));
        other.has_changed();
        Ok(Self { tie: Tie::Here { home: other, visitor }, life: life()?, board, bell, guest })
    }

    fn begin(home: &Home, card: &AgentCard, path: &FilePath, patience: Duration) -> Result<Self> {
        let end = ipc::deadline(patience);
        let mut rest = RESTS.0;
        let channel = loop {
            match Channel::connect(path, left(end)) {
                Ok(channel) => break channel,
                // It may be about to start: then its card hangs there already.
                Err(_) if left(end) > rest && doorplate::is_hung(path) => std::thread::sleep(rest),
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
        let message = channel.receive(left(end)).map_err(of_channel(CONNECT))?;
        let (it, [life, board, bell, visit]) = Reply::read_welcome(CONNECT, message)?;
        if it.identity != card.identity {
            let detail = format!("another agent (\"{}\") listens there now", it.label);
            return Err(Error::new(CONNECT, ErrorKind::Stale, detail));
        }
        let malformed =
            |why: &dyn ToString| Error::new(CONNECT, ErrorKind::Malformed, why.to_string());
        Ok(Self {
            tie: Tie::Channel(channel),
            life: Life::from_fd(life).map_err(|error| malformed(&error))?,
            board: Board::open(board).map_err(|error| malformed(&error))?,
            bell: Home::open_bell(bell)?,
            guest: Guest::open(visit)?,
        })
    }

    /// Asks for a region, and is given each piece that it consists of: descriptor, length, and
    /// the bytes of all pieces.
    fn ask(
        &mut self,
        region: &RegionDescriptor,
        end: Instant,
        mut take: impl FnMut(OwnedFd, u64, u64) -> Result<()>,
    ) -> Result<()> {
        let asked = self.exchange(region, end, &mut take);
        if asked.as_ref().is_err_and(|error| error.kind() == ErrorKind::DeadlineExceeded)
            && let Tie::Channel(channel) = &self.tie
        {
            // What comes late would be taken for the answer to the next request.
            channel.end();
        }
        asked
    }

    fn exchange(
        &mut self,
        region: &RegionDescriptor,
        end: Instant,
        take: &mut dyn FnMut(OwnedFd, u64, u64) -> Result<()>,
    ) -> Result<()> {
        let Tie::Channel(channel) = &self.tie else {
            return Err(Error::new(OPEN, ErrorKind::NoPath, "it belongs to this process"));
        };
        let request = Request::Open(region.number, region.ticket).encode();
        channel.send(&request, &[], left(end)).map_err(of_channel(OPEN))?;
        let mut next = 0;
        let mut failure = None;
        loop {
            let message = channel.receive(left(end)).map_err(of_channel(OPEN))?;
            let pieces = Reply::read_pieces(OPEN, &message)?;
            let fits = pieces.number == region.number
                && pieces.in_all == region.pieces
                && pieces.first == next;
            if !fits {
                let detail = "an answer to something else";
                return Err(Error::new(OPEN, ErrorKind::Malformed, detail));
            }
            for (descriptor, length) in message.descriptors.into_iter().zip(&pieces.lengths) {
                // The rest of the answer has to be read all the same.
                if failure.is_none() {
                    failure = take(descriptor, *length, pieces.bytes).err();
                }
            }
            next += pieces.lengths.len() as u32;
            if next >= region.pieces {
                return failure.map_or(Ok(()), Err);
            }
            if pieces.lengths.is_empty() {
                return Err(Error::new(OPEN, ErrorKind::Malformed, "an answer without pieces"));
            }
        }
    }

    fn import(
        &mut self,
        region: &RegionDescriptor,
        device: &Device,
        end: Instant,
    ) -> Result<Memory> {
        let of_device = |error| Error::of_device(OPEN, error);
        let mut importer = None;
        self.ask(region, end, |descriptor, length, bytes| {
            // The last piece may have far more than what is the region's of it.
            let importer = match &mut importer {
                Some(importer) => importer,
                none => none.insert(device.importer(bytes).map_err(of_device)?),
            };
            importer.add(descriptor.as_fd(), length).map_err(of_device)
        })?;
        let Some(importer) = importer else {
            return Err(Error::new(OPEN, ErrorKind::Malformed, "no piece came"));
        };
        let memory = importer.finish(region.offset, region.length).map_err(of_device)?;
        check_device(OPEN, &memory, region.device)?;
        Ok(memory)
    }

    fn import_legacy(
        &mut self,
        region: &RegionDescriptor,
        device: &Device,
        end: Instant,
    ) -> Result<Memory> {
        // Nothing comes, but it says whether the region is there.
        self.ask(region, end, |_, _, _| Ok(()))?;
        let Some(bytes) = region.legacy else {
            return Err(Error::new(OPEN, ErrorKind::Malformed, "no handle"));
        };
        let handle = LegacyHandle { bytes, offset: region.offset, length: region.length };
        // Of memory that is opened so the driver says that it lies on the device that opened
        // it: there is nothing to compare.
        device.open_legacy_of_another(&handle).map_err(|error| Error::of_device(OPEN, error))
    }

    fn open_host(&mut self, region: &RegionDescriptor, end: Instant) -> Result<HostBuffer> {
        let mut file = None;
        self.ask(region, end, |descriptor, _, _| {
            file = Some(descriptor);
            Ok(())
        })?;
        match file {
            Some(file) => HostBuffer::open(file, region.length),
            None => Err(Error::new(OPEN, ErrorKind::Malformed, "no descriptor came")),
        }
    }
}
