//! Peers: their sessions, the order of the operations with them, and their mapped regions.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use gpu::{DeviceName, Memory, Uuid, WeakMemory};

use super::card::AgentCard;
use super::epochs::Epochs;
use super::local_session::{LocalSession, ProgressCallback};
use super::local_target::{self, LocalTarget};
use super::{DeferredOperation, JOIN, OperationContext, agent_files};
use crate::error::{Error, ErrorKind, Result};
use crate::host_buffer::HostBuffer;
use crate::notice::Notice;
use crate::operations::{OperationInfo, Operations, Token};
use crate::path::{DeviceAccess, Locality, MemoryType};
use crate::region::RegionDescriptor;

/// How often peers are checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(super) struct Peers {
    /// By unique numbers.
    all: BTreeMap<u32, Peer>,
    next: u32,
    /// Number of deferred operations of all peers.
    deferred: usize,
    next_check: Instant,
}

impl Peers {
    pub(super) fn new() -> Self {
        Self { all: BTreeMap::new(), next: 0, deferred: 0, next_check: Instant::now() }
    }

    /// Adds a peer, and returns its number.
    pub(super) fn add(&mut self, peer: Peer) -> u32 {
        let number = self.next;
        self.next += 1;
        self.all.insert(number, peer);
        number
    }

    pub(super) fn find(&self, number: u32) -> Option<&Peer> {
        self.all.get(&number)
    }

    pub(super) fn find_mut(&mut self, number: u32) -> Option<&mut Peer> {
        self.all.get_mut(&number)
    }

    pub(super) fn get(&mut self, number: u32, operation: &'static str) -> Result<&mut Peer> {
        let unknown = || Error::new(operation, ErrorKind::Unknown, "unknown peer");
        self.all.get_mut(&number).ok_or_else(unknown)
    }

    pub(super) fn label(&self, number: u32) -> String {
        self.find(number).map_or_else(String::new, |peer| peer.label().to_owned())
    }

    pub(super) fn labels(&self) -> Vec<&str> {
        self.all.values().map(Peer::label).collect()
    }

    /// Completes a transfer or its failure: sends its notice and records the outcome. Only operations
    /// by rails outlive their peer.
    pub(super) fn complete(
        &mut self,
        context: OperationContext,
        outcome: Result<()>,
        operations: &mut Operations,
    ) {
        match self.all.get_mut(&context.peer) {
            Some(peer) => peer.complete(context, outcome, operations),
            None => operations.finish(context.token, outcome),
        }
    }

    pub(super) fn defer(&mut self, operation: DeferredOperation) {
        if let Some(peer) = self.all.get_mut(&operation.context.peer) {
            peer.deferred.push_back(operation);
            self.deferred += 1;
        }
    }

    /// A deferred operation that is ready, and the failure it depends on, if any.
    pub(super) fn take_deferred(&mut self) -> Option<(DeferredOperation, Option<String>)> {
        if self.deferred == 0 {
            return None;
        }
        let next = self.all.values_mut().find_map(Peer::take_deferred)?;
        self.deferred -= 1;
        Some(next)
    }

    /// Removes deferred operations and notices that were not sent, if they are meant.
    pub(super) fn cancel(
        &mut self,
        is_meant: impl Fn(&OperationContext) -> bool,
    ) -> Vec<OperationContext> {
        let mut cancelled = Vec::new();
        for peer in self.all.values_mut() {
            if let Some(at) = peer.unsent_notices.iter().position(&is_meant) {
                let unsent = peer.unsent_notices.remove(at);
                if let Some(local_session) = peer.local_session.as_mut().filter(|_| at == 0) {
                    local_session.give_up_notice();
                }
                cancelled
                    .extend(unsent.map(|context| OperationContext { notice: None, ..context }));
            }
            if let Some(at) = peer.deferred.iter().position(|it| is_meant(&it.context)) {
                cancelled.extend(peer.deferred.remove(at).map(|it| it.context));
                self.deferred -= 1;
            }
        }
        cancelled
    }

    /// Sends notices that found the queue full.
    pub(super) fn send_notices(&mut self, operations: &mut Operations) {
        self.all.values_mut().for_each(|peer| peer.send_notices(operations));
    }

