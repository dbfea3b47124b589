//! Waits of calls with an agent. A thread that waits for an operation or an event lets other
//! threads use the agent meanwhile.

use std::cell::Cell;
use std::time::{Duration, Instant};

use gpu::Stream;
use ipc::Interruption;
use transfer::{Agent, Done, ErrorKind, Event, PeerId, Token};

use super::OpenAgent;
use crate::exclusive::interrupted;
use crate::failure::{Failure, Operation, Result};
use crate::status::Status;
use crate::timeout::{CLOSE_CHECK_INTERVAL, Timeout};

/// How long a wait for operations keeps the agent from other threads.
const SLICE: Duration = Duration::from_millis(2);
/// How long a thread that gives up the agent waits for the other thread to take it.
const HANDOVER: Duration = Duration::from_micros(100);
/// How often operations in flight need progress while the thread waits for an event.
const PROGRESS_INTERVAL: Duration = Duration::from_micros(200);

/// Without allocation, for frequent polls.
const NO_EVENT: Failure = Failure::fixed(
    Status::WouldBlock,
    c"wait for event",
    c"wait for event failed: would block: no event",
);

const NOT_COMPLETE: Failure = Failure::fixed(
    Status::WouldBlock,
    c"wait for operation",
    c"wait for operation failed: would block: it is in flight",
);

/// What a piece of a wait has found.
enum Piece<T> {
    Over(Result<T>),
    /// Not over yet.
    Pending(transfer::Error),
}

