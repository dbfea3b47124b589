//! `fabricast info`: providers and devices of this machine, and which provider is selected, and
//! why.

mod devices;
mod providers;

use clap::builder::PossibleValuesParser;
use fabric::{
    Caps, Choice, EndpointKind, Locality, MemoryKind, MrMode, Order, Policy, Progress,
    Requirements, Version,
};
use serde::Serialize;

use super::exit::{Exit, Failure};
use super::{choices, output, size, text};
use devices::Devices;
use providers::{ProviderEntry, ProviderSurvey};

/// Shows the providers and devices of this machine, and which provider is selected, and why.
///
/// Each choice lists its candidates with a score, the sum of the points in brackets behind the
/// reasons. Of the providers that support what is needed, the one with the highest score is
/// selected.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Only this provider: a whole name ("tcp;ofi_rxm") or one of its layers
    #[arg(long, value_name = "NAME")]
    provider: Option<String>,
    /// Every attribute of each offer, as libfabric prints them
    #[arg(long)]
    verbose: bool,
    /// One JSON line, with everything
    #[arg(long)]
    json: bool,
    /// Providers to prefer (NAME), require (=NAME) or deny (^NAME), separated by commas
    #[arg(long, value_name = "POLICY", default_value = "")]
    policy: Policy,
    /// Bind to this local address
    #[arg(long, value_name = "ADDRESS")]
    source: Option<String>,
    /// Select a provider for these peers only
    #[arg(long, value_parser = PossibleValuesParser::new(["same-machine", "other-machines"]))]
    reach: Option<String>,
}

/// A choice, and the memory and peers it is for.
#[derive(Debug, Serialize)]
struct Decision {
    memory: String,
    reach: Locality,
    taken: Option<String>,
    #[serde(flatten)]
    choice: Choice,
}

#[derive(Debug, Serialize)]
struct Versions {
    fabricast: &'static str,
    commit: Option<&'static str>,
    libfabric_headers: Version,
    libfabric_running: Version,
}

#[derive(Debug, Serialize)]
struct Document<'a> {
    versions: Versions,
    /// libfabric's filter of providers, if set.
    fi_provider: Option<String>,
    policy: &'a Policy,
    providers: Vec<&'a ProviderEntry>,
    choices: Vec<Decision>,
    devices: Devices,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let survey = ProviderSurvey::take(arguments.source.as_deref())?;
    let providers = survey.entries.iter().map(|entry| entry.facts.provider.as_str());
    choices::warn_unknown_providers(&arguments.policy, providers);
    let entries = match &arguments.provider {
        Some(name) => survey.named(name)?,
        None => survey.entries.iter().collect(),
    };
    let reaches = match arguments.reach.as_deref() {
        Some("same-machine") => vec![Locality::SameMachine],
        Some(_) => vec![Locality::OtherMachines],
        None => vec![Locality::SameMachine, Locality::OtherMachines],
    };
    let mut decisions = Vec::new();
    for memory in [MemoryKind::Host, MemoryKind::Cuda(0)] {
        for reach in &reaches {
            let need = Requirements::ring(*reach).memory(memory);
            let choice = survey.choose(&need, &arguments.policy, arguments.provider.as_deref());
            decisions.push(Decision {
                memory: memory.to_string(),
                reach: *reach,
                taken: choice.taken().map(|taken| taken.provider.clone()),
                choice,
            });
        }
    }
    let is_served = decisions.iter().any(|decision| {
        decision.memory == MemoryKind::Host.to_string() && decision.taken.is_some()
    });
    // With --provider the report is about this provider, not about a choice.
    let must_choose = arguments.provider.is_none() || arguments.policy != Policy::default();
    let document = Document {
        versions: Versions {
            fabricast: env!("CARGO_PKG_VERSION"),
            commit: Some(command::GIT_COMMIT).filter(|commit| !commit.is_empty()),
            libfabric_headers: Version::headers(),
            libfabric_running: Version::running(),
        },
        fi_provider: std::env::var("FI_PROVIDER").ok(),
        policy: &arguments.policy,
        providers: entries,
        choices: decisions,
        devices: Devices::query(),
    };
    let why = "select provider for host memory failed: all candidates are rejected, for the reasons listed above";
    let done = match must_choose && !is_served {
        true => Err(Failure::new(Exit::NoProvider, why)),
        false => Ok(()),
    };
    if arguments.json {
        return output::report_as_json(done, &document);
    }
    output::print(&to_text(&document, arguments.verbose))?;
    done
}

