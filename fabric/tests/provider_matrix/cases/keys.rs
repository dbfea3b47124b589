//! Keys of regions: requested, drawn at random, chosen by the provider, raw.

use fabric::{
    Access, ErrorKind, HostMemory, MrMode, RegistrationOptions, RemoteKey, TransferFlags,
};

use super::Case;
use crate::cells::Cell;
use crate::pair::{A, B, CaseResult, Pair, check_bytes, get, nonblocking, pattern, put};
use crate::{cases, ensure};

pub const CASES: &[Case] = cases![
    requested_key_is_honoured,
    requested_key_in_use_is_refused,
    requested_key_is_ignored_where_the_provider_chooses,
    no_key_cannot_be_requested,
    keys_are_random,
    raw_key_is_exchanged,
    raw_key_calls_return,
];

fn requested_key_is_honoured(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let options = RegistrationOptions::new(Access::ALL).requested_key(0x1234);
    let into = pair.sides[B].region_for(64, options)?;
    ensure!(into.key()? == 0x1234, "key {:#x}", into.key()?);
    let from = pair.sides[A].region(64)?;
    put(&from, 0, &pattern(1, 64))?;
    let remote = pair.sides[A].attach(&into)?;
    let flags = nonblocking(0).flags(TransferFlags::DELIVERY_COMPLETE);
    let id = pair
        .post(A, |s| s.endpoint.write(&mut s.queue, s.peer, &from.all(), &remote.all(), flags))?;
    pair.complete(A, id)?;
    check_bytes("by the key", &get(&into, 0, 64)?, &pattern(1, 64))
}

fn requested_key_in_use_is_refused(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    let options = RegistrationOptions::new(Access::ALL).requested_key(77);
    let first = pair.sides[B].region_for(64, options.clone())?;
    let error =
        pair.sides[B].domain.register(HostMemory::zeroed(64)?, options.clone()).unwrap_err();
    ensure!(error.kind() == ErrorKind::KeyInUse, "{error}");
    drop(first);
    // The key is free again.
    pair.sides[B].region_for(64, options)?;
    Ok(())
}

fn requested_key_is_ignored_where_the_provider_chooses(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    let mode = pair.sides[A].domain.capabilities().registration.mr_mode.without_deprecated();
    ensure!(mode.contains(MrMode::PROV_KEY), "the application chooses the keys here");
    // The manual page: the requested key is ignored.
    let options = RegistrationOptions::new(Access::ALL).requested_key(0x1234_5678_9abc);
    let region = pair.sides[A].domain.register(HostMemory::zeroed(64)?, options)?;
    ensure!(region.key()? != 0x1234_5678_9abc, "the provider used the requested key");
    Ok(())
}

fn no_key_cannot_be_requested(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    let options = RegistrationOptions::new(Access::ALL).requested_key(u64::MAX);
    let error = pair.sides[A].domain.register(HostMemory::zeroed(64)?, options).unwrap_err();
    ensure!(error.kind() == ErrorKind::KeyUnavailable, "{error}");
    Ok(())
}

fn keys_are_random(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    let mut keys = std::collections::HashSet::new();
    for _ in 0..100 {
        let region = pair.sides[A].region(64)?;
        let key = match region.describe()?.key() {
            RemoteKey::Plain(key) => *key,
            _ => return Err("raw key".into()),
        };
        ensure!(keys.insert(key), "key {key:#x} was repeated after its region was closed");
    }
    let bits = keys.iter().fold(0, |all, key| all | key);
    ensure!(bits.count_ones() > 50, "keys use only the bits {bits:#x}");
    Ok(())
}

fn raw_key_is_exchanged(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let mode = pair.sides[A].domain.capabilities().registration.mr_mode.without_deprecated();
    ensure!(mode.contains(MrMode::RAW), "keys are plain here");
    let into = pair.sides[B].region(4096)?;
    let (_, key) = into.raw_key()?;
    ensure!(key.len() > 8, "a raw key of {} bytes", key.len());
    let plain = into.key();
    ensure!(plain.as_ref().is_err_and(|e| e.kind() == ErrorKind::KeyUnavailable), "{plain:?}");
    let description = into.describe()?;
    ensure!(matches!(description.key(), RemoteKey::Raw(k) if *k == key), "{description:?}");
    let from = pair.sides[A].region(4096)?;
    put(&from, 0, &pattern(1, 4096))?;
    // Mapped and released repeatedly.
    for _ in 0..10 {
        let remote = pair.sides[A].attach(&into)?;
        ensure!(remote.is_mapped(), "the key was not mapped");
        let options = nonblocking(0).flags(TransferFlags::DELIVERY_COMPLETE);
        let id = pair.post(A, |s| {
            s.endpoint.write(&mut s.queue, s.peer, &from.all(), &remote.all(), options)
        })?;
        // Dropped while the operation is in flight, which retains it.
        drop(remote);
        pair.complete(A, id)?;
    }
    check_bytes("by raw key", &get(&into, 0, 4096)?, &pattern(1, 4096))
}

/// The manual page says "It is safe to use this call with any memory region"; but most
/// providers without raw keys return that they do not know the call.
fn raw_key_calls_return(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    let region = pair.sides[A].region(64)?;
    match region.raw_key() {
        Ok((_, key)) => ensure!(!key.is_empty(), "an empty raw key"),
        Err(error) => ensure!(
            matches!(error.kind(), ErrorKind::NotSupported | ErrorKind::InvalidArgument),
            "{error}"
        ),
    }
    Ok(())
}
