//! Clients of the service: their memory, and their pairs.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use gpu::{Device, DeviceName, Memory};
use ipc::{Channel, Doorbell, ListenerGuard, MappedWords};
use threads::lock;

use super::owners::Owner;
use crate::copy_requests::{PostedRequest, ServiceRing, Start};
use crate::error::{Error, ErrorKind, Result};
use crate::host_buffer::HostBuffer;
use crate::path::Operation;
use crate::region::{RegionDescriptor, Rights};

/// Memory that a client offered.
#[derive(Debug)]
pub(super) enum OfferedMemory {
    Device(Memory),
    Host(HostBuffer),
}

impl OfferedMemory {
    /// The device that has it mapped; None for the host.
    pub(super) fn device(&self) -> Option<&Device> {
        match self {
            Self::Device(memory) => Some(memory.mapped_for()),
            Self::Host(_) => None,
        }
    }

    /// The memory as this device sees it.
    pub(super) fn mapped_for(&self, device: &Device) -> Result<Memory> {
        match self {
            Self::Device(memory) if memory.is_reachable_from(device) => Ok(memory.clone()),
            Self::Device(memory) => {
                let detail = format!("{} does not reach {memory:?}", device.name());
                Err(Error::new("open pair of memory", ErrorKind::NoPeerAccess, detail))
            }
            Self::Host(buffer) => buffer.pinned_for(device),
        }
    }
}

/// Two memories, both mapped for one device, that copies between them.
#[derive(Debug)]
pub(super) struct Pair {
    device: Device,
    local: Memory,
    remote: Memory,
    remote_side: RemoteSide,
    /// Keeps the mapping for other pairs with the same memory.
    _local_memory: Arc<OfferedMemory>,
}

/// Whose the other memory is.
#[derive(Debug)]
pub(super) enum RemoteSide {
    /// A region, as its owner describes it.
    Region(RegionDescriptor, Arc<Owner>),
    /// The client has it.
    Offered,
}

