//! Ranks of other machines: a ring to and from each on one port, their messages, and their failures.
//!
//! The caller drives the port: there is no thread, so an operation of other ranks advances while this one
//! is in a call. Messages of a pair of ranks are in the order of the operations.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use fabric::ring::{
    ChunkView, Message, Port, PortEvent, Pushed, ReceiverId, RingAnswer, RingOffer, RingOptions,
    SenderId, queue_entries,
};
use fabric::{
    Access, Address, AddressVector, CompletionQueue, Domain, Endpoint, HostMemory, MemoryRegion,
    Offer, Peer, QueueOptions,
};
use ipc::Announcement;

use crate::liveness::{LivenessLinks, LivenessMessage};
use crate::members::{Calls, Failure};

/// Bytes before the payload of a message.
pub(crate) const HEADER: usize = 64;
/// Slots of the outbox for large messages, and for small ones.
const LARGE_SLOTS: usize = 8;
const SMALL_SLOTS: usize = 64;
/// Bytes of a small message to a rank, with its header, at most; memory of all its slots, at most.
const SMALL_BYTES: usize = HEADER + (4 << 10);
const SMALL_MEMORY: usize = 8 << 20;
/// Memory for the rings from other ranks, at most together.
const MAX_MEMORY: u64 = 64 << 20;
/// Bytes of a ring.
const RING_BYTES: [u64; 2] = [128 << 10, 8 << 20];
/// A ring has space for so many large messages.
const MESSAGES_OF_RING: u64 = 8;
/// Time between two looks at the connections for liveness.
const LINK_INTERVAL: Duration = Duration::from_millis(5);
/// How long messages of a rank that has ended may be under way.
const LAST_MESSAGES_TIME: Duration = Duration::from_millis(20);

/// The header of a message: a step that a rank has published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StepHeader {
    signature: u64,
    carried: u64,
    /// What the rank calls, without the digest of its blocks.
    call: [u64; 2],
    /// Bytes of the payload.
    bytes: u64,
    /// The number of the operation, and of the step in it.
    number: u64,
    step: u64,
}

impl StepHeader {
    const MAGIC: u64 = 0x6661_6272_6963_7374;

    /// Of an operation with this signature and call, and a payload of so many bytes.
    pub(crate) fn new(signature: u64, call: &Announcement, carried: u64, bytes: usize) -> Self {
        let (call, bytes) = ([call[0], call[1]], bytes as u64);
        Self { signature, carried, call, bytes, number: 0, step: 0 }
    }

    /// In the operation and the step of these numbers.
    pub(crate) fn at(self, number: u64, step: u64) -> Self {
        Self { number, step, ..self }
    }

    /// Returns whether it is of the operation with this signature and number, and of this step.
    pub(crate) fn is_of(&self, signature: u64, number: u64, step: u64) -> bool {
        (self.signature, self.number, self.step) == (signature, number, step)
    }

    pub(crate) fn carried(&self) -> u64 {
        self.carried
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    fn encode(&self) -> [u8; HEADER] {
        let Self { signature, carried, call, bytes, number, step } = *self;
        let mut encoded = [0; HEADER];
        let words = [Self::MAGIC, signature, carried, call[0], call[1], bytes, number, step];
        for (at, word) in words.into_iter().enumerate() {
            encoded[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
        }
        encoded
    }

    /// The header of a message of so many bytes; None if it has none.
    fn decode(message: &[u8; HEADER], length: usize) -> Option<Self> {
        let word =
            |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| message[at * 8 + byte]));
        let bytes = word(5);
        let is_complete = bytes.checked_add(HEADER as u64) == Some(length as u64);
        (word(0) == Self::MAGIC && is_complete).then(|| Self {
            signature: word(1),
            carried: word(2),
            call: [word(3), word(4)],
            bytes,
            number: word(6),
            step: word(7),
        })
    }

    pub(crate) fn announcement(&self) -> Announcement {
        [self.call[0], self.call[1], 0, 0]
    }
}

/// A message that has arrived.
#[derive(Debug)]
enum Arrived {
    /// In the ring, until it is dropped.
    InPlace(ChunkView),
    /// Bytes of several parts.
    Assembled(Vec<u8>),
}

impl Arrived {
    fn start(&self) -> *const u8 {
        match self {
            Self::InPlace(view) => view.as_ptr(),
            Self::Assembled(bytes) => bytes.as_ptr(),
        }
    }

