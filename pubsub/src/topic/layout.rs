//! Layout of a topic's words.
//!
//! ```text
//!   0 number and settings                 64 publishers: 64 slots
//!  34 serial of the last publisher       576 origins: 64 slots
//!  35 inbound writer                    1088 subscribers: 32 slots
//!  36 its intent                        1344 destinations: 32 of 2 words
//!  38 is the topic replicated           1408 messages missed by nodes: 17 slots
//!  39 uses of origins                   1544 the next values of these: 17 slots
//!  40 publishers lost, local            1680 the last lost, local: 16 of 3 words
//!  41 and remote                        1728 and remote
//!  42 evictions                         1776 changes of the remote last sequences
//!                                       1777 changes of publishers
//!                                       1778 arrivals of publishing nodes
//!  43 losses sent to other nodes        1784 remote last sequences: 256 slots
//!  44 loans of each publisher           3832 remote accounts: their header
//!  45 messages dropped by publishers    3840 nodes: 64 of 4 words
//!  46 type of its values                4096 publishers: 256 of 16 words
//!                                       8192 names of publishers: 64 of 16 words
//!                                       9216 publishing nodes: 64 of 16 words
//!                                      10240 local queue
//!                                            inbound queue
//! ```
//!
//! A slot is 8 words, so that no two share a cache line. Words that are never written take no memory.

use std::sync::atomic::Ordering::Release;

use ipc::Words;

pub(super) const NUMBER: usize = 0;
pub(super) const NAME_LENGTH: usize = 1;
pub(super) const NAME: usize = 2;
pub(super) const PLACE: usize = 27;
pub(super) const UUID: usize = 28;
pub(super) const RELIABILITY: usize = 30;
pub(super) const DEPTH: usize = 31;
pub(super) const LARGEST: usize = 32;
pub(super) const RELEASE: usize = 33;
pub(super) const SERIAL: usize = 34;
pub(super) const WRITER: usize = 35;
pub(super) const INBOUND_INTENT: usize = 36;
pub(super) const REPLICATED: usize = 38;
pub(super) const ORIGIN_USES: usize = 39;
pub(super) const LOST: usize = 40;
pub(super) const EVICTIONS: usize = 42;
pub(super) const LOSSES_SENT: usize = 43;
pub(super) const LOANS: usize = 44;
/// How often publishers of this node found no room, and dropped a message.
pub(super) const DROPS: usize = 45;
/// Length of the type name, 0 without one, and the name.
pub(super) const TYPE_LENGTH: usize = 46;
pub(super) const TYPE: usize = 47;
/// Samples that a subscriber may hold.
pub(super) const MAX_HELD: usize = TYPE + crate::TypeName::WORDS;
/// For each direction the message that blocks publishers, for how long, and when that was recorded.
pub(super) const BLOCKING: usize = MAX_HELD + 1;
pub(super) const BLOCKING_WORDS: usize = 3;
pub(super) const MAX_REMEMBERED_LOSSES: usize = 16;

pub(super) const CACHE_LINE_WORDS: usize = 8;
pub(super) const PUBLISHERS: usize = 64;
/// Publishers of a topic on one node at a time.
pub(crate) const PUBLISHER_SLOTS: usize = 64;
pub(super) const ORIGINS: usize = PUBLISHERS + PUBLISHER_SLOTS * CACHE_LINE_WORDS;
/// Topics of other nodes whose last delivered message is recorded.
pub(crate) const MAX_ORIGINS: usize = 64;
pub(super) const SUBSCRIBERS: usize = ORIGINS + MAX_ORIGINS * CACHE_LINE_WORDS;
/// Limit of subscribers, equal to a queue's subscriptions.
pub(super) const MAX_SUBSCRIBERS: usize = 32;
pub(super) const DESTINATIONS: usize = SUBSCRIBERS + MAX_SUBSCRIBERS * CACHE_LINE_WORDS;
/// Nodes for which messages of a topic may be retained.
pub(super) const MAX_DESTINATIONS: usize = 32;
pub(super) const MISSED: usize = DESTINATIONS + 2 * MAX_DESTINATIONS;
/// A slot for the totals, and two words for each publisher.
pub(super) const MISSED_WORDS: usize = CACHE_LINE_WORDS + 2 * PUBLISHER_SLOTS;
pub(super) const MISSED_NEXT: usize = MISSED + MISSED_WORDS;
pub(super) const LAST_LOST: usize = MISSED_NEXT + MISSED_WORDS;
/// A node, and a publisher of it.
pub(super) const LOST_WORDS: usize = 3;
pub(super) const REMOTE_LAST_SEQUENCE_CHANGES: usize =
    LAST_LOST + 2 * MAX_REMEMBERED_LOSSES * LOST_WORDS;
