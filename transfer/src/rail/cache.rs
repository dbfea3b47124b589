//! Registrations that are kept for whoever wants the same memory next.
//!
//! Pinning pages takes half a second for each gibibyte, and engines register the same buffers again
//! and again. A registration that holds what is wanted, with at least the rights that are
//! wanted, is found here; those that nobody uses make room, the one first that was not used for the
//! longest time.
//!
//! Nothing here knows a fabric or a clock: what a registration is, and whose memory it is of, is up
//! to the caller. Memory is named by its *owner*, not by its address, which is handed out again
//! when memory was freed. So a name may be given to other memory only when this cache was told
//! that the first one [went](Cache::let_go).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::ops::Range;

use fabric::Access;

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

/// Memory, and what is to be done with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Span<O> {
    pub(super) owner: O,
    /// In bytes, from the beginning of what the owner has.
    pub(super) range: Range<u64>,
    pub(super) access: Access,
}

impl<O> Span<O> {
    fn length(&self) -> u64 {
        self.range.end - self.range.start
    }
}

#[derive(Debug)]
struct Entry<O, R> {
    span: Span<O>,
    kept: R,
    /// When it was used last, by a count of uses.
    used: u64,
}

/// Registrations, by the memory that they are of.
#[derive(Debug)]
pub(super) struct Cache<O, R> {
    limits: Limits,
    entries: HashMap<u64, Entry<O, R>>,
    /// Of each owner, where those entries begin, and which they are.
    by_owner: HashMap<O, BTreeSet<(u64, u64)>>,
    by_use: BTreeMap<u64, u64>,
    /// Numbers of entries and of uses: none comes twice.
    next: u64,
    counts: RegistrationCache,
}

impl<O: Clone + Eq + Hash, R: Kept> Cache<O, R> {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            entries: HashMap::new(),
            by_owner: HashMap::new(),
            by_use: BTreeMap::new(),
            next: 0,
            counts: RegistrationCache::default(),
        }
    }

    pub(super) fn counts(&self) -> RegistrationCache {
        self.counts
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// A registration that contains what is wanted, and where it begins.
    pub(super) fn find(&mut self, wanted: &Span<O>) -> Option<(&R, u64)> {
        let fits = |number: &u64| {
            let span = &self.entries.get(number)?.span;
            let contains =
                span.range.end >= wanted.range.end && span.access.contains(wanted.access);
            contains.then_some(*number)
        };
        let places = self.by_owner.get(&wanted.owner);
        let mut beginning = places.into_iter().flat_map(|places| {
            places.range(..=(wanted.range.start, u64::MAX)).map(|(_, number)| number).rev()
        });
        let Some(number) = beginning.find_map(fits) else {
            self.counts.misses += 1;
            return None;
        };
        self.counts.hits += 1;
        let now = self.number();
        let entry = self.entries.get_mut(&number)?;
        self.by_use.remove(&entry.used);
        entry.used = now;
        self.by_use.insert(now, number);
        Some((&entry.kept, entry.span.range.start))
    }

    /// Lets go of what nobody uses until so many bytes more can be kept. False if they cannot
    /// be: then nothing was let go of.
    pub(super) fn make_room(&mut self, length: u64) -> bool {
        let used = self.entries.values().filter(|entry| entry.kept.is_used());
        let (count, bytes) =
            used.fold((0, 0), |(count, bytes), entry| (count + 1, bytes + entry.span.length()));
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
        let is_unused =
            |number: &&u64| self.entries.get(number).is_some_and(|entry| !entry.kept.is_used());
        let Some(number) = self.by_use.values().find(is_unused).copied() else { return false };
        self.remove(number);
        self.counts.evictions += 1;
        true
    }

    /// Keeps a registration, if there is [room](Self::make_room). False if there is not: then it
    /// is its user's alone.
    pub(super) fn keep(&mut self, span: Span<O>, kept: R) -> bool {
        if !self.make_room(span.length()) {
            return false;
        }
        let (number, used) = (self.number(), self.number());
        self.counts.bytes += span.length();
        self.counts.entries += 1;
        self.by_owner.entry(span.owner.clone()).or_default().insert((span.range.start, number));
        self.by_use.insert(used, number);
        self.entries.insert(number, Entry { span, kept, used });
        true
    }

    /// Lets go of what is registered of memory that goes. Who uses such a registration keeps it.
    pub(super) fn let_go(&mut self, goes: impl Fn(&O, &R) -> bool) {
        let going = self.entries.iter().filter(|(_, entry)| goes(&entry.span.owner, &entry.kept));
        let going: Vec<_> = going.map(|(number, _)| *number).collect();
        for number in going {
            self.remove(number);
        }
    }

    fn remove(&mut self, number: u64) {
        let Some(Entry { span, used, .. }) = self.entries.remove(&number) else { return };
        self.by_use.remove(&used);
        self.counts.bytes -= span.length();
        self.counts.entries -= 1;
        if let Some(places) = self.by_owner.get_mut(&span.owner) {
            places.remove(&(span.range.start, number));
            if places.is_empty() {
                self.by_owner.remove(&span.owner);
            }
        }
    }
}
