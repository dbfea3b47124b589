//! What a publisher has published on each topic, in a file: the supervisor reads it, also after the
//! publisher was killed.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Numbers of the messages of one publisher on one topic.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Published {
    /// The last one that it began to publish.
    pub begun: u64,
    /// The last one that is published.
    pub done: u64,
}

/// The file of a publisher.
pub struct Progress(File);

impl Progress {
    fn path(directory: &Path, publisher: u64) -> PathBuf {
        directory.join(format!("published-{publisher}"))
    }

    pub fn create(directory: &Path, publisher: u64) -> Self {
        Self(File::create(Self::path(directory, publisher)).expect("create a file of progress"))
    }

    fn store(&self, at: usize, number: u64) {
        self.0.write_at(&number.to_le_bytes(), at as u64 * 8).expect("write progress");
    }

    pub fn begin(&self, topic: usize, number: u64) {
        self.store(2 * topic, number);
    }

    pub fn end(&self, topic: usize, number: u64) {
        self.store(2 * topic + 1, number);
    }

    /// What the publisher has published on each of so many topics.
    pub fn read(directory: &Path, publisher: u64, topics: usize) -> Vec<Published> {
        let bytes = std::fs::read(Self::path(directory, publisher)).unwrap_or_default();
        let number = |at: usize| {
            bytes
                .get(at * 8..at * 8 + 8)
                .map_or(0, |bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
        };
        // A message that was published meanwhile was begun before.
        (0..topics)
            .map(|topic| {
                let done = number(2 * topic + 1);
                Published { begun: number(2 * topic).max(done), done }
            })
            .collect()
    }
}
