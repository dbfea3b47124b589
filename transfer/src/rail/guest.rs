//! What a rail does for its own agent: it visits others, puts into their regions and gets from
//! them.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use fabric::{Address, Options, Peer, RemoteMemory, RemoteRegion, TransferFlags};

use super::driver::{Driver, Party, Presence};
use super::flow::{Course, Flow, Part, Stage};
use super::host::AWAKE;
use super::message::{Chunk, Message};
use super::staging::{SLOT, Slots, part};
use super::{Bytes, Here, Move, Report};
use crate::agent::{LONGEST_NOTICE, Notice, Ticket};
use crate::error::{Error, ErrorKind, Result};
use crate::path::Operation;
use crate::region::Buffer;
use crate::share::random;

/// Longest one-sided operation: so that others come between.
const LONGEST_PART: u64 = 4 << 20;
/// One-sided operations, and copies for them, that are under way at a time.
const MOST_FLYING: usize = 48;
/// What a host may say of its staging memory.
const MOST_SLOTS: u32 = 1024;
const LEAST_SLOT: u64 = 4096;

/// Staging memory of a host's.
#[derive(Debug)]
struct TheirSlots {
    memory: RemoteMemory,
    length: u64,
    free: Vec<u32>,
}

/// What was asked of a host.
#[derive(Debug)]
struct Asked {
    stages: bool,
}

/// A host, as its guest knows it.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) session: u64,
    pub(super) peer: Peer,
    pub(super) presence: Presence,
    /// Until when it may take to say welcome; None when it did.
    meets_until: Option<Instant>,
    asked: HashMap<u64, Asked>,
    slots: Option<TheirSlots>,
    withdrawn: HashSet<u64>,
    /// Notices that wait to be sent, and those that were sent and not yet heard of.
    unsent: VecDeque<(Ticket, Notice)>,
    unheard: VecDeque<Ticket>,
    sent: u64,
    may_send: u64,
}

/// A transfer that is under way.
#[derive(Debug)]
pub(super) struct Moving {
    link: u32,
    ticket: Ticket,
    notice: Option<Notice>,
    bytes: Bytes,
    flow: Flow,
    failure: Option<Error>,
}

/// A part of one.
#[derive(Debug)]
pub(super) struct Flying {
    /// Its transfer, which may be given up already.
    of: u64,
    link: u32,
    part: Part,
    stage: Stage,
    here: Option<u32>,
    there: Option<u32>,
}

impl Driver {
    // ------------------------------------------------------------------- meeting

    pub(super) fn meet(
        &mut self,
        number: u32,
        identity: [u8; 16],
        address: Address,
        patience: Duration,
    ) {
        let peer = match self.addresses.insert(&address) {
            Ok(peer) => peer,
            Err(error) => {
                let outcome = Err(Error::of_fabric("connect to an agent", error));
                return self.tell(Report::Met { link: number, outcome });
            }
        };
        let session = match random("connect to an agent") {
            Ok(random) => u64::from_le_bytes(std::array::from_fn(|at| random[at])),
            Err(error) => return self.tell(Report::Met { link: number, outcome: Err(error) }),
        };
        let link = Link {
            session,
            peer,
            presence: Presence::new(),
            meets_until: Some(Instant::now() + patience),
            asked: HashMap::new(),
            slots: None,
            withdrawn: HashSet::new(),
            unsent: VecDeque::new(),
            unheard: VecDeque::new(),
            sent: 0,
            may_send: 0,
        };
        self.links.insert(number, link);
        let hello = Message::Hello {
            to: identity,
            from: self.home.identity,
            node: self.home.node,
            label: self.home.label.clone(),
            address: self.address().to_vec(),
        };
        self.say(Party::Link(number), &hello);
    }

