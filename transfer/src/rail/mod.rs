//! Rails: fabrics that carry the bytes of agents without shared memory.
//!
//! Each rail is one domain of one provider with its own thread, which posts, polls, answers peers,
//! and submits copies of memory that the fabric cannot access. The agent sends commands and
//! receives events. [`message`] is the protocol between rails, and [`reliable_window`] its reliable
//! delivery; these know no fabric. [`registration_cache`] caches registrations. [`probe`]
//! tries whether the fabric accesses device memory itself.
//!
//! The thread's loop is in [`driver`]. It owns the [`io`], with the [`staging`] of device memory,
//! and the roles as [`initiator`] and as [`target`] of peers. A role gets the io as an argument,
//! and does not know the other role.

mod driver;
mod initiator;
mod io;
mod message;
#[cfg(test)]
mod pair_tests;
mod probe;
#[cfg(test)]
mod probe_tests;
mod registration_cache;
mod release_worker;
mod reliable_window;
mod session;
mod staging;
mod target;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fabric::{Capabilities, Caps, Domain, MemoryRegion, Offer, RemoteMemory, Waker};
use gpu::Memory;
use serde::{Deserialize, Serialize};
use threads::lock;

use crate::blocks::BlockQueue;
use crate::device_memory::{FabricFacts, WrittenDevices};
use crate::error::{Context, Error, ErrorKind, Result, failed};
use crate::notice::Notice;
use crate::operations::Token;
use crate::path::{DeviceFabric, Operation};
use crate::region::{Buffer, RegisteredRegion};

pub(crate) use driver::Driver;
pub(crate) use initiator::{DirectRequest, PROBE_TIMEOUT};
pub(crate) use registration_cache::CacheLimits;
use registration_cache::RegistrationCache;

const START: &str = "start rail";
/// A rail answers at once, unless its provider hangs.
const RAIL_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy)]
pub(crate) struct RailOptions {
    /// A silent peer is lost after this time.
    pub(crate) lost_after: Duration,
    /// Limits of the cache of local-only registrations.
    pub(crate) cached: CacheLimits,
    /// Registers local-only memory even if the provider does not require it.
    pub(crate) always_registers: bool,
    /// Permission for the fabric to access device memory itself.
    pub(crate) device_fabric: DeviceFabric,
}

impl Default for RailOptions {
    fn default() -> Self {
        // Half a minute of registering, and more buffers than engines usually have.
        let cached = CacheLimits { bytes: 64 << 30, count: 1024 };
        let device_fabric = DeviceFabric::default();
        Self { lost_after: Duration::from_secs(5), cached, always_registers: false, device_fabric }
    }
}

/// The agent of a rail, which is the target of its peers.
pub(crate) trait RailOwner: Send + Sync {
    fn identity(&self) -> [u8; 16];

    fn label(&self) -> &str;

    /// The region with this number, if the ticket is right.
    fn find_region(&self, number: u64, ticket: u64) -> Option<Arc<RegisteredRegion>>;

    /// Devices whose memory peers may write to.
    fn written_devices(&self) -> &WrittenDevices;

    /// Wakes the agent's thread, which takes the events.
    fn wake(&self);
}

/// The memory of a transfer on this side.
#[derive(Debug, Clone)]
pub(crate) enum LocalSide {
    /// Registered with the fabric.
    Registered(MemoryRegion),
    /// Copied by a device through slots.
    Device(Memory),
}

/// The memory of a transfer on the other side.
#[derive(Clone)]
pub(crate) struct RemoteSide {
    pub(crate) region: u64,
    pub(crate) ticket: u64,
    /// None if the peer copies through its slots.
    pub(crate) memory: Option<RemoteMemory>,
}

/// The answer to a request for direct access.
#[derive(Debug, Clone)]
pub(crate) enum DirectOutcome {
    /// With the key of device memory; host memory has its key in the descriptor. And was it probed?
    Granted { memory: Option<RemoteMemory>, is_probed: bool },
    /// The peer does not grant it, for this reason.
    Refused { kind: ErrorKind, cause: String },
    /// The probe failed. If that is not final, it was not over in time, or could not be made.
    Failed { cause: String, is_final: bool },
    /// The link was lost meanwhile.
    Lost { cause: String },
}

/// Without ticket and key, because routes may be printed.
impl fmt::Debug for RemoteSide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteSide(region {}, staged: {})", self.region, self.memory.is_none())
    }
}

/// The agent to connect to, and its address.
#[derive(Debug, Clone)]
pub(crate) struct LinkTarget {
    pub(crate) identity: [u8; 16],
    pub(crate) address: Vec<u8>,
    /// Number that all rails to one peer share.
    pub(crate) connection_id: u64,
}

/// A chunk that the target copies to or from staging memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Chunk {
    /// Chosen by the initiator; the reply repeats it.
    number: u64,
    region: u64,
    ticket: u64,
    /// Index of the slot in the target's staging memory.
    slot: u32,
    /// Offset in the region.
    offset: u64,
    length: u64,
}

