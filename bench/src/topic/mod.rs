//! `fabricast bench topic`: messages of topics, within a node and between two.

mod baseline;
mod contents;
mod cores;
mod idle;
mod inter_node;
mod intra_node;
mod many_topics;
mod message_stamps;
mod node;
mod private_copy;
mod queue_baseline;
mod role;
mod schedule;
mod shared_words;
mod stage_baselines;
mod thread_usage;
mod timed_publisher;
mod timed_subscriber;
mod topic_results;
mod wire_baseline;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use gpu::Implementation;
use pubsub::{MemoryLocation, Reliability, TopicSettings};
use serde::{Deserialize, Serialize};

pub(super) use self::role::WorkerRole;

use self::cores::CoreChoice;
use crate::exchange::plan::Wait;
use crate::random_pattern::{Content, HEADER};
use command::exit::{Exit, Failure};
use command::histogram::Histogram;
use command::{size, stages, text};

/// Interleaved rounds, as A B B A …: so many pairs.
const ROUNDS: u64 = 11;
/// Default number of timed messages, and the maximum of their bytes together where they are copied.
const MESSAGES: u64 = 20_000;
const BYTES: u64 = 2 << 30;
/// Loans of each publisher.
const LOANS: u32 = 4;

/// Publishes messages that readers in other processes pull, check and release.
///
/// By default within a node, from the loan of memory until a reader has the message. All bytes are
/// verified in separate rounds, before and after the timed ones; in these only the first and last
/// bytes, unless a device has them. The last line of the output is one JSON object.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Arguments {
    /// Within one node: loan, publish, pull, release; interleaved with the queue baseline
    #[arg(long, group = "what")]
    intra_node: bool,
    /// Within one node with 1, 2, 4, … readers up to this number, that busy-poll and that block:
    /// growth of latency, and of the call that publishes
    #[arg(
        long,
        value_name = "READERS",
        group = "what",
        conflicts_with_all = ["subscribers", "single_subscriber"],
        value_parser = clap::value_parser!(u64).range(1..=32)
    )]
    fan_out: Option<u64>,
    /// Between two nodes of this machine without shared memory: latency compared with that of a
    /// ring, or from --size 64K on with the stages of a message by themselves, with as many lanes;
    /// messages per second
    #[arg(long, group = "what")]
    inter_node: bool,
    /// Cost of this many idle topics
    #[arg(long, value_name = "N", group = "what", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    idle_topics: Option<u64>,
    /// Fairness of this many topics on two nodes at once, each with --subscribers
    #[arg(long, value_name = "TOPICS", group = "what", value_parser = clap::value_parser!(u64).range(1..=256))]
    many_topics: Option<u64>,
    /// Interleave --inter-node with this baseline: pageable copies, a Unix socket, TCP, a copy for
    /// each reader
    #[arg(long, value_enum, group = "what")]
    baseline: Option<Baseline>,
    /// Bytes of a message; accepts K, M, G
    #[arg(long, value_name = "BYTES", value_parser = size::parse_positive, default_value = "64")]
    size: u64,
    /// Number of readers, each a process
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u64).range(1..=32))]
    subscribers: u64,
    /// Interleave with a single reader, too, and print the ratio
    #[arg(long)]
    single_subscriber: bool,
    /// Timed messages; accepts K, M, G [default: 20K; where they are copied at most 2 GiB together,
    /// but at least 22]
    #[arg(long = "iters", value_name = "N", value_parser = size::parse_positive)]
    iterations: Option<u64>,
    /// How readers and publishers wait
    #[arg(long, value_enum, default_value_t = Wait::Default)]
    waiting: Wait,
    /// Memory of the messages: host, or a device such as cuda:0 or emulated:0
    #[arg(long, value_name = "PLACE", default_value = "host")]
    memory: MemoryLocation,
    /// Memory of the messages at the other node [default: the same]
    #[arg(long, value_name = "PLACE")]
    remote_memory: Option<MemoryLocation>,
    /// Include the time to write the content
    #[arg(long)]
    time_fill: bool,
    #[command(flatten)]
    replication: Replication,
    /// With --many-topics: number of processes of each node, and of each subscriber, that share the
    /// topics
    #[arg(long, value_name = "N", default_value = "1", requires = "many_topics", value_parser = clap::value_parser!(u64).range(1..=32))]
    processes: u64,
    /// With --many-topics: only one node publishes, and only the other one reads
    #[arg(long, requires = "many_topics")]
    one_way: bool,
    /// Duration of --idle-topics and --many-topics
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,
    /// Cores of the publisher and of each reader, A,B,…: readers share them if there are fewer, and
    /// the services of nodes have the rest; or auto: one for each, but two thirds for services that
    /// replicate messages between nodes [default: not pinned]
    #[arg(long, value_name = "A,B|auto")]
    cores: Option<CoreChoice>,
    /// Print the JSON line only
    #[arg(long)]
    json: bool,
}

