//! Which process serves a node: the one that holds a lock in the node's directory.
//!
//! It is a record lock, which belongs to the process and to nobody else: the kernel takes it
//! from the dead, and a forked child does not have it. Within one process, which could take
//! such a lock twice, a set of directories keeps order.
//!
//! Who is to serve for as long as it is there holds a lock beside it, the *claim*, also while
//! somebody else still has the office: who serves in passing gives way to who holds it, and who
//! could serve in passing leaves a vacant office to it for a while. The kernel takes it from the
//! dead, too, so nobody waits for one that is no more.
//!
//! Every member of a node holds another lock, together with the others. While anybody holds
//! it there is a hall, and a new service waits for somebody to bring it. Which hall that is
//! stands in the file: one who was away may bring the hall of a node that is no more.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ipc::{Channel, Credentials, ForkGeneration};
use nix::fcntl::{FcntlArg, Flock, FlockArg, fcntl};
use nix::libc;

use crate::error::{Error, ErrorKind, Result};
use crate::lock::lock;
use crate::peers::NodeId;

const LOCK_FILE: &str = "node.lock";
const PRIORITY_FILE: &str = "node.priority";
const MEMBERS_FILE: &str = "node.members";
const SOCKET_FILE: &str = "node.sock";

/// Where processes join.
pub(crate) fn socket_path(directory: &Path) -> PathBuf {
    directory.join(SOCKET_FILE)
}

/// The lock of who serves.
pub(crate) fn lock_path(directory: &Path) -> PathBuf {
    directory.join(LOCK_FILE)
}

/// Makes the directory of a node, or refuses one that others could tamper with, or that no socket
/// can be in.
pub(crate) fn prepare(operation: &'static str, directory: &Path) -> Result<()> {
    Channel::check_path(&socket_path(directory))
        .map_err(|error| Error::because(operation, ErrorKind::InvalidArgument, error))?;
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(|error| directory_error(operation, directory, error))?;
    check(operation, directory)
}

fn directory_error(operation: &'static str, directory: &Path, error: io::Error) -> Error {
    let kind = match error.kind() {
        io::ErrorKind::PermissionDenied => ErrorKind::Denied,
        _ => ErrorKind::Failed,
    };
    Error::because(operation, kind, error).on(directory.display())
}

/// Refuses a directory that others could tamper with. That none is there is for others to say.
pub(crate) fn check(operation: &'static str, directory: &Path) -> Result<()> {
    let found = match fs::symlink_metadata(directory) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(directory_error(operation, directory, error)),
    };
    let (own, mode) = (Credentials::of_this_process().user, found.mode() & 0o7777);
    let detail = if found.is_symlink() {
        "it is a symbolic link, and not a directory".to_owned()
    } else if !found.is_dir() {
        "it is not a directory".to_owned()
    } else if found.uid() != own {
        format!("it is another user's (user {}, this process is of user {own})", found.uid())
    } else if mode & 0o022 != 0 {
        format!("it is writable for other users (mode {mode:o}). chmod go-w it")
    } else {
        return Ok(());
    };
    Err(Error::new(operation, ErrorKind::Denied, detail).on(directory.display()))
}

/// A file, by device and number.
type FileId = (u64, u64);

/// The locks that this process holds. A forked child finds its parent's here.
static HELD: Mutex<BTreeMap<FileId, ForkGeneration>> = Mutex::new(BTreeMap::new());

/// A lock of a file in a node's directory, of this process and nobody else.
#[derive(Debug)]
pub(crate) struct RecordLock<const IS_PRIORITY: bool> {
    file: Option<File>,
    key: FileId,
    fork_generation: ForkGeneration,
}

/// The right to serve a node.
pub(crate) type LeaderLock = RecordLock<false>;
/// Says that this process is to serve the node for as long as it is there.
pub(crate) type PriorityLock = RecordLock<true>;

fn failed(operation: &'static str, directory: &Path) -> impl Fn(io::Error) -> Error + Copy {
    move |error| Error::of(operation, error).on(directory.display())
}

fn open(directory: &Path, name: &str) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(directory.join(name))
}

impl<const IS_PRIORITY: bool> RecordLock<IS_PRIORITY> {
    const NAME: &str = if IS_PRIORITY { PRIORITY_FILE } else { LOCK_FILE };

