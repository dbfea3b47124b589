//! Stamps of a message: when it was published, how long the loan and the fill took before, and its
//! number.

/// Number of stamps.
const STAMPS: usize = 4;

/// Nanoseconds of the clock that all processes of a machine share, and that stamps messages.
#[inline]
pub(super) fn now() -> u64 {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_REALTIME);
    time.map_or(0, |time| time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}

/// The stamps attached to a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamps {
    pub(super) published: u64,
    pub(super) loan: u64,
    /// 0 if not measured.
    pub(super) fill: u64,
    pub(super) number: u64,
}

impl Stamps {
    pub(super) fn bytes(self) -> [u8; STAMPS * 8] {
        let mut bytes = [0; STAMPS * 8];
        let words = [self.published, self.loan, self.fill, self.number];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub(super) fn of(bytes: &[u8]) -> Option<Self> {
        let word =
            |at: usize| Some(u64::from_le_bytes(bytes.get(at * 8..at * 8 + 8)?.try_into().ok()?));
        Some(Self { published: word(0)?, loan: word(1)?, fill: word(2)?, number: word(3)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_are_read_as_written() {
        let stamps = Stamps { published: 1, loan: 2, fill: 3, number: u64::MAX };
        assert_eq!(Stamps::of(&stamps.bytes()), Some(stamps));
        assert_eq!(Stamps::of(&stamps.bytes()[1..]), None);
    }
}
