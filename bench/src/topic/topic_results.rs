//! Common results of the measurements of topics.

use std::time::Duration;

use serde::Serialize;

use super::{Arguments, TopicResult};
use crate::exchange::plan::{Wait, name_of};
use crate::report::{Common, format_figure, rounded};
use crate::worker_group;
use command::histogram::Histogram;
use command::stages::Stage;

/// The result of a worker.
pub(super) type WorkerResult = worker_group::WorkerResult<Option<TopicResult>>;

pub(super) fn empty_result(iterations: u64) -> WorkerResult {
    WorkerResult { iterations, verified: true, ..WorkerResult::default() }
}

/// Duration of a stage.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Latency {
    pub(super) stage: &'static str,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
}

impl Latency {
    /// None without samples.
    pub(super) fn of(stage: &'static str, samples: &Histogram) -> Option<Self> {
        let (p50_us, p99_us) = (samples.microseconds(0.5)?, samples.microseconds(0.99)?);
        Some(Self { stage, p50_us, p99_us })
    }
}

/// Latency of messages to one reader, interleaved with those to all.
#[derive(Debug, Serialize)]
pub(super) struct SingleSubscriber {
    single_subscriber_p50_us: Option<f64>,
    single_subscriber_p99_us: Option<f64>,
    fan_out_ratio: Option<f64>,
}

impl SingleSubscriber {
    /// With the median of all readers.
    pub(super) fn of(samples: &Histogram, all: Option<f64>) -> Self {
        let p50 = samples.microseconds(0.5);
        Self {
            single_subscriber_p50_us: p50,
            single_subscriber_p99_us: samples.microseconds(0.99),
            fan_out_ratio: all.zip(p50).map(|(all, one)| all / one),
        }
    }

    /// None without messages to one reader.
    pub(super) fn to_text(&self) -> Option<String> {
        let [p50, p99] =
            [self.single_subscriber_p50_us, self.single_subscriber_p99_us].map(format_figure);
        let ratio = self.fan_out_ratio?;
        Some(format!("{ratio:.3} of the latency with one reader (p50 {p50}, p99 {p99} us)"))
    }
}

/// The merged results of all readers.
pub(super) fn of_topic(results: &[WorkerResult], topic: usize) -> Histogram {
    found(results).filter_map(|found| found.topics.get(topic)).collect()
}

pub(super) fn found(results: &[WorkerResult]) -> impl Iterator<Item = &TopicResult> {
    results.iter().filter_map(|done| done.detail.as_ref())
}

pub(super) fn stages(results: &[WorkerResult]) -> Vec<Latency> {
    let of_stage = |stage: Stage| {
        let all = found(results).map(|found| &found.stages[stage as usize]).collect();
        Latency::of(stage.name(), &all)
    };
    Stage::ALL.into_iter().filter_map(of_stage).collect()
}

/// The stage with the highest median.
pub(super) fn slowest<'a>(stages: impl Iterator<Item = (&'a str, f64)>) -> Option<&'a str> {
    stages.max_by(|one, other| one.1.total_cmp(&other.1)).map(|(stage, _)| stage)
}

/// The path of the messages.
pub(super) fn path(results: &[WorkerResult]) -> String {
    found(results).map(|found| found.path.clone()).find(|path| !path.is_empty()).unwrap_or_default()
}

/// The processor time of a timed message added: of the publisher's process, and of all readers.
pub(super) fn with_processor_times(
    common: Common,
    publisher: Duration,
    readers: &[WorkerResult],
) -> Common {
    let of_each =
        |time: Duration| Some(rounded(time.as_secs_f64() * 1e6 / common.iterations as f64));
    let readers = found(readers).map(|found| found.processor_time).sum();
    let (cpu_us, peer_cpu_us) = (of_each(publisher), of_each(readers));
    Common { cpu_us, peer_cpu_us, ..common }
}

/// The common part of all reports.
pub(super) fn common(
    arguments: &Arguments,
    waiting: Wait,
    cores: Option<Vec<usize>>,
    samples: &Histogram,
    iterations: u64,
    verified: bool,
) -> Common {
    let p50 = samples.quantile(0.5).unwrap_or(0);
    Common {
        gb_per_s: if p50 > 0 { arguments.size as f64 / p50 as f64 } else { 0.0 },
        bytes: arguments.size,
        iterations,
        provider: arguments.memory.to_string(),
        waiting: name_of(waiting),
        cores,
        verified,
        ..Common::of(samples, 1.0)
    }
}
