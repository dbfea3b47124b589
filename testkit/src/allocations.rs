//! A counting allocator, for tests of code that must not allocate.
//!
//! ```
//! use testkit::allocations::{CountingAllocator, of_this_thread};
//!
//! #[global_allocator]
//! static ALLOCATOR: CountingAllocator = CountingAllocator::new();
//!
//! let before = of_this_thread();
//! drop(Box::new(1));
//! assert_eq!(of_this_thread() - before, 1);
//! ```
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The system's allocator, which counts allocations and reallocations of this process.
/// Allocations of C libraries are not counted.
#[derive(Debug, Default)]
pub struct CountingAllocator {
    by_thread_name: bool,
}

impl CountingAllocator {
    /// Counts for [each thread](of_this_thread), and for [all](of_all_threads).
    #[must_use]
    pub const fn new() -> Self {
        Self { by_thread_name: false }
    }

    /// Counts [by the names of threads](by_thread_name), too: a system call each time.
    #[must_use]
    pub const fn with_thread_names() -> Self {
        Self { by_thread_name: true }
    }

    fn count(&self) {
        ALL.fetch_add(1, Relaxed);
        // No longer available when the thread ends.
        let _ = OF_THIS_THREAD.try_with(|mine| mine.set(mine.get() + 1));
        if self.by_thread_name {
            count_by_name();
        }
    }
}

// SAFETY: every call is forwarded to the system's allocator.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.count();
        // SAFETY: by the caller's contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: by the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        self.count();
        // SAFETY: by the caller's contract.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

static ALL: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static OF_THIS_THREAD: Cell<u64> = const { Cell::new(0) };
}

/// Allocations of all threads so far.
#[must_use]
pub fn of_all_threads() -> u64 {
    ALL.load(Relaxed)
}

/// Allocations of this thread so far.
#[must_use]
pub fn of_this_thread() -> u64 {
    OF_THIS_THREAD.get()
}

/// Threads with the same name count together.
struct Count {
    key: AtomicU64,
    name: [AtomicU64; 2],
    allocations: AtomicU64,
}

/// The largest number of names.
pub const MAX_NAMES: usize = 32;
static COUNTS: [Count; MAX_NAMES] = [const {
    Count {
        key: AtomicU64::new(0),
        name: [const { AtomicU64::new(0) }; 2],
        allocations: AtomicU64::new(0),
    }
}; MAX_NAMES];

fn count_by_name() {
    // The kernel's thread name, in two words.
    let mut name = [0_u64; 2];
    // SAFETY: space for the longest name.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    let key = (name[0] ^ name[1].rotate_left(7)).max(1);
    for count in &COUNTS {
        match count.key.compare_exchange(0, key, Relaxed, Relaxed) {
            Ok(_) => count.name.iter().zip(name).for_each(|(to, word)| to.store(word, Relaxed)),
            Err(found) if found == key => {}
            Err(_) => continue,
        }
        count.allocations.fetch_add(1, Relaxed);
        return;
    }
}

/// Allocations so far of all threads of each name, in the order of [`thread_names`].
#[must_use]
pub fn by_thread_name() -> [u64; MAX_NAMES] {
    std::array::from_fn(|number| COUNTS[number].allocations.load(Relaxed))
}

/// The names of threads that allocated; the rest is empty.
#[must_use]
pub fn thread_names() -> [String; MAX_NAMES] {
    std::array::from_fn(|number| {
        let words = COUNTS[number].name.each_ref().map(|word| word.load(Relaxed).to_ne_bytes());
        String::from_utf8_lossy(words.as_flattened()).replace('\0', "")
    })
}
