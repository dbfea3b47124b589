//! Metrics of the paths of this process.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use threads::lock;

use super::Path;

#[derive(Debug)]
struct Counter {
    bytes: AtomicU64,
    transfers: AtomicU64,
}

static COUNTERS: [Counter; Path::ALL.len()] =
    [const { Counter { bytes: AtomicU64::new(0), transfers: AtomicU64::new(0) } }; Path::ALL.len()];
static FALLBACKS: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

/// Counts a transfer, its path, and the reason if the path is a fallback.
pub(crate) fn count(path: Path, bytes: u64, fallback: Option<&'static str>) {
    let counter = &COUNTERS[path as usize];
    counter.bytes.fetch_add(bytes, Ordering::Relaxed);
    counter.transfers.fetch_add(1, Ordering::Relaxed);
    if let Some(reason) = fallback {
        let mut fallbacks = lock(&FALLBACKS);
        *fallbacks.entry(reason).or_default() += 1;
    }
}

/// Other metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Count {
    RailLost,
    RailRestored,
    CacheHits,
    CacheMisses,
    CacheEvictions,
    CacheBytes,
    CacheEntries,
}

/// Kind, name and help of each count, in the same order.
const COUNTS: [(&str, &str, &str); 7] = [
    ("counter", "rail_lost", "Rails to other agents that were lost."),
    ("counter", "rail_restored", "Rails to other agents that were lost and restored."),
    ("counter", "registration_cache_hits", "Local registrations that were found in the cache."),
    ("counter", "registration_cache_misses", "Local registrations that were not in the cache."),
    ("counter", "registration_cache_evictions", "Cached registrations that were evicted."),
    ("gauge", "registration_cache_bytes", "Bytes of memory in the registration cache."),
    // Names that end with `_count` belong to histograms in OpenMetrics.
    ("gauge", "registration_cache_entries", "Entries of the registration cache."),
];
static VALUES: [AtomicU64; COUNTS.len()] = [const { AtomicU64::new(0) }; COUNTS.len()];

impl Count {
    pub(crate) fn add(self, more: u64) {
        VALUES[self as usize].fetch_add(more, Ordering::Relaxed);
    }

    pub(crate) fn take(self, less: u64) {
        VALUES[self as usize].fetch_sub(less, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(crate) fn value(self) -> u64 {
        VALUES[self as usize].load(Ordering::Relaxed)
    }
}

/// All metrics in the format of OpenMetrics.
///
/// ```
/// let text = transfer::path::metrics();
/// assert!(text.contains("fabricast_path_bytes_total{path=\"cuda-ipc\"}"));
/// assert!(text.contains("fabricast_registration_cache_hits_total 0"));
/// assert!(text.contains("fabricast_rail_lost_total 0"));
/// ```
#[must_use]
pub fn metrics() -> String {
    let mut text = String::new();
    let mut family = |kind: &str, name: &str, help: &str, values: &[(String, u64)]| {
        let name = format!("fabricast_{name}");
        let end = if kind == "counter" { "_total" } else { "" };
        let _ = writeln!(text, "# TYPE {name} {kind}\n# HELP {name} {help}");
        for (label, value) in values {
            let _ = writeln!(text, "{name}{end}{label} {value}");
        }
    };
    let by_path = |of: fn(&Counter) -> &AtomicU64| -> Vec<_> {
        let value = |path: Path| of(&COUNTERS[path as usize]).load(Ordering::Relaxed);
        Path::ALL.map(|path| (format!("{{path=\"{path}\"}}"), value(path))).into()
    };
    let bytes = by_path(|counter| &counter.bytes);
    family("counter", "path_bytes", "Bytes transferred by path.", &bytes);
    let transfers = by_path(|counter| &counter.transfers);
    family("counter", "path_transfers", "Transfers by path.", &transfers);
    let help = "Transfers that fell back to a worse path, by reason.";
    let label = |reason: &str| format!("{{reason=\"{reason}\"}}");
    let by_reason: Vec<_> =
        lock(&FALLBACKS).iter().map(|(reason, count)| (label(reason), *count)).collect();
    family("counter", "path_fallback", help, &by_reason);
    for ((kind, name, help), value) in COUNTS.into_iter().zip(&VALUES) {
        family(kind, name, help, &[(String::new(), value.load(Ordering::Relaxed))]);
    }
    text.push_str("# EOF\n");
    text
}
