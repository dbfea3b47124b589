//! What happens to a subscriber beside messages.

use std::time::Duration;

use crate::publisher::PublisherId;

/// What happened, beside messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// Messages were dropped before the subscriber came to read them, or never written, here or on
    /// the node that they would have come from: see [`missed`](crate::Subscriber::missed).
    Gap {
        /// How many, since the last such event.
        missed: u64,
    },
    /// A publisher on this node died. What it had published is delivered all the same, some of it
    /// maybe later than this is told.
    PublisherLost {
        /// Which.
        publisher: PublisherId,
    },
    /// A publisher on another node died, as that node says. What it had published is delivered all
    /// the same, some of it maybe later than this is told.
    ///
    /// It is told once, by the service of that node when it has cleaned up: never if the whole node
    /// ended with the publisher, for then nobody is left to tell; and not if the connection between
    /// the nodes is lost in that moment.
    RemotePublisherLost {
        /// The node: as samples tell it that [come](crate::Sample::origin) from there.
        node: [u8; 16],
        /// Which of those there.
        publisher: PublisherId,
    },
    /// The subscriber was evicted from its topic: it held messages that were in the way of
    /// others. It gets nothing more.
    Evicted {
        /// For how long it was in the way, if that is known.
        held_for: Option<Duration>,
    },
}
