//! A listening socket with a path.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use threads::ForkGeneration;

use crate::deadline::deadline;
use crate::not_inherited::NotInherited;
use errors::limits::LimitReached;

use super::{Channel, ChannelError, Result, address, new_socket, system, wait};

/// Waits for connections at a path, which it removes when it is dropped.
#[derive(Debug)]
pub struct ChannelListener {
    /// Makes the socket end with this process, although a forked child lives. Dropped before the
    /// socket.
    _not_inherited: NotInherited,
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode number of the path's file, so that another listener's file is not
    /// removed.
    file: (u64, u64),
    fork_generation: ForkGeneration,
}

impl ChannelListener {
    /// Listens at a path, for this user only. A socket that a killed process left behind,
    /// without a listener, is replaced.
    ///
    /// # Errors
    /// `InUse`, `NotASocket`, `InvalidPath`, `DeadlineExceeded`, `System`.
    pub fn bind(path: &Path) -> Result<Self> {
        Self::bind_with_mode(path, 0o600)
    }

    /// Like [`bind`](Self::bind), for users with write permission by the mode of the socket.
    /// The directories above it also restrict access.
    ///
    /// # Errors
    /// As for [`bind`](Self::bind).
    pub fn bind_with_mode(path: &Path, mode: u32) -> Result<Self> {
        let (to, length) = address(path)?;
        let socket = new_socket()?;
        // Between `bind` and `listen`, a socket looks stale. And between a check and the
        // removal of a stale socket, another process may have replaced it.
        let _alone = DirectoryLock::above(path)?;
        let bind = || {
            // SAFETY: a valid address, with its length.
            unsafe { libc::bind(socket.as_raw_fd(), (&raw const to).cast(), length) == 0 }
        };
        if !bind() {
            if io::Error::last_os_error().raw_os_error() != Some(libc::EADDRINUSE) {
                return Err(system("bind", Some(path)));
            }
            remove_stale(path)?;
            if !bind() {
                return Err(system("bind", Some(path)));
            }
        }
        let failed =
            |call| move |cause| ChannelError::System { call, path: Some(path.to_owned()), cause };
        // Before any process can connect, which is possible from `listen` on.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
            .map_err(failed("chmod"))?;
        let status = std::fs::symlink_metadata(path).map_err(failed("stat"))?;
        // SAFETY: a socket owned here.
        if unsafe { libc::listen(socket.as_raw_fd(), 128) } < 0 {
            return Err(system("listen", Some(path)));
        }
        let (file, fork_generation) = ((status.dev(), status.ino()), ForkGeneration::current());
        let _not_inherited = NotInherited::new(&socket);
        Ok(Self { _not_inherited, socket, path: path.to_owned(), file, fork_generation })
    }

    /// The next connection.
    ///
    /// # Errors
    /// `DeadlineExceeded`, `System`.
    pub fn accept(&self, timeout: Duration) -> Result<Channel> {
        let end = deadline(timeout);
        loop {
            wait(&self.socket, libc::POLLIN, end, "a connection")?;
            if let Some(connection) = self.try_accept() {
                return Ok(Channel::connected(connection));
            }
            match io::Error::last_os_error().raw_os_error() {
                // The client has disconnected again.
                Some(libc::EINTR | libc::ECONNABORTED | libc::EAGAIN) => {}
                _ => return Err(system("accept", Some(&self.path))),
            }
        }
    }

    fn try_accept(&self) -> Option<OwnedFd> {
        let (socket, none) = (self.socket.as_raw_fd(), std::ptr::null_mut());
        // SAFETY: no address is requested; the result is checked.
        let fd = unsafe { libc::accept4(socket, none, std::ptr::null_mut(), libc::SOCK_CLOEXEC) };
        // SAFETY: just opened, and not shared.
        (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Is this a socket without a listener? Only valid under the [lock](DirectoryLock) of its
    /// directory: otherwise another process may be about to listen.
    #[must_use]
    pub fn is_stale(path: &Path) -> bool {
        let is_socket =
            std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
        let is_refused = || match Channel::connect(path, Duration::ZERO) {
            Err(ChannelError::System { cause, .. }) => {
                cause.kind() == io::ErrorKind::ConnectionRefused
            }
            _ => false,
        };
        is_socket && is_refused()
    }

    /// The kind of file at a path, if it is not a socket.
    #[must_use]
    pub fn non_socket_kind(path: &Path) -> Option<&'static str> {
        let kind = std::fs::symlink_metadata(path).ok()?.file_type();
        match kind {
            _ if kind.is_socket() => None,
            _ if kind.is_file() => Some("a regular file"),
            _ if kind.is_dir() => Some("a directory"),
            _ if kind.is_symlink() => Some("a symbolic link"),
            _ => Some("a device or a pipe"),
        }
    }
}

impl AsFd for ChannelListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for ChannelListener {
    fn drop(&mut self) {
        if !self.fork_generation.is_current() {
            // In a forked child: the parent continues to listen.
            return;
        }
        // Not the file of a successor; there is none while this one listens.
        let is_ours = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|found| (found.dev(), found.ino()) == self.file);
        if is_ours {
            let _ = std::fs::remove_file(&self.path);
        }
        // Shuts it down even if a forked child has a duplicate, which would keep the socket
        // open. SAFETY: a socket owned here.
        unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_RDWR) };
        // Connections that were not accepted end with an error instead of their deadline. The socket
        // no longer waits.
        while self.try_accept().is_some() {}
    }
}

