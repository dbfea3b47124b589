//! When the last subscriber of a publisher has gone.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use super::Publisher;
use crate::event::PublisherEvent;

/// Remembers that a publisher has seen a subscriber.
#[derive(Debug, Default)]
pub(super) struct SubscriberWatch {
    has_seen_any: AtomicBool,
}

impl SubscriberWatch {
    /// This many subscribers exist, or have got a message.
    #[inline]
    pub(super) fn note(&self, subscribers: u32) {
        // Usually it is known: then no store disturbs other threads.
        if subscribers > 0 && !self.has_seen_any.load(Relaxed) {
            self.has_seen_any.store(true, Relaxed);
        }
    }
}

impl Publisher {
    /// The number of subscribers on this node that would receive a message now; replication to
    /// other nodes counts as one.
    #[must_use]
    pub fn subscribers(&self) -> u32 {
        let subscribers = self.state.context.topic.local().subscribers();
        self.state.subscriber_watch.note(subscribers);
        subscribers
    }

    /// The next event since the last call. Of several threads one gets it.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pubsub::{Node, NodeOptions, PublisherEvent, TopicSettings};
    /// # let directory = testkit::temp_dir::TempDir::new("fabricast-doc-publisher-event");
    /// # let node = Node::join(NodeOptions { directory: directory.join("node"), ..NodeOptions::default() })?;
    /// let topic = node.topic("frames", &TopicSettings::default())?;
    /// let (publisher, subscriber) = (topic.publisher()?, topic.subscriber()?);
    /// publisher.push(b"first", Duration::from_secs(5))?;
    /// assert_eq!(publisher.poll_event(), None);
    /// drop(subscriber);
    /// assert_eq!(publisher.poll_event(), Some(PublisherEvent::NoSubscribers));
    /// assert_eq!(publisher.poll_event(), None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn poll_event(&self) -> Option<PublisherEvent> {
        let has_gone = self.subscribers() == 0
            && self.state.subscriber_watch.has_seen_any.swap(false, Relaxed);
        has_gone.then_some(PublisherEvent::NoSubscribers)
    }
}
