//! Another agent, and the connections to it.

use std::collections::{HashMap, VecDeque};
use std::fs;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path as FilePath;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gpu::{DeviceName, Memory, WeakMemory};
use ipc::{Channel, ChannelError, Doorbell, MappedWords, Message, PidFd};

use super::card::AgentCard;
use super::card_file;
use super::copy_queue::OperationContext;
use super::deferred::DeferredOperation;
use super::epochs::Epochs;
use super::local_target::{self, LocalInitiator, LocalTarget};
use super::operations::{Operations, Token};
use super::protocol::{Reply, Request};
use super::region_table::ReadOnlyRegionTable;
use super::session_segment::{InitiatorSegment, TargetSegment};
use crate::error::{Error, ErrorKind, Result};
use crate::host_buffer::HostBuffer;
use crate::lock;
use crate::path::Locality;
use crate::region::{RegionDescriptor, RegisteredRegion};

pub(super) const CONNECT: &str = "connect to an agent";
/// Shortest and longest pause between attempts to connect while no agent listens.
const RETRY_PAUSES: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(100));

/// A connection to an agent of this machine.
#[derive(Debug)]
pub(super) struct LocalSession {
    /// Declared before `connection`, so that the clean close is visible before the connection ends.
    pub(super) segment: InitiatorSegment,
    pub(super) connection: Connection,
    pub(super) pidfd: PidFd,
    pub(super) region_table: ReadOnlyRegionTable,
    pub(super) doorbell: Doorbell<MappedWords>,
    /// Its process has ended, as of the last check.
    process_ended: bool,
    /// The connection has ended, as of the last check. Its owner reads no notices any more.
    is_disconnected: bool,
}

/// How another agent of this machine is reached.
#[derive(Debug)]
pub(super) enum Connection {
    /// It belongs to this process.
    InProcess { local_target: Arc<LocalTarget>, initiator: Arc<LocalInitiator> },
    /// It belongs to another process, with which descriptors can be exchanged.
    Channel(Arc<Channel>),
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Self::InProcess { local_target, initiator } = self {
            initiator.has_left.store(true, Ordering::Release);
            local_target.notify_change();
        }
    }
}

/// A peer.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) card: AgentCard,
    pub(super) locality: Locality,
    /// None if it is reached by a fabric, or not at all.
    pub(super) local_session: Option<Box<LocalSession>>,
    /// Notices that found the queue full, in the order in which their data arrived.
    pub(super) unsent_notices: VecDeque<OperationContext>,
    pub(super) epochs: Epochs,
    /// Deferred operations, in order.
    pub(super) deferred: VecDeque<DeferredOperation>,
    /// Mappings of its device regions, by number and device.
    device_mappings: HashMap<(u64, DeviceName), WeakMemory>,
    /// Mappings of its host regions, by number and writability.
    host_mappings: HashMap<(u64, bool), HostBuffer>,
    /// Its links by rails, and the one that carries notices.
    pub(super) links: Vec<u32>,
    pub(super) notice_link: Option<u32>,
    /// Why connecting by a fabric failed, if it did.
    pub(super) fabric_error: Option<Error>,
}

/// The boot id of the kernel: the same in all containers of a machine.
pub(super) fn machine() -> [u8; 16] {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mut digits = text.bytes().filter_map(|byte| char::from(byte).to_digit(16));
    std::array::from_fn(|_| {
        let (high, low) = (digits.next().unwrap_or(0), digits.next().unwrap_or(0));
        (high << 4 | low) as u8
    })
}

