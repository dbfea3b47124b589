//! Another process of the machine pretends to be a peer, at a provider that believes that.

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use pubsub::replication::{Worker, WorkerOptions};

use super::connect_request::connect_request;
use super::support::{MemoryKind, Nodes, Published, PublishedLog, options};
use super::{KEY, lengths, receive, send};

/// Two seconds until it is noticed, some round trips, and what a busy machine needs.
const BOUND: Duration = Duration::from_secs(5);
const COUNT: u64 = 3000;

fn port(worker: &Worker) -> u16 {
    let address = worker.address();
    u16::from_be_bytes([address[2], address[3]])
}

/// Takes the connection that one side has with the other in its place, in the middle of everything.
fn a_connection_is_taken(at: u8) {
    let options = WorkerOptions { lanes: 1, ..options("=net") };
    let mut nodes = Nodes::start(2, &options);
    let log = PublishedLog::default();
    receive(&nodes, KEY, 1, MemoryKind::Host, &log);
    let source = Published::new(&lengths(&[64, 5000, 100_000]), MemoryKind::Host, 0, COUNT);
    let is_done = send(&nodes, KEY, source, &[1]);
    let mut forged = Vec::new();
    for part in 1..=3 {
        nodes.until("some are there", |_| log.len() as u64 >= part * COUNT / 5 || is_done());
        let (victim, other) = (nodes.of(at), nodes.of(1 - at));
        let address = ("127.0.0.1", port(victim));
        // It may have another endpoint by now.
        if let Ok(mut stream) = TcpStream::connect(address) {
            stream.write_all(&connect_request(port(other))).unwrap();
            forged.push(stream);
        }
        let (came, began) = (log.len(), Instant::now());
        nodes.until("messages come again", |_| log.len() > came + 20 || is_done());
        let took = began.elapsed();
        println!("the connection of {at} was taken: messages again after {took:?}");
        assert!(took < BOUND, "{took:?}");
    }
    nodes.until("all are delivered", |_| is_done());
    log.check(COUNT);
    assert!(nodes.failed.is_empty() && !forged.is_empty(), "{:?}", nodes.failed);
}

#[test]
fn a_reader_whose_connection_is_taken_gets_another_one() {
    a_connection_is_taken(1);
}

#[test]
fn a_writer_whose_connection_is_taken_gets_another_one() {
    a_connection_is_taken(0);
}
