//! Operations in flight, and the memory that the provider may still access.
//!
//! Every posted operation takes one entry of the table: scratch space for the provider (`struct
//! fi_context2`), and a slot that owns all memory that the operation reads or writes. The
//! entry's address is the operation's context, which the completion returns. Entries never
//! move, and are freed only after the provider's queue is closed.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::num::NonZeroU32;
use std::os::raw::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use libfabric_sys as sys;

use super::{CompletionKind, MAX_RETAINED, OperationId, Retained, Slot, SlotInfo, State};
use crate::memory::MappedKey;
use crate::{MemoryRegion, Peer};

/// The slot follows the scratch space, whose address is the context. The two are separate
/// because the provider writes the scratch space at any time, while a slot is accessed by
/// reference.
#[repr(C, align(64))]
struct TableEntry {
    scratch: UnsafeCell<sys::fi_context2>,
    slot: Slot,
}

impl Slot {
    #[inline]
    pub(crate) fn keep_region(&mut self, region: &MemoryRegion) {
        let region = region.clone();
        if self.region.is_none() {
            self.region = Some(region);
        } else {
            self.keep_more(Retained::Region(region));
        }
    }

    #[inline]
    pub(crate) fn keep_mapped_key(&mut self, mapped_key: Option<&Arc<MappedKey>>) {
        if let Some(mapped_key) = mapped_key {
            self.keep_more(Retained::MappedKey(Arc::clone(mapped_key)));
        }
    }

    fn keep_more(&mut self, what: Retained) {
        self.keep[usize::from(self.retained_count)] = Some(what);
        self.retained_count += 1;
    }

    #[inline]
    pub(crate) fn id(&self) -> OperationId {
        OperationId { index: self.index, generation: self.generation }
    }

    #[inline]
    pub(crate) fn context(&self) -> *mut c_void {
        self.context
    }

    #[inline]
    fn release_retained(&mut self) {
        self.region = None;
        if self.retained_count > 0 {
            self.release_further_retained();
        }
    }

    /// Ends the operation; true if it was abandoned.
    #[inline]
    fn complete_slot(&mut self) -> bool {
        let was_abandoned = self.state == State::Abandoned;
        self.release_retained();
        self.state = State::Free;
        self.generation = self.generation.checked_add(1).unwrap_or(NonZeroU32::MIN);
        was_abandoned
    }

    #[cold]
    fn release_further_retained(&mut self) {
        for retained_count in &mut self.keep[..usize::from(self.retained_count)] {
            *retained_count = None;
        }
        self.retained_count = 0;
    }
}

struct Chunk {
    entries: NonNull<TableEntry>,
    length: u32,
    first: u32,
}

/// All slots of one queue.
pub(super) struct Table {
    chunks: Vec<Chunk>,
    free: Vec<NonNull<TableEntry>>,
    total: u32,
    abandoned: usize,
}

// SAFETY: the table owns the entries, and all its pointers lead to them; the provider accesses
// only `scratch`, under its own locking.
unsafe impl Send for Table {}

impl Table {
    const FIRST_CHUNK: u32 = 256;
    const MAX_SLOTS: u32 = 1 << 20;

    pub(super) fn new() -> Self {
        let mut table = Self { chunks: Vec::new(), free: Vec::new(), total: 0, abandoned: 0 };
        table.grow();
        table
    }

    /// Doubles the table; chunks do not move.
    fn grow(&mut self) {
        let length = self.total.max(Self::FIRST_CHUNK);
        let entries: Box<[TableEntry]> = (0..length)
            .map(|i| TableEntry {
                scratch: UnsafeCell::new(sys::fi_context2::default()),
                slot: Slot {
                    context: ptr::null_mut(),
                    token: 0,
                    peer: Peer::ANY,
                    generation: NonZeroU32::MIN,
                    index: self.total + i,
                    member: 0,
                    state: State::Free,
                    kind: CompletionKind::Send,
                    retained_count: 0,
                    region: None,
                    keep: [const { None }; MAX_RETAINED],
                },
            })
            .collect();
        let entries: NonNull<TableEntry> = NonNull::from(Box::leak(entries)).cast();
        self.free.reserve((self.total + length) as usize);
        for at in (0..length as usize).rev() {
            // SAFETY: inside the chunk that was just made, and not shared yet.
            unsafe {
                let entry = entries.add(at);
                (*entry.as_ptr()).slot.context = entry.as_ptr().cast();
                self.free.push(entry);
            }
        }
        self.chunks.push(Chunk { entries, length, first: self.total });
        self.total += length;
    }

    /// A slot for one operation; None if a million are in flight.
    #[inline]
    pub(super) fn take(&mut self) -> Option<&mut Slot> {
        if self.free.is_empty() {
            if self.total >= Self::MAX_SLOTS {
                return None;
            }
            self.grow();
        }
        let entry = self.free.pop()?;
        // SAFETY: all free entries belong to chunks of this table; the rest as in `at`.
        let slot = unsafe { &mut (*entry.as_ptr()).slot };
        slot.state = State::InFlight;
        Some(slot)
    }

