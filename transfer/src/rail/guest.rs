//! What a rail does for its own agent: it puts into the regions of others, and gets from them.

use std::time::{Duration, Instant};

use fabric::{Options, TransferFlags};

use super::driver::{Driver, Party};
use super::flow::{Course, Flow, Part, Stage};
use super::host::AWAKE;
use super::links::withdrawn;
use super::message::{Chunk, Message};
use super::staging::{SLOT, Slots, part};
use super::{Bytes, Here, Move, Report};
use crate::agent::{Notice, Ticket};
use crate::error::{Error, ErrorKind, Result};
use crate::path::Operation;
use crate::region::Buffer;

/// Longest one-sided operation: so that others come between.
const LONGEST_PART: u64 = 4 << 20;
/// Parts of a peer's transfers that are under way at a time, and their bytes: enough to fill a wire,
/// and few enough for a question and its answer to come through between them.
const MOST_FLYING: usize = 48;
const MOST_BYTES: u64 = 32 << 20;

/// A transfer that is under way.
#[derive(Debug)]
pub(super) struct Moving {
    pub(super) link: u32,
    pub(super) ticket: Ticket,
    notice: Option<Notice>,
    pub(super) bytes: Bytes,
    pub(super) flow: Flow,
    pub(super) failure: Option<Error>,
    /// Its peer is gone: until when what was posted for it is waited for.
    pub(super) ends_by: Option<Instant>,
}

/// A part of one.
#[derive(Debug)]
pub(super) struct Flying {
    /// Its transfer, which may be given up already.
    of: u64,
    pub(super) link: u32,
    part: Part,
    pub(super) stage: Stage,
    here: Option<u32>,
    there: Option<u32>,
    /// Which of our staging memories `here` is a slot of.
    generation: u32,
}

