//! The connection to the launcher: bytes out, lines and counted bytes in, with deadlines.

use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use super::descriptor::Descriptor;
use super::failure::Failure;
use super::message::MAX_MESSAGE;
use crate::launcher::bounded_call::{left, resolve};

/// A stream socket whose other end is the launcher.
#[derive(Debug)]
pub(super) struct Connection {
    descriptor: Descriptor,
    /// The socket, if this process opened it.
    _own: Option<TcpStream>,
    /// Received, not used yet.
    unread: Vec<u8>,
}

impl Connection {
    /// The socket with this inherited number.
    pub(super) fn inherited(number: i32) -> Result<Self, Failure> {
        let descriptor = Descriptor::of_stream(number).map_err(|what| {
            let remedy = "Start the rank directly by the launcher, without a program between \
                          them that closes descriptors, or choose another launcher by \
                          FABRICAST_LAUNCHER";
            Failure::Environment(format!("PMI_FD={number}, but {what}. {remedy}"))
        })?;
        Ok(Self { descriptor, _own: None, unread: Vec::new() })
    }

    /// A new connection to `host:port`.
    pub(super) fn to_address(address: &str, deadline: Instant) -> Result<Self, Failure> {
        let invalid = format!("PMI_PORT={address} is no address");
        let resolved = resolve(address.to_owned(), deadline)?.ok_or(Failure::Deadline)?;
        let addresses =
            resolved.map_err(|error| Failure::Environment(format!("{invalid}: {error}")))?;
        let mut last = Failure::Environment(invalid);
        for address in addresses {
            let left = left(deadline).max(Duration::from_millis(1));
            match TcpStream::connect_timeout(&address, left) {
                Ok(socket) => {
                    socket.set_nodelay(true)?;
                    let descriptor =
                        Descriptor::of_stream(socket.as_raw_fd()).map_err(io::Error::other)?;
                    return Ok(Self { descriptor, _own: Some(socket), unread: Vec::new() });
                }
                Err(error) => last = error.into(),
            }
        }
        Err(last)
    }

    pub(super) fn descriptor(&self) -> Descriptor {
        self.descriptor
    }

    /// Sends a request. All that was received before must have been used.
    pub(super) fn send(&mut self, mut bytes: &[u8], deadline: Instant) -> Result<(), Failure> {
        if !self.unread.is_empty() {
            let begin = self.unread[..self.unread.len().min(64)].escape_ascii();
            let detail = format!("the launcher sent \"{begin}\" without a request");
            return Err(Failure::Malformed(detail));
        }
        while !bytes.is_empty() {
            let sent = self.descriptor.send(bytes, deadline)?;
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    /// Receives a line, without its end.
    pub(super) fn line(&mut self, deadline: Instant) -> Result<Vec<u8>, Failure> {
        let mut searched = 0;
        loop {
            let found = self.unread[searched..].iter().position(|byte| *byte == b'\n');
            if let Some(length) = found.map(|at| searched + at) {
                let mut line: Vec<u8> = self.unread.drain(..=length).collect();
                line.pop();
                return Ok(line);
            }
            searched = self.unread.len();
            if searched > MAX_MESSAGE {
                let detail = format!("the launcher sent a line of more than {MAX_MESSAGE} bytes");
                return Err(Failure::Malformed(detail));
            }
            self.receive(deadline)?;
        }
    }

    /// Receives this number of bytes.
    pub(super) fn exactly(&mut self, count: usize, deadline: Instant) -> Result<Vec<u8>, Failure> {
        while self.unread.len() < count {
            self.receive(deadline)?;
        }
        Ok(self.unread.drain(..count).collect())
    }

    pub(super) fn put_back(&mut self, bytes: &[u8]) {
        self.unread.splice(..0, bytes.iter().copied());
    }

    fn receive(&mut self, deadline: Instant) -> Result<(), Failure> {
        let mut bytes = [0; 4096];
        match self.descriptor.receive(&mut bytes, deadline)? {
            0 => Err(Failure::Closed),
            count => {
                self.unread.extend(&bytes[..count]);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(50)
    }

    fn pair() -> (Connection, UnixStream, UnixStream) {
        let (here, there) = UnixStream::pair().unwrap();
        (Connection::inherited(here.as_raw_fd()).unwrap(), there, here)
    }

    #[test]
    fn lines_and_counted_bytes_are_received() {
        let (mut connection, mut there, _socket) = pair();
        there.write_all(b"one\n\ntwo\n6 bytesrest").unwrap();
        assert_eq!(connection.line(soon()).unwrap(), b"one");
        assert_eq!(connection.line(soon()).unwrap(), b"");
        assert_eq!(connection.line(soon()).unwrap(), b"two");
        assert_eq!(connection.exactly(7, soon()).unwrap(), b"6 bytes");
        let error = connection.send(b"request", soon()).unwrap_err();
        let expected = "the launcher sent \"rest\" without a request";
        assert!(matches!(error, Failure::Malformed(text) if text == expected));
        assert!(matches!(connection.line(soon()), Err(Failure::Deadline)));
        there.write_all(b"!\n").unwrap();
        assert_eq!(connection.line(soon()).unwrap(), b"rest!");
    }

    #[test]
    fn long_lines_and_the_end_are_errors() {
        let (mut connection, mut there, _socket) = pair();
        let write = std::thread::spawn(move || {
            let _ = there.write_all(&vec![b'x'; 2 * MAX_MESSAGE]);
        });
        let late = Instant::now() + Duration::from_secs(20);
        assert!(matches!(connection.line(late), Err(Failure::Malformed(_))));
        assert!(connection.exactly(2 * MAX_MESSAGE, late).is_ok());
        write.join().unwrap();
        assert!(matches!(connection.line(late), Err(Failure::Closed)));
        assert!(matches!(connection.send(b"x", late), Err(Failure::Closed)));
    }

    #[test]
    fn launcher_that_receives_nothing_ends_the_send_at_the_deadline() {
        let (mut connection, _there, _socket) = pair();
        let error = connection.send(&vec![0; 8 << 20], soon()).unwrap_err();
        assert!(matches!(error, Failure::Deadline));
    }

    #[test]
    fn address_without_a_listener_is_an_error() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        assert!(Connection::to_address(&address, soon()).is_ok());
        drop(listener);
        let late = Instant::now() + Duration::from_secs(20);
        assert!(matches!(Connection::to_address(&address, late), Err(Failure::System(_))));
        for text in ["", "host", "127.0.0.1:x", "127.0.0.1:99999"] {
            let error = Connection::to_address(text, late).unwrap_err();
            assert!(matches!(error, Failure::Environment(_)), "{text}: {error:?}");
        }
    }
}
