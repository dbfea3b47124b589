//! The publishers of a subscriber's topic: which there are, and when the last one has gone.

use super::Subscriber;
use crate::TopicPublisher;
use crate::error::{Error, ErrorKind};
use crate::topic::{Presence, Topic};

/// The publishers that a subscriber knows of.
#[derive(Debug)]
pub(super) struct PublisherWatch {
    /// The changes that were counted when it looked last.
    changes: u64,
    known: Presence,
    /// There was a publisher since the subscription.
    had_any: bool,
    /// There was one since the last event.
    has_event_to_come: bool,
    /// The last one has gone, and no event has reported that yet.
    is_event_due: bool,
    /// The subscriber ends without publishers.
    ends: bool,
}

impl PublisherWatch {
    pub(super) fn new(topic: &Topic) -> Self {
        // First: later changes are found by the first look.
        let changes = topic.publisher_changes();
        let known = topic.presence();
        let had_any = known.is_any();
        Self {
            changes,
            known,
            had_any,
            has_event_to_come: had_any,
            is_event_due: false,
            ends: false,
        }
    }

    /// Looks at the publishers, if they have changed since the last look.
    #[inline]
    pub(super) fn look(&mut self, topic: &Topic) {
        if topic.publisher_changes() != self.changes {
            self.look_again(topic);
        }
    }

    #[cold]
    fn look_again(&mut self, topic: &Topic) {
        // First: later changes are found by the next look.
        self.changes = topic.publisher_changes();
        let (before, now) = (self.known, topic.presence());
        // Some may have come and gone since the last look.
        let has_seen_any = now.is_any() || now.has_arrivals_since(before);
        self.had_any |= has_seen_any;
        self.has_event_to_come |= has_seen_any;
        if now.is_any() {
            self.is_event_due = false;
        } else if self.has_event_to_come {
            (self.is_event_due, self.has_event_to_come) = (true, false);
        }
        self.known = now.after(before);
    }

    /// Returns true if the subscriber is to end once it has pulled all messages.
    #[inline]
    pub(super) fn is_over(&mut self, topic: &Topic) -> bool {
        if !self.ends {
            return false;
        }
        self.look(topic);
        self.had_any && !self.known.is_any()
    }

    /// Takes the event that the last publisher has gone, if it was due at the last look.
    pub(super) fn take_event(&mut self) -> bool {
        std::mem::take(&mut self.is_event_due)
    }

    /// Returns the changes of publishers if the event is due, and 0 if it is not.
    pub(super) fn changes_with_event(&self, topic: &Topic) -> u64 {
        let changes = topic.publisher_changes();
        let is_due = if changes == self.changes {
            self.is_event_due
        } else {
            let now = topic.presence();
            let has_ended = self.is_event_due || self.has_event_to_come;
            !now.is_any() && (has_ended || now.has_arrivals_since(self.known))
        };
        if is_due { changes } else { 0 }
    }
}

impl Subscriber {
    /// Lists the publishers of the topic, as [`Topic::publishers`](crate::Topic::publishers).
    #[must_use]
    pub fn publishers(&self) -> Vec<TopicPublisher> {
        TopicPublisher::all(&self.shared.context)
    }

    /// Sets whether pulls fail with [`NoPublishers`](ErrorKind::NoPublishers) once the last publisher
    /// has left or died, on this node and on connected ones, and all messages were pulled. False by
    /// default: publishers may come back. [`samples`](Self::samples) end then, without an error.
    ///
    /// There must have been a publisher since the subscription: a subscriber may come first. If
    /// another publisher comes later, its messages are pulled. A node that is lost counts until it is
    /// given up, after [`lost_after`](crate::NetworkOptions::lost_after).
    ///
    /// ```
    /// use std::time::Duration;
    /// use pubsub::{ErrorKind, Node, NodeOptions, TopicSettings};
    /// # let directory = testkit::temp_dir::TempDir::new("fabricast-doc-without-publishers");
    /// # let node = Node::join(NodeOptions { directory: directory.join("node"), ..NodeOptions::default() })?;
    /// let topic = node.topic("lines", &TopicSettings::default())?;
    /// let mut subscriber = topic.subscriber()?;
    /// subscriber.end_without_publishers(true);
    ///
    /// let publisher = topic.publisher()?; // in another process, as a rule
    /// publisher.push(b"last", Duration::from_secs(5))?;
    /// drop(publisher);
    ///
    /// let timeout = Duration::from_secs(60);
    /// assert_eq!(subscriber.pull(timeout)?.to_vec()?, b"last");
    /// assert_eq!(subscriber.pull(timeout).unwrap_err().kind(), ErrorKind::NoPublishers);
    /// assert_eq!(subscriber.samples(timeout).count(), 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn end_without_publishers(&mut self, ends: bool) {
        self.publisher_watch.ends = ends;
    }

    #[cold]
    pub(super) fn no_publishers(&self) -> Error {
        let detail = "the last publisher has left, and all messages were pulled";
        Error::new("pull from topic", ErrorKind::NoPublishers, detail).on(self.topic())
    }
}
