//! Agents: who puts and gets.

mod begin;
mod board;
mod card;
mod chore;
mod company;
mod deferred;
mod doorplate;
mod events;
mod explain;
mod far;
mod home;
mod lane;
mod leftovers;
mod lists;
mod mapping;
mod meet;
mod named;
mod notice;
mod operations;
mod options;
mod order;
mod peer;
mod pending;
mod progress;
mod protocol;
mod reception;
mod route;
mod track;
mod visit;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gpu::DeviceName;
use ipc::{ChannelListener, Incarnation, Spin};

use self::chore::Chore;
use self::doorplate::Doorplate;
use self::far::Far;
use self::home::{SETTLE_TIMEOUT, Visitor};
use self::lane::{Lane, Ticket};
use self::lists::Lists;
use self::operations::Operations;
use self::peer::{Peer, left};
use self::pending::OutstandingCopies;
use self::progress::CLOSE_TIMEOUT;
use self::route::JOIN;
use crate::error::{Error, ErrorKind, Result};
use crate::path::Policy;
use crate::rail::Rail;
use crate::region::{Buffer, Region, RegionDescriptor, Registered, Rights};
use crate::share::check_fork;

pub use card::{AgentCard, FabricAddress, LONGEST_LABEL, MOST_REGIONS};
pub use events::Event;
pub use explain::Whereabouts;
pub(crate) use home::Home;
pub use leftovers::{Condition, Remains, clean};
pub use notice::{LONGEST_NOTICE, Notice};
pub use operations::{Done, MOST_OPERATIONS, Token};
pub use options::AgentOptions;
pub(crate) use protocol::Refusal;
pub(crate) use route::Inner as Joined;
pub use route::Route;

/// Copies of less than this have a stream of their own, so that they do not wait behind
/// those that take milliseconds.
const SMALL: u64 = 1 << 20;
/// The longest rest while something of ours is under way.
const REST: Duration = Duration::from_micros(200);
const START: &str = "start an agent";
const CLOSE: &str = "close an agent";

/// Names a peer at an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PeerId(u32);

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
pub struct Agent {
    home: Arc<Home>,
    socket: Option<PathBuf>,
    doorplate: Option<Doorplate>,
    takes_all_for_remote: bool,
    waiting: Spin,
    reception: Option<JoinHandle<()>>,
    /// By a number that no other had before.
    peers: BTreeMap<u32, Peer>,
    next_peer: u32,
    lanes: HashMap<(u32, DeviceName, bool), Lane>,
    chores: VecDeque<Chore>,
    /// Operations of all peers that wait for earlier ones.
    deferred: usize,
    /// For the blocks of chores.
    lists: Lists,
    /// Empty: its room is used again for what lanes tell.
    done: Vec<(Ticket, Result<()>)>,
    operations: Operations,
    visitors: Vec<Arc<Visitor>>,
    /// Who was heard last.
    next_visitor: usize,
    seen_changes: u64,
    /// What happened, and whose rail is to be told when it was taken.
    events: VecDeque<(Event, Option<(usize, u64)>)>,
    far: Far,
    /// Regions that its card tells of, by name.
    published: BTreeMap<String, Weak<Registered>>,
    next_look: Instant,
    born: Incarnation,
}

/// Without what leads to memory: tickets and keys of peers' regions.
impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let peers: Vec<_> = self.peers.values().map(|peer| &peer.card.label).collect();
        let fabrics: Vec<_> = self.far.rails.iter().map(Rail::provider).collect();
        let mut shown = f.debug_struct("Agent");
        shown.field("label", &self.home.label).field("socket", &self.socket);
        shown.field("fabrics", &fabrics).field("peers", &peers);
        shown.field("under_way", &self.operations.under_way).finish_non_exhaustive()
    }
}

