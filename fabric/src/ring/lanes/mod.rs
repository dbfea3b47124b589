//! Lanes: an endpoint each, with its queue, its domain and a thread, in addition to the port's own
//! endpoint.
//!
//! One connection does not always fill the network or the memory bandwidth: a software provider is
//! limited to what one thread copies, and a machine may have several NICs. A ring on lanes stays
//! one ring: one memory, registered with each lane's domain, one order of chunks, one credit. A
//! chunk goes by the lane that is expected to complete it first. The port plans chunks and takes
//! them; lanes post them and receive notices.

mod extra_lanes;
mod lane;
mod lane_event;
mod scheduler;
mod send_queue;
mod stripe_tracker;

pub(super) use extra_lanes::ExtraLanes;
pub(super) use lane_event::LaneEvent;
pub(super) use stripe_tracker::StripeTracker;

use lane::RetainedMemory;

use std::collections::BTreeSet;

use super::posted_receives::PostedReceives;
use super::queue_budget::queue_entries;
use super::{EndpointIo, credit_memory};
use crate::{
    AddressVector, Capabilities, CompletionQueue, Domain, Endpoint, EndpointKind, Error, ErrorKind,
    MemoryRegion, QueueOptions, Result, WaitStrategy,
};

const MAX_LANES: usize = 64;

/// Open lanes that belong to no port yet: see [`Port::add_lanes`](super::Port::add_lanes).
#[derive(Debug)]
pub struct LaneSet {
    lanes: Vec<OpenLane>,
}

/// A lane without its thread.
#[derive(Debug)]
struct OpenLane {
    io: EndpointIo,
    addresses: AddressVector,
    credit_memory: MemoryRegion,
}

/// Resources of a lane's thread. Drop order: the endpoint before the memory that peers write.
struct LaneResources {
    io: EndpointIo,
    posted_receives: PostedReceives,
    _credit_memory: MemoryRegion,
    _retained: RetainedMemory,
}

impl LaneSet {
    /// Opens a lane on each of these domains, to write memory registered with them. A domain may be
    /// given repeatedly for several lanes. Idle threads sleep at once.
    ///
    /// # Errors
    /// Errors of libfabric; `InvalidArgument` for no domains, more than 64, or connection-oriented
    /// ones.
    pub fn open_on(domains: &[Domain]) -> Result<Self> {
        let refuse = |why: String| Err(Error::new(ErrorKind::InvalidArgument, "open lanes", why));
        if domains.is_empty() || domains.len() > MAX_LANES {
            return refuse(format!("{} lanes were requested. Use 1 to {MAX_LANES}", domains.len()));
        }
        if domains.iter().any(|domain| domain.capabilities().endpoint != EndpointKind::Rdm) {
            return refuse("lanes need connectionless endpoints".to_owned());
        }
        let mut lanes = Vec::with_capacity(domains.len());
        for domain in domains {
            let size = queue_entries(domain.capabilities());
            let queue_options = QueueOptions { size, waiting: WaitStrategy::Block };
            let mut queue = CompletionQueue::open_with(domain, queue_options)?;
            let addresses = AddressVector::open(domain)?;
            let builder = Endpoint::builder(domain).addresses(&addresses);
            let endpoint = builder.queue(&mut queue).open()?;
            let credit_memory = credit_memory::register(&endpoint, 0)?;
            let io = EndpointIo { endpoint, queue };
            lanes.push(OpenLane { io, addresses, credit_memory });
        }
        Ok(Self { lanes })
    }

    /// Capabilities of each lane's provider, and the entries of its queue.
    pub(super) fn queues(&self) -> impl Iterator<Item = (&Capabilities, usize)> {
        self.lanes
            .iter()
            .map(|lane| (lane.io.endpoint.domain().capabilities(), lane.io.queue.size()))
    }
}

/// A sensible number of lanes for these offers of one provider: those that a policy chose for the
/// same peer, one for each NIC or address.
///
/// A NIC fills its link with one lane, so each NIC has one. Without a NIC the provider copies, and
/// one thread copies slower than the memory: then there are several lanes, as far as there are
/// cores for the threads of both sides. A provider that stays on the machine writes directly into
/// the peer's memory, and a second lane would only contend with the first.
#[must_use]
pub fn default_lane_count(offers: &[Capabilities], cores: usize) -> usize {
    let Some(first) = offers.first() else { return 1 };
    let nics = offers.iter().filter_map(|capabilities| capabilities.nic.as_ref());
    let nics: BTreeSet<_> = nics.map(|nic| (&nic.pci, &nic.name)).collect();
    if !nics.is_empty() {
        return nics.len().min(MAX_LANES);
    }
    if !first.reaches_other_machines {
        return 1;
    }
    (cores * 3 / 8).clamp(1, MAX_COPYING_LANES)
}

/// The largest number of lanes of a copying provider that improved measurements, with cores for
/// both sides: see docs/internals/ring.md.
const MAX_COPYING_LANES: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Query;

    #[test]
    fn default_lane_count_follows_nics_and_cores() {
        let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
        let mut copying = offer.capabilities().clone();
        (copying.nic, copying.reaches_other_machines) = (None, true);
        let counts =
            [1, 4, 8, 16, 24, 64].map(|cores| default_lane_count(&[copying.clone()], cores));
        assert_eq!(counts, [1, 1, 3, 6, 8, 8]);
        let local = Capabilities { reaches_other_machines: false, ..copying.clone() };
        assert_eq!(default_lane_count(&[local], 64), 1);
        let nic = |name: &str| {
            let nic = crate::Nic {
                name: Some(name.to_owned()),
                pci: None,
                link_bits_per_second: 0,
                link_up: None,
            };
            Capabilities { nic: Some(nic), ..copying.clone() }
        };
        assert_eq!(default_lane_count(&[nic("mlx5_0"), nic("mlx5_1"), nic("mlx5_0")], 4), 2);
        assert_eq!(default_lane_count(&[], 64), 1);
    }
}