    fn length(&self) -> usize {
        match self {
            Self::InPlace(view) => view.len(),
            Self::Assembled(bytes) => bytes.len(),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Present,
    Left,
    /// Since then.
    Ended(Instant),
    /// Violation of the protocol, or a broken ring, since then.
    Unreachable(Instant),
}

#[derive(Debug)]
struct RemoteRank {
    state: State,
    peer: Option<Peer>,
    /// The ring that it writes, and the one that this rank writes to it.
    from: Option<ReceiverId>,
    to: Option<SenderId>,
    /// The parts of a message that is not complete.
    parts: Vec<u8>,
    arrived: Option<(StepHeader, Arrived)>,
    /// How many messages of this rank it has released.
    released: u64,
}

/// A slot of the outbox, and the messages that are in it: the rank of each, and how many that rank has
/// released when it is free.
#[derive(Debug, Default)]
struct Slot {
    messages: Vec<(u32, u64)>,
}

/// Memory that this rank gives to others.
#[derive(Debug)]
struct Outbox {
    region: MemoryRegion,
    slots: Vec<Slot>,
    slot_bytes: usize,
    next: usize,
}

impl Outbox {
    fn new(domain: &Domain, slots: usize, slot_bytes: usize) -> fabric::Result<Self> {
        let memory = HostMemory::zeroed(slots * slot_bytes)?;
        let region = domain.register(memory, Access::WRITE)?;
        let slots = (0..slots).map(|_| Slot::default()).collect();
        Ok(Self { region, slots, slot_bytes, next: 0 })
    }
}

/// A slot that this rank fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OutboxSlot {
    is_small: bool,
    index: usize,
    start: *mut u8,
}

impl OutboxSlot {
    /// Where a payload goes whose message begins at this offset.
    pub(crate) fn payload(self, offset: usize) -> *mut u8 {
        self.start.wrapping_add(offset + HEADER)
    }
}

/// All ranks of a domain, as one of them reaches them.
#[derive(Debug)]
pub(crate) struct RemoteRanks {
    port: Port,
    addresses: AddressVector,
    links: LivenessLinks,
    links_read_at: Instant,
    own: u32,
    ranks: Vec<RemoteRank>,
    small: Outbox,
    /// Bytes of a small message to one rank.
    small_bytes: usize,
    large: Outbox,
    /// The longest payload for one rank.
    payload_bytes: usize,
    /// What a rank of another machine reported.
    reported: Option<(Failure, Calls)>,
    has_reported: bool,
}

/// Why a ring or a message cannot be used.
pub(crate) type Cause = Box<dyn std::error::Error + Send + Sync>;

/// What each rank gives the others to open rings: for each other rank an offer, and an answer to its offer.
pub(crate) type Offers = Vec<Option<RingOffer>>;
pub(crate) type Answers = Vec<Option<RingAnswer>>;

impl RemoteRanks {
    /// Opens the port of a rank in a domain of so many.
    pub(crate) fn open(offer: &Offer, own: u32, count: usize) -> fabric::Result<Self> {
        let domain = Domain::open(offer)?;
        let addresses = AddressVector::open(&domain)?;
        let size = queue_entries(domain.capabilities());
        let options = QueueOptions { size, ..QueueOptions::default() };
        let mut queue = CompletionQueue::open_with(&domain, options)?;
        let endpoint = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
        let payload_bytes = (ring_bytes(count) / MESSAGES_OF_RING) as usize - 2 * HEADER;
        let payload_bytes = payload_bytes / 4096 * 4096;
        let small_bytes = SMALL_BYTES.min(SMALL_MEMORY / SMALL_SLOTS / count / HEADER * HEADER);
        let small = Outbox::new(&domain, SMALL_SLOTS, small_bytes * count)?;
        let large = Outbox::new(&domain, LARGE_SLOTS, (HEADER + payload_bytes) * count)?;
        let rank = |_| RemoteRank {
            state: State::Present,
            peer: None,
            from: None,
            to: None,
            parts: Vec::new(),
            arrived: None,
            released: 0,
        };
        Ok(Self {
            port: Port::new(endpoint, queue),
            addresses,
            links: LivenessLinks::default(),
            links_read_at: Instant::now(),
            own,
            ranks: (0..count).map(rank).collect(),
            small,
            small_bytes,
            large,
            payload_bytes,
            reported: None,
            has_reported: false,
        })
    }

    pub(crate) fn address(&self) -> fabric::Result<Address> {
        self.port.endpoint().address()
    }

    pub(crate) fn own(&self) -> u32 {
        self.own
    }

    /// The longest payload of a message to one rank.
    pub(crate) fn payload_bytes(&self) -> usize {
        self.payload_bytes
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.own as usize;
        (0..self.ranks.len()).filter(move |rank| *rank != own)
    }

