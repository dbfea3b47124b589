//! Memory, queues and liveness shared by the processes of one machine.
//!
//! This crate has no knowledge of networks or devices. Shared state is in [segments](segment),
//! which are passed as file descriptors, consists of [`words`], and stays consistent when a
//! process dies at any instruction.
//!
//! Modules, each importing only those before it: `deadline`, `debug`, `page_size`, `not_inherited`,
//! `per_process`, `participant`, `futex`, `interruption`, `membarrier`, `words`, `lock`, `doorbell`,
//! `marked_doorbell`, `watch`, `segment`, `crash_test`, `channel`, `pidfd`, `agreed_table`, `allocator`, `queue`.

pub mod agreed_table;
pub mod allocator;
pub mod channel;
#[cfg(feature = "crash-test")]
pub mod crash_test;
mod deadline;
mod debug;
mod doorbell;
mod futex;
mod interruption;
pub mod lock;
mod marked_doorbell;
pub mod membarrier;
#[cfg(all(test, loom))]
mod models;
mod not_inherited;
mod page_size;
pub mod participant;
mod per_process;
pub mod pidfd;
pub mod queue;
pub mod segment;
pub mod watch;
pub mod words;

pub use agreed_table::{AgreedTable, AgreedTableSetup, Announcement, ChangeRefused, Report};
pub use allocator::{Allocator, AllocatorError, Block, BlockRange, Owner, Statistics};
pub use channel::{Channel, ChannelError, ChannelListener, Credentials, DirectoryLock, Message};
pub use deadline::deadline;
pub use doorbell::{Doorbell, WaitStrategy};
pub use errors::limits::{self, DescriptorLimit, LimitReached};
pub use errors::memory;
pub use interruption::{Interruption, sleep_interruptible};
pub use lock::LockTimeout;
pub use marked_doorbell::MarkedDoorbell;
pub use not_inherited::NotInherited;
pub use page_size::page_size;
pub use participant::{AlwaysAlive, Caller, Liveness, Participant};
pub use per_process::PerProcess;
pub use pidfd::{ParticipantTable, PidFd};
pub use queue::{
    OverflowPolicy, Published, Queue, QueueError, QueueSetup, Subscriber, SubscriptionId,
    TakenEntry,
};
pub use segment::{Layout, MappedWords, ReadOnlySegment, Segment, SegmentError};
pub use threads::ForkGeneration;
pub use watch::{DoorbellListener, DoorbellWatcher, ListenerGuard};
pub use words::{LocalWords, WordRange, Words};
