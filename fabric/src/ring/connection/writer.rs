//! The writer of a ring between two programs.

use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::super::memory::RegistrationScope;
use super::super::port::{Port, SenderId};
use super::super::sender::{Pushed, SenderStatistics};
use super::super::writer_state::Message;
use super::progress_thread::{PortGuard, ProgressThread, WAIT_SLICE};
use crate::waiting::Deadline;
use crate::{Access, ErrorKind, HostMemory, MemoryRegion, Result};

const WRITE: &str = "write to ring";
const FLUSH: &str = "flush ring";
const CLOSE: &str = "close ring";
/// Bytes of a slot: the longest chunk.
pub(super) const SLOT_LEN: usize = 64 << 10;
/// Slots that messages are copied into: the provider reads some while others are filled.
const SLOT_COUNT: usize = 16;

/// Writes messages into a ring that another program reads: see [`connect`](super::connect).
///
/// A sent message arrives without further calls: a background thread drives the ring between calls.
/// [`close`](Self::close) waits until everything was read.
///
/// Errors report the state of the reader:
///
/// - [`Closed`](ErrorKind::Closed): the reader closed the ring
/// - [`ConnectionLost`](ErrorKind::ConnectionLost): the reader exited without closing, or the
///   connection broke; unread messages are lost
///
/// A forked child cannot use its parent's writer: `NotSupported`. Dropping it there has no effect.
#[derive(Debug)]
pub struct RingWriter {
    progress_thread: ProgressThread,
    ring: SenderId,
    largest: u64,
    staging: Staging,
    /// A message that is partly written.
    unfinished: Option<Message>,
}

/// Registered memory that messages are copied into.
#[derive(Debug)]
struct Staging {
    region: MemoryRegion,
    /// Chunks up to this position must be locally complete before the slot is free.
    busy_to: [u64; SLOT_COUNT],
    next: usize,
}

impl RingWriter {
    pub(super) fn start(
        port: Port,
        ring: SenderId,
        stream: TcpStream,
        peer: SocketAddr,
        provider: String,
        largest: u64,
    ) -> Result<Self> {
        let memory = HostMemory::zeroed(SLOT_COUNT * SLOT_LEN)?;
        let region = RegistrationScope::of(port.endpoint()).register(memory, Access::WRITE)?;
        let staging = Staging { region, busy_to: [0; SLOT_COUNT], next: 0 };
        let progress_thread = ProgressThread::start(port, stream, peer, provider)?;
        Ok(Self { progress_thread, ring, largest, staging, unfinished: None })
    }

    /// Sends a message, of any length that the reader accepts. The bytes may be changed as soon as
    /// the call returns. Waits while the ring has no room.
    ///
    /// # Errors
    /// `Closed`, `ConnectionLost`: see [`RingWriter`]; `Truncated` if the message is longer than
    /// the reader accepts; `DeadlineExceeded`, after which the same message must be sent again:
    /// bytes already written are not written twice. `InvalidArgument` for another message.
    pub fn send(&mut self, message: &[u8], timeout: Duration) -> Result<()> {
        let deadline = Deadline::after(timeout);
        let length = message.len() as u64;
        if length > self.largest {
            let detail =
                format!("message of {length} bytes, the reader takes at most {}", self.largest);
            return Err(self.progress_thread.error(ErrorKind::Truncated, WRITE, detail));
        }
        let mut port = self.progress_thread.lock_port(WRITE)?;
        // The reader's close notice takes precedence.
        if port.sender(self.ring)?.broken().is_none() {
            self.progress_thread.check_peer(WRITE)?;
        }
        let mut begun = match self.unfinished.take() {
            Some(begun) if begun.length() == length => begun,
            Some(begun) => {
                let detail = format!(
                    "{} of {} bytes of the last message are written. Send that message again first",
                    begun.written(),
                    begun.length()
                );
                self.unfinished = Some(begun);
                return Err(self.progress_thread.error(ErrorKind::InvalidArgument, WRITE, detail));
            }
            None => port.begin(self.ring, 0, length)?,
        };
        let written = write(&mut port, self.ring, &mut self.staging, &mut begun, message, |why| {
            self.progress_thread.check_peer(WRITE)?;
            if !deadline.has_passed() {
                return Ok(());
            }
            let detail = format!(
                "{} of {length} bytes were written within {timeout:?}, waiting for {}",
                why.written, why.waiting_for
            );
            Err(self.progress_thread.error(ErrorKind::DeadlineExceeded, WRITE, detail))
        });
        if written.is_err() && begun.written() > 0 && !begun.is_written() {
            self.unfinished = Some(begun);
        }
        written
    }

