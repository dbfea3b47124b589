//! Election of a node's service: the process that holds the leader lock in the node's directory.
//!
//! The leader lock is a record lock, which belongs to one process: the kernel releases it at the
//! process's death, and a forked child does not inherit it. A process could take such a lock twice,
//! so a set of held files prevents that.
//!
//! A dedicated service also holds the priority lock, even while an embedded service still holds the
//! leader lock. The embedded service hands over to it, and other candidates leave a free leader
//! lock to it for a while. The kernel releases the priority lock of a dead process, too.
//!
//! Every member of a node shares the member lock. While it is held the node segment exists, and a
//! new service waits for a member to return it. The file has the identity of that node: a process
//! that was disconnected may return the segment of an earlier node.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ipc::{Channel, Credentials, ForkGeneration, NotInherited};
use nix::fcntl::{FcntlArg, Flock, FlockArg, fcntl};
use nix::libc;
use threads::lock;

use crate::error::{Error, ErrorKind, Result};
use crate::ids::NodeId;

const LOCK_FILE: &str = "node.lock";
const PRIORITY_FILE: &str = "node.priority";
const MEMBERS_FILE: &str = "node.members";
const SOCKET_FILE: &str = "node.sock";
/// All files of a node. The leader lock is the last: it is held while the others are removed.
pub(crate) const FILES: [&str; 4] = [SOCKET_FILE, PRIORITY_FILE, MEMBERS_FILE, LOCK_FILE];

pub(crate) fn socket_path(directory: &Path) -> PathBuf {
    directory.join(SOCKET_FILE)
}

pub(crate) fn lock_path(directory: &Path) -> PathBuf {
    directory.join(LOCK_FILE)
}

/// Creates the directory of a node. Rejects one that other users may write to, or whose path is too
/// long for a socket.
pub(crate) fn prepare(operation: &'static str, directory: &Path) -> Result<()> {
    Channel::check_path(&socket_path(directory))
        .map_err(|error| Error::because(operation, ErrorKind::InvalidArgument, error))?;
    let created = DirBuilder::new().recursive(true).mode(0o700).create(directory);
    created.map_err(|error| directory_error(operation, directory, error))?;
    check(operation, directory)
}

fn directory_error(operation: &'static str, directory: &Path, error: io::Error) -> Error {
    let kind = match error.kind() {
        io::ErrorKind::PermissionDenied => ErrorKind::Denied,
        _ => ErrorKind::Failed,
    };
    Error::because(operation, kind, error).at(directory.display())
}

/// Rejects a directory that other users may write to. A missing directory is accepted here.
pub(crate) fn check(operation: &'static str, directory: &Path) -> Result<()> {
    let found = match fs::symlink_metadata(directory) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(directory_error(operation, directory, error)),
    };
    let (own, mode) = (Credentials::of_this_process().user, found.mode() & 0o7777);
    let detail = if found.is_symlink() {
        "it is a symbolic link, not a directory".to_owned()
    } else if !found.is_dir() {
        "it is not a directory".to_owned()
    } else if found.uid() != own {
        format!("it is another user's (user {}, this process is of user {own})", found.uid())
    } else if mode & 0o022 != 0 {
        format!("it is writable for other users (mode {mode:o}). chmod go-w it")
    } else {
        return Ok(());
    };
    Err(Error::new(operation, ErrorKind::Denied, detail).at(directory.display()))
}

/// A file, by device and inode.
type FileId = (u64, u64);

/// The locks that this process holds. A forked child sees its parent's here.
static HELD: Mutex<BTreeMap<FileId, ForkGeneration>> = Mutex::new(BTreeMap::new());

/// A record lock of a file in a node's directory, held by this process.
#[derive(Debug)]
pub(crate) struct RecordLock<const IS_PRIORITY: bool> {
    file: Option<File>,
    key: FileId,
    fork_generation: ForkGeneration,
}

/// Lock whose holder is the service of the node.
pub(crate) type LeaderLock = RecordLock<false>;
/// Lock whose holder is the dedicated service of the node.
pub(crate) type PriorityLock = RecordLock<true>;

fn failed(operation: &'static str, directory: &Path) -> impl Fn(io::Error) -> Error + Copy {
    move |error| Error::of(operation, error).at(directory.display())
}

fn open_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    options
}

fn open(operation: &'static str, directory: &Path, name: &str) -> Result<File> {
    check_file(operation, &directory.join(name))?;
    let opened = open_options().create(true).truncate(false).open(directory.join(name));
    opened.map_err(failed(operation, directory))
}

/// For a check, which creates no file.
fn open_existing(operation: &'static str, directory: &Path, name: &str) -> Result<Option<File>> {
    check_file(operation, &directory.join(name))?;
    match open_options().open(directory.join(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some).map_err(failed(operation, directory)),
    }
}

