//! Directories for temporary files.

use std::ops::Deref;
use std::path::{Path, PathBuf};

/// The directory of one test. It is removed when this is dropped, unless the test panics.
#[derive(Debug)]
pub struct TempDir(PathBuf);

impl TempDir {
    /// A new directory, named after the test.
    ///
    /// # Panics
    /// If it cannot be created.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// The entries of the directory.
    ///
    /// # Panics
    /// If it cannot be read.
    #[must_use]
    pub fn entries(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }
}

impl Deref for TempDir {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}
