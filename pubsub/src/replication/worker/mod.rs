//! A thread that owns an endpoint, and sends and receives messages of topics through it.

mod doorbell;
mod endpoint;
mod event_loop;
mod ready_queue;
mod ready_state;
mod topics;

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, bounded, unbounded};
use fabric::{Offer, Policy};
use transfer::path::DeviceFabric;

pub use doorbell::Announcer;
use doorbell::WorkerDoorbell;
use endpoint::WorkerEndpoint;
pub(crate) use endpoint::choose_provider;
use endpoint::{RingEnds, RingExtent};
use event_loop::WorkerLoop;

use super::{
    ConnectionMessage, DestinationCounters, DirectWriter, InboundCounters, MAX_PREFIX_LENGTH,
    NodeId, Provider, Side, Sink, Source, TopicParameters,
};
use crate::error::{Error, ErrorKind, Result};
use crate::wake::WakeFd;

/// Limit of queued commands for messages and questions, which can be repeated. The senders of other
/// commands limit what other nodes can cause.
const MAX_QUEUED_COMMANDS: usize = 1024;
const MIN_RING_SIZE: u64 = 64 << 10;
/// Limit of pieces that a further lane writes from.
const SLOTS_PER_LANE: usize = 8;
/// How long a dropped worker may take to end.
const JOIN_TIMEOUT: Duration = Duration::from_secs(5);
const CONNECT: &str = "connect topic to node";
const RENEW: &str = "renew endpoint";
const ENDED: &str = "the thread ended";

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The key of a topic, chosen by the user of the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TopicKey(pub u64);

/// Options of a worker.
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// Which providers to use.
    pub policy: Policy,
    /// The largest ring in bytes; each further lane adds as much.
    pub ring: u64,
    /// Bytes of a chunk, and of a staged piece.
    pub chunk: u64,
    /// Staging slots of one topic.
    pub slots: usize,
    /// Staging slots of all topics, beside the first one of each.
    pub max_slots: usize,
    /// Lanes for large messages, each a thread with its own connection; 0: as many as the provider
    /// and the cores allow. Limited by the cores that other workers leave, and by the lanes of the
    /// other node.
    pub lanes: usize,
    /// How long it polls without events before it sleeps.
    pub spin: Duration,
    /// Timeout for a device's copy, and for a node's answer.
    pub timeout: Duration,
    /// Permission for rings to lie in device memory.
    pub device_fabric: DeviceFabric,
    /// An offer to be used instead of one of [`policy`](Self::policy).
    pub offer: Option<Offer>,
}

impl Default for WorkerOptions {
    fn default() -> Self {
        Self {
            policy: Policy::default(),
            ring: 8 << 20,
            chunk: 512 << 10,
            slots: 8,
            max_slots: 64,
            lanes: 0,
            spin: Duration::from_micros(50),
            timeout: Duration::from_secs(10),
            device_fabric: DeviceFabric::default(),
            offer: None,
        }
    }
}

impl WorkerOptions {
    /// Slots of a topic whose messages use this number of lanes.
    pub fn slots_for(&self, lanes: usize) -> usize {
        self.slots + SLOTS_PER_LANE * lanes.saturating_sub(1)
    }

    /// Bytes of the ring of such a topic over this number of lanes: all queued messages with their
    /// headers, limited to the share of one topic; a power of two.
    pub fn ring_size_for(&self, lanes: usize, largest: u64, depth: u32) -> u64 {
        let most = self.ring.saturating_mul(lanes.max(1) as u64).max(MIN_RING_SIZE);
        let each = largest.saturating_add(2 * MAX_PREFIX_LENGTH as u64);
        let capacity = each.saturating_mul(depth.max(2).into()).clamp(MIN_RING_SIZE, most);
        1 << capacity.ilog2()
    }
}

/// Options of an outbound topic.
#[derive(Debug, Clone)]
pub struct TopicOptions {
    /// The topic's parameters.
    pub parameters: TopicParameters,
    /// The device of its source's memory; None: of the host.
    pub device: Option<gpu::Device>,
    /// Messages retained for lagging nodes, which miss the oldest ones; None: all are retained, and
    /// the source is blocked.
    pub max_retained: Option<usize>,
}

/// Counters of a worker.
#[derive(Debug, Clone, Default)]
pub struct Counters {
    /// For each topic that is sent, and node that wants it.
    pub sent: Vec<(TopicKey, NodeId, DestinationCounters)>,
    /// For each topic that is received, and node that sends it.
    pub received: Vec<(TopicKey, NodeId, InboundCounters)>,
    /// Why messages of these topics on devices are received through the host.
    pub staged: Vec<(TopicKey, NodeId, String)>,
    /// Bytes of closed rings that are quarantined until the endpoint is closed, since writes into
    /// them may be in flight.
    pub quarantined_bytes: u64,
    /// How often it replaced its endpoint.
    pub renewals: u64,
    /// How often it went to sleep.
    pub sleeps: u64,
}

