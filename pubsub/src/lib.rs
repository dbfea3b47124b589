//! Topics: one copy of a message, read by any number of processes, on any number of machines.
//!
//! Stands on `transfer`, and with it on `fabric`, `gpu` and `ipc`.

mod below;
#[doc(hidden)]
pub mod bridge;
mod carrier;
mod clock;
#[cfg(test)]
mod crash_points;
mod error;
mod event;
/// What fuzz targets call, and the tests that replay their corpora.
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::carrier::read_letter;
    pub use crate::peers::fuzzing::{Heard, hear, hear_interests, introduction};
    pub use crate::service::{HeardGuests, hear_guests};
}
mod hall;
mod house;
mod interruption;
mod loan;
mod loans;
mod lock;
mod log_limit;
mod node;
mod peers;
mod plain;
mod pool;
mod publisher;
mod report;
mod sample;
mod service;
mod settings;
mod subscriber;
#[cfg(test)]
mod tests;
mod text;
mod topic;
mod type_name;
mod typed;
mod waits;
mod wake;

pub use carrier::NetworkOptions;
pub use error::{Error, ErrorKind, Result};
pub use event::Event;
pub use loan::{Attempt, Loan, Sent};
pub use node::{
    Budgets, KNOWN_VARIABLES, Node, NodeOptions, ServiceMode, Topic, nearest_variable, report,
};
pub use peers::NodeIdentity;
pub use plain::Plain;
pub use pool::{Metadata, Readiness, Times, Way};
pub use publisher::{Publisher, PublisherCounters, PublisherId};
pub use report::Row;
pub use sample::Sample;
pub use service::{Condition, ServiceProcess, check_directory, clean};
pub use settings::{
    LONGEST_TOPIC, MOST_METADATA, MemoryPlace, Reliability, Reserve, TopicSettings,
};
pub use subscriber::Subscriber;
pub use type_name::TypeName;
pub use typed::{TypedPublisher, TypedSubscriber, TypedTopic};
pub use waits::Samples;
