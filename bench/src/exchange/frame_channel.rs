//! The channel between the two processes: two pipes, or a connection.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::frame::{Decoder, Frame, encode};
use super::plan::{Plan, STALL_TIMEOUT};
use crate::process::set_nonblocking;
use command::exit::{Exit, Failure};

/// How long the other side may leave the channel full.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Result of a poll.
#[derive(Debug)]
pub(crate) enum Received {
    Frame(Frame),
    Nothing,
    /// The other process closed its end, or exited.
    Closed,
}

/// Frames in both directions, without blocking longer than a timeout.
#[derive(Debug)]
pub(crate) struct FrameChannel {
    reader: File,
    writer: File,
    decoder: Decoder,
}

impl FrameChannel {
    /// From two pipes, or from a connection that is passed twice.
    pub(crate) fn new(
        reader: impl Into<OwnedFd>,
        writer: impl Into<OwnedFd>,
    ) -> Result<Self, Failure> {
        let (reader, writer) = (File::from(reader.into()), File::from(writer.into()));
        set_nonblocking(&reader)?;
        set_nonblocking(&writer)?;
        Ok(Self { reader, writer, decoder: Decoder::default() })
    }

    /// A second handle, to send on.
    pub(crate) fn try_clone(&self) -> Result<Self, Failure> {
        let clone = |file: &File| file.try_clone().map_err(|error| broken("duplicate", &error));
        let (reader, writer) = (clone(&self.reader)?, clone(&self.writer)?);
        Ok(Self { reader, writer, decoder: Decoder::default() })
    }

    /// The plan, which is the first frame.
    pub(crate) fn plan(&mut self) -> Result<Plan, Failure> {
        match self.wait_for("the plan", STALL_TIMEOUT)? {
            Received::Frame(Frame::Plan(plan)) => Ok(plan),
            Received::Frame(_) => Err(Failure::failed("the first frame is not a plan")),
            Received::Closed | Received::Nothing => {
                Err(Failure::failed("the other process has exited"))
            }
        }
    }

    /// Reports a failure to the other process; false if it is gone.
    pub(crate) fn report(&mut self, failure: &Failure) -> bool {
        let message = failure.to_string().chars().take(4000).collect();
        let frame = Frame::Failed { exit: failure.exit() as i32, message };
        !failure.is_silent() && self.send(&frame).unwrap_or(false)
    }

    /// Sends a frame; false if the other process has exited.
    pub(crate) fn send(&mut self, frame: &Frame) -> Result<bool, Failure> {
        let bytes = encode(frame)?;
        let deadline = Instant::now() + SEND_TIMEOUT;
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            match self.writer.write(rest) {
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if is_gone(error.kind()) => return Ok(false),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if !wait(&self.writer, PollFlags::POLLOUT, deadline)? {
                        return Err(deadline_failure(
                            "the other process to take a frame",
                            SEND_TIMEOUT,
                        ));
                    }
                }
                Err(error) => return Err(broken("write to", &error)),
            }
        }
        Ok(true)
    }

    /// The next frame, if one has arrived.
    pub(crate) fn poll(&mut self) -> Result<Received, Failure> {
        loop {
            if let Some(frame) = self.decoder.next()? {
                return Ok(Received::Frame(frame));
            }
            let mut piece = [0; 4096];
            match self.reader.read(&mut piece) {
                Ok(0) => return Ok(Received::Closed),
                Ok(length) => self.decoder.push(&piece[..length]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    return Ok(Received::Nothing);
                }
                Err(error) if is_gone(error.kind()) => return Ok(Received::Closed),
                Err(error) => return Err(broken("read from", &error)),
            }
        }
    }

    /// Blocks until a frame arrives or the other process has exited.
    pub(crate) fn wait_for(&mut self, what: &str, timeout: Duration) -> Result<Received, Failure> {
        let deadline = Instant::now() + timeout;
        loop {
            match self.poll()? {
                Received::Nothing => {
                    if !wait(&self.reader, PollFlags::POLLIN, deadline)? {
                        return Err(deadline_failure(what, timeout));
                    }
                }
                found => return Ok(found),
            }
        }
    }
}

