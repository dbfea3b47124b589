//! What all processes of a node share from the moment they join: who is there, and how their
//! node is connected to others.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use ipc::{Layout, MappedWords, MarkedDoorbell, Participant, ParticipantTable, Segment, Words};

use crate::error::{Error, ErrorKind, Result};
use crate::peers::NodeId;
use crate::pool::{id_from_words, id_to_words};

pub(crate) const LAYOUT: Layout = Layout::new("node segment", 4);

// Words of the hall, behind the roster.
const IDENTITY: usize = ParticipantTable::<MappedWords>::WORDS;
const TOPIC_COUNT: usize = IDENTITY + 2;
const SERVICE_COUNT: usize = IDENTITY + 3;
/// The bell that wakes who carries messages to other nodes.
const PUBLISH_DOORBELL: usize = IDENTITY + 8;
/// For each place, the name of who came to be a member there.
const MEMBERS: usize = PUBLISH_DOORBELL + PublishDoorbell::WORDS;
/// How the node is connected to others: how often that was said, and two places for what was said,
/// of which the one in use is never written to.
const NETWORK: usize = MEMBERS + Participant::SLOTS as usize;
/// The length of what was said, in bytes, and then its bytes.
const NETWORK_SLOT_WORDS: usize = 1 + MAX_NETWORK_BYTES / size_of::<u64>();
const WORDS: usize = NETWORK + 1 + 2 * NETWORK_SLOT_WORDS;

/// Bytes that how a node is connected to others may take.
pub(crate) const MAX_NETWORK_BYTES: usize = 16 << 10;

/// The bell that is rung by those that publish what other nodes want.
pub(crate) type PublishDoorbell = MarkedDoorbell<MappedWords>;

/// A node's hall. It outlives the services of the node, as long as anybody is there.
#[derive(Debug)]
pub(crate) struct NodeSegment {
    segment: Segment,
    words: MappedWords,
    roster: Arc<ParticipantTable<MappedWords>>,
    publish_doorbell: Arc<PublishDoorbell>,
}

impl NodeSegment {
    /// That of a node that nobody is at yet.
    pub(crate) fn create(identity: NodeId) -> Result<Self> {
        let segment = Segment::create(LAYOUT, WORDS * size_of::<u64>())
            .map_err(|error| Error::of("create the node segment", error))?;
        let words = segment.words();
        for (at, half) in id_to_words(&identity.0).into_iter().enumerate() {
            words.store(IDENTITY + at, half, Relaxed);
        }
        segment.mark_ready();
        Self::from_segment(segment)
    }

    /// As it came from another process.
    pub(crate) fn open(file: OwnedFd) -> Result<Self> {
        let operation = "open the node segment";
        let segment = Segment::open(file, LAYOUT)
            .map_err(|error| Error::because(operation, ErrorKind::Malformed, error))?;
        Self::from_segment(segment)
    }

    fn from_segment(segment: Segment) -> Result<Self> {
        let words = segment.words();
        let roster = ParticipantTable::new(segment.words());
        let (Some(roster), Some(publish_doorbell)) =
            (roster, PublishDoorbell::new(&words, PUBLISH_DOORBELL))
        else {
            let detail = "it is too small";
            return Err(Error::new("open the node segment", ErrorKind::Malformed, detail));
        };
        Ok(Self {
            segment,
            words,
            roster: Arc::new(roster),
            publish_doorbell: Arc::new(publish_doorbell),
        })
    }

    /// Who is there.
    pub(crate) fn roster(&self) -> &Arc<ParticipantTable<MappedWords>> {
        &self.roster
    }

    /// Rung by those that publish what other nodes want.
    pub(crate) fn publish_doorbell(&self) -> &Arc<PublishDoorbell> {
        &self.publish_doorbell
    }

    /// The node's, whatever service serves it.
    pub(crate) fn identity(&self) -> NodeId {
        NodeId(id_from_words([0, 1].map(|at| self.words.load(IDENTITY + at, Relaxed))))
    }

    /// Said by a process of itself, when it knows that it is a member: from now on it may have
    /// something of the node. A name that was given and never did this has nothing.
    pub(crate) fn mark_member(&self, who: Participant) {
        self.words.store(MEMBERS + who.slot() as usize, who.number().into(), Release);
    }

    /// Did it say so? A service never does.
    pub(crate) fn is_member(&self, who: Participant) -> bool {
        self.words.load(MEMBERS + who.slot() as usize, Acquire) == u64::from(who.number())
    }

    fn network_slot(count: u64) -> usize {
        NETWORK + 1 + (count % 2) as usize * NETWORK_SLOT_WORDS
    }

    /// Keeps how the node is connected to others, for the next services. By who holds the office:
    /// one at a time, whose last store is the moment. False if it is too long.
    pub(crate) fn store_network(&self, bytes: &[u8]) -> bool {
        if bytes.is_empty() || bytes.len() > MAX_NETWORK_BYTES {
            return false;
        }
        let next = self.words.load(NETWORK, Acquire).wrapping_add(1).max(1);
        let place = Self::network_slot(next);
        self.words.store(place, bytes.len() as u64, Relaxed);
        for (at, word) in bytes.chunks(size_of::<u64>()).enumerate() {
            let mut whole = [0; size_of::<u64>()];
            whole[..word.len()].copy_from_slice(word);
            self.words.store(place + 1 + at, u64::from_le_bytes(whole), Relaxed);
        }
        self.words.store(NETWORK, next, Release);
        true
    }

    /// What was kept last, if anything was, and can have been.
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

    /// A number that no topic of this node had before.
    pub(crate) fn next_topic_number(&self) -> u32 {
        self.words.fetch_add(TOPIC_COUNT, 1) as u32
    }

    /// The how manieth service this is, from 1 on.
    pub(crate) fn next_service_number(&self) -> u32 {
        self.words.fetch_add(SERVICE_COUNT, 1) as u32 + 1
    }
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
    fn a_hall_is_the_same_for_all() {
        let made = NodeSegment::create(NodeId([7; 16])).unwrap();
        let opened = NodeSegment::open(made.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(opened.identity(), NodeId([7; 16]));
        assert_eq!((made.next_topic_number(), opened.next_topic_number()), (0, 1));
        assert_eq!((opened.next_service_number(), made.next_service_number()), (1, 2));
        let who = Participant::new(3, 2).unwrap();
        assert!(!opened.is_member(who));
        made.mark_member(who);
        assert!(opened.is_member(who) && !opened.is_member(Participant::new(3, 1).unwrap()));
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(NodeSegment::open(null.into()).unwrap_err().kind(), ErrorKind::Malformed);
    }
    #[test]
    fn what_was_kept_last_is_found_whole() {
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
        // Who dies on the way there has not said anything.
        let count = made.words.load(NETWORK, Acquire);
        made.words.store(NodeSegment::network_slot(count + 1), 5, Relaxed);
        assert_eq!(opened.network(), Some(vec![0, 1, 2]));
        // Nobody is led beyond the place by what cannot be.
        for length in [0, MAX_NETWORK_BYTES as u64 + 1, u64::MAX] {
            made.words.store(NodeSegment::network_slot(count), length, Relaxed);
            assert_eq!(opened.network(), None);
        }
    }
}
