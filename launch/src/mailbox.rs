//! Messages between ranks, in notices of an agent.
//!
//! A notice has at most 4096 bytes, and notices may arrive in any order. The tag of each says to which
//! message it belongs:
//!
//! ```text
//! bits  63 … 48   47 … 32          31 … 29   28 … 24   23 … 0
//!       all ones  number of the    kind      round     index of the
//!                 collective                           fragment
//! ```
//!
//! The first fragment begins with the length of the message (4 bytes, little endian).

use std::collections::{BTreeMap, HashMap, VecDeque};

use transfer::{Departure, MAX_NOTICE_LENGTH, Notice};

/// The first tag of these notices.
pub(crate) const FIRST_TAG: u64 = 0xffff << 48;
/// The longest message: 16 MiB for the bytes of the ranks, and their lengths.
pub(crate) const MAX_MESSAGE: usize = MAX_BYTES + (1 << 20);
/// The most bytes in a collective.
pub(crate) const MAX_BYTES: usize = 16 << 20;
/// Bytes of the length.
const PREFIX: usize = 4;
/// Kind and round of messages outside of collectives; those of collectives are below.
const ABORT_ROUND: u8 = 0xff;
const DIRECT_ROUND: u8 = 0xfe;
const ROUND_BITS: u32 = 5;

/// The message that a notice belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct MessageId {
    /// The number of the collective.
    pub(crate) sequence: u16,
    /// The kind of the collective above [`ROUND_BITS`], and the round.
    round: u8,
}

impl MessageId {
    pub(crate) fn of_round(sequence: u16, kind: u8, round: u8) -> Self {
        debug_assert!(round < 1 << ROUND_BITS && kind < 7);
        Self { sequence, round: kind << ROUND_BITS | round }
    }

    /// Is it of another collective with the same number?
    fn contradicts(self, other: Self) -> bool {
        self.sequence == other.sequence
            && self.round < DIRECT_ROUND
            && self.round >> ROUND_BITS != other.round >> ROUND_BITS
    }

    /// A message from one rank to another, outside of collectives.
    pub(crate) fn direct() -> Self {
        Self { sequence: 0, round: DIRECT_ROUND }
    }

    /// The report that collectives are over from this one on.
    pub(crate) fn abort(sequence: u16) -> Self {
        Self { sequence, round: ABORT_ROUND }
    }
}

/// Is a collective earlier than another one? Their numbers wrap around.
fn is_before(one: u16, other: u16) -> bool {
    (one.wrapping_sub(other) as i16) < 0
}

/// The notices that carry a message.
pub(crate) fn fragments(id: MessageId, message: &[u8]) -> impl Iterator<Item = Notice> + use<> {
    let mut bytes = Vec::with_capacity(PREFIX + message.len());
    bytes.extend((message.len() as u32).to_le_bytes());
    bytes.extend(message);
    let count = bytes.len().div_ceil(MAX_NOTICE_LENGTH);
    let tag = FIRST_TAG | u64::from(id.sequence) << 32 | u64::from(id.round) << 24;
    (0..count).filter_map(move |index| {
        let start = index * MAX_NOTICE_LENGTH;
        let end = bytes.len().min(start + MAX_NOTICE_LENGTH);
        Notice::new(tag | index as u64, &bytes[start..end]).ok()
    })
}

/// A message of which fragments are missing.
#[derive(Debug, Default)]
struct Partial {
    fragments: BTreeMap<u32, Vec<u8>>,
    bytes: usize,
}

impl Partial {
    fn add(&mut self, index: u32, bytes: &[u8]) {
        // No fragment is empty: those of a faulty rank would use memory without limit.
        if self.bytes <= PREFIX + MAX_MESSAGE && !bytes.is_empty() {
            self.bytes += bytes.len();
            self.fragments.insert(index, bytes.to_vec());
        }
    }

