//! The ranks of a job of torchrun, mpirun or srun.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use launch::{FabricUse, Group, GroupOptions};
use pubsub::NodeOptions;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList, PyMemoryView};
use threads::lock;

use crate::agent::PyAgent;
use crate::domain::PyDomain;
use crate::exclusive::Exclusive;
use crate::failure::{Failure, Result};
use crate::node::PyNode;
use crate::waits::{LONGEST_CALL, Timeout, interruptibly};

const START: &str = "start group";

/// The ranks of a launched job, as one of them sees them: of torchrun, mpirun, srun, or one rank
/// without a launcher. All ranks call its operations in the same order.
///
/// `broadcast` and `all_gather` of bytes are for set-up, with small messages. The operations on arrays are
/// those of the group's `domain()`, which the first of them joins.
///
/// >>> import numpy
/// >>> from fabricast.launch import Group
/// >>> with Group() as group:
/// ...     group.rank, group.size, group.all_gather(b"hello"), group.all_reduce(numpy.ones(2))
/// (0, 1, [b'hello'], array([1., 1.]))
#[pyclass(frozen, name = "Group", module = "fabricast.launch")]
#[derive(Debug)]
pub(crate) struct PyGroup {
    group: Arc<Exclusive<Group>>,
    /// None until an operation needs it.
    domain: Mutex<Option<Py<PyDomain>>>,
}

/// Is it a message of bytes, instead of an array?
fn is_message(data: &Bound<'_, PyAny>) -> bool {
    data.is_instance_of::<PyBytes>()
        || data.is_instance_of::<PyByteArray>()
        || data.is_instance_of::<PyMemoryView>()
        || data.is_instance_of::<PyList>()
}

impl PyGroup {
    fn get<R: Send>(
        &self,
        py: Python<'_>,
        operation: &'static str,
        get: impl FnOnce(&mut Group) -> R + Send,
    ) -> Result<R> {
        self.group.with(py, operation, |group| Ok(get(group)))
    }

    fn leave_domain(&self, py: Python<'_>) {
        let domain = lock(&self.domain).take();
        if let Some(domain) = domain {
            domain.get().leave(py);
        }
    }

    /// A call that has a timeout of its own.
    fn call<T: Send + 'static>(
        &self,
        py: Python<'_>,
        operation: &'static str,
        timeout: Option<f64>,
        call: impl FnOnce(&mut Group, std::time::Duration) -> launch::Result<T> + Send + 'static,
    ) -> Result<T> {
        let timeout = Timeout::new(operation, timeout)?.or(LONGEST_CALL);
        let group = Arc::clone(&self.group);
        interruptibly(py, operation, move || {
            group.detached(operation, |group| Ok(call(group, timeout)?))
        })
    }
}

