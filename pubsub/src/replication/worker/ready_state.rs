//! State of one topic in the queue of ready topics.

use std::mem;

use crate::replication::Progress;

/// State of a topic in the queue: listed or not, and until when it is polled in every round.
#[derive(Debug, Default)]
pub(super) struct ReadyState {
    is_listed: bool,
    until: u64,
    progress: Progress,
}

impl ReadyState {
    /// Polls the topic until this time. Returns true if it was not listed before.
    pub(super) fn mark(&mut self, until: u64) -> bool {
        self.until = until;
        !mem::replace(&mut self.is_listed, true)
    }

    /// Notes the result of the topic's turn; a topic that moved data is polled for `spin` more
    /// nanoseconds. Returns true if it stays listed.
    pub(super) fn end_turn(&mut self, progress: Progress, now: u64, spin: u64) -> bool {
        self.progress = progress;
        if progress.has_moved {
            self.until = now + spin;
        }
        self.is_listed = now < self.until || progress.is_copying || progress.is_waiting;
        self.is_listed
    }

    pub(super) fn progress(&self) -> Progress {
        self.progress
    }
}
