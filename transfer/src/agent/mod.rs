//! Agents: who puts and gets.

mod board;
mod card;
mod home;
mod lane;
mod notice;
mod operations;
mod peer;
mod protocol;
mod reception;
mod route;
mod visit;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gpu::{Block, BlocksBy, DeviceName, Slice};
use ipc::{ChannelListener, Incarnation, Spin};

use self::home::Visitor;
use self::lane::{Copy, Lane, Ticket};
use self::operations::{Begun, Operations};
use self::peer::{Peer, Tie};
use self::route::{JOIN, Means};
use crate::error::{Error, ErrorKind, Result};
use crate::host::HostBuffer;
use crate::path::{Operation, Policy, metrics};
use crate::region::{Buffer, Region, RegionDescriptor, Rights};
use crate::service::Admission;
use crate::share::check_fork;

pub use card::{AgentCard, FabricAddress, LONGEST_LABEL};
pub(crate) use home::Home;
pub use notice::{LONGEST_NOTICE, Notice};
pub use operations::{Done, MOST_OPERATIONS, Token};
pub use route::Route;

/// Copies of less than this have a stream of their own, so that they do not wait behind
/// those that take milliseconds.
const SMALL: u64 = 1 << 20;
/// What the processor copies at a time, between two looks at everything else.
const SHARE: u64 = 1 << 20;
/// How often the life of peers is looked at.
const LOOK: Duration = Duration::from_millis(50);
/// The longest rest while something of ours is under way.
const REST: Duration = Duration::from_micros(200);

/// How an agent is started.
#[derive(Debug, Clone)]
pub struct AgentOptions {
    label: String,
    directory: Option<PathBuf>,
    admission: Admission,
    node: Option<[u8; 16]>,
    takes_all_for_remote: bool,
    waiting: Spin,
}

impl AgentOptions {
    /// With what people are to call it.
    #[must_use]
    pub fn new(label: &str) -> Self {
        Self {
            label: label.to_owned(),
            directory: None,
            admission: Admission::own_user(),
            node: None,
            takes_all_for_remote: false,
            waiting: Spin::default(),
        }
    }

    /// Where its socket is to be: a directory that those see who are to reach it without
    /// a network. Without one nobody does, except agents of this process.
    #[must_use]
    pub fn directory(mut self, directory: &FilePath) -> Self {
        self.directory = Some(directory.to_owned());
        self
    }

    /// Who may visit it, and whose agents it visits; the own user only, otherwise.
    #[must_use]
    pub fn admission(mut self, admission: Admission) -> Self {
        self.admission = admission;
        self
    }

    /// The node that it belongs to; one of its own, otherwise.
    #[must_use]
    pub fn node(mut self, node: [u8; 16]) -> Self {
        self.node = Some(node);
        self
    }

    /// Takes all others for remote, whatever is possible between them: to try out what
    /// happens between machines.
    #[must_use]
    pub fn take_all_for_remote(mut self) -> Self {
        self.takes_all_for_remote = true;
        self
    }

    /// How it waits.
    #[must_use]
    pub fn waiting(mut self, waiting: Spin) -> Self {
        self.waiting = waiting;
        self
    }
}

/// Names a peer at an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PeerId(u32);

/// What happens at an agent without its doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// One began to visit.
    Joined {
        /// Its identity.
        from: [u8; 16],
        /// What people call it.
        label: String,
    },
    /// A notice came. The data of its transfer is there.
    Notice {
        /// Identity of its sender.
        from: [u8; 16],
        /// What it says.
        notice: Notice,
    },
    /// One left, or died. All its notices came before.
    Left {
        /// Its identity.
        from: [u8; 16],
        /// What people call it.
        label: String,
        /// Its process is gone.
        is_dead: bool,
    },
}

