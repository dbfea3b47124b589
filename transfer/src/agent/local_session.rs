//! Connections to agents of this machine.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipc::{Channel, ChannelError, Doorbell, LimitReached, MappedWords, Message, PidFd};
use threads::RetryBackoff;

use super::card::AgentCard;
use super::event::Departure;
use super::host_staged::StagingLink;
use super::local_protocol::Reply;
use super::local_target::{InitiatorKind, LocalInitiator, LocalTarget, ReadOnlyRegionTable};
use super::session_segment::{InitiatorSegment, TargetSegment};
use super::{CONNECT, agent_files};
use crate::error::{Context, Error, ErrorKind, Result, failed};
use crate::notice::Notice;
use crate::region::{RegionDescriptor, RegisteredRegion};
use crate::remaining;
use crate::wire::malformed;

/// Pauses between attempts to connect while no agent listens.
const RETRY_BACKOFF: RetryBackoff =
    RetryBackoff::new(Duration::from_millis(2), Duration::from_millis(100));

#[derive(Debug)]
pub(super) struct LocalSession {
    /// Declared before `connection`, so that the clean close is visible before the connection ends.
    segment: InitiatorSegment,
    connection: Connection,
    pidfd: PidFd,
    region_table: ReadOnlyRegionTable,
    doorbell: Doorbell<MappedWords>,
    /// The agent's process has ended, as of the last check.
    process_ended: bool,
    /// The connection has ended, as of the last check. Its owner reads no notices any more.
    is_disconnected: bool,
    /// Staging memory of the session, if regions were joined by it.
    staging: Option<Arc<StagingLink>>,
}

/// How another agent of this machine is reached.
#[derive(Debug)]
enum Connection {
    /// The agent belongs to this process.
    InProcess { local_target: Arc<LocalTarget>, initiator: Arc<LocalInitiator> },
    /// The agent belongs to another process, with which descriptors can be exchanged.
    Channel(Arc<Channel>),
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Self::InProcess { local_target, initiator } = self {
            local_target.initiator_left(initiator);
        }
    }
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

impl LocalSession {
    /// Checks the process of the peer and the connection to it.
    pub(super) fn refresh(&mut self) {
        self.process_ended = self.process_ended || self.pidfd.has_exited();
        self.is_disconnected = self.is_disconnected
            || match &self.connection {
                Connection::Channel(channel) => channel.is_shut_down(),
                Connection::InProcess { .. } => false,
            };
        if let (Some(staging), Some(cause)) = (&self.staging, self.closed_cause()) {
            staging.end(cause);
        }
    }

    pub(super) fn staging(&self) -> Option<&Arc<StagingLink>> {
        self.staging.as_ref()
    }

