//! Agents: put, get and notices.

mod access;
mod agent_event;
mod integers;
mod operation;
mod prepared;
mod requested_blocks;
mod route;
mod strided_rows;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use launch::Group;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use transfer::path;
use transfer::{
    Agent, AgentCard, AgentOptions, Blocks, Buffer, Notice, PeerId, Rights, Route, Token,
};

pub(crate) use self::agent_event::PyAgentEvent;
pub(crate) use self::operation::PyOperation;
pub(crate) use self::prepared::PyPrepared;
pub(crate) use self::route::{PyRegion, PyRoute};
pub(crate) use self::strided_rows::PyStrided;

use self::access::Access;
use self::integers::Integers;
use self::requested_blocks::RequestedBlocks;
use self::route::device_of;
use crate::caller_stream::CallerStream;
use crate::exclusive::Exclusive;
use crate::failure::{Failure, Result};
use crate::memory::{buffer_of, memories_of};
use crate::waits::{LONGEST_CALL, Timeout, interruptibly, unless_late, wait};

const START: &str = "start agent";
const CONNECT: &str = "connect to agent";
const JOIN: &str = "join regions";
const PREPARE: &str = "prepare transfer";
const SUBMIT: &str = "submit transfer";
const NO_DATA: &[u8] = b"";
const EVENT: &str = "wait for event";

/// Tag and data of a notice, if there is one.
type NoticeParts = Option<(u64, Vec<u8>)>;

