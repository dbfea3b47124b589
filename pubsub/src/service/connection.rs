//! A connection that never holds up the service: what cannot be sent now waits.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use ipc::{Channel, ChannelError};

use super::protocol::{self, Notice};

/// Messages that may wait for one who does not listen.
const MOST_WAITING: usize = 4096;

#[derive(Debug)]
pub(super) struct Connection {
    channel: Channel,
    waiting: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
    is_broken: bool,
}

impl Connection {
    pub(super) fn new(channel: Channel) -> Self {
        Self { channel, waiting: VecDeque::new(), is_broken: false }
    }

    pub(super) fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Sends, now or later, in order.
    pub(super) fn send(&mut self, notice: &Notice, descriptors: Vec<OwnedFd>) {
        if self.waiting.len() >= MOST_WAITING {
            self.is_broken = true;
        }
        if !self.is_broken {
            self.waiting.push_back((protocol::encode(notice), descriptors));
            self.flush();
        }
    }

    /// Sends what waits, as far as there is room.
    pub(super) fn flush(&mut self) {
        while let Some((bytes, descriptors)) = self.waiting.front() {
            let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            match self.channel.send(bytes, &borrowed, Duration::ZERO) {
                Ok(()) => drop(self.waiting.pop_front()),
                Err(ChannelError::DeadlineExceeded { .. }) => return,
                Err(_) => {
                    self.is_broken = true;
                    self.waiting.clear();
                }
            }
        }
    }

    /// The other side cannot be told what it has to know: it comes back, and is told all.
    pub(super) fn give_up(&mut self) {
        self.is_broken = true;
        self.waiting.clear();
    }

    /// Ends the connection for both sides, also where a child of either keeps a copy of it open.
    pub(super) fn end(&mut self) {
        self.flush();
        self.channel.end();
    }

    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Is the other side gone, or so far behind that it is given up?
    pub(super) fn is_broken(&self) -> bool {
        self.is_broken
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}