impl Agent {
    /// Starts an agent, with a thread for those that visit it.
    ///
    /// # Errors
    /// [`Failed`](ErrorKind::Failed) if its directory is no good, or the system has not
    /// what it needs.
    pub fn start(options: AgentOptions) -> Result<Self> {
        let failed = |why: String| Error::new(START, ErrorKind::Failed, why);
        if options.label.len() > LONGEST_LABEL {
            return Err(failed(format!("a label has {LONGEST_LABEL} bytes at most")));
        }
        let home = Arc::new(Home::new(options.label, options.admission)?);
        let mut far = Far::default();
        for (number, offer) in options.fabrics.iter().enumerate() {
            far.add_rail(Rail::start(offer, &home, number, options.rails)?);
        }
        let _ = home.lines.set(far.rails.iter().map(|rail| rail.line.clone()).collect());
        let mut socket = None;
        let mut doorplate = None;
        let mut reception = None;
        if let Some(directory) = options.directory {
            let path = doorplate::socket_of(&directory, home.identity);
            let (mode, card) = (home.admission.mode(), card_of(&home, Some(&path), &far.rails));
            // Before the socket: who reads a card waits for the socket, and nobody finds a
            // socket of ours without its card.
            doorplate = Some(Doorplate::hang(&path, &card.encode()?, mode)?);
            let listener = ChannelListener::bind_with_mode(&path, mode)
                .map_err(|error| Error::of_channel_at(START, &path, error))?;
            let theirs = Arc::clone(&home);
            let thread = std::thread::Builder::new().name("fabricast-agent".to_owned());
            let thread = thread.spawn(move || reception::receive(&listener, &theirs));
            reception = Some(thread.map_err(|error| failed(error.to_string()))?);
            socket = Some(path);
        }
        home::add_to_process_list(&home);
        Ok(Self {
            home,
            socket,
            doorplate,
            takes_all_for_remote: options.takes_all_for_remote,
            waiting: options.waiting,
            reception,
            peers: BTreeMap::new(),
            next_peer: 0,
            lanes: HashMap::new(),
            chores: VecDeque::new(),
            deferred: 0,
            lists: Lists::default(),
            done: Vec::new(),
            operations: Operations::default(),
            visitors: Vec::new(),
            next_visitor: 0,
            seen_changes: 0,
            events: VecDeque::new(),
            far,
            published: BTreeMap::new(),
            next_look: Instant::now(),
            born: Incarnation::current(),
        })
    }

    /// How others find it, and the regions that it has [published](Self::publish).
    #[must_use]
    pub fn card(&self) -> AgentCard {
        let region = |(name, region): (&String, &Weak<Registered>)| {
            let region = region.upgrade()?;
            let is_there = !region.is_withdrawn.load(Ordering::Acquire);
            is_there.then(|| (name.clone(), region.descriptor.clone()))
        };
        let regions = self.published.iter().filter_map(region).collect();
        AgentCard { regions, ..card_of(&self.home, self.socket.as_deref(), &self.far.rails) }
    }

    /// Registers memory, so that peers can reach it, and to be joined with theirs.
    ///
    /// # Errors
    /// [`TooMany`](ErrorKind::TooMany) regions; what the device says.
    pub fn register(&self, memory: impl Into<Buffer>, rights: Rights) -> Result<Region> {
        check_fork(self.born, "register a region")?;
        Region::new(&self.home, memory.into(), rights)
    }

    /// Registers memory for the own use of this agent: to put from it and to get into it. No
    /// peer can reach it, whatever it was told, and its descriptor cannot be
    /// [encoded](RegionDescriptor::encode).
    ///
    /// What a fabric made of it (it pins the pages, which takes long) is kept when the region is
    /// dropped, for whoever registers the same buffer for own use next. It goes when nobody else
    /// has a handle to the buffer any more, or when others need the
    /// [room](AgentOptions::keep_registered).
    ///
    /// ```
    /// use transfer::{Agent, AgentOptions, HostBuffer};
    /// let agent = Agent::start(AgentOptions::new("decode"))?;
    /// let region = agent.register_own(HostBuffer::new(1 << 20)?)?;
    /// assert!(region.descriptor().encode().is_err());
    /// # Ok::<(), transfer::Error>(())
    /// ```
    ///
    /// # Errors
    /// What the device says.
    pub fn register_own(&self, memory: impl Into<Buffer>) -> Result<Region> {
        check_fork(self.born, "register a region")?;
        Region::own(&self.home, memory.into())
    }

    /// Withdraws a region, and waits until nothing that peers began is under way with it. Then its
    /// memory can be used for something else.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded), with the peer that may still copy: do not use
    /// the memory for something else yet. Nothing *new* is begun with it all the same. To wait
    /// longer, withdraw it once more.
    pub fn withdraw(&mut self, region: &Region, timeout: Duration) -> Result<()> {
        let operation = "withdraw a region";
        check_fork(self.born, operation)?;
        let number = region.0.descriptor.number;
        self.home.withdraw(number);
        region.0.retire();
        let end = ipc::deadline(timeout);
        let mut copies = OutstandingCopies::of_all(&self.home, Some(number));
        loop {
            self.progress();
            copies.are_over();
            let far = || self.home.lines().iter().find_map(|line| line.who_is_at(number));
            let who = copies.label().map(str::to_owned).or_else(far);
            let Some(who) = who else { return Ok(()) };
            if Instant::now() >= end {
                let length = region.0.descriptor.length;
                let detail = format!(
                    "region {number} of {length} bytes: the peer has not finished what it began \
                     after {timeout:?}"
                );
                return Err(Error::new(operation, ErrorKind::DeadlineExceeded, detail).with(who));
            }
            std::thread::sleep(REST);
        }
    }

