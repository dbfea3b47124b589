//! Whether a process listens at the address of a peer that a message cannot be sent to.
//!
//! Providers over TCP connect by themselves, and try again and again where nothing listens: the
//! message waits, and no error says why. So the system is asked, by a connection that carries
//! nothing, on a thread of its own that ends with the answer.

use std::io::ErrorKind as IoKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use super::driver::{Driver, SessionKey};
use super::links::{CONNECT, CloseReason, LinkState};
use crate::error::{Error, ErrorKind};

/// A peer that answers is not probed.
const START_AFTER: Duration = Duration::from_millis(100);
/// As long as the system may take to answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// A question to the system.
#[derive(Debug)]
pub(super) enum TcpProbe {
    NotStarted,
    /// The provider does not connect by TCP, or no thread could be started.
    Impossible,
    /// The answer is true if the connection was refused.
    Running(SocketAddr, Receiver<bool>),
}

impl TcpProbe {
    fn start(address: &[u8]) -> Self {
        let Some(address) = socket_address(address) else { return Self::Impossible };
        let (tell, answer) = channel();
        let thread = std::thread::Builder::new().name("fabricast-probe".to_owned());
        let ask = move || {
            let connected = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT);
            let _ = tell.send(connected.is_err_and(|e| e.kind() == IoKind::ConnectionRefused));
        };
        thread.spawn(ask).map_or(Self::Impossible, |_| Self::Running(address, answer))
    }
}

/// A `sockaddr_in` or `sockaddr_in6`, as a peer sent it.
fn socket_address(bytes: &[u8]) -> Option<SocketAddr> {
    let word = |at: usize| Some([*bytes.get(at)?, *bytes.get(at + 1)?]);
    let long = |at: usize| <[u8; 4]>::try_from(bytes.get(at..at + 4)?).ok();
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

impl Driver {
    /// Ends the meeting of peers at whose address nothing listens: they have ended, and would
    /// not answer before the deadline either.
    pub(super) fn check_tcp_probes(&mut self, now: Instant) {
        let connecting = self.links.iter().filter(|(_, link)| link.has_waiter());
        let connecting: Vec<_> = connecting.map(|(number, _)| *number).collect();
        for number in connecting {
            let is_unsent = self.is_sending(SessionKey::Link(number));
            let Some(link) = self.links.get_mut(&number) else { continue };
            let started = match &link.state {
                LinkState::Connecting { began, tcp_probe: TcpProbe::NotStarted, .. }
                    if is_unsent && now.saturating_duration_since(*began) >= START_AFTER =>
                {
                    match self.domain.capabilities().connects_by_tcp() {
                        true => TcpProbe::start(link.address()),
                        false => TcpProbe::Impossible,
                    }
                }
                LinkState::Connecting { tcp_probe: TcpProbe::Running(address, answer), .. }
                    if answer.try_recv() == Ok(true) =>
                {
                    let detail = format!(
                        "{address} refuses connections (ECONNREFUSED): its process has ended, or a \
                         firewall rejects them. Start it and take its new card"
                    );
                    let error = Error::new(CONNECT, ErrorKind::Closed, detail);
                    self.close_link(number, CloseReason::Lost, error);
                    continue;
                }
                _ => continue,
            };
            if let LinkState::Connecting { tcp_probe, .. } = &mut link.state {
                *tcp_probe = started;
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
    fn probe_tells_a_refused_connection_from_an_accepted_one() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let is_refused = || match TcpProbe::start(&bytes_of(address)) {
            TcpProbe::Running(_, answer) => answer.recv_timeout(2 * CONNECT_TIMEOUT).unwrap(),
            other => panic!("{other:?}"),
        };
        assert!(!is_refused());
        drop(listener);
        assert!(is_refused());
        assert!(matches!(TcpProbe::start(b""), TcpProbe::Impossible));
    }
}
