//! Membership in a node.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ipc::WaitStrategy;
use pubsub::{Node, ServiceMode, Settings, TopicSettings, TypeName};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arguments::{contiguous, data_type_of, shape_of};
use crate::closable::Closable;
use crate::failure::{Failure, Result};
use crate::message_type::MessageType;
use crate::topic::PyTopic;
use crate::waits::{Timeout, interruptibly};

const JOIN: &str = "join node";
const OPEN: &str = "open topic";
/// How long a wait for a topic goes on after it was interrupted.
const ATTEMPT: Duration = Duration::from_secs(1);

/// A membership in a node: all processes with the same directory share a node, and its topics.
///
/// >>> import array, tempfile
/// >>> import fabricast
/// >>> directory = tempfile.TemporaryDirectory()
/// >>> with fabricast.Node(directory.name) as node:
/// ...     topic = node.topic("numbers", dtype="int32", shape=(3,))
/// ...     subscriber = topic.subscriber()
/// ...     sent = topic.publisher().publish(array.array("i", [1, 2, 3]))
/// ...     memoryview(subscriber.pull().array).tolist()
/// [1, 2, 3]
/// >>> directory.cleanup()
#[pyclass(frozen, name = "Node", module = "fabricast")]
#[derive(Debug)]
pub(crate) struct PyNode {
    node: Closable<Node>,
}

/// Addresses of peers, or one.
#[derive(FromPyObject)]
enum Peers {
    One(String),
    Several(Vec<String>),
}

impl Peers {
    fn all(self) -> Vec<String> {
        match self {
            Self::One(peer) => vec![peer],
            Self::Several(peers) => peers,
        }
    }
}

fn service_mode(name: &str) -> Result<ServiceMode> {
    match name {
        "embedded" => Ok(ServiceMode::Embedded),
        "external" => Ok(ServiceMode::External),
        "dedicated" => Ok(ServiceMode::Dedicated),
        _ => {
            let cause = format!("service=\"{name}\": embedded, external or dedicated");
            Err(Failure::invalid(JOIN, cause))
        }
    }
}

fn wait_strategy(name: &str) -> Result<WaitStrategy> {
    match name {
        "adaptive" => Ok(WaitStrategy::default()),
        "busy" => Ok(WaitStrategy::Busy),
        "block" => Ok(WaitStrategy::Block),
        _ => {
            let cause = format!("waiting=\"{name}\": adaptive, busy or block");
            Err(Failure::invalid(JOIN, cause))
        }
    }
}

impl PyNode {
    pub(crate) fn of(node: Node) -> Self {
        Self { node: Closable::new("the node was closed", node) }
    }
}