// Options of replication between nodes. Without documentation comment, which would be the help of
// the command.
#[derive(Debug, Clone, clap::Args, Serialize, Deserialize)]
struct Replication {
    /// Provider for messages between nodes [default: the best provider]
    #[arg(long, value_name = "NAME")]
    provider: Option<String>,
    /// Lanes for large messages between nodes [default: automatic]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    lanes: Option<u32>,
    /// Replication threads of each service [default: automatic]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    workers: Option<u32>,
}

/// The baseline design.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Baseline {
    /// The design of the original thesis
    Thesis,
}

impl Arguments {
    /// Messages of each round; fewer if they are copied.
    fn each(&self, is_copied: bool) -> u64 {
        let few = (BYTES / self.size).clamp(2 * ROUNDS, MESSAGES);
        let all = self.iterations.unwrap_or(if is_copied { few } else { MESSAGES });
        all.div_ceil(ROUNDS).max(1)
    }

    /// Is there a topic with one reader, besides that with all?
    fn has_one(&self) -> bool {
        self.single_subscriber && self.subscribers > 1
    }

    /// Does the publisher write both ends of a timed message? Not in device memory: users let the
    /// device write it.
    fn writes_ends(&self) -> bool {
        self.time_fill || matches!(self.memory, MemoryLocation::Host)
    }

    fn check(&self) -> Result<(), Failure> {
        let refuse = |why: String| Err(Failure::new(Exit::Usage, why));
        if self.size < HEADER as u64 {
            return refuse(format!("--size is too small. Use at least {HEADER} bytes"));
        }
        intra_node::cores(self).map(drop)?;
        if self.size > TopicSettings::LARGEST {
            let most = size::print(TopicSettings::LARGEST);
            return refuse(format!("--size is too large. Use at most {most}"));
        }
        let is_of_host = |place: MemoryLocation| match place.device() {
            Ok(name) => name.is_none_or(|name| name.implementation != Implementation::Cuda),
            Err(_) => false,
        };
        // A message, and its source or the buffer to compare with; at each node.
        let places = match self.inter_node || self.baseline.is_some() {
            true => [Some(self.memory), Some(self.remote_memory.unwrap_or(self.memory))],
            false => [Some(self.memory), None],
        };
        let of_host =
            places.into_iter().flatten().filter(|place| is_of_host(*place)).count() as u64;
        // The service of a node has a descriptor for each topic, and some more.
        let topics = self.idle_topics.or(self.many_topics).unwrap_or(2);
        let remedy = "Use fewer topics";
        command::process::check_descriptors("measure topics", topics + 64, remedy)?;
        let remedy = "Use a smaller --size";
        command::memory::check("measure a topic", self.size.saturating_mul(2 * of_host), remedy)
    }
}

/// Warns if busy-polling processes share cores.
fn warn_of_cores(arguments: &Arguments) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    if arguments.waiting == Wait::Poll && arguments.subscribers + 1 > cores {
        eprintln!(
            "fabricast: warning: {} processes busy-poll on {}: --waiting block gives meaningful results",
            arguments.subscribers + 1,
            text::count_of(cores, "core")
        );
    }
}

pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    arguments.check()?;
    if let Some(most) = arguments.fan_out {
        return intra_node::fan_out::run(arguments, most);
    }
    warn_of_cores(arguments);
    if let Some(topics) = arguments.idle_topics {
        return idle::run(arguments, topics);
    }
    if let Some(topics) = arguments.many_topics {
        return many_topics::run(arguments, topics);
    }
    if arguments.inter_node || arguments.baseline.is_some() {
        return inter_node::run(arguments);
    }
    intra_node::run(arguments)
}