    /// Waits until the reader has read everything that was sent.
    ///
    /// # Errors
    /// `Closed`, `ConnectionLost`: see [`RingWriter`]; `DeadlineExceeded`; `InvalidArgument` while
    /// a message is partly written.
    pub fn flush(&mut self, timeout: Duration) -> Result<()> {
        if let Some(begun) = &self.unfinished {
            let detail =
                format!("{} bytes of a message are unsent", begun.length() - begun.written());
            return Err(self.progress_thread.error(ErrorKind::InvalidArgument, FLUSH, detail));
        }
        let deadline = Deadline::after(timeout);
        let mut port = self.progress_thread.lock_port(FLUSH)?;
        loop {
            match port.flush(self.ring, WAIT_SLICE.min(deadline.left())) {
                Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {}
                done => return done,
            }
            self.progress_thread.check_peer(FLUSH)?;
            if deadline.has_passed() {
                let unread = port.sender(self.ring)?.writer().unread();
                let detail = format!("{unread} chunks were not read within {timeout:?}");
                return Err(self.progress_thread.error(ErrorKind::DeadlineExceeded, FLUSH, detail));
            }
        }
    }

    /// Waits until the reader has read everything, and sends it the end notice. It is no error if
    /// the reader has exited after reading everything. If a writer is dropped without closing, its
    /// reader gets `ConnectionLost`.
    ///
    /// # Errors
    /// As [`flush`](Self::flush). The ring is closed in any case, as if the writer had exited: the
    /// reader gets what arrived, and then `ConnectionLost`; or `Closed`, if only its answer was
    /// late.
    pub fn close(mut self, timeout: Duration) -> Result<SenderStatistics> {
        let deadline = Deadline::after(timeout);
        self.flush(timeout)?;
        let mut port = self.progress_thread.lock_port(CLOSE)?;
        let sender = port.sender(self.ring)?;
        let (statistics, is_alive) = (sender.statistics(), sender.broken().is_none());
        port.begin_close(self.ring, is_alive);
        let mut idle = 0;
        while port.rings().1 > 0 {
            if self.progress_thread.check_peer(CLOSE).is_err() {
                // Not by `ProgressThread::close`, which would repeat the end notice for a while.
                return Ok(statistics);
            }
            if deadline.has_passed() {
                let detail = format!(
                    "everything was read, but the reader did not answer within {timeout:?} \
                     and may not have received the end notice"
                );
                return Err(self.progress_thread.error(ErrorKind::DeadlineExceeded, CLOSE, detail));
            }
            port.progress(&mut idle, WAIT_SLICE.min(deadline.left()))?;
        }
        drop(port);
        self.progress_thread.close()?;
        Ok(statistics)
    }

    /// The reader's address.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.progress_thread.peer()
    }

    /// The provider that carries the messages.
    #[must_use]
    pub fn provider(&self) -> &str {
        self.progress_thread.provider()
    }
}

/// The reason of a wait.
struct WaitCause {
    waiting_for: &'static str,
    written: u64,
}

/// Writes the rest of a message. Before each wait, `may_wait` is called.
fn write(
    port: &mut PortGuard<'_>,
    ring: SenderId,
    staging: &mut Staging,
    message: &mut Message,
    bytes: &[u8],
    may_wait: impl Fn(WaitCause) -> Result<()>,
) -> Result<()> {
    let mut idle = 0;
    while !message.is_written() {
        // Positions are enough here, so the numbers of read messages are discarded.
        while port.next_read(ring)?.is_some() {}
        let slot = staging.next;
        if port.sender(ring)?.completed_to() < staging.busy_to[slot] {
            let cause =
                WaitCause { waiting_for: "earlier chunks to complete", written: message.written() };
            wait(port, &mut idle, cause, &may_wait)?;
            if let Some(broken) = port.sender(ring)?.broken() {
                return Err(broken.clone());
            }
            continue;
        }
        let at = message.written();
        let piece = &bytes[at as usize..bytes.len().min(at as usize + SLOT_LEN)];
        let offset = slot * SLOT_LEN;
        staging.region.write(offset, piece)?;
        let part = staging.region.slice(offset..offset + piece.len())?;
        let end = at + piece.len() as u64;
        let mut pushed = Ok(());
        while !message.is_written() && (message.written() < end || end == 0) {
            let waiting_for = match port.push_part(ring, message, &part, at)? {
                Pushed::Posted(_) | Pushed::Written => {
                    idle = 0;
                    continue;
                }
                Pushed::Blocked(_) => "the reader to release chunks",
                Pushed::Busy => "room in the provider's queue",
            };
            let cause = WaitCause { waiting_for, written: message.written() };
            pushed = wait(port, &mut idle, cause, &may_wait);
            if pushed.is_err() {
                break;
            }
        }
        if message.written() > at {
            staging.busy_to[slot] = port.sender(ring)?.writer().tail();
            staging.next = (slot + 1) % SLOT_COUNT;
        }
        pushed?;
    }
    Ok(())
}

fn wait(
    port: &mut PortGuard<'_>,
    idle: &mut u32,
    cause: WaitCause,
    may_wait: &impl Fn(WaitCause) -> Result<()>,
) -> Result<()> {
    may_wait(cause)?;
    port.progress(idle, WAIT_SLICE)
}
