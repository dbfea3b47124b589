//! Rings between two programs, established by listening and connecting.
#![allow(missing_docs)]

use std::fmt::Display;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::process::Stdio;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fabric::ring::{self, RingListener, RingReader, RingSetup, RingWriter};
use fabric::{EndpointKind, Error, ErrorKind, Query, Result};
use testkit::children::{self, Child};

const TIMEOUT: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(100);
/// libfabric 1.x calls the `tcp` of 2.x `net`.
const PROVIDERS: [&str; 3] = ["net", "tcp", "tcp;ofi_rxm"];

testkit::child_entry!(|words| {
    let [role, address] = words else { panic!("{words:?}") };
    let result = match *role {
        "write" => write_and_wait(address),
        "read" => read_and_wait(address),
        "read on" => read_to_the_end(address),
        other => panic!("{other}"),
    };
    result.unwrap();
});

/// In a child: sends three messages and makes no further calls.
fn write_and_wait(address: &str) -> Result<()> {
    let mut writer = ring::connect(address, TIMEOUT)?;
    writer.send(b"first", TIMEOUT)?;
    writer.send(&[3; 100_000], TIMEOUT)?;
    writer.flush(TIMEOUT)?;
    writer.send(b"last", TIMEOUT)?;
    children::say("sent");
    children::wait_for_end_of_input();
    Ok(())
}

/// In a child: listens, prints the address, and reads one message.
fn read_and_wait(address: &str) -> Result<()> {
    let mut listener = ring::listen(address)?;
    children::say(&listener.address().to_string());
    let mut reader = listener.accept(TIMEOUT)?;
    assert_eq!(reader.receive(TIMEOUT)?, b"first");
    children::say("read");
    children::wait_for_end_of_input();
    Ok(())
}

/// In a child: the same, then reads until an error and prints its kind.
fn read_to_the_end(address: &str) -> Result<()> {
    let mut listener = ring::listen(address)?;
    children::say(&listener.address().to_string());
    let mut reader = listener.accept(TIMEOUT)?;
    assert_eq!(reader.receive(TIMEOUT)?, b"first");
    children::say("read");
    let error = reader.receive(TIMEOUT).unwrap_err();
    children::say(&format!("{:?}", error.kind()));
    Ok(())
}

fn child(role: &str, address: &str) -> Child {
    Child::start(children::respawn([role, address]).stdout(Stdio::piped()))
}

/// Providers of the list that are present.
fn providers() -> Vec<&'static str> {
    let offers = Query::new(EndpointKind::Rdm).source("127.0.0.1").offers().unwrap();
    let is_here = |name: &&str| offers.iter().any(|it| it.capabilities().provider == *name);
    let found: Vec<_> = PROVIDERS.into_iter().filter(is_here).collect();
    assert!(!found.is_empty(), "none of {PROVIDERS:?} is present");
    found
}

fn setup_of(provider: &str) -> RingSetup {
    RingSetup::new().policy(format!("={provider}").parse().unwrap())
}

/// Both sides of a ring, in one process.
fn pair_of(setup: &RingSetup) -> (RingReader, RingWriter) {
    let listener = setup.listen("127.0.0.1:0").unwrap();
    pair_at(setup, listener)
}

fn pair_at(setup: &RingSetup, mut listener: RingListener) -> (RingReader, RingWriter) {
    let connecting = connecting(setup, listener.address());
    let reader = listener.accept(TIMEOUT).unwrap();
    (reader, connecting.join().unwrap().unwrap())
}

fn connecting(setup: &RingSetup, address: SocketAddr) -> JoinHandle<Result<RingWriter>> {
    let setup = setup.clone();
    std::thread::spawn(move || setup.connect(address, TIMEOUT))
}

fn pattern(number: usize, length: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 7 + number) as u8).collect()
}

#[track_caller]
fn assert_kind<T>(result: Result<T>, kind: ErrorKind) -> Error {
    match result {
        Ok(_) => panic!("{kind:?} was expected"),
        Err(error) => {
            assert_eq!(error.kind(), kind, "{error}");
            error
        }
    }
}

