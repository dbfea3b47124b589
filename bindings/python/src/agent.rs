//! Agents: put, get and notices.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gpu::Block;
use launch::Group;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use transfer::path;
use transfer::{
    Agent, AgentCard, AgentOptions, Done, Event, Notice, PeerId, Region, Rights, Route, Strided,
    Subarray, Token,
};

use crate::closable::Closable;
use crate::exclusive::Exclusive;
use crate::failure::{Failure, Result};
use crate::memory::buffer_of;
use crate::waits::{LONGEST_CALL, Timeout, interruptibly, unless_late, wait};

const START: &str = "start agent";
const CONNECT: &str = "connect to agent";
const JOIN: &str = "join regions";
const WAIT: &str = "wait for operation";
const NO_DATA: &[u8] = b"";
const EVENT: &str = "wait for event";

/// Tag and data of a notice, if there is one.
type NoticeParts = Option<(u64, Vec<u8>)>;

/// Moves bytes between registered memory of this process and of others, by the best path: in the
/// process, by shared memory, between devices, or by a fabric.
#[pyclass(frozen, name = "Agent", module = "fabricast")]
#[derive(Debug)]
pub(crate) struct PyAgent {
    agent: Arc<Access>,
}

/// An agent of its own, or that of a group.
#[derive(Debug)]
enum Access {
    Own(Box<Exclusive<Agent>>),
    OfGroup(Arc<Exclusive<Group>>),
}

impl Access {
    fn detached<R>(
        &self,
        operation: &'static str,
        call: impl FnOnce(&mut Agent) -> Result<R>,
    ) -> Result<R> {
        match self {
            Self::Own(agent) => agent.detached(operation, call),
            Self::OfGroup(group) => group.detached(operation, |group| call(group.agent())),
        }
    }

    fn step<R>(
        &self,
        operation: &'static str,
        call: impl FnOnce(&mut Agent) -> Result<R>,
    ) -> Result<R> {
        match self {
            Self::Own(agent) => agent.step(operation, call),
            Self::OfGroup(group) => group.step(operation, |group| call(group.agent())),
        }
    }

    fn with<R: Send>(
        &self,
        py: Python<'_>,
        operation: &'static str,
        call: impl FnOnce(&mut Agent) -> Result<R> + Send,
    ) -> Result<R> {
        py.detach(|| self.detached(operation, call))
    }
}

/// Memory that is registered with an agent.
#[pyclass(frozen, name = "Region", module = "fabricast")]
#[derive(Debug)]
pub(crate) struct PyRegion {
    region: Closable<Region>,
}

/// Two joined regions, one of the agent and one of a peer, and the path between them.
#[pyclass(frozen, name = "Route", module = "fabricast")]
#[derive(Debug)]
pub(crate) struct PyRoute {
    route: Route,
}

/// An operation in flight: wait for it with `wait`.
#[pyclass(frozen, name = "Operation", module = "fabricast")]
#[derive(Debug)]
pub(crate) struct PyOperation {
    agent: Arc<Access>,
    token: Token,
    /// The number of bytes, or the failure: the agent returns it once.
    outcome: OnceLock<transfer::Result<u64>>,
}

impl PyOperation {
    fn keep(&self, outcome: transfer::Result<Done>) -> transfer::Result<u64> {
        self.outcome.get_or_init(|| outcome.map(|done| done.bytes)).clone()
    }
}

/// Rows of the same length at regular strides, as planes and halos of arrays have them.
#[pyclass(frozen, name = "Strided", module = "fabricast")]
#[derive(Debug)]
pub(crate) struct PyStrided {
    rows: Strided,
}

/// An event that another agent caused.
#[pyclass(frozen, name = "AgentEvent", module = "fabricast", get_all)]
#[derive(Debug)]
pub(crate) struct PyAgentEvent {
    /// `"joined"`, `"notice"`, `"left"`, `"rail-lost"` or `"rail-restored"`.
    kind: &'static str,
    /// Identity of the other agent.
    agent: Py<PyBytes>,
    /// Label of the other agent; empty for a notice.
    label: String,
    /// Tag of a notice.
    tag: u64,
    /// Data of a notice.
    data: Py<PyBytes>,
    /// The agent's process ended, or nothing was received from it in time.
    is_dead: bool,
    /// Number of the rail.
    rail: usize,
    /// Why a rail was lost.
    reason: String,
}

#[pymethods]
impl PyAgentEvent {
    fn __repr__(&self) -> String {
        format!("AgentEvent(kind=\"{}\", label={:?}, tag={})", self.kind, self.label, self.tag)
    }
}

