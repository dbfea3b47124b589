//! Connections before their first message, and the reasons of rejected connections and refused
//! requests, for clients and the log.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ipc::{Channel, ChannelError, ChannelListener, DescriptorLimit, LimitReached, Message};

use super::{POLL_INTERVAL, SERVING};
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::During;
use crate::log_limit::LogLimit;
use crate::service::connection::Connection;
use crate::service::protocol::{self, Notice, Refusal, Request};
use crate::wake::WakeFd;

pub(super) const RECEIVING: &str = "accept process";
pub(super) const MAX_PENDING_CLIENTS: usize = 64;
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection without a first message so far.
#[derive(Debug)]
pub(super) struct PendingClient {
    connection: Connection,
    /// Time of the connection, or of the last message that the client received.
    since: Instant,
}

/// Accepts and rejects connections; limits its log messages.
#[derive(Debug)]
pub(super) struct Admission {
    listener: ChannelListener,
    /// Lets it accept and reject a connection when no other descriptors are left.
    spare_descriptor: Option<OwnedFd>,
    /// The oldest first.
    pending_clients: Vec<PendingClient>,
    began: Instant,
    log_limit: LogLimit,
}

/// Names this process for the process at the other end.
fn service_for(connection: &Connection) -> String {
    let own = std::process::id();
    match connection.channel().credentials().is_ok_and(|it| it.process == Some(own)) {
        true => "this process, which also serves the node".to_owned(),
        false => format!("the node's service, process {own}"),
    }
}

/// The service has no descriptors left for another process.
pub(super) fn out_of_descriptors(connection: &Connection, limit: DescriptorLimit) -> Error {
    let detail = format!("{}: {limit}", service_for(connection));
    Error::new(RECEIVING, ErrorKind::TooMany, detail)
}

impl Admission {
    pub(super) fn new(listener: ChannelListener, bell: &WakeFd) -> Result<Self> {
        let spare_descriptor = bell.as_fd().try_clone_to_owned();
        Ok(Self {
            listener,
            spare_descriptor: Some(spare_descriptor.during(SERVING)?),
            pending_clients: Vec::new(),
            began: Instant::now(),
            log_limit: LogLimit::short(),
        })
    }

    pub(super) fn connections(&self) -> impl Iterator<Item = &Connection> {
        self.pending_clients.iter().map(|pending_client| &pending_client.connection)
    }

    /// Accepts the next connection. The bell is duplicated as a spare descriptor.
    pub(super) fn accept(&mut self, bell: &WakeFd) {
        match self.listener.accept(Duration::ZERO) {
            Ok(channel) => self.receive(channel),
            Err(ChannelError::DeadlineExceeded { .. }) => {}
            Err(ChannelError::System { cause, .. }) => match LimitReached::of(&cause) {
                Some(LimitReached::Descriptors(limit)) => self.refuse_next(limit, bell),
                _ => std::thread::sleep(POLL_INTERVAL),
            },
            Err(_) => std::thread::sleep(POLL_INTERVAL),
        }
    }

    /// Out of descriptors: uses the spare one to reject the next connection with a reason.
    fn refuse_next(&mut self, limit: DescriptorLimit, bell: &WakeFd) {
        drop(self.spare_descriptor.take());
        if let Ok(channel) = self.listener.accept(Duration::ZERO) {
            let mut connection = Connection::new(channel);
            let error = out_of_descriptors(&connection, limit);
            self.reject(&mut connection, &error);
        }
        self.spare_descriptor = bell.as_fd().try_clone_to_owned().ok();
        // Another thread may have taken it; wait until one is closed.
        if self.spare_descriptor.is_none() {
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    pub(super) fn receive(&mut self, channel: Channel) {
        let own = ipc::Credentials::of_this_process().user;
        let is_admitted = channel.credentials().is_ok_and(|it| it.user == own || it.user == 0);
        let mut connection = Connection::new(channel);
        if !is_admitted {
            let error = Error::new(RECEIVING, ErrorKind::Denied, "this user is not admitted");
            return self.reject(&mut connection, &error);
        }
        if self.pending_clients.len() >= MAX_PENDING_CLIENTS {
            // The oldest one has waited longest.
            let mut oldest = self.pending_clients.remove(0);
            let detail = "too many connections without a first message";
            let error = Error::new(RECEIVING, ErrorKind::TooMany, detail);
            self.reject(&mut oldest.connection, &error);
        }
        self.await_message(connection);
    }

    pub(super) fn await_message(&mut self, connection: Connection) {
        self.pending_clients.push(PendingClient { connection, since: Instant::now() });
    }

    /// All pending clients, for [`first_message`](Self::first_message) of each.
    pub(super) fn take_pending(&mut self) -> Vec<PendingClient> {
        std::mem::take(&mut self.pending_clients)
    }

    /// The first message of a client, if there is one; else it stays pending, or is dropped.
    pub(super) fn first_message(
        &mut self,
        mut client: PendingClient,
        is_ready: bool,
    ) -> Option<(Connection, Request, Vec<OwnedFd>)> {
        if !is_ready {
            if client.since.elapsed() < HELLO_TIMEOUT {
                self.pending_clients.push(client);
            }
            return None;
        }
        if client.connection.flush() {
            client.since = Instant::now();
        }
        let error = match client.connection.channel().receive(Duration::ZERO) {
            Ok(Message { bytes, descriptors }) => match protocol::decode(RECEIVING, &bytes) {
                Ok(request) => return Some((client.connection, request, descriptors)),
                Err(error) => Error::new(RECEIVING, error.kind(), error.to_string()),
            },
            Err(ChannelError::DeadlineExceeded { .. }) => {
                if !client.connection.is_broken() {
                    self.pending_clients.push(client);
                }
                return None;
            }
            Err(ChannelError::Closed) => return None,
            Err(ChannelError::DescriptorsLost { limit, .. }) => {
                out_of_descriptors(&client.connection, limit)
            }
            Err(error) => Error::new(RECEIVING, ErrorKind::Malformed, error.to_string()),
        };
        self.reject(&mut client.connection, &error);
        None
    }

    /// Removes the socket. Returns the connections that are left.
    pub(super) fn close(self) -> impl Iterator<Item = Connection> {
        drop(self.listener);
        self.pending_clients.into_iter().map(|pending_client| pending_client.connection)
    }

    fn allows_log(&mut self) -> bool {
        self.log_limit.allows(self.began.elapsed())
    }

    pub(super) fn reject(&mut self, connection: &mut Connection, error: &Error) {
        let reason = Refusal::of(error);
        if self.allows_log() {
            let process = connection.channel().credentials().ok().and_then(|it| it.process);
            tracing::info!(process, reason = reason.detail(), "a connection was rejected");
        }
        connection.send(&Notice::Rejected { reason }, Vec::new());
    }

    /// The reason of a failed request. A limit that was reached is the service's.
    pub(super) fn refusal(&mut self, connection: &Connection, error: &Error) -> Refusal {
        let Some(limit) = error.limit_reached() else { return Refusal::of(error) };
        if self.allows_log() {
            tracing::warn!(%limit, "a request was rejected: a limit of the service's process");
        }
        Refusal::new(error.kind(), limit.of_process(&service_for(connection)))
    }
}

impl AsFd for Admission {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}
