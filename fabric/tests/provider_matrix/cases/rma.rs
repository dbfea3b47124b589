//! One-sided reads and writes.

use fabric::{MemoryRegion, TransferFlags};

use super::{Case, sizes};
use crate::cells::Cell;
use crate::pair::{A, B, CaseResult, Pair, Setup, check_bytes, get, nonblocking, pattern, put};
use crate::{cases, ensure};

pub const CASES: &[Case] = cases![
    write_all_sizes,
    read_all_sizes,
    write_unaligned,
    write_many_in_flight,
    write_delivery_complete_is_visible,
    writes_are_counted,
    both_directions_at_once,
];

/// Writes with delivery complete, so that the bytes can be checked.
fn write(
    pair: &mut Pair,
    from: &MemoryRegion,
    into: &MemoryRegion,
    at: usize,
    length: usize,
) -> CaseResult {
    let remote = pair.sides[A].attach(into)?;
    let target = remote.slice(at as u64..(at + length) as u64)?;
    let source = from.slice(at..at + length)?;
    let options = nonblocking(1).flags(TransferFlags::DELIVERY_COMPLETE);
    let id = pair.post(A, |s| s.endpoint.write(&mut s.queue, s.peer, &source, &target, options))?;
    let done = pair.complete(A, id)?;
    ensure!(done.token == 1, "token {}", done.token);
    Ok(())
}

fn write_all_sizes(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let sizes = sizes(pair.sides[A].domain.capabilities().max_message_size);
    let largest = *sizes.last().ok_or("no size")?;
    let (from, into) = (pair.sides[A].region(largest)?, pair.sides[B].region(largest + 1)?);
    for length in sizes {
        let bytes = pattern(length as u64, length);
        put(&from, 0, &bytes)?;
        write(&mut pair, &from, &into, 0, length)?;
        check_bytes(&format!("{length} bytes"), &get(&into, 0, length)?, &bytes)?;
        ensure!(get(&into, largest, 1)?[0] == 0, "a byte beyond the range was written");
    }
    Ok(())
}

fn read_all_sizes(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let sizes = sizes(pair.sides[A].domain.capabilities().max_message_size);
    let largest = *sizes.last().ok_or("no size")?;
    let (into, from) = (pair.sides[A].region(largest)?, pair.sides[B].region(largest)?);
    let remote = pair.sides[A].attach(&from)?;
    for length in sizes {
        let bytes = pattern(!(length as u64), length);
        put(&from, 0, &bytes)?;
        let (target, source) = (into.slice(0..length)?, remote.slice(0..length as u64)?);
        let id = pair
            .post(A, |s| s.endpoint.read(&mut s.queue, s.peer, &target, &source, nonblocking(1)))?;
        pair.complete(A, id)?;
        check_bytes(&format!("{length} bytes"), &get(&into, 0, length)?, &bytes)?;
    }
    Ok(())
}

fn write_unaligned(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let (from, into) = (pair.sides[A].region(80_000)?, pair.sides[B].region(80_000)?);
    for at in [1, 3, 4093] {
        for length in [1, 100, 5000, 70_001] {
            let bytes = pattern((at * length) as u64, length);
            put(&from, at, &bytes)?;
            write(&mut pair, &from, &into, at, length)?;
            check_bytes(&format!("{length} bytes at {at}"), &get(&into, at, length)?, &bytes)?;
        }
    }
    Ok(())
}

fn write_many_in_flight(cell: &Cell) -> CaseResult {
    const COUNT: usize = 2000;
    const EACH: usize = 512;
    let mut pair = Pair::new(cell)?;
    let (from, into) = (pair.sides[A].region(COUNT * EACH)?, pair.sides[B].region(COUNT * EACH)?);
    let bytes = pattern(1, COUNT * EACH);
    put(&from, 0, &bytes)?;
    let remote = pair.sides[A].attach(&into)?;
    let mut ids = Vec::new();
    for i in 0..COUNT {
        let source = from.slice(i * EACH..(i + 1) * EACH)?;
        let target = remote.slice((i * EACH) as u64..((i + 1) * EACH) as u64)?;
        let flags = nonblocking(i as u64).flags(TransferFlags::DELIVERY_COMPLETE);
        ids.push(
            pair.post(A, |s| s.endpoint.write(&mut s.queue, s.peer, &source, &target, flags))?,
        );
    }
    for (i, id) in ids.into_iter().enumerate() {
        let done = pair.complete(A, id)?;
        ensure!(done.token == i as u64, "token {} of operation {i}", done.token);
    }
    ensure!(pair.sides[A].queue.in_flight() == 0, "an operation is still in flight");
    check_bytes("all", &get(&into, 0, COUNT * EACH)?, &bytes)
}

fn write_delivery_complete_is_visible(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let (from, into) = (pair.sides[A].region(1 << 20)?, pair.sides[B].region(1 << 20)?);
    for round in 0..10 {
        let bytes = pattern(round, 1 << 20);
        put(&from, 0, &bytes)?;
        write(&mut pair, &from, &into, 0, 1 << 20)?;
        check_bytes("at completion", &get(&into, 0, 1 << 20)?, &bytes)?;
    }
    Ok(())
}

fn writes_are_counted(cell: &Cell) -> CaseResult {
    let setup = Setup { counted: Some(fabric::Access::WRITE), ..Setup::default() };
    let mut pair = Pair::with(cell, setup)?;
    let (from, into) = (pair.sides[A].region(64)?, pair.sides[B].region(64)?);
    let counter = pair.counter.clone().ok_or("no counter")?;
    // The pair's first exchange included a write.
    let start = counter.read();
    for _ in 0..5 {
        write(&mut pair, &from, &into, 0, 64)?;
    }
    pair.pump_until(|| counter.read() >= start + 5);
    let counted = counter.read() - start;
    ensure!(counted == 5 && counter.read_errors() == 0, "{counted} counted");
    Ok(())
}

fn both_directions_at_once(cell: &Cell) -> CaseResult {
    const LENGTH: usize = 1 << 20;
    let mut pair = Pair::new(cell)?;
    let mut work = Vec::new();
    for (initiator, responder) in [(A, B), (B, A)] {
        let from = pair.sides[initiator].region(LENGTH)?;
        let into = pair.sides[responder].region(LENGTH)?;
        put(&from, 0, &pattern(initiator as u64 + 10, LENGTH))?;
        let remote = pair.sides[initiator].attach(&into)?;
        work.push((initiator, from, into, remote));
    }
    let mut ids = Vec::new();
    for round in 0..8_u64 {
        for (initiator, from, _, remote) in &work {
            let options = nonblocking(round).flags(TransferFlags::DELIVERY_COMPLETE);
            let id = pair.post(*initiator, |s| {
                s.endpoint.write(&mut s.queue, s.peer, &from.all(), &remote.all(), options)
            })?;
            ids.push((*initiator, id));
        }
    }
    for (initiator, id) in ids {
        pair.complete(initiator, id)?;
    }
    for (initiator, _, into, _) in &work {
        check_bytes("payload", &get(into, 0, LENGTH)?, &pattern(*initiator as u64 + 10, LENGTH))?;
    }
    Ok(())
}
