//! The settings: declared once, in this file, for the settings file, the environment, the command
//! line, `fabricast config` and the documentation.
//!
//! The command line overrides the environment, the environment the file, and the file the defaults.

pub(crate) mod config;
mod declare;
mod environment;
mod file;
mod options;
#[cfg(test)]
mod tests;
mod value;

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

use pubsub::{Budgets, MemoryLocation, Reliability, TopicSettings};

use super::exit::{Exit, Failure, Result};
use declare::{Group, declare};
pub(crate) use environment::variables;
pub(crate) use options::{ALL, DIRECTORY_ONLY, NODE_SETTINGS, Options};
pub(crate) use value::{Count, Depth, Lanes, Loans, Service, Size, Workers, seconds};
use value::{Value, ValueForm};

declare! {
    Node {
        /// Directory of the node's socket: processes with the same directory form one node.
        directory: PathBuf = default_directory(),
            "`fabricast` in `$XDG_RUNTIME_DIR`, if that exists, or else `fabricast-UID` in `$TMPDIR` or `/tmp`", no_check;
        /// Name of this process in reports.
        label: Option<String> = None, "`fabricast` and the subcommand", label;
        /// Service of the node: embedded (this process, unless another one serves) or external (always another process).
        service: Service = Service::Embedded, "embedded", no_check;
        /// Timeout for the node's service: to join, to open a topic, or for the next service when one has ended.
        service_timeout: Duration = Duration::from_secs(20), "20", no_check;
        /// Host memory that all topics together may reserve, if this process serves the node.
        budget_host: Option<Size> = None, "a quarter of the host's memory", budget;
        /// Memory of each device that all topics together may reserve, if this process serves the node.
        budget_device: Option<Size> = None, "half of the device's memory", budget;
        /// Address at which this node listens for other nodes; port 0: any free port.
        listen: Option<SocketAddr> = None, "none", no_check;
        /// Other nodes as host:port; it is enough to name a peer on one side.
        peers: Vec<String> = Vec::new(), "none", |all| addresses(all);
        /// Node, as host:port, from which the other nodes are learned.
        rendezvous: Option<String> = None, "none", |any| addresses(any);
        /// Allow other nodes without authentication or encryption: every process that can connect, on loopback of any user of the machine, can read and publish in all topics.
        insecure: bool = false, "false", no_check;
        /// Name of this node at other nodes.
        node_name: Option<String> = None, "the label", label;
        /// libfabric provider for messages between nodes.
        provider: Option<String> = None, "the best one", label;
        /// Lanes, a connection and a thread each, for messages of 1 MiB and more to other nodes; at most the number of processors, and the lanes of the other node.
        lanes: Option<Lanes> = None, "chosen by provider and number of processors", no_check;
        /// Threads that replicate messages to and from other nodes, each for its share of the topics; the first has the lanes, and with them all topics with messages of 1 MiB and more.
        workers: Option<Workers> = None, "one for each eight processors, four at most", no_check;
        /// Local address to send from: itself, its subnet like 10.1.0.0/16, or its interface like ib0.
        source: Option<IpAddr> = None, "the address of the control connection", no_check;
        /// Time without a heartbeat after which a node is considered lost.
        lost_after: Duration = Duration::from_secs(5), "5", lost_after;
    }
    Topic {
        /// Memory of the messages: host, or a device such as cuda:0 or emulated:0.
        memory: MemoryLocation = TopicSettings::default().memory, "host", no_check;
        /// When the topic is full: the publisher waits (reliable), or the oldest or the newest message is dropped.
        reliability: Reliability = TopicSettings::default().reliability, "reliable", no_check;
        /// Number of messages that may be unread or held by subscribers.
        depth: Depth = Count(TopicSettings::default().depth), "16", no_check;
        /// The length of the longest message, in bytes.
        largest: Size = Size(TopicSettings::default().largest), "1MiB", largest;
        /// Loans that each publisher may hold at once; memory for them is reserved.
        loans: Loans = Count(TopicSettings::default().loans), "4", no_check;
        /// Time for which a subscriber may hold a message that blocks a publisher, before it is evicted.
        release_deadline: Duration = TopicSettings::default().release_deadline, "5", release_deadline;
    }
}

/// The declaration of a setting.
#[derive(Debug)]
struct Declaration {
    group: Group,
    name: &'static str,
    kind: &'static str,
    /// The default, in words.
    default: &'static str,
    about: &'static str,
    /// The environment variable.
    variable: String,
    /// The option, without the dashes.
    option: String,
    form: ValueForm,
    /// Reads the value from a text with this origin.
    read: fn(&mut Settings, &str, &str) -> Result<(), String>,
    /// Writes the value as `read` accepts it.
    write: fn(&Settings) -> String,
    /// The value as JSON.
    json: fn(&Settings) -> serde_json::Value,
    origin: fn(&Settings) -> Option<&str>,
}

impl Declaration {
    /// The origin of the value.
    fn origin<'a>(&self, settings: &'a Settings) -> &'a str {
        (self.origin)(settings).unwrap_or("default")
    }

    /// Is the setting set?
    fn is_set(&self, settings: &Settings) -> bool {
        (self.origin)(settings).is_some()
    }

    /// The unique name, with the group: `topic.depth`.
    fn full_name(&self) -> String {
        self.group.full(self.name, '.')
    }
}

/// The value of a setting, and its origin.
#[derive(Debug, Clone)]
pub(crate) struct Setting<T> {
    pub(crate) value: T,
    /// The origin, if set: `option --depth`.
    pub(crate) origin: Option<String>,
}

impl<T> Setting<T> {
    /// Is it set?
    pub(crate) fn is_set(&self) -> bool {
        self.origin.is_some()
    }
}

