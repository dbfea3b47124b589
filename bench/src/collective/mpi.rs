//! The MPI library of the launcher, loaded at run time.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::path::Path;

use collective::Operation;
use command::exit::{Exit, Failure};
use libloading::{Library, Symbol};

use super::buffers::Buffers;

/// Handles of communicators, types and operations: addresses in Open MPI, numbers in MPICH.
type Handle = usize;

const MPICH_WORLD: Handle = 0x4400_0000;
const MPICH_FLOAT: Handle = 0x4c00_040a;
const MPICH_SUM: Handle = 0x5800_0003;

type Init = unsafe extern "C" fn(*mut c_int, *mut *mut *mut u8) -> c_int;
type OneArgument = unsafe extern "C" fn(Handle) -> c_int;
type NoArgument = unsafe extern "C" fn() -> c_int;
type Query = unsafe extern "C" fn(Handle, *mut c_int) -> c_int;
type Reducing =
    unsafe extern "C" fn(*const c_void, *mut c_void, c_int, Handle, Handle, Handle) -> c_int;
type Moving =
    unsafe extern "C" fn(*const c_void, c_int, Handle, *mut c_void, c_int, Handle, Handle) -> c_int;
type Rooted = unsafe extern "C" fn(
    *const c_void,
    c_int,
    Handle,
    *mut c_void,
    c_int,
    Handle,
    c_int,
    Handle,
) -> c_int;
type RootedReducing =
    unsafe extern "C" fn(*const c_void, *mut c_void, c_int, Handle, Handle, c_int, Handle) -> c_int;
type Broadcasting = unsafe extern "C" fn(*mut c_void, c_int, Handle, c_int, Handle) -> c_int;

/// An initialized MPI library.
#[derive(Debug)]
pub(crate) struct Mpi {
    library: Library,
    world: Handle,
    float: Handle,
    sum: Handle,
}

fn failed(why: impl std::fmt::Display) -> Failure {
    Failure::new(Exit::NoProvider, format!("load MPI library failed: {why}"))
}

impl Mpi {
    /// Loads and initializes a library; by default the one that the launcher's processes find.
    pub(crate) fn start(path: Option<&Path>) -> Result<Self, Failure> {
        let names = match path {
            Some(path) => vec![path.to_owned()],
            None => ["libmpi.so.40", "libmpi.so.12", "libmpi.so"].map(Into::into).to_vec(),
        };
        // SAFETY: an MPI library has no requirements for being loaded.
        let open = |name: &std::path::PathBuf| unsafe {
            libloading::os::unix::Library::open(Some(name), libc_flags())
        };
        let library = names.iter().find_map(|name| open(name).ok());
        let library: Library =
            library.ok_or_else(|| failed(format!("{names:?} not found")))?.into();
        let address = |name: &[u8]| {
            // SAFETY: an object of Open MPI, whose address is the handle.
            let symbol = unsafe { library.get::<*mut c_void>(name) }.ok()?;
            // SAFETY: only its address is used.
            unsafe { symbol.try_as_raw_ptr() }.map(|at| at.addr())
        };
        let (world, float, sum) = match address(b"ompi_mpi_comm_world") {
            Some(world) => {
                let float = address(b"ompi_mpi_float").unwrap_or(0);
                (world, float, address(b"ompi_mpi_op_sum").unwrap_or(0))
            }
            None => (MPICH_WORLD, MPICH_FLOAT, MPICH_SUM),
        };
        let mpi = Self { library, world, float, sum };
        // SAFETY: as the MPI standard declares it; no arguments.
        let code = unsafe {
            mpi.function::<Init>(b"MPI_Init")?(std::ptr::null_mut(), std::ptr::null_mut())
        };
        if code == 0 { Ok(mpi) } else { Err(failed(format!("MPI_Init returned {code}"))) }
    }

