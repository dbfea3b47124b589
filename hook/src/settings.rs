//! Settings, from the environment. A program that preloads this library has no other place for them.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

#[derive(Debug)]
pub(crate) struct Settings {
    /// Shorter blocks are left to the original function: `FABRICAST_HOOK_MIN_BYTES`, 1 MiB.
    min_bytes: u64,
    /// What `/proc/self/fd` shows for descriptors that other processes may get:
    /// `FABRICAST_HOOK_DESCRIPTORS`, those of NVIDIA's driver.
    descriptors: String,
    /// Does it report what it does on standard error? `FABRICAST_HOOK_LOG=1`.
    is_logged: bool,
    /// Directory of the sockets.
    directory: PathBuf,
}

impl Settings {
    /// Does this library allocate blocks of this length?
    pub(crate) fn allocates(&self, length: usize) -> bool {
        length as u64 >= self.min_bytes
    }

    /// May other processes get a descriptor that `/proc/self/fd` shows like this?
    pub(crate) fn sends(&self, shown: &Path) -> bool {
        shown.to_str().is_some_and(|shown| shown.starts_with(&self.descriptors))
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }
}

/// Those of this process, read once.
pub(crate) fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let named = |name| std::env::var(name).ok().filter(|text| !text.is_empty());
        let min_bytes = named("FABRICAST_HOOK_MIN_BYTES").and_then(|text| text.parse().ok());
        let descriptors = named("FABRICAST_HOOK_DESCRIPTORS");
        Settings {
            min_bytes: min_bytes.unwrap_or(1 << 20),
            descriptors: descriptors.unwrap_or_else(|| "/dev/nvidia".to_owned()),
            is_logged: named("FABRICAST_HOOK_LOG").is_some_and(|text| text != "0"),
            directory: transfer::default_directory(),
        }
    })
}

/// Reports a line, if that is wanted.
pub(crate) fn log(text: impl FnOnce() -> String) {
    if settings().is_logged {
        eprintln!("fabricast-hook[{}]: {}", std::process::id(), text());
    }
}
