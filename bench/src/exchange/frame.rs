//! Frames between the two processes: a line of JSON each.

use std::time::Duration;

use fabric::ring::{RingAnswer, RingOffer};
use fabric::{Address, RemoteRegion};
use serde::{Deserialize, Serialize};

use super::plan::Plan;
use command::exit::Failure;

/// Maximum length of a line. The longest has an address and a region descriptor.
pub(crate) const MAX_LINE_LENGTH: usize = 64 * 1024;

/// One frame.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Frame {
    /// The measurement. The first frame, from the initiator.
    Plan(Plan),
    /// The sender's endpoint address and memory.
    Hello { address: Address, region: RemoteRegion },
    /// The sender's ring.
    Ring(RingOffer),
    /// Where the sender receives credit.
    Answer(RingAnswer),
    /// The sender has reached the next barrier.
    Barrier,
    /// The sender made progress since its last heartbeat.
    Heartbeat,
    /// The result of the sender's verification, and its processor time of the measured part.
    Verified { bytes: u64, bad: u64, processor_time: Duration },
    /// The sender failed.
    Failed { exit: i32, message: String },
}

/// The bytes of a frame.
pub(crate) fn encode(frame: &Frame) -> Result<Vec<u8>, Failure> {
    let wrong = |why: String| Failure::failed(format!("send a frame failed: {why}"));
    let mut bytes = serde_json::to_vec(frame).map_err(|error| wrong(error.to_string()))?;
    bytes.push(b'\n');
    if bytes.len() > MAX_LINE_LENGTH {
        return Err(wrong(format!("it has {} bytes; {MAX_LINE_LENGTH} are allowed", bytes.len())));
    }
    Ok(bytes)
}

/// Decodes frames from bytes that arrive in pieces.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    bytes: Vec<u8>,
}

impl Decoder {
    /// Adds received bytes.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next frame, once complete.
    pub(crate) fn next(&mut self) -> Result<Option<Frame>, Failure> {
        let wrong = |why: String| Failure::failed(format!("the other process sent {why}"));
        let Some(end) = self.bytes.iter().position(|byte| *byte == b'\n') else {
            return match self.bytes.len() {
                ..MAX_LINE_LENGTH => Ok(None),
                length => Err(wrong(format!("a line of {length} bytes and more"))),
            };
        };
        let line: Vec<u8> = self.bytes.drain(..=end).collect();
        let frame = serde_json::from_slice(&line);
        frame.map(Some).map_err(|error| wrong(format!("a frame that cannot be read: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_arrive_in_any_pieces() {
        let frames = [
            Frame::Barrier,
            Frame::Failed { exit: 4, message: "später\nund mehr".to_owned() },
            Frame::Verified { bytes: u64::MAX, bad: 0, processor_time: Duration::MAX },
            Frame::Heartbeat,
        ];
        let bytes: Vec<u8> = frames.iter().flat_map(|frame| encode(frame).unwrap()).collect();
        for piece in 1..bytes.len() {
            let mut decoder = Decoder::default();
            let mut decoded = Vec::new();
            for part in bytes.chunks(piece) {
                decoder.push(part);
                while let Some(frame) = decoder.next().unwrap() {
                    decoded.push(frame);
                }
            }
            assert_eq!(decoded, frames, "in pieces of {piece}");
            assert!(decoder.bytes.is_empty());
        }
    }

    #[test]
    fn endless_and_invalid_lines_are_errors() {
        let mut decoder = Decoder::default();
        decoder.push(&[b'x'; MAX_LINE_LENGTH - 1]);
        assert_eq!(decoder.next().unwrap(), None);
        decoder.push(b"x");
        assert!(decoder.next().is_err());
        for line in
            [&b"\n"[..], b"{}\n", b"\"Fly\"\n", b"[1,2\n", b"\xff\xfe\n", b"\"Meet\"\"Meet\"\n"]
        {
            let mut decoder = Decoder::default();
            decoder.push(line);
            assert!(decoder.next().is_err(), "{line:?}");
        }
        let frame = Frame::Failed { exit: 1, message: "x".repeat(MAX_LINE_LENGTH) };
        assert!(encode(&frame).is_err());
    }
}