    /// # Safety
    /// The function has this type.
    unsafe fn function<F>(&self, name: &[u8]) -> Result<Symbol<'_, F>, Failure> {
        // SAFETY: the caller's promise.
        unsafe { self.library.get(name) }.map_err(failed)
    }

    /// The rank of this process, and the number of ranks.
    pub(crate) fn place(&self) -> Result<(u32, u32), Failure> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: as the MPI standard declares them.
        unsafe {
            self.function::<Query>(b"MPI_Comm_rank")?(self.world, &raw mut rank);
            self.function::<Query>(b"MPI_Comm_size")?(self.world, &raw mut size);
        }
        Ok((rank.cast_unsigned(), size.cast_unsigned()))
    }

    /// Waits until all ranks have called it.
    pub(crate) fn barrier(&self) -> Result<(), Failure> {
        // SAFETY: as the MPI standard declares it.
        check(unsafe { self.function::<OneArgument>(b"MPI_Barrier")?(self.world) })
    }

    /// Carries out an operation once for each turn.
    pub(crate) fn run(
        &self,
        operation: Operation,
        buffers: &mut Buffers,
        turns: u64,
    ) -> Result<(), Failure> {
        let (from, to) = (buffers.input().cast::<c_void>(), buffers.output().cast::<c_void>());
        let count = c_int::try_from(buffers.count()).map_err(failed)?;
        let Self { world, float, sum, .. } = *self;
        // SAFETY: the functions are as the MPI standard declares them; the buffers have space for the
        // elements of the operation.
        unsafe {
            match operation {
                Operation::AllReduce => {
                    let call = self.function::<Reducing>(b"MPI_Allreduce")?;
                    repeat(turns, || call(from, to, count, float, sum, world))
                }
                Operation::ReduceScatter => {
                    let call = self.function::<Reducing>(b"MPI_Reduce_scatter_block")?;
                    repeat(turns, || call(from, to, count, float, sum, world))
                }
                Operation::AllGather => {
                    let call = self.function::<Moving>(b"MPI_Allgather")?;
                    repeat(turns, || call(from, count, float, to, count, float, world))
                }
                Operation::AllToAll => {
                    let call = self.function::<Moving>(b"MPI_Alltoall")?;
                    repeat(turns, || call(from, count, float, to, count, float, world))
                }
                Operation::Gather => {
                    let call = self.function::<Rooted>(b"MPI_Gather")?;
                    repeat(turns, || call(from, count, float, to, count, float, 0, world))
                }
                Operation::Scatter => {
                    let call = self.function::<Rooted>(b"MPI_Scatter")?;
                    repeat(turns, || call(from, count, float, to, count, float, 0, world))
                }
                Operation::Reduce => {
                    let call = self.function::<RootedReducing>(b"MPI_Reduce")?;
                    repeat(turns, || call(from, to, count, float, sum, 0, world))
                }
                Operation::Broadcast => {
                    let call = self.function::<Broadcasting>(b"MPI_Bcast")?;
                    repeat(turns, || call(to, count, float, 0, world))
                }
                _ => {
                    let call = self.function::<OneArgument>(b"MPI_Barrier")?;
                    repeat(turns, || call(world))
                }
            }
        }
    }
}

/// Symbols of the library are visible to the libraries that it loads itself.
fn libc_flags() -> c_int {
    libloading::os::unix::RTLD_NOW | libloading::os::unix::RTLD_GLOBAL
}

fn repeat(turns: u64, mut call: impl FnMut() -> c_int) -> Result<(), Failure> {
    (0..turns).try_for_each(|_| check(call()))
}

fn check(code: c_int) -> Result<(), Failure> {
    if code == 0 { Ok(()) } else { Err(Failure::failed(format!("MPI returned {code}"))) }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        // SAFETY: as the MPI standard declares it.
        if let Ok(finalize) = unsafe { self.function::<NoArgument>(b"MPI_Finalize") } {
            // SAFETY: no operation runs.
            unsafe { finalize() };
        }
    }
}
