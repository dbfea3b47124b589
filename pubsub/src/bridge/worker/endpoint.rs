//! The endpoint of a worker: which provider, and where.

use std::net::IpAddr;

use fabric::ring::{Port, Stripes, StripesOptions, default_stripes};
use fabric::{
    AddressVector, Capabilities, CompletionQueue, Domain, Endpoint, EndpointKind,
    ErrorKind as FabricKind, Need, Offer, Policy, Query, QueueOptions, Reach, Verdict, Waiting,
    select,
};

use super::super::Spot;
use super::super::terms::MOST_LANES;
use crate::error::{Error, ErrorKind, Result};

const START: &str = "start a bridge";
/// Completions that may wait to be looked at.
const QUEUE: usize = 4096;

pub(super) struct Opened {
    pub(super) addresses: AddressVector,
    pub(super) port: Port,
    pub(super) spot: Spot,
    /// Of the further lanes.
    pub(super) lane_domains: Vec<Domain>,
}

/// How many lanes a worker has that shares the cores with others, so many in all: as many as were
/// asked for, or as fill the wire (0), but no more threads than there are cores.
pub(super) fn count_lanes(
    asked: usize,
    facts: &Capabilities,
    cores: usize,
    workers: usize,
) -> usize {
    let wanted = match asked {
        0 => default_stripes(std::slice::from_ref(facts), cores),
        asked => asked.min(usize::from(MOST_LANES)),
    };
    wanted.min(cores / workers.max(1)).max(1)
}

pub(super) fn open(policy: &Policy, local: IpAddr, lanes: usize, workers: usize) -> Result<Opened> {
    let of_fabric = |error| Error::of(START, error);
    let offer = choose(policy, local)?;
    let facts = offer.capabilities().clone();
    let domain = Domain::open(&offer).map_err(of_fabric)?;
    let addresses = AddressVector::open(&domain).map_err(of_fabric)?;
    let (endpoint, queue) = begin(&domain, &addresses).map_err(of_fabric)?;
    let address = endpoint.address().map_err(of_fabric)?.0;
    let mut port = Port::new(endpoint, queue);
    port.keep_news();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let further = count_lanes(lanes, &facts, cores, workers) - 1;
    let lane_domains =
        (0..further).map(|_| Domain::open(&offer)).collect::<fabric::Result<Vec<_>>>();
    let mut lane_domains = lane_domains.map_err(of_fabric)?;
    if !add_lanes(&mut port, &lane_domains) {
        lane_domains.clear();
    }
    let (provider, protocol, format) = (facts.provider, facts.protocol, facts.address_format);
    let spot = Spot { provider, protocol, format, address };
    Ok(Opened { addresses, port, spot, lane_domains })
}

/// Starts the further lanes. False if there are none then: all goes by the first, which is said.
pub(super) fn add_lanes(port: &mut Port, domains: &[Domain]) -> bool {
    if domains.is_empty() {
        return true;
    }
    let options = StripesOptions { waiting: Waiting::Block };
    let added = Stripes::open_on(domains, options).and_then(|lanes| port.add_lanes(lanes));
    match &added {
        Ok(()) => tracing::info!(lanes = port.lanes(), "large messages go by several lanes"),
        Err(error) => tracing::warn!(%error, "large messages go by one lane"),
    }
    added.is_ok()
}

fn begin(
    domain: &Domain,
    addresses: &AddressVector,
) -> fabric::Result<(Endpoint, CompletionQueue)> {
    let options = QueueOptions { size: QUEUE, waiting: Waiting::Block };
    let mut queue = CompletionQueue::open_with(domain, options)?;
    let endpoint = Endpoint::builder(domain).addresses(addresses).queue(&mut queue).open()?;
    Ok((endpoint, queue))
}

/// Another endpoint in the place of a port's, which is closed, with all rings. Gives its address,
/// and where those of others are kept for it.
///
/// # Errors
/// What the provider says. Then the old one may be there or not, and is of no use any more.
pub(super) fn renew(port: &mut Port) -> Result<(AddressVector, Vec<u8>)> {
    let of_fabric = |error| Error::of("begin a bridge's endpoint anew", error);
    let domain = port.endpoint().domain().clone();
    let addresses = AddressVector::open(&domain).map_err(of_fabric)?;
    let (endpoint, queue) = begin(&domain, &addresses).map_err(of_fabric)?;
    let address = endpoint.address().map_err(of_fabric)?.0;
    port.renew(endpoint, queue).map_err(of_fabric)?;
    Ok((addresses, address))
}

/// The best offer that leads to other machines; on the loopback address, one that would if it were
/// another. What never leaves the machine is taken only if the policy requires it by name.
fn choose(policy: &Policy, local: IpAddr) -> Result<Offer> {
    policy.check().map_err(|error| Error::of(START, error))?;
    let is_asked = !policy.require.is_empty();
    let reach =
        if is_asked || local.is_loopback() { Reach::SameMachine } else { Reach::OtherMachines };
    let mut refused = None;
    // Without immediates there are still messages.
    for immediate_bytes in [4, 0] {
        let need = Need { immediate_bytes, ..Need::ring(reach) };
        let query = Query::new(EndpointKind::Rdm).source(local.to_string()).caps(need.caps);
        let mut offers = match query.offers() {
            Ok(offers) => offers,
            Err(error) if error.kind() == FabricKind::NoProvider => Vec::new(),
            Err(error) => return Err(Error::of(START, error)),
        };
        offers.retain(|offer| is_asked || offer.capabilities().reaches_other_machines);
        let candidates: Vec<&Offer> = offers.iter().collect();
        let (choice, order) = select(&candidates, &need, policy);
        let taken = choice.candidates.iter().position(|one| one.verdict == Verdict::Taken);
        if let Some(place) = taken {
            let offer = offers.swap_remove(order[place]);
            tracing::info!(provider = %offer.capabilities().provider, %local, "a bridge's provider");
            return Ok(offer);
        }
        refused.get_or_insert(choice);
    }
    let why = refused.map(|choice| choice.to_string()).unwrap_or_default();
    let detail = format!("no provider leads from {local} to other nodes: {}", why.trim_end());
    Err(Error::new(START, ErrorKind::Failed, detail))
}
