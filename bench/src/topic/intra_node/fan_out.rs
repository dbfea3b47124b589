//! Within a node, with 1, 2, 4, … readers that busy-poll or block.

use serde::Serialize;

use super::{Arguments, IntraNodeMetrics as Row, cores, measure};
use crate::exchange::plan::Wait;
use crate::report::{Common, Metrics, Report, format_figure};
use command::exit::Failure;
use command::text::table_of;

/// Default number of messages where readers block: only some thousand are possible per second.
const ASLEEP: u64 = 4_000;

/// The common part is of the last row: all readers, blocking.
#[derive(Debug, Serialize)]
struct FanOutMetrics {
    rows: Vec<Report<Row>>,
}

/// The rows. Busy-polling readers need a core each: rows with too few cores are left out.
fn rows(most: u64, has_core_for_each: impl Fn(u64) -> bool) -> Vec<(Wait, u64)> {
    let readers = move || (0..).map(|power| 1 << power).take_while(move |count| *count < most);
    let all = move || readers().chain([most]);
    let busy = all().filter(|count| has_core_for_each(*count)).map(|count| (Wait::Poll, count));
    busy.chain(all().map(|count| (Wait::Block, count))).collect()
}

pub(in super::super) fn run(arguments: &Arguments, most: u64) -> Result<(), Failure> {
    let everywhere = std::thread::available_parallelism().map_or(1, usize::from);
    let has_core_for_each = |subscribers| {
        let arguments = Arguments { subscribers, ..arguments.clone() };
        cores(&arguments).is_ok_and(|cores| cores.has_core_for_each(everywhere))
    };
    let mut measured = Vec::new();
    for (waiting, subscribers) in rows(most, has_core_for_each) {
        let asleep = (waiting == Wait::Block).then_some(ASLEEP);
        let iterations = arguments.iterations.or(asleep);
        let arguments = Arguments { waiting, subscribers, iterations, ..arguments.clone() };
        measured.push(measure(&arguments)?);
    }
    let Some(last) = measured.last() else { return Ok(()) };
    let verified = measured.iter().all(|row| row.common.verified);
    let common = Common { verified, ..last.common.clone() };
    Report::new(common, FanOutMetrics { rows: measured }).conclude(arguments.json)
}

impl Metrics for FanOutMetrics {
    fn to_text(&self, _common: &Common) -> String {
        let heads = [
            "waiting",
            "readers",
            "p50",
            "p99",
            "publish p50",
            "p99",
            "loan",
            "wakeup",
            "queue p50",
            "p99",
        ];
        let row = |row: &Report<Row>| {
            let found = &row.metrics;
            let stage = |name: &str| {
                format_figure(
                    found.stages.iter().find(|stage| stage.stage == name).map(|stage| stage.p50_us),
                )
            };
            [
                row.common.waiting.clone(),
                found.subscribers.to_string(),
                format_figure(row.common.p50_us),
                format_figure(row.common.p99_us),
                format_figure(found.publish_p50_us),
                format_figure(found.publish_p99_us),
                stage("loan"),
                stage("wakeup"),
                format_figure(found.queue_p50_us),
                format_figure(found.queue_p99_us),
            ]
        };
        let table = table_of(heads, self.rows.iter().map(row));
        format!("us, from the loan of memory until a reader has the message\n{table}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_double_and_busy_pollers_have_a_core() {
        let all = |most, cores| rows(most, |readers| readers < cores);
        let (busy, block) = (Wait::Poll, Wait::Block);
        let few = [(busy, 1), (block, 1), (block, 2), (block, 4), (block, 6)];
        assert_eq!(all(6, 2), few);
        assert_eq!(all(8, 32).len(), 8);
        assert_eq!(all(1, 1), [(block, 1)]);
    }
}
