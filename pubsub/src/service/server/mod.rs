//! The thread that serves a node: admits processes, distributes pidfds, topics and pools, and
//! reclaims after dead processes.
//!
//! It never waits for a client: messages are queued, and awaited events are polled. It only waits
//! for locks in shared memory, for a short time; an operation that fails for a held lock is tried
//! again later.

/// Logs a change of the node: at level info in a dedicated service.
macro_rules! log_change {
    ($service:expr, $($what:tt)+) => {
        if $service.options.has_priority.load(std::sync::atomic::Ordering::Acquire) {
            tracing::info!($($what)+);
        } else {
            tracing::debug!($($what)+);
        }
    };
}

mod clients;
mod eviction;
#[cfg(any(test, feature = "fuzzing"))]
pub(super) mod fuzzing;
#[cfg(test)]
mod fuzzing_tests;
mod growth;
mod reclaim;
mod refusals;
mod replication;
mod reports;
mod takeover;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ipc::{
    Caller, Channel, ChannelError, ChannelListener, DescriptorLimit, LimitReached, MappedWords,
    Participant, ParticipantTable, PidFd,
};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use self::eviction::EvictionMonitor;
use self::refusals::Refusals;
use self::replication::ReplicationSupervisor;
use self::takeover::Takeover;
use super::ServiceOptions;
use super::connection::{Connection, drop_stalled};
use super::election::MemberLock;
use super::protocol::{Notice, Request};
use super::registry::Registry;
use crate::error::{Error, ErrorKind, Result};
use crate::node_segment::NodeSegment;
use crate::pool::PoolId;
use crate::wake::WakeFd;

/// Maximum number of connections without a first message.
const MAX_PENDING_CLIENTS: usize = 64;
/// Time for the first message.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of polling for state without events: blocking subscribers, reclaims that failed for a
/// held lock.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Timeout for locks. Only a stopped or starved process holds one for longer.
const LOCK_TIMEOUT: Duration = Duration::from_millis(20);
/// Interval of the search for unreported deaths.
const LIVENESS_CHECK: Duration = Duration::from_secs(5);
/// Slots of the participant table that are reserved for services.
const RESERVED_ROSTER_SLOTS: usize = 8;
/// The longest sleep.
const MAX_SLEEP: Duration = Duration::from_secs(5);
/// Messages of one process that are handled before those of the next.
const MAX_MESSAGES_PER_TURN: usize = 64;

const SERVING: &str = "serve a node";

/// A connection without a first message so far.
#[derive(Debug)]
struct PendingClient {
    connection: Connection,
    /// Time of the connection, or of the last message that the client received.
    since: Instant,
}

/// A member, and its connection.
#[derive(Debug)]
struct Client {
    label: String,
    process: u32,
    connection: Connection,
    /// The topics that it uses, and how often each was granted.
    topics: BTreeMap<u32, u64>,
    /// Pools that it knows, and how many pieces of each it has.
    pools: HashMap<PoolId, usize>,
    /// Requests that are held during a takeover.
    held: Vec<Request>,
    /// It has sent [`Request::Leave`].
    is_leaving: bool,
}

impl Client {
    fn new(label: String, connection: Connection) -> Self {
        let credentials = connection.channel().credentials().ok();
        Self {
            label,
            process: credentials.and_then(|it| it.process).unwrap_or(0),
            connection,
            topics: BTreeMap::new(),
            pools: HashMap::new(),
            held: Vec::new(),
            is_leaving: false,
        }
    }
}

/// The node segment, and the service's participant in it.
#[derive(Debug)]
struct ServedNode {
    node_segment: NodeSegment,
    me: Participant,
    roster: Arc<ParticipantTable<MappedWords>>,
    number: u32,
    /// Pidfd of this process.
    pidfd: PidFd,
}

impl ServedNode {
    /// Descriptors for a new member: the node segment, and this service's pidfd.
    fn descriptors(&self) -> std::io::Result<Vec<OwnedFd>> {
        Ok(vec![
            self.node_segment.as_fd().try_clone_to_owned()?,
            self.pidfd.as_fd().try_clone_to_owned()?,
        ])
    }

    /// With a short timeout, since all members wait while the service does.
    fn caller(&self) -> Caller<'_> {
        Caller { timeout: LOCK_TIMEOUT, ..Caller::new(self.me, &*self.roster) }
    }
}

