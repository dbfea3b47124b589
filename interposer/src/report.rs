//! What was called on a communicator, by whom it was carried out, and how long that took.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::time::Duration;

use collective::OpKey;

use crate::settings::{Destination, settings};

/// Times of a row that are kept: the latest ones.
const TIMES: usize = 256;

#[derive(Debug, Default)]
struct Times {
    latest: Vec<u32>,
    next: usize,
}

impl Times {
    fn add(&mut self, time: Duration) {
        let nanoseconds = u32::try_from(time.as_nanos()).unwrap_or(u32::MAX);
        if self.latest.len() < TIMES {
            self.latest.push(nanoseconds);
        } else {
            self.latest[self.next] = nanoseconds;
            self.next = (self.next + 1) % TIMES;
        }
    }

    /// The median in nanoseconds.
    fn median(&self) -> Option<f64> {
        let mut all = self.latest.clone();
        all.sort_unstable();
        all.get(all.len() / 2).map(|time| f64::from(*time))
    }
}

/// Operations of one library.
#[derive(Debug, Default)]
struct Share {
    calls: u64,
    times: Times,
}

/// What was called on a communicator.
#[derive(Debug, Default)]
pub(crate) struct Statistics {
    /// By whether this project carried out the operations.
    rows: BTreeMap<OpKey, [Share; 2]>,
    /// Operations that were left to NCCL, by the reason.
    left: BTreeMap<&'static str, u64>,
}

impl Statistics {
    pub(crate) fn add_call(&mut self, key: OpKey, is_ours: bool) {
        self.rows.entry(key).or_default()[usize::from(is_ours)].calls += 1;
    }

    pub(crate) fn add_time(&mut self, key: OpKey, is_ours: bool, time: Duration) {
        self.rows.entry(key).or_default()[usize::from(is_ours)].times.add(time);
    }

    pub(crate) fn add_left(&mut self, reason: &'static str) {
        *self.left.entry(reason).or_default() += 1;
    }

    /// The table. `title` names the communicator, `reason` says why all its operations were left.
    pub(crate) fn table(&self, title: &str, library: &str, reason: Option<&str>) -> String {
        let mut text = format!("fabricast: {title}\n");
        if let Some(reason) = reason {
            let _ = writeln!(text, "  left to {library}: {reason}");
        }
        for (reason, calls) in &self.left {
            let _ = writeln!(text, "  {calls} operations left to {library}: {reason}");
        }
        if !self.rows.is_empty() {
            let _ = writeln!(
                text,
                "  {:<14} {:<8} {:>10} {:>8} {:>8} {:>8} {:>10} {:>10} {:>6}",
                "operation",
                "type",
                "up to B",
                "calls",
                "ours",
                library,
                "ours us",
                "other us",
                "gain"
            );
        }
        for (key, [other, ours]) in &self.rows {
            let micros = |share: &Share| share.times.median().map(|time| time / 1e3);
            let text_of = |time: Option<f64>| time.map_or("-".to_owned(), |it| format!("{it:.1}"));
            let (own, others) = (micros(ours), micros(other));
            let gain = own.zip(others).filter(|(own, _)| *own > 0.0);
            let gain = gain.map_or("-".to_owned(), |(own, others)| format!("{:.2}", others / own));
            let _ = writeln!(
                text,
                "  {:<14} {:<8} {:>10} {:>8} {:>8} {:>8} {:>10} {:>10} {:>6}",
                key.operation.name(),
                key.data_type.name(),
                key.size_class.largest(),
                other.calls + ours.calls,
                ours.calls,
                other.calls,
                text_of(own),
                text_of(others),
                gain
            );
        }
        text
    }
}

/// Writes a table to where the report goes, in one piece.
pub(crate) fn write(text: &str) {
    match settings().report() {
        None => {}
        Some(Destination::StandardError) => {
            let _ = std::io::stderr().write_all(text.as_bytes());
        }
        Some(Destination::File(path)) => {
            let file = OpenOptions::new().append(true).create(true).open(path);
            if let Err(error) = file.and_then(|mut file| file.write_all(text.as_bytes())) {
                eprintln!("fabricast: report {} was not written: {error}", path.display());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use collective::{DataType, Operation, SizeClass};

    #[test]
    fn table_has_calls_medians_and_gain() {
        let size_class = SizeClass::of(4096);
        let key = OpKey { operation: Operation::AllReduce, size_class, data_type: DataType::F32 };
        let mut statistics = Statistics::default();
        for micros in [10, 30, 20] {
            statistics.add_call(key, false);
            statistics.add_time(key, false, Duration::from_micros(micros));
        }
        statistics.add_call(key, true);
        statistics.add_time(key, true, Duration::from_micros(10));
        statistics.add_left("graph capture");
        let table = statistics.table("communicator 1", "nccl", None);
        let words: Vec<&str> = table.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(words, ["all-reduce", "f32", "4096", "4", "1", "3", "10.0", "20.0", "2.00"]);
        assert!(table.contains("1 operations left to nccl: graph capture"), "{table}");
        let table = Statistics::default().table("communicator 2", "nccl", Some("one rank"));
        assert_eq!(table, "fabricast: communicator 2\n  left to nccl: one rank\n");
    }

    #[test]
    fn latest_times_are_kept() {
        let mut times = Times::default();
        (0..1000).for_each(|number| times.add(Duration::from_nanos(number)));
        assert_eq!(times.latest.len(), TIMES);
        assert_eq!(times.median(), Some(872.0));
    }
}
