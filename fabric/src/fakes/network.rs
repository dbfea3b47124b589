//! The open objects of the fake providers, and the packets in flight between their endpoints.
//!
//! Each thread has one network. Nothing moves unless a queue is read. A seeded generator draws
//! the next packet among all that the profile's order permits. The memory of an operation is
//! accessed as late as the profile permits. A call that breaks the provider's rules is a
//! misuse, and fails the calling test.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use libfabric_sys as sys;

use super::profile::ProviderProfile;

/// An open object, by its address.
#[derive(Debug)]
pub(super) enum Object {
    Fabric,
    Domain,
    Vector(Vec<u64>),
    Queue(Queue),
    Region(Region),
    Endpoint(Endpoint),
}

#[derive(Debug)]
pub(super) struct Open {
    pub(super) object: Object,
    /// The objects that it was made from or is bound to: none of these may be closed before it.
    pub(super) needs: Vec<usize>,
    users: usize,
}

#[derive(Debug)]
pub(super) struct Queue {
    pub(super) size: usize,
    pub(super) tagged: bool,
    pub(super) entries: VecDeque<sys::fi_cq_tagged_entry>,
}

#[derive(Debug)]
pub(super) struct Region {
    pub(super) domain: usize,
    pub(super) base: usize,
    pub(super) length: usize,
    pub(super) access: u64,
    pub(super) key: u64,
    pub(super) endpoint: usize,
    pub(super) is_enabled: bool,
}

#[derive(Debug, Default)]
pub(super) struct Endpoint {
    pub(super) number: u64,
    pub(super) domain: usize,
    pub(super) queue: usize,
    pub(super) vector: usize,
    pub(super) is_enabled: bool,
    pub(super) receives: VecDeque<Receive>,
    /// Operations that have not completed.
    pub(super) in_flight: usize,
}

#[derive(Debug)]
pub(super) struct Receive {
    pub(super) piece: LocalSegment,
    pub(super) tag: Option<u64>,
    pub(super) context: usize,
}

/// Local memory, and its local descriptor.
#[derive(Debug, Clone, Copy)]
pub(super) struct LocalSegment {
    pub(super) at: usize,
    pub(super) length: usize,
    pub(super) descriptor: usize,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kind {
    Write,
    Read,
    Message(Option<u64>),
    /// The operation on a word, the comparand, and whether it returns the old value.
    Atomic(u32, u64, bool),
}

/// An operation in flight.
#[derive(Debug)]
pub(super) struct Packet {
    pub(super) from: usize,
    pub(super) to: u64,
    pub(super) kind: Kind,
    /// Where bytes are read from, and where read bytes are written to.
    pub(super) source: Vec<LocalSegment>,
    pub(super) result: Option<LocalSegment>,
    pub(super) length: usize,
    /// The bytes, after they left their source.
    pub(super) bytes: Option<Vec<u8>>,
    pub(super) remote: (u64, u64),
    pub(super) data: Option<u64>,
    /// 0: the packet was injected, and no completion is reported.
    pub(super) context: usize,
    /// Is its completion reported only after it arrived? And was it reported?
    pub(super) delivery_complete: bool,
    pub(super) is_reported: bool,
    /// The offsets of the parts of a long write that have not arrived.
    pub(super) parts: Option<Vec<usize>>,
}

#[derive(Debug)]
pub(super) struct Network {
    pub(super) profile: ProviderProfile,
    pub(super) objects: HashMap<usize, Open>,
    packets: Vec<Packet>,
    random: u64,
    pub(super) next_number: u64,
    pub(super) misuses: Vec<String>,
    /// Packets that arrived before an earlier one of the same pair of endpoints.
    pub(super) reordered: u64,
    /// Posts that failed because the queue was full.
    pub(super) rejected_posts: u64,
    pub(super) most_entries: usize,
    /// Nothing can be posted: as if no connection were set up.
    pub(super) is_disconnected: bool,
}

thread_local! {
    static NETWORK: RefCell<Option<Network>> = const { RefCell::new(None) };
}

/// Resets a thread's network.
pub(super) fn begin(profile: ProviderProfile, seed: u64) {
    let network = Network {
        profile,
        objects: HashMap::new(),
        packets: Vec::new(),
        random: seed | 1,
        next_number: 1,
        misuses: Vec::new(),
        reordered: 0,
        rejected_posts: 0,
        most_entries: 0,
        is_disconnected: false,
    };
    NETWORK.set(Some(network));
}

pub(super) fn with<T>(act: impl FnOnce(&mut Network) -> T) -> T {
    NETWORK.with_borrow_mut(|network| act(network.as_mut().unwrap()))
}

/// Bytes of a write that arrive together.
const PART: usize = 4096;

const AGAIN: isize = -(sys::FI_EAGAIN as isize);
const INVALID: isize = -(sys::FI_EINVAL as isize);

impl Network {
    /// Return values for misuse.
    pub(super) fn misuse(&mut self, what: String) -> isize {
        self.note_misuse(what);
        INVALID
    }

