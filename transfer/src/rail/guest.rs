//! What a rail does for its own agent: it puts into the regions of others, and gets from them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric::{Options, TransferFlags};

use super::driver::{Driver, LOOK, Party};
use super::flow::{Course, Flow, Part, Stage};
use super::host::AWAKE;
use super::message::{Chunk, Message};
use super::post::Posted;
use super::replies::withdrawn;
use super::staging::{SLOT, Slot, Slots, part};
use super::{Bytes, Here, Move, Report};
use crate::agent::{Notice, Token};
use crate::error::{Error, ErrorKind, Result};
use crate::path::Operation;

/// Longest one-sided operation: so that others come between.
const LONGEST_PART: u64 = 4 << 20;
/// Parts of a peer's transfers that are under way at a time, and their bytes: enough to fill a wire,
/// and few enough for a question and its answer to come through between them.
const MOST_FLYING: usize = 48;
const MOST_BYTES: u64 = 32 << 20;
/// How often a part is posted that comes to nothing since the connection breaks, before the peer is
/// lost by this rail.
const MOST_POSTINGS: u32 = 64;

/// A transfer that is under way.
#[derive(Debug)]
pub(super) struct Moving {
    pub(super) link: u32,
    pub(super) token: Token,
    notice: Option<Notice>,
    pub(super) bytes: Bytes,
    pub(super) flow: Flow,
    pub(super) failure: Option<Error>,
    /// Why its peer is gone. What is not moved then may go another way.
    pub(super) stranded: Option<String>,
    /// Its peer is gone: until when what was posted for it is waited for.
    pub(super) ends_by: Option<Instant>,
}

