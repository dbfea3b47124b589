//! Agents: put into and get from regions of other agents.

mod agent_files;
mod card;
mod card_file;
mod epochs;
mod event;
mod event_queue;
mod event_watch;
mod explain;
mod fabric_direct;
mod host_staged;
mod join;
mod join_staged;
mod leftovers;
mod local_copies;
mod local_protocol;
mod local_session;
mod local_target;
mod mapping;
mod options;
mod peers;
mod prepared_transfer;
mod progress;
mod published_regions;
mod put_get;
mod region_owner;
mod register;
mod remote_transport;
mod route;
mod session_segment;
mod stream_order;
mod transfer_parts;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu::Point;
use ipc::{ForkGeneration, WaitStrategy};

use self::event_queue::EventQueue;
use self::local_copies::{DeferredBlocks, LocalCopies};
use self::local_target::{LocalServer, OutstandingCopies};
use self::peers::{Peer, Peers};
use self::progress::CLOSE_TIMEOUT;
use self::published_regions::PublishedRegions;
use self::remote_transport::RemoteTransport;
use self::stream_order::DelayedTransfers;
use crate::error::{Error, ErrorKind, Result};
use crate::notice::Notice;
use crate::operations::{Operations, Token};
use crate::path::{Operation, Policy};
use crate::region::{Buffer, Region, RegionDescriptor, Rights};
use crate::remaining;
use crate::share::check_fork;

pub use agent_files::Condition;
pub use card::{AgentCard, FabricAddress, MAX_PUBLISHED_REGIONS};
pub use event::{Departure, Event};
pub use event_watch::EventWatch;
pub use explain::MemoryAttributes;
pub use leftovers::{Leftovers, clean};
pub(crate) use local_target::LocalTarget;
pub use options::{AgentOptions, choose_fabric};
pub use prepared_transfer::PreparedTransfer;
pub(crate) use region_owner::{RegionChannel, RegionOwnerSession};
pub use route::Route;

/// How long dropping an agent waits for copies of other processes.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(1);
/// The longest pause while operations are in flight.
const BUSY_PAUSE: Duration = Duration::from_micros(200);
const START: &str = "start agent";
const CLOSE: &str = "close agent";
const CONNECT: &str = "connect to agent";
const JOIN: &str = "join two regions";

/// Identifies a peer of an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PeerId(u32);

impl PeerId {
    /// The number of the peer at its agent, for interfaces to other languages. It is not reused.
    #[must_use]
    pub fn to_u32(self) -> u32 {
        self.0
    }

    /// The peer with a [number](Self::to_u32). A number that no peer has is
    /// [`Unknown`](ErrorKind::Unknown) to the agent.
    #[must_use]
    pub fn from_u32(number: u32) -> Self {
        Self(number)
    }
}

/// An operation in flight: what its completion needs.
#[derive(Debug, Clone)]
struct OperationContext {
    token: Token,
    peer: u32,
    /// Number of the operation in the local session.
    number: u64,
    bytes: u64,
    notice: Option<Notice>,
    /// Epoch of the operation among those with the peer.
    epoch: u64,
}

/// An operation behind a fence, or an ordered notice.
#[derive(Debug)]
struct DeferredOperation {
    context: OperationContext,
    /// All epochs before this one must have completed.
    after: u64,
    /// None for a notice without data.
    transfer: Option<DeferredTransfer>,
}

#[derive(Debug)]
struct DeferredTransfer {
    operation: Operation,
    route: Route,
    blocks: DeferredBlocks,
    /// The transfer begins after this point of a stream.
    after: Option<Point>,
}

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
    /// State shared with its threads.
    local_target: Arc<LocalTarget>,
    local_server: Option<LocalServer>,
    published: PublishedRegions,
    peers: Peers,
    local_copies: LocalCopies,
    remote_transport: RemoteTransport,
    operations: Operations,
    /// Operations with parts in flight.
    wholes: HashMap<Token, OperationContext>,
    /// Transfers that wait for streams, on paths without a device of this process.
    delayed: DelayedTransfers,
    events: EventQueue,
    forces_remote: bool,
    wait_strategy: WaitStrategy,
    fork_generation: ForkGeneration,
}

/// Without secrets: tickets and keys of peers' regions.
impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let socket = self.local_server.as_ref().map(LocalServer::socket);
        let mut shown = f.debug_struct("Agent");
        shown.field("label", &self.local_target.label).field("socket", &socket);
        shown.field("fabrics", &self.remote_transport.providers());
        shown.field("peers", &self.peers.labels());
        shown.field("in_flight", &self.operations.in_flight()).finish_non_exhaustive()
    }
}

impl Agent {
    /// How peers reach it, and the regions that it has [published](Self::publish).
    #[must_use]
    pub fn card(&self) -> AgentCard {
        AgentCard {
            identity: self.local_target.identity,
            node: self.local_target.identity,
            machine: card::machine(),
            label: self.local_target.label.clone(),
            socket: self.local_server.as_ref().map(|server| server.socket().to_owned()),
            fabrics: self.remote_transport.addresses(),
            regions: self.published.all(),
        }
    }

