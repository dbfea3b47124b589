//! Events of an agent: initiators that connect and disconnect, and their notices.

use std::collections::VecDeque;
use std::sync::Arc;

use super::local_target::{LocalInitiator, LocalTarget};
use crate::notice::Notice;

/// An event that peers caused.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// An initiator connected, by one or more rails.
    Joined {
        /// Its identity.
        from: [u8; 16],
        /// Its label.
        label: String,
    },
    /// A notice arrived. The data of its transfer has arrived before.
    Notice {
        /// Identity of its sender.
        from: [u8; 16],
        /// Its contents.
        notice: Notice,
    },
    /// An initiator disconnected or died, or the connection to it was lost. All its notices were
    /// reported before.
    Left {
        /// Its identity.
        from: [u8; 16],
        /// Its label.
        label: String,
        /// Its process ended, or no rail received anything from it within the timeout.
        is_dead: bool,
    },
    /// A fabric between this agent and a peer was lost. The other rails continue, and this one is
    /// retried. If it was the last one of an initiator, [`Left`](Self::Left) is reported too.
    RailLost {
        /// Identity of the peer.
        with: [u8; 16],
        /// Label of the peer.
        label: String,
        /// Index of the [fabric](super::AgentOptions::fabric) of this agent, from 0.
        rail: usize,
        /// The cause.
        reason: String,
    },
    /// A lost rail carries bytes again. Not reported for an initiator that has [left](Self::Left):
    /// it is reported as [joined](Self::Joined) when it reconnects.
    RailRestored {
        /// Identity of the peer.
        with: [u8; 16],
        /// Label of the peer.
        label: String,
        /// Index of the fabric of this agent.
        rail: usize,
    },
}

/// Events that were not taken, and the local initiators that cause some of them.
#[derive(Debug, Default)]
pub(super) struct Events {
    queue: VecDeque<(Event, Option<NoticeCredit>)>,
    /// Initiators that joined and did not leave.
    initiators: Vec<Arc<LocalInitiator>>,
    /// The initiator of the last notice: the next one has its turn.
    next_initiator: usize,
    seen_changes: u64,
}

/// The rail and session whose credit a notice returns when it is taken.
pub(super) type NoticeCredit = (usize, u64);

impl Events {
    pub(super) fn push(&mut self, event: Event, credit: Option<NoticeCredit>) {
        self.queue.push_back((event, credit));
    }

    /// The next event, if any.
    pub(super) fn take(&mut self) -> Option<(Event, Option<NoticeCredit>)> {
        if let Some(event) = self.queue.pop_front() {
            return Some(event);
        }
        // Round robin: an initiator with many notices does not starve the others.
        for _ in 0..self.initiators.len() {
            self.next_initiator = (self.next_initiator + 1) % self.initiators.len();
            if let Some(notice) = self.initiators[self.next_initiator].take_notice() {
                return Some((notice, None));
            }
        }
        None
    }

    /// Reports local initiators that connected or disconnected.
    pub(super) fn update(&mut self, local_target: &LocalTarget) {
        let Some(all) = local_target.changed_initiators(&mut self.seen_changes) else { return };
        for initiator in all {
            if !self.initiators.iter().any(|reported| Arc::ptr_eq(reported, &initiator)) {
                self.queue.push_back((initiator.joined(), None));
                self.initiators.push(initiator);
            }
        }
        // Notices that it sent before are reported first.
        for left in self.initiators.extract_if(.., |initiator| initiator.has_left()) {
            left.report_departure(|event| self.queue.push_back((event, None)));
        }
        local_target.remove_departed();
    }
}
