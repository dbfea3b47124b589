//! Calls of replaced functions from inside this library, which are for the originals.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
}

struct Inside;

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = IS_INSIDE.try_with(|inside| inside.set(false));
    }
}

/// The outcome of a function of this library; None if this thread is inside already, if there is
/// none, or if it panics: then the original function is to be called.
pub(crate) fn outermost<T>(call: impl FnOnce() -> Option<T>) -> Option<T> {
    // A thread that ends has no thread-local values any more.
    let is_inside = IS_INSIDE.try_with(|inside| inside.replace(true)).unwrap_or(true);
    if is_inside {
        return None;
    }
    let _inside = Inside;
    catch_unwind(AssertUnwindSafe(call)).ok().flatten()
}
