//! Agents: put into and get from regions of other agents.

mod block_list_pool;
mod card;
mod card_file;
mod copy_queue;
mod cpu_copy;
mod deferred;
mod epochs;
mod events;
mod explain;
mod leftovers;
mod local_server;
mod local_target;
mod mapping;
mod options;
mod peer;
mod progress;
mod protocol;
mod published_regions;
mod put_get;
mod reclaim;
mod region_table;
mod register;
mod remote_connect;
mod remote_sessions;
mod remote_transport;
mod route;
mod route_lane;
mod session_segment;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gpu::DeviceName;
use ipc::{ChannelListener, ForkGeneration, WaitStrategy};

use self::block_list_pool::BlockListPool;
use self::card_file::CardFile;
use self::copy_queue::{CopyQueue, OperationContext};
use self::cpu_copy::CpuCopy;
use self::local_target::{LocalInitiator, SETTLE_TIMEOUT};
use self::peer::{Peer, remaining};
use self::progress::CLOSE_TIMEOUT;
use self::reclaim::OutstandingCopies;
use self::remote_transport::RemoteTransport;
use self::route::JOIN;
use crate::error::{Error, ErrorKind, Result};
use crate::notice::Notice;
use crate::operations::{Operations, Token};
use crate::path::Policy;
use crate::rail::Rail;
use crate::region::{Buffer, Region, RegionDescriptor, RegisteredRegion, Rights};
use crate::share::check_fork;
use crate::wire::MAX_LABEL_LENGTH;
use crate::{notice, operations};

pub use card::{AgentCard, FabricAddress, MAX_PUBLISHED_REGIONS};
pub use events::Event;
pub use explain::MemoryAttributes;
pub use leftovers::{Condition, Leftovers, clean};
pub(crate) use local_target::LocalTarget;
pub use options::AgentOptions;
pub use route::Route;

/// Shorter copies have their own stream, so that they do not wait behind copies that take
/// milliseconds.
const SMALL_COPY: u64 = 1 << 20;
/// The longest pause while operations are in flight.
const BUSY_PAUSE: Duration = Duration::from_micros(200);
const START: &str = "start an agent";
const CLOSE: &str = "close an agent";

/// Identifies a peer of an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PeerId(u32);

/// Puts into regions of other agents, gets from them, and owns regions itself.
///
/// The caller drives it: transfers advance while [`progress`](Self::progress) is called, directly
/// or by a wait. Requests of *peers* for its regions are served by a thread, which otherwise
/// sleeps.
///
/// ```
/// use std::time::Duration;
/// use gpu::{Block, Device};
/// use transfer::path::{Path, Policy};
/// use transfer::{Agent, AgentOptions, Event, Notice, Rights};
/// let second = Duration::from_secs(1);
/// // Prefill and decode usually run in processes of their own.
/// let mut prefill = Agent::start(AgentOptions::new("prefill"))?;
/// let mut decode = Agent::start(AgentOptions::new("decode"))?;
/// let device = Device::open("emulated:0".parse()?)?;
/// let cache = decode.register(&device.allocate_shared(1 << 20, &[])?, Rights::WRITE)?;
/// let computed = prefill.register(&device.allocate_shared(1 << 20, &[])?, Rights::READ)?;
///
/// // Send card and descriptor as bytes, by any means.
/// let (card, descriptor) = (decode.card().encode()?, cache.descriptor().encode()?);
/// let peer = prefill.connect(&card, second)?;
/// let route = prefill.join(peer, &computed, &descriptor, &Policy::default(), second)?;
/// assert_eq!(route.path(), Path::SameProcess);
/// println!("{}", route.choice()); // every path with its verdict
///
/// let blocks = [Block { to: 0, from: 4096, length: 65536 }];
/// let token = prefill.put(&route, &blocks, Some(Notice::new(7, b"layer 0")?))?;
/// prefill.wait(token, second)?;
/// let received = loop {
///     match decode.next_event(second)? {
///         Event::Notice { notice, .. } => break notice,
///         _ => {}
///     }
/// };
/// assert_eq!((received.tag, received.data()), (7, &b"layer 0"[..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Agent {
    local_target: Arc<LocalTarget>,
    socket: Option<PathBuf>,
    card_file: Option<CardFile>,
    forces_remote: bool,
    wait_strategy: WaitStrategy,
    local_server: Option<JoinHandle<()>>,
    /// By unique numbers.
    peers: BTreeMap<u32, Peer>,
    next_peer: u32,
    copy_queues: HashMap<(u32, DeviceName, bool), CopyQueue>,
    cpu_copies: VecDeque<CpuCopy>,
    /// Number of deferred operations of all peers.
    deferred: usize,
    /// Lists of blocks for CPU copies.
    block_lists: BlockListPool,
    /// Empty; its capacity is reused for completed operations.
    done: Vec<(OperationContext, Result<()>)>,
    operations: Operations,
    local_initiators: Vec<Arc<LocalInitiator>>,
    /// The initiator of the last notice: the next one has its turn.
    next_initiator: usize,
    seen_changes: u64,
    /// Events, with the rail and session whose credit they return when they are taken.
    events: VecDeque<(Event, Option<(usize, u64)>)>,
    remote_transport: RemoteTransport,
    /// Published regions by name.
    published: BTreeMap<String, Weak<RegisteredRegion>>,
    next_check: Instant,
    fork_generation: ForkGeneration,
}

