//! The endpoint of a worker: its transport, its peers, and its renewal.

mod device_rings;
mod node_faults;
mod renewal;
mod renewal_reason;
mod rings;
mod selection;

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use fabric::ring::{LaneSet, Port, PortEvent, ReceiverId, RingEvent, queue_entries};
use fabric::{
    AddressVector, Caps, CompletionQueue, Domain, Endpoint, Peer, PeerToPeer, QueueOptions,
    WaitStrategy, Waker,
};
use transfer::device_memory::FabricFacts;
use transfer::path::DeviceFabric;

use self::device_rings::DeviceRings;
pub(super) use self::device_rings::{RingEnds, RingExtent};
use self::node_faults::NodeFaults;
use self::renewal::Renewal;
pub(super) use self::renewal_reason::RenewalReason;
pub(crate) use self::selection::choose as choose_provider;
use super::{Counters, NodeId, Provider, WorkerOptions};
use crate::error::{Error, Result};
use crate::replication::transport::Transport;

const START: &str = "start replication worker";
const COMPLETIONS_PER_ROUND: usize = 64;
/// Failures of the endpoint, without a success between them, after which the worker ends.
const MAX_ENDPOINT_FAILURES: u32 = 1000;

pub(super) struct WorkerEndpoint {
    transport: Transport,
    addresses: AddressVector,
    address: Vec<u8>,
    lane_domains: Vec<Domain>,
    fabric_peers: HashMap<Vec<u8>, Peer>,
    /// Rings being closed, with node and time: their writers may never answer.
    closing_rings: Vec<(ReceiverId, NodeId, u64)>,
    renewal: Renewal,
    faults: NodeFaults,
    device_rings: DeviceRings,
    /// Bytes of the largest ring.
    largest_ring: u64,
    failures: u32,
    has_failed: bool,
    sleep_count: u64,
}

impl WorkerEndpoint {
    /// Opens an endpoint of the best provider at a local address.
    pub(super) fn open(
        options: &WorkerOptions,
        local: IpAddr,
        workers: usize,
    ) -> Result<(Self, Provider)> {
        let of_fabric = |error| Error::of(START, error);
        let offer = match &options.offer {
            Some(offer) => offer.clone(),
            None => selection::choose_with(&options.policy, local, options.device_fabric)?,
        };
        tracing::info!(
            provider = %offer.capabilities().provider,
            %local,
            "provider of replication chosen"
        );
        let capabilities = offer.capabilities().clone();
        let domain = Domain::open(&offer).map_err(of_fabric)?;
        let addresses = AddressVector::open(&domain).map_err(of_fabric)?;
        let registers_devices = capabilities.caps.contains(Caps::DEVICE_MEMORY);
        let (endpoint, queue, refusal) =
            begin(&domain, &addresses, options.device_fabric).map_err(of_fabric)?;
        let facts = FabricFacts::new(options.device_fabric, registers_devices, refusal);
        let address = endpoint.address().map_err(of_fabric)?.0;
        let mut port = Port::new(endpoint, queue);
        port.enable_events();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let lanes = selection::choose_lane_count(options.lanes, &capabilities, cores, workers);
        let lane_domains =
            (1..lanes).map(|_| Domain::open(&offer)).collect::<fabric::Result<Vec<_>>>();
        let mut lane_domains = lane_domains.map_err(of_fabric)?;
        if !add_lanes(&mut port, &lane_domains) {
            lane_domains.clear();
        }
        let name = capabilities.wire_name().to_owned();
        let provider =
            Provider { name, protocol: capabilities.protocol, format: capabilities.address_format };
        let largest_ring = options.ring.saturating_mul(1 + lane_domains.len() as u64);
        let max_slots = options.max_slots.max(2 * options.slots_for(port.lanes()));
        let opened = Self {
            transport: Transport::new(port, options.chunk as usize, max_slots),
            addresses,
            address,
            lane_domains,
            fabric_peers: HashMap::new(),
            closing_rings: Vec::new(),
            renewal: Renewal::default(),
            faults: NodeFaults::default(),
            device_rings: DeviceRings::new(facts),
            largest_ring,
            failures: 0,
            has_failed: false,
            sleep_count: 0,
        };
        Ok((opened, provider))
    }

    pub(super) fn address(&self) -> &[u8] {
        &self.address
    }