pub(super) struct Service {
    options: ServiceOptions,
    listener: ChannelListener,
    bell: Arc<WakeFd>,
    /// Lets it accept and reject a connection when no other descriptors are left.
    spare_descriptor: Option<OwnedFd>,
    is_over: Arc<AtomicBool>,
    /// It ended since it failed.
    has_failed: bool,
    /// None until the node segment is known.
    served_node: Option<ServedNode>,
    pending_clients: Vec<PendingClient>,
    clients: BTreeMap<Participant, Client>,
    /// Pidfds of all members that are watched.
    pidfds: HashMap<Participant, PidFd>,
    /// Participants that are dead or have left, and may still own memory.
    unreclaimed: BTreeSet<Participant>,
    /// Members whose connection ended, though no death is known: process and label.
    disconnected: HashMap<Participant, (u32, String)>,
    /// A late process returned objects in which reclaimed participants may still own memory.
    must_rescan_owners: bool,
    checked_liveness_at: Instant,
    registry: Registry,
    takeover: Option<Takeover>,
    eviction_monitor: EvictionMonitor,
    refusals: Refusals,
    replication: ReplicationSupervisor,
    /// Topics or their users have changed, among them those in `changed_topics`.
    replicator_needs_topics: bool,
    changed_topics: BTreeSet<u32>,
    next_ticket: u64,
}

impl Service {
    pub(super) fn new(
        options: ServiceOptions,
        listener: ChannelListener,
        bell: Arc<WakeFd>,
        is_over: Arc<AtomicBool>,
    ) -> Result<Self> {
        let registry = Registry::new(options.budgets);
        let spare_descriptor = bell.as_fd().try_clone_to_owned();
        let mut service = Self {
            options,
            listener,
            bell,
            spare_descriptor: Some(spare_descriptor.map_err(|error| Error::of(SERVING, error))?),
            is_over,
            has_failed: false,
            served_node: None,
            pending_clients: Vec::new(),
            clients: BTreeMap::new(),
            pidfds: HashMap::new(),
            unreclaimed: BTreeSet::new(),
            disconnected: HashMap::new(),
            must_rescan_owners: false,
            checked_liveness_at: Instant::now(),
            registry,
            takeover: None,
            eviction_monitor: EvictionMonitor::default(),
            refusals: Refusals::new(),
            replication: ReplicationSupervisor::new(),
            replicator_needs_topics: false,
            changed_topics: BTreeSet::new(),
            next_ticket: 1,
        };
        if !service.create_if_empty()? {
            let node = MemberLock::read_node_id(SERVING, &service.options.directory)?;
            service.takeover = Some(Takeover::begin(Instant::now(), node));
        }
        Ok(service)
    }

    /// Serves until the service is over. True if it failed.
    pub(super) fn serve(mut self) -> bool {
        while !self.is_over.load(Ordering::Acquire) {
            self.run_once();
        }
        let has_failed = self.has_failed;
        self.close();
        has_failed
    }

    /// Waits for events, and handles them.
    fn run_once(&mut self) {
        let Some(ready) = self.wait() else {
            // For instance out of memory: do not spin.
            std::thread::sleep(POLL_INTERVAL);
            return;
        };
        if ready.bell {
            self.bell.silence();
        }
        for participant in ready.dead {
            self.handle_death(participant);
        }
        let pending_clients = std::mem::take(&mut self.pending_clients);
        for (pending_client, is_ready) in pending_clients.into_iter().zip(ready.pending_clients) {
            if is_ready {
                self.handle_first_message(pending_client);
            } else if pending_client.since.elapsed() < HELLO_TIMEOUT {
                self.pending_clients.push(pending_client);
            }
        }
        for participant in ready.clients {
            self.handle_messages(participant);
        }
        if ready.listener {
            self.accept_client();
        }
        self.do_periodic_work();
    }

