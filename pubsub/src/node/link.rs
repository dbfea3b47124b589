//! The thread that keeps a process a member of its node: hears what the service says, and
//! finds, or becomes, another service when it ends.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ipc::{Channel, ChannelError, Fate, Life, Message};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::attendance::{Answer, Shared};
use super::line::{Answered, Coming};
use super::options::ServiceMode;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::Piece;
use crate::service::ServiceProcess;
use crate::service::protocol::{self, LIVES_AT_ONCE, Notice, Request};

/// How long the service may take to take what is said to it.
const TAKING: Duration = Duration::from_secs(10);
/// How long a process that leaves waits for its service to say that it may, and for another service
/// where there is none.
const LEAVING: Duration = Duration::from_secs(5);
/// The same where the service is stopped, which may be for a moment only.
const LEAVING_A_STOPPED_ONE: Duration = Duration::from_millis(500);
/// Between two attempts to come back to a service that cannot take this process now, or to take a
/// lock that another one holds.
const AGAIN: Duration = Duration::from_millis(50);
/// The longest pause before this process comes back that lacks descriptors. It is twice as long each
/// time, and short again once the connection lasted that long.
const LACKING: Duration = Duration::from_secs(5);
/// The longest sleep.
const LONGEST: Duration = Duration::from_secs(5);
/// How often the service is told of those that wait.
const WAITING: Duration = Duration::from_secs(1);
/// Between two looks how far streams are that hold or write messages.
const TENDING: Duration = Duration::from_millis(2);
/// Between two attempts of a process that is there to serve to get the office.
const ASKING: Duration = Duration::from_secs(1);
/// Pieces of a pool in one message.
const PIECES_AT_ONCE: usize = 32;

const RETURNING: &str = "go on at a node whose service has ended";

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
        ChannelError::TooManyOnTheirWay | ChannelError::DescriptorsLost { .. } => {
            ErrorKind::TooMany
        }
        ChannelError::DeadlineExceeded { .. } => ErrorKind::DeadlineExceeded,
        _ => ErrorKind::Failed,
    };
    Error::because(operation, kind, error)
}

/// What is to become of the link.
enum Next {
    Stay,
    /// The service is gone.
    Lost,
    /// It cannot keep this process now.
    Refused,
    /// This process may not have as many descriptors as were sent to it.
    LacksDescriptors,
    /// This process has left, or the node is closed to it.
    Over,
}

/// A connection to a service.
pub(super) struct Link {
    pub(super) channel: Channel,
    /// Over when the service is, also if its connections outlive it in a child.
    pub(super) service: Life,
}

/// What was said to a service already.
#[derive(Default)]
struct Said {
    /// That this process leaves.
    leaves: bool,
    /// That it is to serve, and when.
    asked: Option<Instant>,
}

/// The pause before a process comes back that lacked descriptors at its last connections.
#[derive(Debug)]
struct Lack {
    pause: Duration,
    since: Instant,
}

impl Lack {
    fn new(now: Instant) -> Self {
        Self { pause: AGAIN, since: now }
    }

    /// The connection is over: how long to wait before the next one.
    fn next(&mut self, now: Instant) -> Duration {
        if now.saturating_duration_since(self.since) >= self.pause + LACKING {
            self.pause = AGAIN;
        }
        let pause = self.pause;
        (self.pause, self.since) = ((2 * pause).min(LACKING), now);
        pause
    }
}

/// Waits, but not as long as that once this process leaves.
fn pause(shared: &Shared, pause: Duration) {
    let end = Instant::now() + pause;
    while shared.leaving_since().is_none() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left.min(AGAIN));
    }
}

/// Runs until the process has left.
pub(super) fn run(shared: &Shared, link: Link) {
    let mut link = Some(link);
    let mut said = Said::default();
    let mut lack = Lack::new(Instant::now());
    loop {
        let Some(open) = &link else {
            match come_back(shared) {
                Ok(Some(back)) => link = Some(back),
                // There is nobody whom it would have to tell.
                Ok(None) => return,
                Err(error) => {
                    if shared.leaving_since().is_none() {
                        tracing::error!(%error, "this process is not at its node any more");
                    }
                    shared.close(&error);
                    return;
                }
            }
            said = Said::default();
            continue;
        };
        match turn(shared, open, &mut said) {
            Next::Stay => {}
            Next::Lost => link = None,
            Next::Refused => {
                link = None;
                std::thread::sleep(AGAIN);
            }
            Next::LacksDescriptors => {
                link = None;
                pause(shared, lack.next(Instant::now()));
            }
            Next::Over => return,
        }
    }
}

