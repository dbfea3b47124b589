//! Messages between supervisor and children: frames of JSON on a socket, each after its length in
//! four bytes. Memory is allocated only for bytes that arrived, and no call blocks forever.

use std::io::{ErrorKind, Read, Write};
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use fabric::Address;
use fabric::ring::{NotifyMode, RingAnswer, RingOffer};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// Longest body. The longest real one has three descriptors and an address.
const MAX_FRAME_LENGTH: usize = 64 << 10;
/// How long the peer may leave the socket full.
const TIMEOUT: Duration = Duration::from_secs(10);

/// From the supervisor. Each belongs to a connection attempt; reports of earlier attempts are
/// ignored.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Instruction {
    /// To the reader: offer a ring.
    Offer { attempt: u64, ring: RingPlan, mode: ReaderMode },
    /// To the writer: stop writing, and wait until no write is in flight.
    Drain { attempt: u64 },
    /// To the writer: write into this ring of this reader.
    Write { attempt: u64, peer: Address, offer: RingOffer, chunk: u64, mode: WriterMode },
    /// To the reader: the writer's address and answer.
    Connect { attempt: u64, peer: Address, answer: RingAnswer },
    /// To the writer: write one more message, then close the ring.
    Finish,
    /// Report the state as text.
    ReportState,
    /// Close everything and exit.
    End,
}

/// The ring that a reader is to offer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RingPlan {
    pub capacity: u64,
    pub watermark: u64,
    pub notify: NotifyMode,
    /// Messages delivered according to the supervisor: for a new reader.
    pub completed_messages: u64,
}

/// What a reader does with its old ring.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum ReaderMode {
    /// The reader opens the new ring on a new endpoint.
    NewEndpoint,
    /// The reader forgets the old ring, and opens another on the same endpoint: a later epoch, in
    /// new memory.
    SameEndpoint,
}

/// What a writer does with its old ring.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum WriterMode {
    /// The writer opens a new endpoint.
    NewEndpoint,
    /// The writer drops the old ring, and accepts the new one on the same endpoint.
    SameEndpointDrained,
    /// Like [`Self::SameEndpointDrained`], with writes in flight.
    SameEndpoint,
}

/// To the supervisor.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Report {
    Offered {
        attempt: u64,
        address: Address,
        offer: RingOffer,
    },
    Drained {
        attempt: u64,
        unfinished: usize,
    },
    Answered {
        attempt: u64,
        address: Address,
        answer: RingAnswer,
    },
    Connected {
        attempt: u64,
    },
    /// A message was completed, and every byte was right.
    Delivered {
        number: u64,
        length: u64,
        sum: u64,
    },
    /// The ring is broken, as expected after a kill.
    Broken {
        attempt: u64,
        text: String,
    },
    /// The writer closed the ring after this many messages.
    Finished {
        messages: u64,
    },
    /// The reader got the end notice after this many messages.
    EndOfStream {
        messages: u64,
    },
    /// State as text.
    State {
        text: String,
    },
    /// A failure; the process exits.
    Failed {
        is_wrong_data: bool,
        text: String,
    },
}

/// Result of a read of the control channel.
#[derive(Debug)]
pub enum Received<T> {
    Frame(T),
    Nothing,
    /// The other process has exited.
    Closed,
}

/// One end, which receives frames of `T`.
#[derive(Debug)]
pub struct ControlChannel<T> {
    stream: UnixStream,
    buffer: Vec<u8>,
    from: usize,
    frames: PhantomData<T>,
}

impl<T: DeserializeOwned> ControlChannel<T> {
    pub fn new(stream: UnixStream) -> Result<Self, Failure> {
        let system = |error| Failure::System("setting a socket's timeout", error);
        stream.set_write_timeout(Some(TIMEOUT)).map_err(system)?;
        Ok(Self { stream, buffer: Vec::new(), from: 0, frames: PhantomData })
    }

    /// False if the other process has exited.
    pub fn send(&mut self, frame: &impl Serialize) -> Result<bool, Failure> {
        let mut bytes = vec![0; 4];
        serde_json::to_writer(&mut bytes, frame)
            .map_err(|e| Failure::ControlChannel(e.to_string()))?;
        let length = bytes.len() - 4;
        if length > MAX_FRAME_LENGTH {
            return Err(Failure::ControlChannel(format!("frame of {length} bytes is too long")));
        }
        bytes[..4].copy_from_slice(&(length as u32).to_le_bytes());
        match self.stream.write_all(&bytes) {
            Ok(()) => Ok(true),
            Err(e) if matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                Ok(false)
            }
            Err(error) => Err(Failure::System("writing to a process", error)),
        }
    }

    /// The next frame, if it arrives within the timeout.
    pub fn receive(&mut self, timeout: Duration) -> Result<Received<T>, Failure> {
        if let Some(frame) = self.next()? {
            return Ok(Received::Frame(frame));
        }
        if !is_readable(&[self.stream.as_fd()], timeout)? {
            return Ok(Received::Nothing);
        }
        let mut piece = [0; 16 << 10];
        match self.stream.read(&mut piece) {
            Ok(0) => return Ok(Received::Closed),
            Ok(length) => self.buffer.extend_from_slice(&piece[..length]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {
                return Ok(Received::Closed);
            }
            Err(error) => return Err(Failure::System("reading from a process", error)),
        }
        Ok(self.next()?.map_or(Received::Nothing, Received::Frame))
    }

    fn next(&mut self) -> Result<Option<T>, Failure> {
        let rest = &self.buffer[self.from..];
        let Some((length, rest)) = rest.split_first_chunk::<4>() else {
            self.buffer.drain(..self.from);
            self.from = 0;
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > MAX_FRAME_LENGTH {
            return Err(Failure::ControlChannel(format!("frame of {length} bytes is too long")));
        }
        let Some(body) = rest.get(..length) else {
            self.buffer.drain(..self.from);
            self.from = 0;
            return Ok(None);
        };
        let frame = serde_json::from_slice(body).map_err(|error| {
            let text: String = String::from_utf8_lossy(body).chars().take(200).collect();
            Failure::ControlChannel(format!("{text}: {error}"))
        })?;
        self.from += 4 + length;
        Ok(Some(frame))
    }
}

impl<T> AsFd for ControlChannel<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Does one of these become readable within the timeout?
pub fn is_readable(descriptors: &[BorrowedFd<'_>], timeout: Duration) -> Result<bool, Failure> {
    let entries = descriptors.iter().map(|descriptor| PollFd::new(*descriptor, PollFlags::POLLIN));
    let mut entries: Vec<PollFd<'_>> = entries.collect();
    let milliseconds = timeout.as_micros().div_ceil(1000);
    let timeout = PollTimeout::try_from(milliseconds).unwrap_or(PollTimeout::MAX);
    match poll(&mut entries, timeout) {
        Ok(count) => Ok(count > 0),
        Err(Errno::EINTR) => Ok(false),
        Err(error) => Err(Failure::System("poll", error.into())),
    }
}
