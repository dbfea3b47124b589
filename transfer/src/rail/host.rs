//! What a rail does for others: guests come, ask for regions, stage by way of memory that they were
//! given, and leave notices.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric::{Address, MemoryRegion};

use super::Report;
use super::driver::{Driver, Party};
use super::links::Parting;
use super::message::{Chunk, Message};
use super::post::MOST_WAITING;
use super::presence::Session;
use super::staging::{SLOT, SLOTS, part};
use crate::agent::{Notice, Refusal};
use crate::error::{Error, ErrorKind, Result};
use crate::host::HostBuffer;
use crate::lock;
use crate::region::{Buffer, Registered, Rights};

/// How long memory is kept that a guest had been given or shown, and left: until what it wrote before
/// it said so has landed; or, where it did not say so, until it is not likely to come back, since what
/// it had begun would come back with it.
const AFTER_LEAVING: Duration = Duration::from_secs(1);
const AFTER_A_LOSS: Duration = Duration::from_secs(60);
/// And slots of how many guests: then the oldest go. Guests that come and are killed, one after the
/// other, do not keep the next from being served. Regions have no such limit: they are as many as the
/// agent makes.
const MOST_LEFT_BEHIND: usize = 128;
pub(super) const MOST_GUESTS: usize = if cfg!(test) { 64 } else { 1024 };
/// Guests of one identity that are given staging memory: an agent connects once, or a few times.
const MOST_STAGING: usize = 8;
/// Refusals of hellos that wait to be sent.
const MAX_QUEUED_REFUSALS: usize = 16;
/// Notices of one guest that may wait to be taken.
const WINDOW: u64 = 64;
/// How long a host that was roused polls without a rest.
pub(super) const AWAKE: Duration = Duration::from_millis(1);
/// Copies of one guest that may be under way: more than it has slots is no guest's way.
const MOST_ERRANDS: usize = 2 * SLOTS as usize;

/// One that came to put and get.
#[derive(Debug)]
pub(super) struct Guest {
    /// Of all guests that ever came; a session may come again.
    number: u64,
    pub(super) session: Session,
    identity: [u8; 16],
    visit: u64,
    label: String,
    /// It heard that it is welcome. Before it may give up and come again, and is told of to nobody.
    has_come: bool,
    opened: HashSet<u64>,
    /// Those of them that are withdrawn, and that it is not told of yet.
    withdrawing: VecDeque<u64>,
    pub(super) staging: Option<(HostBuffer, MemoryRegion)>,
    errands: usize,
    /// Notices that came, and those that were taken.
    received: u64,
    taken: u64,
}

/// A copy between a region and a guest's slot.
#[derive(Debug)]
pub(super) struct Errand {
    session: u64,
    guest: u64,
    chunk: u64,
    /// Kept until it is done.
    region: Arc<Registered>,
}

/// A region that was withdrawn.
#[derive(Debug, Clone)]
pub(super) struct Retiring {
    at_it: HashSet<u64>,
    // The fabric's handle goes first.
    _memory: Option<MemoryRegion>,
    _buffer: Buffer,
}

impl Driver {
    pub(super) fn host_hears(&mut self, session: u64, message: Message) {
        if let Message::Hello { to, from, visit, label, address, .. } = message {
            return self.welcome(session, to, (from, visit), label, Address(address));
        }
        let Some(guest) = self.guests.get_mut(&session) else { return };
        let party = Party::Guest(session);
        match message {
            Message::Open { request, region, ticket } => {
                let message = if self.home.region(region, ticket).is_some() {
                    guest.opened.insert(region);
                    Message::Opened { request }
                } else {
                    let why = "the region was withdrawn, or never was";
                    let refusal = Refusal::new(ErrorKind::Stale, why);
                    Message::Refused { request, refusal }
                };
                self.say(party, &message);
            }
            Message::Stage { request } => {
                let message = match self.staging(session) {
                    Ok(memory) => {
                        Message::Staging { request, slots: SLOTS, slot_length: SLOT, memory }
                    }
                    Err(error) => Message::Refused { request, refusal: Refusal::of(&error) },
                };
                self.say(party, &message);
            }
            Message::Notice(notice) => self.take_notice(session, notice),
            Message::Deliver(chunk) => self.run_errand(session, chunk, true),
            Message::Fetch(chunk) => self.run_errand(session, chunk, false),
            Message::Rouse => self.awake_until = Instant::now() + AWAKE,
            Message::Released { region } => {
                guest.opened.remove(&region);
                self.is_released(region, session);
            }
            _ => {}
        }
    }

