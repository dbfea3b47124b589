//! Idle connections to an endpoint's port.
//!
//! Providers over TCP accept every connection to their port and keep an idle one for ever: a
//! thousand of them leave a process without file descriptors. With `TCP_DEFER_ACCEPT` the
//! kernel holds a connection back until its first byte. A peer's provider sends as soon as it
//! is connected.

use std::os::fd::RawFd;

use crate::Address;

/// How long the kernel holds back an idle connection, in seconds.
const DEFER_ACCEPT_SECONDS: libc::c_int = 3600;

/// Sets `TCP_DEFER_ACCEPT` on the sockets of this process that listen at this address, if they
/// are TCP sockets.
pub(super) fn defer_accept(address: &Address) {
    let family = address.0.first_chunk().map(|bytes| i32::from(u16::from_ne_bytes(*bytes)));
    if !matches!(family, Some(libc::AF_INET | libc::AF_INET6)) {
        return;
    }
    let Ok(descriptors) = std::fs::read_dir("/proc/self/fd") else { return };
    let numbers = descriptors.flatten().filter_map(|it| it.file_name().to_str()?.parse().ok());
    for descriptor in numbers.filter(|descriptor| listens_at(*descriptor, address)) {
        // SAFETY: the option is an `int`. If the descriptor number has been reused, no harm is
        // done: only a listening TCP socket uses the option.
        let code = unsafe {
            libc::setsockopt(
                descriptor,
                libc::IPPROTO_TCP,
                libc::TCP_DEFER_ACCEPT,
                std::ptr::from_ref(&DEFER_ACCEPT_SECONDS).cast(),
                size_of_val(&DEFER_ACCEPT_SECONDS) as libc::socklen_t,
            )
        };
        if code != 0 {
            let error = std::io::Error::last_os_error();
            tracing::debug!(%error, "setting TCP_DEFER_ACCEPT on the endpoint socket failed");
        }
    }
}

/// Is it a socket that listens at this address?
fn listens_at(descriptor: RawFd, address: &Address) -> bool {
    let (mut listens, mut length): (libc::c_int, _) = (0, size_of::<libc::c_int>() as u32);
    // SAFETY: space for an `int`, whose length is passed.
    let code = unsafe {
        libc::getsockopt(
            descriptor,
            libc::SOL_SOCKET,
            libc::SO_ACCEPTCONN,
            (&raw mut listens).cast(),
            &raw mut length,
        )
    };
    if code != 0 || listens == 0 {
        return false;
    }
    let mut name = [0_u8; 128];
    let mut length = name.len() as libc::socklen_t;
    // SAFETY: space for the longest address, whose length is passed.
    let code = unsafe { libc::getsockname(descriptor, name.as_mut_ptr().cast(), &raw mut length) };
    // Family, port and address; padding or scope follow.
    let compared = if address.0.len() < 28 { 8 } else { 24 };
    code == 0
        && name
            .get(..compared)
            .is_some_and(|name| address.0.get(..compared).is_some_and(|ours| ours == name))
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;
    use std::time::{Duration, Instant};

    use crate::*;

    #[test]
    fn idle_connections_take_no_file_descriptors() {
        for provider in ["net", "tcp;ofi_rxm", "tcp"] {
            let query = Query::new(EndpointKind::Rdm).source("127.0.0.1").provider(provider);
            let Ok(offer) = query.first() else { continue };
            let domain = Domain::open(&offer).unwrap();
            let addresses = AddressVector::open(&domain).unwrap();
            let mut queue = CompletionQueue::open(&domain).unwrap();
            let builder = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue);
            let endpoint = builder.open().unwrap();
            let address = endpoint.address().unwrap().0;
            let port = u16::from_be_bytes([address[2], address[3]]);
            let silent: Vec<_> =
                (0..40).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
            let count = || std::fs::read_dir("/proc/self/fd").unwrap().count();
            let before = count();
            let end = Instant::now() + Duration::from_millis(300);
            while Instant::now() < end {
                assert!(queue.poll().is_none());
            }
            assert!(count() <= before + 2, "{provider}: {} and {before} descriptors", count());
            drop((silent, endpoint));
        }
    }
}
