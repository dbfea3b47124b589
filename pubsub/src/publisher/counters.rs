//! Counters of a publisher.

/// Counters of a publisher since it was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PublisherCounters {
    /// Messages that it published, with or without subscribers.
    pub messages: u64,
    /// Bytes of these messages.
    pub bytes: u64,
    /// Messages that were dropped for lack of room.
    pub dropped: u64,
    /// On a reliable topic, messages of this publisher that another subscribed node is not known to
    /// have when it was [dropped](crate::NetworkOptions::lost_after), counted for each such node.
    /// Messages that [`flush`](super::Publisher::flush) waited for until then are included when it
    /// returns.
    pub missed_by_nodes: u64,
    /// Subscribers on this node that were evicted since this publisher was created: they held
    /// messages that blocked publishers. They missed their unread messages.
    pub evicted: u64,
}
