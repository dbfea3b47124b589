//! Shared memory of all members of a node: participant table, members, counters and network
//! options.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use ipc::{Layout, MappedWords, MarkedDoorbell, Participant, ParticipantTable, Segment, Words};

use crate::error::{Error, ErrorKind, Result};
use crate::ids::{NodeId, bytes_to_words, id_from_words, id_to_words, serials_before};

pub(crate) const LAYOUT: Layout = Layout::new("node segment", 5);

// Words of the node segment, behind the participant table.
const IDENTITY: usize = ParticipantTable::<MappedWords>::WORDS;
const TOPIC_COUNT: usize = IDENTITY + 2;
const SERVICE_COUNT: usize = IDENTITY + 3;
const PUBLISH_DOORBELL: usize = IDENTITY + 8;
/// For each slot, the number of the participant that became a member.
const MEMBERS: usize = PUBLISH_DOORBELL + PublishDoorbell::WORDS;
/// Network options: how often they were stored, and two slots, of which the one in use is never
/// written.
const NETWORK: usize = MEMBERS + Participant::SLOTS as usize;
/// Length in bytes, then the bytes.
const NETWORK_SLOT_WORDS: usize = 1 + MAX_NETWORK_BYTES / size_of::<u64>();
/// Ended publishers: how many were recorded, and slots.
const ENDED: usize = NETWORK + 1 + 2 * NETWORK_SLOT_WORDS;
const MAX_ENDED: usize = 256;
/// The topic's name, as a hash, or 0; the publisher, and its last sequence.
const ENDED_SLOT_WORDS: usize = 3;
const WORDS: usize = ENDED + 1 + MAX_ENDED * ENDED_SLOT_WORDS;

pub(crate) const MAX_NETWORK_BYTES: usize = 16 << 10;

/// Rung after a publish on a replicated topic.
pub(crate) type PublishDoorbell = MarkedDoorbell<MappedWords>;

/// Shared memory of a node. It outlives services, as long as the node has members.
#[derive(Debug)]
pub(crate) struct NodeSegment {
    segment: Segment,
    words: MappedWords,
    participants: Arc<ParticipantTable<MappedWords>>,
    publish_doorbell: Arc<PublishDoorbell>,
}

impl NodeSegment {
    pub(crate) fn create(identity: NodeId) -> Result<Self> {
        let segment = Segment::create(LAYOUT, WORDS * size_of::<u64>())
            .map_err(|error| Error::of("create segment of node", error))?;
        let words = segment.words();
        for (at, half) in id_to_words(&identity.0).into_iter().enumerate() {
            words.store(IDENTITY + at, half, Relaxed);
        }
        segment.mark_ready();
        Self::from_segment(segment)
    }

    /// Maps a segment received from another process.
    pub(crate) fn open(file: OwnedFd) -> Result<Self> {
        let segment = Segment::open(file, LAYOUT)
            .map_err(|error| Error::because("open segment of node", ErrorKind::Malformed, error))?;
        Self::from_segment(segment)
    }

    fn from_segment(segment: Segment) -> Result<Self> {
        let words = segment.words();
        let participants = ParticipantTable::new(segment.words());
        let (Some(participants), Some(publish_doorbell)) =
            (participants, PublishDoorbell::new(&words, PUBLISH_DOORBELL))
        else {
            let detail = "it is too small";
            return Err(Error::new("open segment of node", ErrorKind::Malformed, detail));
        };
        let (participants, publish_doorbell) = (Arc::new(participants), Arc::new(publish_doorbell));
        Ok(Self { segment, words, participants, publish_doorbell })
    }

    pub(crate) fn participants(&self) -> &Arc<ParticipantTable<MappedWords>> {
        &self.participants
    }

    pub(crate) fn publish_doorbell(&self) -> &Arc<PublishDoorbell> {
        &self.publish_doorbell
    }

    /// The node's identity, the same for all its services.
    pub(crate) fn identity(&self) -> NodeId {
        NodeId(id_from_words([0, 1].map(|at| self.words.load(IDENTITY + at, Relaxed))))
    }

    /// Called by a process that knows that it has joined: from now on it may hold memory of the
    /// node. An admitted participant without this mark holds none.
    pub(crate) fn mark_member(&self, member: Participant) {
        self.words.store(MEMBERS + member.slot() as usize, member.number().into(), Release);
    }

    /// Returns true if the participant is marked as a member. A service is not.
    pub(crate) fn is_member(&self, member: Participant) -> bool {
        self.words.load(MEMBERS + member.slot() as usize, Acquire) == u64::from(member.number())
    }

    fn network_slot(count: u64) -> usize {
        NETWORK + 1 + (count % 2) as usize * NETWORK_SLOT_WORDS
    }

    /// Stores the network options for later services. Only the holder of the leader lock calls
    /// this; the last store commits. False if they are too long.
    pub(crate) fn store_network(&self, bytes: &[u8]) -> bool {
        if bytes.is_empty() || bytes.len() > MAX_NETWORK_BYTES {
            return false;
        }
        let next = self.words.load(NETWORK, Acquire).wrapping_add(1).max(1);
        let place = Self::network_slot(next);
        self.words.store(place, bytes.len() as u64, Relaxed);
        for (at, word) in (place + 1..).zip(bytes_to_words(bytes)) {
            self.words.store(at, word, Relaxed);
        }
        self.words.store(NETWORK, next, Release);
        true
    }