    pub(super) fn open(
        &mut self,
        number: u32,
        request: u64,
        (region, ticket): (u64, u64),
        stages: bool,
    ) {
        let Some(link) = self.links.get_mut(&number) else {
            let outcome = Err(Error::new("open a region", ErrorKind::Closed, "it is not there"));
            return self.tell(Report::Opened { request, outcome });
        };
        link.asked.insert(request, Asked { stages });
        self.say(Party::Link(number), &Message::Open { request, region, ticket });
    }

    pub(super) fn leave(&mut self, number: u32) {
        self.say(Party::Link(number), &Message::Bye);
        self.drop_link(number, "it was left");
    }

    pub(super) fn lose_link(&mut self, number: u32, why: &str) {
        if self.links.contains_key(&number) {
            self.drop_link(number, why);
            self.tell(Report::Lost { link: number, why: why.to_owned() });
        }
    }

    fn drop_link(&mut self, number: u32, why: &str) {
        let Some(link) = self.links.remove(&number) else { return };
        let closed = |operation| Error::new(operation, ErrorKind::Closed, why);
        if link.meets_until.is_some() {
            let outcome = Err(closed("connect to an agent"));
            self.tell(Report::Met { link: number, outcome });
        }
        for request in link.asked.into_keys() {
            self.tell(Report::Opened { request, outcome: Err(closed("open a region")) });
        }
        let unsent = link.unsent.into_iter().map(|(ticket, _)| ticket);
        for ticket in link.unheard.into_iter().chain(unsent) {
            self.tell(Report::Done { ticket, outcome: Err(closed("tell a peer")) });
        }
        let of_it = self.moves.iter().filter(|(_, moving)| moving.link == number);
        let of_it: Vec<_> = of_it.map(|(key, _)| *key).collect();
        for key in of_it {
            let Some(moving) = self.moves.remove(&key) else { continue };
            self.tell(Report::Done { ticket: moving.ticket, outcome: Err(closed("transfer")) });
        }
        // What was posted keeps its slot until the provider is through with it; what waited for
        // the peer, or was not posted, is over.
        let is_over = |number: &u64, flying: &Flying, unposted: &VecDeque<u64>| {
            matches!(flying.stage, Stage::Ask | Stage::Deliver) || unposted.contains(number)
        };
        let unposted = &self.unposted;
        let over = self.flying.iter().filter(|(_, flying)| flying.link == number);
        let over: Vec<_> = over
            .filter(|(key, flying)| is_over(key, flying, unposted))
            .map(|(key, _)| *key)
            .collect();
        for key in over {
            self.unposted.retain(|other| *other != key);
            if let Some(flying) = self.flying.remove(&key) {
                self.give_back(&flying);
            }
        }
        self.forget_waiting(Party::Link(number));
        let _ = self.addresses.remove(link.peer);
    }

    pub(super) fn look_after_links(&mut self, now: Instant) {
        let lost_after = self.lost_after;
        let (mut lost, mut ask) = (Vec::new(), Vec::new());
        for (number, link) in &mut self.links {
            if link.meets_until.is_some_and(|end| now >= end) {
                lost.push((*number, "it did not answer in time"));
            } else if link.meets_until.is_none() {
                if link.presence.is_lost(now, lost_after) {
                    lost.push((*number, "it does not answer any more"));
                } else if link.presence.asks(now, lost_after) {
                    ask.push(*number);
                }
            }
        }
        for (number, why) in lost {
            self.lose_link(number, why);
        }
        for number in ask {
            self.say(Party::Link(number), &Message::Ping { number: 0 });
        }
    }

    // ------------------------------------------------------------------- hearing