    #[inline]
    pub(super) fn at(&mut self, index: u32) -> Option<&mut Slot> {
        for chunk in &self.chunks {
            if let Some(offset) = index.checked_sub(chunk.first)
                && offset < chunk.length
            {
                // SAFETY: inside the chunk, which this table owns. `&mut self` makes the
                // reference unique in this process, and it excludes the scratch space, which
                // the provider owns.
                return Some(unsafe { &mut (*chunk.entries.as_ptr().add(offset as usize)).slot });
            }
        }
        None
    }

    /// The slot of a returned context. The context of an entry without a local operation (a
    /// peer's immediate) may be any value.
    #[inline]
    pub(super) fn by_context(&mut self, context: *mut c_void) -> Option<&mut Slot> {
        let address = context as usize;
        for chunk in &self.chunks {
            let first = chunk.entries.as_ptr() as usize;
            let size = size_of::<TableEntry>();
            if let Some(distance) = address.checked_sub(first)
                && distance < chunk.length as usize * size
            {
                if !distance.is_multiple_of(size) {
                    return None;
                }
                // SAFETY: as in `at`.
                let slot = unsafe { &mut (*chunk.entries.as_ptr().add(distance / size)).slot };
                return (slot.state != State::Free).then_some(slot);
            }
        }
        None
    }

    pub(super) fn by_id(&mut self, id: OperationId) -> Option<&mut Slot> {
        let slot = self.at(id.index)?;
        (slot.state != State::Free && slot.generation == id.generation).then_some(slot)
    }

    /// Ends the operation: its memory is released, and its slot is free again.
    #[inline]
    pub(super) fn release(&mut self, index: u32) {
        let Some(slot) = self.at(index) else { return };
        if slot.state == State::Free {
            return;
        }
        let (context, was_abandoned) = (slot.context, slot.complete_slot());
        self.recycle_slot(context, was_abandoned);
    }

    /// Takes the fields from the slot of this context, and ends the operation as
    /// [`release`](Self::release) does.
    #[inline]
    pub(super) fn take_info(&mut self, context: *mut c_void) -> Option<SlotInfo> {
        let slot = self.by_context(context)?;
        let info = SlotInfo {
            operation: slot.id(),
            token: slot.token,
            kind: slot.kind,
            is_abandoned: slot.state == State::Abandoned,
        };
        slot.complete_slot();
        self.recycle_slot(context, info.is_abandoned);
        Some(info)
    }

    #[inline]
    fn recycle_slot(&mut self, context: *mut c_void, was_abandoned: bool) {
        self.abandoned -= usize::from(was_abandoned);
        // `grow` reserved space for all of them.
        self.free.extend(NonNull::new(context.cast::<TableEntry>()));
    }

    pub(super) fn abandon(&mut self, index: u32) {
        if let Some(slot) = self.at(index)
            && slot.state == State::InFlight
        {
            slot.state = State::Abandoned;
            self.abandoned += 1;
        }
    }

    pub(super) fn abandoned(&self) -> usize {
        self.abandoned
    }

    pub(super) fn in_flight(&self) -> usize {
        self.total as usize - self.free.len()
    }

    /// The indices of the slots that one member uses.
    pub(super) fn of_member(&mut self, member: u32) -> Vec<u32> {
        (0..self.total)
            .filter(|i| self.at(*i).is_some_and(|s| s.state != State::Free && s.member == member))
            .collect()
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        for chunk in &self.chunks {
            // SAFETY: exactly the boxed slice that `grow` leaked.
            unsafe {
                drop(Box::from_raw(ptr::slice_from_raw_parts_mut(
                    chunk.entries.as_ptr(),
                    chunk.length as usize,
                )));
            }
        }
    }
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} in flight, {} abandoned", self.in_flight(), self.abandoned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_valid_contexts_find_a_slot() {
        let mut table = Table::new();
        let mut contexts = Vec::new();
        for i in 0..2000_u64 {
            let slot = table.take().unwrap();
            slot.token = i;
            contexts.push(slot.context());
        }
        for (i, context) in contexts.iter().enumerate() {
            assert_eq!(table.by_context(*context).unwrap().token, i as u64);
        }
        assert!(table.by_context(ptr::null_mut()).is_none());
        assert!(table.by_context(0x1234 as *mut c_void).is_none());
        let inside = contexts[7].cast::<u8>().wrapping_add(8).cast();
        assert!(table.by_context(inside).is_none());
    }

    #[test]
    fn stale_id_does_not_name_a_reused_slot() {
        let mut table = Table::new();
        let slot = table.take().unwrap();
        let (index, old) = (slot.index, slot.id());
        let context = slot.context();
        table.release(index);
        assert!(table.by_id(old).is_none());
        assert!(table.by_context(context).is_none());
        let again = table.take().unwrap();
        assert_eq!(again.index, index);
        assert!(table.by_id(old).is_none());
    }

    #[test]
    fn abandoned_slots_are_counted_until_they_are_released() {
        let mut table = Table::new();
        let index = table.take().unwrap().index;
        table.abandon(index);
        table.abandon(index);
        assert_eq!(table.abandoned(), 1);
        table.release(index);
        table.release(index);
        assert_eq!((table.abandoned(), table.in_flight()), (0, 0));
    }
}
