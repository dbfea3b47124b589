//! Regions of agents, and the routes between them.

use gpu::DeviceName;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use transfer::{Buffer, Region, Route};

use crate::closable::Closable;
use crate::failure::Result;

/// Memory that is registered with an agent.
#[pyclass(frozen, name = "Region", module = "fabricast")]
#[derive(Debug)]
pub(crate) struct PyRegion {
    region: Closable<Region>,
    device: Option<DeviceName>,
}

impl PyRegion {
    pub(super) fn new(region: Region, device: Option<DeviceName>) -> Self {
        Self { region: Closable::new("the region was closed", region), device }
    }

    pub(super) fn get(&self, operation: &'static str) -> Result<Region> {
        self.region.get(operation)
    }
}

/// The device that has the memory; None for memory of the host.
pub(super) fn device_of(buffer: &Buffer) -> Option<DeviceName> {
    match buffer {
        Buffer::Host(_) => None,
        Buffer::Device(memory) => Some(memory.mapped_for().name()),
    }
}

/// Two joined regions, one of the agent and one of a peer, and the path between them.
#[pyclass(frozen, name = "Route", module = "fabricast")]
#[derive(Debug)]
pub(crate) struct PyRoute {
    route: Route,
    device: Option<DeviceName>,
}

impl PyRoute {
    /// A route from this region.
    pub(super) fn new(route: Route, region: &PyRegion) -> Self {
        Self { route, device: region.device }
    }

    pub(super) fn get(&self) -> &Route {
        &self.route
    }

    /// The device of the region here; None for memory of the host.
    pub(super) fn device(&self) -> Option<DeviceName> {
        self.device
    }
}

#[pymethods]
impl PyRegion {
    /// Bytes by which a peer joins it.
    #[getter]
    fn descriptor<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyBytes>> {
        let region = self.region.get("get descriptor of region")?;
        Ok(PyBytes::new(py, &region.descriptor().encode()?))
    }

    /// Closes it: no new operation of a peer starts. The memory stays until those in flight ended.
    fn close(&self, py: Python<'_>) {
        let region = self.region.close();
        py.detach(move || drop(region));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.close(py);
    }
}

#[pymethods]
impl PyRoute {
    /// The path of the bytes, such as `"shared-memory"`.
    #[getter]
    fn path(&self) -> &'static str {
        self.route.path().name()
    }

    /// A word for why the path is not a better one; None if it is as good as could be expected.
    #[getter]
    fn fallback(&self) -> Option<&'static str> {
        self.route.fallback()
    }

    /// The verdict on each path, in lines.
    fn explain(&self) -> String {
        self.route.choice().to_string()
    }

    fn __repr__(&self) -> String {
        format!("<fabricast.Route by {}>", self.path())
    }
}