    fn complete(&self) -> Option<Vec<u8>> {
        let (length, _) = self.fragments.get(&0)?.split_first_chunk::<PREFIX>()?;
        let length = u32::from_le_bytes(*length) as usize;
        if self.bytes < PREFIX + length {
            return None;
        }
        let mut message: Vec<u8> = self.fragments.values().flatten().copied().collect();
        message.drain(..PREFIX);
        message.truncate(length);
        (message.len() == length).then_some(message)
    }
}

/// Messages that arrived and were not taken.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    partial: HashMap<(u32, MessageId), Partial>,
    /// Messages of collectives.
    arrived: HashMap<(u32, MessageId), Vec<u8>>,
    /// Direct messages of each rank, in the order of their arrival.
    direct: HashMap<u32, VecDeque<Vec<u8>>>,
    /// The first collective that failed, and why.
    abort: Option<(u16, Vec<u8>)>,
    /// Ranks that have departed, in the order in which that was learned.
    departed: Vec<(u32, Departure)>,
}

impl Mailbox {
    /// A notice of a rank. A message counts from its first fragment on for the collective `current`
    /// or a later one: what is left of an earlier one is dropped.
    pub(crate) fn add(&mut self, from: u32, notice: &Notice, current: u16) {
        let id = MessageId { sequence: (notice.tag >> 32) as u16, round: (notice.tag >> 24) as u8 };
        if id.round < DIRECT_ROUND && is_before(id.sequence, current) {
            return;
        }
        let partial = self.partial.entry((from, id)).or_default();
        partial.add(notice.tag as u32 & 0xff_ffff, notice.data());
        let Some(message) = partial.complete() else { return };
        self.partial.remove(&(from, id));
        match id.round {
            ABORT_ROUND => {
                let is_first = |(first, _): &(u16, _)| is_before(id.sequence, *first);
                if self.abort.as_ref().is_none_or(is_first) {
                    self.abort = Some((id.sequence, message));
                }
            }
            DIRECT_ROUND => self.direct.entry(from).or_default().push_back(message),
            _ => drop(self.arrived.insert((from, id), message)),
        }
    }

    /// A rank has departed.
    pub(crate) fn note_departure(&mut self, rank: u32, departure: Departure) {
        if !self.has_departed(rank) {
            self.departed.push((rank, departure));
        }
    }

    pub(crate) fn has_departed(&self, rank: u32) -> bool {
        self.departed.iter().any(|(departed, _)| *departed == rank)
    }

    /// The rank whose departure may be the cause of others: the first that died, or else the first.
    pub(crate) fn first_departed(&self) -> Option<u32> {
        let died = self.departed.iter().find(|(_, departure)| *departure == Departure::Dead);
        died.or(self.departed.first()).map(|(rank, _)| *rank)
    }

    pub(crate) fn take(&mut self, from: u32, id: MessageId) -> Option<Vec<u8>> {
        if id.round == DIRECT_ROUND {
            return self.direct.get_mut(&from)?.pop_front();
        }
        self.arrived.remove(&(from, id))
    }

    /// Has a rank sent a message of another collective with the number of this one?
    pub(crate) fn has_contradiction(&self, from: u32, id: MessageId) -> bool {
        self.arrived.keys().any(|(rank, other)| *rank == from && other.contradicts(id))
    }

    pub(crate) fn has_direct(&self, from: u32) -> bool {
        self.direct.get(&from).is_some_and(|messages| !messages.is_empty())
    }

    /// The report of a rank that collectives are over, if this one is among them: ranks that are
    /// late still complete earlier ones.
    pub(crate) fn abort(&self, current: u16) -> Option<&[u8]> {
        let (first, message) = self.abort.as_ref()?;
        (!is_before(current, *first)).then_some(message)
    }