/// Rejects what is no file of this node alone, before it is opened: a lock of it would be one of
/// another node, too, and its content might be overwritten. A missing file is accepted.
fn check_file(operation: &'static str, path: &Path) -> Result<()> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(directory_error(operation, path, error)),
    };
    let detail = if !found.is_file() {
        "it is not a regular file. Remove it, or choose another directory".to_owned()
    } else if found.nlink() > 1 {
        let links = found.nlink();
        format!(
            "it has {links} names (hard links), so it may be a file of another node. Remove this name of it"
        )
    } else {
        return Ok(());
    };
    Err(Error::new(operation, ErrorKind::Denied, detail).at(path.display()))
}

impl<const IS_PRIORITY: bool> RecordLock<IS_PRIORITY> {
    const NAME: &str = if IS_PRIORITY { PRIORITY_FILE } else { LOCK_FILE };

    /// Takes it, if it is free.
    pub(crate) fn take(operation: &'static str, directory: &Path) -> Result<Option<Self>> {
        let failed = failed(operation, directory);
        // Locked until the holder is known. Closing any descriptor of the file would release this
        // process's lock, so the file is not even opened if this process holds it.
        let mut held = lock(&HELD);
        if is_own(&held, directory, Self::NAME) {
            return Ok(None);
        }
        let file = open(operation, directory, Self::NAME)?;
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

    /// Returns true if the file of this lock is still the one in the directory: otherwise other
    /// processes find no service there, or another one.
    pub(crate) fn is_in_place(&self, directory: &Path) -> bool {
        let found = fs::symlink_metadata(directory.join(Self::NAME));
        found.is_ok_and(|found| (found.dev(), found.ino()) == self.key)
    }

    /// The process that holds it, if any; 0 for a process of another PID namespace.
    pub(crate) fn holder(operation: &'static str, directory: &Path) -> Result<Option<u32>> {
        let failed = failed(operation, directory);
        // As above: closing the file would release this process's lock.
        let held = lock(&HELD);
        if is_own(&held, directory, Self::NAME) {
            return Ok(Some(std::process::id()));
        }
        let file = open_existing(operation, directory, Self::NAME)?;
        let Some(file) = file else { return Ok(None) };
        let mut found = whole(libc::F_WRLCK);
        fcntl(&file, FcntlArg::F_GETLK(&mut found)).map_err(|error| failed(error.into()))?;
        let is_held = i32::from(found.l_type) != libc::F_UNLCK;
        Ok(is_held.then(|| u32::try_from(found.l_pid).unwrap_or(0)))
    }
}

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
            // Closing it would release the lock of this child, if it holds one.
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

/// Shared by all members of a node.
#[derive(Debug)]
pub(crate) struct MemberLock {
    /// A forked child does not keep the lock.
    not_inherited: Option<NotInherited>,
    file: Option<Flock<File>>,
    fork_generation: ForkGeneration,
}

impl MemberLock {
    /// A service holds it exclusively only for a check, so this is ample.
    const TIMEOUT: Duration = Duration::from_secs(5);

