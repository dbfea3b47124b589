//! The thread that keeps a process a member of its node: hears what the service says, and
//! finds, or becomes, another service when it ends.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ipc::{Channel, ChannelError, Fate, Life, Message};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::attendance::Shared;
use super::line::reach;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::Piece;
use crate::service::protocol::{self, LIVES_AT_ONCE, Notice, Request};

/// How long the service may take to take what is said to it.
const TAKING: Duration = Duration::from_secs(10);
/// How long it may take to say that one is a member.
const WELCOMING: Duration = Duration::from_secs(20);
/// How long one that leaves waits for a service to tell.
const LEAVING: Duration = Duration::from_secs(5);
/// The longest sleep.
const LONGEST: Duration = Duration::from_secs(5);
/// Pieces of a pool in one message.
const PIECES_AT_ONCE: usize = 32;

const RETURNING: &str = "go on at a node whose service has ended";

/// What the first answer says.
pub(super) struct Welcome {
    pub(super) participant: u32,
    pub(super) hall: OwnedFd,
}

pub(super) fn say(
    operation: &'static str,
    channel: &Channel,
    request: &Request,
    files: &[BorrowedFd<'_>],
) -> Result<()> {
    channel
        .send(&protocol::encode(request), files, TAKING)
        .map_err(|error| of_channel(operation, error))
}

pub(super) fn of_channel(operation: &'static str, error: ChannelError) -> Error {
    let kind = match &error {
        ChannelError::Closed => ErrorKind::Closed,
        ChannelError::DeadlineExceeded { .. } => ErrorKind::DeadlineExceeded,
        _ => ErrorKind::Failed,
    };
    Error::because(operation, kind, error)
}

/// Says who this process is, and hears whether it is a member.
pub(super) fn introduce(
    operation: &'static str,
    channel: &Channel,
    request: &Request,
    files: &[BorrowedFd<'_>],
) -> Result<Welcome> {
    say(operation, channel, request, files)?;
    let Message { bytes, mut descriptors } =
        channel.receive(WELCOMING).map_err(|error| of_channel(operation, error))?;
    match protocol::decode(operation, &bytes)? {
        Notice::Welcome { participant, .. } if descriptors.len() == 1 => {
            let hall = descriptors.swap_remove(0);
            Ok(Welcome { participant, hall })
        }
        Notice::SeenOff { why } => Err(why.into_error(operation)),
        other => {
            let detail = format!("it begins with {other:?}");
            Err(Error::new(operation, ErrorKind::Malformed, detail))
        }
    }
}

/// What is to become of the link.
enum Next {
    Stay,
    /// The service is gone.
    Lost,
    /// This process has left, or the node is closed to it.
    Over,
}

/// Runs until the process has left.
pub(super) fn run(shared: &Shared, channel: Channel) {
    let mut channel = Some(channel);
    let mut says_so = false;
    loop {
        let Some(open) = &channel else {
            match come_back(shared) {
                Ok(back) => channel = Some(back),
                Err(error) => {
                    if shared.leaving_since().is_none() {
                        tracing::error!(%error, "this process is not at its node any more");
                    }
                    shared.close(&error);
                    return;
                }
            }
            says_so = false;
            continue;
        };
        match turn(shared, open, &mut says_so) {
            Next::Stay => {}
            Next::Lost => channel = None,
            Next::Over => return,
        }
    }
}

fn turn(shared: &Shared, channel: &Channel, says_so: &mut bool) -> Next {
    for request in shared.requests() {
        if say("speak to the service", channel, &request, &[]).is_err() {
            return Next::Lost;
        }
    }
    let mut longest = LONGEST;
    if let Some(since) = shared.leaving_since() {
        if !*says_so && say("leave a node", channel, &Request::Leave, &[]).is_err() {
            return Next::Lost;
        }
        *says_so = true;
        longest = LEAVING.saturating_sub(since.elapsed());
        if longest.is_zero() {
            tracing::warn!("the service does not say that this process may leave");
            return Next::Over;
        }
    }
    let mut entries = [channel.as_fd(), shared.bell().as_fd()]
        .map(|descriptor| PollFd::new(descriptor, PollFlags::POLLIN));
    let _ = poll(&mut entries, PollTimeout::try_from(longest).unwrap_or(PollTimeout::ZERO));
    let _ = shared.bell().read();
    loop {
        let message = match channel.receive(Duration::ZERO) {
            Ok(message) => message,
            Err(ChannelError::DeadlineExceeded { .. }) => return Next::Stay,
            Err(_) => return Next::Lost,
        };
        match hear(shared, channel, message) {
            Ok(Next::Stay) => {}
            Ok(other) => return other,
            Err(error) => {
                tracing::warn!(%error, "the service of the node is not understood");
                return Next::Lost;
            }
        }
    }
}

/// Does what the service says.
fn hear(shared: &Shared, channel: &Channel, message: Message) -> Result<Next> {
    let operation = "hear the service of the node";
    let Message { bytes, descriptors } = message;
    let only = |descriptors: Vec<OwnedFd>| -> Result<OwnedFd> {
        let [one] = <[OwnedFd; 1]>::try_from(descriptors).map_err(|_| {
            let detail = "another number of descriptors than it speaks of";
            Error::new(operation, ErrorKind::Malformed, detail)
        })?;
        Ok(one)
    };
    match protocol::decode(operation, &bytes)? {
        Notice::Lives { participants } => {
            for (who, life) in protocol::lives(&participants, descriptors)? {
                shared.roster().learn(who, life);
            }
        }
        Notice::Pool { pool } => shared.meet_pool(pool, only(descriptors)?),
        Notice::Piece { pool, number, length, name, ticket } => {
            let piece = Piece { memory: only(descriptors)?, length, name };
            shared.has_piece(pool, number as usize, piece);
            // Also where it cannot be used here: others must not wait for that.
            if say(operation, channel, &Request::Mapped { ticket }, &[]).is_err() {
                return Ok(Next::Lost);
            }
        }
        Notice::Grown { pool } => shared.has_grown(pool),
        Notice::Topic { request, number } => shared.has_topic(request, number, only(descriptors)?),
        Notice::Refused { request, why } => shared.is_refused(request, why),
        Notice::Rows { request, rows, is_last } => shared.has_rows(request, rows, is_last),
        Notice::SeenOff { why } => {
            shared.close(&why.into_error("stay at a node"));
            return Ok(Next::Over);
        }
        Notice::Left => return Ok(Next::Over),
        Notice::Welcome { .. } => {}
    }
    Ok(Next::Stay)
}

/// Finds the next service, or becomes it, and hands over all that is known here.
fn come_back(shared: &Shared) -> Result<Channel> {
    let end = Instant::now() + shared.options().patience;
    // One that leaves does not wait that long.
    let end = || shared.leaving_since().map_or(end, |since| end.min(since + LEAVING));
    loop {
        let channel = reach(RETURNING, shared.options(), shared.service(), end)?;
        match hand_over(shared, &channel) {
            Ok(()) => return Ok(channel),
            // It has ended, too.
            Err(error) if error.kind() == ErrorKind::Closed && Instant::now() < end() => {}
            Err(error) => return Err(error),
        }
    }
}

fn hand_over(shared: &Shared, channel: &Channel) -> Result<()> {
    let life = Life::of_this_process().map_err(|error| Error::of(RETURNING, error))?;
    let label = shared.options().label.clone();
    let again = Request::Again { label, participant: shared.me().number() };
    introduce(RETURNING, channel, &again, &[life.as_fd(), shared.hall().as_fd()])?;
    let say = |request: &Request, files: &[OwnedFd]| {
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        say(RETURNING, channel, request, &files)
    };
    let lives = shared.roster().lives().map_err(|error| Error::of(RETURNING, error))?;
    let known: Vec<_> =
        lives.into_iter().filter(|(who, _)| !shared.roster().is_dead(Some(*who))).collect();
    for some in known.chunks(LIVES_AT_ONCE) {
        let participants = some.iter().map(|(who, _)| who.number()).collect();
        let files: Vec<_> = some.iter().map(|(_, life)| life.as_fd()).collect();
        let lives = protocol::encode(&Request::Lives { participants });
        channel.send(&lives, &files, TAKING).map_err(|error| of_channel(RETURNING, error))?;
    }
    let belongings = shared.belongings()?;
    for (pool, books, pieces) in belongings.pools {
        say(&Request::Pool { pool }, &[books])?;
        let mut first = 0;
        let mut pieces = pieces.into_iter().peekable();
        while pieces.peek().is_some() {
            let some = pieces.by_ref().take(PIECES_AT_ONCE);
            let (files, pieces): (Vec<_>, Vec<_>) =
                some.map(|piece| (piece.memory, (piece.length, piece.name))).unzip();
            let count = pieces.len() as u32;
            say(&Request::Pieces { pool, first, pieces }, &files)?;
            first += count;
        }
    }
    for (number, segment) in belongings.topics {
        say(&Request::Topic { number }, &[segment])?;
    }
    say(&Request::Returned, &[])?;
    for request in belongings.unanswered {
        say(&request, &[])?;
    }
    Ok(())
}