    /// Drops what is left of collectives before this one.
    pub(crate) fn begin(&mut self, current: u16) {
        let is_current =
            |id: &MessageId| id.round >= DIRECT_ROUND || !is_before(id.sequence, current);
        self.partial.retain(|(_, id), _| is_current(id));
        self.arrived.retain(|(_, id), _| is_current(id));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_of_earlier_collectives_are_dropped() {
        let mut mailbox = Mailbox::default();
        let old = MessageId::of_round(u16::MAX, 0, 1);
        let new = MessageId::of_round(2, 0, 1);
        for id in [old, new] {
            fragments(id, b"bytes").for_each(|notice| mailbox.add(3, &notice, 0));
        }
        assert_eq!(mailbox.take(3, old), None);
        assert_eq!(mailbox.take(3, new).unwrap(), b"bytes");
        fragments(new, b"bytes").for_each(|notice| mailbox.add(3, &notice, 0));
        mailbox.begin(3);
        assert_eq!(mailbox.take(3, new), None);
    }

    #[test]
    fn message_of_another_collective_is_found() {
        let mut mailbox = Mailbox::default();
        let id = MessageId::of_round(4, 1, 0);
        fragments(id, b"").for_each(|notice| mailbox.add(3, &notice, 4));
        fragments(MessageId::direct(), b"").for_each(|notice| mailbox.add(3, &notice, 4));
        for (from, sequence, kind, contradicts) in
            [(3, 4, 0, true), (3, 4, 1, false), (2, 4, 0, false), (3, 5, 0, false)]
        {
            let id = MessageId::of_round(sequence, kind, 2);
            assert_eq!(mailbox.has_contradiction(from, id), contradicts);
        }
    }

    #[test]
    fn failure_of_a_later_collective_does_not_end_an_earlier_one() {
        let mut mailbox = Mailbox::default();
        for (sequence, text) in [(1, b"later"), (u16::MAX, b"first"), (0, b"other")] {
            let id = MessageId::abort(sequence);
            fragments(id, text).for_each(|notice| mailbox.add(3, &notice, 0));
        }
        assert_eq!(mailbox.abort(u16::MAX - 1), None);
        for current in [u16::MAX, 0, 5] {
            assert_eq!(mailbox.abort(current).unwrap(), b"first");
        }
    }

    #[test]
    fn direct_messages_of_a_rank_stay_in_order() {
        let mut mailbox = Mailbox::default();
        for message in [b"1", b"2"] {
            fragments(MessageId::direct(), message).for_each(|notice| mailbox.add(5, &notice, 9));
        }
        assert_eq!(mailbox.take(4, MessageId::direct()), None);
        assert_eq!(mailbox.take(5, MessageId::direct()).unwrap(), b"1");
        assert_eq!(mailbox.take(5, MessageId::direct()).unwrap(), b"2");
    }

    #[test]
    fn announced_length_allocates_nothing() {
        let mut mailbox = Mailbox::default();
        let notice = Notice::new(FIRST_TAG, &u32::MAX.to_le_bytes()).unwrap();
        mailbox.add(0, &notice, 0);
        assert_eq!(mailbox.take(0, MessageId::of_round(0, 0, 0)), None);
    }

    proptest! {
        #[test]
        fn message_is_restored_from_fragments_in_any_order(
            message in proptest::collection::vec(any::<u8>(), 0..1000),
            keys in proptest::collection::vec(any::<u32>(), 20),
        ) {
            let id = MessageId::of_round(7, 2, 2);
            let mut notices: Vec<_> = fragments(id, &message).zip(keys).collect();
            notices.sort_by_key(|(_, key)| *key);
            let mut mailbox = Mailbox::default();
            for (at, (notice, _)) in notices.iter().enumerate() {
                prop_assert!(at == 0 || mailbox.take(1, id).is_none());
                mailbox.add(1, notice, 7);
            }
            prop_assert_eq!(mailbox.take(1, id), Some(message));
        }

        #[test]
        fn any_notice_is_accepted(tag: u64, bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let mut mailbox = Mailbox::default();
            mailbox.add(0, &Notice::new(tag, &bytes).unwrap(), 0);
        }
    }
}
