//! What a worker has to say, and the descriptor that wakes who listens.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::{NodeId, TopicKey};
use crate::error::{Error, Result};
use crate::replication::{ConnectionMessage, Side};
use crate::wake::WakeFd;

/// What a worker has to say: of which topic, by its number here, and of which other node.
#[derive(Debug)]
pub enum WorkerEvent {
    /// A letter about a topic, for a node's worker.
    ControlMessage { key: TopicKey, node: NodeId, terms: ConnectionMessage },
    /// Messages of a topic flow; which side of it we are.
    Connected { key: TopicKey, node: NodeId, side: Side },
    /// They do not any more. Nothing is lost with that: a writer may
    /// [begin again](super::Command::Add).
    Disconnected { key: TopicKey, node: NodeId, side: Side, reason: Error },
    /// A node holds up a topic, which was asked for.
    Lagging { key: TopicKey, node: NodeId },
    /// A topic cannot be sent, or not to a node (None: to none), or not be received, and would not be
    /// if it were tried again: a source, a sink or a device failed, or the nodes do not understand
    /// each other.
    Failed { key: TopicKey, node: Option<NodeId>, side: Side, error: Error },
}

pub(super) fn channel() -> Result<(Arc<WakeFd>, Sender<WorkerEvent>, Receiver<WorkerEvent>)> {
    let bell = WakeFd::new().map_err(|error| Error::of("start a replication worker", error))?;
    let (tell, told) = unbounded();
    Ok((Arc::new(bell), tell, told))
}

/// The worker's end.
#[derive(Debug)]
pub(super) struct WorkerEvents {
    /// Gone before the bell rings for the last time, so that who is woken sees the end.
    tell: Sender<WorkerEvent>,
    bell: WakeOnDrop,
}

/// Wakes the receiver of the reports when the worker ends, in whatever way.
#[derive(Debug)]
struct WakeOnDrop(Arc<WakeFd>);

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        self.0.ring();
    }
}

impl WorkerEvents {
    pub(super) fn new(tell: Sender<WorkerEvent>, bell: &Arc<WakeFd>) -> Self {
        Self { tell, bell: WakeOnDrop(Arc::clone(bell)) }
    }

    pub(super) fn tell(&self, report: WorkerEvent) {
        // Perhaps nobody listens any more.
        let _ = self.tell.send(report);
        self.bell.0.ring();
    }
}