impl OpenAgent {
    /// Waits in slices, between which other threads use the agent.
    fn wait_in_slices<T>(
        &self,
        operation: Operation,
        timeout: Timeout,
        mut attempt: impl FnMut(&mut Agent, Duration) -> Piece<T>,
    ) -> Result<T> {
        let (end, interruption) = (timeout.end(), Interruption::watch());
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let slice = left.min(SLICE);
            let remaining = timeout.remaining(end);
            let piece = self.agent.with(operation, remaining, |agent| Ok(attempt(agent, slice)))?;
            match piece {
                Piece::Over(outcome) => return outcome,
                Piece::Pending(error) if left <= SLICE => {
                    return Err(Failure::of_wait(timeout, Some(slice), error));
                }
                Piece::Pending(_) if interruption.occurred() => return Err(interrupted(operation)),
                Piece::Pending(_) if self.agent.is_wanted() => {
                    ipc::sleep_interruptible(HANDOVER);
                }
                Piece::Pending(_) => {}
            }
        }
    }

    /// Waits for an operation.
    pub(super) fn wait(
        &self,
        operation: Operation,
        token: Token,
        timeout: Timeout,
    ) -> Result<Done> {
        if timeout == Timeout::Now {
            return self.test(operation, token, timeout)?.ok_or(NOT_COMPLETE);
        }
        self.wait_in_slices(operation, timeout, |agent, slice| {
            let error = match agent.wait(token, slice) {
                Err(error) if error.kind() == ErrorKind::DeadlineExceeded => error,
                outcome => return Piece::Over(outcome.map_err(Failure::from)),
            };
            // The operation itself may have failed so; then its outcome was returned just now.
            match agent.test(token) {
                None => Piece::Pending(error),
                Some(Err(gone)) if gone.kind() == ErrorKind::Unknown => {
                    Piece::Over(Err(error.into()))
                }
                Some(outcome) => Piece::Over(outcome.map_err(Failure::from)),
            }
        })
    }

    /// The outcome of an operation, or None while it is in flight.
    pub(super) fn test(
        &self,
        operation: Operation,
        token: Token,
        timeout: Timeout,
    ) -> Result<Option<Done>> {
        self.agent.with(operation, timeout, |agent| Ok(agent.test(token).transpose()?))
    }

    /// Waits until all operations with a peer have completed.
    pub(super) fn flush(&self, operation: Operation, peer: PeerId, timeout: Timeout) -> Result<()> {
        self.wait_in_slices(operation, timeout, |agent, slice| match agent.flush(peer, slice) {
            Err(error) if error.kind() == ErrorKind::DeadlineExceeded => Piece::Pending(error),
            outcome => Piece::Over(outcome.map_err(Failure::from)),
        })
    }

    /// Lets a stream wait for an operation, as soon as that has begun.
    pub(super) fn delay_stream(
        &self,
        operation: Operation,
        token: Token,
        stream: &Stream,
        timeout: Timeout,
    ) -> Result<()> {
        self.wait_in_slices(operation, timeout, |agent, slice| {
            match agent.delay_stream(token, stream, slice) {
                Err(error) if error.kind() == ErrorKind::DeadlineExceeded => Piece::Pending(error),
                outcome => Piece::Over(outcome.map_err(Failure::from)),
            }
        })
    }

    /// Waits for an event. Without operations in flight, other threads can use the agent all the
    /// time.
    pub(super) fn next_event(&self, operation: Operation, timeout: Timeout) -> Result<Event> {
        let (end, interruption) = (timeout.end(), Interruption::watch());
        let in_flight = Cell::new(0);
        let mut poll = || {
            let polled = self.agent.with(operation, timeout.remaining(end), |agent| {
                agent.progress();
                let event = agent.poll_event();
                in_flight.set(agent.in_flight());
                Ok(event)
            });
            match polled {
                Ok(None) if interruption.occurred() => Some(Err(interrupted(operation))),
                polled => polled.transpose(),
            }
        };
        if timeout == Timeout::Now {
            return poll().unwrap_or(Err(NO_EVENT));
        }
        loop {
            let pause = if in_flight.get() > 0 { PROGRESS_INTERVAL } else { CLOSE_CHECK_INTERVAL };
            let now = Instant::now();
            if let Some(found) = self.watch.wait(end.min(now + pause), &mut poll) {
                return found;
            }
            if Instant::now() >= end {
                let detail = format!("no event after {:?}", timeout.as_duration());
                return Err(Failure::new(Status::DeadlineExceeded, operation, detail));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use transfer::Notice;

    use super::*;
    use crate::ffi::WithDefaults as _;
    use crate::layout::RawAgentOptions;

    /// An agent whose last notice waits for room at its peer.
    fn stuck() -> (OpenAgent, OpenAgent, PeerId, Token) {
        let options = RawAgentOptions::defaults(size_of::<RawAgentOptions>());
        let start = || OpenAgent::start(c"test", options).unwrap();
        let (here, there) = (start(), start());
        let card = there.with(c"test", |there| there.card().encode()).unwrap();
        let (peer, token) = here
            .with(c"test", |here| {
                let peer = here.connect(&card, Duration::from_secs(10))?;
                loop {
                    let token = here.notify(peer, Notice::new(1, &[])?)?;
                    if here.test(token).is_none() {
                        return Ok((peer, token));
                    }
                }
            })
            .unwrap();
        (here, there, peer, token)
    }

    #[test]
    fn message_of_a_timeout_has_the_whole_time() {
        let (here, _there, peer, token) = stuck();
        let whole = Timeout::For(Duration::from_millis(20));
        let failures = [
            here.wait(c"test", token, whole).unwrap_err(),
            here.flush(c"test", peer, whole).unwrap_err(),
        ];
        for failure in failures {
            assert_eq!(failure.status, Status::DeadlineExceeded);
            assert!(failure.message().contains("after 20ms"), "{failure:?}");
        }
        let failure = here.flush(c"test", peer, Timeout::Now).unwrap_err();
        assert_eq!(failure.status, Status::WouldBlock);
        assert!(failure.message().contains("would block"), "{failure:?}");
        let failure = here.wait(c"test", token, Timeout::Now).unwrap_err();
        assert_eq!(failure.status, Status::WouldBlock);
    }

    #[test]
    fn agent_is_used_by_others_during_a_flush_and_closed() {
        let (here, _there, peer, _) = stuck();
        let here = Arc::new(here);
        let flushing = std::thread::spawn({
            let here = Arc::clone(&here);
            move || here.flush(c"test", peer, Timeout::Forever)
        });
        let start = Instant::now();
        for _ in 0..20 {
            here.with(c"test", |agent| Ok(agent.in_flight())).unwrap();
        }
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        here.agent.end();
        let failure = flushing.join().unwrap().unwrap_err();
        assert_eq!(failure.status, Status::Closed, "{failure:?}");
    }

    /// The operation's outcome is returned, and not taken for a timeout of the call.
    #[test]
    fn operation_completes_while_it_is_waited_for() {
        let (here, there, peer, token) = stuck();
        let taking = std::thread::spawn(move || {
            while there.next_event(c"test", Timeout::For(Duration::from_millis(300))).is_ok() {}
        });
        here.wait(c"test", token, Timeout::Forever).unwrap();
        here.flush(c"test", peer, Timeout::For(Duration::from_secs(60))).unwrap();
        let failure = here.wait(c"test", token, Timeout::Now).unwrap_err();
        assert_eq!(failure.status, Status::NotFound);
        taking.join().unwrap();
    }
}