    /// Offers a ring to each other rank, whose address is known.
    pub(crate) fn offer(&mut self, addresses: &[Address]) -> fabric::Result<Offers> {
        let mut offers = vec![None; self.ranks.len()];
        for rank in self.others() {
            // Some providers drop data from unknown addresses.
            self.ranks[rank].peer = Some(self.addresses.insert(&addresses[rank])?);
            let options = RingOptions::new(self.port.endpoint(), ring_bytes(self.ranks.len()))?;
            let ring = self.port.offer(&options)?;
            self.ranks[rank].from = Some(ring);
            offers[rank] = Some(self.port.ring_offer(ring)?);
        }
        Ok(offers)
    }

    /// Accepts the rings that the others have offered to this rank: `offers` are those of each.
    pub(crate) fn accept(&mut self, offers: &[Offers]) -> fabric::Result<Answers> {
        let mut answers = vec![None; self.ranks.len()];
        for rank in self.others() {
            let offer = offers[rank].get(self.own as usize);
            let (Some(Some(offer)), Some(peer)) = (offer, self.ranks[rank].peer) else { continue };
            let most = (self.payload_bytes + HEADER) as u64;
            let (ring, answer) = self.port.accept(peer, offer, most)?;
            self.ranks[rank].to = Some(ring);
            answers[rank] = Some(answer);
        }
        Ok(answers)
    }

    /// Takes the answers of the others to the offers of this rank.
    pub(crate) fn connect(&mut self, answers: &[Answers]) -> fabric::Result<()> {
        for rank in self.others() {
            let answer = answers[rank].get(self.own as usize).and_then(Option::as_ref);
            let RemoteRank { from, peer, .. } = &self.ranks[rank];
            let (from, peer) = (*from, *peer);
            if let (Some(answer), Some(ring), Some(peer)) = (answer, from, peer) {
                self.port.connect(ring, peer, answer)?;
            }
        }
        Ok(())
    }

    /// Learns by these connections when other ranks end.
    pub(crate) fn watch(&mut self, links: LivenessLinks) {
        self.links = links;
    }

    /// A free slot for messages of this payload to each other rank, or the rank that still needs one.
    pub(crate) fn free_slot(&mut self, payload: usize) -> Result<OutboxSlot, u32> {
        let is_small = payload.next_multiple_of(HEADER) + HEADER <= self.small_bytes;
        let outbox = if is_small { &mut self.small } else { &mut self.large };
        let index = outbox.next;
        let mut messages = std::mem::take(&mut outbox.slots[index].messages);
        let held = messages.iter().find(|(rank, released)| {
            !self.has_released(*rank, *released)
                && self.ranks[*rank as usize].state == State::Present
        });
        let held = held.map(|(rank, _)| *rank);
        if held.is_none() {
            messages.clear();
        }
        let outbox = if is_small { &mut self.small } else { &mut self.large };
        outbox.slots[index].messages = messages;
        if let Some(rank) = held {
            return Err(rank);
        }
        outbox.next = (index + 1) % outbox.slots.len();
        let start = outbox.region.as_ptr().wrapping_add(index * outbox.slot_bytes);
        Ok(OutboxSlot { is_small, index, start })
    }

    /// Returns whether a rank has released so many messages of this one.
    fn has_released(&mut self, rank: u32, count: u64) -> bool {
        let to = &mut self.ranks[rank as usize];
        while to.released < count
            && let Some(ring) = to.to
            && let Ok(Some(number)) = self.port.next_read(ring)
        {
            to.released = number + 1;
        }
        to.released >= count
    }

    /// Begins the message to a rank whose payload is in a slot, and writes its header.
    pub(crate) fn begin(
        &mut self,
        rank: u32,
        slot: OutboxSlot,
        offset: usize,
        header: &StepHeader,
    ) -> fabric::Result<Option<Sending>> {
        let Some(ring) = self.ranks[rank as usize].to else { return Ok(None) };
        let encoded = header.encode();
        // SAFETY: the slot has space for the header; only this rank writes it. A header that is for
        // several ranks is written with the same bytes again.
        unsafe {
            let at = slot.start.wrapping_add(offset);
            encoded.as_ptr().copy_to_nonoverlapping(at, HEADER);
        }
        let length = HEADER + header.bytes as usize;
        let message = self.port.begin(ring, 0, length as u64)?;
        let outbox = if slot.is_small { &mut self.small } else { &mut self.large };
        let start = slot.index * outbox.slot_bytes + offset;
        let source = outbox.region.slice(start..start + length)?;
        outbox.slots[slot.index].messages.push((rank, message.number() + 1));
        Ok(Some(Sending { ring, message, source }))
    }

