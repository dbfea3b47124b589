//! Where everything lies in a topic's words.
//!
//! ```text
//!   0 number, and what it is like        64 publishers: 64 lines
//!  34 publishers' serials              576 origins: 64 lines
//!  35 who delivers what arrives       1088 alarms: 32 lines
//!  36 its intent                      1344 destinations: 32 of 2 words
//!  38 is it carried                   1408 what nodes missed: 17 lines
//!  39 uses of origins                 1544 that, as it is about to be: 17 lines
//!  40 publishers lost, here           1680 the last lost, here: 16 of 3 words
//!  41 and elsewhere                   1728 and elsewhere
//!  42 subscribers evicted             1776 changes of what follows
//!  43 losses that others were told of 1784 what was published elsewhere: 64 lines
//!  44 loans of each publisher         2296 the queue of what is published here
//!  45 messages that publishers dropped     the queue of what arrives
//!  46 the type of its values
//! ```
//!
//! A line is 8 words, so that no two share one of the processor's.

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
pub(super) const ARRIVING: usize = 36;
pub(super) const CARRIED: usize = 38;
/// How often lines of origins were used.
pub(super) const ORIGIN_USES: usize = 39;
pub(super) const LOST: usize = 40;
pub(super) const EVICTIONS: usize = 42;
pub(super) const LOST_TOLD: usize = 43;
pub(super) const LOANS: usize = 44;
/// How often publishers here found no room, and dropped a message.
pub(super) const DROPS: usize = 45;
/// The length of the type's name, 0 if there is none, and the name.
pub(super) const TYPE_LENGTH: usize = 46;
pub(super) const TYPE: usize = 47;
pub(super) const MOST_LOST: usize = 16;

pub(super) const LINE: usize = 8;
pub(super) const PUBLISHERS: usize = 64;
/// Publishers of a topic at a time on one node.
pub(crate) const MOST_PUBLISHERS: usize = 64;
pub(super) const ORIGINS: usize = PUBLISHERS + MOST_PUBLISHERS * LINE;
/// Topics of other nodes of which it is known what was delivered.
pub(crate) const MOST_ORIGINS: usize = 64;
pub(super) const ALARMS: usize = ORIGINS + MOST_ORIGINS * LINE;
/// As many as a queue has places for.
pub(super) const MOST_SUBSCRIBERS: usize = 32;
pub(super) const DESTINATIONS: usize = ALARMS + MOST_SUBSCRIBERS * LINE;
/// Nodes that a topic may be owed to.
pub(super) const MOST_DESTINATIONS: usize = 32;
pub(super) const MISSED: usize = DESTINATIONS + 2 * MOST_DESTINATIONS;
/// A line for all together, and two words for each publisher.
pub(super) const MISSED_WORDS: usize = LINE + 2 * MOST_PUBLISHERS;
pub(super) const MISSED_NEXT: usize = MISSED + MISSED_WORDS;
pub(super) const LAST_LOST: usize = MISSED_NEXT + MISSED_WORDS;
/// A node, and a publisher's name there.
pub(super) const LOST_WORDS: usize = 3;
/// How often a line of what was published elsewhere was written.
pub(super) const ELSEWHERE_CHANGES: usize = LAST_LOST + 2 * MOST_LOST * LOST_WORDS;
pub(super) const ELSEWHERE: usize = ELSEWHERE_CHANGES + LINE;
/// Publishers of other nodes of which the number of the last message is noted.
pub(super) const MOST_ELSEWHERE: usize = 64;
pub(super) const QUEUES: usize = ELSEWHERE + MOST_ELSEWHERE * LINE;

const _: () = assert!(ELSEWHERE_CHANGES.is_multiple_of(LINE) && QUEUES == 2296);
const _: () = assert!(TYPE + crate::TypeName::WORDS <= PUBLISHERS);
const _: () = assert!(NAME + crate::settings::LONGEST_TOPIC.div_ceil(8) <= PLACE);
