//! What all measurements print last.

use serde::Serialize;

use crate::cli::exit::{Exit, Failure};
use crate::cli::text;

/// The keys that every report begins with, in this order: scripts read them.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Common {
    pub(super) p50_us: Option<f64>,
    pub(super) p99_us: Option<f64>,
    pub(super) p999_us: Option<f64>,
    pub(super) gb_per_s: f64,
    pub(super) bytes: u64,
    pub(super) iterations: u64,
    pub(super) provider: String,
    pub(super) waiting: String,
    pub(super) cores: Option<Vec<usize>>,
    pub(super) verified: bool,
}

/// The one in the middle, if there is any.
pub(super) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// Prints a report as one line of JSON, after what is for people, if that is wanted. Fails,
/// with what is wrong, if the data was not verified.
pub(super) fn conclude<R: Serialize>(
    report: &R,
    common: &Common,
    is_json_only: bool,
    for_people: impl FnOnce(&R) -> String,
    what_is_wrong: &str,
) -> Result<(), Failure> {
    let line = serde_json::to_string(report).map_err(|e| Failure::failed(e.to_string()))?;
    if !is_json_only {
        text::print(&for_people(report))?;
    }
    text::print(&format!("{line}\n"))?;
    if common.verified { Ok(()) } else { Err(Failure::new(Exit::Corrupt, what_is_wrong)) }
}
