//! Registrations that are kept for whoever wants the same memory next.
//!
//! Pinning pages takes half a second for each gibibyte, and engines register the same buffers again
//! and again. A registration of what is wanted is found here; those that nobody uses make room, the
//! one first that was not used for the longest time.
//!
//! Nothing here knows a fabric or a clock: what a registration is, and whose memory it is of, is up
//! to the caller. Memory is named by its *owner*, not by its address, which is handed out again
//! when memory was freed. So a name may be given to other memory only when this cache was told
//! that the first one [went](Cache::let_go).

use std::collections::HashMap;
use std::hash::Hash;

use crate::path::RegistrationCache;

#[cfg(test)]
mod tests;

/// How much is kept, in use or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) bytes: u64,
    pub(crate) count: usize,
}

/// What is kept.
pub(super) trait Kept {
    /// Has anybody else a part in it? Then it cannot make room.
    fn is_used(&self) -> bool;
}

#[derive(Debug)]
struct Entry<R> {
    kept: R,
    length: u64,
    /// When it was used last, by a count of uses.
    used: u64,
}

/// Registrations, by the memory that they are of.
#[derive(Debug)]
pub(super) struct Cache<O, R> {
    limits: Limits,
    entries: HashMap<O, Entry<R>>,
    uses: u64,
    counts: RegistrationCache,
}

impl<O: Clone + Eq + Hash, R: Kept> Cache<O, R> {
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, entries: HashMap::new(), uses: 0, counts: RegistrationCache::default() }
    }

    pub(super) fn counts(&self) -> RegistrationCache {
        self.counts
    }

    /// The registration of this memory.
    pub(super) fn find(&mut self, owner: &O) -> Option<&R> {
        self.uses += 1;
        let Some(entry) = self.entries.get_mut(owner) else {
            self.counts.misses += 1;
            return None;
        };
        self.counts.hits += 1;
        entry.used = self.uses;
        Some(&entry.kept)
    }

    /// Lets go of what nobody uses until so many bytes more can be kept. False if they cannot
    /// be: then nothing was let go of.
    pub(super) fn make_room(&mut self, length: u64) -> bool {
        let used = self.entries.values().filter(|entry| entry.kept.is_used());
        let (count, bytes) =
            used.fold((0, 0), |(count, bytes), entry| (count + 1, bytes + entry.length));
        let can_be = |bytes: u64, count: usize, limits: Limits| {
            bytes.checked_add(length).is_some_and(|all| all <= limits.bytes) && count < limits.count
        };
        if !can_be(bytes, count, self.limits) {
            return false;
        }
        while !can_be(self.counts.bytes, self.entries.len(), self.limits) {
            if !self.evict_one() {
                return false;
            }
        }
        true
    }

    /// Lets go of all that nobody uses: the system has no room for more. False if there was
    /// nothing of the kind.
    pub(super) fn evict_unused(&mut self) -> bool {
        let before = self.counts.evictions;
        while self.evict_one() {}
        self.counts.evictions > before
    }

    fn evict_one(&mut self) -> bool {
        let unused = self.entries.iter().filter(|(_, entry)| !entry.kept.is_used());
        let oldest = unused.min_by_key(|(_, entry)| entry.used).map(|(owner, _)| owner.clone());
        let Some(owner) = oldest else { return false };
        self.entries.remove(&owner);
        self.counts.evictions += 1;
        self.count();
        true
    }

    /// Keeps a registration, if there is [room](Self::make_room). False if there is not: then it
    /// is its user's alone.
    pub(super) fn keep(&mut self, owner: O, length: u64, kept: R) -> bool {
        if !self.make_room(length) {
            return false;
        }
        self.uses += 1;
        self.entries.insert(owner, Entry { kept, length, used: self.uses });
        self.count();
        true
    }

    /// Lets go of what is registered of memory that goes. Who uses such a registration keeps it.
    pub(super) fn let_go(&mut self, goes: impl Fn(&O, &R) -> bool) {
        self.entries.retain(|owner, entry| !goes(owner, &entry.kept));
        self.count();
    }

    fn count(&mut self) {
        self.counts.bytes = self.entries.values().map(|entry| entry.length).sum();
        self.counts.entries = self.entries.len() as u64;
    }
}
