//! The endpoint of a worker: which provider, and where.

use std::collections::BTreeSet;
use std::net::IpAddr;

use fabric::ring::{LaneSet, Port, default_lane_count, queue_entries};
use fabric::{
    AddressVector, Candidate, Capabilities, Choice, CompletionQueue, Domain, Endpoint,
    EndpointKind, ErrorKind as FabricKind, Locality, Offer, Policy, Query, QueueOptions,
    Requirements, Verdict, WaitStrategy, select,
};

use super::super::connection_messages::{MAX_LANES, Provider};
use crate::error::{Error, ErrorKind, Result};

const START: &str = "start a replication worker";

pub(super) struct OpenedEndpoint {
    pub(super) addresses: AddressVector,
    pub(super) port: Port,
    pub(super) provider: Provider,
    pub(super) address: Vec<u8>,
    /// Of the further lanes.
    pub(super) lane_domains: Vec<Domain>,
}

/// How many lanes a worker has that shares the cores with others, of one lane each, so many in all: as
/// many as were asked for, or as fill the wire (0), but no more threads than there are cores.
pub(super) fn choose_lane_count(
    asked: usize,
    facts: &Capabilities,
    cores: usize,
    workers: usize,
) -> usize {
    let wanted = match asked {
        0 => default_lane_count(std::slice::from_ref(facts), cores),
        asked => asked.min(usize::from(MAX_LANES)),
    };
    wanted.min((cores + 1).saturating_sub(workers)).max(1)
}

pub(super) fn open(
    policy: &Policy,
    local: IpAddr,
    lanes: usize,
    workers: usize,
) -> Result<OpenedEndpoint> {
    let of_fabric = |error| Error::of(START, error);
    let offer = choose(policy, Some(local))?;
    tracing::info!(provider = %offer.capabilities().provider, %local, "this provider carries messages to other nodes");
    let facts = offer.capabilities().clone();
    let domain = Domain::open(&offer).map_err(of_fabric)?;
    let addresses = AddressVector::open(&domain).map_err(of_fabric)?;
    let (endpoint, queue) = begin(&domain, &addresses).map_err(of_fabric)?;
    let address = endpoint.address().map_err(of_fabric)?.0;
    let mut port = Port::new(endpoint, queue);
    port.enable_events();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let further = choose_lane_count(lanes, &facts, cores, workers) - 1;
    let lane_domains =
        (0..further).map(|_| Domain::open(&offer)).collect::<fabric::Result<Vec<_>>>();
    let mut lane_domains = lane_domains.map_err(of_fabric)?;
    if !add_lanes(&mut port, &lane_domains) {
        lane_domains.clear();
    }
    let name = facts.wire_name().to_owned();
    let provider = Provider { name, protocol: facts.protocol, format: facts.address_format };
    Ok(OpenedEndpoint { addresses, port, provider, address, lane_domains })
}

