//! Connections of an attacker to a TCP port.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::target::{Target, Victim};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Lifetime of a cached address: the port of the provider may change.
const ADDRESS_LIFETIME: Duration = Duration::from_millis(200);

/// Open connections, and counts since the start.
#[derive(Debug, Default)]
pub struct Connections {
    open: Vec<TcpStream>,
    pub opened: u64,
    /// Closed by the node.
    pub closed: u64,
    /// Not accepted.
    pub failed: u64,
    pub max_open: usize,
    address: Option<(Instant, SocketAddr)>,
}

impl Connections {
    /// Opens a connection; false if that failed.
    pub fn open(&mut self, target: &Target, victim: Victim) -> bool {
        let stream = self
            .address(target, victim)
            .and_then(|address| TcpStream::connect_timeout(&address, CONNECT_TIMEOUT).ok())
            .filter(|stream| {
                stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_ok()
            });
        match stream {
            Some(stream) => {
                self.opened += 1;
                self.open.push(stream);
                self.max_open = self.max_open.max(self.open.len());
                true
            }
            None => {
                (self.address, self.failed) = (None, self.failed + 1);
                false
            }
        }
    }

    /// The address of the port. It is cached, since a lookup takes time in proportion to the number
    /// of connections.
    fn address(&mut self, target: &Target, victim: Victim) -> Option<SocketAddr> {
        if self.address.is_none_or(|(since, _)| since.elapsed() > ADDRESS_LIFETIME) {
            self.address = target.address(victim).map(|address| (Instant::now(), address));
        }
        self.address.map(|(_, address)| address)
    }

    pub fn count(&self) -> usize {
        self.open.len()
    }

    /// Sends bytes over the newest connection.
    pub fn send(&mut self, bytes: &[u8]) {
        if let Some(stream) = self.open.last_mut() {
            // `reap` counts connections that the node has closed.
            let _ = stream.write_all(bytes);
        }
    }

    /// Sends the next byte over each connection; the caller holds the position of each.
    pub fn send_byte_each(&mut self, bytes: &[u8], positions: &mut Vec<usize>) {
        positions.resize(self.open.len(), 0);
        for (stream, position) in self.open.iter_mut().zip(positions) {
            if let Some(byte) = bytes.get(*position) {
                let _ = stream.write_all(&[*byte]);
                *position += 1;
            }
        }
    }

    /// Drops connections that the node has closed, and returns their indices in descending order.
    pub fn reap(&mut self) -> Vec<usize> {
        let is_closed = |stream: &mut TcpStream| {
            let mut bytes = [0; 4096];
            loop {
                match stream.read(&mut bytes) {
                    Ok(0) => return true,
                    Ok(_) => {}
                    Err(error) => return error.kind() != ErrorKind::WouldBlock,
                }
            }
        };
        let mut closed = Vec::new();
        for index in (0..self.open.len()).rev() {
            if is_closed(&mut self.open[index]) {
                self.open.remove(index);
                closed.push(index);
            }
        }
        self.closed += closed.len() as u64;
        closed
    }

    /// Closes the oldest connections above a limit.
    pub fn limit(&mut self, max: usize) {
        let excess = self.open.len().saturating_sub(max);
        self.open.drain(..excess);
    }

    pub fn text(&self) -> String {
        let Self { opened, closed, failed, max_open, .. } = self;
        format!(
            "{opened} opened, {max_open} at a time, {closed} closed by the node, {failed} failed"
        )
    }
}