impl Peer {
    /// Finds out by trying what the two can pass to each other.
    pub(super) fn connect(
        local_target: &LocalTarget,
        card: &AgentCard,
        forces_remote: bool,
        (timeout, meanwhile): (Duration, ProgressCallback<'_>),
    ) -> Result<Self> {
        let time = (timeout, meanwhile);
        let (locality, local_session) =
            Self::local_session(local_target, card, forces_remote, time)?;
        Ok(Self {
            card: card.clone(),
            locality,
            local_session,
            unsent_notices: VecDeque::new(),
            epochs: Epochs::default(),
            deferred: VecDeque::new(),
            device_mappings: HashMap::new(),
            host_mappings: HashMap::new(),
            links: Vec::new(),
            notice_link: None,
            fabric_error: None,
        })
    }

    fn local_session(
        local_target: &LocalTarget,
        card: &AgentCard,
        forces_remote: bool,
        (timeout, meanwhile): (Duration, ProgressCallback<'_>),
    ) -> Result<(Locality, Option<Box<LocalSession>>)> {
        if forces_remote {
            return Ok((Locality::ForcedRemote, None));
        }
        if let Some(other) = local_target::find_in_process(card.identity) {
            let local_session = LocalSession::in_process(local_target, other)?;
            return Ok((Locality::SameProcess, Some(Box::new(local_session))));
        }
        let is_same_machine = card.machine == machine();
        let cause = match &card.socket {
            None if is_same_machine => "it has no socket".to_owned(),
            Some(path) => match LocalSession::begin(local_target, card, path, (timeout, meanwhile))
            {
                Ok(local_session) => {
                    return Ok((Locality::SameMachine, Some(Box::new(local_session))));
                }
                // A listening agent refused: that is not a matter of paths.
                Err(error) if error.kind() != ErrorKind::Failed => return Err(error),
                Err(_) if is_same_machine && card_file::is_socket_gone(path) => format!(
                    "agent \"{}\" has ended, or its card is from an earlier start: its socket {} is \
                     gone. Take a new card",
                    card.label.escape_debug(),
                    path.display()
                ),
                Err(error) => error.to_string(),
            },
            None => String::new(),
        };
        let locality = if is_same_machine {
            Locality::NoDescriptorPassing { cause }
        } else {
            Locality::OtherMachine
        };
        Ok((locality, None))
    }

    /// Sends notices, in order, until the queue is full.
    pub(super) fn send_notices(&mut self, operations: &mut Operations) {
        let Some(local_session) = &self.local_session else { return };
        let mut has_sent = false;
        while let Some(OperationContext { token, notice: Some(notice), epoch, .. }) =
            self.unsent_notices.front()
        {
            let remaining = match local_session.closed_cause() {
                None => local_session.segment.send_notice(notice, &local_session.pidfd),
                Some(end) => {
                    let detail = format!("{end} before the notice was sent");
                    Err(Error::new("notify", ErrorKind::Closed, detail))
                }
            };
            let outcome = match remaining {
                Ok(true) => Ok(()),
                Ok(false) => break,
                Err(error) => Err(error.with(&self.card.label)),
            };
            has_sent |= outcome.is_ok();
            finish((*token, *epoch), outcome, &mut self.epochs, operations);
            self.unsent_notices.pop_front();
        }
        if has_sent {
            local_session.doorbell.ring();
        }
    }

    /// Records the outcome of an operation, also for operations that wait for it.
    pub(super) fn finish(
        &mut self,
        context: &OperationContext,
        outcome: Result<()>,
        operations: &mut Operations,
    ) {
        finish((context.token, context.epoch), outcome, &mut self.epochs, operations);
    }

    /// The next deferred operation that is ready, and the failure it depends on, if any.
    pub(super) fn take_deferred(&mut self) -> Option<(DeferredOperation, Option<String>)> {
        let after = self.deferred.front()?.after();
        if !self.epochs.is_over_before(after) {
            return None;
        }
        let failure = self.epochs.failure_before(after).map(str::to_owned);
        Some((self.deferred.pop_front()?, failure))
    }

    /// Why no operation can start with it, or with a region of an existing route.
    pub(super) fn obstacle(
        &mut self,
        region: Option<&RegionDescriptor>,
    ) -> Option<(ErrorKind, &'static str)> {
        let local_session = self.local_session.as_mut()?;
        local_session.refresh();
        if let Some(end) = local_session.closed_cause() {
            return Some((ErrorKind::Closed, end));
        }
        let is_withdrawn =
            region.is_some_and(|region| !local_session.region_table.contains(region.number));
        is_withdrawn.then_some((ErrorKind::Stale, "the region was withdrawn"))
    }

    /// Checks whether it is alive, and fails notices that cannot be sent.
    pub(super) fn check_alive(&mut self, operations: &mut Operations) {
        let Some(local_session) = &mut self.local_session else { return };
        local_session.refresh();
        self.send_notices(operations);
    }

    /// The mapping of a region for a device of this process.
    pub(super) fn mapped(&self, region: u64, device: DeviceName) -> Option<Memory> {
        self.device_mappings.get(&(region, device)).and_then(WeakMemory::upgrade)
    }

    pub(super) fn cache_mapping(&mut self, region: u64, memory: &Memory) {
        self.device_mappings.retain(|_, memory| memory.upgrade().is_some());
        self.device_mappings.insert((region, memory.mapped_for().name()), memory.downgrade());
    }

    /// The mapping of a region of host memory. A read-only mapping does not serve callers with the
    /// right to write.
    pub(super) fn mapped_host(&self, region: u64, is_writable: bool) -> Option<HostBuffer> {
        self.host_mappings.get(&(region, is_writable)).cloned()
    }

    pub(super) fn cache_host_mapping(&mut self, region: u64, buffer: HostBuffer) {
        self.host_mappings.insert((region, !buffer.is_read_only()), buffer);
    }

    /// The channel for requests, if it belongs to another process.
    pub(super) fn channel(&self) -> Option<Arc<Channel>> {
        match &self.local_session.as_deref()?.connection {
            Connection::Channel(channel) => Some(Arc::clone(channel)),
            Connection::InProcess { .. } => None,
        }
    }

    /// Its region, if it belongs to this process.
    pub(super) fn in_process_region(
        &self,
        region: &RegionDescriptor,
    ) -> Option<Arc<RegisteredRegion>> {
        match &self.local_session.as_deref()?.connection {
            Connection::InProcess { local_target, initiator } => {
                let found = local_target.region(region.number, region.ticket)?;
                initiator.record_opened(&found);
                Some(found)
            }
            Connection::Channel(_) => None,
        }
    }

    /// Drops mappings of withdrawn regions.
    pub(super) fn drop_stale_mappings(&mut self) {
        let Some(local_session) = &self.local_session else { return };
        self.host_mappings.retain(|(number, _), _| local_session.region_table.contains(*number));
    }
}

fn finish(
    (token, epoch): (Token, u64),
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

/// Makes progress during a wait, and returns how long the next wait may last without it.
pub(super) type ProgressCallback<'a> = &'a mut dyn FnMut() -> Duration;

/// Receives a message, and makes progress until it arrives.
pub(super) fn receive(
    channel: &Channel,
    end: Instant,
    meanwhile: ProgressCallback<'_>,
) -> std::result::Result<Message, ChannelError> {
    loop {
        let longest = meanwhile();
        match channel.receive(remaining(end).min(longest)) {
            Err(ChannelError::DeadlineExceeded { .. }) if remaining(end) > Duration::ZERO => {}
            outcome => return outcome,
        }
    }
}

pub(super) fn remaining(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now())
}

pub(super) fn of_channel(operation: &'static str) -> impl Fn(ChannelError) -> Error {
    move |error| Error::of_channel(operation, error)
}

impl LocalSession {
    /// Checks the process of the peer and the connection to it.
    pub(super) fn refresh(&mut self) {
        self.process_ended = self.process_ended || self.pidfd.is_over();
        self.is_disconnected = self.is_disconnected
            || match &self.connection {
                Connection::Channel(channel) => channel.is_shut_down(),
                Connection::InProcess { .. } => false,
            };
    }

    /// Why no operation can start with it, if so.
    #[inline]
    pub(super) fn closed_cause(&self) -> Option<&'static str> {
        if self.region_table.is_closed() {
            return Some("the agent has ended");
        }
        if self.process_ended {
            return Some("its process has ended");
        }
        self.is_disconnected.then_some("the connection to it has ended. Connect again")
    }

    /// Connects to another agent of this process.
    fn in_process(local_target: &LocalTarget, other: Arc<LocalTarget>) -> Result<Self> {
        let failed =
            |cause: &dyn ToString| Error::new(CONNECT, ErrorKind::Failed, cause.to_string());
        let copy = |file: BorrowedFd<'_>| file.try_clone_to_owned().map_err(|e| failed(&e));
        let pidfd = || PidFd::of_this_process().map_err(|error| failed(&error));
        let target = TargetSegment::create()?;
        let region_table = other.region_table.read_only().map_err(|error| failed(&error))?;
        let region_table =
            ReadOnlyRegionTable::open(region_table).map_err(|error| failed(&error))?;
        let doorbell = LocalTarget::open_doorbell(copy(other.doorbell_segment.as_fd())?)?;
        let segment = InitiatorSegment::open(copy(target.as_fd())?)?;
        let introduction = (local_target.identity, local_target.label.clone());
        let initiator = Arc::new(LocalInitiator::new(introduction, pidfd()?, target, true));
        lock(&other.local_initiators).push(Arc::clone(&initiator));
        other.notify_change();
        let connection = Connection::InProcess { local_target: other, initiator };
        Ok(Self {
            segment,
            connection,
            pidfd: pidfd()?,
            region_table,
            doorbell,
            process_ended: false,
            is_disconnected: false,
        })
    }

    fn begin(
        local_target: &LocalTarget,
        card: &AgentCard,
        path: &FilePath,
        (timeout, meanwhile): (Duration, ProgressCallback<'_>),
    ) -> Result<Self> {
        let end = ipc::deadline(timeout);
        let mut pause = RETRY_PAUSES.0;
        let channel = loop {
            let longest = meanwhile();
            match Channel::connect(path, remaining(end).min(longest)) {
                Ok(channel) => break channel,
                Err(ChannelError::DeadlineExceeded { .. }) if remaining(end) > Duration::ZERO => {}
                // The lock of the card file ends with the process, for all containers of the
                // machine.
                Err(_) if card.is_of_this_machine() && card.is_orphaned() => {
                    let detail = format!(
                        "{}: connection refused and the card file unlocked: its process has ended",
                        path.display()
                    );
                    return Err(Error::new(CONNECT, ErrorKind::Closed, detail));
                }
                // It may be starting: the card file exists before the socket.
                Err(_) if remaining(end) > pause && card_file::exists(path) => {
                    let until = Instant::now() + pause;
                    while remaining(until) > Duration::ZERO {
                        std::thread::sleep(remaining(until).min(meanwhile()));
                    }
                }
                Err(error) => {
                    let error = Error::of_channel_at(CONNECT, path, error);
                    return Err(error.with_kind(ErrorKind::Failed));
                }
            }
            pause = (2 * pause).min(RETRY_PAUSES.1);
        };
        let credentials = channel.credentials().map_err(of_channel(CONNECT))?;
        let is_trusted =
            credentials.user == 0 || local_target.admission.users.contains(&credentials.user);
        if !is_trusted {
            let detail = format!(
                "the socket belongs to user {}, who is not trusted. Add the user to the admission",
                credentials.user
            );
            return Err(Error::new(CONNECT, ErrorKind::Denied, detail));
        }
        let hello = Request::Hello(local_target.introduction()).encode();
        channel
            .send(&hello, &[local_target.pidfd.as_fd()], remaining(end))
            .map_err(of_channel(CONNECT))?;
        let message = receive(&channel, end, meanwhile).map_err(of_channel(CONNECT))?;
        let (introduction, [pidfd, region_table, doorbell, local_session]) =
            Reply::read_welcome(CONNECT, message)?;
        if introduction.identity != card.identity {
            let detail = format!("another agent (\"{}\") listens there now", introduction.label);
            return Err(Error::new(CONNECT, ErrorKind::Stale, detail));
        }
        let malformed =
            |cause: &dyn ToString| Error::new(CONNECT, ErrorKind::Malformed, cause.to_string());
        Ok(Self {
            connection: Connection::Channel(Arc::new(channel)),
            pidfd: PidFd::from_fd(pidfd).map_err(|error| malformed(&error))?,
            region_table: ReadOnlyRegionTable::open(region_table)
                .map_err(|error| malformed(&error))?,
            doorbell: LocalTarget::open_doorbell(doorbell)?,
            segment: InitiatorSegment::open(local_session)?,
            process_ended: false,
            is_disconnected: false,
        })
    }
}
