//! `fabricast paths --explain`: the path of transfers to a running agent.

mod candidates;
mod probe_agent;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path as FilePath, PathBuf};

use serde::Serialize;
use transfer::path::{Choice, Locality, Operation, Path, Policy, Reason};
use transfer::{Agent, AgentCard, ErrorKind, MemoryAttributes, PeerId, RegionDescriptor};

use super::{Arguments, name};
use crate::cli::exit::{Exit, Failure, Result};
use crate::cli::{output, text};

/// Upper bound of the length of cards and descriptors.
const LONGEST: u64 = 1 << 16;

/// Memory with its name for users.
struct NamedMemory {
    name: String,
    /// The device, where it is worth showing.
    device: Option<String>,
    memory: MemoryAttributes,
}

/// Memory and operations with the same verdicts.
#[derive(Debug, Serialize)]
struct PathChoice {
    local: Vec<String>,
    remote: String,
    remote_devices: Vec<String>,
    operations: Vec<Operation>,
    taken: Option<Path>,
    /// Why no better path is usable, if one could be expected.
    fallback: Option<&'static str>,
    #[serde(flatten)]
    choice: Choice,
}

#[derive(Debug, Default, Serialize)]
struct AgentReport {
    label: String,
    identity: String,
    card: PathBuf,
    locality: Option<Locality>,
    /// The agent was killed, and its card is left.
    is_stale: bool,
    /// Operations that the rights of the region deny.
    not_allowed: Vec<Operation>,
    choices: Vec<PathChoice>,
    /// Why it could not be examined.
    error: Option<String>,
    /// The exit code, if this were the only agent.
    #[serde(skip)]
    exit: Option<Exit>,
}

#[derive(Debug, Serialize)]
struct ExplainReport<'a> {
    policy: &'a Policy,
    peers: Vec<AgentReport>,
    program: &'static str,
}

pub(super) fn run(arguments: &Arguments, peer: &FilePath) -> Result<()> {
    let region = arguments.region.as_deref();
    let region = region.map(|path| decoded(path, RegionDescriptor::decode)).transpose()?;
    let mut cards = cards(peer)?;
    if peer.is_dir() {
        // In a directory, only the agent of the region.
        cards
            .retain(|(_, card)| region.as_ref().is_none_or(|region| region.agent == card.identity));
    }
    if cards.is_empty() {
        let owner = if region.is_some() { "owns the region" } else { "left its card" };
        let message = format!("find agent in {} failed: no agent {owner}", peer.display());
        return Err(Failure::new(Exit::NotFound, message));
    }
    let peers = cards
        .into_iter()
        .map(|(path, card)| examine(path, &card, region.as_ref(), arguments))
        .collect::<Result<_, _>>()?;
    let report = ExplainReport { policy: &arguments.policy, peers, program: command::VERSION_LINE };
    let done = conclude(&report.peers);
    if arguments.json {
        return output::report_as_json(done, &report);
    }
    let mut out = report.peers.iter().map(to_text).collect::<Vec<_>>().join("\n");
    if arguments.fabric.is_none() && report.peers.iter().any(|found| !found.choices.is_empty()) {
        out.push_str("\nThis command opened no provider. To examine fabric paths, too: --fabric\n");
    }
    output::print_report(&out)?;
    done
}

/// Fails if no agent can be reached.
fn conclude(peers: &[AgentReport]) -> Result<()> {
    if peers.iter().any(|found| found.exit.is_none()) {
        return Ok(());
    }
    let exit = peers.iter().find_map(|found| found.exit).unwrap_or(Exit::Failed);
    let why = match peers.iter().all(|found| found.is_stale) {
        true => {
            "explain paths failed: all agents found have exited. Remove their cards: fabricast clean"
        }
        false => "explain paths failed: no usable path; see the reasons above",
    };
    Err(Failure::new(exit, why))
}

fn read(path: &FilePath) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(LONGEST).read_to_end(&mut bytes));
    read.map(|_| bytes).map_err(|error| {
        let exit = match error.kind() {
            io::ErrorKind::NotFound => Exit::NotFound,
            _ => Exit::Failed,
        };
        Failure::new(exit, format!("read {} failed: {error}", path.display()))
    })
}

fn decoded<T>(path: &FilePath, decode: impl Fn(&[u8]) -> transfer::Result<T>) -> Result<T> {
    decode(&read(path)?)
        .map_err(|error| Failure::new(Exit::Usage, format!("{}: {error}", path.display())))
}

fn card_at(path: PathBuf) -> Result<(PathBuf, AgentCard)> {
    let card = decoded(&path, AgentCard::decode)?;
    Ok((path, card))
}

