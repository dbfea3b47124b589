//! Between two nodes of this machine, each with a service of its own: as between two machines,
//! since neither can pass the other a descriptor.

use std::net::{SocketAddr, TcpListener};

use pubsub::{Node, Row};
use serde::Serialize;

use super::baseline::Rival;
use super::cores::Cores;
use super::part::{Kind, Network, Part, Service, WORDS, end_all, join, next_turn};
use super::publishing::Line;
use super::reading::Reading;
use super::report::{Stage, common, figure, found, middle, of_topic, slowest, stages, way};
use super::schedule::{PROOFS, Round, Turn, WARMUP, What, compared, in_turn};
use super::{Arguments, ROUNDS, alone, baseline};
use crate::cli::bench::party::{Party, Task};
use crate::cli::bench::queue::Wait;
use crate::cli::bench::report::{Common, conclude, median};
use crate::cli::exchange::plan::{Mode, WaitingMode};
use crate::cli::exit::Failure;
use crate::cli::process::{Affinity, pin};
use crate::cli::size;

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

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    common: Common,
    subscribers: u64,
    to: String,
    path: String,
    wire: String,
    counts_writing: bool,
    /// Messages of which all bytes were compared.
    compared: u64,
    publish_p50_us: Option<f64>,
    stages: Vec<Stage>,
    /// Of those alone, or of these.
    slowest_stage: Option<String>,
    /// Messages of a stream that may wait.
    stream_depth: u32,
    messages_per_s: f64,
    stream_gb_per_s: f64,
    /// The same, 64 bytes or so, by a ring alone, measured in turn.
    ring_p50_us: Option<f64>,
    beyond_ring_us: Option<f64>,
    /// Large ones: the stages by themselves, and what all takes relative to the slowest.
    alone: Vec<Alone>,
    ratio_to_slowest: Option<f64>,
    baseline: Option<baseline::Measured>,
    note: Option<String>,
    program: &'static str,
}

#[derive(Debug, Clone, Serialize)]
struct Alone {
    stage: &'static str,
    p50_us: f64,
}

/// An address of this machine that nobody uses now.
pub(super) fn address() -> Result<SocketAddr, Failure> {
    let found = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    found.map_err(|error| Failure::failed(format!("looking for a free port: {error}")))
}

/// The services of two nodes that know each other, below this directory.
pub(super) fn services(
    party: &Party,
    budget: u64,
    (provider, lanes): (Option<&String>, Option<u32>),
    cores: &[usize],
) -> Result<[Service; 2], Failure> {
    let addresses = [address()?, address()?];
    Ok([0, 1].map(|node| Service {
        directory: party.directory().join(format!("node-{node}")),
        network: Some(Network {
            listen: addresses[node],
            peer: (node == 1).then_some(addresses[0]),
            provider: provider.cloned(),
            lanes: lanes.unwrap_or(0),
        }),
        budget,
        cores: cores.to_vec(),
    }))
}

/// Which provider carries this node's messages.
fn wire(node: &Node) -> Result<String, Failure> {
    let rows = node.report()?;
    let path = rows.into_iter().find_map(|row| match row {
        Row::Sent { path, .. } => Some(path),
        _ => None,
    });
    let path = path.unwrap_or_default();
    Ok(path.rsplit(' ').next().unwrap_or_default().to_owned())
}

fn waiting(wait: Wait) -> WaitingMode {
    match wait {
        Wait::Busy => WaitingMode::Busy,
        Wait::Adaptive => WaitingMode::Adaptive,
        Wait::Block => WaitingMode::Block,
    }
}

/// What readers do: first and last all bytes are compared, the stream is a topic of its own where
/// more may wait.
fn schedule(each: u64, stream: (usize, u64)) -> Vec<Turn> {
    let all = What::Topic(0);
    let topics = || (0..=stream.0).map(What::Topic);
    let proofs = || topics().map(|what| Turn::new(what, Round::Proof, PROOFS));
    // The first ones make rings, and pools that have to grow.
    let warm = topics().map(|what| Turn::new(what, Round::Warmup, WARMUP));
    let timed = (0..ROUNDS).flat_map(|_| [Turn::new(all, Round::Timed, each), Turn::rest()]);
    let streamed = Turn::new(What::Topic(stream.0), Round::Stream, stream.1);
    proofs().chain(warm).chain(timed).chain([streamed]).chain(proofs()).collect()
}

pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let mut party = Party::new(WORDS)?;
    let cores = Cores::new(arguments.cores.as_ref(), arguments.subscribers);
    let stream_depth = (WAITING / arguments.size).clamp(DEPTH.into(), MOST_WAITING) as u32;
    let kind = |memory: &str, depth: u32| Kind {
        memory: memory.to_owned(),
        size: arguments.size,
        depth,
        run: std::process::id().into(),
        is_touched: arguments.is_touched(),
    };
    let kinds = |memory: &str| {
        let mut all = vec![("all".to_owned(), kind(memory, DEPTH))];
        if stream_depth > DEPTH {
            all.push(("stream".to_owned(), kind(memory, stream_depth)));
        }
        all
    };
    let here = arguments.memory.to_string();
    let there = arguments.to.unwrap_or(arguments.memory).to_string();
    let budget = kinds(&here).iter().map(|(_, kind)| kind.budget(1)).sum();
    let by = (arguments.provider.as_ref(), arguments.lanes);
    let both = services(&party, budget, by, cores.services())?;
    let each = arguments.each(true);
    let in_stream = (STREAM / arguments.size).clamp(8, MOST_OF_A_STREAM).min(each * 2 * ROUNDS);
    let schedule = schedule(each, (kinds(&here).len() - 1, in_stream));
    let mut tasks: Vec<_> =
        both.iter().map(|service| (Task::Topic(Part::Serve(service.clone())), None)).collect();
    for reader in 0..arguments.subscribers {
        let reading = Reading {
            directory: both[1].directory.clone(),
            topics: kinds(&there).into_iter().map(Some).collect(),
            schedule: schedule.clone(),
            waiting: arguments.waiting,
            core: cores.reader(reader),
            line: 0,
            private: None,
        };
        tasks.push((Task::Topic(Part::Read(reading)), None));
    }
    let plan = arguments
        .baseline
        .map(|_| baseline::Plan::new(&party, arguments.subscribers, &kind(&there, DEPTH), each));
    let plan = plan.transpose()?;
    if let Some(plan) = &plan {
        tasks.extend(plan.parts().into_iter().map(|part| (Task::Topic(part), None)));
    }
    party.invite(&tasks)?;
    let node = join(&both[0].directory, "publisher", arguments.waiting)?;
    let mut lines = Vec::new();
    for (name, kind) in kinds(&here) {
        let topic = node.topic(&name, &kind.settings()?)?;
        lines.push(Line::new(&topic, &kind, arguments.waiting, arguments.copy)?);
    }
    // Whatever else starts threads or processes runs where it may.
    let anywhere = Affinity::now()?;
    let here_again = || cores.publisher().map_or(Ok(()), pin);
    here_again()?;
    // Who carries messages to the other node.
    lines.iter().try_for_each(|line| line.wait_for(1))?;
    party.begin()?;
    let is_timed = |turn: &&Turn| turn.round == Round::Timed;
    let is_before = |turn: &&Turn| !is_timed(turn);
    for turn in schedule.iter().take_while(is_before) {
        if let What::Topic(topic) = turn.what {
            lines[topic].turn(*turn)?;
        }
    }
    let wire = wire(&node)?;
    let rival_kind = kind(&here, DEPTH);
    let mut rival = plan.as_ref().map(|plan| Rival::start(plan, &rival_kind)).transpose()?;
    let (mut ring, mut is_awake) = (Vec::new(), true);
    let is_small = arguments.size < LARGE && rival.is_none();
    for is_ours in in_turn(&[true, false]) {
        if is_ours {
            if !is_awake {
                next_turn(&party.shared, 0)?;
            }
            lines[0].turn(Turn::new(What::Topic(0), Round::Timed, each))?;
            is_awake = false;
        } else if let Some(rival) = &mut rival {
            rival.turn(&party.shared, each)?;
        } else if is_small {
            anywhere.restore()?;
            let (message, how) = ((arguments.size, each), waiting(arguments.waiting));
            ring.push(alone::ring(&wire, Mode::Lat, message, how, cores.of_two())?);
            here_again()?;
        }
    }
    next_turn(&party.shared, 0)?;
    let after = schedule.iter().rev().take_while(|turn| turn.what != What::Rest);
    for turn in after.collect::<Vec<_>>().into_iter().rev() {
        if let What::Topic(topic) = turn.what {
            lines[topic].turn(*turn)?;
        }
    }
    let publishing = middle(&lines[0].publishing);
    drop(lines);
    if let Some(rival) = &mut rival {
        rival.end(&party.shared)?;
    }
    drop(node);
    let results = party.results_with_last(2, || end_all(&party.shared))?;
    let readers = &results[2..2 + arguments.subscribers as usize];
    let samples = of_topic(readers, 0);
    let stream = found(readers).filter_map(|found| found.streams.last());
    let per_second = stream.map(|(time, messages)| (*messages - 1) as f64 / *time as f64 * 1e9);
    let messages_per_s = median(per_second).unwrap_or_default();
    let one_way = samples.microseconds(0.5);
    anywhere.restore()?;
    let parts_alone = match is_small {
        true => Vec::new(),
        false => parts_alone(arguments, &wire, cores)?,
    };
    let longest = parts_alone.iter().map(|it| it.p50_us).fold(0.0, f64::max);
    let ring = median(ring);
    let baseline = plan.map(|plan| plan.measured(&results, one_way, longest));
    let stages = stages(readers);
    let of_all = stages.iter().map(|it| (it.stage, it.p50_us));
    let of_alone = parts_alone.iter().map(|it| (it.stage, it.p50_us));
    let slowest_stage = slowest(of_alone).or_else(|| slowest(of_all)).map(str::to_owned);
    let verified = results.iter().all(|done| done.verified);
    let report = Report {
        common: common(arguments, &samples, each * ROUNDS, verified),
        subscribers: arguments.subscribers,
        to: there,
        path: way(readers),
        wire,
        counts_writing: arguments.copy,
        compared: compared(&schedule),
        publish_p50_us: publishing,
        stages,
        slowest_stage,
        stream_depth,
        messages_per_s,
        stream_gb_per_s: messages_per_s * arguments.size as f64 / 1e9,
        ring_p50_us: ring,
        beyond_ring_us: one_way.zip(ring).map(|(all, ring)| all - ring),
        ratio_to_slowest: one_way.filter(|_| longest > 0.0).map(|all| all / longest),
        alone: parts_alone,
        baseline,
        note: cores.note(),
        program: env!("FABRICAST_VERSION_LINE"),
    };
    conclude(&report, &report.common, arguments.json, for_people, "other bytes arrived")
}

