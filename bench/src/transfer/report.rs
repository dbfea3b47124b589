//! The report of a measurement.

use serde::Serialize;

use super::link_counters::LinkTraffic;
use super::{Baseline, Direction, Source};
use crate::report::{Common, Metrics};
use command::{size, text};

#[derive(Debug, Serialize)]
pub(super) struct TransferMetrics {
    pub(super) peer: String,
    pub(super) fabric: Option<String>,
    pub(super) rails: Option<u8>,
    pub(super) op: Direction,
    pub(super) memory: Source,
    pub(super) batch: u64,
    pub(super) path: &'static str,
    /// A device is emulated in host memory: no GPU took part, whatever the path is called.
    pub(super) emulated: bool,
    pub(super) fallback: Option<&'static str>,
    pub(super) isolated: bool,
    /// Until the initiator knows that the data is there.
    pub(super) local_completion_p50_us: f64,
    pub(super) baseline: Option<Baseline>,
    pub(super) baseline_p50_us: Option<f64>,
    pub(super) baseline_gb_per_s: Option<f64>,
    /// Bytes per second relative to the baseline's in the same round; the median of the rounds,
    /// which is not the quotient of the medians, since the speed of a machine changes.
    pub(super) ratio: Option<f64>,
    /// A loop of single copies, for requests of several blocks.
    pub(super) loop_gb_per_s: Option<f64>,
    pub(super) links: Option<LinkTraffic>,
}

impl Metrics for TransferMetrics {
    const FAILURE_TEXT: &str = "received data is corrupted";

    fn to_text(&self, common: &Common) -> String {
        let mut text = format!(
            "{} x {} by {}{} between {} and {}: {:.2} us, {:.1} GB/s\n",
            self.batch,
            size::print(common.bytes),
            self.path,
            // The path that GPUs would use.
            if self.emulated { " (emulated)" } else { "" },
            common.provider,
            self.peer,
            common.p50_us.unwrap_or_default(),
            common.gb_per_s,
        );
        if let (Some(time), Some(rate), Some(ratio)) =
            (self.baseline_p50_us, self.baseline_gb_per_s, self.ratio)
        {
            text += &format!(
                "a copy in one process: {time:.2} us, {rate:.1} GB/s; ratio {ratio:.3} (its time by ours, in the same \
             round; the median of the rounds)\n"
            );
        }
        if let Some(rate) = self.loop_gb_per_s {
            text += &format!("by a loop of single copies: {rate:.1} GB/s\n");
        }
        if let Some(links) = &self.links {
            let number = |bytes: Option<u64>| match bytes {
                Some(bytes) => bytes.to_string(),
                None => "not counted".to_owned(),
            };
            text += &format!(
                "moved {}; NVLink sent {}, received {}; PCIe sent {}, received {}; interfaces sent {}\n",
                text::count_of(links.moved, "byte"),
                number(links.nvlink_sent),
                number(links.nvlink_received),
                number(links.pcie_sent),
                number(links.pcie_received),
                number(links.interfaces_sent),
            );
            if let Some(why) = &links.unavailable_reason {
                text += &format!("links are not counted: {why}\n");
            }
        }
        text
    }
}
