//! Directories for temporary files.

use std::ops::Deref;
use std::path::{Path, PathBuf};

/// A directory of one test. It goes when this is dropped, unless the test panics.
#[derive(Debug)]
pub struct TempDir(PathBuf);

impl TempDir {
    /// A new one, which tells the test by its name.
    ///
    /// # Panics
    /// It cannot be made.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// What lies in it.
    ///
    /// # Panics
    /// It cannot be read.
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
