//! A connection to the store. Each wait has a deadline.

use std::io::{self, ErrorKind as IoKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::wire::{Answers, Dialect, OPENING_ANSWERS, Queries, opening};
use crate::launcher::bounded_call::{self, resolve};

/// Bytes received at once.
const CHUNK: usize = 64 * 1024;
/// More keys than a store has: such a number comes from another server.
const MAX_KEYS: i64 = 1 << 40;

/// The time until a deadline; after it, this fault.
fn left(deadline: Instant, late: impl FnOnce() -> Fault) -> Result<Duration, Fault> {
    let left = bounded_call::left(deadline);
    if left.is_zero() { Err(late()) } else { Ok(left) }
}

/// Why an exchange with the store failed.
#[derive(Debug)]
pub(super) enum Fault {
    /// This did not happen before the deadline.
    Late(String),
    /// The store closed the connection, or does not accept one.
    Closed(String),
    /// The store sent this.
    Malformed(String),
    /// A rank sent this.
    OfRank(u32, String),
    InvalidAddress(String),
    /// The system reported this.
    Failed(String),
}

impl Fault {
    fn of(error: &io::Error, what: &str) -> Self {
        match error.kind() {
            IoKind::ConnectionRefused
            | IoKind::ConnectionReset
            | IoKind::ConnectionAborted
            | IoKind::BrokenPipe
            | IoKind::NotConnected => Self::Closed(format!("{what}: {error}")),
            _ => Self::Failed(format!("{what}: {error}")),
        }
    }
}

#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    /// Of the peer, for messages.
    address: SocketAddr,
    dialect: Dialect,
    deadline: Instant,
    answers: Answers,
    has_received: bool,
    chunk: Vec<u8>,
}

impl Connection {
    /// Connects to the store at `host:port`, and finds out its dialect.
    pub(super) fn open(address: &str, deadline: Instant) -> Result<Self, Fault> {
        let candidates = addresses_of(address, deadline)?;
        let mut connection = Self::connect(&candidates, Dialect::Since22, deadline)?;
        match connection.begin() {
            Ok(()) => Ok(connection),
            // Either a store until 2.1 or no store.
            Err(Fault::Closed(_)) if !connection.has_received => {
                let mut connection = Self::connect(&candidates, Dialect::Until21, deadline)?;
                connection.begin()?;
                Ok(connection)
            }
            Err(fault) => Err(fault),
        }
    }

    fn connect(
        candidates: &[SocketAddr],
        dialect: Dialect,
        deadline: Instant,
    ) -> Result<Self, Fault> {
        let mut fault = Fault::Failed("the host has no address".to_owned());
        for (index, address) in candidates.iter().enumerate() {
            let late = || Fault::Late(format!("{address} accepted no connection"));
            // Leaves time for the other addresses.
            let part = left(deadline, late)? / (candidates.len() - index) as u32;
            match TcpStream::connect_timeout(address, part) {
                Ok(stream) => {
                    let what = format!("connecting to {address}");
                    stream.set_nodelay(true).map_err(|error| Fault::of(&error, &what))?;
                    return Ok(Self {
                        stream,
                        address: *address,
                        dialect,
                        deadline,
                        answers: Answers::default(),
                        has_received: false,
                        chunk: vec![0; CHUNK],
                    });
                }
                Err(error) if error.kind() == IoKind::TimedOut => fault = late(),
                Err(error) => fault = Fault::of(&error, &format!("connecting to {address}")),
            }
        }
        Err(fault)
    }

    fn begin(&mut self) -> Result<(), Fault> {
        let count = match self.dialect {
            Dialect::Since22 => {
                self.send_bytes(&opening())?;
                OPENING_ANSWERS
            }
            Dialect::Until21 => {
                self.send(Queries::count_keys)?;
                1
            }
        };
        for _ in 0..count {
            let keys = self.number()?;
            if !(0..MAX_KEYS).contains(&keys) {
                return Err(Fault::Malformed(format!("{keys} as its number of keys")));
            }
        }
        Ok(())
    }