/// Does this error mean that the other side has exited? A connection is reset if the other side
/// exits with unread data.
fn is_gone(kind: ErrorKind) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset};
    matches!(kind, BrokenPipe | ConnectionReset | ConnectionAborted)
}

fn broken(doing: &str, error: &std::io::Error) -> Failure {
    Failure::failed(format!("{doing} the pipe to the other process failed: {error}"))
}

fn deadline_failure(what: &str, after: Duration) -> Failure {
    Failure::new(Exit::Deadline, format!("timed out after {after:?} waiting for {what}"))
}

/// False if the deadline has passed.
fn wait(file: &File, events: PollFlags, deadline: Instant) -> Result<bool, Failure> {
    let remaining = deadline.saturating_duration_since(Instant::now());
    if remaining.is_zero() {
        return Ok(false);
    }
    let mut entries = [PollFd::new(file.as_fd(), events)];
    let timeout = PollTimeout::try_from(remaining.as_millis().max(1)).unwrap_or(PollTimeout::MAX);
    match poll(&mut entries, timeout) {
        // Interrupted, or no event yet: the caller polls again.
        Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(true),
        Err(error) => Err(Failure::failed(format!("poll: {}", error.desc()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (FrameChannel, FrameChannel) {
        let (read_here, write_there) = std::io::pipe().unwrap();
        let (read_there, write_here) = std::io::pipe().unwrap();
        (
            FrameChannel::new(read_here, write_here).unwrap(),
            FrameChannel::new(read_there, write_there).unwrap(),
        )
    }

    #[test]
    fn frames_go_both_ways() {
        let (mut here, mut there) = pair();
        assert!(matches!(there.poll().unwrap(), Received::Nothing));
        assert!(here.send(&Frame::Barrier).unwrap());
        assert!(here.send(&Frame::Heartbeat).unwrap());
        assert!(matches!(there.poll().unwrap(), Received::Frame(Frame::Barrier)));
        let found = there.wait_for("a frame", Duration::from_secs(1)).unwrap();
        assert!(matches!(found, Received::Frame(Frame::Heartbeat)));
        assert!(there.send(&Frame::Barrier).unwrap());
        assert!(matches!(here.poll().unwrap(), Received::Frame(Frame::Barrier)));
    }

    #[test]
    fn wait_ends_at_its_deadline() {
        let (mut here, _there) = pair();
        let failure = here.wait_for("a frame", Duration::from_millis(20)).unwrap_err();
        assert_eq!(failure.exit(), Exit::Deadline);
        assert!(failure.to_string().contains("a frame"));
    }

    #[test]
    fn closed_pipe_is_reported() {
        let (mut here, there) = pair();
        drop(there);
        assert!(matches!(here.poll().unwrap(), Received::Closed));
        assert!(!here.send(&Frame::Barrier).unwrap());
    }

    #[test]
    fn reset_connection_is_reported_as_closed() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let here = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (there, _) = listener.accept().unwrap();
        let mut here = FrameChannel::new(here.try_clone().unwrap(), here).unwrap();
        assert!(here.send(&Frame::Barrier).unwrap());
        // The frame is unread: the system resets the connection.
        drop(there);
        let found = here.wait_for("the end", Duration::from_secs(5)).unwrap();
        assert!(matches!(found, Received::Closed), "{found:?}");
        assert!(!here.send(&Frame::Barrier).unwrap());
    }

    #[test]
    fn invalid_data_is_an_error() {
        let (mut here, mut there) = pair();
        there.writer.write_all(b"hello, world\n").unwrap();
        let failure = here.poll().unwrap_err();
        assert!(failure.to_string().contains("cannot be read"), "{failure}");
    }
}
