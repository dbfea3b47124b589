//! The ranks of a job of torchrun, mpirun or srun.

use std::path::PathBuf;
use std::sync::Arc;

use launch::{FabricUse, Group, GroupOptions};
use pubsub::NodeOptions;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::agent::PyAgent;
use crate::exclusive::Exclusive;
use crate::failure::{Failure, Result};
use crate::node::PyNode;
use crate::waits::{LONGEST_CALL, Timeout, interruptibly};

const START: &str = "start group";

/// The ranks of a launched job, as one of them sees them: of torchrun, mpirun, srun, or one rank
/// without a launcher. Collectives are for set-up, with small messages; data goes by the agent and by
/// topics. All ranks call collectives in the same order.
///
/// >>> from fabricast.launch import Group
/// >>> with Group() as group:
/// ...     group.rank, group.size, group.all_gather(b"hello")
/// (0, 1, [b'hello'])
#[pyclass(frozen, name = "Group", module = "fabricast.launch")]
#[derive(Debug)]
pub(crate) struct PyGroup {
    group: Arc<Exclusive<Group>>,
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
        Ok(Self { group: Arc::new(Exclusive::new("group", group)) })
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

    /// The bytes of the rank `root`, for all ranks.
    #[pyo3(signature = (data, root=0, timeout=30.0))]
    fn broadcast<'py>(
        &self,
        py: Python<'py>,
        data: Vec<u8>,
        root: u32,
        timeout: Option<f64>,
    ) -> Result<Bound<'py, PyBytes>> {
        let bytes = self.call(py, "broadcast to ranks", timeout, move |group, left| {
            group.broadcast(root, &data, left)
        })?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// The bytes of all ranks, for all, in their order.
    #[pyo3(signature = (data, timeout=30.0))]
    fn all_gather<'py>(
        &self,
        py: Python<'py>,
        data: Vec<u8>,
        timeout: Option<f64>,
    ) -> Result<Vec<Bound<'py, PyBytes>>> {
        let all = self.call(py, "all-gather of ranks", timeout, move |group, left| {
            group.all_gather(&data, left)
        })?;
        Ok(all.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
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
        match self.group.take(py) {
            Some(group) => interruptibly(py, "close group", move || group.close(timeout)),
            None => Ok(()),
        }
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
        let group = self.group.take(py);
        py.detach(move || drop(group));
        Ok(())
    }
}