#[pymethods]
impl PyGroup {
    /// Waits for the other ranks. Options that are not given come from the environment
    /// (FABRICAST_DIRECTORY, FABRICAST_PROVIDER, …). `fabric` is "between-machines", "always" or
    /// "never".
    #[new]
    #[pyo3(signature = (*, label=None, directory=None, timeout=30.0, fabric="between-machines",
        provider=None, source=None, insecure=None))]
    #[allow(clippy::too_many_arguments)] // keywords
    fn new(
        py: Python<'_>,
        label: Option<&str>,
        directory: Option<PathBuf>,
        timeout: Option<f64>,
        fabric: &str,
        provider: Option<&str>,
        source: Option<&str>,
        insecure: Option<bool>,
    ) -> Result<Self> {
        let mut options = GroupOptions::from_environment()?;
        options = options.timeout(Timeout::new(START, timeout)?.or(LONGEST_CALL));
        if let Some(label) = label {
            options = options.label(label);
        }
        if let Some(directory) = &directory {
            options = options.directory(directory);
        }
        options = options.fabric_use(match fabric {
            "between-machines" => FabricUse::BetweenMachines,
            "always" => FabricUse::Always,
            "never" => FabricUse::Never,
            other => {
                let cause = format!("fabric=\"{other}\": between-machines, always or never");
                return Err(Failure::invalid(START, cause));
            }
        });
        if let Some(provider) = provider {
            options = options.providers(provider.parse()?);
        }
        if let Some(source) = source {
            options = options.source(::fabric::local_address(source)?);
        }
        if insecure == Some(true) {
            options = options.insecure();
        }
        let group = interruptibly(py, START, move || Group::start_with(options))?;
        Ok(Self { group: Arc::new(Exclusive::new("group", group)), domain: Mutex::new(None) })
    }

    /// This process' rank, from 0.
    #[getter]
    fn rank(&self, py: Python<'_>) -> Result<u32> {
        self.get(py, "get rank", |group| group.rank())
    }

    /// Number of ranks.
    #[getter]
    fn size(&self, py: Python<'_>) -> Result<u32> {
        self.get(py, "get size of group", |group| group.size())
    }

    /// This rank among those of its machine, from 0.
    #[getter]
    fn local_rank(&self, py: Python<'_>) -> Result<u32> {
        self.get(py, "get local rank", |group| group.local().rank)
    }

    /// Ranks of this machine, ascending, with this one.
    #[getter]
    fn local_ranks(&self, py: Python<'_>) -> Result<Vec<u32>> {
        self.get(py, "get local ranks", |group| group.local_ranks())
    }

    /// Number of machines with ranks of the group.
    #[getter]
    fn machines(&self, py: Python<'_>) -> Result<u32> {
        self.get(py, "get machines of group", |group| group.machines())
    }

    /// The launcher or its protocol, such as "PMIx".
    #[getter]
    fn launcher(&self, py: Python<'_>) -> Result<String> {
        self.get(py, "get launcher", |group| group.launcher().to_owned())
    }

    /// This rank's agent: to register memory, and to put and get.
    #[getter]
    fn agent(&self) -> PyAgent {
        PyAgent::of_group(&self.group)
    }

    /// Connects the agent to that of another rank, once. Returns the number of the peer.
    #[pyo3(signature = (rank, timeout=30.0))]
    fn peer(&self, py: Python<'_>, rank: u32, timeout: Option<f64>) -> Result<u32> {
        let peer =
            self.call(py, "connect to rank", timeout, move |group, left| group.peer(rank, left))?;
        Ok(peer.to_u32())
    }

    /// The rank of an agent, as events name it; None if it is of no rank.
    fn rank_of(&self, py: Python<'_>, identity: [u8; 16]) -> Result<Option<u32>> {
        self.get(py, "find rank", |group| group.rank_of(identity))
    }

    /// Waits until all ranks have called it.
    #[pyo3(signature = (timeout=30.0))]
    fn barrier(&self, py: Python<'_>, timeout: Option<f64>) -> Result<()> {
        self.call(py, "barrier of ranks", timeout, |group, left| group.barrier(left))
    }

    /// The bytes of the rank `root`, for all ranks; or, if all ranks pass arrays, copies that of the root
    /// into the others.
    #[pyo3(signature = (data, root=0, timeout=30.0))]
    fn broadcast<'py>(
        &self,
        py: Python<'py>,
        data: &Bound<'py, PyAny>,
        root: u32,
        timeout: Option<f64>,
    ) -> Result<Bound<'py, PyAny>> {
        if !is_message(data) {
            return self.domain(py, timeout)?.get().broadcast(py, data, root, timeout);
        }
        let data: Vec<u8> = data.extract()?;
        let bytes = self.call(py, "broadcast to ranks", timeout, move |group, left| {
            group.broadcast(root, &data, left)
        })?;
        Ok(PyBytes::new(py, &bytes).into_any())
    }

    /// The bytes of all ranks, for all, in their order: a list; or, of arrays, an array with all of them,
    /// whose first axis has an index for each rank.
    #[pyo3(signature = (data, timeout=30.0))]
    fn all_gather<'py>(
        &self,
        py: Python<'py>,
        data: &Bound<'py, PyAny>,
        timeout: Option<f64>,
    ) -> Result<Bound<'py, PyAny>> {
        if !is_message(data) {
            return self.domain(py, timeout)?.get().all_gather(py, data, None, None, timeout);
        }
        let data: Vec<u8> = data.extract()?;
        let all = self.call(py, "all-gather of ranks", timeout, move |group, left| {
            group.all_gather(&data, left)
        })?;
        let all = all.iter().map(|bytes| PyBytes::new(py, bytes));
        Ok(PyList::new(py, all)?.into_any())
    }

    /// The domain of all ranks, always the same one: collective operations on arrays in host memory, and if all
    /// ranks are on one machine of devices. All ranks call it. It ends with the group.
    #[pyo3(signature = (timeout=30.0))]
    fn domain(&self, py: Python<'_>, timeout: Option<f64>) -> Result<Py<PyDomain>> {
        if let Some(domain) = &*lock(&self.domain) {
            return Ok(domain.clone_ref(py));
        }
        const JOIN: &str = "join communication domain";
        let timeout = Timeout::new(JOIN, timeout)?.or(LONGEST_CALL);
        let group = Arc::clone(&self.group);
        let joined = interruptibly(py, JOIN, move || {
            group.detached(JOIN, |group| PyDomain::of_group(group, timeout))
        })?;
        let joined = Py::new(py, joined)?;
        Ok(lock(&self.domain).get_or_insert(joined).clone_ref(py))
    }

    /// Reduces the arrays of all ranks, as `Domain.all_reduce`: in place if possible. Returns the result.
    #[pyo3(signature = (array, op="sum", *, out=None, timeout=30.0))]
    fn all_reduce<'py>(
        &self,
        py: Python<'py>,
        array: &Bound<'py, PyAny>,
        op: &str,
        out: Option<&Bound<'py, PyAny>>,
        timeout: Option<f64>,
    ) -> Result<Bound<'py, PyAny>> {
        self.domain(py, timeout)?.get().all_reduce(py, array, op, out, timeout)
    }

    /// Reduces the arrays of all ranks to the rank `root`, as `Domain.reduce`. None on other ranks.
    #[pyo3(signature = (array, root=0, op="sum", *, out=None, timeout=30.0))]
    #[allow(clippy::too_many_arguments)] // keywords
    fn reduce<'py>(
        &self,
        py: Python<'py>,
        array: &Bound<'py, PyAny>,
        root: u32,
        op: &str,
        out: Option<&Bound<'py, PyAny>>,
        timeout: Option<f64>,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        self.domain(py, timeout)?.get().reduce(py, array, root, op, out, timeout)
    }

    /// Reduces a block for each rank, as `Domain.reduce_scatter`.
    #[pyo3(signature = (array, op="sum", *, out=None, timeout=30.0))]
    fn reduce_scatter<'py>(
        &self,
        py: Python<'py>,
        array: &Bound<'py, PyAny>,
        op: &str,
        out: Option<&Bound<'py, PyAny>>,
        timeout: Option<f64>,
    ) -> Result<Bound<'py, PyAny>> {
        self.domain(py, timeout)?.get().reduce_scatter(py, array, op, out, None, timeout)
    }

    /// Copies the nth block of each rank to rank n, as `Domain.all_to_all`.
    #[pyo3(signature = (array, *, out=None, timeout=30.0))]
    fn all_to_all<'py>(
        &self,
        py: Python<'py>,
        array: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
        timeout: Option<f64>,
    ) -> Result<Bound<'py, PyAny>> {
        self.domain(py, timeout)?.get().all_to_all(py, array, out, None, None, timeout)
    }

    /// Copies the arrays of all ranks to the rank `root`, as `Domain.gather`. None on other ranks.
    #[pyo3(signature = (array, root=0, *, out=None, timeout=30.0))]
    fn gather<'py>(
        &self,
        py: Python<'py>,
        array: &Bound<'py, PyAny>,
        root: u32,
        out: Option<&Bound<'py, PyAny>>,
        timeout: Option<f64>,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        self.domain(py, timeout)?.get().gather(py, array, root, out, None, timeout)
    }

    /// Copies a block of the rank `root` to each, as `Domain.scatter`.
    #[pyo3(signature = (array, root=0, *, out=None, timeout=30.0))]
    fn scatter<'py>(
        &self,
        py: Python<'py>,
        array: Option<&Bound<'py, PyAny>>,
        root: u32,
        out: Option<&Bound<'py, PyAny>>,
        timeout: Option<f64>,
    ) -> Result<Bound<'py, PyAny>> {
        self.domain(py, timeout)?.get().scatter(py, array, root, out, None, timeout)
    }

    /// Joins the node of the job: topics of all its ranks. All ranks call it.
    #[pyo3(signature = (timeout=30.0))]
    fn node(&self, py: Python<'_>, timeout: Option<f64>) -> Result<PyNode> {
        let options = NodeOptions::from_environment()?;
        let node = self
            .call(py, "join node of job", timeout, move |group, left| group.node(options, left))?;
        Ok(PyNode::of(node))
    }

    /// Ends the group, when all ranks have called it.
    #[pyo3(signature = (timeout=30.0))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> Result<()> {
        let timeout = Timeout::new("close group", timeout)?.or(LONGEST_CALL);
        let closed = match self.group.take(py) {
            Some(group) => interruptibly(py, "close group", move || group.close(timeout)),
            None => Ok(()),
        };
        // No rank is in an operation any more.
        self.leave_domain(py);
        closed
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Closes it. After an exception it ends without waiting for other ranks.
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> Result<()> {
        if kind.is_none() {
            return self.close(py, Some(30.0));
        }
        self.leave_domain(py);
        let group = self.group.take(py);
        py.detach(move || drop(group));
        Ok(())
    }
}
