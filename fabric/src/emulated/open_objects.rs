//! The open objects of the emulated provider, and how its operations are carried out.
//!
//! One lock guards all of it. An operation is carried out when it is posted, except for bytes that
//! a fault delays: these are copied when any queue is read after their time.
#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use libfabric_sys as sys;
use threads::lock;

use super::{DEPTH, Fault};

const AGAIN: isize = -(sys::FI_EAGAIN as isize);
const INVALID: isize = -(sys::FI_EINVAL as isize);
const BAD_KEY: isize = -(sys::FI_EKEYREJECTED as isize);

/// An open object.
#[derive(Debug)]
pub(super) enum Object {
    Fabric,
    Domain,
    /// The numbers of the peers' endpoints.
    Vector(Vec<u64>),
    Queue(VecDeque<Entry>),
    Region(Region),
    Endpoint(Endpoint),
}

/// An operation that is done.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    context: usize,
    flags: u64,
    length: usize,
    data: u64,
}

impl Entry {
    pub(super) fn tagged(self) -> sys::fi_cq_tagged_entry {
        let Self { context, flags, length, data } = self;
        let op_context = std::ptr::with_exposed_provenance_mut(context);
        sys::fi_cq_tagged_entry { op_context, flags, len: length, data, ..Default::default() }
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Region {
    domain: usize,
    base: usize,
    length: usize,
    access: u64,
    key: u64,
    is_device: bool,
}

impl Region {
    pub(super) fn new(
        domain: usize,
        (base, length): (usize, usize),
        (access, key): (u64, u64),
        is_device: bool,
    ) -> Self {
        Self { domain, base, length, access, key, is_device }
    }
}

#[derive(Debug)]
pub(super) struct Endpoint {
    number: u64,
    domain: usize,
    queue: usize,
    vector: usize,
    receives: VecDeque<Receive>,
    /// Messages that found no receive.
    unexpected: VecDeque<Vec<u8>>,
}

impl Endpoint {
    pub(super) fn new(number: u64, domain: usize) -> Self {
        let (receives, unexpected) = (VecDeque::new(), VecDeque::new());
        Self { number, domain, queue: 0, vector: 0, receives, unexpected }
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn bind_vector(&mut self, vector: usize) {
        self.vector = vector;
    }

    pub(super) fn bind_queue(&mut self, queue: usize) {
        self.queue = queue;
    }
}

/// Local memory, with the address of its region.
#[derive(Debug, Clone, Copy)]
pub(super) struct Local {
    at: usize,
    length: usize,
    region: usize,
}

impl Local {
    pub(super) fn new(at: usize, length: usize, region: usize) -> Self {
        Self { at, length, region }
    }
}

#[derive(Debug)]
struct Receive {
    into: Local,
    context: usize,
}

/// A posted operation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Posted {
    endpoint: usize,
    peer: u64,
    local: Local,
    context: usize,
    /// The immediate of a write.
    data: Option<u64>,
}

impl Posted {
    pub(super) fn new(endpoint: usize, peer: u64, local: Local, context: usize) -> Self {
        Self { endpoint, peer, local, context, data: None }
    }

    /// A write with this immediate.
    pub(super) fn with_data(self, data: u64) -> Self {
        Self { data: Some(data), ..self }
    }
}

/// Bytes that arrive after their operation was reported as done.
#[derive(Debug)]
struct LateBytes {
    due: Instant,
    bytes: Vec<u8>,
    to: usize,
    /// They are dropped if it was closed meanwhile.
    region: usize,
}

#[derive(Debug, Default)]
pub(super) struct World {
    /// What is wrong with each network.
    faults: Vec<Fault>,
    /// With the number of their network.
    objects: HashMap<usize, (usize, Object)>,
    late: Vec<LateBytes>,
    last_number: u64,
}

static WORLD: Mutex<Option<World>> = Mutex::new(None);

fn world() -> MutexGuard<'static, Option<World>> {
    lock(&WORLD)
}

pub(super) fn with<T>(act: impl FnOnce(&mut World) -> T) -> T {
    act(world().get_or_insert_default())
}

/// The number of a new network.
pub(super) fn create(fault: Fault) -> usize {
    with(|world| {
        world.faults.push(fault);
        world.faults.len() - 1
    })
}

impl World {
    pub(super) fn fault(&self, network: usize) -> Fault {
        self.faults.get(network).copied().unwrap_or_default()
    }