/// A part of one.
#[derive(Debug)]
pub(super) struct Flying {
    /// Its transfer, which may be given up already.
    of: u64,
    pub(super) link: u32,
    /// With the peer, who may have another one by now.
    pub(super) session: u64,
    part: Part,
    pub(super) stage: Stage,
    postings: u32,
    here: Option<Slot>,
    there: Option<u32>,
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
            // One that does not take what was said before is not roused by saying more.
            if !self.waiting.iter().any(|waiting| waiting.to == Party::Link(link)) {
                self.say(Party::Link(link), &Message::Rouse);
            }
        }
    }

    pub(crate) fn begin_move(&mut self, told: Move) {
        let refuse = |kind, why: &str| Err(Error::new("transfer", kind, why));
        let Some(link) = self.links.get_mut(&told.link).filter(|link| link.is_up()) else {
            let why = "it is not there any more".to_owned();
            return self.tell(Report::Stranded { told: Box::new(told), why });
        };
        let Move { link: number, token, notice, bytes } = told;
        let Some(bytes) = bytes else {
            return match notice {
                Some(notice) => {
                    link.unsent.push_back((token, notice));
                    self.send_notices(number);
                }
                None => self.tell(Report::Done { token, outcome: Ok(()) }),
            };
        };
        if !link.known.wanted.contains_key(&bytes.there.region) {
            // The agent does not know yet.
            return self.tell(Report::Done { token, outcome: Err(withdrawn()) });
        }
        let course = Course {
            operation: bytes.operation,
            stages_here: matches!(bytes.here, Here::Device(_)),
            stages_there: bytes.there.memory.is_none(),
        };
        let mut longest = LONGEST_PART.min(self.domain.capabilities().max_message_size as u64);
        if course.stages_here {
            longest = longest.min(SLOT);
            if let Err(error) = self.have_slots() {
                return self.tell(Report::Done { token, outcome: Err(error) });
            }
        }
        let link = self.links.get(&number);
        if course.stages_there {
            let Some(slots) = link.and_then(|link| link.slots.as_ref()) else {
                let outcome = refuse(ErrorKind::NoPath, "it gave no memory to stage with");
                return self.tell(Report::Done { token, outcome });
            };
            longest = longest.min(slots.length);
        }
        let mut bytes = bytes;
        let flow = Flow::new(course, std::mem::take(&mut bytes.blocks), longest);
        let key = self.number();
        let (failure, stranded, ends_by) = (None, None, None);
        let moving =
            Moving { link: number, token, notice, bytes, flow, failure, stranded, ends_by };
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

    /// Makes slots of ours, if there are none: nothing was staged here before, or those that there
    /// were had to be [set aside](Self::set_slots_aside).
    fn have_slots(&mut self) -> Result<()> {
        if self.slots.is_none() {
            let slots = Slots::new(|buffer| self.register_slots(buffer, None))?;
            self.slots = Some(Arc::new(slots));
        }
        Ok(())
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
        let Some(moving) = self.moves.get(&key).filter(|moving| moving.flow.has_more()) else {
            self.pending.remove(&key);
            return false;
        };
        let (course, number) = (moving.flow.course, moving.link);
        if course.stages_here
            && let Err(error) = self.have_slots()
        {
            self.fail_move(key, error);
            return false;
        }
        let Some(link) = self.links.get_mut(&number) else { return false };
        let has_room = !link.is_stuck && link.flying < MOST_FLYING && (link.bytes < MOST_BYTES);
        let has_mine =
            !course.stages_here || self.slots.as_ref().is_some_and(|slots| slots.has_free());
        let has_theirs =
            !course.stages_there || link.slots.as_ref().is_some_and(|slots| !slots.free.is_empty());
        if !(has_room && has_mine && has_theirs) {
            return false;
        }
        let begun = self.moves.get_mut(&key).and_then(|moving| moving.flow.begin());
        let Some(part) = begun else { return false };
        let here = self.slots.as_ref().filter(|_| course.stages_here).and_then(Slot::take);
        let there = link.slots.as_mut().filter(|_| course.stages_there);
        let there = there.and_then(|slots| slots.free.pop());
        link.flying += 1;
        link.bytes += part.length;
        let (stage, session) = (course.first(), link.session.id);
        let chunk = self.number();
        let flying =
            Flying { of: key, link: number, session, part, stage, postings: 0, here, there };
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
        // Copies on this side go on without it.
        let link = self.links.get(&flying.link).filter(|link| link.session.id == flying.session);
        let Part { here, there, length } = flying.part;
        match flying.stage {
            Stage::Fetch | Stage::Store => {
                let (Here::Device(memory), Some(slot)) = (&moving.bytes.here, &flying.here) else {
                    return Err(gone());
                };
                let device = memory.mapped_for();
                let slot = slot.pinned(length, device)?;
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
                let link = link.ok_or_else(gone)?;
                let operation = moving.bytes.operation;
                let name = if operation == Operation::Put { "put" } else { "get" };
                let of_fabric = |error| Error::of_fabric(name, error);
                let local = match (&moving.bytes.here, &flying.here) {
                    (Here::Registered(region), _) => {
                        region.slice(here as usize..(here + length) as usize)
                    }
                    (Here::Device(_), Some(slot)) => slot.registered(length),
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
                let (peer, stage) = (link.session.peer, flying.stage);
                let token = self.post(Posted::Data(chunk, peer));
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
                        self.posted(token);
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
        let (of, stage) = (flying.of, flying.stage);
        let link = self.links.get_mut(&flying.link);
        let mut link = link.filter(|link| link.session.id == flying.session);
        let moving = self.moves.get_mut(&of).filter(|moving| moving.failure.is_none());
        let Some(moving) = moving else { return self.end_part(chunk) };
        match outcome {
            Ok(()) => {
                if let Some(link) = &mut link {
                    link.session.presence.is_seen();
                }
                match moving.flow.course.after(stage) {
                    None => self.end_part(chunk),
                    // Without the peer only what a device does here can be gone on with.
                    Some(next) if link.is_some() || next == Stage::Store => {
                        flying.stage = next;
                        flying.postings = 0;
                        self.go(chunk);
                    }
                    Some(_) => self.give_part_back(chunk),
                }
            }
            // The provider has it no more, and it may be half done: it is done again, onto the same
            // bytes, and whoever waits for the transfer waits for that.
            Err(error)
                if matches!(stage, Stage::Write | Stage::Read)
                    && matches!(error.kind(), ErrorKind::Closed | ErrorKind::DeadlineExceeded) =>
            {
                flying.postings += 1;
                match link {
                    Some(_) if flying.postings < MOST_POSTINGS => {
                        self.resting.push((Instant::now() + LOOK, chunk));
                    }
                    // This rail does not carry it. Another one may.
                    Some(_) => {
                        let party = Party::Link(flying.link);
                        self.resting.push((Instant::now(), chunk));
                        self.lose(party, &format!("what is posted comes back: {error}"));
                    }
                    None => self.give_part_back(chunk),
                }
            }
            Err(error) => self.fail_part(chunk, error),
        }
    }

    /// A part failed, and its transfer with it.
    pub(super) fn fail_part(&mut self, chunk: u64, error: Error) {
        if let Some(of) = self.flying.get(&chunk).map(|flying| flying.of) {
            self.fail_move(of, error);
        }
        self.end_part(chunk);
    }

    /// A transfer failed. It is over when the parts of it are that are under way.
    fn fail_move(&mut self, key: u64, error: Error) {
        let Some(moving) = self.moves.get_mut(&key) else { return };
        moving.flow.give_up();
        moving.failure.get_or_insert(error);
        if moving.flow.is_over() {
            self.end_move(key);
        }
    }

    /// A part of a transfer whose peer is gone was not moved, and nothing is under way for it.
    pub(super) fn give_part_back(&mut self, chunk: u64) {
        let flying = self.flying.get(&chunk).map(|flying| (flying.of, flying.part));
        if let Some((of, part)) = flying
            && let Some(moving) = self.moves.get_mut(&of)
        {
            moving.flow.give_back(part);
        }
        self.end_part(chunk);
    }

    /// Posts again what came to nothing a while ago.
    pub(super) fn wake_resting(&mut self, now: Instant) {
        let unposted = &mut self.unposted;
        self.resting.retain(|(until, chunk)| {
            let stays = now < *until;
            if !stays {
                unposted.push_back(*chunk);
            }
            stays
        });
    }

    /// Nothing is under way any more for a part: its slots are free, and its transfer is over if it
    /// was the last.
    pub(super) fn end_part(&mut self, chunk: u64) {
        let Some(flying) = self.flying.remove(&chunk) else { return };
        if self.leaving.contains_key(&flying.session) {
            self.take_leave(flying.session);
        }
        let link = self.links.get_mut(&flying.link);
        if let Some(link) = link.filter(|link| link.session.id == flying.session) {
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
    /// queue keeps their memory. The next part that needs one gets others.
    pub(super) fn set_slots_aside(&mut self, link: u32) {
        let Some(slots) = &self.slots else { return };
        let holds = |slot: &Slot| Arc::ptr_eq(&slot.of, slots);
        let mut parts = self.flying.values().filter(|flying| flying.link == link);
        if parts.any(|flying| flying.here.as_ref().is_some_and(holds)) {
            // Others that have some go on with them.
            self.slots = None;
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
        let Moving { link: number, token, notice, mut bytes, mut flow, failure, stranded, .. } =
            moving;
        let region = bytes.there.region;
        bytes.blocks = flow.take_rest();
        let is_all = bytes.blocks.is_empty();
        match (failure, notice) {
            (Some(error), _) => self.tell(Report::Done { token, outcome: Err(error) }),
            (None, None) if is_all => self.tell(Report::Done { token, outcome: Ok(()) }),
            (None, notice) => match (stranded, self.links.get_mut(&number), notice) {
                (None, Some(link), Some(notice)) => {
                    link.unsent.push_back((token, notice));
                    self.send_notices(number);
                }
                (why, _, notice) => {
                    let why = why.unwrap_or_else(|| "it is gone".to_owned());
                    let bytes = (!is_all).then_some(bytes);
                    let told = Box::new(Move { link: number, token, notice, bytes });
                    self.tell(Report::Stranded { told, why });
                }
            },
        }
        self.release(number, region);
    }

    /// Sends notices as long as the host has room for them.
    pub(super) fn send_notices(&mut self, number: u32) {
        while let Some(link) = self.links.get_mut(&number) {
            if link.sent >= link.may_send {
                return;
            }
            let Some((token, notice)) = link.unsent.pop_front() else { return };
            let message = Message::Notice(notice);
            link.sent += 1;
            link.unheard.push_back(token);
            self.say(Party::Link(number), &message);
        }
    }
}
