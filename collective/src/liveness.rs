//! Connections by which a rank learns at once that a process on another machine has ended, or what has
//! failed there.
//!
//! Fabrics notice the end of a peer only when it has not answered for some seconds. A connection of TCP is
//! closed by the system when a process ends. It is an addition: without it, for example behind a firewall,
//! ranks fail at their deadlines.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// What a rank sends before it leaves, and before a report.
const LEAVE: u8 = 0x4c;
const REPORT: u8 = 0x52;
/// What a rank answers to the greeting of another one: a nonce and a rank.
const ACCEPTED: u8 = 0x41;
const GREETING: usize = 20;
/// How long a rank waits for a greeting, and for one connection, at most.
const GREETING_TIMEOUT: Duration = Duration::from_millis(200);
const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
/// How long ranks try to connect, at most.
const TIMEOUT: Duration = Duration::from_secs(2);
const RETRY: Duration = Duration::from_millis(1);

/// Where a rank listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LivenessAddress {
    address: SocketAddr,
    /// What a connecting rank sends, so that other programs are not taken for one.
    nonce: [u8; 16],
}

/// A rank that listens.
#[derive(Debug)]
pub(crate) struct LivenessListener {
    listener: TcpListener,
    address: LivenessAddress,
}

impl LivenessListener {
    pub(crate) fn new(address: IpAddr) -> std::io::Result<Self> {
        let listener = TcpListener::bind(SocketAddr::new(address, 0))?;
        listener.set_nonblocking(true)?;
        let mut nonce = [0; 16];
        getrandom::fill(&mut nonce)?;
        let address = LivenessAddress { address: listener.local_addr()?, nonce };
        Ok(Self { listener, address })
    }

    pub(crate) fn address(&self) -> LivenessAddress {
        self.address
    }

    /// Connects to ranks, and accepts the connections of others. A connection counts when the rank that accepts
    /// it has said so.
    pub(crate) fn connect(
        self,
        own: u32,
        to: &[(u32, LivenessAddress)],
        from: &[u32],
        deadline: Instant,
    ) -> LivenessLinks {
        let deadline = deadline.min(Instant::now() + TIMEOUT);
        std::thread::scope(|scope| {
            let accepting = scope.spawn(|| self.accept_all(from, deadline));
            let connect =
                |(rank, address): &(u32, LivenessAddress)| match address.connect(own, deadline) {
                    Ok(stream) => Some(Link::new(*rank, stream)),
                    Err(error) => {
                        tracing::debug!(rank, %error, "no connection for liveness");
                        None
                    }
                };
            let mut links: Vec<Link> = to.iter().filter_map(connect).collect();
            links.extend(accepting.join().unwrap_or_default());
            LivenessLinks(links)
        })
    }

    fn accept_all(&self, from: &[u32], deadline: Instant) -> Vec<Link> {
        let (mut missing, mut links) = (from.to_vec(), Vec::new());
        while !missing.is_empty() && Instant::now() < deadline {
            let Ok((stream, _)) = self.listener.accept() else {
                std::thread::sleep(RETRY);
                continue;
            };
            if let Some((rank, stream)) = self.accept(stream)
                && let Some(at) = missing.iter().position(|other| *other == rank)
            {
                missing.swap_remove(at);
                links.push(Link::new(rank, stream));
            }
        }
        if !missing.is_empty() {
            tracing::debug!(?missing, "no connections for liveness");
        }
        links
    }

    /// The rank of a connection; None if it is of another program.
    fn accept(&self, mut stream: TcpStream) -> Option<(u32, TcpStream)> {
        stream.set_nonblocking(true).ok()?;
        let mut greeting = [0; GREETING];
        read_until(&mut stream, &mut greeting, Instant::now() + GREETING_TIMEOUT).ok()?;
        let (nonce, rank) = greeting.split_at(16);
        if nonce != self.address.nonce {
            return None;
        }
        stream.write_all(&[ACCEPTED]).ok()?;
        Some((u32::from_le_bytes(rank.try_into().ok()?), stream))
    }
}

impl LivenessAddress {
    fn connect(&self, own: u32, deadline: Instant) -> std::io::Result<TcpStream> {
        let left = deadline.saturating_duration_since(Instant::now()).max(RETRY);
        let mut stream = TcpStream::connect_timeout(&self.address, left.min(CONNECT_TIMEOUT))?;
        stream.write_all(&[&self.nonce[..], &own.to_le_bytes()].concat())?;
        stream.set_nonblocking(true)?;
        let mut answer = [0];
        read_until(&mut stream, &mut answer, deadline)?;
        match answer {
            [ACCEPTED] => Ok(stream),
            _ => Err(std::io::Error::new(ErrorKind::InvalidData, "another program answers")),
        }
    }
}

