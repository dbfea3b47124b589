//! Size classes of the two-level segregated fit: the class selects the list of a free block.
//!
//! The first level is the power of two, the second divides it into 32 equal parts.
//! Sizes below 32 have a class each. Sizes are in granules.

/// Parts of each power of two, as a power of two.
const PART_BITS: u32 = 5;
/// Parts of each power of two.
pub(super) const PARTS: usize = 1 << PART_BITS;
/// Powers of two, the small sizes together being one.
pub(super) const LEVELS: usize = (u32::BITS - PART_BITS + 1) as usize;
pub(super) const CLASSES: usize = LEVELS * PARTS;

/// A class, as level and part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Class {
    pub(super) level: usize,
    pub(super) part: usize,
}

impl Class {
    /// The class of a block of this size.
    #[inline]
    pub(super) fn of(size: u32) -> Self {
        if size < PARTS as u32 {
            return Self { level: 0, part: size as usize };
        }
        let log = u32::BITS - 1 - size.leading_zeros();
        let level = (log - PART_BITS + 1) as usize;
        let part = ((size >> (log - PART_BITS)) as usize) & (PARTS - 1);
        Self { level, part }
    }

    /// The first class in which every block is at least this large; None if there is
    /// no such class.
    #[inline]
    pub(super) fn fitting(size: u32) -> Option<Self> {
        if size < PARTS as u32 {
            return Some(Self::of(size));
        }
        let log = u32::BITS - 1 - size.leading_zeros();
        let rounded = size.checked_add((1 << (log - PART_BITS)) - 1)?;
        Some(Self::of(rounded))
    }

    #[inline]
    pub(super) fn index(self) -> usize {
        self.level * PARTS + self.part
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn classes_grow_with_sizes(size in 1..u32::MAX) {
            prop_assert!(Class::of(size) <= Class::of(size + 1));
            prop_assert!(Class::of(size).index() < CLASSES);
            prop_assert!(Class::of(size).part < PARTS);
        }

        #[test]
        fn every_block_of_a_fitting_class_fits(size in 1..u32::MAX, other in 1..u32::MAX) {
            if let Some(class) = Class::fitting(size)
                && Class::of(other) >= class
            {
                prop_assert!(other >= size, "{other} is in the class for {size}");
            }
        }

        #[test]
        fn rounding_wastes_at_most_one_32nd(size in 32..u32::MAX / 2) {
            // The smallest block of a fitting class is at most 1/32 larger.
            let class = Class::fitting(size).unwrap();
            let rounded = u64::from(size) + u64::from(size) / 32 + 1;
            prop_assert!(Class::of(rounded as u32) >= class);
        }
    }

    #[test]
    fn smallest_and_largest_sizes_have_classes() {
        assert_eq!(Class::of(1), Class { level: 0, part: 1 });
        assert_eq!(Class::of(32), Class { level: 1, part: 0 });
        assert_eq!(Class::of(u32::MAX).index(), CLASSES - 1);
        assert_eq!(Class::fitting(u32::MAX), None);
    }
}
