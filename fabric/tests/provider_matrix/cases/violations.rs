//! Wrong bounds, access and keys: an error, never data.
//!
//! The library refuses what it can check. Faults that only the target can detect (a forged or
//! stale key) are sent on purpose here, by a forged region descriptor.
#![allow(unsafe_code)]

use std::time::Duration;

use fabric::{
    Access, ErrorKind, MemoryRegion, Outcome, Peer, RemoteKey, RemoteRegion, TransferFlags,
};

use super::Case;
use crate::cells::Cell;
use crate::pair::{A, B, CaseResult, Pair, check_bytes, get, nonblocking, pattern, put};
use crate::{cases, ensure};

pub const CASES: &[Case] = cases![
    out_of_bounds_is_refused_before_sending,
    missing_access_is_refused_before_sending,
    oversized_injection_is_refused_before_sending,
    wrong_key_is_an_error_and_no_data,
    write_beyond_the_region_is_an_error_and_no_data,
    write_without_access_is_an_error_and_no_data,
    read_without_access_is_an_error_and_no_data,
    closed_region_is_an_error_and_no_data,
    removed_peer_is_refused,
    foreign_objects_are_refused,
    foreign_descriptor_is_refused,
];

fn out_of_bounds_is_refused_before_sending(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let (from, into) = (pair.sides[A].region(128)?, pair.sides[B].region(64)?);
    let remote = pair.sides[A].attach(&into)?;
    ensure!(remote.slice(0..65).is_err(), "a slice beyond the end");
    ensure!(remote.slice(65..66).is_err(), "a slice after the end");
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = remote.slice(10..5);
    ensure!(reversed.is_err(), "a reversed slice");
    ensure!(from.slice(100..129).is_err(), "a local slice beyond the end");
    let side = &mut pair.sides[A];
    let (source, target) = (from.all(), remote.all());
    let errors = [
        side.endpoint.write(&mut side.queue, side.peer, &source, &target, 0).unwrap_err(),
        side.endpoint.read(&mut side.queue, side.peer, &source, &target, 0).unwrap_err(),
    ];
    for error in errors {
        ensure!(error.kind() == ErrorKind::OutOfBounds, "{error}");
    }
    ensure!(side.queue.in_flight() == 0, "an operation was posted");
    Ok(())
}

fn missing_access_is_refused_before_sending(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let from = pair.sides[A].region(64)?;
    let read_only = pair.sides[B].region_for(64, Access::LOCAL | Access::REMOTE_READ)?;
    let write_only = pair.sides[B].region_for(64, Access::LOCAL | Access::REMOTE_WRITE)?;
    let (read_only, write_only) =
        (pair.sides[A].attach(&read_only)?, pair.sides[A].attach(&write_only)?);
    let no_source = pair.sides[A].region_for(64, Access::RECEIVE | Access::REMOTE)?;
    let no_receive = pair.sides[A].region_for(64, Access::SEND | Access::REMOTE)?;
    let side = &mut pair.sides[A];
    let errors = [
        side.endpoint.write(&mut side.queue, side.peer, &from.all(), &read_only.all(), 0),
        side.endpoint.read(&mut side.queue, side.peer, &from.all(), &write_only.all(), 0),
        side.endpoint.write(&mut side.queue, side.peer, &no_source.all(), &write_only.all(), 0),
        side.endpoint.send(&mut side.queue, side.peer, &no_source.all(), 0),
        side.endpoint.read(&mut side.queue, side.peer, &no_source.all(), &read_only.all(), 0),
        side.endpoint.receive(&mut side.queue, &no_receive.all(), 0),
    ];
    for result in errors {
        let error = result.err().ok_or("the operation was posted")?;
        ensure!(error.kind() == ErrorKind::AccessDenied, "{error}");
    }
    Ok(())
}

/// Some providers copy without checking the size of their buffer.
fn oversized_injection_is_refused_before_sending(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let length = pair.sides[A].domain.capabilities().inject_size + 1;
    let (from, into) = (pair.sides[A].region(length)?, pair.sides[B].region(length)?);
    let remote = pair.sides[A].attach(&into)?;
    let side = &mut pair.sides[A];
    let options = nonblocking(0).flags(TransferFlags::INJECT);
    let errors = [
        side.endpoint.write(&mut side.queue, side.peer, &from.all(), &remote.all(), options),
        side.endpoint.send(&mut side.queue, side.peer, &from.all(), options),
    ];
    for result in errors {
        let error = result.err().ok_or("the operation was posted")?;
        ensure!(error.kind() == ErrorKind::Truncated, "{error}");
    }
    ensure!(side.queue.in_flight() == 0, "an operation was posted");
    Ok(())
}

