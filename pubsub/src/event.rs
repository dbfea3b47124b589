//! Events of subscribers and publishers beside messages.

use std::time::Duration;

use crate::ids::PublisherId;

/// An event that is no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// Messages were dropped before the subscriber read them, or never written, on this node or on
    /// the publisher's: see [`missed`](crate::Subscriber::missed).
    Gap {
        /// How many since the last such event.
        missed: u64,
    },
    /// A publisher on this node died. Its published messages are still delivered, some perhaps
    /// after this event.
    PublisherLost {
        /// The lost publisher.
        publisher: PublisherId,
    },
    /// A publisher on another node died, as that node reports. Its published messages are still
    /// delivered, some perhaps after this event.
    ///
    /// The service of that node reports it once, after it has reclaimed. There is no report if the
    /// whole node ended with the publisher, or if the connection between the nodes is lost at that
    /// moment.
    RemotePublisherLost {
        /// The node, as in the [origin](crate::Sample::origin) of its samples.
        node: [u8; 16],
        /// The lost publisher on that node.
        publisher: PublisherId,
    },
    /// The last publisher has left, was closed or has died: no publisher is left on this node, and no
    /// connected node has one. A node that is lost counts until it is given up, after
    /// [`lost_after`](crate::NetworkOptions::lost_after). Reported only after there was a publisher
    /// since the subscription, or since the last such event. If a publisher of this node has died,
    /// that is reported before. Published messages are still delivered, some perhaps after this event:
    /// see [`end_without_publishers`](crate::Subscriber::end_without_publishers).
    NoPublishers,
    /// The subscriber was evicted from its topic, since it blocked publishers. Its samples stay
    /// valid.
    /// The subscriber receives nothing more.
    Evicted {
        /// How long it blocked them, if known.
        held_for: Option<Duration>,
    },
}

/// An event of a publisher: [`Publisher::poll_event`](crate::Publisher::poll_event).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PublisherEvent {
    /// The last subscriber has left, was closed, evicted or has died: a message would reach none, on
    /// this node or another one. A node that is lost counts until it is given up, after
    /// [`lost_after`](crate::NetworkOptions::lost_after). Reported only after the publisher has seen a
    /// subscriber since it was created, or since the last such event: it sees those that its messages
    /// are delivered to, and those that exist when it polls or waits.
    NoSubscribers,
}
