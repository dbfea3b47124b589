//! The report of a node: a list of rows.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::ErrorKind;
use crate::settings::Reserve;
use crate::text;

const REPLICATION: &str = "replication";

/// The participant of a subscriber; as text the participant, or `replication`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum ReportedSubscriber {
    /// A process; empty if it is unknown.
    Process(String),
    /// The service, on behalf of other nodes.
    Replication,
}

impl From<String> for ReportedSubscriber {
    fn from(text: String) -> Self {
        if text == REPLICATION { Self::Replication } else { Self::Process(text) }
    }
}

impl From<ReportedSubscriber> for String {
    fn from(subscriber: ReportedSubscriber) -> Self {
        match subscriber {
            ReportedSubscriber::Process(participant) => participant,
            ReportedSubscriber::Replication => REPLICATION.to_owned(),
        }
    }
}

/// The path of a topic's messages to or from another node: lanes of a ring over a provider. As text
/// `ring of 3 lanes over net`, `ring over net`, or `direct ring over verbs`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RingPath {
    /// The provider's name.
    pub provider: String,
    /// Number of its lanes, at least 1.
    pub lanes: usize,
    /// The ring lies in device memory, and the fabric writes to it itself.
    pub is_direct: bool,
}

/// What a path in device memory begins with.
const DIRECT: &str = "direct ";

impl fmt::Display for RingPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_direct {
            f.write_str(DIRECT)?;
        }
        match self.lanes {
            1 => write!(f, "ring over {}", self.provider),
            lanes => write!(f, "ring of {lanes} lanes over {}", self.provider),
        }
    }
}

impl TryFrom<String> for RingPath {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, &'static str> {
        let parse = || {
            let direct = text.strip_prefix(DIRECT);
            let (ring, provider) = direct.unwrap_or(&text).split_once(" over ")?;
            let lanes = match ring.strip_prefix("ring of ") {
                Some(text) => text.strip_suffix(" lanes")?.parse().ok()?,
                None if ring == "ring" => 1,
                None => return None,
            };
            let provider = provider.to_owned();
            let is_direct = direct.is_some();
            (lanes > 0).then_some(Self { provider, lanes, is_direct })
        };
        parse().ok_or("not the path of a ring")
    }
}

impl From<RingPath> for String {
    fn from(path: RingPath) -> Self {
        path.to_string()
    }
}

