//! The handle tables of this process.
//!
//! A forked child has its own tables: it must not use objects of the parent's handles, whose locks
//! may be held by threads that the child does not have.
#![allow(unsafe_code)]

use std::array;
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use ipc::ForkGeneration;
use pubsub::Node;

use crate::failure::{Failure, Operation, Result};
use crate::ffi::UserData;
use crate::handle::{Handle, HandleTable, KINDS, Kind, fork_count_bits};
use crate::status::Status;

/// The callback of the log.
pub(crate) type LogCallback = unsafe extern "C" fn(i32, *const c_char, *mut c_void);

/// Objects of all open handles of this process.
#[derive(Debug)]
pub(crate) struct Registry {
    incarnation: ForkGeneration,
    forks: u32,
    tables: [HandleTable; KINDS],
    texts: Mutex<HashMap<usize, CString>>,
    /// The node that all handles of rgaps.h share.
    pub(crate) simple_node: Mutex<Weak<Node>>,
    pub(crate) log: Mutex<Option<(LogCallback, UserData)>>,
}

static CURRENT: AtomicPtr<Registry> = AtomicPtr::new(ptr::null_mut());

impl Registry {
    fn new(forks: u32) -> Self {
        Self {
            incarnation: ForkGeneration::current(),
            forks,
            tables: array::from_fn(|_| HandleTable::new(fork_count_bits(forks))),
            texts: Mutex::default(),
            simple_node: Mutex::default(),
            log: Mutex::default(),
        }
    }

    /// The registry of this process.
    pub(crate) fn current() -> &'static Self {
        loop {
            let found = CURRENT.load(Ordering::Acquire);
            // SAFETY: null, or from a box below, which is never freed.
            let registry = unsafe { found.as_ref() };
            if let Some(registry) = registry
                && registry.incarnation.is_current()
            {
                return registry;
            }
            let forks = registry.map_or(0, |parent| parent.forks.wrapping_add(1));
            let fresh = Box::into_raw(Box::new(Self::new(forks)));
            let stored =
                CURRENT.compare_exchange(found, fresh, Ordering::AcqRel, Ordering::Acquire);
            if stored.is_err() {
                // SAFETY: another thread was faster; no other reference to this one exists.
                drop(unsafe { Box::from_raw(fresh) });
            }
        }
    }

    fn table<K: Kind>(&self) -> &HandleTable {
        &self.tables[K::NUMBER as usize]
    }

    /// Number of open handles, and of texts that were not freed.
    pub(crate) fn count(&self) -> usize {
        let texts = self.texts.lock().unwrap_or_else(PoisonError::into_inner);
        self.tables.iter().map(HandleTable::count).sum::<usize>() + texts.len()
    }

    /// Passes a text to C, which must free it.
    pub(crate) fn lend_text(&self, text: CString) -> *mut c_char {
        let start = text.as_ptr().cast_mut();
        let mut texts = self.texts.lock().unwrap_or_else(PoisonError::into_inner);
        texts.insert(start.addr(), text);
        start
    }

    /// Frees a text of C.
    pub(crate) fn free_text(&self, operation: Operation, address: usize) -> Result<()> {
        let mut texts = self.texts.lock().unwrap_or_else(PoisonError::into_inner);
        match texts.remove(&address) {
            Some(_) => Ok(()),
            None => {
                let detail = "not a text of this library, or already freed";
                Err(Failure::new(Status::BadHandle, operation, detail))
            }
        }
    }
}

/// Opens a handle of an object.
pub(crate) fn open<K: Kind>(operation: Operation, what: K) -> Result<*mut K> {
    let table = Registry::current().table::<K>();
    Ok(table.open(operation, Arc::new(what))?.pointer())
}

/// Closes a handle, if it is not NULL: its object ends with its last use.
pub(crate) fn close<K: Kind>(operation: Operation, handle: Option<Handle<K>>) -> Result<()> {
    handle.map_or(Ok(()), |handle| handle.close(operation).map(|closed| closed.end()))
}

/// Exports a function that closes handles of a kind, if they are not NULL.
macro_rules! export_close {
    ($kind:ty, $name:ident, $operation:literal) => {
        $crate::ffi::export! {
            fn $name(handle: Option<$crate::handle::Handle<$kind>>) -> i32, $operation {
                $crate::registry::close(OPERATION, handle)
            }
        }
    };
}
pub(crate) use export_close;

impl<K: Kind> Handle<K> {
    /// The object of the handle.
    pub(crate) fn find(self, operation: Operation) -> Result<Arc<K>> {
        Registry::current().table::<K>().find(operation, self)
    }

    /// Closes the handle, and returns its object.
    pub(crate) fn close(self, operation: Operation) -> Result<Arc<K>> {
        Registry::current().table::<K>().close(operation, self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_freed_once() {
        let registry = Registry::current();
        let address = registry.lend_text(c"{}".to_owned()).addr();
        registry.free_text(c"test", address).unwrap();
        let failure = registry.free_text(c"test", address).unwrap_err();
        assert_eq!(failure.status, Status::BadHandle);
    }

    #[test]
    fn all_threads_share_one_registry() {
        let own: *const Registry = Registry::current();
        let other = std::thread::spawn(|| ptr::from_ref(Registry::current()).addr());
        assert_eq!(own.addr(), other.join().unwrap());
    }
}
