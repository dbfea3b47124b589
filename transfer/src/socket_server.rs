//! The thread that serves a Unix socket: accepts connections, bounds their number, and hands each
//! message to a handler.
//!
//! One thread serves all connections in turn, and trusts none of them. An admitted user has a
//! bounded number of connections; when the bound is reached, its longest idle connection is closed.
//! [Registered clients] are not counted and not closed. A user that is not admitted receives a
//! refusal and is never counted.
//!
//! [Registered clients]: Handler::Client

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ipc::{Channel, ChannelError, ChannelListener};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::admission::Admission;

/// Connections without a registered client, at most.
pub(crate) const MAX_CONNECTIONS: usize = 64;
/// Refused connections that are kept open until the client has read why, at most.
const MAX_REFUSED: usize = 16;
/// How long a refused connection is kept open.
const REFUSED_LINGER: Duration = Duration::from_secs(1);
/// How often the thread checks whether it is to stop.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// What a server does with the messages of its connections.
pub(crate) trait Handler {
    /// State of a registered connection, which stays until it ends by itself.
    type Client;

    /// Handles a connection that is readable or at its end. False closes it.
    fn handle(&mut self, channel: &Channel, client: &mut Option<Self::Client>) -> bool;

    /// The connection of a registered client was closed.
    fn disconnected(&mut self, _client: Self::Client) {}
}

/// A socket and its rules of admission.
pub(crate) struct SocketServer<'a> {
    pub(crate) listener: &'a ChannelListener,
    pub(crate) admission: &'a Admission,
    pub(crate) is_over: &'a AtomicBool,
    /// Connections of one user at the same time, of [all](MAX_CONNECTIONS).
    pub(crate) max_per_user: usize,
    /// How long a connection may stay without registering.
    pub(crate) register_timeout: Duration,
    /// The reply to users that are not admitted.
    pub(crate) denial: Vec<u8>,
}

impl SocketServer<'_> {
    /// Serves until `is_over`.
    pub(crate) fn serve<H: Handler>(&self, handler: &mut H) {
        let mut connections = Connections::new();
        while !self.is_over.load(Ordering::Acquire) {
            connections.poll_once(self, handler);
        }
        connections.open.into_iter().for_each(|connection| connection.close(handler));
    }
}

/// An open connection of an admitted user.
struct Connection<C> {
    channel: Channel,
    user: u32,
    since: Instant,
    client: Option<C>,
}

impl<C> Connection<C> {
    fn close<H: Handler<Client = C>>(mut self, handler: &mut H) {
        let client = self.client.take();
        drop(self);
        if let Some(client) = client {
            handler.disconnected(client);
        }
    }
}

impl<C> Drop for Connection<C> {
    fn drop(&mut self) {
        self.channel.end();
    }
}

struct Connections<C> {
    /// In the order of their last message, the oldest first.
    open: Vec<Connection<C>>,
    /// Refused connections. A client whose request is unread at the close would see a reset before
    /// the reply, so each stays open for a moment.
    refused: VecDeque<(Channel, Instant)>,
    /// Accepting is paused until then, because the process ran out of descriptors.
    accept_paused_until: Instant,
    is_accept_failing: bool,
}

impl<C> Connections<C> {
    fn new() -> Self {
        Self {
            open: Vec::new(),
            refused: VecDeque::new(),
            accept_paused_until: Instant::now(),
            is_accept_failing: false,
        }
    }

