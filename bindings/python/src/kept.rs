//! Objects of Python that the library keeps: memory that an agent adopted.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr;
use std::sync::Mutex;

use ipc::PerProcess;
use pyo3::ffi;
use pyo3::prelude::*;
use threads::lock;

use crate::array::Source;

/// Sources that are not used any more.
static UNUSED: PerProcess<Mutex<Vec<Unused>>> = PerProcess::new();

struct Unused {
    _source: Source,
}

// SAFETY: it is dropped by threads that hold the lock of the interpreter, and not used otherwise.
unsafe impl Send for Unused {}

/// Arrays of other libraries whose memory an agent adopted. They are dropped by a thread of Python:
/// the last user may be a thread of the library, which must not wait for the interpreter.
pub(crate) struct Kept(Vec<Unused>);

// SAFETY: nothing is read through it.
unsafe impl Sync for Kept {}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Kept")
    }
}

impl Kept {
    pub(crate) fn new(source: Source) -> Self {
        Self::all([source])
    }

    /// Several arrays with one use.
    pub(crate) fn all(sources: impl IntoIterator<Item = Source>) -> Self {
        Self(sources.into_iter().map(|source| Unused { _source: source }).collect())
    }
}

/// Drops what is not used any more. Python calls it, with its lock.
extern "C" fn drop_unused_later(_nothing: *mut c_void) -> c_int {
    // It has the lock of the interpreter already, and is told so: otherwise references would be
    // dropped later. While the interpreter ends, what is left ends with the process.
    let _ = Python::try_attach(|_| {
        let unused = std::mem::take(&mut *lock(UNUSED.get()));
        drop(unused);
    });
    0
}

/// Drops what is not used any more: the main thread may wait for a long time, and only that runs
/// [pending calls](ffi::Py_AddPendingCall).
pub(crate) fn drop_unused(_py: Python<'_>) {
    drop_unused_later(ptr::null_mut());
}

impl Drop for Kept {
    fn drop(&mut self) {
        lock(UNUSED.get()).append(&mut self.0);
        // SAFETY: any thread may call it. If Python has too many calls to make, a later one drops
        // this source, too; if it ends, the process does.
        unsafe {
            if ffi::Py_IsInitialized() != 0 {
                ffi::Py_AddPendingCall(Some(drop_unused_later), ptr::null_mut());
            }
        }
    }
}