/// Without secrets: tickets and keys of peers' regions.
impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let peers: Vec<_> = self.peers.values().map(|peer| &peer.card.label).collect();
        let fabrics: Vec<_> = self.remote_transport.rails.iter().map(Rail::provider).collect();
        let mut shown = f.debug_struct("Agent");
        shown.field("label", &self.local_target.label).field("socket", &self.socket);
        shown.field("fabrics", &fabrics).field("peers", &peers);
        shown.field("in_flight", &self.operations.in_flight).finish_non_exhaustive()
    }
}

impl Agent {
    /// Starts an agent, with a thread that serves its local initiators.
    ///
    /// # Errors
    /// [`Failed`](ErrorKind::Failed) if its directory is unusable, or a system resource is missing.
    pub fn start(options: AgentOptions) -> Result<Self> {
        let failed = |cause: String| Error::new(START, ErrorKind::Failed, cause);
        if options.label.len() > MAX_LABEL_LENGTH {
            return Err(failed(format!("the label exceeds {MAX_LABEL_LENGTH} bytes")));
        }
        let local_target = Arc::new(LocalTarget::new(options.label, options.admission)?);
        let mut remote_transport = RemoteTransport::default();
        for (number, offer) in options.fabrics.iter().enumerate() {
            remote_transport.add_rail(Rail::start(
                offer,
                local_target.clone(),
                number,
                options.rails,
            )?);
        }
        let _ = local_target
            .rail_handles
            .set(remote_transport.rails.iter().map(|rail| rail.handle.clone()).collect());
        let mut socket = None;
        let mut card_file = None;
        let mut local_server = None;
        if let Some(directory) = options.directory {
            let path = card_file::socket_of(&directory, local_target.identity);
            let (mode, card) = (
                local_target.admission.mode(),
                card_of(&local_target, Some(&path), &remote_transport.rails),
            );
            // Before the socket: readers of a card wait for the socket, and no process sees a
            // socket without its card.
            card_file = Some(CardFile::create(&path, &card.encode()?, mode)?);
            let listener = ChannelListener::bind_with_mode(&path, mode)
                .map_err(|error| Error::of_channel_at(START, &path, error))?;
            let thread_target = Arc::clone(&local_target);
            let thread = std::thread::Builder::new().name("fabricast-agent".to_owned());
            let thread = thread.spawn(move || local_server::serve(&listener, &thread_target));
            local_server = Some(thread.map_err(|error| failed(error.to_string()))?);
            socket = Some(path);
        }
        local_target::add_to_process_list(&local_target);
        Ok(Self {
            local_target,
            socket,
            card_file,
            forces_remote: options.forces_remote,
            wait_strategy: options.wait_strategy,
            local_server,
            peers: BTreeMap::new(),
            next_peer: 0,
            copy_queues: HashMap::new(),
            cpu_copies: VecDeque::new(),
            deferred: 0,
            block_lists: BlockListPool::default(),
            done: Vec::new(),
            operations: Operations::default(),
            local_initiators: Vec::new(),
            next_initiator: 0,
            seen_changes: 0,
            events: VecDeque::new(),
            remote_transport,
            published: BTreeMap::new(),
            next_check: Instant::now(),
            fork_generation: ForkGeneration::current(),
        })
    }

