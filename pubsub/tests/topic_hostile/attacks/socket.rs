//! Attacks on the Unix socket of node 1. Permissions of its directory exclude other users.

use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use ipc::{Channel, ChannelError};
use nix::sys::socket::{MsgFlags, send};

use super::target::Target;
use crate::outcome::Outcome;
use crate::random::Random;
use crate::stop_signal::StopSignal;

const CONNECT_TIMEOUT: Duration = Duration::from_millis(200);
const PAUSE: Duration = Duration::from_millis(20);
const BETWEEN_BYTES: Duration = Duration::from_millis(100);
const SILENT: usize = 300;
const SLOW: usize = 32;
const MAX_OPEN: usize = 32;
const MAX_BYTES: u64 = 4096;
/// The beginning of a channel's hello: no descriptors, version, an empty label.
const BEGINNING: [u8; 4] = [0, 8, 0, 0];

/// Channels to the socket, and counts since the start.
struct Channels<'a> {
    target: &'a Target,
    open: Vec<Channel>,
    opened: u64,
    max_open: usize,
    closed: u64,
    denied: u64,
    failed: u64,
}

impl<'a> Channels<'a> {
    fn new(target: &'a Target) -> Self {
        Self { target, open: Vec::new(), opened: 0, max_open: 0, closed: 0, denied: 0, failed: 0 }
    }

    fn open(&mut self) -> bool {
        match Channel::connect(&self.target.directory.join("node.sock"), CONNECT_TIMEOUT) {
            Ok(channel) => {
                self.opened += 1;
                self.open.push(channel);
                self.max_open = self.max_open.max(self.open.len());
                return true;
            }
            Err(error) if is_denied(&error) => self.denied += 1,
            Err(_) => self.failed += 1,
        }
        false
    }

    fn send(&self, index: usize, bytes: &[u8]) {
        // `reap` counts channels that the service has closed.
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let _ = send(self.open[index].as_fd().as_raw_fd(), bytes, flags);
    }

    fn reap(&mut self) {
        let before = self.open.len();
        self.open.retain(|channel| {
            // Answers before the close are discarded.
            while !channel.is_shut_down() && channel.receive(Duration::ZERO).is_ok() {}
            !channel.is_shut_down()
        });
        self.closed += (before - self.open.len()) as u64;
    }

    fn outcome(self, user: &str) -> Outcome {
        let Self { opened, max_open, closed, denied, failed, .. } = self;
        let text = match denied {
            0 => format!(
                "{opened} opened, {max_open} at a time, {closed} closed by the node, {failed} failed"
            ),
            _ => format!("permission denied {denied} times, {opened} opened, {failed} failed"),
        };
        let fault = (user == "other" && opened > 0)
            .then(|| format!("another user connected {opened} times"));
        Outcome { refused: closed + denied + failed, text, fault }
    }
}

fn is_denied(error: &ChannelError) -> bool {
    let mut error: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = error {
        let system = cause.downcast_ref::<std::io::Error>();
        if system.is_some_and(|it| it.kind() == std::io::ErrorKind::PermissionDenied) {
            return true;
        }
        error = cause.source();
    }
    false
}

/// Random bytes, over several connections a second.
pub fn garbage(stop: &StopSignal, target: &Target, user: &str) -> Outcome {
    let mut random = Random::new(target.seed);
    let mut channels = Channels::new(target);
    while stop.sleep(PAUSE) {
        if channels.open() {
            let length = 1 + random.below(MAX_BYTES) as usize;
            channels.send(channels.open.len() - 1, &random.bytes(length));
        }
        channels.reap();
        let excess = channels.open.len().saturating_sub(MAX_OPEN);
        channels.open.drain(..excess);
    }
    channels.outcome(user)
}

/// Connections that send no bytes.
pub fn silent(stop: &StopSignal, target: &Target, user: &str) -> Outcome {
    let mut channels = Channels::new(target);
    loop {
        while channels.open.len() < SILENT && !stop.is_over() && channels.open() {}
        if !stop.sleep(Duration::from_secs(1)) {
            break;
        }
        channels.reap();
    }
    channels.outcome(user)
}

/// A hello, one byte at a time.
pub fn slow(stop: &StopSignal, target: &Target, user: &str) -> Outcome {
    let mut channels = Channels::new(target);
    let mut round = 0;
    while stop.sleep(BETWEEN_BYTES) {
        channels.reap();
        while channels.open.len() < SLOW && channels.open() {}
        for index in 0..channels.open.len() {
            channels.send(index, &BEGINNING[round % BEGINNING.len()..][..1]);
        }
        round += 1;
    }
    channels.outcome(user)
}
