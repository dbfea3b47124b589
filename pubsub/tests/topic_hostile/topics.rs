//! The topics under traffic, and joining a node.

use std::path::Path;
use std::time::Duration;

use pubsub::{Node, NodeOptions, Reliability, ServiceMode, TopicSettings};

/// Reached only by a test that fails.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Between two messages of a topic: 500 a second.
pub const PERIOD: Duration = Duration::from_millis(2);

pub const LENGTH: usize = 1 << 10;

/// Half a second of messages.
const DEPTH: u32 = 256;

/// Time for which a stopped reader may block the reliable topic: shorter than the longest pause that
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
        _ => panic!("unknown topic {name}"),
    };
    TopicSettings {
        reliability,
        depth: DEPTH,
        largest: LENGTH as u64,
        release_deadline: RELEASE_DEADLINE,
        ..TopicSettings::default()
    }
}

/// Options to join a node that another process serves.
pub fn options(directory: &Path) -> NodeOptions {
    NodeOptions {
        directory: directory.to_owned(),
        service: ServiceMode::External,
        service_timeout: TIMEOUT,
        ..NodeOptions::default()
    }
}

pub fn join(directory: &Path) -> Node {
    Node::join(options(directory)).expect("join the node")
}