#[test]
fn messages_of_all_lengths_arrive_complete_and_in_order() {
    const LENGTHS: [usize; 9] = [0, 1, 64, 257, 5000, 64 << 10, (64 << 10) + 1, 1 << 20, 3];
    for provider in providers() {
        let setup = setup_of(provider).capacity(256 << 10);
        let (mut reader, mut writer) = pair_of(&setup);
        assert_eq!((reader.provider(), writer.provider()), (provider, provider));
        let writing = std::thread::spawn(move || {
            for round in 0..20 {
                for (number, length) in LENGTHS.into_iter().enumerate() {
                    writer.send(&pattern(round + number, length), TIMEOUT)?;
                }
            }
            writer.close(TIMEOUT)
        });
        for round in 0..20 {
            for (number, length) in LENGTHS.into_iter().enumerate() {
                let message = reader.receive(TIMEOUT).unwrap();
                assert!(message == pattern(round + number, length), "{provider}: {length} bytes");
            }
        }
        assert_kind(reader.receive(TIMEOUT), ErrorKind::Closed);
        let statistics = writing.join().unwrap().unwrap();
        assert_eq!(statistics.messages, 20 * LENGTHS.len() as u64);
    }
}

#[test]
fn sent_message_arrives_while_its_writer_makes_no_calls() {
    for provider in providers() {
        let (mut reader, mut writer) = pair_of(&setup_of(provider));
        for length in [64, 5000, 1 << 20] {
            writer.send(&pattern(1, length), TIMEOUT).unwrap();
            // Only the progress thread drives the writer's endpoint now.
            assert!(reader.receive(TIMEOUT).unwrap() == pattern(1, length), "{provider}: {length}");
        }
        writer.close(TIMEOUT).unwrap();
    }
}

#[test]
fn writer_continues_while_its_reader_makes_no_calls() {
    for provider in providers() {
        let setup = setup_of(provider).capacity(128 << 10);
        let (mut reader, mut writer) = pair_of(&setup);
        // Fills the ring: the reader has not made a call yet.
        writer.send(&pattern(0, 60_000), TIMEOUT).unwrap();
        writer.send(&pattern(1, 60_000), TIMEOUT).unwrap();
        assert_kind(writer.send(&pattern(2, 60_000), SHORT), ErrorKind::DeadlineExceeded);
        let views: Vec<_> = (0..2).map(|_| reader.receive_chunk(TIMEOUT).unwrap()).collect();
        assert!(views.iter().all(ring::ChunkView::is_last));
        // Long enough for the thread to sleep.
        std::thread::sleep(SHORT);
        drop(views);
        // The reader's thread returns the credit.
        writer.send(&pattern(2, 60_000), TIMEOUT).unwrap();
        assert!(reader.receive(TIMEOUT).unwrap() == pattern(2, 60_000), "{provider}");
        writer.close(TIMEOUT).unwrap();
    }
}

#[test]
fn message_past_its_deadline_continues_when_sent_again() {
    let (mut reader, mut writer) = pair_of(&RingSetup::new().capacity(64 << 10));
    let long = pattern(5, 300_000);
    let error = assert_kind(writer.send(&long, SHORT), ErrorKind::DeadlineExceeded);
    assert!(error.to_string().contains("of 300000 bytes were written"), "{error}");
    let error = assert_kind(writer.send(b"another", TIMEOUT), ErrorKind::InvalidArgument);
    assert!(error.to_string().contains("Send that message again first"), "{error}");
    assert_kind(writer.flush(TIMEOUT), ErrorKind::InvalidArgument);

    // The reader continues the message after a deadline, too.
    assert_kind(reader.receive(SHORT), ErrorKind::DeadlineExceeded);
    assert_kind(reader.receive_chunk(SHORT), ErrorKind::InvalidArgument);
    let writing = std::thread::spawn(move || {
        writer.send(&pattern(5, 300_000), TIMEOUT)?;
        writer.send(b"another", TIMEOUT)?;
        writer.close(TIMEOUT)
    });
    assert!(reader.receive(TIMEOUT).unwrap() == long);
    assert_eq!(reader.receive(TIMEOUT).unwrap(), b"another");
    assert_kind(reader.receive(TIMEOUT), ErrorKind::Closed);
    writing.join().unwrap().unwrap();
}

#[test]
fn message_longer_than_the_limit_is_refused() {
    let (mut reader, mut writer) = pair_of(&RingSetup::new().largest(1000));
    let error = assert_kind(writer.send(&[0; 1001], TIMEOUT), ErrorKind::Truncated);
    assert!(error.to_string().contains("the reader takes at most 1000"), "{error}");
    writer.send(&[1; 1000], TIMEOUT).unwrap();
    assert_eq!(reader.receive(TIMEOUT).unwrap(), [1; 1000]);
}

