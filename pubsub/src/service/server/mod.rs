//! The thread that serves a node: admits processes, distributes pidfds, topics and pools, and
//! reclaims after dead processes.
//!
//! The thread never waits for a client: messages are queued, and awaited events are polled. It only
//! waits for locks in shared memory, for a short time; an operation that fails for a held lock is
//! tried again later.

/// Logs a change of the node: at level info in a dedicated service.
macro_rules! log_change {
    ($service:expr, $($what:tt)+) => {
        if $service.has_priority.load(std::sync::atomic::Ordering::Acquire) {
            tracing::info!($($what)+);
        } else {
            tracing::debug!($($what)+);
        }
    };
}

mod admission;
mod broker;
mod clients;
mod eviction_monitor;
#[cfg(any(test, feature = "fuzzing"))]
pub(super) mod fuzzing;
#[cfg(test)]
mod fuzzing_tests;
mod handover;
mod reclaimer;
mod replication;
mod reports;
mod takeover;
#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ipc::{Caller, ChannelListener, MappedWords, Participant, ParticipantTable, PidFd};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use self::admission::Admission;
use self::broker::Broker;
use self::eviction_monitor::EvictionMonitor;
use self::reclaimer::Reclaimer;
use self::replication::ReplicationSupervisor;
use self::takeover::Takeover;
use super::SERVING;
use super::connection::Connection;
use super::election::MemberLock;
use super::registry::Registry;
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::During;
use crate::ids::NodeId;
use crate::node_options::NodeOptions;
use crate::node_segment::NodeSegment;
use crate::wake::WakeFd;

/// Interval of polling for state without events: blocking subscribers, reclaims that failed for a
/// held lock.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Timeout for locks. Only a stopped or starved process holds one for longer.
const LOCK_TIMEOUT: Duration = Duration::from_millis(20);
/// Slots of the participant table that are reserved for services.
const RESERVED_PARTICIPANT_SLOTS: usize = 8;
const MAX_SLEEP: Duration = Duration::from_secs(5);
/// Interval of looks for the node's directory; a service without work looks every five seconds.
const DIRECTORY_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Messages of one process that are handled before those of the next.
const MAX_MESSAGES_PER_TURN: usize = 64;

/// How a client is named in logs and reports.
#[derive(Debug)]
struct ClientName {
    process: u32,
    label: String,
}

/// A client whose hello was received.
#[derive(Debug)]
struct JoiningClient {
    connection: Connection,
    label: String,
    pidfd: PidFd,
}

/// The node segment, and the service's participant in it.
#[derive(Debug)]
struct ServedNode {
    node_segment: Arc<NodeSegment>,
    me: Participant,
    participants: Arc<ParticipantTable<MappedWords>>,
    number: u32,
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
        Caller { timeout: LOCK_TIMEOUT, ..Caller::new(self.me, &*self.participants) }
    }
}

pub(super) struct Service {
    options: NodeOptions,
    /// This process holds the priority lock: no other service takes over.
    has_priority: Arc<AtomicBool>,
    /// Until then no other service takes over, whatever its priority.
    min_term_until: Option<Instant>,
    /// Identity of the node, if the service creates it.
    identity: NodeId,
    bell: Arc<WakeFd>,
    is_over: Arc<AtomicBool>,
    /// The node cannot be served.
    has_failed: bool,
    /// None until the node segment is known.
    served_node: Option<ServedNode>,
    admission: Admission,
    broker: Broker,
    reclaimer: Reclaimer,
    takeover: Option<Takeover>,
    eviction_monitor: EvictionMonitor,
    replication: ReplicationSupervisor,
}

