//! Messages that are written and compared as fast as memory is copied: windows of a block of random
//! bytes, equal in all processes.
//!
//! A message begins with a header of four little-endian words: magic number, run, number in the
//! run, length. Each further mebibyte is a window of the block, chosen by run, number and offset;
//! so an older message, or another part of the same one, differs. The pattern of `fabricast pub` is
//! documented, and computed word by word; it is slower.

/// Length of the header, and minimum length of a message.
pub(crate) const HEADER: usize = 32;
const MAGIC: u64 = u64::from_le_bytes(*b"fbwindow");
/// Bytes of a window.
const PART: usize = 1 << 20;
/// Bytes at the end that distinguish messages.
const LAST: usize = 8;
/// Minimum distance of two windows: they begin at words.
const STEP: usize = 8;

/// The parameters of a message's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Content {
    /// The message's run.
    pub(crate) run: u64,
    /// Number of the message in the run.
    pub(crate) number: u64,
    /// Length of the message, with the header.
    pub(crate) length: u64,
}

/// Hashes a number, so that neighbours have nothing in common.
fn mixed(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

impl Content {
    fn header(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let words = [MAGIC, self.run, self.number, self.length];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Offset of the last bytes after the header; None without such bytes.
    fn last(self) -> Option<u64> {
        let end_of_windows = self.length.checked_sub(1)? / PART as u64 * PART as u64;
        let last = self.length.saturating_sub(LAST as u64);
        let last = last.max(end_of_windows).max(HEADER as u64);
        (last < self.length).then_some(last)
    }
}

/// A fault of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The header differs.
    Header,
    /// The bytes of this part differ.
    Corrupted {
        /// Offset of the part.
        at: u64,
    },
}

/// The block, and a buffer to compare.
#[derive(Debug)]
pub(crate) struct RandomPattern {
    block: Vec<u8>,
    found: Vec<u8>,
}

/// Generates the block.
impl Default for RandomPattern {
    fn default() -> Self {
        let words = (0..(2 * PART / 8) as u64).flat_map(|at| mixed(at).to_le_bytes());
        Self { block: words.collect(), found: vec![0; PART] }
    }
}

impl RandomPattern {
    /// The bytes of a message from an offset, up to the end of the window.
    fn part(&self, content: Content, offset: u64) -> &[u8] {
        let which = offset / PART as u64;
        let within = (offset % PART as u64) as usize;
        let length = (content.length - offset).min((PART - within) as u64) as usize;
        let hash = mixed(content.run ^ mixed(content.number ^ mixed(which)));
        let start = hash as usize % (PART / STEP) * STEP + within;
        &self.block[start..start + length]
    }

    /// Writes a message in parts, with the offset of each.
    pub(crate) fn write<E>(
        &self,
        content: Content,
        mut part: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        part(0, &content.header())?;
        let mut offset = HEADER as u64;
        while offset < content.length {
            let bytes = self.part(content, offset);
            part(offset, bytes)?;
            offset += bytes.len() as u64;
        }
        Ok(())
    }

    /// Writes the first and last bytes of a message, with the offset of each.
    pub(crate) fn write_ends<E>(
        &self,
        content: Content,
        mut part: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        part(0, &content.header())?;
        match content.last() {
            Some(last) => part(last, self.part(content, last)),
            None => Ok(()),
        }
    }

    /// Are the first and last bytes of a message correct?
    pub(crate) fn check_ends<E>(
        &self,
        content: Content,
        mut read: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<bool, E> {
        let mut header = [0; HEADER];
        read(0, &mut header)?;
        let Some(last) = content.last() else { return Ok(header == content.header()) };
        let expected = self.part(content, last);
        let mut found = [0; LAST];
        let found = &mut found[..expected.len()];
        read(last, found)?;
        Ok(header == content.header() && found == expected)
    }

    /// Verifies a message in parts, and returns its fault.
    pub(crate) fn check<E>(
        &mut self,
        content: Content,
        mut read: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<Option<Fault>, E> {
        let mut header = [0; HEADER];
        read(0, &mut header)?;
        if header != content.header() {
            return Ok(Some(Fault::Header));
        }
        let mut found = std::mem::take(&mut self.found);
        let mut offset = HEADER as u64;
        let mut result = Ok(None);
        while offset < content.length {
            let expected = self.part(content, offset);
            let found = &mut found[..expected.len()];
            if let Err(error) = read(offset, found) {
                result = Err(error);
                break;
            }
            if found != expected {
                result = Ok(Some(Fault::Corrupted { at: offset }));
                break;
            }
            offset += expected.len() as u64;
        }
        self.found = found;
        result
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn message(windows: &RandomPattern, content: Content) -> Vec<u8> {
        let mut bytes = Vec::new();
        let Ok(()) = windows.write::<Infallible>(content, |offset, part| {
            assert_eq!(offset, bytes.len() as u64);
            bytes.extend_from_slice(part);
            Ok(())
        });
        bytes
    }

    fn check(windows: &mut RandomPattern, content: Content, bytes: &[u8]) -> Option<Fault> {
        let read = |offset: u64, to: &mut [u8]| {
            to.copy_from_slice(&bytes[offset as usize..][..to.len()]);
            Ok::<(), Infallible>(())
        };
        let Ok(fault) = windows.check(content, read);
        fault
    }

    #[test]
    fn written_message_of_any_length_is_valid() {
        let mut windows = RandomPattern::default();
        for length in [32, 33, 64, 1000, PART as u64, PART as u64 + 1, 3 * PART as u64 + 5] {
            let content = Content { run: 3, number: length, length };
            let bytes = message(&windows, content);
            assert_eq!(bytes.len() as u64, length);
            assert_eq!(check(&mut windows, content, &bytes), None, "{length}");
        }
    }

    #[test]
    fn ends_equal_those_of_the_whole_message() {
        let part = PART as u64;
        for length in [32, 33, 39, 40, 64, part - 3, part, part + 1, part + 8, 3 * part + 5] {
            let windows = RandomPattern::default();
            let content = Content { run: 3, number: length, length };
            let whole = message(&windows, content);
            let mut ends = vec![0; whole.len()];
            let mut written = 0;
            let Ok(()) = windows.write_ends::<Infallible>(content, |offset, bytes| {
                ends[offset as usize..][..bytes.len()].copy_from_slice(bytes);
                written = offset as usize + bytes.len();
                Ok(())
            });
            assert_eq!(written, whole.len());
            let is_right = |content: Content, bytes: &[u8]| {
                let Ok(is_right) = windows.check_ends::<Infallible>(content, |offset, to| {
                    to.copy_from_slice(&bytes[offset as usize..][..to.len()]);
                    Ok(())
                });
                is_right
            };
            assert!(is_right(content, &whole) && is_right(content, &ends), "{length}");
            let next = Content { number: length + 1, ..content };
            assert!(!is_right(next, &whole));
            *ends.last_mut().unwrap() ^= 1;
            assert!(!is_right(content, &ends));
        }
    }

    #[test]
    fn wrong_bytes_are_found() {
        let mut windows = RandomPattern::default();
        let length = 2 * PART as u64 + 100;
        let content = Content { run: 3, number: 7, length };
        let bytes = message(&windows, content);
        for at in [0, 8, 16, 31, 32, 33, PART - 1, PART, 2 * PART + 99] {
            let mut corrupted = bytes.clone();
            corrupted[at] ^= 1;
            let expected = match at {
                0..HEADER => Fault::Header,
                at if at < PART => Fault::Corrupted { at: HEADER as u64 },
                at => Fault::Corrupted { at: (at / PART * PART) as u64 },
            };
            assert_eq!(check(&mut windows, content, &corrupted), Some(expected), "{at}");
        }
        // The next message, and exchanged parts.
        let next = message(&windows, Content { number: 8, ..content });
        let mixed = [&bytes[..PART], &next[PART..]].concat();
        let fault = Fault::Corrupted { at: PART as u64 };
        assert_eq!(check(&mut windows, content, &mixed), Some(fault));
        let twice = [&bytes[..PART], &bytes[..PART], &bytes[2 * PART..]].concat();
        assert_eq!(check(&mut windows, content, &twice), Some(fault));
    }
}
