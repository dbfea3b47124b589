//! Messages and file descriptors between processes of one machine.
//!
//! A socket with a path in the file system: a process that sees the directory can connect, also
//! from another PID or network namespace, and nothing else is needed to pass memory. Messages
//! keep their boundaries, are bounded in length, and arrive complete or not at all. File
//! descriptors arrive close-on-exec, and have one owner from the start: those of a refused
//! message are closed.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::deadline::deadline;
use crate::not_inherited::NotInherited;
use errors::limits::{DescriptorLimit, LimitReached};

mod listener;

pub use listener::{ChannelListener, DirectoryLock};

/// Longest socket path, in bytes.
pub const MAX_PATH_LENGTH: usize = 107;
/// Longest message, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 64 << 10;
/// Pause between two attempts to send file descriptors while too many are in flight.
const IN_FLIGHT_RETRY: Duration = Duration::from_millis(5);
/// Most file descriptors of a message.
pub const MAX_DESCRIPTORS: usize = 64;

/// Why a channel call failed.
#[non_exhaustive]
pub enum ChannelError {
    /// A system call failed.
    System {
        /// The call.
        call: &'static str,
        /// The path, if there is one.
        path: Option<PathBuf>,
        /// The cause.
        cause: io::Error,
    },
    /// The deadline passed.
    DeadlineExceeded {
        /// The awaited event.
        waiting_for: &'static str,
    },
    /// The peer closed the channel, or exited.
    Closed,
    /// Unreceived messages of this user already hold as many file descriptors as a process may
    /// open. Their number falls when they are received.
    TooManyDescriptorsInFlight,
    /// A message exceeds the limits: not sent, or received and discarded.
    TooLong {
        /// Bytes, or file descriptors.
        length: usize,
        /// The limit.
        max: usize,
    },
    /// File descriptors of a message were lost, because this process may not open so many.
    DescriptorsLost {
        /// The message's bytes.
        bytes: Vec<u8>,
        /// Number of file descriptors in the message.
        sent: usize,
        /// Number of them that this process could receive. They are closed again.
        received: usize,
        /// The limit that was exceeded.
        limit: DescriptorLimit,
    },
    /// A listener already uses this path.
    InUse(PathBuf),
    /// This path is not a socket, and is left unchanged.
    NotASocket {
        /// The path.
        path: PathBuf,
        /// The kind of file.
        found: &'static str,
    },
    /// A socket path must have 1 to 107 bytes and no zero byte.
    InvalidPath(PathBuf),
}

impl fmt::Display for ChannelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System { call, path: Some(path), cause } => {
                write!(f, "{call} {}: {cause}", path.display())
            }
            Self::System { call, path: None, cause } => write!(f, "{call}: {cause}"),
            Self::DeadlineExceeded { waiting_for } => {
                write!(f, "timed out waiting for {waiting_for}")
            }
            Self::Closed => f.write_str("the peer closed the channel"),
            Self::TooManyDescriptorsInFlight => f.write_str(
                "too many file descriptors of this user are in messages that were not received yet (RLIMIT_NOFILE)",
            ),
            Self::TooLong { length, max } => {
                write!(f, "the message is too long: {length}, at most {max}")
            }
            Self::DescriptorsLost { sent, received, limit, .. } => write!(
                f,
                "this process could receive {received} of the {sent} descriptors of a message: {limit}"
            ),
            Self::InUse(path) => write!(f, "socket {} is in use by a listener", path.display()),
            Self::NotASocket { path, found } => write!(
                f,
                "{} is {found}, not a socket. Remove it, or choose another directory",
                path.display()
            ),
            Self::InvalidPath(path) => {
                let length = path.as_os_str().len();
                write!(
                    f,
                    "{} cannot be the path of a socket: that has 1 to {MAX_PATH_LENGTH} bytes without a \
                     zero, and this has {length}. Choose a shorter directory",
                    path.display()
                )
            }
        }
    }
}

