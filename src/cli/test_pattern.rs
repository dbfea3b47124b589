//! Messages whose content shows whether they arrived unchanged: a header with a number and a
//! checksum, then bytes that follow from the number.
//!
//! The header has five little-endian words: magic number, run (random, of the publisher), number in
//! the run, length of the message, CRC-32 of these four. Then follow words that increase by a
//! constant, from a start that is a hash of run and number.

use std::collections::HashMap;

/// Length of the header, and minimum length of a message.
pub(crate) const HEADER: usize = 40;
const MAGIC: u64 = u64::from_le_bytes(*b"fbcheck1");
/// Bytes generated and compared at a time.
const CHUNK: usize = 1 << 20;
/// Difference of successive words.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Content {
    pub(crate) run: u64,
    pub(crate) number: u64,
    pub(crate) length: u64,
}

impl Content {
    fn header(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        for (at, word) in [MAGIC, self.run, self.number, self.length].into_iter().enumerate() {
            bytes[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
        }
        let sum = u64::from(crc32fast::hash(&bytes[..HEADER - 8]));
        bytes[HEADER - 8..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Parses a header; None if it is invalid.
    fn of_header(bytes: &[u8; HEADER]) -> Option<Self> {
        let word = |at: usize| bytes[at * 8..][..8].try_into().map_or(0, u64::from_le_bytes);
        let content = Self { run: word(1), number: word(2), length: word(3) };
        (content.header() == *bytes).then_some(content)
    }

    fn start(self) -> u64 {
        // Hashed, so that successive numbers have different content.
        let mut word = self.run ^ self.number.wrapping_mul(STEP);
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// Writes the bytes at an offset, which is a multiple of 8 after the header.
    fn body(self, offset: u64, bytes: &mut [u8]) {
        let first = (offset - HEADER as u64) / 8;
        let mut word = self.start().wrapping_add(first.wrapping_mul(STEP));
        let (words, rest) = bytes.as_chunks_mut();
        for to in words {
            *to = word.to_le_bytes();
            word = word.wrapping_add(STEP);
        }
        let length = rest.len();
        rest.copy_from_slice(&word.to_le_bytes()[..length]);
    }

    /// Gives the message in parts, with the offset of each.
    pub(crate) fn write<E>(
        self,
        buffer: &mut Vec<u8>,
        mut part: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        part(0, &self.header())?;
        buffer.resize(CHUNK, 0);
        let mut offset = HEADER as u64;
        while offset < self.length {
            let length = (self.length - offset).min(CHUNK as u64);
            let bytes = &mut buffer[..length as usize];
            self.body(offset, bytes);
            part(offset, bytes)?;
            offset += length;
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The message has no valid header.
    NoHeader,
    /// The message's length differs from that in its header.
    Length { declared: u64, found: u64 },
    /// The message has other bytes from this offset on.
    Corrupted { at: u64 },
    /// The message's number is not above that of the message before it in the same run.
    OutOfOrder { after: u64 },
}

/// Verifies messages as they arrive.
#[derive(Debug, Default)]
pub(crate) struct Checker {
    /// The next number of each run.
    runs: HashMap<u64, u64>,
    buffers: [Vec<u8>; 2],
    /// Gaps in the numbers.
    pub(crate) missed: u64,
}

impl Checker {
    /// Maximum number of runs, since content may be arbitrary.
    const MAX_RUNS: usize = 4096;

    /// Reads a message of this length in parts, and returns its content and fault.
    pub(crate) fn check<E>(
        &mut self,
        length: u64,
        mut read: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<(Option<Content>, Option<Fault>), E> {
        let mut header = [0; HEADER];
        if length < HEADER as u64 {
            return Ok((None, Some(Fault::NoHeader)));
        }
        read(0, &mut header)?;
        let Some(content) = Content::of_header(&header) else {
            return Ok((None, Some(Fault::NoHeader)));
        };
        if content.length != length {
            let fault = Fault::Length { declared: content.length, found: length };
            return Ok((Some(content), Some(fault)));
        }
        let [found, expected] = &mut self.buffers;
        found.resize(CHUNK, 0);
        expected.resize(CHUNK, 0);
        let mut offset = HEADER as u64;
        while offset < length {
            let part = (length - offset).min(CHUNK as u64) as usize;
            let (found, expected) = (&mut found[..part], &mut expected[..part]);
            read(offset, found)?;
            content.body(offset, expected);
            if found != expected {
                let at = found.iter().zip(&*expected).position(|(one, other)| one != other);
                let at = offset + at.unwrap_or(0) as u64;
                return Ok((Some(content), Some(Fault::Corrupted { at })));
            }
            offset += part as u64;
        }
        Ok((Some(content), self.check_sequence(content)))
    }

    /// Checks that the message is the next one of its run.
    fn check_sequence(&mut self, content: Content) -> Option<Fault> {
        if self.runs.len() >= Self::MAX_RUNS && !self.runs.contains_key(&content.run) {
            self.runs.clear();
        }
        let next = content.number.saturating_add(1);
        match self.runs.insert(content.run, next) {
            Some(expected) if content.number < expected => {
                self.runs.insert(content.run, expected);
                Some(Fault::OutOfOrder { after: expected.saturating_sub(1) })
            }
            Some(expected) => {
                self.missed += content.number - expected;
                None
            }
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn message(content: Content) -> Vec<u8> {
        let mut bytes = Vec::new();
        let result = content.write::<Infallible>(&mut Vec::new(), |offset, part| {
            assert_eq!(offset, bytes.len() as u64);
            bytes.extend_from_slice(part);
            Ok(())
        });
        let Ok(()) = result;
        bytes
    }

    fn check(checker: &mut Checker, bytes: &[u8]) -> Option<Fault> {
        let read = |offset: u64, to: &mut [u8]| {
            to.copy_from_slice(&bytes[offset as usize..][..to.len()]);
            Ok::<(), Infallible>(())
        };
        let Ok((_, fault)) = checker.check(bytes.len() as u64, read);
        fault
    }

    fn content(number: u64, length: u64) -> Content {
        Content { run: 7, number, length }
    }

    #[test]
    fn written_message_of_any_length_is_valid() {
        let mut checker = Checker::default();
        let lengths = [40, 41, 47, 48, 1000, CHUNK as u64 + 40, CHUNK as u64 * 2 + 3];
        for (number, length) in lengths.into_iter().enumerate() {
            let bytes = message(content(number as u64, length));
            assert_eq!(bytes.len() as u64, length);
            assert_eq!(check(&mut checker, &bytes), None, "{length}");
        }
        assert_eq!(checker.missed, 0);
    }

    #[test]
    fn every_changed_byte_is_detected() {
        let bytes = message(content(0, 61));
        for at in 0..bytes.len() {
            let mut corrupted = bytes.clone();
            corrupted[at] ^= 0x10;
            let fault = check(&mut Checker::default(), &corrupted).unwrap();
            let expected = match at < HEADER {
                true => Fault::NoHeader,
                false => Fault::Corrupted { at: at as u64 },
            };
            assert_eq!(fault, expected, "{at}");
        }
        for end in 0..bytes.len() {
            check(&mut Checker::default(), &bytes[..end]).unwrap();
        }
    }

    #[test]
    fn mixed_parts_of_two_messages_are_detected() {
        let (one, other) = (message(content(1, 4096)), message(content(2, 4096)));
        let mixed = [&one[..2048], &other[2048..]].concat();
        assert_eq!(check(&mut Checker::default(), &mixed), Some(Fault::Corrupted { at: 2048 }));
    }

    #[test]
    fn gaps_are_counted_and_late_messages_are_faults() {
        let mut checker = Checker::default();
        assert_eq!(check(&mut checker, &message(content(5, 40))), None);
        assert_eq!(check(&mut checker, &message(content(8, 40))), None);
        assert_eq!(checker.missed, 2);
        let fault = check(&mut checker, &message(content(8, 40)));
        assert_eq!(fault, Some(Fault::OutOfOrder { after: 8 }));
        assert_eq!(check(&mut checker, &message(content(9, 40))), None);
        // Another run has its own numbers.
        assert_eq!(check(&mut checker, &message(Content { run: 8, number: 0, length: 40 })), None);
        assert_eq!(checker.missed, 2);
    }
}
