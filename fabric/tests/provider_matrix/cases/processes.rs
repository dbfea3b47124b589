//! Peers in separate processes, killed during any operation.

use std::time::{Duration, Instant};

use fabric::ring::{ChunkLayout, HEADER_LEN, LaneOffer, NotifyMode, Port, RingOffer, SenderId};
use fabric::{Access, ErrorKind, HostMemory, MemoryRegion, PostOptions, RemoteRegion};

use super::Case;
use crate::cells::Cell;
use crate::ensure;
use crate::pair::{CaseResult, Side, check_bytes, pattern, timeout};
use crate::peer::{REGION, connect_to_peer_process};

pub const CASES: &[Case] = &[
    Case {
        name: "write_to_another_process",
        run: write_to_another_process,
        may_leak_objects: false,
    },
    Case {
        name: "peer_killed_mid_transfer",
        run: peer_killed_mid_transfer,
        may_leak_objects: true,
    },
    Case {
        name: "injected_writes_fail_with_their_peer",
        run: injected_writes_fail_with_their_peer,
        may_leak_objects: true,
    },
    Case {
        name: "ring_to_a_dead_peer_fails_in_time",
        run: ring_to_a_dead_peer_fails_in_time,
        may_leak_objects: true,
    },
    Case { name: "peer_killed_while_idle", run: peer_killed_while_idle, may_leak_objects: true },
];

/// How long the survivor may take to detect the death of its peer.
const DETECTION_TIMEOUT: Duration = Duration::from_secs(10);

fn write_to_another_process(cell: &Cell) -> CaseResult {
    let (mut side, mut process, region) = connect_to_peer_process(cell)?;
    let remote = side.domain.attach(&region)?;
    let largest = side.domain.capabilities().max_message_size.min(REGION);
    let memory = HostMemory::from_vec(pattern(1, largest))?;
    let from = side.domain.register(memory, Access::ALL)?;
    let into = side.domain.register(HostMemory::zeroed(largest)?, Access::ALL)?;
    let target = remote.slice(0..largest as u64)?;
    let write = side.endpoint.write(&mut side.queue, side.peer, &from.all(), &target, 1)?;
    side.queue.complete(write, Duration::from_secs(20))?;
    // Read back: the bytes went through the other process.
    let read = side.endpoint.read(&mut side.queue, side.peer, &into.all(), &target, 2)?;
    side.queue.complete(read, Duration::from_secs(20))?;
    let mut got = vec![0; largest];
    into.read(0, &mut got)?;
    check_bytes("read back", &got, &pattern(1, largest))?;
    // While the peer lives: closing may need objects that a killed process would hold.
    drop(side);
    process.kill()
}

/// Writes continuously while the peer is killed. Within the deadline there must be an error,
/// from a completion or from a post to a full queue; never a hang.
fn peer_killed_mid_transfer(cell: &Cell) -> CaseResult {
    let (mut side, mut process, region) = connect_to_peer_process(cell)?;
    let remote = side.domain.attach(&region)?;
    let length = (1 << 20).min(side.domain.capabilities().max_message_size);
    let from = side.domain.register(HostMemory::from_vec(pattern(2, length))?, Access::ALL)?;
    let target = remote.slice(0..length as u64)?;
    let started = Instant::now();
    let mut killed = None;
    let mut flying = std::collections::VecDeque::new();
    loop {
        if killed.is_none() && started.elapsed() > Duration::from_millis(200) {
            process.kill()?;
            killed = Some(Instant::now());
        }
        if killed.is_some_and(|at: Instant| at.elapsed() > DETECTION_TIMEOUT) {
            return Err(
                format!("writes to a dead process succeed after {DETECTION_TIMEOUT:?}").into()
            );
        }
        let options = PostOptions::token(0).timeout(Duration::from_secs(2));
        let mut error = None;
        if flying.len() < 8 {
            match side.endpoint.write(&mut side.queue, side.peer, &from.all(), &target, options) {
                Ok(id) => flying.push_back(id),
                Err(refused) => error = Some(refused),
            }
        } else if let Some(id) = flying.pop_front() {
            // A deadline is an error, too: it names the late operation.
            error = side.queue.complete(id, Duration::from_secs(3)).err();
        }
        if let Some(error) = error {
            ensure!(killed.is_some(), "before the peer was killed: {error}");
            return after_death(side, &error.to_string());
        }
    }
}

/// When a connection ends, injected writes that wait behind others belong to no operation. A
/// library that resolves their context crashes, as rxm over tcp did.
fn injected_writes_fail_with_their_peer(cell: &Cell) -> CaseResult {
    const ROUNDS: usize = 16;
    let (side, mut process, region) = connect_to_peer_process(cell)?;
    let length = 256 << 10;
    let from = source(&side, pattern(2, length))?;
    let timeout = Duration::from_secs(2);
    // A ring injects a short message with its header; some providers inject only the header.
    let inject_size = side.domain.capabilities().inject_size;
    let Some(short) = inject_size.checked_sub(HEADER_LEN as usize) else {
        return Err(format!("lacking: at most {inject_size} bytes can be injected").into());
    };
    let short = from.slice(0..short.min(32))?;
    // The ring is never read, but all messages fit.
    let (mut port, writing) = ring_to(side, region, REGION as u64)?;
    for _ in 0..ROUNDS {
        port.send(writing, 0, &from.all(), timeout)?;
        port.send(writing, 0, &short, timeout)?;
    }
    process.kill()?;
    let end = Instant::now() + timeout;
    while Instant::now() < end {
        if let Err(error) = port.wait(Duration::from_millis(50)) {
            println!("detected: {error}");
        }
    }
    let started = Instant::now();
    port.close()?;
    ensure!(started.elapsed() < Duration::from_secs(5), "closing took {:?}", started.elapsed());
    Ok(())
}

