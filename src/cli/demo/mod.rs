//! `fabricast demo`: two nodes, three topics and eight subscribers on this machine, in a few
//! seconds, with all data verified.

mod display;
mod network;
mod outcome;
mod processes;

use std::time::{Duration, Instant};

use gpu::{Device, DeviceName, Implementation};
use pubsub::{MemoryLocation, Row, TopicSettings, parse_seconds};
use serde::{Deserialize, Serialize};

use self::display::LiveDisplay;
use self::network::{DemoNetwork, NetworkMode};
use self::outcome::DemoResult;
use self::processes::{DemoProcess, DemoProcesses, Role};
use super::exit::{Exit, Failure, Result};
use super::open_topic::check_device;
use super::report_rows::matching;
use super::statistics::Latency;
use super::{output, size, text};

/// Timeout of the start, and of reading what is left at the end.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(18);
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of the last reports and of the end of all processes.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);
/// Machines with more cores can verify more data.
const BASE_CORES: usize = 4;

/// Runs two nodes on this machine, connected by a virtual cable: three topics, three publishers,
/// eight subscribers, each a process; every byte is verified.
///
/// Ends by itself within 50 seconds (with --time, 35 seconds after it). Shows a live table on a
/// terminal, or else a line at intervals; at the end the traffic of each path and the slowest
/// stages. The exit code is 0 if all data was correct and nothing was lost.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// How long messages are published
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, default_value = "12")]
    time: Duration,
    /// Network between the two nodes
    #[arg(long, value_enum, default_value_t = NetworkMode::Auto)]
    network: NetworkMode,
    /// Memory of the messages: host, or a device [default: cuda:0, and cuda:1 for the second node;
    /// host without a device]
    #[arg(long, value_name = "PLACE")]
    memory: Option<MemoryLocation>,
    /// Print one JSON line only
    #[arg(long)]
    json: bool,
    /// Only try whether network namespaces can be created
    #[arg(long, hide = true)]
    probe: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    if arguments.time > Duration::from_secs(3600) || arguments.time < Duration::from_secs(1) {
        return Err(Failure::new(Exit::Usage, "--time is out of range. Use 1 to 3600 seconds"));
    }
    if arguments.probe {
        return network::probe();
    }
    command::memory::check("run the demonstration", MEMORY, "End other programs first")?;
    // The order matters: unshare needs a single thread, and devices and signals start more.
    let network = DemoNetwork::prepare(arguments.network)?;
    let limit = STARTUP_TIMEOUT + arguments.time + DRAIN_TIMEOUT + SHUTDOWN_TIMEOUT * 2;
    let processes = DemoProcesses::new(network, limit)?;
    let places = places(arguments.memory);
    places.into_iter().try_for_each(check_device)?;
    let memory = places.map(|place| place.to_string());
    let mut all =
        Demonstration { arguments, memory, processes, started_at: None, rows: Vec::new() };
    all.print_introduction()?;
    let run_result = all.run_phases();
    if let Some(display) = &mut all.processes.display {
        display.clear()?;
    }
    let outcome = DemoResult::of(&all, run_result.is_ok());
    let is_interrupted = run_result.as_ref().is_err_and(|it| it.exit() == Exit::Interrupted);
    // Corrupted data is more severe than an early end.
    let done = match (run_result, outcome.verdict()) {
        (Ok(()), verdict) => verdict,
        (Err(_), Err(verdict)) if verdict.exit() == Exit::DataCorrupted => Err(verdict),
        (Err(failure), _) => Err(failure),
    };
    if arguments.json {
        return output::report_as_json(done, &outcome);
    }
    let printed = if is_interrupted { Ok(()) } else { outcome.print() };
    done.and(printed)?;
    output::print("demo: ok\n")
}

/// A topic, the node that publishes it, and its subscribers.
#[derive(Debug, Clone, Copy)]
struct DemoTopic {
    name: &'static str,
    /// Bytes of a message.
    size: u64,
    /// Messages per second on two cores, which have to verify all that is read.
    rate: f64,
    depth: u32,
    /// The node that publishes it.
    from: usize,
    /// Number of subscribers at each node.
    readers: [u32; 2],
}

const TOPICS: [DemoTopic; 3] = [
    DemoTopic { name: "camera", size: 4 << 20, rate: 10.0, depth: 8, from: 0, readers: [1, 2] },
    DemoTopic { name: "lidar", size: 16 << 20, rate: 4.0, depth: 4, from: 1, readers: [2, 1] },
    DemoTopic { name: "tensors", size: 64 << 20, rate: 1.0, depth: 2, from: 0, readers: [1, 1] },
];
const NODES: usize = 2;

