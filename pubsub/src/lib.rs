//! Topics: one copy of a message, read by any number of processes, on any number of machines.
//!
//! Stands on `transfer`, and with it on `fabric`, `gpu` and `ipc`.

mod below;
mod clock;
mod error;
mod pool;
mod settings;
mod topic;

pub use error::{Error, ErrorKind, Result};
pub use settings::{LONGEST_TOPIC, MOST_METADATA, MemoryPlace, Reliability, TopicSettings};
