//! The tables of this process.
//!
//! A forked child has tables of its own: it must not use what the parent's handles name, and
//! the parent's locks may be held by threads that the child does not have.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use ipc::ForkGeneration;
use pubsub::{Loan, Node};

use crate::exclusive::Exclusive;
use crate::failure::{Failure, Result};
use crate::handle::{Handle, Kind, fork_count_bits};
use crate::handle_table::HandleTable;
use crate::log::Sink;
use crate::node::OpenNode;
use crate::publisher::OpenPublisher;
use crate::rgaps::{SimplePublisher, SimpleSubscriber};
use crate::status::Status;
use crate::stream::OpenStream;
use crate::subscriber::{OpenSample, OpenSubscriber};
use crate::topic::OpenTopic;

/// What the open handles of this process name.
#[derive(Debug)]
pub(crate) struct Registry {
    incarnation: ForkGeneration,
    forks: u32,
    tables: Tables,
    texts: Mutex<HashMap<usize, CString>>,
    /// The membership that all handles of the simple interface have together.
    pub(crate) simple_node: Mutex<Weak<Node>>,
    /// Where its log goes.
    pub(crate) log: Mutex<Option<Sink>>,
}

/// Which table.
pub(crate) trait Registered: Kind + Sized + 'static {
    fn table(registry: &Registry) -> &HandleTable<Self>;
}

macro_rules! registered {
    ($($type:ty, $table:ident, $number:literal, $name:literal;)*) => {
        #[derive(Debug)]
        struct Tables {
            $($table: HandleTable<$type>,)*
        }

        impl Tables {
            fn new(forks: u8) -> Self {
                Self { $($table: HandleTable::new(forks),)* }
            }

            fn count(&self) -> usize {
                0 $(+ self.$table.count())*
            }
        }

        $(
            impl Kind for $type {
                const NUMBER: u64 = $number;
                const NAME: &'static str = $name;
            }

            impl Registered for $type {
                fn table(registry: &Registry) -> &HandleTable<Self> {
                    &registry.tables.$table
                }
            }
        )*
    };
}

registered! {
    OpenNode, nodes, 0, "node";
    OpenTopic, topics, 1, "topic";
    OpenPublisher, publishers, 2, "publisher";
    Exclusive<Loan>, loans, 3, "loan";
    OpenSubscriber, subscribers, 4, "subscriber";
    OpenSample, samples, 5, "sample";
    SimplePublisher, simple_publishers, 6, "publisher of rgaps.h";
    SimpleSubscriber, simple_subscribers, 7, "subscriber of rgaps.h";
    OpenStream, streams, 8, "stream";
}

static CURRENT: AtomicPtr<Registry> = AtomicPtr::new(ptr::null_mut());

impl Registry {
    fn new(forks: u32) -> Self {
        Self {
            incarnation: ForkGeneration::current(),
            forks,
            tables: Tables::new(fork_count_bits(forks)),
            texts: Mutex::default(),
            simple_node: Mutex::default(),
            log: Mutex::default(),
        }
    }

    /// This process's.
    pub(crate) fn current() -> &'static Self {
        loop {
            let found = CURRENT.load(Ordering::Acquire);
            // SAFETY: it is null or came from a box below, and is never freed.
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
                // SAFETY: another thread was faster; nobody has seen this one.
                drop(unsafe { Box::from_raw(fresh) });
            }
        }
    }

    /// Handles that are open, of all kinds, and texts that were not freed.
    pub(crate) fn count(&self) -> usize {
        let texts = self.texts.lock().unwrap_or_else(PoisonError::into_inner);
        self.tables.count() + texts.len()
    }

    /// Hands a text to C, to be freed by it.
    pub(crate) fn lend_text(&self, text: CString) -> *mut c_char {
        let start = text.as_ptr().cast_mut();
        let mut texts = self.texts.lock().unwrap_or_else(PoisonError::into_inner);
        texts.insert(start.addr(), text);
        start
    }

    /// Frees it.
    pub(crate) fn free_text(&self, operation: &'static CStr, address: usize) -> Result<()> {
        let mut texts = self.texts.lock().unwrap_or_else(PoisonError::into_inner);
        match texts.remove(&address) {
            Some(_) => Ok(()),
            None => {
                let detail = "not a text that this library gave, or freed already";
                Err(Failure::new(Status::BadHandle, operation, detail))
            }
        }
    }
}

/// Gives something a handle.
pub(crate) fn open<K: Registered>(operation: &'static CStr, what: K) -> Result<*mut K> {
    let table = K::table(Registry::current());
    Ok(table.open(operation, Arc::new(what))?.pointer())
}

/// Takes a handle away, if there is one: what it named ends with its last use.
pub(crate) fn close<K: Registered>(
    operation: &'static CStr,
    handle: Option<Handle<K>>,
) -> Result<()> {
    handle.map_or(Ok(()), |handle| handle.close(operation).map(drop))
}

impl<K: Registered> Handle<K> {
    /// What it names.
    pub(crate) fn find(self, operation: &'static CStr) -> Result<Arc<K>> {
        K::table(Registry::current()).find(operation, self)
    }

    /// What it named, for the last time.
    pub(crate) fn close(self, operation: &'static CStr) -> Result<Arc<K>> {
        K::table(Registry::current()).close(operation, self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_freed_once() {
        let registry = Registry::current();
        let address = registry.lend_text(c"{}".to_owned()).addr();
        registry.free_text(c"test", address).unwrap();
        let failure = registry.free_text(c"test", address).unwrap_err();
        assert_eq!(failure.status, Status::BadHandle);
    }

    #[test]
    fn there_is_one_for_all_threads() {
        let here: *const Registry = Registry::current();
        let there = std::thread::spawn(|| ptr::from_ref(Registry::current()).addr());
        assert_eq!(here.addr(), there.join().unwrap());
    }
}
