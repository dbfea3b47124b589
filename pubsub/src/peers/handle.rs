//! The handle of a node service for its peers.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use ipc::ForkGeneration;
use threads::lock;

use super::event_loop::PeerEventLoop;
use super::event_queue::PeerEventQueue;
use super::identity::{MAX_LABEL_LENGTH, SessionId};
use super::interests::{Interest, collect_interests};
use super::listener::listen;
use super::mesh::{Mesh, PeerReport};
use super::peer_event::PeerEvent;
use super::protocol_limits::MIN_LOST_AFTER;
use super::{Hello, Limits, Peers, ServiceInstance, Shared, Timing, resolver};
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::During;
use crate::ids::NodeId;
use crate::network_options::NetworkOptions;
use crate::wake::WakeFd;

const START: &str = "start peer discovery";

/// The risk of connected nodes.
const INSECURE: &str = "nodes are not authenticated and nothing is encrypted yet: \
                        any process that can connect reads and publishes in all topics; \
                        on loopback, each user of the machine";

impl NetworkOptions {
    /// Refuses invalid addresses, and any address without [`insecure`](Self::insecure), as
    /// [`Node::join`](crate::Node::join) does.
    ///
    /// `label` is the label of the service, if the node has no name.
    ///
    /// # Errors
    /// Of the kind [`InvalidArgument`](crate::ErrorKind::InvalidArgument), with what is invalid.
    ///
    /// ```
    /// use pubsub::{ErrorKind, NetworkOptions};
    /// let listen = Some("127.0.0.1:7007".parse()?);
    /// let mut network = NetworkOptions { listen, ..NetworkOptions::default() };
    /// assert_eq!(network.check("camera").unwrap_err().kind(), ErrorKind::InvalidArgument);
    /// network.insecure = true;
    /// assert!(network.check("camera").is_ok());
    /// # Ok::<(), std::net::AddrParseError>(())
    /// ```
    pub fn check(&self, label: &str) -> Result<()> {
        self.policy()?;
        self.check_connections(self.name(label))
    }

    /// Checks all but the provider, for a node of this name. Any other node needs
    /// [`insecure`](Self::insecure).
    fn check_connections(&self, label: &str) -> Result<()> {
        let refuse = |detail: String| Err(Error::new(START, ErrorKind::InvalidArgument, detail));
        if label.len() > MAX_LABEL_LENGTH || label.chars().any(char::is_control) {
            return refuse(format!(
                "a label has at most {MAX_LABEL_LENGTH} bytes and no control characters: \"{}\"",
                label.escape_debug()
            ));
        }
        let (lost_after, longest) = (self.lost_after, Duration::from_secs(3600));
        if lost_after < Duration::from_millis(MIN_LOST_AFTER.into()) || lost_after > longest {
            return refuse(format!(
                "lost_after {lost_after:?} is outside of {MIN_LOST_AFTER} ms to {longest:?}"
            ));
        }
        for address in self.peers.iter().chain(&self.rendezvous) {
            resolver::check(START, address)?;
        }
        match self.first_address() {
            Some(address) if !self.insecure => refuse(format!(
                "{address}: {INSECURE}. Set insecure (FABRICAST_INSECURE) to accept this"
            )),
            _ => Ok(()),
        }
    }

    /// The first address at which this node would listen, or that it would dial.
    #[must_use]
    pub fn first_address(&self) -> Option<String> {
        let dialled = self.peers.iter().chain(&self.rendezvous).cloned();
        self.listen.map(|address| address.to_string()).into_iter().chain(dialled).next()
    }

    /// Logs the risk of other nodes, if any are allowed.
    pub(crate) fn warn_if_insecure(&self) {
        if let Some(address) = self.first_address().filter(|_| self.insecure) {
            tracing::warn!(address, "insecure: {INSECURE}");
        }
    }
}

impl Peers {
    /// Starts to listen and to dial. The caller logs the [insecurity
    /// warning](NetworkOptions::warn_if_insecure), once.
    ///
    /// No interests are sent before they are [set](Self::set_interests), not even that there are
    /// none. A node gets them only after [`announce_interests`](Self::announce_interests), so that
    /// control messages can be sent first.
    pub(crate) fn start(network: &NetworkOptions, identity: NodeId, label: &str) -> Result<Self> {
        Self::start_with(network, identity, label, Limits::default(), true)
    }

