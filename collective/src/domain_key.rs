//! The identity of a communication domain.

/// The identity of a communication domain: equal on all its ranks.
///
/// ```
/// use collective::CommDomainKey;
/// let key = CommDomainKey::of_first_ranks(8);
/// assert_eq!((key.world_size, key.ranks.len()), (8, 8));
/// assert_ne!(key.digest(), CommDomainKey { topology_hash: 1, ..key.clone() }.digest());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CommDomainKey {
    /// The number of ranks of the job.
    pub world_size: u32,
    /// The ranks of the job that belong to the domain. Rank n of the domain is the nth of them.
    pub ranks: Vec<u32>,
    /// A hash of machines and devices, so that what was learnt on others is not used.
    pub topology_hash: u64,
}

impl CommDomainKey {
    /// All ranks of a job of this size, on a topology without a hash.
    #[must_use]
    pub fn of_first_ranks(world_size: u32) -> Self {
        Self { world_size, ranks: (0..world_size).collect(), topology_hash: 0 }
    }

    /// A digest that is the same in all builds and processes.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let numbers = [u64::from(self.world_size), self.topology_hash, self.ranks.len() as u64];
        let ranks = self.ranks.iter().map(|rank| u64::from(*rank));
        digest(numbers.into_iter().chain(ranks))
    }
}

/// A digest of words that is the same in all builds and processes (FNV-1a).
pub(crate) fn digest(words: impl IntoIterator<Item = u64>) -> u64 {
    digest_of_bytes(words.into_iter().flat_map(u64::to_le_bytes))
}

/// A digest of bytes, as [`digest`].
pub(crate) fn digest_of_bytes(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |digest, byte| {
        (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
