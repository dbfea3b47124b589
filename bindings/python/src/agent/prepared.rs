//! Transfers that are made several times.

use gpu::DeviceName;
use pyo3::prelude::*;
use transfer::{PreparedTransfer, path};

/// Blocks of a route, checked and prepared for puts or gets: start them with `Agent.submit`.
#[pyclass(frozen, name = "PreparedTransfer", module = "fabricast")]
#[derive(Debug)]
pub(crate) struct PyPrepared {
    operation: path::Operation,
    prepared: PreparedTransfer,
    device: Option<DeviceName>,
}

impl PyPrepared {
    pub(super) fn new(
        operation: path::Operation,
        prepared: PreparedTransfer,
        device: Option<DeviceName>,
    ) -> Self {
        Self { operation, prepared, device }
    }

    pub(super) fn get(&self) -> &PreparedTransfer {
        &self.prepared
    }

    /// The device of the region here; None for memory of the host.
    pub(super) fn device(&self) -> Option<DeviceName> {
        self.device
    }
}

#[pymethods]
impl PyPrepared {
    /// Number of blocks.
    fn __len__(&self) -> usize {
        self.prepared.blocks().len()
    }

    /// Number of bytes of all blocks together.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.prepared.bytes()
    }

    fn __repr__(&self) -> String {
        let (operation, blocks) = (self.operation.name(), self.prepared.blocks().len());
        let path = self.prepared.route().path().name();
        format!("<fabricast.PreparedTransfer: {operation} of {blocks} blocks by {path}>")
    }
}
