//! Calls that may never return, on threads that can be abandoned.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Longer timeouts are equal to this one, since points in time have a limit.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// The point in time at which a timeout that begins now ends.
pub(super) fn deadline(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(LONGEST)
}

/// The time until a deadline.
pub(super) fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Runs a call on a thread of its own; None if it does not return before the deadline. The thread
/// then remains, until the process ends or the call returns.
pub(super) fn run<T: Send + 'static>(
    thread_name: &str,
    deadline: Instant,
    call: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Option<T>> {
    let (sender, returned) = mpsc::sync_channel(1);
    let call = move || {
        let _ = sender.send(call());
    };
    threads::spawn(thread_name, call)?;
    match returned.recv_timeout(left(deadline)) {
        Ok(result) => Ok(Some(result)),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => Err(io::Error::other("a thread panicked")),
    }
}

/// What the system's resolver returned for a name; None if that is not known before the deadline,
/// which the resolver does not take.
pub(super) fn resolve(
    name: impl ToSocketAddrs + Send + 'static,
    deadline: Instant,
) -> io::Result<Option<io::Result<Vec<SocketAddr>>>> {
    run("fabricast-resolve", deadline, move || name.to_socket_addrs().map(Vec::from_iter))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_return_or_are_abandoned() {
        let soon = || deadline(Duration::from_millis(20));
        assert_eq!(run("call", deadline(Duration::MAX), || 7).unwrap(), Some(7));
        let (sender, receiver) = mpsc::channel::<()>();
        assert_eq!(run("call", soon(), move || receiver.recv().is_ok()).unwrap(), None);
        drop(sender);
    }
}
