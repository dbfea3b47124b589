//! All offers of libfabric.

use std::net::IpAddr;

use fabric::{
    Capabilities, Caps, Choice, EndpointKind, ErrorKind, MrMode, Offer, Order, Policy, Progress,
    Query, Requirements, select,
};
use serde::Serialize;

use crate::cli::choices::{self, distinct};
use crate::cli::exit::{Exit, Failure, Result};
use crate::cli::{size, text};

#[derive(Debug, Serialize)]
pub(crate) struct ProviderEntry {
    #[serde(flatten)]
    facts: Capabilities,
    /// Does the provider offer to register device memory (`FI_HMEM`), if requested?
    device_memory: bool,
    #[serde(skip)]
    description: String,
    #[serde(skip)]
    offer: Offer,
}

impl ProviderEntry {
    /// Every attribute, below a heading.
    pub(crate) fn describe(&self) -> String {
        let Capabilities { provider, domain, fabric, endpoint, .. } = &self.facts;
        let kind = kind_name(*endpoint);
        let title = format!("{provider}, {kind} endpoints, domain {domain}, fabric {fabric}");
        format!("\n{}\n{}", text::heading(&title), self.description)
    }
}

/// All offers, in the order in which libfabric lists them.
#[derive(Debug)]
pub(crate) struct ProviderSurvey {
    entries: Vec<ProviderEntry>,
    /// Offers with device memory requested.
    device: Vec<Offer>,
}

impl ProviderSurvey {
    pub(crate) fn take(source: Option<IpAddr>) -> Result<Self> {
        let mut entries: Vec<ProviderEntry> = Vec::new();
        let mut all_device = Vec::new();
        for kind in [EndpointKind::Rdm, EndpointKind::Msg] {
            let one_sided = Caps::MESSAGE | Caps::RMA;
            let device = query_offers(kind, one_sided | Caps::DEVICE_MEMORY, source)?;
            // Some have no one-sided transfers; they are listed, too.
            for caps in [one_sided, Caps::MESSAGE] {
                for offer in query_offers(kind, caps, source)? {
                    let facts = offer.capabilities().clone();
                    if entries.iter().any(|known| is_same(&known.facts, &facts)) {
                        continue;
                    }
                    entries.push(ProviderEntry {
                        device_memory: device
                            .iter()
                            .any(|known| is_same(known.capabilities(), &facts)),
                        description: offer.describe(),
                        facts,
                        offer,
                    });
                }
            }
            all_device.extend(device);
        }
        Ok(Self { entries, device: all_device })
    }

    pub(crate) fn providers(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| &*entry.facts.provider)
    }

    /// The offers of the provider with this name, or with a layer of this name; all without a name.
    pub(crate) fn named(&self, name: Option<&str>) -> Result<Vec<&ProviderEntry>> {
        let Some(name) = name else { return Ok(self.entries.iter().collect()) };
        let found: Vec<&ProviderEntry> =
            self.entries.iter().filter(|entry| is_named(&entry.facts, name)).collect();
        if !found.is_empty() {
            return Ok(found);
        }
        let names = distinct(self.providers()).join(", ");
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

fn query_offers(kind: EndpointKind, caps: Caps, source: Option<IpAddr>) -> Result<Vec<Offer>> {
    let query = Query::new(kind).caps(caps);
    let query = source.into_iter().fold(query, Query::interface);
    match query.offers() {
        Err(error) if error.kind() == ErrorKind::NoProvider => Ok(Vec::new()),
        offers => Ok(offers?),
    }
}

fn is_named(facts: &Capabilities, name: &str) -> bool {
    facts.provider == name || facts.provider.split(';').any(|layer| layer == name)
}

/// Ports, and process numbers in addresses, differ from call to call, so only the network's name is
/// compared.
fn is_same(a: &Capabilities, b: &Capabilities) -> bool {
    (&a.provider, &a.fabric, &a.domain, a.endpoint, a.protocol, a.address_format)
        == (&b.provider, &b.fabric, &b.domain, b.endpoint, b.protocol, b.address_format)
}

/// One line for all offers that differ only in their domain or network.
pub(super) fn table(entries: &[&ProviderEntry]) -> String {
    let mut rows: Vec<ProviderRow<'_>> = Vec::new();
    for entry in entries {
        let (provider, columns) = (&entry.facts.provider, columns(entry));
        let (kind, domain) = (entry.facts.endpoint, &entry.facts.domain);
        // The same provider and facts, with another domain or endpoint kind.
        match rows.iter_mut().find(|row| row.provider == provider && row.columns == columns) {
            Some(row) => {
                if !row.kinds.contains(&kind) {
                    row.kinds.push(kind);
                }
                row.domains.push(domain);
            }
            None => rows.push(ProviderRow {
                provider,
                domains: vec![domain],
                kinds: vec![kind],
                columns,
            }),
        }
    }
    let head = "provider domain kind reach imm order mr_mode FI_HMEM max inject progress threading";
    let mut cells = vec![head.split(' ').map(str::to_owned).collect::<Vec<_>>()];
    for row in rows {
        let kinds: Vec<&str> = row.kinds.into_iter().map(kind_name).collect();
        let domains = choices::join_domains(&row.domains);
        let mut line = vec![row.provider.to_owned(), domains, kinds.join(" ")];
        line.extend(row.columns);
        cells.push(line);
    }
    text::table(&cells)
}

struct ProviderRow<'a> {
    provider: &'a str,
    domains: Vec<&'a str>,
    kinds: Vec<EndpointKind>,
    columns: Vec<String>,
}