    /// How peers reach it, and the regions that it has [published](Self::publish).
    #[must_use]
    pub fn card(&self) -> AgentCard {
        let region = |(name, region): (&String, &Weak<RegisteredRegion>)| {
            let region = region.upgrade()?;
            let exists = !region.is_withdrawn();
            exists.then(|| (name.clone(), region.descriptor.clone()))
        };
        let regions = self.published.iter().filter_map(region).collect();
        AgentCard {
            regions,
            ..card_of(&self.local_target, self.socket.as_deref(), &self.remote_transport.rails)
        }
    }

    /// Registers memory with rights for peers. Regions of both sides are joined for transfers.
    ///
    /// # Errors
    /// [`TooMany`](ErrorKind::TooMany) regions; errors of the device.
    pub fn register(&self, memory: impl Into<Buffer>, rights: Rights) -> Result<Region> {
        check_fork(self.fork_generation, "register a region")?;
        self.local_target.register(memory.into(), rights)
    }

    /// Registers memory as local-only: to put from it and to get into it. No peer can access it,
    /// and its descriptor cannot be [encoded](RegionDescriptor::encode).
    ///
    /// The registration with a fabric pins pages, which is slow. So it is cached when the region is
    /// dropped, for the next local-only region of the same buffer. It is evicted when no other
    /// handle to the buffer exists, or when other registrations need the
    /// [room](AgentOptions::registration_cache_limits).
    ///
    /// ```
    /// use transfer::{Agent, AgentOptions, HostBuffer};
    /// let agent = Agent::start(AgentOptions::new("decode"))?;
    /// let region = agent.register_local(HostBuffer::new(1 << 20)?)?;
    /// assert!(region.descriptor().encode().is_err());
    /// # Ok::<(), transfer::Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors of the device.
    pub fn register_local(&self, memory: impl Into<Buffer>) -> Result<Region> {
        check_fork(self.fork_generation, "register a region")?;
        self.local_target.register_local(memory.into())
    }

    /// Withdraws a region, and waits until peers have completed all operations with it. Then its
    /// memory can be reused.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded), with the peer that may still copy: do not
    /// reuse the memory yet. No *new* operation starts. To wait longer, withdraw it again.
    pub fn withdraw(&mut self, region: &Region, timeout: Duration) -> Result<()> {
        let operation = "withdraw a region";
        check_fork(self.fork_generation, operation)?;
        let number = region.0.descriptor.number;
        self.local_target.withdraw(number);
        region.0.retire();
        let end = ipc::deadline(timeout);
        let mut copies = OutstandingCopies::of_all(&self.local_target, Some(number));
        loop {
            self.progress();
            copies.are_over();
            let remote_transport = || {
                self.local_target
                    .rail_handles()
                    .iter()
                    .find_map(|handle| handle.region_user(number))
            };
            let user = copies.label().map(str::to_owned).or_else(remote_transport);
            let Some(user) = user else { return Ok(()) };
            if Instant::now() >= end {
                let length = region.0.descriptor.length;
                let detail = format!(
                    "region {number}: the peer still copies to or from its {length} bytes after \
                     {timeout:?}. Withdraw it again to wait longer"
                );
                return Err(Error::new(operation, ErrorKind::DeadlineExceeded, detail).with(user));
            }
            std::thread::sleep(BUSY_PAUSE);
        }
    }

    /// Connects to another agent by its card. Operations with other peers progress meanwhile.
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
    /// of its fabric refuses the connection; [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) if
    /// it does not answer; [`NoPath`](ErrorKind::NoPath) if no socket and no fabric reaches it.
    /// [`Malformed`](ErrorKind::Malformed), [`VersionMismatch`](ErrorKind::VersionMismatch);
    /// [`Denied`](ErrorKind::Denied) on either side; [`Stale`](ErrorKind::Stale) if another agent
    /// listens there now.
    pub fn connect(&mut self, card: &[u8], timeout: Duration) -> Result<PeerId> {
        let peer = self.inspect(card, timeout)?;
        let Some(error) = self.unreachable_error(peer.0) else { return Ok(peer) };
        if let Some(peer) = self.peers.remove(&peer.0) {
            self.remote_transport.disconnect(&peer.links);
        }
        Err(error)
    }

