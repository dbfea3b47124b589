//! Connecting to peers, and joining regions: these need peers, rails and mapped memory, and the
//! agent makes progress while it waits.

use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu::{Device, Memory};

use super::event::Departure;
use super::explain::{self, EXPLAIN, MemoryAttributes};
use super::local_copies::{CopyBuffer, LocalMover};
use super::peers::Peer;
use super::remote_transport::{DirectKeys, LinkCounts, RemoteTransport, RouteLane};
use super::route::{DataMover, Route};
use super::{Agent, CONNECT, JOIN, PeerId};
use crate::copy_requests;
use crate::device_memory::FabricFacts;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::path::{
    Choice, CopyServiceState, DeviceAccess, Fabric, Locality, Operation, Path, Policy,
    Registration, choose,
};
use crate::region::{Buffer, Region, RegionDescriptor, RegisteredRegion};
use crate::share::check_fork;

/// Once one rail is up, how long to wait for the other rails to a peer.
const OTHER_LINKS_TIMEOUT: Duration = Duration::from_secs(1);

impl Agent {
    /// What the agent and a peer can pass to each other.
    #[must_use]
    pub fn locality(&self, peer: PeerId) -> Option<&Locality> {
        self.peers.find(peer.0).map(Peer::locality)
    }

    /// How a peer departed, if it is known to have. [`Event::Left`] tells that only of peers that
    /// connected to this agent, this also of those that this agent connected to.
    ///
    /// ```
    /// # use std::time::Duration;
    /// use transfer::{Agent, AgentOptions, Departure};
    /// let mut here = Agent::start(AgentOptions::new("here"))?;
    /// let there = Agent::start(AgentOptions::new("there"))?;
    /// let peer = here.connect(&there.card().encode()?, Duration::from_secs(1))?;
    /// assert_eq!(here.departure(peer), None);
    /// drop(there);
    /// assert_eq!(here.departure(peer), Some(Departure::Closed));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// [`Event::Left`]: super::Event::Left
    pub fn departure(&mut self, peer: PeerId) -> Option<Departure> {
        self.progress();
        match self.peers.find_mut(peer.0)?.local_session_mut() {
            Some(local_session) => local_session.departure(),
            None => self.remote_transport.departure(peer.0),
        }
    }

    /// Connects to a peer by a fabric now, not only when the first regions are joined, so that
    /// [`explain`](Self::explain) knows whether the peer answers. Does nothing if they have no
    /// provider in common.
    ///
    /// # Errors
    /// [`Unknown`](ErrorKind::Unknown) peer; errors of the fabric. A peer that does not answer is
    /// not an error here: `explain` reports it as a reason.
    pub fn connect_fabrics(&mut self, peer: PeerId, timeout: Duration) -> Result<()> {
        check_fork(self.fork_generation, EXPLAIN)?;
        let end = ipc::deadline(timeout);
        self.peers.get(peer.0, EXPLAIN)?;
        self.connect_fabric(peer.0, end)
    }

    /// The verdict on every path between two ends, from the same facts as [joining](Self::join).
    /// Obstacles that only mapping would show are not found.
    ///
    /// ```
    /// # use std::time::Duration;
    /// use transfer::path::{Exportability, Operation, Path, Policy};
    /// use transfer::{Agent, AgentOptions, MemoryAttributes};
    /// let mut here = Agent::start(AgentOptions::new("here"))?;
    /// let there = Agent::start(AgentOptions::new("there"))?;
    /// let peer = here.connect(&there.card().encode()?, Duration::from_secs(1))?;
    /// let host = MemoryAttributes::on_host(Exportability::ByDescriptors);
    /// let choice = here.explain(peer, Operation::Put, &host, &host, &Policy::default())?;
    /// assert_eq!(choice.taken(), Some(Path::SameProcess));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Stale`](ErrorKind::Stale) if the region was withdrawn, or its agent was restarted;
    /// [`NoSuchDevice`](ErrorKind::NoSuchDevice) if the local memory is on a device that this
    /// process does not see.
    pub fn explain(
        &self,
        peer: PeerId,
        operation: Operation,
        local: &MemoryAttributes,
        remote: &MemoryAttributes,
        policy: &Policy,
    ) -> Result<Choice> {
        check_fork(self.fork_generation, EXPLAIN)?;
        policy.check()?;
        let other = self.peers.find(peer.0);
        if let Some(other) = other {
            remote.check_region(other).map_err(|error| error.with(other.label()))?;
        }
        let local_device = local.local_device()?;
        let by = (peer.0, &self.peers);
        let ends = (local, remote);
        let local = (local_device, self.copy_service_state(peer.0));
        let (facts, _) = explain::facts(operation, ends, local, by, &self.remote_transport)?;
        Ok(choose(&facts, policy))
    }

