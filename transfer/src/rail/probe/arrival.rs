//! What an end sees after bytes were announced, and the verdict on it: without clocks and devices.

use std::time::{Duration, Instant};

use super::plan::{Step, size_text};
use crate::device_memory::{Part, Pattern};
use crate::path::Operation;

/// How long late bytes are waited for, to tell how late they are.
const MAX_LATENESS: Duration = Duration::from_millis(100);

/// The bytes of a step as an end saw them, copied in this order.
#[derive(Debug, Default)]
pub(in crate::rail) struct Snapshot {
    tail: Vec<u8>,
    parts: Vec<Vec<u8>>,
}

impl Snapshot {
    /// The [end of the last part](Step::tail), and all parts.
    pub(super) fn new(tail: Vec<u8>, parts: Vec<Vec<u8>>) -> Self {
        Self { tail, parts }
    }
}

/// The verdict on a snapshot.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::rail) enum Look {
    /// All bytes are right at the first look.
    Right,
    /// Some are wrong: look again, to tell how late they are.
    Again,
    Failed(String),
}

/// The bytes of one step, after their announcement.
#[derive(Debug)]
pub(in crate::rail) struct Arrival {
    step: &'static Step,
    pattern: Pattern,
    at: Instant,
    /// The first part that was wrong, once one was.
    late: Option<Part>,
}

impl Arrival {
    /// The bytes of a step of a probe were announced now.
    pub(in crate::rail) fn new((step, pattern): (&'static Step, Pattern), at: Instant) -> Self {
        Self { step, pattern, at, late: None }
    }

    pub(super) fn step(&self) -> &'static Step {
        self.step
    }

    /// Judges a snapshot whose copy was started at this time.
    pub(super) fn look(&mut self, seen: &Snapshot, began: Instant) -> Look {
        let after = began.saturating_duration_since(self.at);
        let wrong = self.step.parts().iter().zip(&seen.parts).find_map(|(part, bytes)| {
            self.pattern.right_bytes(*part, bytes).map(|right| (*part, right))
        });
        let tail = self.step.tail();
        let is_tail_wrong = self.pattern.right_bytes(tail, &seen.tail).is_some();
        let name = match self.step.operation() {
            Operation::Put => "notice",
            Operation::Get => "completion",
        };
        match (wrong, self.late) {
            (None, None) if !is_tail_wrong => Look::Right,
            (None, late) => {
                // The tail was copied first: it arrived between the two copies.
                let late = late.or(self.step.parts().last().copied());
                let length = late.map_or(0, Part::length);
                let (size, after) = (size_text(length), duration_text(after));
                Look::Failed(format!("{size} arrived {after} after its {name}"))
            }
            (Some((part, _)), _) if after < MAX_LATENESS => {
                self.late.get_or_insert(part);
                Look::Again
            }
            (Some((part, right)), _) => {
                let (size, after) = (size_text(part.length()), duration_text(after));
                let right = size_text(right as u64);
                Look::Failed(format!(
                    "{size} was incomplete {after} after its {name}: the first {right} are right"
                ))
            }
        }
    }
}

/// Formats a duration, such as `5 µs` or `100 ms`.
fn duration_text(time: Duration) -> String {
    match time.as_micros() {
        micros @ 0..10_000 => format!("{micros} µs"),
        _ => format!("{} ms", time.as_millis()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::steps;
    use super::*;

    const BURST: usize = 15;
    const FIRST_READ: usize = 18;

    fn arrival(step: usize) -> (Arrival, Instant) {
        let at = Instant::now();
        let step = (&steps()[step], Pattern::of(1, step));
        (Arrival::new(step, at), at)
    }

    /// A snapshot in which the first `right` bytes of the last part have arrived.
    fn seen(step: usize, right: usize) -> Snapshot {
        let (known, pattern) = (&steps()[step], Pattern::of(1, step));
        let bytes = |part: &Part| pattern.bytes(*part);
        let mut parts: Vec<_> = known.parts().iter().map(bytes).collect();
        let last = parts.last_mut().unwrap();
        let length = last.len();
        last[right.min(length)..].fill(0);
        let tail = last[length - known.tail().length() as usize..].to_vec();
        Snapshot { tail, parts }
    }

    const MICROSECOND: Duration = Duration::from_micros(1);

    #[test]
    fn bytes_that_are_there_at_once_are_right() {
        for step in 0..steps().len() {
            let (mut arrival, at) = arrival(step);
            assert_eq!(arrival.look(&seen(step, usize::MAX), at), Look::Right);
        }
    }

    #[test]
    fn late_bytes_are_reported_with_their_delay() {
        let (mut arrival, at) = arrival(7);
        assert_eq!(arrival.look(&seen(7, 100), at), Look::Again);
        assert_eq!(arrival.look(&seen(7, 50_000), at + 3 * MICROSECOND), Look::Again);
        let found = arrival.look(&seen(7, usize::MAX), at + 5 * MICROSECOND);
        let text = "64 KiB arrived 5 µs after its notice";
        assert_eq!(found, Look::Failed(text.to_owned()));
    }

    /// The bytes arrive while the snapshot is taken: only its first copy shows it.
    #[test]
    fn bytes_that_arrive_during_the_first_look_are_late() {
        let (mut arrival, at) = arrival(BURST + 1);
        let mut snapshot = seen(BURST + 1, usize::MAX);
        snapshot.tail.fill(0);
        let found = arrival.look(&snapshot, at + 12 * MICROSECOND);
        let text = "4 MiB arrived 12 µs after its notice";
        assert_eq!(found, Look::Failed(text.to_owned()));
    }

    #[test]
    fn missing_bytes_are_reported_with_what_arrived() {
        let (mut late, at) = arrival(7);
        assert_eq!(late.look(&seen(7, 4096), at), Look::Again);
        let found = late.look(&seen(7, 4096), at + MAX_LATENESS);
        let text = "64 KiB was incomplete 100 ms after its notice: the first 4 KiB are right";
        assert_eq!(found, Look::Failed(text.to_owned()));
        let (mut read, at) = arrival(FIRST_READ);
        let found = read.look(&seen(FIRST_READ, 0), at + MAX_LATENESS);
        let text =
            "8 bytes was incomplete 100 ms after its completion: the first 0 bytes are right";
        assert_eq!(found, Look::Failed(text.to_owned()));
    }

    #[test]
    fn every_part_of_a_burst_counts() {
        let (mut arrival, at) = arrival(BURST);
        let mut snapshot = seen(BURST, usize::MAX);
        snapshot.parts[3][65_535] ^= 1;
        assert_eq!(arrival.look(&snapshot, at), Look::Again);
        let found = arrival.look(&seen(BURST, usize::MAX), at + 700 * MICROSECOND);
        let text = "64 KiB arrived 700 µs after its notice";
        assert_eq!(found, Look::Failed(text.to_owned()));
    }
}