    /// Connects to another agent as far as possible. An unreachable agent is no error:
    /// [`explain`](Self::explain) reports the cause.
    ///
    /// # Errors
    /// As [`connect`](Self::connect), without [`NoPath`](ErrorKind::NoPath), and without
    /// [`Closed`](ErrorKind::Closed) and [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) of a
    /// fabric.
    pub fn inspect(&mut self, card: &[u8], timeout: Duration) -> Result<PeerId> {
        check_fork(self.fork_generation, peer::CONNECT)?;
        let card = AgentCard::decode(card)?;
        let end = ipc::deadline(timeout);
        // The socket may not be visible here: it must not use up the whole timeout.
        let for_socket = if self.remote_transport.reaches(&card) { timeout / 2 } else { timeout };
        let (local_target, forces_remote) = (Arc::clone(&self.local_target), self.forces_remote);
        let mut progress = || self.progress_while_waiting();
        let connected =
            Peer::connect(&local_target, &card, forces_remote, (for_socket, &mut progress));
        let peer = connected.map_err(|error| error.with(&card.label))?;
        tracing::debug!(peer = peer.card.label, locality = ?peer.locality, "connected to an agent");
        let (number, is_remote) = (self.next_peer, peer.local_session.is_none());
        self.next_peer += 1;
        self.peers.insert(number, peer);
        // Also if no regions will be joined: notices need the link.
        if is_remote && let Err(error) = self.connect_fabric(number, end) {
            self.peers.remove(&number);
            return Err(error);
        }
        Ok(PeerId(number))
    }

    /// Disconnects from a peer, after its operations in flight have completed.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded): it is disconnected nevertheless, and its
    /// operations end with errors. Copies on a device cannot be cancelled: it waits up to ten
    /// seconds more for them, and leaks their memory after that.
    pub fn disconnect(&mut self, peer: PeerId, timeout: Duration) -> Result<()> {
        let operation = "disconnect a peer";
        let end = ipc::deadline(timeout);
        while self.is_busy_with(peer.0) && Instant::now() < end {
            if !self.progress() {
                std::thread::sleep(BUSY_PAUSE);
            }
        }
        let (was_busy, label) = (self.is_busy_with(peer.0), self.label(peer.0));
        let end = Instant::now() + CLOSE_TIMEOUT;
        self.drop_peer(peer.0, end, || {
            Error::new(operation, ErrorKind::Closed, "the peer was disconnected")
        });
        if was_busy {
            let detail = "operations with it were in flight";
            return Err(Error::new(operation, ErrorKind::DeadlineExceeded, detail).with(label));
        }
        Ok(())
    }

    /// Joins a region of this agent with a peer's region: chooses a path by the policy, and maps
    /// what it needs. Operations with all peers progress meanwhile.
    ///
    /// # Errors
    /// [`NoPath`](ErrorKind::NoPath), with a reason for each path;
    /// [`Stale`](ErrorKind::Stale) if the region was withdrawn, or its agent was restarted;
    /// [`Malformed`](ErrorKind::Malformed).
    pub fn join(
        &mut self,
        peer: PeerId,
        local: &Region,
        descriptor: &[u8],
        policy: &Policy,
        timeout: Duration,
    ) -> Result<Route> {
        check_fork(self.fork_generation, JOIN)?;
        policy.check()?;
        let remote = RegionDescriptor::decode(descriptor)?;
        if local.0.descriptor.agent != self.local_target.identity {
            let detail = "the local region belongs to another agent";
            return Err(Error::new(JOIN, ErrorKind::Stale, detail));
        }
        let end = ipc::deadline(timeout);
        self.peer(peer.0, JOIN)?.drop_stale_mappings();
        let joined = self.join_with(peer.0, local, remote, policy, end);
        let label = self.label(peer.0);
        let route = joined.map_err(|error| error.with(&label))?;
        match route.0.choice.fallback() {
            Some((path, reason)) => tracing::warn!(
                peer = label,
                wanted = path.name(),
                taken = route.path().name(),
                %reason,
                "fallback: an expected path was refused"
            ),
            None => tracing::debug!(peer = label, taken = route.path().name(), "joined"),
        }
        Ok(route)
    }
}

fn fabric_address(rail: &Rail) -> FabricAddress {
    FabricAddress { provider: rail.provider().to_owned(), address: rail.address().to_vec() }
}