    pub(super) fn network_of(&self, object: usize) -> usize {
        self.objects.get(&object).map_or(usize::MAX, |(network, _)| *network)
    }

    pub(super) fn open(&mut self, address: usize, network: usize, object: Object) {
        self.objects.insert(address, (network, object));
    }

    /// False if it is not open.
    pub(super) fn close(&mut self, address: usize) -> bool {
        self.objects.remove(&address).is_some()
    }

    pub(super) fn object(&mut self, address: usize) -> Option<&mut Object> {
        self.objects.get_mut(&address).map(|(_, object)| object)
    }

    /// A number for an endpoint.
    pub(super) fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    pub(super) fn endpoint(&mut self, address: usize) -> Option<&mut Endpoint> {
        match self.object(address) {
            Some(Object::Endpoint(endpoint)) => Some(endpoint),
            _ => None,
        }
    }

    fn region(&self, address: usize) -> Option<Region> {
        match self.objects.get(&address) {
            Some((_, Object::Region(region))) => Some(*region),
            _ => None,
        }
    }

    /// The endpoint of a peer.
    fn target(&self, endpoint: usize, peer: u64) -> Option<usize> {
        let (network, Object::Endpoint(Endpoint { vector, .. })) = self.objects.get(&endpoint)?
        else {
            return None;
        };
        let (_, Object::Vector(peers)) = self.objects.get(vector)? else { return None };
        let number = *peers.get(usize::try_from(peer).ok()?)?;
        let is_it = |(of, object): &(usize, Object)| {
            of == network && matches!(object, Object::Endpoint(it) if it.number == number)
        };
        self.objects.iter().find(|(_, object)| is_it(object)).map(|(address, _)| *address)
    }

    fn report(&mut self, endpoint: usize, context: usize, flags: u64, length: usize) {
        self.add_entry(endpoint, Entry { context, flags, length, data: 0 });
    }

    fn add_entry(&mut self, endpoint: usize, entry: Entry) {
        let queue = self.endpoint(endpoint).map_or(0, |endpoint| endpoint.queue);
        if let Some(Object::Queue(entries)) = self.object(queue) {
            entries.push_back(entry);
        }
    }

    /// Is local memory inside of its region, with this access?
    fn allows(&self, local: Local, access: u64) -> bool {
        self.region(local.region).is_some_and(|region| {
            region.access & access == access
                && local.at >= region.base
                && local.at + local.length <= region.base + region.length
        })
    }

    // ------------------------------------------------------------------- messages

    pub(super) fn send(&mut self, posted: Posted) -> isize {
        let Posted { endpoint, peer, local, context, .. } = posted;
        if !self.allows(local, sys::FI_SEND) {
            return INVALID;
        }
        // SAFETY: checked above; the poster keeps the memory of its operation.
        let bytes = unsafe { bytes_at(local.at, local.length) };
        if self.deliver(endpoint, peer, bytes) == AGAIN {
            return AGAIN;
        }
        self.report(endpoint, context, sys::FI_MSG | sys::FI_SEND, 0);
        0
    }

    /// A message to a closed endpoint is lost.
    pub(super) fn deliver(&mut self, endpoint: usize, peer: u64, bytes: Vec<u8>) -> isize {
        if let Some(target) = self.target(endpoint, peer)
            && let Some(to) = self.endpoint(target)
        {
            if to.unexpected.len() >= DEPTH {
                return AGAIN;
            }
            to.unexpected.push_back(bytes);
            self.match_messages(target);
        }
        0
    }

    pub(super) fn receive(&mut self, address: usize, into: Local, context: usize) -> isize {
        if !self.allows(into, sys::FI_RECV) {
            return INVALID;
        }
        let Some(endpoint) = self.endpoint(address) else { return INVALID };
        if endpoint.receives.len() >= DEPTH {
            return AGAIN;
        }
        endpoint.receives.push_back(Receive { into, context });
        self.match_messages(address);
        0
    }

