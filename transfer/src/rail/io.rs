//! Input and output of a rail: posts receives, messages and one-sided operations at its endpoint,
//! and polls for their completions. Copies of devices are the [`Staging`]'s.
//!
//! Sessions are known here only by their keys. Sessions that sending finds lost are reported as
//! [`SendEvent`]s, and receive nothing more.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fabric::{
    Access, Address, AddressVector, Capabilities, Caps, CompletionKind, CompletionQueue, Domain,
    Endpoint, HostMemory, MemoryRegion, Outcome, Peer, PeerToPeer, PostOptions, QueueOptions,
    RegionSlice, RemoteMemory, RemoteRegion, RemoteSlice, TransferFlags, WaitStrategy, Waker,
};

use super::message::{Frame, MAX_MESSAGE_LENGTH, Message};
use super::registration_cache::register_or_evict;
use super::session::{CHECK_INTERVAL, Session, SessionKey};
use super::staging::{Slots, Staging};
use super::{RailEvent, RailOwner, RailShared, START};
use crate::device_memory::registration;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::operations::Token;
use crate::path::{DeviceFabric, Operation};
use crate::region::{Buffer, Rights};

/// Messages that may arrive between two polls.
const RECEIVE_BUFFERS: usize = 64;
const SEND_BUFFERS: usize = 64;
/// Consecutive failures of the queue after which it is considered broken.
const MAX_QUEUE_FAILURES: u32 = 1000;
/// Maximum of messages to one peer in the provider, and in the queue: a peer may request but not
/// receive.
const MAX_SENDS_PER_PEER: usize = 8;
const MAX_QUEUED_PER_PEER: usize = 512;
/// How long a refusal without a session may wait.
const REFUSAL_SEND_TIMEOUT: Duration = Duration::from_secs(1);
/// Longest sleep while a device copies, or a message found the queue full.
pub(super) const BUSY_PAUSE: Duration = Duration::from_micros(50);

#[derive(Debug, Clone, Copy)]
enum Posted {
    Receive(usize),
    Send(usize, SessionKey, Peer),
    Data(u64, Peer),
}

struct QueuedMessage {
    to: SessionKey,
    peer: Peer,
    bytes: Vec<u8>,
    since: Instant,
}

/// What a completion means for the roles.
pub(super) enum Received {
    Message(Frame),
    /// The one-sided operation of a chunk.
    Chunk(u64, Result<()>),
    Nothing,
}

/// What is lost with a message that was not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendLoss {
    /// The message, which may be sent again.
    Message,
    /// The connection that carried it, perhaps one to an earlier process at the address.
    Connection,
    /// The session: the peer violates a limit.
    Session,
}

/// A message of a session that was not sent.
#[derive(Debug)]
pub(super) struct SendEvent {
    pub(super) session: SessionKey,
    pub(super) loss: SendLoss,
    pub(super) cause: String,
}

pub(super) struct RailIo {
    // First, so that it is closed first: it returns posted buffers.
    endpoint: Endpoint,
    queue: CompletionQueue,
    addresses: AddressVector,
    domain: Domain,
    address: Vec<u8>,
    agent: Arc<dyn RailOwner>,
    shared: Arc<RailShared>,
    receive_buffers: MemoryRegion,
    send_buffers: MemoryRegion,
    posted: Vec<Option<Posted>>,
    free_tokens: Vec<usize>,
    free_send_buffers: Vec<usize>,
    send_queue: VecDeque<QueuedMessage>,
    send_events: VecDeque<SendEvent>,
    /// Number of sessions per peer address. An address without sessions and messages in flight is
    /// removed; providers use it until then.
    peers: HashMap<Peer, usize>,
    staging: Staging,
    failures: u32,
    lost_after: Duration,
    next_number: u64,
}