    /// Connects to a peer by its rails, unless one is up already.
    fn connect_remote(&mut self, number: u32, end: Instant) -> Result<()> {
        self.poll_rails();
        let card = self.peers.get(number, CONNECT)?.card();
        if card.identity == self.local_target.identity {
            let detail =
                "the card is of this agent itself: an agent cannot connect to itself over a fabric";
            return Err(Error::new(CONNECT, ErrorKind::Closed, detail));
        }
        let Some(connecting) = self.remote_transport.begin_connect(number, card, end)? else {
            return Ok(());
        };
        let counts = self.wait_for_links(end, |transport| transport.connect_counts(&connecting));
        self.remote_transport.finish_connect(connecting, counts, &mut self.events)
    }

    /// Like [`connect_remote`](Self::connect_remote), but a peer that does not answer is no error:
    /// the cause is recorded for `explain`.
    pub(super) fn connect_fabric(&mut self, number: u32, end: Instant) -> Result<()> {
        let peer = self.peers.find(number);
        if !peer.is_some_and(|peer| self.remote_transport.reaches(peer.card())) {
            return Ok(());
        }
        let error = self.connect_remote(number, end).err();
        match error {
            Some(error)
                if !matches!(error.kind(), ErrorKind::Closed | ErrorKind::DeadlineExceeded) =>
            {
                Err(error.with(self.peers.label(number)))
            }
            error => {
                self.remote_transport.set_error(number, error);
                Ok(())
            }
        }
    }

    /// Why a peer is reachable neither by memory nor by a fabric, if so.
    pub(super) fn unreachable_error(&self, number: u32) -> Option<Error> {
        let peer = self.peers.find(number)?;
        if !peer.is_remote() || self.remote_transport.is_connected(number) {
            return None;
        }
        let socket = match peer.locality() {
            Locality::NoDescriptorPassing { cause } => Some(cause.clone()),
            _ => None,
        };
        let works = |_, _: &FabricFacts| Registration::Works;
        let (kind, fabric) = match self.remote_transport.error(number) {
            Some(error) => (error.kind(), error.reason()),
            None => match self.remote_transport.facts(number, peer.card(), works, works) {
                Fabric::None { cause } => {
                    (ErrorKind::NoPath, format!("no fabric reaches it: {cause}"))
                }
                // It was connected before.
                Fabric::Connected { .. } => {
                    (ErrorKind::Closed, "it was lost right after connecting".to_owned())
                }
            },
        };
        let detail = socket.into_iter().chain([fabric]).collect::<Vec<_>>().join("; ");
        Some(Error::new(CONNECT, kind, detail).with(peer.label()))
    }

    /// Waits until all links have answered; or one is up, and the others had their timeout.
    pub(super) fn wait_for_links(
        &mut self,
        mut end: Instant,
        count: impl Fn(&RemoteTransport) -> LinkCounts,
    ) -> LinkCounts {
        loop {
            let max_wait = self.progress_while_waiting();
            let (open, good) = count(&self.remote_transport);
            let now = Instant::now();
            if good > 0 {
                end = end.min(now + OTHER_LINKS_TIMEOUT);
            }
            if open == 0 || now >= end {
                return (open, good);
            }
            self.wait_for_doorbell(end.min(now + max_wait));
        }
    }

