//! Operations in flight: what the provider may still touch, and for whom.
//!
//! Every posted operation lends the provider one slot: scratch space
//! (`struct fi_context2`), and ownership of all memory the operation reads or
//! writes. The slot's address is the operation's context; it comes back with the
//! completion. Slots never move, and are freed only after the provider's queue
//! is closed.
#![allow(unsafe_code)]

use std::os::raw::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use libfabric_sys as sys;

use super::{CompletionKind, OperationId};
use crate::memory::{Mapping, RegionInner};

/// Something that must live until an operation is done.
#[allow(dead_code)] // held, never read
pub(crate) enum Keep {
    Region(Arc<RegionInner>),
    Mapping(Arc<Mapping>),
}

/// Four local buffers, a result, an operand to compare with, and a mapped key.
const MOST_KEPT: usize = 7;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    Free,
    InFlight,
    /// Its owner stopped waiting; the memory stays until the provider lets go.
    Abandoned,
}

#[repr(C, align(64))]
pub(crate) struct Slot {
    /// The provider's scratch space: first, since its address is the context.
    scratch: sys::fi_context2,
    pub(crate) token: u64,
    pub(crate) generation: u32,
    pub(crate) index: u32,
    pub(crate) member: u32,
    pub(crate) state: State,
    pub(crate) kind: CompletionKind,
    /// Stays posted until the provider says it is used up (multi-receive).
    pub(crate) lasting: bool,
    kept: u8,
    keep: [Option<Keep>; MOST_KEPT],
    /// Where a lasting receive's buffer begins, to tell offsets in it.
    pub(crate) base: usize,
}

impl Slot {
    #[inline]
    pub(crate) fn keep(&mut self, what: Keep) {
        self.keep[usize::from(self.kept)] = Some(what);
        self.kept += 1;
    }

    #[inline]
    pub(crate) fn context(&mut self) -> *mut c_void {
        std::ptr::from_mut(self).cast()
    }

    fn let_go(&mut self) {
        for kept in &mut self.keep[..usize::from(self.kept)] {
            *kept = None;
        }
        self.kept = 0;
    }
}

struct Chunk {
    slots: NonNull<Slot>,
    length: u32,
    first: u32,
}

/// All slots of one queue.
pub(crate) struct Table {
    chunks: Vec<Chunk>,
    free: Vec<u32>,
    total: u32,
    abandoned: usize,
}

// SAFETY: the slots are owned by the table; the provider touches only `scratch`,
// under its own locking.
unsafe impl Send for Table {}

impl Table {
    const FIRST_CHUNK: u32 = 256;
    const LARGEST: u32 = 1 << 20;

    pub(crate) fn new() -> Self {
        let mut table = Self { chunks: Vec::new(), free: Vec::new(), total: 0, abandoned: 0 };
        table.grow();
        table
    }

    /// Doubles the table; chunks stay where they are.
    fn grow(&mut self) {
        let length = self.total.max(Self::FIRST_CHUNK);
        let slots: Box<[Slot]> = (0..length)
            .map(|i| Slot {
                scratch: sys::fi_context2::default(),
                token: 0,
                generation: 0,
                index: self.total + i,
                member: 0,
                state: State::Free,
                kind: CompletionKind::Send,
                lasting: false,
                kept: 0,
                keep: [const { None }; MOST_KEPT],
                base: 0,
            })
            .collect();
        let slots = NonNull::from(Box::leak(slots)).cast();
        self.chunks.push(Chunk { slots, length, first: self.total });
        self.free.reserve(length as usize);
        self.free.extend((self.total..self.total + length).rev());
        self.total += length;
    }

    /// A slot for one operation; None if a million are in flight.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<&mut Slot> {
        if self.free.is_empty() {
            if self.total >= Self::LARGEST {
                return None;
            }
            self.grow();
        }
        let index = self.free.pop()?;
        let slot = self.at(index)?;
        slot.state = State::InFlight;
        Some(slot)
    }

    #[inline]
    fn at(&mut self, index: u32) -> Option<&mut Slot> {
        for chunk in &self.chunks {
            if let Some(offset) = index.checked_sub(chunk.first)
                && offset < chunk.length
            {
                // SAFETY: inside the chunk, which this table owns; `&mut self`
                // makes the reference unique among ours.
                return Some(unsafe { &mut *chunk.slots.as_ptr().add(offset as usize) });
            }
        }
        None
    }

    /// The slot of a context that came back: contexts of entries that belong to
    /// no operation of ours (a peer's immediate) may be anything.
    #[inline]
    pub(crate) fn by_context(&mut self, context: *mut c_void) -> Option<&mut Slot> {
        let address = context as usize;
        for chunk in &self.chunks {
            let first = chunk.slots.as_ptr() as usize;
            let size = size_of::<Slot>();
            if let Some(distance) = address.checked_sub(first)
                && distance < chunk.length as usize * size
            {
                if !distance.is_multiple_of(size) {
                    return None;
                }
                // SAFETY: as in `at`.
                let slot = unsafe { &mut *chunk.slots.as_ptr().add(distance / size) };
                return (slot.state != State::Free).then_some(slot);
            }
        }
        None
    }

    pub(crate) fn by_id(&mut self, id: OperationId) -> Option<&mut Slot> {
        let slot = self.at(id.index)?;
        (slot.state != State::Free && slot.generation == id.generation).then_some(slot)
    }

    /// The operation is over: its memory is let go, its slot is free again.
    #[inline]
    pub(crate) fn release(&mut self, index: u32) {
        let Some(slot) = self.at(index) else { return };
        if slot.state == State::Free {
            return;
        }
        let was_abandoned = slot.state == State::Abandoned;
        slot.let_go();
        slot.state = State::Free;
        slot.lasting = false;
        slot.generation = slot.generation.wrapping_add(1);
        if was_abandoned {
            self.abandoned -= 1;
        }
        self.free.push(index);
    }

    pub(crate) fn abandon(&mut self, index: u32) {
        if let Some(slot) = self.at(index)
            && slot.state == State::InFlight
        {
            slot.state = State::Abandoned;
            self.abandoned += 1;
        }
    }

    pub(crate) fn abandoned(&self) -> usize {
        self.abandoned
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.total as usize - self.free.len()
    }

    /// Slots in use by one member.
    pub(crate) fn of_member(&mut self, member: u32) -> Vec<u32> {
        (0..self.total)
            .filter(|i| self.at(*i).is_some_and(|s| s.state != State::Free && s.member == member))
            .collect()
    }

    pub(crate) fn slot(&mut self, index: u32) -> Option<&mut Slot> {
        self.at(index)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        for chunk in &self.chunks {
            // SAFETY: exactly the boxed slice that `grow` leaked.
            unsafe {
                drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(
                    chunk.slots.as_ptr(),
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
    fn slots_are_found_by_their_context_and_nothing_else_is() {
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
        assert!(table.by_context(std::ptr::null_mut()).is_none());
        assert!(table.by_context(0x1234 as *mut c_void).is_none());
        let inside = contexts[7].cast::<u8>().wrapping_add(8).cast();
        assert!(table.by_context(inside).is_none());
    }

    #[test]
    fn an_old_id_does_not_name_a_reused_slot() {
        let mut table = Table::new();
        let slot = table.take().unwrap();
        let (index, old) =
            (slot.index, OperationId { index: slot.index, generation: slot.generation });
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