fn to_text(document: &Document<'_>, verbose: bool) -> String {
    let versions = &document.versions;
    let mut out = format!(
        "fabricast {}, libfabric {} (built against {})\n",
        command::VERSION_LINE,
        versions.libfabric_running,
        versions.libfabric_headers
    );
    if let Some(filter) = &document.fi_provider {
        out.push_str(&format!(
            "FI_PROVIDER={filter} is set: libfabric hides all other providers\n"
        ));
    }
    out.push_str(&format!("\n{}\n", text::heading("Providers")));
    out.push_str(&providers_table(&document.providers));
    out.push_str(LEGEND);
    if verbose {
        for entry in &document.providers {
            out.push_str(&format!("\n{}\n", text::heading(&entry.title())));
            out.push_str(&entry.description);
        }
    }
    out.push_str(&format!("\n{}\n", text::heading("Devices")));
    out.push_str(&document.devices.to_text());
    let has_cuda = document.devices.has_cuda();
    let cuda = MemoryKind::Cuda(0).to_string();
    if !has_cuda && document.choices.iter().any(|decision| decision.memory == cuda) {
        let title = format!("{cuda} memory: no CUDA device, no provider selected");
        out.push_str(&format!("\n{}\n", text::heading(&title)));
    }
    out.push_str(&format!("\n{}\n", text::heading("Choices")));
    out.push_str(SCORES);
    let is_shown = |decision: &&Decision| has_cuda || decision.memory != cuda;
    for decision in document.choices.iter().filter(is_shown) {
        let peers = match decision.reach {
            Locality::SameMachine => "peers on the same machine",
            Locality::OtherMachines => "peers on other machines",
        };
        let taken = decision.taken.as_deref().unwrap_or("none usable");
        let title = format!("{} memory, {peers}: {taken}", decision.memory);
        out.push_str(&format!("\n{}\n", text::heading(&title)));
        out.push_str(&choices::print(&decision.choice));
    }
    out
}

const LEGEND: &str = "\
imm: bytes of an immediate   order kept: write (W), send (S) after a write   progress: of data/of connections
mr_mode: L local, V virtual addresses, A allocated, P provider's keys, R raw keys, E endpoint, N notify, C count, H HMEM
";

const SCORES: &str = "\
score: the sum of the points of a provider. Of those that meet the requirements (usable), the one with the highest score
is taken; the others are refused, with the first reason. --policy prefers, requires or denies providers.
";

/// One line for all offers that differ only in their domain or network.
fn providers_table(entries: &[&ProviderEntry]) -> String {
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
    let head = [
        "provider",
        "domain",
        "kind",
        "reach",
        "imm",
        "order",
        "mr_mode",
        "FI_HMEM",
        "max",
        "inject",
        "progress",
        "threading",
    ];
    let mut cells = vec![head.map(str::to_owned).to_vec()];
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

pub(crate) fn kind_name(kind: EndpointKind) -> &'static str {
    match kind {
        EndpointKind::Rdm => "RDM",
        EndpointKind::Msg => "MSG",
        EndpointKind::Datagram => "DGRAM",
    }
}

/// The columns from reach on.
fn columns(entry: &ProviderEntry) -> Vec<String> {
    let facts = &entry.facts;
    let immediates = if facts.caps.contains(Caps::RMA) {
        facts.immediates.cq_data_size.to_string()
    } else {
        "no RMA".to_owned()
    };
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
        &immediates,
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

    #[test]
    fn table_fits_its_width() {
        let survey = ProviderSurvey::take(None).unwrap();
        let entries: Vec<&ProviderEntry> = survey.entries.iter().collect();
        let table = providers_table(&entries) + LEGEND + SCORES;
        for line in table.lines() {
            assert!(line.chars().count() <= text::WIDTH, "{line}");
        }
    }
}
