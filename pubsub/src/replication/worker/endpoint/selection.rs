//! The choice of a worker's provider.

use std::collections::BTreeSet;
use std::net::IpAddr;

use fabric::ring::{NotifyMode, default_lane_count};
use fabric::{
    Candidate, Capabilities, Choice, EndpointKind, ErrorKind as FabricKind, Locality, Offer,
    Policy, Query, Requirements, Verdict, select,
};

use transfer::path::DeviceFabric;

use super::START;
use crate::error::{Error, ErrorKind, Result};
use crate::replication::connection_messages::MAX_LANES;

/// Number of lanes of a worker: as requested, or as many as saturate the link (0), but not more
/// threads than cores. Other workers of one lane each share the cores.
pub(super) fn choose_lane_count(
    requested: usize,
    capabilities: &Capabilities,
    cores: usize,
    workers: usize,
) -> usize {
    let wanted = match requested {
        0 => default_lane_count(std::slice::from_ref(capabilities), cores),
        requested => requested.min(usize::from(MAX_LANES)),
    };
    wanted.min((cores + 1).saturating_sub(workers)).max(1)
}

/// Like [`choose`], with device memory if the provider has it and rings may lie there.
pub(super) fn choose_with(
    policy: &Policy,
    local: IpAddr,
    device_fabric: DeviceFabric,
) -> Result<Offer> {
    let offer = choose(policy, Some(local))?;
    if device_fabric == DeviceFabric::Off {
        return Ok(offer);
    }
    let caps = Requirements::ring(Locality::SameMachine).caps;
    let query = Query::new(EndpointKind::Rdm).caps(caps).interface(local);
    let with_devices = query.with_device_memory(offer.clone());
    let is_as_good = is_as_good(with_devices.capabilities(), offer.capabilities());
    Ok(if is_as_good { with_devices } else { offer })
}

/// Does a ring in host memory lose nothing with this offer?
fn is_as_good(offer: &Capabilities, other: &Capabilities) -> bool {
    NotifyMode::best(offer).ok() == NotifyMode::best(other).ok()
        && offer.immediate_mask() >= other.immediate_mask()
        && offer.inject_size >= other.inject_size
        && offer.limits.iov_limit >= other.limits.iov_limit.min(2)
}

/// The best provider that reaches other machines from this address, or from this machine if the
/// address is not known; at a loopback address, one that would elsewhere.
///
/// Providers that never leave the machine are refused, even if both nodes are on one and they are
/// named: of two nodes connected by shm of libfabric 1.17, one crashed in it as soon as a topic was
/// replicated.
pub(crate) fn choose(policy: &Policy, local: Option<IpAddr>) -> Result<Offer> {
    policy.check().map_err(|error| Error::of(START, error))?;
    let is_named = !policy.require.is_empty();
    let may_be_local = local.is_none_or(|local| local.is_loopback());
    let reach =
        if is_named || may_be_local { Locality::SameMachine } else { Locality::OtherMachines };
    let (mut refused, mut local_only) = (None, BTreeSet::new());
    // Without immediates, messages still work.
    for immediate_bytes in [4, 0] {
        let need = Requirements { immediate_bytes, ..Requirements::ring(reach) };
        let query = Query::new(EndpointKind::Rdm).caps(need.caps);
        let query = match local {
            Some(local) => query.interface(local),
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
        let is_remote = |offer: &Offer| offer.capabilities().reaches_other_machines;
        let all = offers.iter().filter(|offer| !is_remote(offer));
        local_only.extend(all.map(|offer| offer.capabilities().provider.clone()));
        offers.retain(is_remote);
        let candidates: Vec<&Offer> = offers.iter().collect();
        let (choice, order) = select(&candidates, &need, policy);
        let taken = choice.candidates.iter().position(|one| one.verdict == Verdict::Taken);
        if let Some(index) = taken {
            return Ok(offers.swap_remove(order[index]));
        }
        refused.get_or_insert(choice);
    }
    let why = refused.map_or_else(
        || "no provider was found".to_owned(),
        |choice| explain_no_provider(policy, &choice, &local_only),
    );
    let from = local.map_or_else(String::new, |local| format!(" from {local}"));
    let detail = format!("no provider connects{from} to other nodes: {why}");
    Err(Error::new(START, ErrorKind::NoProvider, detail))
}

/// Why no candidate was chosen, in one line. For a provider required by name: why not that one, or
/// that it does not exist here.
fn explain_no_provider(policy: &Policy, choice: &Choice, local_only: &BTreeSet<String>) -> String {
    let names: BTreeSet<&str> = choice.candidates.iter().map(|one| &*one.provider).collect();
    let unknown_providers = policy.unknown_providers(names.iter().copied());
    let is_wanted = |one: &Candidate| {
        policy.require.is_empty()
            || policy.unknown_providers([&*one.provider]).len() < policy.require.len()
    };
    if let Some(name) = unknown_providers.first() {
        if !policy.unknown_providers(local_only.iter().map(String::as_str)).contains(name) {
            return format!("{name} never leaves a machine, and does not connect nodes on one");
        }
        let known = match names.is_empty() {
            true => "there is no provider".to_owned(),
            false => {
                format!("the providers are {}", names.into_iter().collect::<Vec<_>>().join(", "))
            }
        };
        return format!("no provider is named \"{}\"; {known}", name.escape_debug());
    }
    let reasons: BTreeSet<String> = choice
        .candidates
        .iter()
        .filter(|one| is_wanted(one))
        .map(|one| format!("{}: {}", one.provider, one.reasons.join(", ")))
        .collect();
    match reasons.is_empty() {
        true => "no provider was found".to_owned(),
        false => reasons.into_iter().collect::<Vec<_>>().join("; "),
    }
}
