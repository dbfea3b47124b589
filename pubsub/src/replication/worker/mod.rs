//! A thread that owns an endpoint, and moves topics' messages through it.

mod commands;
mod connections;
mod doorbell;
mod endpoint;
mod event_loop;
mod events;
mod node_faults;
mod renewal;
mod stall_detection;
mod teardown;
mod topic_table;

use std::collections::HashSet;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};
use fabric::Policy;

pub use doorbell::Announcer;
use doorbell::Doorbell;
pub(crate) use endpoint::check as check_provider;
use event_loop::WorkerLoop;
pub use events::WorkerEvent;
use events::WorkerEvents;

use super::{
    ConnectionMessage, DestinationCounters, InboundCounters, MAX_PREFIX_LENGTH, NodeId, Provider,
    Sink, Source, TopicParameters,
};
use crate::error::{Error, ErrorKind, Result};
use crate::wake::WakeFd;

/// Commands that may wait when a letter or a question comes, which can be asked again. Whoever gives
/// the others bounds what other nodes can cause.
const MAX_QUEUED_COMMANDS: usize = 1024;
/// The smallest ring.
const MIN_RING_SIZE: u64 = 64 << 10;
/// Pieces that a further lane writes from, at most.
const SLOTS_PER_LANE: usize = 8;
/// How long a worker that is dropped may take to end.
const JOIN_TIMEOUT: Duration = Duration::from_secs(5);

/// A topic, as whoever uses the worker numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TopicKey(pub u64);

/// How a worker works.
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// Which providers are wanted.
    pub policy: Policy,
    /// The most bytes of a ring; as many again for each further lane.
    pub ring: u64,
    /// Bytes of a chunk, and of a piece that is staged.
    pub chunk: u64,
    /// Slots for staging that one topic has.
    pub slots: usize,
    /// Slots that all have together, beside the first one of each.
    pub max_slots: usize,
    /// Lanes that large messages go by, each a thread with a connection of its own; 0: as many as
    /// the provider and the cores make sensible. No more than there are cores beside other workers,
    /// and no more than the other node has.
    pub lanes: usize,
    /// How long it looks for more when nothing happens, before it sleeps.
    pub spin: Duration,
    /// How long a device may take for a copy, and a node for an answer.
    pub timeout: Duration,
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
        }
    }
}

impl WorkerOptions {
    /// Slots that a topic has whose messages go by so many lanes.
    pub fn slots_for(&self, lanes: usize) -> usize {
        self.slots + SLOTS_PER_LANE * lanes.saturating_sub(1)
    }

    /// Bytes of the ring by which messages of such a topic come over so many lanes: as much as may
    /// wait, with room for headers, but no more than there is for one topic; a power of two.
    pub fn ring_size_for(&self, lanes: usize, largest: u64, depth: u32) -> u64 {
        let most = self.ring.saturating_mul(lanes.max(1) as u64).max(MIN_RING_SIZE);
        let each = largest.saturating_add(2 * MAX_PREFIX_LENGTH as u64);
        let capacity = each.saturating_mul(depth.max(2).into()).clamp(MIN_RING_SIZE, most);
        1 << capacity.ilog2()
    }
}

/// How a topic is sent.
#[derive(Debug, Clone, Copy)]
pub struct TopicOptions {
    /// What it is like.
    pub facts: TopicParameters,
    /// Messages that are kept for nodes that lag behind, which miss the oldest then; None: all are
    /// kept, and its source is held up.
    pub max_retained: Option<usize>,
}

/// What a worker did.
#[derive(Debug, Clone, Default)]
pub struct Counters {
    /// For each topic that is sent and node that wants it.
    pub sent: Vec<(TopicKey, NodeId, DestinationCounters)>,
    /// For each topic that is received, and node that it comes from.
    pub received: Vec<(TopicKey, NodeId, InboundCounters)>,
    /// Bytes of memory of rings whose writers are gone, which is kept since something may be on
    /// its way to it, until the endpoint is closed.
    pub quarantined_bytes: u64,
    /// Times that it closed its endpoint and opened another one.
    pub renewals: u64,
    /// Times that it went to sleep.
    pub sleeps: u64,
}