/// A command to a worker.
#[allow(missing_debug_implementations)]
pub enum Command {
    /// Sends a topic's messages to the added destinations.
    AddOutbound(TopicKey, TopicOptions, Box<dyn Source>),
    /// Stops sending a topic, delivered or not.
    StopOutbound(TopicKey),
    /// A node wants a topic: messages from now on are retained until it has them, or is removed. A
    /// message to it is reported as an event. To be repeated after a
    /// [disconnection](WorkerEvent::Disconnected), as soon as a receiver of the message is
    /// connected. It has no effect while messages flow: a restarted node has to be reported lost
    /// first.
    AddDestination(TopicKey, NodeId),
    /// A node does not want a topic any more, or is gone for good.
    RemoveDestination(TopicKey, NodeId),
    /// Receives a topic's messages from a node.
    AddInbound(TopicKey, NodeId, Box<InboundTopicOptions>),
    /// Stops receiving a topic.
    StopInbound(TopicKey, NodeId),
    /// A connection message of a node, which its worker [reported](WorkerEvent::ControlMessage).
    ControlMessage(TopicKey, NodeId, ConnectionMessage),
    /// A node disconnected: all its connections are lost, and no answer is waited for. Messages
    /// retained for it stay.
    NodeLost(NodeId),
    /// A node returned after its link was down: its connections restart, through another endpoint
    /// if no other node is connected, or if others returned, too.
    NodeReturned(NodeId),
    /// [Reports](WorkerEvent::Lagging) each node that lacks the oldest retained message of a topic,
    /// or is not connected.
    ReportLagging(TopicKey),
    /// Sends the counters.
    GetCounters(Sender<Counters>),
    /// Ends the worker.
    Stop,
}

/// An event of a worker: the topic by its key here, and the other node.
#[derive(Debug)]
pub enum WorkerEvent {
    /// A connection message about a topic, for a node's worker.
    ControlMessage { key: TopicKey, node: NodeId, message: ConnectionMessage },
    /// Messages of a topic flow; `side` is the local side.
    Connected { key: TopicKey, node: NodeId, side: Side },
    /// The connection ended. No message is lost: [`AddDestination`](Command::AddDestination)
    /// starts a new one.
    Disconnected { key: TopicKey, node: NodeId, side: Side, reason: Error },
    /// A node blocks a topic, as requested by [`ReportLagging`](Command::ReportLagging).
    Lagging { key: TopicKey, node: NodeId },
    /// A topic cannot be sent, not to a node (None: to none), or not be received, and a retry would
    /// fail, too: a source, a sink or a device failed, or the nodes are incompatible.
    Failed { key: TopicKey, node: Option<NodeId>, side: Side, error: Error },
}

/// The worker's end of its events. The receiver is woken when it is dropped, for any reason.
#[derive(Debug)]
struct WorkerEvents {
    /// Dropped before the bell rings for the last time, so that the receiver sees the end.
    sender: Option<Sender<WorkerEvent>>,
    bell: Arc<WakeFd>,
}

impl WorkerEvents {
    fn send(&self, event: WorkerEvent) {
        if let Some(sender) = &self.sender {
            // The receiver may have been dropped.
            let _ = sender.send(event);
        }
        self.bell.ring();
    }
}

impl Drop for WorkerEvents {
    fn drop(&mut self) {
        self.sender = None;
        self.bell.ring();
    }
}

#[derive(Debug, Clone)]
struct ConnectRequest {
    connection: u64,
    parameters: TopicParameters,
    /// The address of its endpoint.
    from: Vec<u8>,
    /// Addresses of further lanes that it could write from.
    lane_addresses: Vec<Vec<u8>>,
    /// What it says about writing to device memory.
    direct: Option<DirectWriter>,
}

/// How a topic is received: from the first position that this node lacks.
#[allow(missing_debug_implementations)]
pub struct InboundTopicOptions {
    from: u64,
    device: Option<gpu::Device>,
    sink: Box<dyn Sink>,
}

/// A thread that owns an endpoint, and moves topics' messages through it.
///
/// A worker reports [`WorkerEvent`]s. Connection messages among them are for the worker of the same
/// topic at another node, to be passed there as [`Command::ControlMessage`].
#[derive(Debug)]
pub struct Worker {
    commands: Sender<Command>,
    doorbell: Arc<WorkerDoorbell>,
    events: Receiver<WorkerEvent>,
    bell: Arc<WakeFd>,
    finished: Receiver<()>,
    provider: Provider,
    address: Vec<u8>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Opens an endpoint at a local address, and starts the thread.
    pub fn start(options: WorkerOptions, local: IpAddr) -> Result<Self> {
        Self::start_among(options, local, 1)
    }