/// Puts into regions of others, gets from them, and has regions of its own.
///
/// Whoever has it drives it: transfers go on while [`progress`](Self::progress) is called,
/// by itself or by a wait. What a *peer* needs of this agent (to reach its regions) is seen
/// to by a thread that sleeps otherwise.
///
/// ```
/// use std::time::Duration;
/// use gpu::{Block, Device};
/// use transfer::path::{Path, Policy};
/// use transfer::{Agent, AgentOptions, Event, Notice, Rights};
/// let second = Duration::from_secs(1);
/// // Prefill and decode, each in a process of its own; here in one, for once.
/// let mut prefill = Agent::start(AgentOptions::new("prefill"))?;
/// let mut decode = Agent::start(AgentOptions::new("decode"))?;
/// let device = Device::open("stand-in:0".parse()?)?;
/// let cache = decode.register(&device.allocate_shared(1 << 20, &[])?, Rights::WRITE)?;
/// let computed = prefill.register(&device.allocate_shared(1 << 20, &[])?, Rights::READ)?;
///
/// // The card and the descriptor travel as bytes, by whatever way there is.
/// let (card, descriptor) = (decode.card().encode()?, cache.descriptor().encode()?);
/// let peer = prefill.connect(&card, second)?;
/// let route = prefill.join(peer, &computed, &descriptor, &Policy::default(), second)?;
/// assert_eq!(route.path(), Path::SameProcess);
/// println!("{}", route.choice()); // every path, taken or refused, and why
///
/// let blocks = [Block { to: 0, from: 4096, length: 65536 }];
/// let token = prefill.put(&route, &blocks, Some(Notice::new(7, b"layer 0")?))?;
/// prefill.wait(token, second)?;
/// let came = loop {
///     match decode.next_event(second)? {
///         Event::Notice { notice, .. } => break notice,
///         _ => {}
///     }
/// };
/// assert_eq!((came.tag, came.data()), (7, &b"layer 0"[..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Agent {
    home: Arc<Home>,
    socket: Option<PathBuf>,
    takes_all_for_remote: bool,
    waiting: Spin,
    reception: Option<JoinHandle<()>>,
    peers: Vec<Option<Peer>>,
    lanes: HashMap<(u32, DeviceName, bool), Lane>,
    chores: VecDeque<Chore>,
    /// Notices for which there was no room, in the order in which their data was there.
    unsent: HashMap<u32, VecDeque<Ticket>>,
    operations: Operations,
    visitors: Vec<Arc<Visitor>>,
    seen_changes: u64,
    events: VecDeque<Event>,
    next_look: Instant,
    born: Incarnation,
}

/// A copy that the processor makes.
#[derive(Debug)]
struct Chore {
    ticket: Ticket,
    to: HostBuffer,
    from: HostBuffer,
    blocks: VecDeque<Block>,
}

impl Agent {
    /// Starts an agent, with a thread for those that visit it.
    ///
    /// # Errors
    /// [`Failed`](ErrorKind::Failed) if its directory is no good, or the system has not
    /// what it needs.
    pub fn start(options: AgentOptions) -> Result<Self> {
        let operation = "start an agent";
        let failed = |why: String| Error::new(operation, ErrorKind::Failed, why);
        if options.label.len() > LONGEST_LABEL {
            return Err(failed(format!("a label has {LONGEST_LABEL} bytes at most")));
        }
        let home = Arc::new(Home::new(options.label, options.node, options.admission)?);
        let mut socket = None;
        let mut reception = None;
        if let Some(directory) = options.directory {
            let name: String = home.identity.iter().map(|byte| format!("{byte:02x}")).collect();
            let path = directory.join(format!("agent-{name}"));
            let listener = ChannelListener::bind_with_mode(&path, home.admission.mode())
                .map_err(|error| Error::of_channel_at(operation, &path, error))?;
            let theirs = Arc::clone(&home);
            let thread = std::thread::Builder::new().name("fabricast-agent".to_owned());
            let thread = thread.spawn(move || reception::receive(&listener, &theirs));
            reception = Some(thread.map_err(|error| failed(error.to_string()))?);
            socket = Some(path);
        }
        home::settle(&home);
        Ok(Self {
            home,
            socket,
            takes_all_for_remote: options.takes_all_for_remote,
            waiting: options.waiting,
            reception,
            peers: Vec::new(),
            lanes: HashMap::new(),
            chores: VecDeque::new(),
            unsent: HashMap::new(),
            operations: Operations::default(),
            visitors: Vec::new(),
            seen_changes: 0,
            events: VecDeque::new(),
            next_look: Instant::now(),
            born: Incarnation::current(),
        })
    }

