//! The end of a publisher, by its own close or that of its topic or node.

use std::sync::Arc;

use threads::lock;

use super::{Publisher, PublisherState};
use crate::endpoint_list::Endpoint;
use crate::error::Result;
use crate::error_mapping::On;

impl PublisherState {
    /// Fails once the publisher, its topic or its node is closed.
    pub(super) fn check_open(&self, operation: &'static str) -> Result<()> {
        let topic = self.context.topic.name();
        self.closed.check(operation).on(topic)?;
        self.context.node.check(operation).on(topic)
    }
}

impl Endpoint for PublisherState {
    fn close(&self, reason: &Arc<str>) {
        let node = &self.context.node;
        if !node.fork_generation.is_current() || !self.closed.set(reason) {
            return;
        }
        {
            // A message that another thread is publishing is published first.
            let _sequencer = lock(&self.sequencer);
            if self.slot().is_of(node.me, self.id) {
                let _ = self.last_counters.set(self.counters());
                self.slot().leave();
            }
        }
        self.context.participants_changed();
        // Subscribers may wait for its end.
        self.context.topic.local().messages().ring();
        // Waits for room, for memory and for loans end.
        self.context.topic.local().room().ring();
        self.context.local.control().wake();
        self.loans.wake();
    }

    fn on_lost_membership(&self, reason: &Arc<str>) {
        self.close(reason);
    }
}

impl Publisher {
    /// Closes it, for all threads: they publish nothing more, and their waits end with
    /// [`Closed`](crate::ErrorKind::Closed). Messages that were published stay. Loans can only be
    /// dropped; until then their memory stays reserved. Closing the topic or the node does the same.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pubsub::{ErrorKind, Node, NodeOptions, TopicSettings};
    /// # let directory = testkit::temp_dir::TempDir::new("fabricast-doc-close-publisher");
    /// # let node = Node::join(NodeOptions { directory: directory.join("node"), ..NodeOptions::default() })?;
    /// let timeout = Duration::from_secs(60);
    /// let topic = node.topic("frames", &TopicSettings { depth: 1, ..TopicSettings::default() })?;
    /// let (publisher, _subscriber) = (topic.publisher()?, topic.subscriber()?);
    /// publisher.push(b"fills the topic", timeout)?;
    /// std::thread::scope(|scope| {
    ///     let waiting = scope.spawn(|| publisher.push(b"waits for room", timeout));
    ///     std::thread::sleep(Duration::from_millis(20));
    ///     publisher.close();
    ///     let error = waiting.join().unwrap().unwrap_err();
    ///     assert_eq!(error.kind(), ErrorKind::Closed);
    ///     assert_eq!(error.detail(), "the publisher was closed");
    /// });
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn close(&self) {
        self.state.close(&Arc::from("the publisher was closed"));
    }
}
