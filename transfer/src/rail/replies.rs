//! What hosts say to a rail that visits them.

use fabric::RemoteRegion;

use super::Report;
use super::driver::{Driver, Party};
use super::flow::Stage;
use super::guest::Moving;
use super::links::{Parting, TheirSlots};
use super::message::Message;
use crate::error::{Error, ErrorKind, Result};

/// What a host may say of its staging memory.
const MOST_SLOTS: u32 = 1024;
const LEAST_SLOT: u64 = 4096;

impl Driver {
    pub(super) fn guest_hears(&mut self, session: u64, message: Message) {
        let mut links = self.links.iter_mut().filter(|(_, link)| link.session.id == session);
        let Some((number, link)) = links.next().map(|(number, link)| (*number, link)) else {
            return;
        };
        match message {
            Message::Welcome { may_send, .. } if !link.is_met() => self.is_met(number, may_send),
            Message::Refused { request: 0, refusal } => {
                let parting = match refusal.kind {
                    // There is another one now.
                    ErrorKind::Stale => Parting::Bye,
                    _ => Parting::Lost,
                };
                self.part(number, parting, refusal.into_error("connect to an agent"));
            }
            Message::Refused { request, refusal } => {
                self.is_answered(number, request, Err(refusal.into_error("open a region")));
            }
            Message::Opened { request } => match link.asked.get(&request) {
                Some(asked) if asked.wanted.stages && link.slots.is_none() => {
                    self.say(Party::Link(number), &Message::Stage { request });
                }
                Some(_) => self.is_answered(number, request, Ok(())),
                None => {}
            },
            Message::Staging { request, slots, slot_length, memory }
                if link.asked.contains_key(&request) =>
            {
                let outcome = self.take_staging(number, slots, slot_length, &memory);
                self.is_answered(number, request, outcome);
            }
            Message::Done { number: chunk, refusal } => {
                let is_ours = self.flying.get(&chunk).is_some_and(|flying| {
                    flying.session == session && matches!(flying.stage, Stage::Ask | Stage::Deliver)
                });
                if is_ours {
                    let refused = refusal.map(|refusal| refusal.into_error("transfer"));
                    self.stage_is_over(chunk, refused.map_or(Ok(()), Err));
                }
            }
            Message::Heard { notices, may_send } => {
                let known = link.sent - link.unheard.len() as u64;
                if notices > link.sent {
                    let why = "it heard notices that were not sent";
                    return self.end(Party::Link(number), Parting::Distrusted, why);
                }
                link.may_send = link.may_send.max(may_send);
                let more = notices.saturating_sub(known) as usize;
                let heard: Vec<_> = link.unheard.drain(..more).collect();
                for token in heard {
                    self.tell(Report::Done { token, outcome: Ok(()) });
                }
                self.send_notices(number);
            }
            Message::Withdrawn { region } => self.is_withdrawn(number, region),
            _ => {}
        }
    }

    /// A host takes a region back, and waits until it is told that nothing is under way with it.
    ///
    /// It may be one that is not known here: the host has given it, and then refused to stage, or said
    /// what is no staging memory. It waits for the answer all the same.
    fn is_withdrawn(&mut self, number: u32, region: u64) {
        let Some(link) = self.links.get_mut(&number) else { return };
        let mut is_known = link.known.wanted.remove(&region).is_some();
        for asked in link.asked.values_mut().filter(|asked| asked.region == region) {
            (asked.is_withdrawn, is_known) = (true, true);
        }
        link.withdrawn.insert(region);
        if is_known {
            self.tell(Report::Withdrawn { link: number, region });
        }
        for moving in self.moves.values_mut() {
            if moving.link == number && moving.bytes.there.region == region {
                moving.flow.give_up();
                moving.failure.get_or_insert_with(withdrawn);
            }
        }
        self.end_moves();
        self.release(number, region);
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
        let Some(link) = self.links.get_mut(&number) else { return };
        if link.withdrawn.contains(&region) && !self.moves.values().any(is_busy) {
            link.withdrawn.remove(&region);
            self.say(Party::Link(number), &Message::Released { region });
        }
    }
}

pub(super) fn withdrawn() -> Error {
    Error::new("transfer", ErrorKind::Stale, "the region was withdrawn")
}
