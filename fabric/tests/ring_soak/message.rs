//! Contents of the messages: lengths and bytes follow from the seed and the number.

use fabric::{MemoryRegion, Result};

/// Bytes of the longest message.
pub const MAX_MESSAGE_LENGTH: u64 = 256 << 20;
/// Bytes that are generated or compared at a time: they stay in the first-level cache.
pub const PIECE: usize = 16 << 10;
/// Bytes of the words of a payload.
pub const WORD: usize = 8;
/// Difference of consecutive words. Odd, so that no two of a message are equal.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Pseudo-random numbers from a seed.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64, number: u64) -> Self {
        let mut rng = Self(seed ^ number.wrapping_mul(0xd134_2543_de82_ef95));
        rng.next();
        rng
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// Below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// True with this probability in percent.
    pub fn percent(&mut self, often: u64) -> bool {
        self.below(100) < often
    }

    /// Between two powers of two: each power has the same probability, and within one each number.
    pub fn between_powers(&mut self, low: u32, high: u32) -> u64 {
        let power = low + self.below(u64::from(high - low)) as u32;
        (1 << power) + self.below((1 << power) + 1)
    }

    pub fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Message {
    pub number: u64,
    pub length: u64,
    pub topic: u32,
    key: u64,
}

impl Message {
    /// Mostly bytes to kilobytes; sometimes empty, megabytes, or hundreds of megabytes.
    pub fn new(seed: u64, number: u64) -> Self {
        let mut rng = Rng::new(seed, number);
        let key = rng.next();
        let length = match rng.below(10_000) {
            0..200 => 0,
            200..9700 => rng.between_powers(0, 16),
            9700..9995 => rng.between_powers(16, 24),
            _ => rng.between_powers(24, 28),
        };
        Self { number, length, topic: rng.next() as u32, key }
    }

    /// The word at an index.
    fn word(&self, index: u64) -> u64 {
        self.key.wrapping_add(index.wrapping_mul(STEP))
    }

    /// Writes words of the message from index `first` on.
    pub fn words(&self, first: u64, into: &mut [u8]) {
        let mut word = self.word(first);
        for slot in into.chunks_exact_mut(WORD) {
            slot.copy_from_slice(&word.to_le_bytes());
            word = word.wrapping_add(STEP);
        }
    }

    /// Writes the payload into memory at this offset.
    pub fn fill(&self, region: &MemoryRegion, offset: usize) -> Result<()> {
        let mut piece = [0; PIECE];
        let mut at = 0;
        while at < self.length as usize {
            let length = (self.length as usize - at).min(PIECE);
            self.words((at / WORD) as u64, &mut piece[..length.next_multiple_of(WORD)]);
            region.write(offset + at, &piece[..length])?;
            at += length;
        }
        Ok(())
    }

    /// Sum of its words, the last one padded with zeros. Computed in constant time, since they are
    /// an arithmetic progression.
    pub fn sum(&self) -> u64 {
        let (whole, rest) = (self.length / WORD as u64, self.length % WORD as u64);
        let pairs = whole * whole.saturating_sub(1) / 2;
        let tail = self.word(whole) & ((1 << (8 * rest)) - 1);
        whole.wrapping_mul(self.key).wrapping_add(pairs.wrapping_mul(STEP)).wrapping_add(tail)
    }
}
