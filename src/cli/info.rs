//! `fabricast info`: providers and devices of this machine, and which provider is selected, and
//! why.

mod devices;
mod providers;

use std::net::IpAddr;

use clap::builder::PossibleValuesParser;
use fabric::{Choice, Locality, MemoryKind, Policy, Requirements, Version};
use pubsub::Settings;
use serde::Serialize;

use super::exit::{Exit, Failure, Result};
use super::settings::Options;
use super::{choices, output, text};
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
    /// Providers to prefer (NAME), require (=NAME) or deny (^NAME), separated by commas [default:
    /// $FABRICAST_PROVIDER alone, or all]
    #[arg(long, value_name = "POLICY")]
    policy: Option<Policy>,
    /// Reach other machines from here: an address of this machine, a subnet (10.1.0.0/16), or an
    /// interface (ib0) [default: $FABRICAST_SOURCE, or any]
    #[arg(long, value_name = "ADDRESS|SUBNET|INTERFACE", value_parser = parse_source)]
    source: Option<IpAddr>,
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
    /// Where the setting `provider` is set, if that is the policy.
    policy_origin: Option<String>,
    providers: Vec<&'a ProviderEntry>,
    choices: Vec<Decision>,
    devices: Devices,
}

fn parse_source(text: &str) -> std::result::Result<IpAddr, String> {
    fabric::local_address(text).map_err(|error| error.detail().unwrap_or_default().to_owned())
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let settings = Options::none().settings()?;
    let (policy, policy_origin) = policy(arguments, &settings)?;
    let survey = ProviderSurvey::take(arguments.source.or(settings.network.source))?;
    choices::warn_unknown_providers(&policy, survey.providers());
    let entries = survey.named(arguments.provider.as_deref())?;
    let reaches = match arguments.reach.as_deref() {
        Some("same-machine") => vec![Locality::SameMachine],
        Some(_) => vec![Locality::OtherMachines],
        None => vec![Locality::SameMachine, Locality::OtherMachines],
    };
    let mut decisions = Vec::new();
    for memory in [MemoryKind::Host, MemoryKind::Cuda(0)] {
        for reach in &reaches {
            let need = Requirements::ring(*reach).memory(memory);
            let choice = survey.choose(&need, &policy, arguments.provider.as_deref());
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
    let must_choose = arguments.provider.is_none() || policy != Policy::default();
    let document = Document {
        versions: Versions {
            fabricast: env!("CARGO_PKG_VERSION"),
            commit: Some(command::GIT_COMMIT).filter(|commit| !commit.is_empty()),
            libfabric_headers: Version::headers(),
            libfabric_running: Version::running(),
        },
        fi_provider: std::env::var("FI_PROVIDER").ok(),
        policy: &policy,
        policy_origin,
        providers: entries,
        choices: decisions,
        devices: Devices::query(),
    };
    let why = "select provider for host memory failed: all candidates are rejected, for the reasons listed above";
    let is_failed = must_choose && !is_served;
    let done = if is_failed { Err(Failure::new(Exit::NoProvider, why)) } else { Ok(()) };
    if arguments.json {
        return output::report_as_json(done, &document);
    }
    output::print_report(&to_text(&document, arguments.verbose))?;
    done
}

/// The policy of the command line, or that of the settings, with its origin.
fn policy(arguments: &Arguments, settings: &Settings) -> Result<(Policy, Option<String>)> {
    if let Some(policy) = &arguments.policy {
        return Ok((policy.clone(), None));
    }
    let origin = settings.origin("provider").filter(|_| arguments.provider.is_none());
    match origin {
        Some(origin) => Ok((settings.network.policy()?, Some(origin.to_owned()))),
        None => Ok((Policy::default(), None)),
    }
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
    if let Some(origin) = &document.policy_origin {
        let policy = document.policy;
        out.push_str(&format!("{origin} sets the policy {policy}; --policy overrides it\n"));
    }
    out.push_str(&format!("\n{}\n", text::heading("Providers")));
    out.push_str(&providers::table(&document.providers));
    out.push_str(LEGEND);
    if verbose {
        for entry in &document.providers {
            out.push_str(&entry.describe());
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
    out.push_str(&text::wrapped("score: ", SCORES));
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

const SCORES: &str = "the sum of the points of a provider. Of those that meet the requirements (usable), the one \
    with the highest score is taken; the others are refused, with the first reason. --policy prefers, requires or \
    denies providers.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_fits_its_width() {
        let survey = ProviderSurvey::take(None).unwrap();
        let table = providers::table(&survey.named(None).unwrap()) + LEGEND;
        for line in table.lines() {
            assert!(line.chars().count() <= text::WIDTH, "{line}");
        }
    }
}
