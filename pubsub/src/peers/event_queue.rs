//! Events waiting for the replicator, with a descriptor that can be polled.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;

use threads::lock;

use super::peer_event::PeerEvent;
use crate::wake::WakeFd;

/// Limits of queued events. Above them nothing is read from peers until half is taken; what is in
/// progress may still exceed them by about one read, and by disconnections.
const MAX_EVENTS: usize = 4096;
const MAX_EVENT_BYTES: usize = 32 << 20;

#[derive(Debug, Default)]
struct State {
    events: VecDeque<PeerEvent>,
    weight: usize,
}

impl State {
    fn is_filled(&self, part: usize) -> bool {
        self.events.len() >= MAX_EVENTS / part || self.weight >= MAX_EVENT_BYTES / part
    }
}

#[derive(Debug)]
pub(super) struct PeerEventQueue {
    state: Mutex<State>,
    bell: WakeFd,
}

impl PeerEventQueue {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self { state: Mutex::default(), bell: WakeFd::new()? })
    }

    pub(super) fn push(&self, event: PeerEvent) {
        let mut state = lock(&self.state);
        state.weight += event.weight();
        state.events.push_back(event);
        if state.events.len() == 1 {
            self.bell.ring();
        }
    }

    /// The oldest event, and whether the queue just fell below half.
    pub(super) fn pop(&self) -> (Option<PeerEvent>, bool) {
        let mut state = lock(&self.state);
        let was_filled = state.is_filled(2);
        let event = state.events.pop_front();
        if let Some(event) = &event {
            state.weight -= event.weight();
        }
        if state.events.is_empty() {
            self.bell.silence();
        }
        let has_room = was_filled && !state.is_filled(2);
        (event, has_room)
    }

    /// Returns true if reading should pause; after a pause it resumes below half only.
    pub(super) fn is_full(&self, is_paused: bool) -> bool {
        lock(&self.state).is_filled(if is_paused { 2 } else { 1 })
    }
}

impl AsFd for PeerEventQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}
