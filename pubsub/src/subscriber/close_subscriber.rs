//! The end of a subscriber, by its own close or that of its topic or node.

use std::sync::{Arc, Weak};

use ipc::membarrier;

use super::{EndScope, Subscriber, Subscription};
use crate::endpoint_list::{ClosedMark, Endpoint};
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::On;
use crate::interruption::Interruption;
use crate::pool::Direction;

/// The decision between a take and a close of the subscription by another thread: each message
/// either belongs to the taker, or is given up with the unread ones.
#[derive(Debug, Default)]
pub(super) struct EndOfTakes {
    closed: ClosedMark,
}

impl EndOfTakes {
    /// Called after a message was taken. False if it belongs to the unread messages that are given
    /// up: the caller releases it, which does no harm if that was done already.
    ///
    /// Either this sees the mark, or the close sees that the message was taken: takes are many, so
    /// theirs is the light side of the fence.
    #[inline]
    pub(super) fn admits(&self) -> bool {
        membarrier::light();
        !self.closed.is_set()
    }

    /// Called before the unread messages are given up. False if it was closed before.
    fn close(&self, reason: &Arc<str>) -> bool {
        if !self.closed.set(reason) {
            return false;
        }
        membarrier::heavy();
        true
    }
}

impl Subscription {
    #[inline]
    pub(super) fn is_closed(&self) -> bool {
        self.end_of_takes.closed.is_set()
    }

    /// Fails once the subscriber, its topic or its node was closed.
    pub(super) fn check_open(&self, operation: &'static str) -> Result<()> {
        self.end_of_takes.closed.check(operation).on(self.context.topic.name())
    }
}

impl Endpoint for Subscription {
    /// Gives up all messages but those that its samples hold.
    fn close(&self, reason: &Arc<str>) {
        if !self.context.node.fork_generation.is_current() || !self.end_of_takes.close(reason) {
            return;
        }
        self.context.end_subscriptions(self.subscription_ids, EndScope::Unread);
        self.context.participants_changed();
        // Waits end, and the descriptor becomes readable.
        self.context.topic.local().messages().ring();
    }
}

/// Closes a [`Subscriber`] that another thread uses. Clones close the same one.
#[derive(Debug, Clone)]
pub struct Closer {
    subscription: Weak<Subscription>,
}

impl Closer {
    /// Closes the subscriber at once: a [`pull`](Subscriber::pull) that waits, and each later one,
    /// fails with [`Closed`](ErrorKind::Closed), and the
    /// [descriptor](Subscriber::descriptor) becomes readable. Its unread messages are given up, so
    /// that publishers do not wait for them. Samples stay valid until they are dropped.
    pub fn close(&self) {
        if let Some(subscription) = self.subscription.upgrade() {
            subscription.close(&Arc::from("the subscriber was closed"));
        }
    }

    /// Returns true once the subscriber, its topic or its node was closed, or it was dropped with
    /// all its samples.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.subscription.upgrade().is_none_or(|subscription| subscription.is_closed())
    }
}

impl Subscriber {
    /// Returns what closes it from another thread, even while it waits. Closing the topic or the
    /// node does the same.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pubsub::{ErrorKind, Node, NodeOptions, TopicSettings};
    /// # let directory = testkit::temp_dir::TempDir::new("fabricast-doc-closer");
    /// # let node = Node::join(NodeOptions { directory: directory.join("node"), ..NodeOptions::default() })?;
    /// # let topic = node.topic("lines", &TopicSettings::default())?;
    /// let mut subscriber = topic.subscriber()?;
    /// let closer = subscriber.closer();
    /// let reading = std::thread::spawn(move || subscriber.pull(Duration::from_secs(60)));
    /// closer.close();
    /// assert_eq!(reading.join().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn closer(&self) -> Closer {
        Closer { subscription: Arc::downgrade(&self.shared) }
    }

    pub(crate) fn interruption(&self) -> Interruption {
        self.shared.context.node.interruption()
    }

    /// Fails once it can receive no more, or in a forked child.
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        self.shared.check_open(operation)?;
        self.shared.context.node.check(operation).on(self.topic())
    }

    /// Gives up the messages behind the last one that it returned, after its close. Returns the
    /// reason of the close.
    #[cold]
    pub(super) fn give_up_lookahead(&mut self) -> Error {
        for direction in Direction::BOTH {
            if let Some((position, _)) = self.lookahead[direction as usize].take() {
                self.shared.release(direction, position);
            }
        }
        let operation = "pull from topic";
        let closed = || Error::new(operation, ErrorKind::Closed, "").on(self.topic());
        self.shared.check_open(operation).err().unwrap_or_else(closed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_taken_after_the_close_are_given_up() {
        let end_of_takes = EndOfTakes::default();
        assert!(end_of_takes.admits());
        assert!(end_of_takes.close(&Arc::from("the subscriber was closed")));
        assert!(!end_of_takes.admits() && !end_of_takes.admits());
        let again = end_of_takes.close(&Arc::from("the node was closed"));
        assert!(!again, "the first reason stays");
        let error = end_of_takes.closed.check("pull from topic").unwrap_err();
        assert_eq!(error.detail(), "the subscriber was closed");
    }
}