    pub(super) fn start_with(
        network: &NetworkOptions,
        identity: NodeId,
        label: &str,
        limits: Limits,
        withholds_interests: bool,
    ) -> Result<Self> {
        let label = network.name(label);
        network.check_connections(label)?;
        let listener = network.listen.map(listen).transpose()?;
        let listens = listener.as_ref().map(TcpListener::local_addr).transpose().during(START)?;
        let instance = ServiceInstance::new(getrandom::u64().during(START)?);
        let me = Hello::new(identity, instance, label, listens, network);
        let mesh = Mesh::new(me, network, limits, withholds_interests, Duration::ZERO);
        let shared = Arc::new(Shared {
            mesh: Mutex::new(mesh),
            events: PeerEventQueue::new().during(START)?,
            bell: Arc::new(WakeFd::new().during(START)?),
            began: Instant::now(),
            is_over: AtomicBool::new(false),
        });
        let own = listens.map(|address| address.ip());
        let dial_timeout = Timing::new(network.lost_after).handshake_timeout;
        let event_loop = PeerEventLoop::new(Arc::clone(&shared), listener, own, dial_timeout);
        let thread = threads::spawn("fabricast-peers", move || event_loop.run()).during(START)?;
        Ok(Self {
            shared,
            listens,
            thread: Some(thread),
            fork_generation: ForkGeneration::current(),
        })
    }

    /// The address at which other nodes reach it.
    pub(crate) fn listens(&self) -> Option<SocketAddr> {
        self.listens
    }

    /// Sets the interests of this node. Peers get the difference.
    pub(crate) fn set_interests(
        &self,
        interests: impl IntoIterator<Item = Interest>,
    ) -> Result<()> {
        let interests = collect_interests(interests);
        self.command("set interests of node", |mesh, now| {
            interests.map(|interests| mesh.set_interests(interests, now))
        })
    }

    /// Sends the interests of this node to a peer from now on, after the messages already queued,
    /// unless the session ended.
    pub(crate) fn announce_interests(&self, node: NodeId, session: SessionId) -> Result<()> {
        self.command("send to node", |mesh, now| {
            mesh.announce_interests(node, session, now);
            Ok(())
        })
    }

    /// Sends a control message. It arrives once and in order, unless the session ends. Never
    /// blocks: if the queue is full, the session is closed.
    pub(crate) fn send(&self, node: NodeId, session: SessionId, message: Vec<u8>) -> Result<()> {
        self.command("send to node", |mesh, now| {
            mesh.send_control_message(node, session, message, now)
        })
    }

    /// The state of each peer, and of each address that is dialled.
    pub(crate) fn reports(&self) -> Vec<PeerReport> {
        if !self.fork_generation.is_current() {
            return Vec::new();
        }
        let (now, moment) = (SystemTime::now(), self.shared.now());
        lock(&self.shared.mesh).reports(moment, |since| now - moment.saturating_sub(since))
    }

    /// Readable as long as there are [events](Self::next_event).
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.events.as_fd()
    }

    /// The next event, if any. While the queue is full, nothing is read from peers.
    pub(crate) fn next_event(&self) -> Option<PeerEvent> {
        if !self.fork_generation.is_current() {
            return None;
        }
        let (event, has_room) = self.shared.events.pop();
        if has_room {
            self.shared.bell.ring();
        }
        event
    }

    /// Changes the mesh, and wakes the thread.
    fn command(
        &self,
        operation: &'static str,
        change: impl FnOnce(&mut Mesh, Duration) -> Result<()>,
    ) -> Result<()> {
        if !self.fork_generation.is_current() {
            let detail = "the peer thread belongs to the parent process";
            return Err(Error::new(operation, ErrorKind::Forked, detail));
        }
        let done = change(&mut lock(&self.shared.mesh), self.shared.now());
        self.shared.bell.ring();
        done
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if !self.fork_generation.is_current() {
            // The thread exists in the parent only, which owns the connections.
            std::mem::forget(thread);
            return;
        }
        self.shared.is_over.store(true, Ordering::Release);
        self.shared.bell.ring();
        if thread.join().is_err() {
            tracing::error!("the peer thread panicked");
        }
    }
}