/// What a worker is told to do.
#[allow(missing_debug_implementations)]
pub enum Command {
    /// Sends a topic's messages to those that are added.
    AddOutbound(TopicKey, TopicOptions, Box<dyn Source>),
    /// Does not send it any more. What was not delivered was not.
    StopOutbound(TopicKey),
    /// A node wants a topic: what comes from now on is kept until it has it, or is removed. A letter
    /// to it is reported. To be told again after a [loss](Report::Lost), as soon as there is somebody
    /// to take the letter; while messages flow it does nothing, so a node that was started again is
    /// to be lost first.
    AddDestination(TopicKey, NodeId),
    /// A node does not want a topic any more, or is gone for good.
    RemoveDestination(TopicKey, NodeId),
    /// Receives a topic's messages from a node.
    AddInbound(TopicKey, NodeId, Box<InboundTopicOptions>),
    /// Does not receive it any more.
    StopInbound(TopicKey, NodeId),
    /// A letter of a node about a topic, which that node's worker [reported](Report::Letter).
    ControlMessage(TopicKey, NodeId, ConnectionMessage),
    /// A node is gone: all connections to it are lost, and nothing of it is waited for. What is kept
    /// for it stays.
    NodeLost(NodeId),
    /// A node is back whose link was down for a while: its connections begin anew, by another endpoint
    /// if no other node is connected, or others are back with it.
    NodeReturned(NodeId),
    /// Each node is [reported](Report::Behind) that does not have the oldest message of a topic that
    /// is kept, or is not connected.
    ReportLagging(TopicKey),
    /// Tells what it did so far.
    GetCounters(Sender<Counters>),
    /// Ends.
    Stop,
}

/// How a topic is received: from the first position that is not here.
#[allow(missing_debug_implementations)]
pub struct InboundTopicOptions {
    pub(super) from: u64,
    pub(super) device: Option<gpu::Device>,
    pub(super) sink: Box<dyn Sink>,
}

/// A thread that owns an endpoint, and moves topics' messages through it.
///
/// What it has to say comes as [`WorkerEvent`]s; letters among them are for the worker of the same
/// topic at another node, to be told there as [`Command::ControlMessage`].
#[derive(Debug)]
pub struct Worker {
    commands: Sender<Command>,
    doorbell: Arc<Doorbell>,
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

    /// The same, where so many share the cores.
    fn start_among(options: WorkerOptions, local: IpAddr, workers: usize) -> Result<Self> {
        let operation = "start a replication worker";
        if options.chunk < 4096 || options.ring < 64 << 10 || options.slots == 0 {
            let detail = "chunks of at least 4 KiB, rings of at least 64 KiB, at least one slot";
            return Err(Error::new(operation, ErrorKind::InvalidArgument, detail));
        }
        let opened = endpoint::open(&options.policy, local, options.lanes, workers)?;
        let (provider, address) = (opened.provider.clone(), opened.address.clone());
        let (commands, ordered) = unbounded();
        let (bell, events, told) = events::channel()?;
        let (finish, finished) = bounded::<()>(1);
        let mut engine =
            WorkerLoop::new(options, opened, ordered, WorkerEvents::new(events, &bell));
        let doorbell = engine.doorbell();
        let thread =
            std::thread::Builder::new().name("fabricast-repl".to_owned()).spawn(move || {
                // Whoever waits for the end hears of it, however it comes.
                let _finish = finish;
                engine.run();
                engine.close();
            });
        let thread = Some(thread.map_err(|error| Error::of(operation, error))?);
        Ok(Self { commands, doorbell, events: told, bell, finished, provider, address, thread })
    }

    /// What it carries messages by, for as long as it is there.
    pub fn provider(&self) -> &Provider {
        &self.provider
    }

    /// The address of its endpoint where it began. It may close that one day and open another one
    /// of the same provider, of which those that it writes to and reads from are told by letters.
    pub fn address(&self) -> &[u8] {
        &self.address
    }

    /// Sends a topic's messages to those that are [added](Command::Add). Gives what tells
    /// it that there are some.
    pub fn send_topic(
        &self,
        key: TopicKey,
        options: TopicOptions,
        source: Box<dyn Source>,
    ) -> Result<Announcer> {
        let announcer = Announcer::new(&self.doorbell, key);
        self.tell(Command::AddOutbound(key, options, source))?;
        Ok(announcer)
    }

