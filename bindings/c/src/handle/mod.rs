//! Handles: opaque numbers in pointer types.
//!
//! A handle is never an address: its highest bits make it non-canonical, so that it cannot be
//! dereferenced. Closed handles, and those of the parent process after a fork, are distinguished
//! from open ones.

mod table;

use std::any::Any;
use std::marker::PhantomData;

pub(crate) use self::table::HandleTable;

use crate::failure::{Failure, Operation, Result};
use crate::status::Status;

/// A kind of object with handles.
pub(crate) trait Kind: Any + Send + Sync {
    /// The kind's number in the handle, below [`KINDS`]; no two kinds have the same.
    const NUMBER: u64;
    /// The kind's name in messages.
    const NAME: &'static str;

    /// Ends waits and releases what is held, after its handle was closed.
    fn end(&self) {}
}

/// Declares the kind of a type, its number and its name.
macro_rules! kind {
    ($type:ty, $number:literal, $name:literal $(, $end:expr)?) => {
        impl $crate::handle::Kind for $type {
            const NUMBER: u64 = $number;
            const NAME: &'static str = $name;

            $(fn end(&self) {
                $end(self);
            })?
        }
    };
}
pub(crate) use kind;

// From the lowest bit: generation, slot, forks, kind, and a mark.
const GENERATION_BITS: u32 = 32;
const SLOT_BITS: u32 = 18;
const FORK_BITS: u32 = 5;
const KIND_BITS: u32 = 5;
const MARK_BITS: u32 = 4;
/// Maximum number of kinds.
pub(crate) const KINDS: usize = 1 << KIND_BITS;
const MARK: u64 = 0b1010;
const _: () = assert!(GENERATION_BITS + SLOT_BITS + FORK_BITS + KIND_BITS + MARK_BITS == 64);

/// Maximum number of open handles of a kind.
const MAX_HANDLES: usize = 1 << SLOT_BITS;

/// A handle of an object.
#[derive(Debug)]
pub(crate) struct Handle<K> {
    slot: u32,
    generation: u32,
    /// Number of forks since the first process that used the library, modulo the bits in a handle.
    forks: u8,
    kind: PhantomData<fn(K)>,
}

impl<K> Clone for Handle<K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K> Copy for Handle<K> {}

/// The number of forks, modulo the bits in a handle.
pub(crate) fn fork_count_bits(forks: u32) -> u8 {
    (forks % (1 << FORK_BITS)) as u8
}

fn bits(word: u64, shift: u32, count: u32) -> u64 {
    word >> shift & ((1 << count) - 1)
}

impl<K: Kind> Handle<K> {
    fn new(slot: u32, generation: u32, forks: u8) -> Self {
        Self { slot, generation, forks, kind: PhantomData }
    }

    /// The handle as a C pointer.
    pub(crate) fn pointer(self) -> *mut K {
        let mut word = MARK;
        word = word << KIND_BITS | K::NUMBER;
        word = word << FORK_BITS | u64::from(self.forks);
        word = word << SLOT_BITS | u64::from(self.slot);
        word = word << GENERATION_BITS | u64::from(self.generation);
        std::ptr::without_provenance_mut(word as usize)
    }

    /// The handle of a C pointer.
    pub(crate) fn of_pointer(operation: Operation, pointer: *mut K) -> Result<Self> {
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

    #[derive(Debug)]
    struct Cup;
    impl Kind for Cup {
        const NUMBER: u64 = 5;
        const NAME: &'static str = "cup";
    }

    #[derive(Debug)]
    struct Plate;
    impl Kind for Plate {
        const NUMBER: u64 = 6;
        const NAME: &'static str = "plate";
    }

    #[test]
    fn handle_survives_conversion_to_a_pointer() {
        for (slot, generation, forks) in
            [(0, 1, 0), (MAX_HANDLES as u32 - 1, u32::MAX, 31), (17, 3, 1)]
        {
            let pointer = Handle::<Cup>::new(slot, generation, forks).pointer();
            let back = Handle::of_pointer(c"test", pointer).unwrap();
            assert_eq!((back.slot, back.generation, back.forks), (slot, generation, forks));
        }
    }

    #[test]
    fn handle_of_another_kind_is_an_error() {
        let cup = Handle::<Cup>::new(3, 4, 0).pointer();
        let words = [0, 1, 0x7fff_1234_5678, cup.addr(), usize::MAX];
        for word in words {
            let pointer = std::ptr::without_provenance_mut::<Plate>(word);
            let failure = Handle::of_pointer(c"test", pointer).unwrap_err();
            assert_eq!(failure.status, Status::BadHandle, "{word:#x}");
        }
    }

    #[test]
    fn handle_is_not_a_valid_address() {
        let word = Handle::<Cup>::new(0, 0, 0).pointer().addr();
        // Bits 47 to 63 are equal in all valid addresses.
        assert!(!matches!(word >> 47, 0 | 0x1ffff));
    }

    #[test]
    fn fork_count_wraps_in_its_bits() {
        assert_eq!((fork_count_bits(0), fork_count_bits(31), fork_count_bits(32)), (0, 31, 0));
    }
}
