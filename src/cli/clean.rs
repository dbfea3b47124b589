//! `fabricast clean`: removes files that killed processes left in directories of nodes and agents.

use std::path::{Path, PathBuf};

use serde_json::json;

use super::exit::{Exit, Failure, Result};
use super::remedy::{check_not_a_file, with_remedy};
use super::settings::{DIRECTORY_ONLY, Options};
use super::{output, text};

/// Removes files that killed processes left in directories of nodes and agents, and reports which
/// files it keeps, and why.
///
/// Files of running processes are kept. Running it is never required: the next process to join
/// cleans up, too.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Directories [default: the node's]
    directories: Vec<PathBuf>,
    /// Report what would be removed, and remove nothing
    #[arg(long)]
    dry_run: bool,
    /// One JSON line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Options<DIRECTORY_ONLY>,
}

/// A file, or several that belong together, and whether it is removed.
#[derive(Debug, Clone, PartialEq, Eq)]
struct CleanedPaths {
    paths: Vec<PathBuf>,
    is_removed: bool,
    why: String,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let settings = arguments.settings.settings()?;
    let directories = match arguments.directories.is_empty() {
        true => {
            // The default directory belongs to a node. A named one may belong to an agent, with a
            // looser mode.
            check_not_a_file(&settings)?;
            pubsub::check_directory(&settings.node.directory).map_err(with_remedy)?;
            vec![settings.node.directory]
        }
        false => arguments.directories.clone(),
    };
    let (mut all, mut failures) = (Vec::new(), Vec::new());
    for directory in &directories {
        if !directory.is_dir() {
            let why = format!("clean {} failed: no such directory", directory.display());
            failures.push(Failure::new(Exit::NotFound, why));
            continue;
        }
        if let Err(failure) = check_readable(directory) {
            failures.push(failure);
            continue;
        }
        for clean in [clean_agents, clean_names, clean_node, clean_domains] {
            match clean(directory, arguments.dry_run) {
                Ok(done) => all.extend(done),
                Err(failure) => failures.push(failure),
            }
        }
    }
    // Also after a failure, report what was removed.
    if arguments.json {
        return output::report_as_json(combined(&failures), &to_json(&all, arguments.dry_run));
    }
    let printed = match all.is_empty() && !failures.is_empty() {
        true => Ok(()),
        false => output::print_report(&to_text(&all, arguments.dry_run)),
    };
    combined(&failures).and(printed)
}

/// A directory that is not readable belongs to another user.
fn check_readable(directory: &Path) -> Result<()> {
    directory.read_dir().map(drop).map_err(|error| {
        let exit = match error.kind() {
            std::io::ErrorKind::PermissionDenied => Exit::Denied,
            _ => Exit::Failed,
        };
        Failure::new(exit, format!("clean {} failed: {error}", directory.display()))
    })
}

/// All failures as one, with the code of the first.
fn combined(failures: &[Failure]) -> Result<()> {
    let Some(first) = failures.first() else { return Ok(()) };
    let words: Vec<_> = failures.iter().map(Failure::to_string).collect();
    Err(Failure::new(first.exit(), words.join("; ")))
}

fn clean_agents(directory: &Path, dry_run: bool) -> Result<Vec<CleanedPaths>> {
    use transfer::Condition;
    let found = transfer::clean(directory, dry_run).map_err(Failure::of)?;
    let dead =
        |paths| CleanedPaths { paths, is_removed: true, why: "the agent has exited".to_owned() };
    let done = found.into_iter().flat_map(|one| {
        let kept =
            |why| CleanedPaths { paths: vec![directory.join(&one.name)], is_removed: false, why };
        match one.condition {
            Condition::Dead(paths) => vec![dead(paths)],
            Condition::PartlyRemoved { removed, kept: paths, why } => {
                vec![dead(removed), CleanedPaths { paths, is_removed: false, why }]
            }
            Condition::Alive(why) | Condition::Unknown(why) => vec![kept(why)],
            _ => vec![kept("not known".to_owned())],
        }
    });
    Ok(done.collect())
}

fn clean_names(directory: &Path, dry_run: bool) -> Result<Vec<CleanedPaths>> {
    let paths = transfer::clean_names(directory, dry_run).map_err(Failure::of)?;
    let why = "the process that shared memory under the name has ended".to_owned();
    let done = CleanedPaths { paths, is_removed: true, why };
    Ok(if done.paths.is_empty() { Vec::new() } else { vec![done] })
}

fn clean_node(directory: &Path, dry_run: bool) -> Result<Vec<CleanedPaths>> {
    use pubsub::Condition;
    let condition = pubsub::clean(directory, dry_run).map_err(with_remedy)?;
    let (paths, is_removed, why) = match condition {
        Condition::Dead(paths) => {
            (paths, true, "no process serves the node or is a member of it".to_owned())
        }
        Condition::Alive(path, why) | Condition::Unknown(path, why) => (vec![path], false, why),
        _ => return Ok(Vec::new()),
    };
    Ok(vec![CleanedPaths { paths, is_removed, why }])
}

fn clean_domains(directory: &Path, dry_run: bool) -> Result<Vec<CleanedPaths>> {
    let found = collective::DomainStatus::clean(directory, dry_run).map_err(|error| {
        Failure::new(Exit::Failed, format!("clean {} failed: {error}", directory.display()))
    })?;
    let why = "the process that decided for the domain has ended".to_owned();
    let removed = found.removed.into_iter().map(|path| (path, true, why.clone()));
    let kept = found.kept.into_iter().map(|(path, error)| (path, false, error.to_string()));
    let done = |(path, is_removed, why)| CleanedPaths { paths: vec![path], is_removed, why };
    Ok(removed.chain(kept).map(done).collect())
}

fn to_text(all: &[CleanedPaths], dry_run: bool) -> String {
    let mut out = String::new();
    for done in all {
        let what = match (done.is_removed, dry_run) {
            (true, false) => "removed",
            (true, true) => "would remove",
            (false, _) => "kept",
        };
        for path in &done.paths {
            let path = text::escape_control(&path.display().to_string());
            out.push_str(&format!("{what} {path}: {}\n", text::escape_control(&done.why)));
        }
    }
    if out.is_empty() {
        out.push_str("nothing to remove\n");
    }
    out
}

fn to_json(all: &[CleanedPaths], dry_run: bool) -> serde_json::Value {
    let of = |is_removed: bool| -> Vec<_> {
        let some = all.iter().filter(|done| done.is_removed == is_removed);
        let lines = some.flat_map(|done| done.paths.iter().map(move |path| (path, &done.why)));
        lines
            .map(|(path, why)| json!({ "path": path.display().to_string(), "reason": why }))
            .collect()
    };
    json!({ "dry_run": dry_run, "removed": of(true), "kept": of(false) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_lists_removed_and_kept_files_with_reasons() {
        let one = |path: &str, is_removed, why: &str| CleanedPaths {
            paths: vec![path.into()],
            is_removed,
            why: why.to_owned(),
        };
        let all = [one("a", true, "dead"), one("b", false, "alive")];
        assert_eq!(to_text(&all, false), "removed a: dead\nkept b: alive\n");
        assert_eq!(to_text(&all, true), "would remove a: dead\nkept b: alive\n");
        assert_eq!(to_text(&[], true), "nothing to remove\n");
        let document = to_json(&all, false);
        assert_eq!(
            (&document["removed"][0]["path"], &document["kept"][0]["reason"]),
            (&"a".into(), &"alive".into())
        );
    }
}
