//! Between two nodes of this machine, each with a service of its own: as between two machines,
//! since neither can pass the other a descriptor.

use std::net::{SocketAddr, TcpListener};

use pubsub::{MemoryLocation, Node, Row};

use super::baseline::{self, BaselinePublisher};
use super::cores::{Cores, Services};
use super::inter_node_metrics::InterNodeMetrics;
use super::report::{Latency, common, found, of_topic, path, slowest, stages};
use super::role::{
    Network, Service, TopicKind, WORDS, WorkerRole, end_all, join, next_turn, wire_turn,
};
use super::schedule::{Round, Turn, TurnTarget, VERIFIED_MESSAGES, WARMUP, compared, in_turn};
use super::stage_baselines::{self, StageCopies};
use super::thread_usage::ThreadUsages;
use super::timed_publisher::TimedPublisher;
use super::timed_subscriber::SubscriberTask;
use super::wire_baseline::{RingPath, WireEnd};
use super::{Arguments, ROUNDS};
use crate::process::{Affinity, pin, set_affinity};
use crate::report::{Report, median};
use crate::worker_group::{Task, WorkerGroup};
use command::exit::Failure;
use command::histogram::Histogram;
use command::stages::Stage;

/// Messages from here on are large: what counts is how fast bytes come, not how soon.
const LARGE: u64 = 64 << 10;
/// Bytes of a stream, and the most messages of it.
const STREAM: u64 = 1 << 30;
const MAX_STREAM_MESSAGES: u64 = 200_000;
/// Messages that wait, one at a time; and of a stream, up to so many bytes and messages: its
/// publisher is to wait for room, not for the answer to each.
const DEPTH: u32 = 4;
const WAITING: u64 = 64 << 20;
const MAX_WAITING: u64 = 1024;

/// An address of this machine that nobody uses now.
pub(super) fn address() -> Result<SocketAddr, Failure> {
    let found = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    found.map_err(|error| Failure::failed(format!("looking for a free port: {error}")))
}

/// What carries messages.
#[derive(Debug, Clone)]
pub(super) struct ReplicationOptions {
    provider: Option<String>,
    lanes: u32,
    workers: u32,
}

impl ReplicationOptions {
    pub(super) fn of(arguments: &Arguments) -> Self {
        let Arguments { provider, lanes, workers, .. } = arguments;
        let (lanes, workers) = (lanes.unwrap_or(0), workers.unwrap_or(0));
        Self { provider: provider.clone(), lanes, workers }
    }
}

/// The services of two nodes that know each other, below this directory.
pub(super) fn services(
    party: &WorkerGroup,
    budget: u64,
    by: ReplicationOptions,
    cores: &[usize],
) -> Result<[Service; 2], Failure> {
    let addresses = [address()?, address()?];
    Ok([0, 1].map(|node| Service {
        directory: party.directory().join(format!("node-{node}")),
        network: Some(Network {
            listen: addresses[node],
            peer: (node == 1).then_some(addresses[0]),
            provider: by.provider.clone(),
            lanes: by.lanes,
            workers: by.workers,
        }),
        budget,
        cores: cores.to_vec(),
    }))
}

/// The topic that is timed.
const ALL: &str = "all";
/// Copies by themselves in each round.
const COPIES: u64 = 2;

/// How this node's messages go, and how long they have waited for room at the other node, in
/// nanoseconds.
fn sent(node: &Node) -> Result<(RingPath, u64), Failure> {
    let of_it = node.report()?.into_iter().find_map(|row| match row {
        Row::Sent { topic, path, stages, .. } if topic == ALL => {
            Some((RingPath::of(&path)?, stages.first().map_or(0, |(_, waited)| *waited)))
        }
        _ => None,
    });
    of_it.ok_or_else(|| Failure::failed("the node does not say how messages go"))
}

/// What takes turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Item {
    /// Messages to all readers.
    All,
    /// Messages to one of them, in a topic of its own.
    One,
    /// The same by other means.
    BaselinePublisher,
    /// A ring alone, one message each way.
    Ring,
    /// The stages of a large message alone.
    Stages,
}

/// Which topics there are, by number, and messages of them.
#[derive(Debug, Clone)]
struct Plan {
    items: Vec<Item>,
    each: u64,
    /// Is there one for a stream? Else the first one is.
    has_stream: bool,
    in_stream: u64,
    stream_depth: u32,
}

