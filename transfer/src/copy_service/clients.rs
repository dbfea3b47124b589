//! Clients of the service: their memory, and their pairs.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use gpu::{Device, Memory};
use ipc::{Channel, Doorbell, ListenerGuard, MappedWords};
use threads::lock;

use super::owners::Owner;
use crate::copy_requests::ServiceRing;
use crate::error::ErrorKind;
use crate::host_buffer::HostBuffer;
use crate::path::Operation;
use crate::region::Rights;

/// Memory of a client.
#[derive(Debug)]
pub(super) enum LocalMemory {
    Device(Memory),
    Host(HostBuffer),
}

/// Two memories, both mapped for one device, that copies between them.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) device: Device,
    pub(super) local: Memory,
    pub(super) remote: Memory,
    pub(super) remote_length: u64,
    /// The rights of peers to the remote region.
    pub(super) rights: Rights,
    pub(super) region: u64,
    pub(super) owner: Arc<Owner>,
    /// Keeps the mapping for other pairs with the same memory.
    pub(super) _local_memory: Arc<LocalMemory>,
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
    pub(super) number: u64,
    pub(super) label: String,
    /// The service's handle to the connection, for replies from other threads.
    pub(super) channel: Channel,
    /// What is rung after an outcome was written.
    pub(super) doorbell: Doorbell<MappedWords>,
    pub(super) ring: Mutex<ServiceRing>,
    pairs: Mutex<HashMap<u32, PairState>>,
    memories: Mutex<HashMap<u64, Weak<LocalMemory>>>,
    has_left: AtomicBool,
    /// Pairs that are being opened.
    pub(super) openings: AtomicUsize,
    _listener: ListenerGuard,
}

/// Pairs of a client, at most.
pub(super) const MAX_PAIRS: usize = 1 << 16;

impl Client {
    pub(super) fn new(
        (number, label): (u64, String),
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

    pub(super) fn has_left(&self) -> bool {
        self.has_left.load(Ordering::Acquire)
    }

    /// The client has disconnected: all its pairs end.
    pub(super) fn leave(&self) {
        self.has_left.store(true, Ordering::Release);
        lock(&self.pairs).clear();
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
                && let Some((kind, cause)) = pair.owner.obstacle(Some(pair.region))
            {
                ended.push(std::mem::replace(state, PairState::Ended(kind, cause)));
            }
        }
        !pairs.is_empty()
    }

    /// Memory that the client offered before, if a pair still uses it.
    pub(super) fn memory(&self, number: u64) -> Option<Arc<LocalMemory>> {
        lock(&self.memories).get(&number).and_then(Weak::upgrade)
    }

    pub(super) fn add_memory(&self, number: u64, memory: &Arc<LocalMemory>) {
        let mut memories = lock(&self.memories);
        memories.retain(|_, memory| memory.strong_count() > 0);
        memories.insert(number, Arc::downgrade(memory));
    }
}

impl Pair {
    /// Where a copy goes, and where from.
    pub(super) fn ends(&self, operation: Operation) -> (&Memory, &Memory) {
        operation.to_and_from(&self.local, &self.remote)
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