#[test]
fn closed_reader_ends_its_writer() {
    for provider in providers() {
        let (mut reader, mut writer) = pair_of(&setup_of(provider));
        writer.send(b"read", TIMEOUT).unwrap();
        writer.send(b"not read", TIMEOUT).unwrap();
        assert_eq!(reader.receive(TIMEOUT).unwrap(), b"read");
        let statistics = reader.close(TIMEOUT).unwrap();
        assert_eq!(statistics.messages, 1, "{provider}");
        let end = Instant::now() + TIMEOUT;
        let error = loop {
            match writer.send(b"more", TIMEOUT) {
                Ok(()) => assert!(Instant::now() < end, "{provider}"),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), ErrorKind::Closed, "{provider}: {error}");
    }
}

#[test]
fn killed_writer_is_reported_after_its_last_message() {
    let mut listener = ring::listen("127.0.0.1:0").unwrap();
    let mut writer = child("write", &listener.address().to_string());
    let mut reader = listener.accept(TIMEOUT).unwrap();
    assert_eq!(reader.receive(TIMEOUT).unwrap(), b"first");
    assert_eq!(reader.receive(TIMEOUT).unwrap(), [3; 100_000]);
    assert_eq!(writer.line(TIMEOUT).as_deref(), Some("sent"));
    // Time for "last" to arrive.
    std::thread::sleep(Duration::from_millis(200));
    writer.kill();
    let before = Instant::now();
    assert_eq!(reader.receive(TIMEOUT).unwrap(), b"last");
    assert_kind(reader.receive(TIMEOUT), ErrorKind::ConnectionLost);
    assert!(before.elapsed() < Duration::from_secs(5), "{:?}", before.elapsed());
    assert_kind(reader.receive(TIMEOUT), ErrorKind::ConnectionLost);
}

/// Processor time of a process, all its threads together.
fn processor_time(process: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let behind_name = stat.rsplit(')').next().unwrap();
    let ticks =
        behind_name.split_whitespace().skip(11).take(2).map(|it| it.parse::<u64>().unwrap());
    // USER_HZ is 100 on all supported machines.
    Duration::from_millis(10 * ticks.sum::<u64>())
}

#[test]
fn idle_writer_uses_little_cpu() {
    let mut listener = ring::listen("127.0.0.1:0").unwrap();
    let mut writer = child("write", &listener.address().to_string());
    let mut reader = listener.accept(TIMEOUT).unwrap();
    for _ in 0..3 {
        reader.receive(TIMEOUT).unwrap();
    }
    assert_eq!(writer.line(TIMEOUT).as_deref(), Some("sent"));
    std::thread::sleep(Duration::from_millis(500));
    let before = processor_time(writer.id());
    std::thread::sleep(Duration::from_secs(2));
    let taken = processor_time(writer.id()) - before;
    assert!(taken <= Duration::from_millis(100), "{taken:?} of 2 s");
}

#[test]
fn dropped_writer_is_reported_lost_not_closed() {
    let (mut reader, mut writer) = pair_of(&RingSetup::new());
    writer.send(b"message", TIMEOUT).unwrap();
    assert_eq!(reader.receive(TIMEOUT).unwrap(), b"message");
    drop(writer);
    assert_kind(reader.receive(TIMEOUT), ErrorKind::ConnectionLost);
    reader.close(TIMEOUT).unwrap();
}

