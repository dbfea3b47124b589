//! The thread that serves a node: lets processes in, tells them of each other, gives them
//! topics and pools, and sees to what the dead leave.
//!
//! What it sends waits in line, and what it awaits is looked for at the next turn. Locks in
//! shared memory are the one thing that it waits for, and not for long: what one of them is
//! in the way of is done at another turn.

/// Logs what came and went: as information, where the process is there to serve the node.
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

/// Connections that have not said yet who they are.
const MAX_PENDING_CLIENTS: usize = 64;
/// How long one has to say who it is.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// How often it looks for what nobody tells it: who is in whose way, what could not be
/// buried yet.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// How long it waits for a lock. None is held for so long but by one that is stopped, or starved.
const LOCK_TIMEOUT: Duration = Duration::from_millis(20);
/// How often it looks who is dead of whom it was not told.
const LIVENESS_CHECK: Duration = Duration::from_secs(5);
/// Places in the roster that are kept for services.
const RESERVED_ROSTER_SLOTS: usize = 8;
/// The longest sleep.
const MAX_SLEEP: Duration = Duration::from_secs(5);
/// Messages of one process that are heard before the next has its turn.
const MAX_MESSAGES_PER_TURN: usize = 64;

const SERVING: &str = "serve a node";

/// One who came, and has not said who it is.
#[derive(Debug)]
struct PendingClient {
    connection: Connection,
    /// When it came, or took something last.
    since: Instant,
}

/// A process that takes part, and its connection.
#[derive(Debug)]
struct Client {
    label: String,
    process: u32,
    connection: Connection,
    /// The topics that it uses, and how often each was given to it.
    topics: BTreeMap<u32, u64>,
    /// Pools that it knows, and how many pieces of each were sent to it, or came from it.
    pools: HashMap<PoolId, usize>,
    /// What it asked for while the others were still handing over.
    held: Vec<Request>,
    /// It said that it leaves.
    leaves: bool,
}

impl Client {
    fn new(label: String, connection: Connection) -> Self {
        let credentials = connection.channel().credentials().ok();
        Self {
            label,
            process: credentials.and_then(|who| who.process).unwrap_or(0),
            connection,
            topics: BTreeMap::new(),
            pools: HashMap::new(),
            held: Vec::new(),
            leaves: false,
        }
    }
}

/// The node's hall, and who the service is in it.
#[derive(Debug)]
struct ServedNode {
    node_segment: NodeSegment,
    me: Participant,
    roster: Arc<ParticipantTable<MappedWords>>,
    number: u32,
    /// Of this process.
    pidfd: PidFd,
}

impl ServedNode {
    /// What a member is given: the hall, and this service's life.
    fn keys(&self) -> std::io::Result<Vec<OwnedFd>> {
        Ok(vec![
            self.node_segment.as_fd().try_clone_to_owned()?,
            self.pidfd.as_fd().try_clone_to_owned()?,
        ])
    }

    /// All others wait while the service does: what a lock is in the way of it does later.
    fn caller(&self) -> Caller<'_> {
        Caller { timeout: LOCK_TIMEOUT, ..Caller::new(self.me, &*self.roster) }
    }
}