    /// Registers memory with rights for peers. Regions of both sides are joined for transfers.
    ///
    /// # Errors
    /// [`TooMany`](ErrorKind::TooMany) regions; errors of the device.
    pub fn register(&self, memory: impl Into<Buffer>, rights: Rights) -> Result<Region> {
        check_fork(self.fork_generation, "register region")?;
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
        check_fork(self.fork_generation, "register region")?;
        self.local_target.register_local(memory.into())
    }

    /// Publishes a region by name on the [card](Self::card) from now on: peers
    /// [join](Self::route_to) it without its descriptor. A region published before under the name
    /// is replaced. The card does not keep the region: dropping it removes the name.
    ///
    /// Holders of the card can do with the region what its rights allow. The card file beside the
    /// agent's socket has no regions.
    ///
    /// # Errors
    /// [`NotAllowed`](ErrorKind::NotAllowed) for a local-only region;
    /// [`Stale`](ErrorKind::Stale) for a region of another agent; [`TooMany`](ErrorKind::TooMany)
    /// names;
    /// [`Failed`](ErrorKind::Failed) for an empty name, or one of more than 64 bytes.
    pub fn publish(&mut self, name: &str, region: &Region) -> Result<()> {
        self.published.publish(name, region, self.local_target.identity)
    }

