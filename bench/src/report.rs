//! What all measurements print last.

use serde::Serialize;

use command::exit::{Exit, Failure};
use command::text;

/// The keys that every report begins with, in this order: scripts read them.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Common {
    pub(crate) p50_us: Option<f64>,
    pub(crate) p99_us: Option<f64>,
    pub(crate) p999_us: Option<f64>,
    pub(crate) gb_per_s: f64,
    pub(crate) bytes: u64,
    pub(crate) iterations: u64,
    pub(crate) provider: String,
    pub(crate) waiting: String,
    pub(crate) cores: Option<Vec<usize>>,
    pub(crate) verified: bool,
}

/// The one in the middle, if there is any.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// Prints a report as one line of JSON, after what is for people, if that is wanted. Fails,
/// with what is wrong, if the data was not verified.
pub(crate) fn conclude<R: Serialize>(
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
