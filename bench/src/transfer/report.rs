//! What is told of a measurement.

use serde::Serialize;

use super::links::Carried;
use super::{Direction, Rival, Source};
use crate::report::Common;
use command::{size, text};

#[derive(Debug, Serialize)]
pub(super) struct Report {
    #[serde(flatten)]
    pub(super) common: Common,
    pub(super) peer: String,
    pub(super) fabric: Option<String>,
    pub(super) rails: Option<u8>,
    pub(super) op: Direction,
    pub(super) memory: Source,
    pub(super) batch: u64,
    pub(super) path: &'static str,
    pub(super) fallback: Option<&'static str>,
    pub(super) isolated: bool,
    /// Until the process that began it knows that the data is there.
    pub(super) done_p50_us: f64,
    pub(super) rival: Option<Rival>,
    pub(super) rival_p50_us: Option<f64>,
    pub(super) rival_gb_per_s: Option<f64>,
    /// Bytes in a second, relative to the rival's in the same round; the median of the rounds,
    /// which is not the quotient of the medians of all, since a machine is not equally fast in all.
    pub(super) ratio: Option<f64>,
    /// A loop of single copies, for requests of many blocks.
    pub(super) loop_gb_per_s: Option<f64>,
    pub(super) carried: Option<Carried>,
    pub(super) program: &'static str,
}

pub(super) fn for_people(report: &Report) -> String {
    let common = &report.common;
    let mut text = format!(
        "{} x {} by {}{} between {} and {}: {:.2} us, {:.1} GB/s\n",
        report.batch,
        size::print(common.bytes),
        report.path,
        // Of host memory, by the way that GPUs would take.
        if common.provider.starts_with("stand-in:") { " (stand-in)" } else { "" },
        common.provider,
        report.peer,
        common.p50_us.unwrap_or_default(),
        common.gb_per_s,
    );
    if let (Some(time), Some(rate), Some(ratio)) =
        (report.rival_p50_us, report.rival_gb_per_s, report.ratio)
    {
        text += &format!(
            "a copy in one process: {time:.2} us, {rate:.1} GB/s; ratio {ratio:.3} (its time by ours, in the same \
             round; the median of the rounds)\n"
        );
    }
    if let Some(rate) = report.loop_gb_per_s {
        text += &format!("by a loop of single copies: {rate:.1} GB/s\n");
    }
    if let Some(carried) = &report.carried {
        let number = |bytes: Option<u64>| match bytes {
            Some(bytes) => bytes.to_string(),
            None => "not counted".to_owned(),
        };
        text += &format!(
            "moved {}; NVLink sent {}, received {}; PCIe sent {}, received {}; interfaces sent {}\n",
            text::counted(carried.moved, "byte"),
            number(carried.nvlink_sent),
            number(carried.nvlink_received),
            number(carried.pcie_sent),
            number(carried.pcie_received),
            number(carried.interfaces_sent),
        );
        if let Some(why) = &carried.why_not {
            text += &format!("links are not counted: {why}\n");
        }
    }
    text
}