    pub(super) fn set_staging(&mut self, link: Arc<StagingLink>) {
        self.staging = Some(link);
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

    /// How the peer departed, if it did. An agent that is closed says so before its connection ends.
    pub(super) fn departure(&mut self) -> Option<Departure> {
        self.refresh();
        let closed = self.region_table.is_closed();
        self.closed_cause().map(|_| if closed { Departure::Closed } else { Departure::Dead })
    }

    /// Why no operation can start with it, or with a region, as of now.
    pub(super) fn obstacle(&mut self, region: Option<u64>) -> Option<(ErrorKind, &'static str)> {
        self.refresh();
        self.known_obstacle(region)
    }

    /// Why no operation can start with it, or with a region, as of the last [`refresh`](Self::refresh).
    pub(super) fn known_obstacle(&self, region: Option<u64>) -> Option<(ErrorKind, &'static str)> {
        if let Some(cause) = self.closed_cause() {
            return Some((ErrorKind::Closed, cause));
        }
        let is_withdrawn = region.is_some_and(|region| !self.region_table.contains(region));
        is_withdrawn.then_some((ErrorKind::Stale, "the region was withdrawn"))
    }

    /// Records the start of a copy with a region, if any.
    pub(super) fn begin_copy(
        &mut self,
        region: Option<u64>,
    ) -> std::result::Result<u64, (ErrorKind, &'static str)> {
        if let Some(cause) = self.closed_cause() {
            return Err((ErrorKind::Closed, cause));
        }
        // Record the copy first, then check: withdrawing removes the region first, then checks.
        let number = self.segment.begin();
        if region.is_none_or(|region| self.region_table.contains(region)) {
            return Ok(number);
        }
        self.segment.end(number);
        let withdrawn = (ErrorKind::Stale, "the region was withdrawn");
        Err(self.obstacle(None).unwrap_or(withdrawn))
    }

    pub(super) fn end_copy(&mut self, number: u64) {
        self.segment.end(number);
    }

    pub(super) fn settle(&mut self) {
        self.segment.settle();
    }

    /// Sends a notice, without waking the peer. False if the queue is full.
    pub(super) fn send_notice(&mut self, notice: &Notice) -> Result<bool> {
        match self.closed_cause() {
            None => self.segment.send_notice(notice, &self.pidfd),
            Some(cause) => {
                let detail = format!("the notice was not sent: {cause}");
                Err(Error::new("notify", ErrorKind::Closed, detail))
            }
        }
    }

    /// The notice that was to be sent again will not be sent.
    pub(super) fn give_up_notice(&mut self) {
        self.segment.give_up_notice();
    }

    pub(super) fn wake_peer(&self) {
        self.doorbell.ring();
    }

    pub(super) fn has_region(&self, number: u64) -> bool {
        self.region_table.contains(number)
    }

    /// The channel for requests, if the peer belongs to another process.
    pub(super) fn channel(&self) -> Option<Arc<Channel>> {
        match &self.connection {
            Connection::Channel(channel) => Some(Arc::clone(channel)),
            Connection::InProcess { .. } => None,
        }
    }

    /// The peer's region, if it belongs to this process.
    pub(super) fn in_process_region(
        &self,
        region: &RegionDescriptor,
    ) -> Option<Arc<RegisteredRegion>> {
        match &self.connection {
            Connection::InProcess { local_target, initiator } => {
                let found = local_target.region(region.number, region.ticket)?;
                initiator.record_opened(&found);
                Some(found)
            }
            Connection::Channel(_) => None,
        }
    }

    /// Connects to another agent of this process.
    pub(super) fn in_process(local_target: &LocalTarget, other: Arc<LocalTarget>) -> Result<Self> {
        let copy = |file: BorrowedFd<'_>| {
            file.try_clone_to_owned().map_err(LimitReached::explain).map_err(failed(CONNECT))
        };
        let pidfd = || PidFd::of_this_process().map_err(failed(CONNECT));
        let target = TargetSegment::create()?;
        let (region_table, doorbell) = other.shared_files().map_err(failed(CONNECT))?;
        let region_table = ReadOnlyRegionTable::open(region_table).map_err(failed(CONNECT))?;
        let doorbell = LocalTarget::open_doorbell(copy(doorbell)?)?;
        let segment = InitiatorSegment::open(copy(target.as_fd())?)?;
        let introduction = local_target.introduction();
        let initiator =
            Arc::new(LocalInitiator::new(introduction, pidfd()?, target, InitiatorKind::InProcess));
        other.add_initiator(Arc::clone(&initiator));
        Ok(Self {
            segment,
            connection: Connection::InProcess { local_target: other, initiator },
            pidfd: pidfd()?,
            region_table,
            doorbell,
            process_ended: false,
            is_disconnected: false,
            staging: None,
        })
    }

    /// Connects to an agent of another process by its socket.
    pub(super) fn begin(
        local_target: &LocalTarget,
        card: &AgentCard,
        path: &Path,
        timeout: Duration,
        meanwhile: ProgressCallback<'_>,
    ) -> Result<Self> {
        let end = ipc::deadline(timeout);
        let mut backoff = RETRY_BACKOFF;
        let channel = loop {
            let pause = backoff.next_pause();
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
                Err(_) if remaining(end) > pause && agent_files::exists(path) => {
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
        };
        let credentials = channel.credentials().during(CONNECT)?;
        if !local_target.trusts(credentials.user) {
            let detail = format!(
                "the socket belongs to user {}, who is not trusted. Add the user to the admission",
                credentials.user
            );
            return Err(Error::new(CONNECT, ErrorKind::Denied, detail));
        }
        let hello = local_target.hello().encode();
        channel.send(&hello, &[local_target.pidfd()], remaining(end)).during(CONNECT)?;
        let message = receive(&channel, end, meanwhile).during(CONNECT)?;
        let (introduction, [pidfd, region_table, doorbell, local_session]) =
            Reply::read_welcome(CONNECT, message)?;
        if introduction.identity != card.identity {
            let detail = format!("another agent (\"{}\") listens there now", introduction.label);
            return Err(Error::new(CONNECT, ErrorKind::Stale, detail));
        }
        let region_table = ReadOnlyRegionTable::open(region_table);
        Ok(Self {
            connection: Connection::Channel(Arc::new(channel)),
            pidfd: PidFd::from_fd(pidfd).map_err(|error| malformed(CONNECT, error.to_string()))?,
            region_table: region_table.map_err(|error| malformed(CONNECT, error.to_string()))?,
            doorbell: LocalTarget::open_doorbell(doorbell)?,
            segment: InitiatorSegment::open(local_session)?,
            process_ended: false,
            is_disconnected: false,
            staging: None,
        })
    }
}
