//! Stamps of messages: a message's number is at both ends of it, across chunks.

use fabric::MemoryRegion;
use fabric::ring::ChunkView;

use command::exit::Failure;

const STAMP: u64 = 8;

/// Writes a message's number to both ends of it. Where they overlap the latter wins.
#[inline(always)] // part of the measured time
pub(super) fn stamp(
    source: &MemoryRegion,
    at: usize,
    size: usize,
    number: u64,
) -> Result<(), Failure> {
    let stamp = number.to_le_bytes();
    let stamped = size.min(stamp.len());
    source.write(at, &stamp[..stamped])?;
    source.write(at + size - stamped, &stamp[..stamped])?;
    Ok(())
}

/// Does it have its number at both ends?
#[inline(always)] // part of the measured time
pub(super) fn is_stamped(
    memory: &MemoryRegion,
    at: usize,
    size: usize,
    number: u64,
) -> Result<bool, Failure> {
    let stamp = number.to_le_bytes();
    let stamped = size.min(stamp.len());
    let (mut first, mut last) = (stamp, stamp);
    // Where they overlap the latter is right.
    if size >= 2 * stamp.len() {
        memory.read(at, &mut first)?;
    }
    memory.read(at + size - stamped, &mut last[..stamped])?;
    Ok(first == stamp && last == stamp)
}

/// Result of checking stamps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct StampCheck {
    /// Bytes of received payload.
    pub(super) bytes: u64,
    /// Bytes of stamps that were compared.
    compared: u64,
    /// Pieces of stamps that were wrong.
    wrong: u64,
}

impl StampCheck {
    /// Checks the stamps in a chunk of the message with this number.
    #[inline(always)] // part of the measured time
    pub(super) fn check_chunk(
        &mut self,
        view: &ChunkView,
        size: u64,
        number: u64,
    ) -> Result<(), Failure> {
        let (offset, length) = (view.header().offset, view.len() as u64);
        self.bytes += length;
        // Most messages are one chunk, and this check is part of the measured time.
        if length == size && size >= 2 * STAMP {
            let (mut first, mut last) = ([0; STAMP as usize], [0; STAMP as usize]);
            view.read(0, &mut first)?;
            view.read((size - STAMP) as usize, &mut last)?;
            let stamp = number.to_le_bytes();
            self.wrong += u64::from(first != stamp || last != stamp);
            self.compared += 2 * STAMP;
            return Ok(());
        }
        self.compare(offset, length, size, number, |at, into| Ok(view.read(at, into)?))
    }

    /// `read` copies bytes of the chunk from an offset.
    #[cold]
    #[inline(never)]
    fn compare(
        &mut self,
        offset: u64,
        length: u64,
        size: u64,
        number: u64,
        mut read: impl FnMut(usize, &mut [u8]) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let stamp = number.to_le_bytes();
        let last = size.saturating_sub(STAMP);
        // For each stamp: its offset in the message, and its end.
        for (begin, end) in [(0, last.min(STAMP)), (last, size)] {
            let from = begin.max(offset);
            let to = end.min(offset.saturating_add(length));
            if from >= to {
                continue;
            }
            let mut found = [0; STAMP as usize];
            let found = &mut found[..(to - from) as usize];
            read((from - offset) as usize, found)?;
            self.compared += to - from;
            let expected = &stamp[(from - begin) as usize..(to - begin) as usize];
            self.wrong += u64::from(*found != *expected);
        }
        Ok(())
    }

    /// Number of wrong stamps after so many messages; missing ones are wrong.
    pub(super) fn bad(&self, size: u64, messages: u64) -> u64 {
        let stamps = messages.saturating_mul(size.min(2 * STAMP));
        let missing = messages.saturating_mul(size).abs_diff(self.bytes);
        self.wrong.saturating_add(stamps.abs_diff(self.compared)).saturating_add(missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NUMBER: u64 = 0x1122_3344_5566_7788;

    fn message(size: u64) -> Vec<u8> {
        let mut bytes = vec![0x5a; size as usize];
        let stamp = NUMBER.to_le_bytes();
        let stamped = bytes.len().min(8);
        bytes[..stamped].copy_from_slice(&stamp[..stamped]);
        let last = bytes.len() - stamped;
        bytes[last..].copy_from_slice(&stamp[..stamped]);
        bytes
    }

    /// Checks a message in chunks of this size.
    fn check(message: &[u8], chunk: usize) -> StampCheck {
        let mut found = StampCheck::default();
        let size = message.len() as u64;
        for (index, piece) in message.chunks(chunk).enumerate() {
            let (offset, length) = ((index * chunk) as u64, piece.len() as u64);
            found.bytes += length;
            let read = |at: usize, into: &mut [u8]| {
                into.copy_from_slice(&piece[at..at + into.len()]);
                Ok(())
            };
            found.compare(offset, length, size, NUMBER, read).unwrap();
        }
        found
    }

    #[test]
    fn stamps_are_compared_across_chunks() {
        for size in (1..40).chain([1003]) {
            let message = message(size);
            for chunk in 1..=message.len() {
                let found = check(&message, chunk);
                assert_eq!(found.compared, size.min(16), "{size} bytes by {chunk}");
                assert_eq!(found.bad(size, 1), 0, "{size} bytes by {chunk}");
            }
        }
    }

    #[test]
    fn every_wrong_byte_of_a_stamp_is_found() {
        for size in [1, 7, 8, 9, 15, 16, 40] {
            let whole = message(size);
            for at in 0..whole.len() {
                let is_stamp = at < 8 || at + 8 >= whole.len();
                let mut corrupted = whole.clone();
                corrupted[at] ^= 1;
                for chunk in 1..=whole.len() {
                    let bad = check(&corrupted, chunk).bad(size, 1);
                    assert_eq!(bad != 0, is_stamp, "byte {at} of {size} by {chunk}");
                }
            }
        }
    }

    #[test]
    fn missing_message_counts_as_bad() {
        assert_ne!(StampCheck::default().bad(64, 1), 0);
        let half = StampCheck { bytes: 64, compared: 8, wrong: 0 };
        assert_ne!(half.bad(64, 1), 0);
        let twice = check(&message(64), 64);
        assert_eq!(twice.bad(64, 1), 0);
        assert_ne!(twice.bad(64, 2), 0, "a message is missing");
    }
}