    fn note_misuse(&mut self, what: String) {
        eprintln!("misuse of {}: {what}", self.profile.name);
        self.misuses.push(what);
    }

    pub(super) fn draw(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as usize % below
    }

    pub(super) fn open(&mut self, address: usize, object: Object, parent: usize) {
        let needs = if parent == 0 { Vec::new() } else { vec![parent] };
        self.objects.insert(address, Open { object, needs: Vec::new(), users: 0 });
        needs.into_iter().for_each(|parent| self.need(address, parent));
    }

    /// This object may be closed only after another.
    pub(super) fn need(&mut self, object: usize, needed: usize) {
        match self.objects.get_mut(&needed) {
            Some(open) => open.users += 1,
            None => self.note_misuse("an object is made from a closed object".to_owned()),
        }
        self.objects.get_mut(&object).unwrap().needs.push(needed);
    }

    pub(super) fn close(&mut self, address: usize) -> i32 {
        let Some(open) = self.objects.get(&address) else {
            return self.misuse("closing an object that is not open".to_owned()) as i32;
        };
        if open.users > 0 {
            let what = format!("closing {:?} with {} users", open.object, open.users);
            self.misuse(what);
            return -sys::FI_EBUSY;
        }
        // A region that belongs to an endpoint has to be closed first, whatever is in flight.
        let is_bound = self.profile.mr_mode & sys::FI_MR_ENDPOINT != 0;
        if matches!(open.object, Object::Region(_)) && !is_bound && self.is_used(address) {
            self.misuse("closing a region that an operation in flight uses".to_owned());
        }
        let open = self.objects.remove(&address).unwrap();
        for needed in open.needs {
            self.objects.get_mut(&needed).unwrap().users -= 1;
        }
        if let Object::Endpoint(_) = open.object {
            // Sent packets continue, but their completion is not reported.
            self.packets.retain(|packet| packet.from != address || packet.bytes.is_some());
        }
        0
    }

    /// Does an operation in flight use this local descriptor?
    fn is_used(&self, region: usize) -> bool {
        let is_it = |piece: &LocalSegment| piece.descriptor == region;
        let receives = self.objects.values().filter_map(|open| match &open.object {
            Object::Endpoint(endpoint) => Some(&endpoint.receives),
            _ => None,
        });
        receives.flatten().any(|receive| is_it(&receive.piece))
            || self.packets.iter().any(|packet| {
                let is_unsent = packet.bytes.is_none();
                let is_open = self.objects.contains_key(&packet.from);
                let mut pieces = packet.source.iter().filter(|_| is_unsent).chain(&packet.result);
                is_open && pieces.any(is_it)
            })
    }

    pub(super) fn endpoint(&mut self, address: usize) -> Option<&mut Endpoint> {
        match self.objects.get_mut(&address).map(|open| &mut open.object) {
            Some(Object::Endpoint(endpoint)) => Some(endpoint),
            _ => None,
        }
    }