impl Pair {
    /// A pair of a client's memory and another one, both mapped for a device.
    pub(super) fn new(
        device: Device,
        local: Memory,
        remote: Memory,
        remote_side: RemoteSide,
        local_memory: Arc<OfferedMemory>,
    ) -> Self {
        Self { device, local, remote, remote_side, _local_memory: local_memory }
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// The device of the remote memory, if it has one.
    pub(super) fn remote_device(&self) -> Option<DeviceName> {
        self.remote.device()
    }

    pub(super) fn rights(&self) -> Rights {
        match &self.remote_side {
            RemoteSide::Region(region, _) => region.rights,
            RemoteSide::Offered => Rights::ALL,
        }
    }

    /// Lengths of the local and the remote memory.
    pub(super) fn lengths(&self) -> (u64, u64) {
        let remote = match &self.remote_side {
            RemoteSide::Region(region, _) => region.length,
            RemoteSide::Offered => self.remote.length(),
        };
        (self.local.length(), remote)
    }

    /// Where a copy goes, and where from.
    pub(super) fn ends(&self, operation: Operation) -> (&Memory, &Memory) {
        operation.to_and_from(&self.local, &self.remote)
    }

    /// Announces a copy to the owner; an error if the region or its agent is gone.
    pub(super) fn begin_copy(&self) -> std::result::Result<u64, (ErrorKind, &'static str)> {
        match &self.remote_side {
            RemoteSide::Region(region, owner) => owner.begin_copy(region.number),
            RemoteSide::Offered => Ok(0),
        }
    }

    pub(super) fn end_copy(&self, number: u64) {
        if let RemoteSide::Region(_, owner) = &self.remote_side {
            owner.end_copy(number);
        }
    }

    /// Why nothing can be copied any more, as of the last look at its owner.
    fn known_obstacle(&self) -> Option<(ErrorKind, &'static str)> {
        match &self.remote_side {
            RemoteSide::Region(region, owner) => owner.known_obstacle(region.number),
            RemoteSide::Offered => None,
        }
    }
}

/// A pair, or why it has ended.
#[derive(Debug, Clone)]
pub(super) enum PairState {
    Open(Arc<Pair>),
    Ended(ErrorKind, &'static str),
}

/// An agent that the service copies for.
#[derive(Debug)]
pub(super) struct Client {
    number: u64,
    label: String,
    /// The service's handle to the connection, for replies from other threads.
    channel: Channel,
    /// What is rung after an outcome was written.
    doorbell: Doorbell<MappedWords>,
    ring: Mutex<ServiceRing>,
    pairs: Mutex<HashMap<u32, PairState>>,
    memories: Mutex<HashMap<u64, Weak<OfferedMemory>>>,
    has_left: AtomicBool,
    /// Pairs that are being opened.
    openings: AtomicUsize,
    _listener: ListenerGuard,
}

/// Pairs of a client, at most.
pub(super) const MAX_PAIRS: usize = 1 << 16;
/// Pairs of a client that are being opened at a time, at most.
const MAX_OPENINGS: usize = 8;

impl Client {
    /// A client that connected, with its label, the channel for replies, its doorbell, its ring, and
    /// what listens to the ring's doorbell.
    pub(super) fn new(
        number: u64,
        label: String,
        channel: Channel,
        doorbell: Doorbell<MappedWords>,
        ring: ServiceRing,
        listener: ListenerGuard,
    ) -> Self {
        Self {
            number,
            label,
            channel,
            doorbell,
            ring: Mutex::new(ring),
            pairs: Mutex::default(),
            memories: Mutex::default(),
            has_left: AtomicBool::new(false),
            openings: AtomicUsize::new(0),
            _listener: listener,
        }
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn label(&self) -> &str {
        &self.label
    }

    /// Sends a reply. False if the client does not take it in time.
    pub(super) fn reply(&self, bytes: &[u8], timeout: Duration) -> bool {
        self.channel.send(bytes, &[], timeout).is_ok()
    }

    pub(super) fn has_posted(&self) -> bool {
        lock(&self.ring).has_posted()
    }

    /// The next request. An error if the client does not keep to the protocol.
    pub(super) fn take_request(&self) -> Result<Option<PostedRequest>> {
        lock(&self.ring).take()
    }

    /// Does this request begin, which follows a stream of the client?
    pub(super) fn start_of(&self, request: u64) -> Start {
        lock(&self.ring).start(request)
    }

    /// Writes the outcome of a request, and wakes the client.
    pub(super) fn finish(
        &self,
        request: u64,
        outcome: std::result::Result<(), (ErrorKind, String)>,
    ) {
        lock(&self.ring).finish(request, outcome);
        self.doorbell.ring();
    }

    /// Tells the client that the service ends, with all copies.
    pub(super) fn end(&self) {
        lock(&self.ring).end();
        self.doorbell.ring();
    }

    /// Ends the connection: the thread of the socket then removes the client.
    pub(super) fn disconnect(&self) {
        self.channel.end();
    }

    /// A thread is about to sleep until the client rings.
    pub(super) fn announce_waiter(&self) {
        if let Some(doorbell) = lock(&self.ring).doorbell() {
            doorbell.announce_waiter();
        }
    }

    /// Begins to open a pair. False if too many are being opened.
    pub(super) fn begin_opening(&self) -> bool {
        let may_begin = self.openings.fetch_add(1, Ordering::AcqRel) < MAX_OPENINGS;
        if !may_begin {
            self.end_opening();
        }
        may_begin
    }

    pub(super) fn end_opening(&self) {
        self.openings.fetch_sub(1, Ordering::AcqRel);
    }

    pub(super) fn has_left(&self) -> bool {
        self.has_left.load(Ordering::Acquire)
    }

    /// The client has disconnected: all its pairs end.
    pub(super) fn leave(&self) {
        self.has_left.store(true, Ordering::Release);
        // Unmapping may take a while.
        let pairs = std::mem::take(&mut *lock(&self.pairs));
        drop(pairs);
    }

    /// Adds an open pair. False if the client has left, or has too many or this one already.
    pub(super) fn add_pair(&self, number: u32, pair: Pair) -> bool {
        let mut pairs = lock(&self.pairs);
        let is_free = pairs.len() < MAX_PAIRS && !pairs.contains_key(&number);
        if is_free && !self.has_left() {
            pairs.insert(number, PairState::Open(Arc::new(pair)));
        }
        is_free
    }

    pub(super) fn pair(&self, number: u32) -> Option<PairState> {
        lock(&self.pairs).get(&number).cloned()
    }

    pub(super) fn close_pair(&self, number: u32) {
        // Unmapping may take a while.
        let closed = lock(&self.pairs).remove(&number);
        drop(closed);
    }

    /// Ends pairs whose region or its owner is gone, so that they do not keep memory. True if pairs
    /// are left.
    pub(super) fn end_stale_pairs(&self) -> bool {
        let mut ended = Vec::new();
        let mut pairs = lock(&self.pairs);
        for state in pairs.values_mut() {
            if let PairState::Open(pair) = state
                && let Some((kind, cause)) = pair.known_obstacle()
            {
                ended.push(std::mem::replace(state, PairState::Ended(kind, cause)));
            }
        }
        let has_pairs = !pairs.is_empty();
        drop(pairs);
        // Unmapping may take a while.
        drop(ended);
        has_pairs
    }

    /// Memory that the client offered before, if a pair still uses it.
    pub(super) fn memory(&self, number: u64) -> Option<Arc<OfferedMemory>> {
        lock(&self.memories).get(&number).and_then(Weak::upgrade)
    }

    pub(super) fn add_memory(&self, number: u64, memory: &Arc<OfferedMemory>) {
        let mut memories = lock(&self.memories);
        memories.retain(|_, memory| memory.strong_count() > 0);
        memories.insert(number, Arc::downgrade(memory));
    }
}

/// The connected clients.
#[derive(Debug, Default)]
pub(super) struct Clients {
    all: Mutex<HashMap<u64, Arc<Client>>>,
    /// Incremented when clients connect or leave.
    changes: AtomicU64,
    last: AtomicU64,
}

impl Clients {
    pub(super) fn next_number(&self) -> u64 {
        self.last.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn add(&self, client: Arc<Client>) {
        lock(&self.all).insert(client.number, client);
        self.changes.fetch_add(1, Ordering::Release);
    }

    pub(super) fn remove(&self, client: &Client) {
        client.leave();
        lock(&self.all).remove(&client.number);
        self.changes.fetch_add(1, Ordering::Release);
    }

    pub(super) fn count(&self) -> usize {
        lock(&self.all).len()
    }

    pub(super) fn has_changed(&self, seen: u64) -> bool {
        self.changes.load(Ordering::Acquire) != seen
    }

    /// The clients, if any connected or left since.
    pub(super) fn changed(&self, seen: &mut u64) -> Option<Vec<Arc<Client>>> {
        let changes = self.changes.load(Ordering::Acquire);
        if changes == *seen {
            return None;
        }
        *seen = changes;
        Some(lock(&self.all).values().cloned().collect())
    }
}
