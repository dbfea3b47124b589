//! The membership thread: handles messages of the service, and finds, or becomes, another service
//! when it ends.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ipc::{Channel, ChannelError, Liveness, Message, PidFd};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use threads::RetryBackoff;

use super::connector::ServiceConnector;
use super::membership::Answer;
use super::{Link, MembershipState};
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::During;
use crate::node_options::ServiceMode;
use crate::pool::{Piece, PoolId};
use crate::service::ServiceProcess;
use crate::service::protocol::{self, MAX_PIDFDS_PER_MESSAGE, Notice, Refusal, Request};

/// How long the service may take to accept a message.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a leaving process waits for its service's answer, or for another service if there is
/// none.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a leaving process waits for a stopped service, which may be stopped only for a moment.
const STOPPED_SERVICE_LEAVE_TIMEOUT: Duration = Duration::from_millis(500);
/// Between two attempts to rejoin a service that cannot accept this process now, or to take a held
/// lock.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause before a process without free descriptors rejoins. Pauses double, and start
/// short again once a connection lasted that long.
const MAX_DESCRIPTOR_BACKOFF: Duration = Duration::from_secs(5);
const MAX_SLEEP: Duration = Duration::from_secs(5);
const BLOCKED_REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Between two polls of streams that hold or write messages.
const STREAM_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Between two attempts of a dedicated process to take over the node.
const TAKE_OVER_INTERVAL: Duration = Duration::from_secs(1);

const REJOINING: &str = "rejoin node";

pub(super) fn send_request(
    operation: &'static str,
    channel: &Channel,
    request: &Request,
    files: &[BorrowedFd<'_>],
) -> Result<()> {
    channel.send(&protocol::encode(request), files, SEND_TIMEOUT).during(operation)
}

/// What follows an iteration of the thread.
enum Next {
    Continue,
    /// The service has ended.
    Lost,
    /// The service cannot accept this process now.
    Refused,
    /// This process may not have as many descriptors as were sent to it.
    OutOfDescriptors,
    /// This process has left, or the node is closed for it.
    Ended,
}

#[derive(Default)]
struct SentRequests {
    leave_sent: bool,
    take_over_requested_at: Option<Instant>,
}

/// The pause before a process rejoins that lacked descriptors at its last connections.
#[derive(Debug)]
struct DescriptorBackoff {
    backoff: RetryBackoff,
    since: Instant,
}

impl DescriptorBackoff {
    fn new(now: Instant) -> Self {
        Self { backoff: RetryBackoff::new(RETRY_PAUSE, MAX_DESCRIPTOR_BACKOFF), since: now }
    }

    /// Called at the end of a connection: the pause before the next one.
    fn next(&mut self, now: Instant) -> Duration {
        let lasted = now.saturating_duration_since(self.since);
        self.since = now;
        let pause = self.backoff.next_pause();
        if lasted < pause + MAX_DESCRIPTOR_BACKOFF {
            return pause;
        }
        self.backoff.reset();
        self.backoff.next_pause()
    }
}

/// Waits, but ends soon once this process leaves.
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
pub(super) fn run(shared: &MembershipState, mut link: Link) {
    let mut sent = SentRequests::default();
    let mut descriptor_backoff = DescriptorBackoff::new(Instant::now());
    loop {
        match run_once(shared, &link, &mut sent) {
            Next::Continue => continue,
            Next::Ended => return,
            Next::Lost => drop(link),
            Next::Refused => {
                drop(link);
                std::thread::sleep(RETRY_PAUSE);
            }
            Next::OutOfDescriptors => {
                drop(link);
                pause(shared, descriptor_backoff.next(Instant::now()));
            }
        }
        link = match rejoin(shared) {
            Ok(Some(back)) => back,
            // No service is left to notify.
            Ok(None) => return,
            Err(error) => {
                if shared.leaving_since().is_none() {
                    tracing::error!(%error, "this process is no longer a member of its node");
                }
                return shared.close(&error);
            }
        };
        sent = SentRequests::default();
    }
}

/// A dedicated process requests the takeover from an embedded service, once it has priority.
/// Returns when to call this again, if at all.
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
        .take_over_requested_at
        .map_or(Duration::ZERO, |at| TAKE_OVER_INTERVAL.saturating_sub(at.elapsed()));
    if !left.is_zero() {
        return Ok(Some(left));
    }
    // First: a failed service releases its priority.
    let is_running = own.is_running();
    let has_priority = own.acquire_priority(REJOINING, options).unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot request the takeover of the node");
        false
    });
    if has_priority && is_running {
        return Ok(None);
    }
    sent.take_over_requested_at = Some(Instant::now());
    if has_priority {
        send_request("take over node", channel, &Request::TakeOver, &[])?;
    }
    Ok(Some(TAKE_OVER_INTERVAL))
}

