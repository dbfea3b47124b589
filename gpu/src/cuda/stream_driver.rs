//! Streams and events.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cudarc::driver::sys;
use threads::lock;

use super::Context;
use super::kernels::{Kernel, checksum_launch, copy_launch, exchange_launch};
use super::library::Address;
use super::memory_driver;
use crate::device_name::Implementation;
use crate::driver::{self, EventDriver, StreamDriver};
use crate::error::{Error, ErrorKind, Result};
use crate::raw_exchange::RawExchange;
use crate::stream_waits::if_no_stream_waits;

#[derive(Debug)]
pub(super) struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
    is_adopted: bool,
    /// The word in which the checksum kernel adds up.
    accumulator: OnceLock<Address>,
}

// SAFETY: the driver's streams may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: the same.
unsafe impl Sync for Stream {}

impl Stream {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        /// Does not wait for the default stream, which other libraries may use.
        const NON_BLOCKING: u32 = 1;
        let mut raw = ptr::null_mut();
        context.call("create stream", |functions| {
            // SAFETY: space for a handle.
            unsafe { (functions.stream_create)(&raw mut raw, NON_BLOCKING) }
        })?;
        let (context, accumulator) = (Arc::clone(context), OnceLock::new());
        Ok(Self { context, raw, is_adopted: false, accumulator })
    }

    /// # Safety
    /// A stream of this context, or one of the driver's small numbers for default streams; it
    /// outlives the returned object.
    pub(super) unsafe fn adopt(context: &Arc<Context>, handle: u64) -> Result<Self> {
        /// The driver's number for the per-thread default stream.
        const OF_EACH_THREAD: u64 = 2;
        let operation = "adopt stream";
        if handle == OF_EACH_THREAD {
            let detail = "the per-thread default stream differs in each thread";
            return Err(Error::new(operation, ErrorKind::NotSupported, detail));
        }
        let raw: sys::CUstream = ptr::with_exposed_provenance_mut(handle as usize);
        let (context, accumulator) = (Arc::clone(context), OnceLock::new());
        // Alive, by the caller's promise.
        let adopted = Self { context, raw, is_adopted: true, accumulator };
        if adopted.asks_whether_captured(operation)? {
            let detail = "the stream is being captured into a graph";
            return Err(Error::new(operation, ErrorKind::NotSupported, detail));
        }
        Ok(adopted)
    }

    fn asks_whether_captured(&self, operation: &'static str) -> Result<bool> {
        let mut status = 0;
        // SAFETY: alive; space for a number.
        self.context.call(operation, |functions| unsafe {
            (functions.stream_is_capturing)(self.raw, &raw mut status)
        })?;
        Ok(status != 0)
    }

    fn accumulator(&self) -> Result<Address> {
        if let Some(address) = self.accumulator.get() {
            return Ok(*address);
        }
        let spare = lock(&self.context.spare_accumulators).pop();
        let made = spare.map_or_else(|| memory_driver::allocate(&self.context, 8), Ok)?;
        // Under the lock of the stream that this belongs to: no other thread set it in between.
        Ok(*self.accumulator.get_or_init(|| made))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.is_adopted {
            let _ = self.context.call("close stream", |functions| {
                // SAFETY: owned, and all operations are done.
                unsafe { (functions.stream_destroy)(self.raw) }
            });
        }
        if let Some(accumulator) = self.accumulator.take() {
            let free = || memory_driver::free_accumulator(&self.context, accumulator);
            if !if_no_stream_waits(Implementation::Cuda, free) {
                lock(&self.context.spare_accumulators).push(accumulator);
            }
        }
    }
}

impl StreamDriver for Stream {
    unsafe fn copy(&self, to: u64, from: u64, length: u64) -> Result<()> {
        if length == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        self.context.call("copy memory", |functions| unsafe {
            (functions.copy)(to, from, length as usize, self.raw)
        })
    }

    unsafe fn fill(&self, to: u64, byte: u8, length: u64) -> Result<()> {
        if length == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        self.context.call("fill memory", |functions| unsafe {
            (functions.fill_bytes)(to, byte, length as usize, self.raw)
        })
    }

    unsafe fn checksum(&self, mut from: u64, mut length: u64, result: u64) -> Result<()> {
        let operation = "checksum";
        let functions = self.context.make_current(operation)?;
        let mut accumulator = self.accumulator()?;
        let what = (Kernel::Checksum, checksum_launch(length));
        let mut arguments = [
            (&raw mut from).cast::<c_void>(),
            (&raw mut length).cast(),
            (&raw mut accumulator).cast(),
        ];
        // SAFETY: the caller's promise for the range; three arguments, as the kernel has; the
        // sum belongs to this stream.
        unsafe {
            self.context.check(operation, (functions.fill_bytes)(accumulator, 0, 8, self.raw))?;
            let kernels = &self.context.kernels;
            kernels.launch(&self.context, &functions, what, self.raw, &mut arguments)?;
            self.context.check(operation, (functions.copy)(result, accumulator, 8, self.raw))
        }
    }

