//! All offers of libfabric.

use fabric::{
    Capabilities, Caps, Choice, EndpointKind, ErrorKind, Offer, Policy, Query, Requirements, select,
};
use serde::Serialize;

use super::kind_name;
use crate::cli::choices::distinct;
use crate::cli::exit::{Exit, Failure};

/// One offer, for display.
#[derive(Debug, Serialize)]
pub(crate) struct ProviderEntry {
    #[serde(flatten)]
    pub(crate) facts: Capabilities,
    /// Does the provider offer to register device memory (`FI_HMEM`), if requested?
    pub(crate) device_memory: bool,
    #[serde(skip)]
    pub(crate) description: String,
    #[serde(skip)]
    offer: Offer,
}

impl ProviderEntry {
    pub(crate) fn title(&self) -> String {
        let Capabilities { provider, domain, fabric, endpoint, .. } = &self.facts;
        format!("{provider}, {} endpoints, domain {domain}, fabric {fabric}", kind_name(*endpoint))
    }
}

/// All offers, in the order in which libfabric lists them.
#[derive(Debug)]
pub(crate) struct ProviderSurvey {
    pub(crate) entries: Vec<ProviderEntry>,
    /// Offers with device memory requested.
    device: Vec<Offer>,
}

impl ProviderSurvey {
    pub(crate) fn take(source: Option<&str>) -> Result<Self, Failure> {
        let mut entries: Vec<ProviderEntry> = Vec::new();
        let mut all_device = Vec::new();
        for kind in [EndpointKind::Rdm, EndpointKind::Msg] {
            let one_sided = Caps::MESSAGE | Caps::RMA;
            let device = query_offers(kind, one_sided | Caps::DEVICE_MEMORY, source)?;
            // Some have no one-sided transfers; they are listed, too.
            for caps in [one_sided, Caps::MESSAGE] {
                for offer in query_offers(kind, caps, source)? {
                    if entries.iter().any(|known| is_same_offer(&known.facts, &offer)) {
                        continue;
                    }
                    entries.push(ProviderEntry {
                        facts: offer.capabilities().clone(),
                        device_memory: device
                            .iter()
                            .any(|d| is_same_offer(d.capabilities(), &offer)),
                        description: offer.describe(),
                        offer,
                    });
                }
            }
            all_device.extend(device);
        }
        Ok(Self { entries, device: all_device })
    }

    /// The offers of the provider with this name, or with a layer of this name.
    pub(crate) fn named(&self, name: &str) -> Result<Vec<&ProviderEntry>, Failure> {
        let found: Vec<&ProviderEntry> =
            self.entries.iter().filter(|entry| is_named(&entry.facts, name)).collect();
        if !found.is_empty() {
            return Ok(found);
        }
        let names = distinct(self.entries.iter().map(|entry| &*entry.facts.provider)).join(", ");
        let others = match names.is_empty() {
            true => ", and no other provider is".to_owned(),
            false => format!(". Available: {names}"),
        };
        let mut message = format!("find provider \"{name}\" failed: not available here{others}");
        if let Ok(filter) = std::env::var("FI_PROVIDER") {
            message.push_str(&format!(" (FI_PROVIDER={filter} hides all others)"));
        }
        Err(Failure::new(Exit::NoProvider, message))
    }

    /// Chooses among all offers, as [`fabric::choose`] does; but here a choice that selects nothing
    /// is a result, not an error.
    pub(crate) fn choose(
        &self,
        need: &Requirements,
        policy: &Policy,
        provider: Option<&str>,
    ) -> Choice {
        let mut candidates: Vec<&Offer> = Vec::new();
        // Offers for device memory may have other attributes than those for host memory.
        if need.memory.is_device() {
            candidates.extend(&self.device);
        }
        for entry in &self.entries {
            if !candidates.iter().any(|known| is_same(known.capabilities(), &entry.facts)) {
                candidates.push(&entry.offer);
            }
        }
        candidates.retain(|offer| {
            let facts = offer.capabilities();
            facts.endpoint == need.endpoint && provider.is_none_or(|name| is_named(facts, name))
        });
        select(&candidates, need, policy).0
    }
}

fn query_offers(
    kind: EndpointKind,
    caps: Caps,
    source: Option<&str>,
) -> Result<Vec<Offer>, Failure> {
    let query = Query::new(kind).caps(caps);
    let query = match source {
        Some(source) => query.source(source),
        None => query,
    };
    match query.offers() {
        Ok(offers) => Ok(offers),
        Err(error) if error.kind() == ErrorKind::NoProvider => Ok(Vec::new()),
        Err(error) => Err(error.into()),
    }
}

fn is_named(facts: &Capabilities, name: &str) -> bool {
    facts.provider == name || facts.provider.split(';').any(|layer| layer == name)
}

fn is_same_offer(known: &Capabilities, offer: &Offer) -> bool {
    is_same(known, offer.capabilities())
}

/// Ports, and process numbers in addresses, differ from call to call, so only the network's name is
/// compared.
fn is_same(a: &Capabilities, b: &Capabilities) -> bool {
    (&a.provider, &a.fabric, &a.domain, a.endpoint, a.protocol, a.address_format)
        == (&b.provider, &b.fabric, &b.domain, b.endpoint, b.protocol, b.address_format)
}
