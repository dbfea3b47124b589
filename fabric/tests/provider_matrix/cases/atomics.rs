//! One-sided atomics.

use fabric::{
    Access, AtomicForm, AtomicOperation, AtomicRequest, Caps, Datatype, ErrorKind, MemoryRegion,
    RegionSlice,
};

use super::Case;
use crate::cells::Cell;
use crate::pair::{A, B, CaseResult, Pair, get, nonblocking, put};
use crate::{cases, ensure};

pub const CASES: &[Case] = cases![
    fetch_and_add,
    compare_and_swap,
    plain_atomics,
    atomic_limits_are_reported,
    atomics_without_access_or_alignment_are_refused,
];

fn word(region: &MemoryRegion, at: usize) -> CaseResult<u64> {
    let bytes: [u8; 8] = get(region, at, 8)?.try_into().map_err(|_| "length")?;
    Ok(u64::from_le_bytes(bytes))
}

fn fetch_and_add(cell: &Cell) -> CaseResult {
    let mut pair = Pair::caps(cell, Caps::ATOMIC)?;
    let (local, target) = (pair.sides[A].region(64)?, pair.sides[B].region(64)?);
    put(&target, 16, &1000_u64.to_le_bytes())?;
    let remote = pair.sides[A].attach(&target)?.slice(16..24)?;
    for round in 0..50_u64 {
        put(&local, 0, &3_u64.to_le_bytes())?;
        let (operand, result) = (local.slice(0..8)?, local.slice(8..16)?);
        let request = AtomicRequest {
            datatype: Datatype::U64,
            operation: AtomicOperation::Sum,
            operand: &operand,
            remote: &remote,
        };
        let id = pair.post(A, |s| {
            s.endpoint.fetch_atomic(&mut s.queue, s.peer, &request, &result, nonblocking(0))
        })?;
        pair.complete(A, id)?;
        let before = word(&local, 8)?;
        ensure!(before == 1000 + 3 * round, "fetched {before} in round {round}");
    }
    ensure!(word(&target, 16)? == 1150, "target is {}", word(&target, 16)?);
    Ok(())
}

fn compare_and_swap(cell: &Cell) -> CaseResult {
    let mut pair = Pair::caps(cell, Caps::ATOMIC)?;
    let (local, target) = (pair.sides[A].region(64)?, pair.sides[B].region(64)?);
    put(&target, 0, &7_u64.to_le_bytes())?;
    let remote = pair.sides[A].attach(&target)?.slice(0..8)?;
    // Once with the right expectation, once with a wrong one.
    for (expected, new, before, after) in [(7_u64, 8_u64, 7, 8), (7, 9, 8, 8)] {
        put(&local, 0, &new.to_le_bytes())?;
        put(&local, 8, &expected.to_le_bytes())?;
        let (operand, compare, result) =
            (local.slice(0..8)?, local.slice(8..16)?, local.slice(16..24)?);
        let request = AtomicRequest {
            datatype: Datatype::U64,
            operation: AtomicOperation::CompareSwap,
            operand: &operand,
            remote: &remote,
        };
        let id = pair.post(A, |s| {
            s.endpoint.compare_atomic(
                &mut s.queue,
                s.peer,
                &request,
                &compare,
                &result,
                nonblocking(0),
            )
        })?;
        pair.complete(A, id)?;
        ensure!(word(&local, 16)? == before, "fetched {}, not {before}", word(&local, 16)?);
        ensure!(word(&target, 0)? == after, "target {}, not {after}", word(&target, 0)?);
    }
    Ok(())
}

fn plain_atomics(cell: &Cell) -> CaseResult {
    let mut pair = Pair::caps(cell, Caps::ATOMIC)?;
    let (local, target) = (pair.sides[A].region(64)?, pair.sides[B].region(64)?);
    let remote = pair.sides[A].attach(&target)?.slice(0..8)?;
    let steps = [
        (AtomicOperation::Write, 0xf0_u64, 0xf0_u64),
        (AtomicOperation::BitOr, 0x0f, 0xff),
        (AtomicOperation::BitAnd, 0x3c, 0x3c),
        (AtomicOperation::BitXor, 0xff, 0xc3),
        (AtomicOperation::Maximum, 0x100, 0x100),
        (AtomicOperation::Minimum, 0x10, 0x10),
        (AtomicOperation::Sum, 5, 0x15),
    ];
    let mut done = 0;
    for (operation, value, expected) in steps {
        if pair.sides[A].domain.atomic_limit(Datatype::U64, operation, AtomicForm::Plain).is_none()
        {
            continue;
        }
        put(&local, 0, &value.to_le_bytes())?;
        let operand = local.slice(0..8)?;
        let request = AtomicRequest {
            datatype: Datatype::U64,
            operation,
            operand: &operand,
            remote: &remote,
        };
        let id =
            pair.post(A, |s| s.endpoint.atomic(&mut s.queue, s.peer, &request, nonblocking(0)))?;
        pair.complete(A, id)?;
        // The completion of an atomic without a result does not prove its arrival.
        for _ in 0..400 {
            if word(&target, 0)? == expected {
                break;
            }
            pair.pump_for(std::time::Duration::from_millis(1));
        }
        let got = word(&target, 0)?;
        ensure!(got == expected, "{operation:?} {value:#x} gave {got:#x}, not {expected:#x}");
        done += 1;
    }
    ensure!(done > 0, "atomics are offered and none is supported");
    Ok(())
}