    /// Joins two regions: chooses a path and prepares it.
    pub(super) fn join_with(
        &mut self,
        number: u32,
        region: &Region,
        remote: RegionDescriptor,
        policy: &Policy,
        end: Instant,
    ) -> Result<Route> {
        let local = &region.0;
        let peer = self.peers.get(number, JOIN)?;
        peer.check_owner(&remote)?;
        peer.check_connected()?;
        // Earlier failures of the fabric do not count.
        self.remote_transport.set_error(number, None);
        let local_device = local.buffer.memory().map(|memory| memory.mapped_for().clone());
        let ends = (&MemoryAttributes::from(region), &MemoryAttributes::from(&remote));
        let by = (number, &self.peers);
        let found = (local_device, self.copy_service_state(number));
        let (mut facts, device) =
            explain::facts(Operation::Put, ends, found, by, &self.remote_transport)?;
        loop {
            let judged = (&mut facts, policy);
            let prepared = self.prepare_direct(number, &local.buffer, &remote, judged, end);
            let choice = choose(&facts, policy);
            let path = match (choice.taken(), &prepared) {
                (Some(path), Ok(_)) => path,
                (_, Err(_)) => Path::FabricDirect,
                (None, Ok(_)) => return Err(Error::new(JOIN, ErrorKind::NoPath, choice.reasons())),
            };
            let made = prepared.and_then(|keys| {
                if path == Path::ServiceCopied {
                    let opened = self.open_service_pair(number, local, &remote, end);
                    return opened.map(DataMover::Local);
                }
                if path.is_local() {
                    let regions = (local, &remote);
                    let mapped = self.map_regions(path, number, regions, device.as_ref(), end);
                    return mapped.map(DataMover::Local);
                }
                let lanes = self.open_route_lanes(number, (local, &remote), keys.as_ref(), end);
                lanes.map(DataMover::Rails)
            });
            let verdict = match &made {
                Ok(_) => Some(DeviceAccess::Direct),
                Err(error) if error.is_refusal_of_driver() => {
                    Some(DeviceAccess::Refused { cause: error.reason() })
                }
                Err(_) => None,
            };
            if path == Path::CudaIpc
                && facts.device_access == DeviceAccess::NotTried
                && let (Some(verdict), Some(by)) = (verdict, &device)
            {
                let peer = self.peers.get(number, JOIN)?;
                peer.note_mapping(ends.1.key(), by.name(), verdict.clone());
                facts.device_access = verdict;
                if made.is_err() {
                    continue;
                }
            }
            let error = match made {
                Ok(mover) => {
                    let agent = self.local_target.identity;
                    return Ok(Route::new(agent, number, local, remote, (choice, path), mover));
                }
                Err(error) => error,
            };
            // It may have ended meanwhile, which is not a fact about paths.
            if matches!(error.kind(), ErrorKind::Closed | ErrorKind::Failed | ErrorKind::Stale) {
                self.peers.get(number, JOIN)?.check_connected()?;
            }
            // Obstacles that show only when the path is tried become facts too.
            match error.kind() {
                ErrorKind::Stale if path == Path::ServiceCopied => return Err(error),
                _ if path == Path::ServiceCopied => {
                    let cause = error.to_string();
                    facts.copy_service = CopyServiceState::Unavailable { cause };
                }
                ErrorKind::NoPeerAccess => facts.device_access = DeviceAccess::None,
                ErrorKind::Failed if path.is_local() => {
                    facts.locality = Locality::NoDescriptorPassing { cause: error.to_string() };
                }
                // The peer does not answer by the fabric: recorded by `connect_by_rails`.
                _ if !path.is_local() && self.remote_transport.error(number).is_some() => {
                    facts.fabric = Fabric::None { cause: error.to_string() };
                }
                _ => return Err(error),
            }
        }
    }

    /// Connects to a peer for a join: that it does not answer becomes a fact.
    pub(super) fn connect_by_rails(&mut self, peer: u32, end: Instant) -> Result<()> {
        self.connect_remote(peer, end).inspect_err(|error| {
            self.remote_transport.set_error(peer, Some(error.clone()));
        })
    }

    /// Prepares a fabric path: requests the peer's region, and staging memory if necessary.
    fn open_route_lanes(
        &mut self,
        peer: u32,
        (local, remote): (&RegisteredRegion, &RegionDescriptor),
        keys: Option<&DirectKeys>,
        end: Instant,
    ) -> Result<Vec<RouteLane>> {
        self.connect_by_rails(peer, end)?;
        let opening = self.remote_transport.begin_open(peer, Some(local), remote, keys)?;
        self.wait_for_links(end, RemoteTransport::open_counts);
        self.remote_transport.finish_open(opening)
    }

    /// What is known of a copy service for transfers with a peer, without connecting to it.
    pub(super) fn copy_service_state(&self, peer: u32) -> CopyServiceState {
        let cause = match self.copy_service_directory(peer) {
            Some(directory) => copy_requests::absence(directory),
            None => Some("the peer has no directory".to_owned()),
        };
        match cause {
            Some(cause) => CopyServiceState::Unavailable { cause },
            None => CopyServiceState::Available,
        }
    }