/// How often publishers of this node or publishing nodes have come or gone.
pub(super) const PUBLISHER_CHANGES: usize = REMOTE_LAST_SEQUENCE_CHANGES + 1;
pub(super) const PUBLISHING_NODE_ARRIVALS: usize = REMOTE_LAST_SEQUENCE_CHANGES + 2;
pub(super) const REMOTE_LAST_SEQUENCES: usize = REMOTE_LAST_SEQUENCE_CHANGES + CACHE_LINE_WORDS;
/// Publishers of other nodes whose last sequence is recorded.
pub(super) const MAX_REMOTE_LAST_SEQUENCES: usize = 256;
pub(super) const REMOTE_ACCOUNTS: usize =
    REMOTE_LAST_SEQUENCES + MAX_REMOTE_LAST_SEQUENCES * CACHE_LINE_WORDS;
/// Nodes whose start is recorded, and words of each.
pub(super) const REMOTE_STARTS: usize = REMOTE_ACCOUNTS + CACHE_LINE_WORDS;
pub(super) const MAX_REMOTE_STARTS: usize = 64;
pub(super) const REMOTE_START_WORDS: usize = 4;
/// Publishers of other nodes with an account, and words of each.
pub(super) const ACCOUNTS: usize = REMOTE_STARTS + MAX_REMOTE_STARTS * REMOTE_START_WORDS;
pub(super) const MAX_ACCOUNTS: usize = 256;
pub(super) const ACCOUNT_WORDS: usize = 2 * CACHE_LINE_WORDS;
pub(super) const PUBLISHER_NAMES: usize = ACCOUNTS + MAX_ACCOUNTS * ACCOUNT_WORDS;
pub(super) const NAME_WORDS: usize = 2 * CACHE_LINE_WORDS;
/// Other nodes that publish.
pub(super) const PUBLISHING_NODES: usize = PUBLISHER_NAMES + PUBLISHER_SLOTS * NAME_WORDS;
pub(super) const MAX_PUBLISHING_NODES: usize = 64;
pub(super) const PUBLISHING_NODE_WORDS: usize = 2 * CACHE_LINE_WORDS;
pub(super) const QUEUES: usize = PUBLISHING_NODES + MAX_PUBLISHING_NODES * PUBLISHING_NODE_WORDS;

/// Stores values in words that follow each other. The stores count as the caller's: tests kill a
/// process before and after each store of a listed source.
#[inline]
#[track_caller]
pub(super) fn store_all<W: Words>(words: &W, first: usize, all: impl IntoIterator<Item = u64>) {
    for (at, word) in (first..).zip(all) {
        words.store(at, word, Release);
    }
}

const _: () =
    assert!(REMOTE_LAST_SEQUENCE_CHANGES.is_multiple_of(CACHE_LINE_WORDS) && QUEUES == 10240);
const _: () = assert!(BLOCKING + 2 * BLOCKING_WORDS <= PUBLISHERS);
const _: () = assert!(NAME + crate::settings::MAX_TOPIC_NAME.div_ceil(8) <= PLACE);