crate::debug::debug_for_people!(ChannelError {
    System { call, path, cause },
    DeadlineExceeded { waiting_for },
    Closed,
    TooManyDescriptorsInFlight,
    TooLong { length, max },
    DescriptorsLost { bytes, sent, received, limit },
    InUse(path),
    NotASocket { path, found },
    InvalidPath(path),
});

impl std::error::Error for ChannelError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::System { cause, .. } => Some(cause),
            _ => None,
        }
    }
}

/// The result of channel calls.
pub type Result<T> = std::result::Result<T, ChannelError>;

fn system(call: &'static str, path: Option<&Path>) -> ChannelError {
    let cause = LimitReached::explain(io::Error::last_os_error());
    ChannelError::System { call, path: path.map(Path::to_owned), cause }
}

/// The credentials of the peer, from the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// User id.
    pub user: u32,
    /// Group id.
    pub group: u32,
    /// Process id; None if the peer is not visible in this PID namespace.
    pub process: Option<u32>,
}

impl Credentials {
    /// The credentials of this process.
    #[must_use]
    pub fn of_this_process() -> Self {
        // SAFETY: no pointers, and the calls cannot fail.
        let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
        Self { user, group, process: Some(std::process::id()) }
    }
}

/// A received message.
#[derive(Debug, Default)]
pub struct Message {
    /// The message's bytes.
    pub bytes: Vec<u8>,
    /// The message's file descriptors, in order.
    pub descriptors: Vec<OwnedFd>,
}

/// One end of a connection.
///
/// ```
/// use std::os::fd::AsFd;
/// use std::time::Duration;
/// use ipc::Channel;
/// let (here, there) = Channel::pair()?;
/// let file = std::fs::File::open("/dev/null").unwrap();
/// let timeout = Duration::from_secs(5);
/// here.send(b"a file for you", &[file.as_fd()], timeout)?;
/// let message = there.receive(timeout)?;
/// assert_eq!(message.bytes, b"a file for you");
/// assert_eq!(message.descriptors.len(), 1);
/// # Ok::<(), ipc::ChannelError>(())
/// ```
#[derive(Debug)]
pub struct Channel {
    /// Of one that was connected: the end of this process ends it, although a forked child lives.
    /// Dropped before the socket is closed.
    not_inherited: Option<NotInherited>,
    socket: OwnedFd,
}

fn new_socket() -> Result<OwnedFd> {
    // SAFETY: no pointers; the result is checked.
    let socket =
        unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Err(system("socket", None));
    }
    // SAFETY: just opened, and not shared.
    Ok(unsafe { OwnedFd::from_raw_fd(socket) })
}

/// Reads an option of a socket, which consists of numbers of four bytes. Returns whether it was
/// read, and how many numbers it has.
pub(crate) fn socket_option(
    socket: BorrowedFd<'_>,
    option: libc::c_int,
    numbers: &mut [i32],
) -> (bool, usize) {
    let mut length = size_of_val(numbers) as libc::socklen_t;
    let (socket, to) = (socket.as_raw_fd(), numbers.as_mut_ptr().cast());
    // SAFETY: space for the result, with its length in bytes.
    let code = unsafe { libc::getsockopt(socket, libc::SOL_SOCKET, option, to, &raw mut length) };
    (code == 0, length as usize / size_of::<i32>())
}

fn address(path: &Path) -> Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: all bytes zero is a valid address.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.as_os_str().as_bytes();
    // An abstract name would not cross network namespaces.
    if bytes.is_empty() || bytes.len() > MAX_PATH_LENGTH || bytes.contains(&0) {
        return Err(ChannelError::InvalidPath(path.to_owned()));
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        // `c_char` is signed on x86-64, and unsigned on aarch64.
        *to = std::ffi::c_char::from_ne_bytes([*from]);
    }
    Ok((address, size_of::<libc::sockaddr_un>() as libc::socklen_t))
}