/// The results of a worker, in addition to its samples.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct TopicResult {
    /// Nanoseconds of each timed message, by topic.
    topics: Vec<Histogram>,
    /// Of each entry of the queue baseline.
    queue: Histogram,
    /// Of the stages of messages.
    stages: [Histogram; stages::COUNT],
    /// Of copies to the readers' own memory, if requested.
    private: Histogram,
    /// The path of the messages.
    path: String,
    /// Of the stream: from the first message to the last, in nanoseconds, and their number.
    streams: Vec<(u64, u64)>,
    /// Messages by topic.
    shares: Vec<u64>,
    /// The longest time without a message of a topic, in nanoseconds.
    longest_gap: u64,
    /// Processor time of the timed messages of the first topic.
    processor_time: Duration,
}

/// The service of a node.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Service {
    directory: PathBuf,
    network: Option<Network>,
    budget: u64,
    /// The cores of its threads; not pinned without any.
    cores: Vec<usize>,
}

impl Service {
    /// Of a node without a network.
    fn local(directory: PathBuf, budget: u64, cores: &[usize]) -> Self {
        Self { directory, network: None, budget, cores: cores.to_vec() }
    }
}

/// The network of a node.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Network {
    listen: SocketAddr,
    peer: Option<SocketAddr>,
    replication: Replication,
}

/// The settings and contents of a topic.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct TopicKind {
    memory: String,
    size: u64,
    depth: u32,
    run: u64,
    /// The first and last bytes are written each time.
    writes_ends: bool,
}

impl TopicKind {
    /// A topic of this measurement, with messages in this memory.
    fn new(arguments: &Arguments, memory: MemoryLocation, depth: u32) -> Self {
        Self {
            memory: memory.to_string(),
            size: arguments.size,
            depth,
            run: std::process::id().into(),
            writes_ends: arguments.writes_ends(),
        }
    }

    fn settings(&self) -> Result<TopicSettings, Failure> {
        let memory: MemoryLocation = self.memory.parse()?;
        Ok(TopicSettings {
            memory,
            reliability: Reliability::Reliable,
            depth: self.depth,
            largest: self.size,
            max_held: 2,
            loans: LOANS,
            release_deadline: schedule::TIMEOUT,
            type_name: None,
        })
    }

    fn is_on_host(&self) -> Result<bool, Failure> {
        Ok(matches!(self.memory.parse()?, MemoryLocation::Host))
    }

    /// Memory that so many topics reserve, with a publisher each.
    fn budget(&self, topics: u64) -> u64 {
        let (depth, largest) = (self.depth, self.size);
        let each = TopicSettings { depth, largest, ..TopicSettings::default() }.reserves(1);
        each.bytes * topics + (64 << 20)
    }

    fn content(&self, number: u64) -> Content {
        Content { run: self.run, number, length: self.size }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn arguments(words: &str) -> Arguments {
        Line::try_parse_from(std::iter::once("topic").chain(words.split_whitespace()))
            .unwrap_or_else(|error| panic!("{words}: {error}"))
            .arguments
    }

    #[test]
    fn fewer_messages_are_timed_where_they_are_copied() {
        for (words, is_copied, expected) in [
            ("--size 64", false, 20_000),
            ("--size 1G", false, 20_000),
            ("--size 1G", true, 22),
            ("--size 1M", true, 2048),
            ("--size 1G --iters 33", false, 33),
        ] {
            let all = arguments(words).each(is_copied) * ROUNDS;
            assert!((expected..expected + ROUNDS).contains(&all), "{words}: {all}");
        }
    }

    #[test]
    fn number_of_readers_is_set_by_one_option() {
        let is_taken = |words: &str| {
            let words = std::iter::once("topic").chain(words.split_whitespace());
            Line::try_parse_from(words).is_ok()
        };
        assert!(
            is_taken("--fan-out 8 --waiting block")
                && is_taken("--subscribers 8 --single-subscriber")
        );
        assert!(
            !is_taken("--fan-out 8 --subscribers 4")
                && !is_taken("--single-subscriber --fan-out 8")
        );
    }

    #[test]
    fn device_memory_is_not_written_by_the_publisher() {
        assert!(arguments("--size 1M").writes_ends());
        assert!(!arguments("--memory emulated:0").writes_ends());
        assert!(arguments("--memory emulated:0 --time-fill").writes_ends());
    }
}
