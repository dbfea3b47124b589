//! The stages of a message's latency, and their names in all reports. docs/reference/stages.md has the
//! table.

use pubsub::Times;

/// A stage, from its start to its end. Stages of a message from another node overlap: chunks are
/// copied out, on the wire and copied in at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// The publisher waits for the loan of memory.
    Loan,
    /// The publisher writes the message.
    Fill,
    /// From publish until the node begins to write the message to the other node; within a node,
    /// until it is delivered.
    Queue,
    /// Copied out of device memory, to be written to another node.
    CopyOut,
    /// From the begin of the write until the last byte has arrived.
    Wire,
    /// Copied to the memory of the topic. Chunks that the processor copies on arrival are part of
    /// *wire*, but for the time between the first and the last.
    CopyIn,
    /// From delivery until the subscriber pulls the message.
    Wakeup,
    /// The subscriber releases the message.
    Release,
}

/// Number of stages.
pub const COUNT: usize = Stage::ALL.len();

/// The total, which is not a stage: from publish until pull.
pub const TOTAL: &str = "total";

impl Stage {
    /// In order of time.
    pub const ALL: [Self; 8] = [
        Self::Loan,
        Self::Fill,
        Self::Queue,
        Self::CopyOut,
        Self::Wire,
        Self::CopyIn,
        Self::Wakeup,
        Self::Release,
    ];

    /// The name in tables and JSON.
    pub fn name(self) -> &'static str {
        ["loan", "fill", "queue", "copy-out", "wire", "copy-in", "wakeup", "release"][self as usize]
    }
}

/// How long each stage took, in nanoseconds; None if the message skipped it, or if the clocks of
/// two nodes differ too much.
pub type StageDurations = [Option<u64>; COUNT];

/// The stages of a message that was published and pulled at these times. Its loan, fill and release
/// are known only to its publisher and subscriber.
pub fn durations(times: &Times, is_remote: bool, published: u64, pulled: u64) -> StageDurations {
    let begun = if is_remote { times.posted } else { times.published };
    std::array::from_fn(|which| {
        // Chunks that the processor copies on arrival have no stage of their own.
        let (from, to, may_be_zero) = match Stage::ALL[which] {
            Stage::Queue => (published, begun, true),
            Stage::CopyOut if is_remote => (times.posted, times.filled, false),
            Stage::Wire if is_remote => (times.posted, times.wire, true),
            Stage::CopyIn if is_remote => (times.copying, times.copied, false),
            Stage::Wakeup => (times.published, pulled, true),
            _ => return None,
        };
        let is_known = from > 0 && to >= from && (may_be_zero || to > from);
        is_known.then(|| to - from)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(durations: StageDurations) -> Vec<(&'static str, u64)> {
        let all = Stage::ALL.into_iter().zip(durations);
        all.filter_map(|(stage, durations)| Some((stage.name(), durations?))).collect()
    }

    #[test]
    fn stages_begin_and_end_as_documented() {
        let mut times = Times::default();
        (times.allocated, times.filled, times.published) = (100, 200, 230);
        assert_eq!(names(durations(&times, false, 200, 270)), [("queue", 30), ("wakeup", 40)]);
        // Of another node: published there at 190, begun at 200, copied out by 260, the last byte
        // at 300, copied in from 240 to 310, delivered at 315.
        (times.posted, times.filled, times.wire) = (200, 260, 300);
        (times.copying, times.copied, times.published) = (240, 310, 315);
        let all = [("queue", 10), ("copy-out", 60), ("wire", 100), ("copy-in", 70), ("wakeup", 5)];
        assert_eq!(names(durations(&times, true, 190, 320)), all);
        // From host memory to host memory, in one chunk.
        (times.filled, times.copying) = (200, 310);
        let all = [("queue", 10), ("wire", 100), ("wakeup", 5)];
        assert_eq!(names(durations(&times, true, 190, 320)), all);
        // The other node's clock is ahead.
        let all = [("queue", 10), ("wakeup", 5)];
        (times.posted, times.filled) = (5000, 5000);
        assert_eq!(names(durations(&times, true, 4990, 320)), all);
    }

    #[test]
    fn documentation_lists_the_stages_in_order() {
        let page = include_str!("../../docs/reference/stages.md");
        let mut rest = page;
        for stage in Stage::ALL.into_iter().map(Stage::name).chain([TOTAL]) {
            let row = format!("| *{stage}* | ");
            let found = rest.split_once(&row).map(|(_, behind)| behind);
            rest = found.unwrap_or_else(|| {
                panic!("docs/reference/stages.md has no row {row}, or too early")
            });
        }
    }
}