/// Waits until the file descriptor is ready for these events.
fn wait(fd: &OwnedFd, events: i16, end: Instant, waiting_for: &'static str) -> Result<()> {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let milliseconds = i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
        let mut entry = libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
        // SAFETY: one valid entry.
        match unsafe { libc::poll(&raw mut entry, 1, milliseconds) } {
            0 => return Err(ChannelError::DeadlineExceeded { waiting_for }),
            1.. => return Ok(()),
            _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            _ => return Err(system("poll", None)),
        }
    }
}

/// Space for the file descriptors of a message, aligned as the kernel requires.
#[repr(C, align(8))]
struct Control([u8; 16 + MAX_DESCRIPTORS * size_of::<RawFd>()]);

impl Channel {
    /// Refuses invalid socket paths.
    ///
    /// # Errors
    /// `InvalidPath`.
    pub fn check_path(path: &Path) -> Result<()> {
        address(path).map(drop)
    }

    /// Connects to the listener at the path.
    ///
    /// # Errors
    /// `System` if there is no listener, or it refuses access; `DeadlineExceeded`.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self> {
        let (to, length) = address(path)?;
        let end = deadline(timeout);
        let socket = new_socket()?;
        // With a full backlog a blocking call would wait without a bound. SAFETY: a socket
        // owned here.
        unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        loop {
            // SAFETY: a valid address, with its length.
            let code = unsafe { libc::connect(socket.as_raw_fd(), (&raw const to).cast(), length) };
            if code == 0 {
                break;
            }
            match io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EAGAIN) if Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Some(libc::EAGAIN) => {
                    return Err(ChannelError::DeadlineExceeded { waiting_for: "a connection" });
                }
                _ => return Err(system("connect", Some(path))),
            }
        }
        // SAFETY: a socket owned here. Waiting is done by poll, so this only affects the time
        // between poll and call.
        unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_SETFL, 0) };
        Ok(Self::connected(socket))
    }

    pub(crate) fn connected(socket: OwnedFd) -> Self {
        Self { not_inherited: Some(NotInherited::new(&socket)), socket }
    }

    /// Two ends of one connection. Forked children inherit both.
    ///
    /// # Errors
    /// `System`.
    pub fn pair() -> Result<(Self, Self)> {
        let mut fds = [0; 2];
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
        // SAFETY: space for two file descriptors.
        if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()) } < 0 {
            return Err(system("socketpair", None));
        }
        // SAFETY: just opened, and not shared.
        let ends = fds.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        let [one, other] = ends.map(|socket| Self { not_inherited: None, socket });
        Ok((one, other))
    }

    /// Another handle to this end of the connection, for another thread.
    ///
    /// # Errors
    /// `System`.
    pub fn try_clone(&self) -> Result<Self> {
        let copied = self.socket.try_clone().map_err(|cause| ChannelError::System {
            call: "dup",
            path: None,
            cause,
        })?;
        let not_inherited = self.not_inherited.is_some().then(|| NotInherited::new(&copied));
        Ok(Self { not_inherited, socket: copied })
    }

    /// The credentials of the peer at the time of the connection.
    ///
    /// # Errors
    /// `System`.
    pub fn credentials(&self) -> Result<Credentials> {
        // Process, user and group, as in `ucred`.
        let mut found = [0, -1, -1];
        if !socket_option(self.socket.as_fd(), libc::SO_PEERCRED, &mut found).0 {
            return Err(system("SO_PEERCRED", None));
        }
        let [process, user, group] = found;
        let process = u32::try_from(process).ok().filter(|process| *process != 0);
        Ok(Credentials { user: user.cast_unsigned(), group: group.cast_unsigned(), process })
    }

    /// The supplementary groups of the peer at the time of the connection.
    ///
    /// # Errors
    /// `System`.
    pub fn groups(&self) -> Result<Vec<u32>> {
        let mut groups = vec![0; 64];
        loop {
            let (is_known, found) =
                socket_option(self.socket.as_fd(), libc::SO_PEERGROUPS, &mut groups);
            if is_known {
                groups.truncate(found);
                return Ok(groups.into_iter().map(i32::cast_unsigned).collect());
            }
            // The buffer was too small: the length now holds the required size.
            let error = system("SO_PEERGROUPS", None);
            match &error {
                ChannelError::System { cause, .. }
                    if cause.raw_os_error() == Some(libc::ERANGE) && found > groups.len() =>
                {
                    groups.resize(found, 0);
                }
                _ => return Err(error),
            }
        }
    }

    /// Shuts the connection down, for both sides and all duplicates of either end, and wakes
    /// waiting threads. Messages that were sent before can still be received.
    pub fn end(&self) {
        // SAFETY: a socket owned here. The call fails only if the connection is already shut
        // down.
        unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_RDWR) };
    }

    /// Did either side [shut down](Self::end) the connection, or is the peer gone? Messages
    /// that were sent before can still be received.
    ///
    /// ```
    /// use ipc::Channel;
    /// let (here, there) = Channel::pair()?;
    /// assert!(!here.is_shut_down());
    /// drop(there);
    /// assert!(here.is_shut_down());
    /// # Ok::<(), ipc::ChannelError>(())
    /// ```
    #[must_use]
    pub fn is_shut_down(&self) -> bool {
        let mut entry = libc::pollfd { fd: self.socket.as_raw_fd(), events: 0, revents: 0 };
        // SAFETY: one valid entry. A hang-up is reported even without requested events.
        unsafe { libc::poll(&raw mut entry, 1, 0) == 1 && entry.revents & libc::POLLHUP != 0 }
    }

    /// Has the peer not received all messages that were sent here?
    #[must_use]
    pub fn has_unreceived(&self) -> bool {
        let mut bytes: libc::c_int = 0;
        // SAFETY: space for the result.
        let code = unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
        code == 0 && bytes > 0
    }

    /// Sends a message with file descriptors, which stay open in this process.
    ///
    /// # Errors
    /// `TooLong`, `Closed`, `DeadlineExceeded`, `TooManyDescriptorsInFlight` if that lasted
    /// until the timeout, `System`.
    pub fn send(
        &self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
        timeout: Duration,
    ) -> Result<()> {
        for (length, max) in
            [(bytes.len(), MAX_MESSAGE_BYTES), (descriptors.len(), MAX_DESCRIPTORS)]
        {
            if length > max {
                return Err(ChannelError::TooLong { length, max });
            }
        }
        // An empty message would look like the end of the connection.
        let mut framed = Vec::with_capacity(bytes.len() + 1);
        framed.push(descriptors.len() as u8);
        framed.extend_from_slice(bytes);
        let raw: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
        let mut control = Control([0; size_of::<Control>()]);
        let mut part = libc::iovec { iov_base: framed.as_mut_ptr().cast(), iov_len: framed.len() };
        // SAFETY: all bytes zero is a valid, empty message.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        if !raw.is_empty() {
            let length = size_of_val(raw.as_slice());
            message.msg_control = (&raw mut control).cast();
            // SAFETY: only computes sizes; the first header is in `control`, which has space
            // for it and for all file descriptors.
            unsafe {
                message.msg_controllen = libc::CMSG_SPACE(length as u32) as usize;
                let head = libc::CMSG_FIRSTHDR(&raw const message);
                (*head).cmsg_level = libc::SOL_SOCKET;
                (*head).cmsg_type = libc::SCM_RIGHTS;
                (*head).cmsg_len = libc::CMSG_LEN(length as u32) as usize;
                std::ptr::copy_nonoverlapping(raw.as_ptr().cast(), libc::CMSG_DATA(head), length);
            }
        }
        let end = deadline(timeout);
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        loop {
            // SAFETY: the message and all pointers in it are valid until the call returns.
            let sent = unsafe { libc::sendmsg(self.socket.as_raw_fd(), &raw const message, flags) };
            if sent >= 0 {
                return Ok(());
            }
            match io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EAGAIN) => {
                    wait(&self.socket, libc::POLLOUT, end, "space for a message")?
                }
                Some(libc::ETOOMANYREFS) => {
                    let left = end.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(ChannelError::TooManyDescriptorsInFlight);
                    }
                    // They may be in flight on any socket, so there is no event to wait for.
                    std::thread::sleep(left.min(IN_FLIGHT_RETRY));
                }
                Some(libc::EPIPE | libc::ECONNRESET | libc::ENOTCONN) => {
                    return Err(ChannelError::Closed);
                }
                _ => return Err(system("sendmsg", None)),
            }
        }
    }

    /// The next message.
    ///
    /// # Errors
    /// `DeadlineExceeded`, `Closed`, `TooLong` for a message beyond the limits,
    /// `DescriptorsLost`, `System`.
    pub fn receive(&self, timeout: Duration) -> Result<Message> {
        let end = deadline(timeout);
        let mut bytes = vec![0; MAX_MESSAGE_BYTES + 1];
        loop {
            let mut control = Control([0; size_of::<Control>()]);
            let mut part =
                libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
            // SAFETY: all bytes zero is a valid, empty message.
            let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
            message.msg_iov = &raw mut part;
            message.msg_iovlen = 1;
            message.msg_control = (&raw mut control).cast();
            message.msg_controllen = size_of::<Control>();
            let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
            // SAFETY: the message and all pointers in it are valid until the call returns.
            let got = unsafe { libc::recvmsg(self.socket.as_raw_fd(), &raw mut message, flags) };
            if got < 0 {
                match io::Error::last_os_error().raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EAGAIN) => wait(&self.socket, libc::POLLIN, end, "a message")?,
                    // The peer closed with unread messages of this end. What it sent before comes first,
                    // and then its end.
                    Some(libc::ECONNRESET) => {}
                    _ => return Err(system("recvmsg", None)),
                }
                continue;
            }
            // Owned from here on, even if the message is refused.
            let descriptors = descriptors_of(&message);
            if got == 0 {
                return Err(ChannelError::Closed);
            }
            if message.msg_flags & libc::MSG_TRUNC != 0 {
                return Err(ChannelError::TooLong {
                    length: MAX_MESSAGE_BYTES + 1,
                    max: MAX_MESSAGE_BYTES,
                });
            }
            bytes.truncate(got as usize);
            let (sent, received) = (usize::from(bytes.remove(0)), descriptors.len());
            // The buffer had space for all of them: the kernel could not open more.
            if message.msg_flags & libc::MSG_CTRUNC != 0
                && received < sent
                && sent <= MAX_DESCRIPTORS
            {
                let limit = DescriptorLimit::of_this_process();
                return Err(ChannelError::DescriptorsLost { bytes, sent, received, limit });
            }
            if message.msg_flags & libc::MSG_CTRUNC != 0 {
                let (length, max) = (MAX_DESCRIPTORS + 1, MAX_DESCRIPTORS);
                return Err(ChannelError::TooLong { length, max });
            }
            if sent != received {
                return Err(ChannelError::TooLong { length: sent, max: received });
            }
            return Ok(Message { bytes, descriptors });
        }
    }
}

/// Takes the file descriptors out of a received message.
fn descriptors_of(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut descriptors = Vec::new();
    // SAFETY: the kernel wrote the headers into the buffer, which is still valid; a header's
    // length bounds its data; and each file descriptor is new, and not owned elsewhere.
    unsafe {
        let mut head = libc::CMSG_FIRSTHDR(message);
        while !head.is_null() {
            if (*head).cmsg_level == libc::SOL_SOCKET && (*head).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*head).cmsg_len - libc::CMSG_LEN(0) as usize;
                let data = std::slice::from_raw_parts(libc::CMSG_DATA(head), bytes);
                for raw in data.as_chunks().0 {
                    descriptors.push(OwnedFd::from_raw_fd(RawFd::from_ne_bytes(*raw)));
                }
            }
            head = libc::CMSG_NXTHDR(message, head);
        }
    }
    descriptors
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(all(test, not(loom)))]
#[path = "channel_tests.rs"]
mod tests;