/// The claim of a hostile peer about its region: a region descriptor with changed fields.
struct Forged {
    key: u64,
    skip: u64,
    write: bool,
}

/// Writes (or reads) 64 bytes with a wrong region descriptor, and expects an error at the
/// initiator, and no change at the target.
fn violate(
    pair: &mut Pair,
    local: &MemoryRegion,
    good: &RemoteRegion,
    forged: Forged,
) -> CaseResult {
    let Forged { key, skip, write } = forged;
    let mut bytes = good.encode();
    // Full access, a sufficient length, and another key.
    bytes[20..24].copy_from_slice(&3_u32.to_le_bytes());
    bytes[24..32].copy_from_slice(&(skip + 64).to_le_bytes());
    bytes[42..50].copy_from_slice(&key.to_le_bytes());
    let end = bytes.len() - 4;
    let checksum = crc32fast::hash(&bytes[..end]);
    bytes[end..].copy_from_slice(&checksum.to_le_bytes());
    let remote = pair.sides[A].domain.attach(&RemoteRegion::decode(&bytes)?)?;
    let (here, there) = (local.slice(0..64)?, remote.slice(skip..skip + 64)?);
    // Without delivery complete a write may be reported before the target checked its key.
    let options = nonblocking(1).flags(TransferFlags::DELIVERY_COMPLETE);
    let id = pair.post(A, |s| match write {
        true => s.endpoint.write(&mut s.queue, s.peer, &here, &there, options),
        false => s.endpoint.read(&mut s.queue, s.peer, &here, &there, options),
    })?;
    let is_it = move |outcome: &Outcome| match outcome {
        Ok(completion) => completion.operation == Some(id),
        // A connection that the violation broke may be reported without the operation.
        Err(_) => true,
    };
    match pair.find(A, Duration::from_secs(3), is_it) {
        Some(Err(failure)) => {
            ensure!(failure.error.kind() != ErrorKind::DeadlineExceeded, "{failure}");
            let names_peer = failure.operation.is_none() || failure.error.peer().is_some();
            ensure!(names_peer, "a failed operation does not name its peer: {failure}");
            Ok(())
        }
        Some(Ok(_)) => Err("the operation was reported as successful".into()),
        // Some targets drop a refused operation: then the caller's deadline is the error.
        None => {
            let error = pair.sides[A].queue.complete(id, Duration::from_millis(10)).unwrap_err();
            ensure!(error.kind() == ErrorKind::DeadlineExceeded, "{error}");
            Ok(())
        }
    }
}

fn described(region: &MemoryRegion) -> CaseResult<(RemoteRegion, u64)> {
    let description = region.describe()?;
    match description.key() {
        RemoteKey::Plain(key) => Ok((description.clone(), *key)),
        _ => Err("raw key".into()),
    }
}

fn untouched(region: &MemoryRegion, length: usize) -> CaseResult {
    check_bytes("the target", &get(region, 0, length)?, &pattern(99, length))
}

fn wrong_key_is_an_error_and_no_data(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let (from, into) = (pair.sides[A].region(64)?, pair.sides[B].region(64)?);
    put(&into, 0, &pattern(99, 64))?;
    let (good, key) = described(&into)?;
    let result =
        violate(&mut pair, &from, &good, Forged { key: key ^ 0x5a5a, skip: 0, write: true });
    untouched(&into, 64)?;
    result
}

fn write_beyond_the_region_is_an_error_and_no_data(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let from = pair.sides[A].region(64)?;
    // A region in the middle of memory that this process owns.
    let memory = fabric::HostMemory::zeroed(8192)?;
    let base = fabric::Memory::as_ptr(&memory);
    // SAFETY: `memory` is kept until the end of the case.
    let into = unsafe {
        pair.sides[B].domain.register_raw(base, 4096, fabric::MemoryKind::Host, Access::ALL)?
    };
    pair.sides[B].activate(&into)?;
    let (good, key) = described(&into)?;
    let result = violate(&mut pair, &from, &good, Forged { key, skip: 4096 - 32, write: true });
    // SAFETY: inside `memory`.
    let beyond = unsafe { std::slice::from_raw_parts(base.add(4096), 4096) };
    ensure!(beyond.iter().all(|b| *b == 0), "bytes beyond the region were written");
    drop(into);
    drop(memory);
    result
}

fn write_without_access_is_an_error_and_no_data(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let from = pair.sides[A].region(64)?;
    let into = pair.sides[B].region_for(64, Access::LOCAL | Access::REMOTE_READ)?;
    put(&into, 0, &pattern(99, 64))?;
    let (good, key) = described(&into)?;
    let result = violate(&mut pair, &from, &good, Forged { key, skip: 0, write: true });
    untouched(&into, 64)?;
    result
}