    pub(crate) fn hold(operation: &'static str, directory: &Path) -> Result<Self> {
        let failed = failed(operation, directory);
        let mut file = open(operation, directory, MEMBERS_FILE)?;
        let end = Instant::now() + Self::TIMEOUT;
        loop {
            match Flock::lock(file, FlockArg::LockSharedNonblock) {
                Ok(lock) => {
                    return Ok(Self {
                        not_inherited: Some(NotInherited::new(&*lock)),
                        file: Some(lock),
                        fork_generation: ForkGeneration::current(),
                    });
                }
                // A service checks for members.
                Err((back, nix::errno::Errno::EAGAIN)) if Instant::now() < end => file = back,
                Err((_, error)) => return Err(failed(error.into())),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The node that the last new service recorded in the file.
    pub(crate) fn node(&self) -> Option<NodeId> {
        self.file.as_ref().and_then(|file| identity_in(file))
    }

    /// The node that was created last in this directory.
    pub(crate) fn read_node_id(
        operation: &'static str,
        directory: &Path,
    ) -> Result<Option<NodeId>> {
        Ok(identity_in(&open(operation, directory, MEMBERS_FILE)?))
    }

    /// Records the identity of the node, before any process becomes a member. Called by the holder
    /// of the [leader lock](LeaderLock).
    pub(crate) fn write_node_id(
        operation: &'static str,
        directory: &Path,
        node: Option<NodeId>,
    ) -> Result<()> {
        let failed = failed(operation, directory);
        let file = open(operation, directory, MEMBERS_FILE)?;
        ipc::limits::check_file_size(size_of::<NodeId>() as u64).map_err(failed)?;
        file.write_all_at(&node.map_or([0; 16], |node| node.0), 0).map_err(failed)
    }

    /// Returns true if any process holds the lock. Called by the holder of the [leader
    /// lock](LeaderLock).
    pub(crate) fn is_held(operation: &'static str, directory: &Path) -> Result<bool> {
        let failed = failed(operation, directory);
        // Without the file no process was ever a member.
        let file = open_existing(operation, directory, MEMBERS_FILE)?;
        let Some(file) = file else { return Ok(false) };
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
        self.not_inherited = None;
        if !self.fork_generation.is_current() {
            // The lock is the parent's.
            std::mem::forget(self.file.take());
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
    fn leader_lock_is_exclusive_even_within_a_process() {
        let directory = directory("election");
        let leader_lock = LeaderLock::take("test", &directory).unwrap().unwrap();
        assert!(LeaderLock::take("test", &directory).unwrap().is_none());
        drop(leader_lock);
        assert!(LeaderLock::take("test", &directory).unwrap().is_some());
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn priority_lock_names_its_holder() {
        let directory = directory("claim");
        assert_eq!(PriorityLock::holder("test", &directory).unwrap(), None);
        assert!(!directory.join(PRIORITY_FILE).exists(), "the check creates no file");
        let priority_lock = PriorityLock::take("test", &directory).unwrap().unwrap();
        assert!(PriorityLock::take("test", &directory).unwrap().is_none());
        assert_eq!(PriorityLock::holder("test", &directory).unwrap(), Some(std::process::id()));
        // The two locks are independent.
        let leader_lock = LeaderLock::take("test", &directory).unwrap().unwrap();
        drop(leader_lock);
        assert_eq!(PriorityLock::holder("test", &directory).unwrap(), Some(std::process::id()));
        drop(priority_lock);
        assert_eq!(PriorityLock::holder("test", &directory).unwrap(), None);
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn member_lock_is_held_until_its_last_member_leaves() {
        let directory = directory("members");
        assert!(!MemberLock::is_held("test", &directory).unwrap());
        assert!(!directory.join(MEMBERS_FILE).exists(), "the check creates no file");
        let one = MemberLock::hold("test", &directory).unwrap();
        let other = MemberLock::hold("test", &directory).unwrap();
        drop(one);
        assert!(MemberLock::is_held("test", &directory).unwrap());
        drop(other);
        assert!(!MemberLock::is_held("test", &directory).unwrap());
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn member_lock_file_names_its_node() {
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
    fn file_that_is_not_of_this_node_alone_is_refused() {
        let directory = directory("foreign");
        let refused = |error: Error, why: &str| {
            assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
            assert!(error.detail().contains(why), "{error}");
        };
        let (members, other) = (directory.join(MEMBERS_FILE), directory.join("other"));
        fs::write(&other, "content of another program").unwrap();
        fs::hard_link(&other, &members).unwrap();
        refused(MemberLock::hold("test", &directory).unwrap_err(), "2 names (hard links)");
        refused(
            MemberLock::write_node_id("test", &directory, None).unwrap_err(),
            "2 names (hard links)",
        );
        assert_eq!(fs::read(&other).unwrap(), b"content of another program");
        fs::remove_file(&other).unwrap();
        assert!(MemberLock::hold("test", &directory).is_ok(), "it is a file of this node alone");
        nix::unistd::mkfifo(&directory.join(LOCK_FILE), nix::sys::stat::Mode::S_IRWXU).unwrap();
        refused(LeaderLock::take("test", &directory).unwrap_err(), "not a regular file");
        refused(LeaderLock::holder("test", &directory).unwrap_err(), "not a regular file");
        std::os::unix::fs::symlink(&members, directory.join(PRIORITY_FILE)).unwrap();
        refused(PriorityLock::take("test", &directory).unwrap_err(), "not a regular file");
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    #[allow(unsafe_code)]
    fn forked_child_takes_the_lock_after_its_parent() {
        let directory = directory("forked");
        let leader_lock = LeaderLock::take("test", &directory).unwrap().unwrap();
        let (read, write) = nix::unistd::pipe().unwrap();
        // SAFETY: the child takes no lock but the one of this module, which is free: the tests of
        // one process that use it run before and after.
        match unsafe { nix::unistd::fork() }.unwrap() {
            nix::unistd::ForkResult::Child => {
                drop(write);
                // Until the parent has released the lock.
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
    fn directory_of_other_users_is_rejected_with_a_reason() {
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
        // Only a privileged user can create one of another user.
        if std::os::unix::fs::chown(&others, Some(user), None).is_ok() {
            let reason = refused(&others);
            assert!(reason.contains(&format!("another user's (user {user},")), "{reason}");
        }
        fs::remove_dir_all(&directory).unwrap();
    }
}
