//! Publishers of a topic, as users of the topic see them.

use ipc::Liveness;

use crate::context::TopicContext;
use crate::ids::PublisherId;

/// A publisher of a topic on this node, or another node that publishes to the topic:
/// [`Topic::publishers`](crate::Topic::publishers).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TopicPublisher {
    /// The publisher, as its samples [name it](crate::Sample::publisher). None for another node: how
    /// many publishers it has is not known here.
    pub publisher: Option<PublisherId>,
    /// The other node, as in the [origin](crate::Sample::origin) of its samples. None for a publisher
    /// on this node.
    pub node: Option<[u8; 16]>,
    /// The publisher's process, as [reports](crate::Node::report) number it. None for another node.
    pub process: Option<u32>,
    /// Name of the process, or of the other node, as in reports.
    pub label: String,
    /// False for a process that died, and for a node that is lost, until they are removed: a node
    /// after [`lost_after`](crate::NetworkOptions::lost_after).
    pub is_alive: bool,
}

impl TopicPublisher {
    /// All of a topic: first those of this node.
    pub(crate) fn all(context: &TopicContext) -> Vec<Self> {
        let (topic, participants) = (&context.topic, &context.node.participants);
        let local = topic.named_publishers().into_iter().map(|found| {
            let (process, label) = found.process();
            Self {
                publisher: Some(PublisherId(found.id())),
                node: None,
                process: Some(process),
                label: label.to_owned(),
                is_alive: !participants.is_dead(Some(found.participant())),
            }
        });
        let remote = topic.publishing_nodes().into_iter().map(|found| Self {
            publisher: None,
            node: Some(found.node()),
            process: None,
            label: found.label().to_owned(),
            is_alive: found.is_connected(),
        });
        local.chain(remote).collect()
    }
}
