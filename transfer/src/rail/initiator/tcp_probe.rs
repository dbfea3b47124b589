//! Checks whether a process listens at the address of a peer to which sending fails.
//!
//! Providers over TCP connect and retry by themselves: the message waits, and no error is reported.
//! So a separate thread tries a plain TCP connection.

use std::io::ErrorKind as IoKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use super::{CONNECT, InitiatorRole, LinkState};
use crate::error::{Error, ErrorKind};
use crate::rail::io::RailIo;
use crate::rail::session::{CloseReason, SessionKey};

/// A peer that answers is not probed.
const START_AFTER: Duration = Duration::from_millis(100);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) enum TcpProbe {
    NotStarted,
    /// The provider does not use TCP, or no thread could be started.
    Impossible,
    /// The reply is true if the connection was refused.
    Running(SocketAddr, Receiver<bool>),
}

impl TcpProbe {
    fn start(address: &[u8]) -> Self {
        let Some(address) = socket_address(address) else { return Self::Impossible };
        let (sender, reply) = channel();
        let attempt = move || {
            let connected = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT);
            let _ = sender.send(connected.is_err_and(|e| e.kind() == IoKind::ConnectionRefused));
        };
        threads::spawn("fabricast-probe", attempt)
            .map_or(Self::Impossible, |_| Self::Running(address, reply))
    }
}

/// A `sockaddr_in` or `sockaddr_in6` from a peer.
fn socket_address(bytes: &[u8]) -> Option<SocketAddr> {
    let word = |offset: usize| Some([*bytes.get(offset)?, *bytes.get(offset + 1)?]);
    let long = |offset: usize| <[u8; 4]>::try_from(bytes.get(offset..offset + 4)?).ok();
    let (family, port) = (u16::from_ne_bytes(word(0)?), u16::from_be_bytes(word(2)?));
    match i32::from(family) {
        libc::AF_INET => Some((IpAddr::V4(Ipv4Addr::from(long(4)?)), port).into()),
        libc::AF_INET6 => {
            let address: [u8; 16] = bytes.get(8..24)?.try_into().ok()?;
            let scope = u32::from_ne_bytes(long(24)?);
            Some(SocketAddrV6::new(Ipv6Addr::from(address), port, 0, scope).into())
        }
        _ => None,
    }
}

impl InitiatorRole {
    /// Fails connecting links to addresses where no process listens: their agents have ended, and
    /// would not answer before the deadline.
    pub(super) fn check_tcp_probes(&mut self, io: &mut RailIo, now: Instant) {
        let connecting = self.links.iter().filter(|(_, link)| link.has_waiter());
        let connecting: Vec<_> = connecting.map(|(number, _)| *number).collect();
        for number in connecting {
            let is_unsent = io.unsent_messages(SessionKey::Link(number)) > 0;
            let Some(link) = self.links.get_mut(&number) else { continue };
            let LinkState::Connecting { began, tcp_probe, .. } = &mut link.state else { continue };
            match tcp_probe {
                TcpProbe::NotStarted
                    if is_unsent && now.saturating_duration_since(*began) >= START_AFTER =>
                {
                    *tcp_probe = match io.capabilities().connects_by_tcp() {
                        true => TcpProbe::start(&link.known_target.target.address),
                        false => TcpProbe::Impossible,
                    };
                }
                TcpProbe::Running(address, reply) if reply.try_recv() == Ok(true) => {
                    let detail = format!(
                        "{address} refuses connections (ECONNREFUSED): its process has ended, or a \
                         firewall rejects them. Start it and take its new card"
                    );
                    let error = Error::new(CONNECT, ErrorKind::Closed, detail);
                    self.close_link(io, number, CloseReason::Lost, error);
                }
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn bytes_of(address: SocketAddr) -> Vec<u8> {
        let port = address.port().to_be_bytes();
        match address {
            SocketAddr::V4(v4) => {
                let family = (libc::AF_INET as u16).to_ne_bytes();
                [&family[..], &port, &v4.ip().octets(), &[0; 8]].concat()
            }
            SocketAddr::V6(v6) => {
                let family = (libc::AF_INET6 as u16).to_ne_bytes();
                let scope = v6.scope_id().to_ne_bytes();
                [&family[..], &port, &[0; 4], &v6.ip().octets(), &scope].concat()
            }
        }
    }

    #[test]
    fn socket_addresses_are_read_and_truncated_ones_refused() {
        for text in ["10.0.0.2:4711", "[fe80::1%3]:4711", "[::1]:80"] {
            let address: SocketAddr = text.parse().unwrap();
            let bytes = bytes_of(address);
            assert_eq!(socket_address(&bytes), Some(address));
            for length in 0..if address.is_ipv4() { 8 } else { bytes.len() } {
                assert_eq!(socket_address(&bytes[..length]), None, "{length} bytes of {text}");
            }
        }
        assert_eq!(socket_address(&[0xff; 28]), None);
    }

    #[test]
    fn probe_distinguishes_refused_and_accepted_connections() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let is_refused = || match TcpProbe::start(&bytes_of(address)) {
            TcpProbe::Running(_, reply) => reply.recv_timeout(2 * CONNECT_TIMEOUT).unwrap(),
            other => panic!("{other:?}"),
        };
        assert!(!is_refused());
        drop(listener);
        assert!(is_refused());
        assert!(matches!(TcpProbe::start(b""), TcpProbe::Impossible));
    }
}