    pub(super) fn transport(&mut self) -> &mut Transport {
        &mut self.transport
    }

    /// Decides which rings may lie in device memory.
    pub(super) fn device_rings(&mut self) -> &mut DeviceRings {
        &mut self.device_rings
    }

    /// Wakes the thread while it waits for the endpoint, until that is renewed.
    pub(super) fn waker(&mut self) -> Waker {
        self.transport.port_mut().parts().1.waker()
    }

    /// Returns true if the endpoint failed so often that the worker has to end.
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Counters without those of the topics.
    pub(super) fn counters(&self) -> Counters {
        Counters {
            quarantined_bytes: self.transport.port().quarantined_bytes(),
            renewals: self.renewal.count(),
            sleeps: self.sleep_count,
            ..Counters::default()
        }
    }

    /// Handles completions, up to a limit. True if there was an event.
    pub(super) fn poll(&mut self) -> bool {
        let mut has_moved = false;
        for _ in 0..COMPLETIONS_PER_ROUND {
            let progress = self.transport.port_mut().progress();
            if !self.note_progress(progress) {
                break;
            }
            has_moved = true;
        }
        has_moved
    }

    /// Waits for an event. Without a descriptor to sleep on, it polls with pauses up to
    /// `max_pause`.
    pub(super) fn sleep(&mut self, longest: Duration, max_pause: Duration) {
        self.sleep_count += 1;
        self.transport.port_mut().parts().1.set_max_pause(max_pause);
        self.wait(longest);
    }

    pub(super) fn wait(&mut self, longest: Duration) {
        let progress = self.transport.port_mut().wait(longest);
        self.note_progress(progress);
    }

    /// Notes the result of a turn of the port. True if there was an event.
    fn note_progress(&mut self, progress: fabric::Result<PortEvent>) -> bool {
        match progress {
            Ok(PortEvent::Idle) => false,
            Ok(_) => {
                self.failures = 0;
                true
            }
            Err(error) => {
                tracing::debug!(%error, "an endpoint operation failed");
                self.failures += 1;
                if self.failures >= MAX_ENDPOINT_FAILURES {
                    tracing::error!(%error, "the endpoint failed repeatedly; the worker ends");
                    self.has_failed = true;
                }
                false
            }
        }
    }

    pub(super) fn next_event(&mut self) -> Option<RingEvent> {
        self.transport.port_mut().next_event()
    }

    /// Closes the endpoint, and then releases all memory.
    pub(super) fn close(self) {
        if let Err(error) = self.transport.close() {
            tracing::warn!(%error, "closing the endpoint failed");
        }
    }
}

/// Starts the further lanes. On failure all messages use the first lane, and a warning is logged.
fn add_lanes(port: &mut Port, domains: &[Domain]) -> bool {
    if domains.is_empty() {
        return true;
    }
    let added = LaneSet::open_on(domains).and_then(|lanes| port.add_lanes(lanes));
    match &added {
        Ok(()) => tracing::info!(lanes = port.lanes(), "large messages use several lanes"),
        Err(error) => tracing::warn!(%error, "large messages use one lane"),
    }
    added.is_ok()
}

/// Opens an endpoint, and returns why it refuses direct transfers of device memory, if it does.
fn begin(
    domain: &Domain,
    addresses: &AddressVector,
    device_fabric: DeviceFabric,
) -> fabric::Result<(Endpoint, CompletionQueue, Option<String>)> {
    let size = queue_entries(domain.capabilities());
    let options = QueueOptions { size, waiting: WaitStrategy::Block };
    let mut queue = CompletionQueue::open_with(domain, options)?;
    let mut refusal = None;
    if domain.capabilities().caps.contains(Caps::DEVICE_MEMORY)
        && device_fabric != DeviceFabric::Off
    {
        let builder = Endpoint::builder(domain).addresses(addresses).queue(&mut queue);
        match builder.peer_to_peer(PeerToPeer::Required).open() {
            Ok(endpoint) => return Ok((endpoint, queue, None)),
            Err(error) => {
                tracing::info!(%error, "no direct transfers of device memory");
                refusal = Some(error.to_string());
            }
        }
    }
    let endpoint = Endpoint::builder(domain).addresses(addresses).queue(&mut queue).open()?;
    Ok((endpoint, queue, refusal))
}
