//! Functions that PyTorch calls as a pluggable allocator: its tensors then lie in memory that other
//! processes can map.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use gpu::{Device, DeviceName, Memory, Pool, WeakMemory};
use ipc::PerProcess;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::failure::Result;

/// The pools of this process, by the numbers of their devices.
static POOLS: PerProcess<Mutex<HashMap<u32, Arc<Pool>>>> = PerProcess::new();

/// Identities of memories of pools, by device and address.
static IDENTITIES: PerProcess<Mutex<Identities>> = PerProcess::new();

type Identities = HashMap<(u32, u64), (WeakMemory, [u8; 16])>;

fn pool_of(number: u32) -> gpu::Result<Arc<Pool>> {
    let mut pools = POOLS.get().lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pool) = pools.get(&number) {
        return Ok(Arc::clone(pool));
    }
    let pool = Arc::new(Pool::new(&Device::open(DeviceName::cuda(number))?));
    pools.insert(number, Arc::clone(&pool));
    Ok(pool)
}

/// The memory of a pool that contains these bytes of a device, and the identity of its shares.
pub(crate) fn find_in_pool(number: u32, address: u64, length: u64) -> Option<(Memory, [u8; 16])> {
    let pools = POOLS.get().lock().unwrap_or_else(PoisonError::into_inner);
    let memory = pools.get(&number)?.segment(address)?;
    drop(pools);
    if address + length > memory.address() + memory.length() {
        return None;
    }
    let mut identities = IDENTITIES.get().lock().unwrap_or_else(PoisonError::into_inner);
    let key = (number, memory.address());
    if let Some((known, identity)) = identities.get(&key)
        && known.upgrade().is_some_and(|known| known.identity() == memory.identity())
    {
        return Some((memory, *identity));
    }
    identities.retain(|_, (known, _)| known.upgrade().is_some());
    let mut identity = [0; 16];
    getrandom::fill(&mut identity).ok()?;
    identities.insert(key, (memory.downgrade(), identity));
    Some((memory, identity))
}

/// Allocates memory for use in the order of a stream. Null without memory: the log has the reason.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fabricast_torch_malloc(
    length: usize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    let allocated = u32::try_from(device)
        .map_err(drop)
        .and_then(|number| pool_of(number).map_err(|error| tracing::error!("{error}")))
        .and_then(|pool| {
            let handle = stream.expose_provenance() as u64;
            let block = pool.allocate(length as u64, handle, &|point| {
                // SAFETY: the framework's stream.
                unsafe { pool.device().adopt_stream(handle) }.ok()?.wait_for(point).ok()
            });
            block.map_err(|error| tracing::error!("{error}; {:?}", pool.statistics()))
        });
    match allocated {
        Ok(address) => ptr::with_exposed_provenance_mut(address as usize),
        Err(()) => ptr::null_mut(),
    }
}

/// Frees memory, in the order of its stream. Memory of no pool is left as it is.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fabricast_torch_free(
    address: *mut c_void,
    _length: usize,
    device: c_int,
    stream: *mut c_void,
) {
    let Ok(number) = u32::try_from(device) else { return };
    let Ok(pool) = pool_of(number) else { return };
    let handle = stream.expose_provenance() as u64;
    // SAFETY: the framework frees memory of a stream that it has. A stream that is being captured is
    // refused: then it is not known when the block is free.
    let stream = unsafe { pool.device().adopt_stream(handle) };
    let point = stream.and_then(|stream| stream.point()).ok();
    pool.free(address.expose_provenance() as u64, handle, point);
}

/// Figures of the pool of a device: bytes, and events so far.
#[pyfunction]
pub(crate) fn _pool_statistics(py: Python<'_>, device: u32) -> Result<Bound<'_, PyDict>> {
    let found = pool_of(device)?.statistics();
    let statistics = PyDict::new(py);
    for (name, value) in [
        ("reserved", found.reserved),
        ("allocated", found.allocated),
        ("waiting", found.waiting),
        ("peak", found.peak),
        ("allocations", found.allocations),
        ("grown", found.grown),
    ] {
        statistics.set_item(name, value)?;
    }
    Ok(statistics)
}

/// Gives unused memory of the pool of a device back.
#[pyfunction]
pub(crate) fn _trim_pool(py: Python<'_>, device: u32) -> Result<()> {
    let pool = pool_of(device)?;
    py.detach(|| pool.trim());
    Ok(())
}
