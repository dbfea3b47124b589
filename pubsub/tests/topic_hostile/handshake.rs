//! Handshakes of genuine nodes, recorded to be replayed.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::frames;
use crate::topics::LONGEST;

/// How long the beginning of a session is recorded.
const RECORDED: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(10);

/// The hello of the node that listens there, with a claim behind it: all that a process needs to say
/// that it is this node.
pub fn hello_of(node: SocketAddr) -> Vec<u8> {
    let mut stream = TcpStream::connect_timeout(&node, LONGEST).expect("a node that listens");
    stream.set_read_timeout(Some(LONGEST)).expect("a timeout");
    let mut length = [0; 4];
    stream.read_exact(&mut length).expect("a hello");
    let mut hello = length.to_vec();
    hello.resize(4 + u32::from_le_bytes(length) as usize, 0);
    stream.read_exact(&mut hello[4..]).expect("a hello");
    frames::claim_as(&hello)
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
    assert!(!recorded.is_empty(), "the node said nothing");
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
