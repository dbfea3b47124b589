//! Rails: fabrics that carry the bytes of agents which share no memory.
//!
//! Each rail is one domain of one provider with a thread of its own, which posts, polls, answers
//! peers and has devices copy what the fabric cannot reach. The agent tells it what to do and is
//! told what became of it. [`message`] is what two rails say to each other and [`reliable_window`] sees to it
//! that it is heard, [`chunks`] is how a transfer is cut; none of them knows a fabric. [`registration_cache`] is what
//! stays registered.

mod chunks;
mod driver;
mod initiator;
mod links;
mod memory;
mod message;
#[cfg(test)]
mod pair_tests;
mod post;
mod registration_cache;
mod release_worker;
mod reliable_window;
mod session;
mod staging;
mod target;
mod target_replies;
mod tcp_probe;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fabric::{Capabilities, Caps, Domain, MemoryRegion, Offer, RemoteMemory, Waker};
use gpu::Memory;

use crate::agent::{FabricAddress, LocalTarget, Notice, RouteInner, Token};
use crate::blocks::BlockQueue;
use crate::error::{Error, ErrorKind, Result};
use crate::lock;
use crate::path::Operation;
use crate::region::Buffer;

pub(crate) use driver::Driver;
pub(crate) use memory::can_be_registered;
pub(crate) use registration_cache::CacheLimits;
use registration_cache::RegistrationCache;

const START: &str = "start a rail";
/// A rail answers at once, unless its provider hangs.
const RAIL_TIMEOUT: Duration = Duration::from_secs(10);

/// How a rail is to be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RailOptions {
    /// One that is not heard of for so long is.
    pub(crate) lost_after: Duration,
    /// What stays registered for own use.
    pub(crate) cached: CacheLimits,
    /// Registers memory for own use whether the provider asks for it or not.
    pub(crate) always_registers: bool,
}

impl Default for RailOptions {
    fn default() -> Self {
        // Half a minute of registering; more pieces than engines have of the host's memory.
        let cached = CacheLimits { bytes: 64 << 30, count: 1024 };
        Self { lost_after: Duration::from_secs(5), cached, always_registers: false }
    }
}

/// Where the bytes of a transfer are on this side.
#[derive(Debug, Clone)]
pub(crate) enum LocalSide {
    /// The fabric reaches them.
    Registered(MemoryRegion),
    /// A device copies them.
    Device(Memory),
}

/// Where they are on the other side.
#[derive(Clone)]
pub(crate) struct RemoteSide {
    pub(crate) region: u64,
    pub(crate) ticket: u64,
    /// None: the peer copies them.
    pub(crate) memory: Option<RemoteMemory>,
}

/// Without ticket and key: routes can be printed by whoever has them.
impl fmt::Debug for RemoteSide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "There({}, by the peer: {})", self.region, self.memory.is_none())
    }
}

/// Who is looked for, and where.
#[derive(Debug, Clone)]
pub(crate) struct LinkTarget {
    pub(crate) identity: [u8; 16],
    pub(crate) address: Vec<u8>,
    /// The same for all rails by which one peer is visited.
    pub(crate) connection_id: u64,
}

/// A transfer, or a notice alone.
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
    /// How often a rail was lost with some of it.
    pub(crate) reroutes: u32,
    /// Kept until the last byte has moved, and what another rail goes on with.
    pub(crate) route: Arc<RouteInner>,
}

/// A transfer on its way to the rail's thread. It is reported as stranded if the thread ends first.
struct QueuedRequest {
    transfer: Option<RailRequest>,
    shared: Arc<RailShared>,
}

impl Drop for QueuedRequest {
    fn drop(&mut self) {
        if let Some(request) = self.transfer.take() {
            let cause = "the rail's thread has ended".to_owned();
            self.shared.report(RailEvent::Returned { request: Box::new(request), cause });
        }
    }
}

/// What a rail is told to do.
type Command = Box<dyn FnOnce(&mut Driver) + Send>;

/// What a rail tells.
#[derive(Debug)]
pub(crate) enum RailEvent {
    /// The peer is there, and all regions are open that were before. It may come back by itself.
    Up {
        link: u32,
    },
    /// It does not answer, or not any more; or it is another one.
    Down {
        link: u32,
        error: Error,
    },
    /// Whether a region is there that was asked for by this ticket, or was open in an earlier session.
    Opened {
        link: u32,
        region: (u64, u64),
        outcome: Result<()>,
    },
    Done {
        token: Token,
        outcome: Result<()>,
    },
    /// The link was lost with this much not done, and nothing of it under way.
    Returned {
        request: Box<RailRequest>,
        cause: String,
    },
    /// A region that was known to be there is not there any more.
    Withdrawn {
        link: u32,
        region: u64,
    },
    /// A guest came, in a session of its own.
    SessionOpened {
        session: u64,
        from: [u8; 16],
        connection_id: u64,
        label: String,
    },
    /// A session of a guest is over: it said so, or why it was lost.
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

/// What an agent and its rail share.
#[derive(Debug)]
pub(crate) struct RailShared {
    rail_events: Mutex<VecDeque<RailEvent>>,
    /// Regions that peers may still be at, each with who that is.
    retiring: Mutex<HashMap<u64, Vec<String>>>,
    /// What is registered for the agent's own use.
    registration_cache: Mutex<RegistrationCache>,
    /// Held by whoever registers memory for own use: one after the other, so that no more is kept
    /// than may be.
    registration_lock: Mutex<()>,
    is_over: AtomicBool,
    /// The thread is gone: nothing more comes of it.
    has_ended: AtomicBool,
    /// It ended while a device was at a copy.
    may_copy: AtomicBool,
}

impl RailShared {
    fn new(settings: &RailOptions, facts: &Capabilities) -> Self {
        Self {
            rail_events: Mutex::default(),
            retiring: Mutex::default(),
            registration_cache: Mutex::new(RegistrationCache::new(settings, facts)),
            registration_lock: Mutex::default(),
            is_over: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            may_copy: AtomicBool::new(false),
        }
    }