type BeginParts =
    fn(&mut Agent, &[(&Route, Blocks<'_>)], Option<Notice>) -> transfer::Result<Token>;

/// Moves bytes between registered memory of this process and of others, by the best path: in the
/// process, by shared memory, between devices, or by a fabric.
#[pyclass(frozen, name = "Agent", module = "fabricast")]
#[derive(Debug)]
pub(crate) struct PyAgent {
    agent: Arc<Access>,
}

fn peer_of(number: u32) -> PeerId {
    PeerId::from_u32(number)
}

fn notice_of(notice: NoticeParts) -> Result<Option<Notice>> {
    Ok(notice.map(|(tag, data)| Notice::new(tag, &data)).transpose()?)
}

impl PyAgent {
    /// That of a group.
    pub(crate) fn of_group(group: &Arc<Exclusive<Group>>) -> Self {
        Self { agent: Arc::new(Access::OfGroup(Arc::clone(group))) }
    }

    /// Begins a transfer, after the work of a stream if there is one.
    fn begin(
        &self,
        direction: path::Operation,
        route: &Bound<'_, PyRoute>,
        blocks: Option<&Bound<'_, PyAny>>,
        notice: NoticeParts,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> Result<PyOperation> {
        let (py, operation) = (route.py(), direction.name());
        let route = route.get();
        let blocks = RequestedBlocks::of(direction, route.get(), blocks)?;
        let stream = CallerStream::adopted(operation, stream, route.device())?;
        let notice = notice_of(notice)?;
        let token = self.agent.with(py, operation, |agent| {
            let (route, blocks) = (route.get(), blocks.blocks());
            Ok(match (direction, &stream) {
                (path::Operation::Put, None) => agent.put(route, blocks, notice),
                (path::Operation::Get, None) => agent.get(route, blocks, notice),
                (path::Operation::Put, Some(stream)) => {
                    agent.put_after(route, blocks, notice, stream)
                }
                (path::Operation::Get, Some(stream)) => {
                    agent.get_after(route, blocks, notice, stream)
                }
            }?)
        })?;
        Ok(PyOperation::new(&self.agent, token, route.device()))
    }

    /// Begins a transfer by several routes.
    fn begin_parts(
        &self,
        py: Python<'_>,
        direction: path::Operation,
        parts: Vec<(Bound<'_, PyRoute>, Option<Bound<'_, PyAny>>)>,
        notice: NoticeParts,
        begin: BeginParts,
    ) -> Result<PyOperation> {
        let requested = parts.iter().map(|(route, blocks)| {
            RequestedBlocks::of(direction, route.get().get(), blocks.as_ref())
        });
        let requested = requested.collect::<Result<Vec<_>>>()?;
        let routes: Vec<_> = parts.iter().map(|(route, _)| route.get()).collect();
        let notice = notice_of(notice)?;
        let token = self.agent.with(py, direction.name(), |agent| {
            let parts = routes.iter().zip(&requested);
            let parts: Vec<_> = parts.map(|(route, list)| (route.get(), list.blocks())).collect();
            Ok(begin(agent, &parts, notice)?)
        })?;
        let device = routes.iter().find_map(|route| route.device());
        Ok(PyOperation::new(&self.agent, token, device))
    }

    /// A call that has a timeout of its own.
    fn call<T: Send + 'static>(
        &self,
        py: Python<'_>,
        operation: &'static str,
        timeout: Option<f64>,
        call: impl FnOnce(&mut Agent, Duration) -> transfer::Result<T> + Send + 'static,
    ) -> Result<T> {
        let timeout = Timeout::new(operation, timeout)?.or(LONGEST_CALL);
        let agent = Arc::clone(&self.agent);
        interruptibly(py, operation, move || {
            agent.detached(operation, |agent| Ok(call(agent, timeout)?))
        })
    }
}

impl PyAgent {
    fn register_buffer(
        &self,
        py: Python<'_>,
        buffer: Buffer,
        read: bool,
        write: bool,
    ) -> Result<PyRegion> {
        let device = device_of(&buffer);
        let region = self.agent.with(py, "register region", |agent| {
            Ok(match (read, write) {
                (false, false) => agent.register_local(buffer),
                (true, false) => agent.register(buffer, Rights::READ),
                (false, true) => agent.register(buffer, Rights::WRITE),
                (true, true) => agent.register(buffer, Rights::ALL),
            }?)
        })?;
        Ok(PyRegion::new(region, device))
    }
}

#[pymethods]
impl PyAgent {
    /// Starts an agent. Peers on the machine reach it through `directory`, which both see, peers on
    /// other machines by a fabric: `"auto"`, or a policy such as `"verbs"` or `"=tcp"`.
    #[new]
    #[pyo3(signature = (label="python", *, directory=None, fabric=None, source=None, force_remote=false))]
    fn new(
        py: Python<'_>,
        label: &str,
        directory: Option<PathBuf>,
        fabric: Option<String>,
        source: Option<String>,
        force_remote: bool,
    ) -> Result<Self> {
        let mut options = AgentOptions::new(label);
        if let Some(directory) = &directory {
            options = options.directory(directory);
        }
        if force_remote {
            options = options.force_remote();
        }
        let agent = interruptibly(py, START, move || {
            if let Some(policy) = fabric {
                let source = source.map(|source| fabric::local_address(&source)).transpose()?;
                options = options.fabric(&transfer::choose_fabric(&policy, source)?);
            }
            Ok::<_, Failure>(Agent::start(options)?)
        })?;
        Ok(Self { agent: Arc::new(Access::Own(Box::new(Exclusive::new("agent", agent)))) })
    }

    /// How peers reach it, and its published regions: bytes to be sent to them by any means.
    #[getter]
    fn card<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyBytes>> {
        let card =
            self.agent.with(py, "get card of agent", |agent| Ok(agent.card().encode()?))?;
        Ok(PyBytes::new(py, &card))
    }

    /// The agent's identity, as in events of its peers.
    #[getter]
    fn identity<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyBytes>> {
        let card = self.agent.with(py, "get identity of agent", |agent| Ok(agent.card()))?;
        Ok(PyBytes::new(py, &card.identity))
    }

    /// Registers the memory of an array, which stays as long as the region. Without `read` and
    /// `write` no peer can access it: to put from and to get into.
    #[pyo3(signature = (array, *, read=false, write=false))]
    fn register(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        read: bool,
        write: bool,
    ) -> Result<PyRegion> {
        self.register_buffer(py, buffer_of(array)?, read, write)
    }

    /// Registers many arrays on one GPU, such as the pages of a cache: one region for each group of
    /// arrays that share allocations. Returns the region of each array, and its offset there.
    #[pyo3(signature = (arrays, *, read=false, write=false))]
    fn register_views(
        &self,
        py: Python<'_>,
        arrays: &Bound<'_, PyAny>,
        read: bool,
        write: bool,
    ) -> Result<Vec<(Py<PyRegion>, u64)>> {
        let (memories, views) = memories_of(arrays)?;
        let regions = memories.into_iter().map(|memory| {
            let region = self.register_buffer(py, memory, read, write)?;
            Ok(Py::new(py, region)?)
        });
        let regions = regions.collect::<Result<Vec<_>>>()?;
        let region = |view: gpu::View| (regions[view.memory].clone_ref(py), view.offset);
        Ok(views.into_iter().map(region).collect())
    }

    /// Publishes a region by name on the card from now on.
    fn publish(&self, py: Python<'_>, name: &str, region: &PyRegion) -> Result<()> {
        let region = region.get("publish region")?;
        self.agent.with(py, "publish region", |agent| Ok(agent.publish(name, &region)?))
    }

    /// Withdraws a region, and waits until peers have completed all operations with it. Then its
    /// memory can be reused.
    #[pyo3(signature = (region, timeout=30.0))]
    fn withdraw(&self, py: Python<'_>, region: &PyRegion, timeout: Option<f64>) -> Result<()> {
        let region = region.get("withdraw region")?;
        self.call(py, "withdraw region", timeout, move |agent, left| agent.withdraw(&region, left))
    }

    /// Connects to another agent by its card. Returns the number of the peer.
    #[pyo3(signature = (card, timeout=30.0))]
    fn connect(&self, py: Python<'_>, card: Vec<u8>, timeout: Option<f64>) -> Result<u32> {
        let peer =
            self.call(py, CONNECT, timeout, move |agent, left| agent.connect(&card, left))?;
        Ok(peer.to_u32())
    }

    /// Disconnects from a peer, when operations with it have completed.
    #[pyo3(signature = (peer, timeout=30.0))]
    fn disconnect(&self, py: Python<'_>, peer: u32, timeout: Option<f64>) -> Result<()> {
        let operation = "disconnect from agent";
        self.call(py, operation, timeout, move |agent, left| agent.disconnect(peer_of(peer), left))
    }

    /// Joins a region with one that the peer published by name.
    #[pyo3(signature = (peer, name, region, timeout=30.0))]
    fn route_to(
        &self,
        py: Python<'_>,
        peer: u32,
        name: String,
        region: &PyRegion,
        timeout: Option<f64>,
    ) -> Result<PyRoute> {
        let local = region.get(JOIN)?;
        let route = self.call(py, JOIN, timeout, move |agent, left| {
            agent.route_to(peer_of(peer), &name, &local, left)
        })?;
        Ok(PyRoute::new(route, region))
    }

    /// Joins a region with one of the peer, by its descriptor. `policy` prefers
    /// (`"shared-memory"`), requires (`"=cuda-ipc"`) or denies (`"^fabric-staged"`) paths.
    #[pyo3(signature = (peer, descriptor, region, *, policy="", timeout=30.0))]
    fn join(
        &self,
        py: Python<'_>,
        peer: u32,
        descriptor: Vec<u8>,
        region: &PyRegion,
        policy: &str,
        timeout: Option<f64>,
    ) -> Result<PyRoute> {
        let (local, policy) = (region.get(JOIN)?, policy.parse::<path::Policy>()?);
        let route = self.call(py, JOIN, timeout, move |agent, left| {
            agent.join(peer_of(peer), &local, &descriptor, &policy, left)
        })?;
        Ok(PyRoute::new(route, region))
    }

    /// Copies from the region here to that of the peer: everything, a list of (to, from, length) in
    /// bytes, an array of integers of the shape (n, 3), or strided rows. Then the peer gets the
    /// notice, a tag and up to 4096 bytes. With `stream` it begins after the work on that stream.
    #[pyo3(signature = (route, blocks=None, *, notice=None, stream=None))]
    fn put(
        &self,
        route: &Bound<'_, PyRoute>,
        blocks: Option<&Bound<'_, PyAny>>,
        notice: NoticeParts,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> Result<PyOperation> {
        self.begin(path::Operation::Put, route, blocks, notice, stream)
    }

    /// Copies from the region of the peer to that here; otherwise as `put`.
    #[pyo3(signature = (route, blocks=None, *, notice=None, stream=None))]
    fn get(
        &self,
        route: &Bound<'_, PyRoute>,
        blocks: Option<&Bound<'_, PyAny>>,
        notice: NoticeParts,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> Result<PyOperation> {
        self.begin(path::Operation::Get, route, blocks, notice, stream)
    }

    /// Puts by several routes to one peer as one operation: a list of (route, blocks), with blocks
    /// as of `put`. The notice is sent after the data of all.
    #[pyo3(signature = (parts, *, notice=None))]
    fn put_parts(
        &self,
        py: Python<'_>,
        parts: Vec<(Bound<'_, PyRoute>, Option<Bound<'_, PyAny>>)>,
        notice: NoticeParts,
    ) -> Result<PyOperation> {
        self.begin_parts(py, path::Operation::Put, parts, notice, Agent::put_parts)
    }

    /// Gets by several routes to one peer as one operation; otherwise as `put_parts`.
    #[pyo3(signature = (parts, *, notice=None))]
    fn get_parts(
        &self,
        py: Python<'_>,
        parts: Vec<(Bound<'_, PyRoute>, Option<Bound<'_, PyAny>>)>,
        notice: NoticeParts,
    ) -> Result<PyOperation> {
        self.begin_parts(py, path::Operation::Get, parts, notice, Agent::get_parts)
    }

    /// Checks and prepares blocks for puts or gets that are repeated: `operation` is `"put"` or
    /// `"get"`, blocks are as of `put`.
    fn prepare(
        &self,
        route: &Bound<'_, PyRoute>,
        blocks: Option<&Bound<'_, PyAny>>,
        operation: &str,
    ) -> Result<PyPrepared> {
        let direction = match operation {
            "put" => path::Operation::Put,
            "get" => path::Operation::Get,
            other => {
                let cause = format!("operation=\"{other}\": \"put\" or \"get\" is possible");
                return Err(Failure::invalid(PREPARE, cause));
            }
        };
        let (py, route) = (route.py(), route.get());
        let blocks = RequestedBlocks::of(direction, route.get(), blocks)?.into_list();
        let prepared = self
            .agent
            .with(py, PREPARE, |agent| Ok(agent.prepare(direction, route.get(), blocks)?))?;
        Ok(PyPrepared::new(direction, prepared, route.device()))
    }

    /// Starts a prepared transfer: of the blocks with these indices, each given once, or of all.
    /// Indices are a list, a range, or an array of integers. Otherwise as `put`.
    #[pyo3(signature = (prepared, indices=None, *, notice=None, stream=None))]
    fn submit(
        &self,
        prepared: &Bound<'_, PyPrepared>,
        indices: Option<&Bound<'_, PyAny>>,
        notice: NoticeParts,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> Result<PyOperation> {
        let (py, prepared) = (prepared.py(), prepared.get());
        let count = prepared.get().blocks().len();
        let indices = match indices {
            Some(indices) => Some(Integers::of(SUBMIT, indices)?.to_indices(SUBMIT, count)?),
            None => None,
        };
        let stream = CallerStream::adopted(SUBMIT, stream, prepared.device())?;
        let notice = notice_of(notice)?;
        let token = self.agent.with(py, SUBMIT, |agent| {
            let indices = indices.as_deref();
            Ok(match &stream {
                None => agent.submit(prepared.get(), indices, notice),
                Some(stream) => agent.submit_after(prepared.get(), indices, notice, stream),
            }?)
        })?;
        Ok(PyOperation::new(&self.agent, token, prepared.device()))
    }

    /// Sends a notice without data. With `ordered` it arrives after all earlier transfers.
    #[pyo3(
        signature = (peer, tag, data=NO_DATA, *, ordered=false),
        text_signature = "($self, peer, tag, data=b'', *, ordered=False)"
    )]
    fn notify(
        &self,
        py: Python<'_>,
        peer: u32,
        tag: u64,
        data: &[u8],
        ordered: bool,
    ) -> Result<PyOperation> {
        let notice = Notice::new(tag, data)?;
        let token = self.agent.with(py, "notify", |agent| {
            Ok(match ordered {
                true => agent.notify_ordered(peer_of(peer), notice),
                false => agent.notify(peer_of(peer), notice),
            }?)
        })?;
        Ok(PyOperation::new(&self.agent, token, None))
    }

    /// Orders operations: later ones with the peer begin when the earlier ones are complete.
    fn fence(&self, py: Python<'_>, peer: u32) -> Result<()> {
        self.agent.with(py, "fence", |agent| Ok(agent.fence(peer_of(peer))?))
    }

    /// Waits until all operations with a peer are complete.
    #[pyo3(signature = (peer, timeout=30.0))]
    fn flush(&self, py: Python<'_>, peer: u32, timeout: Option<f64>) -> Result<()> {
        let operation = "flush";
        let cause = || "operations are in flight".to_owned();
        wait(py, operation, Timeout::new(operation, timeout)?, cause, |slice| {
            self.agent.step(operation, |agent| unless_late(agent.flush(peer_of(peer), slice)))
        })
    }

    /// Makes progress with all operations. Whether something moved.
    fn progress(&self, py: Python<'_>) -> Result<bool> {
        self.agent.with(py, "make progress", |agent| Ok(agent.progress()))
    }

    /// Waits for the next event; None after the timeout.
    #[pyo3(signature = (timeout=30.0))]
    fn next_event(&self, py: Python<'_>, timeout: Option<f64>) -> Result<Option<PyAgentEvent>> {
        let cause = || "no event".to_owned();
        let event = wait(py, EVENT, Timeout::new(EVENT, timeout)?, cause, |slice| {
            self.agent.step(EVENT, |agent| unless_late(agent.next_event(slice)))
        });
        match event {
            Ok(event) => Ok(Some(PyAgentEvent::of(py, event))),
            Err(error) if error.is_of("DeadlineExceeded") || error.is_of("WouldBlock") => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Ends it: completes its operations, and waits until peers do not use its memory any more.
    #[pyo3(signature = (timeout=30.0))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> Result<()> {
        let timeout = Timeout::new("close agent", timeout)?.or(LONGEST_CALL);
        let Access::Own(own) = &*self.agent else {
            let cause = "it is the agent of a group: close the group";
            return Err(Failure::invalid("close agent", cause));
        };
        match own.take(py) {
            Some(agent) => interruptibly(py, "close agent", move || agent.close(timeout)),
            None => Ok(()),
        }
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> Result<()> {
        self.close(py, Some(30.0))
    }
}

/// Identity and label of the agent of a card.
#[pyfunction]
pub(crate) fn card_info<'py>(
    py: Python<'py>,
    card: &[u8],
) -> Result<(Bound<'py, PyBytes>, String)> {
    let card = AgentCard::decode(card)?;
    Ok((PyBytes::new(py, &card.identity), card.label))
}