/// A transfer, or a notice without data.
#[derive(Debug)]
pub(crate) struct RailRequest {
    pub(crate) link: u32,
    pub(crate) token: Token,
    pub(crate) notice: Option<Notice>,
    pub(crate) bytes: Option<RailTransfer>,
}

#[derive(Debug)]
pub(crate) struct RailTransfer {
    pub(crate) operation: Operation,
    pub(crate) local: LocalSide,
    pub(crate) remote: RemoteSide,
    pub(crate) blocks: BlockQueue,
    /// How often its rails were lost.
    pub(crate) reroutes: u32,
    /// Kept until the last byte is copied.
    pub(crate) region: Arc<RegisteredRegion>,
}

/// A request in the queue of the rail's thread. It is returned if the thread ends first.
struct QueuedRequest {
    request: Option<RailRequest>,
    shared: Arc<RailShared>,
}

impl Drop for QueuedRequest {
    fn drop(&mut self) {
        if let Some(request) = self.request.take() {
            let cause = "the rail's thread has ended".to_owned();
            self.shared.report(RailEvent::Returned { request: Box::new(request), cause });
        }
    }
}

/// A command for the rail's thread.
type Command = Box<dyn FnOnce(&mut Driver) + Send>;

#[derive(Debug)]
pub(crate) enum RailEvent {
    /// The link is connected, and all known regions are open. Also after an automatic reconnect.
    Up {
        link: u32,
    },
    /// The peer does not answer (any more), is another agent, or has closed its agent or rail.
    Down {
        link: u32,
        error: Error,
        is_closed: bool,
    },
    /// The outcome of opening a region with this ticket, now or again in a new session.
    Opened {
        link: u32,
        region: (u64, u64),
        outcome: Result<()>,
    },
    /// The outcome of a request for direct access to the region with this number.
    Direct {
        link: u32,
        region: u64,
        outcome: DirectOutcome,
    },
    Done {
        token: Token,
        outcome: Result<()>,
    },
    /// The link was lost; the rest of the request is not in flight.
    Returned {
        request: Box<RailRequest>,
        cause: String,
    },
    /// A known region was withdrawn.
    Withdrawn {
        link: u32,
        region: u64,
    },
    /// An initiator opened a session.
    SessionOpened {
        session: u64,
        from: [u8; 16],
        connection_id: u64,
        label: String,
    },
    /// A session closed cleanly, or was lost for this reason.
    SessionClosed {
        session: u64,
        lost: Option<String>,
    },
    Notice {
        session: u64,
        from: [u8; 16],
        notice: Notice,
    },
}

/// State shared by an agent and its rail.
#[derive(Debug)]
pub(crate) struct RailShared {
    /// Index of the rail at the agent.
    number: usize,
    device_fabric: DeviceFabric,
    registers_devices: bool,
    /// Why its endpoint refuses direct transfers of device memory, if it does.
    device_refusal: OnceLock<String>,
    rail_events: Mutex<VecDeque<RailEvent>>,
    /// Withdrawn regions that peers may still access, with the labels of these peers.
    retiring: Mutex<HashMap<u64, Vec<String>>>,
    /// Registrations of local-only memory.
    registration_cache: Mutex<RegistrationCache>,
    /// Serialises registrations of local-only memory, so that the cache keeps its limits.
    registration_lock: Mutex<()>,
    is_over: AtomicBool,
    /// The thread has ended, and reports nothing more.
    has_ended: AtomicBool,
    /// The thread ended while a device was copying.
    may_copy: AtomicBool,
}

impl RailShared {
    fn new(number: usize, settings: &RailOptions, facts: &Capabilities) -> Self {
        Self {
            number,
            device_fabric: settings.device_fabric,
            registers_devices: facts.caps.contains(Caps::DEVICE_MEMORY),
            device_refusal: OnceLock::new(),
            rail_events: Mutex::default(),
            retiring: Mutex::default(),
            registration_cache: Mutex::new(RegistrationCache::new(settings, facts)),
            registration_lock: Mutex::default(),
            is_over: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            may_copy: AtomicBool::new(false),
        }
    }

    /// What the registration of device memory depends on.
    fn device_facts(&self) -> FabricFacts {
        let refusal = self.device_refusal.get().cloned();
        FabricFacts::new(self.device_fabric, self.registers_devices, refusal)
    }

    /// Reports an event, unless the agent has ended. An unread event would leak the regions of its
    /// request: they hold handles of the rails, which hold this queue.
    fn report(&self, event: RailEvent) {
        let mut rail_events = lock(&self.rail_events);
        if !self.is_over.load(Ordering::Acquire) {
            rail_events.push_back(event);
        }
        // The lock is released before an event that was not reported is dropped.
    }
}

/// A handle for sending commands to a rail from any thread.
#[derive(Debug, Clone)]
pub(crate) struct RailHandle {
    commands: Sender<Command>,
    shared: Arc<RailShared>,
    waker: Waker,
    domain: Domain,
}