    /// Writes a message as far as there is space. Returns whether all of it is written.
    pub(crate) fn push(&mut self, sending: &mut Sending) -> fabric::Result<bool> {
        let Sending { ring, message, source } = sending;
        loop {
            match self.port.push(*ring, message, source)? {
                Pushed::Written => return Ok(true),
                Pushed::Posted(_) if message.is_written() => return Ok(true),
                Pushed::Posted(_) => {}
                Pushed::Blocked(_) | Pushed::Busy => return Ok(false),
            }
        }
    }

    /// Returns whether the fabric has taken all that this rank has written to a rank.
    pub(crate) fn is_sent(&self, rank: u32) -> bool {
        let ring = self.ranks[rank as usize].to.and_then(|ring| self.port.sender(ring).ok());
        ring.is_none_or(|sender| sender.unfinished() == 0)
    }

    /// Tells the others what this rank has released of their messages.
    pub(crate) fn return_credit(&mut self) {
        self.port.return_all_credit(true);
    }

    /// Makes progress, without waiting.
    pub(crate) fn poll(&mut self) -> fabric::Result<bool> {
        self.read_links();
        Ok(!matches!(self.port.progress()?, PortEvent::Idle))
    }

    /// Waits for progress, for this time at most.
    pub(crate) fn wait(&mut self, longest: Duration) -> fabric::Result<()> {
        self.read_links();
        let _event = self.port.wait(longest)?;
        Ok(())
    }

    fn read_links(&mut self) {
        if self.links_read_at.elapsed() < LINK_INTERVAL {
            return;
        }
        self.links_read_at = Instant::now();
        for (rank, message) in self.links.messages() {
            match message {
                LivenessMessage::Left => self.depart(rank, State::Left),
                LivenessMessage::Ended => self.depart(rank, State::Ended(Instant::now())),
                LivenessMessage::Report(bytes) => {
                    self.reported = self.reported.or(decode_failure(&bytes));
                }
            }
        }
    }

    fn depart(&mut self, rank: u32, how: State) {
        if let Some(rank) = self.ranks.get_mut(rank as usize)
            && matches!(rank.state, State::Present | State::Unreachable(_))
        {
            rank.state = how;
        }
    }

    /// The ring to or from a rank failed.
    pub(crate) fn set_unreachable(&mut self, rank: u32, error: &dyn std::fmt::Display) {
        let state = &mut self.ranks[rank as usize].state;
        if *state == State::Present {
            tracing::warn!(rank, %error, "ring of a collective operation failed");
            *state = State::Unreachable(Instant::now());
        }
    }

    /// The header of the next message of a rank, if it has come.
    ///
    /// # Errors
    /// What is wrong with the ring or the message, for the log.
    pub(crate) fn arrived(&mut self, rank: u32) -> Result<Option<StepHeader>, Cause> {
        let most = HEADER + self.payload_bytes;
        let Self { port, ranks, .. } = self;
        let from = &mut ranks[rank as usize];
        loop {
            if let Some((header, _)) = &from.arrived {
                return Ok(Some(*header));
            }
            let Some(ring) = from.from else { return Ok(None) };
            let Some(view) = port.take(ring)? else { return Ok(None) };
            let is_whole = view.header().offset == 0 && view.is_last();
            let message = if is_whole {
                Arrived::InPlace(view)
            } else {
                let first = from.parts.len();
                let bytes = view.len();
                if first + bytes > most {
                    return Err("a message is longer than all that are sent".into());
                }
                from.parts.resize(first + bytes, 0);
                view.read(0, &mut from.parts[first..])?;
                if !view.is_last() {
                    continue;
                }
                Arrived::Assembled(std::mem::take(&mut from.parts))
            };
            let length = message.length();
            let mut header = [0; HEADER];
            if length >= HEADER {
                // SAFETY: the message has so many bytes.
                unsafe {
                    message.start().copy_to_nonoverlapping(header.as_mut_ptr(), HEADER);
                }
            }
            let Some(header) = StepHeader::decode(&header, length) else {
                return Err("a message has no valid header".into());
            };
            from.arrived = Some((header, message));
        }
    }

    /// The payload of the message of a rank that has arrived; null if there is none. Valid until it is
    /// [released](Self::release).
    pub(crate) fn payload(&self, rank: u32) -> *const u8 {
        let arrived = self.ranks[rank as usize].arrived.as_ref();
        arrived.map_or(std::ptr::null(), |(_, message)| message.start().wrapping_add(HEADER))
    }

    /// Releases the message of a rank that has arrived.
    pub(crate) fn release(&mut self, rank: u32) {
        self.ranks[rank as usize].arrived = None;
    }

