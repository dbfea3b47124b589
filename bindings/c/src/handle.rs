//! Handles: names that look like pointers.
//!
//! A handle is never an address: it cannot be followed by mistake on either side (its highest
//! bits make it one that no process has), and one that was closed, or comes from the process
//! that this one was forked from, is told from those that are open.

use std::ffi::CStr;
use std::fmt;
use std::marker::PhantomData;

use crate::failure::{Failure, Result};
use crate::status::Status;

/// What a handle can name.
pub(crate) trait Kind {
    /// Told apart in the handle: below 16.
    const NUMBER: u64;
    /// How it is called in messages.
    const NAME: &'static str;
}

// From the lowest bit on: generation, place, forks, kind, and a mark.
const GENERATION_BITS: u32 = 32;
const SLOT_BITS: u32 = 18;
const FORK_BITS: u32 = 6;
const KIND_BITS: u32 = 4;
const MARK_BITS: u32 = 4;
const MARK: u64 = 0b1010;
const _: () = assert!(GENERATION_BITS + SLOT_BITS + FORK_BITS + KIND_BITS + MARK_BITS == 64);

/// Handles of a kind that can be open at once.
pub(crate) const MAX_HANDLES: usize = 1 << SLOT_BITS;

/// A handle of something.
pub(crate) struct Handle<K> {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
    /// How many forks ago the first process was that used the library, as far as a handle
    /// can say.
    pub(crate) forks: u8,
    kind: PhantomData<fn(K)>,
}

impl<K> Clone for Handle<K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K> Copy for Handle<K> {}

impl<K: Kind> fmt::Debug for Handle<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { slot, generation, forks, .. } = self;
        write!(f, "{}({slot}, {generation}, {forks})", K::NAME)
    }
}

/// Forks, as far as a handle can say.
pub(crate) fn fork_count_bits(forks: u32) -> u8 {
    (forks % (1 << FORK_BITS)) as u8
}

fn bits(word: u64, shift: u32, count: u32) -> u64 {
    word >> shift & ((1 << count) - 1)
}

impl<K: Kind> Handle<K> {
    pub(crate) fn new(slot: u32, generation: u32, forks: u8) -> Self {
        Self { slot, generation, forks, kind: PhantomData }
    }

    /// As C knows it.
    pub(crate) fn pointer(self) -> *mut K {
        let mut word = MARK;
        word = word << KIND_BITS | K::NUMBER;
        word = word << FORK_BITS | u64::from(self.forks);
        word = word << SLOT_BITS | u64::from(self.slot);
        word = word << GENERATION_BITS | u64::from(self.generation);
        std::ptr::without_provenance_mut(word as usize)
    }

    /// What came from C.
    pub(crate) fn of_pointer(operation: &'static CStr, pointer: *mut K) -> Result<Self> {
        let word = pointer.addr() as u64;
        let refuse = |detail: String| Err(Failure::new(Status::BadHandle, operation, detail));
        if word == 0 {
            return refuse(format!("NULL, where a {} is needed", K::NAME));
        }
        let behind = GENERATION_BITS + SLOT_BITS;
        let kind = bits(word, behind + FORK_BITS, KIND_BITS);
        if bits(word, behind + FORK_BITS + KIND_BITS, MARK_BITS) != MARK || kind != K::NUMBER {
            return refuse(format!("{word:#x} is not a {}", K::NAME));
        }
        Ok(Self::new(
            bits(word, GENERATION_BITS, SLOT_BITS) as u32,
            bits(word, 0, GENERATION_BITS) as u32,
            bits(word, behind, FORK_BITS) as u8,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Cup;
    impl Kind for Cup {
        const NUMBER: u64 = 5;
        const NAME: &'static str = "cup";
    }

    struct Plate;
    impl Kind for Plate {
        const NUMBER: u64 = 6;
        const NAME: &'static str = "plate";
    }

    #[test]
    fn a_handle_comes_back_as_it_was() {
        for (slot, generation, forks) in
            [(0, 1, 0), (MAX_HANDLES as u32 - 1, u32::MAX, 63), (17, 3, 1)]
        {
            let pointer = Handle::<Cup>::new(slot, generation, forks).pointer();
            let back = Handle::of_pointer(c"test", pointer).unwrap();
            assert_eq!((back.slot, back.generation, back.forks), (slot, generation, forks));
        }
    }

    #[test]
    fn what_is_no_handle_of_the_kind_is_refused() {
        let cup = Handle::<Cup>::new(3, 4, 0).pointer();
        let words = [0, 1, 0x7fff_1234_5678, cup.addr(), usize::MAX];
        for word in words {
            let pointer = std::ptr::without_provenance_mut::<Plate>(word);
            let failure = Handle::of_pointer(c"test", pointer).unwrap_err();
            assert_eq!(failure.status, Status::BadHandle, "{word:#x}");
        }
    }

    #[test]
    fn a_handle_is_no_address() {
        let word = Handle::<Cup>::new(0, 0, 0).pointer().addr();
        // Bit 47 up to 63 are the same in all addresses.
        assert!(!matches!(word >> 47, 0 | 0x1ffff));
    }

    #[test]
    fn forks_are_told_in_few_bits() {
        assert_eq!((fork_count_bits(0), fork_count_bits(63), fork_count_bits(64)), (0, 63, 0));
    }
}
