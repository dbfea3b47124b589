//! Between two nodes of this machine, each with a service of its own: as between two machines,
//! since neither can pass the other a descriptor.

use std::net::{SocketAddr, TcpListener};

use pubsub::{MemoryPlace, Node, Row};

use super::alone::{self, Copies};
use super::baseline::{self, Rival};
use super::cores::{Cores, Services};
use super::part::{Kind, Network, Part, Service, WORDS, end_all, join, next_turn, wire_turn};
use super::publishing::Line;
use super::reading::Reading;
use super::report::{Latency, common, found, of_topic, slowest, stages, way};
use super::schedule::{PROOFS, Round, Turn, WARMUP, What, compared, in_turn};
use super::summary::Summary;
use super::threads::Threads;
use super::wire::{End, Way};
use super::{Arguments, ROUNDS};
use crate::party::{Party, Task};
use crate::process::{Affinity, confine, pin};
use crate::report::{Report, median};
use command::exit::Failure;
use command::histogram::Histogram;
use command::stages::Stage;

/// Messages from here on are large: what counts is how fast bytes come, not how soon.
const LARGE: u64 = 64 << 10;
/// Bytes of a stream, and the most messages of it.
const STREAM: u64 = 1 << 30;
const MOST_OF_A_STREAM: u64 = 200_000;
/// Messages that wait, one at a time; and of a stream, up to so many bytes and messages: its
/// publisher is to wait for room, not for the answer to each.
const DEPTH: u32 = 4;
const WAITING: u64 = 64 << 20;
const MOST_WAITING: u64 = 1024;

/// An address of this machine that nobody uses now.
pub(super) fn address() -> Result<SocketAddr, Failure> {
    let found = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    found.map_err(|error| Failure::failed(format!("looking for a free port: {error}")))
}

/// What carries messages.
#[derive(Debug, Clone)]
pub(super) struct By {
    provider: Option<String>,
    lanes: u32,
    workers: u32,
}

impl By {
    pub(super) fn of(arguments: &Arguments) -> Self {
        let Arguments { provider, lanes, workers, .. } = arguments;
        let (lanes, workers) = (lanes.unwrap_or(0), workers.unwrap_or(0));
        Self { provider: provider.clone(), lanes, workers }
    }
}

