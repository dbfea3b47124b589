//! What the two processes tell each other, and how it looks on the pipe: a line of JSON each.

use fabric::ring::{RingAnswer, RingOffer};
use fabric::{Address, RemoteRegion};
use serde::{Deserialize, Serialize};

use super::plan::Plan;
use command::exit::Failure;

/// Longest line. The longest real one holds an address and a region descriptor.
pub(crate) const MAX_LINE_LENGTH: usize = 64 * 1024;

/// One message on the pipe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Frame {
    /// What to do. From the initiator, once, first.
    Plan(Plan),
    /// Where the sender's endpoint and memory are.
    Hello { address: Address, region: RemoteRegion },
    /// The sender's ring.
    Ring(RingOffer),
    /// Where the sender wants to be told of credit.
    Answer(RingAnswer),
    /// The sender has come to the next meeting point.
    Barrier,
    /// The sender got something done since it last said so.
    Heartbeat,
    /// What the sender found when it checked the data.
    Verified { bytes: u64, bad: u64 },
    /// The sender gives up.
    Failed { exit: i32, message: String },
}

/// The bytes of a frame.
pub(crate) fn encode(frame: &Frame) -> Result<Vec<u8>, Failure> {
    let wrong = |why: String| Failure::failed(format!("sending a frame: {why}"));
    let mut bytes = serde_json::to_vec(frame).map_err(|error| wrong(error.to_string()))?;
    bytes.push(b'\n');
    if bytes.len() > MAX_LINE_LENGTH {
        return Err(wrong(format!("it has {} bytes; {MAX_LINE_LENGTH} are allowed", bytes.len())));
    }
    Ok(bytes)
}

/// Makes frames of bytes that come in pieces.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    bytes: Vec<u8>,
}

impl Decoder {
    /// Takes what was read.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next frame, once all of it is there.
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
            Frame::Verified { bytes: u64::MAX, bad: 0 },
            Frame::Heartbeat,
        ];
        let bytes: Vec<u8> = frames.iter().flat_map(|frame| encode(frame).unwrap()).collect();
        for piece in 1..bytes.len() {
            let mut decoder = Decoder::default();
            let mut got = Vec::new();
            for part in bytes.chunks(piece) {
                decoder.push(part);
                while let Some(frame) = decoder.next().unwrap() {
                    got.push(frame);
                }
            }
            assert_eq!(got, frames, "in pieces of {piece}");
            assert!(decoder.bytes.is_empty());
        }
    }

    #[test]
    fn lines_without_end_and_nonsense_are_refused() {
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
