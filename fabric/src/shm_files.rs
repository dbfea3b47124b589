//! The files of the provider shm in `/dev/shm`.
//!
//! shm names the file of an endpoint after its source, and a killed process leaves it behind. So a
//! source contains its process and time, and the number of its PID namespace: `/dev/shm` may be shared
//! by several. The next endpoint of shm that the user opens in that namespace removes the files of
//! processes that no longer exist.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process;
use std::time::{SystemTime, UNIX_EPOCH};

use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::{Pid, geteuid};

const DIRECTORY: &str = "/dev/shm";
/// The scheme of shm's sources.
pub(crate) const SCHEME: &str = "fi_shm://";

/// A source that no other endpoint has or had.
pub(crate) fn new_source() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = since.map_or(0, |since| since.as_nanos());
    format!("{SCHEME}{}-{now:x}-{:x}", process::id(), namespace())
}

/// The number of this process' PID namespace; 0 if it is not known.
fn namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |found| found.ino())
}

pub(crate) fn remove_of_ended_processes() {
    remove_in(Path::new(DIRECTORY), namespace());
}

fn remove_in(directory: &Path, namespace: u64) {
    // Without its number a process of another namespace could be taken for an ended one.
    if namespace == 0 {
        return;
    }
    let user = geteuid().as_raw();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| process_of(name, namespace));
        if process.is_some_and(|process| !exists(process))
            && entry.metadata().is_ok_and(|found| found.is_file() && found.uid() == user)
        {
            // Another process may have removed it.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// The process of a file that is named after a [source](new_source) of this namespace.
fn process_of(name: &str, namespace: u64) -> Option<i32> {
    // The provider appends numbers to the name.
    let mut parts = name.split(':').next()?.split('-');
    let (process, time, space) = (parts.next()?, parts.next()?, parts.next()?);
    let has_time = u128::from_str_radix(time, 16).is_ok();
    let is_here = u64::from_str_radix(space, 16) == Ok(namespace);
    let process = process.parse().ok().filter(|process| *process > 0)?;
    (has_time && is_here && parts.next().is_none()).then_some(process)
}

/// Does a process exist? If it belongs to another user, too.
fn exists(process: i32) -> bool {
    kill(Pid::from_raw(process), None) != Err(Errno::ESRCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_ended_processes_of_this_namespace_are_removed() {
        let directory = std::env::temp_dir().join(format!("fabricast-shm-files-{}", process::id()));
        fs::create_dir_all(&directory).unwrap();
        let mut child = process::Command::new("true").spawn().unwrap();
        let (ended, running) = (child.id(), process::id());
        child.wait().unwrap();
        let names = [
            format!("{running}-18ebc6-a1:0:0"),
            format!("{ended}-18ebc6-a2:0:0"),
            format!("{ended}-18ebc6:0:0"),
            format!("{ended}:0:0"),
            format!("x{ended}-18ebc6-a1"),
            format!("-{ended}-18ebc6-a1"),
            format!("{ended}-18ebc6-a1-b:0:0"),
        ];
        let removed = [format!("{ended}-18ebc6-a1:0:0"), format!("{ended}-18ebc7-a1")];
        for name in names.iter().chain(&removed) {
            fs::write(directory.join(name), "").unwrap();
        }
        remove_in(&directory, 0xa1);
        let left = names.iter().filter(|name| directory.join(name).exists()).count();
        assert_eq!((left, fs::read_dir(&directory).unwrap().count()), (names.len(), names.len()));
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn sources_name_this_process_and_namespace() {
        let source = new_source();
        let name = source.strip_prefix(SCHEME).unwrap();
        assert_eq!(process_of(name, namespace()), Some(process::id() as i32));
        assert_eq!(process_of(name, namespace() + 1), None);
    }
}
