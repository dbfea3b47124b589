//! The open handles of one kind, with their objects.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Handle, Kind, MAX_HANDLES};
use crate::failure::{Failure, Operation, Result};
use crate::status::Status;

#[derive(Debug)]
pub(crate) struct HandleTable {
    forks: u8,
    slots: Mutex<Slots>,
}

#[derive(Debug, Default)]
struct Slots {
    all: Vec<Slot>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Slot {
    /// Changes whenever the slot is freed, so that old handles do not match the next object.
    generation: u32,
    object: Option<Arc<dyn Any + Send + Sync>>,
}

impl HandleTable {
    pub(crate) fn new(forks: u8) -> Self {
        Self { forks, slots: Mutex::default() }
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn open<K: Kind>(&self, operation: Operation, object: Arc<K>) -> Result<Handle<K>> {
        let mut slots = self.slots();
        let number = match slots.free.pop() {
            Some(number) => number,
            None if slots.all.len() == MAX_HANDLES => {
                let detail = format!("{MAX_HANDLES} {}s are open already", K::NAME);
                return Err(Failure::new(Status::TooMany, operation, detail));
            }
            None => {
                slots.all.push(Slot { generation: 1, object: None });
                slots.all.len() as u32 - 1
            }
        };
        let slot = &mut slots.all[number as usize];
        slot.object = Some(object);
        Ok(Handle::new(number, slot.generation, self.forks))
    }

    /// The object of a handle.
    pub(crate) fn find<K: Kind>(&self, operation: Operation, handle: Handle<K>) -> Result<Arc<K>> {
        self.with_slot(operation, handle, |_, slot| slot.object.clone()?.downcast().ok())
    }

    pub(crate) fn close<K: Kind>(&self, operation: Operation, handle: Handle<K>) -> Result<Arc<K>> {
        self.with_slot(operation, handle, |free, slot| {
            let object = slot.object.take()?.downcast().ok()?;
            slot.generation = slot.generation.wrapping_add(1);
            free.push(handle.slot);
            Some(object)
        })
    }

    /// Number of open handles.
    pub(crate) fn count(&self) -> usize {
        let slots = self.slots();
        slots.all.len() - slots.free.len()
    }

    /// The result for the slot of an open handle; None means that it was closed.
    fn with_slot<K: Kind>(
        &self,
        operation: Operation,
        handle: Handle<K>,
        act: impl FnOnce(&mut Vec<u32>, &mut Slot) -> Option<Arc<K>>,
    ) -> Result<Arc<K>> {
        if handle.forks != self.forks {
            let detail = format!("this {} belongs to the parent process (fork)", K::NAME);
            return Err(Failure::new(Status::Forked, operation, detail));
        }
        let Slots { all, free } = &mut *self.slots();
        let slot = all.get_mut(handle.slot as usize);
        let slot = slot.filter(|slot| slot.generation == handle.generation);
        slot.and_then(|slot| act(free, slot)).ok_or_else(|| {
            let word = handle.pointer().addr();
            let detail = format!("the {} {word:#x} was closed", K::NAME);
            Failure::new(Status::BadHandle, operation, detail)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    struct Cup(u32);
    impl Kind for Cup {
        const NUMBER: u64 = 5;
        const NAME: &'static str = "cup";
    }

    fn status<T: std::fmt::Debug>(result: Result<T>) -> Status {
        result.unwrap_err().status
    }

    #[test]
    fn only_open_handles_are_found() {
        let table = HandleTable::new(0);
        let (one, two) = (
            table.open(c"test", Arc::new(Cup(1))).unwrap(),
            table.open(c"test", Arc::new(Cup(2))).unwrap(),
        );
        assert_eq!(*table.find(c"test", one).unwrap(), Cup(1));
        assert_eq!(*table.close(c"test", one).unwrap(), Cup(1));
        assert_eq!(status(table.find(c"test", one)), Status::BadHandle);
        assert_eq!(status(table.close(c"test", one)), Status::BadHandle);
        assert_eq!(*table.find(c"test", two).unwrap(), Cup(2));
        assert_eq!(table.count(), 1);
    }

    #[test]
    fn old_handle_does_not_match_the_next_object() {
        let table = HandleTable::new(0);
        let old = table.open(c"test", Arc::new(Cup(1))).unwrap();
        table.close(c"test", old).unwrap();
        let new = table.open(c"test", Arc::new(Cup(2))).unwrap();
        assert_eq!(old.slot, new.slot);
        assert_eq!(status(table.close(c"test", old)), Status::BadHandle);
        assert_eq!(*table.find(c"test", new).unwrap(), Cup(2));
    }

    #[test]
    fn handle_of_the_parent_process_is_detected() {
        let (parent, child) = (HandleTable::new(0), HandleTable::new(1));
        let handle = parent.open(c"test", Arc::new(Cup(1))).unwrap();
        assert_eq!(status(child.find(c"test", handle)), Status::Forked);
        assert_eq!(status(child.close(c"test", handle)), Status::Forked);
    }

    #[test]
    fn unused_slots_have_no_handles() {
        let table = HandleTable::new(0);
        assert_eq!(status(table.find(c"test", Handle::<Cup>::new(9, 1, 0))), Status::BadHandle);
    }

    #[test]
    fn object_in_use_survives_close() {
        let table = HandleTable::new(0);
        let handle = table.open(c"test", Arc::new(Cup(7))).unwrap();
        let used = table.find(c"test", handle).unwrap();
        drop(table.close(c"test", handle).unwrap());
        assert_eq!(*used, Cup(7));
    }
}
