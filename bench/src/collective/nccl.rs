//! NCCL, loaded at run time.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::path::Path;

use collective::Operation;
use command::exit::{Exit, Failure};
use libloading::{Library, Symbol};

/// The identity of a communicator.
#[derive(Clone, Copy)]
#[repr(C)]
struct UniqueId([u8; 128]);

type Handle = *mut c_void;

const FLOAT: c_int = 7;
const SUM: c_int = 0;

type Moving = unsafe extern "C" fn(u64, u64, usize, c_int, Handle, u64) -> c_int;
type Reducing = unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Handle, u64) -> c_int;
type RootedReducing =
    unsafe extern "C" fn(u64, u64, usize, c_int, c_int, c_int, Handle, u64) -> c_int;

/// A communicator of this process' current device.
#[derive(Debug)]
pub(crate) struct Nccl {
    library: Library,
    communicator: Handle,
}

fn failed(why: impl std::fmt::Display) -> Failure {
    Failure::new(Exit::NoProvider, format!("use NCCL failed: {why}"))
}

fn check(code: c_int) -> Result<(), Failure> {
    if code == 0 { Ok(()) } else { Err(Failure::failed(format!("NCCL returned {code}"))) }
}

impl Nccl {
    /// Joins a communicator. `share` gives the bytes of rank 0 to all ranks.
    pub(crate) fn start(
        path: Option<&Path>,
        rank: u32,
        ranks: u32,
        share: impl FnOnce(&mut [u8]) -> Result<(), Failure>,
    ) -> Result<Self, Failure> {
        let path = path.map_or_else(|| "libnccl.so.2".into(), Path::to_owned);
        // SAFETY: NCCL has no requirements for being loaded.
        let library = unsafe { Library::new(&path) }.map_err(failed)?;
        let mut nccl = Self { library, communicator: std::ptr::null_mut() };
        let mut id = UniqueId([0; 128]);
        type Identify = unsafe extern "C" fn(*mut UniqueId) -> c_int;
        type Join = unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int) -> c_int;
        if rank == 0 {
            // SAFETY: as NCCL declares it.
            check(unsafe { nccl.function::<Identify>(b"ncclGetUniqueId")?(&raw mut id) })?;
        }
        share(&mut id.0)?;
        let mut communicator = std::ptr::null_mut();
        let (ranks, rank) = (ranks.cast_signed(), rank.cast_signed());
        // SAFETY: as NCCL declares it.
        check(unsafe {
            nccl.function::<Join>(b"ncclCommInitRank")?(&raw mut communicator, ranks, id, rank)
        })?;
        nccl.communicator = communicator;
        Ok(nccl)
    }

    /// # Safety
    /// The function has this type.
    unsafe fn function<F>(&self, name: &[u8]) -> Result<Symbol<'_, F>, Failure> {
        // SAFETY: the caller's promise.
        unsafe { self.library.get(name) }.map_err(failed)
    }

    /// Starts an operation with blocks of f32 once for each turn, on the default stream.
    pub(crate) fn run(
        &self,
        operation: Operation,
        from: u64,
        to: u64,
        count: usize,
        turns: u64,
    ) -> Result<(), Failure> {
        let comm = self.communicator;
        let repeat = |call: &dyn Fn() -> c_int| (0..turns).try_for_each(|_| check(call()));
        // SAFETY: the functions are as NCCL declares them; the buffers have space for the elements.
        unsafe {
            match operation {
                Operation::AllGather => {
                    let call = self.function::<Moving>(b"ncclAllGather")?;
                    repeat(&|| call(from, to, count, FLOAT, comm, 0))
                }
                Operation::AllToAll => {
                    let call = self.function::<Moving>(b"ncclAlltoAll")?;
                    repeat(&|| call(from, to, count, FLOAT, comm, 0))
                }
                Operation::AllReduce => {
                    let call = self.function::<Reducing>(b"ncclAllReduce")?;
                    repeat(&|| call(from, to, count, FLOAT, SUM, comm, 0))
                }
                Operation::ReduceScatter => {
                    let call = self.function::<Reducing>(b"ncclReduceScatter")?;
                    repeat(&|| call(from, to, count, FLOAT, SUM, comm, 0))
                }
                Operation::Reduce => {
                    let call = self.function::<RootedReducing>(b"ncclReduce")?;
                    repeat(&|| call(from, to, count, FLOAT, SUM, 0, comm, 0))
                }
                Operation::Broadcast => {
                    let call = self.function::<Reducing>(b"ncclBroadcast")?;
                    repeat(&|| call(to, to, count, FLOAT, 0, comm, 0))
                }
                Operation::Gather => {
                    let call = self.function::<Reducing>(b"ncclGather")?;
                    repeat(&|| call(from, to, count, FLOAT, 0, comm, 0))
                }
                Operation::Scatter => {
                    let call = self.function::<Reducing>(b"ncclScatter")?;
                    repeat(&|| call(from, to, count, FLOAT, 0, comm, 0))
                }
                other => Err(failed(format!("it has no {other}"))),
            }
        }
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        type End = unsafe extern "C" fn(Handle) -> c_int;
        // SAFETY: as NCCL declares it.
        if let Ok(end) = unsafe { self.function::<End>(b"ncclCommDestroy") } {
            // SAFETY: a communicator whose operations are done.
            unsafe { end(self.communicator) };
        }
    }
}