    /// Checks periodically whether the peers are alive, and fails notices that cannot be sent. False
    /// if it is not time yet.
    pub(super) fn check_alive(&mut self, operations: &mut Operations) -> bool {
        if Instant::now() < self.next_check {
            return false;
        }
        self.next_check = Instant::now() + CHECK_INTERVAL;
        self.all.values_mut().for_each(|peer| {
            peer.refresh();
            peer.send_notices(operations);
        });
        true
    }

    /// Removes a peer, and returns its operations that do not complete. If it is settled, the peer
    /// takes all copies for complete.
    pub(super) fn disconnect(&mut self, number: u32, is_settled: bool) -> Vec<OperationContext> {
        let Some(mut peer) = self.all.remove(&number) else { return Vec::new() };
        if let Some(local_session) = peer.local_session.as_mut().filter(|_| is_settled) {
            local_session.settle();
        }
        self.deferred -= peer.deferred.len();
        let deferred = peer.deferred.into_iter().map(|operation| operation.context);
        peer.unsent_notices.into_iter().chain(deferred).collect()
    }

    /// Removes all peers. Copies with the unsettled ones may still run.
    pub(super) fn close(&mut self, unsettled: &BTreeSet<u32>) {
        while let Some((number, _)) = self.all.first_key_value() {
            let number = *number;
            self.disconnect(number, !unsettled.contains(&number));
        }
    }
}

#[derive(Debug)]
pub(super) struct Peer {
    card: AgentCard,
    locality: Locality,
    /// None if it is reached by a fabric, or not at all.
    local_session: Option<Box<LocalSession>>,
    /// Notices that found the queue full, in the order in which their data arrived.
    unsent_notices: VecDeque<OperationContext>,
    epochs: Epochs,
    /// Deferred operations, in order.
    deferred: VecDeque<DeferredOperation>,
    /// Mappings of its device regions, by number and device.
    device_mappings: HashMap<(u64, DeviceName), WeakMemory>,
    /// Mappings of its host regions, by number and writability.
    host_mappings: HashMap<(u64, bool), HostBuffer>,
    /// Verdicts of the driver on mapping such memory for a device of this process.
    mapping_verdicts: HashMap<(MappingKey, DeviceName), DeviceAccess>,
}

/// Memory of a peer, as far as it decides whether the driver maps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct MappingKey {
    memory_type: MemoryType,
    device: Option<Uuid>,
}

impl MappingKey {
    pub(super) fn new(memory_type: MemoryType, device: Option<Uuid>) -> Self {
        Self { memory_type, device }
    }
}

impl Peer {
    /// Finds out by trying what the two can pass to each other.
    pub(super) fn connect(
        local_target: &LocalTarget,
        card: &AgentCard,
        forces_remote: bool,
        timeout: Duration,
        meanwhile: ProgressCallback<'_>,
    ) -> Result<Self> {
        let peer = |locality, local_session: Option<LocalSession>| Self {
            card: card.clone(),
            locality,
            local_session: local_session.map(Box::new),
            unsent_notices: VecDeque::new(),
            epochs: Epochs::default(),
            deferred: VecDeque::new(),
            device_mappings: HashMap::new(),
            host_mappings: HashMap::new(),
            mapping_verdicts: HashMap::new(),
        };
        // On another machine, too, an agent reaches itself.
        if forces_remote && card.identity != local_target.identity {
            return Ok(peer(Locality::ForcedRemote, None));
        }
        if let Some(other) = local_target::find_in_process(card.identity) {
            let local_session = LocalSession::in_process(local_target, other)?;
            return Ok(peer(Locality::SameProcess, Some(local_session)));
        }
        let is_same_machine = card.is_of_this_machine();
        let cause = match &card.socket {
            None if is_same_machine => "it has no socket".to_owned(),
            Some(path) => match LocalSession::begin(local_target, card, path, timeout, meanwhile) {
                Ok(local_session) => return Ok(peer(Locality::SameMachine, Some(local_session))),
                // A listening agent refused: that is not a matter of paths.
                Err(error) if error.kind() != ErrorKind::Failed => return Err(error),
                Err(_) if is_same_machine && agent_files::is_socket_gone(path) => format!(
                    "agent \"{}\" has ended, or its card is from an earlier start: its socket {} is \
                     gone. Take a new card",
                    card.label.escape_debug(),
                    path.display()
                ),
                Err(error) => error.to_string(),
            },
            None => String::new(),
        };
        let locality = match is_same_machine {
            true => Locality::NoDescriptorPassing { cause },
            false => Locality::OtherMachine,
        };
        Ok(peer(locality, None))
    }

