//! Frames of the handshake, on a non-blocking socket.
//!
//! ```text
//! offset  size  field (little endian)
//!      0     4  "FcRn"
//!      4     4  bytes that follow
//!      8     1  version of the handshake
//!      9        the frame, in postcard
//! ```
//!
//! | | writer | reader |
//! |---|---|---|
//! | 1 | `Hello`: its providers, and the key, if it has one | |
//! | 2 | | `Selected`: the provider, and the reader's address |
//! | 3 | `Address`: the writer's | |
//! | 4 | | `Offer`: the ring |
//! | 5 | `Answer` | |
//! | 6 | | `Ready` |
//!
//! `Refused` may take the place of each of these. Everything comes from a peer: frames have a
//! bounded length and exactly one encoding, and their contents are checked where they are used.

use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::TcpStream;

use control::codec::{self, DecodeError};
use nix::sys::socket::{setsockopt, sockopt};
use serde::{Deserialize, Serialize};

use super::super::{RingAnswer, RingOffer};
use super::{OPERATION, ProviderProtocol, RingKey};
use crate::{Address, Error, ErrorKind, Result};

pub(super) const VERSION: u8 = 2;
const MAGIC: [u8; 4] = *b"FcRn";
const FRAME_HEADER_LEN: usize = 8;
/// The longest frame without its header. The longest one sent has some addresses and descriptors.
pub(super) const MAX_FRAME_LEN: usize = 16 << 10;
/// Longest reason of a refusal, in characters.
const MAX_REASON_CHARS: usize = 400;
/// Providers that a side may list.
pub(super) const MAX_PROVIDERS: usize = 64;
/// TCP keepalive, to detect an unreachable machine: after 5 s of silence 5 probes, one a second.
const KEEPALIVE: (u32, u32, u32) = (5, 1, 5);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Frame {
    Hello { providers: Vec<ProviderProtocol>, key: Option<RingKey> },
    Selected { provider: ProviderProtocol, address: Address },
    Address(Address),
    Offer { offer: RingOffer, largest: u64 },
    Answer(RingAnswer),
    Ready,
    Refused { is_provider_error: bool, reason: String },
}

impl Frame {
    pub(super) fn refusal(error: &Error) -> Self {
        let is_provider_error = error.kind() == ErrorKind::NoProvider;
        let reason = error.detail().map_or_else(|| error.to_string(), str::to_owned);
        let reason = reason.chars().filter(|c| !c.is_control()).take(MAX_REASON_CHARS).collect();
        Self::Refused { is_provider_error, reason }
    }
}

pub(super) fn encode(frame: &Frame) -> Vec<u8> {
    let body = codec::encode(VERSION, frame);
    [&MAGIC, &(body.len() as u32).to_le_bytes(), &body[..]].concat()
}

/// Takes the first frame off these bytes, if it is complete.
pub(super) fn take_frame(received: &mut Vec<u8>) -> Result<Option<Frame>> {
    let there = received.len().min(MAGIC.len());
    if received[..there] != MAGIC[..there] {
        return Err(malformed("the peer does not use the ring handshake"));
    }
    let Some(head) = received.get(MAGIC.len()..FRAME_HEADER_LEN) else { return Ok(None) };
    let length = head.iter().rev().fold(0_usize, |sum, byte| sum << 8 | usize::from(*byte));
    if length == 0 || length > MAX_FRAME_LEN {
        return Err(malformed(format!(
            "frame length {length} is not in 1 to {MAX_FRAME_LEN} bytes"
        )));
    }
    if received.len() < FRAME_HEADER_LEN + length {
        return Ok(None);
    }
    let frame = codec::decode(VERSION, &received[FRAME_HEADER_LEN..FRAME_HEADER_LEN + length]);
    received.drain(..FRAME_HEADER_LEN + length);
    match frame {
        Ok(frame) => Ok(Some(frame)),
        Err(DecodeError::Tag { found, expected }) => {
            let detail =
                format!("the peer speaks handshake version {found}, this build {expected}");
            Err(Error::new(ErrorKind::VersionMismatch, OPERATION, detail))
        }
        Err(error) => Err(malformed(error.to_string())),
    }
}

#[derive(Debug)]
pub(super) struct FramedStream {
    stream: TcpStream,
    received: Vec<u8>,
}

impl FramedStream {
    /// Makes the connection non-blocking.
    pub(super) fn new(stream: TcpStream) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let (idle, interval, count) = KEEPALIVE;
        setsockopt(&stream, sockopt::TcpKeepIdle, &idle)?;
        setsockopt(&stream, sockopt::TcpKeepInterval, &interval)?;
        setsockopt(&stream, sockopt::TcpKeepCount, &count)?;
        setsockopt(&stream, sockopt::KeepAlive, &true)?;
        Ok(Self { stream, received: Vec::new() })
    }

    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// The next frame, if it is complete.
    pub(super) fn next(&mut self) -> Result<Option<Frame>> {
        loop {
            if let Some(frame) = take_frame(&mut self.received)? {
                return Ok(Some(frame));
            }
            let mut piece = [0; 4096];
            match self.stream.read(&mut piece) {
                Ok(0) => return Err(connection_lost("the peer closed the connection")),
                Ok(length) => self.received.extend_from_slice(&piece[..length]),
                Err(error) if error.kind() == IoKind::Interrupted => {}
                Err(error) if error.kind() == IoKind::WouldBlock => return Ok(None),
                Err(error) => return Err(connection_lost(error.to_string())),
            }
        }
    }

    /// Sends a frame. The socket buffer holds a whole handshake, so this never waits.
    pub(super) fn send(&mut self, frame: &Frame) -> Result<()> {
        self.stream.write_all(&encode(frame)).map_err(|error| connection_lost(error.to_string()))
    }

    /// The connection after the handshake, when no more bytes may follow.
    pub(super) fn into_stream(self) -> Result<TcpStream> {
        match self.received.is_empty() {
            true => Ok(self.stream),
            false => Err(malformed("unexpected bytes after the handshake")),
        }
    }
}

pub(super) fn malformed(detail: impl Into<String>) -> Error {
    Error::new(ErrorKind::MalformedDescriptor, OPERATION, detail.into())
}

pub(super) fn connection_lost(detail: impl Into<String>) -> Error {
    Error::new(ErrorKind::ConnectionLost, OPERATION, detail.into())
}
