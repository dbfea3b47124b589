//! Which parts of some ranges of addresses are free: two-level segregated fit (TLSF), with its
//! records beside the memory.

use std::collections::HashMap;

/// Addresses and lengths are multiples of this: what kernels of frameworks expect.
pub(crate) const ALIGNMENT: u64 = 512;
/// Lists for each power of two.
const SUBDIVISIONS_LOG2: u32 = 4;
const SUBDIVISIONS: usize = 1 << SUBDIVISIONS_LOG2;
const POWERS: usize = 64 - ALIGNMENT.trailing_zeros() as usize;
/// Blocks of the list of a length that are tried: not all of them are long enough.
const TRIED: usize = 16;
const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Record {
    address: u64,
    length: u64,
    /// Neighbours in the same range.
    before: u32,
    behind: u32,
    /// Neighbours in the list of free blocks.
    previous: u32,
    next: u32,
    is_free: bool,
}

/// Free and used blocks of ranges. All operations but the search for a list take constant time.
#[derive(Debug)]
pub(crate) struct BlockAllocator {
    records: Vec<Record>,
    unused: Vec<u32>,
    /// Used blocks, and free blocks that are whole ranges, by their addresses.
    by_address: HashMap<u64, u32>,
    /// First blocks of the lists, and which lists have any.
    first: Box<[[u32; SUBDIVISIONS]; POWERS]>,
    powers: u64,
    subdivisions: [u16; POWERS],
}

/// The list of blocks of this length.
fn list_of(length: u64) -> (usize, usize) {
    let units = length / ALIGNMENT;
    let power = units.ilog2();
    let subdivision = match power.checked_sub(SUBDIVISIONS_LOG2) {
        Some(shift) => units >> shift,
        None => units << (SUBDIVISIONS_LOG2 - power),
    };
    (power as usize, subdivision as usize & (SUBDIVISIONS - 1))
}

/// The length of a block for this many bytes; None for more than there are addresses.
pub(crate) fn rounded(length: u64) -> Option<u64> {
    length.max(1).checked_next_multiple_of(ALIGNMENT)
}

impl BlockAllocator {
    pub(crate) fn new() -> Self {
        Self {
            records: Vec::new(),
            unused: Vec::new(),
            by_address: HashMap::new(),
            first: Box::new([[NONE; SUBDIVISIONS]; POWERS]),
            powers: 0,
            subdivisions: [0; POWERS],
        }
    }

    /// Adds a free range, of a multiple of the alignment.
    pub(crate) fn add(&mut self, address: u64, length: u64) {
        let record = self.record(address, length, (NONE, NONE));
        self.by_address.insert(address, record);
        self.insert(record);
    }

    /// Removes a range. False unless all of it is free.
    pub(crate) fn remove(&mut self, address: u64) -> bool {
        let Some(record) = self.by_address.get(&address).copied() else { return false };
        let Record { is_free, before, behind, .. } = self.records[record as usize];
        if !is_free || (before, behind) != (NONE, NONE) {
            return false;
        }
        self.by_address.remove(&address);
        self.take_out(record);
        self.unused.push(record);
        true
    }

    /// The address of a block of at least this length; None if there is none.
    pub(crate) fn allocate(&mut self, length: u64) -> Option<u64> {
        let length = rounded(length)?;
        let found = self.find(length)?;
        self.take_out(found);
        let Record { address, length: whole, behind, .. } = self.records[found as usize];
        if whole > length {
            let rest = self.record(address + length, whole - length, (found, behind));
            if behind != NONE {
                self.records[behind as usize].before = rest;
            }
            let record = &mut self.records[found as usize];
            (record.length, record.behind) = (length, rest);
            self.insert(rest);
        }
        self.by_address.insert(address, found);
        Some(address)
    }

    /// The length of a used block.
    pub(crate) fn length(&self, address: u64) -> Option<u64> {
        let record = &self.records[*self.by_address.get(&address)? as usize];
        (!record.is_free).then_some(record.length)
    }

    /// Frees a block. Returns the start and the length of its range, if all of it is free now.
    pub(crate) fn free(&mut self, address: u64) -> Option<(u64, u64)> {
        let mut record = *self.by_address.get(&address)?;
        if self.records[record as usize].is_free {
            return None;
        }
        self.by_address.remove(&address);
        for is_behind in [false, true] {
            let Record { before, behind, .. } = self.records[record as usize];
            let neighbour = if is_behind { behind } else { before };
            if neighbour != NONE && self.records[neighbour as usize].is_free {
                self.take_out(neighbour);
                let (low, high) = if is_behind { (record, neighbour) } else { (neighbour, record) };
                record = self.merge(low, high);
            }
        }
        self.insert(record);
        let Record { address, length, before, behind, .. } = self.records[record as usize];
        let is_whole = (before, behind) == (NONE, NONE);
        is_whole.then(|| {
            self.by_address.insert(address, record);
            (address, length)
        })
    }

    fn merge(&mut self, low: u32, high: u32) -> u32 {
        let Record { length, behind, .. } = self.records[high as usize];
        let record = &mut self.records[low as usize];
        record.length += length;
        record.behind = behind;
        if behind != NONE {
            self.records[behind as usize].before = low;
        }
        self.unused.push(high);
        low
    }