    /// Receives a topic's messages from a node, from a position on: the first one that is not here.
    /// If the sink gives memory of a device, this one.
    pub fn receive_topic(
        &self,
        key: TopicKey,
        origin: NodeId,
        from: u64,
        device: Option<gpu::Device>,
        sink: Box<dyn Sink>,
    ) -> Result<()> {
        let reception = InboundTopicOptions { from, device, sink };
        self.tell(Command::AddInbound(key, origin, Box::new(reception)))
    }

    /// Asks what it did so far; the answer comes by itself.
    pub fn request_counters(&self) -> Result<Receiver<Counters>> {
        let (answer, answered) = bounded(1);
        self.tell(Command::GetCounters(answer))?;
        Ok(answered)
    }

    /// The next thing that it has to say, if there is one.
    pub fn try_report(&self) -> Result<Option<WorkerEvent>> {
        self.bell.silence();
        match self.events.try_recv() {
            Ok(report) => Ok(Some(report)),
            Err(crossbeam_channel::TryRecvError::Empty) => Ok(None),
            Err(crossbeam_channel::TryRecvError::Disconnected) => Err(ended()),
        }
    }

    /// Readable when there may be [reports](Self::try_report): to be taken until there are none.
    pub fn wake_descriptor(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Ends it, as if it could not go on.
    #[cfg(test)]
    pub(crate) fn ends(&self) {
        let _ = self.tell(Command::Stop);
    }

    /// Has the thread do this. What can be asked again is refused if it is far behind.
    pub fn tell(&self, command: Command) -> Result<()> {
        let can_wait = matches!(
            command,
            Command::ControlMessage(..) | Command::ReportLagging(_) | Command::GetCounters(_)
        );
        if can_wait && self.commands.len() >= MAX_QUEUED_COMMANDS {
            return Err(Error::new(
                "use a replication worker",
                ErrorKind::TooMany,
                "its command queue is full",
            ));
        }
        let told = self.commands.send(command);
        self.doorbell.ring();
        told.map_err(|_| ended())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.tell(Command::Stop);
        // A provider may hang; then the thread, and what it owns, stay behind.
        if let Err(RecvTimeoutError::Disconnected) = self.finished.recv_timeout(JOIN_TIMEOUT)
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

#[cold]
fn ended() -> Error {
    Error::new("use a replication worker", ErrorKind::Closed, "its thread ended")
}

/// Several workers, no more than there are cores: each topic has its place with one of them. The
/// first one has all lanes, and so those with large messages; the others do not wait for these.
#[derive(Debug)]
pub struct Workers {
    all: Vec<Worker>,
    /// Topics that are with the first one, since their messages may go by several lanes.
    large: HashSet<TopicKey>,
}

impl Workers {
    /// How many a node has on so many cores, if nobody says so: one carries half a million small
    /// messages a second, and more, and is in nobody's way while it sleeps.
    pub fn default_count(cores: usize) -> usize {
        (cores / 8).clamp(1, 4)
    }

    /// Starts so many, but no more than there are cores; 0: as many as are
    /// [sensible](Self::sensible).
    pub fn start(count: usize, options: &WorkerOptions, local: IpAddr) -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let count = match count {
            0 => Self::default_count(cores),
            count => count.min(cores),
        };
        let start = |number| {
            let lanes = if number == 0 { options.lanes } else { 1 };
            Worker::start_among(WorkerOptions { lanes, ..options.clone() }, local, count)
        };
        let all = (0..count).map(start).collect::<Result<_>>()?;
        Ok(Self { all, large: HashSet::new() })
    }

    /// Gives a topic that nothing was begun with its place, by the length of its longest message.
    pub fn place(&mut self, key: TopicKey, largest: u64) {
        match largest >= super::transport::MIN_STRIPED_LENGTH {
            true => self.large.insert(key),
            false => self.large.remove(&key),
        };
    }

    /// The worker of a topic.
    pub fn of(&self, key: TopicKey) -> &Worker {
        let place = if self.large.contains(&key) { 0 } else { key.0 % self.all.len() as u64 };
        &self.all[place as usize]
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = &Worker> {
        self.all.iter()
    }
}