/// A row of a report.
///
/// Participants are named by their number and generation, nodes by their identity in hexadecimal
/// digits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Row {
    /// The node: always the first row.
    Node {
        /// Identity of the node.
        identity: String,
        /// Label of its service.
        label: String,
        /// Ordinal of this service among all that the node had.
        service: u32,
        /// The process that serves it.
        process: u32,
        /// Address for other nodes, if it listens.
        listens: Option<String>,
    },
    /// A member of the node.
    Process {
        /// The member's participant.
        participant: String,
        /// The member's label.
        label: String,
        /// Process ID, as the service sees it; 0 if it does not.
        process: u32,
    },
    /// A pool: memory of topics.
    Pool {
        /// `host`, or a device's UUID.
        place: String,
        /// For messages from other nodes.
        is_inbound: bool,
        /// Allocated bytes.
        bytes: u64,
        /// Bytes that topics may reserve.
        budget: u64,
        /// Maximum size in bytes: a quarter more than the budget, for fragmentation.
        limit: u64,
        /// Free bytes.
        free: u64,
        /// Allocated blocks: messages and loans.
        blocks: u64,
    },
    /// A topic.
    Topic {
        /// Name of the topic.
        name: String,
        /// Number of the topic on this node.
        number: u32,
        /// `host`, or a device's UUID.
        place: String,
        /// `reliable`, `drop-oldest` or `drop-newest`.
        reliability: String,
        /// Maximum number of unread messages of a subscriber.
        depth: u32,
        /// Maximum number of samples that a subscriber holds, and that all of them hold beside the
        /// unread ones.
        max_held: u32,
        /// Maximum message length.
        largest: u64,
        /// Maximum number of loans of a publisher.
        loans: u32,
        /// How long a message may be held while it blocks publishers, in microseconds.
        release_microseconds: u64,
        /// Type of its values, if it was created with one.
        type_name: Option<String>,
        /// Messages published on this node.
        published: u64,
        /// Messages received from other nodes.
        arrived: u64,
        /// Unread messages that were dropped to make room, counted for each subscriber.
        dropped: u64,
        /// Memory that it reserves, including its present publishers.
        reserves: Reserve,
    },
    /// A publisher.
    Publisher {
        /// The topic's name.
        topic: String,
        /// The publisher's process.
        participant: String,
        /// Identifier of the publisher within the topic.
        publisher: u64,
        /// Messages that it published.
        messages: u64,
        /// Bytes of these messages.
        bytes: u64,
        /// How long it has been waiting for room, in microseconds; 0 if it is not. Successive
        /// attempts within a second are one wait.
        waits_microseconds: u64,
    },
    /// A subscriber.
    Subscriber {
        /// The topic's name.
        topic: String,
        /// The subscriber's process; or the service, on behalf of other nodes.
        participant: ReportedSubscriber,
        /// Messages that it has not read.
        unread: u64,
        /// Samples that it holds.
        held: u64,
        /// True for an evicted subscriber, which gets no more messages. Reports have it as long as
        /// it holds samples of its own node.
        is_evicted: bool,
        /// Messages that it missed.
        missed: u64,
    },
    /// Another node.
    Peer {
        /// Identity of the node; empty if it was never connected.
        node: String,
        /// Label of the node.
        label: String,
        /// Address of the node, if known the one it listens at.
        address: String,
        /// True if a connection for messages exists. Nodes with incompatible providers have none.
        is_connected: bool,
        /// True if this node keeps trying to connect.
        is_retried: bool,
        /// Reason of a missing connection, or the duration of an existing one.
        detail: String,
    },
    /// A topic that is replicated to another node.
    Sent {
        /// The topic's name.
        topic: String,
        /// The other node.
        node: String,
        /// Path of its messages.
        path: RingPath,
        /// Messages delivered there.
        messages: u64,
        /// Bytes of these messages.
        bytes: u64,
        /// How often it waited for room in the other node's ring.
        waits: u64,
        /// Nanoseconds by stage, in order.
        stages: Vec<(String, u64)>,
    },
    /// A topic that is replicated from another node.
    Received {
        /// The topic's name.
        topic: String,
        /// The other node.
        node: String,
        /// Path of its messages.
        path: RingPath,
        /// Why messages of a topic on a device are received through the host, if they are.
        staged: Option<String>,
        /// Messages delivered here.
        messages: u64,
        /// Bytes of these messages.
        bytes: u64,
        /// Nanoseconds by stage, in order.
        stages: Vec<(String, u64)>,
    },
    /// A topic with subscribers that is not replicated between two nodes: its settings or the
    /// providers are incompatible, or its messages cannot be transferred.
    IncompatibleTopic {
        /// The topic's name.
        topic: String,
        /// The other node.
        node: String,
        /// The other node subscribes to a publisher on this node.
        is_wanted_remotely: bool,
        /// This node subscribes to a publisher on the other node.
        is_wanted_locally: bool,
        /// The differing settings here, and this node's provider if that differs.
        local: String,
        /// The differing settings of the other node, and its provider; or the reason, if nothing
        /// differs.
        remote: String,
        /// Names of the differing settings; and [`provider`](Row::PROVIDER) for incompatible
        /// providers.
        differs: Vec<String>,
    },
    /// A topic of another node that this node does not use. Very long reports omit some.
    RemoteTopic {
        /// The topic's name.
        topic: String,
        /// The other node.
        node: String,
        /// The node has a publisher.
        publishes: bool,
        /// The node has a subscriber.
        subscribes: bool,
        /// `reliable`, `drop-oldest` or `drop-newest`.
        reliability: String,
        /// Maximum number of unread messages of a subscriber.
        depth: u32,
        /// Maximum message length.
        largest: u64,
        /// How long a message may be held while it blocks publishers, in microseconds.
        release_microseconds: u64,
    },
    /// A topic of which other nodes missed messages, since they were dropped as destinations. There
    /// is no row without such a loss.
    Missed {
        /// The topic's name.
        topic: String,
        /// How often a node with missed messages was dropped.
        nodes: u64,
        /// Messages published on this node, counted for each such node.
        messages: u64,
    },
    /// Replication does not work now. It is retried, unless the network options are invalid.
    ReplicationError {
        /// The kind of the last error.
        kind: ErrorKind,
        /// The reason.
        why: String,
    },
    /// A dropped destination and the messages of a topic that it missed, as far as the current
    /// service knows. The sums are in [`Missed`](Self::Missed).
    GivenUp {
        /// The topic's name.
        topic: String,
        /// The other node.
        node: String,
        /// Label of the other node; empty if unknown.
        label: String,
        /// Messages that it missed, over all times that it was dropped.
        messages: u64,
    },
}

impl Row {
    /// Value in `differs` of an [`IncompatibleTopic`](Self::IncompatibleTopic) whose nodes have
    /// incompatible providers.
    pub const PROVIDER: &'static str = "provider";

    const MAX_REASON: usize = 1000;

    /// With the reason shortened for a report.
    pub(crate) fn replication_error(kind: ErrorKind, why: &str) -> Self {
        Self::ReplicationError { kind, why: Self::shortened(why) }
    }

    pub(crate) fn shortened(why: &str) -> String {
        text::shortened(why, Self::MAX_REASON).to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_is_parsed_as_nodes_report_it() {
        let path = |provider: &str, lanes| {
            Ok::<_, &str>(RingPath { provider: provider.to_owned(), lanes, is_direct: false })
        };
        let parsed = |text: &str| RingPath::try_from(text.to_owned());
        assert_eq!(parsed("ring over net"), path("net", 1));
        assert_eq!(parsed("ring of 3 lanes over tcp;ofi_rxm"), path("tcp;ofi_rxm", 3));
        let direct = RingPath { is_direct: true, ..path("verbs", 2).unwrap() };
        assert_eq!(direct.to_string(), "direct ring of 2 lanes over verbs");
        assert_eq!(parsed("direct ring of 2 lanes over verbs"), Ok(direct));
        for none in [
            "",
            "ring",
            "direct",
            "direct direct ring over net",
            "path over net",
            "ring of lanes over net",
        ] {
            assert!(parsed(none).is_err(), "{none}");
        }
        for lanes in ["-1", "0"] {
            assert!(parsed(&format!("ring of {lanes} lanes over net")).is_err(), "{lanes}");
        }
    }
}