    fn queue(&mut self, address: usize) -> Option<&mut Queue> {
        match self.objects.get_mut(&address).map(|open| &mut open.object) {
            Some(Object::Queue(queue)) => Some(queue),
            _ => None,
        }
    }

    /// The endpoint number of a peer of an endpoint's vector.
    pub(super) fn resolve(&mut self, endpoint: usize, peer: u64) -> Option<u64> {
        let vector = self.endpoint(endpoint)?.vector;
        match self.objects.get(&vector).map(|open| &open.object) {
            Some(Object::Vector(peers)) => {
                peers.get(peer as usize).copied().filter(|number| *number != 0)
            }
            _ => None,
        }
    }

    /// May the endpoint use this local memory?
    pub(super) fn check_local(
        &mut self,
        address: usize,
        piece: LocalSegment,
        right: u64,
    ) -> Result<(), String> {
        if self.profile.mr_mode & sys::FI_MR_LOCAL == 0 {
            return Ok(());
        }
        let domain = self.endpoint(address).map(|endpoint| endpoint.domain);
        let Some(Object::Region(region)) =
            self.objects.get(&piece.descriptor).map(|open| &open.object)
        else {
            return Err(format!("{piece:?} is in no open region"));
        };
        let is_inside = region.base <= piece.at
            && piece.at + piece.length <= region.base + region.length
            && region.is_enabled;
        let is_for = region.access & right == right && Some(region.domain) == domain;
        if is_inside && is_for { Ok(()) } else { Err(format!("{piece:?} is not in {region:?}")) }
    }

    /// Takes an operation, or returns the reason for a refusal.
    pub(super) fn post(&mut self, mut packet: Packet, peer: u64) -> isize {
        let is_injected = packet.context == 0;
        let Some(endpoint) = self.endpoint(packet.from) else {
            return self.misuse("a post to a closed endpoint".to_owned());
        };
        let (is_enabled, in_flight) = (endpoint.is_enabled, endpoint.in_flight);
        if !is_enabled {
            return self.misuse("a post to a disabled endpoint".to_owned());
        }
        let Some(to) = self.resolve(packet.from, peer) else {
            return self.misuse(format!("a post to peer {peer}, which was not inserted"));
        };
        let width = 8 * self.profile.data_size as u32;
        if packet.data.is_some_and(|data| width < 64 && data >> width != 0) {
            return self.misuse(format!("immediate {:?} is too wide", packet.data));
        }
        if packet.source.len() > self.profile.iov_limit || packet.length > self.profile.max_message
        {
            return self.misuse("an operation with too many pieces, or too long".to_owned());
        }
        let right = if let Kind::Message(_) = packet.kind { sys::FI_SEND } else { sys::FI_WRITE };
        let sources = packet.source.iter().filter(|_| !is_injected).map(|piece| (*piece, right));
        let results = packet.result.map(|piece| (piece, sys::FI_READ));
        for (piece, right) in sources.chain(results).collect::<Vec<_>>() {
            if let Err(what) = self.check_local(packet.from, piece, right) {
                return self.misuse(what);
            }
        }
        if self.is_disconnected || in_flight >= self.profile.depth || self.draw(16) == 0 {
            self.rejected_posts += 1;
            return AGAIN;
        }
        packet.to = to;
        if is_injected {
            packet.bytes = Some(gather(&packet.source));
        } else {
            overwrite_context(packet.context);
        }
        self.endpoint(packet.from).unwrap().in_flight += 1;
        self.packets.push(packet);
        0
    }

    /// Moves a few of the packets of the endpoints of a queue.
    pub(super) fn progress(&mut self, queue: usize) {
        for _ in 0..self.draw(5) {
            let able: Vec<_> =
                (0..self.packets.len()).filter(|at| self.can_move(*at, queue)).collect();
            if able.is_empty() {
                return;
            }
            let at = able[self.draw(able.len())];
            if self.packets[at].bytes.is_none() { self.read_source(at) } else { self.deliver(at) }
        }
    }

    fn is_polled(&mut self, endpoint: usize, queue: usize) -> bool {
        self.endpoint(endpoint).is_some_and(|endpoint| endpoint.queue == queue)
    }

