//! Between two nodes of this machine, each with a dedicated service: as between two machines, since
//! the nodes cannot pass descriptors.

use pubsub::{MemoryLocation, Node, RingPath, Row};
use serde::Serialize;

use super::baseline::{self, BaselinePublisher};
use super::cores::{Cores, Services};
use super::node::{join, services};
use super::role::WorkerRole;
use super::schedule::{Round, Turn, TurnTarget, VERIFIED_MESSAGES, WARMUP, compared, in_turn};
use super::shared_words::{WORDS, end_all, next_turn, wire_turn};
use super::stage_baselines::{self, StageCopies};
use super::thread_usage::{self, ThreadUsage, ThreadUsages};
use super::timed_publisher::TimedPublisher;
use super::timed_subscriber::SubscriberTask;
use super::topic_results::{
    Latency, SingleSubscriber, common, found, of_topic, path, slowest, stages, with_processor_times,
};
use super::wire_baseline::{WireEnd, write_path};
use super::{Arguments, ROUNDS, Service, TopicKind};
use crate::process::{Affinity, pin, set_affinity};
use crate::report::{Common, Metrics, Report, format_figure, median};
use crate::worker_group::WorkerGroup;
use command::exit::Failure;
use command::histogram::Histogram;
use command::{size, text};

/// From this size on messages are large: throughput counts, not latency.
const LARGE: u64 = 64 << 10;
/// Bytes of a stream, and its maximum number of messages.
const STREAM: u64 = 1 << 30;
const MAX_STREAM_MESSAGES: u64 = 200_000;
/// Depth of the topics: one message at a time; and of a stream, limited by bytes and messages: its
/// publisher should wait for space, not for each answer.
const DEPTH: u32 = 4;
const WAITING: u64 = 64 << 20;
const MAX_WAITING: u64 = 1024;

/// The timed topic.
const ALL: &str = "all";
/// Copies of a baseline in each round.
const COPIES: u64 = 2;

/// The path of this node's messages, and how long they waited for credit of the other node's ring,
/// in nanoseconds.
fn sent(node: &Node) -> Result<(RingPath, u64), Failure> {
    let of_it = node.report()?.into_iter().find_map(|row| match row {
        Row::Sent { topic, path, stages, .. } if topic == ALL => {
            Some((path, stages.first().map_or(0, |(_, waited)| *waited)))
        }
        _ => None,
    });
    of_it.ok_or_else(|| Failure::failed("the node does not report the path of messages"))
}

#[derive(Debug, Serialize)]
struct InterNodeMetrics {
    subscribers: u64,
    remote_memory: String,
    path: String,
    provider_between_nodes: String,
    /// The path of the messages, as the node reports it.
    lanes: usize,
    fill_is_timed: bool,
    /// Messages of which all bytes were compared.
    verified_messages: u64,
    publish_p50_us: Option<f64>,
    stages: Vec<Latency>,
    /// The slowest stage: of the baselines of stages, or of the topic.
    slowest_stage: Option<String>,
    #[serde(flatten)]
    single_subscriber: SingleSubscriber,
    /// Of a timed message, until the ring of the other node had credit.
    credit_wait_us: f64,
    /// Threads of both services, during the timed messages.
    threads: Vec<ThreadUsage>,
    #[serde(flatten)]
    stream: StreamRate,
    /// Ring baseline with about 64 bytes, interleaved.
    ring_p50_us: Option<f64>,
    overhead_over_ring_us: Option<f64>,
    /// Large messages: baselines of the stages, interleaved, and the topic's latency relative to
    /// the slowest.
    stage_baselines: Vec<Latency>,
    ratio_to_slowest: Option<f64>,
    baseline: Option<baseline::Measured>,
    note: Option<String>,
}

/// Rate of the stream, and the depth of its topic.
#[derive(Debug, Serialize)]
struct StreamRate {
    stream_depth: u32,
    messages_per_s: f64,
    stream_gb_per_s: f64,
}

fn spread(stages: &[Latency]) -> String {
    let each = stages.iter().map(|it| format!("{} {:.1}/{:.1}", it.stage, it.p50_us, it.p99_us));
    each.collect::<Vec<_>>().join("  ")
}

