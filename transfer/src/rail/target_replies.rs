//! Messages of targets to an initiator.

use fabric::RemoteRegion;

use super::RailEvent;
use super::chunks::Stage;
use super::driver::{Driver, SessionKey};
use super::initiator::ActiveTransfer;
use super::links::{CloseReason, RemoteSlots};
use super::message::Message;
use crate::error::{Error, ErrorKind, Result};

/// Limits for the staging memory that a target grants.
const MAX_SLOTS: u32 = 1024;
const MIN_SLOT_LENGTH: u64 = 4096;

impl Driver {
    pub(super) fn handle_at_initiator(&mut self, session: u64, message: Message) {
        let mut links = self.links.iter_mut().filter(|(_, link)| link.session.id == session);
        let Some((number, link)) = links.next().map(|(number, link)| (*number, link)) else {
            return;
        };
        match message {
            Message::Welcome { credit_limit, .. } if !link.is_connected() => {
                self.handle_welcome(number, credit_limit)
            }
            Message::Refused { request: 0, refusal } => {
                let close_reason = match refusal.kind {
                    // The address has another agent now.
                    ErrorKind::Stale => CloseReason::Bye,
                    _ => CloseReason::Lost,
                };
                self.close_link(number, close_reason, refusal.into_error("connect to an agent"));
            }
            Message::Refused { request, refusal } => {
                self.open_answered(number, request, Err(refusal.into_error("open a region")));
            }
            Message::Opened { request } => match link.pending_opens.get(&request) {
                Some(pending_opens) if pending_opens.wanted.stages && link.slots.is_none() => {
                    self.send_message(
                        SessionKey::Link(number),
                        &Message::RequestStaging { request },
                    );
                }
                Some(_) => self.open_answered(number, request, Ok(())),
                None => {}
            },
            Message::Staging { request, slots, slot_length, memory }
                if link.pending_opens.contains_key(&request) =>
            {
                let outcome = self.accept_staging_memory(number, slots, slot_length, &memory);
                self.open_answered(number, request, outcome);
            }
            Message::Done { number: chunk, refusal } => {
                let is_pending = self.in_flight.get(&chunk).is_some_and(|in_flight| {
                    in_flight.session == session
                        && matches!(in_flight.stage, Stage::RequestFill | Stage::RequestDrain)
                });
                if is_pending {
                    let refused = refusal.map(|refusal| refusal.into_error("transfer"));
                    self.stage_done(chunk, refused.map_or(Ok(()), Err));
                }
            }
            Message::NoticeCredit { notices, credit_limit } => {
                let already_acknowledged = link.sent - link.unacknowledged.len() as u64;
                if notices > link.sent {
                    let cause = "it acknowledged notices that were not sent";
                    return self.end(SessionKey::Link(number), CloseReason::Fatal, cause);
                }
                link.credit_limit = link.credit_limit.max(credit_limit);
                let more = notices.saturating_sub(already_acknowledged) as usize;
                let delivered: Vec<_> = link.unacknowledged.drain(..more).collect();
                for token in delivered {
                    self.report(RailEvent::Done { token, outcome: Ok(()) });
                }
                self.send_notices(number);
            }
            Message::Withdrawn { region } => self.region_withdrawn(number, region),
            _ => {}
        }
    }

    /// A target withdraws a region, and waits for the confirmation that no operation uses it.
    ///
    /// The region may be unknown here: opening it failed after the target had recorded it. It needs
    /// the confirmation nevertheless.
    fn region_withdrawn(&mut self, number: u32, region: u64) {
        let Some(link) = self.links.get_mut(&number) else { return };
        let mut is_known = link.known_target.wanted.remove(&region).is_some();
        for pending_opens in
            link.pending_opens.values_mut().filter(|pending_opens| pending_opens.region == region)
        {
            (pending_opens.is_withdrawn, is_known) = (true, true);
        }
        link.withdrawn.insert(region);
        if is_known {
            self.report(RailEvent::Withdrawn { link: number, region });
        }
        for transfer in self.transfers.values_mut() {
            if transfer.link == number && transfer.bytes.remote.region == region {
                transfer.chunks.cancel();
                transfer.failure.get_or_insert_with(withdrawn);
            }
        }
        self.end_transfers();
        self.release_region(number, region);
    }

    fn accept_staging_memory(
        &mut self,
        number: u32,
        slots: u32,
        length: u64,
        memory: &[u8],
    ) -> Result<()> {
        let operation = "open a region";
        let of_fabric = |error| Error::of_fabric(operation, error);
        let remote = RemoteRegion::decode(memory).map_err(of_fabric)?;
        let memory = self.domain.attach(&remote).map_err(of_fabric)?;
        let is_good = (1..=MAX_SLOTS).contains(&slots)
            && length >= MIN_SLOT_LENGTH
            && length.checked_mul(u64::from(slots)).is_some_and(|all| all <= memory.len());
        if !is_good {
            let detail = format!("{slots} slots of {length} bytes in {}", memory.len());
            return Err(Error::new(operation, ErrorKind::Malformed, detail));
        }
        if let Some(link) = self.links.get_mut(&number) {
            let free = (0..slots).rev().collect();
            link.slots.get_or_insert(RemoteSlots { memory, length, free });
        }
        Ok(())
    }

    /// Confirms to the target that no operation uses a withdrawn region.
    pub(super) fn release_region(&mut self, number: u32, region: u64) {
        let is_busy = |transfer: &ActiveTransfer| {
            transfer.link == number && transfer.bytes.remote.region == region
        };
        let Some(link) = self.links.get_mut(&number) else { return };
        if link.withdrawn.contains(&region) && !self.transfers.values().any(is_busy) {
            link.withdrawn.remove(&region);
            self.send_message(SessionKey::Link(number), &Message::Released { region });
        }
    }
}

pub(super) fn withdrawn() -> Error {
    Error::new("transfer", ErrorKind::Stale, "the region was withdrawn")
}