impl RailIo {
    pub(super) fn open(
        domain: &Domain,
        shared: Arc<RailShared>,
        agent: Arc<dyn RailOwner>,
        lost_after: Duration,
    ) -> Result<Self> {
        let facts = domain.capabilities();
        if !facts.caps.contains(Caps::MESSAGE) {
            let detail = format!(
                "rails need messages without tags (FI_MSG), which provider {} lacks or loses",
                facts.provider
            );
            return Err(Error::new(START, ErrorKind::Failed, detail));
        }
        let addresses = AddressVector::open(domain).during(START)?;
        let options = QueueOptions { size: 1024, waiting: WaitStrategy::Block };
        let mut queue = CompletionQueue::open_with(domain, options).during(START)?;
        let endpoint = open_endpoint(domain, &addresses, &mut queue, &shared).during(START)?;
        let buffers = |count: usize, access| {
            let memory = HostMemory::zeroed(count * MAX_MESSAGE_LENGTH)?;
            let region = domain.register(memory, access)?;
            region.enable_for(&endpoint)?;
            fabric::Result::Ok(region)
        };
        let receive_buffers = buffers(RECEIVE_BUFFERS, Access::RECEIVE).during(START)?;
        let send_buffers = buffers(SEND_BUFFERS, Access::SEND).during(START)?;
        let address = endpoint.address().during(START)?.0;
        let mut opened = Self {
            endpoint,
            queue,
            addresses,
            domain: domain.clone(),
            address,
            agent,
            shared,
            receive_buffers,
            send_buffers,
            posted: Vec::new(),
            free_tokens: Vec::new(),
            free_send_buffers: (0..SEND_BUFFERS).collect(),
            send_queue: VecDeque::new(),
            send_events: VecDeque::new(),
            peers: HashMap::new(),
            staging: Staging::default(),
            failures: 0,
            lost_after,
            next_number: 1,
        };
        for buffer in 0..RECEIVE_BUFFERS {
            opened.receive(buffer).during(START)?;
        }
        Ok(opened)
    }

    pub(super) fn address(&self) -> &[u8] {
        &self.address
    }

    pub(super) fn waker(&self) -> Waker {
        self.queue.waker()
    }

    pub(super) fn agent(&self) -> &Arc<dyn RailOwner> {
        &self.agent
    }

    pub(super) fn shared(&self) -> &Arc<RailShared> {
        &self.shared
    }

    pub(super) fn capabilities(&self) -> &Capabilities {
        self.domain.capabilities()
    }

    /// The number of the rail at its agent.
    pub(super) fn rail(&self) -> usize {
        self.shared.number
    }

    pub(super) fn lost_after(&self) -> Duration {
        self.lost_after
    }

    pub(super) fn report(&self, event: RailEvent) {
        self.shared.report(event);
        self.agent.wake();
    }

    pub(super) fn report_done(&self, token: Token, outcome: Result<()>) {
        self.report(RailEvent::Done { token, outcome });
    }