impl Metrics for InterNodeMetrics {
    fn to_text(&self, common: &Common) -> String {
        let lanes = text::count_of(self.lanes as u64, "lane");
        let mut out = format!(
            "{} on {}, to {} on {} by {} over {}, {lanes}, {}: p50 {}, p99 {}, p99.9 {} us one \
         way; {:.0} messages/s, {:.3} GB/s\n",
            size::print(common.bytes),
            common.provider,
            text::count_of(self.subscribers, "reader"),
            self.remote_memory,
            self.path,
            self.provider_between_nodes,
            common.waiting,
            format_figure(common.p50_us),
            format_figure(common.p99_us),
            format_figure(common.p999_us),
            self.stream.messages_per_s,
            self.stream.stream_gb_per_s,
        );
        out += &common.waiting_line("all readers");
        if let Some(single) = self.single_subscriber.to_text() {
            out.push_str(&format!("{single}\n"));
        }
        if let Some(ring) = self.ring_p50_us {
            let beyond = format_figure(self.overhead_over_ring_us);
            out.push_str(&format!(
                "a ring by itself takes {ring:.3} us; the topic, {beyond} us more\n"
            ));
        }
        let slowest = self.slowest_stage.as_deref().unwrap_or("?");
        out.push_str(&format!(
            "stages in us, p50/p99: {}; the slowest is {slowest}\n",
            spread(&self.stages)
        ));
        if !self.stage_baselines.is_empty() {
            out.push_str(&format!(
                "each by itself: {}; the total is {} of the slowest\n",
                spread(&self.stage_baselines),
                format_figure(self.ratio_to_slowest)
            ));
        }
        if self.credit_wait_us > 0.0 {
            let waits = self.credit_wait_us;
            out.push_str(&format!(
                "a message waits {waits:.1} us for credit of the other node's ring\n"
            ));
        }
        out.push_str(&thread_usage::to_text(&self.threads));
        if let Some(baseline) = &self.baseline {
            out.push_str(&baseline.to_text());
        }
        if let Some(note) = &self.note {
            out.push_str(&format!("{note}\n"));
        }
        out
    }
}

/// The interleaved items.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Item {
    /// Messages to all readers.
    All,
    /// Messages to one reader, in a separate topic.
    One,
    /// The baseline design.
    BaselinePublisher,
    /// A ring by itself, one message in each direction.
    Ring,
    /// The stages of a large message by themselves.
    Stages,
}

/// The topics by number, and messages of each.
#[derive(Debug, Clone)]
struct Plan {
    items: Vec<Item>,
    each: u64,
    /// Is there a topic for a stream? Otherwise the first one is used.
    has_stream: bool,
    in_stream: u64,
    stream_depth: u32,
}

impl Plan {
    fn new(arguments: &Arguments) -> Self {
        let has_baseline = arguments.baseline.is_some();
        let is_small = arguments.size < LARGE && !has_baseline;
        let mut items = vec![Item::All];
        items.extend(arguments.has_one().then_some(Item::One));
        items.extend(has_baseline.then_some(Item::BaselinePublisher));
        items.push(if is_small { Item::Ring } else { Item::Stages });
        let each = arguments.each(true);
        let stream_depth = (WAITING / arguments.size).clamp(DEPTH.into(), MAX_WAITING) as u32;
        let most = (STREAM / arguments.size).clamp(8, MAX_STREAM_MESSAGES);
        let in_stream = most.min(each * 2 * ROUNDS);
        Self { items, each, has_stream: stream_depth > DEPTH, in_stream, stream_depth }
    }

    fn has(&self, item: Item) -> bool {
        self.items.contains(&item)
    }

    /// Index of the topic of the stream, and of the one with one reader.
    fn stream(&self) -> usize {
        usize::from(self.has_stream)
    }

    fn one(&self) -> usize {
        self.stream() + 1
    }

    fn topics(&self) -> impl Iterator<Item = TurnTarget> + use<> {
        (0..=self.stream() + usize::from(self.has(Item::One))).map(TurnTarget::Topic)
    }

