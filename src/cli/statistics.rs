//! Rate of messages, and latency of their stages.

use std::time::{Duration, Instant};

use pubsub::Sample;
use serde::{Deserialize, Serialize};

use crate::cli::histogram::Histogram;
use crate::cli::stages::{self, COUNT, Stage, StageDurations, TOTAL};
use crate::cli::text;

#[derive(Debug, Default)]
pub(crate) struct Statistics {
    /// Times of the first and the last message.
    span: Option<(Instant, Instant)>,
    pub(crate) messages: u64,
    pub(crate) bytes: u64,
    /// From publish to pull.
    latency: Histogram,
    stages: [Histogram; COUNT],
}

/// A latency, for reports.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Latency {
    pub(crate) stage: String,
    pub(crate) p50_us: f64,
    p99_us: f64,
    messages: u64,
}

impl Latency {
    #[cfg(test)]
    pub(crate) fn new(stage: &str, p50_us: f64) -> Self {
        Self { stage: stage.to_owned(), p50_us, p99_us: p50_us, messages: 1 }
    }

    pub(crate) fn of(stage: &str, histogram: &Histogram) -> Option<Self> {
        let (p50_us, p99_us) = (histogram.microseconds(0.5)?, histogram.microseconds(0.99)?);
        Some(Self { stage: stage.to_owned(), p50_us, p99_us, messages: histogram.samples() })
    }
}

/// Duration of each stage of a message that was pulled at this time, as far as its subscriber knows
/// them.
pub(crate) fn durations(sample: &Sample, pulled: u64) -> StageDurations {
    let (times, is_remote) = (sample.times(), sample.origin().is_some());
    let published = if is_remote { sample.published_at() } else { times.filled };
    let mut durations = stages::durations(&times, is_remote, published, pulled);
    if !is_remote && times.allocated > 0 {
        durations[Stage::Fill as usize] = times.filled.checked_sub(times.allocated);
    }
    durations
}

impl Statistics {
    /// Adds a message with its length, its latency and the durations of its stages.
    pub(crate) fn add(&mut self, length: u64, latency: u64, durations: StageDurations) {
        let now = Instant::now();
        self.span = Some((self.span.map_or(now, |(first, _)| first), now));
        self.messages += 1;
        self.bytes += length;
        self.latency.add(latency);
        for (stage, durations) in self.stages.iter_mut().zip(durations) {
            if let Some(durations) = durations {
                stage.add(durations);
            }
        }
    }

    /// From the first message to the last.
    pub(crate) fn time(&self) -> Duration {
        self.span.map_or(Duration::ZERO, |(first, last)| last - first)
    }

    /// Rate without the first message, at which the time begins.
    fn per_second(&self, amount: f64) -> f64 {
        let seconds = self.time().as_secs_f64();
        if seconds > 0.0 { amount / seconds } else { 0.0 }
    }

    pub(crate) fn messages_per_second(&self) -> f64 {
        self.per_second(self.messages.saturating_sub(1) as f64)
    }

    pub(crate) fn bytes_per_second(&self) -> f64 {
        let of_one = self.bytes as f64 / self.messages.max(1) as f64;
        self.per_second(self.bytes as f64 - of_one)
    }

    /// The total latency, and that of each stage.
    pub(crate) fn latencies(&self) -> Vec<Latency> {
        let stages = Stage::ALL.into_iter().zip(&self.stages);
        let stages = stages.filter_map(|(stage, all)| Latency::of(stage.name(), all));
        Latency::of(TOTAL, &self.latency).into_iter().chain(stages).collect()
    }

    pub(crate) fn table(&self) -> String {
        let rows = self.latencies().into_iter().map(|latency| {
            [
                latency.stage,
                format!("{:.1} µs", latency.p50_us),
                format!("{:.1} µs", latency.p99_us),
                latency.messages.to_string(),
            ]
        });
        text::table_of(["stage", "p50", "p99", "messages"], rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_lists_stages_that_were_not_skipped() {
        let mut all = Statistics::default();
        let mut durations: StageDurations = [None; COUNT];
        (durations[Stage::Fill as usize], durations[Stage::Wakeup as usize]) =
            (Some(1000), Some(4000));
        all.add(10, 4000, durations);
        all.add(10, 4000, durations);
        let found = all.latencies();
        let found: Vec<_> = found.iter().map(|one| (&*one.stage, one.p50_us.round())).collect();
        assert_eq!(found, [("total", 4.0), ("fill", 1.0), ("wakeup", 4.0)]);
        assert_eq!((all.messages, all.bytes), (2, 20));
        assert_eq!(all.table().lines().count(), 4);
        // Equal but for rounding.
        let ratio = all.bytes_per_second() / all.messages_per_second();
        assert!((ratio - 10.0).abs() < 1e-9, "{ratio}");
    }
}