    /// The directory of the peer's socket: a copy service finds the peer there.
    fn copy_service_directory(&self, peer: u32) -> Option<&FilePath> {
        self.peers.find(peer)?.card().socket.as_deref()?.parent()
    }

    /// Lets a copy service map both memories.
    fn open_service_pair(
        &mut self,
        peer: u32,
        local: &Arc<RegisteredRegion>,
        remote: &RegionDescriptor,
        end: Instant,
    ) -> Result<LocalMover> {
        let no_directory = || Error::new(JOIN, ErrorKind::NoPath, "the peer has no directory");
        let directory = self.copy_service_directory(peer).ok_or_else(no_directory)?.to_owned();
        let local_target = &self.local_target;
        let identity = || local_target.as_client_of_copy_service();
        let service = self.local_copies.service_of(&directory, identity)?;
        service.open_pair(local, remote, end)
    }

    /// Maps the memory for a path on this machine.
    fn map_regions(
        &mut self,
        path: Path,
        peer: u32,
        (local, remote): (&Arc<RegisteredRegion>, &RegionDescriptor),
        device: Option<&Device>,
        end: Instant,
    ) -> Result<LocalMover> {
        if path == Path::HostStaged {
            return self.join_staged(peer, local, remote, end);
        }
        let local_session = self.peers.get(peer, JOIN)?.local_session();
        let own_region = local_session.and_then(|session| session.in_process_region(remote));
        let in_process_buffer = match own_region {
            Some(region) if region.descriptor.rights.allow(remote.rights) => {
                Some(region.buffer.clone())
            }
            Some(_) => {
                let detail = "the descriptor claims rights that the region does not grant";
                return Err(Error::new(JOIN, ErrorKind::NotAllowed, detail));
            }
            None if path == Path::SameProcess => {
                let detail = "the region was withdrawn or never existed";
                return Err(Error::new(JOIN, ErrorKind::Stale, detail));
            }
            None => None,
        };
        let Some(device) = device else {
            let no_device =
                || Error::new(JOIN, ErrorKind::NoPath, "no device takes part in this transfer");
            let Buffer::Host(local_buffer) = &local.buffer else { return Err(no_device()) };
            let remote = match in_process_buffer {
                Some(Buffer::Host(buffer)) => buffer,
                Some(Buffer::Device(_)) => return Err(no_device()),
                None => self.map_host(peer, remote, end)?,
            };
            return Ok(LocalMover::Cpu { local: CopyBuffer::Host(local_buffer.clone()), remote });
        };
        let whole = |memory: &Memory, length| memory.slice(0, length).during(JOIN);
        let remote_memory = match in_process_buffer {
            Some(Buffer::Device(memory)) => {
                if memory.device().is_some_and(|resident| resident != device.name()) {
                    device.enable_peer(memory.mapped_for()).during(JOIN)?;
                }
                memory
            }
            Some(Buffer::Host(buffer)) => buffer.pinned_for(device)?,
            None if remote.memory_type.is_device() => self.map_for(peer, remote, device, end)?,
            None => {
                let remote = self.map_host(peer, remote, end)?;
                let Some(memory) = remote.pinned_if_possible(device)? else {
                    let local = match &local.buffer {
                        Buffer::Host(buffer) => CopyBuffer::Host(buffer.clone()),
                        Buffer::Device(memory) => {
                            CopyBuffer::device(whole(memory, local.descriptor.length)?, device)?
                        }
                    };
                    return Ok(LocalMover::Cpu { local, remote });
                };
                memory
            }
        };
        let local_memory = match &local.buffer {
            Buffer::Device(memory) => memory.clone(),
            Buffer::Host(buffer) => buffer.pinned_for(device)?,
        };
        for memory in [&local_memory, &remote_memory] {
            if !memory.is_reachable_from(device) {
                let detail = format!("{:?} does not reach {memory:?}", device.name());
                return Err(Error::new(JOIN, ErrorKind::NoPeerAccess, detail));
            }
        }
        Ok(LocalMover::Device {
            device: device.clone(),
            local: whole(&local_memory, local.descriptor.length)?,
            remote: whole(&remote_memory, remote.length)?,
        })
    }
}
