//! What the two processes tell each other, and how it looks on the pipe: four
//! bytes of length, little endian, then JSON. What a length merely claims is
//! never allocated.

use fabric::ring::{RingAnswer, RingOffer};
use fabric::{Address, RemoteRegion};
use serde::{Deserialize, Serialize};

use super::plan::Plan;

/// Longest body. The longest real one holds an address and a region descriptor.
pub(crate) const LONGEST: usize = 64 * 1024;
const HEADER: usize = 4;

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
    Meet,
    /// The sender got something done since it last said so.
    Alive,
    /// What the sender found when it checked the data.
    Checked { bytes: u64, bad: u64 },
    /// The sender gives up.
    Failed { exit: i32, message: String },
}

/// Why bytes on the pipe are no frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FrameError {
    /// The length is zero or above [`LONGEST`].
    Length(usize),
    /// The body is not what was agreed.
    Body(String),
}

impl std::fmt::Display for FrameError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Length(length) => {
                write!(f, "a frame of {length} bytes; 1 to {LONGEST} are allowed")
            }
            Self::Body(why) => write!(f, "a frame that cannot be read: {why}"),
        }
    }
}

/// The bytes of a frame.
pub(crate) fn encode(frame: &Frame) -> Result<Vec<u8>, FrameError> {
    let mut bytes = vec![0; HEADER];
    serde_json::to_writer(&mut bytes, frame).map_err(|e| FrameError::Body(e.to_string()))?;
    let length = bytes.len() - HEADER;
    match u32::try_from(length) {
        Ok(short) if length <= LONGEST => bytes[..HEADER].copy_from_slice(&short.to_le_bytes()),
        _ => return Err(FrameError::Length(length)),
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

    /// The next frame, once all of it is there. After an error there is no way
    /// to find the next frame's beginning: the pipe is of no use any more.
    pub(crate) fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        let Some(header) = self.bytes.first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*header) as usize;
        if length == 0 || length > LONGEST {
            return Err(FrameError::Length(length));
        }
        let Some(body) = self.bytes.get(HEADER..HEADER + length) else {
            return Ok(None);
        };
        let frame = serde_json::from_slice(body).map_err(|e| FrameError::Body(e.to_string()))?;
        self.bytes.drain(..HEADER + length);
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_arrive_in_any_pieces() {
        let frames = [
            Frame::Meet,
            Frame::Failed { exit: 4, message: "später".to_owned() },
            Frame::Checked { bytes: u64::MAX, bad: 0 },
            Frame::Alive,
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
    fn hostile_lengths_are_refused_before_anything_is_stored() {
        for length in [0, LONGEST as u32 + 1, u32::MAX] {
            let mut decoder = Decoder::default();
            decoder.push(&length.to_le_bytes());
            assert_eq!(decoder.next(), Err(FrameError::Length(length as usize)));
        }
        let mut decoder = Decoder::default();
        decoder.push(&(LONGEST as u32).to_le_bytes());
        assert_eq!(decoder.next(), Ok(None));
        assert!(decoder.bytes.capacity() < 64, "a claim is not allocated");
    }

    #[test]
    fn nonsense_is_refused() {
        for body in
            [&b"{}"[..], b"\"Fly\"", b"\"Meet\" ", b"[1,2", b"\xff\xfe", b"\"Meet\"\"Meet\""]
        {
            let mut decoder = Decoder::default();
            decoder.push(&(body.len() as u32).to_le_bytes());
            decoder.push(body);
            let result = decoder.next();
            if body == b"\"Meet\" " {
                assert_eq!(result, Ok(Some(Frame::Meet)));
            } else {
                assert!(matches!(result, Err(FrameError::Body(_))), "{result:?}");
            }
        }
    }

    #[test]
    fn what_is_too_long_is_not_sent() {
        let frame = Frame::Failed { exit: 1, message: "x".repeat(LONGEST) };
        assert!(matches!(encode(&frame), Err(FrameError::Length(_))));
    }
}