impl Plan {
    fn new(arguments: &Arguments) -> Self {
        let has_rival = arguments.baseline.is_some();
        let is_small = arguments.size < LARGE && !has_rival;
        let mut items = vec![Item::All];
        items.extend(arguments.has_one().then_some(Item::One));
        items.extend(has_rival.then_some(Item::BaselinePublisher));
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

    /// The number of the topic of a stream, and of the one with one reader.
    fn stream(&self) -> usize {
        usize::from(self.has_stream)
    }

    fn one(&self) -> usize {
        self.stream() + 1
    }

    fn topics(&self) -> impl Iterator<Item = TurnTarget> + use<> {
        (0..=self.stream() + usize::from(self.has(Item::One))).map(TurnTarget::Topic)
    }

    /// The topics' names and how many of their messages may wait.
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
            Item::BaselinePublisher | Item::Ring | Item::Stages => Turn::rest(),
        }
    }

    fn verify_turns(&self) -> impl Iterator<Item = Turn> + use<> {
        self.topics().map(|what| Turn::new(what, Round::Verify, VERIFIED_MESSAGES))
    }

    /// All bytes are compared; then the first ones make rings, and pools that have to grow.
    fn before(&self) -> impl Iterator<Item = Turn> + use<> {
        self.verify_turns().chain(self.topics().map(|what| Turn::new(what, Round::Warmup, WARMUP)))
    }

    /// A stream, and all bytes are compared again.
    fn after(&self) -> impl Iterator<Item = Turn> + use<> {
        let stream = Turn::new(TurnTarget::Topic(self.stream()), Round::Stream, self.in_stream);
        std::iter::once(stream).chain(self.verify_turns())
    }

    /// What readers do.
    fn schedule(&self) -> Vec<Turn> {
        let timed = in_turn(&self.items).map(|item| self.turn(item));
        self.before().chain(timed).chain(self.after()).collect()
    }
}

/// The topics of one place.
fn kinds(arguments: &Arguments, plan: &Plan, memory: MemoryLocation) -> Vec<(String, TopicKind)> {
    let kind = |depth: u32| TopicKind {
        memory: memory.to_string(),
        size: arguments.size,
        depth,
        run: std::process::id().into(),
        writes_ends: arguments.writes_ends(),
    };
    plan.names().into_iter().map(|(name, depth)| (name.to_owned(), kind(depth))).collect()
}

/// Everybody but the publisher: the services first, then who ends as they do, then the readers.
struct RemainingWorkers {
    tasks: Vec<(Task, Option<usize>)>,
    last_to_end: usize,
}

impl RemainingWorkers {
    fn new(
        arguments: &Arguments,
        plan: &Plan,
        cores: &Cores,
        (party, both): (&WorkerGroup, &[Service; 2]),
        there: &[(String, TopicKind)],
    ) -> Self {
        let mut parts: Vec<_> = both.iter().cloned().map(WorkerRole::Serve).collect();
        if plan.has(Item::Stages) {
            let end = |is_writer: bool| WireEnd {
                is_writer,
                directory: party.directory().to_owned(),
                size: arguments.size,
                depth: DEPTH,
                is_staged: !matches!(arguments.memory, MemoryLocation::Host),
                each: plan.each,
                warmup: 1,
                cores: cores.services().to_vec(),
            };
            parts.extend([true, false].map(|is_writer| WorkerRole::Wire(end(is_writer))));
        }
        let last_to_end = parts.len();
        let schedule = plan.schedule();
        for reader in 0..arguments.subscribers {
            let mut topics: Vec<_> = there.iter().cloned().map(Some).collect();
            if plan.has(Item::One) && reader > 0 {
                topics[plan.one()] = None;
            }
            parts.push(WorkerRole::Read(SubscriberTask {
                directory: both[1].directory.clone(),
                topics,
                schedule: schedule.clone(),
                waiting: cores.waiting(arguments.waiting),
                core: cores.reader(reader),
                line: 0,
                private: None,
            }));
        }
        let tasks = parts.into_iter().map(|part| (Task::Topic(part), None)).collect();
        Self { tasks, last_to_end }
    }
}

pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let mut party = WorkerGroup::new(WORDS)?;
    let cores = Cores::new(arguments.cores.as_ref(), arguments.subscribers, Services::Carry)?;
    let plan = Plan::new(arguments);
    let to = arguments.remote_memory.unwrap_or(arguments.memory);
    let here = kinds(arguments, &plan, arguments.memory);
    let there = kinds(arguments, &plan, to);
    let budget = here.iter().map(|(_, kind)| kind.budget(1)).sum();
    let by = ReplicationOptions::of(arguments);
    let both = services(&party, budget, by, cores.services())?;
    let RemainingWorkers { mut tasks, last_to_end } =
        RemainingWorkers::new(arguments, &plan, &cores, (&party, &both), &there);
    let baseline_plan = arguments
        .baseline
        .map(|_| baseline::Plan::new(&party, arguments.subscribers, &there[0].1, plan.each));
    let baseline_plan = baseline_plan.transpose()?;
    if let Some(baseline_plan) = &baseline_plan {
        tasks.extend(baseline_plan.parts().into_iter().map(|part| (Task::Topic(part), None)));
    }
    party.start_workers(&tasks)?;
    let node = join(&both[0].directory, "publisher", arguments.waiting)?;
    let mut lines = Vec::new();
    for (name, kind) in &here {
        let topic = node.topic(name, &kind.settings()?)?;
        lines.push(TimedPublisher::new(&topic, kind, arguments.waiting, arguments.time_fill)?);
    }
    // Whatever else starts threads or processes runs where it may.
    let anywhere = Affinity::now()?;
    let pin_publisher = || cores.publisher().map_or(Ok(()), pin);
    pin_publisher()?;
    // Who carries messages to the other node.
    lines.iter().try_for_each(|line| line.wait_for(1))?;
    party.begin()?;
    publish(&mut lines, plan.before())?;
    let (ring_path, waited_before) = sent(&node)?;
    let mut baseline_publisher = baseline_plan
        .as_ref()
        .map(|plan| BaselinePublisher::start(plan, &here[0].1))
        .transpose()?;
    let mut copies = None;
    if plan.has(Item::Stages) {
        anywhere.restore()?;
        copies = Some(StageCopies::new(arguments.memory, to, &here[0].1, ring_path.lanes)?);
        pin_publisher()?;
        ring_path.tell(party.directory())?;
        wire_turn(&party.shared)?;
    }
    let mut threads = ThreadUsages::of(&party.processes());
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
                    baseline_publisher.turn(&party.shared, plan.each)?;
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
                wire_turn(&party.shared)?;
                // Where the services copy.
                anywhere.restore()?;
                set_affinity(cores.services())?;
                copies.as_mut().map_or(Ok(()), |copies| copies.turn(COPIES))?;
                pin_publisher()?;
            }
        }
        next_turn(&party.shared, 0)?;
    }
    let waited = sent(&node)?.1.saturating_sub(waited_before);
    publish(&mut lines, plan.after())?;
    let publishing: Histogram = lines[0].publish_times.iter().copied().collect();
    drop(lines);
    if let Some(baseline_publisher) = &mut baseline_publisher {
        baseline_publisher.end(&party.shared)?;
    }
    drop(node);
    let results = party.results_ending_with(last_to_end, end_all)?;
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
    let alone: Vec<_> = copies.map_or_else(Vec::new, |copies| {
        let wire = of_topic(&results[2..last_to_end], 0);
        let all = [
            (Stage::CopyOut, &copies.times[0]),
            (Stage::Wire, &wire),
            (Stage::CopyIn, &copies.times[1]),
        ];
        all.into_iter().filter_map(|(stage, times)| Latency::of(stage.name(), times)).collect()
    });
    let longest = alone.iter().map(|it| it.p50_us).fold(0.0, f64::max);
    let ring = median(ring);
    let baseline = baseline_plan.map(|plan| plan.measured(&results, one_way, longest));
    let stages = stages(readers);
    let of_all = stages.iter().map(|it| (it.stage, it.p50_us));
    let of_alone = alone.iter().map(|it| (it.stage, it.p50_us));
    let slowest_stage = slowest(of_alone).or_else(|| slowest(of_all)).map(str::to_owned);
    let verified = results.iter().all(|done| done.verified);
    let messages = plan.each * ROUNDS;
    let waiting = cores.waiting(arguments.waiting);
    let common = common(arguments, waiting, cores.all(), &samples, messages, verified);
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
        single_subscriber_p50_us: one.microseconds(0.5),
        single_subscriber_p99_us: one.microseconds(0.99),
        fan_out_ratio: one_way.zip(one.microseconds(0.5)).map(|(all, one)| all / one),
        credit_wait_us: waited as f64 / 1e3 / messages as f64,
        threads: threads.busiest(messages),
        stream_depth: plan.stream_depth,
        messages_per_s,
        stream_gb_per_s: messages_per_s * arguments.size as f64 / 1e9,
        ring_p50_us: ring,
        overhead_over_ring_us: one_way.zip(ring).map(|(all, ring)| all - ring),
        ratio_to_slowest: one_way.filter(|_| longest > 0.0).map(|all| all / longest),
        stage_baselines: alone,
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
    fn readers_rest_while_something_else_is_measured() {
        for (items, rests) in [
            (&[Item::All, Item::Ring][..], 1),
            (&[Item::All, Item::One, Item::Stages], 1),
            (&[Item::All, Item::One, Item::BaselinePublisher, Item::Stages], 2),
        ] {
            for has_stream in [false, true] {
                let plan = plan(items, has_stream);
                let schedule = plan.schedule();
                let count = |what: TurnTarget, round| {
                    let of_it = |turn: &&Turn| turn.what == what && turn.round == round;
                    schedule.iter().filter(of_it).map(|turn| turn.count).sum::<u64>()
                };
                let rest =
                    schedule.iter().filter(|turn| turn.what == TurnTarget::Pause).count() as u64;
                assert_eq!(rest, rests * ROUNDS, "{items:?}");
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