    fn find(&self, number: u64) -> Option<usize> {
        let is_it =
            |open: &Open| matches!(&open.object, Object::Endpoint(it) if it.number == number);
        self.objects.iter().find(|(_, open)| is_it(open)).map(|(address, _)| *address)
    }

    fn can_move(&mut self, at: usize, queue: usize) -> bool {
        let (from, to) = (self.packets[at].from, self.packets[at].to);
        let sends = self.is_polled(from, queue);
        if self.packets[at].bytes.is_none() {
            return sends;
        }
        let is_message = matches!(self.packets[at].kind, Kind::Message(_));
        let is_read = match self.find(to) {
            Some(target) => self.is_polled(target, queue),
            // The endpoint has been closed.
            None => true,
        };
        let is_moved = is_read || sends && self.profile.automatic_progress && !is_message;
        let packet = &self.packets[at];
        is_moved && !self.packets[..at].iter().any(|before| self.is_ordered(before, packet))
    }

    fn is_ordered(&self, before: &Packet, after: &Packet) -> bool {
        let is_pair = (before.from, before.to) == (after.from, after.to);
        let profile = &self.profile;
        is_pair
            && match (before.kind, after.kind) {
                (Kind::Write, Kind::Write) => {
                    profile.order & sys::FI_ORDER_WAW != 0
                        && before.length <= profile.max_ordered_write
                }
                (Kind::Message(_), Kind::Message(_)) => profile.order & sys::FI_ORDER_SAS != 0,
                _ => false,
            }
    }

    /// The bytes leave their source; the caller may reuse it if the completion is reported.
    fn read_source(&mut self, at: usize) {
        let (from, context) = (self.packets[at].from, self.packets[at].context);
        let bytes = match self.packets[at].kind {
            Kind::Read => Vec::new(),
            _ => {
                for piece in self.packets[at].source.clone() {
                    if let Err(what) = self.check_local(from, piece, 0) {
                        self.misuse(format!("closed under a transfer: {what}"));
                    }
                }
                gather(&self.packets[at].source)
            }
        };
        let packet = &mut self.packets[at];
        packet.bytes = Some(bytes);
        if matches!(packet.kind, Kind::Write | Kind::Message(_)) && !packet.delivery_complete {
            let kind = packet.kind;
            packet.is_reported = true;
            self.complete(from, context, kind);
        }
    }

    /// Reports an operation to the endpoint that posted it.
    fn complete(&mut self, from: usize, context: usize, kind: Kind) {
        let Some(endpoint) = self.endpoint(from) else { return };
        endpoint.in_flight -= 1;
        let queue = endpoint.queue;
        if context == 0 {
            return;
        }
        if !is_context_overwritten(context) {
            self.misuse("the context of an operation in flight was changed".to_owned());
        }
        let flags = match kind {
            Kind::Write => sys::FI_RMA | sys::FI_WRITE,
            Kind::Read => sys::FI_RMA | sys::FI_READ,
            Kind::Message(_) => sys::FI_MSG | sys::FI_SEND,
            Kind::Atomic(..) => sys::FI_ATOMIC,
        };
        self.report(
            queue,
            sys::fi_cq_tagged_entry { op_context: context as _, flags, ..Default::default() },
        );
    }

    fn is_full(&mut self, queue: usize) -> bool {
        self.queue(queue).is_some_and(|queue| queue.entries.len() >= queue.size)
    }

    fn report(&mut self, queue: usize, entry: sys::fi_cq_tagged_entry) {
        if self.is_full(queue) && self.profile.queues_overrun {
            self.misuse("a completion queue overran".to_owned());
        }
        let Some(queue) = self.queue(queue) else { return };
        queue.entries.push_back(entry);
        let entries = queue.entries.len();
        self.most_entries = self.most_entries.max(entries);
    }

