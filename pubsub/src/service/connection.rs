//! A connection that never holds up the service: what cannot be sent now waits.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use ipc::{Channel, ChannelError, Participant};

use super::protocol::{self, Notice};

/// Messages that may wait for one who does not listen.
const MOST_WAITING: usize = 4096;
/// Their bytes: more than any report has.
const MOST_BYTES: usize = 16 << 20;
/// Their descriptors, which all others would lack: those of all lives, and as many more.
const MOST_FILES: usize = 2 * Participant::PLACES as usize;

#[derive(Debug)]
pub(super) struct Connection {
    channel: Channel,
    waiting: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
    /// Of all that waits.
    bytes: usize,
    files: usize,
    is_broken: bool,
}

impl Connection {
    pub(super) fn new(channel: Channel) -> Self {
        Self { channel, waiting: VecDeque::new(), bytes: 0, files: 0, is_broken: false }
    }

    pub(super) fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Sends, now or later, in order.
    pub(super) fn send(&mut self, notice: &Notice, descriptors: Vec<OwnedFd>) {
        if self.is_broken {
            return;
        }
        let bytes = protocol::encode(notice);
        self.bytes += bytes.len();
        self.files += descriptors.len();
        self.waiting.push_back((bytes, descriptors));
        self.flush();
        let is_too_much =
            self.waiting.len() > MOST_WAITING || self.bytes > MOST_BYTES || self.files > MOST_FILES;
        if is_too_much {
            self.give_up();
        }
    }

    /// Sends what waits, as far as there is room.
    pub(super) fn flush(&mut self) {
        while let Some((bytes, descriptors)) = self.waiting.front() {
            let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            match self.channel.send(bytes, &borrowed, Duration::ZERO) {
                Ok(()) => {
                    self.bytes -= bytes.len();
                    self.files -= descriptors.len();
                    self.waiting.pop_front();
                }
                Err(ChannelError::DeadlineExceeded { .. }) => return,
                Err(_) => self.give_up(),
            }
        }
    }

    /// The other side cannot be told what it has to know: it comes back, and is told all.
    pub(super) fn give_up(&mut self) {
        self.is_broken = true;
        self.waiting.clear();
        (self.bytes, self.files) = (0, 0);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What waits for one who does not listen, before and after it is given up.
    fn until_given_up(notice: &Notice, files: usize) -> (usize, usize, usize) {
        let (near, _far) = Channel::pair().unwrap();
        let mut connection = Connection::new(near);
        let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let copies = || (0..files).map(|_| null.try_clone().unwrap()).collect();
        let mut most = (0, 0, 0);
        while !connection.is_broken() {
            let Connection { bytes, files, .. } = connection;
            most = most.max((connection.waiting.len(), bytes, files));
            connection.send(notice, copies());
        }
        assert!(!connection.has_waiting());
        most
    }

    #[test]
    fn what_waits_for_one_who_does_not_listen_is_bounded() {
        let left = Notice::Left;
        let (messages, ..) = until_given_up(&left, 0);
        assert_eq!(messages, MOST_WAITING);
        let lives = Notice::Lives { participants: vec![1; 32] };
        let (_, _, files) = until_given_up(&lives, 32);
        assert!((Participant::PLACES as usize..=MOST_FILES).contains(&files), "{files}");
        let row = crate::Row::Subscriber {
            topic: "x".repeat(200),
            participant: "y".repeat(200),
            behind: 0,
            missed: 0,
        };
        let rows = Notice::Rows { request: 1, rows: vec![row; 64], is_last: false };
        let (messages, bytes, _) = until_given_up(&rows, 0);
        assert!(messages < MOST_WAITING && bytes <= MOST_BYTES, "{messages} of {bytes}");
    }

    #[test]
    fn nothing_is_counted_that_was_sent() {
        let (near, far) = Channel::pair().unwrap();
        let mut connection = Connection::new(near);
        for _ in 0..3 * MOST_WAITING {
            connection.send(&Notice::Left, Vec::new());
            far.receive(Duration::ZERO).unwrap();
        }
        assert!(!connection.is_broken() && !connection.has_waiting());
        assert_eq!((connection.bytes, connection.files), (0, 0));
    }
}
