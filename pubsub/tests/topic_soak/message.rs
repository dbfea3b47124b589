//! Numbered messages. Publisher and number determine the contents.

use crate::topics::LARGEST;

/// A message: its publisher, and its number among those of this publisher on this topic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    pub publisher: u64,
    pub number: u64,
}

const HEADER: usize = 16;

impl Message {
    pub fn bytes(self) -> Vec<u8> {
        let seed = self.publisher ^ self.number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let length = match self.number % 29 {
            7 => LARGEST,
            _ => HEADER + (seed % 700) as usize,
        };
        let mut bytes = self.publisher.to_le_bytes().to_vec();
        bytes.extend(self.number.to_le_bytes());
        bytes.extend((HEADER..length).map(|at| (seed >> (at % 57)) as u8 ^ at as u8));
        bytes
    }

    /// None if the contents are not those of the publisher and number.
    pub fn of(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let message = Self { publisher: word(0)?, number: word(8)? };
        (message.bytes() == bytes).then_some(message)
    }
}
