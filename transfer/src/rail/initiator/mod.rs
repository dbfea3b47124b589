//! The initiator's side of a rail: links to targets, and transfers over them.

mod chunk_window;
mod chunks;
mod direct_requests;
mod links;
mod notice_queue;
mod target_replies;
mod tcp_probe;
mod transfers;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use fabric::Peer;

use self::chunk_window::ChunkWindow;
use self::chunks::Stage;
use self::direct_requests::DirectRequests;
pub(crate) use self::direct_requests::{DirectRequest, PROBE_TIMEOUT};
use self::links::ReconnectSchedule;
use self::notice_queue::NoticeQueue;
use self::tcp_probe::TcpProbe;
use self::transfers::ActiveTransfer;
use super::LinkTarget;
use super::io::{RailIo, SendLoss};
use super::release_worker::ReleaseWorker;
use super::session::{CloseReason, Session};
use super::staging::Slot;
use crate::error::{Error, ErrorKind};
use crate::path::Operation;

const CONNECT: &str = "connect to agent";
const OPEN: &str = "open region";

/// A region that the agent uses.
#[derive(Debug, Clone, Copy)]
struct WantedRegion {
    ticket: u64,
    stages: bool,
}

/// A region request in flight.
#[derive(Debug)]
struct PendingOpen {
    region: u64,
    wanted: WantedRegion,
    /// The request was withdrawn before the reply.
    is_withdrawn: bool,
}

#[derive(Debug)]
enum LinkState {
    /// The deadline for the welcome, and the time of the next hello.
    Connecting {
        began: Instant,
        until: Instant,
        next_hello: Instant,
        /// Tells, once probed, whether anything listens at the peer's address.
        tcp_probe: TcpProbe,
    },
    /// Connected; regions of an earlier session are being opened again.
    Opening,
    Up,
}

/// What is known of a target, connected or not.
#[derive(Debug)]
struct KnownTarget {
    target: LinkTarget,
    /// None if it is not retried.
    reconnect: Option<ReconnectSchedule>,
    /// Regions that the agent has opened, also in earlier sessions.
    wanted: HashMap<u64, WantedRegion>,
}

/// An active or connecting link to a target.
#[derive(Debug)]
struct Link {
    known_target: KnownTarget,
    session: Session,
    state: LinkState,
    /// The agent waits for it.
    has_waiter: bool,
    /// A connection broke, and the message was sent again.
    is_retried: bool,
    pending_opens: HashMap<u64, PendingOpen>,
    /// Regions that are still to be opened again.
    reopening: VecDeque<u64>,
    /// Withdrawn regions that transfers still use.
    withdrawn: HashSet<u64>,
    chunks: ChunkWindow,
    notices: NoticeQueue,
}

/// The direction of a transfer, and the ends that the fabric cannot access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pipeline {
    operation: Operation,
    stages_locally: bool,
    stages_remotely: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ChunkRange {
    local: u64,
    remote: u64,
    length: u64,
}

#[derive(Debug)]
struct InFlightChunk {
    /// The chunk's transfer, which may be cancelled already.
    of: u64,
    link: u32,
    /// The session of its start; the peer may have a newer one.
    session: u64,
    part: ChunkRange,
    stage: Stage,
    post_attempts: u32,
    local: Option<Slot>,
    remote: Option<u32>,
}

/// The links of a rail, and its transfers.
pub(super) struct InitiatorRole {
    links: HashMap<u32, Link>,
    /// Lost peers, to be retried.
    lost_links: HashMap<u32, KnownTarget>,
    /// Sessions that were closed here; their peers receive `Bye` when no chunk is in flight.
    closing_sessions: HashMap<u64, Peer>,
    transfers: BTreeMap<u64, ActiveTransfer>,
    in_flight: HashMap<u64, InFlightChunk>,
    /// Of these, chunks that found the provider's queue full.
    unposted: VecDeque<u64>,
    /// Chunks whose post failed since the connection broke, and when they are posted again.
    repost_later: Vec<(Instant, u64)>,
    /// Transfers with chunks that were not started.
    unstarted: BTreeSet<u64>,
    next_keep_polling: Option<Instant>,
    direct: DirectRequests,
}

impl InitiatorRole {
    pub(super) fn new(release_worker: Arc<ReleaseWorker>) -> Self {
        Self {
            links: HashMap::new(),
            lost_links: HashMap::new(),
            closing_sessions: HashMap::new(),
            transfers: BTreeMap::new(),
            in_flight: HashMap::new(),
            unposted: VecDeque::new(),
            repost_later: Vec::new(),
            unstarted: BTreeSet::new(),
            next_keep_polling: None,
            direct: DirectRequests::new(release_worker),
        }
    }

    /// Has the provider operations of this link?
    fn has_operations(&self, link: u32) -> bool {
        self.in_flight.values().any(|chunk| chunk.link == link)
            || self.direct.has_chunks_of_link(link)
    }

    pub(super) fn link_of(&self, session: u64) -> Option<u32> {
        let link = self.links.iter().find(|(_, link)| link.session.id() == session);
        link.map(|(number, _)| *number)
    }

    pub(super) fn session(&mut self, link: u32) -> Option<&mut Session> {
        self.links.get_mut(&link).map(|link| &mut link.session)
    }

    /// All sessions, and whether they are still connecting.
    pub(super) fn sessions(&mut self) -> impl Iterator<Item = (&mut Session, bool)> {
        self.links.values_mut().map(|link| {
            let is_connecting = !link.is_connected();
            (&mut link.session, is_connecting)
        })
    }

    /// Notes that a message was not sent. True if the agent's request to connect fails. A connection
    /// to an earlier process at this address breaks with the first message, and the next one uses
    /// another: only the second loss is a failure.
    pub(super) fn note_send_loss(&mut self, link: u32, loss: SendLoss) -> bool {
        let Some(link) = self.links.get_mut(&link) else { return false };
        let is_connection_lost = loss == SendLoss::Connection;
        let may_retry = is_connection_lost && !link.is_retried;
        link.is_retried |= is_connection_lost;
        if may_retry && let LinkState::Connecting { next_hello, .. } = &mut link.state {
            *next_hello = Instant::now();
        }
        link.has_waiter() && !may_retry
    }

    pub(super) fn end_link(
        &mut self,
        io: &mut RailIo,
        number: u32,
        close_reason: CloseReason,
        cause: &str,
    ) {
        let error = Error::new(CONNECT, ErrorKind::Closed, cause);
        self.close_link(io, number, close_reason, error);
    }
}

/// Access for tests.
#[cfg(test)]
mod test_access {
    use super::*;

    impl InitiatorRole {
        pub(in crate::rail) fn pending_opens(&self, link: u32) -> Vec<u64> {
            self.links[&link].pending_opens.keys().copied().collect()
        }

        pub(in crate::rail) fn session_id(&self, link: u32) -> Option<u64> {
            self.links.get(&link).map(|link| link.session.id())
        }

        pub(in crate::rail) fn withdrawn_and_wanted(&self, link: u32) -> (usize, usize) {
            let link = &self.links[&link];
            (link.withdrawn.len(), link.known_target.wanted.len())
        }

        /// The deadline of an attempt to connect.
        pub(in crate::rail) fn connect_deadline(&self, link: u32) -> Instant {
            match self.links[&link].state {
                LinkState::Connecting { until, .. } => until,
                _ => panic!("the link is not connecting"),
            }
        }
    }
}