    /// Waits for the next event, and handles all that are ready.
    fn poll_once<H: Handler<Client = C>>(&mut self, server: &SocketServer<'_>, handler: &mut H) {
        let is_accepting = Instant::now() >= self.accept_paused_until;
        let channels = self.open.iter().map(|connection| connection.channel.as_fd());
        let listening = is_accepting.then(|| server.listener.as_fd());
        let Some(is_ready) = ready(channels.chain(listening)) else {
            // For example out of memory: sleep instead of spinning.
            return std::thread::sleep(POLL_INTERVAL);
        };
        let has_incoming = is_accepting && is_ready.last() == Some(&true);
        let (readable, idle): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.open).into_iter().zip(is_ready).partition(|(_, ready)| *ready);
        self.open = idle.into_iter().map(|(connection, _)| connection).collect();
        self.expire(server.register_timeout);
        for (mut connection, _) in readable {
            match handler.handle(&connection.channel, &mut connection.client) {
                true => self.open.push(connection),
                false => connection.close(handler),
            }
        }
        if has_incoming {
            self.accept(server);
        }
    }

    fn accept(&mut self, server: &SocketServer<'_>) {
        let channel = match server.listener.accept(Duration::ZERO) {
            Ok(channel) => channel,
            Err(ChannelError::DeadlineExceeded { .. }) => return,
            Err(error) => {
                // Once, until a connection is accepted.
                if !std::mem::replace(&mut self.is_accept_failing, true) {
                    tracing::warn!(%error, "accept connection failed; it is retried");
                }
                self.accept_paused_until = Instant::now() + POLL_INTERVAL;
                return;
            }
        };
        self.is_accept_failing = false;
        match server.admission.admitted_user(&channel) {
            Some(user) => self.add(channel, user, server.max_per_user),
            None => self.refuse(channel, &server.denial),
        }
    }

    /// Adds a connection; at a limit, closes the one that is idle for longest.
    fn add(&mut self, channel: Channel, user: u32, max_per_user: usize) {
        let counted = || self.open.iter().enumerate().filter(|(_, it)| it.client.is_none());
        let of_user = || counted().filter(|(_, connection)| connection.user == user);
        let evicted = if of_user().count() >= max_per_user {
            of_user().next()
        } else {
            counted().next().filter(|_| counted().count() >= MAX_CONNECTIONS)
        };
        if let Some(index) = evicted.map(|(index, _)| index) {
            self.open.remove(index);
        }
        let since = Instant::now();
        self.open.push(Connection { channel, user, since, client: None });
    }

    fn refuse(&mut self, channel: Channel, reply: &[u8]) {
        if self.refused.len() >= MAX_REFUSED {
            self.refused.pop_front();
        }
        let _ = channel.send(reply, &[], Duration::ZERO);
        self.refused.push_back((channel, Instant::now() + REFUSED_LINGER));
    }

    fn expire(&mut self, register_timeout: Duration) {
        self.refused.retain(|(channel, end)| {
            let is_closed = matches!(channel.receive(Duration::ZERO), Err(ChannelError::Closed));
            !is_closed && Instant::now() < *end
        });
        self.open.retain(|connection| {
            connection.client.is_some() || connection.since.elapsed() < register_timeout
        });
    }
}

/// Which descriptors are readable or at their end? None if poll failed.
fn ready<'a>(descriptors: impl Iterator<Item = BorrowedFd<'a>>) -> Option<Vec<bool>> {
    let mut entries: Vec<_> =
        descriptors.map(|descriptor| PollFd::new(descriptor, PollFlags::POLLIN)).collect();
    let timeout = PollTimeout::try_from(POLL_INTERVAL).unwrap_or(PollTimeout::ZERO);
    match poll(&mut entries, timeout) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(_) => return None,
    }
    Some(entries.iter().map(|entry| entry.any().unwrap_or(true)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_closed(channel: &Channel) -> bool {
        matches!(channel.receive(Duration::ZERO), Err(ChannelError::Closed))
    }

    #[test]
    fn oldest_connection_of_the_user_is_evicted_first() {
        let mut connections = Connections::<()>::new();
        let mut of = |user, count| -> Vec<_> {
            let mut connect = || {
                let (here, there) = Channel::pair().unwrap();
                connections.add(here, user, 16);
                there
            };
            (0..count).map(|_| connect()).collect()
        };
        let mut all = of(1, 16);
        all.extend(of(2, 16));
        assert!(!all.iter().any(is_closed));
        // The first of user 2, though connections of user 1 are idle for longer.
        all.extend(of(2, 1));
        assert!(is_closed(&all.remove(16)));
        assert!(!all.iter().any(is_closed));
        all.extend(of(3, 16));
        all.extend(of(4, 16));
        assert!(!all.iter().any(is_closed));
        all.extend(of(5, 1));
        assert!(is_closed(&all.remove(0)));
        assert!(!all.iter().any(is_closed));
        // Registered clients stay, the others are closed after the timeout.
        connections.open[0].client = Some(());
        connections.expire(Duration::ZERO);
        assert!(!is_closed(&all.remove(0)));
        assert!(all.iter().all(is_closed));
    }

    #[test]
    fn refused_connections_are_bounded_and_get_a_reply() {
        let mut connections = Connections::<()>::new();
        let all: Vec<_> = (0..MAX_REFUSED + 4)
            .map(|_| {
                let (here, there) = Channel::pair().unwrap();
                connections.refuse(here, b"no");
                there
            })
            .collect();
        assert_eq!(connections.refused.len(), MAX_REFUSED);
        assert!(all.iter().all(|channel| channel.receive(REFUSED_LINGER).unwrap().bytes == b"no"));
        drop(all);
        connections.expire(Duration::MAX);
        assert!(connections.refused.is_empty());
    }
}