/// The services of two nodes that know each other, below this directory.
pub(super) fn services(
    party: &Party,
    budget: u64,
    by: By,
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
fn sent(node: &Node) -> Result<(Way, u64), Failure> {
    let of_it = node.report()?.into_iter().find_map(|row| match row {
        Row::Sent { topic, path, stages, .. } if topic == ALL => {
            Some((Way::of(&path)?, stages.first().map_or(0, |(_, waited)| *waited)))
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
    Rival,
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
        items.extend(has_rival.then_some(Item::Rival));
        items.push(if is_small { Item::Ring } else { Item::Stages });
        let each = arguments.each(true);
        let stream_depth = (WAITING / arguments.size).clamp(DEPTH.into(), MOST_WAITING) as u32;
        let most = (STREAM / arguments.size).clamp(8, MOST_OF_A_STREAM);
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

    fn topics(&self) -> impl Iterator<Item = What> + use<> {
        (0..=self.stream() + usize::from(self.has(Item::One))).map(What::Topic)
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
            Item::All => Turn::new(What::Topic(0), Round::Timed, self.each),
            Item::One => Turn::new(What::Topic(self.one()), Round::Timed, self.each),
            Item::Rival | Item::Ring | Item::Stages => Turn::rest(),
        }
    }

    fn proofs(&self) -> impl Iterator<Item = Turn> + use<> {
        self.topics().map(|what| Turn::new(what, Round::Proof, PROOFS))
    }

    /// All bytes are compared; then the first ones make rings, and pools that have to grow.
    fn before(&self) -> impl Iterator<Item = Turn> + use<> {
        self.proofs().chain(self.topics().map(|what| Turn::new(what, Round::Warmup, WARMUP)))
    }

    /// A stream, and all bytes are compared again.
    fn after(&self) -> impl Iterator<Item = Turn> + use<> {
        let stream = Turn::new(What::Topic(self.stream()), Round::Stream, self.in_stream);
        std::iter::once(stream).chain(self.proofs())
    }

    /// What readers do.
    fn schedule(&self) -> Vec<Turn> {
        let timed = in_turn(&self.items).map(|item| self.turn(item));
        self.before().chain(timed).chain(self.after()).collect()
    }
}

/// The topics of one place.
fn kinds(arguments: &Arguments, plan: &Plan, memory: MemoryPlace) -> Vec<(String, Kind)> {
    let kind = |depth: u32| Kind {
        memory: memory.to_string(),
        size: arguments.size,
        depth,
        run: std::process::id().into(),
        is_touched: arguments.is_touched(),
    };
    plan.names().into_iter().map(|(name, depth)| (name.to_owned(), kind(depth))).collect()
}

/// Everybody but the publisher: the services first, then who ends as they do, then the readers.
struct Company {
    tasks: Vec<(Task, Option<usize>)>,
    ends_last: usize,
}

impl Company {
    fn new(
        arguments: &Arguments,
        plan: &Plan,
        cores: &Cores,
        (party, both): (&Party, &[Service; 2]),
        there: &[(String, Kind)],
    ) -> Self {
        let mut parts: Vec<_> = both.iter().cloned().map(Part::Serve).collect();
        if plan.has(Item::Stages) {
            let end = |is_writer: bool| End {
                is_writer,
                directory: party.directory().to_owned(),
                size: arguments.size,
                depth: DEPTH,
                is_staged: !matches!(arguments.memory, MemoryPlace::Host),
                each: plan.each,
                warmup: 1,
                cores: cores.services().to_vec(),
            };
            parts.extend([true, false].map(|is_writer| Part::Wire(end(is_writer))));
        }
        let ends_last = parts.len();
        let schedule = plan.schedule();
        for reader in 0..arguments.subscribers {
            let mut topics: Vec<_> = there.iter().cloned().map(Some).collect();
            if plan.has(Item::One) && reader > 0 {
                topics[plan.one()] = None;
            }
            parts.push(Part::Read(Reading {
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
        Self { tasks, ends_last }
    }
}

pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let mut party = Party::new(WORDS)?;
    let cores = Cores::new(arguments.cores.as_ref(), arguments.subscribers, Services::Carry)?;
    let plan = Plan::new(arguments);
    let to = arguments.to.unwrap_or(arguments.memory);
    let here = kinds(arguments, &plan, arguments.memory);
    let there = kinds(arguments, &plan, to);
    let budget = here.iter().map(|(_, kind)| kind.budget(1)).sum();
    let by = By::of(arguments);
    let both = services(&party, budget, by, cores.services())?;
    let Company { mut tasks, ends_last } =
        Company::new(arguments, &plan, &cores, (&party, &both), &there);
    let rivals = arguments
        .baseline
        .map(|_| baseline::Plan::new(&party, arguments.subscribers, &there[0].1, plan.each));
    let rivals = rivals.transpose()?;
    if let Some(rivals) = &rivals {
        tasks.extend(rivals.parts().into_iter().map(|part| (Task::Topic(part), None)));
    }
    party.invite(&tasks)?;
    let node = join(&both[0].directory, "publisher", arguments.waiting)?;
    let mut lines = Vec::new();
    for (name, kind) in &here {
        let topic = node.topic(name, &kind.settings()?)?;
        lines.push(Line::new(&topic, kind, arguments.waiting, arguments.copy)?);
    }
    // Whatever else starts threads or processes runs where it may.
    let anywhere = Affinity::now()?;
    let here_again = || cores.publisher().map_or(Ok(()), pin);
    here_again()?;
    // Who carries messages to the other node.
    lines.iter().try_for_each(|line| line.wait_for(1))?;
    party.begin()?;
    publish(&mut lines, plan.before())?;
    let (way_of_all, waited_before) = sent(&node)?;
    let mut rival = rivals.as_ref().map(|plan| Rival::start(plan, &here[0].1)).transpose()?;
    let mut copies = None;
    if plan.has(Item::Stages) {
        anywhere.restore()?;
        copies = Some(Copies::new(arguments.memory, to, &here[0].1, way_of_all.lanes)?);
        here_again()?;
        way_of_all.tell(party.directory())?;
        wire_turn(&party.shared)?;
    }
    let mut threads = Threads::of(&party.processes());
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
            Item::Rival => {
                if let Some(rival) = &mut rival {
                    rival.turn(&party.shared, plan.each)?;
                }
            }
            Item::Ring => {
                anywhere.restore()?;
                let (message, how) = ((arguments.size, plan.each), arguments.waiting);
                ring.push(alone::ring(&way_of_all.provider, message, how, cores.of_two())?);
                here_again()?;
            }
            Item::Stages => {
                wire_turn(&party.shared)?;
                // Where the services copy.
                anywhere.restore()?;
                confine(cores.services())?;
                copies.as_mut().map_or(Ok(()), |copies| copies.turn(COPIES))?;
                here_again()?;
            }
        }
        next_turn(&party.shared, 0)?;
    }
    let waited = sent(&node)?.1.saturating_sub(waited_before);
    publish(&mut lines, plan.after())?;
    let publishing: Histogram = lines[0].publishing.iter().copied().collect();
    drop(lines);
    if let Some(rival) = &mut rival {
        rival.end(&party.shared)?;
    }
    drop(node);
    let results = party.results_with_last(ends_last, end_all)?;
    let readers = &results[ends_last..ends_last + arguments.subscribers as usize];
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
        let wire = of_topic(&results[2..ends_last], 0);
        let all =
            [(Stage::Out, &copies.times[0]), (Stage::Wire, &wire), (Stage::In, &copies.times[1])];
        all.into_iter().filter_map(|(stage, times)| Latency::of(stage.name(), times)).collect()
    });
    let longest = alone.iter().map(|it| it.p50_us).fold(0.0, f64::max);
    let ring = median(ring);
    let baseline = rivals.map(|plan| plan.measured(&results, one_way, longest));
    let stages = stages(readers);
    let of_all = stages.iter().map(|it| (it.stage, it.p50_us));
    let of_alone = alone.iter().map(|it| (it.stage, it.p50_us));
    let slowest_stage = slowest(of_alone).or_else(|| slowest(of_all)).map(str::to_owned);
    let verified = results.iter().all(|done| done.verified);
    let messages = plan.each * ROUNDS;
    let waiting = cores.waiting(arguments.waiting);
    let common = common(arguments, waiting, cores.all(), &samples, messages, verified);
    let summary = Summary {
        subscribers: arguments.subscribers,
        to: to.to_string(),
        path: way(readers),
        wire: way_of_all.provider,
        lanes: way_of_all.lanes,
        counts_writing: arguments.copy,
        compared: compared(&plan.schedule()),
        publish_p50_us: publishing.microseconds(0.5),
        stages,
        slowest_stage,
        one_p50_us: one.microseconds(0.5),
        one_p99_us: one.microseconds(0.99),
        fan_out_ratio: one_way.zip(one.microseconds(0.5)).map(|(all, one)| all / one),
        waits_for_room_us: waited as f64 / 1e3 / messages as f64,
        threads: threads.busiest(messages),
        stream_depth: plan.stream_depth,
        messages_per_s,
        stream_gb_per_s: messages_per_s * arguments.size as f64 / 1e9,
        ring_p50_us: ring,
        beyond_ring_us: one_way.zip(ring).map(|(all, ring)| all - ring),
        ratio_to_slowest: one_way.filter(|_| longest > 0.0).map(|all| all / longest),
        alone,
        baseline,
        note: cores.note(),
    };
    Report::new(common, summary).conclude(arguments.json)
}

fn publish(lines: &mut [Line], turns: impl IntoIterator<Item = Turn>) -> Result<(), Failure> {
    for turn in turns {
        if let What::Topic(topic) = turn.what
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
            (&[Item::All, Item::One, Item::Rival, Item::Stages], 2),
        ] {
            for has_stream in [false, true] {
                let plan = plan(items, has_stream);
                let schedule = plan.schedule();
                let count = |what: What, round| {
                    let of_it = |turn: &&Turn| turn.what == what && turn.round == round;
                    schedule.iter().filter(of_it).map(|turn| turn.count).sum::<u64>()
                };
                let rest = schedule.iter().filter(|turn| turn.what == What::Rest).count() as u64;
                assert_eq!(rest, rests * ROUNDS, "{items:?}");
                assert_eq!(count(What::Topic(0), Round::Timed), 3 * ROUNDS);
                let one = What::Topic(plan.one());
                let of_one = if plan.has(Item::One) { 3 * ROUNDS } else { 0 };
                assert_eq!(count(one, Round::Timed), of_one);
                assert_eq!(count(What::Topic(usize::from(has_stream)), Round::Stream), 8);
                let topics = plan.names().len() as u64;
                assert_eq!(compared(&schedule), topics * 2 * PROOFS);
            }
        }
    }
}
