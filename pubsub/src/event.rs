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
    /// A publisher on this node died. What it had published is delivered all the same.
    PublisherLost {
        /// Which.
        publisher: PublisherId,
    },
    /// The subscriber was removed from its topic: it held messages that were in the way of
    /// others. It gets nothing more.
    Evicted {
        /// For how long it was in the way, if that is known.
        held_for: Option<Duration>,
    },
}
