//! The workers of a measurement: services of nodes, and readers.
//!
//! Import cycle with `many_topics`: a measurement starts workers by their roles, and its own worker
//! is one of them.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::node::serve;
use super::shared_words::has_ended;
use super::timed_subscriber::{self, SubscriberTask};
use super::topic_results::{WorkerResult, empty_result};
use super::{Service, TopicResult, baseline, many_topics, wire_baseline};
use crate::process::set_affinity;
use crate::worker_group::{SharedSegment, Task};
use command::exit::Failure;

/// The task of a worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum WorkerRole {
    Serve(Service),
    Read(SubscriberTask),
    Many(many_topics::ManyTopicsRole),
    Baseline(baseline::Role),
    Wire(wire_baseline::WireEnd),
}

impl Task for WorkerRole {
    const NAME: &'static str = "topic";
    type Detail = Option<TopicResult>;

    fn run(
        &self,
        shared: &SharedSegment,
        ready: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<WorkerResult, Failure> {
        match self {
            WorkerRole::Serve(service) => {
                // All its threads inherit this affinity.
                set_affinity(&service.cores)?;
                let _node = serve(service)?;
                ready()?;
                while !has_ended(shared)? {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Ok(empty_result(0))
            }
            WorkerRole::Read(reading) => timed_subscriber::read(shared, reading, ready),
            WorkerRole::Many(side) => many_topics::take(shared, side, ready),
            WorkerRole::Baseline(role) => baseline::take(role, ready),
            WorkerRole::Wire(end) => wire_baseline::take(shared, end, ready),
        }
    }
}