/// Upper bound of the host memory used: messages where they are published and received, the rings
/// between the nodes, and fourteen processes.
const MEMORY: u64 = 2 << 30;

impl DemoTopic {
    fn settings(&self) -> TopicSettings {
        TopicSettings {
            depth: self.depth,
            largest: self.size,
            // Machines under load may be slow.
            release_deadline: Duration::from_secs(20),
            ..TopicSettings::default()
        }
    }

    /// Options of its publisher and subscribers.
    fn options(&self) -> Vec<String> {
        let TopicSettings { depth, largest, release_deadline, .. } = self.settings();
        let release_deadline = release_deadline.as_secs();
        options(&format!(
            "--depth={depth} --largest={largest} --release-deadline={release_deadline}"
        ))
    }

    /// Number of subscribers that the publisher waits for: those of its node, and the replication
    /// to the other node, which counts as one.
    fn expected(&self) -> u32 {
        self.readers[self.from] + u32::from(self.readers[1 - self.from] > 0)
    }
}

/// Memory of all topics together at a node.
fn budget() -> u64 {
    TOPICS.iter().map(|topic| topic.settings().reserves(1).bytes).sum()
}

/// The JSON line of `pub` and `sub`.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
struct ProcessReport {
    messages: u64,
    bytes: u64,
    messages_per_s: f64,
    bytes_per_s: f64,
    #[serde(default)]
    corrupted: u64,
    /// None for a subscriber that was removed from its topic.
    #[serde(default)]
    missed: Option<u64>,
    #[serde(default)]
    paths: Vec<String>,
    #[serde(rename(serialize = "stages"))]
    stages: Vec<Latency>,
}

/// A subscriber: its last report, and the stages that only its publisher knows.
#[derive(Debug, Serialize)]
struct SubscriberRow {
    topic: &'static str,
    message_bytes: u64,
    name: String,
    /// Does it run at the node that publishes the topic?
    #[serde(skip)]
    is_local: bool,
    /// Messages per second in the last window.
    #[serde(skip)]
    rate: f64,
    #[serde(flatten)]
    last_report: ProcessReport,
}

/// The memory at each node: as requested, or of a device for each node, if there is one.
fn places(requested: Option<MemoryLocation>) -> [MemoryLocation; NODES] {
    match requested {
        Some(place) => [place; NODES],
        None => match Device::count(Implementation::Cuda) {
            Ok(0) | Err(_) => [MemoryLocation::Host; NODES],
            Ok(count) => [0, 1.min(count - 1)].map(|n| MemoryLocation::Device(DeviceName::cuda(n))),
        },
    }
}

struct Demonstration<'a> {
    arguments: &'a Arguments,
    memory: [String; NODES],
    processes: DemoProcesses,
    /// When all processes had started.
    started_at: Option<Instant>,
    /// Last reports of the nodes: while messages were published, and when all were read.
    rows: Vec<(usize, Row)>,
}

/// Has every subscriber read all messages?
fn has_all(members: &[DemoProcess]) -> bool {
    let published = |topic: usize| {
        let publisher = members.iter().find(|member| member.part == Role::Publish(topic));
        publisher.map(|member| member.last_report.messages)
    };
    members.iter().all(|member| match member.part {
        Role::Subscribe(topic) => published(topic) == Some(member.last_report.messages),
        _ => true,
    })
}