#[test]
fn killed_reader_ends_its_writer() {
    let mut reader = child("read", "127.0.0.1:0");
    let address = reader.line(TIMEOUT).unwrap();
    let mut writer = ring::connect(&address, TIMEOUT).unwrap();
    writer.send(b"first", TIMEOUT).unwrap();
    assert_eq!(reader.line(TIMEOUT).as_deref(), Some("read"));
    writer.send(b"not read", TIMEOUT).unwrap();
    reader.kill();
    let before = Instant::now();
    let message = vec![1; 1 << 20];
    let error = loop {
        match writer.send(&message, TIMEOUT) {
            Ok(()) => assert!(before.elapsed() < TIMEOUT),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::ConnectionLost, "{error}");
    assert!(before.elapsed() < Duration::from_secs(5), "{:?}", before.elapsed());
    assert!(writer.close(TIMEOUT).is_err());
}

#[test]
fn writer_closes_in_time_after_its_reader_was_killed() {
    for provider in providers() {
        let mut reader = child("read", "127.0.0.1:0");
        let address = reader.line(TIMEOUT).unwrap();
        let mut writer = setup_of(provider).connect(&address, TIMEOUT).unwrap();
        writer.send(b"first", TIMEOUT).unwrap();
        assert_eq!(reader.line(TIMEOUT).as_deref(), Some("read"));
        // Everything was read: only the end notice is missing.
        writer.flush(TIMEOUT).unwrap();
        reader.kill();
        let before = Instant::now();
        let statistics = writer.close(TIMEOUT).unwrap();
        assert_eq!(statistics.messages, 1, "{provider}");
        assert!(before.elapsed() < Duration::from_secs(5), "{provider}: {:?}", before.elapsed());
    }
}

#[test]
fn writer_closes_in_time_while_its_reader_is_stopped() {
    let mut reader = child("read on", "127.0.0.1:0");
    let address = reader.line(TIMEOUT).unwrap();
    let mut writer = ring::connect(&address, TIMEOUT).unwrap();
    writer.send(b"first", TIMEOUT).unwrap();
    assert_eq!(reader.line(TIMEOUT).as_deref(), Some("read"));
    writer.flush(TIMEOUT).unwrap();
    reader.stop(TIMEOUT);
    let before = Instant::now();
    let error = assert_kind(writer.close(SHORT), ErrorKind::DeadlineExceeded);
    assert!(error.to_string().contains("everything was read"), "{error}");
    assert!(before.elapsed() < Duration::from_secs(1), "{:?}", before.elapsed());
    reader.resume();
    let seen = reader.line(TIMEOUT).unwrap();
    assert!(["Closed", "ConnectionLost"].contains(&seen.as_str()), "{seen}");
    reader.finish(TIMEOUT);
}

#[test]
fn foreign_connections_do_not_delay_a_writer() {
    let listener = ring::listen("127.0.0.1:0").unwrap();
    let address = listener.address();
    // More than concurrent handshakes, and all of them silent.
    let mut silent: Vec<_> = (0..20).map(|_| TcpStream::connect(address).unwrap()).collect();
    let garbage = [&b"GET / HTTP/1.1\r\n\r\n"[..], b"FcRn\xff\xff\xff\xff", b"FcRn\x01\0\0\0\x09"];
    let mut malformed: Vec<_> = garbage
        .into_iter()
        .map(|bytes| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(bytes).unwrap();
            stream
        })
        .collect();
    let before = Instant::now();
    let (mut reader, mut writer) = pair_at(&RingSetup::new(), listener);
    assert!(before.elapsed() < Duration::from_secs(5), "{:?}", before.elapsed());
    writer.send(b"through", TIMEOUT).unwrap();
    assert_eq!(reader.receive(TIMEOUT).unwrap(), b"through");
    for stream in &mut malformed {
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let mut answer = Vec::new();
        // Refused in a frame and closed; or reset, where not all bytes were read.
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty() || answer.starts_with(b"FcRn"), "{answer:?}");
    }
    // The first one was evicted, with a reason.
    silent[0].set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut answer = Vec::new();
    silent[0].read_to_end(&mut answer).unwrap();
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.contains("no handshake frame for 1s, while connections waited"), "{answer}");
}

#[test]
fn writer_is_accepted_before_later_silent_connections() {
    let mut listener = ring::listen("127.0.0.1:0").unwrap();
    let address = listener.address();
    let connecting = connecting(&RingSetup::new(), address);
    // So that the writer is first.
    std::thread::sleep(SHORT);
    let silent: Vec<_> = (0..20).map(|_| TcpStream::connect(address).unwrap()).collect();
    let before = Instant::now();
    let mut reader = listener.accept(TIMEOUT).unwrap();
    assert!(before.elapsed() < Duration::from_secs(5), "{:?}", before.elapsed());
    let mut writer = connecting.join().unwrap().unwrap();
    writer.send(b"through", TIMEOUT).unwrap();
    assert_eq!(reader.receive(TIMEOUT).unwrap(), b"through");
    drop(silent);
}

