//! The stages of a message's way: what all that tells how long they take calls them, and what each of
//! them is. docs/operating.md has the table.

use pubsub::Times;

/// A stage, from its beginning to its end. Of a message from another node some are under way at a
/// time: chunks are copied out, on the wire and copied in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Its publisher asked for memory, until it was there.
    Loan,
    /// Until its publisher had written it.
    Fill,
    /// From being published until its node began to write it to the other one; within a node,
    /// until it was delivered.
    Queue,
    /// Copied out of its device, to be written to another node.
    CopyOut,
    /// From when its node began to write it until its last byte had come.
    Wire,
    /// Copied to where it is read; chunks that the processor copies as they come are part of
    /// *wire*, but for the time between the first and the last.
    CopyIn,
    /// From being delivered until it was pulled.
    Wakeup,
    /// Letting go of it.
    Release,
}

/// How many there are.
pub const COUNT: usize = Stage::ALL.len();

/// What is not a stage of its own: from being published until it was pulled.
pub const TOTAL: &str = "all";

impl Stage {
    /// In the order of a message's way.
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

    /// As it is called in tables, and by programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Loan => "borrow",
            Self::Fill => "fill",
            Self::Queue => "begin",
            Self::CopyOut => "out",
            Self::Wire => "wire",
            Self::CopyIn => "in",
            Self::Wakeup => "notice",
            Self::Release => "drop",
        }
    }
}

/// How long each stage took, in nanoseconds, as far as a message tells; None if it skipped it, or if
/// the clocks of two nodes are too far apart to tell.
pub type StageDurations = [Option<u64>; COUNT];

/// What a message tells that was published and pulled then. What its publisher did before, and its
/// reader after, only these know.
pub fn durations(times: &Times, is_remote: bool, published: u64, pulled: u64) -> StageDurations {
    let begun = if is_remote { times.posted } else { times.published };
    std::array::from_fn(|which| {
        // What a processor copies as it comes is no stage of its own.
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
    fn stages_begin_and_end_where_the_documentation_says() {
        let mut times = Times::default();
        (times.allocated, times.filled, times.published) = (100, 200, 230);
        assert_eq!(names(durations(&times, false, 200, 270)), [("begin", 30), ("notice", 40)]);
        // Of another node: published there at 190, begun at 200, copied out by 260, the last byte at 300, copied in
        // from 240 to 310, delivered at 315.
        (times.posted, times.filled, times.wire) = (200, 260, 300);
        (times.copying, times.copied, times.published) = (240, 310, 315);
        let all = [("begin", 10), ("out", 60), ("wire", 100), ("in", 70), ("notice", 5)];
        assert_eq!(names(durations(&times, true, 190, 320)), all);
        // From the host to the host, in one chunk.
        (times.filled, times.copying) = (200, 310);
        let all = [("begin", 10), ("wire", 100), ("notice", 5)];
        assert_eq!(names(durations(&times, true, 190, 320)), all);
        // The other node's clock is ahead.
        let all = [("begin", 10), ("notice", 5)];
        (times.posted, times.filled) = (5000, 5000);
        assert_eq!(names(durations(&times, true, 4990, 320)), all);
    }

    #[test]
    fn the_documentation_has_them_in_order() {
        let page = include_str!("../../docs/operating.md");
        let mut rest = page;
        for stage in Stage::ALL.into_iter().map(Stage::name).chain([TOTAL]) {
            let row = format!("| *{stage}* | ");
            let found = rest.split_once(&row).map(|(_, behind)| behind);
            rest =
                found.unwrap_or_else(|| panic!("docs/operating.md has no row {row}, or too early"));
        }
    }
}
