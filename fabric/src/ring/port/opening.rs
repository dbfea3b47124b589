//! Opening rings, on one lane or several.

use std::sync::Arc;

use super::super::credit_memory;
use super::super::immediate::MAX_RINGS;
use super::super::memory::RegistrationScope;
use super::super::receiver::geometry_of;
use super::super::{
    NotifyMode, RingAnswer, RingOffer, RingOptions, RingReceiver, RingSender, SenderInstance,
};
use super::{Port, ReceiverId, SenderId, no_ring, receiver_mut, sender_mut};
use crate::{
    Access, Address, Error, ErrorKind, HostMemory, Memory, MemoryKind, MemoryRegion, Peer, Result,
};

impl Port {
    /// Opens a ring to be written by one peer, which needs the [ring offer](Self::ring_offer).
    /// [Insert](crate::AddressVector::insert) the peer's address before sending the offer: some
    /// providers drop data from unknown addresses.
    ///
    /// To continue after a loss, the lost ring is [forgotten](Self::forget), and
    /// [`RingOptions::completed_messages`] is what its
    /// [reader](super::super::ReaderState::completed_messages) reported. The writer
    /// [drops](Self::drop_sender) its sender and [accepts](Self::accept) the new ring.
    ///
    /// # Errors
    /// `InvalidArgument` for an impossible capacity; `NotSupported` where the provider lacks a
    /// capability; `ResourceExhausted` if there are 1024 rings, or a queue that may overrun has no
    /// room for another ring's notices.
    pub fn offer(&mut self, options: &RingOptions) -> Result<ReceiverId> {
        // Options are checked before memory is allocated.
        geometry_of(&self.io.endpoint, 0, options, MemoryKind::Host)?;
        self.offer_on_lanes(options, 1, HostMemory::zeroed(options.capacity as usize)?)
    }