impl Service {
    pub(super) fn new(
        options: NodeOptions,
        has_priority: Arc<AtomicBool>,
        min_term_until: Option<Instant>,
        listener: ChannelListener,
        bell: Arc<WakeFd>,
        is_over: Arc<AtomicBool>,
    ) -> Result<Self> {
        let mut service = Self {
            admission: Admission::new(listener, &bell)?,
            broker: Broker::new(Registry::new(options.budgets)),
            options,
            has_priority,
            min_term_until,
            identity: NodeId::random()?,
            bell,
            is_over,
            has_failed: false,
            served_node: None,
            reclaimer: Reclaimer::new(),
            takeover: None,
            eviction_monitor: EvictionMonitor::default(),
            replication: ReplicationSupervisor::new(),
        };
        if !service.create_if_empty()? {
            let node = MemberLock::read_node_id(SERVING, &service.options.directory)?;
            service.takeover = Some(Takeover::begin(Instant::now(), node));
        }
        Ok(service)
    }

    /// Serves until the service is over, or its directory was removed. True if it failed.
    pub(super) fn serve(mut self, is_in_place: impl Fn() -> bool) -> bool {
        let mut next_check = Instant::now();
        while !self.is_over.load(Ordering::Acquire) {
            let now = Instant::now();
            if now >= next_check {
                next_check = now + DIRECTORY_CHECK_INTERVAL;
                if !is_in_place() {
                    tracing::error!(
                        directory = %self.options.directory.display(),
                        "the directory of the node was removed or replaced: the node ends, and its \
                         processes have to join again"
                    );
                    break;
                }
            }
            self.run_once();
        }
        let has_failed = self.has_failed;
        self.close();
        has_failed
    }

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
        let pending_clients = self.admission.take_pending();
        for (pending_client, is_ready) in pending_clients.into_iter().zip(ready.pending_clients) {
            let first_message = self.admission.first_message(pending_client, is_ready);
            if let Some((connection, request, descriptors)) = first_message {
                self.handle_first_message(connection, request, descriptors);
            }
        }
        for participant in ready.clients {
            self.handle_messages(participant);
        }
        if ready.listener {
            self.admission.accept(&self.bell);
        }
        self.do_periodic_work();
    }

    fn do_periodic_work(&mut self) {
        for participant in self.broker.flush_stalled() {
            self.handle_disconnect(participant);
        }
        self.advance_takeover();
        if self.takeover.is_some() {
            // Other nodes see this service, and keep its topics and messages, though it cannot
            // announce its topics yet.
            self.start_replication();
        } else {
            self.find_dead();
            self.reclaim_all();
            if let Some(served_node) = &self.served_node {
                self.broker.check_growth(&served_node.caller());
            }
            self.run_replication();
            self.evict();
        }
    }

    fn max_poll_timeout(&self) -> Duration {
        let polls = self.takeover.is_some()
            || self.reclaimer.must_poll()
            || self.broker.is_growing()
            || self.admission.connections().next().is_some()
            || self.broker.connections().any(|(_, it)| it.must_poll())
            || self.broker.registry().unused().next().is_some();
        let longest = if polls { POLL_INTERVAL } else { MAX_SLEEP };
        let waits = [self.eviction_monitor.max_poll_timeout(), self.replication.max_poll_timeout()];
        waits.into_iter().flatten().fold(longest, Duration::min)
    }

    fn wait(&self) -> Option<Ready> {
        fn entry(descriptor: BorrowedFd<'_>) -> PollFd<'_> {
            PollFd::new(descriptor, PollFlags::POLLIN)
        }
        let mut entries = vec![entry(self.bell.as_fd()), entry(self.admission.as_fd())];
        let pending_clients: Vec<_> = self.admission.connections().collect();
        let (clients, connections): (Vec<_>, Vec<_>) = self.broker.connections().unzip();
        for connection in pending_clients.iter().chain(&connections) {
            let mut flags = PollFlags::POLLIN;
            flags.set(PollFlags::POLLOUT, connection.has_queued());
            entries.push(PollFd::new(connection.as_fd(), flags));
        }
        let (watched, pidfds): (Vec<_>, Vec<_>) = self.reclaimer.pidfds().unzip();
        entries.extend(pidfds.iter().map(|pidfd| entry(pidfd.as_fd())));
        // Messages of other nodes are handled once all members have rejoined.
        let replicator = self.replication.replicator().filter(|_| self.takeover.is_none());
        entries.extend(replicator.into_iter().flat_map(|it| it.descriptors()).map(entry));
        let timeout = PollTimeout::try_from(self.max_poll_timeout()).unwrap_or(PollTimeout::ZERO);
        match poll(&mut entries, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(_) => return None,
        }
        let mut is_ready = entries.iter().map(|entry| entry.any().unwrap_or(true));
        let (bell, listener) = (is_ready.next()?, is_ready.next()?);
        let pending_clients = is_ready.by_ref().take(pending_clients.len()).collect();
        let mut readable = |participants: Vec<Participant>| -> Vec<_> {
            let found = participants.into_iter().zip(is_ready.by_ref());
            found.filter(|(_, is_readable)| *is_readable).map(|(it, _)| it).collect()
        };
        let (clients, dead) = (readable(clients), readable(watched));
        Some(Ready { bell, listener, pending_clients, clients, dead })
    }

    fn create_if_empty(&mut self) -> Result<bool> {
        let directory = &self.options.directory;
        if MemberLock::is_held(SERVING, directory)? {
            return Ok(false);
        }
        let before = MemberLock::read_node_id(SERVING, directory)?;
        MemberLock::write_node_id(SERVING, directory, Some(self.identity))?;
        if MemberLock::is_held(SERVING, directory)? {
            // A process that the last service admitted has just become a member. It reads the
            // identity after it has locked, so it has seen one of the two.
            MemberLock::write_node_id(SERVING, directory, before)?;
            return Ok(false);
        }
        self.attach_segment(NodeSegment::create(self.identity)?)?;
        Ok(true)
    }

    /// Re-creates the node, even if processes still hold its old segment.
    fn recreate(&mut self) -> Result<()> {
        MemberLock::write_node_id(SERVING, &self.options.directory, Some(self.identity))?;
        self.attach_segment(NodeSegment::create(self.identity)?)
    }

    fn attach_segment(&mut self, node_segment: NodeSegment) -> Result<()> {
        let pidfd = || PidFd::of_this_process().during(SERVING);
        let (own, watched) = (pidfd()?, pidfd()?);
        let participants = Arc::clone(node_segment.participants());
        let Some(me) = participants.admit(pidfd()?) else {
            let detail = format!("the node already has {} members", Participant::SLOTS);
            return Err(Error::new(SERVING, ErrorKind::TooMany, detail));
        };
        self.reclaimer.watch(me, watched);
        let number = node_segment.next_service_number();
        let node_segment = Arc::new(node_segment);
        self.served_node = Some(ServedNode { node_segment, me, participants, number, pidfd: own });
        self.load_network_options();
        Ok(())
    }

    /// Ends the service in order: members find another one.
    fn close(mut self) {
        let has_workers = self.replication.end();
        // The next service completes a takeover.
        let takeover = self.takeover.take();
        if has_workers {
            // An abandoned worker may still act as a participant of this service, which therefore
            // remains until the process ends.
            tracing::warn!(
                "a worker still runs: the next service reclaims after this one once this process \
                 has exited"
            );
        } else if let Some(served_node) = &self.served_node {
            match self.broker.registry().reclaim(&served_node.caller(), served_node.me) {
                Ok(()) => drop(served_node.participants.free_slot(served_node.me)),
                Err(error) => {
                    tracing::debug!(%error, "the next service reclaims after this one");
                    served_node.participants.leave(served_node.me);
                }
            }
        }
        // The socket is removed first, so that no process connects to an ended service.
        let pending_clients = self.admission.close();
        self.broker.end_connections();
        let joining_clients = takeover.into_iter().flat_map(Takeover::into_connections);
        for mut connection in joining_clients.chain(pending_clients) {
            connection.end();
        }
    }
}

struct Ready {
    bell: bool,
    listener: bool,
    pending_clients: Vec<bool>,
    clients: Vec<Participant>,
    dead: Vec<Participant>,
}
