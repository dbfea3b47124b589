//! Writes that notify the target.

use fabric::{CompletionKind, ErrorKind};

use super::{Case, sizes};
use crate::cells::Cell;
use crate::pair::{A, B, CaseResult, Pair, check_bytes, get, nonblocking, pattern, put};
use crate::{cases, ensure};

pub const CASES: &[Case] = cases![
    write_data_all_sizes,
    immediates_of_every_width,
    too_wide_immediate_is_refused,
    immediates_absent_are_refused,
    write_data_without_payload,
    each_immediate_arrives_once,
    ordered_writes_arrive_in_order,
];

fn write_data_all_sizes(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let sizes = sizes(pair.sides[A].domain.capabilities().max_message_size);
    let largest = *sizes.last().ok_or("no size")?;
    let (from, into) = (pair.sides[A].region(largest)?, pair.sides[B].region(largest)?);
    let remote = pair.sides[A].attach(&into)?;
    for (number, length) in sizes.into_iter().enumerate() {
        let bytes = pattern(length as u64 + 77, length);
        put(&from, 0, &bytes)?;
        pair.expect_immediates(B, 1)?;
        let (source, target) = (from.slice(0..length)?, remote.slice(0..length as u64)?);
        let id = pair.post(A, |s| {
            s.endpoint.write_data(
                &mut s.queue,
                s.peer,
                &source,
                &target,
                number as u64,
                nonblocking(1),
            )
        })?;
        let arrived = pair.arrival(B)?;
        // The data is visible when the immediate arrives.
        check_bytes(&format!("{length} bytes"), &get(&into, 0, length)?, &bytes)?;
        ensure!(arrived.data == Some(number as u64), "immediate {:?}", arrived.data);
        // 0: the provider reports no length here.
        ensure!(
            arrived.length == length || arrived.length == 0,
            "length {} of {length}",
            arrived.length
        );
        let done = pair.complete(A, id)?;
        ensure!(done.kind == CompletionKind::Write, "{done:?}");
    }
    Ok(())
}

fn immediates_of_every_width(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let mask = pair.sides[A].domain.capabilities().immediate_mask();
    let (from, into) = (pair.sides[A].region(8)?, pair.sides[B].region(8)?);
    let remote = pair.sides[A].attach(&into)?;
    let mut values: Vec<u64> = (0..64).map(|bit| 1 << bit).filter(|v| v & !mask == 0).collect();
    values.extend([0, mask, 0x0123_4567_89ab_cdef & mask]);
    for value in values {
        pair.expect_immediates(B, 1)?;
        let id = pair.post(A, |s| {
            s.endpoint.write_data(
                &mut s.queue,
                s.peer,
                &from.all(),
                &remote.all(),
                value,
                nonblocking(0),
            )
        })?;
        let arrived = pair.arrival(B)?;
        ensure!(arrived.data == Some(value), "sent {value:#x}, got {:x?}", arrived.data);
        pair.complete(A, id)?;
    }
    Ok(())
}

fn too_wide_immediate_is_refused(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let mask = pair.sides[A].domain.capabilities().immediate_mask();
    let (from, into) = (pair.sides[A].region(8)?, pair.sides[B].region(8)?);
    let remote = pair.sides[A].attach(&into)?;
    let side = &mut pair.sides[A];
    let error = side
        .endpoint
        .write_data(&mut side.queue, side.peer, &from.all(), &remote.all(), mask.wrapping_add(1), 0)
        .unwrap_err();
    ensure!(error.kind() == ErrorKind::OutOfBounds, "{error}");
    ensure!(error.to_string().contains("wider"), "{error}");
    Ok(())
}

/// For providers with one-sided writes but without immediates.
fn immediates_absent_are_refused(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let (from, into) = (pair.sides[A].region(8)?, pair.sides[B].region(8)?);
    let remote = pair.sides[A].attach(&into)?;
    let side = &mut pair.sides[A];
    let error = side
        .endpoint
        .write_data(&mut side.queue, side.peer, &from.all(), &remote.all(), 1, 0)
        .unwrap_err();
    ensure!(error.kind() == ErrorKind::NotSupported, "{error}");
    Ok(())
}