fn default_directory() -> PathBuf {
    // Batch systems pass it on to machines that do not have the directory.
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    match runtime.filter(|directory| directory.is_dir()) {
        Some(directory) => directory.join("fabricast"),
        None => std::env::temp_dir().join(format!("fabricast-{}", nix::unistd::geteuid())),
    }
}

fn no_check<T>(_: &T) -> Result<(), String> {
    Ok(())
}

fn label(label: &Option<String>) -> Result<(), String> {
    const LONGEST: usize = 64;
    match label.as_ref().map(String::len) {
        Some(0) => Err("it cannot be empty".to_owned()),
        Some(length) if length > LONGEST => Err(format!("at most {LONGEST} bytes")),
        _ => Ok(()),
    }
}

fn addresses<'a>(all: impl IntoIterator<Item = &'a String>) -> Result<(), String> {
    all.into_iter().try_for_each(|address| match address.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok_and(|p| p > 0) => {
            Ok(())
        }
        _ => Err(format!("\"{address}\" is not of the form host:port")),
    })
}

fn budget(budget: &Option<Size>) -> Result<(), String> {
    let least = Budgets::MIN;
    let usual = TopicSettings::default();
    match budget {
        Some(Size(bytes)) if *bytes < least => Err(format!(
            "at least {least} bytes, which the smallest topic reserves; a topic with default settings reserves {} \
             ({} messages of {} bytes)",
            usual.reserves(1).bytes,
            usual.reserves(1).blocks,
            usual.largest
        )),
        _ => Ok(()),
    }
}

fn within<T: PartialOrd>(range: RangeInclusive<T>, value: &T, why: &str) -> Result<(), String> {
    if range.contains(value) { Ok(()) } else { Err(why.to_owned()) }
}

fn lost_after(time: &Duration) -> Result<(), String> {
    let range = Duration::from_millis(100)..=Duration::from_secs(3600);
    within(range, time, "0.1 to 3600 seconds are possible")
}

fn largest(largest: &Size) -> Result<(), String> {
    let most = TopicSettings::LARGEST;
    within(1..=most, &largest.0, &format!("1 to {most} bytes are possible"))
}

fn release_deadline(time: &Duration) -> Result<(), String> {
    within(Duration::from_millis(1)..=Duration::MAX, time, "at least 0.001 seconds")
}

/// A setting, by its index in the table, and its text.
type OptionValue = (usize, String);

/// The variable with the path of the file.
const FILE_VARIABLE: &str = "FABRICAST_CONFIG";

impl Settings {
    /// Merges the sources.
    pub(crate) fn merge(
        file: Option<(&Path, &str)>,
        environment: impl Fn(&str) -> Option<OsString>,
        options: &[OptionValue],
    ) -> Result<Self> {
        let mut settings = Self::default();
        if let Some((path, text)) = file {
            file::read(&mut settings, path, text)?;
        }
        for declaration in TABLE.iter() {
            // Empty counts as not set.
            let value = environment(&declaration.variable).filter(|value| !value.is_empty());
            let Some(value) = value else { continue };
            let origin = format!("environment {}", declaration.variable);
            let not_utf8 = || Failure::new(Exit::Usage, format!("{origin} is not UTF-8"));
            settings.apply(declaration, value.to_str().ok_or_else(not_utf8)?, &origin)?;
        }
        for (which, text) in options {
            let declaration = &TABLE[*which];
            settings.apply(declaration, text, &format!("option --{}", declaration.option))?;
        }
        Ok(settings)
    }

    /// The settings of a new topic.
    pub(crate) fn topic(&self) -> TopicSettings {
        TopicSettings {
            memory: self.memory.value,
            reliability: self.reliability.value,
            depth: self.depth.value.0,
            largest: self.largest.value.0,
            loans: self.loans.value.0,
            release_deadline: self.release_deadline.value,
            type_name: None,
        }
    }

    /// The settings, with the topic's values.
    fn with_topic(&self, topic: &TopicSettings) -> Self {
        let mut all = self.clone();
        all.memory.value = topic.memory;
        all.reliability.value = topic.reliability;
        all.depth.value = Count(topic.depth);
        all.largest.value = Size(topic.largest);
        all.loans.value = Count(topic.loans);
        all.release_deadline.value = topic.release_deadline;
        all
    }

    /// How an existing topic differs, and the options that open it; None if nothing differs, as far
    /// as this process can tell.
    pub(crate) fn differences(
        &self,
        wanted: &TopicSettings,
        existing: &TopicSettings,
    ) -> Option<(String, String)> {
        let [wanted, existing] = [wanted, existing].map(|topic| self.with_topic(topic));
        let (mut which, mut options) = (Vec::new(), Vec::new());
        for declaration in TABLE.iter().filter(|declaration| declaration.group == Group::Topic) {
            let [wants, has] = [&wanted, &existing].map(|settings| (declaration.write)(settings));
            if wants != has {
                let (name, origin) = (declaration.name, declaration.origin(self));
                which.push(format!("{name} is {has}, requested was {wants} ({origin})"));
                options.push(format!("--{} {has}", declaration.option));
            }
        }
        (!which.is_empty()).then(|| (which.join("; "), options.join(" ")))
    }

    /// Are topic settings set?
    pub(crate) fn sets_topic(&self) -> bool {
        TABLE.iter().any(|one| one.group == Group::Topic && one.is_set(self))
    }

    fn apply(&mut self, of: &Declaration, text: &str, origin: &str) -> Result<()> {
        (of.read)(self, text, origin).map_err(|why| {
            Failure::new(Exit::Usage, format!("{origin} is \"{}\": {why}", text.escape_debug()))
        })
    }
}
