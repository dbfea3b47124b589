//! What a publisher did.

/// What a publisher has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PublisherCounters {
    /// Messages that it published, wanted by somebody or not.
    pub messages: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Messages that found no room and were dropped.
    pub dropped: u64,
    /// Of a reliable topic, messages of this publisher that another node is not known to have got,
    /// though it subscribed, when it was [given up](crate::NetworkOptions::lost_after); counted for
    /// each such node. What [`flush`](super::Publisher::flush) waited for until it was given up is among
    /// them when that returns.
    pub missed_by_nodes: u64,
    /// Subscribers on this node that were evicted since this publisher was made: they
    /// held messages that were in somebody's way. What they had still to read they missed.
    pub evicted: u64,
}