impl Driver {
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
        let busy = self.links.iter().filter(|(_, link)| link.flying > 0);
        let busy: Vec<_> = busy.map(|(number, _)| *number).collect();
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
        let (link, failure, ends_by) = (number, None, None);
        let moving = Moving { link, ticket, notice, bytes, flow, failure, ends_by };
        let is_over = moving.flow.is_over();
        self.moves.insert(key, moving);
        if is_over {
            self.end_move(key);
        } else {
            self.pending.insert(key);
        }
        self.advance();
        self.rouse_hosts();
    }

    fn slots_of(&self, generation: u32) -> Option<&Slots> {
        match generation == self.slots_generation {
            true => self.slots.as_ref(),
            false => self.slots_aside.get(&generation),
        }
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
        for link in self.links.values_mut() {
            link.is_stuck = false;
        }
        for _ in 0..self.unposted.len() {
            let Some(chunk) = self.unposted.pop_front() else { break };
            has_moved |= self.go(chunk);
        }
        // One part of each transfer, the oldest first, and again: so none holds up the others.
        let mut keys: Vec<_> = self.pending.iter().copied().take(2 * MOST_FLYING).collect();
        while !keys.is_empty() {
            keys.retain(|key| self.begin_part(*key));
            has_moved |= !keys.is_empty();
        }
        has_moved
    }

    fn begin_part(&mut self, key: u64) -> bool {
        let Some(moving) = self.moves.get_mut(&key).filter(|moving| moving.flow.has_more()) else {
            self.pending.remove(&key);
            return false;
        };
        let course = moving.flow.course;
        let number = moving.link;
        let Some(link) = self.links.get_mut(&number) else { return false };
        let has_room = !link.is_stuck && link.flying < MOST_FLYING && (link.bytes < MOST_BYTES);
        let has_mine = !course.stages_here || self.slots.as_ref().is_some_and(Slots::has_free);
        let has_theirs =
            !course.stages_there || link.slots.as_ref().is_some_and(|slots| !slots.free.is_empty());
        if !(has_room && has_mine && has_theirs) {
            return false;
        }
        let Some(part) = moving.flow.begin() else { return false };
        let here = self.slots.as_mut().filter(|_| course.stages_here).and_then(Slots::take);
        let there = link.slots.as_mut().filter(|_| course.stages_there);
        let there = there.and_then(|slots| slots.free.pop());
        link.flying += 1;
        link.bytes += part.length;
        let (stage, generation) = (course.first(), self.slots_generation);
        let chunk = self.number();
        let flying = Flying { of: key, link: number, part, stage, here, there, generation };
        self.flying.insert(chunk, flying);
        self.go(chunk);
        true
    }

    /// Does what a part's stage asks for. False if there was no room for it.
    fn go(&mut self, chunk: u64) -> bool {
        match self.try_to_go(chunk) {
            Ok(true) => true,
            Ok(false) => {
                self.unposted.push_back(chunk);
                let link = self.flying.get(&chunk).map(|flying| flying.link);
                if let Some(link) = link.and_then(|link| self.links.get_mut(&link)) {
                    link.is_stuck = true;
                }
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
                let slots = self.slots_of(flying.generation).ok_or_else(gone)?;
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
                        self.slots_of(flying.generation).ok_or_else(gone)?.registered(slot, length)
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
                let token = self.post_data(chunk, peer);
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
        if let (Ok(()), Some(link)) = (&outcome, self.links.get_mut(&flying.link)) {
            link.presence.is_heard();
        }
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
        if let (Err(error), Some(moving)) = (outcome, self.moves.get_mut(&of)) {
            moving.flow.give_up();
            moving.failure.get_or_insert(error);
        }
        self.end_part(chunk);
    }

    /// Nothing is under way any more for a part: its slots are free, and its transfer is over if it
    /// was the last.
    pub(super) fn end_part(&mut self, chunk: u64) {
        let Some(flying) = self.flying.remove(&chunk) else { return };
        let is_ours = flying.generation == self.slots_generation;
        if let (Some(slot), Some(slots), true) = (flying.here, &mut self.slots, is_ours) {
            slots.give_back(slot);
        }
        if !is_ours && !self.flying.values().any(|other| other.generation == flying.generation) {
            self.slots_aside.remove(&flying.generation);
        }
        if let Some(link) = self.links.get_mut(&flying.link) {
            link.flying -= 1;
            link.bytes -= flying.part.length;
            if let (Some(slot), Some(slots)) = (flying.there, &mut link.slots) {
                slots.free.push(slot);
            }
        }
        let Some(moving) = self.moves.get_mut(&flying.of) else { return };
        moving.flow.end();
        if moving.flow.is_over() {
            self.end_move(flying.of);
        }
    }

    /// Where a peer that is gone has parts under way in our slots, those are not used again: the
    /// queue keeps their memory. The next transfer gets others.
    pub(super) fn set_slots_aside(&mut self, link: u32) {
        let generation = self.slots_generation;
        let holds = |flying: &Flying| {
            flying.link == link && flying.here.is_some() && flying.generation == generation
        };
        if self.flying.values().any(holds) {
            // Others that have some go on with them.
            if let Some(slots) = self.slots.take() {
                self.slots_aside.insert(generation, slots);
            }
            self.slots_generation += 1;
        }
    }

    /// Tells of transfers that are over.
    pub(super) fn end_moves(&mut self) {
        let over = self.moves.iter().filter(|(_, moving)| moving.flow.is_over());
        let over: Vec<_> = over.map(|(key, _)| *key).collect();
        for key in over {
            self.end_move(key);
        }
    }

    fn end_move(&mut self, key: u64) {
        self.pending.remove(&key);
        let Some(moving) = self.moves.remove(&key) else { return };
        let Moving { link: number, ticket, notice, bytes, failure, .. } = moving;
        let region = bytes.there.region;
        drop(bytes);
        match (failure, notice, self.links.get_mut(&number)) {
            (Some(error), ..) => self.tell(Report::Done { ticket, outcome: Err(error) }),
            (None, None, _) => self.tell(Report::Done { ticket, outcome: Ok(()) }),
            (None, Some(notice), Some(link)) => {
                link.unsent.push_back((ticket, notice));
                self.send_notices(number);
            }
            (None, Some(_), None) => {
                let outcome = Err(Error::new("tell a peer", ErrorKind::Closed, "it is gone"));
                self.tell(Report::Done { ticket, outcome });
            }
        }
        self.release(number, region);
    }

    /// Sends notices as long as the host has room for them.
    pub(super) fn send_notices(&mut self, number: u32) {
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
