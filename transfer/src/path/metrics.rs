//! What went which way, in this process, for those who operate it.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::Path;

/// Bytes and transfers of a path.
#[derive(Debug)]
struct Counter {
    bytes: AtomicU64,
    transfers: AtomicU64,
}

static COUNTERS: [Counter; Path::ALL.len()] =
    [const { Counter { bytes: AtomicU64::new(0), transfers: AtomicU64::new(0) } }; Path::ALL.len()];
static FALLBACKS: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

/// A transfer that took this path, and why it was not a better one, if one could have been
/// expected.
pub(crate) fn count(path: Path, bytes: u64, fallback: Option<&'static str>) {
    let counter = &COUNTERS[path as usize];
    counter.bytes.fetch_add(bytes, Ordering::Relaxed);
    counter.transfers.fetch_add(1, Ordering::Relaxed);
    if let Some(reason) = fallback {
        let mut fallbacks = FALLBACKS.lock().unwrap_or_else(PoisonError::into_inner);
        *fallbacks.entry(reason).or_default() += 1;
    }
}

/// Bytes that took this path, in this process.
#[must_use]
pub fn bytes_by(path: Path) -> u64 {
    COUNTERS[path as usize].bytes.load(Ordering::Relaxed)
}

/// Transfers that took this path, in this process.
#[must_use]
pub fn transfers_by(path: Path) -> u64 {
    COUNTERS[path as usize].transfers.load(Ordering::Relaxed)
}

/// Transfers that took a worse path than could have been expected, by reason.
#[must_use]
pub fn fallbacks() -> BTreeMap<&'static str, u64> {
    FALLBACKS.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// All of it, as OpenMetrics writes it.
///
/// ```
/// let text = transfer::path::metrics();
/// assert!(text.contains("fabricast_path_bytes_total{path=\"cuda-ipc\"}"));
/// ```
#[must_use]
pub fn metrics() -> String {
    let mut text = String::new();
    let family = |text: &mut String, name: &str, help: &str| {
        let _ = writeln!(text, "# TYPE {name} counter\n# HELP {name} {help}");
    };
    family(&mut text, "fabricast_path_bytes", "Bytes that took a path.");
    for path in Path::ALL {
        let bytes = bytes_by(path);
        let _ = writeln!(text, "fabricast_path_bytes_total{{path=\"{path}\"}} {bytes}");
    }
    family(&mut text, "fabricast_path_transfers", "Transfers that took a path.");
    for path in Path::ALL {
        let transfers = transfers_by(path);
        let _ = writeln!(text, "fabricast_path_transfers_total{{path=\"{path}\"}} {transfers}");
    }
    let help = "Transfers that took a worse path than could have been expected.";
    family(&mut text, "fabricast_path_fallback", help);
    for (reason, count) in fallbacks() {
        let _ = writeln!(text, "fabricast_path_fallback_total{{reason=\"{reason}\"}} {count}");
    }
    text.push_str("# EOF\n");
    text
}