    /// How others find it.
    #[must_use]
    pub fn card(&self) -> AgentCard {
        AgentCard {
            identity: self.home.identity,
            node: self.home.node,
            machine: peer::machine(),
            label: self.home.label.clone(),
            socket: self.socket.clone(),
            fabrics: Vec::new(),
        }
    }

    /// Registers memory, so that peers can reach it, and to be joined with theirs.
    ///
    /// # Errors
    /// [`TooMany`](ErrorKind::TooMany) regions; what the device says.
    pub fn register(&self, memory: impl Into<Buffer>, rights: Rights) -> Result<Region> {
        check_fork(self.born, "register a region")?;
        Region::new(&self.home, memory.into(), rights)
    }

    /// Withdraws a region, and waits until nothing that peers began is under way with it.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded), with who is at it: do not use the
    /// memory for something else yet. Nothing *new* is begun with it all the same.
    pub fn withdraw(&mut self, region: &Region, patience: Duration) -> Result<()> {
        let operation = "withdraw a region";
        check_fork(self.born, operation)?;
        self.home.withdraw(region.0.descriptor.number);
        let end = Instant::now() + patience;
        let mut open: Vec<_> = self
            .home
            .visitors()
            .iter()
            .map(|visitor| (visitor.visit().begun(), Arc::clone(visitor)))
            .collect();
        loop {
            self.progress();
            open.retain(|(begun, visitor)| {
                !visitor.visit().is_settled(*begun) && !visitor.life.is_over()
            });
            let Some((_, visitor)) = open.first() else { return Ok(()) };
            if Instant::now() >= end {
                let detail = "it has not finished what it began";
                let error = Error::new(operation, ErrorKind::DeadlineExceeded, detail);
                return Err(error.with(&visitor.label));
            }
            std::thread::sleep(REST);
        }
    }

    /// Gets to know another agent, by its card.
    ///
    /// # Errors
    /// [`Malformed`](ErrorKind::Malformed), [`VersionMismatch`](ErrorKind::VersionMismatch);
    /// [`Denied`](ErrorKind::Denied) on either side; [`Stale`](ErrorKind::Stale) if another
    /// agent listens there now.
    pub fn connect(&mut self, card: &[u8], patience: Duration) -> Result<PeerId> {
        check_fork(self.born, peer::CONNECT)?;
        let card = AgentCard::decode(card)?;
        let met = Peer::meet(&self.home, &card, self.takes_all_for_remote, patience);
        let peer = met.map_err(|error| error.with(&card.label))?;
        tracing::debug!(peer = peer.label(), locality = ?peer.locality, "agents met");
        let free = self.peers.iter().position(Option::is_none);
        let number = free.unwrap_or(self.peers.len());
        if number == self.peers.len() {
            self.peers.push(None);
        }
        self.peers[number] = Some(peer);
        Ok(PeerId(number as u32))
    }

    /// Leaves a peer. What was begun with it and is not done is waited for.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded): it is left all the same, and
    /// operations with it end with errors.
    pub fn disconnect(&mut self, peer: PeerId, patience: Duration) -> Result<()> {
        let operation = "leave a peer";
        let end = Instant::now() + patience;
        let is_busy = |agent: &Self| {
            agent.lanes.iter().any(|((of, ..), lane)| *of == peer.0 && !lane.is_idle())
                || agent.chores.iter().any(|chore| chore.ticket.peer == peer.0)
                || agent.unsent.get(&peer.0).is_some_and(|unsent| !unsent.is_empty())
        };
        while is_busy(self) && Instant::now() < end {
            if !self.progress() {
                std::thread::sleep(REST);
            }
        }
        let was_busy = is_busy(self);
        let label = self.label(peer.0);
        self.drop_peer(peer.0, &|| Error::new(operation, ErrorKind::Closed, "it was left"));
        if let Some(place) = self.peers.get_mut(peer.0 as usize) {
            *place = None;
        }
        if was_busy {
            let detail = "operations with it were under way";
            return Err(Error::new(operation, ErrorKind::DeadlineExceeded, detail).with(label));
        }
        Ok(())
    }

