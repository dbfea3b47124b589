//! Removal of the files of killed agents on request. The next agent in the directory does it too,
//! but there may be none.

use std::path::{Path, PathBuf};

use ipc::DirectoryLock;

use super::card_file::{examine, names_in};
use crate::error::{Error, Result, failed};

/// The files of one agent in a directory, and its condition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leftovers {
    /// The name of its socket.
    pub name: String,
    /// The agent's condition: alive or dead.
    pub condition: Condition,
}

/// Condition of an agent, according to its directory.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Condition {
    /// The agent is dead, and these files were removed; or would be removed, in a dry run.
    Dead(Vec<PathBuf>),
    /// The agent is dead, but some of its files could not be removed.
    PartlyRemoved {
        /// Removed files.
        removed: Vec<PathBuf>,
        /// Files that still exist.
        kept: Vec<PathBuf>,
        /// Why the first of them could not be removed.
        why: String,
    },
    /// The agent is alive, for this reason. Nothing was changed.
    Alive(String),
    /// Unknown, for this reason. Nothing was changed.
    Unknown(String),
}

/// Removes the files of dead agents of this user from a directory; in a dry run only reports. Files
/// of agents that may be alive are kept.
///
/// ```
/// use transfer::{Agent, AgentOptions, Condition};
/// # let directory = std::env::temp_dir().join(format!("fabricast-clean-{}", std::process::id()));
/// # std::fs::create_dir_all(&directory)?;
/// let agent = Agent::start(AgentOptions::new("camera").directory(&directory))?;
/// let found = transfer::clean(&directory, false)?;
/// assert!(matches!(found[0].condition, Condition::Alive(_)));
/// # drop(agent);
/// # std::fs::remove_dir(directory)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Failed`](crate::ErrorKind::Failed) if the directory cannot be read.
pub fn clean(directory: &Path, dry_run: bool) -> Result<Vec<Leftovers>> {
    const OPERATION: &str = "clean up after agents";
    let of_directory = |error: Error| error.at(directory);
    let names = names_in(directory).map_err(failed(OPERATION)).map_err(of_directory)?;
    if names.is_empty() {
        return Ok(Vec::new());
    }
    // No agent can start from now on, so an agent that does not answer is dead.
    let _alone = DirectoryLock::take(directory).map_err(failed(OPERATION)).map_err(of_directory)?;
    let all = names.into_iter().map(|name| {
        let condition = remove_if_dead(&directory.join(&name), dry_run);
        Leftovers { name, condition }
    });
    // Agents that ended while this waited for the lock have no files any more.
    Ok(all.filter(|one| one.condition != Condition::Dead(Vec::new())).collect())
}

/// Removes the files of an agent if it is dead; in a dry run only reports. The caller has the lock
/// of the directory.
pub(super) fn remove_if_dead(socket: &Path, dry_run: bool) -> Condition {
    match examine(socket) {
        Ok((files, _locks)) if dry_run => Condition::Dead(files),
        Ok((files, _locks)) => remove(files),
        Err(condition) => condition,
    }
}

/// Continues after files that cannot be removed.
fn remove(files: Vec<PathBuf>) -> Condition {
    let mut first_error = None;
    let (removed, kept) = files.into_iter().partition(|file| match std::fs::remove_file(file) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            first_error.get_or_insert(error);
            false
        }
        _ => true,
    });
    match first_error {
        Some(error) => Condition::PartlyRemoved { removed, kept, why: error.to_string() },
        None => Condition::Dead(removed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removed_files_are_reported_if_others_remain() {
        let directory =
            std::env::temp_dir().join(format!("fabricast-stuck-{}", std::process::id()));
        // A directory in place of a file cannot be removed.
        let paths = ["first", "second", "third", "gone"].map(|name| directory.join(name));
        let [first, second, third, gone] = &paths;
        std::fs::create_dir_all(second).unwrap();
        for file in [first, third] {
            std::fs::write(file, "").unwrap();
        }
        let Condition::PartlyRemoved { removed, kept, why } = remove(paths.to_vec()) else {
            panic!()
        };
        assert_eq!(removed, [first.clone(), third.clone(), gone.clone()]);
        assert_eq!(kept, std::slice::from_ref(second));
        assert!(!why.is_empty() && !first.exists() && second.exists() && !third.exists());
        std::fs::remove_dir_all(directory).unwrap();
    }
}
