//! The thread that keeps a process a member of its node: hears what the service says, and
//! finds, or becomes, another service when it ends.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ipc::{Channel, ChannelError, Liveness, Message, PidFd};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::connector::{HandshakeResult, ServiceConnector};
use super::membership::{Answer, MembershipState};
use super::options::ServiceMode;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::Piece;
use crate::service::ServiceProcess;
use crate::service::protocol::{self, MAX_PIDFDS_PER_MESSAGE, Notice, Request};

/// How long the service may take to take what is said to it.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a process that leaves waits for its service to say that it may, and for another service
/// where there is none.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);
/// The same where the service is stopped, which may be for a moment only.
const STOPPED_SERVICE_LEAVE_TIMEOUT: Duration = Duration::from_millis(500);
/// Between two attempts to come back to a service that cannot take this process now, or to take a
/// lock that another one holds.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause before this process comes back that lacks descriptors. It is twice as long each
/// time, and short again once the connection lasted that long.
const MAX_DESCRIPTOR_BACKOFF: Duration = Duration::from_secs(5);
/// The longest sleep.
const MAX_SLEEP: Duration = Duration::from_secs(5);
/// How often the service is told of those that wait.
const BLOCKED_REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Between two looks how far streams are that hold or write messages.
const STREAM_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Between two attempts of a process that is there to serve to get the office.
const TAKE_OVER_INTERVAL: Duration = Duration::from_secs(1);
/// Pieces of a pool in one message.
const MAX_PIECES_PER_MESSAGE: usize = 32;

const REJOINING: &str = "rejoin a node after its service exited";

pub(super) fn send_request(
    operation: &'static str,
    channel: &Channel,
    request: &Request,
    files: &[BorrowedFd<'_>],
) -> Result<()> {
    channel
        .send(&protocol::encode(request), files, SEND_TIMEOUT)
        .map_err(|error| channel_error(operation, error))
}

pub(super) fn channel_error(operation: &'static str, error: ChannelError) -> Error {
    let kind = match &error {
        ChannelError::Closed => ErrorKind::Closed,
        ChannelError::TooManyDescriptorsInFlight | ChannelError::DescriptorsLost { .. } => {
            ErrorKind::TooMany
        }
        ChannelError::DeadlineExceeded { .. } => ErrorKind::DeadlineExceeded,
        _ => ErrorKind::Failed,
    };
    Error::because(operation, kind, error)
}

/// What is to become of the link.
enum Next {
    Continue,
    /// The service is gone.
    Lost,
    /// It cannot keep this process now.
    Refused,
    /// This process may not have as many descriptors as were sent to it.
    OutOfDescriptors,
    /// This process has left, or the node is closed to it.
    Ended,
}

/// A connection to a service.
pub(super) struct Link {
    pub(super) channel: Channel,
    /// Over when the service is, also if its connections outlive it in a child.
    pub(super) service: PidFd,
}

/// What was said to a service already.
#[derive(Default)]
struct SentRequests {
    /// That this process leaves.
    leave_sent: bool,
    /// That it is to serve, and when.
    asked: Option<Instant>,
}

/// The pause before a process comes back that lacked descriptors at its last connections.
#[derive(Debug)]
struct DescriptorBackoff {
    pause: Duration,
    since: Instant,
}

impl DescriptorBackoff {
    fn new(now: Instant) -> Self {
        Self { pause: RETRY_PAUSE, since: now }
    }

    /// The connection is over: how long to wait before the next one.
    fn next(&mut self, now: Instant) -> Duration {
        if now.saturating_duration_since(self.since) >= self.pause + MAX_DESCRIPTOR_BACKOFF {
            self.pause = RETRY_PAUSE;
        }
        let pause = self.pause;
        (self.pause, self.since) = ((2 * pause).min(MAX_DESCRIPTOR_BACKOFF), now);
        pause
    }
}

/// Waits, but not as long as that once this process leaves.
fn pause(shared: &MembershipState, pause: Duration) {
    let end = Instant::now() + pause;
    while shared.leaving_since().is_none() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left.min(RETRY_PAUSE));
    }
}

