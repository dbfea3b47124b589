//! TCP sockets that never block.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Shutdown, SockFlag, SockType, SockaddrStorage, bind, connect, shutdown, socket,
};

/// Begins to connect. It has when the socket can be written to, and then `take_error` tells
/// how it went.
///
/// Who listens at an address of its own leaves from there, too, if that leads anywhere: its
/// peers see one address, and the traffic keeps to one network.
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
            // The machine does not have it any more: from wherever it leads there now.
            Ok(()) | Err(Errno::EADDRNOTAVAIL) => {}
            Err(error) => return Err(error.into()),
        }
    }
    match connect(stream.as_raw_fd(), &SockaddrStorage::from(to)) {
        Ok(()) | Err(Errno::EINPROGRESS) => Ok(stream),
        Err(error) => Err(error.into()),
    }
}

/// Has this machine the address, as far as can be told? Connections from one that it does not have any
/// more move nothing, and the system does not end them.
pub(crate) fn is_local_address(address: IpAddr) -> bool {
    let bound = UdpSocket::bind((address, 0));
    !bound.is_err_and(|error| error.kind() == ErrorKind::AddrNotAvailable)
}

/// Nobody can connect any more, whoever else has the socket.
pub(super) fn stop_listening(listener: &TcpListener) {
    // It fails only if it does not listen.
    let _ = shutdown(listener.as_raw_fd(), Shutdown::Both);
}

/// Our end of a connection and the other.
pub(super) fn local_and_peer(stream: &TcpStream) -> io::Result<(SocketAddr, SocketAddr)> {
    let canonical = |address: SocketAddr| match address.ip().to_canonical() {
        // As it is: there is a scope beside the address.
        IpAddr::V6(_) => address,
        canonical => SocketAddr::new(canonical, address.port()),
    };
    Ok((canonical(stream.local_addr()?), canonical(stream.peer_addr()?)))
}

/// How an attempt to connect went.
pub(super) fn connected(stream: &TcpStream) -> io::Result<(SocketAddr, SocketAddr)> {
    if let Some(error) = stream.take_error()? {
        return Err(error);
    }
    let (local_address, peer_address) = local_and_peer(stream)?;
    // Where nobody listens, a port that was picked by chance can meet itself.
    if local_address == peer_address {
        return Err(Errno::ECONNREFUSED.into());
    }
    stream.set_nodelay(true)?;
    Ok((local_address, peer_address))
}

/// What a read or a write did.
#[derive(Debug)]
pub(super) enum IoOutcome {
    Bytes(usize),
    /// Not now.
    WouldBlock,
    /// Never again; and why.
    Closed(String),
}

fn moved(result: io::Result<usize>) -> IoOutcome {
    match result {
        Ok(0) => IoOutcome::Closed("the other side closed it".to_owned()),
        Ok(count) => IoOutcome::Bytes(count),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            IoOutcome::WouldBlock
        }
        Err(error) => IoOutcome::Closed(error.to_string()),
    }
}

pub(super) fn read(mut stream: &TcpStream, room: &mut [u8]) -> IoOutcome {
    moved(stream.read(room))
}

/// Not with nothing.
pub(super) fn write(mut stream: &TcpStream, bytes: &[u8]) -> IoOutcome {
    moved(stream.write(bytes))
}
