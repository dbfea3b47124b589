//! `fabricast demo`: two nodes, three topics and eight subscribers on this machine, in a few
//! seconds, with all data verified.

mod display;
mod memory;
mod network;
mod outcome;
mod processes;
mod scenario;

use std::time::{Duration, Instant};

use pubsub::{MemoryLocation, Row};

use self::display::LiveDisplay;
use self::network::{DemoNetwork, NetworkMode};
use self::outcome::DemoResult;
use self::processes::{DemoProcess, DemoProcesses, Role};
use self::scenario::{NODES, TOPICS, budget};
use super::exit::{Exit, Failure};
use super::settings::seconds;
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
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "12")]
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

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    if arguments.time > Duration::from_secs(3600) || arguments.time < Duration::from_secs(1) {
        return Err(Failure::new(Exit::Usage, "--time is out of range. Use 1 to 3600 seconds"));
    }
    if arguments.probe {
        return network::probe();
    }
    memory::check()?;
    // The order matters: unshare needs a single thread, and devices and signals start more.
    let network = DemoNetwork::prepare(arguments.network)?;
    let limit = STARTUP_TIMEOUT + arguments.time + DRAIN_TIMEOUT + SHUTDOWN_TIMEOUT * 2;
    let processes = DemoProcesses::new(network, limit)?;
    let places = memory::places(arguments.memory);
    memory::check_places(&places)?;
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
    fn print_introduction(&self) -> Result<(), Failure> {
        if self.arguments.json {
            return Ok(());
        }
        let network_mode = match &self.processes.network {
            DemoNetwork::Namespaces(_) => {
                "in two network namespaces with a cable between them".to_owned()
            }
            DemoNetwork::Loopback { why: None } => "on the loopback address".to_owned(),
            DemoNetwork::Loopback { why: Some(why) } => {
                format!("on the loopback address (network namespaces unavailable: {why})")
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
            size::amount(scenario::MEMORY as f64),
            self.arguments.time.as_secs_f64()
        );
        output::print(&(text::wrapped("", &about) + "\n"))
    }

    fn run_phases(&mut self) -> Result<(), Failure> {
        let startup_deadline = Instant::now() + STARTUP_TIMEOUT;
        self.start_services(startup_deadline)?;
        for (topic, subject) in TOPICS.iter().enumerate() {
            for (node, readers) in subject.readers.into_iter().enumerate() {
                for reader in 0..readers {
                    let suffix = char::from(b'a' + reader as u8);
                    let label = format!("node {}, {suffix}", node + 1);
                    let words = format!("sub {} --check --stats --interval 0.25", subject.name);
                    self.start_at(topic, (Role::Subscribe(topic), node, label), &words)?;
                }
            }
        }
        self.processes.wait_until("all subscribers were ready", startup_deadline, |members| {
            members.iter().all(|member| member.has_reported || !member.part.reads())
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
            self.start_at(topic, (Role::Publish(topic), subject.from, label), &words)?;
        }
        self.processes.wait_until(
            "all subscribers had a message",
            startup_deadline,
            |members| {
                members.iter().all(|member| member.last_report.messages > 0 || !member.part.reads())
            },
        )?;
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
        self.processes.wait_until("all messages were read", drain_deadline, has_all)?;
        let left = Instant::now() + SHUTDOWN_TIMEOUT;
        // Reports of received messages list only topics that exist. An older report may still
        // arrive first.
        let known: Vec<u64> = self.processes.rows.iter().map(|(_, reports)| *reports).collect();
        self.processes.wait_until_all("the nodes had reported their traffic", left, |it| {
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
        process: (Role, usize, String),
        words: &str,
    ) -> Result<(), Failure> {
        let memory = format!("--json --service external --memory {}", self.memory[process.1]);
        let all = [options(words), options(&memory), TOPICS[topic].options()].concat();
        self.processes.start(process, all)
    }

    fn start_services(&mut self, startup_deadline: Instant) -> Result<(), Failure> {
        let mut peer: Option<String> = None;
        for node in 0..NODES {
            let (label, address, budget) =
                (format!("node {}", node + 1), self.processes.network.address(node), budget());
            let words = format!(
                "node --insecure --listen {address}:0 --lost-after 20 --budget-host {budget} --budget-device {budget}"
            );
            let mut all = options(&words);
            all.extend(peer.take().map(|peer| format!("--peers={peer}")));
            self.processes.start((Role::NodeService, node, label), all)?;
            self.processes.poll_node(node)?;
            let listens = |it: &DemoProcesses| {
                it.rows[node].0.iter().find_map(|row| match row {
                    Row::Node { listens, .. } => listens.clone(),
                    _ => None,
                })
            };
            self.processes.wait_until_all("the nodes were served", startup_deadline, |it| {
                listens(it).is_some()
            })?;
            peer = listens(&self.processes);
        }
        Ok(())
    }
}
