//! Words of memory that all workers share: they end and resume workers, and request turns.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ipc::Words;

use super::schedule::TIMEOUT;
use crate::worker_group::{LONGEST, SharedSegment};
use command::exit::{Exit, Failure};

/// The word that ends services and other waiting workers.
const END_WORD: usize = 0;
/// Ended pauses: two lines, for readers that pause independently.
const RESUME_WORDS: usize = 1;
/// Requested and completed turns of the ring throughput baseline.
const WIRE_WORDS: (usize, usize) = (3, 4);
/// Common words of all workers.
pub(super) const WORDS: usize = 5;
/// Longer than one sleep of a paused worker.
const WAKEUP_TIME: Duration = Duration::from_millis(4);

/// Ends all waiting workers.
pub(super) fn end_all(shared: &SharedSegment) -> Result<(), Failure> {
    shared.part()?.store(END_WORD, 1, Ordering::Release);
    Ok(())
}

pub(super) fn has_ended(shared: &SharedSegment) -> Result<bool, Failure> {
    Ok(shared.part()?.load(END_WORD, Ordering::Acquire) != 0)
}

/// Ends the pause of a line of readers.
pub(super) fn next_turn(shared: &SharedSegment, line: usize) -> Result<(), Failure> {
    shared.part()?.fetch_add(RESUME_WORDS + line, 1);
    // The pause must not be awaited while a message is in flight.
    std::thread::sleep(WAKEUP_TIME);
    Ok(())
}

/// Requests a turn of the ring throughput baseline, and waits for it.
pub(super) fn wire_turn(shared: &SharedSegment) -> Result<(), Failure> {
    let requested = shared.part()?.fetch_add(WIRE_WORDS.0, 1) + 1;
    await_word(shared, WIRE_WORDS.1, requested, 2 * TIMEOUT, "for the ring throughput baseline")
}

/// Waits until a word has this value, or a higher one.
fn await_word(
    shared: &SharedSegment,
    word: usize,
    least: u64,
    longest: Duration,
    what: &str,
) -> Result<(), Failure> {
    let end = Instant::now() + longest;
    while shared.part()?.load(word, Ordering::Acquire) < least {
        if Instant::now() > end {
            return Err(Failure::new(Exit::Deadline, format!("timed out waiting {what}")));
        }
        std::thread::sleep(WAKEUP_TIME / 4);
    }
    Ok(())
}

/// Number of requested turns of the ring throughput baseline.
pub(super) fn wire_asked(shared: &SharedSegment) -> Result<u64, Failure> {
    Ok(shared.part()?.load(WIRE_WORDS.0, Ordering::Acquire))
}

/// Reports so many turns as completed.
pub(super) fn wire_done(shared: &SharedSegment, turns: u64) -> Result<(), Failure> {
    shared.part()?.store(WIRE_WORDS.1, turns, Ordering::Release);
    Ok(())
}

/// Pauses until this line of readers was resumed so often.
pub(super) fn pause(shared: &SharedSegment, line: usize, pauses: u64) -> Result<(), Failure> {
    await_word(shared, RESUME_WORDS + line, pauses, LONGEST, "to be resumed")
}