    pub(super) fn guest_hears(&mut self, session: u64, message: Message) {
        let mut links = self.links.iter_mut().filter(|(_, link)| link.session == session);
        let Some((number, link)) = links.next().map(|(number, link)| (*number, link)) else {
            return;
        };
        link.presence.is_heard();
        match message {
            Message::Welcome { may_send, .. } if link.meets_until.take().is_some() => {
                link.may_send = may_send;
                self.tell(Report::Met { link: number, outcome: Ok(()) });
            }
            Message::Refused { request: 0, refusal } => {
                let outcome = Err(refusal.into_error("connect to an agent"));
                link.meets_until = None;
                self.tell(Report::Met { link: number, outcome });
                self.drop_link(number, "it does not let us in");
            }
            Message::Refused { request, refusal } if link.asked.remove(&request).is_some() => {
                let outcome = Err(refusal.into_error("open a region"));
                self.tell(Report::Opened { request, outcome });
            }
            Message::Opened { request } => match link.asked.get(&request) {
                Some(Asked { stages: true }) if link.slots.is_none() => {
                    self.say(Party::Link(number), &Message::Stage { request });
                }
                Some(_) => {
                    link.asked.remove(&request);
                    self.tell(Report::Opened { request, outcome: Ok(()) });
                }
                None => {}
            },
            Message::Staging { request, slots, slot_length, memory }
                if link.asked.remove(&request).is_some() =>
            {
                let outcome = self.take_staging(number, slots, slot_length, &memory);
                self.tell(Report::Opened { request, outcome });
            }
            Message::Done { number: chunk, refusal } => {
                let is_ours = self.flying.get(&chunk).is_some_and(|flying| {
                    flying.link == number && matches!(flying.stage, Stage::Ask | Stage::Deliver)
                });
                if is_ours {
                    let refused = refusal.map(|refusal| refusal.into_error("transfer"));
                    self.stage_is_over(chunk, refused.map_or(Ok(()), Err));
                }
            }
            Message::Heard { notices, may_send } => {
                let known = link.sent - link.unheard.len() as u64;
                if notices < known || notices > link.sent {
                    return self.lose_link(number, "it heard notices that were not sent");
                }
                link.may_send = link.may_send.max(may_send);
                let heard: Vec<_> = link.unheard.drain(..(notices - known) as usize).collect();
                for ticket in heard {
                    self.tell(Report::Done { ticket, outcome: Ok(()) });
                }
                self.send_notices(number);
            }
            Message::Withdrawn { region } => {
                link.withdrawn.insert(region);
                self.tell(Report::Withdrawn { link: number, region });
                for moving in self.moves.values_mut() {
                    if moving.link == number && moving.bytes.there.region == region {
                        moving.flow.give_up();
                        moving.failure.get_or_insert_with(withdrawn);
                    }
                }
                self.end_moves();
                self.release(number, region);
            }
            _ => {}
        }
    }

    fn take_staging(&mut self, number: u32, slots: u32, length: u64, memory: &[u8]) -> Result<()> {
        let operation = "open a region";
        let of_fabric = |error| Error::of_fabric(operation, error);
        let remote = RemoteRegion::decode(memory).map_err(of_fabric)?;
        let memory = self.domain.attach(&remote).map_err(of_fabric)?;
        let is_good = (1..=MOST_SLOTS).contains(&slots)
            && length >= LEAST_SLOT
            && length.checked_mul(u64::from(slots)).is_some_and(|all| all <= memory.len());
        if !is_good {
            let detail = format!("{slots} slots of {length} bytes in {}", memory.len());
            return Err(Error::new(operation, ErrorKind::Malformed, detail));
        }
        if let Some(link) = self.links.get_mut(&number) {
            let free = (0..slots).rev().collect();
            link.slots.get_or_insert(TheirSlots { memory, length, free });
        }
        Ok(())
    }

    /// Tells the host that nothing is under way any more with a region that it withdrew.
    fn release(&mut self, number: u32, region: u64) {
        let is_busy =
            |moving: &Moving| moving.link == number && moving.bytes.there.region == region;
        let is_withdrawn =
            self.links.get(&number).is_some_and(|link| link.withdrawn.contains(&region));
        if is_withdrawn && !self.moves.values().any(is_busy) {
            self.say(Party::Link(number), &Message::Released { region });
        }
    }