pub(super) struct Service {
    options: ServiceOptions,
    listener: ChannelListener,
    bell: Arc<WakeFd>,
    /// A descriptor for one that comes when there are no others.
    spare_descriptor: Option<OwnedFd>,
    is_over: Arc<AtomicBool>,
    /// It is over since it could not go on.
    has_failed: bool,
    /// None until it is known which hall it is.
    served_node: Option<ServedNode>,
    pending_clients: Vec<PendingClient>,
    clients: BTreeMap<Participant, Client>,
    /// The lives of all members whose end is waited for.
    pidfds: HashMap<Participant, PidFd>,
    /// Those that are dead or have left, and of whom something may be left.
    unreclaimed: BTreeSet<Participant>,
    /// Members whose connection ended, though they live as far as is known: process and label.
    disconnected: HashMap<Participant, (u32, String)>,
    /// Somebody came late, and brought what those may have left something in who were seen to
    /// before.
    must_rescan_owners: bool,
    checked_liveness_at: Instant,
    registry: Registry,
    takeover: Option<Takeover>,
    eviction_monitor: EvictionMonitor,
    refusals: Refusals,
    replication: ReplicationSupervisor,
    /// Topics, or who uses them, have changed: these, for one.
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
        if !service.found_if_empty()? {
            let node = MemberLock::read_node_id(SERVING, &service.options.directory)?;
            service.takeover = Some(Takeover::begin(Instant::now(), node));
        }
        Ok(service)
    }

    /// Serves until it is over. True if it could not go on.
    pub(super) fn serve(mut self) -> bool {
        while !self.is_over.load(Ordering::Acquire) {
            self.run_once();
        }
        let has_failed = self.has_failed;
        self.close();
        has_failed
    }

    /// Waits until something happens, and sees to it.
    fn run_once(&mut self) {
        let Some(ready) = self.wait() else {
            // Out of memory, say: not a reason to spin.
            std::thread::sleep(POLL_INTERVAL);
            return;
        };
        if ready.bell {
            self.bell.silence();
        }
        for who in ready.dead {
            self.handle_death(who);
        }
        let pending_clients = std::mem::take(&mut self.pending_clients);
        for (pending_client, is_ready) in pending_clients.into_iter().zip(ready.pending_clients) {
            if is_ready {
                self.handle_first_message(pending_client);
            } else if pending_client.since.elapsed() < HELLO_TIMEOUT {
                self.pending_clients.push(pending_client);
            }
        }
        for who in ready.clients {
            self.handle_messages(who);
        }
        if ready.listener {
            self.accept_client();
        }
        self.do_periodic_work();
    }

    /// What nobody tells it of.
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
            .map(|(who, _)| *who)
            .collect();
        for who in broken {
            self.handle_disconnect(who);
        }
        self.advance_takeover();
        if self.takeover.is_some() {
            // Other nodes are to see that this one is there, though it cannot say yet what it
            // wants: so they keep it.
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
        let looks = self.takeover.is_some()
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
        let longest = if looks { POLL_INTERVAL } else { MAX_SLEEP };
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
        // What other nodes say is heard when all are back.
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
        let spoke: Vec<_> = is_ready.by_ref().take(self.clients.len()).collect();
        let clients = self.clients.keys().zip(spoke);
        let clients = clients.filter(|(_, spoke)| *spoke).map(|(who, _)| *who).collect();
        let dead = pidfds.iter().zip(is_ready.by_ref());
        let dead = dead.filter(|(_, is_over)| *is_over).map(|((who, _), _)| **who).collect();
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

    /// Out of descriptors: what comes is told so, by the one that is kept for this.
    fn refuse_next(&mut self, limit: DescriptorLimit) {
        drop(self.spare_descriptor.take());
        if let Ok(channel) = self.listener.accept(Duration::ZERO) {
            self.refusals.reject_out_of_descriptors(&mut Connection::new(channel), limit);
        }
        self.spare_descriptor = self.bell.as_fd().try_clone_to_owned().ok();
        // Another thread may have taken it: others may let go of some.
        if self.spare_descriptor.is_none() {
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn receive(&mut self, channel: Channel) {
        let own = ipc::Credentials::of_this_process().user;
        let is_admitted = channel.credentials().is_ok_and(|who| who.user == own || who.user == 0);
        let mut connection = Connection::new(channel);
        if !is_admitted {
            self.refusals.reject(&mut connection, ErrorKind::Denied, "this user is not admitted");
            return;
        }
        if self.pending_clients.len() >= MAX_PENDING_CLIENTS {
            // The oldest had its time.
            let mut oldest = self.pending_clients.remove(0);
            self.refusals.reject(
                &mut oldest.connection,
                ErrorKind::TooMany,
                "too many came and said nothing",
            );
        }
        self.pending_clients.push(PendingClient { connection, since: Instant::now() });
    }

    /// Founds the node, if there are no members of another.
    fn found_if_empty(&mut self) -> Result<bool> {
        let directory = &self.options.directory;
        if MemberLock::is_held(SERVING, directory)? {
            return Ok(false);
        }
        let before = MemberLock::read_node_id(SERVING, directory)?;
        MemberLock::write_node_id(SERVING, directory, Some(self.options.identity))?;
        if MemberLock::is_held(SERVING, directory)? {
            // One who was let in by the last service has just become a member: it looks whose
            // after it holds the lock, so it has seen one name or the other.
            MemberLock::write_node_id(SERVING, directory, before)?;
            return Ok(false);
        }
        self.attach_segment(NodeSegment::create(self.options.identity)?)?;
        Ok(true)
    }

    /// Founds the node anew, whoever may still hold what there was.
    fn found(&mut self) -> Result<()> {
        let node = Some(self.options.identity);
        MemberLock::write_node_id(SERVING, &self.options.directory, node)?;
        self.attach_segment(NodeSegment::create(self.options.identity)?)
    }

    fn attach_segment(&mut self, node_segment: NodeSegment) -> Result<()> {
        let pidfd = || PidFd::of_this_process().map_err(|error| Error::of(SERVING, error));
        let (own, watched) = (pidfd()?, pidfd()?);
        let roster = Arc::clone(node_segment.roster());
        let Some(me) = roster.admit(pidfd()?) else {
            let detail = format!("it has {} members already", Participant::SLOTS);
            return Err(Error::new(SERVING, ErrorKind::TooMany, detail));
        };
        self.pidfds.insert(me, watched);
        let number = node_segment.next_service_number();
        self.served_node = Some(ServedNode { node_segment, me, roster, number, pidfd: own });
        self.inherit_network();
        Ok(())
    }

    /// Tells a process something, if it is there.
    fn notify(&mut self, who: Participant, notice: &Notice, files: Vec<OwnedFd>) {
        if let Some(client) = self.clients.get_mut(&who) {
            client.connection.send(notice, files);
        }
    }

    /// Ends in order: members find another service.
    fn close(mut self) {
        // What carries messages uses names of this service.
        self.replication.replicator = None;
        // What was not complete is for the next service to complete.
        let takeover = self.takeover.take();
        if self.replication.has_workers() {
            // A worker that was given up may still do something in the name of this service,
            // which therefore stays until the process ends.
            tracing::warn!("the next service cleans up after this one when its process has ended");
        } else if let Some(served_node) = &self.served_node {
            match self.registry.reclaim(&served_node.caller(), served_node.me) {
                Ok(()) => drop(served_node.roster.free_slot(served_node.me)),
                Err(error) => {
                    tracing::debug!(%error, "the next service cleans up after this one");
                    served_node.roster.leave(served_node.me);
                }
            }
        }
        // The socket goes first, so that nobody comes to a service that has ended.
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

/// What there is to see to.
struct Ready {
    bell: bool,
    listener: bool,
    pending_clients: Vec<bool>,
    clients: Vec<Participant>,
    dead: Vec<Participant>,
}