/// Runs until the process has left.
pub(super) fn run(shared: &MembershipState, link: Link) {
    let mut link = Some(link);
    let mut sent = SentRequests::default();
    let mut descriptor_backoff = DescriptorBackoff::new(Instant::now());
    loop {
        let Some(open) = &link else {
            match rejoin(shared) {
                Ok(Some(back)) => link = Some(back),
                // There is nobody whom it would have to tell.
                Ok(None) => return,
                Err(error) => {
                    if shared.leaving_since().is_none() {
                        tracing::error!(%error, "this process is no longer a member of its node");
                    }
                    shared.close(&error);
                    return;
                }
            }
            sent = SentRequests::default();
            continue;
        };
        match run_once(shared, open, &mut sent) {
            Next::Continue => {}
            Next::Lost => link = None,
            Next::Refused => {
                link = None;
                std::thread::sleep(RETRY_PAUSE);
            }
            Next::OutOfDescriptors => {
                link = None;
                pause(shared, descriptor_backoff.next(Instant::now()));
            }
            Next::Ended => return,
        }
    }
}

/// One that is there to serve asks whoever serves for the office, as soon as it has the claim. Gives
/// when it is to be looked again, if at all.
fn request_take_over(
    shared: &MembershipState,
    channel: &Channel,
    sent: &mut SentRequests,
) -> Result<Option<Duration>> {
    let (options, own) = (&shared.options, &shared.service);
    if options.service != ServiceMode::Dedicated || shared.leaving_since().is_some() {
        return Ok(None);
    }
    let left = sent
        .asked
        .map_or(Duration::ZERO, |asked| TAKE_OVER_INTERVAL.saturating_sub(asked.elapsed()));
    if !left.is_zero() {
        return Ok(Some(left));
    }
    // First: one that could not go on lets go of the claim.
    let is_running = own.is_running();
    let has_claim = own.acquire_priority(REJOINING, options).unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot request the takeover of the node");
        false
    });
    if has_claim && is_running {
        return Ok(None);
    }
    sent.asked = Some(Instant::now());
    if has_claim {
        send_request("take over a node", channel, &Request::TakeOver, &[])?;
    }
    Ok(Some(TAKE_OVER_INTERVAL))
}

fn run_once(shared: &MembershipState, link: &Link, sent: &mut SentRequests) -> Next {
    let channel = &link.channel;
    let waiting = shared.report_blocked_topics(Instant::now(), BLOCKED_REPORT_INTERVAL);
    // Nobody says who is gone. The place of one may stay free for ever.
    shared.roster().drop_unused_pidfds();
    for request in shared.requests() {
        if send_request("send to the service", channel, &request, &[]).is_err() {
            return Next::Lost;
        }
    }
    let mut longest = waiting.map_or(MAX_SLEEP, |waiting| MAX_SLEEP.min(waiting));
    if shared.poll_streams() {
        longest = longest.min(STREAM_POLL_INTERVAL);
    }
    if shared.retry() {
        longest = longest.min(RETRY_PAUSE);
    }
    match request_take_over(shared, channel, sent) {
        Ok(next) => longest = next.map_or(longest, |next| longest.min(next)),
        Err(_) => return Next::Lost,
    }
    if let Some(since) = shared.leaving_since() {
        if !sent.leave_sent && send_request("leave a node", channel, &Request::Leave, &[]).is_err()
        {
            return Next::Lost;
        }
        sent.leave_sent = true;
        if leave_timed_out(shared, since.elapsed()) {
            return Next::Ended;
        }
        longest = longest.min(RETRY_PAUSE);
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
            Err(ChannelError::DeadlineExceeded { .. }) => return Next::Continue,
            Err(error @ ChannelError::DescriptorsLost { .. }) => {
                if handle_lost_descriptors(shared, error) {
                    continue;
                }
                return Next::OutOfDescriptors;
            }
            Err(_) => return Next::Lost,
        };
        match handle_notice(shared, channel, message) {
            Ok(Next::Continue) => {}
            Ok(other) => return other,
            Err(error) => {
                tracing::warn!(%error, "the service sent an invalid message");
                return Next::Lost;
            }
        }
    }
}