impl RailHandle {
    pub(crate) fn send_command(&self, command: impl FnOnce(&mut Driver) + Send + 'static) {
        let _ = self.commands.send(Box::new(command));
        // If waking fails, the thread polls soon anyway.
        let _ = self.waker.wake();
    }

    pub(crate) fn begin_request(&self, request: RailRequest) {
        let mut queued = QueuedRequest { request: Some(request), shared: Arc::clone(&self.shared) };
        self.send_command(move |driver| {
            if let Some(request) = queued.request.take() {
                driver.begin_request(request);
            }
        });
    }

    /// Withdraws a region: peers are notified, and its memory is kept until they confirm.
    pub(crate) fn retire(&self, region: u64, memory: Option<MemoryRegion>, buffer: Buffer) {
        lock(&self.shared.retiring).insert(region, vec!["the rail".to_owned()]);
        self.send_command(move |driver| driver.retire(region, memory, buffer));
    }

    pub(crate) fn device_facts(&self) -> FabricFacts {
        self.shared.device_facts()
    }

    /// The label of a peer that may still access a withdrawn region.
    pub(crate) fn region_user(&self, region: u64) -> Option<String> {
        if self.shared.has_ended.load(Ordering::Acquire) {
            return None;
        }
        lock(&self.shared.retiring).get(&region).and_then(|labels| labels.first().cloned())
    }
}

/// A fabric and its thread.
#[derive(Debug)]
pub(crate) struct Rail {
    pub(crate) handle: RailHandle,
    address: Vec<u8>,
    thread: Option<JoinHandle<()>>,
}

impl Rail {
    /// Opens the domain of an offer, and starts its thread.
    pub(crate) fn start(
        offer: &Offer,
        agent: Arc<dyn RailOwner>,
        number: usize,
        settings: RailOptions,
    ) -> Result<Self> {
        let domain = Domain::open(offer).during(START)?;
        let shared = Arc::new(RailShared::new(number, &settings, domain.capabilities()));
        let (commands, command_queue) = channel();
        let driver = Driver::new(&domain, Arc::clone(&shared), agent, settings, command_queue)?;
        let address = driver.address().to_vec();
        let waker = driver.waker();
        let name = format!("fabricast-rail-{number}");
        let thread = threads::spawn(&name, move || driver.serve()).map_err(failed(START))?;
        let handle = RailHandle { commands, shared, waker, domain };
        Ok(Self { handle, address, thread: Some(thread) })
    }

    pub(crate) fn domain(&self) -> &Domain {
        &self.handle.domain
    }

    /// The provider that the peer must have too.
    pub(crate) fn provider(&self) -> &str {
        self.domain().capabilities().wire_name()
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.handle.shared.has_ended.load(Ordering::Acquire)
    }

    pub(crate) fn has_events(&self) -> bool {
        !lock(&self.handle.shared.rail_events).is_empty()
    }

    /// Takes the pending events.
    pub(crate) fn rail_events(&self, into: &mut VecDeque<RailEvent>) {
        let mut rail_events = lock(&self.handle.shared.rail_events);
        if into.is_empty() {
            std::mem::swap(&mut *rail_events, into);
        } else {
            into.append(&mut rail_events);
        }
    }

    /// The address of its endpoint.
    pub(crate) fn address(&self) -> &[u8] {
        &self.address
    }

    /// Ends the threads of all rails, and waits for them at most until `end`. Threads that hang in
    /// their provider are detached. Returns the providers that may still access memory of the
    /// agent.
    pub(crate) fn close_all(rails: &mut Vec<Self>, end: Instant) -> Vec<String> {
        rails.iter().for_each(Self::end);
        let may_copy = |mut rail: Self| {
            let has_ended = rail.join(end) && !rail.handle.shared.may_copy.load(Ordering::Acquire);
            (!has_ended).then(|| rail.provider().to_owned())
        };
        rails.drain(..).filter_map(may_copy).collect()
    }

    fn end(&self) {
        self.handle.shared.is_over.store(true, Ordering::Release);
        let _ = self.handle.waker.wake();
    }

    /// False if its thread is still running.
    fn join(&mut self, end: Instant) -> bool {
        let Some(thread) = self.thread.take() else { return true };
        while !thread.is_finished() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        let has_ended = thread.is_finished();
        if has_ended {
            let _ = thread.join();
        } else {
            tracing::warn!(provider = self.provider(), "thread of a rail did not end in time");
        }
        // Events from before the end.
        let unread = std::mem::take(&mut *lock(&self.handle.shared.rail_events));
        // Their requests may report events when they are dropped, so the lock is released before.
        drop(unread);
        has_ended
    }

    /// The thread belongs to the parent process.
    pub(crate) fn forget(mut self) {
        std::mem::forget(self.thread.take());
    }
}

impl Drop for Rail {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.end();
            self.join(Instant::now() + RAIL_TIMEOUT);
        }
    }
}