    // ------------------------------------------------------------------- transfers

    /// One-sided operations tell the host's thread nothing, and with many providers nothing moves
    /// there while it sleeps. So it is told to stay awake while something is under way.
    pub(super) fn rouse_hosts(&mut self) {
        if self.moves.is_empty() {
            return;
        }
        let now = Instant::now();
        if now < self.next_rouse {
            return;
        }
        self.next_rouse = now + AWAKE / 2;
        let mut busy: Vec<_> = self.moves.values().map(|moving| moving.link).collect();
        busy.sort_unstable();
        busy.dedup();
        for link in busy {
            self.say(Party::Link(link), &Message::Rouse);
        }
    }

    pub(super) fn begin_move(&mut self, told: Move) {
        let Move { link: number, ticket, notice, bytes } = told;
        let refuse = |kind, why: &str| Err(Error::new("transfer", kind, why));
        let Some(link) = self.links.get_mut(&number) else {
            let outcome = refuse(ErrorKind::Closed, "it is not there any more");
            return self.tell(Report::Done { ticket, outcome });
        };
        let Some(bytes) = bytes else {
            return match notice {
                Some(notice) => {
                    link.unsent.push_back((ticket, notice));
                    self.send_notices(number);
                }
                None => self.tell(Report::Done { ticket, outcome: Ok(()) }),
            };
        };
        if link.withdrawn.contains(&bytes.there.region) {
            return self.tell(Report::Done { ticket, outcome: Err(withdrawn()) });
        }
        let course = Course {
            operation: bytes.operation,
            stages_here: matches!(bytes.here, Here::Device(_)),
            stages_there: bytes.there.memory.is_none(),
        };
        let mut longest = LONGEST_PART.min(self.domain.capabilities().max_message_size as u64);
        if course.stages_here {
            longest = longest.min(SLOT);
            if self.slots.is_none() {
                match self.make_slots() {
                    Ok(slots) => self.slots = Some(slots),
                    Err(error) => return self.tell(Report::Done { ticket, outcome: Err(error) }),
                }
            }
        }
        let link = self.links.get(&number);
        if course.stages_there {
            let Some(slots) = link.and_then(|link| link.slots.as_ref()) else {
                let outcome = refuse(ErrorKind::NoPath, "it gave no memory to stage with");
                return self.tell(Report::Done { ticket, outcome });
            };
            longest = longest.min(slots.length);
        }
        let mut bytes = bytes;
        let flow = Flow::new(course, std::mem::take(&mut bytes.blocks), longest);
        let key = self.number();
        let moving = Moving { link: number, ticket, notice, bytes, flow, failure: None };
        self.moves.insert(key, moving);
        self.end_moves();
        self.rouse_hosts();
        self.advance();
    }

    fn make_slots(&mut self) -> Result<Slots> {
        Slots::new(|buffer| {
            let region = self.register(&Buffer::Host(buffer.clone()), None)?;
            region.ok_or_else(|| Error::new("transfer", ErrorKind::Failed, "not registered"))
        })
    }

    /// Begins parts for which there is room, and posts what found none. True if any was.
    pub(super) fn advance(&mut self) -> bool {
        let mut has_moved = false;
        for _ in 0..self.unposted.len() {
            let Some(chunk) = self.unposted.pop_front() else { break };
            has_moved |= self.go(chunk);
        }
        // The oldest first, and each as much as it can have.
        let mut keys: Vec<_> = if self.flying.len() < MOST_FLYING && self.unposted.is_empty() {
            let waiting = self.moves.iter().filter(|(_, moving)| moving.flow.has_more());
            waiting.map(|(key, _)| *key).collect()
        } else {
            return has_moved;
        };
        keys.sort_unstable();
        for key in keys {
            while self.flying.len() < MOST_FLYING && self.unposted.is_empty() {
                if !self.begin_part(key) {
                    break;
                }
                has_moved = true;
            }
        }
        has_moved
    }

