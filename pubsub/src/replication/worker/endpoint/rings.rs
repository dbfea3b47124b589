//! Rings of a worker's endpoint: offered, accepted and closed.

use std::sync::Arc;

use fabric::ring::{ReceiverId, RingAnswer, RingOffer, RingOptions, SenderId};
use fabric::{Access, Address, MemoryRegion};
use gpu::Device;
use ipc::Layout;
use transfer::{Buffer, device_memory};

use super::WorkerEndpoint;
use super::device_rings::{Beginning, RingEnds, RingExtent};
use super::renewal::ADDRESS_LIMITS;
use crate::error::{Error, ErrorKind, Result};
use crate::replication::connection_messages::{MAX_LANES, fit_addresses};
use crate::replication::transport::host_memory::MappedSpan;
use crate::replication::transport::{MIN_STRIPED_LENGTH, RingDeviceAccess};
use crate::replication::worker::topics::InboundRingMemory;
use crate::replication::worker::{CONNECT, ConnectRequest, MIN_RING_SIZE, WorkerOptions};
use crate::replication::{MAX_PREFIX_LENGTH, NodeId, TopicParameters};

const RING: Layout = Layout::new("replication ring", 1);

impl WorkerEndpoint {
    /// The fabric peer at an address of a node.
    fn resolve_peer(&mut self, node: NodeId, address: Vec<u8>) -> Result<fabric::Peer> {
        self.faults.note_address(node, &address);
        if let Some(peer) = self.fabric_peers.get(&address) {
            return Ok(*peer);
        }
        let addresses = self.fabric_peers.len();
        if addresses >= ADDRESS_LIMITS.1 {
            let detail = format!("the limit of {addresses} addresses is reached");
            return Err(Error::new(CONNECT, ErrorKind::TooMany, detail));
        }
        let address = Address(address);
        let peer = self.addresses.insert(&address).map_err(of_fabric)?;
        self.fabric_peers.insert(address.0, peer);
        Ok(peer)
    }

    /// Fails if a ring of a node could not be accepted now.
    pub(crate) fn check_capacity(&mut self, node: NodeId) -> Result<()> {
        if self.transport.port().can_accept() {
            return Ok(());
        }
        let detail = "the endpoint has no capacity for another ring";
        let reason = Error::new(CONNECT, ErrorKind::TooMany, detail).at(node);
        self.note_ring_capacity(Some(&reason));
        Err(reason)
    }

    /// Addresses of as many lanes, without the first.
    pub(crate) fn further_lane_addresses(&self, lanes: usize) -> Vec<Vec<u8>> {
        let addresses = self.transport.port().lane_addresses().into_iter();
        let lane_addresses =
            addresses.take(lanes.saturating_sub(1)).map(|address| address.0).collect();
        fit_addresses(&self.address, lane_addresses)
    }

    /// Number of lanes for messages of such a topic.
    pub(crate) fn lane_count_for(&self, parameters: &TopicParameters) -> usize {
        let lanes = self.transport.port().lanes().min(MAX_LANES.into());
        if parameters.largest < MIN_STRIPED_LENGTH { 1 } else { lanes }
    }

    /// Connects an offered ring, as its writer answered.
    pub(crate) fn connect(
        &mut self,
        node: NodeId,
        ring: ReceiverId,
        from: Vec<u8>,
        answer: &RingAnswer,
    ) -> Result<()> {
        let peer = self.resolve_peer(node, from)?;
        let connected = self.transport.port_mut().connect(ring, peer, answer);
        connected.map_err(|error| Error::of(CONNECT, error))
    }

    /// Accepts an offered ring, for chunks of this length at most.
    pub(crate) fn accept(
        &mut self,
        node: NodeId,
        offer: &RingOffer,
        (from, lane_addresses): (Vec<u8>, Vec<Vec<u8>>),
        chunk: u64,
    ) -> Result<(SenderId, RingAnswer)> {
        if offer.capacity < MIN_RING_SIZE / 2 {
            let detail = format!("offered ring of {} bytes is too small", offer.capacity);
            return Err(Error::new(CONNECT, ErrorKind::Malformed, detail));
        }
        if (1..MAX_PREFIX_LENGTH).contains(&usize::from(offer.inline_data)) {
            let detail = "offered ring has no room for the header of a message";
            return Err(Error::new(CONNECT, ErrorKind::Malformed, detail));
        }
        let peer = self.resolve_peer(node, from)?;
        let longest = chunk.min(offer.capacity / 4).max(4 * MAX_PREFIX_LENGTH as u64);
        let lane_addresses: Vec<_> = lane_addresses.into_iter().map(Address).collect();
        let port = self.transport.port_mut();
        let accepted = port.accept_on_lanes(peer, &lane_addresses, offer, longest);
        let accepted = accepted.map_err(of_fabric);
        self.note_ring_capacity(accepted.as_ref().err());
        accepted
    }

