//! One machine: memory, queues and life shared by its processes.
//!
//! Nothing here knows of networks or devices. What is shared lies in
//! [segments](segment) that travel as file descriptors, is made of
//! [`words`], and stays whole when a process dies at any instruction.

pub mod allocator;
mod bell;
pub mod channel;
#[cfg(feature = "crash-test")]
pub mod crash_test;
mod debug;
mod futex;
mod interruption;
pub mod life;
pub mod limits;
pub mod lock;
mod marked_bell;
#[cfg(all(test, loom))]
mod models;
mod page;
pub mod participant;
mod patience;
pub mod queue;
pub mod segment;
pub mod watch;
pub mod words;

pub use allocator::{Allocator, AllocatorError, Block, Owner, Place, Statistics};
pub use bell::{Doorbell, Spin};
pub use channel::{Channel, ChannelError, ChannelListener, Credentials, DirectoryLock, Message};
pub use interruption::{Interruption, nap};
pub use life::{Incarnation, Life, Roster};
pub use limits::{DescriptorLimit, LimitReached};
pub use lock::Held;
pub use marked_bell::MarkedBell;
pub use page::page_size;
pub use participant::{Caller, Fate, Immortal, Participant};
pub use patience::deadline;
pub use queue::{Published, Queue, QueueError, QueueSetup, Seat, Subscriber, Taken, WhenFull};
pub use segment::{Layout, MappedWords, ReadOnlySegment, Segment, SegmentError};
pub use watch::{Listener, Listening, Watch};
pub use words::{KernelWords, LocalWords, Part, Words};
