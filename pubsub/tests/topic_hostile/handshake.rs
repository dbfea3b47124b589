//! Handshakes of genuine nodes, recorded for a replay.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::topics::TIMEOUT;

/// Duration of the recording of a session.
const RECORDED: Duration = Duration::from_millis(500);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Position of the node id in a hello: after length, magic and version.
const NODE_ID: std::ops::Range<usize> = 14..30;

/// The node id in a hello. Of two nodes the one with the smaller id is the claimant of sessions, and
/// the other is the acceptor.
pub fn node_id(hello: &[u8]) -> &[u8] {
    &hello[NODE_ID]
}

/// The hello that the node at an address sends to each connection.
pub fn hello_of(node: SocketAddr) -> Vec<u8> {
    let mut stream = TcpStream::connect_timeout(&node, TIMEOUT).expect("connect to the node");
    stream.set_read_timeout(Some(TIMEOUT)).expect("set the read timeout");
    let mut length = [0; 4];
    stream.read_exact(&mut length).expect("read the length of the hello");
    let mut hello = length.to_vec();
    hello.resize(4 + u32::from_le_bytes(length) as usize, 0);
    stream.read_exact(&mut hello[4..]).expect("read the hello");
    hello
}

/// Forwards a session between a node that connects to the listener and the node at an address, and
/// returns the first bytes of the connecting node.
pub fn record(listener: &TcpListener, node: SocketAddr) -> Vec<u8> {
    let mut client = accept(listener);
    let mut server = TcpStream::connect_timeout(&node, TIMEOUT).expect("connect to the node");
    for stream in [&client, &server] {
        stream.set_read_timeout(Some(POLL_INTERVAL)).expect("set the read timeout");
    }
    let mut recorded = Vec::new();
    let end = Instant::now() + RECORDED;
    while Instant::now() < end {
        recorded.extend(forward(&mut client, &mut server));
        forward(&mut server, &mut client);
    }
    assert!(recorded.len() > NODE_ID.end, "the node sent no hello: {recorded:?}");
    recorded
}

fn accept(listener: &TcpListener) -> TcpStream {
    listener.set_nonblocking(true).expect("set the listener non-blocking");
    let end = Instant::now() + TIMEOUT;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).expect("set the stream blocking");
                return stream;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => panic!("accept: {error}"),
        }
        assert!(Instant::now() < end, "timeout: no node connects");
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Forwards the available bytes.
fn forward(source: &mut TcpStream, target: &mut TcpStream) -> Vec<u8> {
    let mut bytes = vec![0; 64 << 10];
    match source.read(&mut bytes) {
        Ok(length) => bytes.truncate(length),
        Err(_) => bytes.clear(),
    }
    // The target may have closed the session.
    let _ = target.write_all(&bytes);
    bytes
}