    fn begin_part(&mut self, key: u64) -> bool {
        let Some(moving) = self.moves.get_mut(&key) else { return false };
        let course = moving.flow.course;
        let number = moving.link;
        let Some(link) = self.links.get_mut(&number) else { return false };
        let has_mine = !course.stages_here || self.slots.as_ref().is_some_and(Slots::has_free);
        let their_free = link.slots.as_ref().is_some_and(|slots| !slots.free.is_empty());
        if !has_mine || course.stages_there && !their_free {
            return false;
        }
        let Some(part) = moving.flow.begin() else { return false };
        let here = self.slots.as_mut().filter(|_| course.stages_here).and_then(Slots::take);
        let there = link.slots.as_mut().filter(|_| course.stages_there);
        let there = there.and_then(|slots| slots.free.pop());
        let stage = course.first();
        let chunk = self.number();
        self.flying.insert(chunk, Flying { of: key, link: number, part, stage, here, there });
        self.go(chunk);
        true
    }

    /// Does what a part's stage asks for. False if there was no room for it.
    fn go(&mut self, chunk: u64) -> bool {
        match self.try_to_go(chunk) {
            Ok(true) => true,
            Ok(false) => {
                self.unposted.push_back(chunk);
                false
            }
            Err(error) => {
                self.stage_is_over(chunk, Err(error));
                true
            }
        }
    }

    fn try_to_go(&mut self, chunk: u64) -> Result<bool> {
        let gone = || Error::new("transfer", ErrorKind::Closed, "it is not there any more");
        let flying = self.flying.get(&chunk).ok_or_else(gone)?;
        let moving = self.moves.get(&flying.of).ok_or_else(gone)?;
        let link = self.links.get(&flying.link).ok_or_else(gone)?;
        let Part { here, there, length } = flying.part;
        match flying.stage {
            Stage::Fetch | Stage::Store => {
                let (Here::Device(memory), Some(slot)) = (&moving.bytes.here, flying.here) else {
                    return Err(gone());
                };
                let device = memory.mapped_for();
                let slots = self.slots.as_ref().ok_or_else(gone)?;
                let slot = slots.pinned(slot, length, device)?;
                let memory = part(memory, here, length)?;
                let (to, from) = match flying.stage {
                    Stage::Fetch => (&slot, &memory),
                    _ => (&memory, &slot),
                };
                self.copies.begin(chunk, device, to, from)?;
                Ok(true)
            }
            Stage::Ask | Stage::Deliver => {
                let told = Chunk {
                    number: chunk,
                    region: moving.bytes.there.region,
                    ticket: moving.bytes.there.ticket,
                    slot: flying.there.unwrap_or_default(),
                    offset: there,
                    length,
                };
                let number = flying.link;
                let message = match flying.stage {
                    Stage::Ask => Message::Fetch(told),
                    _ => Message::Deliver(told),
                };
                self.say(Party::Link(number), &message);
                Ok(true)
            }
            Stage::Write | Stage::Read => {
                let operation = moving.bytes.operation;
                let name = if operation == Operation::Put { "put" } else { "get" };
                let of_fabric = |error| Error::of_fabric(name, error);
                let local = match (&moving.bytes.here, flying.here) {
                    (Here::Registered(region), _) => {
                        region.slice(here as usize..(here + length) as usize)
                    }
                    (Here::Device(_), Some(slot)) => {
                        self.slots.as_ref().ok_or_else(gone)?.registered(slot, length)
                    }
                    (Here::Device(_), None) => return Err(gone()),
                };
                let remote = match (&moving.bytes.there.memory, flying.there, &link.slots) {
                    (Some(memory), ..) => memory.slice(there..there + length),
                    (None, Some(slot), Some(slots)) => {
                        let start = u64::from(slot) * slots.length;
                        slots.memory.slice(start..start + length)
                    }
                    _ => return Err(gone()),
                };
                let (local, remote) = (local.map_err(of_fabric)?, remote.map_err(of_fabric)?);
                let (peer, stage) = (link.peer, flying.stage);
                let token = self.post_data(chunk);
                let options = Options::token(token).patience(Duration::ZERO);
                let (endpoint, queue) = (&mut self.endpoint, &mut self.queue);
                let posted = match stage {
                    // What comes behind it relies on the data being there.
                    Stage::Write => {
                        let options = options.flags(TransferFlags::DELIVERY_COMPLETE);
                        endpoint.write(queue, peer, &local, &remote, options)
                    }
                    _ => endpoint.read(queue, peer, &local, &remote, options),
                };
                match posted {
                    Ok(_) => Ok(true),
                    Err(error) => {
                        self.unpost(token);
                        match error.kind() {
                            fabric::ErrorKind::WouldBlock => Ok(false),
                            _ => Err(of_fabric(error)),
                        }
                    }
                }
            }
        }
    }