    /// A packet arrives, unless its target has no space for it.
    fn deliver(&mut self, at: usize) {
        let Some(target) = self.find(self.packets[at].to) else {
            let packet = self.packets.remove(at);
            return self.complete_rest(&packet);
        };
        let queue = self.endpoint(target).unwrap().queue;
        let has_entry =
            self.packets[at].data.is_some() || matches!(self.packets[at].kind, Kind::Message(_));
        if has_entry && !self.profile.queues_overrun && self.is_full(queue) {
            return;
        }
        let receive = match self.packets[at].kind {
            Kind::Message(tag) => {
                let receives = &mut self.endpoint(target).unwrap().receives;
                let Some(place) = receives.iter().position(|receive| receive.tag == tag) else {
                    return;
                };
                receives.remove(place)
            }
            _ => None,
        };
        let mut packet = self.packets.remove(at);
        let is_pair = |other: &&Packet| (other.from, other.to) == (packet.from, packet.to);
        self.reordered += u64::from(self.packets[..at].iter().any(|other| is_pair(&other)));
        match receive {
            Some(receive) => self.take_message(target, &packet, &receive),
            None => {
                let part = self.next_part(&mut packet);
                self.access(target, &packet, part);
                if packet.parts.as_ref().is_some_and(|rest| !rest.is_empty()) {
                    return self.packets.insert(at, packet);
                }
            }
        }
        if let (Some(data), Kind::Write) = (packet.data, packet.kind) {
            let flags = sys::FI_RMA | sys::FI_REMOTE_WRITE | sys::FI_REMOTE_CQ_DATA;
            let (len, op_context) = (packet.length, std::ptr::null_mut());
            self.report(
                queue,
                sys::fi_cq_tagged_entry { op_context, flags, len, data, ..Default::default() },
            );
        }
        self.complete_rest(&packet);
    }

    /// Reports the completion to the initiator, unless it was reported before.
    fn complete_rest(&mut self, packet: &Packet) {
        if !packet.is_reported {
            self.complete(packet.from, packet.context, packet.kind);
        }
    }

    /// The next part of a packet that arrives: long writes arrive in parts, in any order.
    fn next_part(&mut self, packet: &mut Packet) -> Range<usize> {
        if packet.kind != Kind::Write || packet.length <= PART {
            return 0..packet.length;
        }
        let parts = || (0..packet.length).step_by(PART).collect();
        let rest = packet.parts.get_or_insert_with(parts);
        let from = rest.swap_remove(self.draw(rest.len()));
        from..(from + PART).min(packet.length)
    }

    fn take_message(&mut self, target: usize, packet: &Packet, receive: &Receive) {
        let bytes = packet.bytes.as_ref().unwrap();
        if let Err(what) = self.check_local(target, receive.piece, sys::FI_RECV) {
            self.misuse(format!("closed under a receive: {what}"));
        } else if bytes.len() > receive.piece.length || !is_context_overwritten(receive.context) {
            self.misuse("a message is too long, or a receive's context was changed".to_owned());
        } else {
            scatter(bytes, receive.piece.at);
        }
        let flags = sys::FI_RECV | if receive.tag.is_some() { sys::FI_TAGGED } else { sys::FI_MSG };
        let (len, op_context) = (bytes.len(), receive.context as _);
        let tag = receive.tag.unwrap_or(0);
        let queue = self.endpoint(target).unwrap().queue;
        self.report(
            queue,
            sys::fi_cq_tagged_entry { op_context, flags, len, tag, ..Default::default() },
        );
    }

