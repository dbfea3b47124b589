//! What the open handles of one kind name.

use std::ffi::CStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::failure::{Failure, Result};
use crate::handle::{Handle, Kind, MOST};
use crate::status::Status;

/// What the open handles of one kind name.
#[derive(Debug)]
pub(crate) struct Table<K> {
    forks: u8,
    places: Mutex<Places<K>>,
}

#[derive(Debug)]
struct Places<K> {
    all: Vec<Place<K>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Place<K> {
    /// Changes whenever it is vacated, so that old handles do not fit what comes next.
    generation: u32,
    what: Option<Arc<K>>,
}

impl<K: Kind> Table<K> {
    pub(crate) fn new(forks: u8) -> Self {
        let places = Places { all: Vec::new(), free: Vec::new() };
        Self { forks, places: Mutex::new(places) }
    }

    fn places(&self) -> MutexGuard<'_, Places<K>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives it a name.
    pub(crate) fn open(&self, operation: &'static CStr, what: Arc<K>) -> Result<Handle<K>> {
        let mut places = self.places();
        let number = match places.free.pop() {
            Some(number) => number,
            None if places.all.len() == MOST => {
                let detail = format!("{MOST} {}s are open already", K::NAME);
                return Err(Failure::new(Status::TooMany, operation, detail));
            }
            None => {
                places.all.push(Place { generation: 1, what: None });
                places.all.len() as u32 - 1
            }
        };
        let place = &mut places.all[number as usize];
        place.what = Some(what);
        Ok(Handle::new(number, place.generation, self.forks))
    }

    /// Looks it up.
    pub(crate) fn find(&self, operation: &'static CStr, handle: Handle<K>) -> Result<Arc<K>> {
        self.check_forks(operation, handle)?;
        let places = self.places();
        let place = places.all.get(handle.place as usize);
        let place = place.filter(|place| place.generation == handle.generation);
        match place.and_then(|place| place.what.as_ref()) {
            Some(what) => Ok(Arc::clone(what)),
            None => Err(closed(operation, handle)),
        }
    }

    /// Takes its name away.
    pub(crate) fn close(&self, operation: &'static CStr, handle: Handle<K>) -> Result<Arc<K>> {
        self.check_forks(operation, handle)?;
        let mut places = self.places();
        let place = places.all.get_mut(handle.place as usize);
        let place = place.filter(|place| place.generation == handle.generation);
        let Some((place, what)) = place.and_then(|place| {
            let what = place.what.take()?;
            Some((place, what))
        }) else {
            return Err(closed(operation, handle));
        };
        place.generation = place.generation.wrapping_add(1);
        places.free.push(handle.place);
        Ok(what)
    }

    /// Handles that are open.
    pub(crate) fn count(&self) -> usize {
        let places = self.places();
        places.all.len() - places.free.len()
    }

    fn check_forks(&self, operation: &'static CStr, handle: Handle<K>) -> Result<()> {
        if handle.forks == self.forks {
            return Ok(());
        }
        let detail = format!("this {} is of the process that this one was forked from", K::NAME);
        Err(Failure::new(Status::Forked, operation, detail))
    }
}

fn closed<K: Kind>(operation: &'static CStr, handle: Handle<K>) -> Failure {
    let word = handle.pointer().addr();
    let detail = format!("the {} {word:#x} was closed", K::NAME);
    Failure::new(Status::BadHandle, operation, detail)
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
    fn what_is_open_is_found_and_what_is_closed_is_not() {
        let table = Table::new(0);
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
    fn an_old_handle_does_not_fit_what_came_after() {
        let table = Table::new(0);
        let old = table.open(c"test", Arc::new(Cup(1))).unwrap();
        table.close(c"test", old).unwrap();
        let new = table.open(c"test", Arc::new(Cup(2))).unwrap();
        assert_eq!(old.place, new.place);
        assert_eq!(status(table.close(c"test", old)), Status::BadHandle);
        assert_eq!(*table.find(c"test", new).unwrap(), Cup(2));
    }

    #[test]
    fn a_handle_of_another_process_is_told() {
        let (parent, child) = (Table::new(0), Table::new(1));
        let handle = parent.open(c"test", Arc::new(Cup(1))).unwrap();
        assert_eq!(status(child.find(c"test", handle)), Status::Forked);
        assert_eq!(status(child.close(c"test", handle)), Status::Forked);
    }

    #[test]
    fn places_that_never_were_are_no_handles() {
        let table = Table::<Cup>::new(0);
        assert_eq!(status(table.find(c"test", Handle::new(9, 1, 0))), Status::BadHandle);
    }

    #[test]
    fn who_uses_it_keeps_it() {
        let table = Table::new(0);
        let handle = table.open(c"test", Arc::new(Cup(7))).unwrap();
        let used = table.find(c"test", handle).unwrap();
        drop(table.close(c"test", handle).unwrap());
        assert_eq!(*used, Cup(7));
    }
}
