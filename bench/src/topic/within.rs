//! Within a node: from one process to others, through memory that all have.

use serde::Serialize;

use super::bare::{self, Bare};
use super::cores::{Cores, Services};
use super::part::{Kind, Part, Service, WORDS, serve};
use super::publishing::Line;
use super::reading::Reading;
use super::report::{Latency, common, found, of_topic, stages};
use super::schedule::{MORE_WARMUP, PROOFS, Round, Turn, WARMUP, What, compared, in_turn};
use super::{Arguments, ROUNDS};
use crate::party::{Party, Task};
use crate::process::{Affinity, confine, pin};
use crate::report::{Common, Findings, Report, figure};
use command::exit::Failure;
use command::histogram::Histogram;
use command::{size, text};

const ALL: What = What::Topic(0);
const ONE: What = What::Topic(1);

#[derive(Debug, Serialize)]
pub(super) struct Found {
    pub(super) subscribers: u64,
    counts_writing: bool,
    /// Messages of which all bytes were compared.
    compared: u64,
    pub(super) publish_p50_us: Option<f64>,
    pub(super) publish_p99_us: Option<f64>,
    pub(super) stages: Vec<Latency>,
    /// A queue alone, measured in turn, and what the topic takes more.
    pub(super) queue_p50_us: Option<f64>,
    pub(super) queue_p99_us: Option<f64>,
    beyond_queue_us: Option<f64>,
    /// With one reader, measured in turn.
    one_p50_us: Option<f64>,
    one_p99_us: Option<f64>,
    fan_out_ratio: Option<f64>,
    note: Option<String>,
}

/// First and last all bytes are compared; what is compared with each other takes turns.
fn schedule(each: u64, has_one: bool, warmup: u64) -> Vec<Turn> {
    let all = if has_one { &[ALL, What::Queue, ONE][..] } else { &[ALL, What::Queue] };
    let topics = || all.iter().filter(|what| **what != What::Queue);
    let proofs = || topics().map(|what| Turn::new(*what, Round::Proof, PROOFS));
    // Pools that have to grow, pages that nobody touched yet.
    let warm = all.iter().map(|what| Turn::new(*what, Round::Warmup, warmup));
    let timed = in_turn(all).map(|what| Turn::new(what, Round::Timed, each));
    proofs().chain(warm).chain(timed).chain(proofs()).collect()
}

pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    measure(arguments)?.conclude(arguments.json)
}

/// Which are used.
pub(super) fn cores(arguments: &Arguments) -> Result<Cores, Failure> {
    Cores::new(arguments.cores.as_ref(), arguments.subscribers, Services::Rest)
}

