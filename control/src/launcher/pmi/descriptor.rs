//! A socket by the number of its descriptor.
//!
//! The launcher passes the number on to this process, where an MPI library may use the socket, too:
//! it is never closed here. If `MPI_Finalize` or the program closes it, the next file that is
//! opened gets the number. So the socket is compared with its inode before it is used again.
#![allow(unsafe_code)]

use std::ffi::c_short;
use std::io;
use std::os::fd::RawFd;
use std::time::Instant;

use nix::libc;
use nix::sys::socket::{MsgFlags, recv, send};

use crate::launcher::bounded_call::left;

/// A connected stream socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Descriptor {
    number: RawFd,
    /// Device and inode.
    identity: (u64, u64),
}

impl Descriptor {
    /// The socket with this number.
    ///
    /// # Errors
    /// What the number is instead.
    pub(super) fn of_stream(number: RawFd) -> Result<Self, String> {
        match identity_of(number) {
            Err(error) => Err(format!("descriptor {number} is not open ({error})")),
            Ok(None) => Err(format!("descriptor {number} is not a socket")),
            Ok(Some(_)) if socket_type(number).ok() != Some(libc::SOCK_STREAM) => {
                Err(format!("descriptor {number} is not a stream socket"))
            }
            Ok(Some(identity)) => Ok(Self { number, identity }),
        }
    }

    /// Is the number still that of this socket?
    pub(super) fn is_same(self) -> bool {
        identity_of(self.number).is_ok_and(|identity| identity == Some(self.identity))
    }

    /// Receives bytes: 0 at the end of the stream.
    ///
    /// # Errors
    /// `TimedOut` if none arrive in time; the system's error.
    pub(super) fn receive(self, bytes: &mut [u8], deadline: Instant) -> io::Result<usize> {
        let flags = MsgFlags::MSG_DONTWAIT;
        self.retry(libc::POLLIN, deadline, || recv(self.number, bytes, flags))
    }

    /// Sends the first of these bytes, and returns their number.
    ///
    /// # Errors
    /// `TimedOut` if the launcher receives nothing in time; the system's error.
    pub(super) fn send(self, bytes: &[u8], deadline: Instant) -> io::Result<usize> {
        // A signal would end programs that do not ignore it.
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        self.retry(libc::POLLOUT, deadline, || send(self.number, bytes, flags))
    }

    fn retry(
        self,
        events: c_short,
        deadline: Instant,
        mut call: impl FnMut() -> nix::Result<usize>,
    ) -> io::Result<usize> {
        loop {
            match call() {
                Err(nix::Error::EAGAIN | nix::Error::EINTR) => {}
                result => return Ok(result?),
            }
            if !self.wait(events, deadline)? {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }

    /// Waits until it is ready, or the deadline has passed: then false.
    fn wait(self, events: c_short, deadline: Instant) -> io::Result<bool> {
        loop {
            let left = left(deadline);
            let milliseconds = i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
            let mut entry = libc::pollfd { fd: self.number, events, revents: 0 };
            // SAFETY: one valid entry, which lives longer than the call.
            match unsafe { libc::poll(&raw mut entry, 1, milliseconds) } {
                0 if left.is_zero() => return Ok(false),
                0 => {}
                1.. => return Ok(true),
                _ => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error => return Err(error),
                },
            }
        }
    }
}

/// Device and inode of a socket; None for other files.
fn identity_of(number: RawFd) -> io::Result<Option<(u64, u64)>> {
    let mut status = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: any number may be given, and the space for the result is valid.
    if unsafe { libc::fstat(number, status.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so it has filled the result.
    let status = unsafe { status.assume_init() };
    let is_socket = status.st_mode & libc::S_IFMT == libc::S_IFSOCK;
    Ok(is_socket.then_some((status.st_dev, status.st_ino)))
}

fn socket_type(number: RawFd) -> io::Result<i32> {
    let mut value: libc::c_int = 0;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: any number may be given, and the space for the result has the given length.
    let code = unsafe {
        let space = (&raw mut value).cast();
        libc::getsockopt(number, libc::SOL_SOCKET, libc::SO_TYPE, space, &raw mut length)
    };
    if code == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, OwnedFd};
    use std::os::unix::net::{UnixDatagram, UnixStream};
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_open_stream_sockets_are_accepted() {
        let (here, _there) = UnixStream::pair().unwrap();
        assert!(Descriptor::of_stream(here.as_raw_fd()).unwrap().is_same());
        let datagrams = UnixDatagram::unbound().unwrap();
        let error = Descriptor::of_stream(datagrams.as_raw_fd()).unwrap_err();
        assert!(error.ends_with("is not a stream socket"), "{error}");
        let file = std::fs::File::open("/dev/null").unwrap();
        let error = Descriptor::of_stream(file.as_raw_fd()).unwrap_err();
        assert!(error.ends_with("is not a socket"), "{error}");
        let error = Descriptor::of_stream(1_000_000).unwrap_err();
        assert_eq!(error, "descriptor 1000000 is not open (Bad file descriptor (os error 9))");
    }

    #[test]
    fn number_of_another_socket_is_noticed() {
        let (here, there) = UnixStream::pair().unwrap();
        let mut here = OwnedFd::from(here);
        let descriptor = Descriptor::of_stream(here.as_raw_fd()).unwrap();
        nix::unistd::dup2(&there, &mut here).unwrap();
        assert!(!descriptor.is_same());
    }

    #[test]
    fn deadline_ends_the_wait_and_the_end_is_received() {
        let (here, there) = UnixStream::pair().unwrap();
        let descriptor = Descriptor::of_stream(here.as_raw_fd()).unwrap();
        let soon = || Instant::now() + Duration::from_millis(20);
        let error = descriptor.receive(&mut [0; 8], soon()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(there);
        assert_eq!(descriptor.receive(&mut [0; 8], soon()).unwrap(), 0);
        let error = descriptor.send(b"x", soon()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