/// Memory that rings write from.
fn source(side: &Side, bytes: Vec<u8>) -> CaseResult<MemoryRegion> {
    let source = side.domain.register(HostMemory::from_vec(bytes)?, Access::WRITE)?;
    source.enable_for(&side.endpoint)?;
    Ok(source)
}

/// A ring without a reader: the peer has no ring, but memory of the same size.
fn ring_to(side: Side, region: RemoteRegion, capacity: u64) -> CaseResult<(Port, SenderId)> {
    if let Err(error) = NotifyMode::Immediate.check(side.domain.capabilities()) {
        return Err(format!("lacking: {error}").into());
    }
    let lane = LaneOffer { ring: region.clone(), headers: None, credit_memory: region };
    let ring_offer = RingOffer {
        ring: 0,
        epoch: 1,
        capacity,
        notify: NotifyMode::Immediate,
        tagged: false,
        layout: ChunkLayout::InlineHeader,
        inline_data: 0,
        max_chunks: 1 << 14,
        completed_messages: 0,
        lanes: vec![lane],
    };
    let Side { endpoint, queue, peer, .. } = side;
    let mut port = Port::new(endpoint, queue);
    let (writing, _) = port.accept(peer, &ring_offer, 64 << 10)?;
    Ok((port, writing))
}

/// Everything can be closed in reasonable time, with operations in flight.
fn after_death(side: Side, error: &str) -> CaseResult {
    let started = Instant::now();
    let Side { endpoint, mut queue, .. } = side;
    drop(endpoint);
    while queue.poll().is_some() {}
    ensure!(queue.in_flight() == 0, "{} still in flight after {error}", queue.in_flight());
    drop(queue);
    ensure!(started.elapsed() < Duration::from_secs(5), "closing took {:?}", started.elapsed());
    println!("detected: {error}");
    Ok(())
}

/// The peer dies while no operation is in flight; each of the next operations must fail within
/// its deadline.
fn peer_killed_while_idle(cell: &Cell) -> CaseResult {
    let (mut side, mut process, region) = connect_to_peer_process(cell)?;
    let remote = side.domain.attach(&region)?;
    let from = side.domain.register(HostMemory::from_vec(pattern(3, 4096))?, Access::ALL)?;
    let target = remote.slice(0..4096)?;
    let write = side.endpoint.write(&mut side.queue, side.peer, &from.all(), &target, 1)?;
    side.queue.complete(write, Duration::from_secs(20))?;
    process.kill()?;
    let killed = Instant::now();
    while killed.elapsed() < DETECTION_TIMEOUT {
        let options = PostOptions::token(0).timeout(Duration::from_secs(2));
        let started = Instant::now();
        let result = side
            .endpoint
            .write(&mut side.queue, side.peer, &from.all(), &target, options)
            .and_then(|id| side.queue.complete(id, Duration::from_secs(3)));
        ensure!(started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
        if let Err(error) = result {
            return after_death(side, &error.to_string());
        }
    }
    Err(format!("writes to a dead process succeed after {DETECTION_TIMEOUT:?}").into())
}

/// The reader of a ring dies while its writer waits for credit. The writer gets an error within
/// its deadline, which reports how much was written; so does the next message.
fn ring_to_a_dead_peer_fails_in_time(cell: &Cell) -> CaseResult {
    let (side, mut process, region) = connect_to_peer_process(cell)?;
    let capacity = 1 << 20;
    let length = 4 * capacity as usize;
    let source = source(&side, pattern(4, length))?;
    let op_timeout = Duration::from_secs(2);
    let (mut port, writing) = ring_to(side, region, capacity)?;
    let mut message = port.begin(writing, 0, length as u64)?;
    let started = Instant::now();
    // The connection may still be in setup.
    while message.written() <= capacity / 2 {
        let short = Duration::from_millis(300);
        let blocked = port.finish(writing, &mut message, &source.all(), short);
        let error = blocked.err().ok_or("a message of four times the ring size was written")?;
        ensure!(error.kind() == ErrorKind::DeadlineExceeded, "{error}");
        ensure!(started.elapsed() < timeout(), "{error}");
    }
    process.kill()?;
    let started = Instant::now();
    for _ in 0..2 {
        let failed = port.finish(writing, &mut message, &source.all(), op_timeout);
        let error = failed.err().ok_or("a message to a dead process was written")?;
        let is_told = match error.kind() {
            ErrorKind::DeadlineExceeded => error.to_string().contains("bytes of message 0"),
            _ => port.sender(writing)?.broken().is_some(),
        };
        ensure!(is_told, "{error}");
        println!("detected: {error}");
    }
    let took = started.elapsed();
    ensure!(took < 2 * op_timeout + Duration::from_secs(1), "{took:?}");
    let started = Instant::now();
    port.close()?;
    ensure!(started.elapsed() < Duration::from_secs(5), "closing took {:?}", started.elapsed());
    Ok(())
}