    /// Withdraws a region, and waits until peers have completed all operations with it. Then its
    /// memory can be reused.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded), with the peer that may still copy: do not
    /// reuse the memory yet. No *new* operation starts. To wait longer, withdraw it again.
    /// [`Stale`](ErrorKind::Stale) for a region of another agent.
    pub fn withdraw(&mut self, region: &Region, timeout: Duration) -> Result<()> {
        let operation = "withdraw region";
        check_fork(self.fork_generation, operation)?;
        // Its number is that of another region here.
        if region.0.descriptor.agent != self.local_target.identity {
            let detail = "the region belongs to another agent";
            return Err(Error::new(operation, ErrorKind::Stale, detail));
        }
        let number = region.0.descriptor.number;
        self.local_target.withdraw(number);
        region.0.retire();
        let end = ipc::deadline(timeout);
        let mut copies = OutstandingCopies::of(&self.local_target, Some(number));
        loop {
            self.progress();
            copies.are_over();
            let by_rails = || self.remote_transport.region_user(number);
            let own_copies = self.local_target.staging().user_of(Some(number));
            let user = copies.label().map(str::to_owned).or(own_copies).or_else(by_rails);
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
        self.forget_peer(peer.0);
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
        check_fork(self.fork_generation, CONNECT)?;
        let card = self.with_visible_socket(AgentCard::decode(card)?);
        let end = ipc::deadline(timeout);
        // The socket may not be visible here: it must not use up the whole timeout.
        let for_socket = if self.remote_transport.reaches(&card) { timeout / 2 } else { timeout };
        let (local_target, forces_remote) = (Arc::clone(&self.local_target), self.forces_remote);
        let mut progress = || self.progress_while_waiting();
        let connected =
            Peer::connect(&local_target, &card, forces_remote, for_socket, &mut progress);
        let peer = connected.map_err(|error| error.with(&card.label))?;
        tracing::debug!(peer = peer.label(), locality = ?peer.locality(), "connected to an agent");
        let is_remote = peer.is_remote();
        let number = self.peers.add(peer);
        // Also if no regions will be joined: notices need the link.
        if is_remote && let Err(error) = self.connect_fabric(number, end) {
            self.forget_peer(number);
            return Err(error);
        }
        Ok(PeerId(number))
    }

    /// The card with the socket in this agent's directory, if its path exists there only: containers
    /// may mount the common directory at different paths.
    fn with_visible_socket(&self, card: AgentCard) -> AgentCard {
        let Some(socket) = card.socket.as_deref().filter(|socket| !agent_files::exists(socket))
        else {
            return card;
        };
        let own = self.local_server.as_ref().and_then(|server| server.socket().parent());
        let here = own.zip(socket.file_name()).map(|(directory, name)| directory.join(name));
        match here.filter(|here| agent_files::exists(here)) {
            Some(here) => AgentCard { socket: Some(here), ..card },
            None => card,
        }
    }

    /// Removes a peer without operations.
    fn forget_peer(&mut self, number: u32) {
        self.remote_transport.disconnect(number);
        self.peers.disconnect(number, false);
    }

    /// Disconnects from a peer, after its operations in flight have completed.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded): it is disconnected nevertheless, and its
    /// operations end with errors. Copies on a device cannot be cancelled: it waits up to ten
    /// seconds more for them, and leaks their memory after that.
    pub fn disconnect(&mut self, peer: PeerId, timeout: Duration) -> Result<()> {
        let end = ipc::deadline(timeout);
        while self.is_busy_with(peer.0) && Instant::now() < end {
            if !self.progress() {
                std::thread::sleep(BUSY_PAUSE);
            }
        }
        let (was_busy, label) = (self.is_busy_with(peer.0), self.peers.label(peer.0));
        self.drop_peer(peer.0, Instant::now() + CLOSE_TIMEOUT);
        if was_busy {
            let detail = "operations with it were in flight";
            return Err(Error::new("disconnect", ErrorKind::DeadlineExceeded, detail).with(label));
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
        self.peers.get(peer.0, JOIN)?.drop_stale_mappings();
        let joined = self.join_with(peer.0, local, remote, policy, end);
        let label = self.peers.label(peer.0);
        let route = joined.map_err(|error| error.with(&label))?;
        match route.choice().fallback() {
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

    /// Joins a region of this agent with one that a peer [published](Self::publish) by this name,
    /// as [`join`](Self::join) with the default policy.
    ///
    /// ```
    /// use std::time::Duration;
    /// use transfer::{Agent, AgentOptions, HostBuffer, Rights};
    /// let timeout = Duration::from_secs(5);
    /// let mut there = Agent::start(AgentOptions::new("decode"))?;
    /// let cache = HostBuffer::new(4096)?;
    /// let region = there.register(&cache, Rights::WRITE)?;
    /// there.publish("cache", &region)?;
    /// let card = there.card().encode()?; // all that the peer needs
    ///
    /// let mut here = Agent::start(AgentOptions::new("prefill"))?;
    /// let local = here.register_local(HostBuffer::from_vec(vec![7; 4096])?)?;
    /// let peer = here.connect(&card, timeout)?;
    /// let route = here.route_to(peer, "cache", &local, timeout)?;
    /// let put = here.put_all(&route, None)?;
    /// here.wait(put, timeout)?;
    /// let mut found = [0; 4096];
    /// cache.read(0, &mut found)?;
    /// assert_eq!(found, [7; 4096]);
    /// # Ok::<(), transfer::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Unknown`](ErrorKind::Unknown) if the peer's card has no such region, with the regions that
    /// it has; otherwise as [`join`](Self::join).
    pub fn route_to(
        &mut self,
        peer: PeerId,
        name: &str,
        local: &Region,
        timeout: Duration,
    ) -> Result<Route> {
        let descriptor = self.peers.get(peer.0, JOIN)?.published(name)?.encode()?;
        self.join(peer, local, &descriptor, &Policy::default(), timeout)
    }

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
        while self.operations.in_flight() > 0 && !remaining(end).is_zero() {
            if !self.progress() {
                self.pause(remaining(end).min(BUSY_PAUSE));
            }
        }
        let unfinished = self.operations.in_flight();
        let fabrics = self.shut_down(end);
        if !fabrics.is_empty() {
            let names = fabrics.join(", ");
            let detail = format!(
                "providers {names} may still access memory of its regions. Drop the regions, do not \
                 reuse the memory"
            );
            return Err(Error::new(CLOSE, ErrorKind::DeadlineExceeded, detail));
        }
        wait_for_copies(OutstandingCopies::of(&self.local_target, None), end)?;
        if let Some(user) = self.local_target.staging().user_of(None) {
            let detail = "a device still copies between its regions and the peer. Drop the regions, \
                          do not reuse the memory";
            return Err(Error::new(CLOSE, ErrorKind::DeadlineExceeded, detail).with(user));
        }
        if unfinished > 0 {
            let detail = format!("{unfinished} operations in flight after {timeout:?}");
            return Err(Error::new(CLOSE, ErrorKind::DeadlineExceeded, detail));
        }
        Ok(())
    }

    /// Ends all activity and closes the regions. Returns the fabrics that did not release memory in
    /// time.
    fn shut_down(&mut self, end: Instant) -> Vec<String> {
        let server_thread = self.local_server.take().map(LocalServer::remove_card);
        // No peer starts an operation with its regions from now on.
        self.local_target.end();
        let unsettled = self.local_copies.close(end);
        let fabrics = self.remote_transport.close(end);
        self.local_target.staging().join(end);
        self.peers.close(&unsettled);
        if let Some(thread) = server_thread {
            let _ = thread.join();
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
            // The threads exist in the parent only: nothing to join here.
            self.remote_transport.forget();
            std::mem::forget(self.local_server.take().map(LocalServer::remove_card));
            return;
        }
        if self.local_target.is_over() {
            // It was closed.
            return;
        }
        self.shut_down(ipc::deadline(CLOSE_TIMEOUT));
        let copies = OutstandingCopies::of(&self.local_target, None).of_other_processes();
        if let Err(error) = wait_for_copies(copies, ipc::deadline(SETTLE_TIMEOUT)) {
            tracing::warn!(%error, "agent dropped while a peer copies to or from its memory");
        }
    }
}
