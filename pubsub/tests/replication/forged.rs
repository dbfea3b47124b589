//! Another process of the machine impersonates a peer towards a provider that does not verify it.

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use pubsub::replication::{Worker, WorkerOptions};

use super::connect_request::connect_request;
use super::support::{MemoryKind, Nodes, PublishedLog, TestSource, options};
use super::{KEY, lengths, receive, send};

/// Two seconds until the stall is detected, some round trips, and time for a busy machine.
const BOUND: Duration = Duration::from_secs(5);
const COUNT: u64 = 3000;

fn port(worker: &Worker) -> u16 {
    let address = worker.address();
    u16::from_be_bytes([address[2], address[3]])
}

/// Takes over the connection of one side by a forged connect request, while messages flow.
fn take_over_connection(at: u8) {
    let options = WorkerOptions { lanes: 1, ..options("=net") };
    let mut nodes = Nodes::start(2, &options);
    let log = PublishedLog::default();
    receive(&nodes, KEY, 1, MemoryKind::Host, &log);
    let source = TestSource::new(&lengths(&[64, 5000, 100_000]), MemoryKind::Host, 0, COUNT);
    let is_done = send(&nodes, KEY, source, &[1]);
    let mut forged = Vec::new();
    for part in 1..=3 {
        nodes.until("some messages", |_| log.len() as u64 >= part * COUNT / 5 || is_done());
        let (victim, other) = (nodes.of(at), nodes.of(1 - at));
        let address = ("127.0.0.1", port(victim));
        // The victim may have another endpoint in the meantime.
        if let Ok(mut stream) = TcpStream::connect(address) {
            stream.write_all(&connect_request(port(other))).unwrap();
            forged.push(stream);
        }
        let (before, start) = (log.len(), Instant::now());
        nodes.until("more messages", |_| log.len() > before + 20 || is_done());
        let took = start.elapsed();
        println!("connection of node {at} taken over: messages again after {took:?}");
        assert!(took < BOUND, "{took:?}");
    }
    nodes.until("all messages", |_| is_done());
    log.check(COUNT);
    assert!(nodes.failed.is_empty() && !forged.is_empty(), "{:?}", nodes.failed);
}

#[test]
fn reader_recovers_from_a_forged_connect_request() {
    take_over_connection(1);
}

#[test]
fn writer_recovers_from_a_forged_connect_request() {
    take_over_connection(0);
}