/// The card in a file, or the cards in a directory, by name.
fn cards(path: &FilePath) -> Result<Vec<(PathBuf, AgentCard)>> {
    if !path.is_dir() {
        return Ok(vec![card_at(path.to_owned())?]);
    }
    let failed =
        |error| Failure::failed(format!("read directory {} failed: {error}", path.display()));
    let mut cards = Vec::new();
    for entry in std::fs::read_dir(path).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|extension| extension == "card") {
            // A file that was removed meanwhile, or is not a card, is skipped.
            cards.extend(card_at(path).ok());
        }
    }
    cards.sort_by(|(one, _), (other, _)| one.cmp(other));
    Ok(cards)
}

fn examine(
    path: PathBuf,
    card: &AgentCard,
    region: Option<&RegionDescriptor>,
    arguments: &Arguments,
) -> Result<AgentReport> {
    let mut found = AgentReport {
        label: card.label.clone(),
        identity: card.identity.iter().map(|byte| format!("{byte:02x}")).collect(),
        card: path,
        is_stale: card.is_orphaned(),
        ..AgentReport::default()
    };
    if found.is_stale {
        found.exit = Some(Exit::NotFound);
        return Ok(found);
    }
    let mut agent = probe_agent::start(card, arguments.fabric.as_deref())?;
    let judged = card.encode().and_then(|card| {
        let peer = agent.inspect(&card, arguments.timeout)?;
        found.locality = agent.locality(peer).cloned();
        agent.connect_fabrics(peer, arguments.timeout)?;
        find_paths(&mut agent, peer, region, &mut found, arguments)
    });
    found.exit = match judged {
        Err(error) => {
            found.error = Some(error.to_string());
            Some(match error.kind() {
                ErrorKind::DeadlineExceeded => Exit::Deadline,
                // Another agent, or none any more, has its socket.
                ErrorKind::Stale if found.locality.is_none() => Exit::NotFound,
                _ => Exit::Failed,
            })
        }
        Ok(()) if found.choices.iter().any(|judged| judged.taken.is_some()) => None,
        Ok(()) if matches!(found.locality, Some(Locality::NoDescriptorPassing { .. })) => {
            Some(Exit::NotFound)
        }
        Ok(()) => Some(Exit::NoProvider),
    };
    Ok(found)
}

/// Finds the paths between all memory of this process and all memory of the peer.
fn find_paths(
    agent: &mut Agent,
    peer: PeerId,
    region: Option<&RegionDescriptor>,
    found: &mut AgentReport,
    arguments: &Arguments,
) -> transfer::Result<()> {
    let policy = &arguments.policy;
    let descriptor = region.map(RegionDescriptor::encode).transpose()?;
    let devices = candidates::devices(region);
    let remote = match region {
        Some(region) => vec![candidates::region(region, &devices)],
        None => candidates::remote(&devices, found.locality.as_ref()),
    };
    let (may_put, may_get) = region.map_or((true, true), |r| (r.rights.write, r.rights.read));
    let (allowed, not_allowed) = [(Operation::Put, may_put), (Operation::Get, may_get)]
        .into_iter()
        .partition::<Vec<_>, _>(|(_, is_allowed)| *is_allowed);
    found.not_allowed = not_allowed.into_iter().map(|(operation, _)| operation).collect();
    for local in candidates::local(&devices) {
        let mut judged = Vec::new();
        if let Some(descriptor) = &descriptor {
            agent.probe_fabric(peer, &local.memory, descriptor, arguments.timeout)?;
        }
        for remote in &remote {
            let mut grouped: Vec<(Vec<Operation>, Choice)> = Vec::new();
            for (operation, _) in &allowed {
                let choice =
                    agent.explain(peer, *operation, &local.memory, &remote.memory, policy)?;
                match grouped.iter_mut().find(|(_, known)| *known == choice) {
                    Some((operations, _)) => operations.push(*operation),
                    None => grouped.push((vec![*operation], choice)),
                }
            }
            for (operations, choice) in grouped {
                merge_remote(&mut judged, &local, remote, operations, choice);
            }
        }
        merge_local(&mut found.choices, judged);
    }
    Ok(())
}

/// Devices of the peer with equal choices share an entry.
fn merge_remote(
    all: &mut Vec<PathChoice>,
    local: &NamedMemory,
    remote: &NamedMemory,
    operations: Vec<Operation>,
    choice: Choice,
) {
    let is_same = |judged: &&mut PathChoice| {
        (&judged.remote, &judged.operations, &judged.choice) == (&remote.name, &operations, &choice)
    };
    if let Some(same) = all.iter_mut().find(is_same) {
        same.remote_devices.extend(remote.device.clone());
        return;
    }
    all.push(PathChoice {
        local: vec![local.name.clone()],
        remote: remote.name.clone(),
        remote_devices: remote.device.iter().cloned().collect(),
        operations,
        taken: choice.taken(),
        fallback: choice.fallback().map(|(_, reason)| reason.name()),
        choice,
    });
}