/// Reads so many bytes before a deadline.
fn read_until(stream: &mut TcpStream, bytes: &mut [u8], deadline: Instant) -> std::io::Result<()> {
    let mut read = 0;
    while read < bytes.len() {
        match stream.read(&mut bytes[read..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => read += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if Instant::now() >= deadline {
                    return Err(ErrorKind::TimedOut.into());
                }
                std::thread::sleep(RETRY);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Bytes of a report.
pub(crate) const REPORT_BYTES: usize = 56;

/// What a rank learns of another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LivenessMessage {
    /// Departure of a rank that leaves.
    Left,
    /// End of its process.
    Ended,
    /// Report of a failure.
    Report([u8; REPORT_BYTES]),
}

#[derive(Debug)]
struct Link {
    rank: u32,
    stream: TcpStream,
    /// Bytes of a message that is not complete.
    received: Vec<u8>,
}

impl Link {
    fn new(rank: u32, stream: TcpStream) -> Self {
        Self { rank, stream, received: Vec::new() }
    }

    /// Reads what has come. Returns whether there may be more later.
    fn read(&mut self, messages: &mut Vec<(u32, LivenessMessage)>) -> bool {
        let mut bytes = [0; 128];
        let is_open = match self.stream.read(&mut bytes) {
            Ok(0) => false,
            Ok(count) => {
                self.received.extend(&bytes[..count]);
                true
            }
            Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        };
        if self.received.first() == Some(&REPORT)
            && let Some(report) = self.received.get(1..=REPORT_BYTES)
        {
            let report = std::array::from_fn(|at| report[at]);
            messages.push((self.rank, LivenessMessage::Report(report)));
            self.received.drain(..=REPORT_BYTES);
        }
        if self.received.first() == Some(&LEAVE) {
            messages.push((self.rank, LivenessMessage::Left));
            return false;
        }
        if !is_open {
            messages.push((self.rank, LivenessMessage::Ended));
        }
        // What is no message is not kept.
        if self.received.first().is_some_and(|first| *first != REPORT) {
            self.received.clear();
        }
        is_open
    }
}

/// The connections of a rank.
#[derive(Debug, Default)]
pub(crate) struct LivenessLinks(Vec<Link>);

impl LivenessLinks {
    /// What other ranks have sent, and which have ended, since the last call.
    pub(crate) fn messages(&mut self) -> Vec<(u32, LivenessMessage)> {
        let mut messages = Vec::new();
        self.0.retain_mut(|link| link.read(&mut messages));
        messages
    }

    /// Reports a failure to the other ranks.
    pub(crate) fn report(&mut self, report: &[u8; REPORT_BYTES]) {
        let bytes = [&[REPORT], &report[..]].concat();
        for link in &mut self.0 {
            let _ = link.stream.write_all(&bytes);
        }
    }

    /// Tells the other ranks that this one leaves.
    pub(crate) fn leave(&mut self) {
        for link in &mut self.0 {
            let _ = link.stream.write_all(&[LEAVE]);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn pair() -> [LivenessLinks; 2] {
        let deadline = Instant::now() + TIMEOUT;
        let [one, other] =
            [0, 1].map(|_| LivenessListener::new(Ipv4Addr::LOCALHOST.into()).unwrap());
        let to = (1, other.address());
        // A program that does not know the nonce.
        let mut unknown = TcpStream::connect(to.1.address).unwrap();
        unknown.write_all(&[0; 20]).unwrap();
        let connecting = std::thread::spawn(move || one.connect(0, &[to], &[], deadline));
        let accepted = other.connect(1, &[], &[0], deadline);
        [connecting.join().unwrap(), accepted]
    }

    /// What a rank learns within a second.
    fn learn(links: &mut LivenessLinks) -> Vec<(u32, LivenessMessage)> {
        let deadline = Instant::now() + Duration::from_secs(1);
        loop {
            let messages = links.messages();
            if !messages.is_empty() || Instant::now() > deadline {
                return messages;
            }
        }
    }

    #[test]
    fn end_of_a_rank_is_seen_by_the_other_one() {
        let [mut one, other] = pair();
        assert_eq!(one.messages(), []);
        drop(other);
        assert_eq!(learn(&mut one), [(1, LivenessMessage::Ended)]);
        assert_eq!(one.messages(), []);
    }

    #[test]
    fn rank_that_leaves_is_not_taken_for_one_that_has_ended() {
        let [mut one, mut other] = pair();
        let report = [7; REPORT_BYTES];
        one.report(&report);
        assert_eq!(learn(&mut other), [(0, LivenessMessage::Report(report))]);
        one.leave();
        drop(one);
        assert_eq!(learn(&mut other), [(0, LivenessMessage::Left)]);
    }

    #[test]
    fn unreachable_rank_has_no_connection() {
        let listener = LivenessListener::new(Ipv4Addr::LOCALHOST.into()).unwrap();
        let gone = LivenessListener::new(Ipv4Addr::LOCALHOST.into()).unwrap().address();
        let deadline = Instant::now() + Duration::from_millis(100);
        let mut links = listener.connect(0, &[(1, gone)], &[2], deadline);
        assert_eq!(links.messages(), []);
        assert!(links.0.is_empty());
    }
}