    fn welcome(
        &mut self,
        session: u64,
        to: [u8; 16],
        (from, visit): ([u8; 16], u64),
        label: String,
        address: Address,
    ) {
        if self.guests.contains_key(&session) {
            // It did not hear the answer.
            return self.say_welcome(session);
        }
        let refusal = if to != self.home.identity {
            Some(Refusal::new(ErrorKind::Stale, "another agent listens there now"))
        } else if from == self.home.identity {
            // Whether something is for the one or the other half could not be told.
            Some(Refusal::new(ErrorKind::Denied, "an agent does not visit itself by a fabric"))
        } else if !self.make_room_for_a_guest() {
            Some(Refusal::new(
                ErrorKind::TooMany,
                format!("{MOST_GUESTS} guests with regions are here"),
            ))
        } else {
            None
        };
        // Refused ones take no more than a few places among the addresses.
        if refusal.is_some() && self.messages_without_session() >= MAX_QUEUED_REFUSALS {
            tracing::debug!(label, "one that is not welcome was not answered");
            return;
        }
        let Ok(peer) = self.enter_peer(&address) else {
            tracing::debug!(label, "one came with an address that is none");
            return;
        };
        if let Some(refusal) = refusal {
            let message = Message::Refused { request: 0, refusal };
            self.say_to(Party::Nobody, peer, message.encode(session, 0, 0));
            return self.leave_peer(peer);
        }
        // One that has come is gone only when this one is there.
        let earlier = self
            .guests
            .iter()
            .find(|(_, guest)| (guest.identity, guest.visit) == (from, visit) && !guest.has_come);
        let earlier = earlier.map(|(session, _)| *session);
        let number = self.number();
        let guest = Guest {
            number,
            session: self.new_session(session, peer),
            identity: from,
            visit,
            label,
            has_come: false,
            opened: HashSet::new(),
            withdrawing: VecDeque::new(),
            staging: None,
            errands: 0,
            received: 0,
            taken: 0,
        };
        self.guests.insert(session, guest);
        if let Some(earlier) = earlier {
            self.lose(Party::Guest(earlier), "it came again");
        }
        self.say_welcome(session);
    }

    /// Is there room for one more guest? One that was never heard again since its hello makes room, or
    /// else one that has opened no region: the identity that a hello names stands in every card, so
    /// anybody can say hello, and a region takes a ticket. The oldest goes first.
    fn make_room_for_a_guest(&mut self) -> bool {
        if self.guests.len() < MOST_GUESTS {
            return true;
        }
        let idle = self.guests.iter().filter(|(_, guest)| guest.opened.is_empty());
        let victim = idle.min_by_key(|(_, guest)| (guest.has_come, guest.number));
        let Some(session) = victim.map(|(session, _)| *session) else { return false };
        self.lose(Party::Guest(session), "others came, and it had opened no region");
        true
    }