/// One that is there to serve asks whoever serves for the office, as soon as it has the claim. Gives
/// when it is to be looked again, if at all.
fn ask_for_office(shared: &Shared, channel: &Channel, said: &mut Said) -> Result<Option<Duration>> {
    let (options, own) = (&shared.options, &shared.service);
    if options.service != ServiceMode::Standing || shared.leaving_since().is_some() {
        return Ok(None);
    }
    let left = said.asked.map_or(Duration::ZERO, |asked| ASKING.saturating_sub(asked.elapsed()));
    if !left.is_zero() {
        return Ok(Some(left));
    }
    // First: one that could not go on lets go of the claim.
    let is_running = own.is_running();
    let has_claim = own.claims(RETURNING, options).unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot say that this process is there to serve");
        false
    });
    if has_claim && is_running {
        return Ok(None);
    }
    said.asked = Some(Instant::now());
    if has_claim {
        say("take a node over", channel, &Request::TakeOver, &[])?;
    }
    Ok(Some(ASKING))
}

fn turn(shared: &Shared, link: &Link, said: &mut Said) -> Next {
    let channel = &link.channel;
    let waiting = shared.say_who_waits(Instant::now(), WAITING);
    // Nobody says who is gone. The place of one may stay free for ever.
    shared.roster().forget_the_gone();
    for request in shared.requests() {
        if say("speak to the service", channel, &request, &[]).is_err() {
            return Next::Lost;
        }
    }
    let mut longest = waiting.map_or(LONGEST, |waiting| LONGEST.min(waiting));
    if shared.tend() {
        longest = longest.min(TENDING);
    }
    if shared.retry() {
        longest = longest.min(AGAIN);
    }
    match ask_for_office(shared, channel, said) {
        Ok(next) => longest = next.map_or(longest, |next| longest.min(next)),
        Err(_) => return Next::Lost,
    }
    if let Some(since) = shared.leaving_since() {
        if !said.leaves && say("leave a node", channel, &Request::Leave, &[]).is_err() {
            return Next::Lost;
        }
        said.leaves = true;
        if leaves_unanswered(shared, since.elapsed()) {
            return Next::Over;
        }
        longest = longest.min(AGAIN);
    }
    let mut entries = [channel.as_fd(), shared.bell.as_fd(), link.service.as_fd()]
        .map(|descriptor| PollFd::new(descriptor, PollFlags::POLLIN));
    let _ = poll(&mut entries, PollTimeout::try_from(longest).unwrap_or(PollTimeout::ZERO));
    shared.bell.silence();
    // Looked at first: what it said before its end is heard all the same.
    let is_over = link.service.is_over();
    loop {
        let message = match channel.receive(Duration::ZERO) {
            Ok(message) => message,
            Err(ChannelError::DeadlineExceeded { .. }) if is_over => return Next::Lost,
            Err(ChannelError::DeadlineExceeded { .. }) => return Next::Stay,
            Err(error @ ChannelError::DescriptorsLost { .. }) => {
                if has_lost(shared, error) {
                    continue;
                }
                return Next::LacksDescriptors;
            }
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

/// Is it time for a process that leaves to go without its service's answer? The service needs nothing of
/// it any more, and sees its end in any case.
fn leaves_unanswered(shared: &Shared, waited: Duration) -> bool {
    if waited < LEAVING_A_STOPPED_ONE {
        return false;
    }
    let directory = &shared.options.directory;
    let service = ServiceProcess::of(directory).ok().flatten();
    let is_stopped = service.is_some_and(|service| service.is_stopped);
    if !is_stopped && waited < LEAVING {
        return false;
    }
    let why = match service {
        Some(service) if is_stopped => format!("{service}, which serves it, is stopped"),
        Some(service) => format!("{service}, which serves it, did not answer within {LEAVING:?}"),
        None => "no process serves it".to_owned(),
    };
    tracing::warn!(
        directory = %directory.display(),
        "left the node without an answer of its service: {why}. Nothing is lost: what this process \
         leaves is cleaned up when a service runs again"
    );
    true
}

/// A message came without its descriptors, since this process may not have so many. True if it can
/// do without them: a topic is refused to what asked for it, and the life of another process is
/// watched by the service. What the service takes for known here it sends again to one that comes
/// back.
fn has_lost(shared: &Shared, error: ChannelError) -> bool {
    let operation = "receive from the service of the node";
    let ChannelError::DescriptorsLost { bytes, .. } = &error else { return false };
    let notice = protocol::decode(operation, bytes);
    let error = of_channel(operation, error);
    match notice {
        Ok(Notice::Topic { request, number }) => shared.has_no_topic(request, number, error),
        Ok(Notice::Lives { .. }) => {
            tracing::warn!(%error, "this process does not see by itself whether another one ends");
        }
        _ => {
            shared.fail_all(&error);
            return false;
        }
    }
    true
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
        Notice::Refused { request, why } => {
            let why = why.into_error("ask the service of the node");
            shared.is_answered(request, Err(why));
        }
        Notice::Rows { request, rows, is_last } => shared.has_rows(request, rows, is_last),
        Notice::SeenOff { why } => {
            let why = why.into_error("stay at a node");
            if !is_final(&why) {
                return Ok(Next::Refused);
            }
            shared.close(&why);
            return Ok(Next::Over);
        }
        Notice::Left => {
            shared.has_left();
            return Ok(Next::Over);
        }
        Notice::Admitted { request } => shared.is_answered(request, Ok(Answer::Admitted)),
        Notice::Welcome { .. } => {}
    }
    Ok(Next::Stay)
}

/// Is this what the service will say again, whenever it is asked?
fn is_final(why: &Error) -> bool {
    use ErrorKind as Kind;
    matches!(
        why.kind(),
        Kind::Closed
            | Kind::Denied
            | Kind::InvalidArgument
            | Kind::Malformed
            | Kind::VersionMismatch
    )
}

/// Finds the next service, or becomes it, and hands over all that is known here. None if this
/// process leaves, and nobody is there to be told.
fn come_back(shared: &Shared) -> Result<Option<Link>> {
    let end = ipc::deadline(shared.options.patience);
    let is_left_alone = || shared.leaving_since().is_some() && !shared.has_company();
    // One that leaves does not wait that long, and does not begin to serve; it does not wait at all
    // if nobody is there who might, which may come to be so while it waits.
    let end = || match shared.leaving_since() {
        Some(since) if is_left_alone() => since,
        Some(since) => end.min(since + LEAVING),
        None => end,
    };
    let coming = Coming {
        operation: RETURNING,
        options: &shared.options,
        own: &shared.service,
        end: &end,
        serves: &|| shared.leaving_since().is_none(),
        vacant_since: Cell::new(None),
    };
    loop {
        if is_left_alone() {
            return Ok(None);
        }
        let life = Life::of_this_process().map_err(|error| Error::of(RETURNING, error));
        let attempt = life.and_then(|life| {
            let label = shared.options.label.clone();
            let again = Request::Again { label, participant: shared.me.number() };
            let files = [life.as_fd(), shared.hall.as_fd()];
            coming.come_in(|channel| say(RETURNING, channel, &again, &files))
        });
        let error = match attempt {
            Ok((channel, Answered::Welcome(welcome))) => {
                for (who, life) in welcome.lives {
                    shared.roster().learn(who, life);
                }
                match hand_over(shared, &channel) {
                    Ok(()) => return Ok(Some(Link { channel, service: welcome.service })),
                    // It has ended, too, or something is lacking just now.
                    Err(error) => error,
                }
            }
            Ok((_, Answered::Refused(why))) if is_final(&why) => return Err(why),
            Ok((_, Answered::Refused(why))) => why,
            Err(error) => error,
        };
        if Instant::now() >= end() && !is_left_alone() {
            return Err(error);
        }
        tracing::debug!(%error, "cannot come back yet");
        std::thread::sleep(AGAIN);
    }
}

fn hand_over(shared: &Shared, channel: &Channel) -> Result<()> {
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

#[cfg(test)]
#[path = "link_tests.rs"]
mod tests;