/// Is it time for a process that leaves to go without its service's answer? The service needs nothing of
/// it any more, and sees its end in any case.
fn leave_timed_out(shared: &MembershipState, waited: Duration) -> bool {
    if waited < STOPPED_SERVICE_LEAVE_TIMEOUT {
        return false;
    }
    let directory = &shared.options.directory;
    let service = ServiceProcess::of(directory).ok().flatten();
    let is_stopped = service.is_some_and(|service| service.is_stopped);
    if !is_stopped && waited < LEAVE_TIMEOUT {
        return false;
    }
    let reason = match service {
        Some(service) if is_stopped => format!("{service}, which serves it, is stopped"),
        Some(service) => {
            format!("{service}, which serves it, did not answer within {LEAVE_TIMEOUT:?}")
        }
        None => "no process serves it".to_owned(),
    };
    tracing::warn!(
        directory = %directory.display(),
        "left the node without an answer of its service: {reason}. Nothing is lost: what this process \
         leaves is cleaned up when a service runs again"
    );
    true
}

/// A message came without its descriptors, since this process may not have so many. True if it can
/// do without them: a topic is refused to what asked for it, and the life of another process is
/// watched by the service. What the service takes for known here it sends again to one that comes
/// back.
fn handle_lost_descriptors(shared: &MembershipState, error: ChannelError) -> bool {
    let operation = "receive from the service";
    let ChannelError::DescriptorsLost { bytes, .. } = &error else { return false };
    let notice = protocol::decode(operation, bytes);
    let error = channel_error(operation, error);
    match notice {
        Ok(Notice::Topic { request, number }) => {
            shared.on_topic_undelivered(request, number, error)
        }
        Ok(Notice::Pidfds { .. }) => {
            tracing::warn!(%error, "no pidfd of another process: this process cannot detect its exit");
        }
        _ => {
            shared.fail_all(&error);
            return false;
        }
    }
    true
}

/// Does what the service says.
fn handle_notice(shared: &MembershipState, channel: &Channel, message: Message) -> Result<Next> {
    let operation = "read a message of the service";
    let Message { bytes, descriptors } = message;
    let only = |descriptors: Vec<OwnedFd>| -> Result<OwnedFd> {
        let [one] = <[OwnedFd; 1]>::try_from(descriptors).map_err(|_| {
            let detail = "wrong number of descriptors";
            Error::new(operation, ErrorKind::Malformed, detail)
        })?;
        Ok(one)
    };
    match protocol::decode(operation, &bytes)? {
        Notice::Pidfds { participants } => {
            for (who, pidfd) in protocol::pidfds(&participants, descriptors)? {
                shared.roster().add_pidfd(who, pidfd);
            }
        }
        Notice::Pool { pool } => shared.on_pool(pool, only(descriptors)?),
        Notice::Piece { pool, number, length, name, ticket } => {
            let piece = Piece { memory: only(descriptors)?, length, name };
            shared.on_piece(pool, number as usize, piece);
            // Also where it cannot be used here: others must not wait for that.
            if send_request(operation, channel, &Request::AcknowledgePieces { ticket }, &[])
                .is_err()
            {
                return Ok(Next::Lost);
            }
        }
        Notice::PoolGrown { pool } => shared.on_pool_grown(pool),
        Notice::Topic { request, number } => shared.on_topic(request, number, only(descriptors)?),
        Notice::Refused { request, reason } => {
            let reason = reason.into_error("call the service of the node");
            shared.on_answer(request, Err(reason));
        }
        Notice::Rows { request, rows, is_last } => shared.on_rows(request, rows, is_last),
        Notice::Rejected { reason } => {
            let reason = reason.into_error("remain a member of a node");
            if !is_final(&reason) {
                return Ok(Next::Refused);
            }
            shared.close(&reason);
            return Ok(Next::Ended);
        }
        Notice::Left => {
            shared.has_left();
            return Ok(Next::Ended);
        }
        Notice::Admitted { request } => shared.on_answer(request, Ok(Answer::Admitted)),
        Notice::Welcome { .. } => {}
    }
    Ok(Next::Continue)
}

/// Is this what the service will say again, whenever it is asked?
fn is_final(reason: &Error) -> bool {
    use ErrorKind as Kind;
    matches!(
        reason.kind(),
        Kind::Closed
            | Kind::Denied
            | Kind::InvalidArgument
            | Kind::Malformed
            | Kind::VersionMismatch
    )
}