    /// A guest said something that is no hello: it is there, and hears us.
    pub(super) fn guest_is_there(&mut self, session: u64) {
        let Some(guest) = self.guests.get_mut(&session).filter(|guest| !guest.has_come) else {
            return;
        };
        guest.has_come = true;
        let (number, from, visit) = (guest.number, guest.identity, guest.visit);
        let label = guest.label.clone();
        self.tell(Report::Came { session, from, visit, label });
        // It lost us, and we did not notice.
        let earlier = self.guests.iter().find(|(_, guest)| {
            (guest.identity, guest.visit) == (from, visit) && guest.number < number
        });
        if let Some(earlier) = earlier.map(|(session, _)| *session) {
            self.lose(Party::Guest(earlier), "it came again");
        }
    }

    fn say_welcome(&mut self, session: u64) {
        self.say(Party::Guest(session), &Message::Welcome { may_send: WINDOW });
    }

    /// A session with a guest ends.
    pub(super) fn end_guest(&mut self, session: u64, parting: Parting, why: &str) {
        let Some(guest) = self.guests.remove(&session) else { return };
        tracing::debug!(label = guest.label, why, "a guest is gone");
        let is_lost = parting != Parting::Bye;
        let until = Instant::now() + if is_lost { AFTER_A_LOSS } else { AFTER_LEAVING };
        self.forget_waiting(Party::Guest(session));
        for region in &guest.opened {
            let haunted = self.haunted.entry(*region).or_insert((until, None));
            haunted.0 = until.max(haunted.0);
            if let Some(retiring) = self.retiring.get(region) {
                haunted.1 = Some(retiring.clone());
            }
            self.is_released(*region, session);
        }
        if guest.has_come {
            self.tell(Report::Gone { session, lost: is_lost.then(|| why.to_owned()) });
        }
        if let Some((buffer, memory)) = guest.staging {
            if self.left_behind.len() >= MOST_LEFT_BEHIND {
                let oldest = self.left_behind.pop_front();
                self.aside.let_go(oldest);
            }
            self.left_behind.push_back((until, (memory, buffer)));
        }
        self.leave_peer(guest.session.peer);
    }

    pub(super) fn look_after_guests(&mut self, now: Instant) {
        if self.left_behind.iter().any(|(until, _)| now >= *until) {
            let (stays, goes): (VecDeque<_>, VecDeque<_>) =
                self.left_behind.drain(..).partition(|(until, _)| now < *until);
            self.left_behind = stays;
            self.aside.let_go(goes);
        }
        let goes: Vec<_> = self.haunted.extract_if(|_, (until, _)| now >= *until).collect();
        if !goes.is_empty() {
            self.aside.let_go(goes);
        }
        let untold = self.guests.iter().filter(|(_, guest)| !guest.withdrawing.is_empty());
        let untold: Vec<_> = untold.map(|(session, _)| *session).collect();
        untold.into_iter().for_each(|session| self.go_on_withdrawing(session));
    }

    fn staging(&mut self, session: u64) -> Result<Vec<u8>> {
        let operation = "give staging memory";
        let of_fabric = |error| Error::of_fabric(operation, error);
        let guest = self.guests.get(&session);
        if let Some((_, memory)) = guest.and_then(|guest| guest.staging.as_ref()) {
            return Ok(memory.describe().map_err(of_fabric)?.encode());
        }
        // Memory is for those that were given a region's ticket, and they are given it whoever else is
        // there.
        if guest.is_none_or(|guest| guest.opened.is_empty()) {
            let detail = "it has opened no region that it could stage for";
            return Err(Error::new(operation, ErrorKind::Denied, detail));
        }
        let identity = guest.map(|guest| guest.identity);
        let is_staging =
            |guest: &&Guest| guest.staging.is_some() && Some(guest.identity) == identity;
        if self.guests.values().filter(is_staging).count() >= MOST_STAGING {
            let detail = format!("{MOST_STAGING} of its sessions have staging memory already");
            return Err(Error::new(operation, ErrorKind::TooMany, detail));
        }
        let buffer = HostBuffer::new(SLOT * u64::from(SLOTS))?;
        let memory = self.register_slots(&buffer, Some(Rights::ALL))?;
        let described = memory.describe().map_err(of_fabric)?.encode();
        if let Some(guest) = self.guests.get_mut(&session) {
            guest.staging = Some((buffer, memory));
        }
        Ok(described)
    }

