//! Waits of calls with an agent. A thread that waits for an operation or an event lets other
//! threads use the agent meanwhile.

use std::cell::Cell;
use std::time::{Duration, Instant};

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

/// The failure of a call with this timeout: of the whole wait, not of its last `slice`.
pub(super) fn failure_of_wait(
    timeout: Timeout,
    slice: Option<Duration>,
    error: transfer::Error,
) -> Failure {
    if error.kind() != ErrorKind::DeadlineExceeded {
        return error.into();
    }
    let mut text = error.to_string();
    let mut status = Status::DeadlineExceeded;
    if timeout == Timeout::Now {
        status = Status::WouldBlock;
        text = text.replacen("deadline exceeded", "would block", 1);
    } else if let Some(slice) = slice {
        let whole = timeout.as_duration();
        text = text.replacen(&format!("after {slice:?}"), &format!("after {whole:?}"), 1);
    }
    Failure::from_text(status, error.operation(), text)
}

/// The rest of a timeout.
fn remaining(timeout: Timeout, end: Instant) -> Timeout {
    match timeout {
        Timeout::For(_) => Timeout::For(end.saturating_duration_since(Instant::now())),
        other => other,
    }
}

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
            let piece = self
                .agent
                .with(operation, remaining(timeout, end), |agent| Ok(attempt(agent, slice)))?;
            match piece {
                Piece::Over(outcome) => return outcome,
                Piece::Pending(error) if left <= SLICE => {
                    return Err(failure_of_wait(timeout, Some(slice), error));
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

    /// Waits for an event. Without operations in flight, other threads can use the agent all the
    /// time.
    pub(super) fn next_event(&self, operation: Operation, timeout: Timeout) -> Result<Event> {
        let (end, interruption) = (timeout.end(), Interruption::watch());
        let in_flight = Cell::new(0);
        let mut poll = || {
            let polled = self.agent.with(operation, remaining(timeout, end), |agent| {
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