    /// Names of the topics and their depth.
    fn names(&self) -> Vec<(&'static str, u32)> {
        let mut all = vec![(ALL, DEPTH)];
        all.extend(self.has_stream.then_some(("stream", self.stream_depth)));
        all.extend(self.has(Item::One).then_some(("one", DEPTH)));
        all
    }

    fn turn(&self, item: Item) -> Turn {
        match item {
            Item::All => Turn::new(TurnTarget::Topic(0), Round::Timed, self.each),
            Item::One => Turn::new(TurnTarget::Topic(self.one()), Round::Timed, self.each),
            Item::BaselinePublisher | Item::Ring | Item::Stages => Turn::pause(),
        }
    }

    fn verify_turns(&self) -> impl Iterator<Item = Turn> + use<> {
        self.topics().map(|target| Turn::new(target, Round::Verify, VERIFIED_MESSAGES))
    }

    /// Verifies all bytes; then a warm-up creates rings, and grows pools.
    fn before(&self) -> impl Iterator<Item = Turn> + use<> {
        self.verify_turns()
            .chain(self.topics().map(|target| Turn::new(target, Round::Warmup, WARMUP)))
    }

    /// A stream, and all bytes are verified again.
    fn after(&self) -> impl Iterator<Item = Turn> + use<> {
        let stream = Turn::new(TurnTarget::Topic(self.stream()), Round::Stream, self.in_stream);
        std::iter::once(stream).chain(self.verify_turns())
    }

    /// The schedule of readers.
    fn schedule(&self) -> Vec<Turn> {
        let timed = in_turn(&self.items).map(|item| self.turn(item));
        self.before().chain(timed).chain(self.after()).collect()
    }
}

/// The topics of one node.
fn kinds(arguments: &Arguments, plan: &Plan, memory: MemoryLocation) -> Vec<(String, TopicKind)> {
    let kind = |depth| TopicKind::new(arguments, memory, depth);
    plan.names().into_iter().map(|(name, depth)| (name.to_owned(), kind(depth))).collect()
}

/// All processes but the publisher: first the services, then the processes that end with them, then
/// the readers.
struct RemainingWorkers {
    tasks: Vec<(WorkerRole, Option<usize>)>,
    last_to_end: usize,
}

impl RemainingWorkers {
    fn new(
        arguments: &Arguments,
        plan: &Plan,
        cores: &Cores,
        (group, both): (&WorkerGroup, &[Service; 2]),
        remote: &[(String, TopicKind)],
    ) -> Self {
        let mut parts: Vec<_> = both.iter().cloned().map(WorkerRole::Serve).collect();
        if plan.has(Item::Stages) {
            let (directory, messages) = (group.directory(), (DEPTH, plan.each));
            let ends = WireEnd::both(arguments, directory, messages, cores.services());
            parts.extend(ends.map(WorkerRole::Wire));
        }
        let last_to_end = parts.len();
        let schedule = plan.schedule();
        for reader in 0..arguments.subscribers {
            let mut topics: Vec<_> = remote.iter().cloned().map(Some).collect();
            if plan.has(Item::One) && reader > 0 {
                topics[plan.one()] = None;
            }
            let (waiting, core) = (cores.waiting(arguments.waiting), cores.reader(reader));
            let directory = &both[1].directory;
            let task = SubscriberTask::new(directory, topics, &schedule, waiting, core);
            parts.push(WorkerRole::Read(task));
        }
        let tasks = parts.into_iter().map(|part| (part, None)).collect();
        Self { tasks, last_to_end }
    }
}

pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let mut group = WorkerGroup::new(WORDS)?;
    let cores = Cores::new(arguments.cores.as_ref(), arguments.subscribers, Services::Replicate)?;
    let plan = Plan::new(arguments);
    let to = arguments.remote_memory.unwrap_or(arguments.memory);
    let local = kinds(arguments, &plan, arguments.memory);
    let remote = kinds(arguments, &plan, to);
    let budget = local.iter().map(|(_, kind)| kind.budget(1)).sum();
    let both = services(&group, arguments, budget, cores.services())?;
    let RemainingWorkers { mut tasks, last_to_end } =
        RemainingWorkers::new(arguments, &plan, &cores, (&group, &both), &remote);
    let baseline_plan = arguments
        .baseline
        .map(|_| baseline::Plan::new(&group, arguments.subscribers, &remote[0].1, plan.each));
    let baseline_plan = baseline_plan.transpose()?;
    if let Some(baseline_plan) = &baseline_plan {
        let roles = baseline_plan.roles().into_iter().map(WorkerRole::Baseline);
        let readers = baseline_plan.subscriber_tasks().map(WorkerRole::Read);
        tasks.extend(roles.chain(readers).map(|part| (part, None)));
    }
    group.start_workers(&tasks)?;
    let node = join(&both[0].directory, "publisher", arguments.waiting)?;
    let mut lines = Vec::new();
    for (name, kind) in &local {
        let topic = node.topic(name, &kind.settings()?)?;
        lines.push(TimedPublisher::new(&topic, kind, arguments.waiting, arguments.time_fill)?);
    }
    // Threads and processes started from here on are not pinned.
    let anywhere = Affinity::now()?;
    let pin_publisher = || cores.publisher().map_or(Ok(()), pin);
    pin_publisher()?;
    // The replication to the other node counts as a subscriber.
    lines.iter().try_for_each(|line| line.wait_for(1))?;
    group.begin()?;
    publish(&mut lines, plan.before())?;
    let (ring_path, waited_before) = sent(&node)?;
    let mut baseline_publisher = baseline_plan
        .as_ref()
        .map(|plan| BaselinePublisher::start(plan, &local[0].1))
        .transpose()?;
    let mut copies = None;
    if plan.has(Item::Stages) {
        anywhere.restore()?;
        copies = Some(StageCopies::new(arguments.memory, to, &local[0].1, ring_path.lanes)?);
        pin_publisher()?;
        write_path(group.directory(), &ring_path)?;
        wire_turn(&group.shared)?;
    }
    let mut threads = ThreadUsages::of(&group.processes());
    let mut ring = Vec::new();
    for item in in_turn(&plan.items) {
        match item {
            Item::All => {
                threads.begin();
                publish(&mut lines, [plan.turn(item)])?;
                threads.end();
                continue;
            }
            Item::One => {
                publish(&mut lines, [plan.turn(item)])?;
                continue;
            }
            Item::BaselinePublisher => {
                if let Some(baseline_publisher) = &mut baseline_publisher {
                    baseline_publisher.turn(&group.shared, plan.each)?;
                }
            }
            Item::Ring => {
                anywhere.restore()?;
                let (message, how) = ((arguments.size, plan.each), arguments.waiting);
                ring.push(stage_baselines::ring(
                    &ring_path.provider,
                    message,
                    how,
                    cores.core_pair(),
                )?);
                pin_publisher()?;
            }
            Item::Stages => {
                wire_turn(&group.shared)?;
                // On the cores of the services.
                anywhere.restore()?;
                set_affinity(cores.services())?;
                copies.as_mut().map_or(Ok(()), |copies| copies.turn(COPIES))?;
                pin_publisher()?;
            }
        }
        next_turn(&group.shared, 0)?;
    }
    let waited = sent(&node)?.1.saturating_sub(waited_before);
    publish(&mut lines, plan.after())?;
    let publishing = lines[0].publish_times();
    let publisher_time = lines[0].processor_time();
    drop(lines);
    if let Some(baseline_publisher) = &mut baseline_publisher {
        baseline_publisher.end(&group.shared)?;
    }
    drop(node);
    let results = group.results_ending_with(last_to_end, end_all)?;
    let readers = &results[last_to_end..last_to_end + arguments.subscribers as usize];
    let samples = of_topic(readers, 0);
    let stream = found(readers).filter_map(|found| found.streams.last());
    let per_second = stream.map(|(time, messages)| (*messages - 1) as f64 / *time as f64 * 1e9);
    let messages_per_s = median(per_second).unwrap_or_default();
    let one_way = samples.microseconds(0.5);
    let one = match plan.has(Item::One) {
        true => of_topic(readers, plan.one()),
        false => Histogram::default(),
    };
    let baselines = copies
        .map_or_else(Vec::new, |copies| copies.latencies(&of_topic(&results[2..last_to_end], 0)));
    let longest = baselines.iter().map(|it| it.p50_us).fold(0.0, f64::max);
    let ring = median(ring);
    let baseline = baseline_plan.map(|plan| plan.measured(&results, one_way, longest));
    let stages = stages(readers);
    let of_all = stages.iter().map(|it| (it.stage, it.p50_us));
    let of_baselines = baselines.iter().map(|it| (it.stage, it.p50_us));
    let slowest_stage = slowest(of_baselines).or_else(|| slowest(of_all)).map(str::to_owned);
    let verified = results.iter().all(|done| done.verified);
    let messages = plan.each * ROUNDS;
    let waiting = cores.waiting(arguments.waiting);
    let common = common(arguments, waiting, cores.all(), &samples, messages, verified);
    let common = with_processor_times(common, publisher_time, readers);
    let summary = InterNodeMetrics {
        subscribers: arguments.subscribers,
        remote_memory: to.to_string(),
        path: path(readers),
        provider_between_nodes: ring_path.provider,
        lanes: ring_path.lanes,
        fill_is_timed: arguments.time_fill,
        verified_messages: compared(&plan.schedule()),
        publish_p50_us: publishing.microseconds(0.5),
        stages,
        slowest_stage,
        single_subscriber: SingleSubscriber::of(&one, one_way),
        credit_wait_us: waited as f64 / 1e3 / messages as f64,
        threads: threads.busiest(messages),
        stream: StreamRate {
            stream_depth: plan.stream_depth,
            messages_per_s,
            stream_gb_per_s: messages_per_s * arguments.size as f64 / 1e9,
        },
        ring_p50_us: ring,
        overhead_over_ring_us: one_way.zip(ring).map(|(all, ring)| all - ring),
        ratio_to_slowest: one_way.filter(|_| longest > 0.0).map(|all| all / longest),
        stage_baselines: baselines,
        baseline,
        note: cores.note(),
    };
    Report::new(common, summary).conclude(arguments.json)
}