    pub(super) fn card(&self) -> &AgentCard {
        &self.card
    }

    pub(super) fn label(&self) -> &str {
        &self.card.label
    }

    pub(super) fn locality(&self) -> &Locality {
        &self.locality
    }

    /// Has it no memory in common with this agent?
    pub(super) fn is_remote(&self) -> bool {
        self.local_session.is_none()
    }

    pub(super) fn local_session(&self) -> Option<&LocalSession> {
        self.local_session.as_deref()
    }

    pub(super) fn local_session_mut(&mut self) -> Option<&mut LocalSession> {
        self.local_session.as_deref_mut()
    }

    pub(super) fn epochs(&mut self) -> &mut Epochs {
        &mut self.epochs
    }

    /// The region that it published by this name.
    pub(super) fn published(&self, name: &str) -> Result<&RegionDescriptor> {
        let regions = &self.card.regions;
        if let Some((_, region)) = regions.iter().find(|(known, _)| known == name) {
            return Ok(region);
        }
        let known: Vec<_> =
            regions.iter().map(|(name, _)| format!("\"{}\"", name.escape_debug())).collect();
        let detail = match known.is_empty() {
            true => "its card has no regions: the card file is written before regions are \
                 published. Exchange the card that Agent::card() returns after publishing"
                .to_owned(),
            false => format!(
                "its card has no region \"{}\", but these: {}",
                name.escape_debug(),
                known.join(", ")
            ),
        };
        Err(Error::new(JOIN, ErrorKind::Unknown, detail).with(&self.card.label))
    }

    /// Fails unless the region belongs to its agent.
    pub(super) fn check_owner(&self, region: &RegionDescriptor) -> Result<()> {
        if (region.agent, region.node) == (self.card.identity, self.card.node) {
            return Ok(());
        }
        let detail = "the region belongs to another agent, or to this one before a restart";
        Err(Error::new(JOIN, ErrorKind::Stale, detail))
    }

    /// Fails if the session with it has ended.
    pub(super) fn check_connected(&mut self) -> Result<()> {
        self.obstacle(None).map_or(Ok(()), |(kind, cause)| Err(Error::new(JOIN, kind, cause)))
    }

    /// Why no operation can start with it, or with a region of an existing route.
    pub(super) fn obstacle(&mut self, region: Option<u64>) -> Option<(ErrorKind, &'static str)> {
        self.local_session.as_mut()?.obstacle(region)
    }

    /// Starts an operation, unless the session with it has ended or its region is withdrawn. With a
    /// fence, also returns the epoch before which all operations must complete first.
    pub(super) fn begin(
        &mut self,
        begun: OperationInfo,
        region: Option<u64>,
        notice: Option<Notice>,
        operations: &mut Operations,
    ) -> Result<(OperationContext, Option<u64>)> {
        let (name, peer, bytes) = (begun.operation, begun.peer, begun.bytes);
        let number = match &mut self.local_session {
            Some(local_session) => local_session
                .begin_copy(region)
                .map_err(|(kind, cause)| Error::new(name, kind, cause).with(&self.card.label))?,
            None => 0,
        };
        let token = operations.begin(begun).inspect_err(|_| self.end_copy(number))?;
        let after = self.epochs.deferred_until();
        let epoch = self.epochs.begin();
        Ok((OperationContext { token, peer, number, bytes, notice, epoch }, after))
    }

    fn end_copy(&mut self, number: u64) {
        if let Some(local_session) = &mut self.local_session {
            local_session.end_copy(number);
        }
    }

    /// Undoes the start of an operation.
    pub(super) fn cancel_unstarted(&mut self, context: &OperationContext) {
        self.epochs.finish(context.epoch);
        self.end_copy(context.number);
    }

    fn complete(
        &mut self,
        context: OperationContext,
        outcome: Result<()>,
        operations: &mut Operations,
    ) {
        self.end_copy(context.number);
        match outcome {
            Ok(()) if context.notice.is_some() => {
                self.unsent_notices.push_back(context);
                self.send_notices(operations);
            }
            outcome => {
                let outcome = outcome.map_err(|error| error.with(&self.card.label));
                finish(context.token, context.epoch, outcome, &mut self.epochs, operations);
            }
        }
    }

