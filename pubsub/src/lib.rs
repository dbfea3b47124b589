//! Topics: one copy of a message, read by any number of processes, on any number of machines.
//!
//! Built on `transfer`, and with it on `fabric`, `gpu` and `ipc`.
//!
//! Modules, each importing only those before it: `error`, `text`, `clock`, `log_limit`,
//! `wake`, `interruption`, `error_mapping`, `ids`, `type_name`, `plain`, `settings`, `budgets`,
//! `network_options`, `node_options`, `report`, `event`, `loan_limit`, `pool`, `topic`,
//! `node_segment`, `endpoint_list`, `context`, `topic_publisher`, `publisher`, `subscriber`, `peers`,
//! `replication`, `service`, `node`,
//! `configuration`, `typed`, `waits`.

mod budgets;
mod clock;
mod configuration;
#[cfg(test)]
mod crash_points;
mod endpoint_list;
mod error;
mod error_mapping;
mod event;
/// Entry points of the fuzz targets, and the tests that replay their corpora.
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::peers::fuzzing::{FuzzOutcome, fuzz_interests, fuzz_session, valid_handshake};
    pub use crate::replication::reencode_control_message;
    pub use crate::service::{ClientOutcome, run_clients};
}
mod context;
mod ids;
mod interruption;
mod loan_limit;
mod log_limit;
mod network_options;
mod node;
mod node_options;
mod node_segment;
mod peers;
mod plain;
mod pool;
mod publisher;
#[doc(hidden)]
pub mod replication;
mod report;
mod service;
mod settings;
mod subscriber;
#[cfg(test)]
mod tests;
mod text;
mod topic;
mod topic_publisher;
mod type_name;
mod typed;
mod waits;
mod wake;

pub use budgets::Budgets;
pub use configuration::{
    Form, Setting, Settings, UnknownVariable, parse_seconds, parse_size, print_size,
};
pub use error::{Error, ErrorKind, Result};
pub use event::{Event, PublisherEvent};
pub use ids::{NodeId, PublisherId};
pub use network_options::NetworkOptions;
pub use node::{Node, Topic, report};
pub use node_options::{NodeOptions, ServiceMode};
pub use plain::Plain;
pub use pool::{DeliveryPath, Metadata, Readiness, Times};
pub use publisher::{Attempt, Loan, Publisher, PublisherCounters, Sent};
pub use report::{ReportedSubscriber, RingPath, Row};
pub use service::{Condition, ServiceProcess, check_directory, clean, remove_directory};
pub use settings::{
    MAX_METADATA, MAX_TOPIC_NAME, MemoryLocation, Reliability, Reserve, TopicSettings,
};
pub use subscriber::{Closer, Sample, Subscriber};
pub use topic_publisher::TopicPublisher;
pub use type_name::TypeName;
pub use typed::{TypedPublisher, TypedSubscriber, TypedTopic};
pub use waits::Samples;