    /// Handles state without events.
    fn do_periodic_work(&mut self) {
        let clients = self.clients.values_mut().map(|client| &mut client.connection);
        for connection in clients.filter(|connection| connection.is_stalled()) {
            connection.flush();
        }
        let clients = self.clients.values_mut().map(|client| &mut client.connection);
        drop_stalled(Instant::now(), clients);
        let broken: Vec<_> = self
            .clients
            .iter()
            .filter(|(_, client)| client.connection.is_broken())
            .map(|(it, _)| *it)
            .collect();
        for participant in broken {
            self.handle_disconnect(participant);
        }
        self.advance_takeover();
        if self.takeover.is_some() {
            // Other nodes see this service, and keep its topics and messages, though it cannot
            // announce its topics yet.
            self.start_replication();
        } else {
            self.check_liveness();
            self.find_dead_owners();
            self.reclaim_all();
            self.check_growth();
            self.run_replication();
            self.evict();
        }
    }

    fn max_poll_timeout(&self) -> Duration {
        let polls = self.takeover.is_some()
            || !self.unreclaimed.is_empty()
            || self.must_rescan_owners
            || self.is_growing()
            || !self.pending_clients.is_empty()
            || self
                .clients
                .values()
                .map(|client| &client.connection)
                .any(|it| it.is_stalled() || it.has_queued_descriptors())
            || self.registry.unused().next().is_some();
        let longest = if polls { POLL_INTERVAL } else { MAX_SLEEP };
        let longest =
            self.eviction_monitor.max_poll_timeout().map_or(longest, |wait| longest.min(wait));
        self.replication.max_poll_timeout().map_or(longest, |replication| longest.min(replication))
    }

