//! Devices behind NVIDIA's driver, and the context that all their objects share.
#![allow(unsafe_code)]

mod device_driver;
mod fabric_handle;
mod kernels;
mod library;
mod locate;
mod memory_driver;
mod stream_driver;

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use cudarc::driver::sys;

use self::kernels::Kernels;
use self::library::{
    Address, CONTEXT_DESTROYED, Code, DEINITIALIZED, Functions, INVALID_CONTEXT, NOT_READY,
};
use crate::device_name::{DeviceName, Implementation};
use crate::error::{Error, ErrorKind, Result};
use crate::stream_waits::any_stream_waits;

pub(crate) use device_driver::{Device, uuid};
pub(crate) use library::{device_count, functions};
pub(crate) use locate::{PointerLocation, has_context, locate};

/// The primary context of a device, retained; frameworks use the same context.
struct Context {
    functions: &'static Functions,
    number: u32,
    device: c_int,
    raw: sys::CUcontext,
    kernels: Kernels,
    /// Unused pinned blocks and their lengths, for the next requests of the same length. The driver
    /// frees such memory only when the whole device is idle. If a stream waits for another process,
    /// that can take long; if that process waits for this one, for ever.
    spare_blocks: Mutex<Vec<(usize, Address)>>,
    /// Result words of streams that were dropped while another stream waited, for new streams.
    spare_accumulators: Mutex<Vec<Address>>,
    /// Of [`memory_driver::handle_types`].
    handle_types: OnceLock<u32>,
    /// Another library destroyed the context, or the driver shut down: no object of it is used
    /// or freed any more.
    is_destroyed: AtomicBool,
}

// SAFETY: the driver's objects may be used from any thread; a context is made current in each
// before its use.
unsafe impl Send for Context {}
// SAFETY: the same.
unsafe impl Sync for Context {}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Context({})", self.number)
    }
}

impl Context {
    fn retain(functions: &'static Functions, number: u32) -> Result<Arc<Self>> {
        let operation = "open";
        let mut device = 0;
        let mut raw = std::ptr::null_mut();
        // SAFETY: valid pointers for the results.
        unsafe {
            let code = (functions.device_get)(&raw mut device, number as c_int);
            library::check(functions, operation, code)?;
            let code = (functions.context_retain)(&raw mut raw, device);
            library::check(functions, operation, code)?;
        }
        Ok(Arc::new(Self {
            functions,
            number,
            device,
            raw,
            kernels: Kernels::default(),
            spare_blocks: Mutex::default(),
            spare_accumulators: Mutex::default(),
            handle_types: OnceLock::new(),
            is_destroyed: AtomicBool::new(false),
        }))
    }

    /// An error unless the code is 0.
    fn check(&self, operation: &'static str, code: Code) -> Result<()> {
        if matches!(code, DEINITIALIZED | CONTEXT_DESTROYED) {
            // Handles of this context are no longer valid in the driver.
            self.is_destroyed.store(true, Ordering::Relaxed);
        }
        library::check(self.functions, operation, code)
            .map_err(|error| error.on(DeviceName::cuda(self.number)))
    }

    /// Makes the context current on this thread for the following calls, and restores the
    /// previous one afterwards: otherwise the next call of a framework would go to another
    /// device.
    ///
    /// The capture mode of this thread is set and restored, too. While any thread captures a
    /// graph in global mode, as frameworks do, a thread in a mode other than "relaxed" may
    /// neither query an event nor allocate: the call fails, and invalidates the capture. No
    /// operation that starts here is on a captured stream.
    fn make_current(&self, operation: &'static str) -> Result<CurrentContext<'_>> {
        const RELAXED: u32 = 2;
        if self.is_destroyed.load(Ordering::Relaxed) {
            let detail = "its context was destroyed, or the driver shut down";
            let error = Error::new(operation, ErrorKind::DeviceFailed, detail);
            return Err(error.on(DeviceName::cuda(self.number)));
        }
        // SAFETY: retained as long as `self` lives.
        let code = unsafe { (self.functions.context_push)(self.raw) };
        self.check(operation, code).map_err(|error| match code {
            INVALID_CONTEXT => {
                self.is_destroyed.store(true, Ordering::Relaxed);
                error.with_kind(ErrorKind::DeviceFailed)
            }
            _ => error,
        })?;
        let mut mode = RELAXED;
        // SAFETY: a valid mode, which is replaced by the previous one.
        let code = unsafe { (self.functions.exchange_capture_mode)(&raw mut mode) };
        let entered = CurrentContext { context: self, mode: (code == 0).then_some(mode) };
        self.check(operation, code)?;
        Ok(entered)
    }

    /// Calls a function of the driver while the context is current.
    fn call(&self, operation: &'static str, call: impl FnOnce(&Functions) -> Code) -> Result<()> {
        let functions = self.make_current(operation)?;
        self.check(operation, call(&functions))
    }

    /// True if done, false if not yet.
    fn is_ready(
        &self,
        operation: &'static str,
        query: impl FnOnce(&Functions) -> Code,
    ) -> Result<bool> {
        match query(&*self.make_current(operation)?) {
            NOT_READY => Ok(false),
            code => self.check(operation, code).map(|()| true),
        }
    }

    fn attribute(&self, attribute: u32) -> Result<i32> {
        let mut value = 0;
        // SAFETY: one valid number.
        let code =
            unsafe { (self.functions.device_attribute)(&raw mut value, attribute, self.device) };
        self.check("read properties", code).map(|()| value)
    }

    fn has(&self, attribute: u32) -> bool {
        self.attribute(attribute).is_ok_and(|value| value != 0)
    }
}

/// The driver's functions, while a context is current on this thread.
struct CurrentContext<'a> {
    context: &'a Context,
    /// The previous capture mode of this thread.
    mode: Option<u32>,
}

impl std::ops::Deref for CurrentContext<'_> {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        self.context.functions
    }
}

impl Drop for CurrentContext<'_> {
    fn drop(&mut self) {
        if let Some(mut mode) = self.mode {
            // SAFETY: a mode that the driver returned.
            let _ = unsafe { (self.context.functions.exchange_capture_mode)(&raw mut mode) };
        }
        let mut popped = std::ptr::null_mut();
        // SAFETY: space for a handle; the popped context is the pushed one.
        let _ = unsafe { (self.context.functions.context_pop)(&raw mut popped) };
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // The following calls would block on a waiting stream of another device. Then the
        // context ends with the process.
        if self.is_destroyed.load(Ordering::Relaxed) || any_stream_waits(Implementation::Cuda) {
            return;
        }
        std::mem::take(&mut self.kernels).unload(self);
        memory_driver::free_spare(self);
        if self.is_destroyed.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: retained once, by `retain`. A failure cannot be reported to any caller.
        let _ = unsafe { (self.functions.context_release)(self.device) };
    }
}
