//! Within a node: from one process to others, through shared memory.

pub(super) mod fan_out;

use serde::Serialize;

use super::cores::{Cores, Services};
use super::node::serve;
use super::queue_baseline::{self, QueueBaseline};
use super::role::WorkerRole;
use super::schedule::{
    INTRA_NODE_WARMUP, Round, Turn, TurnTarget, VERIFIED_MESSAGES, WARMUP, compared, in_turn,
};
use super::shared_words::WORDS;
use super::timed_publisher::TimedPublisher;
use super::timed_subscriber::SubscriberTask;
use super::topic_results::{
    Latency, SingleSubscriber, common, found, of_topic, stages, with_processor_times,
};
use super::{Arguments, ROUNDS, Service, TopicKind};
use crate::process::{Affinity, pin, set_affinity};
use crate::report::{Common, Metrics, Report, format_figure};
use crate::worker_group::WorkerGroup;
use command::exit::Failure;
use command::histogram::Histogram;
use command::{size, text};

const ALL: TurnTarget = TurnTarget::Topic(0);
const ONE: TurnTarget = TurnTarget::Topic(1);

#[derive(Debug, Serialize)]
struct IntraNodeMetrics {
    subscribers: u64,
    fill_is_timed: bool,
    /// Messages of which all bytes were compared.
    verified_messages: u64,
    publish_p50_us: Option<f64>,
    publish_p99_us: Option<f64>,
    stages: Vec<Latency>,
    /// The queue baseline, interleaved, and the overhead of the topic over it.
    queue_p50_us: Option<f64>,
    queue_p99_us: Option<f64>,
    overhead_over_queue_us: Option<f64>,
    #[serde(flatten)]
    single_subscriber: SingleSubscriber,
    note: Option<String>,
}

/// First and last all bytes are verified; what is compared is interleaved.
fn schedule(each: u64, has_one: bool, warmup: u64) -> Vec<Turn> {
    let all = if has_one { &[ALL, TurnTarget::Queue, ONE][..] } else { &[ALL, TurnTarget::Queue] };
    let topics = || all.iter().filter(|target| **target != TurnTarget::Queue);
    let verify_turns =
        || topics().map(|target| Turn::new(*target, Round::Verify, VERIFIED_MESSAGES));
    // Warm-up: grows pools and touches pages.
    let warm = all.iter().map(|target| Turn::new(*target, Round::Warmup, warmup));
    let timed = in_turn(all).map(|target| Turn::new(target, Round::Timed, each));
    verify_turns().chain(warm).chain(timed).chain(verify_turns()).collect()
}

pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    measure(arguments)?.conclude(arguments.json)
}

pub(super) fn cores(arguments: &Arguments) -> Result<Cores, Failure> {
    Cores::new(arguments.cores.as_ref(), arguments.subscribers, Services::Rest)
}

