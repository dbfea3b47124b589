//! Contents of messages, and how much is verified: everything in separate rounds, so that timed
//! rounds leave caches as users have them; in timed rounds the first and last bytes, which users
//! touch, too, unless the memory is a device's.

use super::TopicKind;
use super::schedule::Round;
use crate::random_pattern::RandomPattern;
use command::exit::Failure;

/// Contents of messages of a topic.
pub(super) struct Contents {
    kind: TopicKind,
    random_pattern: RandomPattern,
    /// The publisher writes all of it each time.
    is_whole: bool,
}

impl Contents {
    pub(super) fn new(kind: &TopicKind, is_whole: bool) -> Self {
        Self { kind: kind.clone(), random_pattern: RandomPattern::default(), is_whole }
    }

    /// Writes the message with a number, as far as its round requires.
    pub(super) fn write(
        &self,
        number: u64,
        round: Round,
        mut part: impl FnMut(u64, &[u8]) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let content = self.kind.content(number);
        if self.is_whole || round == Round::Verify {
            self.random_pattern.write(content, part)
        } else if self.kind.writes_ends {
            self.random_pattern.write_ends(content, &mut part)
        } else {
            Ok(())
        }
    }

    /// Is the message with a number correct, as far as its round verifies it?
    pub(super) fn is_right(
        &mut self,
        number: u64,
        round: Round,
        length: u64,
        read: impl FnMut(u64, &mut [u8]) -> Result<(), Failure>,
    ) -> Result<bool, Failure> {
        let content = self.kind.content(number);
        if length != content.length {
            Ok(false)
        } else if round == Round::Verify {
            Ok(self.random_pattern.check(content, read)?.is_none())
        } else if self.kind.writes_ends && self.kind.is_on_host()? {
            self.random_pattern.check_ends(content, read)
        } else {
            Ok(true)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(memory: &str, writes_ends: bool) -> TopicKind {
        TopicKind { memory: memory.to_owned(), size: 3000, depth: 4, run: 7, writes_ends }
    }

    /// How many bytes are written, and the memory.
    fn written(kind: &TopicKind, round: Round, is_whole: bool) -> (usize, Vec<u8>) {
        let (mut bytes, mut count) = (vec![0; 3000], 0);
        let written = Contents::new(kind, is_whole).write(5, round, |offset, part| {
            bytes[offset as usize..][..part.len()].copy_from_slice(part);
            count += part.len();
            Ok(())
        });
        assert!(written.is_ok());
        (count, bytes)
    }

    fn is_right(kind: &TopicKind, round: Round, number: u64, bytes: &[u8]) -> bool {
        let mut contents = Contents::new(kind, false);
        let found = contents.is_right(number, round, bytes.len() as u64, |offset, to| {
            to.copy_from_slice(&bytes[offset as usize..][..to.len()]);
            Ok(())
        });
        found.ok() == Some(true)
    }

    #[test]
    fn timed_messages_are_touched_and_verified_ones_compared() {
        let host = kind("host", true);
        let (all, mut bytes) = written(&host, Round::Verify, false);
        assert_eq!(all, 3000);
        assert!(is_right(&host, Round::Verify, 5, &bytes));
        bytes[1500] ^= 1;
        assert!(!is_right(&host, Round::Verify, 5, &bytes), "one byte is wrong");
        assert!(is_right(&host, Round::Timed, 5, &bytes), "not compared");
        bytes[2999] ^= 1;
        assert!(
            !is_right(&host, Round::Timed, 5, &bytes) && !is_right(&host, Round::Timed, 6, &bytes)
        );
        let (ends, bytes) = written(&host, Round::Timed, false);
        assert!(ends < 100 && is_right(&host, Round::Stream, 5, &bytes));
        assert!(
            !is_right(&host, Round::Verify, 5, &bytes)
                && !is_right(&host, Round::Timed, 5, &bytes[1..])
        );
        assert_eq!(written(&host, Round::Timed, true).0, 3000);
    }

    #[test]
    fn device_memory_is_not_touched_in_timed_rounds() {
        let device = kind("emulated:0", false);
        let (none, bytes) = written(&device, Round::Timed, false);
        assert_eq!(none, 0);
        assert!(is_right(&device, Round::Timed, 5, &bytes));
        assert!(!is_right(&device, Round::Verify, 5, &bytes));
        // The publisher's message is in host memory, the reader's in device memory.
        assert!(is_right(&kind("emulated:0", true), Round::Timed, 5, &bytes));
    }
}