#[test]
fn more_writers_than_concurrent_handshakes_get_rings() {
    const WRITERS: u8 = 32;
    let mut listener = ring::listen("127.0.0.1:0").unwrap();
    let address = listener.address();
    let writers: Vec<_> = (0..WRITERS)
        .map(|number| {
            std::thread::spawn(move || {
                let mut writer = ring::connect(address, TIMEOUT)?;
                writer.send(&[number], TIMEOUT)?;
                writer.close(TIMEOUT)
            })
        })
        .collect();
    // By then all of them are in the system's backlog.
    std::thread::sleep(Duration::from_millis(500));
    let mut got: Vec<_> = (0..WRITERS)
        .map(|_| {
            let mut reader = listener.accept(TIMEOUT).unwrap();
            let message = reader.receive(TIMEOUT).unwrap();
            assert_kind(reader.receive(TIMEOUT), ErrorKind::Closed);
            message[0]
        })
        .collect();
    got.sort_unstable();
    assert!(got.into_iter().eq(0..WRITERS));
    for writer in writers {
        writer.join().unwrap().unwrap();
    }
}

#[test]
fn several_writers_get_a_ring_each() {
    let mut listener = ring::listen("127.0.0.1:0").unwrap();
    let address = listener.address();
    let writers: Vec<_> = (0..3_u8)
        .map(|number| {
            std::thread::spawn(move || {
                let mut writer = ring::connect(address, TIMEOUT)?;
                writer.send(&[number; 100], TIMEOUT)?;
                writer.close(TIMEOUT)
            })
        })
        .collect();
    let mut readers: Vec<_> = (0..3).map(|_| listener.accept(TIMEOUT).unwrap()).collect();
    let mut got: Vec<_> = readers.iter_mut().map(|it| it.receive(TIMEOUT).unwrap()[0]).collect();
    got.sort_unstable();
    assert_eq!(got, [0, 1, 2]);
    for writer in writers {
        writer.join().unwrap().unwrap();
    }
}

#[test]
fn addresses_beyond_loopback_need_consent() {
    for address in ["0.0.0.0:0", "[::]:0"] {
        let error = assert_kind(ring::listen(address), ErrorKind::InvalidArgument);
        for part in [address, "not authenticated", "RingSetup::insecure"] {
            assert!(error.to_string().contains(part), "{error}");
        }
    }
    let error = assert_kind(ring::connect("192.0.2.1:7000", SHORT), ErrorKind::InvalidArgument);
    assert!(error.to_string().contains("RingSetup::insecure"), "{error}");
    for address in ["7000", "nonsense", "127.0.0.1:70000"] {
        let error = assert_kind(ring::listen(address), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains("host:port"), "{error}");
    }
    let setup = RingSetup::new().capacity(1000);
    assert_kind(setup.listen("127.0.0.1:0"), ErrorKind::InvalidArgument);
    let listener = ring::listen("127.0.0.1:0").unwrap();
    assert_kind(ring::listen(listener.address()), ErrorKind::Busy);
}

#[test]
fn writer_may_connect_before_its_reader_listens() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let connecting = connecting(&RingSetup::new(), address);
    std::thread::sleep(SHORT);
    let mut listener = ring::listen(address).unwrap();
    let mut reader = listener.accept(TIMEOUT).unwrap();
    let mut writer = connecting.join().unwrap().unwrap();
    writer.send(b"early", TIMEOUT).unwrap();
    assert_eq!(reader.receive(TIMEOUT).unwrap(), b"early");
}

#[test]
fn failed_connect_ends_at_its_deadline() {
    let unused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    assert_kind(ring::connect(unused, SHORT), ErrorKind::ConnectionRefused);
    // A listener that accepts nothing.
    let mut listener = ring::listen("127.0.0.1:0").unwrap();
    let error = ring::connect(listener.address(), Duration::from_millis(500));
    let error = assert_kind(error, ErrorKind::DeadlineExceeded);
    assert!(error.to_string().contains("may not accept"), "{error}");
    assert_kind(listener.accept(SHORT), ErrorKind::DeadlineExceeded);
    // A service of another kind.
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap();
    let serving = std::thread::spawn(move || {
        let (mut stream, _) = other.accept().unwrap();
        stream.write_all(b"220 mail.example ESMTP\r\n").unwrap();
        let _ = stream.read(&mut [0; 1024]);
    });
    assert_kind(ring::connect(address, TIMEOUT), ErrorKind::MalformedDescriptor);
    serving.join().unwrap();
}

/// The addresses of a name.
struct Addresses(Vec<SocketAddr>);

impl Display for Addresses {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("several.example:7000")
    }
}

impl ToSocketAddrs for Addresses {
    type Iter = std::vec::IntoIter<SocketAddr>;