    /// Takes it, if nobody has it.
    pub(crate) fn take(operation: &'static str, directory: &Path) -> Result<Option<Self>> {
        let failed = failed(operation, directory);
        // Kept until it is known whose the lock is. Closing any descriptor of the file would
        // take the lock from this process, so it is not even opened if this process has it.
        let mut held = lock(&HELD);
        if is_own(&held, directory, Self::NAME) {
            return Ok(None);
        }
        let file = open(directory, Self::NAME).map_err(failed)?;
        let found = file.metadata().map_err(failed)?;
        let key = (found.dev(), found.ino());
        match fcntl(&file, FcntlArg::F_SETLK(&whole(libc::F_WRLCK))) {
            Ok(_) => {
                let fork_generation = ForkGeneration::current();
                held.insert(key, fork_generation);
                Ok(Some(Self { file: Some(file), key, fork_generation }))
            }
            Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EACCES) => Ok(None),
            Err(error) => Err(failed(error.into())),
        }
    }

    /// The process that has it, if any has; 0 if that cannot be seen from here.
    pub(crate) fn holder(operation: &'static str, directory: &Path) -> Result<Option<u32>> {
        let failed = failed(operation, directory);
        // As above: it is closed again.
        let held = lock(&HELD);
        if is_own(&held, directory, Self::NAME) {
            return Ok(Some(std::process::id()));
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_NOFOLLOW);
        let file = match options.open(directory.join(Self::NAME)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(failed)?,
        };
        let mut found = whole(libc::F_WRLCK);
        fcntl(&file, FcntlArg::F_GETLK(&mut found)).map_err(|error| failed(error.into()))?;
        let is_held = i32::from(found.l_type) != libc::F_UNLCK;
        Ok(is_held.then(|| u32::try_from(found.l_pid).unwrap_or(0)))
    }
}

/// Does this process hold the lock of a file?
fn is_own(held: &BTreeMap<FileId, ForkGeneration>, directory: &Path, name: &str) -> bool {
    let found = fs::metadata(directory.join(name));
    let holder = found.ok().and_then(|found| held.get(&(found.dev(), found.ino())).copied());
    holder.is_some_and(|holder| holder.is_current())
}