    // ------------------------------------------------------------------- notices

    fn take_notice(&mut self, session: u64, notice: Notice) {
        let Some(guest) = self.guests.get_mut(&session) else { return };
        if guest.received >= guest.taken + WINDOW {
            return self.lose(Party::Guest(session), "it sends notices that it may not send");
        }
        guest.received += 1;
        let from = guest.identity;
        self.tell(Report::Notice { session, from, notice });
        self.say_heard(session);
    }

    fn say_heard(&mut self, session: u64) {
        let Some(guest) = self.guests.get(&session) else { return };
        let message = Message::Heard { notices: guest.received, may_send: guest.taken + WINDOW };
        self.say(Party::Guest(session), &message);
    }

    /// The agent took notices of a guest: there is room for as many more.
    pub(crate) fn taken(&mut self, session: u64, notices: u64) {
        let Some(guest) = self.guests.get_mut(&session) else { return };
        guest.taken += notices;
        self.say_heard(session);
    }

    // ------------------------------------------------------------------- copies for guests

    fn run_errand(&mut self, session: u64, chunk: Chunk, is_delivery: bool) {
        let begun = self.begin_errand(session, chunk, is_delivery);
        if let Err(error) = begun {
            let refusal = Some(Refusal::of(&error));
            self.say(Party::Guest(session), &Message::Done { number: chunk.number, refusal });
        }
    }

    pub(super) fn begin_errand(
        &mut self,
        session: u64,
        chunk: Chunk,
        is_delivery: bool,
    ) -> Result<()> {
        let operation = if is_delivery { "put" } else { "get" };
        let refuse = |kind, why: &str| Err(Error::new(operation, kind, why));
        let Some(region) = self.home.region(chunk.region, chunk.ticket) else {
            return refuse(ErrorKind::Stale, "the region was withdrawn, or never was");
        };
        let rights = region.descriptor.rights;
        if !(if is_delivery { rights.write } else { rights.read }) {
            return refuse(ErrorKind::NotAllowed, "its rights do not allow it");
        }
        let end = chunk.offset.checked_add(chunk.length);
        let is_inside = end.is_some_and(|end| end <= region.descriptor.length);
        if !is_inside || chunk.slot >= SLOTS || chunk.length > SLOT {
            return refuse(ErrorKind::OutOfBounds, "it is not inside of the region, or of a slot");
        }
        let number = self.number();
        let Some(guest) = self.guests.get_mut(&session) else { return Ok(()) };
        let Some((buffer, _)) = &guest.staging else {
            return refuse(ErrorKind::NoPath, "it has no staging memory");
        };
        if guest.errands >= MOST_ERRANDS {
            return refuse(ErrorKind::TooMany, "more than there are slots");
        }
        let at = u64::from(chunk.slot) * SLOT;
        match &region.buffer {
            Buffer::Host(memory) => {
                let copied = match is_delivery {
                    true => memory.copy(chunk.offset, buffer, at, chunk.length),
                    false => buffer.copy(at, memory, chunk.offset, chunk.length),
                };
                copied?;
                let done = Message::Done { number: chunk.number, refusal: None };
                self.say(Party::Guest(session), &done);
            }
            Buffer::Device(memory) => {
                let device = memory.mapped_for();
                let slot = part(&buffer.pinned_for(device)?, at, chunk.length)?;
                let place = part(memory, chunk.offset, chunk.length)?;
                let (to, from) = if is_delivery { (&place, &slot) } else { (&slot, &place) };
                self.copies.begin(number, device, to, from)?;
                guest.errands += 1;
                self.errands.insert(
                    number,
                    Errand { session, guest: guest.number, chunk: chunk.number, region },
                );
            }
        }
        Ok(())
    }