impl PyAgentEvent {
    fn of(py: Python<'_>, event: Event) -> Self {
        let new = |kind, agent: [u8; 16], label: String| Self {
            kind,
            agent: PyBytes::new(py, &agent).unbind(),
            label,
            tag: 0,
            data: PyBytes::new(py, &[]).unbind(),
            is_dead: false,
            rail: 0,
            reason: String::new(),
        };
        match event {
            Event::Joined { from, label } => new("joined", from, label),
            Event::Notice { from, notice } => Self {
                tag: notice.tag,
                data: PyBytes::new(py, notice.data()).unbind(),
                ..new("notice", from, String::new())
            },
            Event::Left { from, label, is_dead } => Self { is_dead, ..new("left", from, label) },
            Event::RailLost { with, label, rail, reason } => {
                Self { rail, reason, ..new("rail-lost", with, label) }
            }
            Event::RailRestored { with, label, rail } => {
                Self { rail, ..new("rail-restored", with, label) }
            }
            _ => new("other", [0; 16], String::new()),
        }
    }
}

fn peer_of(number: u32) -> PeerId {
    PeerId::from_u32(number)
}

/// Blocks of a transfer.
enum Parts {
    Whole,
    List(Vec<Block>),
    Strided(Strided),
}

impl Parts {
    fn of(blocks: Option<&Bound<'_, PyAny>>) -> Result<Self> {
        let Some(blocks) = blocks else { return Ok(Self::Whole) };
        if let Ok(strided) = blocks.cast::<PyStrided>() {
            return Ok(Self::Strided(strided.get().rows));
        }
        let blocks: Vec<(u64, u64, u64)> = blocks.extract()?;
        let block = |(to, from, length)| Block { to, from, length };
        Ok(Self::List(blocks.into_iter().map(block).collect()))
    }
}

impl PyAgent {
    /// That of a group.
    pub(crate) fn of_group(group: &Arc<Exclusive<Group>>) -> Self {
        Self { agent: Arc::new(Access::OfGroup(Arc::clone(group))) }
    }

