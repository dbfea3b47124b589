//! What killed agents left in a directory, removed on request: the next agent there does it,
//! too, but there may be none.

use std::path::{Path, PathBuf};

use ipc::DirectoryLock;

use super::doorplate::{Found, examine, names_in};
use crate::error::{Error, ErrorKind, Result};

/// What lies in a directory under the name of one agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remains {
    /// What its socket is called.
    pub name: String,
    /// What was found out about it.
    pub condition: Condition,
}

/// Whether an agent lives, as far as its directory tells.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Condition {
    /// It is dead, and these files were removed; or would have been, if only that was asked.
    Dead(Vec<PathBuf>),
    /// It lives, and nothing was touched. With what speaks for it.
    Alive(String),
    /// Nobody can say, and nothing was touched. With what is in the way.
    Unknown(String),
}

/// Removes what agents of this user left in a directory that are dead; or only says what it
/// would remove, and why not the rest. Nothing is removed that anybody could be alive for.
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
/// [`Failed`](ErrorKind::Failed) if the directory cannot be looked into.
pub fn clean(directory: &Path, is_rehearsal: bool) -> Result<Vec<Remains>> {
    const OPERATION: &str = "clean up after agents";
    let failed = |why: &dyn ToString| {
        Error::new(OPERATION, ErrorKind::Failed, why.to_string()).with(directory.display())
    };
    let names = names_in(directory).map_err(|error| failed(&error))?;
    if names.is_empty() {
        return Ok(Vec::new());
    }
    // From now on nobody comes, so that who is not there is dead.
    let _alone = DirectoryLock::take(directory).map_err(|error| failed(&error))?;
    let all = names.into_iter().map(|name| {
        let condition = judge(&directory.join(&name), is_rehearsal);
        Remains { name, condition }
    });
    // One that left while this waited for its turn has nothing there any more.
    Ok(all.filter(|one| one.condition != Condition::Dead(Vec::new())).collect())
}

fn judge(socket: &Path, is_rehearsal: bool) -> Condition {
    match examine(socket) {
        Ok(Found::Alive(why)) => Condition::Alive(why.to_owned()),
        Ok(Found::Strange(why)) => Condition::Unknown(why.to_owned()),
        Ok(Found::Dead(files, _locks)) => {
            let removed = match is_rehearsal {
                true => Ok(()),
                false => files.iter().try_for_each(std::fs::remove_file),
            };
            removed.map_or_else(
                |error| Condition::Unknown(error.to_string()),
                |()| Condition::Dead(files),
            )
        }
        Err(error) => Condition::Unknown(error.to_string()),
    }
}