    fn match_messages(&mut self, address: usize) {
        loop {
            let Some(endpoint) = self.endpoint(address) else { return };
            if endpoint.receives.is_empty() || endpoint.unexpected.is_empty() {
                return;
            }
            let (Some(receive), Some(mut bytes)) =
                (endpoint.receives.pop_front(), endpoint.unexpected.pop_front())
            else {
                return;
            };
            bytes.truncate(receive.into.length);
            // SAFETY: checked when the receive was posted; a closed region returns its receives
            // with the endpoint first.
            unsafe { put_bytes(receive.into.at, &bytes) };
            self.report(address, receive.context, sys::FI_MSG | sys::FI_RECV, bytes.len());
        }
    }

    // ------------------------------------------------------------------- one-sided operations

    /// Writes to a peer, or reads from it, at this offset of the region with this key.
    pub(super) fn transfer(
        &mut self,
        posted: Posted,
        (offset, key): (u64, u64),
        is_read: bool,
    ) -> isize {
        let Posted { endpoint, peer, local, context, data } = posted;
        let access = if is_read { sys::FI_READ } else { sys::FI_WRITE };
        let (Some(here), true) = (self.region(local.region), self.allows(local, access)) else {
            return INVALID;
        };
        let Some(target) = self.target(endpoint, peer) else { return AGAIN };
        let domain = self.endpoint(target).map_or(0, |target| target.domain);
        let remote_access = if is_read { sys::FI_REMOTE_READ } else { sys::FI_REMOTE_WRITE };
        let found = self.objects.iter().find_map(|(address, (_, object))| match object {
            Object::Region(region)
                if region.domain == domain
                    && region.key == key
                    && region.access & remote_access != 0 =>
            {
                Some((*address, *region))
            }
            _ => None,
        });
        let Some((there_address, there)) = found else { return BAD_KEY };
        let end = usize::try_from(offset).ok().and_then(|at| at.checked_add(local.length));
        if end.is_none_or(|end| end > there.length) {
            return BAD_KEY;
        }
        let at = there.base + offset as usize;
        let (from, to, region) = match is_read {
            true => (at, local.at, local.region),
            false => (local.at, at, there_address),
        };
        let fault = match here.is_device || there.is_device {
            true => self.fault(self.network_of(endpoint)),
            false => Fault::None,
        };
        if fault == Fault::NeverCompletes {
            return 0;
        }
        let arriving = match fault {
            Fault::CutsTransfers(length) => local.length.min(length),
            _ => local.length,
        };
        // SAFETY: both ranges are inside of open regions, whose memory exists as long as they do.
        let bytes = unsafe { bytes_at(from, arriving) };
        match fault {
            Fault::EarlyCompletions(late) => {
                let due = Instant::now() + late;
                self.late.push(LateBytes { due, bytes, to, region });
            }
            // SAFETY: as above.
            _ => unsafe { put_bytes(to, &bytes) },
        }
        if let Some(data) = data {
            let flags = sys::FI_RMA | sys::FI_REMOTE_WRITE | sys::FI_REMOTE_CQ_DATA;
            self.add_entry(target, Entry { context: 0, flags, length: local.length, data });
        }
        let kind = if is_read { sys::FI_READ } else { sys::FI_WRITE };
        self.report(endpoint, context, sys::FI_RMA | kind, 0);
        0
    }

    /// Copies the bytes that are due.
    fn copy_late(&mut self) {
        let now = Instant::now();
        let due: Vec<_> = self.late.extract_if(.., |late| late.due <= now).collect();
        for LateBytes { bytes, to, region, .. } in due {
            if self.region(region).is_some() {
                // SAFETY: inside of an open region, whose memory exists as long as it does.
                unsafe { put_bytes(to, &bytes) };
            }
        }
    }

    /// The next entries of a queue.
    pub(super) fn read(&mut self, queue: usize, count: usize) -> Vec<Entry> {
        self.copy_late();
        match self.object(queue) {
            Some(Object::Queue(entries)) => entries.drain(..count.min(entries.len())).collect(),
            _ => Vec::new(),
        }
    }
}

/// # Safety
/// The range is readable; other threads may write it, as peers of a provider do.
unsafe fn bytes_at(at: usize, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    // SAFETY: by contract; the vector is new.
    unsafe {
        let from: *const u8 = std::ptr::with_exposed_provenance(at);
        std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), length);
    }
    bytes
}

/// # Safety
/// The range is writable; other threads may access it, as with any provider.
unsafe fn put_bytes(at: usize, bytes: &[u8]) {
    // SAFETY: by contract.
    unsafe {
        let to: *mut u8 = std::ptr::with_exposed_provenance_mut(at);
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
    }
}
