//! Removal of the files of killed agents on request. The next agent in the directory does it too,
//! but there may be none.

use std::path::Path;

use ipc::DirectoryLock;

use super::agent_files::{Condition, names_in, remove_if_dead};
use crate::error::{Error, Result, failed};

/// The files of one agent in a directory, and its condition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leftovers {
    /// The name of its socket.
    pub name: String,
    /// The agent's condition: alive or dead.
    pub condition: Condition,
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
