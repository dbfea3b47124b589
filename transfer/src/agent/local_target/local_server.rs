//! The thread that serves an agent's socket: admits local initiators, and sends them region
//! exports.
//!
//! The server is independent of the thread that owns the agent, which may compute for minutes.
//! Initiators are served in turn, with deadlines, and all they send is validated.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ipc::{Channel, ChannelError, ChannelListener, Message, PidFd};
use threads::lock;

use super::initiators::InitiatorKind;
use super::{LocalInitiator, LocalTarget};
use crate::agent::agent_files;
use crate::agent::card_file::CardFile;
use crate::agent::local_protocol::{MAX_PIECES_PER_MESSAGE, Pieces, Reply, Request};
use crate::agent::session_segment::TargetSegment;
use crate::agent::{AgentCard, START};
use crate::error::{Error, ErrorKind, failed};
use crate::refusal::Refusal;
use crate::region::RegionDescriptor;
use crate::remaining;
use crate::socket_server::{Handler, MAX_CONNECTIONS, SocketServer};
use crate::wire::malformed;

/// Maximum of local initiators, including disconnected ones that may still use a region.
const MAX_LOCAL_INITIATORS: usize = if cfg!(test) { 16 } else { 1024 };
const HELLO_TIMEOUT: Duration = Duration::from_secs(2);
/// How long an initiator may take to receive a message before it is disconnected.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);
/// How long an initiator may take to receive a reply of several messages: others wait meanwhile.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a wait checks whether the agent has ended.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The socket of an agent, its card file, and its thread.
#[derive(Debug)]
pub(in crate::agent) struct LocalServer {
    socket: PathBuf,
    _card_file: CardFile,
    thread: JoinHandle<()>,
}

impl LocalServer {
    pub(in crate::agent) fn start(
        directory: &Path,
        local_target: &Arc<LocalTarget>,
        card: AgentCard,
    ) -> Result<Self, Error> {
        let socket = agent_files::socket_of(directory, local_target.identity);
        let mode = local_target.admission.mode();
        // Before the socket: readers of a card wait for the socket, and no process sees a socket
        // without its card.
        let card = AgentCard { socket: Some(socket.clone()), ..card };
        let _card_file = CardFile::create(&socket, &card.encode()?, mode)?;
        let listener = ChannelListener::bind_with_mode(&socket, mode)
            .map_err(|error| Error::of_listening_at(START, &socket, error))?;
        let thread_target = Arc::clone(local_target);
        let serve = move || serve(&listener, &thread_target);
        let thread = threads::spawn("fabricast-agent", serve).map_err(failed(START))?;
        Ok(Self { socket, _card_file, thread })
    }

    pub(in crate::agent) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Removes the card, and returns the thread, which ends with the agent.
    pub(in crate::agent) fn remove_card(self) -> JoinHandle<()> {
        self.thread
    }
}

fn serve(listener: &ChannelListener, local_target: &Arc<LocalTarget>) {
    let LocalTarget { admission, is_over, .. } = &**local_target;
    let denial = refusal(ErrorKind::Denied, "the agent does not admit this user");
    let (max_per_user, register_timeout) = (MAX_CONNECTIONS, HELLO_TIMEOUT);
    let server =
        SocketServer { listener, admission, is_over, max_per_user, register_timeout, denial };
    server.serve(&mut Requests(local_target));
}

struct Requests<'a>(&'a Arc<LocalTarget>);

impl Handler for Requests<'_> {
    type Client = Arc<LocalInitiator>;

    fn handle(&mut self, channel: &Channel, initiator: &mut Option<Arc<LocalInitiator>>) -> bool {
        let message = match channel.receive(Duration::ZERO) {
            Ok(message) => message,
            Err(ChannelError::DeadlineExceeded { .. }) => return true,
            Err(ChannelError::Closed) => return false,
            Err(error) => {
                refuse(channel, ErrorKind::Malformed, error.to_string());
                return false;
            }
        };
        if let Some(initiator) = initiator {
            return handle_request(self.0, initiator, channel, &message);
        }
        match admit(self.0, channel, message) {
            Ok(admitted) => {
                self.0.add_initiator(Arc::clone(&admitted));
                *initiator = Some(admitted);
                true
            }
            Err(error) => {
                refuse(channel, error.kind(), error.to_string());
                false
            }
        }
    }

    fn disconnected(&mut self, initiator: Arc<LocalInitiator>) {
        self.0.initiator_disconnected(initiator);
    }
}

