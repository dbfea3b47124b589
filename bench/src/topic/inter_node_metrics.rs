//! What is told of messages between two nodes.

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
    /// By which the messages went, as the node says.
    pub(super) lanes: usize,
    pub(super) fill_is_timed: bool,
    /// Messages of which all bytes were compared.
    pub(super) verified_messages: u64,
    pub(super) publish_p50_us: Option<f64>,
    pub(super) stages: Vec<Latency>,
    /// Of those alone, or of these.
    pub(super) slowest_stage: Option<String>,
    /// With one reader, measured in turn.
    pub(super) single_subscriber_p50_us: Option<f64>,
    pub(super) single_subscriber_p99_us: Option<f64>,
    pub(super) fan_out_ratio: Option<f64>,
    /// Of a message that was timed, until there was room in the ring of the other node.
    pub(super) credit_wait_us: f64,
    /// Of both services, while the messages went that were timed.
    pub(super) threads: Vec<ThreadUsage>,
    /// Messages of a stream that may wait.
    pub(super) stream_depth: u32,
    pub(super) messages_per_s: f64,
    pub(super) stream_gb_per_s: f64,
    /// The same, 64 bytes or so, by a ring alone, measured in turn.
    pub(super) ring_p50_us: Option<f64>,
    pub(super) overhead_over_ring_us: Option<f64>,
    /// Large ones: the stages by themselves, measured in turn, and what all takes relative to the
    /// slowest.
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
    const FAILURE_TEXT: &str = "other bytes arrived";

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
                "{ratio:.3} of what it takes with one reader (p50 {}, p99 {} us)\n",
                format_figure(self.single_subscriber_p50_us),
                format_figure(self.single_subscriber_p99_us)
            ));
        }
        if let Some(ring) = self.ring_p50_us {
            let beyond = format_figure(self.overhead_over_ring_us);
            out.push_str(&format!(
                "a ring alone takes {ring:.3} us; the topic, {beyond} us more\n"
            ));
        }
        let slowest = self.slowest_stage.as_deref().unwrap_or("?");
        out.push_str(&format!(
            "stages in us, p50/p99: {}; the slowest is {slowest}\n",
            spread(&self.stages)
        ));
        if !self.stage_baselines.is_empty() {
            out.push_str(&format!(
                "each alone: {}; all takes {} of the slowest\n",
                spread(&self.stage_baselines),
                format_figure(self.ratio_to_slowest)
            ));
        }
        if self.credit_wait_us > 0.0 {
            let waits = self.credit_wait_us;
            out.push_str(&format!(
                "a message waits {waits:.1} us for room in the other node's ring\n"
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