fn parts_alone(arguments: &Arguments, wire: &str, cores: Cores<'_>) -> Result<Vec<Alone>, Failure> {
    let to = arguments.to.unwrap_or(arguments.memory);
    // Where a device is copied from, and by whom, is as it is with the topic.
    let (out, _) = alone::copies(arguments.memory, arguments.size)?;
    let (_, into) = alone::copies(to, arguments.size)?;
    let messages = (STREAM / arguments.size).clamp(4, 1000);
    let message = (arguments.size, messages);
    let how = waiting(arguments.waiting);
    let of_wire = alone::ring(wire, Mode::Bw, message, how, cores.of_two())?;
    let all = [("out", out), ("wire", Some(of_wire)), ("in", Some(into))];
    Ok(all.into_iter().filter_map(|(stage, time)| Some(Alone { stage, p50_us: time? })).collect())
}

fn for_people(report: &Report) -> String {
    let common = &report.common;
    let mut out = format!(
        "{} on {}, to {} readers on {} by {} over {}, {}: p50 {}, p99 {}, p99.9 {} us one way; \
         {:.0} messages/s, {:.3} GB/s\n",
        size::print(common.bytes),
        common.provider,
        report.subscribers,
        report.to,
        report.path,
        report.wire,
        common.waiting,
        figure(common.p50_us),
        figure(common.p99_us),
        figure(common.p999_us),
        report.messages_per_s,
        report.stream_gb_per_s,
    );
    if let Some(ring) = report.ring_p50_us {
        let beyond = figure(report.beyond_ring_us);
        out.push_str(&format!("a ring alone takes {ring:.3} us; the topic, {beyond} us more\n"));
    }
    let stages = report.stages.iter().map(|it| format!("{} {:.1}  ", it.stage, it.p50_us));
    let slowest = report.slowest_stage.as_deref().unwrap_or("?");
    out.push_str(&format!(
        "p50 of stages in us: {}; the slowest is {slowest}\n",
        stages.collect::<String>().trim_end()
    ));
    if !report.alone.is_empty() {
        let alone = report.alone.iter().map(|it| format!("{} {:.1}  ", it.stage, it.p50_us));
        out.push_str(&format!(
            "each alone: {}; all takes {} of the slowest\n",
            alone.collect::<String>().trim_end(),
            figure(report.ratio_to_slowest)
        ));
    }
    if let Some(baseline) = &report.baseline {
        out.push_str(&baseline.for_people());
    }
    if let Some(note) = &report.note {
        out.push_str(&format!("{note}\n"));
    }
    out
}
