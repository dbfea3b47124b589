//! Parameters of an operation, and their encoding as a word.

use std::fmt;

/// Algorithm of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Algorithm {
    /// Default algorithm of the operation and the size.
    #[default]
    Automatic,
    /// One exchange: each rank reads all that it needs from each other rank.
    OneStep,
    /// Two exchanges: each rank reduces its part, then the parts are gathered.
    TwoStep,
    /// Two exchanges, too, but ranks read the memory of each other, instead of chunks that these copy to
    /// common memory.
    Direct,
    /// The operation of another library, which programs with a choice carry out themselves.
    Library,
}

impl Algorithm {
    /// All algorithms.
    pub const ALL: [Self; 5] =
        [Self::Automatic, Self::OneStep, Self::TwoStep, Self::Direct, Self::Library];

    /// Name in reports and options: `two-step`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Automatic => "automatic",
            Self::OneStep => "one-step",
            Self::TwoStep => "two-step",
            Self::Direct => "direct",
            Self::Library => "library",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The parameters of an operation, which are the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Parameters {
    /// The share of the bytes that the fast path moves, in thousandths: the rest takes the second
    /// path.
    pub alpha: u16,
    /// The bytes that are moved at once, as a power of two; 0 for the default of the path.
    pub chunk_bits: u8,
    /// The number of streams or links that a path uses; 0 for the default.
    pub stripes: u8,
    /// The algorithm.
    pub algorithm: Algorithm,
}

impl Default for Parameters {
    fn default() -> Self {
        Self { alpha: Self::FAST_ONLY, chunk_bits: 0, stripes: 0, algorithm: Algorithm::default() }
    }
}

impl Parameters {
    /// The `alpha` of an operation that uses no second path.
    pub const FAST_ONLY: u16 = 1000;
    /// The largest `chunk_bits`.
    pub const MAX_CHUNK_BITS: u8 = 40;

    /// The parameters as a word that is not 0: 0 stands for parameters that were not learnt.
    #[must_use]
    pub fn encode(self) -> u64 {
        let bytes = [1, self.algorithm as u8, self.chunk_bits, self.stripes];
        u64::from(u32::from_le_bytes(bytes)) | u64::from(self.alpha) << 32
    }

    /// The parameters of a word; the default for 0. None if [`encode`](Self::encode) gives no such word.
    #[must_use]
    pub fn decode(word: u64) -> Option<Self> {
        if word == 0 {
            return Some(Self::default());
        }
        let [1, algorithm, chunk_bits, stripes] = (word as u32).to_le_bytes() else { return None };
        let alpha = u16::try_from(word >> 32).ok().filter(|alpha| *alpha <= Self::FAST_ONLY)?;
        let algorithm = *Algorithm::ALL.get(usize::from(algorithm))?;
        let is_valid = chunk_bits <= Self::MAX_CHUNK_BITS;
        is_valid.then_some(Self { alpha, chunk_bits, stripes, algorithm })
    }

    /// The bytes of `total` that the fast path moves: a multiple of `granule`, or all.
    #[must_use]
    pub fn fast_bytes(self, total: u64, granule: u64) -> u64 {
        let share = u128::from(total) * u128::from(self.alpha) / u128::from(Self::FAST_ONLY);
        (share as u64).next_multiple_of(granule.max(1)).min(total)
    }
}

impl fmt::Display for Parameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "alpha {:.1} %", f64::from(self.alpha) / 10.0)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn any_parameters() -> impl Strategy<Value = Parameters> {
        let algorithm = proptest::sample::select(&Algorithm::ALL[..]);
        let alpha = 0..=Parameters::FAST_ONLY;
        let parts = (alpha, 0..=Parameters::MAX_CHUNK_BITS, any::<u8>(), algorithm);
        parts.prop_map(|(alpha, chunk_bits, stripes, algorithm)| Parameters {
            alpha,
            chunk_bits,
            stripes,
            algorithm,
        })
    }

    proptest! {
        #[test]
        fn encoded_parameters_are_decoded(parameters in any_parameters()) {
            prop_assert_ne!(parameters.encode(), 0);
            prop_assert_eq!(Parameters::decode(parameters.encode()), Some(parameters));
        }

        #[test]
        fn words_that_are_no_encoding_give_none(
            word: u64,
            parameters in any_parameters(),
            bit in 0_u32..64,
        ) {
            for word in [word, word & 0x0000_03ff_ff3f_0301, parameters.encode() ^ 1 << bit] {
                let encoded = Parameters::decode(word).map(Parameters::encode);
                prop_assert!(encoded.is_none_or(|encoded| encoded == word));
            }
        }

        #[test]
        fn fast_bytes_are_whole_granules_or_all(
            parameters in any_parameters(),
            total: u64,
            granule in 0_u64..=1 << 20,
        ) {
            let total = total >> 1;
            let bytes = parameters.fast_bytes(total, granule);
            prop_assert!(bytes == total || bytes < total && bytes % granule.max(1) == 0);
            if parameters.alpha == Parameters::FAST_ONLY {
                prop_assert_eq!(bytes, total);
            }
        }
    }

    #[test]
    fn word_0_is_the_default() {
        assert_eq!(Parameters::decode(0), Some(Parameters::default()));
    }

    #[test]
    fn values_beyond_their_range_give_none() {
        let invalid = [
            Parameters { alpha: Parameters::FAST_ONLY + 1, ..Parameters::default() },
            Parameters { chunk_bits: Parameters::MAX_CHUNK_BITS + 1, ..Parameters::default() },
        ];
        for parameters in invalid {
            assert_eq!(Parameters::decode(parameters.encode()), None);
        }
        let unknown_algorithm = Parameters::default().encode() | 5 << 8;
        assert_eq!(Parameters::decode(unknown_algorithm), None);
    }
}