/// Removes a socket without a listener.
fn remove_stale(path: &Path) -> Result<()> {
    if let Some(found) = ChannelListener::non_socket_kind(path) {
        return Err(ChannelError::NotASocket { path: path.to_owned(), found });
    }
    if !ChannelListener::is_stale(path) {
        return Err(ChannelError::InUse(path.to_owned()));
    }
    std::fs::remove_file(path).map_err(|cause| ChannelError::System {
        call: "unlink",
        path: Some(path.to_owned()),
        cause,
    })
}

/// Held while a socket is created in a directory, or a stale one is removed: a lock on the
/// directory itself, which leaves no file behind and ends with the process.
///
/// ```
/// use ipc::{ChannelListener, DirectoryLock};
/// # let directory = std::env::temp_dir().join(format!("fabricast-lock-{}", std::process::id()));
/// # std::fs::create_dir_all(&directory)?;
/// let lock = DirectoryLock::take(&directory)?;
/// // Under the lock no process is about to listen, so a socket without a listener is stale.
/// assert!(!ChannelListener::is_stale(&directory.join("none")));
/// drop(lock);
/// let path = directory.join("one");
/// let listener = ChannelListener::bind(&path)?;
/// assert!(!ChannelListener::is_stale(&path));
/// # drop(listener);
/// # std::fs::remove_dir(&directory)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct DirectoryLock(Option<File>, ForkGeneration);

impl DirectoryLock {
    /// The lock is only held for a check whether a listener is alive.
    const TIMEOUT: Duration = Duration::from_secs(10);

    fn above(path: &Path) -> Result<Self> {
        let above = path.parent().filter(|above| !above.as_os_str().is_empty());
        Self::take(above.unwrap_or(Path::new(".")))
    }

    /// Waits for the lock. If the directory cannot be opened for reading, there is no lock, and
    /// the call returns at once. The owner must not call [`bind`](ChannelListener::bind), which
    /// takes the lock itself.
    ///
    /// # Errors
    /// `DeadlineExceeded`, `System`.
    pub fn take(directory: &Path) -> Result<Self> {
        let failed = |call, cause| {
            let (path, cause) = (Some(directory.to_owned()), LimitReached::explain(cause));
            Err(ChannelError::System { call, path, cause })
        };
        let file = match File::open(directory) {
            Ok(file) => file,
            Err(cause) if cause.kind() == io::ErrorKind::PermissionDenied => {
                return Ok(Self(None, ForkGeneration::current()));
            }
            Err(cause) => return failed("open", cause),
        };
        let end = deadline(Self::TIMEOUT);
        loop {
            // SAFETY: a file owned here.
            if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
                return Ok(Self(Some(file), ForkGeneration::current()));
            }
            let cause = io::Error::last_os_error();
            match cause.kind() {
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::WouldBlock if Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                io::ErrorKind::WouldBlock => {
                    let waiting_for = "the lock of the directory";
                    return Err(ChannelError::DeadlineExceeded { waiting_for });
                }
                _ => return failed("flock", cause),
            }
        }
    }
}

impl Drop for DirectoryLock {
    fn drop(&mut self) {
        // A forked child must not unlock: it shares the lock with its parent.
        if let Some(file) = self.0.as_ref().filter(|_| self.1.is_current()) {
            // Closing alone would leave the lock with a child that was forked meanwhile.
            // SAFETY: a file owned here.
            unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_UN) };
        }
    }
}
