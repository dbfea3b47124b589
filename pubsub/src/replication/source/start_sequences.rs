//! Start sequences: for each publisher the last sequence number when its node learned that another
//! node subscribes. The next message counts for that node, and all messages of later publishers.
//!
//! A node sends them for each subscription that another node reports, again in each session, also
//! for topics that it does not have. The receiver keeps the first ones for its subscription: so
//! messages count that were published while the two could not reach each other.

use serde::{Deserialize, Serialize};

use crate::ids::NodeId;
use crate::node_segment::NodeSegment;
use crate::topic::{PUBLISHER_SLOTS, Topic, TopicStart};

/// Topics in one message, and publishers of all of them.
pub(crate) const MAX_TOPICS: usize = 32;
pub(crate) const MAX_PUBLISHERS: usize = 4 * PUBLISHER_SLOTS;

/// The start sequences of a topic, for a subscription of another node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StartSequences {
    topic: String,
    /// The subscription, as the other node named it.
    subscription: u64,
    start: TopicStart,
}

impl StartSequences {
    /// Answers a subscription of another node to the topic of this name.
    pub(crate) fn answer(
        node_segment: &NodeSegment,
        topic: Option<&Topic>,
        name: &str,
        subscription: u64,
    ) -> Self {
        let no_topic = || TopicStart::new(node_segment.serials_of_past_topics(), Vec::new());
        let start = topic.map_or_else(no_topic, |topic| topic.start());
        Self { topic: name.to_owned(), subscription, start }
    }

    pub(crate) fn topic(&self) -> &str {
        &self.topic
    }

    /// Begins the accounts of a node's publishers, unless this answers an earlier subscription.
    pub(crate) fn begin(&self, node: NodeId, topic: &Topic) {
        if topic.subscription() == self.subscription {
            topic.begin_accounts(&node.0, &self.start);
        }
    }

    fn publishers(&self) -> usize {
        self.start.publishers().len()
    }

    pub(crate) fn validation_error(all: &[Self]) -> Option<&'static str> {
        let publishers: usize = all.iter().map(Self::publishers).sum();
        let is_valid = (1..=MAX_TOPICS).contains(&all.len()) && publishers <= MAX_PUBLISHERS;
        (!is_valid).then_some("start sequences: none, or too many")
    }

    /// Distributes them over messages.
    pub(crate) fn into_messages(all: Vec<Self>) -> Vec<Vec<Self>> {
        let mut messages: Vec<Vec<Self>> = Vec::new();
        for one in all {
            let fits = |message: &Vec<Self>| {
                let publishers: usize = message.iter().map(Self::publishers).sum();
                message.len() < MAX_TOPICS && publishers + one.publishers() <= MAX_PUBLISHERS
            };
            match messages.last_mut().filter(|message| fits(message)) {
                Some(message) => message.push(one),
                None => messages.push(vec![one]),
            }
        }
        messages
    }
}

#[cfg(test)]
impl StartSequences {
    pub(crate) fn at(topic: &str, start: TopicStart) -> Self {
        Self { topic: topic.to_owned(), subscription: u64::MAX, start }
    }

    pub(crate) fn answers(&self, subscription: u64) -> bool {
        self.subscription == subscription
    }

    pub(crate) fn start(&self) -> &TopicStart {
        &self.start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_sequences_are_distributed_over_valid_messages() {
        let of = |publishers: usize| StartSequences {
            topic: "numbers".to_owned(),
            subscription: 7,
            start: TopicStart::new(3, vec![(1 << 8, 2); publishers]),
        };
        let all: Vec<_> = [vec![of(PUBLISHER_SLOTS); 9], vec![of(0); 70]].concat();
        let messages = StartSequences::into_messages(all.clone());
        assert_eq!(messages.iter().map(Vec::len).collect::<Vec<_>>(), [4, 4, 32, 32, 7]);
        assert!(messages.iter().all(|it| StartSequences::validation_error(it).is_none()));
        assert_eq!(messages.concat(), all);
        for wrong in [vec![], vec![of(0); MAX_TOPICS + 1], vec![of(PUBLISHER_SLOTS); 5]] {
            assert!(StartSequences::validation_error(&wrong).is_some());
        }
    }
}