/// Leaves this process where it was, with nothing that was measured there.
pub(super) fn measure(arguments: &Arguments) -> Result<Report<Found>, Failure> {
    let mut party = Party::new(WORDS + bare::words())?;
    let cores = cores(arguments)?;
    let waiting = cores.waiting(arguments.waiting);
    let directory = party.directory().join("node");
    let kind = Kind {
        memory: arguments.memory.to_string(),
        size: arguments.size,
        depth: 4,
        run: std::process::id().into(),
        is_touched: arguments.is_touched(),
    };
    let has_one = arguments.has_one();
    let service = Service {
        directory: directory.clone(),
        network: None,
        budget: kind.budget(2),
        cores: cores.services().to_vec(),
    };
    // The service's threads are not where the publisher will be.
    let anywhere = Affinity::now()?;
    confine(&service.cores)?;
    let node = serve(&service)?;
    anywhere.restore()?;
    let each = arguments.each(arguments.copy);
    let warmup = if arguments.copy { WARMUP } else { MORE_WARMUP.min(each) };
    let schedule = schedule(each, has_one, warmup);
    let topic = |name: &str| Some((name.to_owned(), kind.clone()));
    // The second topic has the first reader only.
    let tasks: Vec<_> = (0..arguments.subscribers)
        .map(|reader| {
            let one = if has_one && reader == 0 { topic("one") } else { None };
            let reading = Reading {
                directory: directory.clone(),
                topics: vec![topic("all"), one],
                schedule: schedule.clone(),
                waiting,
                core: cores.reader(reader),
                line: 0,
                private: None,
            };
            (Task::Topic(Part::Read(reading)), None)
        })
        .collect();
    let open = |name: &str| -> Result<Line, Failure> {
        let topic = node.topic(name, &kind.settings()?)?;
        Line::new(&topic, &kind, arguments.waiting, arguments.copy)
    };
    Bare::make(&party.shared)?;
    party.invite(&tasks)?;
    let mut lines = vec![open("all")?];
    if has_one {
        lines.push(open("one")?);
    }
    let mut queue = Bare::new(&party.shared, arguments.waiting)?;
    if let Some(core) = cores.publisher() {
        pin(core)?;
    }
    lines[0].wait_for(arguments.subscribers as u32)?;
    party.begin()?;
    for turn in &schedule {
        match turn.what {
            What::Topic(topic) => lines[topic].turn(*turn)?,
            What::Queue => queue.one_by_one(turn.count, arguments.waiting.pause())?,
            What::Rest => {}
        }
    }
    anywhere.restore()?;
    let results = party.results()?;
    let samples = of_topic(&results, 0);
    let mut of_queue = Histogram::default();
    found(&results).for_each(|found| of_queue.merge(&found.queue));
    let verified = results.iter().all(|done| done.verified);
    let p50 = samples.microseconds(0.5);
    let one = of_topic(&results, 1);
    let one_p50 = one.microseconds(0.5);
    let queue_p50 = of_queue.microseconds(0.5);
    let publishing: Histogram = lines[0].publishing.iter().copied().collect();
    let common = common(arguments, waiting, cores.all(), &samples, each * ROUNDS, verified);
    let found = Found {
        subscribers: arguments.subscribers,
        counts_writing: arguments.copy,
        compared: compared(&schedule),
        publish_p50_us: publishing.microseconds(0.5),
        publish_p99_us: publishing.microseconds(0.99),
        stages: stages(&results),
        queue_p50_us: queue_p50,
        queue_p99_us: of_queue.microseconds(0.99),
        beyond_queue_us: p50.zip(queue_p50).map(|(all, queue)| all - queue),
        one_p50_us: one_p50,
        one_p99_us: one.microseconds(0.99),
        fan_out_ratio: p50.zip(one_p50).map(|(all, one)| all / one),
        note: cores.note(),
    };
    Ok(Report::new(common, found))
}

impl Findings for Found {
    const WRONG: &str = "other bytes were read";

    fn for_people(&self, common: &Common) -> String {
        let fan_out = self.fan_out_ratio.map(|ratio| {
            let (p50, p99) = (figure(self.one_p50_us), figure(self.one_p99_us));
            format!("; {ratio:.3} of what it takes with one reader (p50 {p50}, p99 {p99} us)")
        });
        let of_stage = |it: &Latency| format!(", {} {:.3}/{:.3}", it.stage, it.p50_us, it.p99_us);
        let stages = self.stages.iter().map(of_stage);
        let note = self.note.as_ref().map(|note| format!("{note}\n"));
        format!(
            "{} on {}, {}, {}: p50 {}, p99 {}, p99.9 {} us until it was read{}\n\
         p50 of the call that publishes {} us (p99 {}); p50/p99 of stages{}\n\
         a queue alone takes {} us; the topic, {} us more\n{}",
            size::print(common.bytes),
            common.provider,
            text::counted(self.subscribers, "reader"),
            common.waiting,
            figure(common.p50_us),
            figure(common.p99_us),
            figure(common.p999_us),
            fan_out.unwrap_or_default(),
            figure(self.publish_p50_us),
            figure(self.publish_p99_us),
            stages.collect::<String>(),
            figure(self.queue_p50_us),
            figure(self.beyond_queue_us),
            note.unwrap_or_default(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_timed_is_not_compared_in_full() {
        for has_one in [false, true] {
            let all = schedule(7, has_one, 5);
            let count = |what: What, round| {
                let turns = all.iter().filter(|turn| turn.what == what && turn.round == round);
                turns.map(|turn| turn.count).sum::<u64>()
            };
            assert_eq!(count(ALL, Round::Timed), 7 * ROUNDS);
            assert_eq!(count(What::Queue, Round::Timed), 7 * ROUNDS);
            assert_eq!(count(ONE, Round::Timed), if has_one { 7 * ROUNDS } else { 0 });
            assert_eq!(count(What::Queue, Round::Proof), 0);
            // Before and after.
            let ends = [all.first(), all.last()].map(|turn| turn.map(|turn| turn.round));
            assert_eq!(ends, [Some(Round::Proof); 2]);
            assert_eq!(compared(&all), if has_one { 8 } else { 4 });
        }
    }
}
