//! Making rings.

use super::super::credit_memory;
use super::super::immediate::RINGS;
use super::super::notify::Notify;
use super::super::outlet::Title;
use super::super::receiver::{RingOptions, RingReceiver, shape_of};
use super::super::sender::RingSender;
use super::super::terms::{RingAnswer, RingOffer};
use super::{Port, ReceiverId, SenderId, no_ring, open};
use crate::{Error, ErrorKind, HostMemory, MemoryKind, MemoryRegion, Peer, Result};

impl Port {
    /// Makes a ring, to be written by one peer, who is to get its [`terms`](Self::terms). The
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
        shape_of(&self.endpoint, 0, options, MemoryKind::Host)?;
        self.offer_by(options, 1, HostMemory::zeroed(options.capacity as usize)?)
    }

    pub(super) fn keep_receiver(
        &mut self,
        ring: u16,
        receiver: RingReceiver,
    ) -> Result<ReceiverId> {
        self.prepare(receiver.notify())?;
        receiver.wakes(self.queue.waker());
        self.credit_memory()?;
        let born = receiver.born();
        put(&mut self.receivers, ring, receiver);
        self.next_ring = (ring + 1) % RINGS;
        self.is_restless = true;
        Ok(ReceiverId { ring, born })
    }

    /// Before rings of this form are opened.
    fn prepare(&mut self, form: Notify) -> Result<()> {
        self.board.expect(&self.endpoint, form)?;
        self.board.refill(&mut self.endpoint, &mut self.queue)
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
    pub fn terms(&self, id: ReceiverId) -> Result<RingOffer> {
        let Some(credit_memory) = &self.credit_memory else { return Err(no_ring()) };
        let further = self.beside.iter().flat_map(|lanes| lanes.credit_memories().cloned());
        let credit_memories: Vec<_> =
            std::iter::once(credit_memory.clone()).chain(further).collect();
        self.receiver(id)?.offer(&credit_memories)
    }

    /// Could the writing side of another ring be [opened](Self::accept)? To be asked before a peer
    /// makes one.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.capacity.has_share() && free_place(&self.senders, self.next_name).is_ok()
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
        longest_payload: u64,
    ) -> Result<(SenderId, RingAnswer)> {
        let (name, credit_memory) =
            (free_place(&self.senders, self.next_name)?, self.credit_memory()?);
        // Sixty-five thousand outlets later nothing of an earlier one is on its way.
        self.generation = self.generation.wrapping_add(1);
        let title = Title { name, generation: self.generation };
        let limits = (longest_payload, &self.capacity);
        let (sender, answer) =
            RingSender::open(&self.endpoint, &credit_memory, peer, offer, title, limits)?;
        self.prepare(offer.notify)?;
        put(&mut self.senders, name, sender);
        self.next_name = (name + 1) % RINGS;
        self.is_restless = true;
        Ok((SenderId(name), answer))
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
pub(super) fn free_place<T>(places: &[Option<T>], from: u16) -> Result<u16> {
    let is_free = |place: &u16| places.get(usize::from(*place)).is_none_or(|ring| ring.is_none());
    (from..RINGS).chain(0..from).find(is_free).ok_or_else(|| {
        let detail = format!("{RINGS} rings end on this endpoint");
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