    fn wait(&self) -> Option<Ready> {
        fn entry(descriptor: BorrowedFd<'_>) -> PollFd<'_> {
            PollFd::new(descriptor, PollFlags::POLLIN)
        }
        let mut entries = vec![entry(self.bell.as_fd()), entry(self.listener.as_fd())];
        let pending_clients =
            self.pending_clients.iter().map(|pending_client| &pending_client.connection);
        let clients = self.clients.values().map(|client| &client.connection);
        for connection in pending_clients.chain(clients) {
            let mut flags = PollFlags::POLLIN;
            flags.set(PollFlags::POLLOUT, connection.has_queued());
            entries.push(PollFd::new(connection.as_fd(), flags));
        }
        let pidfds: Vec<_> = self.pidfds.iter().collect();
        entries.extend(pidfds.iter().map(|(_, pidfd)| entry(pidfd.as_fd())));
        // Messages of other nodes are handled once all members have rejoined.
        let replication = self
            .replication
            .replicator
            .iter()
            .flat_map(|it| it.descriptors())
            .filter(|_| self.takeover.is_none());
        entries.extend(replication.map(entry));
        let timeout = PollTimeout::try_from(self.max_poll_timeout()).unwrap_or(PollTimeout::ZERO);
        match poll(&mut entries, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(_) => return None,
        }
        let mut is_ready = entries.iter().map(|entry| entry.any().unwrap_or(true));
        let (bell, listener) = (is_ready.next()?, is_ready.next()?);
        let pending_clients = is_ready.by_ref().take(self.pending_clients.len()).collect();
        let readable: Vec<_> = is_ready.by_ref().take(self.clients.len()).collect();
        let clients = self.clients.keys().zip(readable);
        let clients = clients.filter(|(_, readable)| *readable).map(|(it, _)| *it).collect();
        let dead = pidfds.iter().zip(is_ready.by_ref());
        let dead = dead.filter(|(_, is_over)| *is_over).map(|((it, _), _)| **it).collect();
        Some(Ready { bell, listener, pending_clients, clients, dead })
    }

    fn accept_client(&mut self) {
        match self.listener.accept(Duration::ZERO) {
            Ok(channel) => self.receive(channel),
            Err(ChannelError::DeadlineExceeded { .. }) => {}
            Err(ChannelError::System { cause, .. }) => match LimitReached::of(&cause) {
                Some(LimitReached::Descriptors(limit)) => self.refuse_next(limit),
                _ => std::thread::sleep(POLL_INTERVAL),
            },
            Err(_) => std::thread::sleep(POLL_INTERVAL),
        }
    }

    /// Out of descriptors: uses the spare one to reject the next connection with a reason.
    fn refuse_next(&mut self, limit: DescriptorLimit) {
        drop(self.spare_descriptor.take());
        if let Ok(channel) = self.listener.accept(Duration::ZERO) {
            self.refusals.reject_out_of_descriptors(&mut Connection::new(channel), limit);
        }
        self.spare_descriptor = self.bell.as_fd().try_clone_to_owned().ok();
        // Another thread may have taken it; wait until one is closed.
        if self.spare_descriptor.is_none() {
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn receive(&mut self, channel: Channel) {
        let own = ipc::Credentials::of_this_process().user;
        let is_admitted = channel.credentials().is_ok_and(|it| it.user == own || it.user == 0);
        let mut connection = Connection::new(channel);
        if !is_admitted {
            self.refusals.reject(&mut connection, ErrorKind::Denied, "this user is not admitted");
            return;
        }
        if self.pending_clients.len() >= MAX_PENDING_CLIENTS {
            // The oldest one has waited longest.
            let mut oldest = self.pending_clients.remove(0);
            self.refusals.reject(
                &mut oldest.connection,
                ErrorKind::TooMany,
                "too many connections without a first message",
            );
        }
        self.pending_clients.push(PendingClient { connection, since: Instant::now() });
    }

    /// Creates the node, if it has no members.
    fn create_if_empty(&mut self) -> Result<bool> {
        let directory = &self.options.directory;
        if MemberLock::is_held(SERVING, directory)? {
            return Ok(false);
        }
        let before = MemberLock::read_node_id(SERVING, directory)?;
        MemberLock::write_node_id(SERVING, directory, Some(self.options.identity))?;
        if MemberLock::is_held(SERVING, directory)? {
            // A process that the last service admitted has just become a member. It reads the
            // identity after it has locked, so it has seen one of the two.
            MemberLock::write_node_id(SERVING, directory, before)?;
            return Ok(false);
        }
        self.attach_segment(NodeSegment::create(self.options.identity)?)?;
        Ok(true)
    }

    /// Re-creates the node, even if processes still hold its old segment.
    fn recreate(&mut self) -> Result<()> {
        let node = Some(self.options.identity);
        MemberLock::write_node_id(SERVING, &self.options.directory, node)?;
        self.attach_segment(NodeSegment::create(self.options.identity)?)
    }

    fn attach_segment(&mut self, node_segment: NodeSegment) -> Result<()> {
        let pidfd = || PidFd::of_this_process().map_err(|error| Error::of(SERVING, error));
        let (own, watched) = (pidfd()?, pidfd()?);
        let roster = Arc::clone(node_segment.roster());
        let Some(me) = roster.admit(pidfd()?) else {
            let detail = format!("the node already has {} members", Participant::SLOTS);
            return Err(Error::new(SERVING, ErrorKind::TooMany, detail));
        };
        self.pidfds.insert(me, watched);
        let number = node_segment.next_service_number();
        self.served_node = Some(ServedNode { node_segment, me, roster, number, pidfd: own });
        self.load_network_options();
        Ok(())
    }

    /// Sends a notice to a process, if it is connected.
    fn notify(&mut self, participant: Participant, notice: &Notice, files: Vec<OwnedFd>) {
        if let Some(client) = self.clients.get_mut(&participant) {
            client.connection.send(notice, files);
        }
    }

    /// Ends the service in order: members find another one.
    fn close(mut self) {
        // Replication uses participants of this service.
        self.replication.replicator = None;
        // The next service completes a takeover.
        let takeover = self.takeover.take();
        if self.replication.has_workers() {
            // An abandoned worker may still act as a participant of this service, which therefore
            // remains until the process ends.
            tracing::warn!(
                "a worker still runs: the next service reclaims after this one once this process \
                 has exited"
            );
        } else if let Some(served_node) = &self.served_node {
            match self.registry.reclaim(&served_node.caller(), served_node.me) {
                Ok(()) => drop(served_node.roster.free_slot(served_node.me)),
                Err(error) => {
                    tracing::debug!(%error, "the next service reclaims after this one");
                    served_node.roster.leave(served_node.me);
                }
            }
        }
        // The socket is removed first, so that no process connects to an ended service.
        drop(self.listener);
        for client in self.clients.values_mut() {
            client.connection.end();
        }
        let joining_clients = takeover.into_iter().flat_map(|takeover| takeover.joining_clients);
        let connections = joining_clients.map(clients::JoiningClient::into_connection);
        for mut connection in
            connections.chain(self.pending_clients.into_iter().map(|it| it.connection))
        {
            connection.end();
        }
    }
}

/// Events to handle.
struct Ready {
    bell: bool,
    listener: bool,
    pending_clients: Vec<bool>,
    clients: Vec<Participant>,
    dead: Vec<Participant>,
}
