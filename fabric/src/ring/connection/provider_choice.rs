//! Chooses the provider that both sides have, and opens its endpoint.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use super::super::{Port, queue_entries};
use super::frame::MAX_PROVIDERS;
use super::{OPERATION, ProviderProtocol};
use crate::{
    AddressVector, Capabilities, CompletionQueue, Domain, Endpoint, EndpointKind, Error, ErrorKind,
    Locality, Offer, Policy, Query, QueueOptions, Requirements, Result, Verdict, select,
};

/// The address to bind an endpoint to, if it is known yet.
pub(super) fn bind_address(local: SocketAddr) -> Option<IpAddr> {
    let local = local.ip().to_canonical();
    (!local.is_unspecified()).then_some(local)
}

/// Reasons of refusals, each with the providers that it concerns.
#[derive(Debug, Default)]
struct Refusals(Vec<(String, Vec<String>)>);

impl Refusals {
    fn add(&mut self, reason: String, provider: Option<&str>) {
        let known = self.0.iter().position(|(known, _)| *known == reason);
        let at = known.unwrap_or_else(|| {
            self.0.push((reason, Vec::new()));
            self.0.len() - 1
        });
        let providers = &mut self.0[at].1;
        if let Some(provider) = provider
            && !providers.iter().any(|known| known == provider)
        {
            providers.push(provider.to_owned());
        }
    }
}

impl fmt::Display for Refusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (reason, providers)) in self.0.iter().enumerate() {
            let separator = if at == 0 { "" } else { " | " };
            let colon = if providers.is_empty() { "" } else { ": " };
            write!(f, "{separator}{}{colon}{reason}", providers.join(", "))?;
        }
        Ok(())
    }
}

/// Usable providers at a local address, best first. A provider that stays on the machine is used
/// only if it is required: a TCP connection between two containers does not imply shared memory.
pub(super) fn usable_providers(
    local: Option<IpAddr>,
    policy: &Policy,
) -> Result<Vec<(ProviderProtocol, Offer)>> {
    policy.check()?;
    let is_asked = !policy.require.is_empty();
    let is_near = is_asked || local.is_none_or(|local| local.is_loopback());
    let reach = if is_near { Locality::SameMachine } else { Locality::OtherMachines };
    let (mut found, mut refused) = (Vec::new(), Refusals::default());
    // Providers without immediates can still use messages.
    for immediate_bytes in [4, 0] {
        let need = Requirements { immediate_bytes, ..Requirements::ring(reach) };
        let mut query = Query::new(EndpointKind::Rdm).caps(need.caps);
        if let Some(local) = local {
            query = query.interface(local);
        }
        let mut offers = match query.offers() {
            Err(error) if error.kind() == ErrorKind::NoProvider => {
                refused.add(error.to_string(), None);
                continue;
            }
            offers => offers?,
        };
        offers.retain(|offer| is_asked || offer.capabilities().reaches_other_machines);
        let candidates: Vec<&Offer> = offers.iter().collect();
        let (choice, order) = select(&candidates, &need, policy);
        let mut offers: Vec<_> = offers.into_iter().map(Some).collect();
        for (candidate, at) in choice.candidates.iter().zip(order) {
            let Some(offer) = offers[at].take() else { continue };
            if candidate.verdict == Verdict::Refused {
                refused.add(candidate.reasons.join("; "), Some(&candidate.provider));
                continue;
            }
            let Capabilities { protocol, address_format, .. } = *offer.capabilities();
            let name = offer.capabilities().wire_name().to_owned();
            let wire = ProviderProtocol { name, protocol, address_format };
            if found.len() < MAX_PROVIDERS && found.iter().all(|(known, _)| *known != wire) {
                found.push((wire, offer));
            }
        }
    }
    if found.is_empty() {
        let detail = format!("no provider of this machine is permitted: {refused}");
        return Err(Error::new(ErrorKind::NoProvider, OPERATION, detail));
    }
    Ok(found)
}

/// The best local provider that the peer has, too.
pub(super) fn common_provider(
    usable: Vec<(ProviderProtocol, Offer)>,
    offered: &[ProviderProtocol],
) -> Result<(ProviderProtocol, Offer)> {
    let names = |wires: &mut dyn Iterator<Item = &ProviderProtocol>| {
        let names: Vec<_> = wires.map(|wire| wire.name.escape_debug().to_string()).collect();
        names.join(", ")
    };
    let here = names(&mut usable.iter().map(|(wire, _)| wire));
    usable.into_iter().find(|(wire, _)| offered.contains(wire)).ok_or_else(|| {
        let detail = format!(
            "the reader permits {here}, the writer {}: none in common",
            names(&mut offered.iter())
        );
        Error::new(ErrorKind::NoProvider, OPERATION, detail)
    })
}

/// A port with an endpoint of this offer, for one ring, and the address vector for its peer.
pub(super) fn open(offer: &Offer) -> Result<(Port, AddressVector)> {
    let domain = Domain::open(offer)?;
    let addresses = AddressVector::open(&domain)?;
    let size = queue_entries(domain.capabilities());
    let options = QueueOptions { size, ..QueueOptions::default() };
    let mut queue = CompletionQueue::open_with(&domain, options)?;
    let endpoint = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
    Ok((Port::new(endpoint, queue), addresses))
}
