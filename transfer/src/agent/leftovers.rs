//! What killed agents left in a directory, removed on request: the next agent there does it,
//! too, but there may be none.

use std::path::{Path, PathBuf};

use ipc::DirectoryLock;

use super::card_file::{examine, names_in};
use crate::error::{Error, ErrorKind, Result};

/// What lies in a directory under the name of one agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leftovers {
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
    /// It is dead, and not all of its files could be removed.
    PartlyRemoved {
        /// These were.
        removed: Vec<PathBuf>,
        /// These are still there.
        kept: Vec<PathBuf>,
        /// What was in the way, of the first of them.
        why: String,
    },
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
pub fn clean(directory: &Path, dry_run: bool) -> Result<Vec<Leftovers>> {
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
        let condition = remove_if_dead(&directory.join(&name), dry_run);
        Leftovers { name, condition }
    });
    // One that left while this waited for its turn has nothing there any more.
    Ok(all.filter(|one| one.condition != Condition::Dead(Vec::new())).collect())
}

/// Removes what a dead agent left, or only says what it would remove. To be called by who has the
/// lock of the directory.
pub(super) fn remove_if_dead(socket: &Path, dry_run: bool) -> Condition {
    match examine(socket) {
        Ok((files, _locks)) if dry_run => Condition::Dead(files),
        Ok((files, _locks)) => remove(files),
        Err(condition) => condition,
    }
}

/// One that cannot be removed keeps no other from it.
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
    fn what_was_removed_is_told_also_if_not_all_was() {
        let directory =
            std::env::temp_dir().join(format!("fabricast-stuck-{}", std::process::id()));
        // Nobody removes a directory in place of a file.
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