    /// Creates a ring for a writer that requested one, and tells whether it begins with a probe.
    pub(crate) fn offer(
        &mut self,
        node: NodeId,
        request: &ConnectRequest,
        device: Option<&Device>,
        options: &WorkerOptions,
    ) -> Result<(RingOffer, InboundRingMemory, bool)> {
        let lanes = self.lane_count_for(&request.parameters).min(1 + request.lane_addresses.len());
        // Only as many lanes as a message has space for.
        let lanes = 1 + self.further_lane_addresses(lanes).len();
        // Before the writer knows the ring.
        self.resolve_peer(node, request.from.clone())?;
        let lane_addresses: Vec<_> =
            request.lane_addresses.iter().take(lanes - 1).cloned().map(Address).collect();
        let port = self.transport.port_mut();
        port.insert_lane_addresses(&lane_addresses).map_err(of_fabric)?;
        let capacity =
            options.ring_size_for(lanes, request.parameters.largest, request.parameters.depth);
        let options = RingOptions::new(port.endpoint(), capacity).map_err(of_fabric)?;
        let (memory, is_probed) = match device {
            None => {
                let memory = fabric::HostMemory::zeroed(capacity as usize).map_err(of_fabric)?;
                let ring = port.offer_on_lanes(&options, lanes, memory).map_err(of_fabric)?;
                (InboundRingMemory::in_host(ring, None, None), false)
            }
            Some(device) => self.offer_for_device((node, request), device, (&options, lanes))?,
        };
        let port = self.transport.port_mut();
        match port.ring_offer(memory.id()) {
            Ok(offer) => Ok((offer, memory, is_probed)),
            Err(error) => {
                port.forget(memory.id());
                Err(of_fabric(error))
            }
        }
    }

    /// Creates a ring for a topic on a device: in its memory if that works, else in host memory.
    fn offer_for_device(
        &mut self,
        (node, request): (NodeId, &ConnectRequest),
        device: &Device,
        (options, lanes): (&RingOptions, usize),
    ) -> Result<(InboundRingMemory, bool)> {
        let extent = RingExtent::new(options.capacity, lanes);
        let writer = request.direct.as_ref();
        let cause = match self.device_rings.beginning(node, writer, (device, extent)) {
            Ok((ends, beginning)) => {
                let is_probed = beginning == Beginning::Probe;
                // Other errors than of this port's capacity are of the memory: then it is staged.
                match self.register_on_device(device, (options, lanes), is_probed) {
                    Ok((device_access, regions)) => {
                        let inline_data = MAX_PREFIX_LENGTH as u16;
                        let options = RingOptions { inline_data, ..*options };
                        let port = self.transport.port_mut();
                        let ring = port.offer_registered(&options, regions.clone());
                        let direct = (ends, extent, regions);
                        let memory = InboundRingMemory::on_device(
                            ring.map_err(of_fabric)?,
                            device_access,
                            direct,
                        );
                        return Ok((memory, is_probed));
                    }
                    Err(error) => {
                        tracing::warn!(%error, %node, "no ring in device memory");
                        error.to_string()
                    }
                }
            }
            Err(cause) => cause,
        };
        let memory = MappedSpan::pinned(RING, options.capacity as usize, device, CONNECT)?;
        let device_access = RingDeviceAccess::pinned(&memory);
        let port = self.transport.port_mut();
        let ring = port.offer_on_lanes(options, lanes, memory).map_err(of_fabric)?;
        Ok((InboundRingMemory::in_host(ring, Some(device_access), Some(cause)), false))
    }

    /// Memory of a device for a ring, registered with the domain of each lane.
    fn register_on_device(
        &mut self,
        device: &Device,
        (options, lanes): (&RingOptions, usize),
        is_probed: bool,
    ) -> Result<(RingDeviceAccess, Vec<MemoryRegion>)> {
        let allocated = device.allocate_shared(options.capacity, &[]);
        let memory = allocated.map_err(|error| Error::of(CONNECT, error))?;
        let device_access = RingDeviceAccess::on_device(memory.clone(), is_probed)?;
        let buffer = Arc::new(Buffer::Device(memory));
        let port = self.transport.port_mut();
        let register = |lane| {
            let domain = port.lane_domain(lane).unwrap_or(port.endpoint().domain());
            device_memory::register(domain, Arc::clone(&buffer), Access::REMOTE_WRITE)
        };
        let regions: fabric::Result<Vec<_>> = (0..lanes).map(register).collect();
        Ok((device_access, regions.map_err(of_fabric)?))
    }

    pub(crate) fn probe_failed(&mut self, ends: RingEnds, cause: &str) {
        let provider = &self.transport.port().endpoint().domain().capabilities().provider;
        self.device_rings.probe_failed(ends, format!("{provider} failed the probe: {cause}"));
    }

    /// Closes a ring of a node. No answer is waited for if the writer is gone or has restarted.
    pub(crate) fn close_ring(&mut self, node: NodeId, ring: ReceiverId, is_gone: bool, now: u64) {
        if is_gone {
            return self.reclaim(node, |port| port.forget(ring));
        }
        match self.reclaim(node, |port| port.close_receiver(ring)) {
            Ok(_) => self.closing_rings.push((ring, node, now)),
            Err(error) => tracing::debug!(%error, "closing a ring failed"),
        }
    }

    /// Forgets rings whose writers did not answer within the timeout.
    pub(crate) fn expire_closing_rings(&mut self, now: u64, timeout: u64) {
        let is_late = |(_, _, since): &mut (ReceiverId, NodeId, u64)| now - *since > timeout;
        for (ring, node, _) in self.closing_rings.extract_if(.., is_late).collect::<Vec<_>>() {
            self.reclaim(node, |port| port.forget_if_closing(ring));
        }
    }
}

/// Exhausted capacity, which a retry may find free, has its own kind.
#[cold]
fn of_fabric(error: fabric::Error) -> Error {
    let kind = match error.kind() {
        fabric::ErrorKind::ResourceExhausted => ErrorKind::TooMany,
        _ => ErrorKind::Failed,
    };
    Error::because(CONNECT, kind, error)
}
