//! The reading side of a ring between two programs.

use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::super::memory::ChunkView;
use super::super::port::{Port, ReceiverId};
use super::super::receiver::ReceiverStatistics;
use super::progress_thread::{ProgressThread, WAIT_SLICE};
use crate::waiting::Deadline;
use crate::{Error, ErrorKind, Result};

const READ: &str = "reading a ring";
const CLOSE: &str = "closing a ring";

/// Reads the messages of a ring that another program writes: see [`listen`](super::listen).
///
/// A thread of its own drives the ring while no call does, so that the writer goes on while this program
/// does something else, as far as the ring has room.
///
/// The errors of its calls say what became of the writer:
///
/// - [`Closed`](ErrorKind::Closed): the writer closed the ring, and everything was read
/// - [`ConnectionLost`](ErrorKind::ConnectionLost): the writer ended without that, or the connection
///   broke. What came before was given out first; at most a last message is missing in part or whole,
///   and those that were still on their way
///
/// A forked child cannot use its parent's: `NotSupported`. What it drops stays as it is.
#[derive(Debug)]
pub struct RingReader {
    progress_thread: ProgressThread,
    ring: ReceiverId,
    largest: u64,
    /// What came so far of a message that is put together.
    partial: Vec<u8>,
    /// Is a message given out in chunks, and not to its end yet?
    is_chunked: bool,
}

impl RingReader {
    pub(super) fn start(
        port: Port,
        ring: ReceiverId,
        stream: TcpStream,
        peer: SocketAddr,
        provider: String,
        largest: u64,
    ) -> Result<Self> {
        let progress_thread = ProgressThread::start(port, stream, peer, provider)?;
        Ok(Self { progress_thread, ring, largest, partial: Vec::new(), is_chunked: false })
    }

    /// Waits for the next message, and gives it whole.
    ///
    /// # Errors
    /// `Closed`, `ConnectionLost`: see [`RingReader`]; `DeadlineExceeded`, after which the message goes
    /// on with the next call; `InvalidArgument` if the message's first part was taken by
    /// [`receive_chunk`](Self::receive_chunk).
    pub fn receive(&mut self, timeout: Duration) -> Result<Vec<u8>> {
        if self.is_chunked {
            let detail = "a message was taken in part by receive_chunk: take the rest by that, too";
            return Err(self.progress_thread.error(ErrorKind::InvalidArgument, READ, detail));
        }
        let deadline = Deadline::after(timeout);
        loop {
            let view = self.next(&deadline, timeout)?;
            let from = self.partial.len();
            self.partial.resize(from + view.len(), 0);
            view.read(0, &mut self.partial[from..])?;
            if view.is_last() {
                return Ok(std::mem::take(&mut self.partial));
            }
            // Also where chunks come all the time.
            if deadline.has_passed() {
                return Err(self.deadline_exceeded(timeout));
            }
        }
    }

    /// Waits for the next chunk of a message, and gives it where it lies: without a copy, and also of
    /// messages that are longer than the ring. Its place is the writer's again when the view is dropped.
    ///
    /// ```
    /// use std::time::Duration;
    /// use fabric::ring;
    /// # let timeout = Duration::from_secs(10);
    /// # let mut listener = ring::listen("127.0.0.1:0")?;
    /// # let address = listener.address();
    /// # let writing = std::thread::spawn(move || {
    /// #     let mut writer = ring::connect(address, timeout)?;
    /// #     writer.send(&[7; 100_000], timeout)?;
    /// #     writer.close(timeout)
    /// # });
    /// let mut reader = listener.accept(timeout)?;
    /// let mut length = 0;
    /// loop {
    ///     let view = reader.receive_chunk(timeout)?;
    ///     length += view.len();
    ///     if view.is_last() {
    ///         break;
    ///     }
    /// }
    /// assert_eq!(length, 100_000);
    /// # writing.join().expect("the writer panicked")?;
    /// # Ok::<(), fabric::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`receive`](Self::receive); `InvalidArgument` if a message came in part by that.
    pub fn receive_chunk(&mut self, timeout: Duration) -> Result<ChunkView> {
        if !self.partial.is_empty() {
            let detail = "a message came in part by receive: take the rest by that, too";
            return Err(self.progress_thread.error(ErrorKind::InvalidArgument, READ, detail));
        }
        let view = self.next(&Deadline::after(timeout), timeout)?;
        self.is_chunked = !view.is_last();
        Ok(view)
    }

    fn next(&mut self, deadline: &Deadline, timeout: Duration) -> Result<ChunkView> {
        let mut call = self.progress_thread.call(READ)?;
        loop {
            match call.receive(self.ring, WAIT_SLICE.min(deadline.left())) {
                Ok(view) if view.header().length > self.largest => {
                    let detail = format!(
                        "the writer sent a message of {} bytes, where at most {} are agreed",
                        view.header().length,
                        self.largest
                    );
                    return Err(self.progress_thread.error(ErrorKind::Truncated, READ, detail));
                }
                Ok(view) => return Ok(view),
                Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {}
                Err(error) => return Err(error),
            }
            self.progress_thread.check_peer(READ)?;
            if deadline.has_passed() {
                return Err(self.deadline_exceeded(timeout));
            }
        }
    }

    fn deadline_exceeded(&self, timeout: Duration) -> Error {
        let received = self.partial.len();
        let detail = format!(
            "the next message did not arrive within {timeout:?}: {received} bytes of it are here"
        );
        self.progress_thread.error(ErrorKind::DeadlineExceeded, READ, detail)
    }

    /// Where the writer is.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.progress_thread.peer()
    }

    /// The provider that carries the messages.
    #[must_use]
    pub fn provider(&self) -> &str {
        self.progress_thread.provider()
    }

    /// Closes the ring: the writer is told that nothing is read any more. What was not read is lost.
    /// A reader that is dropped without that is one that died, to its writer.
    ///
    /// # Errors
    /// `DeadlineExceeded` if the writer does not answer; the ring is closed all the same.
    pub fn close(self, timeout: Duration) -> Result<ReceiverStatistics> {
        let deadline = Deadline::after(timeout);
        let mut call = self.progress_thread.call(CLOSE)?;
        let statistics = call.close_receiver(self.ring)?;
        let mut idle = 0;
        let closed = loop {
            if call.rings().0 == 0 || self.progress_thread.check_peer(CLOSE).is_err() {
                break Ok(());
            }
            if deadline.has_passed() {
                let detail = format!("the writer did not answer within {timeout:?}");
                break Err(self.progress_thread.error(ErrorKind::DeadlineExceeded, CLOSE, detail));
            }
            if let Err(error) = call.progress(&mut idle, WAIT_SLICE.min(deadline.left())) {
                break Err(error);
            }
        };
        drop(call);
        self.progress_thread.close().and(closed)?;
        Ok(statistics)
    }
}