fn options(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

impl Demonstration<'_> {
    fn print_introduction(&self) -> Result<()> {
        if self.arguments.json {
            return Ok(());
        }
        let network_mode = match &self.processes.network {
            DemoNetwork::Namespaces(_) => "in two network namespaces with a cable between them",
            DemoNetwork::Loopback { why: None } => "on the loopback address",
            DemoNetwork::Loopback { why: Some(why) } => {
                &format!("on the loopback address (network namespaces unavailable: {why})")
            }
        };
        let [first, second] = &self.memory;
        let memory = match first == second {
            true => format!("in the memory of {first}"),
            false => format!("in the memory of {first} and {second}"),
        };
        let about = format!(
            "Two nodes of this machine, {network_mode}. 3 topics, 3 publishers and 8 subscribers, each a process. \
             Messages are stored {memory}. It needs up to {}, and a few more than {:.0} seconds.",
            size::amount(MEMORY as f64),
            self.arguments.time.as_secs_f64()
        );
        output::print(&(text::wrapped("", &about) + "\n"))
    }

    fn run_phases(&mut self) -> Result<()> {
        let startup_deadline = Instant::now() + STARTUP_TIMEOUT;
        self.start_services(startup_deadline)?;
        for (topic, subject) in TOPICS.iter().enumerate() {
            for (node, readers) in subject.readers.into_iter().enumerate() {
                for reader in 0..readers {
                    let suffix = char::from(b'a' + reader as u8);
                    let label = format!("node {}, {suffix}", node + 1);
                    let words = format!("sub {} --check --stats --interval 0.25", subject.name);
                    self.start_at(topic, Role::Subscribe(topic), node, label, &words)?;
                }
            }
        }
        self.processes.wait_until("all subscribers were ready", startup_deadline, |it| {
            it.members.iter().all(|member| member.has_reported || !member.part.reads())
        })?;
        // More cores can verify more data.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let speed = (cores / BASE_CORES).clamp(1, 8) as f64;
        for (topic, subject) in TOPICS.iter().enumerate() {
            let label = format!("publisher of {}", subject.name);
            let words = format!(
                "pub {} --pattern --size {} --rate {} --no-catch-up --wait-for {} --interval 0.25",
                subject.name,
                subject.size,
                subject.rate * speed,
                subject.expected()
            );
            self.start_at(topic, Role::Publish(topic), subject.from, label, &words)?;
        }
        self.processes.wait_until("all subscribers had a message", startup_deadline, |it| {
            it.members.iter().all(|member| member.last_report.messages > 0 || !member.part.reads())
        })?;
        let started_at = Instant::now();
        self.started_at = Some(started_at);
        self.processes.display = (!self.arguments.json).then(LiveDisplay::begin);
        let end = started_at + self.arguments.time;
        self.processes
            .wait_until("the time was over", end + SHUTDOWN_TIMEOUT, |_| Instant::now() >= end)?;
        let copied = |(node, row): (usize, &Row)| (node, row.clone());
        self.rows = self.processes.report().map(copied).collect();
        let drain_deadline = Instant::now() + DRAIN_TIMEOUT;
        self.processes.end(Role::publishes, drain_deadline)?;
        self.processes
            .wait_until("all messages were read", drain_deadline, |it| has_all(&it.members))?;
        let left = Instant::now() + SHUTDOWN_TIMEOUT;
        // Reports of received messages list only topics that exist. An older report may still
        // arrive first.
        let known: Vec<u64> = self.processes.rows.iter().map(|(_, reports)| *reports).collect();
        self.processes.wait_until("the nodes had reported their traffic", left, |it| {
            it.rows.iter().zip(&known).all(|((_, reports), known)| *reports > known + 1)
        })?;
        self.rows.retain(|(_, row)| matches!(row, Row::Received { .. }));
        self.rows.extend(self.processes.report().map(copied));
        self.processes.end(Role::reads, left)?;
        self.processes.end(|part| part == Role::NodeService, left)
    }

    /// Starts a publisher or subscriber of a topic.
    fn start_at(
        &mut self,
        topic: usize,
        role: Role,
        node: usize,
        label: String,
        words: &str,
    ) -> Result<()> {
        let memory = format!("--json --service external --memory {}", self.memory[node]);
        let all = [options(words), options(&memory), TOPICS[topic].options()].concat();
        self.processes.start(role, node, label, all)
    }

    fn start_services(&mut self, startup_deadline: Instant) -> Result<()> {
        let mut peer: Option<String> = None;
        for node in 0..NODES {
            let (address, budget) = (self.processes.network.address(node), budget());
            let words = format!(
                "node --insecure --listen {address}:0 --lost-after 20 --budget-host {budget} --budget-device {budget}"
            );
            let mut all = options(&words);
            all.extend(peer.take().map(|peer| format!("--peers={peer}")));
            self.processes.start(Role::NodeService, node, format!("node {}", node + 1), all)?;
            self.processes.poll_node(node)?;
            let listens = |it: &DemoProcesses| {
                let rows = &it.rows[node].0;
                matching!(rows, Row::Node { listens: Some(address), .. } => address.clone()).next()
            };
            self.processes.wait_until("the nodes were served", startup_deadline, |it| {
                listens(it).is_some()
            })?;
            peer = listens(&self.processes);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scenario_has_eight_subscribers_on_both_nodes() {
        let readers = |node: usize| TOPICS.iter().map(|topic| topic.readers[node]).sum::<u32>();
        assert_eq!((readers(0), readers(1)), (4, 4));
        let mut sizes = TOPICS.map(|topic| topic.size >> 20);
        sizes.sort_unstable();
        assert_eq!(sizes, [4, 16, 64]);
        assert!(TOPICS.iter().any(|topic| topic.from == 0));
        assert!(TOPICS.iter().any(|topic| topic.from == 1));
        assert!(budget() < MEMORY);
    }
}
