//! Reading what a stream is still writing.

use std::time::Duration;

use gpu::Stream;

use super::Subscriber;
use crate::below;
use crate::error::Result;
use crate::pool::{Direction, Readiness};
use crate::sample::Sample;
use crate::topic::Entry;

const OPERATION: &str = "pull in the order of a stream";

impl Subscriber {
    /// The next message, for what is begun on this stream afterwards: if it was
    /// [published on a stream](crate::Loan::publish_on) and is not written yet, this stream waits
    /// for it, and the caller does not. Waits for a message as [`pull`](Self::pull) does.
    ///
    /// The stream goes on also if the message will never be written, since its publisher died.
    /// Only afterwards it is known [what came of it](Sample::readiness). The sample has to be
    /// held until the stream is through with it, or be [released there](Sample::release_on).
    ///
    /// [`Publisher::push_on`](crate::Publisher::push_on) has an example.
    ///
    /// # Errors
    /// As [`pull`](Self::pull); [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for a stream of
    /// another kind of device than the one that messages lie on. If the device refuses, the
    /// message is still the next one.
    pub fn pull_on(&mut self, stream: &Stream, patience: Duration) -> Result<Sample> {
        self.check_stream(stream)?;
        self.pull_in_time(OPERATION, patience, Some(stream))
    }

    /// As [`pull_on`](Self::pull_on), if there is a message now.
    ///
    /// # Errors
    /// As [`pull_on`](Self::pull_on), but for the deadline.
    pub fn try_pull_on(&mut self, stream: &Stream) -> Result<Option<Sample>> {
        self.check_stream(stream)?;
        self.try_pull_with(Some(stream))
    }

    fn check_stream(&self, stream: &Stream) -> Result<()> {
        self.shared.desk.house.check_fork(OPERATION)?;
        let pool = self.shared.desk.pool(Direction::Here);
        // Messages on the host are there when they are published.
        if pool.ledger().is_ordered() { pool.check_stream(OPERATION, stream) } else { Ok(()) }
    }

    /// Does anything go on that this one waits for, and that rings no bell?
    pub(super) fn waits_for_streams(&self) -> bool {
        self.shared.departures.has_any() || self.waits_for_a_stream()
    }

    /// Is the next message one that a stream is still writing?
    #[inline]
    pub(super) fn waits_for_a_stream(&self) -> bool {
        let is_ordered = |ahead: &Option<(u64, Entry)>| ahead.is_some_and(|it| it.1.turn.is_some());
        self.ahead.iter().any(is_ordered)
    }

    /// Of a message that a stream writes, and those behind it: the first that is there, or for
    /// which this stream waits from now on. None if there is none yet.
    #[cold]
    pub(super) fn take_in_order(
        &mut self,
        direction: Direction,
        mut taken: (u64, Entry),
        stream: Option<&Stream>,
    ) -> Result<Option<(u64, Entry)>> {
        loop {
            let (position, entry) = taken;
            let Some(turn) = entry.turn else { return Ok(Some(taken)) };
            let pool = self.shared.desk.pool(direction);
            match pool.ledger().readiness(entry.block, turn) {
                Some(Readiness::Ready) => return Ok(Some(taken)),
                Some(Readiness::Pending) => {
                    let Some(stream) = stream else {
                        self.ahead[direction as usize] = Some(taken);
                        return Ok(None);
                    };
                    let waits = pool.word_of(entry.block).and_then(|word| {
                        let waits = stream.wait_for_word(&word, turn.ready());
                        waits.map_err(|cause| below::of_device(OPERATION, cause))
                    });
                    return match waits {
                        Ok(()) => Ok(Some(taken)),
                        Err(error) => {
                            self.ahead[direction as usize] = Some(taken);
                            Err(error)
                        }
                    };
                }
                // It was removed, and what it had is gone; or this is no message. That is seen later.
                None => return Ok(Some(taken)),
                Some(Readiness::Poisoned) => {
                    self.shared.release(direction, position);
                    self.account.misses(1);
                }
            }
            match self.take_from(direction) {
                Some(next) => taken = next,
                None => return Ok(None),
            }
        }
    }
}