fn write_data_without_payload(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let (from, into) = (pair.sides[A].region(8)?, pair.sides[B].region(8)?);
    let remote = pair.sides[A].attach(&into)?;
    pair.expect_immediates(B, 1)?;
    let (source, target) = (from.slice(0..0)?, remote.slice(0..0)?);
    let id = pair.post(A, |s| {
        s.endpoint.write_data(&mut s.queue, s.peer, &source, &target, 99, nonblocking(0))
    })?;
    let arrived = pair.arrival(B)?;
    ensure!(arrived.data == Some(99), "{arrived:?}");
    pair.complete(A, id)?;
    Ok(())
}

/// By count: every immediate arrives exactly once, in any order.
fn each_immediate_arrives_once(cell: &Cell) -> CaseResult {
    const COUNT: usize = 1000;
    let mut pair = Pair::new(cell)?;
    let (from, into) = (pair.sides[A].region(64)?, pair.sides[B].region(64)?);
    let remote = pair.sides[A].attach(&into)?;
    let mut seen = vec![0_u32; COUNT];
    let mut ids = Vec::new();
    let mut arrived = 0;
    let expected = 64;
    pair.expect_immediates(B, expected)?;
    for number in 0..COUNT {
        ids.push(pair.post(A, |s| {
            let data = number as u64;
            s.endpoint.write_data(
                &mut s.queue,
                s.peer,
                &from.all(),
                &remote.all(),
                data,
                nonblocking(0),
            )
        })?);
        if number + 1 - arrived >= expected / 2 {
            let value = pair.arrival(B)?.data.ok_or("no data")?;
            *seen.get_mut(value as usize).ok_or("immediate out of range")? += 1;
            arrived += 1;
            pair.expect_immediates(B, 1)?;
        }
    }
    while arrived < COUNT {
        let value = pair.arrival(B)?.data.ok_or("no data")?;
        *seen.get_mut(value as usize).ok_or("immediate out of range")? += 1;
        arrived += 1;
    }
    for id in ids {
        pair.complete(A, id)?;
    }
    ensure!(seen.iter().all(|n| *n == 1), "not each immediate arrived once: {seen:?}");
    Ok(())
}

/// With write-after-write order: immediates arrive in the order of posting, and the bytes of
/// each are visible.
fn ordered_writes_arrive_in_order(cell: &Cell) -> CaseResult {
    const COUNT: u64 = 500;
    let mut pair = Pair::new(cell)?;
    ensure!(pair.sides[A].domain.capabilities().orders_writes(), "no order is promised");
    let (from, into) = (pair.sides[A].region(8 * COUNT as usize)?, pair.sides[B].region(8)?);
    let remote = pair.sides[A].attach(&into)?;
    for number in 0..COUNT {
        put(&from, number as usize * 8, &number.to_le_bytes())?;
    }
    let window = 32;
    pair.expect_immediates(B, 64)?;
    for number in 0..COUNT + window {
        if number < COUNT {
            let at = number as usize * 8;
            let source = from.slice(at..at + 8)?;
            pair.post(A, |s| {
                let target = remote.all();
                s.endpoint.write_data(
                    &mut s.queue,
                    s.peer,
                    &source,
                    &target,
                    number,
                    nonblocking(0),
                )
            })?;
        }
        if number >= window {
            let arrived = pair.arrival(B)?;
            ensure!(
                arrived.data == Some(number - window),
                "{:?} after {}",
                arrived.data,
                number - window
            );
            // All writes change the same word: its value never decreases.
            let bytes: [u8; 8] = get(&into, 0, 8)?.try_into().map_err(|_| "length")?;
            let value = u64::from_le_bytes(bytes);
            ensure!(value >= number - window, "word {value} at immediate {}", number - window);
            pair.expect_immediates(B, 1)?;
        }
    }
    Ok(())
}
