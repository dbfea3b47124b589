//! Events of a worker, and the descriptor that wakes their receiver.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::{NodeId, TopicKey};
use crate::error::{Error, Result};
use crate::replication::{ConnectionMessage, Side};
use crate::wake::WakeFd;

/// An event of a worker: the topic by its key here, and the other node.
#[derive(Debug)]
pub enum WorkerEvent {
    /// A connection message about a topic, for a node's worker.
    ControlMessage { key: TopicKey, node: NodeId, terms: ConnectionMessage },
    /// Messages of a topic flow; `side` is the local side.
    Connected { key: TopicKey, node: NodeId, side: Side },
    /// The connection ended. No message is lost: [`AddDestination`](super::Command::AddDestination)
    /// starts a new one.
    Disconnected { key: TopicKey, node: NodeId, side: Side, reason: Error },
    /// A node blocks a topic, as requested by [`ReportLagging`](super::Command::ReportLagging).
    Lagging { key: TopicKey, node: NodeId },
    /// A topic cannot be sent, not to a node (None: to none), or not be received, and a retry would
    /// fail, too: a source, a sink or a device failed, or the nodes are incompatible.
    Failed { key: TopicKey, node: Option<NodeId>, side: Side, error: Error },
}

pub(super) fn channel() -> Result<(Arc<WakeFd>, Sender<WorkerEvent>, Receiver<WorkerEvent>)> {
    let bell = WakeFd::new().map_err(|error| Error::of("start replication worker", error))?;
    let (sender, receiver) = unbounded();
    Ok((Arc::new(bell), sender, receiver))
}

/// The worker's end.
#[derive(Debug)]
pub(super) struct WorkerEvents {
    /// Dropped before the bell rings for the last time, so that its receiver sees the end.
    sender: Sender<WorkerEvent>,
    bell: WakeOnDrop,
}

/// Wakes the receiver of the events when the worker ends, for any reason.
#[derive(Debug)]
struct WakeOnDrop(Arc<WakeFd>);

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        self.0.ring();
    }
}

impl WorkerEvents {
    pub(super) fn new(sender: Sender<WorkerEvent>, bell: &Arc<WakeFd>) -> Self {
        Self { sender, bell: WakeOnDrop(Arc::clone(bell)) }
    }

    pub(super) fn send(&self, event: WorkerEvent) {
        // The receiver may have been dropped.
        let _ = self.sender.send(event);
        self.bell.0.ring();
    }
}