/// Memory of this process with equal choices shares an entry.
fn merge_local(all: &mut Vec<PathChoice>, judged: Vec<PathChoice>) {
    for one in judged {
        let is_same = |known: &&mut PathChoice| {
            (&known.remote, &known.remote_devices, &known.operations, &known.choice)
                == (&one.remote, &one.remote_devices, &one.operations, &one.choice)
        };
        match all.iter_mut().find(is_same) {
            Some(same) => same.local.extend(one.local),
            None => all.push(one),
        }
    }
}

fn operation_name(operation: &Operation) -> &'static str {
    match operation {
        Operation::Put => "put",
        Operation::Get => "get",
    }
}

/// Is the device emulated in host memory, so that the path is that of a GPU?
fn is_emulated(judged: &PathChoice) -> bool {
    let ends = || judged.local.iter().chain(&judged.remote_devices);
    judged.taken == Some(Path::CudaIpc) && ends().any(|end| end.starts_with("emulated:"))
}

/// What to change for the next better path, if the path taken is a fallback.
fn advice(choice: &Choice) -> Option<String> {
    let (path, reason) = choice.fallbacks().last()?;
    let remedy = match reason {
        Reason::NoCopyService { .. } => {
            "run \"fabricast node\" with this directory in a process or pod that sees all GPUs \
             (packaging/kubernetes)"
        }
        Reason::MappingRefused { .. } => "give this container the device files of both GPUs",
        Reason::NoLocalDevice => "give this process a GPU",
        Reason::NoDescriptorPassing { .. } => {
            "mount one directory in both containers, and start both agents in it"
        }
        Reason::NoPeerAccess => "place both on GPUs that reach each other (nvidia-smi topo -p2p r)",
        Reason::ExportObstacle { .. } | Reason::LocalExportObstacle { .. } => {
            "allocate the memory with cudaMalloc, expandable segments or a pool"
        }
        Reason::NoFabric { .. } => "start both agents with a provider in common",
        _ => return None,
    };
    Some(format!("for {path}: {remedy}"))
}

fn to_text(found: &AgentReport) -> String {
    let label = text::escape_control(&found.label);
    let card = text::escape_control(&found.card.display().to_string());
    if found.is_stale {
        return format!("Agent \"{label}\" has exited, its card: {card}\n");
    }
    let place = match &found.locality {
        None => "unreachable",
        Some(Locality::SameProcess | Locality::SameMachine) => "on this machine",
        Some(Locality::NoDescriptorPassing { .. }) => {
            "on this machine, but descriptors cannot be passed"
        }
        Some(Locality::ForcedRemote) => "treated as remote",
        Some(Locality::OtherMachine) => "on another machine",
    };
    let mut out = String::new();
    if let Some(advice) = found.choices.iter().find_map(|judged| advice(&judged.choice)) {
        out.push_str(&text::wrapped("To change: ", &advice));
        out.push('\n');
    }
    let title = format!("Agent \"{label}\", {place} ({card})");
    out.push_str(&format!("{}\n", text::heading(&title)));
    if let Some(error) = &found.error {
        out.push_str(&text::wrapped("  ", &text::escape_control(error)));
    }
    for operation in &found.not_allowed {
        let operation = operation_name(operation);
        out.push_str(&format!("  {operation}: the region's rights do not allow it\n"));
    }
    for judged in &found.choices {
        let mut remote = judged.remote.clone();
        if !judged.remote_devices.is_empty() {
            remote.push_str(&format!(" on {}", judged.remote_devices.join(", ")));
        }
        let operations: Vec<_> = judged.operations.iter().map(operation_name).collect();
        let operations = operations.join(" and ");
        let ends = format!(
            "{}; remote {remote}; {operations}: {}{}",
            judged.local.join(", "),
            name(judged.taken),
            if is_emulated(judged) { " (emulated)" } else { "" }
        );
        out.push('\n');
        out.push_str(&text::wrapped("local ", &text::escape_control(&ends)));
        for candidate in &judged.choice.candidates {
            let first = format!("  {:<14} ", candidate.path);
            out.push_str(&text::wrapped(
                &first,
                &text::escape_control(&candidate.verdict.to_string()),
            ));
        }
    }
    out
}
