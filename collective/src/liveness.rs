//! Connections by which a rank learns at once that a process on another machine has ended.
//!
//! Fabrics notice that only when a peer has not answered for some seconds. A connection of TCP on which
//! nothing is sent is closed by the system when a process ends. It is an addition: without it, ranks fail
//! later, for example behind a firewall.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// What a rank sends before it leaves.
const LEAVE: u8 = 0x4c;
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

    /// Connects to ranks, and waits for the connections of others.
    pub(crate) fn connect(
        self,
        own: u32,
        to: &[(u32, LivenessAddress)],
        from: &[u32],
        deadline: Instant,
    ) -> LivenessLinks {
        let deadline = deadline.min(Instant::now() + TIMEOUT);
        let mut links = LivenessLinks::default();
        for (rank, address) in to {
            let left = deadline.saturating_duration_since(Instant::now()).max(RETRY);
            let connected =
                TcpStream::connect_timeout(&address.address, left).and_then(|mut it| {
                    it.write_all(&[&address.nonce[..], &own.to_le_bytes()].concat())?;
                    it.set_nonblocking(true)?;
                    Ok(it)
                });
            match connected {
                Ok(stream) => links.0.push((*rank, stream)),
                Err(error) => tracing::debug!(rank, %error, "no connection for liveness"),
            }
        }
        let mut missing = from.to_vec();
        while !missing.is_empty() && Instant::now() < deadline {
            let Ok((stream, _)) = self.listener.accept() else {
                std::thread::sleep(RETRY);
                continue;
            };
            if let Some((rank, stream)) = self.welcome(stream, deadline)
                && let Some(at) = missing.iter().position(|other| *other == rank)
            {
                missing.swap_remove(at);
                links.0.push((rank, stream));
            }
        }
        if !missing.is_empty() {
            tracing::debug!(?missing, "no connections for liveness");
        }
        links
    }

    /// The rank of a connection; None if it is of another program.
    fn welcome(&self, mut stream: TcpStream, deadline: Instant) -> Option<(u32, TcpStream)> {
        let left = deadline.saturating_duration_since(Instant::now()).max(RETRY);
        stream.set_nonblocking(false).ok()?;
        stream.set_read_timeout(Some(left)).ok()?;
        let (mut nonce, mut rank) = ([0; 16], [0; 4]);
        stream.read_exact(&mut nonce).ok()?;
        stream.read_exact(&mut rank).ok()?;
        stream.set_nonblocking(true).ok()?;
        (nonce == self.address.nonce).then_some((u32::from_le_bytes(rank), stream))
    }
}

/// How a rank departed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Departed {
    Left,
    Ended,
}

/// The connections of a rank.
#[derive(Debug, Default)]
pub(crate) struct LivenessLinks(Vec<(u32, TcpStream)>);

impl LivenessLinks {
    /// The ranks that have departed since the last call.
    pub(crate) fn departed(&mut self) -> Vec<(u32, Departed)> {
        let mut departed = Vec::new();
        self.0.retain_mut(|(rank, stream)| {
            let mut byte = [0];
            let how = match stream.read(&mut byte) {
                Ok(1) if byte[0] == LEAVE => Departed::Left,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == ErrorKind::Interrupted => return true,
                _ => Departed::Ended,
            };
            departed.push((*rank, how));
            false
        });
        departed
    }

    /// Tells the other ranks that this one leaves.
    pub(crate) fn leave(&mut self) {
        for (_, stream) in &mut self.0 {
            let _ = stream.write(&[LEAVE]);
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
    fn departed(links: &mut LivenessLinks) -> Vec<(u32, Departed)> {
        let deadline = Instant::now() + Duration::from_secs(1);
        loop {
            let departed = links.departed();
            if !departed.is_empty() || Instant::now() > deadline {
                return departed;
            }
        }
    }

    #[test]
    fn end_of_a_rank_is_seen_by_the_other_one() {
        let [mut one, other] = pair();
        assert_eq!(one.departed(), []);
        drop(other);
        assert_eq!(departed(&mut one), [(1, Departed::Ended)]);
        assert_eq!(one.departed(), []);
    }

    #[test]
    fn rank_that_leaves_is_not_taken_for_one_that_has_ended() {
        let [mut one, mut other] = pair();
        one.leave();
        drop(one);
        assert_eq!(departed(&mut other), [(0, Departed::Left)]);
    }

    #[test]
    fn unreachable_rank_has_no_connection() {
        let listener = LivenessListener::new(Ipv4Addr::LOCALHOST.into()).unwrap();
        let gone = LivenessListener::new(Ipv4Addr::LOCALHOST.into()).unwrap().address();
        let deadline = Instant::now() + Duration::from_millis(100);
        let mut links = listener.connect(0, &[(1, gone)], &[2], deadline);
        assert_eq!(links.departed(), []);
        assert!(links.0.is_empty());
    }
}