/// Finds the next service, or becomes it, and hands over all that is known here. None if this
/// process leaves, and nobody is there to be told.
fn rejoin(shared: &MembershipState) -> Result<Option<Link>> {
    let end = ipc::deadline(shared.options.service_timeout);
    let is_last_member = || shared.leaving_since().is_some() && !shared.has_other_members();
    // One that leaves does not wait that long, and does not begin to serve; it does not wait at all
    // if nobody is there who might, which may come to be so while it waits.
    let end = || match shared.leaving_since() {
        Some(since) if is_last_member() => since,
        Some(since) => end.min(since + LEAVE_TIMEOUT),
        None => end,
    };
    let connector = ServiceConnector {
        operation: REJOINING,
        options: &shared.options,
        own: &shared.service,
        end: &end,
        serves: &|| shared.leaving_since().is_none(),
        leaderless_since: Cell::new(None),
    };
    loop {
        if is_last_member() {
            return Ok(None);
        }
        let pidfd = PidFd::of_this_process().map_err(|error| Error::of(REJOINING, error));
        let attempt = pidfd.and_then(|pidfd| {
            let label = shared.options.label.clone();
            let again = Request::Rejoin { label, participant: shared.me.number() };
            let files = [pidfd.as_fd(), shared.node_segment.as_fd()];
            connector.handshake(|channel| send_request(REJOINING, channel, &again, &files))
        });
        let error = match attempt {
            Ok((channel, HandshakeResult::Welcome(welcome))) => {
                for (who, pidfd) in welcome.pidfds {
                    shared.roster().add_pidfd(who, pidfd);
                }
                match hand_over(shared, &channel) {
                    Ok(()) => return Ok(Some(Link { channel, service: welcome.service })),
                    // It has ended, too, or something is lacking just now.
                    Err(error) => error,
                }
            }
            Ok((_, HandshakeResult::Refused(reason))) if is_final(&reason) => return Err(reason),
            Ok((_, HandshakeResult::Refused(reason))) => reason,
            Err(error) => error,
        };
        if Instant::now() >= end() && !is_last_member() {
            return Err(error);
        }
        tracing::debug!(%error, "rejoining the node failed; retrying");
        std::thread::sleep(RETRY_PAUSE);
    }
}

fn hand_over(shared: &MembershipState, channel: &Channel) -> Result<()> {
    let send_request = |request: &Request, files: &[OwnedFd]| {
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        send_request(REJOINING, channel, request, &files)
    };
    let pidfds = shared.roster().pidfds().map_err(|error| Error::of(REJOINING, error))?;
    let known: Vec<_> =
        pidfds.into_iter().filter(|(who, _)| !shared.roster().is_dead(Some(*who))).collect();
    for some in known.chunks(MAX_PIDFDS_PER_MESSAGE) {
        let participants = some.iter().map(|(who, _)| who.number()).collect();
        let files: Vec<_> = some.iter().map(|(_, pidfd)| pidfd.as_fd()).collect();
        let pidfds = protocol::encode(&Request::Pidfds { participants });
        channel
            .send(&pidfds, &files, SEND_TIMEOUT)
            .map_err(|error| channel_error(REJOINING, error))?;
    }
    let handover_state = shared.handover_state()?;
    for (pool, control_segment, pieces) in handover_state.pools {
        send_request(&Request::Pool { pool }, &[control_segment])?;
        let mut first = 0;
        let mut pieces = pieces.into_iter().peekable();
        while pieces.peek().is_some() {
            let some = pieces.by_ref().take(MAX_PIECES_PER_MESSAGE);
            let (files, pieces): (Vec<_>, Vec<_>) =
                some.map(|piece| (piece.memory, (piece.length, piece.name))).unzip();
            let count = pieces.len() as u32;
            send_request(&Request::Pieces { pool, first, pieces }, &files)?;
            first += count;
        }
    }
    for (number, segment) in handover_state.topics {
        send_request(&Request::Topic { number }, &[segment])?;
    }
    send_request(&Request::RejoinDone, &[])?;
    for request in handover_state.unanswered {
        send_request(&request, &[])?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "link_tests.rs"]
mod tests;