    /// Gets to know another agent, by its card. What is under way with others goes on meanwhile.
    ///
    /// ```
    /// use std::time::Duration;
    /// use transfer::{Agent, AgentOptions, ErrorKind};
    /// let mut here = Agent::start(AgentOptions::new("here"))?;
    /// let there = Agent::start(AgentOptions::new("there"))?;
    /// let card = there.card().encode()?;
    /// here.connect(&card, Duration::from_secs(10))?;
    /// drop(there);
    /// let error = here.connect(&card, Duration::from_secs(10)).unwrap_err(); // at once
    /// assert_eq!((error.kind(), error.peer()), (ErrorKind::NoPath, Some("there")));
    /// # Ok::<(), transfer::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Closed`](ErrorKind::Closed) if its process has ended: as soon as its socket or the address
    /// of its fabric refuses the connection; [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) if it
    /// does not answer; [`NoPath`](ErrorKind::NoPath) if neither a socket nor a fabric leads there.
    /// [`Malformed`](ErrorKind::Malformed), [`VersionMismatch`](ErrorKind::VersionMismatch);
    /// [`Denied`](ErrorKind::Denied) on either side; [`Stale`](ErrorKind::Stale) if another
    /// agent listens there now.
    pub fn connect(&mut self, card: &[u8], timeout: Duration) -> Result<PeerId> {
        let peer = self.inspect(card, timeout)?;
        let Some(why) = self.why_out_of_reach(peer.0) else { return Ok(peer) };
        if let Some(peer) = self.peers.remove(&peer.0) {
            self.far.leave(&peer.links);
        }
        Err(why)
    }

    /// Gets to know another agent as far as it can be reached: that nothing leads there is no error,
    /// but what [`explain`](Self::explain) tells then.
    ///
    /// # Errors
    /// As [`connect`](Self::connect), but for [`NoPath`](ErrorKind::NoPath), and for
    /// [`Closed`](ErrorKind::Closed) and [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) of a fabric.
    pub fn inspect(&mut self, card: &[u8], timeout: Duration) -> Result<PeerId> {
        check_fork(self.born, peer::CONNECT)?;
        let card = AgentCard::decode(card)?;
        let end = ipc::deadline(timeout);
        // Its socket may be nowhere here: that must not take all the time that there is.
        let for_socket = if self.far.leads_to(&card) { timeout / 2 } else { timeout };
        let (home, is_remote) = (Arc::clone(&self.home), self.takes_all_for_remote);
        let mut progress = || self.progress_while_waiting();
        let met = Peer::meet(&home, &card, is_remote, (for_socket, &mut progress));
        let peer = met.map_err(|error| error.with(&card.label))?;
        tracing::debug!(peer = peer.card.label, locality = ?peer.locality, "agents met");
        let (number, is_far) = (self.next_peer, peer.visit.is_none());
        self.next_peer += 1;
        self.peers.insert(number, peer);
        // Also where nothing will be joined: notices go by it.
        if is_far && let Err(error) = self.try_fabric(number, end) {
            self.peers.remove(&number);
            return Err(error);
        }
        Ok(PeerId(number))
    }

    /// Leaves a peer. What was begun with it and is not done is waited for.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded): it is left all the same, and
    /// operations with it end with errors. Copies that a device has begun cannot be taken back:
    /// they are waited for, ten seconds more at most, or else their memory is given up.
    pub fn disconnect(&mut self, peer: PeerId, patience: Duration) -> Result<()> {
        let operation = "leave a peer";
        let end = ipc::deadline(patience);
        while self.is_busy_with(peer.0) && Instant::now() < end {
            if !self.progress() {
                std::thread::sleep(REST);
            }
        }
        let (was_busy, label) = (self.is_busy_with(peer.0), self.label(peer.0));
        let end = Instant::now() + CLOSE_TIMEOUT;
        self.drop_peer(peer.0, end, || Error::new(operation, ErrorKind::Closed, "it was left"));
        if was_busy {
            let detail = "operations with it were under way";
            return Err(Error::new(operation, ErrorKind::DeadlineExceeded, detail).with(label));
        }
        Ok(())
    }

    /// Joins a region of this agent with one of a peer's: chooses a path, by the policy,
    /// and maps what it needs. What is under way with any peer goes on meanwhile.
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
        let end = ipc::deadline(patience);
        self.peer(peer.0, JOIN)?.sweep();
        let joined = self.join_with(peer.0, local, remote, policy, end);
        let label = self.label(peer.0);
        let route = joined.map_err(|error| error.with(&label))?;
        match route.0.choice.fallback() {
            Some((path, reason)) => tracing::warn!(
                peer = label,
                wanted = path.name(),
                taken = route.path().name(),
                %reason,
                "not the path that could be expected"
            ),
            None => tracing::debug!(peer = label, taken = route.path().name(), "joined"),
        }
        Ok(route)
    }
}

