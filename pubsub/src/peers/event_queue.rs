//! Events on their way to those above, and a descriptor that can be polled for them.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;

use super::event::PeerEvent;
use crate::lock::lock;
use crate::wake::WakeFd;

/// So many events, or so many bytes of them, and nothing is read from peers any more until
/// half of it is taken. What is under way then still comes: about what one read gives, and
/// word of those that end.
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

    /// The oldest, and whether there is enough room again just now.
    pub(super) fn pop(&self) -> (Option<PeerEvent>, bool) {
        let mut state = lock(&self.state);
        let was_tight = state.is_filled(2);
        let event = state.events.pop_front();
        if let Some(event) = &event {
            state.weight -= event.weight();
        }
        if state.events.is_empty() {
            self.bell.silence();
        }
        let has_room = was_tight && !state.is_filled(2);
        (event, has_room)
    }

    /// Is it to be filled further? Who has stopped goes on at half of it only.
    pub(super) fn is_full(&self, has_stopped: bool) -> bool {
        lock(&self.state).is_filled(if has_stopped { 2 } else { 1 })
    }
}

impl AsFd for PeerEventQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}