    fn record(&mut self, address: u64, length: u64, (before, behind): (u32, u32)) -> u32 {
        let (previous, next) = (NONE, NONE);
        let record = Record { address, length, before, behind, previous, next, is_free: false };
        match self.unused.pop() {
            Some(number) => {
                self.records[number as usize] = record;
                number
            }
            None => {
                self.records.push(record);
                self.records.len() as u32 - 1
            }
        }
    }

    fn find(&self, length: u64) -> Option<u32> {
        let (power, subdivision) = list_of(length);
        let mut next = self.first[power][subdivision];
        for _ in 0..TRIED {
            if next == NONE {
                break;
            }
            let record = &self.records[next as usize];
            if record.length >= length {
                return Some(next);
            }
            next = record.next;
        }
        // All blocks of the lists behind it are long enough.
        let rest = u32::from(self.subdivisions[power]) >> (subdivision + 1) << (subdivision + 1);
        if rest != 0 {
            return Some(self.first[power][rest.trailing_zeros() as usize]);
        }
        let powers = self.powers.checked_shr(power as u32 + 1)?;
        if powers == 0 {
            return None;
        }
        let power = power + 1 + powers.trailing_zeros() as usize;
        Some(self.first[power][self.subdivisions[power].trailing_zeros() as usize])
    }

    fn insert(&mut self, number: u32) {
        let (power, subdivision) = list_of(self.records[number as usize].length);
        let next = std::mem::replace(&mut self.first[power][subdivision], number);
        if next != NONE {
            self.records[next as usize].previous = number;
        }
        let record = &mut self.records[number as usize];
        (record.previous, record.next, record.is_free) = (NONE, next, true);
        self.subdivisions[power] |= 1 << subdivision;
        self.powers |= 1 << power;
    }

    fn take_out(&mut self, number: u32) {
        let Record { length, previous, next, address, .. } = self.records[number as usize];
        let (power, subdivision) = list_of(length);
        match previous {
            NONE => self.first[power][subdivision] = next,
            previous => self.records[previous as usize].next = next,
        }
        if next != NONE {
            self.records[next as usize].previous = previous;
        }
        if self.first[power][subdivision] == NONE {
            self.subdivisions[power] &= !(1 << subdivision);
            if self.subdivisions[power] == 0 {
                self.powers &= !(1 << power);
            }
        }
        self.records[number as usize].is_free = false;
        // A whole range that is used from now on, or merged.
        self.by_address.remove(&address);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RANGE: u64 = 64 * ALIGNMENT;

    #[test]
    fn freed_neighbours_become_one_block() {
        let mut allocator = BlockAllocator::new();
        allocator.add(RANGE, RANGE);
        let blocks: Vec<_> = (0..4).map(|_| allocator.allocate(RANGE / 4).unwrap()).collect();
        assert_eq!(allocator.allocate(1), None);
        assert!(!allocator.remove(RANGE));
        for block in [blocks[1], blocks[3], blocks[0]] {
            assert_eq!(allocator.free(block), None);
        }
        assert_eq!(allocator.allocate(RANGE / 2), Some(RANGE));
        assert_eq!(allocator.free(RANGE), None);
        assert_eq!(allocator.free(blocks[2]), Some((RANGE, RANGE)));
        assert_eq!(allocator.free(blocks[2]), None, "twice");
        assert!(allocator.remove(RANGE));
        assert_eq!(allocator.allocate(1), None);
    }

    #[test]
    fn ranges_beside_each_other_stay_apart() {
        let mut allocator = BlockAllocator::new();
        allocator.add(0, RANGE);
        allocator.add(RANGE, RANGE);
        assert_eq!(allocator.allocate(RANGE + 1), None);
        let both = [allocator.allocate(RANGE).unwrap(), allocator.allocate(RANGE).unwrap()];
        assert_eq!(allocator.length(both[0]), Some(RANGE));
        for range in both {
            assert_eq!(allocator.free(range), Some((range, RANGE)));
        }
    }

    proptest! {
        #[test]
        fn blocks_do_not_overlap_and_nothing_is_lost(
            steps in proptest::collection::vec((any::<bool>(), 1..40 * ALIGNMENT, any::<u16>()), 1..300)
        ) {
            let mut allocator = BlockAllocator::new();
            let ranges = [RANGE, 10 * RANGE, 20 * RANGE];
            ranges.iter().for_each(|start| allocator.add(*start, RANGE));
            let mut used: Vec<(u64, u64)> = Vec::new();
            for (is_allocation, length, choice) in steps {
                if is_allocation || used.is_empty() {
                    let Some(address) = allocator.allocate(length) else { continue };
                    let end = address + rounded(length).unwrap();
                    prop_assert_eq!(allocator.length(address), rounded(length));
                    prop_assert!(ranges.iter().any(|start| *start <= address && end <= start + RANGE));
                    prop_assert!(used.iter().all(|(start, stop)| end <= *start || *stop <= address));
                    used.push((address, end));
                } else {
                    let (address, _) = used.swap_remove(usize::from(choice) % used.len());
                    allocator.free(address);
                }
            }
            for (address, _) in used {
                allocator.free(address);
            }
            for start in ranges {
                prop_assert!(allocator.remove(start));
            }
        }
    }
}