    /// Joins a region of this agent with one of a peer's: chooses a path, by the policy,
    /// and maps what it needs.
    ///
    /// # Errors
    /// [`NoPath`](ErrorKind::NoPath), with a reason for each path;
    /// [`Stale`](ErrorKind::Stale) if the region is gone, or its agent was started anew;
    /// [`Malformed`](ErrorKind::Malformed).
    pub fn join(
        &mut self,
        peer: PeerId,
        local: &Region,
        descriptor: &[u8],
        policy: &Policy,
        patience: Duration,
    ) -> Result<Route> {
        check_fork(self.born, JOIN)?;
        policy.check()?;
        let remote = RegionDescriptor::decode(descriptor)?;
        if local.0.descriptor.agent != self.home.identity {
            let detail = "the local region is another agent's";
            return Err(Error::new(JOIN, ErrorKind::Stale, detail));
        }
        let end = Instant::now() + patience;
        let Some(Some(other)) = self.peers.get_mut(peer.0 as usize) else {
            return Err(Error::new(JOIN, ErrorKind::Unknown, "no such peer"));
        };
        other.sweep();
        let joined = route::join(&self.home, peer.0, other, &local.0, remote, policy, end);
        let route = joined.map_err(|error| error.with(other.label()))?;
        match route.0.choice.fallback() {
            Some((path, reason)) => tracing::warn!(
                peer = other.label(),
                wanted = path.name(),
                taken = route.path().name(),
                %reason,
                "not the path that could be expected"
            ),
            None => tracing::debug!(peer = other.label(), taken = route.path().name(), "joined"),
        }
        Ok(route)
    }

    /// Copies blocks from the local region of a route to the remote one, and then tells the
    /// peer, if a notice is given. Without blocks it is a notice alone.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds), [`NotAllowed`](ErrorKind::NotAllowed),
    /// [`Stale`](ErrorKind::Stale), [`Closed`](ErrorKind::Closed): before a byte moved.
    /// [`TooMany`](ErrorKind::TooMany) operations.
    pub fn put(
        &mut self,
        route: &Route,
        blocks: &[Block],
        notice: Option<Notice>,
    ) -> Result<Token> {
        self.begin(Operation::Put, route, blocks, notice, BlocksBy::Best)
    }

    /// Copies blocks from the remote region of a route to the local one, and then tells the
    /// peer, if a notice is given.
    ///
    /// # Errors
    /// As for [`put`](Self::put).
    pub fn get(
        &mut self,
        route: &Route,
        blocks: &[Block],
        notice: Option<Notice>,
    ) -> Result<Token> {
        self.begin(Operation::Get, route, blocks, notice, BlocksBy::Best)
    }

    /// Tells a peer something, without data.
    ///
    /// # Errors
    /// [`Closed`](ErrorKind::Closed), [`TooMany`](ErrorKind::TooMany) operations.
    pub fn notify(&mut self, peer: PeerId, notice: Notice) -> Result<Token> {
        let name = "notify";
        check_fork(self.born, name)?;
        let Some(Some(other)) = self.peers.get_mut(peer.0 as usize) else {
            return Err(Error::new(name, ErrorKind::Closed, "the peer was left"));
        };
        if other.is_gone {
            let error = Error::new(name, ErrorKind::Closed, "its process is gone");
            return Err(error.with(other.label()));
        }
        let begun = Begun { operation: name, bytes: 0, path: None, peer: peer.0 };
        let Some(visit) = other.visit() else {
            let error = Error::new(name, ErrorKind::NoPath, "it is not on this machine");
            return Err(error.with(other.label()));
        };
        let number = visit.guest.begin();
        let token = match self.operations.begin(begun) {
            Ok(token) => token,
            Err(error) => {
                visit.guest.end(number);
                return Err(error);
            }
        };
        let ticket = Ticket { token, peer: peer.0, number, bytes: 0, notice: Some(notice) };
        self.complete(ticket, Ok(()));
        Ok(token)
    }