fn run_once(shared: &MembershipState, link: &Link, sent: &mut SentRequests) -> Next {
    let channel = &link.channel;
    let waiting = shared.report_blocked_topics(Instant::now(), BLOCKED_REPORT_INTERVAL);
    // No message reports a death, and the slot of a dead process may stay free for ever.
    shared.participants().drop_unused_pidfds();
    for request in shared.requests() {
        if send_request("send to service of node", channel, &request, &[]).is_err() {
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
        if !sent.leave_sent && send_request("leave node", channel, &Request::Leave, &[]).is_err() {
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
    // Checked first: messages that the service sent before its end are still handled.
    let is_over = link.service.has_exited();
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

/// Returns true if a leaving process stops waiting for its service's answer. It has dropped all its
/// handles, and the service detects its exit in any case.
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
        Some(service) if is_stopped => format!("{service} is stopped"),
        Some(service) => format!("{service} did not answer within {LEAVE_TIMEOUT:?}"),
        None => "no process serves the node".to_owned(),
    };
    tracing::warn!(
        directory = %directory.display(),
        "left the node without an answer of its service: {reason}. Nothing is lost: a later \
         service reclaims what this process held"
    );
    true
}

/// A message lost its descriptors, since this process has reached its limit. True if it can
/// continue: the request for a topic fails, and the service watches other processes. Everything
/// else is sent again when this process rejoins.
fn handle_lost_descriptors(shared: &MembershipState, error: ChannelError) -> bool {
    let operation = "receive from service of node";
    let ChannelError::DescriptorsLost { bytes, .. } = &error else { return false };
    let notice = protocol::decode(operation, bytes);
    let error = error.during(operation);
    match notice {
        Ok(Notice::Topic { request, number }) => {
            shared.on_topic_undelivered(request, number, error)
        }
        Ok(Notice::Pidfds { .. }) => {
            tracing::warn!(
                %error,
                "no pidfd of another process: this process cannot detect its exit"
            );
        }
        _ => {
            shared.fail_all(&error);
            return false;
        }
    }
    true
}

fn handle_notice(shared: &MembershipState, channel: &Channel, message: Message) -> Result<Next> {
    let operation = "read message from service of node";
    let Message { bytes, descriptors } = message;
    let only =
        |descriptors| protocol::exactly(operation, descriptors).map(|[one]: [OwnedFd; 1]| one);
    match protocol::decode(operation, &bytes)? {
        Notice::Pidfds { participants } => {
            for (participant, pidfd) in protocol::pidfds(&participants, descriptors)? {
                shared.participants().add_pidfd(participant, pidfd);
            }
        }
        Notice::Pool { pool } => shared.on_pool(pool, only(descriptors)?),
        Notice::Piece { pool, number, length, name, ticket } => {
            let piece = Piece { memory: only(descriptors)?, length, name };
            shared.on_piece(pool, number as usize, piece);
            // Also if the piece is unusable here: other processes must not wait for it.
            if send_request(operation, channel, &Request::AcknowledgePieces { ticket }, &[])
                .is_err()
            {
                return Ok(Next::Lost);
            }
        }
        Notice::MakePiece { pool, number, length } => {
            let made = shared.make_piece(pool, number as usize, length);
            if send_made_piece(channel, pool, number, made).is_err() {
                return Ok(Next::Lost);
            }
        }
        Notice::PoolGrown { pool } => shared.on_pool_grown(pool),
        Notice::Topic { request, number } => shared.on_topic(request, number, only(descriptors)?),
        Notice::Refused { request, reason } => {
            let reason = reason.into_error("call service of node");
            shared.on_answer(request, Err(reason));
        }
        Notice::Rows { request, rows, is_last } => shared.on_rows(request, rows, is_last),
        Notice::Rejected { reason } => {
            let reason = reason.into_error("remain member of node");
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

/// Answers a [request](Notice::MakePiece) for a piece.
fn send_made_piece(
    channel: &Channel,
    pool: PoolId,
    number: u32,
    made: Result<Piece>,
) -> Result<()> {
    let operation = "send piece of pool";
    match made {
        Ok(Piece { memory, length, name }) => {
            let pieces = vec![(length, name)];
            let request = Request::Pieces { pool, first: number, pieces };
            send_request(operation, channel, &request, &[memory.as_fd()])
        }
        Err(error) => {
            let request = Request::PieceRefused { pool, reason: Refusal::of(&error) };
            send_request(operation, channel, &request, &[])
        }
    }
}

/// Returns true if the service would give the same answer again.
fn is_final(reason: &Error) -> bool {
    use ErrorKind::{Closed, Denied, InvalidArgument, Malformed, VersionMismatch};
    matches!(reason.kind(), Closed | Denied | InvalidArgument | Malformed | VersionMismatch)
}

/// Finds the next service, or becomes it, and returns all pools and topics to it. None if this
/// process leaves, and no other member is left.
fn rejoin(shared: &MembershipState) -> Result<Option<Link>> {
    let end = ipc::deadline(shared.options.service_timeout);
    let is_last_member = || shared.leaving_since().is_some() && !shared.has_other_members();
    // A leaving process waits less, and starts no service. Without other members, which may end
    // while it waits, it does not wait at all.
    let end = || match shared.leaving_since() {
        Some(since) if is_last_member() => since,
        Some(since) => end.min(since + LEAVE_TIMEOUT),
        None => end,
    };
    let serves = || shared.leaving_since().is_none();
    let (options, own) = (&shared.options, &shared.service);
    let connector = ServiceConnector::new(REJOINING, options, own, &end, &serves);
    loop {
        if is_last_member() {
            return Ok(None);
        }
        let attempt = PidFd::of_this_process().during(REJOINING).and_then(|pidfd| {
            let label = shared.options.label.clone();
            let again = Request::Rejoin { label, participant: shared.me.number() };
            let files = [pidfd.as_fd(), shared.node_segment.as_fd()];
            connector.handshake(|channel| send_request(REJOINING, channel, &again, &files))
        });
        let error = match attempt {
            Ok((channel, Ok(welcome))) => {
                for (participant, pidfd) in welcome.pidfds {
                    shared.participants().add_pidfd(participant, pidfd);
                }
                match hand_over(shared, &channel) {
                    Ok(()) => return Ok(Some(Link { channel, service: welcome.service })),
                    // That service has ended, too, or lacks a resource at the moment.
                    Err(error) => error,
                }
            }
            Ok((_, Err(reason))) if is_final(&reason) => return Err(reason),
            Ok((_, Err(error))) | Err(error) => error,
        };
        if Instant::now() >= end() && !is_last_member() {
            return Err(error);
        }
        tracing::debug!(%error, "rejoining the node failed; retrying");
        std::thread::sleep(RETRY_PAUSE);
    }
}

fn hand_over(shared: &MembershipState, channel: &Channel) -> Result<()> {
    let pidfds = shared.participants().pidfds().during(REJOINING)?;
    let known: Vec<_> =
        pidfds.into_iter().filter(|(it, _)| !shared.participants().is_dead(Some(*it))).collect();
    for some in known.chunks(MAX_PIDFDS_PER_MESSAGE) {
        let participants = some.iter().map(|(participant, _)| participant.number()).collect();
        let files: Vec<_> = some.iter().map(|(_, pidfd)| pidfd.as_fd()).collect();
        send_request(REJOINING, channel, &Request::Pidfds { participants }, &files)?;
    }
    for (request, files) in shared.handover_requests()? {
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        send_request(REJOINING, channel, &request, &files)?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "link_tests.rs"]
mod tests;
