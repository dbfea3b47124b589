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

pub(super) use self::role::{TopicResult, WorkerRole, take};

use self::cores::CoreChoice;
use crate::exchange::plan::Wait;
use crate::random_pattern::HEADER;
use command::exit::{Exit, Failure};
use command::{size, text};

/// The shares of what is measured in turn, as A B B A …: so many pairs.
const ROUNDS: u64 = 11;
/// Messages that are timed, if nothing else is said, and bytes that they have together where they
/// are copied.
const MESSAGES: u64 = 20_000;
const BYTES: u64 = 2 << 30;

/// Publishes messages that readers in other processes pull, look at and let go of.
///
/// Without anything: within a node, from the memory being borrowed until a reader has the message.
/// All bytes are compared in rounds of their own, before and after those that are timed; in these
/// the first and the last ones, unless a device has them. The last line of the output is one JSON
/// object.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Arguments {
    /// Within one node: loan, publish, pull, release; interleaved with a queue alone
    #[arg(long, group = "what")]
    intra_node: bool,
    /// The same with one reader, two, four and so on to so many, that look all the time and that
    /// sleep: how latency, and the call that publishes, grow with them
    #[arg(
        long,
        value_name = "READERS",
        group = "what",
        conflicts_with_all = ["subscribers", "single_subscriber"],
        value_parser = clap::value_parser!(u64).range(1..=32)
    )]
    fan_out: Option<u64>,
    /// Between two nodes of this machine that do not know it: latency beside that of a ring, or
    /// from --size 64K on beside the stages of a message, each of them alone and by as many lanes;
    /// messages a second
    #[arg(long, group = "what")]
    inter_node: bool,
    /// Cost of this many idle topics
    #[arg(long, value_name = "N", group = "what", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    idle_topics: Option<u64>,
    /// Fairness of this many topics on two nodes at once, each with --subscribers
    #[arg(long, value_name = "TOPICS", group = "what", value_parser = clap::value_parser!(u64).range(1..=256))]
    many_topics: Option<u64>,
    /// The same by other means, interleaved with --inter-node: pageable copies, a Unix socket, TCP, a copy for
    /// each reader
    #[arg(long, value_enum, group = "what")]
    baseline: Option<Baseline>,
    /// Bytes of a message; takes K, M, G
    #[arg(long, value_name = "BYTES", value_parser = size::parse_positive, default_value = "64")]
    size: u64,
    /// Readers, each a process
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u64).range(1..=32))]
    subscribers: u64,
    /// Measure in turn with one reader, too, and tell the ratio
    #[arg(long)]
    single_subscriber: bool,
    /// Messages that are timed; takes K, M, G [default: 20K; where they are copied no more than
    /// 2 GiB together, but 22 at least]
    #[arg(long = "iters", value_name = "N", value_parser = size::parse_positive)]
    iterations: Option<u64>,
    /// How readers and publishers wait
    #[arg(long, value_enum, default_value_t = Wait::Busy)]
    waiting: Wait,
    /// In whose memory messages lie: host, or a device like cuda:0 or emulated:0
    #[arg(long, value_name = "PLACE", default_value = "host")]
    memory: MemoryLocation,
    /// In whose memory they lie at the other node [default: the same]
    #[arg(long, value_name = "PLACE")]
    remote_memory: Option<MemoryLocation>,
    /// Count the time to write the content, too
    #[arg(long)]
    time_fill: bool,
    /// What carries messages between nodes [default: the best provider]
    #[arg(long, value_name = "NAME")]
    provider: Option<String>,
    /// Lanes by which large messages go between nodes [default: automatic]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    lanes: Option<u32>,
    /// Threads of each service that carry messages between nodes [default: automatic]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    workers: Option<u32>,
    /// With --many-topics: processes that the topics of each node, and of each subscriber, are dealt out to
    #[arg(long, value_name = "N", default_value = "1", requires = "many_topics", value_parser = clap::value_parser!(u64).range(1..=32))]
    processes: u64,
    /// With --many-topics: only one node publishes, and only the other one reads
    #[arg(long, requires = "many_topics")]
    one_way: bool,
    /// How long idle topics, or many at once, are watched
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,
    /// Cores of the publisher and of each reader, A,B,…: readers share them if there are fewer, and
    /// the services of nodes have those that are left; or auto: one for each of them, but two thirds
    /// for services that carry messages between nodes [default: wherever the system puts them]
    #[arg(long, value_name = "A,B|auto")]
    cores: Option<CoreChoice>,
    /// Only the JSON line
    #[arg(long)]
    json: bool,
}

/// What it is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Baseline {
    /// The design of the original thesis
    Thesis,
}

impl Arguments {
    /// Messages of each round; are they copied?
    fn each(&self, is_copied: bool) -> u64 {
        let few = (BYTES / self.size).clamp(2 * ROUNDS, MESSAGES);
        let all = self.iterations.unwrap_or(if is_copied { few } else { MESSAGES });
        all.div_ceil(ROUNDS).max(1)
    }

    /// Is there to be a topic with one reader beside that with all?
    fn has_one(&self) -> bool {
        self.single_subscriber && self.subscribers > 1
    }

    /// Does the publisher write at both ends of a message that is timed? Bytes of a device are
    /// left alone: users have it write them.
    fn writes_ends(&self) -> bool {
        self.time_fill || matches!(self.memory, MemoryLocation::Host)
    }

    fn check(&self) -> Result<(), Failure> {
        let refuse = |why: String| Err(Failure::new(Exit::Usage, why));
        if self.size < HEADER as u64 {
            return refuse(format!("--size: what can be checked has {HEADER} bytes at least"));
        }
        intra_node::cores(self).map(drop)?;
        if self.size > TopicSettings::LARGEST {
            let most = size::print(TopicSettings::LARGEST);
            return refuse(format!("--size: a message has at most {most}"));
        }
        let is_of_host = |place: MemoryLocation| match place {
            MemoryLocation::Host => true,
            MemoryLocation::Device(name) => name.implementation != Implementation::Cuda,
        };
        // A message, and what it is made of or compared with; at each node.
        let places = match self.inter_node || self.baseline.is_some() {
            true => [Some(self.memory), Some(self.remote_memory.unwrap_or(self.memory))],
            false => [Some(self.memory), None],
        };
        let of_host =
            places.into_iter().flatten().filter(|place| is_of_host(*place)).count() as u64;
        // The service of a node has one for each topic, and some more.
        let topics = self.idle_topics.or(self.many_topics).unwrap_or(2);
        let remedy = "Use fewer topics";
        command::process::check_descriptors("measure topics", topics + 64, remedy)?;
        let remedy = "Use a smaller --size";
        command::memory::check("measure a topic", self.size.saturating_mul(2 * of_host), remedy)
    }
}

/// Who looks all the time keeps others from what they wait for.
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
    fn few_are_timed_only_where_they_are_copied() {
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
    fn how_many_read_is_said_once() {
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
    fn bytes_of_a_device_are_left_alone() {
        assert!(arguments("--size 1M").writes_ends());
        assert!(!arguments("--memory emulated:0").writes_ends());
        assert!(arguments("--memory emulated:0 --time-fill").writes_ends());
    }
}
