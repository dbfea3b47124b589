//! `fabricast bench topic`: messages of topics, within a node and between two.

mod baseline;
mod contents;
mod cores;
mod fan_out;
mod idle;
mod inter_node;
mod inter_node_metrics;
mod intra_node;
mod many_topics;
mod private_copy;
mod queue_baseline;
mod report;
mod role;
mod schedule;
mod stage_baselines;
mod thread_usage;
mod timed_publisher;
mod timed_subscriber;
mod wire_baseline;

use gpu::Implementation;
use pubsub::{MemoryLocation, TopicSettings};

pub(super) use self::role::WorkerRole;

use self::cores::CoreChoice;
use crate::exchange::plan::Wait;
use crate::random_pattern::HEADER;
use command::exit::{Exit, Failure};
use command::{size, text};

/// Interleaved rounds, as A B B A …: so many pairs.
const ROUNDS: u64 = 11;
/// Default number of timed messages, and the maximum of their bytes together where they are copied.
const MESSAGES: u64 = 20_000;
const BYTES: u64 = 2 << 30;

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
    #[arg(long, value_enum, default_value_t = Wait::Busy)]
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
    /// Provider for messages between nodes [default: the best provider]
    #[arg(long, value_name = "NAME")]
    provider: Option<String>,
    /// Lanes for large messages between nodes [default: automatic]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    lanes: Option<u32>,
    /// Replication threads of each service [default: automatic]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    workers: Option<u32>,
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
        let is_of_host = |place: MemoryLocation| match place {
            MemoryLocation::Host => true,
            MemoryLocation::Device(name) => name.implementation != Implementation::Cuda,
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
    if arguments.waiting == Wait::Busy && arguments.subscribers + 1 > cores {
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
        return fan_out::run(arguments, most);
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