    /// As [`put`](Self::put) or [`get`](Self::get), where the caller says by which means
    /// many blocks are copied: to measure them.
    ///
    /// # Errors
    /// As for [`put`](Self::put).
    pub fn begin(
        &mut self,
        operation: Operation,
        route: &Route,
        blocks: &[Block],
        notice: Option<Notice>,
        by: BlocksBy,
    ) -> Result<Token> {
        let name = match operation {
            Operation::Put => "put",
            Operation::Get => "get",
        };
        check_fork(self.born, name)?;
        let inner = &route.0;
        if inner.agent != self.home.identity {
            return Err(Error::new(name, ErrorKind::Stale, "the route is another agent's"));
        }
        let (to, from) = match operation {
            Operation::Put => (inner.local.descriptor.length, inner.remote.length),
            Operation::Get => (inner.remote.length, inner.local.descriptor.length),
        };
        let (from, to) = (to, from);
        let rights = inner.remote.rights;
        let may = if operation == Operation::Put { rights.write } else { rights.read };
        if !may && !blocks.is_empty() {
            let detail = "its rights do not allow it";
            return Err(
                Error::new(name, ErrorKind::NotAllowed, detail).with(self.label(inner.peer))
            );
        }
        let mut bytes = 0_u64;
        for (number, block) in blocks.iter().enumerate() {
            let is_inside = |at: u64, length: u64| {
                at.checked_add(block.length).is_some_and(|end| end <= length)
            };
            if !(is_inside(block.to, to) && is_inside(block.from, from)) {
                let detail = format!(
                    "block {number}: {} bytes from {} of {from} to {} of {to}",
                    block.length, block.from, block.to
                );
                return Err(Error::new(name, ErrorKind::OutOfBounds, detail));
            }
            bytes = bytes.saturating_add(block.length);
        }
        let Some(Some(peer)) = self.peers.get_mut(inner.peer as usize) else {
            return Err(Error::new(name, ErrorKind::Closed, "the peer was left"));
        };
        let closed =
            |peer: &Peer, why: &str| Error::new(name, ErrorKind::Closed, why).with(peer.label());
        if peer.card.identity != inner.remote.agent {
            return Err(closed(peer, "the peer was left"));
        }
        if peer.is_gone {
            return Err(closed(peer, "its process is gone"));
        }
        let (Tie::Visit(visit) | Tie::Here { visit, .. }) = &mut peer.tie else {
            return Err(closed(peer, "it is not on this machine"));
        };
        // First said, then looked: who withdraws a region first hides it, then looks.
        let number = visit.guest.begin();
        if !visit.board.is_there(inner.remote.number) {
            visit.guest.end(number);
            let over = visit.is_over();
            let kind = if over { ErrorKind::Closed } else { ErrorKind::Stale };
            let detail = if over { "its process is gone" } else { "the region was withdrawn" };
            return Err(Error::new(name, kind, detail).with(&peer.card.label));
        }
        let begun = Begun { operation: name, bytes, path: Some(inner.path), peer: inner.peer };
        let token = match self.operations.begin(begun) {
            Ok(token) => token,
            Err(error) => {
                visit.guest.end(number);
                return Err(error);
            }
        };
        let ticket = Ticket { token, peer: inner.peer, number, bytes, notice };
        metrics::count(inner.path, bytes, inner.fallback);
        self.move_bytes(operation, route, blocks, by, ticket)?;
        Ok(token)
    }

    fn move_bytes(
        &mut self,
        operation: Operation,
        route: &Route,
        blocks: &[Block],
        by: BlocksBy,
        ticket: Ticket,
    ) -> Result<()> {
        if ticket.bytes == 0 {
            self.complete(ticket, Ok(()));
            return Ok(());
        }
        match &route.0.means {
            Means::Processor { local, remote } => {
                let (to, from) = match operation {
                    Operation::Put => (remote.clone(), local.clone()),
                    Operation::Get => (local.clone(), remote.clone()),
                };
                let blocks = blocks.iter().copied().collect();
                self.chores.push_back(Chore { ticket, to, from, blocks });
                Ok(())
            }
            Means::Device { device, local, remote } => {
                let (to, from) = match operation {
                    Operation::Put => (remote, local),
                    Operation::Get => (local, remote),
                };
                let key = (ticket.peer, device.name(), ticket.bytes < SMALL);
                let copy = match copy_of(to, from, blocks, by) {
                    Ok(copy) => copy,
                    Err(error) => return Err(self.undo(ticket, error)),
                };
                let lane = match self.lanes.entry(key) {
                    Entry::Occupied(lane) => lane.into_mut(),
                    Entry::Vacant(place) => match Lane::new(device) {
                        Ok(lane) => place.insert(lane),
                        Err(error) => return Err(self.undo(ticket, error)),
                    },
                };
                lane.push(ticket, copy).map_err(|failed| {
                    let (ticket, error) = *failed;
                    self.undo(ticket, error)
                })
            }
        }
    }

