//! The scenario of the demonstration: two nodes, three topics, eight subscribers.

use std::time::Duration;

use pubsub::TopicSettings;

/// A topic, the node that publishes it, and its subscribers.
#[derive(Debug, Clone, Copy)]
pub(super) struct DemoTopic {
    pub(super) name: &'static str,
    /// Bytes of a message.
    pub(super) size: u64,
    /// Messages per second on two cores, which have to verify all that is read.
    pub(super) rate: f64,
    depth: u32,
    /// The node that publishes it.
    pub(super) from: usize,
    /// Number of subscribers at each node.
    pub(super) readers: [u32; 2],
}

pub(super) const TOPICS: [DemoTopic; 3] = [
    DemoTopic { name: "camera", size: 4 << 20, rate: 10.0, depth: 8, from: 0, readers: [1, 2] },
    DemoTopic { name: "lidar", size: 16 << 20, rate: 4.0, depth: 4, from: 1, readers: [2, 1] },
    DemoTopic { name: "tensors", size: 64 << 20, rate: 1.0, depth: 2, from: 0, readers: [1, 1] },
];
pub(super) const NODES: usize = 2;

/// Upper bound of the host memory used: messages where they are published and received, the rings
/// between the nodes, and fourteen processes.
pub(super) const MEMORY: u64 = 2 << 30;

impl DemoTopic {
    fn settings(&self) -> TopicSettings {
        TopicSettings {
            depth: self.depth,
            largest: self.size,
            // Machines under load may be slow.
            release_deadline: Duration::from_secs(20),
            ..TopicSettings::default()
        }
    }

    /// Options of its publisher and subscribers.
    pub(super) fn options(&self) -> Vec<String> {
        let TopicSettings { depth, largest, release_deadline, .. } = self.settings();
        let release_deadline = release_deadline.as_secs();
        let options =
            format!("--depth={depth} --largest={largest} --release-deadline={release_deadline}");
        options.split(' ').map(str::to_owned).collect()
    }

    /// Number of subscribers that the publisher waits for: those of its node, and the replication
    /// to the other node, which counts as one.
    pub(super) fn expected(&self) -> u32 {
        self.readers[self.from] + u32::from(self.readers[1 - self.from] > 0)
    }
}

/// Memory of all topics together at a node.
pub(super) fn budget() -> u64 {
    TOPICS.iter().map(|topic| topic.settings().reserves(1).bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scenario_has_eight_subscribers_on_both_nodes() {
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