    /// A one-sided operation accesses memory.
    fn access(&mut self, target: usize, packet: &Packet, part: Range<usize>) {
        let Endpoint { domain, vector, .. } = *self.endpoint(target).unwrap();
        let number = self.endpoint(packet.from).map(|endpoint| endpoint.number);
        if let (true, Some(number)) = (self.profile.needs_initiator_address, number) {
            let peers = match &self.objects[&vector].object {
                Object::Vector(peers) => peers,
                _ => unreachable!(),
            };
            if !peers.contains(&number) {
                self.misuse("the target has not inserted the initiator's address".to_owned());
                return;
            }
        }
        let (address, key) = packet.remote;
        let is_virtual = self.profile.mr_mode & sys::FI_MR_VIRT_ADDR != 0;
        let is_bound = self.profile.mr_mode & sys::FI_MR_ENDPOINT != 0;
        let right = match packet.kind {
            Kind::Read | Kind::Atomic(_, _, true) => sys::FI_REMOTE_READ,
            _ => sys::FI_REMOTE_WRITE,
        };
        let region = self.objects.values().find_map(|open| match &open.object {
            Object::Region(region)
                if region.key == key
                    && region.domain == domain
                    && region.is_enabled
                    && (!is_bound || region.endpoint == target)
                    && region.access & right != 0 =>
            {
                let from = if is_virtual {
                    (address as usize).wrapping_sub(region.base)
                } else {
                    address as usize
                };
                let end = from.checked_add(packet.length)?;
                (end <= region.length).then_some(region.base + from)
            }
            _ => None,
        });
        let Some(at) = region else {
            self.misuse(format!("{packet:?} reaches no region"));
            return;
        };
        let bytes = packet.bytes.as_ref().unwrap();
        match packet.kind {
            Kind::Write => scatter(&bytes[part.clone()], at + part.start),
            Kind::Read => {
                let there = [LocalSegment { at, length: packet.length, descriptor: 0 }];
                self.return_bytes(packet, &gather(&there));
            }
            Kind::Atomic(operation, compared, _) => {
                let there = [LocalSegment { at, length: 8, descriptor: 0 }];
                let old = u64::from_ne_bytes(gather(&there).try_into().unwrap());
                let operand = u64::from_ne_bytes(bytes.as_slice().try_into().unwrap());
                let new = match operation {
                    sys::FI_SUM => old.wrapping_add(operand),
                    sys::FI_CSWAP if old == compared => operand,
                    sys::FI_CSWAP => old,
                    _ => return self.note_misuse("the operation is not offered".to_owned()),
                };
                scatter(&new.to_ne_bytes(), at);
                self.return_bytes(packet, &old.to_ne_bytes());
            }
            Kind::Message(_) => unreachable!(),
        }
    }

    /// Returns bytes to the initiator of a read.
    fn return_bytes(&mut self, packet: &Packet, bytes: &[u8]) {
        let Some(result) = packet.result else { return };
        if !self.objects.contains_key(&packet.from) {
            return;
        }
        match self.check_local(packet.from, result, sys::FI_READ) {
            Ok(()) => scatter(bytes, result.at),
            Err(what) => self.note_misuse(format!("closed under a read: {what}")),
        }
    }

    /// The entry of one of the packets that arrived; no order is promised.
    pub(super) fn take_entry(&mut self, address: usize) -> Option<sys::fi_cq_tagged_entry> {
        let candidates = self.queue(address)?.entries.len().min(4);
        let at = if candidates == 0 { return None } else { self.draw(candidates) };
        self.queue(address)?.entries.remove(at)
    }
}

fn gather(pieces: &[LocalSegment]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for piece in pieces {
        for at in 0..piece.length {
            // SAFETY: local memory of an operation in flight, or of an open region; other
            // threads access it only by atomics or after that.
            bytes.push(unsafe { std::ptr::read_volatile((piece.at + at) as *const u8) });
        }
    }
    bytes
}

fn scatter(bytes: &[u8], to: usize) {
    for (at, byte) in bytes.iter().enumerate() {
        // SAFETY: as in `gather`.
        unsafe { std::ptr::write_volatile((to + at) as *mut u8, *byte) };
    }
}

/// Overwrites the space of a context that belongs to the provider.
pub(super) fn overwrite_context(context: usize) {
    for word in 0..8 {
        // SAFETY: a context is a `fi_context2`, which the provider owns until completion.
        unsafe { ((context + 8 * word) as *mut usize).write(context ^ word) };
    }
}

fn is_context_overwritten(context: usize) -> bool {
    // SAFETY: as in `overwrite_context`.
    (0..8).all(|word| unsafe { ((context + 8 * word) as *const usize).read() } == context ^ word)
}
