//! Hosts, as a rail knows them that visits them: getting to know them, hearing them, losing them.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use fabric::{Address, Peer, RemoteMemory, RemoteRegion};

use super::driver::{Driver, Party, Presence};
use super::flow::Stage;
use super::guest::Moving;
use super::message::Message;
use super::{PATIENCE, Report};
use crate::agent::{Notice, Ticket};
use crate::error::{Error, ErrorKind, Result};
use crate::share::random;

/// What a host may say of its staging memory.
const MOST_SLOTS: u32 = 1024;
const LEAST_SLOT: u64 = 4096;

/// Staging memory of a host's.
#[derive(Debug)]
pub(super) struct TheirSlots {
    pub(super) memory: RemoteMemory,
    pub(super) length: u64,
    pub(super) free: Vec<u32>,
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
    /// Regions that it was asked for, and those of them that it withdrew.
    opened: HashSet<u64>,
    pub(super) withdrawn: HashSet<u64>,
    pub(super) slots: Option<TheirSlots>,
    /// Parts, and their bytes, that are under way.
    pub(super) flying: usize,
    pub(super) bytes: u64,
    /// One of them found no room in the provider's queue.
    pub(super) is_stuck: bool,
    /// Notices that wait to be sent, and those that were sent and not yet heard of.
    pub(super) unsent: VecDeque<(Ticket, Notice)>,
    pub(super) unheard: VecDeque<Ticket>,
    pub(super) sent: u64,
    pub(super) may_send: u64,
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
        let session = match random("connect to an agent") {
            Ok(random) => u64::from_le_bytes(std::array::from_fn(|at| random[at])),
            Err(error) => return self.tell(Report::Met { link: number, outcome: Err(error) }),
        };
        let peer = match self.enter_peer(&address) {
            Ok(peer) => peer,
            Err(error) => {
                let outcome = Err(Error::of_fabric("connect to an agent", error));
                return self.tell(Report::Met { link: number, outcome });
            }
        };
        let link = Link {
            session,
            peer,
            presence: Presence::new(),
            meets_until: Some(Instant::now() + patience),
            asked: HashMap::new(),
            opened: HashSet::new(),
            withdrawn: HashSet::new(),
            slots: None,
            flying: 0,
            bytes: 0,
            is_stuck: false,
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
        // From now on it may say that it withdrew it, in whatever order that comes.
        link.opened.insert(region);
        link.asked.insert(request, Asked { stages });
        self.say(Party::Link(number), &Message::Open { request, region, ticket });
    }

    pub(super) fn leave(&mut self, number: u32) {
        if let Some(link) = self.links.get(&number) {
            let (peer, bye) = (link.peer, Message::Bye.encode(link.session));
            // It may be sent when the link is gone here.
            self.say_to(Party::Nobody, peer, bye);
        }
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
        // What was posted, or is copied by a device, may still touch the memory of the transfer and
        // of its slot: it is over when that is. What waited for the peer, or was not posted, is.
        let over = self.flying.iter().filter(|(_, flying)| flying.link == number);
        let over: Vec<_> = over
            .filter(|(key, flying)| {
                matches!(flying.stage, Stage::Ask | Stage::Deliver) || self.unposted.contains(key)
            })
            .map(|(key, _)| *key)
            .collect();
        let until = Instant::now() + PATIENCE;
        for moving in self.moves.values_mut().filter(|moving| moving.link == number) {
            moving.flow.give_up();
            moving.failure.get_or_insert_with(|| closed("transfer"));
            moving.ends_by = Some(until);
        }
        for key in over {
            self.unposted.retain(|other| *other != key);
            self.end_part(key);
        }
        self.set_slots_aside(number);
        self.end_moves();
        self.forget_waiting(Party::Link(number));
        self.leave_peer(link.peer);
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
        // Of a peer that is gone, and what was posted for it does not come back.
        let late = |moving: &Moving| moving.ends_by.is_some_and(|end| now >= end);
        let late: Vec<_> =
            self.moves.iter().filter(|(_, moving)| late(moving)).map(|(key, _)| *key).collect();
        for key in late {
            let Some(moving) = self.moves.remove(&key) else { continue };
            let detail = "the peer is gone, and what was under way may still touch the memory";
            let outcome = Err(Error::new("transfer", ErrorKind::Closed, detail));
            self.tell(Report::Done { ticket: moving.ticket, outcome });
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
            Message::Refused { request: 0, .. } if link.meets_until.is_none() => {
                self.lose_link(number, "it does not let us in any more");
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
                if notices > link.sent {
                    return self.lose_link(number, "it heard notices that were not sent");
                }
                link.may_send = link.may_send.max(may_send);
                // Not all providers keep the order: an older one may come later.
                let more = notices.saturating_sub(known) as usize;
                let heard: Vec<_> = link.unheard.drain(..more).collect();
                for ticket in heard {
                    self.tell(Report::Done { ticket, outcome: Ok(()) });
                }
                self.send_notices(number);
            }
            Message::Withdrawn { region } if link.opened.contains(&region) => {
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
    pub(super) fn release(&mut self, number: u32, region: u64) {
        let is_busy =
            |moving: &Moving| moving.link == number && moving.bytes.there.region == region;
        let is_withdrawn =
            self.links.get(&number).is_some_and(|link| link.withdrawn.contains(&region));
        if is_withdrawn && !self.moves.values().any(is_busy) {
            self.say(Party::Link(number), &Message::Released { region });
        }
    }
}

pub(super) fn withdrawn() -> Error {
    Error::new("transfer", ErrorKind::Stale, "the region was withdrawn")
}
