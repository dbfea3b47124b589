//! What a node service holds of its peers.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use ipc::ForkGeneration;

use super::admission::Limits;
use super::connection_protocol::Timing;
use super::event::PeerEvent;
use super::event_loop::{PeerEventLoop, Shared};
use super::event_queue::PeerEventQueue;
use super::identity::{MAX_LABEL_LENGTH, NodeId, ServiceInstance, SessionId};
use super::interests::{Interest, collect};
use super::listener::listen;
use super::mesh::{Mesh, Start};
use super::protocol::MIN_LOST_AFTER;
use super::report::PeerReport;
use super::resolver;
use crate::error::{Error, ErrorKind, Result};
use crate::lock::lock;
use crate::network_options::NetworkOptions;
use crate::wake::WakeFd;

const START: &str = "start peer discovery";

/// Refuses what is impossible, and any other node without [`insecure`](NetworkOptions::insecure),
/// for a node that is called so.
pub(crate) fn check(network: &NetworkOptions, label: &str) -> Result<()> {
    let refuse = |detail: String| Err(Error::new(START, ErrorKind::InvalidArgument, detail));
    if label.len() > MAX_LABEL_LENGTH || label.chars().any(char::is_control) {
        return refuse(format!(
            "a label has {MAX_LABEL_LENGTH} bytes at most, and no control characters: \"{}\"",
            label.escape_debug()
        ));
    }
    let (lost_after, longest) = (network.lost_after, Duration::from_secs(3600));
    if lost_after < Duration::from_millis(MIN_LOST_AFTER.into()) || lost_after > longest {
        return refuse(format!(
            "lost after {lost_after:?}: {MIN_LOST_AFTER} ms to {longest:?} is possible"
        ));
    }
    for address in network.peers.iter().chain(&network.rendezvous) {
        resolver::check(START, address)?;
    }
    match first_address(network) {
        Some(address) if !network.insecure => {
            refuse(format!("{address}: {INSECURE}. Allow it: \"insecure\""))
        }
        _ => Ok(()),
    }
}

/// What it means that nodes are connected.
pub(crate) const INSECURE: &str = "nodes are not authenticated and nothing is encrypted yet, so \
    whatever can connect reads and publishes in all topics; on loopback, each user of the machine";

/// The first address at which this node meets others, if there is one.
pub(crate) fn first_address(network: &NetworkOptions) -> Option<String> {
    let dialled = network.peers.iter().chain(&network.rendezvous).cloned();
    network.listen.map(|address| address.to_string()).into_iter().chain(dialled).next()
}

/// The other nodes, looked after by a thread. Dropping it says goodbye to them, for which
/// they have half a second.
#[derive(Debug)]
pub(crate) struct Peers {
    pub(super) shared: Arc<Shared>,
    listens: Option<SocketAddr>,
    thread: Option<JoinHandle<()>>,
    fork_generation: ForkGeneration,
}

impl Peers {
    /// Starts to listen and to dial. That peers are not authenticated is for others to
    /// [say](NetworkOptions::say_if_insecure), and not at each attempt.
    ///
    /// Nothing is said of what the node subscribes to until it [knows](Self::set_interests): not even
    /// that it is nothing. Nor is it said to a node before it [may](Self::announce_interests): so that other
    /// things can be said first.
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
        check(network, label)?;
        let failed = |cause: std::io::Error| Error::of(START, cause);
        let listener = match network.listen {
            Some(address) => Some(listen(address)?),
            None => None,
        };
        let listens = match &listener {
            Some(listener) => Some(listener.local_addr().map_err(failed)?),
            None => None,
        };
        let chance = getrandom::u64().map_err(|cause| Error::of(START, cause))?;
        let start = Start {
            identity,
            run: ServiceInstance::new(chance),
            label: label.to_owned(),
            listens,
            peers: network.peers.clone(),
            rendezvous: network.rendezvous.clone(),
            timing: Timing::new(network.lost_after),
            limits,
        };
        let mut mesh = Mesh::new(start, Duration::ZERO);
        (mesh.interests_unknown, mesh.withholds_interests) =
            (withholds_interests, withholds_interests);
        let shared = Arc::new(Shared {
            mesh: Mutex::new(mesh),
            events: PeerEventQueue::new().map_err(failed)?,
            bell: Arc::new(WakeFd::new().map_err(failed)?),
            began: Instant::now(),
            is_over: AtomicBool::new(false),
        });
        let own = listens.map(|address| address.ip());
        let service = PeerEventLoop::new(Arc::clone(&shared), listener, own);
        let thread = std::thread::Builder::new()
            .name("fabricast-peers".to_owned())
            .spawn(move || service.run())
            .map_err(|cause| Error::of(START, cause))?;
        Ok(Self {
            shared,
            listens,
            thread: Some(thread),
            fork_generation: ForkGeneration::current(),
        })
    }

    /// Where others can reach it.
    pub(crate) fn listens(&self) -> Option<SocketAddr> {
        self.listens
    }

    /// All that this node publishes and subscribes from now on. Peers are told what is
    /// different from before.
    pub(crate) fn set_interests(
        &self,
        interests: impl IntoIterator<Item = Interest>,
    ) -> Result<()> {
        self.check_not_forked("set the interests of this node")?;
        let interests = collect(interests)?;
        lock(&self.shared.mesh).set_interests(interests, self.shared.now());
        self.shared.bell.ring();
        Ok(())
    }

    /// A node is told what this one publishes and subscribes to from now on, behind the letters
    /// that were sent there, unless the session is over.
    pub(crate) fn announce_interests(&self, node: NodeId, session: SessionId) -> Result<()> {
        self.check_not_forked("send to a node")?;
        lock(&self.shared.mesh).announce_interests(node, session, self.shared.now());
        self.shared.bell.ring();
        Ok(())
    }

    /// Sends a letter. It arrives once, behind those sent before, unless the session ends.
    /// This never waits: if more letters wait than may, the session is ended.
    pub(crate) fn tell(&self, node: NodeId, session: SessionId, letter: Vec<u8>) -> Result<()> {
        self.check_not_forked("send to a node")?;
        let told = lock(&self.shared.mesh).tell(node, session, letter, self.shared.now());
        self.shared.bell.ring();
        told
    }

    /// How it stands with each peer, and with each address at which one is wanted.
    pub(crate) fn reports(&self) -> Vec<PeerReport> {
        if !self.fork_generation.is_current() {
            return Vec::new();
        }
        let (now, moment) = (SystemTime::now(), self.shared.now());
        let mut mesh = lock(&self.shared.mesh);
        // Nothing may have happened since it was time.
        mesh.departed.tick(moment);
        mesh.reports(|since| now - moment.saturating_sub(since))
    }

    /// Can be read as long as there are [events](Self::next_event).
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.events.as_fd()
    }

    /// The next event, if there is one. As long as many wait here, nothing is read from peers.
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

    fn check_not_forked(&self, operation: &'static str) -> Result<()> {
        if self.fork_generation.is_current() {
            return Ok(());
        }
        let detail = "the peer thread belongs to the parent process";
        Err(Error::new(operation, ErrorKind::Forked, detail))
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if !self.fork_generation.is_current() {
            // There is no such thread here, and the connections are the parent's.
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
