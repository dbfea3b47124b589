//! Objects of Python that the library keeps: memory that an agent adopted.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr;
use std::sync::{Mutex, PoisonError};

use pyo3::ffi;

use crate::array::Source;

/// Sources that are not used any more.
static UNUSED: Mutex<Vec<Unused>> = Mutex::new(Vec::new());

struct Unused {
    _source: Source,
}

// SAFETY: it is dropped by threads that hold the lock of the interpreter, and not used otherwise.
unsafe impl Send for Unused {}

/// An array of another library whose memory an agent adopted. It is dropped by a thread of Python:
/// the last user may be a thread of the library, which must not wait for the interpreter.
pub(crate) struct Kept(Option<Unused>);

// SAFETY: nothing is read through it.
unsafe impl Sync for Kept {}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Kept")
    }
}

impl Kept {
    pub(crate) fn new(source: Source) -> Self {
        Self(Some(Unused { _source: source }))
    }
}

/// Drops what is not used any more. Python calls it, with its lock.
extern "C" fn drop_unused(_nothing: *mut c_void) -> c_int {
    let unused = std::mem::take(&mut *UNUSED.lock().unwrap_or_else(PoisonError::into_inner));
    drop(unused);
    0
}

impl Drop for Kept {
    fn drop(&mut self) {
        UNUSED.lock().unwrap_or_else(PoisonError::into_inner).extend(self.0.take());
        // SAFETY: any thread may call it. If Python has too many calls to make, a later one drops
        // this source, too; if it ends, the process does.
        unsafe {
            if ffi::Py_IsInitialized() != 0 {
                ffi::Py_AddPendingCall(Some(drop_unused), ptr::null_mut());
            }
        }
    }
}
