//! Messages of targets to an initiator.

use super::{CONNECT, InitiatorRole, OPEN};
use crate::error::{Context, Error, ErrorKind};
use crate::rail::RailEvent;
use crate::rail::io::RailIo;
use crate::rail::message::Message;
use crate::rail::session::CloseReason;

impl InitiatorRole {
    pub(in crate::rail) fn handle(&mut self, io: &mut RailIo, session: u64, message: Message) {
        let mut links = self.links.iter_mut();
        let found = links.find(|(_, link)| link.session.id() == session);
        let Some((&number, link)) = found else { return };
        match message {
            Message::Welcome { credit_limit } if !link.is_connected() => {
                self.handle_welcome(io, number, credit_limit)
            }
            Message::Refused { request: 0, refusal } => {
                let close_reason = match refusal.kind {
                    // The address has another agent now.
                    ErrorKind::Stale => CloseReason::Bye,
                    _ => CloseReason::Lost,
                };
                let error = refusal.into_error(CONNECT);
                self.close_link(io, number, close_reason, error);
            }
            Message::Refused { request, refusal } if self.direct.has_request(session, request) => {
                self.direct.refused(io, request, refusal);
            }
            Message::Refused { request, refusal } => {
                self.open_answered(io, number, request, Err(refusal.into_error(OPEN)));
            }
            Message::Opened { request } => match link.pending_opens.get(&request) {
                Some(open) if open.wanted.stages && link.chunks.slot_length().is_none() => {
                    io.send_message(&mut link.session, &Message::RequestStaging { request });
                }
                Some(_) => self.open_answered(io, number, request, Ok(())),
                None => {}
            },
            Message::Staging { request, slots, slot_length, memory }
                if link.pending_opens.contains_key(&request) =>
            {
                let attached = io.attach(&memory).during(OPEN);
                let outcome =
                    attached.and_then(|memory| link.chunks.add_slots(memory, slots, slot_length));
                self.open_answered(io, number, request, outcome);
            }
            Message::Done { number: chunk, refusal } => {
                let outcome = refusal.map_or(Ok(()), |refusal| Err(refusal.into_error("transfer")));
                self.peer_done(io, (session, chunk), outcome);
            }
            Message::NoticeCredit { notices, credit_limit } => {
                let Some(delivered) = link.notices.acknowledge(notices) else {
                    let cause = "it acknowledged notices that were not sent";
                    return self.end_link(io, number, CloseReason::Fatal, cause);
                };
                delivered.for_each(|token| io.report_done(token, Ok(())));
                link.notices.add_credit(credit_limit);
                link.send_notices(io);
            }
            Message::Withdrawn { region } => self.region_withdrawn(io, number, region),
            message => self.handle_direct(io, session, message),
        }
    }

    /// A target withdraws a region, and waits for the confirmation that no operation uses it.
    ///
    /// The region may be unknown here: opening it failed after the target had recorded it. It needs
    /// the confirmation nevertheless.
    fn region_withdrawn(&mut self, io: &mut RailIo, number: u32, region: u64) {
        let Some(link) = self.links.get_mut(&number) else { return };
        let mut is_known = link.known_target.wanted.remove(&region).is_some();
        for open in link.pending_opens.values_mut().filter(|open| open.region == region) {
            (open.is_withdrawn, is_known) = (true, true);
        }
        link.withdrawn.insert(region);
        if is_known {
            io.report(RailEvent::Withdrawn { link: number, region });
        }
        self.fail_transfers_with(io, number, region);
        self.release_region(io, number, region);
    }

    /// Confirms to the target that no operation uses a withdrawn region.
    pub(super) fn release_region(&mut self, io: &mut RailIo, number: u32, region: u64) {
        let is_busy = self.has_transfers_with(number, region);
        let Some(link) = self.links.get_mut(&number) else { return };
        if !is_busy && link.withdrawn.remove(&region) {
            io.send_message(&mut link.session, &Message::Released { region });
        }
    }
}

pub(super) fn withdrawn() -> Error {
    Error::new("transfer", ErrorKind::Stale, "the region was withdrawn")
}
