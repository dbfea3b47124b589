//! Handshakes of genuine nodes, recorded to be replayed.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::topics::LONGEST;

/// How long the beginning of a session is recorded.
const RECORDED: Duration = Duration::from_millis(500);
const LOOK: Duration = Duration::from_millis(10);
/// Where the identity of a node stands in its hello: behind length, magic and version.
const IDENTITY: std::ops::Range<usize> = 14..30;

/// The identity in a hello. Of two nodes the one with the smaller identity claims sessions, and the
/// other accepts them.
pub fn identity(hello: &[u8]) -> &[u8] {
    &hello[IDENTITY]
}

/// The hello of the node that listens there, which it says to each connection.
pub fn hello_of(node: SocketAddr) -> Vec<u8> {
    let mut stream = TcpStream::connect_timeout(&node, LONGEST).expect("a node that listens");
    stream.set_read_timeout(Some(LONGEST)).expect("a timeout");
    let mut length = [0; 4];
    stream.read_exact(&mut length).expect("a hello");
    let mut hello = length.to_vec();
    hello.resize(4 + u32::from_le_bytes(length) as usize, 0);
    stream.read_exact(&mut hello[4..]).expect("a hello");
    hello
}

/// What a node that connects to the listener says at the beginning of a session with the node at
/// that address. Both get what the other says.
pub fn record(listener: &TcpListener, node: SocketAddr) -> Vec<u8> {
    let mut caller = accept(listener);
    let mut called = TcpStream::connect_timeout(&node, LONGEST).expect("a node that listens");
    for stream in [&caller, &called] {
        stream.set_read_timeout(Some(LOOK)).expect("a timeout");
    }
    let mut recorded = Vec::new();
    let end = Instant::now() + RECORDED;
    while Instant::now() < end {
        recorded.extend(pass(&mut caller, &mut called));
        pass(&mut called, &mut caller);
    }
    assert!(recorded.len() > IDENTITY.end, "the node did not say hello: {recorded:?}");
    recorded
}

fn accept(listener: &TcpListener) -> TcpStream {
    listener.set_nonblocking(true).expect("a listener");
    let end = Instant::now() + LONGEST;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).expect("a stream");
                return stream;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => panic!("accept: {error}"),
        }
        assert!(Instant::now() < end, "no node connects");
        std::thread::sleep(LOOK);
    }
}

/// Passes on what is there.
fn pass(from: &mut TcpStream, to: &mut TcpStream) -> Vec<u8> {
    let mut bytes = vec![0; 64 << 10];
    match from.read(&mut bytes) {
        Ok(length) => bytes.truncate(length),
        Err(_) => bytes.clear(),
    }
    // The other side may have ended the session.
    let _ = to.write_all(&bytes);
    bytes
}
