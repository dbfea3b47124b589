//! Values that forked children do not share with their parents.

use std::sync::OnceLock;

use threads::ForkGeneration;

/// A value of this process, made at the first use. A forked child makes its own, whatever state a
/// lock in that of the parent was in; the parent's is never dropped there.
///
/// ```
/// use std::sync::Mutex;
/// static NAMES: ipc::PerProcess<Mutex<Vec<String>>> = ipc::PerProcess::new();
/// NAMES.get().lock().unwrap().push("camera".to_owned());
/// // … a fork: the child has no names …
/// assert_eq!(NAMES.get().lock().unwrap().len(), 1);
/// ```
#[derive(Debug)]
pub struct PerProcess<T>(OnceLock<Generation<T>>);

#[derive(Debug)]
struct Generation<T> {
    number: ForkGeneration,
    value: T,
    /// That of a forked child.
    child: OnceLock<Box<Self>>,
}

impl<T: Default> Generation<T> {
    fn new() -> Self {
        Self { number: ForkGeneration::current(), value: T::default(), child: OnceLock::new() }
    }
}

impl<T: Default> PerProcess<T> {
    /// For a static.
    #[must_use]
    pub const fn new() -> Self {
        Self(OnceLock::new())
    }

    /// That of this process.
    pub fn get(&self) -> &T {
        let mut generation = self.0.get_or_init(Generation::new);
        while !generation.number.is_current() {
            generation = generation.child.get_or_init(|| Box::new(Generation::new()));
        }
        &generation.value
    }
}

impl<T: Default> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(loom)))]
#[allow(unsafe_code)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    static VALUE: PerProcess<Mutex<u32>> = PerProcess::new();

    #[test]
    fn forked_child_has_its_own_value() {
        let locked = VALUE.get().lock().unwrap();
        // SAFETY: the child only reads a value, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = VALUE.get().try_lock().map_or(1, |value| i32::from(*value != 0));
            // SAFETY: ends the child without running any code of the parent.
            unsafe { libc::_exit(code) };
        }
        let mut status = -1;
        // SAFETY: a child of this process.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0, "the child found the lock of its parent");
        drop(locked);
    }
}
