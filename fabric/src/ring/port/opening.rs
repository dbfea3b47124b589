//! Opening rings.

use super::super::chunk_poster::SenderInstance;
use super::super::credit_memory;
use super::super::immediate::MAX_RINGS;
use super::super::notify::NotifyMode;
use super::super::receiver::{RingOptions, RingReceiver, geometry_of};
use super::super::ring_offer::{RingAnswer, RingOffer};
use super::super::sender::RingSender;
use super::{Port, ReceiverId, SenderId, no_ring, receiver_mut};
use crate::{Error, ErrorKind, HostMemory, MemoryKind, MemoryRegion, Peer, Result};

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
        geometry_of(&self.endpoint, 0, options, MemoryKind::Host)?;
        self.offer_on_lanes(options, 1, HostMemory::zeroed(options.capacity as usize)?)
    }

    pub(super) fn insert_receiver(
        &mut self,
        ring: u16,
        receiver: RingReceiver,
    ) -> Result<ReceiverId> {
        self.prepare(receiver.notify())?;
        receiver.set_waker(self.queue.waker());
        self.credit_memory()?;
        let creation_epoch = receiver.creation_epoch();
        insert_at(&mut self.receivers, ring, receiver);
        self.next_ring = (ring + 1) % MAX_RINGS;
        self.needs_polling = true;
        Ok(ReceiverId { ring, creation_epoch })
    }

    /// Prepares the port for rings of this notify mode.
    fn prepare(&mut self, mode: NotifyMode) -> Result<()> {
        self.posted_receives.prepare_for(&self.endpoint, mode)?;
        self.posted_receives.refill(&mut self.endpoint, &mut self.queue)
    }

    fn credit_memory(&mut self) -> Result<MemoryRegion> {
        match &self.credit_memory {
            Some(credit_memory) => Ok(credit_memory.clone()),
            None => {
                Ok(self.credit_memory.insert(credit_memory::with_credits(&self.endpoint)?).clone())
            }
        }
    }

    pub(super) fn next_epoch(&mut self) -> u32 {
        self.epoch += 1;
        self.epoch
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
        let instance = SenderInstance { sender_index, generation: self.generation };
        let limits = (max_payload, &self.queue_budget);
        let (sender, answer) =
            RingSender::open(&self.endpoint, &credit_memory, peer, offer, instance, limits)?;
        self.prepare(offer.notify)?;
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
        receiver_mut(&mut self.receivers, id)?.connect(&self.endpoint, peer, answer)
    }
}

/// The first free index at or after this one, cyclically.
pub(super) fn free_index<T>(slots: &[Option<T>], from: u16) -> Result<u16> {
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
