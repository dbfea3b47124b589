//! Streams that callers pass: of CUDA, PyTorch and others.

use gpu::{DeviceName, Stream};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyInt;

use crate::failure::{Failure, Result};
use crate::streams::adopt;

/// A stream of another library.
#[derive(Debug)]
pub(crate) struct CallerStream {
    handle: u64,
    /// The number of its CUDA device, if the object knows it.
    device: Option<u32>,
}

impl CallerStream {
    /// Of an object with `__cuda_stream__`, a stream of PyTorch, or a handle of the driver.
    ///
    /// # Errors
    /// `TypeError` for another object.
    pub(crate) fn of(operation: &'static str, stream: &Bound<'_, PyAny>) -> Result<Self> {
        let handle = if stream.is_instance_of::<PyInt>() {
            stream.extract()?
        } else if stream.hasattr("__cuda_stream__")? {
            let (version, handle): (u64, u64) =
                stream.call_method0("__cuda_stream__")?.extract()?;
            if version != 0 {
                let cause = format!("its __cuda_stream__ has version {version}, 0 is known");
                return Err(Failure::invalid(operation, cause));
            }
            handle
        } else if stream.hasattr("cuda_stream")? {
            stream.getattr("cuda_stream")?.extract()?
        } else {
            let cause = format!(
                "{operation} failed: {} is no stream: pass a stream of PyTorch, an object with \
                 __cuda_stream__, or a handle",
                stream.get_type().name()?
            );
            return Err(PyTypeError::new_err(cause).into());
        };
        Ok(Self { handle, device: device_of(stream) })
    }

    /// The stream, of its own device or else of this one.
    ///
    /// # Errors
    /// `InvalidArgument` if no device is known; errors of the device, also for a stream that is being
    /// captured into a graph.
    pub(crate) fn adopt(
        &self,
        operation: &'static str,
        device: Option<DeviceName>,
    ) -> Result<Stream> {
        match self.device.map(DeviceName::cuda).or(device) {
            Some(device) => adopt(device, self.handle),
            None => {
                let cause = "the device of the stream is not known: pass a stream that has a device, \
                             as those of PyTorch";
                Err(Failure::invalid(operation, cause))
            }
        }
    }

    /// The stream that a caller passed, if any.
    ///
    /// # Errors
    /// As for [`of`](Self::of) and [`adopt`](Self::adopt).
    pub(crate) fn adopted(
        operation: &'static str,
        stream: Option<&Bound<'_, PyAny>>,
        device: Option<DeviceName>,
    ) -> Result<Option<Stream>> {
        let Some(stream) = stream else { return Ok(None) };
        Self::of(operation, stream)?.adopt(operation, device).map(Some)
    }
}

/// The number of the device, as in PyTorch: `stream.device.index`.
fn device_of(stream: &Bound<'_, PyAny>) -> Option<u32> {
    stream.getattr("device").ok()?.getattr("index").ok()?.extract().ok()
}
