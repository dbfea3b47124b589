//! What a node can tell about itself: a list of rows.

use serde::{Deserialize, Serialize};

use crate::error::ErrorKind;
use crate::settings::Reserve;
use crate::text;

/// A line of a report.
///
/// Participants are named as the node's shared memory names them; nodes, by their identity in
/// hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Row {
    /// The node: always the first row.
    Node {
        /// Its identity.
        identity: String,
        /// What its service calls itself.
        label: String,
        /// The how manieth service of the node this is.
        service: u32,
        /// The process that serves it.
        process: u32,
        /// Where other nodes reach it, if they do.
        listens: Option<String>,
    },
    /// A process that takes part.
    Process {
        /// Its name in shared memory.
        participant: String,
        /// What it calls itself.
        label: String,
        /// Its number, as the service's process sees it; 0 if it does not.
        process: u32,
    },
    /// Memory that topics draw from.
    Pool {
        /// Whose memory: `host`, or a device's UUID.
        place: String,
        /// For messages from other nodes?
        is_inbound: bool,
        /// Bytes that there are.
        bytes: u64,
        /// Bytes that topics may reserve.
        budget: u64,
        /// Bytes that it may grow to: a quarter more, for what lies between messages.
        limit: u64,
        /// Bytes that are free.
        free: u64,
        /// Messages and loans that lie in it.
        blocks: u64,
    },
    /// A topic.
    Topic {
        /// Its name.
        name: String,
        /// Its number on this node.
        number: u32,
        /// Whose memory: `host`, or a device's UUID.
        place: String,
        /// `reliable`, `drop-oldest` or `drop-newest`.
        reliability: String,
        /// Messages that may wait.
        depth: u32,
        /// The longest message.
        largest: u64,
        /// Loans that each publisher may have.
        loans: u32,
        /// How long a message may be held that is in the way, in microseconds.
        release_microseconds: u64,
        /// The type of its values, if it was made with one.
        type_name: Option<String>,
        /// Messages that were published here.
        published: u64,
        /// Messages that came from other nodes.
        arrived: u64,
        /// Marks of readers that were taken off unread messages to make room.
        dropped: u64,
        /// What it reserves of the memory of its place, with the publishers that it has.
        reserves: Reserve,
    },
    /// One who publishes.
    Publisher {
        /// The topic's name.
        topic: String,
        /// The process.
        participant: String,
        /// Its identity within the topic.
        publisher: u64,
        /// Messages that it published.
        messages: u64,
        /// Their bytes.
        bytes: u64,
        /// For how long it has been waiting for room, in microseconds; 0 if it does not. Attempts that
        /// follow each other within a second are one wait.
        waits_microseconds: u64,
    },
    /// One who subscribes.
    Subscriber {
        /// The topic's name.
        topic: String,
        /// The process; or `replication`: the service, for other nodes.
        participant: String,
        /// Messages that it has still to read or holds.
        behind: u64,
        /// Messages that it missed.
        missed: u64,
    },
    /// Another node.
    Peer {
        /// Its identity; empty if it was never met.
        node: String,
        /// What it calls itself.
        label: String,
        /// Where it is: where it listens, as far as that is known.
        address: String,
        /// Is there a connection, by which messages can go? If the two have providers that do not
        /// understand each other, there is none.
        is_connected: bool,
        /// Does this node try to connect to it, again and again?
        is_retried: bool,
        /// Why not, if not; else for how long.
        detail: String,
    },
    /// A topic that is sent to another node.
    Sent {
        /// The topic's name.
        topic: String,
        /// To which node.
        node: String,
        /// By which path, and why.
        path: String,
        /// Messages that were delivered there.
        messages: u64,
        /// Their bytes.
        bytes: u64,
        /// How often it waited for room in the other node's ring.
        waits: u64,
        /// Time spent by stage, in nanoseconds: named, in order.
        stages: Vec<(String, u64)>,
    },
    /// A topic that is received from another node.
    Received {
        /// The topic's name.
        topic: String,
        /// From which node.
        node: String,
        /// By which path, and why.
        path: String,
        /// Messages that were delivered here.
        messages: u64,
        /// Their bytes.
        bytes: u64,
        /// Time spent by stage, in nanoseconds: named, in order.
        stages: Vec<(String, u64)>,
    },
    /// A topic whose messages do not go between this node and another one, though somebody wants
    /// them: it is another one there, or they cannot go there.
    IncompatibleTopic {
        /// The topic's name.
        topic: String,
        /// The other node.
        node: String,
        /// Somebody there subscribes to what is published here.
        is_wanted_remotely: bool,
        /// Somebody here subscribes to what is published there.
        is_wanted_locally: bool,
        /// What the topic is like here, if that differs; and this node's provider, if that does.
        local: String,
        /// The same of the other node; or why it cannot go between the two, if nothing differs.
        remote: String,
        /// Which settings of the topic are not the same; and [`provider`](Row::PROVIDER), if the nodes
        /// have providers that do not understand each other.
        differs: Vec<String>,
    },
    /// A topic that another node has to do with, and nobody here. The longest reports leave some
    /// out.
    RemoteTopic {
        /// The topic's name.
        topic: String,
        /// The other node.
        node: String,
        /// Somebody publishes there.
        publishes: bool,
        /// Somebody subscribes there.
        subscribes: bool,
        /// `reliable`, `drop-oldest` or `drop-newest`.
        reliability: String,
        /// Messages that may wait.
        depth: u32,
        /// The longest message.
        largest: u64,
        /// How long a message may be held that is in the way, in microseconds.
        release_microseconds: u64,
    },
    /// A topic of which other nodes missed messages, since they were given up; only then there is
    /// such a row.
    Missed {
        /// The topic's name.
        topic: String,
        /// How often a node was given up that missed some.
        nodes: u64,
        /// Messages that were published here, counted for each such node.
        messages: u64,
    },
    /// The node was told of others, and no messages can go there now, or come from there. It is tried
    /// again and again, unless what it was told is impossible.
    ReplicationError {
        /// The kind of the last error.
        kind: ErrorKind,
        /// Why.
        why: String,
    },
    /// A node that was given up and missed messages of a topic, as far as this service of the node
    /// knows which ones they were. The sums are those of [`Missed`](Self::Missed).
    GivenUp {
        /// The topic's name.
        topic: String,
        /// The other node.
        node: String,
        /// What it called itself; empty if that is not known.
        label: String,
        /// Messages that it missed, each time that it was given up.
        messages: u64,
    },
}

impl Row {
    /// What stands in `differs` of a [`IncompatibleTopic`](Self::Misfit) of nodes whose providers do not
    /// understand each other.
    pub const PROVIDER: &'static str = "provider";

    /// The longest reason, in bytes.
    const MAX_REASON: usize = 1000;

    /// Shortened to what has room in a report.
    pub(crate) fn replication_error(kind: ErrorKind, why: &str) -> Self {
        Self::ReplicationError { kind, why: Self::shortened(why) }
    }

    /// As much of a reason as has room in a report.
    pub(crate) fn shortened(why: &str) -> String {
        text::shortened(why, Self::MAX_REASON).to_owned()
    }
}
