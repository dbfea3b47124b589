//! Between two nodes of this machine, each with a service of its own: as between two machines,
//! since neither can pass the other a descriptor.

use std::net::{SocketAddr, TcpListener};

use pubsub::{Node, Row};
use serde::Serialize;

use super::baseline::Rival;
use super::part::{
    FORGET, Kind, LAST, Network, Part, REST, Reading, Service, WORDS, end_all, join, next_turn,
};
use super::publishing::Line;
use super::report::{Stage, common, figure, found, middle, stages, way};
use super::within::{in_turn, pause};
use super::{Arguments, ROUNDS, WARMUP, alone, baseline};
use crate::cli::bench::party::{Done, Party, Task};
use crate::cli::bench::queue::Wait;
use crate::cli::bench::report::{Common, conclude, median};
use crate::cli::exchange::plan::{Mode, WaitingMode};
use crate::cli::exit::Failure;
use crate::cli::histogram::Histogram;
use crate::cli::process::pin;
use crate::cli::size;

/// Messages from here on are large: what counts is how fast bytes come, not how soon.
const LARGE: u64 = 64 << 10;
/// Bytes of a stream, and the most messages of it.
const STREAM: u64 = 1 << 30;
const MOST_OF_A_STREAM: u64 = 200_000;

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    common: Common,
    subscribers: u64,
    to: String,
    path: String,
    wire: String,
    counts_writing: bool,
    publish_p50_us: Option<f64>,
    stages: Vec<Stage>,
    messages_per_s: f64,
    stream_gb_per_s: f64,
    /// The same, 64 bytes or so, by a ring alone, measured in turn.
    ring_p50_us: Option<f64>,
    beyond_ring_us: Option<f64>,
    /// Large ones: the stages by themselves, and what all takes relative to the slowest.
    alone: Vec<Alone>,
    ratio_to_slowest: Option<f64>,
    baseline: Option<baseline::Measured>,
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
    provider: Option<&String>,
) -> Result<[Service; 2], Failure> {
    let addresses = [address()?, address()?];
    Ok([0, 1].map(|node| Service {
        directory: party.directory().join(format!("node-{node}")),
        network: Some(Network {
            listen: addresses[node],
            peer: (node == 1).then_some(addresses[0]),
            provider: provider.cloned(),
        }),
        budget,
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

pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let mut party = Party::new(WORDS)?;
    let kind = |memory: &str| Kind {
        memory: memory.to_owned(),
        size: arguments.size,
        depth: 4,
        run: std::process::id().into(),
    };
    let here = arguments.memory.to_string();
    let there = arguments.to.unwrap_or(arguments.memory).to_string();
    let both = services(&party, kind(&here).budget(1), arguments.provider.as_ref())?;
    let mut tasks: Vec<_> =
        both.iter().map(|service| (Task::Topic(Part::Serve(service.clone())), None)).collect();
    for reader in 0..arguments.subscribers {
        let reading = Reading {
            directory: both[1].directory.clone(),
            topics: vec![Some("all".to_owned())],
            kind: kind(&there),
            waiting: arguments.waiting,
            line: 0,
            ends_with_stream: true,
            private: None,
        };
        tasks.push((Task::Topic(Part::Read(reading)), arguments.core(reader + 1)));
    }
    let plan = match arguments.baseline {
        Some(_) => Some(baseline::Plan::new(&party, arguments.subscribers, &kind(&there))?),
        None => None,
    };
    if let Some(plan) = &plan {
        tasks.extend(plan.parts().into_iter().map(|part| (Task::Topic(part), None)));
    }
    party.invite(&tasks)?;
    if let Some(core) = arguments.core(0) {
        pin(core)?;
    }
    let node = join(&both[0].directory, "publisher", arguments.waiting)?;
    let kind = kind(&here);
    let topic = node.topic("all", &kind.settings()?)?;
    let mut line = Line::new(&topic, &kind, pause(arguments.waiting), arguments.copy)?;
    // Who carries messages to the other node.
    line.wait_for(1)?;
    party.begin()?;
    let each = arguments.each();
    // The first ones make rings, and pools that have to grow.
    line.one_by_one(WARMUP, FORGET)?;
    let wire = wire(&node)?;
    let mut rival = plan.as_ref().map(|plan| Rival::start(plan, &kind)).transpose()?;
    let (mut ring, mut is_awake) = (Vec::new(), true);
    let is_small = arguments.size < LARGE && rival.is_none();
    for turn in in_turn() {
        if turn == 0 {
            if !is_awake {
                next_turn(&party.shared, 0)?;
            }
            line.one_by_one(each, REST)?;
            is_awake = false;
        } else if let Some(rival) = &mut rival {
            rival.turn(&party.shared, each)?;
        } else if is_small {
            let found =
                alone::ring(&wire, Mode::Lat, (arguments.size, each), waiting(arguments.waiting))?;
            ring.push(found);
        }
    }
    next_turn(&party.shared, 0)?;
    let count = (STREAM / arguments.size).clamp(8, MOST_OF_A_STREAM).min(each * 2 * ROUNDS);
    line.stream(count, LAST)?;
    let publishing = middle(&line.publishing);
    drop((line, topic));
    if let Some(rival) = &mut rival {
        rival.end(&party.shared)?;
    }
    drop(node);
    let results = party.results_with_last(2, || end_all(&party.shared))?;
    let readers = &results[2..2 + arguments.subscribers as usize];
    let samples = singly(readers);
    let stream = found(readers).filter_map(|found| found.streams.last());
    let per_second = stream.map(|(time, messages)| (*messages - 1) as f64 / *time as f64 * 1e9);
    let messages_per_s = median(per_second).unwrap_or_default();
    let one_way = samples.microseconds(0.5);
    let parts_alone = match is_small {
        true => Vec::new(),
        false => parts_alone(arguments, &wire)?,
    };
    let slowest = parts_alone.iter().map(|it| it.p50_us).fold(0.0, f64::max);
    let ring = median(ring);
    let baseline = plan.map(|plan| plan.measured(&results, one_way, slowest));
    let report = Report {
        common: common(
            arguments,
            &samples,
            each * ROUNDS,
            results.iter().all(|done| done.verified),
        ),
        subscribers: arguments.subscribers,
        to: there,
        path: way(readers),
        wire,
        counts_writing: arguments.copy,
        publish_p50_us: publishing,
        stages: stages(readers),
        messages_per_s,
        stream_gb_per_s: messages_per_s * arguments.size as f64 / 1e9,
        ring_p50_us: ring,
        beyond_ring_us: one_way.zip(ring).map(|(all, ring)| all - ring),
        ratio_to_slowest: one_way.filter(|_| slowest > 0.0).map(|all| all / slowest),
        alone: parts_alone,
        baseline,
        program: env!("FABRICAST_VERSION_LINE"),
    };
    conclude(&report, &report.common, arguments.json, for_people, "other bytes arrived")
}

/// Of all that came one at a time.
fn singly(readers: &[Done]) -> Histogram {
    let mut all = Histogram::default();
    found(readers).for_each(|found| all.merge(&found.singly));
    all
}

fn parts_alone(arguments: &Arguments, wire: &str) -> Result<Vec<Alone>, Failure> {
    let to = arguments.to.unwrap_or(arguments.memory);
    let [out, _] = alone::copies(arguments.memory, arguments.size)?;
    let [_, into] = alone::copies(to, arguments.size)?;
    let messages = (STREAM / arguments.size).clamp(4, 1000);
    let of_wire =
        alone::ring(wire, Mode::Bw, (arguments.size, messages), waiting(arguments.waiting))?;
    let all = [("out", out), ("wire", of_wire), ("in", into)];
    Ok(all.map(|(stage, p50_us)| Alone { stage, p50_us }).to_vec())
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
    out.push_str(&format!("p50 of stages in us: {}\n", stages.collect::<String>().trim_end()));
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
    out
}
