//! The connections to launchers that this process has opened.
//!
//! A connection stays open until the process exits: an MPI library may use it after this one, and
//! the launcher takes the end of a connection for a crash. At exit the launcher is told that the
//! process ends, unless an MPI library has yet to do that.
#![allow(unsafe_code)]

use std::sync::{Mutex, Once};
use std::time::{Duration, Instant};

use nix::libc;
use threads::lock;

use super::super::error::{CONNECT, Error, ErrorKind, Result};
use super::descriptor::Descriptor;
use super::mpi::{self, MpiState};
use super::session::Session;
use super::version::PmiVersion;
use super::{wire1, wire2};

/// How long the exit of a process waits for a launcher that does not answer.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// Which connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Key {
    /// An inherited socket.
    Inherited(Descriptor),
    /// The launcher's address, and the number of this process there.
    Address(String, u32),
}

#[derive(Debug)]
enum State {
    /// By a `Pmi`, or it is being opened.
    InUse,
    Idle(Session),
    /// An exchange failed. The session stays, so that its connection stays open.
    Failed(Error, Option<Session>),
}

#[derive(Debug)]
struct Entry {
    key: Key,
    /// The process that opened it.
    process: u32,
    /// Known when it is open.
    socket: Option<(Descriptor, PmiVersion)>,
    state: State,
}

static ENTRIES: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

fn change(key: &Key, how: impl FnOnce(&mut Entry)) {
    if let Some(entry) = lock(&ENTRIES).iter_mut().find(|entry| entry.key == *key) {
        how(entry);
    }
}

/// The idle session of this connection, or None if it must be opened. It is in use afterwards.
pub(super) fn take(key: &Key) -> Result<Option<Session>> {
    let process = std::process::id();
    let mut entries = lock(&ENTRIES);
    let Some(entry) = entries.iter_mut().find(|entry| entry.key == *key) else {
        entries.push(Entry { key: key.clone(), process, socket: None, state: State::InUse });
        return Ok(None);
    };
    if entry.process != process {
        return Err(of_fork(CONNECT));
    }
    match std::mem::replace(&mut entry.state, State::InUse) {
        State::Idle(session) => Ok(Some(session)),
        State::InUse => {
            let detail = "this process exchanges through the launcher already. Drop the other \
                          exchange first";
            Err(Error::new(CONNECT, ErrorKind::Unavailable, detail))
        }
        State::Failed(error, session) => {
            entry.state = State::Failed(error.clone(), session);
            Err(error)
        }
    }
}

pub(super) fn opened(key: &Key, session: &Session) {
    static REGISTER: Once = Once::new();
    let client = session.client();
    change(key, |entry| entry.socket = Some((client.descriptor(), client.version())));
    REGISTER.call_once(|| {
        // SAFETY: the function may run at any time before this library is unloaded. If there is no
        // space for it, the launcher takes the exit for a crash.
        unsafe { libc::atexit(finalize_at_exit) };
    });
}

/// The connection could not be opened. An inherited one is not tried again, because answers to what
/// was sent may still arrive.
pub(super) fn not_opened(key: &Key, error: &Error) {
    match key {
        Key::Address(..) => lock(&ENTRIES).retain(|entry| entry.key != *key),
        Key::Inherited(_) => change(key, |entry| entry.state = State::Failed(error.clone(), None)),
    }
}

pub(super) fn put_back(key: &Key, session: Session, failed: Option<Error>) {
    let state = match failed {
        None => State::Idle(session),
        Some(error) => State::Failed(error, Some(session)),
    };
    change(key, |entry| entry.state = state);
}

/// The error for the child of a fork.
pub(super) fn of_fork(operation: &'static str) -> Error {
    let detail = "this process is a fork of the rank that has connected. Call it in the process \
                  that the launcher started";
    Error::new(operation, ErrorKind::Unavailable, detail)
}

/// Tells the launchers that this process ends as it should.
extern "C" fn finalize_at_exit() {
    let deadline = Instant::now() + EXIT_TIMEOUT;
    // If another thread stopped while it held the lock, there is nothing to be done.
    let Ok(entries) = ENTRIES.try_lock() else { return };
    let process = std::process::id();
    for entry in entries.iter().filter(|entry| entry.process == process) {
        match entry.socket {
            // The program forgot MPI_Finalize, which the launcher is to know.
            Some(_) if mpi::state() == MpiState::Initialized => {}
            Some((descriptor, version)) if descriptor.is_same() => {
                finalize(descriptor, version, deadline);
            }
            _ => {}
        }
    }
}

/// Sends the last request, and waits for the answer: launchers fail if they cannot send it.
fn finalize(descriptor: Descriptor, version: PmiVersion, deadline: Instant) {
    let (request, answer) = match version {
        PmiVersion::One => (wire1::encode("finalize", &[]), "cmd=finalize_ack"),
        PmiVersion::Two => (wire2::encode("finalize", &[]), "cmd=finalize-response"),
    };
    if descriptor.send(&request, deadline).is_err() {
        return;
    }
    // After a failed exchange the answers to earlier requests come first.
    let mut received: Vec<u8> = Vec::new();
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = descriptor.receive(&mut bytes, deadline) {
        received.extend(&bytes[..count]);
        if received.windows(answer.len()).any(|part| part == answer.as_bytes()) {
            return;
        }
        received.drain(..received.len().saturating_sub(answer.len()));
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Ends a connection to a launcher that has sent this already, and returns the time.
    fn time_of(version: PmiVersion, sent: &[u8]) -> Duration {
        let (here, mut there) = UnixStream::pair().unwrap();
        there.write_all(sent).unwrap();
        let descriptor = Descriptor::of_stream(here.as_raw_fd()).unwrap();
        let begin = Instant::now();
        finalize(descriptor, version, begin + EXIT_TIMEOUT);
        let time = begin.elapsed();
        drop(here);
        let mut request = String::new();
        there.read_to_string(&mut request).unwrap();
        assert!(request.ends_with("cmd=finalize\n") || request.ends_with("cmd=finalize;"));
        time
    }

    #[test]
    fn exit_waits_for_the_answer_within_its_limit() {
        let late = b"cmd=barrier_out\ncmd=finalize_ack\n";
        assert!(time_of(PmiVersion::One, late) < EXIT_TIMEOUT);
        assert!(time_of(PmiVersion::Two, b"34    cmd=finalize-response;rc=0;") < EXIT_TIMEOUT);
        for silent in [&b""[..], b"cmd=barrier_out\n"] {
            let time = time_of(PmiVersion::One, silent);
            assert!(time >= EXIT_TIMEOUT && time < 30 * EXIT_TIMEOUT);
        }
    }

    #[test]
    fn exit_does_not_wait_for_a_launcher_that_has_ended() {
        let (here, there) = UnixStream::pair().unwrap();
        let descriptor = Descriptor::of_stream(here.as_raw_fd()).unwrap();
        drop(there);
        let begin = Instant::now();
        finalize(descriptor, PmiVersion::One, begin + 30 * EXIT_TIMEOUT);
        assert!(begin.elapsed() < 30 * EXIT_TIMEOUT);
    }
}
