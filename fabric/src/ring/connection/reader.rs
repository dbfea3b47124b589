//! The reader of a ring between two programs.

use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::super::memory::ChunkView;
use super::super::port::{Port, ReceiverId};
use super::super::receiver::ReceiverStatistics;
use super::progress_thread::{ProgressThread, WAIT_SLICE};
use crate::waiting::Deadline;
use crate::{Error, ErrorKind, Result};

const READ: &str = "read from ring";
const CLOSE: &str = "close ring";

/// Reads the messages of a ring that another program writes: see [`listen`](super::listen).
///
/// A background thread drives the ring between calls, so the writer can continue as far as the ring
/// has room.
///
/// Errors report the state of the writer:
///
/// - [`Closed`](ErrorKind::Closed): the writer closed the ring, and every message was read
/// - [`ConnectionLost`](ErrorKind::ConnectionLost): the writer exited without closing, or the
///   connection broke. Complete messages that had arrived are returned first; a partial last
///   message and messages in flight are lost
///
/// A forked child cannot use its parent's reader: `NotSupported`. Dropping it there has no effect.
#[derive(Debug)]
pub struct RingReader {
    progress_thread: ProgressThread,
    ring: ReceiverId,
    largest: u64,
    /// The part of a message received so far.
    partial: Vec<u8>,
    /// Was a part of a message returned by `receive_chunk`?
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

    /// Waits for the next message and returns it.
    ///
    /// # Errors
    /// `Closed`, `ConnectionLost`: see [`RingReader`]; `DeadlineExceeded`, after which the next
    /// call continues the message; `InvalidArgument` if [`receive_chunk`](Self::receive_chunk) took
    /// the first part of the message.
    pub fn receive(&mut self, timeout: Duration) -> Result<Vec<u8>> {
        if self.is_chunked {
            let detail = "receive_chunk took a part of the message. Continue with receive_chunk";
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
            // Checked here, too, since chunks may arrive without a break.
            if deadline.has_passed() {
                return Err(self.deadline_exceeded(timeout));
            }
        }
    }

    /// Waits for the next chunk of a message and returns it in place: without a copy, and also of
    /// messages that are longer than the ring. Dropping the view releases its part of the ring.
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
    /// As [`receive`](Self::receive); `InvalidArgument` if `receive` took a part of the message.
    pub fn receive_chunk(&mut self, timeout: Duration) -> Result<ChunkView> {
        if !self.partial.is_empty() {
            let detail = "receive took a part of the message. Continue with receive";
            return Err(self.progress_thread.error(ErrorKind::InvalidArgument, READ, detail));
        }
        let view = self.next(&Deadline::after(timeout), timeout)?;
        self.is_chunked = !view.is_last();
        Ok(view)
    }

    fn next(&mut self, deadline: &Deadline, timeout: Duration) -> Result<ChunkView> {
        let mut port = self.progress_thread.lock_port(READ)?;
        loop {
            match port.receive(self.ring, WAIT_SLICE.min(deadline.left())) {
                Ok(view) if view.header().length > self.largest => {
                    let detail = format!(
                        "the message has {} bytes, the limit is {}",
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
            "the next message did not arrive within {timeout:?}: {received} bytes of it arrived"
        );
        self.progress_thread.error(ErrorKind::DeadlineExceeded, READ, detail)
    }

    /// The writer's address.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.progress_thread.peer()
    }

    /// The provider that carries the messages.
    #[must_use]
    pub fn provider(&self) -> &str {
        self.progress_thread.provider()
    }

    /// Closes the ring and notifies the writer. Unread messages are lost. If a reader is dropped
    /// instead, its writer gets `ConnectionLost`.
    ///
    /// # Errors
    /// `DeadlineExceeded` if the writer does not answer; the ring is closed in any case.
    pub fn close(self, timeout: Duration) -> Result<ReceiverStatistics> {
        let deadline = Deadline::after(timeout);
        let mut port = self.progress_thread.lock_port(CLOSE)?;
        let statistics = port.close_receiver(self.ring)?;
        let mut idle = 0;
        let closed = loop {
            if port.rings().0 == 0 || self.progress_thread.check_peer(CLOSE).is_err() {
                break Ok(());
            }
            if deadline.has_passed() {
                let detail = format!("the writer did not answer within {timeout:?}");
                break Err(self.progress_thread.error(ErrorKind::DeadlineExceeded, CLOSE, detail));
            }
            if let Err(error) = port.progress(&mut idle, WAIT_SLICE.min(deadline.left())) {
                break Err(error);
            }
        };
        drop(port);
        self.progress_thread.close().and(closed)?;
        Ok(statistics)
    }
}