    pub(super) fn errand_is_over(&mut self, number: u64, outcome: Result<()>) {
        let Some(errand) = self.errands.remove(&number) else { return };
        let Errand { session, guest: of, chunk, region } = errand;
        let number = region.descriptor.number;
        drop(region);
        if let Some(guest) = self.guests.get_mut(&session).filter(|guest| guest.number == of) {
            guest.errands -= 1;
            let refusal = outcome.err().map(|error| Refusal::of(&error));
            self.say(Party::Guest(session), &Message::Done { number: chunk, refusal });
        }
        self.finish_retiring(number);
    }

    // ------------------------------------------------------------------- regions that go

    pub(super) fn retire(&mut self, region: u64, memory: Option<MemoryRegion>, buffer: Buffer) {
        let at_it = self.guests.iter().filter(|(_, guest)| guest.opened.contains(&region));
        let at_it: HashSet<_> = at_it.map(|(session, _)| *session).collect();
        for session in &at_it {
            if let Some(guest) = self.guests.get_mut(session) {
                guest.withdrawing.push_back(region);
            }
        }
        let told: Vec<_> = at_it.iter().copied().collect();
        let retiring = Retiring { at_it, _memory: memory, _buffer: buffer };
        // Whoever withdraws it does not wait for one that was lost, but the memory is nobody else's.
        if let Some((_, kept)) = self.haunted.get_mut(&region) {
            *kept = Some(retiring.clone());
        }
        self.retiring.insert(region, retiring);
        told.into_iter().for_each(|session| self.go_on_withdrawing(session));
        self.finish_retiring(region);
    }

    /// Tells a guest which regions are withdrawn, no more at a time than it hears: thousands may be
    /// at once, and one that is said more than it hears would be lost for that.
    pub(super) fn go_on_withdrawing(&mut self, session: u64) {
        while let Some(guest) = self.guests.get(&session) {
            if guest.withdrawing.is_empty() || !guest.session.hearing.has_room() {
                return;
            }
            let peer = guest.session.peer;
            let waiting = self.waiting.iter().filter(|waiting| waiting.peer == peer).count();
            if waiting >= MOST_WAITING / 2 {
                return;
            }
            let Some(guest) = self.guests.get_mut(&session) else { return };
            let Some(region) = guest.withdrawing.pop_front() else { return };
            if guest.opened.contains(&region) {
                self.say(Party::Guest(session), &Message::Withdrawn { region });
            }
        }
    }

    fn is_released(&mut self, region: u64, session: u64) {
        if let Some(retiring) = self.retiring.get_mut(&region) {
            retiring.at_it.remove(&session);
            self.finish_retiring(region);
        }
    }

    /// Lets go of a region that was withdrawn if nobody is at it any more, or else tells who is.
    fn finish_retiring(&mut self, region: u64) {
        let Some(retiring) = self.retiring.get(&region) else { return };
        let mut is_at_it = self.errands.values().map(|errand| errand.region.descriptor.number);
        let is_copied = is_at_it.any(|number| number == region);
        if !retiring.at_it.is_empty() || is_copied {
            let guests = retiring.at_it.iter().filter_map(|session| self.guests.get(session));
            let mut who: Vec<_> = guests.map(|guest| guest.label.clone()).collect();
            if who.is_empty() {
                who.push("a copy of ours".to_owned());
            }
            lock(&self.shared.retiring).insert(region, who);
            return;
        }
        let retiring = self.retiring.remove(&region);
        lock(&self.shared.retiring).insert(region, vec!["the rail".to_owned()]);
        // Not as long as the fabric has it.
        let shared = Arc::clone(&self.shared);
        self.aside.run(move || {
            drop(retiring);
            lock(&shared.retiring).remove(&region);
        });
    }

    /// What waits to be sent to one that is gone.
    pub(super) fn forget_waiting(&mut self, party: Party) {
        self.waiting.retain(|waiting| waiting.to != party);
    }
}
