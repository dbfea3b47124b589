//! The thread at an agent's socket: lets visitors in, and gives them what leads to regions.
//!
//! It needs nothing of the agent's owner, who may compute for minutes meanwhile. Every
//! visitor is served in turn, with deadlines, and none of them is believed.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ipc::{Channel, ChannelError, ChannelListener, Life, Message};

use super::home::{Home, Visitor};
use super::peer::left;
use super::protocol::{PIECES_AT_ONCE, Pieces, Refusal, Reply, Request};
use super::visit::Host;
use crate::error::{Error, ErrorKind};
use crate::lock;
use crate::socket_server::{Handler, MAX_CONNECTIONS, SocketServer};

/// Visitors at a time; also those that left and may still be at a region.
const MOST_VISITORS: usize = if cfg!(test) { 16 } else { 1024 };
/// How long one has to say who it is.
const INTRODUCING: Duration = Duration::from_secs(2);
/// How long one has to take a message before it is given up.
const TAKING: Duration = Duration::from_secs(2);
/// How long one has to take all messages of an answer: others wait meanwhile.
const ANSWERING: Duration = Duration::from_secs(10);
/// How often it is looked whether the agent has ended, during a wait.
const LOOK: Duration = Duration::from_millis(50);

struct Reception<'a> {
    home: &'a Home,
}

/// Serves all who come, until it is over.
pub(super) fn receive(listener: &ChannelListener, home: &Home) {
    let Home { admission, is_over, .. } = home;
    let denial = refusal(ErrorKind::Denied, "this user is not admitted");
    let (max_per_user, register_timeout) = (MAX_CONNECTIONS, INTRODUCING);
    let server =
        SocketServer { listener, admission, is_over, max_per_user, register_timeout, denial };
    server.serve(&mut Reception { home });
}

impl Handler for Reception<'_> {
    type Client = Arc<Visitor>;

    fn handle(&mut self, channel: &Channel, visitor: &mut Option<Arc<Visitor>>) -> bool {
        let message = match channel.receive(Duration::ZERO) {
            Ok(message) => message,
            Err(ChannelError::DeadlineExceeded { .. }) => return true,
            Err(ChannelError::Closed) => return false,
            Err(error) => {
                refuse(channel, ErrorKind::Malformed, error.to_string());
                return false;
            }
        };
        if let Some(visitor) = visitor {
            return answer(self.home, visitor, channel, &message);
        }
        match self.admit(channel, message) {
            Ok(come) => {
                lock(&self.home.visitors).push(Arc::clone(&come));
                self.home.has_changed();
                *visitor = Some(come);
                true
            }
            Err(error) => {
                refuse(channel, error.kind(), error.to_string());
                false
            }
        }
    }

    fn disconnected(&mut self, visitor: Arc<Visitor>) {
        visitor.has_left.store(true, Ordering::Release);
        self.home.has_changed();
    }
}

impl Reception<'_> {
    fn admit(&self, channel: &Channel, message: Message) -> Result<Arc<Visitor>, Error> {
        let operation = "receive a visitor";
        let failed = |why: &dyn ToString| Error::new(operation, ErrorKind::Failed, why.to_string());
        self.home.forget_departed();
        if lock(&self.home.visitors).len() >= MOST_VISITORS {
            return Err(failed(&format!("it has {MOST_VISITORS} visitors already")));
        }
        let (who, life) = Request::read_hello(message)?;
        let life = Life::of_peer(channel, life)
            .map_err(|error| Error::new(operation, ErrorKind::Malformed, error.to_string()))?;
        let visit = Host::create()?;
        let home = self.home;
        let welcome = Reply::Welcome(home.introduction()).encode();
        let board = home.board.read_only().map_err(|error| failed(&error))?;
        let descriptors = [home.life.as_fd(), board.as_fd(), home.bell.as_fd(), visit.as_fd()];
        send(home, channel, &welcome, &descriptors, ipc::deadline(TAKING))
            .map_err(|error| failed(&error))?;
        Ok(Arc::new(Visitor::new((who.identity, who.label), life, visit, false)))
    }
}

fn refusal(kind: ErrorKind, why: impl Into<String>) -> Vec<u8> {
    Reply::Refused(Refusal::new(kind, why)).encode()
}

fn refuse(channel: &Channel, kind: ErrorKind, why: impl Into<String>) {
    // Who does not take it does not hear it.
    let _ = channel.send(&refusal(kind, why), &[], Duration::ZERO);
}

/// Sends a message, in time, and as long as the agent has not ended.
fn send(
    home: &Home,
    channel: &Channel,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
    end: Instant,
) -> Result<(), ChannelError> {
    loop {
        let sent = channel.send(bytes, descriptors, left(end).min(LOOK));
        let is_crowded = matches!(
            sent,
            Err(ChannelError::DeadlineExceeded { .. } | ChannelError::TooManyOnTheirWay)
        );
        if !is_crowded || home.is_over.load(Ordering::Acquire) || left(end).is_zero() {
            return sent;
        }
    }
}

/// Answers a request. False if the visitor is to be seen off.
fn answer(home: &Home, visitor: &Visitor, channel: &Channel, message: &Message) -> bool {
    let (number, ticket) = match Request::read_open(&message.bytes) {
        Ok(asked) => asked,
        Err(error) => {
            refuse(channel, error.kind(), error.to_string());
            return false;
        }
    };
    let Some(region) = home.region(number, ticket) else {
        let refused = refusal(ErrorKind::Stale, "the region was withdrawn, or never was");
        return send(home, channel, &refused, &[], ipc::deadline(TAKING)).is_ok();
    };
    visitor.opens(&region);
    let all_taken = ipc::deadline(ANSWERING);
    let in_all = region.descriptor.pieces;
    let bytes = region.buffer.bytes_of_pieces();
    let rights = region.descriptor.rights;
    let mut first = 0;
    loop {
        // A few at a time: a process has not so many descriptors.
        let end = in_all.min(first + PIECES_AT_ONCE as u32);
        let exported: Result<Vec<_>, _> =
            (first..end).map(|piece| region.buffer.export(piece, rights)).collect();
        let (descriptors, lengths): (Vec<_>, Vec<_>) = match exported {
            Ok(exported) => exported.into_iter().unzip(),
            Err(error) => {
                let refused = refusal(ErrorKind::Failed, error.to_string());
                return send(home, channel, &refused, &[], ipc::deadline(TAKING)).is_ok();
            }
        };
        let pieces = Pieces { number, in_all, first, bytes, lengths };
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let taken = all_taken.min(ipc::deadline(TAKING));
        let reply = Reply::Pieces(pieces).encode();
        if send(home, channel, &reply, &borrowed, taken).is_err() {
            return false;
        }
        first = end;
        if first >= in_all {
            return true;
        }
    }
}

#[cfg(test)]
mod tests;
