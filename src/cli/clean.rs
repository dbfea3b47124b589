//! `fabricast clean`: removes what the dead left in directories of nodes and agents.

use std::path::{Path, PathBuf};

use serde_json::json;

use super::exit::{Exit, Failure, report_as_json};
use super::membership::{check_is_no_file, with_remedy};
use super::settings::{OF_DIRECTORY, Options};
use super::text;

/// Removes what killed processes left in directories of nodes and agents, and says what it
/// keeps, and why.
///
/// Nothing is removed that anybody could be alive for. It is never needed: whoever comes next
/// cleans up, too.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Directories [default: the node's]
    directories: Vec<PathBuf>,
    /// Only say what would be removed
    #[arg(long)]
    dry_run: bool,
    /// One JSON line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Options<OF_DIRECTORY>,
}

/// What was done about a file, or about several that belong together.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Done {
    paths: Vec<PathBuf>,
    is_removed: bool,
    why: String,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let settings = arguments.settings.settings()?;
    let directories = match arguments.directories.is_empty() {
        true => {
            // It is a node's; those that are named may be agents', who are not so strict.
            check_is_no_file(&settings)?;
            pubsub::check_directory(&settings.directory.value).map_err(with_remedy)?;
            vec![settings.directory.value]
        }
        false => arguments.directories.clone(),
    };
    let (mut all, mut failures) = (Vec::new(), Vec::new());
    for directory in &directories {
        if !directory.is_dir() {
            let why = format!("clean {} failed: there is no such directory", directory.display());
            failures.push(Failure::new(Exit::NobodyThere, why));
            continue;
        }
        if let Err(failure) = look_into(directory) {
            failures.push(failure);
            continue;
        }
        for look in [of_agents, of_node] {
            match look(directory, arguments.dry_run) {
                Ok(done) => all.extend(done),
                Err(failure) => failures.push(failure),
            }
        }
    }
    // What was done is told, whatever failed beside it.
    if arguments.json {
        return report_as_json(together(&failures), &for_programs(&all, arguments.dry_run));
    }
    let told = match all.is_empty() && !failures.is_empty() {
        true => Ok(()),
        false => text::print(&for_people(&all, arguments.dry_run)),
    };
    together(&failures).and(told)
}

/// What this user may not look into is another one's.
fn look_into(directory: &Path) -> Result<(), Failure> {
    directory.read_dir().map(drop).map_err(|error| {
        let exit = match error.kind() {
            std::io::ErrorKind::PermissionDenied => Exit::Denied,
            _ => Exit::Failed,
        };
        Failure::new(exit, format!("clean {} failed: {error}", directory.display()))
    })
}

/// All that failed, with the code of what failed first.
fn together(failures: &[Failure]) -> Result<(), Failure> {
    let Some(first) = failures.first() else { return Ok(()) };
    let words: Vec<_> = failures.iter().map(Failure::to_string).collect();
    Err(Failure::new(first.exit(), words.join("; ")))
}

fn of_agents(directory: &Path, is_rehearsal: bool) -> Result<Vec<Done>, Failure> {
    use transfer::Condition;
    let found = transfer::clean(directory, is_rehearsal)
        .map_err(|error| Failure::failed(error.to_string()))?;
    let dead = |paths| Done { paths, is_removed: true, why: "the agent is dead".to_owned() };
    let done = found.into_iter().flat_map(|one| {
        let kept = |why| Done { paths: vec![directory.join(&one.name)], is_removed: false, why };
        match one.condition {
            Condition::Dead(paths) => vec![dead(paths)],
            Condition::Stuck { removed, kept: paths, why } => {
                vec![dead(removed), Done { paths, is_removed: false, why }]
            }
            Condition::Alive(why) | Condition::Unknown(why) => vec![kept(why)],
            _ => vec![kept("not known".to_owned())],
        }
    });
    Ok(done.collect())
}

fn of_node(directory: &Path, is_rehearsal: bool) -> Result<Vec<Done>, Failure> {
    use pubsub::Condition;
    let condition = pubsub::clean(directory, is_rehearsal).map_err(with_remedy)?;
    let (paths, is_removed, why) = match condition {
        Condition::Dead(paths) => {
            (paths, true, "nobody serves the node, nor takes part in it".to_owned())
        }
        Condition::Alive(path, why) | Condition::Unknown(path, why) => (vec![path], false, why),
        _ => return Ok(Vec::new()),
    };
    Ok(vec![Done { paths, is_removed, why }])
}

fn for_people(all: &[Done], is_rehearsal: bool) -> String {
    let mut out = String::new();
    for done in all {
        let what = match (done.is_removed, is_rehearsal) {
            (true, false) => "removed",
            (true, true) => "would remove",
            (false, _) => "kept",
        };
        for path in &done.paths {
            out.push_str(&format!("{what} {}: {}\n", path.display(), done.why));
        }
    }
    if out.is_empty() {
        out.push_str("nothing is there to be removed\n");
    }
    out
}

fn for_programs(all: &[Done], is_rehearsal: bool) -> serde_json::Value {
    let of = |is_removed: bool| -> Vec<_> {
        let some = all.iter().filter(|done| done.is_removed == is_removed);
        let lines = some.flat_map(|done| done.paths.iter().map(move |path| (path, &done.why)));
        lines.map(|(path, why)| json!({ "path": path.display().to_string(), "why": why })).collect()
    };
    json!({ "dry_run": is_rehearsal, "removed": of(true), "kept": of(false) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_told_with_its_reason() {
        let one = |path: &str, is_removed, why: &str| Done {
            paths: vec![path.into()],
            is_removed,
            why: why.to_owned(),
        };
        let all = [one("a", true, "dead"), one("b", false, "alive")];
        assert_eq!(for_people(&all, false), "removed a: dead\nkept b: alive\n");
        assert_eq!(for_people(&all, true), "would remove a: dead\nkept b: alive\n");
        assert_eq!(for_people(&[], true), "nothing is there to be removed\n");
        let said = for_programs(&all, false);
        assert_eq!(
            (&said["removed"][0]["path"], &said["kept"][0]["why"]),
            (&"a".into(), &"alive".into())
        );
    }
}
