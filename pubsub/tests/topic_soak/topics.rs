//! The topics, and joining a node.

use std::path::Path;
use std::time::Duration;

use pubsub::{Node, NodeOptions, Reliability, ServiceMode, TopicSettings};

/// Longer than any failure that the supervisor injects.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// Longer than the supervisor stops a process: a reader that resumes in time is not evicted.
const RELEASE_DEADLINE: Duration = Duration::from_secs(20);

/// More than the backlog of readers on a busy machine, less than that of a reader stopped for long.
const DEPTH: u32 = 256;

pub const LARGEST: usize = 16 << 10;

/// All topics, with their names.
pub fn all() -> Vec<(String, TopicSettings)> {
    let reliabilities = [Reliability::Reliable, Reliability::DropOldest, Reliability::DropNewest];
    let numbered = |reliability| (0..3).map(move |number| (reliability, number));
    let topics = reliabilities.into_iter().flat_map(numbered).map(|(reliability, number)| {
        let settings = TopicSettings {
            reliability,
            depth: DEPTH,
            largest: LARGEST as u64,
            release_deadline: RELEASE_DEADLINE,
            ..TopicSettings::default()
        };
        (format!("{reliability}-{number}"), settings)
    });
    topics.collect()
}

/// Topics for holders of samples: a holder that stalls blocks publishers, and is evicted.
pub fn held() -> Vec<(String, TopicSettings)> {
    let settings = [Reliability::Reliable, Reliability::DropOldest].map(|reliability| {
        let settings = TopicSettings {
            reliability,
            depth: 16,
            max_held: 16,
            largest: LARGEST as u64,
            release_deadline: Duration::from_secs(1),
            ..TopicSettings::default()
        };
        (format!("held-{reliability}"), settings)
    });
    settings.into()
}

/// Joins a node that another process serves.
pub fn join(directory: &Path) -> Node {
    let options = NodeOptions {
        directory: directory.to_owned(),
        service: ServiceMode::External,
        service_timeout: TIMEOUT,
        ..NodeOptions::default()
    };
    Node::join(options).expect("join the node")
}