    pub(super) fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }

    pub(super) fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// Sends queries at once. All earlier ones must have been answered: otherwise both sides might
    /// wait until the other receives.
    pub(super) fn send(&mut self, ask: impl FnOnce(&mut Queries)) -> Result<(), Fault> {
        if !self.answers.is_empty() {
            return Err(Fault::Malformed("an answer without a query".to_owned()));
        }
        let mut queries = Queries::new(self.dialect);
        ask(&mut queries);
        self.send_bytes(queries.bytes())
    }

    fn send_bytes(&mut self, mut bytes: &[u8]) -> Result<(), Fault> {
        let what = format!("sending to {}", self.address);
        while !bytes.is_empty() {
            let late = || Fault::Late(format!("{} did not receive all queries", self.address));
            let left = left(self.deadline, late)?;
            self.stream.set_write_timeout(Some(left)).map_err(|error| Fault::of(&error, &what))?;
            match self.stream.write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if is_pause(&error) => {}
                Err(error) => return Err(Fault::of(&error, &what)),
            }
        }
        Ok(())
    }

    fn receive<T>(
        &mut self,
        take: impl Fn(&mut Answers) -> Result<Option<T>, String>,
    ) -> Result<T, Fault> {
        let what = format!("receiving from {}", self.address);
        loop {
            if let Some(answer) = take(&mut self.answers).map_err(Fault::Malformed)? {
                return Ok(answer);
            }
            let late = || Fault::Late(format!("{} did not answer", self.address));
            let left = left(self.deadline, late)?;
            self.stream.set_read_timeout(Some(left)).map_err(|error| Fault::of(&error, &what))?;
            match self.stream.read(&mut self.chunk) {
                Ok(0) => {
                    return Err(Fault::Closed(format!("{} closed the connection", self.address)));
                }
                Ok(count) => {
                    self.has_received = true;
                    self.answers.extend(&self.chunk[..count]);
                }
                Err(error) if is_pause(&error) => {}
                Err(error) => return Err(Fault::of(&error, &what)),
            }
        }
    }

    /// The answer to `add`, `count_keys`, and `remove` if it has one.
    pub(super) fn number(&mut self) -> Result<i64, Fault> {
        self.receive(|answers| Ok(answers.number()))
    }

    /// The answer to `check`, and `wait`.
    pub(super) fn existence(&mut self) -> Result<bool, Fault> {
        self.receive(Answers::existence)
    }

    /// The answer to `get`.
    pub(super) fn value(&mut self, most: usize) -> Result<Vec<u8>, Fault> {
        self.receive(|answers| answers.value(most))
    }
}

/// Was the call only interrupted, or ended by its timeout? The deadline is compared next.
fn is_pause(error: &io::Error) -> bool {
    matches!(error.kind(), IoKind::WouldBlock | IoKind::TimedOut | IoKind::Interrupted)
}

/// Host and port of `host:port`. The host may be an IPv6 address, with or without brackets.
fn split(address: &str) -> Result<(&str, u16), Fault> {
    let split = || {
        let (host, port) = address.rsplit_once(':')?;
        let within = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        Some((within.unwrap_or(host), port.parse().ok()?))
    };
    split().filter(|(host, _)| !host.is_empty()).ok_or_else(|| {
        Fault::InvalidAddress(format!("\"{}\" is no host and port", address.escape_debug()))
    })
}

/// The addresses of `host:port`.
fn addresses_of(address: &str, deadline: Instant) -> Result<Vec<SocketAddr>, Fault> {
    let (host, port) = split(address)?;
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    let failed = |error: io::Error| {
        Fault::Failed(format!("resolving host name \"{}\": {error}", host.escape_debug()))
    };
    let late = || Fault::Late(format!("host name \"{}\" was not resolved", host.escape_debug()));
    left(deadline, late)?;
    let resolved = resolve((host.to_owned(), port), deadline);
    resolved.map_err(failed)?.ok_or_else(late)?.map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_and_port_are_separated() {
        assert_eq!(split("node7:29500").unwrap(), ("node7", 29500));
        assert_eq!(split("[::1]:29500").unwrap(), ("::1", 29500));
        assert_eq!(split("fe80::1%eth0:29500").unwrap(), ("fe80::1%eth0", 29500));
        for address in ["", "node7", "node7:", ":29500", "node7:65536", "[]:1", "node7:-1"] {
            assert!(matches!(split(address), Err(Fault::InvalidAddress(_))), "{address}");
        }
    }

    #[test]
    fn names_and_addresses_are_resolved() {
        let resolve =
            |address| addresses_of(address, bounded_call::deadline(Duration::from_secs(20)));
        assert_eq!(resolve("[::1]:1").unwrap(), ["[::1]:1".parse().unwrap()]);
        assert_eq!(resolve("::1:29500").unwrap(), ["[::1]:29500".parse().unwrap()]);
        assert_eq!(resolve("127.0.0.1:1").unwrap(), ["127.0.0.1:1".parse().unwrap()]);
        let addresses = resolve("localhost:7").unwrap();
        assert!(addresses.iter().all(|it| it.ip().is_loopback() && it.port() == 7));
        assert!(!addresses.is_empty());
    }
}
