//! Who takes part in the demonstration: two nodes, three topics, eight subscribers; and what
//! they say to who started them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use pubsub::{MemoryPlace, Reliability, Row, TopicSettings};
use serde::{Deserialize, Serialize};

use super::network::Place;
use crate::cli::exit::Failure;
use crate::cli::histogram::Histogram;
use crate::cli::stages::Stage;

/// A topic: where it is published, and by how many it is read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Subject {
    pub(super) name: &'static str,
    /// Bytes of a message.
    pub(super) size: u64,
    /// Messages a second on two cores, which have to compare all that is read.
    pub(super) rate: f64,
    pub(super) depth: u32,
    /// The node that publishes it.
    pub(super) from: usize,
    /// Subscribers at each node.
    pub(super) readers: [u32; 2],
}

pub(super) const TOPICS: [Subject; 3] = [
    Subject { name: "camera", size: 4 << 20, rate: 10.0, depth: 8, from: 0, readers: [1, 2] },
    Subject { name: "lidar", size: 16 << 20, rate: 4.0, depth: 4, from: 1, readers: [2, 1] },
    Subject { name: "tensors", size: 64 << 20, rate: 1.0, depth: 2, from: 0, readers: [1, 1] },
];
pub(super) const NODES: usize = 2;
const LOANS: u32 = 4;

impl Subject {
    pub(super) fn settings(&self, memory: MemoryPlace) -> TopicSettings {
        TopicSettings {
            memory,
            reliability: Reliability::Reliable,
            depth: self.depth,
            largest: self.size,
            loans: LOANS,
            // Machines that are busy with other things may be slow.
            release_deadline: Duration::from_secs(20),
        }
    }

    /// Those that a publisher has at its node, once all are there: who carries messages to the
    /// other node counts as one.
    pub(super) fn expected(&self) -> u32 {
        self.readers[self.from] + u32::from(self.readers[1 - self.from] > 0)
    }
}

/// What all topics together may take at a node.
pub(super) fn budget() -> u64 {
    let settings = TOPICS.iter().map(|topic| topic.settings(MemoryPlace::Host));
    settings.map(|settings| settings.reserves(1).bytes).sum()
}

/// What it takes of the host's memory at most: messages where they are published, and where they
/// arrive; the rings between the nodes, and fourteen processes.
pub(super) const MEMORY: u64 = 2 << 30;

/// Stages of a message's way, in order; a stage that it skipped has no time. All but that of letting
/// go of it.
pub(super) const STAGES: [Stage; 7] =
    [Stage::Borrow, Stage::Fill, Stage::Begin, Stage::Out, Stage::Wire, Stage::In, Stage::Notice];
/// The stages, and all from publishing to pulling.
pub(super) const TIMES: usize = STAGES.len() + 1;

/// What a process does.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Role {
    /// Who started it.
    pub(super) parent: u32,
    pub(super) place: Place,
    pub(super) directory: PathBuf,
    pub(super) label: String,
    /// It is over by then, whatever happens.
    pub(super) limit: Duration,
    pub(super) part: Part,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Part {
    /// Serves a node.
    Serve {
        listen: SocketAddr,
        peers: Vec<String>,
        budget: u64,
    },
    Publish {
        topic: usize,
        memory: String,
        run: u64,
        time: Duration,
        rate: f64,
    },
    Read {
        topic: usize,
        memory: String,
        run: u64,
    },
}

/// What a process says, a line each.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Said {
    /// It is in a network of its own, and waits for a cable.
    Separate,
    /// It could begin.
    Ready {
        listens: Option<String>,
    },
    Served(Vec<Row>),
    Published(Published),
    Read(Box<Reading>),
    /// All was said.
    Done,
    Failed {
        exit: i32,
        message: String,
    },
}

/// What a publisher has done so far.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub(super) struct Published {
    pub(super) messages: u64,
    pub(super) bytes: u64,
    /// Time without room.
    pub(super) waited: Duration,
    /// All subscribers have released all of it.
    pub(super) is_released: bool,
}

/// What a subscriber has read so far.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub(super) struct Reading {
    pub(super) messages: u64,
    pub(super) bytes: u64,
    pub(super) altered: u64,
    pub(super) missed: u64,
    /// By which ways messages came.
    pub(super) paths: Vec<String>,
    /// Nanoseconds of each stage, and of all: the median of the latest ones. 0: skipped.
    pub(super) latest: [u64; TIMES],
    /// The same of all, at the end.
    pub(super) samples: Vec<Histogram>,
}

/// A value as a line.
pub(super) fn line(value: &impl Serialize) -> Result<String, Failure> {
    let text = serde_json::to_string(value).map_err(|error| Failure::failed(error.to_string()))?;
    Ok(text + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_subscribers_on_both_nodes_read_three_topics() {
        let readers = |node: usize| TOPICS.iter().map(|topic| topic.readers[node]).sum::<u32>();
        assert_eq!((readers(0), readers(1)), (4, 4));
        let mut sizes = TOPICS.map(|topic| topic.size >> 20);
        sizes.sort_unstable();
        assert_eq!(sizes, [4, 16, 64]);
        assert!(TOPICS.iter().any(|topic| topic.from == 0));
        assert!(TOPICS.iter().any(|topic| topic.from == 1));
        assert!(budget() < MEMORY);
    }
}