/// Runs the measurement, and restores the affinity of this process.
fn measure(arguments: &Arguments) -> Result<Report<IntraNodeMetrics>, Failure> {
    let mut group = WorkerGroup::new(WORDS + queue_baseline::words())?;
    let cores = cores(arguments)?;
    let waiting = cores.waiting(arguments.waiting);
    let directory = group.directory().join("node");
    let kind = TopicKind::new(arguments, arguments.memory, 4);
    let has_one = arguments.has_one();
    let service = Service::local(directory.clone(), kind.budget(2), cores.services());
    // The service's threads must not share the publisher's core.
    let anywhere = Affinity::now()?;
    set_affinity(&service.cores)?;
    let node = serve(&service)?;
    anywhere.restore()?;
    let each = arguments.each(arguments.time_fill);
    let warmup = if arguments.time_fill { WARMUP } else { INTRA_NODE_WARMUP.min(each) };
    let schedule = schedule(each, has_one, warmup);
    let topic = |name: &str| Some((name.to_owned(), kind.clone()));
    // The second topic has the first reader only.
    let tasks: Vec<_> = (0..arguments.subscribers)
        .map(|reader| {
            let one = if has_one && reader == 0 { topic("one") } else { None };
            let (topics, core) = (vec![topic("all"), one], cores.reader(reader));
            let task = SubscriberTask::new(&directory, topics, &schedule, waiting, core);
            (WorkerRole::Read(task), None)
        })
        .collect();
    let open = |name: &str| -> Result<TimedPublisher, Failure> {
        let topic = node.topic(name, &kind.settings()?)?;
        TimedPublisher::new(&topic, &kind, arguments.waiting, arguments.time_fill)
    };
    QueueBaseline::make(&group.shared)?;
    group.start_workers(&tasks)?;
    let mut lines = vec![open("all")?];
    if has_one {
        lines.push(open("one")?);
    }
    let mut queue = QueueBaseline::new(&group.shared, arguments.waiting)?;
    if let Some(core) = cores.publisher() {
        pin(core)?;
    }
    lines[0].wait_for(arguments.subscribers as u32)?;
    group.begin()?;
    for turn in &schedule {
        match turn.what {
            TurnTarget::Topic(topic) => lines[topic].turn(*turn)?,
            TurnTarget::Queue => queue.one_by_one(turn.count, arguments.waiting.pause())?,
            TurnTarget::Pause => {}
        }
    }
    anywhere.restore()?;
    let results = group.results()?;
    let samples = of_topic(&results, 0);
    let of_queue: Histogram = found(&results).map(|found| &found.queue).collect();
    let verified = results.iter().all(|done| done.verified);
    let p50 = samples.microseconds(0.5);
    let queue_p50 = of_queue.microseconds(0.5);
    let publishing = lines[0].publish_times();
    let common = common(arguments, waiting, cores.all(), &samples, each * ROUNDS, verified);
    let common = with_processor_times(common, lines[0].processor_time(), &results);
    let found = IntraNodeMetrics {
        subscribers: arguments.subscribers,
        fill_is_timed: arguments.time_fill,
        verified_messages: compared(&schedule),
        publish_p50_us: publishing.microseconds(0.5),
        publish_p99_us: publishing.microseconds(0.99),
        stages: stages(&results),
        queue_p50_us: queue_p50,
        queue_p99_us: of_queue.microseconds(0.99),
        overhead_over_queue_us: p50.zip(queue_p50).map(|(all, queue)| all - queue),
        single_subscriber: SingleSubscriber::of(&of_topic(&results, 1), p50),
        note: cores.note(),
    };
    Ok(Report::new(common, found))
}

impl Metrics for IntraNodeMetrics {
    fn to_text(&self, common: &Common) -> String {
        let single = self.single_subscriber.to_text().map(|single| format!("; {single}"));
        let of_stage = |it: &Latency| format!(", {} {:.3}/{:.3}", it.stage, it.p50_us, it.p99_us);
        let stages = self.stages.iter().map(of_stage);
        let note = self.note.as_ref().map(|note| format!("{note}\n"));
        format!(
            "{} on {}, {}, {}: p50 {}, p99 {}, p99.9 {} us until it was read{}\n\
         p50 of the call that publishes {} us (p99 {}); p50/p99 of stages{}\n\
         a queue by itself takes {} us; the topic, {} us more\n{}",
            size::print(common.bytes),
            common.provider,
            text::count_of(self.subscribers, "reader"),
            common.waiting,
            format_figure(common.p50_us),
            format_figure(common.p99_us),
            format_figure(common.p999_us),
            single.unwrap_or_default(),
            format_figure(self.publish_p50_us),
            format_figure(self.publish_p99_us),
            stages.collect::<String>(),
            format_figure(self.queue_p50_us),
            format_figure(self.overhead_over_queue_us),
            note.unwrap_or_default(),
        ) + &common.waiting_line("all readers")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timed_messages_are_not_compared_completely() {
        for has_one in [false, true] {
            let all = schedule(7, has_one, 5);
            let count = |target: TurnTarget, round| {
                let turns = all.iter().filter(|turn| turn.what == target && turn.round == round);
                turns.map(|turn| turn.count).sum::<u64>()
            };
            assert_eq!(count(ALL, Round::Timed), 7 * ROUNDS);
            assert_eq!(count(TurnTarget::Queue, Round::Timed), 7 * ROUNDS);
            assert_eq!(count(ONE, Round::Timed), if has_one { 7 * ROUNDS } else { 0 });
            assert_eq!(count(TurnTarget::Queue, Round::Verify), 0);
            // Before and after.
            let ends = [all.first(), all.last()].map(|turn| turn.map(|turn| turn.round));
            assert_eq!(ends, [Some(Round::Verify); 2]);
            assert_eq!(compared(&all), if has_one { 8 } else { 4 });
        }
    }
}