/// A lock of a whole file.
fn whole(kind: i32) -> libc::flock {
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

impl<const IS_PRIORITY: bool> Drop for RecordLock<IS_PRIORITY> {
    fn drop(&mut self) {
        let file = self.file.take();
        if !self.fork_generation.is_current() {
            // Closing it would take the lock from this child, if it has it by itself.
            std::mem::forget(file);
            return;
        }
        let mut held = lock(&HELD);
        if let Some(file) = &file {
            let _ = fcntl(file, FcntlArg::F_SETLK(&whole(libc::F_UNLCK)));
        }
        held.remove(&self.key);
    }
}

/// Held by every member of a node.
#[derive(Debug)]
pub(crate) struct MemberLock(Option<Flock<File>>, ForkGeneration);

impl MemberLock {
    /// Nobody holds it alone for longer than it takes to see that this can be.
    const TIMEOUT: Duration = Duration::from_secs(5);

    /// Holds it, together with others.
    pub(crate) fn hold(operation: &'static str, directory: &Path) -> Result<Self> {
        let failed = failed(operation, directory);
        let mut file = open(directory, MEMBERS_FILE).map_err(failed)?;
        let end = Instant::now() + Self::TIMEOUT;
        loop {
            match Flock::lock(file, FlockArg::LockSharedNonblock) {
                Ok(lock) => return Ok(Self(Some(lock), ForkGeneration::current())),
                // A service looks whether anybody is there.
                Err((back, nix::errno::Errno::EAGAIN)) if Instant::now() < end => file = back,
                Err((_, error)) => return Err(failed(error.into())),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Of which node, by the last service that founded one.
    pub(crate) fn node(&self) -> Option<NodeId> {
        self.0.as_ref().and_then(|file| identity_in(file))
    }

    /// The node that was founded in this directory last.
    pub(crate) fn read_node_id(
        operation: &'static str,
        directory: &Path,
    ) -> Result<Option<NodeId>> {
        Ok(identity_in(&open(directory, MEMBERS_FILE).map_err(failed(operation, directory))?))
    }

    /// Says which node it is, before anybody becomes a member of it. By who holds the
    /// [office](Office).
    pub(crate) fn write_node_id(
        operation: &'static str,
        directory: &Path,
        node: Option<NodeId>,
    ) -> Result<()> {
        let failed = failed(operation, directory);
        let file = open(directory, MEMBERS_FILE).map_err(failed)?;
        ipc::limits::check_file_size(size_of::<NodeId>() as u64).map_err(failed)?;
        file.write_all_at(&node.map_or([0; 16], |node| node.0), 0).map_err(failed)
    }

    /// Does anybody hold it? To be asked by who holds the [office](Office).
    pub(crate) fn is_held(operation: &'static str, directory: &Path) -> Result<bool> {
        let failed = failed(operation, directory);
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_NOFOLLOW);
        let file = match options.open(directory.join(MEMBERS_FILE)) {
            // Nobody has ever been there; asking changes nothing about that.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            opened => opened.map_err(failed)?,
        };
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(_) => Ok(false),
            Err((_, nix::errno::Errno::EAGAIN)) => Ok(true),
            Err((_, error)) => Err(failed(error.into())),
        }
    }
}

fn identity_in(file: &File) -> Option<NodeId> {
    let mut bytes = [0; 16];
    file.read_exact_at(&mut bytes, 0).ok()?;
    (bytes != [0; 16]).then_some(NodeId(bytes))
}

impl Drop for MemberLock {
    fn drop(&mut self) {
        if !self.1.is_current() {
            // The lock is the parent's, who shares the file with its child.
            std::mem::forget(self.0.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("fabricast-{name}-{}", std::process::id()));
        prepare("test", &path).unwrap();
        path
    }

    #[test]
    fn one_serves_at_a_time_also_within_a_process() {
        let directory = directory("election");
        let leader_lock = LeaderLock::take("test", &directory).unwrap().unwrap();
        assert!(LeaderLock::take("test", &directory).unwrap().is_none());
        drop(leader_lock);
        assert!(LeaderLock::take("test", &directory).unwrap().is_some());
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn it_is_known_who_claims_to_serve() {
        let directory = directory("claim");
        assert_eq!(PriorityLock::holder("test", &directory).unwrap(), None);
        assert!(!directory.join(PRIORITY_FILE).exists(), "asking leaves nothing behind");
        let priority_lock = PriorityLock::take("test", &directory).unwrap().unwrap();
        assert!(PriorityLock::take("test", &directory).unwrap().is_none());
        assert_eq!(PriorityLock::holder("test", &directory).unwrap(), Some(std::process::id()));
        // They are not each other's.
        let leader_lock = LeaderLock::take("test", &directory).unwrap().unwrap();
        drop(leader_lock);
        assert_eq!(PriorityLock::holder("test", &directory).unwrap(), Some(std::process::id()));
        drop(priority_lock);
        assert_eq!(PriorityLock::holder("test", &directory).unwrap(), None);
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn members_are_seen_while_they_are_there() {
        let directory = directory("members");
        assert!(!MemberLock::is_held("test", &directory).unwrap());
        assert!(!directory.join(MEMBERS_FILE).exists(), "asking leaves nothing behind");
        let one = MemberLock::hold("test", &directory).unwrap();
        let other = MemberLock::hold("test", &directory).unwrap();
        drop(one);
        assert!(MemberLock::is_held("test", &directory).unwrap());
        drop(other);
        assert!(!MemberLock::is_held("test", &directory).unwrap());
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn the_members_know_of_which_node_they_are() {
        let directory = directory("named");
        let node = NodeId([7; 16]);
        let member = MemberLock::hold("test", &directory).unwrap();
        assert_eq!(member.node(), None);
        MemberLock::write_node_id("test", &directory, Some(node)).unwrap();
        assert_eq!(member.node(), Some(node));
        assert_eq!(MemberLock::read_node_id("test", &directory).unwrap(), Some(node));
        MemberLock::write_node_id("test", &directory, None).unwrap();
        assert_eq!(member.node(), None);
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    #[allow(unsafe_code)]
    fn a_child_may_serve_when_its_parent_does_not_any_more() {
        let directory = directory("forked");
        let leader_lock = LeaderLock::take("test", &directory).unwrap().unwrap();
        let (read, write) = nix::unistd::pipe().unwrap();
        // SAFETY: the child takes no lock but the one of this module, which nobody holds: the
        // tests of one process that use it run before and after.
        match unsafe { nix::unistd::fork() }.unwrap() {
            nix::unistd::ForkResult::Child => {
                drop(write);
                // Until its parent has let go.
                let _ = nix::unistd::read(&read, &mut [0]);
                let taken = LeaderLock::take("test", &directory).is_ok_and(|taken| taken.is_some());
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(i32::from(!taken)) }
            }
            nix::unistd::ForkResult::Parent { child } => {
                drop(read);
                drop(leader_lock);
                drop(write);
                let status = nix::sys::wait::waitpid(child, None).unwrap();
                assert!(matches!(status, nix::sys::wait::WaitStatus::Exited(_, 0)), "{status:?}");
            }
        }
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_directory_of_others_is_refused_and_why_is_told() {
        let directory = directory("open");
        let refused = |directory: &Path| {
            let error = check("test", directory).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Denied);
            error.detail().to_owned()
        };
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        fs::set_permissions(&directory, open).unwrap();
        assert_eq!(prepare("test", &directory).unwrap_err().kind(), ErrorKind::Denied);
        assert_eq!(refused(&directory), "it is writable for other users (mode 777). chmod go-w it");
        let (file, link) = (directory.join("file"), directory.join("link"));
        fs::write(&file, "").unwrap();
        assert_eq!(refused(&file), "it is not a directory");
        std::os::unix::fs::symlink(&directory, &link).unwrap();
        assert!(refused(&link).contains("symbolic link"));
        let others = directory.join("others");
        fs::create_dir(&others).unwrap();
        let user = Credentials::of_this_process().user + 1;
        // Who may do everything can make one that is another's.
        if std::os::unix::fs::chown(&others, Some(user), None).is_ok() {
            let reason = refused(&others);
            assert!(reason.contains(&format!("another user's (user {user},")), "{reason}");
        }
        fs::remove_dir_all(&directory).unwrap();
    }
}