    /// Tells the agent something, unless that has ended. A report that is never read would keep its
    /// regions for ever: they keep the agent's lines, which keep this.
    fn report(&self, report: RailEvent) {
        let mut rail_events = lock(&self.rail_events);
        if !self.is_over.load(Ordering::Acquire) {
            rail_events.push_back(report);
            return;
        }
        drop(rail_events);
        drop(report);
    }
}

/// How a rail is told things, by anybody.
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
        // Where nobody can be woken, the thread looks by itself, soon.
        let _ = self.waker.wake();
    }

    pub(crate) fn begin_request(&self, request: RailRequest) {
        let mut queued =
            QueuedRequest { transfer: Some(request), shared: Arc::clone(&self.shared) };
        self.send_command(move |driver| {
            if let Some(transfer) = queued.transfer.take() {
                driver.begin_request(transfer);
            }
        });
    }

    /// A region is not to be reached any more: the peers are told, and it is kept until they know.
    pub(crate) fn retire(&self, region: u64, memory: Option<MemoryRegion>, buffer: Buffer) {
        lock(&self.shared.retiring).insert(region, vec!["the rail".to_owned()]);
        self.send_command(move |driver| driver.retire(region, memory, buffer));
    }

    /// Who may still be at a region that was withdrawn.
    pub(crate) fn region_user(&self, region: u64) -> Option<String> {
        if self.shared.has_ended.load(Ordering::Acquire) {
            return None;
        }
        lock(&self.shared.retiring).get(&region).and_then(|labels| labels.first().cloned())
    }
}

/// A fabric, and the thread that drives it.
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
        local_target: &Arc<LocalTarget>,
        number: usize,
        settings: RailOptions,
    ) -> Result<Self> {
        let of_fabric = |error| Error::of_fabric(START, error);
        let domain = Domain::open(offer).map_err(of_fabric)?;
        let shared = Arc::new(RailShared::new(&settings, domain.capabilities()));
        let (commands, request) = channel();
        let driver =
            Driver::new(&domain, Arc::clone(&shared), Arc::clone(local_target), settings, request)?;
        let address = driver.address().to_vec();
        let waker = driver.queue.waker();
        let thread = std::thread::Builder::new().name(format!("fabricast-rail-{number}"));
        let thread = thread
            .spawn(move || driver.serve())
            .map_err(|error| Error::new(START, ErrorKind::Failed, error.to_string()))?;
        let handle = RailHandle { commands, shared, waker, domain };
        Ok(Self { handle, address, thread: Some(thread) })
    }

    pub(crate) fn domain(&self) -> &Domain {
        &self.handle.domain
    }

    /// What the other end has to have, too.
    pub(crate) fn provider(&self) -> &str {
        self.domain().capabilities().wire_name()
    }

    pub(crate) fn has(&self, caps: Caps) -> bool {
        self.domain().capabilities().caps.contains(caps)
    }

    /// Its thread is gone, and with it all that was under way.
    pub(crate) fn has_ended(&self) -> bool {
        self.handle.shared.has_ended.load(Ordering::Acquire)
    }

    pub(crate) fn has_events(&self) -> bool {
        !lock(&self.handle.shared.rail_events).is_empty()
    }

    /// What it has to tell.
    pub(crate) fn rail_events(&self, into: &mut VecDeque<RailEvent>) {
        let mut rail_events = lock(&self.handle.shared.rail_events);
        if into.is_empty() {
            std::mem::swap(&mut *rail_events, into);
        } else {
            into.append(&mut rail_events);
        }
    }

    /// How others find it.
    pub(crate) fn card(&self) -> FabricAddress {
        FabricAddress { provider: self.provider().to_owned(), address: self.address.clone() }
    }

    /// Ends the threads of all, and waits for them, at most until `end`. A thread that its provider
    /// does not let go of is left to itself. Gives the providers of those that may still be at
    /// memory of the agent.
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

    /// False if its thread goes on.
    fn join(&mut self, end: Instant) -> bool {
        let Some(thread) = self.thread.take() else { return true };
        while !thread.is_finished() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        let has_ended = thread.is_finished();
        match has_ended {
            true => drop(thread.join()),
            false => {
                tracing::warn!(provider = self.provider(), "thread of a rail did not end in time")
            }
        }
        // What was told before it was over.
        let unread = std::mem::take(&mut *lock(&self.handle.shared.rail_events));
        drop(unread);
        has_ended
    }

    /// The thread is another process's.
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
