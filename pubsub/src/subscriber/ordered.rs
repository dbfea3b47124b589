//! Pulling messages that a stream is still writing.

use std::time::Duration;

use gpu::Stream;

use super::Subscriber;
use crate::error::Result;
use crate::error_mapping;
use crate::pool::{Direction, Readiness};
use crate::sample::Sample;
use crate::topic::Entry;

const OPERATION: &str = "pull in stream order";

impl Subscriber {
    /// The next message, for work that is begun on this stream afterwards. If it was [published on
    /// a stream](crate::Loan::publish_on) and is not written yet, this stream waits for it, and the
    /// caller does not. Waits for a message as [`pull`](Self::pull) does.
    ///
    /// The stream continues even if the message will never be written, since its publisher died.
    /// Check [`readiness`](Sample::readiness) afterwards. Hold the sample until the stream has
    /// finished with it, or [release it there](Sample::release_on).
    ///
    /// [`Publisher::push_on`](crate::Publisher::push_on) has an example.
    ///
    /// # Errors
    /// As [`pull`](Self::pull); [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for a stream
    /// of another kind of device than that of the messages. If the device fails the call, the
    /// message remains the next one.
    pub fn pull_on(&mut self, stream: &Stream, timeout: Duration) -> Result<Sample> {
        self.check_stream(stream)?;
        self.pull_in_time(OPERATION, timeout, Some(stream))
    }

    /// As [`pull_on`](Self::pull_on), if there is a message now.
    ///
    /// # Errors
    /// As [`pull_on`](Self::pull_on), except for the deadline.
    pub fn try_pull_on(&mut self, stream: &Stream) -> Result<Option<Sample>> {
        self.check_stream(stream)?;
        self.try_pull_with(Some(stream))
    }

    fn check_stream(&self, stream: &Stream) -> Result<()> {
        self.shared.context.node.check_not_forked(OPERATION)?;
        let pool = self.shared.context.pool(Direction::Local);
        // Messages in host memory are complete when they are published.
        if pool.control().is_stream_ordered() {
            pool.check_stream(OPERATION, stream)
        } else {
            Ok(())
        }
    }

    /// Whether this subscriber waits for work that rings no doorbell.
    pub(super) fn is_waiting_for_streams(&self) -> bool {
        self.shared.deferred_releases.has_any() || self.is_next_unwritten()
    }

    /// Whether a stream is still writing the next message.
    #[inline]
    pub(super) fn is_next_unwritten(&self) -> bool {
        let is_stream_ordered = |lookahead: &Option<(u64, Entry)>| {
            lookahead.is_some_and(|it| it.1.sync_point.is_some())
        };
        self.lookahead.iter().any(is_stream_ordered)
    }

    /// From a message that a stream writes onwards: the first one that is written, or for which
    /// this stream waits from now on. None if there is none yet.
    #[cold]
    pub(super) fn take_stream_ordered(
        &mut self,
        direction: Direction,
        mut taken: (u64, Entry),
        stream: Option<&Stream>,
    ) -> Result<Option<(u64, Entry)>> {
        loop {
            let (position, entry) = taken;
            let Some(sync_point) = entry.sync_point else { return Ok(Some(taken)) };
            let pool = self.shared.context.pool(direction);
            match pool.control().readiness(entry.block, sync_point) {
                Some(Readiness::Ready) => return Ok(Some(taken)),
                Some(Readiness::Pending) => {
                    let Some(stream) = stream else {
                        self.lookahead[direction as usize] = Some(taken);
                        return Ok(None);
                    };
                    let wait = pool.sync_word(entry.block).and_then(|word| {
                        let wait = stream.wait_for_word(&word, sync_point.ready());
                        wait.map_err(|cause| error_mapping::from_device(OPERATION, cause))
                    });
                    return match wait {
                        Ok(()) => Ok(Some(taken)),
                        Err(error) => {
                            self.lookahead[direction as usize] = Some(taken);
                            Err(error)
                        }
                    };
                }
                // The subscriber was evicted, or this is no message: detected later.
                None => return Ok(Some(taken)),
                Some(Readiness::Poisoned) => {
                    self.shared.release(direction, position);
                    self.loss_tracker.add_missed(1);
                }
            }
            match self.take_from(direction) {
                Some(next) => taken = next,
                None => return Ok(None),
            }
        }
    }
}