fn card_of(home: &Home, socket: Option<&Path>, rails: &[Rail]) -> AgentCard {
    AgentCard {
        identity: home.identity,
        node: home.identity,
        machine: peer::machine(),
        label: home.label.clone(),
        socket: socket.map(Path::to_owned),
        fabrics: rails.iter().map(Rail::card).collect(),
        regions: Vec::new(),
    }
}

impl Agent {
    /// Ends the agent: finishes what it began, takes its regions out of reach, and waits until nothing
    /// that peers of this machine began is under way with them. Then the memory of all its regions can be
    /// used for something else, also of those that were dropped before.
    ///
    /// Dropping an agent ends it, too. That lets go of requests that no device has begun and of
    /// notices that were not sent, waits for copies of other processes for a second at most, and tells of
    /// what is left by a warning alone.
    ///
    /// ```
    /// use std::time::Duration;
    /// use transfer::{Agent, AgentOptions, HostBuffer, Rights};
    /// let agent = Agent::start(AgentOptions::new("decode"))?;
    /// let region = agent.register(HostBuffer::new(1 << 20)?, Rights::ALL)?;
    /// agent.close(Duration::from_secs(1))?;
    /// # Ok::<(), transfer::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded): the agent has ended all the same. With the
    /// peer, or the fabrics, that may still copy, if there are such: drop the regions then, and their
    /// memory is kept until that is over, but do not use it for something else.
    pub fn close(mut self, timeout: Duration) -> Result<()> {
        check_fork(self.born, CLOSE)?;
        let end = ipc::deadline(timeout);
        while self.operations.under_way > 0 && !left(end).is_zero() {
            if !self.progress() {
                self.rest(left(end).min(REST));
            }
        }
        let unfinished = self.operations.under_way;
        let fabrics = self.shut_down(end);
        if !fabrics.is_empty() {
            let names = fabrics.join(", ");
            let detail = format!("these fabrics may still be at memory of its regions: {names}");
            return Err(Error::new(CLOSE, ErrorKind::DeadlineExceeded, detail));
        }
        wait_for_copies(OutstandingCopies::of_all(&self.home, None), end)?;
        if unfinished > 0 {
            let detail = format!("{unfinished} of its operations were not over after {timeout:?}");
            return Err(Error::new(CLOSE, ErrorKind::DeadlineExceeded, detail));
        }
        Ok(())
    }

    /// Ends what it does, and what its peers can do with it. Gives the fabrics that do not let go of
    /// memory in time.
    fn shut_down(&mut self, end: Instant) -> Vec<String> {
        self.doorplate = None;
        // No peer begins anything with its regions from now on.
        self.home.end();
        let unsettled = self.close_lanes(end);
        let fabrics = Rail::close_all(&mut self.far.rails, end);
        for (number, peer) in &mut self.peers {
            if let Some(visit) = peer.visit.as_mut().filter(|_| !unsettled.contains(number)) {
                visit.guest.settle();
            }
        }
        self.peers.clear();
        if let Some(reception) = self.reception.take() {
            let _ = reception.join();
        }
        fabrics
    }
}

/// Waits until these are over.
fn wait_for_copies(mut copies: OutstandingCopies, end: Instant) -> Result<()> {
    while !copies.are_over() {
        if left(end).is_zero() {
            let bytes = copies.bytes();
            let detail = format!(
                "the peer has not finished what it began with regions of {bytes} bytes in all, \
                 whose memory is not freed before"
            );
            let error = Error::new(CLOSE, ErrorKind::DeadlineExceeded, detail);
            return Err(error.with(copies.label().unwrap_or_default()));
        }
        std::thread::sleep(REST);
    }
    Ok(())
}

impl Drop for Agent {
    fn drop(&mut self) {
        if !self.born.is_current() {
            self.doorplate = None;
            // The parent's threads: there are none to be joined, or let go of, here.
            self.far.rails.drain(..).for_each(Rail::forget);
            std::mem::forget(self.reception.take());
            return;
        }
        if self.home.is_over.load(Ordering::Acquire) {
            // It was closed.
            return;
        }
        self.shut_down(ipc::deadline(CLOSE_TIMEOUT));
        let copies = OutstandingCopies::of_other_processes(&self.home, None);
        if let Err(error) = wait_for_copies(copies, ipc::deadline(SETTLE_TIMEOUT)) {
            tracing::warn!(%error, "an agent was dropped while a peer copies");
        }
    }
}