    pub(super) fn next_id(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    /// Has the queue failed too often, or has the agent ended?
    pub(super) fn is_over(&self) -> bool {
        self.shared.is_over.load(Ordering::Acquire) || self.failures >= MAX_QUEUE_FAILURES
    }

    // ------------------------------------------------------------------- memory

    /// Enables a registration that the provider binds to the endpoint.
    pub(super) fn enable(&self, region: &MemoryRegion) -> fabric::Result<()> {
        region.enable_for(&self.endpoint)
    }

    /// Registers little memory on this thread.
    pub(super) fn register_now(
        &self,
        buffer: Buffer,
        rights: Option<Rights>,
    ) -> Result<MemoryRegion> {
        let buffer = Arc::new(buffer);
        let access = registration::access(rights);
        let register = || {
            let region = registration::register(&self.domain, Arc::clone(&buffer), access)?;
            region.enable_for(&self.endpoint)?;
            Ok(region)
        };
        let cache = &self.shared.registration_cache;
        // Does not wait for another thread that is registering memory.
        register_or_evict(register, || cache.try_lock().is_ok_and(|mut it| it.evict_unused()))
    }

    pub(super) fn staging(&mut self) -> &mut Staging {
        &mut self.staging
    }

    /// Allocates local slots, if there are none: at the first use, or after they were abandoned.
    pub(super) fn ensure_slots(&mut self) -> Result<()> {
        if !self.staging.has_slots() {
            let slots = Slots::new(|buffer| self.register_now(buffer.into(), None))?;
            self.staging.add_slots(slots);
        }
        Ok(())
    }

    /// The memory of a peer, as described by it.
    pub(super) fn attach(&self, described: &[u8]) -> fabric::Result<RemoteMemory> {
        self.domain.attach(&RemoteRegion::decode(described)?)
    }

    // ------------------------------------------------------------------- completions

    /// The next completion.
    pub(super) fn poll(&mut self) -> Option<Received> {
        let outcome = self.queue.poll()?;
        Some(self.completed(outcome))
    }

    /// Waits for a completion or a command.
    pub(super) fn wait(&mut self, pause: Duration) -> Option<Received> {
        let outcome = self.queue.wait_or_wake(pause)?;
        Some(self.completed(outcome))
    }

    pub(super) fn pause(&self) {
        self.queue.pause();
    }

    fn completed(&mut self, outcome: Outcome) -> Received {
        let (operation, token, length, failure) = match outcome {
            Ok(done) => (done.operation, done.token, done.length, None),
            Err(failure) => {
                (failure.operation, failure.token, 0, Some((failure.kind, failure.error)))
            }
        };
        if failure.is_none() && self.failures < MAX_QUEUE_FAILURES {
            self.failures = 0;
        }
        if operation.is_none() {
            if let Some((_, error)) = failure {
                tracing::debug!(%error, "completion queue of a rail failed");
                self.failures += 1;
            }
            return Received::Nothing;
        }
        match (self.take_posted(token), failure) {
            (Some(Posted::Receive(buffer)), failure) => {
                let frame = if failure.is_none() { self.decode(buffer, length) } else { None };
                if let Err(error) = self.receive(buffer) {
                    // One receive buffer less; the others are reposted.
                    tracing::warn!(%error, "posting a receive of a rail again failed");
                }
                frame.map_or(Received::Nothing, Received::Message)
            }
            (Some(Posted::Send(buffer, to, _)), failure) => {
                self.free_send_buffers.push(buffer);
                if let Some((_, error)) = failure {
                    self.send_failed(to, &error);
                }
                Received::Nothing
            }
            (Some(Posted::Data(chunk, _)), None) => Received::Chunk(chunk, Ok(())),
            (Some(Posted::Data(chunk, _)), Some((kind, error))) => {
                let is_read = matches!(kind, Some(CompletionKind::Read));
                let operation = if is_read { "get" } else { "put" };
                Received::Chunk(chunk, Err(error).during(operation))
            }
            (None, _) => Received::Nothing,
        }
    }

    fn decode(&self, buffer: usize, length: usize) -> Option<Frame> {
        let mut bytes = [0; MAX_MESSAGE_LENGTH];
        let bytes = &mut bytes[..length.min(MAX_MESSAGE_LENGTH)];
        self.receive_buffers.read(buffer * MAX_MESSAGE_LENGTH, bytes).ok()?;
        let decoded = Message::decode(bytes);
        decoded.inspect_err(|error| tracing::debug!(%error, "malformed message ignored")).ok()
    }

    // ------------------------------------------------------------------- posting

    /// Posts an operation under a token, which is [taken back](Self::take_posted) if that fails.
    fn post<T>(
        &mut self,
        posted: Posted,
        post: impl FnOnce(&mut Endpoint, &mut CompletionQueue, PostOptions) -> fabric::Result<T>,
    ) -> fabric::Result<()> {
        let index = self.free_tokens.pop().unwrap_or_else(|| {
            self.posted.push(None);
            self.posted.len() - 1
        });
        self.posted[index] = Some(posted);
        let token = index as u64;
        let outcome = post(&mut self.endpoint, &mut self.queue, PostOptions::token(token));
        outcome.map(drop).inspect_err(|_| {
            self.take_posted(token);
        })
    }

    fn take_posted(&mut self, token: u64) -> Option<Posted> {
        let posted = self.posted.get_mut(token as usize)?.take()?;
        self.free_tokens.push(token as usize);
        Some(posted)
    }

    fn receive(&mut self, buffer: usize) -> fabric::Result<()> {
        let start = buffer * MAX_MESSAGE_LENGTH;
        let slice = self.receive_buffers.slice(start..start + MAX_MESSAGE_LENGTH)?;
        let posted = Posted::Receive(buffer);
        self.post(posted, |endpoint, queue, options| endpoint.receive(queue, &slice, options))
    }

    /// Posts the one-sided operation of a chunk: writes to a peer, or reads from it. False if the
    /// provider's queue is full.
    pub(super) fn post_data(
        &mut self,
        operation: Operation,
        chunk: u64,
        peer: Peer,
        local: &RegionSlice,
        remote: &RemoteSlice,
    ) -> fabric::Result<bool> {
        let posted = self.post(Posted::Data(chunk, peer), |endpoint, queue, options| {
            let options = options.timeout(Duration::ZERO);
            match operation {
                // Later messages rely on the data being visible at the target.
                Operation::Put => {
                    let options = options.flags(TransferFlags::DELIVERY_COMPLETE);
                    endpoint.write(queue, peer, local, remote, options)
                }
                Operation::Get => endpoint.read(queue, peer, local, remote, options),
            }
        });
        match posted {
            Err(error) if error.kind() == fabric::ErrorKind::WouldBlock => Ok(false),
            posted => posted.map(|()| true),
        }
    }

    /// The chunks that the provider has.
    pub(super) fn posted_chunks(&self) -> impl Iterator<Item = u64> {
        self.posted.iter().flatten().filter_map(|posted| match posted {
            Posted::Data(chunk, _) => Some(*chunk),
            Posted::Receive(_) | Posted::Send(..) => None,
        })
    }

    // ------------------------------------------------------------------- messages

    pub(super) fn send_message(&mut self, session: &mut Session, message: &Message) {
        match session.encode(message) {
            Some(bytes) => self.queue_message(session.key(), session.peer(), bytes),
            None => self.lose(session.key(), "it acknowledges no messages"),
        }
    }

    pub(super) fn send_without_session(&mut self, peer: Peer, session: u64, message: &Message) {
        self.queue_message(SessionKey::NoSession, peer, message.encode(session, 0, 0));
    }

    fn queue_message(&mut self, to: SessionKey, peer: Peer, bytes: Vec<u8>) {
        if self.is_lost(to) {
            return;
        }
        if bytes.len() > MAX_MESSAGE_LENGTH {
            return tracing::warn!(length = bytes.len(), "message longer than the limit dropped");
        }
        if self.queued(peer) >= MAX_QUEUED_PER_PEER {
            return self.lose(to, "it receives no messages");
        }
        self.send_queue.push_back(QueuedMessage { to, peer, bytes, since: Instant::now() });
        self.flush();
    }

    fn queued(&self, peer: Peer) -> usize {
        self.send_queue.iter().filter(|waiting| waiting.peer == peer).count()
    }

    /// Is there room in the queue to a peer for messages that can wait?
    pub(super) fn has_room(&self, peer: Peer) -> bool {
        self.queued(peer) < MAX_QUEUED_PER_PEER / 2
    }

    /// Pings a silent peer, retransmits unacknowledged messages, and acknowledges received ones.
    pub(super) fn check_session(
        &mut self,
        session: &mut Session,
        is_connecting: bool,
        now: Instant,
    ) {
        // Connecting links have their own deadline.
        if !is_connecting && session.is_lost(now) {
            return self.lose(session.key(), "it does not answer");
        }
        if !is_connecting && session.should_ping(now) {
            self.send_message(session, &Message::Ping);
        }
        let mut due_retransmits = session.due_retransmits(now);
        let ack_is_due = session.ack_is_due(now);
        // Queued messages, in the provider or here, are not lost.
        if !due_retransmits.is_empty() && self.unsent_messages(session.key()) > 0 {
            due_retransmits.clear();
        }
        if due_retransmits.is_empty() && ack_is_due {
            self.send_message(session, &Message::Pong);
        }
        for (number, message) in due_retransmits {
            let bytes = session.encode_numbered(number, &message);
            self.queue_message(session.key(), session.peer(), bytes);
        }
    }

    /// Are messages of this session queued here?
    pub(super) fn is_queued(&self, to: SessionKey) -> bool {
        self.send_queue.iter().any(|waiting| waiting.to == to)
    }

    /// Number of messages of this session, queued here or in the provider.
    pub(super) fn unsent_messages(&self, session: SessionKey) -> usize {
        let queued = self.send_queue.iter().filter(|waiting| waiting.to == session);
        let posted = self.posted.iter().flatten();
        let is_posted = |it: &&Posted| matches!(it, Posted::Send(_, to, _) if *to == session);
        queued.count() + posted.filter(is_posted).count()
    }

    /// The next session that cannot be sent to.
    pub(super) fn next_send_event(&mut self) -> Option<SendEvent> {
        self.send_events.pop_front()
    }

    /// Has sending found that the session is lost?
    pub(super) fn is_lost(&self, session: SessionKey) -> bool {
        self.send_events
            .iter()
            .any(|event| event.loss == SendLoss::Session && event.session == session)
    }

    /// Sends nothing more in a session whose peer violates a limit.
    fn lose(&mut self, session: SessionKey, cause: &str) {
        if session != SessionKey::NoSession {
            self.drop_queued(session);
            let cause = cause.to_owned();
            let event = SendEvent { session, loss: SendLoss::Session, cause };
            self.send_events.push_back(event);
        }
    }

    fn send_failed(&mut self, to: SessionKey, error: &fabric::Error) {
        tracing::debug!(?to, %error, "sending a message failed");
        let cause = error.to_string();
        let is_connection_lost = error.kind() == fabric::ErrorKind::ConnectionLost;
        let loss = if is_connection_lost { SendLoss::Connection } else { SendLoss::Message };
        let event = SendEvent { session: to, loss, cause };
        self.send_events.push_back(event);
    }

    pub(super) fn drop_queued(&mut self, session: SessionKey) {
        self.send_queue.retain(|waiting| waiting.to != session);
    }

    /// Sends queued messages, in order for each peer. A blocked peer does not hold up others.
    pub(super) fn flush(&mut self) {
        if self.send_queue.is_empty() {
            return;
        }
        let mut sending: HashMap<Peer, usize> = HashMap::new();
        for posted in self.posted.iter().flatten() {
            if let Posted::Send(_, _, peer) = posted {
                *sending.entry(*peer).or_default() += 1;
            }
        }
        let mut blocked: HashSet<Peer> = HashSet::new();
        let mut at = 0;
        while at < self.send_queue.len() && !self.free_send_buffers.is_empty() {
            let QueuedMessage { to, peer, .. } = self.send_queue[at];
            let count = sending.entry(peer).or_default();
            if *count >= MAX_SENDS_PER_PEER || blocked.contains(&peer) {
                at += 1;
                continue;
            }
            match self.send(at) {
                Ok(()) => {
                    *count += 1;
                    self.send_queue.remove(at);
                }
                Err(error) if error.kind() == fabric::ErrorKind::WouldBlock => {
                    blocked.insert(peer);
                }
                Err(error) => {
                    self.send_queue.remove(at);
                    self.send_failed(to, &error);
                }
            }
        }
    }

    fn send(&mut self, at: usize) -> fabric::Result<()> {
        let QueuedMessage { to, peer, ref bytes, .. } = self.send_queue[at];
        let Some(buffer) = self.free_send_buffers.last().copied() else { return Ok(()) };
        let start = buffer * MAX_MESSAGE_LENGTH;
        self.send_buffers.write(start, bytes)?;
        let slice = self.send_buffers.slice(start..start + bytes.len())?;
        self.post(Posted::Send(buffer, to, peer), |endpoint, queue, options| {
            endpoint.send(queue, peer, &slice, options.timeout(Duration::ZERO))
        })?;
        self.free_send_buffers.pop();
        Ok(())
    }

    pub(super) fn has_sent_all(&self) -> bool {
        self.free_send_buffers.len() == SEND_BUFFERS && self.send_queue.is_empty()
    }

    /// The time until the next poll. Messages that find the queue full are retried soon, and less
    /// often with time: a provider that cannot connect never has room.
    pub(super) fn max_sleep(&self, has_unposted: bool) -> Duration {
        if has_unposted || self.staging.copies_in_flight() {
            return BUSY_PAUSE;
        }
        let latest = self.send_queue.back().map(|unsent| unsent.since.elapsed() / 8);
        latest.map_or(CHECK_INTERVAL, |pause| pause.clamp(BUSY_PAUSE, CHECK_INTERVAL))
    }

    // ------------------------------------------------------------------- addresses

    /// The peer of an address; counts one more session.
    pub(super) fn acquire_address(&mut self, address: &Address) -> fabric::Result<Peer> {
        let peer = self.addresses.insert(address)?;
        self.retain_address(peer);
        Ok(peer)
    }

    /// Counts one more session for this address.
    pub(super) fn retain_address(&mut self, peer: Peer) {
        *self.peers.entry(peer).or_default() += 1;
    }

    /// Counts one session less for this address.
    pub(super) fn release_address(&mut self, peer: Peer) {
        if let Some(users) = self.peers.get_mut(&peer) {
            *users = users.saturating_sub(1);
        }
    }

    pub(super) fn remove_unused_addresses(&mut self, now: Instant) {
        self.send_queue.retain(|waiting| {
            waiting.to != SessionKey::NoSession || now - waiting.since < REFUSAL_SEND_TIMEOUT
        });
        // Local providers answer peers by their addresses, also after all sessions have ended.
        if !self.domain.capabilities().reaches_other_machines {
            return;
        }
        let unused = self.peers.iter().filter(|(_, users)| **users == 0);
        let unused: Vec<_> = unused.map(|(peer, _)| *peer).collect();
        for peer in unused {
            let is_used = self.send_queue.iter().any(|waiting| waiting.peer == peer)
                || self.posted.iter().flatten().any(|posted| match posted {
                    Posted::Send(_, _, to) | Posted::Data(_, to) => *to == peer,
                    Posted::Receive(_) => false,
                });
            if !is_used {
                self.peers.remove(&peer);
                let _ = self.addresses.remove(peer);
            }
        }
    }
}

/// Device memory has to go directly, or not at all: a provider that copies it through the host is no
/// faster than staging, and says less. A provider that cannot do that gets no device memory.
fn open_endpoint(
    domain: &Domain,
    addresses: &AddressVector,
    queue: &mut CompletionQueue,
    shared: &RailShared,
) -> fabric::Result<Endpoint> {
    let needs_choice = shared.registers_devices && shared.device_fabric != DeviceFabric::Off;
    if needs_choice {
        let builder = Endpoint::builder(domain).addresses(addresses).queue(queue);
        match builder.peer_to_peer(PeerToPeer::Required).open() {
            Err(error) if error.kind() == fabric::ErrorKind::NotSupported => {
                let _ = shared.device_refusal.set(error.to_string());
            }
            opened => return opened,
        }
    }
    Endpoint::builder(domain).addresses(addresses).queue(queue).open()
}

/// Access for tests.
#[cfg(test)]
mod test_access {
    use super::*;

    impl RailIo {
        /// Acts as if the provider had failed.
        pub(in crate::rail) fn fail(&mut self) {
            self.failures = MAX_QUEUE_FAILURES;
        }

        /// Acts as if the connection had broken that carries the queued messages.
        pub(in crate::rail) fn break_connection(&mut self, session: SessionKey, cause: &str) {
            self.drop_queued(session);
            let cause = cause.to_owned();
            let event = SendEvent { session, loss: SendLoss::Connection, cause };
            self.send_events.push_back(event);
        }

        pub(in crate::rail) fn known_peers(&self) -> usize {
            self.peers.len()
        }
    }
}
