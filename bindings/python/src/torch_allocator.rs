//! Functions that PyTorch calls as a pluggable allocator: its tensors then lie in memory that other
//! processes can map.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex};

use gpu::{DeviceName, Memory, Pool};
use ipc::PerProcess;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use threads::lock;

use crate::devices::open_device;
use crate::failure::Result;

/// The pools of this process, by the numbers of their devices.
static POOLS: PerProcess<Mutex<HashMap<u32, Arc<Pool>>>> = PerProcess::new();

fn pool_of(number: u32) -> gpu::Result<Arc<Pool>> {
    let mut pools = lock(POOLS.get());
    if let Some(pool) = pools.get(&number) {
        return Ok(Arc::clone(pool));
    }
    let pool = Arc::new(Pool::new(&open_device(DeviceName::cuda(number))?));
    pools.insert(number, Arc::clone(&pool));
    Ok(pool)
}

/// The memory of a pool that contains these bytes of a device.
pub(crate) fn find_in_pool(number: u32, address: u64, length: u64) -> Option<Memory> {
    let pools = lock(POOLS.get());
    let memory = pools.get(&number)?.segment(address)?;
    (address + length <= memory.address() + memory.length()).then_some(memory)
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
            // SAFETY: the framework's stream.
            let block = unsafe { pool.allocate(length as u64, stream.expose_provenance() as u64) };
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
    let (address, stream) = (address.expose_provenance(), stream.expose_provenance());
    // SAFETY: the framework frees memory of a stream that it has.
    unsafe { pool.free(address as u64, stream as u64) };
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