#[pymethods]
impl PyNode {
    /// Joins a node. Options that are not given come from the environment (FABRICAST_DIRECTORY, …).
    ///
    /// `waiting` is how publishers and subscribers wait: "adaptive" polls for up to 50 µs and then
    /// sleeps, "busy" polls all the time and uses a core, "block" sleeps at once. `budget_host` and
    /// `budget_device` are the bytes that all topics together may reserve, if this process serves the
    /// node.
    #[new]
    #[pyo3(signature = (directory=None, *, label=None, service=None, service_timeout=None,
        waiting=None, budget_host=None, budget_device=None, listen=None, peers=None, rendezvous=None,
        insecure=None, provider=None, source=None))]
    #[allow(clippy::too_many_arguments)] // keywords
    fn new(
        py: Python<'_>,
        directory: Option<PathBuf>,
        label: Option<String>,
        service: Option<&str>,
        service_timeout: Option<f64>,
        waiting: Option<&str>,
        budget_host: Option<u64>,
        budget_device: Option<u64>,
        listen: Option<&str>,
        peers: Option<Peers>,
        rendezvous: Option<String>,
        insecure: Option<bool>,
        provider: Option<String>,
        source: Option<&str>,
    ) -> Result<Self> {
        if let Some(parent) = directory.as_deref().and_then(Path::parent)
            && !parent.as_os_str().is_empty()
            && !parent.exists()
        {
            let cause = format!(
                "{} does not exist, and only the last part of directory is created. Create it first, or \
                 correct the path",
                parent.display()
            );
            return Err(Failure::invalid(JOIN, cause));
        }
        let mut settings = Settings::from_environment()?;
        let options = &mut settings.node;
        options.directory = directory.unwrap_or_else(|| std::mem::take(&mut options.directory));
        options.label = label.unwrap_or_else(|| std::mem::take(&mut options.label));
        if let Some(name) = service {
            options.service = service_mode(name)?;
        }
        if let Some(seconds) = service_timeout {
            options.service_timeout = Duration::try_from_secs_f64(seconds).map_err(|_| {
                Failure::invalid(JOIN, format!("service_timeout={seconds}: at least 0 seconds"))
            })?;
        }
        if let Some(name) = waiting {
            options.waiting = wait_strategy(name)?;
        }
        options.budgets.host = budget_host.or(options.budgets.host);
        options.budgets.device = budget_device.or(options.budgets.device);
        let network = &mut settings.network;
        if let Some(address) = listen {
            let parsed = address.parse().map_err(|_| {
                let cause =
                    format!("listen=\"{address}\": an address with a port, as 10.0.0.1:7700");
                Failure::invalid(JOIN, cause)
            })?;
            network.listen = Some(parsed);
        }
        network.peers = peers.map(Peers::all).unwrap_or_else(|| std::mem::take(&mut network.peers));
        network.rendezvous = rendezvous.or(network.rendezvous.take());
        network.insecure = insecure.unwrap_or(network.insecure);
        let without_effect = [("provider", provider.is_some()), ("source", source.is_some())];
        network.provider = provider.or(network.provider.take());
        if let Some(source) = source {
            network.source = Some(::fabric::local_address(source)?);
        }
        let options = settings.node_options();
        if let (None, Some((name, _))) =
            (&options.network, without_effect.into_iter().find(|(_, is_given)| *is_given))
        {
            let cause = format!("{name} has no effect without listen, peers or rendezvous");
            return Err(Failure::invalid(JOIN, cause));
        }
        let node = interruptibly(py, JOIN, move || Node::join(options))?;
        Ok(Self::of(node))
    }

    /// Opens a topic, and creates it if it does not exist. With `dtype` its messages are arrays of this
    /// type, and others are refused; with `shape` they also have this shape.
    #[pyo3(signature = (name, *, dtype=None, shape=None, memory="host", reliability="reliable", depth=16,
        largest=None, loans=4, release_deadline=Some(5.0), max_held=None),
        text_signature = "($self, name, *, dtype=None, shape=None, memory='host', reliability='reliable', \
            depth=16, largest=None, loans=4, release_deadline=5.0, max_held=None)")]
    #[allow(clippy::too_many_arguments)] // keywords
    fn topic(
        &self,
        py: Python<'_>,
        name: String,
        dtype: Option<&Bound<'_, PyAny>>,
        shape: Option<&Bound<'_, PyAny>>,
        memory: &str,
        reliability: &str,
        depth: u32,
        largest: Option<u64>,
        loans: u32,
        release_deadline: Option<f64>,
        max_held: Option<u32>,
    ) -> Result<PyTopic> {
        let node = self.node.get(OPEN)?;
        if max_held == Some(0) {
            let cause = format!("max_held=0: at least 1, at most {}", TopicSettings::MAX_DEPTH);
            return Err(Failure::invalid(OPEN, cause));
        }
        let mut settings = TopicSettings {
            memory: memory.parse()?,
            reliability: reliability.parse()?,
            depth,
            loans,
            max_held: max_held.unwrap_or_default(),
            release_deadline: match release_deadline {
                None => TopicSettings::NEVER,
                Some(seconds) => Duration::try_from_secs_f64(seconds).map_err(|_| {
                    let cause = format!("release_deadline={seconds}: at least 0 seconds, or None");
                    Failure::invalid(OPEN, cause)
                })?,
            },
            ..TopicSettings::default()
        };
        let dtype = dtype.map(|dtype| data_type_of(OPEN, dtype)).transpose()?;
        match (dtype, shape) {
            (Some(data_type), shape) => {
                let layout = match shape {
                    Some(shape) => {
                        let (layout, bytes) = contiguous(OPEN, data_type, shape_of(OPEN, shape)?)?;
                        settings.largest = bytes.max(1);
                        Some(layout)
                    }
                    None => None,
                };
                let name = MessageType::new(data_type, layout).name();
                if name.len() > TypeName::MAX_LEN {
                    let cause = format!(
                        "the type {name} has a name of {} bytes, {} are the maximum: give the fields \
                         shorter names, or leave dtype to each message",
                        name.len(),
                        TypeName::MAX_LEN
                    );
                    return Err(Failure::invalid(OPEN, cause));
                }
                settings.type_name = Some(name.parse()?);
            }
            (None, Some(_)) => {
                return Err(Failure::invalid(OPEN, "shape needs dtype, such as dtype=\"float32\""));
            }
            (None, None) => {}
        }
        settings.largest = largest.unwrap_or(settings.largest);
        let has_name = format!(". node.open(\"{name}\") takes the settings that it has");
        let topic = interruptibly(py, OPEN, move || node.topic(&name, &settings));
        PyTopic::new(topic.map_err(|error| match error.is_of("SettingsDiffer") {
            true => error.with_more(has_name),
            false => error,
        })?)
    }

    /// Waits until a topic exists on this node or a connected one, and opens it with its settings.
    #[pyo3(signature = (name, timeout=30.0))]
    fn open(&self, py: Python<'_>, name: String, timeout: Option<f64>) -> Result<PyTopic> {
        let node = self.node.get(OPEN)?;
        let end = Timeout::new(OPEN, timeout)?.end();
        loop {
            let left = end.map_or(ATTEMPT, |end| end.saturating_duration_since(Instant::now()));
            let (waiting, name) = (node.clone(), name.clone());
            let opened =
                interruptibly(py, OPEN, move || waiting.wait_for_topic(&name, left.min(ATTEMPT)));
            let is_late =
                |error: &Failure| error.is_of("NotFound") || error.is_of("DeadlineExceeded");
            match opened {
                Err(error) if is_late(&error) && left > ATTEMPT => {}
                Err(error) if is_late(&error) && end.is_none() => {}
                Err(error) if is_late(&error) => {
                    let directory = node.directory().display();
                    let waited = timeout.unwrap_or_default();
                    let more = format!(" within {waited} s, in the node at {directory}");
                    return Err(error.with_class("NotFoundInTime").with_more(more));
                }
                opened => return PyTopic::new(opened?),
            }
        }
    }

    /// The identity of the node, which all its members share.
    #[getter]
    fn identity(&self) -> Result<String> {
        Ok(self.node.get("get identity of node")?.identity())
    }

    /// The directory of its socket.
    #[getter]
    fn directory(&self) -> Result<PathBuf> {
        Ok(self.node.get("get directory of node")?.directory().to_owned())
    }

    /// Topics, publishers, subscribers and peers, a dictionary for each, as JSON.
    fn _report(&self, py: Python<'_>) -> Result<String> {
        let node = self.node.get("report on node")?;
        let rows = interruptibly(py, "report on node", move || node.report())?;
        serde_json::to_string(&rows)
            .map_err(|error| Failure::new("Failed", "report on node", error))
    }

    /// Closes the node: its topics, publishers and subscribers end at once, also calls that wait in
    /// other threads, and raise `Closed` from now on. Samples stay readable. The process leaves the
    /// node when its objects are gone.
    fn close(&self, py: Python<'_>) {
        let node = self.node.close();
        py.detach(move || node.inspect(Node::close).map(drop));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.close(py);
    }
}
