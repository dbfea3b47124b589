//! Blocks that this library allocated, and memory of other processes that it mapped.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use gpu::{Device, DeviceName, Memory, Pool};
use ipc::PerProcess;
use threads::lock;
use transfer::{OpenedBuffer, SHORT_TOKEN_LENGTH, Share, SharedBuffer, Tensor};

use crate::original::{Code, cudaDeviceSynchronize, current_device};
use crate::settings::{log, settings};

/// How long the owner of memory may take to answer.
const TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct Block {
    memory: Memory,
    /// Made when its first handle is requested.
    share: Option<Share>,
}

#[derive(Debug, Default)]
struct Blocks {
    /// Blocks of `cudaMalloc`, by their addresses.
    plain: BTreeMap<u64, Block>,
    /// Memory of other processes, by its address, and how often it was opened.
    opened: HashMap<u64, (OpenedBuffer, u32)>,
    /// Pools of `cudaMallocAsync`, by the numbers of their devices.
    pools: HashMap<u32, Arc<Pool>>,
}

static BLOCKS: PerProcess<Mutex<Blocks>> = PerProcess::new();

fn blocks() -> MutexGuard<'static, Blocks> {
    lock(BLOCKS.get())
}

/// The current device; None for a request that is not handled here.
fn device_for(length: usize) -> Option<Device> {
    if !settings().allocates(length) {
        return None;
    }
    Device::open(DeviceName::cuda(current_device()?)).ok()
}

/// Allocates a block that other processes can map.
pub(crate) fn allocate(length: usize) -> Option<u64> {
    let device = device_for(length)?;
    let memory = device.allocate_shared(length as u64, &device.peers()).ok()?;
    let address = memory.address();
    log(|| format!("cudaMalloc: {length} bytes at {address:#x} on {}", device.name()));
    blocks().plain.insert(address, Block { memory, share: None });
    Some(address)
}

/// The device of a block of [`allocate`].
pub(crate) fn device_of_plain(address: u64) -> Option<Device> {
    blocks().plain.get(&address).map(|block| block.memory.mapped_for().clone())
}

/// Waits for all work of a device, whatever device is current.
pub(crate) fn synchronize(device: &Device) -> Option<Code> {
    // SAFETY: no pointers.
    device.with_context(|| unsafe { cudaDeviceSynchronize() }).ok()
}

/// Frees a block of [`allocate`], after all work of its device. Processes that opened it keep it.
pub(crate) fn free(address: u64) {
    let block = blocks().plain.remove(&address);
    drop(block);
}

/// Allocates a block of a pool, for use in the order of a stream.
pub(crate) fn allocate_async(length: usize, stream: u64) -> Option<u64> {
    let device = device_for(length)?;
    // SAFETY: the caller's stream. One that is being captured is refused: the block would belong to
    // the graph.
    unsafe { device.adopt_stream(stream) }.ok()?;
    let pool = {
        let mut blocks = blocks();
        let new = || Arc::new(Pool::new(&device));
        Arc::clone(blocks.pools.entry(device.name().number).or_insert_with(new))
    };
    // SAFETY: the caller's stream.
    unsafe { pool.allocate(length as u64, stream) }.ok()
}

/// The pool of a block of [`allocate_async`].
pub(crate) fn pool_of(address: u64) -> Option<Arc<Pool>> {
    let pools: Vec<_> = blocks().pools.values().cloned().collect();
    pools.into_iter().find(|pool| pool.segment(address).is_some())
}

/// Frees a block of a pool, in the order of a stream. None if it is of none.
pub(crate) fn free_async(address: u64, stream: u64) -> Option<()> {
    let pool = pool_of(address)?;
    // SAFETY: the caller's stream.
    unsafe { pool.free(address, stream) }.then_some(())
}

/// The handle by which other processes map the block of this address.
pub(crate) fn export(address: u64) -> Option<[u8; 64]> {
    let mut blocks = blocks();
    let (start, block) = blocks.plain.range_mut(..=address).next_back()?;
    if address - start >= block.memory.length() {
        return None;
    }
    if block.share.is_none() {
        let tensor = Tensor::bytes(block.memory.length());
        let shared = SharedBuffer::new(&block.memory, &tensor).ok()?;
        block.share = Some(transfer::share(settings().directory(), shared).ok()?);
    }
    let token = block.share.as_ref()?.short_token();
    let mut handle = [0; 64];
    handle[..SHORT_TOKEN_LENGTH].copy_from_slice(&token);
    Some(handle)
}

/// Maps the block of a handle. None for a handle of the driver.
pub(crate) fn open(handle: &[u8; 64]) -> Option<Result<u64, transfer::Error>> {
    let token = handle.get(..SHORT_TOKEN_LENGTH).filter(|token| transfer::is_token(token))?;
    let device = Device::open(DeviceName::cuda(current_device()?)).ok()?;
    let opened = transfer::open(token, settings().directory(), Some(&device), TIMEOUT);
    Some(opened.map(|opened| {
        let address = opened.address();
        log(|| format!("cudaIpcOpenMemHandle: mapped at {address:#x} for {}", device.name()));
        blocks().opened.entry(address).or_insert((opened, 0)).1 += 1;
        address
    }))
}

/// The devices that use memory of [`open`]: its own, and the one that it was opened for.
pub(crate) fn devices_of_opened(address: u64) -> Option<Vec<Device>> {
    let blocks = blocks();
    let memory = blocks.opened.get(&address)?.0.memory()?.clone();
    drop(blocks);
    let used_by = memory.mapped_for().clone();
    let own = memory.device().and_then(|name| Device::open(name).ok());
    Some(own.into_iter().chain([used_by]).collect())
}

/// Unmaps memory of [`open`], after its last user.
pub(crate) fn close(address: u64) {
    let mut blocks = blocks();
    let Some((_, count)) = blocks.opened.get_mut(&address) else { return };
    *count -= 1;
    if *count == 0 {
        let closed = blocks.opened.remove(&address);
        drop(blocks);
        drop(closed);
    }
}