/// Starts the further lanes. False if there are none then: all goes by the first, which is said.
pub(super) fn add_lanes(port: &mut Port, domains: &[Domain]) -> bool {
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

fn begin(
    domain: &Domain,
    addresses: &AddressVector,
) -> fabric::Result<(Endpoint, CompletionQueue)> {
    let size = queue_entries(domain.capabilities());
    let options = QueueOptions { size, waiting: WaitStrategy::Block };
    let mut queue = CompletionQueue::open_with(domain, options)?;
    let endpoint = Endpoint::builder(domain).addresses(addresses).queue(&mut queue).open()?;
    Ok((endpoint, queue))
}

/// Another endpoint in the place of a port's, which is closed, with all rings. Gives its address,
/// and where those of others are kept for it.
pub(super) fn replace_endpoint(port: &mut Port) -> Result<(AddressVector, Vec<u8>)> {
    let of_fabric = |error| Error::of("renew the endpoint", error);
    let domain = port.endpoint().domain().clone();
    let addresses = AddressVector::open(&domain).map_err(of_fabric)?;
    let (endpoint, queue) = begin(&domain, &addresses).map_err(of_fabric)?;
    let address = endpoint.address().map_err(of_fabric)?.0;
    port.replace_endpoint(endpoint, queue).map_err(of_fabric)?;
    Ok((addresses, address))
}

/// Refuses what no worker at this address could begin with; if it is not known where it will be, what
/// none could begin with anywhere on this machine.
pub(crate) fn check(policy: &Policy, local: Option<IpAddr>) -> Result<()> {
    choose(policy, local).map(drop)
}

/// The best offer that leads to other machines; on the loopback address, one that would if it were
/// another. What never leaves the machine is refused, also where both nodes are on one and it is
/// asked for by name: of two nodes that shm of libfabric 1.17 connected, one died in it as soon as a
/// topic went between them.
fn choose(policy: &Policy, local: Option<IpAddr>) -> Result<Offer> {
    policy.check().map_err(|error| Error::of(START, error))?;
    let is_asked = !policy.require.is_empty();
    let may_be_near = local.is_none_or(|local| local.is_loopback());
    let reach =
        if is_asked || may_be_near { Locality::SameMachine } else { Locality::OtherMachines };
    let (mut refused, mut near) = (None, BTreeSet::new());
    // Without immediates there are still messages.
    for immediate_bytes in [4, 0] {
        let need = Requirements { immediate_bytes, ..Requirements::ring(reach) };
        let query = Query::new(EndpointKind::Rdm).caps(need.caps);
        let query = match local {
            Some(local) => query.source(local.to_string()),
            None => query,
        };
        let mut offers = match query.offers() {
            Ok(offers) => offers,
            Err(error) if error.kind() == FabricKind::NoProvider => Vec::new(),
            Err(error) if error.kind() == FabricKind::NoLibrary => {
                return Err(Error::because(START, ErrorKind::NoProvider, error));
            }
            Err(error) => return Err(Error::of(START, error)),
        };
        let is_far = |offer: &Offer| offer.capabilities().reaches_other_machines;
        let all = offers.iter().filter(|offer| !is_far(offer));
        near.extend(all.map(|offer| offer.capabilities().provider.clone()));
        offers.retain(is_far);
        let candidates: Vec<&Offer> = offers.iter().collect();
        let (choice, order) = select(&candidates, &need, policy);
        let taken = choice.candidates.iter().position(|one| one.verdict == Verdict::Taken);
        if let Some(place) = taken {
            return Ok(offers.swap_remove(order[place]));
        }
        refused.get_or_insert(choice);
    }
    let why = refused.map_or_else(
        || "there is none".to_owned(),
        |choice| explain_no_provider(policy, &choice, &near),
    );
    let from = local.map_or_else(String::new, |local| format!(" from {local}"));
    let detail = format!("none leads{from} to other nodes: {why}");
    Err(Error::new(START, ErrorKind::NoProvider, detail))
}

/// Why no candidate was taken, in one line: of a provider that is wanted by its name, why not that
/// one; or that none here has the name.
fn explain_no_provider(policy: &Policy, choice: &Choice, near: &BTreeSet<String>) -> String {
    let names: BTreeSet<&str> = choice.candidates.iter().map(|one| &*one.provider).collect();
    let unknown_providers = policy.unknown_providers(names.iter().copied());
    let is_wanted = |one: &Candidate| {
        policy.require.is_empty()
            || policy.unknown_providers([&*one.provider]).len() < policy.require.len()
    };
    if let Some(stranger) = unknown_providers.first() {
        if !policy.unknown_providers(near.iter().map(String::as_str)).contains(stranger) {
            return format!("{stranger} never leaves a machine, and does not connect nodes on one");
        }
        let there = match names.is_empty() {
            true => "is none at all".to_owned(),
            false => format!("are {}", names.into_iter().collect::<Vec<_>>().join(", ")),
        };
        return format!(
            "no provider here is called \"{}\"; there {there}",
            stranger.escape_debug()
        );
    }
    let reasons: BTreeSet<String> = choice
        .candidates
        .iter()
        .filter(|one| is_wanted(one))
        .map(|one| format!("{}: {}", one.provider, one.reasons.join(", ")))
        .collect();
    match reasons.is_empty() {
        true => "there is none".to_owned(),
        false => reasons.into_iter().collect::<Vec<_>>().join("; "),
    }
}
