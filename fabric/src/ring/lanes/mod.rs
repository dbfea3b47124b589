//! Lanes that a port has beside its own endpoint: each an endpoint with its queue, its domain and a
//! thread.
//!
//! One connection does not always fill the wire, or the memory that stands for one: a
//! software provider is bound to what one thread copies, a machine may have several cards.
//! The ring stays one: one memory, registered with each lane's domain, one order of chunks,
//! one credit. A chunk goes by the lane that is expected to be done with it first. Whoever
//! owns the port plans and takes; the lanes post and listen.

mod extra_lanes;
mod lane;
mod scheduler;
mod send_queue;
mod stripe_tracker;

pub(super) use extra_lanes::ExtraLanes;
pub(super) use lane::LaneEvent;
pub(super) use stripe_tracker::StripeTracker;

use super::credit_memory;
use super::posted_receives::PostedReceives;
use super::queue_budget::queue_entries;
use crate::{
    AddressVector, Capabilities, CompletionQueue, Domain, Endpoint, EndpointKind, Error, ErrorKind,
    MemoryRegion, QueueOptions, Result, WaitStrategy,
};

/// Lanes of a ring, at most.
const MAX_LANES: usize = 64;

/// Lanes that are open and belong to no port yet: see [`Port::add_lanes`](super::Port::add_lanes).
#[derive(Debug)]
pub struct LaneSet {
    lanes: Vec<OpenLane>,
}

/// A lane before it has a thread.
#[derive(Debug)]
struct OpenLane {
    endpoint: Endpoint,
    queue: CompletionQueue,
    addresses: AddressVector,
    credit_memory: MemoryRegion,
}

impl LaneSet {
    /// Opens a lane on each of these domains: what is registered with them can be written through
    /// it. A domain that is there several times has several lanes. Their threads sleep at once when
    /// there is nothing to do.
    ///
    /// # Errors
    /// What cannot be opened; `InvalidArgument` for no domains, more than 64, or connected ones.
    pub fn open_on(domains: &[Domain]) -> Result<Self> {
        let refuse =
            |why: String| Err(Error::new(ErrorKind::InvalidArgument, "opening lanes", why));
        if domains.is_empty() || domains.len() > MAX_LANES {
            return refuse(format!(
                "{} lanes were asked for, 1 to {MAX_LANES} are possible",
                domains.len()
            ));
        }
        if domains.iter().any(|domain| domain.capabilities().endpoint != EndpointKind::Rdm) {
            return refuse("lanes are connectionless endpoints".to_owned());
        }
        let mut lanes = Vec::with_capacity(domains.len());
        for domain in domains {
            let size = queue_entries(domain.capabilities());
            let queue_options = QueueOptions { size, waiting: WaitStrategy::Block };
            let mut queue = CompletionQueue::open_with(domain, queue_options)?;
            let addresses = AddressVector::open(domain)?;
            let builder = Endpoint::builder(domain).addresses(&addresses);
            let endpoint = builder.queue(&mut queue).open()?;
            let credit_memory = credit_memory::without_credits(&endpoint)?;
            lanes.push(OpenLane { endpoint, queue, addresses, credit_memory });
        }
        Ok(Self { lanes })
    }

    /// What is known of each lane's provider, and the entries of its queue.
    pub(super) fn queues(&self) -> impl Iterator<Item = (&Capabilities, usize)> {
        self.lanes.iter().map(|lane| (lane.endpoint.domain().capabilities(), lane.queue.size()))
    }
}

impl OpenLane {
    fn posted_receives(&self) -> PostedReceives {
        PostedReceives::new(self.endpoint.domain())
    }
}

/// How many lanes are sensible, for these offers of one provider: those that a policy chose for
/// the same peer, one for each card or address.
///
/// A card fills its wire by one lane, so there is a lane for each. Without a card the provider
/// copies, and one thread does not copy as fast as the memory is: then there are several,
/// unless there are too few cores for as many threads on both sides. A provider that never
/// leaves the machine writes straight into the peer's memory, and a second lane would only
/// contend with the first.
#[must_use]
pub fn default_lane_count(offers: &[Capabilities], cores: usize) -> usize {
    let Some(first) = offers.first() else { return 1 };
    let mut cards: Vec<_> = offers.iter().filter_map(|facts| facts.nic.as_ref()).collect();
    cards.sort_by(|a, b| (&a.pci, &a.name).cmp(&(&b.pci, &b.name)));
    cards.dedup_by(|a, b| (&a.pci, &a.name) == (&b.pci, &b.name));
    if !cards.is_empty() {
        return cards.len().min(MAX_LANES);
    }
    if !first.reaches_other_machines {
        return 1;
    }
    (cores * 3 / 8).clamp(1, MAX_COPYING_LANES)
}

/// The most lanes of a provider that copies that were measured to bring more, on as many cores as are
/// for both sides: see docs/ring.md.
const MAX_COPYING_LANES: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Query;

    #[test]
    fn lanes_follow_cards_and_cores() {
        let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
        let mut copying = offer.capabilities().clone();
        (copying.nic, copying.reaches_other_machines) = (None, true);
        let counts =
            [1, 4, 8, 16, 24, 64].map(|cores| default_lane_count(&[copying.clone()], cores));
        assert_eq!(counts, [1, 1, 3, 6, 8, 8]);
        let local = Capabilities { reaches_other_machines: false, ..copying.clone() };
        assert_eq!(default_lane_count(&[local], 64), 1);
        let card = |name: &str| {
            let nic = crate::Nic {
                name: Some(name.to_owned()),
                pci: None,
                link_bits_per_second: 0,
                link_up: None,
            };
            Capabilities { nic: Some(nic), ..copying.clone() }
        };
        assert_eq!(default_lane_count(&[card("mlx5_0"), card("mlx5_1"), card("mlx5_0")], 4), 2);
        assert_eq!(default_lane_count(&[], 64), 1);
    }
}