    /// Begins a transfer.
    fn begin(
        &self,
        py: Python<'_>,
        operation: &'static str,
        (route, blocks, notice): (&PyRoute, Option<&Bound<'_, PyAny>>, NoticeParts),
        is_put: bool,
    ) -> Result<PyOperation> {
        let parts = Parts::of(blocks)?;
        let notice = notice.map(|(tag, data)| Notice::new(tag, &data)).transpose()?;
        let token = self.agent.with(py, operation, |agent| {
            let route = &route.route;
            Ok(match (&parts, is_put) {
                (Parts::Whole, true) => agent.put_all(route, notice),
                (Parts::Whole, false) => agent.get_all(route, notice),
                (Parts::List(blocks), true) => agent.put(route, blocks, notice),
                (Parts::List(blocks), false) => agent.get(route, blocks, notice),
                (Parts::Strided(rows), true) => agent.put(route, rows, notice),
                (Parts::Strided(rows), false) => agent.get(route, rows, notice),
            }?)
        })?;
        Ok(PyOperation { agent: Arc::clone(&self.agent), token, outcome: OnceLock::new() })
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
        let buffer = buffer_of(array)?;
        let region = self.agent.with(py, "register region", |agent| {
            Ok(match (read, write) {
                (false, false) => agent.register_local(buffer),
                (true, false) => agent.register(buffer, Rights::READ),
                (false, true) => agent.register(buffer, Rights::WRITE),
                (true, true) => agent.register(buffer, Rights::ALL),
            }?)
        })?;
        Ok(PyRegion { region: Closable::new("the region was closed", region) })
    }

    /// Publishes a region by name on the card from now on.
    fn publish(&self, py: Python<'_>, name: &str, region: &PyRegion) -> Result<()> {
        let region = region.region.get("publish region")?;
        self.agent.with(py, "publish region", |agent| Ok(agent.publish(name, &region)?))
    }

    /// Withdraws a region, and waits until peers have completed all operations with it. Then its
    /// memory can be reused.
    #[pyo3(signature = (region, *, timeout=30.0))]
    fn withdraw(&self, py: Python<'_>, region: &PyRegion, timeout: Option<f64>) -> Result<()> {
        let region = region.region.get("withdraw region")?;
        self.call(py, "withdraw region", timeout, move |agent, left| agent.withdraw(&region, left))
    }

    /// Connects to another agent by its card. Returns the number of the peer.
    #[pyo3(signature = (card, *, timeout=30.0))]
    fn connect(&self, py: Python<'_>, card: Vec<u8>, timeout: Option<f64>) -> Result<u32> {
        let peer =
            self.call(py, CONNECT, timeout, move |agent, left| agent.connect(&card, left))?;
        Ok(peer.to_u32())
    }

    /// Disconnects from a peer, when operations with it have completed.
    #[pyo3(signature = (peer, *, timeout=30.0))]
    fn disconnect(&self, py: Python<'_>, peer: u32, timeout: Option<f64>) -> Result<()> {
        let operation = "disconnect from agent";
        self.call(py, operation, timeout, move |agent, left| agent.disconnect(peer_of(peer), left))
    }

    /// Joins a region with one that the peer published by name.
    #[pyo3(signature = (peer, name, region, *, timeout=30.0))]
    fn route_to(
        &self,
        py: Python<'_>,
        peer: u32,
        name: String,
        region: &PyRegion,
        timeout: Option<f64>,
    ) -> Result<PyRoute> {
        let region = region.region.get(JOIN)?;
        let route = self.call(py, JOIN, timeout, move |agent, left| {
            agent.route_to(peer_of(peer), &name, &region, left)
        })?;
        Ok(PyRoute { route })
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
        let (region, policy) = (region.region.get(JOIN)?, policy.parse::<path::Policy>()?);
        let route = self.call(py, JOIN, timeout, move |agent, left| {
            agent.join(peer_of(peer), &region, &descriptor, &policy, left)
        })?;
        Ok(PyRoute { route })
    }

    /// Copies from the region here to that of the peer: everything, a list of (to, from, length) in
    /// bytes, or strided rows. Then the peer gets the notice, a tag and up to 4096 bytes.
    #[pyo3(signature = (route, blocks=None, *, notice=None))]
    fn put(
        &self,
        py: Python<'_>,
        route: &PyRoute,
        blocks: Option<&Bound<'_, PyAny>>,
        notice: NoticeParts,
    ) -> Result<PyOperation> {
        self.begin(py, "put", (route, blocks, notice), true)
    }

    /// Copies from the region of the peer to that here; otherwise as `put`.
    #[pyo3(signature = (route, blocks=None, *, notice=None))]
    fn get(
        &self,
        py: Python<'_>,
        route: &PyRoute,
        blocks: Option<&Bound<'_, PyAny>>,
        notice: NoticeParts,
    ) -> Result<PyOperation> {
        self.begin(py, "get", (route, blocks, notice), false)
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
        Ok(PyOperation { agent: Arc::clone(&self.agent), token, outcome: OnceLock::new() })
    }

    /// Orders operations: later ones with the peer begin when the earlier ones are complete.
    fn fence(&self, py: Python<'_>, peer: u32) -> Result<()> {
        self.agent.with(py, "fence", |agent| Ok(agent.fence(peer_of(peer))?))
    }

    /// Waits until all operations with a peer are complete.
    #[pyo3(signature = (peer, *, timeout=30.0))]
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
    #[pyo3(signature = (*, timeout=30.0))]
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
    #[pyo3(signature = (*, timeout=30.0))]
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

#[pymethods]
impl PyOperation {
    /// Waits until it is complete. Returns the number of bytes.
    #[pyo3(signature = (*, timeout=30.0))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> Result<u64> {
        let cause = || "it is in flight".to_owned();
        wait(py, WAIT, Timeout::new(WAIT, timeout)?, cause, |slice| {
            self.agent.step(WAIT, |agent| {
                if let Some(outcome) = self.outcome.get() {
                    return Ok(Some(outcome.clone()?));
                }
                match agent.wait(self.token, slice) {
                    Err(error) if error.kind() == transfer::ErrorKind::DeadlineExceeded => {
                        // The operation itself may have failed so; then its outcome was returned now.
                        match agent.test(self.token) {
                            None => Ok(None),
                            Some(Err(gone)) if gone.kind() == transfer::ErrorKind::Unknown => {
                                Ok(Some(self.keep(Err(error))?))
                            }
                            Some(outcome) => Ok(Some(self.keep(outcome)?)),
                        }
                    }
                    outcome => Ok(Some(self.keep(outcome)?)),
                }
            })
        })
    }

    /// Returns True if the operation is complete. Raises its error if it failed.
    fn done(&self, py: Python<'_>) -> Result<bool> {
        self.agent.with(py, WAIT, |agent| {
            agent.progress();
            if let Some(outcome) = self.outcome.get() {
                outcome.clone()?;
                return Ok(true);
            }
            let outcome = agent.test(self.token).map(|outcome| self.keep(outcome));
            Ok(outcome.transpose()?.is_some())
        })
    }
}

#[pymethods]
impl PyStrided {
    /// Rows of `length` bytes, at these distances in bytes.
    #[staticmethod]
    fn rows(count: u64, length: u64, from_stride: u64, to_stride: u64) -> Result<Self> {
        Ok(Self { rows: Strided::rows(count, length, from_stride, to_stride)? })
    }

    /// A part of an array of elements of `item_size` bytes, which lies in arrays of both sides.
    #[staticmethod]
    fn tile(
        item_size: u64,
        tile: Vec<u64>,
        from_extents: Vec<u64>,
        from_origin: Vec<u64>,
        to_extents: Vec<u64>,
        to_origin: Vec<u64>,
    ) -> Result<Self> {
        let from = Subarray { extents: &from_extents, origin: &from_origin };
        let to = Subarray { extents: &to_extents, origin: &to_origin };
        Ok(Self { rows: Strided::tile(item_size, &tile, from, to)? })
    }

    /// Repeats the rows, at these distances in bytes.
    fn repeat(&self, count: u64, from_stride: u64, to_stride: u64) -> Result<Self> {
        Ok(Self { rows: self.rows.repeat(count, from_stride, to_stride)? })
    }

    /// Moves the rows to offsets larger by this many bytes.
    #[pyo3(signature = (*, source=0, target=0))]
    fn shifted(&self, source: u64, target: u64) -> Result<Self> {
        Ok(Self { rows: self.rows.shifted(source, target)? })
    }

    /// Number of bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.rows.bytes()
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