    unsafe fn copy_list(&self, mut list: u64, mut count: u32, bytes: u64) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        let functions = self.context.make_current("copy list")?;
        let (config, mut lanes) = copy_launch(count, bytes);
        let mut arguments =
            [(&raw mut list).cast::<c_void>(), (&raw mut count).cast(), (&raw mut lanes).cast()];
        let what = (Kernel::CopyList, config);
        // SAFETY: the caller's promise for the list, which the driver allocated, so that
        // devices access it at the host's address; three arguments, as the kernel has.
        unsafe {
            let kernels = &self.context.kernels;
            kernels.launch(&self.context, &functions, what, self.raw, &mut arguments)
        }
    }

    unsafe fn exchange(&self, exchange: &RawExchange, blocks: u32) -> Result<()> {
        let functions = self.context.make_current("exchange")?;
        let mut arguments = [ptr::from_ref(exchange).cast_mut().cast::<c_void>()];
        let what = (Kernel::Exchange, exchange_launch(blocks));
        // SAFETY: the caller's promise; one argument, as the kernel has, which the launch copies.
        unsafe {
            let kernels = &self.context.kernels;
            kernels.launch(&self.context, &functions, what, self.raw, &mut arguments)
        }
    }

    unsafe fn write_word(&self, to: u64, value: u32) -> Result<()> {
        /// Includes a system-wide barrier before the write.
        const DEFAULT: u32 = 0;
        // SAFETY: the caller's promise.
        self.context.call("write word", |functions| unsafe {
            (functions.stream_write_word)(self.raw, to, value, DEFAULT)
        })
    }

    unsafe fn wait_for_word(&self, at: u64, min_value: u32) -> Result<()> {
        const AT_LEAST: u32 = 0;
        // SAFETY: the caller's promise.
        self.context.call("wait for word", |functions| unsafe {
            (functions.stream_wait_for_word)(self.raw, at, min_value, AT_LEAST)
        })
    }

    fn record(&self, event: &dyn EventDriver) -> Result<()> {
        let operation = "record event";
        let event: &Event = driver::downcast(operation, event)?;
        // SAFETY: both are alive.
        self.context
            .call(operation, |functions| unsafe { (functions.event_record)(event.raw, self.raw) })
    }

    fn wait(&self, event: &dyn EventDriver) -> Result<()> {
        let operation = "wait for event";
        let event: &Event = driver::downcast(operation, event)?;
        // SAFETY: both are alive; the driver keeps the point, not the event.
        self.context.call(operation, |functions| unsafe {
            (functions.stream_wait_event)(self.raw, event.raw, 0)
        })
    }

    fn is_done(&self) -> Result<bool> {
        // SAFETY: alive.
        self.context
            .is_ready("query stream", |functions| unsafe { (functions.stream_query)(self.raw) })
    }

    fn is_capturing(&self) -> Result<bool> {
        self.asks_whether_captured("query capture")
    }
}

#[derive(Debug)]
pub(super) struct Event {
    context: Arc<Context>,
    raw: sys::CUevent,
}

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: the same.
unsafe impl Sync for Event {}

impl Event {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        const WITHOUT_TIME: u32 = 2;
        Self::with_flags(context, WITHOUT_TIME)
    }

    pub(super) fn with_time(context: &Arc<Context>) -> Result<Self> {
        Self::with_flags(context, 0)
    }

    fn with_flags(context: &Arc<Context>, flags: u32) -> Result<Self> {
        let mut raw = ptr::null_mut();
        context.call("create event", |functions| {
            // SAFETY: space for a handle.
            unsafe { (functions.event_create)(&raw mut raw, flags) }
        })?;
        Ok(Self { context: Arc::clone(context), raw })
    }
}

impl EventDriver for Event {
    fn is_done(&self) -> Result<bool> {
        // SAFETY: alive.
        self.context
            .is_ready("query event", |functions| unsafe { (functions.event_query)(self.raw) })
    }

    fn time_since(&self, earlier: &dyn EventDriver) -> Result<Option<Duration>> {
        let operation = "read time of event";
        let earlier: &Self = driver::downcast(operation, earlier)?;
        let mut milliseconds = 0.0_f32;
        // SAFETY: both are alive; space for a number.
        let is_ready = self.context.is_ready(operation, |functions| unsafe {
            (functions.event_elapsed_time)(&raw mut milliseconds, earlier.raw, self.raw)
        })?;
        Ok(is_ready.then(|| Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3)))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.context.call("close event", |functions| {
            // SAFETY: owned. The driver releases it after it is reached.
            unsafe { (functions.event_destroy)(self.raw) }
        });
    }
}
