//! Non-blocking TCP sockets.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Shutdown, SockFlag, SockType, SockaddrStorage, bind, connect, shutdown, socket,
};

/// Begins to connect. The socket becomes writable when it has; then `take_error` gives the result.
///
/// A node with a listening address of its own connects from there, if possible: its peers see one
/// address, and the traffic stays on one network.
pub(super) fn start_connect(to: SocketAddr, own: Option<IpAddr>) -> io::Result<TcpStream> {
    let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let stream = TcpStream::from(socket(family, SockType::Stream, flags, None)?);
    let leads_there = |own: &IpAddr| {
        !own.is_unspecified()
            && own.is_ipv4() == to.is_ipv4()
            && own.is_loopback() == to.ip().is_loopback()
    };
    if let Some(own) = own.filter(leads_there) {
        match bind(stream.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(own, 0))) {
            // The machine does not have it any more: let the system choose.
            Ok(()) | Err(Errno::EADDRNOTAVAIL) => {}
            Err(error) => return Err(error.into()),
        }
    }
    match connect(stream.as_raw_fd(), &SockaddrStorage::from(to)) {
        Ok(()) | Err(Errno::EINPROGRESS) => Ok(stream),
        Err(error) => Err(error.into()),
    }
}

/// Returns true if this machine has an address, as far as can be determined. Connections from
/// removed addresses are stalled, and the system does not close them.
pub(crate) fn is_local_address(address: IpAddr) -> bool {
    let bound = UdpSocket::bind((address, 0));
    !bound.is_err_and(|error| error.kind() == ErrorKind::AddrNotAvailable)
}

/// Stops accepting connections, even if another process has the socket.
pub(super) fn stop_listening(listener: &TcpListener) {
    // It fails only if the socket does not listen.
    let _ = shutdown(listener.as_raw_fd(), Shutdown::Both);
}

pub(super) fn local_and_peer(stream: &TcpStream) -> io::Result<(SocketAddr, SocketAddr)> {
    let canonical = |address: SocketAddr| match address.ip().to_canonical() {
        // Unchanged: it has a scope.
        IpAddr::V6(_) => address,
        canonical => SocketAddr::new(canonical, address.port()),
    };
    Ok((canonical(stream.local_addr()?), canonical(stream.peer_addr()?)))
}

/// The result of an attempt to connect.
pub(super) fn connected(stream: &TcpStream) -> io::Result<(SocketAddr, SocketAddr)> {
    if let Some(error) = stream.take_error()? {
        return Err(error);
    }
    let (local_address, peer_address) = local_and_peer(stream)?;
    // Without a listener, a socket with a random port can connect to itself.
    if local_address == peer_address {
        return Err(Errno::ECONNREFUSED.into());
    }
    stream.set_nodelay(true)?;
    Ok((local_address, peer_address))
}

#[derive(Debug)]
pub(super) enum IoOutcome {
    Bytes(usize),
    WouldBlock,
    /// Closed, with the cause.
    Closed(String),
}

fn moved(result: io::Result<usize>) -> IoOutcome {
    match result {
        Ok(0) => IoOutcome::Closed("the peer closed the connection".to_owned()),
        Ok(count) => IoOutcome::Bytes(count),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            IoOutcome::WouldBlock
        }
        Err(error) => IoOutcome::Closed(error.to_string()),
    }
}

pub(super) fn read(mut stream: &TcpStream, buffer: &mut [u8]) -> IoOutcome {
    moved(stream.read(buffer))
}

/// `bytes` must not be empty.
pub(super) fn write(mut stream: &TcpStream, bytes: &[u8]) -> IoOutcome {
    moved(stream.write(bytes))
}
