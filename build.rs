//! Records what `fabricast info` tells of its own build: the git commit, where
//! there is one. A source archive without git builds just as well.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=../build.rs");
    let commit = commit().unwrap_or_default();
    println!("cargo::rustc-env=FABRICAST_GIT_COMMIT={commit}");
    let version = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let line = if commit.is_empty() { version } else { format!("{version} ({commit})") };
    println!("cargo::rustc-env=FABRICAST_VERSION_LINE={line}");
}

fn commit() -> Option<String> {
    let directory = PathBuf::from(git(&["rev-parse", "--absolute-git-dir"])?);
    let common = PathBuf::from(git(&["rev-parse", "--path-format=absolute", "--git-common-dir"])?);
    // A commit changes the branch that HEAD names, a checkout HEAD itself.
    watch(&directory.join("HEAD"));
    if let Some(branch) = git(&["symbolic-ref", "-q", "HEAD"]) {
        watch(&common.join(branch));
        watch(&common.join("packed-refs"));
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}

/// Cargo would build again every time for a file that does not exist.
fn watch(file: &Path) {
    if file.exists() {
        println!("cargo::rerun-if-changed={}", file.display());
    }
}

/// What git says; nothing if there is no git, no repository, or it is not ours:
/// a source archive may be unpacked inside some other repository.
fn git(arguments: &[&str]) -> Option<String> {
    let here = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR")?).parent()?.to_owned();
    if !here.join(".git").exists() {
        return None;
    }
    let output = Command::new("git").args(arguments).current_dir(here).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    (output.status.success() && !text.trim().is_empty()).then(|| text.trim().to_owned())
}
