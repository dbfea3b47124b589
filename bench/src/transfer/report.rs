//! What is told of a measurement.

use serde::Serialize;

use super::links::Carried;
use super::{Direction, Rival, Source};
use crate::report::{Common, Findings};
use command::{size, text};

#[derive(Debug, Serialize)]
pub(super) struct Found {
    pub(super) peer: String,
    pub(super) fabric: Option<String>,
    pub(super) rails: Option<u8>,
    pub(super) op: Direction,
    pub(super) memory: Source,
    pub(super) batch: u64,
    pub(super) path: &'static str,
    /// A device of the two is host memory: no GPU took part, whatever the path is called.
    pub(super) emulated: bool,
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
}

impl Findings for Found {
    const WRONG: &str = "other bytes arrived";

    fn for_people(&self, common: &Common) -> String {
        let mut text = format!(
            "{} x {} by {}{} between {} and {}: {:.2} us, {:.1} GB/s\n",
            self.batch,
            size::print(common.bytes),
            self.path,
            // By the way that GPUs would take.
            if self.emulated { " (stand-in)" } else { "" },
            common.provider,
            self.peer,
            common.p50_us.unwrap_or_default(),
            common.gb_per_s,
        );
        if let (Some(time), Some(rate), Some(ratio)) =
            (self.rival_p50_us, self.rival_gb_per_s, self.ratio)
        {
            text += &format!(
                "a copy in one process: {time:.2} us, {rate:.1} GB/s; ratio {ratio:.3} (its time by ours, in the same \
             round; the median of the rounds)\n"
            );
        }
        if let Some(rate) = self.loop_gb_per_s {
            text += &format!("by a loop of single copies: {rate:.1} GB/s\n");
        }
        if let Some(carried) = &self.carried {
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
}