    /// Sends notices, in order, until the queue is full.
    fn send_notices(&mut self, operations: &mut Operations) {
        let Some(local_session) = &mut self.local_session else { return };
        let mut has_sent = false;
        while let Some(OperationContext { token, notice: Some(notice), epoch, .. }) =
            self.unsent_notices.front()
        {
            let outcome = match local_session.send_notice(notice) {
                Ok(true) => Ok(()),
                Ok(false) => break,
                Err(error) => Err(error.with(&self.card.label)),
            };
            has_sent |= outcome.is_ok();
            finish(*token, *epoch, outcome, &mut self.epochs, operations);
            self.unsent_notices.pop_front();
        }
        if has_sent {
            local_session.wake_peer();
        }
    }

    /// Is the data of this operation complete, but not its notice?
    pub(super) fn is_notice_unsent(&self, token: Token) -> bool {
        self.unsent_notices.iter().any(|context| context.token == token)
    }

    /// Are notices unsent or operations deferred?
    pub(super) fn is_busy(&self) -> bool {
        !(self.unsent_notices.is_empty() && self.deferred.is_empty())
    }

    /// The next deferred operation that is ready, and the failure it depends on, if any.
    fn take_deferred(&mut self) -> Option<(DeferredOperation, Option<String>)> {
        let after = self.deferred.front()?.after;
        if !self.epochs.is_over_before(after) {
            return None;
        }
        let failure = self.epochs.failure_before(after).map(str::to_owned);
        Some((self.deferred.pop_front()?, failure))
    }

    /// Checks whether it is alive.
    pub(super) fn refresh(&mut self) {
        if let Some(local_session) = &mut self.local_session {
            local_session.refresh();
        }
    }

    /// The mapping of a region for a device of this process.
    pub(super) fn mapped(&self, region: u64, device: DeviceName) -> Option<Memory> {
        self.device_mappings.get(&(region, device)).and_then(WeakMemory::upgrade)
    }

    pub(super) fn cache_mapping(&mut self, region: u64, memory: &Memory) {
        self.device_mappings.retain(|_, memory| memory.upgrade().is_some());
        self.device_mappings.insert((region, memory.mapped_for().name()), memory.downgrade());
    }

    /// The driver's verdict on mapping such memory for this device, if it was tried: a refusal is not
    /// tried again before the peer reconnects.
    pub(super) fn mapping_verdict(
        &self,
        memory: MappingKey,
        by: DeviceName,
    ) -> Option<DeviceAccess> {
        self.mapping_verdicts.get(&(memory, by)).cloned()
    }

    pub(super) fn note_mapping(
        &mut self,
        memory: MappingKey,
        by: DeviceName,
        verdict: DeviceAccess,
    ) {
        /// A peer may claim any number of devices.
        const MOST: usize = 256;
        if self.mapping_verdicts.len() >= MOST {
            self.mapping_verdicts.clear();
        }
        self.mapping_verdicts.insert((memory, by), verdict);
    }

    /// The mapping of a region of host memory. A read-only mapping does not serve callers with the
    /// right to write.
    pub(super) fn mapped_host(&self, region: u64, is_writable: bool) -> Option<HostBuffer> {
        self.host_mappings.get(&(region, is_writable)).cloned()
    }

    pub(super) fn cache_host_mapping(&mut self, region: u64, buffer: HostBuffer) {
        self.host_mappings.insert((region, !buffer.is_read_only()), buffer);
    }

    /// Drops mappings of withdrawn regions.
    pub(super) fn drop_stale_mappings(&mut self) {
        let Some(local_session) = &self.local_session else { return };
        self.host_mappings.retain(|(number, _), _| local_session.has_region(*number));
    }
}

fn finish(
    token: Token,
    epoch: u64,
    outcome: Result<()>,
    epochs: &mut Epochs,
    operations: &mut Operations,
) {
    match &outcome {
        Ok(()) => epochs.finish(epoch),
        Err(error) => {
            let name = operations.begun(token).map_or("operation", |begun| begun.operation);
            epochs.fail(epoch, || format!("{name} {token} failed: {}", error.reason()));
        }
    }
    operations.finish(token, outcome);
}
