//! The callback that tells the program that its memory is not used any more.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::failure::{Failure, Operation, Result};
use crate::ffi::{IN_CALLBACK, UserData, plain};

/// `fabricast_release_callback`.
pub(crate) type ReleaseCallback = unsafe extern "C" fn(*mut c_void);
/// The callback as C passes it.
pub(crate) type OptionalReleaseCallback = Option<ReleaseCallback>;

plain!(OptionalReleaseCallback);

/// Calls the callback when it is dropped, if it was armed.
#[derive(Debug)]
pub(crate) struct Release {
    callback: ReleaseCallback,
    user_data: UserData,
    is_armed: AtomicBool,
}

impl Release {
    pub(crate) fn new(
        operation: Operation,
        callback: OptionalReleaseCallback,
        user_data: UserData,
    ) -> Result<Self> {
        let Some(callback) = callback else {
            return Err(Failure::invalid(operation, "the argument \"release\" is NULL"));
        };
        Ok(Self { callback, user_data, is_armed: AtomicBool::new(false) })
    }

    /// From now on the callback is called, since the memory was adopted.
    pub(crate) fn arm(&self) {
        self.is_armed.store(true, Ordering::Release);
    }
}

impl Drop for Release {
    fn drop(&mut self) {
        if !self.is_armed.load(Ordering::Acquire) {
            return;
        }
        // The thread may hold locks of the library.
        let before = IN_CALLBACK.replace(true);
        // SAFETY: the header requires a callback that any thread may call at any time, once.
        unsafe { (self.callback)(self.user_data.pointer()) };
        IN_CALLBACK.set(before);
    }
}
