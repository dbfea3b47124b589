//! How fast messages come, and how long each stage of their way takes.

use std::time::{Duration, Instant};

use pubsub::Times;
use serde::Serialize;

use crate::cli::histogram::Histogram;

/// The stages, in the order of a message's way: each ends with what it is named after.
const STAGES: [&str; 5] = ["filled", "wire", "copied", "published", "pulled"];

/// What was measured.
#[derive(Debug)]
pub(super) struct Statistics {
    began: Option<Instant>,
    ended: Instant,
    pub(super) messages: u64,
    pub(super) bytes: u64,
    /// From publishing to pulling.
    latency: Histogram,
    stages: [Histogram; STAGES.len()],
}

/// A latency, for reports.
#[derive(Debug, Serialize)]
pub(super) struct Latency {
    /// What ends with it.
    stage: &'static str,
    p50_us: f64,
    p99_us: f64,
    messages: u64,
}

impl Latency {
    fn of(stage: &'static str, histogram: &Histogram) -> Option<Self> {
        let (p50_us, p99_us) = (histogram.microseconds(0.5)?, histogram.microseconds(0.99)?);
        Some(Self { stage, p50_us, p99_us, messages: histogram.samples() })
    }
}

impl Statistics {
    pub(super) fn new() -> Self {
        Self {
            began: None,
            ended: Instant::now(),
            messages: 0,
            bytes: 0,
            latency: Histogram::default(),
            stages: Default::default(),
        }
    }

    /// A message was pulled at this time.
    pub(super) fn add(&mut self, length: u64, published_at: u64, times: Times, now: u64) {
        self.ended = Instant::now();
        self.began.get_or_insert(self.ended);
        self.messages += 1;
        self.bytes += length;
        // Clocks of other nodes may be ahead.
        self.latency.add(now.saturating_sub(published_at));
        let ends = [times.filled, times.wire, times.copied, times.published, now];
        let mut last = times.allocated;
        for (stage, end) in self.stages.iter_mut().zip(ends) {
            // One that it skipped, or that was measured by another clock.
            if end == 0 {
                continue;
            }
            if last > 0 && end >= last {
                stage.add(end - last);
            }
            last = end;
        }
    }

    /// From the first message to the last.
    pub(super) fn time(&self) -> Duration {
        self.began.map_or(Duration::ZERO, |began| self.ended - began)
    }

    /// Of all but the first message, from when on the time is counted.
    fn per_second(&self, amount: f64) -> f64 {
        let seconds = self.time().as_secs_f64();
        if seconds > 0.0 { amount / seconds } else { 0.0 }
    }

    pub(super) fn messages_per_second(&self) -> f64 {
        self.per_second(self.messages.saturating_sub(1) as f64)
    }

    pub(super) fn bytes_per_second(&self) -> f64 {
        let of_one = self.bytes as f64 / self.messages.max(1) as f64;
        self.per_second(self.bytes as f64 - of_one)
    }

    /// From publishing to pulling, and then by stage.
    pub(super) fn latencies(&self) -> Vec<Latency> {
        let stages = STAGES.iter().zip(&self.stages);
        let stages = stages.filter_map(|(name, histogram)| Latency::of(name, histogram));
        Latency::of("all", &self.latency).into_iter().chain(stages).collect()
    }

    /// A table for people.
    pub(super) fn table(&self) -> Vec<Vec<String>> {
        let head = ["until", "p50", "p99", "messages"].map(str::to_owned).to_vec();
        let rows = self.latencies().into_iter().map(|latency| {
            vec![
                latency.stage.to_owned(),
                format!("{:.1} µs", latency.p50_us),
                format!("{:.1} µs", latency.p99_us),
                latency.messages.to_string(),
            ]
        });
        std::iter::once(head).chain(rows).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(all: [u64; 5]) -> Times {
        let mut times = Times::default();
        [times.allocated, times.filled, times.wire, times.copied, times.published] = all;
        times
    }

    #[test]
    fn stages_are_counted_from_what_came_before() {
        let mut all = Statistics::new();
        all.add(10, 3000, times([1000, 2000, 0, 0, 3000]), 7000);
        all.add(10, 3000, times([1000, 2000, 0, 0, 3000]), 7000);
        let found: Vec<_> =
            all.latencies().into_iter().map(|one| (one.stage, one.p50_us.round())).collect();
        assert_eq!(found, [("all", 4.0), ("filled", 1.0), ("published", 1.0), ("pulled", 4.0)]);
        assert_eq!((all.messages, all.bytes), (2, 20));
        assert_eq!(all.table().len(), 5);
    }

    #[test]
    fn clocks_of_others_do_not_disturb() {
        let mut all = Statistics::new();
        all.add(1, u64::MAX, times([0, 9000, 500, 600, 700]), 800);
        let stages: Vec<_> = all.latencies().into_iter().map(|one| one.stage).collect();
        assert_eq!(stages, ["all", "copied", "published", "pulled"]);
        assert_eq!(all.messages_per_second(), 0.0);
    }
}