    /// A part is through with a stage.
    pub(super) fn stage_is_over(&mut self, chunk: u64, outcome: Result<()>) {
        let Some(flying) = self.flying.get_mut(&chunk) else { return };
        let of = flying.of;
        let next = match (&outcome, self.moves.get(&of)) {
            (Ok(()), Some(moving)) if moving.failure.is_none() => {
                moving.flow.course.after(flying.stage)
            }
            _ => None,
        };
        if let Some(next) = next {
            flying.stage = next;
            self.go(chunk);
            return;
        }
        let Some(flying) = self.flying.remove(&chunk) else { return };
        self.give_back(&flying);
        let Some(moving) = self.moves.get_mut(&of) else { return };
        moving.flow.end();
        if let Err(error) = outcome {
            moving.flow.give_up();
            moving.failure.get_or_insert(error);
        }
        if moving.flow.is_over() {
            self.end_moves();
        }
    }

    fn give_back(&mut self, flying: &Flying) {
        if let (Some(slot), Some(slots)) = (flying.here, &mut self.slots) {
            slots.give_back(slot);
        }
        let link = self.links.get_mut(&flying.link);
        let slots = link.and_then(|link| link.slots.as_mut());
        if let (Some(slot), Some(slots)) = (flying.there, slots) {
            slots.free.push(slot);
        }
    }

    /// Tells of transfers that are over.
    fn end_moves(&mut self) {
        let over = self.moves.iter().filter(|(_, moving)| moving.flow.is_over());
        let mut over: Vec<_> = over.map(|(key, _)| *key).collect();
        over.sort_unstable();
        for key in over {
            let Some(moving) = self.moves.remove(&key) else { continue };
            let Moving { link, ticket, notice, bytes, failure, .. } = moving;
            let region = bytes.there.region;
            drop(bytes);
            match (failure, notice) {
                (Some(error), _) => self.tell(Report::Done { ticket, outcome: Err(error) }),
                (None, None) => self.tell(Report::Done { ticket, outcome: Ok(()) }),
                (None, Some(notice)) => {
                    if let Some(link) = self.links.get_mut(&link) {
                        link.unsent.push_back((ticket, notice));
                    }
                    self.send_notices(link);
                }
            }
            self.release(link, region);
        }
    }

    /// Sends notices as long as the host has room for them.
    fn send_notices(&mut self, number: u32) {
        const { assert!(LONGEST_NOTICE < 256) };
        while let Some(link) = self.links.get_mut(&number) {
            if link.sent >= link.may_send {
                return;
            }
            let Some((ticket, notice)) = link.unsent.pop_front() else { return };
            let message = Message::Notice { number: link.sent, notice };
            link.sent += 1;
            link.unheard.push_back(ticket);
            self.say(Party::Link(number), &message);
        }
    }
}

fn withdrawn() -> Error {
    Error::new("transfer", ErrorKind::Stale, "the region was withdrawn")
}