fn card_of(local_target: &LocalTarget, socket: Option<&Path>, rails: &[Rail]) -> AgentCard {
    AgentCard {
        identity: local_target.identity,
        node: local_target.identity,
        machine: peer::machine(),
        label: local_target.label.clone(),
        socket: socket.map(Path::to_owned),
        fabrics: rails.iter().map(fabric_address).collect(),
        regions: Vec::new(),
    }
}

impl Agent {
    /// Ends the agent: completes its operations, withdraws its regions, and waits until operations
    /// of local peers with them have completed. Then the memory of all its regions can be reused,
    /// also of those that were dropped before.
    ///
    /// Dropping an agent ends it too. That cancels requests that no device has started and unsent
    /// notices, and waits at most a second for copies of other processes. It reports the remaining
    /// ones by a warning only.
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
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded): the agent has ended nevertheless. The
    /// error names the peer or the fabrics that may still copy, if any: drop the regions then,
    /// which keeps the memory until the copies end, but do not reuse the memory.
    pub fn close(mut self, timeout: Duration) -> Result<()> {
        check_fork(self.fork_generation, CLOSE)?;
        let end = ipc::deadline(timeout);
        while self.operations.in_flight > 0 && !remaining(end).is_zero() {
            if !self.progress() {
                self.pause(remaining(end).min(BUSY_PAUSE));
            }
        }
        let unfinished = self.operations.in_flight;
        let fabrics = self.shut_down(end);
        if !fabrics.is_empty() {
            let names = fabrics.join(", ");
            let detail = format!(
                "providers {names} may still access memory of its regions. Drop the regions, do not \
                 reuse the memory"
            );
            return Err(Error::new(CLOSE, ErrorKind::DeadlineExceeded, detail));
        }
        wait_for_copies(OutstandingCopies::of_all(&self.local_target, None), end)?;
        if unfinished > 0 {
            let detail = format!("{unfinished} operations in flight after {timeout:?}");
            return Err(Error::new(CLOSE, ErrorKind::DeadlineExceeded, detail));
        }
        Ok(())
    }

    /// Ends all activity and closes the regions. Returns the fabrics that did not release memory in
    /// time.
    fn shut_down(&mut self, end: Instant) -> Vec<String> {
        self.card_file = None;
        // No peer starts an operation with its regions from now on.
        self.local_target.end();
        let unsettled = self.close_copy_queues(end);
        let fabrics = Rail::close_all(&mut self.remote_transport.rails, end);
        for (number, peer) in &mut self.peers {
            if let Some(local_session) =
                peer.local_session.as_mut().filter(|_| !unsettled.contains(number))
            {
                local_session.segment.settle();
            }
        }
        self.peers.clear();
        if let Some(local_server) = self.local_server.take() {
            let _ = local_server.join();
        }
        fabrics
    }
}

/// Waits until these copies have completed.
fn wait_for_copies(mut copies: OutstandingCopies, end: Instant) -> Result<()> {
    while !copies.are_over() {
        if remaining(end).is_zero() {
            let bytes = copies.bytes();
            let detail = format!(
                "the peer still copies to or from {bytes} bytes of its regions, whose memory is not \
                 freed before"
            );
            let error = Error::new(CLOSE, ErrorKind::DeadlineExceeded, detail);
            return Err(error.with(copies.label().unwrap_or_default()));
        }
        std::thread::sleep(BUSY_PAUSE);
    }
    Ok(())
}

impl Drop for Agent {
    fn drop(&mut self) {
        if !self.fork_generation.is_current() {
            self.card_file = None;
            // The threads exist in the parent only: nothing to join here.
            self.remote_transport.rails.drain(..).for_each(Rail::forget);
            std::mem::forget(self.local_server.take());
            return;
        }
        if self.local_target.is_over.load(Ordering::Acquire) {
            // It was closed.
            return;
        }
        self.shut_down(ipc::deadline(CLOSE_TIMEOUT));
        let copies = OutstandingCopies::of_other_processes(&self.local_target, None);
        if let Err(error) = wait_for_copies(copies, ipc::deadline(SETTLE_TIMEOUT)) {
            tracing::warn!(%error, "agent dropped while a peer copies to or from its memory");
        }
    }
}
