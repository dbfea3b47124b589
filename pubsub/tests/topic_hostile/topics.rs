//! The topics under traffic, and how a process joined its node.

use std::path::Path;
use std::time::Duration;

use pubsub::{Node, NodeOptions, Reliability, ServiceMode, TopicSettings};

/// Reached only on failure.
pub const LONGEST: Duration = Duration::from_secs(60);

/// Between two messages of a topic: 500 a second.
pub const PERIOD: Duration = Duration::from_millis(2);

pub const LENGTH: usize = 1 << 10;

/// Half a second of messages.
const DEPTH: u32 = 256;

/// A stopped reader holds up the reliable topic for so long: shorter than the longest pause that
/// readers may have.
const RELEASE_DEADLINE: Duration = Duration::from_secs(1);

pub const RELIABLE: &str = "reliable";
pub const DROP_OLDEST: &str = "drop-oldest";
/// Both topics under traffic.
pub const ALL: [&str; 2] = [RELIABLE, DROP_OLDEST];

pub fn settings(name: &str) -> TopicSettings {
    let reliability = match name {
        RELIABLE => Reliability::Reliable,
        DROP_OLDEST => Reliability::DropOldest,
        _ => panic!("no topic {name}"),
    };
    TopicSettings {
        reliability,
        depth: DEPTH,
        largest: LENGTH as u64,
        release_deadline: RELEASE_DEADLINE,
        ..TopicSettings::default()
    }
}

/// How a process joined a node that another one serves.
pub fn options(directory: &Path) -> NodeOptions {
    NodeOptions {
        directory: directory.to_owned(),
        service: ServiceMode::External,
        service_timeout: LONGEST,
        ..NodeOptions::default()
    }
}

pub fn join(directory: &Path) -> Node {
    Node::join(options(directory)).expect("the node has a service")
}