fn publish(
    lines: &mut [TimedPublisher],
    turns: impl IntoIterator<Item = Turn>,
) -> Result<(), Failure> {
    for turn in turns {
        if let TurnTarget::Topic(topic) = turn.what
            && let Some(line) = lines.get_mut(topic)
        {
            line.turn(turn)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(items: &[Item], has_stream: bool) -> Plan {
        let items = items.to_vec();
        Plan { items, each: 3, has_stream, in_stream: 8, stream_depth: 16 }
    }

    #[test]
    fn readers_pause_during_the_turns_of_others() {
        for (items, pauses) in [
            (&[Item::All, Item::Ring][..], 1),
            (&[Item::All, Item::One, Item::Stages], 1),
            (&[Item::All, Item::One, Item::BaselinePublisher, Item::Stages], 2),
        ] {
            for has_stream in [false, true] {
                let plan = plan(items, has_stream);
                let schedule = plan.schedule();
                let count = |target: TurnTarget, round| {
                    let of_it = |turn: &&Turn| turn.what == target && turn.round == round;
                    schedule.iter().filter(of_it).map(|turn| turn.count).sum::<u64>()
                };
                let paused =
                    schedule.iter().filter(|turn| turn.what == TurnTarget::Pause).count() as u64;
                assert_eq!(paused, pauses * ROUNDS, "{items:?}");
                assert_eq!(count(TurnTarget::Topic(0), Round::Timed), 3 * ROUNDS);
                let one = TurnTarget::Topic(plan.one());
                let of_one = if plan.has(Item::One) { 3 * ROUNDS } else { 0 };
                assert_eq!(count(one, Round::Timed), of_one);
                assert_eq!(count(TurnTarget::Topic(usize::from(has_stream)), Round::Stream), 8);
                let topics = plan.names().len() as u64;
                assert_eq!(compared(&schedule), topics * 2 * VERIFIED_MESSAGES);
            }
        }
    }
}
