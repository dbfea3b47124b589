//! What a worker has to say, and the descriptor that wakes who listens.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::{NodeIdentity, TopicKey};
use crate::bridge::{Side, Terms};
use crate::error::{Error, Result};
use crate::wake::WakeFd;

/// What a worker has to say: of which topic, by its number here, and of which other node.
#[derive(Debug)]
pub enum Report {
    /// A letter about a topic, for a node's worker.
    Letter { key: TopicKey, node: NodeIdentity, terms: Terms },
    /// Messages of a topic flow; which side of it we are.
    Connected { key: TopicKey, node: NodeIdentity, side: Side },
    /// They do not any more. Nothing is lost with that: a writer may
    /// [begin again](super::Command::Add).
    Lost { key: TopicKey, node: NodeIdentity, side: Side, reason: Error },
    /// A node holds up a topic, which was asked for.
    Behind { key: TopicKey, node: NodeIdentity },
    /// A topic cannot be sent, or not to a node (None: to none), or not be received, and would not be
    /// if it were tried again: a source, a sink or a device failed, or the nodes do not understand
    /// each other.
    Failed { key: TopicKey, node: Option<NodeIdentity>, side: Side, error: Error },
}

pub(super) fn channel() -> Result<(Arc<WakeFd>, Sender<Report>, Receiver<Report>)> {
    let bell = WakeFd::new().map_err(|error| Error::of("start a bridge", error))?;
    let (tell, told) = unbounded();
    Ok((Arc::new(bell), tell, told))
}

/// The worker's end.
#[derive(Debug)]
pub(super) struct Reports {
    /// Gone before the bell rings for the last time, so that who is woken sees the end.
    tell: Sender<Report>,
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

impl Reports {
    pub(super) fn new(tell: Sender<Report>, bell: &Arc<WakeFd>) -> Self {
        Self { tell, bell: WakeOnDrop(Arc::clone(bell)) }
    }

    pub(super) fn tell(&self, report: Report) {
        // Perhaps nobody listens any more.
        let _ = self.tell.send(report);
        self.bell.0.ring();
    }
}
