//! Making rings.

use super::super::chunk_poster::SenderInstance;
use super::super::credit_memory;
use super::super::immediate::MAX_RINGS;
use super::super::notify::NotifyMode;
use super::super::receiver::{RingOptions, RingReceiver, geometry_of};
use super::super::ring_offer::{RingAnswer, RingOffer};
use super::super::sender::RingSender;
use super::{Port, ReceiverId, SenderId, no_ring, open};
use crate::{Error, ErrorKind, HostMemory, MemoryKind, MemoryRegion, Peer, Result};

impl Port {
    /// Makes a ring, to be written by one peer, who is to get its [`ring_offer`](Self::terms). The
    /// peer's address is [inserted](crate::AddressVector::insert) before it gets them: some
    /// providers drop what comes from an endpoint whose address they do not have.
    ///
    /// After a loss, one that goes on with the messages that did not come whole: the ring that is
    /// lost is [forgotten](Self::forget), and [`RingOptions::whole`] is what its
    /// [reader](super::super::Reader::whole) had. Its writer [lets go](Self::drop_sender) of it, too,
    /// and [accepts](Self::accept) the new one.
    ///
    /// # Errors
    /// `InvalidArgument` for a capacity that no ring has; `NotSupported` where the provider
    /// cannot do what is asked for; `ResourceExhausted` if there are 1024 rings, or no room for
    /// another one's notices in a queue that may overrun.
    pub fn offer(&mut self, options: &RingOptions) -> Result<ReceiverId> {
        // What is no ring is refused before there is memory for it.
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
        put(&mut self.receivers, ring, receiver);
        self.next_ring = (ring + 1) % MAX_RINGS;
        self.needs_polling = true;
        Ok(ReceiverId { ring, creation_epoch })
    }

    /// Before rings of this form are opened.
    fn prepare(&mut self, mode: NotifyMode) -> Result<()> {
        self.posted_receives.expect(&self.endpoint, mode)?;
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

    /// What the writer of a ring has to know.
    ///
    /// # Errors
    /// `Closed` if there is no such ring; if the memory's keys cannot be had.
    pub fn ring_offer(&self, id: ReceiverId) -> Result<RingOffer> {
        let Some(credit_memory) = &self.credit_memory else { return Err(no_ring()) };
        let further = self.extra_lanes.iter().flat_map(|lanes| lanes.credit_memories().cloned());
        let credit_memories: Vec<_> =
            std::iter::once(credit_memory.clone()).chain(further).collect();
        self.receiver(id)?.offer(&credit_memories)
    }

    /// Could the writing side of another ring be [opened](Self::accept)? To be asked before a peer
    /// makes one.
    #[must_use]
    pub fn can_accept(&self) -> bool {
        self.queue_budget.has_free_quota()
            && free_index(&self.senders, self.next_sender_index).is_ok()
    }

    /// Opens the writing side of a ring that a peer offered, with chunks of at most so many
    /// bytes of payload. With what is to be answered.
    ///
    /// # Errors
    /// `NotSupported` where the provider cannot do what the offer wants; what is wrong with
    /// the offer; `ResourceExhausted` as for [`offer`](Self::offer).
    pub fn accept(
        &mut self,
        peer: Peer,
        offer: &RingOffer,
        max_payload: u64,
    ) -> Result<(SenderId, RingAnswer)> {
        let (sender_index, credit_memory) =
            (free_index(&self.senders, self.next_sender_index)?, self.credit_memory()?);
        // Sixty-five thousand outlets later nothing of an earlier one is on its way.
        self.generation = self.generation.wrapping_add(1);
        let instance = SenderInstance { sender_index, generation: self.generation };
        let limits = (max_payload, &self.queue_budget);
        let (sender, answer) =
            RingSender::open(&self.endpoint, &credit_memory, peer, offer, instance, limits)?;
        self.prepare(offer.notify)?;
        put(&mut self.senders, sender_index, sender);
        self.next_sender_index = (sender_index + 1) % MAX_RINGS;
        self.needs_polling = true;
        Ok((SenderId(sender_index), answer))
    }

    /// Takes the writer's answer to a ring's terms.
    ///
    /// # Errors
    /// What is wrong with the answer; `Closed` if there is no such ring.
    pub fn connect(&mut self, id: ReceiverId, peer: Peer, answer: &RingAnswer) -> Result<()> {
        open(&mut self.receivers, id)?.connect(&self.endpoint, peer, answer)
    }
}

/// A place that no ring has: the first from this one on, around the end.
pub(super) fn free_index<T>(places: &[Option<T>], from: u16) -> Result<u16> {
    let is_free = |place: &u16| places.get(usize::from(*place)).is_none_or(|ring| ring.is_none());
    (from..MAX_RINGS).chain(0..from).find(is_free).ok_or_else(|| {
        let detail = format!(
            "this endpoint has {MAX_RINGS} rings, the maximum. Close rings or use another endpoint"
        );
        Error::new(ErrorKind::ResourceExhausted, "opening a ring", detail)
    })
}

fn put<T>(places: &mut Vec<Option<Box<T>>>, place: u16, ring: T) {
    let place = usize::from(place);
    if places.len() <= place {
        places.resize_with(place + 1, || None);
    }
    places[place] = Some(Box::new(ring));
}