    /// Starts a worker that shares the cores with others.
    pub(super) fn start_among(
        options: WorkerOptions,
        local: IpAddr,
        workers: usize,
    ) -> Result<Self> {
        let operation = "start replication worker";
        if options.chunk < 4096 || options.ring < 64 << 10 || options.slots == 0 {
            let detail = "chunks of at least 4 KiB, rings of at least 64 KiB, at least one slot";
            return Err(Error::new(operation, ErrorKind::InvalidArgument, detail));
        }
        let (mut endpoint, provider) = WorkerEndpoint::open(&options, local, workers)?;
        let address = endpoint.address().to_vec();
        let (commands, ordered) = unbounded();
        let bell = Arc::new(WakeFd::new().map_err(|error| Error::of(operation, error))?);
        let (sender, events) = unbounded();
        let reported = WorkerEvents { sender: Some(sender), bell: Arc::clone(&bell) };
        let (finish, finished) = bounded::<()>(1);
        let doorbell = Arc::new(WorkerDoorbell::new(endpoint.waker()));
        let mut worker_loop =
            WorkerLoop::new(options, endpoint, ordered, reported, Arc::clone(&doorbell));
        let thread = threads::spawn("fabricast-repl", move || {
            // Dropped at the end of the thread, for any reason.
            let _finish = finish;
            worker_loop.run();
            worker_loop.close();
        });
        let thread = Some(thread.map_err(|error| Error::of(operation, error))?);
        Ok(Self { commands, doorbell, events, bell, finished, provider, address, thread })
    }

    /// The provider of its endpoint.
    pub fn provider(&self) -> &Provider {
        &self.provider
    }

    /// The address of its first endpoint. It may be replaced later by another one of the same
    /// provider, which connection messages announce to its peers.
    pub fn address(&self) -> &[u8] {
        &self.address
    }

    /// Sends a topic's messages to [added](Command::AddDestination) nodes. Returns the announcer of
    /// its messages.
    pub fn send_topic(
        &self,
        key: TopicKey,
        options: TopicOptions,
        source: Box<dyn Source>,
    ) -> Result<Announcer> {
        let announcer = Announcer::new(&self.doorbell, key);
        self.send(Command::AddOutbound(key, options, source))?;
        Ok(announcer)
    }

    /// Receives a topic's messages from a node, from the first position that this node lacks.
    /// `device` is the device of the sink's memory, if any.
    pub fn receive_topic(
        &self,
        key: TopicKey,
        origin: NodeId,
        from: u64,
        device: Option<gpu::Device>,
        sink: Box<dyn Sink>,
    ) -> Result<()> {
        let inbound_options = InboundTopicOptions { from, device, sink };
        self.send(Command::AddInbound(key, origin, Box::new(inbound_options)))
    }

    /// Requests its counters, which arrive later.
    pub fn request_counters(&self) -> Result<Receiver<Counters>> {
        let (sender, receiver) = bounded(1);
        self.send(Command::GetCounters(sender))?;
        Ok(receiver)
    }

    /// The next event, if any.
    pub fn try_event(&self) -> Result<Option<WorkerEvent>> {
        self.bell.silence();
        match self.events.try_recv() {
            Ok(event) => Ok(Some(event)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(refused(ErrorKind::Closed, ENDED)),
        }
    }

    /// Readable when there may be [events](Self::try_event): read until there are none.
    pub fn wake_descriptor(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Ends the thread, as a failure would.
    #[cfg(test)]
    pub(crate) fn stop_for_test(&self) {
        let _ = self.send(Command::Stop);
    }

    /// Sends a command. Repeatable commands are refused while the queue is full.
    pub fn send(&self, command: Command) -> Result<()> {
        let is_repeatable = matches!(
            command,
            Command::ControlMessage(..) | Command::ReportLagging(_) | Command::GetCounters(_)
        );
        if is_repeatable && self.commands.len() >= MAX_QUEUED_COMMANDS {
            return Err(refused(ErrorKind::TooMany, "the command queue is full"));
        }
        let sent = self.commands.send(command);
        self.doorbell.ring();
        sent.map_err(|_| refused(ErrorKind::Closed, ENDED))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.send(Command::Stop);
        // A provider may hang; then the thread and all it owns are abandoned.
        if let Err(RecvTimeoutError::Disconnected) = self.finished.recv_timeout(JOIN_TIMEOUT)
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

#[cold]
fn refused(kind: ErrorKind, detail: &str) -> Error {
    Error::new("use replication worker", kind, detail)
}