    /// It was not begun after all.
    fn undo(&mut self, ticket: Ticket, error: Error) -> Error {
        if let Some(visit) = self.visit(ticket.peer) {
            visit.guest.end(ticket.number);
        }
        let error = error.with(self.label(ticket.peer));
        self.operations.forget(ticket.token);
        self.operations.finish(ticket.token, Ok(()));
        error
    }

    fn visit(&mut self, peer: u32) -> Option<&mut peer::Visit> {
        self.peers.get_mut(peer as usize)?.as_mut()?.visit()
    }

    fn label(&self, peer: u32) -> String {
        let peer = self.peers.get(peer as usize).and_then(Option::as_ref);
        peer.map_or_else(String::new, |peer| peer.label().to_owned())
    }

    /// The data of a transfer is there, or it failed: tells all who are to know.
    fn complete(&mut self, ticket: Ticket, outcome: Result<()>) {
        let label = || self.label(ticket.peer);
        let outcome = outcome.map_err(|error| error.with(label()));
        let Some(visit) =
            self.peers.get_mut(ticket.peer as usize).and_then(Option::as_mut).and_then(Peer::visit)
        else {
            let gone = Error::new("tell a peer", ErrorKind::Closed, "the peer was left");
            return self.operations.finish(ticket.token, outcome.and(Err(gone)));
        };
        visit.guest.end(ticket.number);
        if let (Ok(()), Some(_)) = (&outcome, ticket.notice) {
            self.unsent.entry(ticket.peer).or_default().push_back(ticket);
            return self.send_notices();
        }
        self.operations.finish(ticket.token, outcome);
    }

    /// Leaves notices with those that have room for them, in order.
    fn send_notices(&mut self) {
        for (number, unsent) in &mut self.unsent {
            let Some(visit) =
                self.peers.get_mut(*number as usize).and_then(Option::as_mut).and_then(Peer::visit)
            else {
                continue;
            };
            let mut has_sent = false;
            while let Some(Ticket { token, notice: Some(notice), .. }) = unsent.front() {
                let outcome = match visit.guest.leave(notice, &visit.life) {
                    Ok(true) => Ok(()),
                    Ok(false) if visit.is_over() => {
                        let detail = "its process is gone, and did not hear of it";
                        Err(Error::new("tell a peer", ErrorKind::Closed, detail))
                    }
                    Ok(false) => break,
                    Err(error) => Err(error),
                };
                has_sent |= outcome.is_ok();
                self.operations.finish(*token, outcome);
                unsent.pop_front();
            }
            if has_sent {
                visit.bell.ring();
            }
        }
    }

    /// Goes on with everything that is under way, without waiting. False if nothing moved.
    pub fn progress(&mut self) -> bool {
        let mut done = Vec::new();
        let mut has_moved = false;
        for lane in self.lanes.values_mut() {
            has_moved |= lane.progress(|ticket, outcome| done.push((ticket, outcome)));
        }
        for (ticket, outcome) in done {
            self.complete(ticket, outcome);
        }
        if let Some(mut chore) = self.chores.pop_front() {
            has_moved = true;
            match chore.go_on() {
                Ok(false) => self.chores.push_front(chore),
                Ok(true) => self.complete(chore.ticket, Ok(())),
                Err(error) => self.complete(chore.ticket, Err(error)),
            }
        }
        if self.unsent.values().any(|unsent| !unsent.is_empty()) {
            self.send_notices();
        }
        if Instant::now() >= self.next_look {
            self.next_look = Instant::now() + LOOK;
            self.look_after_peers();
        }
        has_moved
    }