fn atomic_limits_are_reported(cell: &Cell) -> CaseResult {
    let mut pair = Pair::caps(cell, Caps::ATOMIC)?;
    let domain = pair.sides[A].domain.clone();
    let supported = Datatype::ALL
        .iter()
        .flat_map(|t| AtomicOperation::ALL.iter().map(move |o| (*t, *o)))
        .filter(|(t, o)| domain.atomic_limit(*t, *o, AtomicForm::Fetch).is_some())
        .count();
    ensure!(supported > 0, "atomics are offered and none is supported");
    let limit = domain
        .atomic_limit(Datatype::U64, AtomicOperation::Sum, AtomicForm::Plain)
        .ok_or("no type supports Sum")?;
    let length = (limit + 1) * 8;
    let (local, target) = (pair.sides[A].region(length)?, pair.sides[B].region(length)?);
    let remote = pair.sides[A].attach(&target)?.all();
    let side = &mut pair.sides[A];
    let mut refused = |operand: &RegionSlice, operation| {
        let request =
            AtomicRequest { datatype: Datatype::U64, operation, operand, remote: &remote };
        side.endpoint.atomic(&mut side.queue, side.peer, &request, 0).unwrap_err().kind()
    };
    let kind = refused(&local.all(), AtomicOperation::Sum);
    ensure!(kind == ErrorKind::OutOfBounds, "too many elements: {kind:?}");
    let kind = refused(&local.slice(0..7)?, AtomicOperation::Sum);
    ensure!(kind == ErrorKind::InvalidArgument, "7 bytes: {kind:?}");
    let kind = refused(&local.slice(4..12)?, AtomicOperation::Sum);
    ensure!(kind == ErrorKind::InvalidArgument, "unaligned: {kind:?}");
    let kind = refused(&local.slice(0..8)?, AtomicOperation::CompareSwap);
    ensure!(kind == ErrorKind::NotSupported, "compare-swap in plain form: {kind:?}");
    Ok(())
}

fn atomics_without_access_or_alignment_are_refused(cell: &Cell) -> CaseResult {
    let mut pair = Pair::caps(cell, Caps::ATOMIC)?;
    let local = pair.sides[A].region(64)?;
    let target = pair.sides[B].region(64)?;
    let write_only = pair.sides[B].region_for(64, Access::LOCAL | Access::REMOTE_WRITE)?;
    let read_only = pair.sides[B].region_for(64, Access::LOCAL | Access::REMOTE_READ)?;
    let side = &mut pair.sides[A];
    let mut fetch = |remote: &MemoryRegion, result: std::ops::Range<usize>| {
        let remote = side.attach(remote)?.slice(0..8)?;
        let (operand, result) = (local.slice(0..8)?, local.slice(result)?);
        let request = AtomicRequest {
            datatype: Datatype::U64,
            operation: AtomicOperation::Sum,
            operand: &operand,
            remote: &remote,
        };
        let posted = side.endpoint.fetch_atomic(
            &mut side.queue,
            side.peer,
            &request,
            &result,
            nonblocking(0),
        );
        Ok::<_, crate::pair::Failure>(posted.err().map(|error| error.kind()))
    };
    // A fetching atomic reads and writes, so it needs both kinds of access.
    let kind = fetch(&write_only, 8..16)?;
    ensure!(kind == Some(ErrorKind::AccessDenied), "without read access: {kind:?}");
    let kind = fetch(&read_only, 8..16)?;
    ensure!(kind == Some(ErrorKind::AccessDenied), "without write access: {kind:?}");
    let kind = fetch(&target, 12..20)?;
    ensure!(kind == Some(ErrorKind::InvalidArgument), "an unaligned result buffer: {kind:?}");
    let kind = fetch(&target, 8..12)?;
    ensure!(kind == Some(ErrorKind::OutOfBounds), "a result buffer that is too short: {kind:?}");
    ensure!(side.queue.in_flight() == 0, "something was posted");
    Ok(())
}
