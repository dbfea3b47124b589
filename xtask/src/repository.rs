//! Text files of the git repository.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::{env, fs, io};

/// Ends of the names of source files.
const SUFFIXES: [&str; 4] = [".rs", ".c", ".h", ".py"];

/// Reads the source files of the work tree, or of a commit, by their paths in the repository.
pub(crate) fn read(commit: Option<&str>) -> Result<BTreeMap<String, String>, String> {
    let top = PathBuf::from(git(&["rev-parse", "--show-toplevel"])?.trim_end());
    env::set_current_dir(&top).map_err(|error| format!("{}: {error}", top.display()))?;
    let listed = match commit {
        Some(commit) => git(&["ls-tree", "-r", "-z", "--name-only", commit])?,
        None => git(&["ls-files", "-z"])?,
    };
    let mut files = BTreeMap::new();
    for path in listed.split('\0').filter(|path| SUFFIXES.iter().any(|end| path.ends_with(end))) {
        let text = match commit {
            Some(commit) => git(&["show", &format!("{commit}:{path}")])?,
            None => match fs::read(path) {
                Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
                // Deleted, and the deletion is not yet in the index.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(format!("{path}: {error}")),
            },
        };
        files.insert(path.to_owned(), text);
    }
    Ok(files)
}

fn git(arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("git")
        .args(arguments)
        .output()
        .map_err(|error| format!("git {} failed: {error}", arguments[0]))?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr);
        return Err(format!("git {} failed: {}", arguments[0], message.trim_end()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