    /// The network options stored last, if they are valid.
    pub(crate) fn network(&self) -> Option<Vec<u8>> {
        let count = self.words.load(NETWORK, Acquire);
        let place = (count > 0).then(|| Self::network_slot(count))?;
        let length = usize::try_from(self.words.load(place, Relaxed)).ok()?;
        if length == 0 || length > MAX_NETWORK_BYTES {
            return None;
        }
        let words = 0..length.div_ceil(size_of::<u64>());
        let words = words.map(|at| self.words.load(place + 1 + at, Relaxed));
        let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        bytes.truncate(length);
        Some(bytes)
    }

    /// Records the last sequences of publishers of a topic that is about to be removed. Only the
    /// service calls this, one at a time.
    pub(crate) fn record_ended_publishers(&self, topic: &str, publishers: &[(u64, u64)]) {
        let hash = hash_of_name(topic);
        let known = self.ended_publishers(topic);
        for (publisher, last) in publishers.iter().filter(|it| !known.contains(it)) {
            let count = self.words.load(ENDED, Relaxed);
            let at = ENDED + 1 + count as usize % MAX_ENDED * ENDED_SLOT_WORDS;
            // A process that dies in the middle of this leaves a free slot, or records it again.
            self.words.store(at, 0, Release);
            self.words.store(at + 1, *publisher, Release);
            self.words.store(at + 2, *last, Release);
            self.words.store(at, hash, Release);
            self.words.store(ENDED, count.wrapping_add(1), Release);
        }
    }

    /// The publishers of removed topics of this name, each with its last sequence: of all names, the
    /// last 256 are known.
    pub(crate) fn ended_publishers(&self, topic: &str) -> Vec<(u64, u64)> {
        let hash = hash_of_name(topic);
        let slots = (0..MAX_ENDED).map(|slot| ENDED + 1 + slot * ENDED_SLOT_WORDS);
        let word = |at| self.words.load(at, Acquire);
        let of_topic = slots.filter(|at| word(*at) == hash);
        of_topic.map(|at| (word(at + 1), word(at + 2))).collect()
    }

    /// The last serial that no publisher of a topic can have that is created from now on.
    pub(crate) fn serials_of_past_topics(&self) -> u64 {
        serials_before(self.words.load(TOPIC_COUNT, Acquire) as u32)
    }

    /// A topic number that this node has not used before.
    pub(crate) fn next_topic_number(&self) -> u32 {
        self.words.fetch_add(TOPIC_COUNT, 1) as u32
    }

    /// Ordinal of this service, from 1 on.
    pub(crate) fn next_service_number(&self) -> u32 {
        self.words.fetch_add(SERVICE_COUNT, 1) as u32 + 1
    }
}

/// Hash of a topic's name: FNV-1a, never 0.
fn hash_of_name(name: &str) -> u64 {
    let mixed = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    mixed.max(1)
}

impl AsFd for NodeSegment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.segment.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_segment_is_the_same_in_all_processes() {
        let made = NodeSegment::create(NodeId([7; 16])).unwrap();
        let opened = NodeSegment::open(made.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(opened.identity(), NodeId([7; 16]));
        assert_eq!((made.next_topic_number(), opened.next_topic_number()), (0, 1));
        assert_eq!((opened.next_service_number(), made.next_service_number()), (1, 2));
        let member = Participant::new(3, 2).unwrap();
        assert!(!opened.is_member(member));
        made.mark_member(member);
        assert!(opened.is_member(member) && !opened.is_member(Participant::new(3, 1).unwrap()));
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(NodeSegment::open(null.into()).unwrap_err().kind(), ErrorKind::Malformed);
    }

    #[test]
    fn ended_publishers_are_known_by_the_name_of_their_topic() {
        let made = NodeSegment::create(NodeId([7; 16])).unwrap();
        let opened = NodeSegment::open(made.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(opened.ended_publishers("numbers"), []);
        made.record_ended_publishers("numbers", &[(1, 5), (2, 6)]);
        made.record_ended_publishers("images", &[(1, 7)]);
        made.record_ended_publishers("numbers", &[(1, 5), (2, 6)]);
        assert_eq!(opened.ended_publishers("numbers"), [(1, 5), (2, 6)]);
        assert_eq!(opened.ended_publishers("images"), [(1, 7)]);
        // The first ones are forgotten.
        let many: Vec<_> = (10..10 + MAX_ENDED as u64).map(|publisher| (publisher, 1)).collect();
        made.record_ended_publishers("more", &many[1..]);
        assert_eq!(opened.ended_publishers("numbers"), []);
        assert_eq!(opened.ended_publishers("images"), [(1, 7)]);
        made.record_ended_publishers("more", &many[..1]);
        assert_eq!(opened.ended_publishers("images"), []);
    }

    #[test]
    fn last_stored_network_options_are_read_back() {
        let made = NodeSegment::create(NodeId([7; 16])).unwrap();
        let opened = NodeSegment::open(made.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(opened.network(), None);
        for length in [1, 7, 8, 9, MAX_NETWORK_BYTES, 3] {
            let bytes: Vec<u8> = (0..length).map(|at| at as u8).collect();
            assert!(made.store_network(&bytes));
            assert_eq!(opened.network(), Some(bytes));
        }
        assert!(!made.store_network(&[]) && !made.store_network(&[0; MAX_NETWORK_BYTES + 1]));
        assert_eq!(opened.network(), Some(vec![0, 1, 2]));
        // A process that dies before the last store has stored nothing.
        let count = made.words.load(NETWORK, Acquire);
        made.words.store(NodeSegment::network_slot(count + 1), 5, Relaxed);
        assert_eq!(opened.network(), Some(vec![0, 1, 2]));
        // An invalid length does not lead beyond the slot.
        for length in [0, MAX_NETWORK_BYTES as u64 + 1, u64::MAX] {
            made.words.store(NodeSegment::network_slot(count), length, Relaxed);
            assert_eq!(opened.network(), None);
        }
    }
}
