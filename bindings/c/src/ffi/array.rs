//! Arrays of C.

use std::marker::PhantomData;
use std::ptr;

use super::argument::{Argument, Name, check_pointer, refuse};
use super::structure::Plain;
use crate::failure::{Operation, Result};

/// An array whose number of elements is not known yet, as an argument or in a structure; may be
/// NULL.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Array<'a, T> {
    start: *const T,
    lives: PhantomData<&'a [T]>,
}

impl<T> Clone for Array<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Array<'_, T> {}

impl<T> Default for Array<'_, T> {
    fn default() -> Self {
        Self { start: ptr::null(), lives: PhantomData }
    }
}

impl<'a, T: Plain> Array<'a, T> {
    /// An array of Rust.
    pub(crate) fn of(all: &'a [T]) -> Self {
        Self { start: all.as_ptr(), lives: PhantomData }
    }

    pub(crate) fn is_null(self) -> bool {
        self.start.is_null()
    }

    /// The array's elements, of which the caller has stated the number; NULL is an error if there
    /// are any.
    pub(crate) fn get(self, operation: Operation, name: &str, count: usize) -> Result<&'a [T]> {
        let name = (operation, name);
        if count == 0 {
            return Ok(&[]);
        }
        check_pointer(name, self.start)?;
        if count > isize::MAX as usize / size_of::<T>() {
            return refuse(name, "is longer than memory can be");
        }
        // SAFETY: not NULL, aligned, not too long, and valid as its creator guarantees.
        Ok(unsafe { std::slice::from_raw_parts(self.start, count) })
    }
}

impl<T: Plain> Argument for Array<'_, T> {
    type Raw = *const T;

    unsafe fn from_c(_: Name<'_>, raw: *const T, _: usize) -> Result<Self> {
        Ok(Self { start: raw, lives: PhantomData })
    }
}

/// An array for results, whose number of elements is not known yet; NULL for none.
#[derive(Debug)]
pub(crate) struct OutArray<'a, T> {
    start: *mut T,
    lives: PhantomData<&'a mut [T]>,
}

impl<T: Plain> OutArray<'_, T> {
    /// Writes results to the array's first elements, of which the caller has stated how many there
    /// are.
    pub(crate) fn put(
        self,
        operation: Operation,
        name: &str,
        capacity: usize,
        results: &[T],
    ) -> Result<()> {
        if results.is_empty() {
            return Ok(());
        }
        check_pointer((operation, name), self.start)?;
        if results.len() > capacity {
            let cause = format!("has {capacity} elements, for {} results", results.len());
            return refuse((operation, name), &cause);
        }
        // SAFETY: not NULL, aligned, and valid for so many elements as the caller guarantees.
        unsafe { self.start.copy_from_nonoverlapping(results.as_ptr(), results.len()) };
        Ok(())
    }
}

impl<T: Plain> Argument for OutArray<'_, T> {
    type Raw = *mut T;

    unsafe fn from_c(_: Name<'_>, raw: *mut T, _: usize) -> Result<Self> {
        Ok(Self { start: raw, lives: PhantomData })
    }
}
