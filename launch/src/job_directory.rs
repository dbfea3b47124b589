//! The directory of the node that the ranks of a job share on a machine.
//!
//! Each job has its own, so that topics of different jobs do not mix. It lies in the directory of
//! the group, and is removed by the last rank that ends, or by the next group of the user.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipc::DirectoryLock;

const PREFIX: &str = "job-";
/// A younger directory may belong to a job that is about to join its node.
const MIN_AGE: Duration = Duration::from_secs(60);

/// The directory of this job's node. Dropping it removes it, unless a process uses the node.
#[derive(Debug)]
pub(crate) struct JobDirectory(PathBuf);

impl JobDirectory {
    /// The directory of a job, in that of its group. Those of jobs that have ended are removed.
    pub(crate) fn new(directory: &Path, job: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        job.hash(&mut hasher);
        let own = Self(directory.join(format!("{PREFIX}{:016x}", hasher.finish())));
        remove_ended(directory, &own.0);
        own
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for JobDirectory {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

/// Removes the directories of jobs that have ended, except `own`.
fn remove_ended(directory: &Path, own: &Path) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        let changed = entry.metadata().and_then(|found| found.modified());
        let age = changed.ok().and_then(|changed| changed.elapsed().ok());
        let is_old = age.is_some_and(|age| age >= MIN_AGE);
        if is_old && path != own && entry.file_name().to_string_lossy().starts_with(PREFIX) {
            remove(&path);
        }
    }
}

/// Removes the directory of a job, unless a process uses its node. One process at a time, because a
/// process that checks this looks like one that uses it.
fn remove(path: &Path) {
    let _alone = path.parent().map(DirectoryLock::take);
    match pubsub::remove_directory(path) {
        Ok(_) => {}
        Err(error) => tracing::debug!(%error, "directory of a job's node stays"),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::FileTimes;
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn ranks_that_end_at_once_remove_the_directory() {
        let name = format!("fabricast-jobs-at-once-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        for round in 0..20 {
            let ranks = [(); 8].map(|()| JobDirectory::new(&directory, "own"));
            let own = ranks[0].path().to_owned();
            fs::create_dir_all(&own).unwrap();
            std::thread::scope(|scope| {
                ranks.into_iter().for_each(|rank| _ = scope.spawn(move || drop(rank)));
            });
            assert!(!own.exists(), "round {round}");
        }
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn directories_of_ended_jobs_are_removed() {
        let name = format!("fabricast-jobs-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let make = |job| {
            let own = JobDirectory::new(&directory, job);
            fs::create_dir_all(own.path()).unwrap();
            let path = own.path().to_owned();
            std::mem::forget(own);
            path
        };
        let (old, young) = (make("old"), make("young"));
        let long_ago = FileTimes::new().set_modified(SystemTime::now() - 2 * MIN_AGE);
        fs::File::open(&old).unwrap().set_times(long_ago).unwrap();
        let own = JobDirectory::new(&directory, "own");
        assert!(!old.exists() && young.exists());
        fs::create_dir(own.path()).unwrap();
        drop(own);
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
        fs::remove_dir_all(directory).unwrap();
    }
}