    /// The failure of a rank that has ended or left, or what another rank reported.
    pub(crate) fn failure(&self, rank: u32) -> Option<(Failure, Calls)> {
        let is_settled = |since: Instant| since.elapsed() >= LAST_MESSAGES_TIME;
        let departed = match self.ranks[rank as usize].state {
            State::Left => Some(Failure::Left { rank }),
            // Its last messages may still be under way.
            State::Ended(since) if is_settled(since) => Some(Failure::Ended { rank }),
            // That it has ended is the better cause.
            State::Unreachable(since) if is_settled(since) => {
                Some(Failure::Unreachable { rank, waiting: self.own })
            }
            _ => None,
        };
        // The report names the first cause.
        self.reported.or(departed.map(|failure| (failure, [[0; 4]; 2])))
    }

    /// The failure of any rank whose process has ended, or what another rank reported.
    pub(crate) fn any_failure(&self) -> Option<(Failure, Calls)> {
        let has_ended = |rank: &u32| {
            matches!(self.ranks[*rank as usize].state, State::Ended(_) | State::Unreachable(_))
        };
        let ended = (0..self.ranks.len() as u32).filter(has_ended);
        self.reported.or_else(|| ended.filter_map(|rank| self.failure(rank)).next())
    }

    /// What another rank reported.
    pub(crate) fn reported(&self) -> Option<(Failure, Calls)> {
        self.reported
    }

    /// Reports a failure to ranks of other machines, once.
    pub(crate) fn report(&mut self, failure: Failure, calls: &Calls) {
        if !std::mem::replace(&mut self.has_reported, true) {
            self.links.report(&encode_failure(failure, calls));
        }
    }

    /// Leaves the other ranks. Waits until they have the messages of this one.
    pub(crate) fn leave(mut self, deadline: Instant) {
        self.port.return_all_credit(true);
        for rank in self.others() {
            if let Some(ring) = self.ranks[rank].to
                && self.ranks[rank].state == State::Present
                && !self.has_reported
            {
                let left = deadline.saturating_duration_since(Instant::now());
                if let Err(error) = self.port.flush(ring, left) {
                    tracing::debug!(rank, %error, "a rank has not read the last messages yet");
                }
            }
        }
        self.links.leave();
    }
}

/// A message that is being written.
#[derive(Debug)]
pub(crate) struct Sending {
    ring: SenderId,
    message: Message,
    source: fabric::RegionSlice,
}

/// The bytes of a ring in a domain of so many ranks.
fn ring_bytes(count: usize) -> u64 {
    let each = MAX_MEMORY / (count as u64).max(1);
    each.clamp(RING_BYTES[0], RING_BYTES[1]) / 4096 * 4096
}

/// A failure as the bytes of a report.
fn encode_failure(failure: Failure, calls: &Calls) -> [u8; 56] {
    let calls = calls.iter().flat_map(|call| call[..3].iter().copied());
    let mut bytes = [0; 56];
    for (at, word) in std::iter::once(failure.encode()).chain(calls).enumerate() {
        bytes[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn decode_failure(bytes: &[u8; 56]) -> Option<(Failure, Calls)> {
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at * 8 + byte]));
    let call = |first: usize| [word(first), word(first + 1), word(first + 2), 0];
    (word(0) != 0).then(|| (Failure::decode(word(0)), [call(1), call(4)]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn encoded_headers_are_decoded(words: [u64; 4], call: [u64; 2], bytes in 0_u64..1 << 40) {
            let [signature, carried, number, step] = words;
            let header = StepHeader { signature, carried, call, bytes, number, step };
            let length = HEADER + bytes as usize;
            prop_assert_eq!(StepHeader::decode(&header.encode(), length), Some(header));
            prop_assert_eq!(StepHeader::decode(&header.encode(), length + 1), None);
        }

        #[test]
        fn failures_are_reported_with_calls(one in 0_u32..4096, other in 0_u32..4096, word: u64) {
            let calls = [[1, 2, word, 0], [4, word, 6, 0]];
            for failure in [
                Failure::Ended { rank: one },
                Failure::Late { rank: one, waiting: other },
                Failure::Unreachable { rank: one, waiting: other },
                Failure::Mismatch { one, other, collective: 7 },
            ] {
                let bytes = encode_failure(failure, &calls);
                prop_assert_eq!(decode_failure(&bytes), Some((failure, calls)));
            }
        }

        #[test]
        fn other_bytes_are_no_failure_or_one_with_ranks(bytes: [u8; 56], message: [u8; HEADER]) {
            let _ = (decode_failure(&bytes), StepHeader::decode(&message, 100));
        }
    }
}