    /// Ends what peers that are gone will not hear of.
    fn look_after_peers(&mut self) {
        for peer in self.peers.iter_mut().flatten().filter(|peer| !peer.is_gone) {
            peer.is_gone = peer.visit().is_some_and(|visit| visit.is_over());
        }
        let gone: Vec<_> = (0..self.peers.len() as u32)
            .filter(|number| self.unsent.get(number).is_some_and(|unsent| !unsent.is_empty()))
            .filter(|number| {
                let peer = self.peers.get(*number as usize);
                peer.is_some_and(|peer| peer.as_ref().is_none_or(|peer| peer.is_gone))
            })
            .collect();
        for number in gone {
            for ticket in self.unsent.remove(&number).unwrap_or_default() {
                let detail = "its process is gone, and did not hear of it";
                let error = Error::new("tell a peer", ErrorKind::Closed, detail);
                self.operations.finish(ticket.token, Err(error.with(self.label(number))));
            }
        }
    }

    /// Gives up everything that is under way with a peer.
    fn drop_peer(&mut self, peer: u32, error: &dyn Fn() -> Error) {
        let mut given_up: Vec<_> = self.unsent.remove(&peer).into_iter().flatten().collect();
        for (_, lane) in self.lanes.iter_mut().filter(|((of, ..), _)| *of == peer) {
            given_up.extend(lane.give_up());
        }
        self.lanes.retain(|(of, ..), _| *of != peer);
        let (theirs, others) = std::mem::take(&mut self.chores)
            .into_iter()
            .partition(|chore| chore.ticket.peer == peer);
        self.chores = others;
        let theirs: VecDeque<Chore> = theirs;
        given_up.extend(theirs.into_iter().map(|chore| chore.ticket));
        for ticket in given_up {
            self.operations.finish(ticket.token, Err(error()));
        }
    }

    /// What became of an operation, without waiting: None while it is under way. An outcome
    /// is given once.
    pub fn test(&mut self, token: Token) -> Option<Result<Done>> {
        self.progress();
        self.operations.collect(token)
    }

    /// Waits for an operation. An outcome is given once.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded): it goes on, may be waited for
    /// again, and its memory is kept until it is done. Or how it failed.
    pub fn wait(&mut self, token: Token, patience: Duration) -> Result<Done> {
        let end = Instant::now() + patience;
        loop {
            if let Some(outcome) = self.test(token) {
                return outcome;
            }
            let now = Instant::now();
            if now >= end {
                return Err(self.too_late(token, patience));
            }
            self.rest(end - now);
        }
    }

    /// Nobody will ask after the operation any more; it goes on all the same.
    pub fn forget(&mut self, token: Token) {
        self.operations.forget(token);
    }

