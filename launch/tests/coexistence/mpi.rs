//! MPI libraries, loaded at run time as an extension of another language does it.
//!
//! Handles are integers in MPICH and addresses in Open MPI; their values are part of the binary
//! interface of either. Both are passed as one machine word.

use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::process::{Command, Stdio};
use std::ptr::null_mut;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// An MPI implementation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Implementation {
    OpenMpi,
    Mpich,
}

impl Implementation {
    /// By the word with which a test starts its ranks.
    pub(crate) fn of_name(name: &str) -> Self {
        [Self::OpenMpi, Self::Mpich].into_iter().find(|it| it.name() == name).expect(name)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::OpenMpi => "openmpi",
            Self::Mpich => "mpich",
        }
    }

    fn library(self) -> &'static str {
        match self {
            Self::OpenMpi => "libmpi.so.40",
            Self::Mpich => "libmpich.so.12",
        }
    }

    /// The implementation's launcher, for more ranks than processors.
    pub(crate) fn launcher(self) -> &'static [&'static str] {
        match self {
            Self::OpenMpi => &[
                "mpirun.openmpi",
                "--allow-run-as-root",
                "--oversubscribe",
                "--mca",
                "mpi_yield_when_idle",
                "1",
            ],
            Self::Mpich => &["mpirun.mpich"],
        }
    }

    /// Why it cannot be tested here.
    pub(crate) fn obstacle(self) -> Option<String> {
        let launcher = self.launcher()[0];
        let version = Command::new(launcher).arg("--version").stdout(Stdio::null()).status();
        if !version.is_ok_and(|status| status.success()) {
            return Some(format!("{launcher} is not installed"));
        }
        // SAFETY: its initialisers are those of an MPI library, which have no preconditions.
        match unsafe { Library::new(self.library()) } {
            Ok(_) => None,
            Err(_) => Some(format!("{} is not installed", self.library())),
        }
    }
}

/// How threads may call MPI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum ThreadLevel {
    Single = 0,
    Funneled = 1,
    Multiple = 3,
}

/// The functions of a loaded MPI library. It stays loaded: threads of PMIx, which end at the exit of
/// the process, run its code.
#[derive(Debug)]
pub(crate) struct Mpi {
    library: ManuallyDrop<Library>,
    world: usize,
    byte: usize,
    /// No status is wanted.
    ignore: usize,
}

impl Mpi {
    pub(crate) fn load(implementation: Implementation) -> Self {
        let name = implementation.library();
        // SAFETY: its initialisers are those of an MPI library. Its plugins need its names.
        let library = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_GLOBAL) }.unwrap();
        let library = ManuallyDrop::new(library);
        let address = |name: &[u8]| {
            // SAFETY: only the address is used.
            unsafe { library.get::<*mut c_void>(name) }.unwrap().as_raw_ptr() as usize
        };
        let (world, byte, ignore) = match implementation {
            Implementation::OpenMpi => {
                (address(b"ompi_mpi_comm_world\0"), address(b"ompi_mpi_byte\0"), 0)
            }
            Implementation::Mpich => (0x4400_0000, 0x4c00_010d, 1),
        };
        Self { library, world, byte, ignore }
    }

    pub(crate) fn init(&self, level: ThreadLevel) {
        type Init = unsafe extern "C" fn(*mut c_void, *mut c_void, c_int, *mut c_int) -> c_int;
        let mut provided = 0;
        // SAFETY: as the MPI standard declares it; null pointers instead of main's arguments.
        let code = unsafe {
            let init = self.library.get::<Init>(b"MPI_Init_thread\0").unwrap();
            init(null_mut(), null_mut(), level as c_int, &raw mut provided)
        };
        assert!(code == 0 && provided >= level as c_int, "MPI_Init_thread: {code}, {provided}");
    }

    pub(crate) fn finalize(&self) {
        // SAFETY: as the MPI standard declares it.
        let code = unsafe {
            self.library.get::<unsafe extern "C" fn() -> c_int>(b"MPI_Finalize\0").unwrap()()
        };
        assert_eq!(code, 0, "MPI_Finalize");
    }

    pub(crate) fn abort(&self, exit_code: c_int) -> ! {
        type Abort = unsafe extern "C" fn(usize, c_int) -> c_int;
        // SAFETY: as the MPI standard declares it, with the communicator in a machine word.
        unsafe { self.library.get::<Abort>(b"MPI_Abort\0").unwrap()(self.world, exit_code) };
        unreachable!("MPI_Abort returned");
    }

    /// Sends bytes to one rank, and receives as many from another one.
    pub(crate) fn send_receive(&self, to: u32, sent: &[u8], from: u32, received: &mut [u8]) {
        type SendReceive = unsafe extern "C" fn(
            *const u8,
            c_int,
            usize,
            c_int,
            c_int,
            *mut u8,
            c_int,
            usize,
            c_int,
            c_int,
            usize,
            usize,
        ) -> c_int;
        const TAG: c_int = 7;
        let (sent_length, received_length) = (sent.len() as c_int, received.len() as c_int);
        // SAFETY: as the MPI standard declares it, with handles in machine words; both buffers have
        // their lengths.
        let code = unsafe {
            self.library.get::<SendReceive>(b"MPI_Sendrecv\0").unwrap()(
                sent.as_ptr(),
                sent_length,
                self.byte,
                to as c_int,
                TAG,
                received.as_mut_ptr(),
                received_length,
                self.byte,
                from as c_int,
                TAG,
                self.world,
                self.ignore,
            )
        };
        assert_eq!(code, 0, "MPI_Sendrecv");
    }
}