fn kind_name(kind: EndpointKind) -> &'static str {
    match kind {
        EndpointKind::Rdm => "RDM",
        EndpointKind::Msg => "MSG",
        EndpointKind::Datagram => "DGRAM",
    }
}

/// The columns from reach on.
fn columns(entry: &ProviderEntry) -> Vec<String> {
    let facts = &entry.facts;
    let has_rma = facts.caps.contains(Caps::RMA);
    let immediates = has_rma.then(|| facts.immediates.cq_data_size.to_string());
    let orders = facts.order.send_order & facts.order.receive_order;
    let order =
        match (orders.contains(Order::WRITE_AFTER_WRITE), orders.contains(Order::SEND_AFTER_WRITE))
        {
            (true, true) => "W S",
            (true, false) => "W",
            (false, true) => "S",
            (false, false) => "-",
        };
    let progress = match (facts.execution.data_progress, facts.execution.control_progress) {
        (Progress::Automatic, Progress::Automatic) => "auto",
        (Progress::Manual, Progress::Manual) => "manual",
        (Progress::Automatic, Progress::Manual) => "auto/manual",
        (Progress::Manual, Progress::Automatic) => "manual/auto",
    };
    let threading = format!("{:?}", facts.execution.threading).to_lowercase();
    [
        if facts.reaches_other_machines { "network" } else { "machine" },
        immediates.as_deref().unwrap_or("no RMA"),
        order,
        &mr_mode(facts.registration.mr_mode),
        if entry.device_memory { "yes" } else { "no" },
        &size::print(facts.max_message_size as u64),
        &size::print(facts.inject_size as u64),
        progress,
        &threading,
    ]
    .map(str::to_owned)
    .to_vec()
}

/// One letter for each registration requirement.
fn mr_mode(mode: MrMode) -> String {
    const LETTERS: [(MrMode, char); 9] = [
        (MrMode::LOCAL, 'L'),
        (MrMode::VIRT_ADDR, 'V'),
        (MrMode::ALLOCATED, 'A'),
        (MrMode::PROV_KEY, 'P'),
        (MrMode::RAW, 'R'),
        (MrMode::ENDPOINT, 'E'),
        (MrMode::MMU_NOTIFY, 'N'),
        (MrMode::RMA_EVENT, 'C'),
        (MrMode::HMEM, 'H'),
    ];
    let mode = mode.without_deprecated();
    let letters: String =
        LETTERS.iter().filter(|(bit, _)| mode.contains(*bit)).map(|(_, letter)| letter).collect();
    if letters.is_empty() { "-".to_owned() } else { letters }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registration_requirements_have_letters() {
        assert_eq!(mr_mode(MrMode::empty()), "-");
        assert_eq!(mr_mode(MrMode::BASIC), "VAP");
        assert_eq!(mr_mode(MrMode::LOCAL | MrMode::RAW), "LR");
    }
}
