//! Within a node: from one process to others, through memory that all have.

use std::time::Duration;

use serde::Serialize;

use super::part::{FIRST_TOPIC, FORGET, Kind, LAST, Part, Reading, Service, WORDS, serve};
use super::publishing::Line;
use super::report::{Stage, common, figure, middle, of_topic, stages};
use super::{Arguments, ROUNDS, WARMUP};
use crate::cli::bench::party::{Party, Task};
use crate::cli::bench::queue::Wait;
use crate::cli::bench::report::{Common, conclude};
use crate::cli::exit::Failure;
use crate::cli::process::pin;
use crate::cli::size;

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    common: Common,
    subscribers: u64,
    counts_writing: bool,
    publish_p50_us: Option<f64>,
    stages: Vec<Stage>,
    /// With one reader, measured in turn.
    one_p50_us: Option<f64>,
    fan_out_ratio: Option<f64>,
    program: &'static str,
}

pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let mut party = Party::new(WORDS)?;
    let directory = party.directory().join("node");
    let kind = Kind {
        memory: arguments.memory.to_string(),
        size: arguments.size,
        depth: 4,
        run: std::process::id().into(),
    };
    let lone = arguments.ratio && arguments.subscribers > 1;
    let service = Service { directory: directory.clone(), network: None, budget: kind.budget(2) };
    let node = serve(&service)?;
    // The second topic has the first reader only.
    let tasks: Vec<_> = (0..arguments.subscribers)
        .map(|reader| {
            let mut topics = vec![Some("all".to_owned())];
            topics.extend(lone.then(|| (reader == 0).then(|| "one".to_owned())));
            let reading = Reading {
                directory: directory.clone(),
                topics,
                kind: kind.clone(),
                waiting: arguments.waiting,
                line: 0,
                ends_with_stream: false,
                private: None,
            };
            (Task::Topic(Part::Read(reading)), arguments.core(reader + 1))
        })
        .collect();
    party.invite(&tasks)?;
    if let Some(core) = arguments.core(0) {
        pin(core)?;
    }
    let open = |name: &str| -> Result<Line, Failure> {
        let topic = node.topic(name, &kind.settings()?)?;
        Line::new(&topic, &kind, pause(arguments.waiting), arguments.copy)
    };
    let mut all = open("all")?;
    let mut one = lone.then(|| open("one")).transpose()?;
    all.wait_for(arguments.subscribers as u32)?;
    party.begin()?;
    let each = arguments.each();
    // Pools that have to grow, pages that nobody touched yet.
    all.one_by_one(WARMUP, FORGET)?;
    match &mut one {
        None => all.one_by_one(each * ROUNDS, LAST)?,
        Some(one) => {
            let lines = [&mut all, one];
            for (turn, next) in in_turn().zip(in_turn().skip(1).chain([0])) {
                lines[turn].one_by_one(each, FIRST_TOPIC + next as u64)?;
            }
            // It ends with the one that all read.
            lines[0].one_by_one(each, LAST)?;
        }
    }
    let results = party.results()?;
    let samples = of_topic(&results, 0);
    let alone = lone.then(|| of_topic(&results, 1));
    let verified = results.iter().all(|done| done.verified);
    let (p50, one_p50) =
        (samples.microseconds(0.5), alone.and_then(|alone| alone.microseconds(0.5)));
    let report = Report {
        common: common(arguments, &samples, each * ROUNDS, verified),
        subscribers: arguments.subscribers,
        counts_writing: arguments.copy,
        publish_p50_us: middle(&all.publishing),
        stages: stages(&results),
        one_p50_us: one_p50,
        fan_out_ratio: p50.zip(one_p50).map(|(all, one)| all / one),
        program: env!("FABRICAST_VERSION_LINE"),
    };
    conclude(&report, &report.common, arguments.json, for_people, "other bytes were read")
}

/// A B B A A B … A: each is measured as often before as behind the other.
pub(super) fn in_turn() -> impl Iterator<Item = usize> {
    (0..2 * ROUNDS as usize).map(|turn| turn.div_ceil(2) % 2)
}

/// Between two messages: long enough for readers to be waiting again, in their way.
pub(super) fn pause(waiting: Wait) -> Duration {
    match waiting {
        Wait::Busy => Duration::from_nanos(500),
        Wait::Adaptive => Duration::from_micros(5),
        Wait::Block => Duration::from_micros(100),
    }
}

fn for_people(report: &Report) -> String {
    let common = &report.common;
    let fan_out = report.fan_out_ratio.map(|ratio| {
        format!("; {ratio:.3} of what it takes with one reader ({} us)", figure(report.one_p50_us))
    });
    let stages = report.stages.iter().map(|it| format!(", {} {:.3}", it.stage, it.p50_us));
    format!(
        "{} on {}, {} readers, {}: p50 {}, p99 {}, p99.9 {} us until it was read{}\n\
         p50 of the call that publishes {} us{}\n",
        size::print(common.bytes),
        common.provider,
        report.subscribers,
        common.waiting,
        figure(common.p50_us),
        figure(common.p99_us),
        figure(common.p999_us),
        fan_out.unwrap_or_default(),
        figure(report.publish_p50_us),
        stages.collect::<String>(),
    )
}