fn read_without_access_is_an_error_and_no_data(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let into = pair.sides[A].region(64)?;
    put(&into, 0, &pattern(99, 64))?;
    let secret = pair.sides[B].region_for(64, Access::LOCAL | Access::REMOTE_WRITE)?;
    put(&secret, 0, &pattern(5, 64))?;
    let (good, key) = described(&secret)?;
    let result = violate(&mut pair, &into, &good, Forged { key, skip: 0, write: false });
    untouched(&into, 64)?;
    result
}

fn closed_region_is_an_error_and_no_data(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let from = pair.sides[A].region(64)?;
    let memory = fabric::HostMemory::zeroed(4096)?;
    let pointer = fabric::Memory::as_ptr(&memory);
    // SAFETY: `memory` is kept until the end of the case.
    let into = unsafe {
        pair.sides[B].domain.register_raw(pointer, 4096, fabric::MemoryKind::Host, Access::ALL)?
    };
    pair.sides[B].activate(&into)?;
    let (good, key) = described(&into)?;
    drop(into);
    let result = violate(&mut pair, &from, &good, Forged { key, skip: 0, write: true });
    // SAFETY: inside `memory`.
    let bytes = unsafe { std::slice::from_raw_parts(pointer, 4096) };
    ensure!(bytes.iter().all(|b| *b == 0), "a closed region was written");
    drop(memory);
    result
}

fn removed_peer_is_refused(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let from = pair.sides[A].region(64)?;
    let side = &mut pair.sides[A];
    let addresses = side.addresses.clone().ok_or("no address vector")?;
    let address = addresses.lookup(side.peer)?;
    ensure!(!address.0.is_empty(), "empty address");
    ensure!(!addresses.display(&address).is_empty(), "no text for an address");
    addresses.remove(side.peer)?;
    let error = side.endpoint.send(&mut side.queue, side.peer, &from.all(), 0).unwrap_err();
    ensure!(error.kind() == ErrorKind::Closed, "{error}");
    ensure!(addresses.remove(side.peer).is_err(), "removed twice");
    let short = addresses.insert(&fabric::Address(vec![])).unwrap_err();
    ensure!(short.kind() == ErrorKind::InvalidArgument, "{short}");
    Ok(())
}

fn foreign_objects_are_refused(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let (own_region, foreign_region) = (pair.sides[A].region(64)?, pair.sides[B].region(64)?);
    let remote = pair.sides[A].attach(&foreign_region)?;
    let [a, b] = &mut pair.sides;
    // A region of another domain, a queue of another endpoint, a peer of another vector.
    let region = a
        .endpoint
        .write(&mut a.queue, a.peer, &foreign_region.all(), &remote.all(), 0)
        .unwrap_err();
    ensure!(region.kind() == ErrorKind::InvalidArgument, "{region}");
    let queue =
        a.endpoint.write(&mut b.queue, a.peer, &own_region.all(), &remote.all(), 0).unwrap_err();
    ensure!(queue.kind() == ErrorKind::InvalidArgument, "{queue}");
    if cell.kind != fabric::EndpointKind::Msg {
        let peer = a.endpoint.send(&mut a.queue, b.peer, &own_region.all(), 0).unwrap_err();
        ensure!(peer.kind() == ErrorKind::Closed, "{peer}");
        let none =
            a.endpoint.send(&mut a.queue, Peer::CONNECTED, &own_region.all(), 0).unwrap_err();
        ensure!(none.kind() == ErrorKind::Closed, "{none}");
    }
    Ok(())
}

fn foreign_descriptor_is_refused(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    let region = pair.sides[B].region(64)?;
    let mut bytes = region.describe()?.encode();
    let good = bytes.clone();
    bytes[20] ^= 1;
    let altered = RemoteRegion::decode(&bytes).unwrap_err();
    ensure!(altered.kind() == ErrorKind::MalformedDescriptor, "{altered}");
    let cut = RemoteRegion::decode(&good[..good.len() - 1]).unwrap_err();
    ensure!(cut.kind() == ErrorKind::MalformedDescriptor, "{cut}");
    // A region descriptor of another wire protocol, with a correct checksum.
    let mut other = good;
    other[8] ^= 0x40;
    let end = other.len() - 4;
    let checksum = crc32fast::hash(&other[..end]);
    other[end..].copy_from_slice(&checksum.to_le_bytes());
    let foreign = RemoteRegion::decode(&other)?;
    let error = pair.sides[A].domain.attach(&foreign).unwrap_err();
    ensure!(error.kind() == ErrorKind::VersionMismatch, "{error}");
    Ok(())
}