    /// Operations that are under way.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.operations.under_way()
    }

    fn too_late(&self, token: Token, patience: Duration) -> Error {
        let Some(begun) = self.operations.begun(token) else {
            return Error::new("wait", ErrorKind::Unknown, "no such operation");
        };
        let path = begun.path.map_or("no path", crate::path::Path::name);
        let has_data = self.unsent.values().flatten().any(|ticket| ticket.token == token);
        let (done, stage) = if has_data { (begun.bytes, "notice") } else { (0, "copy") };
        let detail = format!(
            "by {path}, in the stage {stage}: {done} of {} bytes known to be there after {patience:?}",
            begun.bytes
        );
        let error = Error::new(begun.operation, ErrorKind::DeadlineExceeded, detail);
        error.with(self.label(begun.peer))
    }

    /// Rests for as long as it is not worth looking.
    fn rest(&self, longest: Duration) {
        /// Sleeps end late by about as much.
        const LATE: Duration = Duration::from_micros(80);
        if self.waiting == Spin::Always || !self.chores.is_empty() {
            std::hint::spin_loop();
            return;
        }
        let busy = self.lanes.values().filter(|lane| !lane.is_idle());
        let Some(expected) = busy.map(Lane::expected).min() else {
            // A notice that finds no room.
            return std::thread::sleep(REST.min(longest));
        };
        let now = Instant::now();
        if expected > now + 2 * LATE {
            std::thread::sleep((expected - now - LATE).min(longest));
        } else if now > expected + REST {
            // Slower than ever seen: no reason to burn a core.
            std::thread::sleep(LATE.min(longest));
        } else {
            std::hint::spin_loop();
        }
    }

    /// What happened, if anything did.
    pub fn poll_event(&mut self) -> Option<Event> {
        if let Some(event) = self.events.pop_front() {
            return Some(event);
        }
        let changes = self.home.changes.load(Ordering::Acquire);
        if changes != self.seen_changes {
            self.seen_changes = changes;
            self.see_visitors();
            if let Some(event) = self.events.pop_front() {
                return Some(event);
            }
        }
        for visitor in &self.visitors {
            if let Some(notice) = visitor.visit().take() {
                return Some(Event::Notice { from: visitor.identity, notice });
            }
        }
        None
    }

    /// Visitors that came, and those that left.
    fn see_visitors(&mut self) {
        let mut all = self.home.visitors();
        for visitor in all.iter() {
            if !self.visitors.iter().any(|known| Arc::ptr_eq(known, visitor)) {
                let (from, label) = (visitor.identity, visitor.label.clone());
                self.events.push_back(Event::Joined { from, label });
                self.visitors.push(Arc::clone(visitor));
            }
        }
        let has_left = |visitor: &Arc<Visitor>| visitor.has_left.load(Ordering::Acquire);
        all.retain(|visitor| !has_left(visitor));
        drop(all);
        for visitor in self.visitors.iter().filter(|visitor| has_left(visitor)) {
            // What it left behind was there before it left.
            let mut visit = visitor.visit();
            while let Some(notice) = visit.take() {
                self.events.push_back(Event::Notice { from: visitor.identity, notice });
            }
            let (from, label) = (visitor.identity, visitor.label.clone());
            let is_dead = visitor.life.is_over();
            self.events.push_back(Event::Left { from, label, is_dead });
        }
        self.visitors.retain(|visitor| !has_left(visitor));
    }

    /// Waits until something happens, and goes on with what is under way meanwhile.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded).
    pub fn next_event(&mut self, patience: Duration) -> Result<Event> {
        let end = Instant::now() + patience;
        let home = Arc::clone(&self.home);
        loop {
            let until =
                if self.operations.under_way() == 0 { end } else { end.min(Instant::now() + REST) };
            let mut waiting = self.waiting;
            let found = home.doorbell.wait(&mut waiting, until, || {
                self.progress();
                self.poll_event()
            });
            self.waiting = waiting;
            if let Some(event) = found {
                return Ok(event);
            }
            if Instant::now() >= end {
                let detail = format!("nothing happened in {patience:?}");
                return Err(Error::new("wait for an event", ErrorKind::DeadlineExceeded, detail));
            }
        }
    }
}

/// One block is a plain copy; many are one request.
fn copy_of(to: &Slice, from: &Slice, blocks: &[Block], by: BlocksBy) -> Result<Copy> {
    let of_device = |error| Error::of_device("copy", error);
    if let [Block { to: at, from: of, length }] = *blocks {
        let to = to.slice(at, length).map_err(of_device)?;
        let from = from.slice(of, length).map_err(of_device)?;
        return Ok(Copy::One { to, from });
    }
    Ok(Copy::Many { to: to.clone(), from: from.clone(), blocks: blocks.to_vec(), by })
}

impl Chore {
    /// Copies a share. True if that was the last.
    fn go_on(&mut self) -> Result<bool> {
        let mut left = SHARE;
        while let Some(block) = self.blocks.front_mut() {
            let length = block.length.min(left);
            self.to.copy(block.to, &self.from, block.from, length)?;
            block.to += length;
            block.from += length;
            block.length -= length;
            left -= length;
            if block.length == 0 {
                self.blocks.pop_front();
            }
            if left == 0 {
                break;
            }
        }
        Ok(self.blocks.is_empty())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let Some(reception) = self.reception.take() else { return };
        if !self.born.is_current() {
            // A thread of the parent's: there is none to be joined, or let go of, here.
            std::mem::forget(reception);
            return;
        }
        self.home.is_over.store(true, Ordering::Release);
        let _ = reception.join();
    }
}
