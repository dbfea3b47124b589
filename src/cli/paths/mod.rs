//! `fabricast paths`: which path data takes, and why: in typical situations, or to a peer.

mod collectives;
mod explain;
mod inter_node;

use std::path::PathBuf;
use std::time::Duration;

use pubsub::parse_seconds;
use serde::Serialize;
use transfer::path::{Choice, Path, Policy, Reason, Verdict, choose, situations};

use super::exit::Result;
use super::settings::{DIRECTORY_ONLY, Options};
use super::{output, text};

pub(crate) use self::inter_node::{
    bracketed_names, given_up, incompatibility, name_of_node, remedy_for, replication_error_text,
    unreachable_text,
};

/// Shows by which path bytes travel, and why.
///
/// Without arguments: in typical situations, as in docs/reference/paths.md. With --explain: to a running
/// agent, from each kind of memory of this machine, without mapping anything. The agent sees a
/// connection that closes again. With --fabric it is contacted through the fabric, too; with --region
/// as well, device memory is probed as a join does. With --topics: between nodes. With --collectives: in
/// collective operations of running ranks.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Explain the paths to this agent: its card file, or the directory it was started with
    #[arg(long, value_name = "PEER")]
    explain: Option<PathBuf>,
    /// Show which topics are replicated between this node and its peers
    #[arg(long, conflicts_with_all = ["explain", "region", "policy", "timeout"])]
    topics: bool,
    /// Show what domains of ranks use for collective operations, and how they learnt it
    #[arg(long, conflicts_with_all = ["explain", "topics", "region", "policy", "timeout"])]
    collectives: bool,
    /// To a region of the agent, whose descriptor is in this file [default: to typical memory]
    #[arg(long, value_name = "FILE", requires = "explain")]
    region: Option<PathBuf>,
    /// Open a fabric, so that its paths are considered, too: of this provider [default: of a
    /// provider of the agent]
    #[arg(long, value_name = "PROVIDER", num_args = 0..=1, default_missing_value = "", requires = "explain")]
    fabric: Option<String>,
    /// Paths to prefer (NAME), require (=NAME) or deny (^NAME), separated by commas
    #[arg(long, value_name = "LIST", default_value = "")]
    policy: Policy,
    /// Timeout for each agent
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, default_value = "2")]
    timeout: Duration,
    /// One JSON line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Options<DIRECTORY_ONLY>,
}

#[derive(Debug, Serialize)]
struct SituationChoice {
    situation: &'static str,
    taken: Option<Path>,
    #[serde(flatten)]
    choice: Choice,
}

#[derive(Debug, Serialize)]
struct SituationTable<'a> {
    policy: &'a Policy,
    situations: Vec<SituationChoice>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    if arguments.topics {
        return inter_node::run(arguments);
    }
    if arguments.collectives {
        return collectives::run(arguments);
    }
    if let Some(peer) = &arguments.explain {
        return explain::run(arguments, peer);
    }
    let judged = situations().into_iter().map(|situation| {
        let choice = choose(&situation.facts, &arguments.policy);
        SituationChoice { situation: situation.name, taken: choice.taken(), choice }
    });
    let table = SituationTable { policy: &arguments.policy, situations: judged.collect() };
    if arguments.json { output::json(&table) } else { output::print_report(&to_text(&table)) }
}

fn name(taken: Option<Path>) -> &'static str {
    taken.map_or("none", Path::name)
}

/// Why no better path is used: unexpected refusals, and those that concern the policy.
fn relevant_refusals<'a>(
    choice: &'a Choice,
    policy: &Policy,
) -> impl Iterator<Item = (Path, &'a Reason)> {
    let wanted = [&policy.prefer[..], &policy.require].concat();
    let before = choice.candidates.iter().map_while(|candidate| match &candidate.verdict {
        Verdict::Refused(reason) => Some((candidate.path, reason)),
        Verdict::Taken => None,
    });
    before.filter(move |(path, reason)| {
        let is_of_policy = matches!(reason, Reason::Denied | Reason::NotRequired);
        !reason.is_expected() || is_of_policy || wanted.contains(path)
    })
}

/// Each situation with its path, and why no better path is used.
fn to_text(table: &SituationTable<'_>) -> String {
    let width = table.situations.iter().map(|judged| judged.situation.len()).max().unwrap_or(0);
    let mut out = String::new();
    for SituationChoice { situation, taken, choice } in &table.situations {
        out.push_str(&format!("{situation:width$}  {}\n", name(*taken)));
        for (path, reason) in relevant_refusals(choice, table.policy) {
            out.push_str(&text::wrapped(&format!("  not {path}: "), &reason.to_string()));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_has_a_line_for_each_situation_within_its_width() {
        let judged = situations().into_iter().map(|situation| {
            let choice = choose(&situation.facts, &Policy::default());
            SituationChoice { situation: situation.name, taken: choice.taken(), choice }
        });
        let table = SituationTable { policy: &Policy::default(), situations: judged.collect() };
        let out = to_text(&table);
        assert!(out.lines().all(|line| line.chars().count() <= text::WIDTH), "{out}");
        assert!(table.situations.iter().all(|judged| out.contains(judged.situation)), "{out}");
    }
}
