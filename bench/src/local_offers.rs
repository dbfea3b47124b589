//! Offers for two processes of this machine.

use fabric::{Offer, Query};

/// Every machine has this address.
const LOOPBACK: &str = "127.0.0.1";

/// An offer for two processes of this machine.
#[derive(Debug, Clone)]
pub(crate) struct LocalOffer {
    /// The offer.
    pub(crate) offer: Offer,
    /// Could its provider reach other machines, too?
    pub(crate) is_network: bool,
}

/// The offers of one query, for two processes of this machine.
///
/// A provider of this machine only needs no address (with one, two processes might get the same); a
/// network provider is bound to the loopback address, unless it has no offer there.
///
/// # Errors
/// Errors of libfabric; `NoProvider` without an offer.
pub(crate) fn offers(query: &Query, source: Option<&str>) -> fabric::Result<Vec<LocalOffer>> {
    let anywhere = match source {
        Some(source) => query.clone().source(source).offers()?,
        None => query.offers()?,
    };
    let network_providers: Vec<String> = anywhere
        .iter()
        .filter(|offer| offer.capabilities().reaches_other_machines)
        .map(provider_name)
        .collect();
    let (far, near): (Vec<_>, Vec<_>) =
        anywhere.into_iter().partition(|offer| network_providers.contains(&provider_name(offer)));
    let mut locals: Vec<LocalOffer> =
        near.into_iter().map(|offer| LocalOffer { offer, is_network: false }).collect();
    let mut bound = match source {
        Some(_) => Vec::new(),
        None => query.clone().source(LOOPBACK).offers().unwrap_or_default(),
    };
    bound.retain(|offer| network_providers.contains(&provider_name(offer)));
    let served: Vec<String> = bound.iter().map(provider_name).collect();
    let rest = far.into_iter().filter(|offer| !served.contains(&provider_name(offer)));
    locals
        .extend(bound.into_iter().chain(rest).map(|offer| LocalOffer { offer, is_network: true }));
    Ok(locals)
}

/// The name of an offer's provider.
pub(crate) fn provider_name(offer: &Offer) -> String {
    offer.capabilities().provider.clone()
}

/// The first offer of a query that two processes of this machine can use.
///
/// # Errors
/// As [`offers`].
pub(crate) fn first(query: &Query) -> fabric::Result<Offer> {
    match offers(query, None)?.into_iter().next() {
        Some(local) => Ok(local.offer),
        None => query.first(),
    }
}