fn admit(
    local_target: &LocalTarget,
    channel: &Channel,
    message: Message,
) -> Result<Arc<LocalInitiator>, Error> {
    let operation = "accept local initiator";
    local_target.remove_departed();
    if lock(&local_target.initiators).len() >= MAX_LOCAL_INITIATORS {
        let detail = format!("the agent has {MAX_LOCAL_INITIATORS} local initiators, the maximum");
        return Err(failed(operation)(detail));
    }
    let (introduction, pidfd, is_copy_service) = Request::read_hello(message)?;
    let pidfd =
        PidFd::of_peer(channel, pidfd).map_err(|error| malformed(operation, error.to_string()))?;
    let local_session = TargetSegment::create()?;
    let welcome = Reply::Welcome(local_target.introduction()).encode();
    let (region_table, doorbell) = local_target.shared_files().map_err(failed(operation))?;
    let descriptors = [local_target.pidfd(), region_table.as_fd(), doorbell, local_session.as_fd()];
    send(local_target, channel, &welcome, &descriptors, ipc::deadline(SEND_TIMEOUT))
        .map_err(failed(operation))?;
    let kind = match is_copy_service {
        true => InitiatorKind::CopyService,
        false => InitiatorKind::OtherProcess,
    };
    Ok(Arc::new(LocalInitiator::new(introduction, pidfd, local_session, kind)))
}

fn refusal(kind: ErrorKind, cause: impl Into<String>) -> Vec<u8> {
    Reply::Refused(Refusal::new(kind, cause)).encode()
}

fn refuse(channel: &Channel, kind: ErrorKind, cause: impl Into<String>) {
    // A full socket loses the refusal; the connection is closed anyway.
    let _ = channel.send(&refusal(kind, cause), &[], Duration::ZERO);
}

/// Sends a message until the deadline, unless the agent ends.
fn send(
    local_target: &LocalTarget,
    channel: &Channel,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
    end: Instant,
) -> Result<(), ChannelError> {
    loop {
        let sent = channel.send(bytes, descriptors, remaining(end).min(STOP_CHECK_INTERVAL));
        let is_crowded = matches!(
            sent,
            Err(ChannelError::DeadlineExceeded { .. } | ChannelError::TooManyDescriptorsInFlight)
        );
        if !is_crowded || local_target.is_over() || remaining(end).is_zero() {
            return sent;
        }
    }
}

/// Answers a request. False if the initiator is to be disconnected.
fn handle_request(
    local_target: &Arc<LocalTarget>,
    initiator: &LocalInitiator,
    channel: &Channel,
    message: &Message,
) -> bool {
    let request = match Request::read(&message.bytes) {
        Ok(request) => request,
        Err(error) => {
            refuse(channel, error.kind(), error.to_string());
            return false;
        }
    };
    let (Request::Describe(number, ticket)
    | Request::Open(number, ticket)
    | Request::OpenStaged(number, ticket)) = request
    else {
        return false;
    };
    let Some(region) = local_target.region(number, ticket) else {
        let refused = refusal(ErrorKind::Stale, "the region was withdrawn or never existed");
        return send(local_target, channel, &refused, &[], ipc::deadline(SEND_TIMEOUT)).is_ok();
    };
    if matches!(request, Request::Describe(..)) {
        let described = RegionDescriptor { keys: Vec::new(), ..region.descriptor.clone() }.encode();
        let reply = described.map_or_else(
            |error| refusal(ErrorKind::Failed, error.to_string()),
            |bytes| Reply::Described(bytes).encode(),
        );
        return send(local_target, channel, &reply, &[], ipc::deadline(SEND_TIMEOUT)).is_ok();
    }
    if matches!(request, Request::OpenStaged(..)) {
        let end = ipc::deadline(SEND_TIMEOUT);
        return match local_target.open_staged(initiator, &region) {
            Ok(files) => {
                let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
                send(local_target, channel, &Reply::Staged.encode(), &files, end).is_ok()
            }
            Err(error) => {
                let refused = refusal(error.kind(), error.reason());
                send(local_target, channel, &refused, &[], end).is_ok()
            }
        };
    }
    initiator.record_opened(&region);
    let reply_end = ipc::deadline(REPLY_TIMEOUT);
    let RegionDescriptor { pieces: total, rights, .. } = region.descriptor;
    let bytes = region.buffer.exported_bytes();
    let mut first = 0;
    loop {
        // A few at a time: the number of descriptors of a process is limited.
        let end = total.min(first + MAX_PIECES_PER_MESSAGE as u32);
        let exported: Result<Vec<_>, _> =
            (first..end).map(|piece| region.buffer.export(piece, rights)).collect();
        let (descriptors, lengths): (Vec<_>, Vec<_>) = match exported {
            Ok(exported) => exported.into_iter().unzip(),
            Err(error) => {
                let refused = refusal(ErrorKind::Failed, error.to_string());
                let message_end = ipc::deadline(SEND_TIMEOUT);
                return send(local_target, channel, &refused, &[], message_end).is_ok();
            }
        };
        let reply = Reply::Pieces(Pieces { number, total, first, bytes, lengths }).encode();
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let message_end = reply_end.min(ipc::deadline(SEND_TIMEOUT));
        if send(local_target, channel, &reply, &borrowed, message_end).is_err() {
            return false;
        }
        first = end;
        if first >= total {
            return true;
        }
    }
}

#[cfg(test)]
mod tests;
