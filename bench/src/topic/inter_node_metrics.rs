//! Results of messages between two nodes.

use serde::Serialize;

use super::baseline;
use super::report::Latency;
use super::thread_usage::{self, ThreadUsage};
use crate::report::{Common, Metrics, format_figure};
use command::{size, text};

#[derive(Debug, Serialize)]
pub(super) struct InterNodeMetrics {
    pub(super) subscribers: u64,
    pub(super) remote_memory: String,
    pub(super) path: String,
    pub(super) provider_between_nodes: String,
    /// The path of the messages, as the node reports it.
    pub(super) lanes: usize,
    pub(super) fill_is_timed: bool,
    /// Messages of which all bytes were compared.
    pub(super) verified_messages: u64,
    pub(super) publish_p50_us: Option<f64>,
    pub(super) stages: Vec<Latency>,
    /// The slowest stage: of the baselines of stages, or of the topic.
    pub(super) slowest_stage: Option<String>,
    /// With one reader, interleaved.
    pub(super) single_subscriber_p50_us: Option<f64>,
    pub(super) single_subscriber_p99_us: Option<f64>,
    pub(super) fan_out_ratio: Option<f64>,
    /// Of a timed message, until the ring of the other node had credit.
    pub(super) credit_wait_us: f64,
    /// Threads of both services, during the timed messages.
    pub(super) threads: Vec<ThreadUsage>,
    /// Depth of the stream's topic.
    pub(super) stream_depth: u32,
    pub(super) messages_per_s: f64,
    pub(super) stream_gb_per_s: f64,
    /// Ring baseline with about 64 bytes, interleaved.
    pub(super) ring_p50_us: Option<f64>,
    pub(super) overhead_over_ring_us: Option<f64>,
    /// Large messages: baselines of the stages, interleaved, and the topic's latency relative to
    /// the slowest.
    pub(super) stage_baselines: Vec<Latency>,
    pub(super) ratio_to_slowest: Option<f64>,
    pub(super) baseline: Option<baseline::Measured>,
    pub(super) note: Option<String>,
}

fn spread(stages: &[Latency]) -> String {
    let each = stages.iter().map(|it| format!("{} {:.1}/{:.1}", it.stage, it.p50_us, it.p99_us));
    each.collect::<Vec<_>>().join("  ")
}

impl Metrics for InterNodeMetrics {
    const FAILURE_TEXT: &str = "received data is corrupted";

    fn to_text(&self, common: &Common) -> String {
        let lanes = text::count_of(self.lanes as u64, "lane");
        let mut out = format!(
            "{} on {}, to {} on {} by {} over {}, {lanes}, {}: p50 {}, p99 {}, p99.9 {} us one \
         way; {:.0} messages/s, {:.3} GB/s\n",
            size::print(common.bytes),
            common.provider,
            text::count_of(self.subscribers, "reader"),
            self.remote_memory,
            self.path,
            self.provider_between_nodes,
            common.waiting,
            format_figure(common.p50_us),
            format_figure(common.p99_us),
            format_figure(common.p999_us),
            self.messages_per_s,
            self.stream_gb_per_s,
        );
        if let Some(ratio) = self.fan_out_ratio {
            out.push_str(&format!(
                "{ratio:.3} of the latency with one reader (p50 {}, p99 {} us)\n",
                format_figure(self.single_subscriber_p50_us),
                format_figure(self.single_subscriber_p99_us)
            ));
        }
        if let Some(ring) = self.ring_p50_us {
            let beyond = format_figure(self.overhead_over_ring_us);
            out.push_str(&format!(
                "a ring by itself takes {ring:.3} us; the topic, {beyond} us more\n"
            ));
        }
        let slowest = self.slowest_stage.as_deref().unwrap_or("?");
        out.push_str(&format!(
            "stages in us, p50/p99: {}; the slowest is {slowest}\n",
            spread(&self.stages)
        ));
        if !self.stage_baselines.is_empty() {
            out.push_str(&format!(
                "each by itself: {}; the total is {} of the slowest\n",
                spread(&self.stage_baselines),
                format_figure(self.ratio_to_slowest)
            ));
        }
        if self.credit_wait_us > 0.0 {
            let waits = self.credit_wait_us;
            out.push_str(&format!(
                "a message waits {waits:.1} us for credit of the other node's ring\n"
            ));
        }
        out.push_str(&thread_usage::to_text(&self.threads));
        if let Some(baseline) = &self.baseline {
            out.push_str(&baseline.to_text());
        }
        if let Some(note) = &self.note {
            out.push_str(&format!("{note}\n"));
        }
        out
    }
}
