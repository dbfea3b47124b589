//! Connections of an attacker to a TCP port.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::target::{Target, Victim};

const LONGEST: Duration = Duration::from_secs(1);
/// The provider may have another port after it.
const ADDRESS_KNOWN: Duration = Duration::from_millis(200);

/// Connections that are open, and counts of all that there were.
#[derive(Debug, Default)]
pub struct Connections {
    open: Vec<TcpStream>,
    pub opened: u64,
    /// By the other side.
    pub closed: u64,
    /// That were not accepted.
    pub failed: u64,
    pub most: usize,
    address: Option<(Instant, SocketAddr)>,
}

impl Connections {
    /// Opens one more; false if that failed.
    pub fn open(&mut self, target: &Target, victim: Victim) -> bool {
        let stream = self
            .address(target, victim)
            .and_then(|address| TcpStream::connect_timeout(&address, LONGEST).ok())
            .filter(|stream| {
                stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_ok()
            });
        match stream {
            Some(stream) => {
                self.opened += 1;
                self.open.push(stream);
                self.most = self.most.max(self.open.len());
                true
            }
            None => {
                (self.address, self.failed) = (None, self.failed + 1);
                false
            }
        }
    }

    /// Where the port is, looked up now and then only: that takes the longer the more connections
    /// there are.
    fn address(&mut self, target: &Target, victim: Victim) -> Option<SocketAddr> {
        if self.address.is_none_or(|(since, _)| since.elapsed() > ADDRESS_KNOWN) {
            self.address = target.address(victim).map(|address| (Instant::now(), address));
        }
        self.address.map(|(_, address)| address)
    }

    pub fn count(&self) -> usize {
        self.open.len()
    }

    /// Sends these bytes over the connection that was opened last.
    pub fn send(&mut self, bytes: &[u8]) {
        if let Some(stream) = self.open.last_mut() {
            // The other side may have closed it; that is counted by `reap`.
            let _ = stream.write_all(bytes);
        }
    }

    /// Sends the byte with the number that the caller keeps of each connection.
    pub fn send_byte_each(&mut self, bytes: &[u8], at: &mut Vec<usize>) {
        at.resize(self.open.len(), 0);
        for (stream, at) in self.open.iter_mut().zip(at) {
            if let Some(byte) = bytes.get(*at) {
                let _ = stream.write_all(&[*byte]);
                *at += 1;
            }
        }
    }

    /// Drops the connections that the other side has closed; their places, from the last to the first.
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
        let mut gone = Vec::new();
        for at in (0..self.open.len()).rev() {
            if is_closed(&mut self.open[at]) {
                self.open.remove(at);
                gone.push(at);
            }
        }
        self.closed += gone.len() as u64;
        gone
    }

    /// Closes the oldest ones, beyond so many.
    pub fn keep(&mut self, most: usize) {
        let excess = self.open.len().saturating_sub(most);
        self.open.drain(..excess);
    }

    pub fn text(&self) -> String {
        let Self { opened, closed, failed, most, .. } = self;
        format!("{opened} opened, {most} at a time, {closed} closed by the node, {failed} failed")
    }
}