    fn to_socket_addrs(&self) -> std::io::Result<Self::Iter> {
        Ok(self.0.clone().into_iter())
    }
}

#[test]
fn writer_retries_while_one_of_several_addresses_refuses() {
    // Of an address of this process alone: the ports of 127.0.0.1 are soon used by other tests.
    let [.., high, low] = std::process::id().to_be_bytes();
    let own = std::net::Ipv4Addr::new(127, 1, high, low);
    let free = || TcpListener::bind((own, 0)).unwrap().local_addr().unwrap();
    // Cannot be connected to anywhere.
    let unreachable: SocketAddr = "255.255.255.255:7000".parse().unwrap();
    let setup = RingSetup::new().insecure();
    let error = setup.connect(Addresses(vec![unreachable]), TIMEOUT);
    let error = assert_kind(error, ErrorKind::ConnectionLost);
    assert!(error.to_string().contains("unreachable"), "{error}");

    for index in 0..2 {
        let address = free();
        let mut both = vec![unreachable];
        both.insert(index, address);
        let error = setup.connect(Addresses(both.clone()), SHORT);
        let error = assert_kind(error, ErrorKind::ConnectionRefused);
        assert!(error.to_string().contains("nothing listens"), "{error}");

        let setup = setup.clone();
        let connecting = std::thread::spawn(move || setup.connect(Addresses(both), TIMEOUT));
        std::thread::sleep(SHORT);
        let mut listener = ring::listen(address).unwrap();
        listener.accept(TIMEOUT).unwrap();
        connecting.join().unwrap().unwrap();
    }
}

#[test]
fn unanswered_address_leaves_time_for_the_next_one() {
    // With a full backlog the system answers no further connection.
    let full = TcpListener::bind("127.0.0.1:0").unwrap();
    nix::sys::socket::listen(&full, nix::sys::socket::Backlog::new(1).unwrap()).unwrap();
    let address = full.local_addr().unwrap();
    let mut waiting = Vec::new();
    let error = loop {
        assert!(waiting.len() < 100, "the backlog does not fill");
        match TcpStream::connect_timeout(&address, Duration::from_millis(200)) {
            Ok(stream) => waiting.push(stream),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "{error}");
    let error = assert_kind(ring::connect(address, SHORT), ErrorKind::DeadlineExceeded);
    assert!(error.to_string().contains("does not answer"), "{error}");

    let mut listener = ring::listen("127.0.0.1:0").unwrap();
    let both = Addresses(vec![address, listener.address()]);
    let connecting = std::thread::spawn(move || ring::connect(both, Duration::from_secs(4)));
    listener.accept(TIMEOUT).unwrap();
    connecting.join().unwrap().unwrap();
}

#[test]
fn steadily_arriving_message_does_not_extend_the_deadline() {
    let (mut reader, mut writer) = pair_of(&RingSetup::new());
    let message = vec![7; 1 << 20];
    let sent = message.clone();
    let writing = std::thread::spawn(move || {
        writer.send(&sent, TIMEOUT).unwrap();
        writer.close(TIMEOUT).unwrap();
    });
    let (end, mut calls) = (Instant::now() + TIMEOUT, 1);
    let received = loop {
        match reader.receive(Duration::ZERO) {
            Ok(received) => break received,
            Err(error) => assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}"),
        }
        assert!(Instant::now() < end);
        calls += 1;
    };
    // A chunk has 64 KiB.
    assert!(received == message && calls >= 16, "{calls} calls");
    assert_kind(reader.receive(TIMEOUT), ErrorKind::Closed);
    writing.join().unwrap();
}

#[test]
fn both_sides_report_that_they_share_no_provider() {
    let found = providers();
    let [first, .., last] = found[..] else { testkit::skip!("only {found:?} is present") };
    // A policy for a name includes the layers above it.
    let only = |one: &str, other: &str| match other.contains(one) {
        true => RingSetup::new().policy(format!("={one},^{other}").parse().unwrap()),
        false => setup_of(one),
    };
    let mut listener = only(first, last).listen("127.0.0.1:0").unwrap();
    let connecting = connecting(&only(last, first), listener.address());
    let error = assert_kind(listener.accept(Duration::from_secs(2)), ErrorKind::DeadlineExceeded);
    let refused = assert_kind(connecting.join().unwrap(), ErrorKind::NoProvider);
    for error in [error, refused] {
        for part in [first, last, "none in common"] {
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
