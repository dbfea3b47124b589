//! The declaration of each setting: name, form, default, meaning and access.

use std::sync::LazyLock;
use std::time::Duration;

use super::setting::{Form, Setting};
use super::value::{
    address, addresses, budget, count, name, optional, own, parse, parse_seconds, parse_size, path,
    print_size, service, source, within,
};
use crate::network_options::NetworkOptions;
use crate::node_options::ServiceMode;
use crate::settings::TopicSettings;

impl Setting {
    /// All settings in order; those of topics last.
    ///
    /// ```
    /// let depth = pubsub::Setting::all().iter().find(|one| one.name == "topic.depth").unwrap();
    /// assert_eq!((depth.key(), &*depth.option, depth.default), ("depth", "depth", "16"));
    /// assert_eq!(depth.variable, "FABRICAST_TOPIC_DEPTH");
    /// ```
    #[must_use]
    pub fn all() -> &'static [Self] {
        &ALL
    }
}

static ALL: LazyLock<Vec<Setting>> = LazyLock::new(|| {
    vec![
        Setting::new("directory", Form::Text("PATH"), DEFAULT_DIRECTORY)
            .about(
                "Directory of the node's socket: processes with the same directory form one node.",
            )
            .read(|all, text| path(text).map(|path| all.node.directory = path))
            .write(|all| Some(all.node.directory.display().to_string())),
        Setting::new("label", Form::Text("TEXT"), "`fabricast` and the subcommand")
            .about("Name of this process in reports.")
            .read(|all, text| {
                optional(text, name).map(|name| all.node.label = name.unwrap_or_default())
            })
            .write(|all| not_empty(&all.node.label)),
        Setting::new("service", Form::Text("embedded|external"), "embedded")
            .about(
                "Service of the node: embedded (this process, unless another one serves) or \
                 external (always another process).",
            )
            .read(|all, text| service(text).map(|mode| all.node.service = mode))
            .write(|all| {
                let is_external = all.node.service == ServiceMode::External;
                Some(if is_external { "external" } else { "embedded" }.to_owned())
            }),
        Setting::new("service_timeout", Form::Seconds, "20")
            .about(
                "Timeout for the node's service: to join, to open a topic, or for the next service \
                 when one has ended.",
            )
            .read(|all, text| parse_seconds(text).map(|time| all.node.service_timeout = time))
            .write(|all| seconds(all.node.service_timeout)),
        Setting::new("budget_host", Form::Size, "a quarter of the host's memory")
            .about(
                "Host memory that all topics together may reserve, if this process serves the \
                 node.",
            )
            .read(|all, text| optional(text, budget).map(|bytes| all.node.budgets.host = bytes))
            .write(|all| all.node.budgets.host.map(print_size)),
        Setting::new("budget_device", Form::Size, "half of the device's memory")
            .about(
                "Memory of each device that all topics together may reserve, if this process \
                 serves the node.",
            )
            .read(|all, text| optional(text, budget).map(|bytes| all.node.budgets.device = bytes))
            .write(|all| all.node.budgets.device.map(print_size)),
        Setting::new("listen", Form::Text("ADDRESS:PORT"), "none")
            .about("Address at which this node listens for other nodes; port 0: any free port.")
            .read(|all, text| {
                let expected = "an address with a port, like 10.0.0.1:7700, is expected";
                let listen = optional(text, |text| parse(text, expected));
                listen.map(|listen| all.network.listen = listen)
            })
            .write(|all| all.network.listen.map(|address| address.to_string())),
        Setting::new("peers", Form::List, "none")
            .about("Other nodes as host:port; it is enough to name a peer on one side.")
            .read(|all, text| addresses(text).map(|peers| all.network.peers = peers))
            .write(|all| not_empty(&all.network.peers.join(","))),
        Setting::new("rendezvous", Form::Text("TEXT"), "none")
            .about("Node, as host:port, from which the other nodes are learned.")
            .read(|all, text| optional(text, address).map(|node| all.network.rendezvous = node))
            .write(|all| all.network.rendezvous.clone()),
        Setting::new("insecure", Form::Flag, "false")
            .about(
                "Allow other nodes without authentication or encryption: every process that can \
                 connect, on loopback of any user of the machine, can read and publish in all \
                 topics.",
            )
            .read(|all, text| {
                parse(text, "true or false is expected").map(|is| all.network.insecure = is)
            })
            .write(|all| Some(all.network.insecure.to_string())),
        Setting::new("node_name", Form::Text("TEXT"), "the label")
            .about("Name of this node at other nodes.")
            .read(|all, text| {
                optional(text, name).map(|name| all.network.name = name.unwrap_or_default())
            })
            .write(|all| not_empty(&all.network.name)),
        Setting::new("provider", Form::Text("TEXT"), "the best one")
            .about("libfabric provider for messages between nodes.")
            .read(|all, text| optional(text, name).map(|provider| all.network.provider = provider))
            .write(|all| all.network.provider.clone()),
        Setting::new("lanes", Form::Number, "chosen by provider and number of processors")
            .about(
                "Lanes, a connection and a thread each, for messages of 1 MiB and more to other \
                 nodes; at most the number of processors, and the lanes of the other node.",
            )
            .read(|all, text| {
                let lanes = optional(text, |text| count(text, NetworkOptions::MAX_LANES));
                lanes.map(|lanes| all.network.lanes = lanes.unwrap_or(0) as usize)
            })
            .write(|all| not_zero(all.network.lanes)),
        Setting::new("workers", Form::Number, "one for each eight processors, four at most")
            .about(
                "Threads that replicate messages to and from other nodes, each for its share of \
                 the topics; the first has the lanes, and with them all topics with messages of 1 \
                 MiB and more.",
            )
            .read(|all, text| {
                let workers = optional(text, |text| count(text, NetworkOptions::MAX_WORKERS));
                workers.map(|workers| all.network.workers = workers.unwrap_or(0) as usize)
            })
            .write(|all| not_zero(all.network.workers)),
        Setting::new(
            "source",
            Form::Text("ADDRESS|SUBNET|INTERFACE"),
            "the address of the control connection",
        )
        .about(
            "Local address to send from: itself, its subnet like 10.1.0.0/16, or its interface \
             like ib0.",
        )
        .read(|all, text| optional(text, source).map(|source| all.network.source = source))
        .write(|all| all.network.source.map(|address| address.to_string())),
        Setting::new("lost_after", Form::Seconds, "5")
            .about("Time without a heartbeat after which a node is considered lost.")
            .read(|all, text| {
                let range = Duration::from_millis(100)..=Duration::from_secs(3600);
                let time = within(parse_seconds(text)?, range, "0.1 to 3600 seconds are possible");
                time.map(|time| all.network.lost_after = time)
            })
            .write(|all| seconds(all.network.lost_after)),
        Setting::new("topic.memory", Form::Text("PLACE"), "host")
            .about(
                "Memory of the messages: host, or a device such as cuda:0, emulated:0 or GPU-UUID.",
            )
            .read(|all, text| own(text).map(|memory| all.topic.memory = memory))
            .write(|all| Some(all.topic.memory.to_string())),
        Setting::new(
            "topic.reliability",
            Form::Text("reliable|drop-oldest|drop-newest"),
            "reliable",
        )
        .about(
            "When the topic is full: the publisher waits (reliable), or the oldest or the \
             newest message is dropped.",
        )
        .read(|all, text| own(text).map(|reliability| all.topic.reliability = reliability))
        .write(|all| Some(all.topic.reliability.to_string())),
        Setting::new("topic.depth", Form::Number, "16")
            .about("Number of messages that a subscriber may have unread.")
            .read(|all, text| {
                count(text, TopicSettings::MAX_DEPTH).map(|depth| all.topic.depth = depth)
            })
            .write(|all| Some(all.topic.depth.to_string())),
        Setting::new(
            "topic.max_held",
            Form::Number,
            "`depth`, at least 2, or 16 if the topic drops messages",
        )
        .about(
            "Samples that a subscriber may hold, and messages that all subscribers together may \
                 hold beside the unread ones; memory for twice as many is reserved.",
        )
        .read(|all, text| {
            count(text, TopicSettings::MAX_DEPTH).map(|held| all.topic.max_held = held)
        })
        .write(|all| Some(all.topic.held().to_string())),
        Setting::new("topic.largest", Form::Size, "1MiB")
            .about("The length of the longest message, in bytes.")
            .read(|all, text| {
                let most = TopicSettings::LARGEST;
                let expected = format!("1 to {most} bytes are possible");
                let largest = within(parse_size(text)?, 1..=most, &expected);
                largest.map(|largest| all.topic.largest = largest)
            })
            .write(|all| Some(print_size(all.topic.largest))),
        Setting::new("topic.loans", Form::Number, "4")
            .about("Loans that each publisher may hold at once; memory for them is reserved.")
            .read(|all, text| {
                count(text, TopicSettings::MAX_LOANS).map(|loans| all.topic.loans = loans)
            })
            .write(|all| Some(all.topic.loans.to_string())),
        Setting::new("topic.release_deadline", Form::Seconds, "5")
            .about(
                "Time for which a subscriber may block publishers, before it is evicted; off: for \
                 ever.",
            )
            .read(|all, text| {
                if text == "off" {
                    all.topic.release_deadline = TopicSettings::NEVER;
                    return Ok(());
                }
                let range = Duration::from_millis(1)..=Duration::MAX;
                let time = within(parse_seconds(text)?, range, "at least 0.001 seconds");
                time.map(|time| all.topic.release_deadline = time)
            })
            .write(|all| match all.topic.release_deadline {
                TopicSettings::NEVER => Some("off".to_owned()),
                deadline => seconds(deadline),
            }),
    ]
});

const DEFAULT_DIRECTORY: &str = "`fabricast` in `$XDG_RUNTIME_DIR`, if that exists, or else \
                                 `fabricast-UID` in `$TMPDIR` or `/tmp`";

fn seconds(time: Duration) -> Option<String> {
    Some(time.as_secs_f64().to_string())
}

fn not_empty(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

fn not_zero(number: usize) -> Option<String> {
    (number != 0).then(|| number.to_string())
}