    /// Like [`offer`](Self::offer), in the caller's memory, which may be device or shared memory.
    /// To be written on at most `lanes` lanes including the endpoint, and fewer if the port has
    /// fewer or the ring does not use immediates.
    ///
    /// # Errors
    /// As [`offer`](Self::offer); `OutOfBounds` if the memory is too small.
    pub fn offer_on_lanes(
        &mut self,
        options: &RingOptions,
        lanes: usize,
        memory: impl Memory,
    ) -> Result<ReceiverId> {
        let lanes = match options.notify {
            NotifyMode::Immediate => lanes.min(self.lanes()),
            NotifyMode::Message => 1,
        };
        let (kind, memory) = (memory.kind(), Arc::new(memory));
        self.offer_in(options, lanes, kind, |scopes| {
            let register = |scope: &RegistrationScope<'_>| {
                scope.register(Arc::clone(&memory), Access::REMOTE_WRITE)
            };
            scopes.iter().map(register).collect()
        })
    }

    /// Like [`offer_on_lanes`](Self::offer_on_lanes), in memory that the caller has registered for
    /// remote writes, with the [domain](Self::lane_domain) of each lane in turn: of device memory,
    /// which may be registered in several ways.
    ///
    /// # Errors
    /// As [`offer_on_lanes`](Self::offer_on_lanes); `InvalidArgument` for a region of another
    /// domain.
    pub fn offer_registered(
        &mut self,
        options: &RingOptions,
        regions: Vec<MemoryRegion>,
    ) -> Result<ReceiverId> {
        let refuse =
            |detail: &'static str| Err(Error::new(ErrorKind::InvalidArgument, "open ring", detail));
        let Some(kind) = regions.first().map(MemoryRegion::kind) else {
            return refuse("no registered memory was given");
        };
        let max_lanes = if options.notify == NotifyMode::Immediate { self.lanes() } else { 1 };
        let is_of_lane = |(lane, region): (usize, &MemoryRegion)| {
            self.lane_domain(lane).is_some_and(|domain| domain.is_same(region.domain()))
        };
        if regions.len() > max_lanes || !regions.iter().enumerate().all(is_of_lane) {
            return refuse("the memory is not registered with the domains of the lanes, in order");
        }
        self.offer_in(options, regions.len(), kind, |scopes| {
            scopes.iter().zip(regions).map(|(scope, region)| scope.enable(region)).collect()
        })
    }

    /// Opens a ring on so many lanes, in memory of this kind that is registered for all of them.
    fn offer_in(
        &mut self,
        options: &RingOptions,
        lanes: usize,
        kind: MemoryKind,
        register: impl FnOnce(&[RegistrationScope<'_>]) -> Result<Vec<MemoryRegion>>,
    ) -> Result<ReceiverId> {
        let extra = lanes.saturating_sub(1);
        let ring = free_index(&self.receivers, self.next_ring)?;
        self.epoch += 1;
        let id = ReceiverId { ring, creation_epoch: self.epoch };
        let limits = (options, &self.queue_budget);
        let lanes = self.extra_lanes.as_ref();
        let scopes = lanes.map(|it| it.registration_scopes(extra)).unwrap_or_default();
        let receiver = RingReceiver::open(&self.io, &scopes, id, limits, kind, register)?;
        if let Some(lanes) = lanes.filter(|_| extra > 0) {
            lanes.retain_memory(receiver.memory());
        }
        self.insert_receiver(receiver)
    }

    /// Inserts the addresses of a writer's [extra lanes](Self::lane_addresses), in their order.
    /// Some providers drop data from unknown addresses. So call this before sending a [ring
    /// offer](Self::ring_offer) to the writer, whose own address must be
    /// [inserted](crate::AddressVector::insert), too.
    ///
    /// # Errors
    /// Errors of the provider for an address; `ResourceExhausted` if a lane has too many addresses.
    pub fn insert_lane_addresses(&mut self, writer: &[Address]) -> Result<()> {
        self.extra_lanes.as_mut().map_or(Ok(()), |lanes| lanes.insert_addresses(writer))
    }

    /// Like [`accept`](Self::accept), for a ring on several lanes: all lanes of the offer, whose
    /// extra ones are at these addresses.
    ///
    /// # Errors
    /// As [`accept`](Self::accept); `MalformedDescriptor` if the number of addresses does not fit
    /// the offer or exceeds the lanes here; `ResourceExhausted` if a lane has too many addresses.
    pub fn accept_on_lanes(
        &mut self,
        peer: Peer,
        extra: &[Address],
        offer: &RingOffer,
        max_payload: u64,
    ) -> Result<(SenderId, RingAnswer)> {
        let addresses = extra.len();
        let offered = offer.lanes.len();
        let here = self.lanes();
        let is_possible = addresses < here
            && offered == addresses + 1
            && (addresses == 0 || offer.notify == NotifyMode::Immediate);
        if !is_possible {
            let detail = format!(
                "{addresses} addresses of extra lanes for a ring of {offered} lanes that is notified by {}; {here} lanes here",
                offer.notify.name()
            );
            return Err(Error::new(ErrorKind::MalformedDescriptor, "open ring", detail));
        }
        let (id, answer) = self.accept(peer, offer, max_payload)?;
        if !extra.is_empty()
            && let Some(lanes) = &mut self.extra_lanes
        {
            let sender = sender_mut(&mut self.senders, id.0)?;
            if let Err(error) = lanes.open(extra, offer, sender.instance()) {
                self.drop_sender(id);
                return Err(error);
            }
            sender.stripe_over(extra.len() + 1);
        }
        Ok((id, answer))
    }

    pub(super) fn insert_receiver(&mut self, receiver: RingReceiver) -> Result<ReceiverId> {
        self.posted_receives.prepare_for(&mut self.io, receiver.notify())?;
        self.credit_memory()?;
        let id = receiver.id();
        insert_at(&mut self.receivers, id.ring, receiver);
        self.next_ring = (id.ring + 1) % MAX_RINGS;
        self.needs_polling = true;
        Ok(id)
    }

    fn credit_memory(&mut self) -> Result<MemoryRegion> {
        let credit_memory = match self.credit_memory.take() {
            Some(credit_memory) => credit_memory,
            None => credit_memory::register(&self.io.endpoint, MAX_RINGS)?,
        };
        Ok(self.credit_memory.insert(credit_memory).clone())
    }

    /// The offer of a ring, for its writer.
    ///
    /// # Errors
    /// `Closed` if there is no such ring; errors in describing the memory.
    pub fn ring_offer(&self, id: ReceiverId) -> Result<RingOffer> {
        let Some(credit_memory) = &self.credit_memory else { return Err(no_ring()) };
        let extra = self.extra_lanes.iter().flat_map(|lanes| lanes.credit_memories().cloned());
        let credit_memories: Vec<_> = std::iter::once(credit_memory.clone()).chain(extra).collect();
        self.receiver(id)?.offer(&credit_memories)
    }

    /// Is there room to [accept](Self::accept) another ring? To be asked before a peer makes one.
    #[must_use]
    pub fn can_accept(&self) -> bool {
        self.queue_budget.has_free_quota()
            && free_index(&self.senders, self.next_sender_index).is_ok()
    }

    /// Opens the sender of a ring that a peer offered, with chunks of at most `max_payload` bytes.
    /// Returns the answer for the reader, too.
    ///
    /// # Errors
    /// `NotSupported` where the provider lacks a capability; errors in the offer;
    /// `ResourceExhausted` as for [`offer`](Self::offer).
    pub fn accept(
        &mut self,
        peer: Peer,
        offer: &RingOffer,
        max_payload: u64,
    ) -> Result<(SenderId, RingAnswer)> {
        let (sender_index, credit_memory) =
            (free_index(&self.senders, self.next_sender_index)?, self.credit_memory()?);
        // It wraps after 65536 senders, when no write of an earlier one is in flight.
        self.generation = self.generation.wrapping_add(1);
        let instance = SenderInstance::new(sender_index, self.generation);
        let limits = (max_payload, &self.queue_budget);
        let (sender, answer) =
            RingSender::open(&self.io.endpoint, &credit_memory, peer, offer, instance, limits)?;
        self.posted_receives.prepare_for(&mut self.io, offer.notify)?;
        insert_at(&mut self.senders, sender_index, sender);
        self.next_sender_index = (sender_index + 1) % MAX_RINGS;
        self.needs_polling = true;
        Ok((SenderId(sender_index), answer))
    }

    /// Takes the writer's answer to a ring offer.
    ///
    /// # Errors
    /// Errors in the answer; `Closed` if there is no such ring.
    pub fn connect(&mut self, id: ReceiverId, peer: Peer, answer: &RingAnswer) -> Result<()> {
        receiver_mut(&mut self.receivers, id)?.connect(&self.io.endpoint, peer, answer)
    }
}

/// The first free index at or after this one, cyclically.
fn free_index<T>(slots: &[Option<T>], from: u16) -> Result<u16> {
    let is_free = |index: &u16| slots.get(usize::from(*index)).is_none_or(|ring| ring.is_none());
    (from..MAX_RINGS).chain(0..from).find(is_free).ok_or_else(|| {
        let detail = format!(
            "this endpoint has {MAX_RINGS} rings, the maximum. Close rings or use another endpoint"
        );
        Error::new(ErrorKind::ResourceExhausted, "open ring", detail)
    })
}

fn insert_at<T>(slots: &mut Vec<Option<Box<T>>>, index: u16, ring: T) {
    let index = usize::from(index);
    if slots.len() <= index {
        slots.resize_with(index + 1, || None);
    }
    slots[index] = Some(Box::new(ring));
}
