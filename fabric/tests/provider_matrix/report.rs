//! Results of the cells: a table for people, JSON for machines.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Passed,
    Failed,
    Skipped,
}

#[derive(Serialize, Deserialize, Clone)]
pub struct Row {
    pub provider: String,
    pub endpoint: String,
    pub memory: String,
    pub case: String,
    pub outcome: Outcome,
    pub detail: String,
    pub seconds: f64,
}

#[derive(Serialize, Deserialize)]
pub struct Report {
    pub label: String,
    pub library: String,
    pub headers: String,
    pub rows: Vec<Row>,
}

impl Report {
    pub fn load(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))
    }

    pub fn save(&self, path: &Path) -> Result<(), String> {
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(|e| format!("{}: {e}", parent.display()))?;
        }
        let text = serde_json::to_string_pretty(self).map_err(|e| e.to_string())?;
        std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))
    }

    fn title(&self) -> String {
        format!("{} (libfabric {}, headers {})", self.label, self.library, self.headers)
    }
}

/// Prints all reports and the closing line; false if the whole run failed.
pub fn print(reports: &[Report]) -> bool {
    let mut totals = BTreeMap::new();
    for report in reports {
        println!("\n{}", report.title());
        println!(
            "  {:22} {:4} {:5} {:>5} {:>7} {:>7} {:>8} {:>8}",
            "provider", "ep", "mem", "run", "passed", "failed", "skipped", "seconds"
        );
        let mut groups: Vec<(&str, &str, &str)> = Vec::new();
        for row in &report.rows {
            let key = (row.provider.as_str(), row.endpoint.as_str(), row.memory.as_str());
            if !groups.contains(&key) {
                groups.push(key);
            }
        }
        for (provider, endpoint, memory) in groups {
            let rows: Vec<&Row> = report
                .rows
                .iter()
                .filter(|r| {
                    (r.provider.as_str(), r.endpoint.as_str(), r.memory.as_str())
                        == (provider, endpoint, memory)
                })
                .collect();
            let count = |outcome| rows.iter().filter(|r| r.outcome == outcome).count();
            let (passed, failed, skipped) =
                (count(Outcome::Passed), count(Outcome::Failed), count(Outcome::Skipped));
            let seconds: f64 = rows.iter().map(|r| r.seconds).sum();
            println!(
                "  {provider:22} {endpoint:4} {memory:5} {:>5} {passed:>7} {failed:>7} {skipped:>8} {seconds:>8.1}",
                passed + failed
            );
        }
        for row in &report.rows {
            *totals.entry(format!("{:?}", row.outcome)).or_insert(0) += 1;
        }
    }
    print_skips(reports);
    print_failures(reports);
    let total = |name: &str| totals.get(name).copied().unwrap_or(0);
    let (passed, failed, skipped) = (total("Passed"), total("Failed"), total("Skipped"));
    if passed + failed == 0 {
        println!("\nfailed: no cell ran");
    }
    println!("\n{passed} passed, {failed} failed, {skipped} skipped");
    failed == 0 && passed > 0
}

fn print_skips(reports: &[Report]) {
    let mut reasons: BTreeMap<(String, &str), usize> = BTreeMap::new();
    for report in reports {
        for row in report.rows.iter().filter(|r| r.outcome == Outcome::Skipped) {
            let group = format!("{}/{}/{}", row.provider, row.endpoint, row.memory);
            *reasons.entry((group, row.detail.as_str())).or_insert(0) += 1;
        }
    }
    if !reasons.is_empty() {
        println!("\nSkipped, with the reason:");
    }
    for ((group, reason), count) in reasons {
        println!("  {count:>4} × {group:32} {reason}");
    }
}

fn print_failures(reports: &[Report]) {
    for report in reports {
        for row in report.rows.iter().filter(|r| r.outcome == Outcome::Failed) {
            println!(
                "\nFAILED {}/{}/{}/{} [{}]\n    {}",
                row.provider,
                row.endpoint,
                row.memory,
                row.case,
                report.label,
                row.detail.trim().replace('\n', "\n    ")
            );
        }
    }
}
