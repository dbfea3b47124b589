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
    /// Operations have windows, and run on this stream: by copy engines, if NCCL's policy is so.
    stream: Option<u64>,
    windows: Vec<(u64, Handle)>,
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
        stream: Option<u64>,
        share: impl FnOnce(&mut [u8]) -> Result<(), Failure>,
    ) -> Result<Self, Failure> {
        let path = path.map_or_else(|| "libnccl.so.2".into(), Path::to_owned);
        // SAFETY: NCCL has no requirements for being loaded.
        let library = unsafe { Library::new(&path) }.map_err(failed)?;
        let (communicator, windows) = (std::ptr::null_mut(), Vec::new());
        let mut nccl = Self { library, communicator, stream, windows };
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

    /// Returns whether its operations have windows.
    pub(crate) fn has_windows(&self) -> bool {
        self.stream.is_some()
    }

    /// Allocates memory that all ranks of the communicator access, instead of that before. All ranks call it.
    pub(crate) fn allocate(&mut self, lengths: [usize; 2]) -> Result<[u64; 2], Failure> {
        type Allocate = unsafe extern "C" fn(*mut u64, usize) -> c_int;
        type Register = unsafe extern "C" fn(Handle, u64, usize, *mut Handle, c_int) -> c_int;
        const SYMMETRIC: c_int = 1;
        self.free_windows();
        let mut addresses = [0; 2];
        for (address, length) in addresses.iter_mut().zip(lengths) {
            let mut window = std::ptr::null_mut();
            // SAFETY: as NCCL declares them.
            unsafe {
                check(self.function::<Allocate>(b"ncclMemAlloc")?(address, length))?;
                let register = self.function::<Register>(b"ncclCommWindowRegister")?;
                let (communicator, at) = (self.communicator, *address);
                check(register(communicator, at, length, &raw mut window, SYMMETRIC))?;
            }
            self.windows.push((*address, window));
        }
        Ok(addresses)
    }

    fn free_windows(&mut self) {
        type Deregister = unsafe extern "C" fn(Handle, Handle) -> c_int;
        type Free = unsafe extern "C" fn(u64) -> c_int;
        for (address, window) in std::mem::take(&mut self.windows) {
            // SAFETY: as NCCL declares them; operations are done.
            unsafe {
                if let Ok(deregister) = self.function::<Deregister>(b"ncclCommWindowDeregister") {
                    deregister(self.communicator, window);
                }
                if let Ok(free) = self.function::<Free>(b"ncclMemFree") {
                    free(address);
                }
            }
        }
    }

    /// # Safety
    /// The function has this type.
    unsafe fn function<F>(&self, name: &[u8]) -> Result<Symbol<'_, F>, Failure> {
        // SAFETY: the caller's promise.
        unsafe { self.library.get(name) }.map_err(failed)
    }

    /// Starts an operation with blocks of f32 once for each turn, on the default stream, or its own one.
    pub(crate) fn run(
        &self,
        operation: Operation,
        from: u64,
        to: u64,
        count: usize,
        turns: u64,
    ) -> Result<(), Failure> {
        let (comm, stream) = (self.communicator, self.stream.unwrap_or(0));
        let repeat = |call: &dyn Fn() -> c_int| (0..turns).try_for_each(|_| check(call()));
        // SAFETY: the functions are as NCCL declares them; the buffers have space for the elements.
        unsafe {
            match operation {
                Operation::AllGather => {
                    let call = self.function::<Moving>(b"ncclAllGather")?;
                    repeat(&|| call(from, to, count, FLOAT, comm, stream))
                }
                Operation::AllToAll => {
                    let call = self.function::<Moving>(b"ncclAlltoAll")?;
                    repeat(&|| call(from, to, count, FLOAT, comm, stream))
                }
                Operation::AllReduce => {
                    let call = self.function::<Reducing>(b"ncclAllReduce")?;
                    repeat(&|| call(from, to, count, FLOAT, SUM, comm, stream))
                }
                Operation::ReduceScatter => {
                    let call = self.function::<Reducing>(b"ncclReduceScatter")?;
                    repeat(&|| call(from, to, count, FLOAT, SUM, comm, stream))
                }
                Operation::Reduce => {
                    let call = self.function::<RootedReducing>(b"ncclReduce")?;
                    repeat(&|| call(from, to, count, FLOAT, SUM, 0, comm, stream))
                }
                Operation::Broadcast => {
                    let call = self.function::<Reducing>(b"ncclBroadcast")?;
                    repeat(&|| call(to, to, count, FLOAT, 0, comm, stream))
                }
                Operation::Gather => {
                    let call = self.function::<Reducing>(b"ncclGather")?;
                    repeat(&|| call(from, to, count, FLOAT, 0, comm, stream))
                }
                Operation::Scatter => {
                    let call = self.function::<Reducing>(b"ncclScatter")?;
                    repeat(&|| call(from, to, count, FLOAT, 0, comm, stream))
                }
                other => Err(failed(format!("it has no {other}"))),
            }
        }
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        self.free_windows();
        type End = unsafe extern "C" fn(Handle) -> c_int;
        // SAFETY: as NCCL declares it.
        if let Ok(end) = unsafe { self.function::<End>(b"ncclCommDestroy") } {
            // SAFETY: a communicator whose operations are done.
            unsafe { end(self.communicator) };
        }
    }
}
