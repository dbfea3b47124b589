//! Values and structures that C gives, or wants.

use std::ffi::CStr;
use std::marker::PhantomData;
use std::ptr;

use super::argument::{Argument, FromC, check_pointer, refuse};
use crate::failure::{Failure, Result};
use crate::layout::{Layout, WithDefaults};

/// What C can be given: any pattern of bytes is one of its values, zeros included.
///
/// # Safety
/// That is so.
pub(crate) unsafe trait Plain: Copy {
    /// Every byte of what it is when there is nothing.
    const EMPTY_BYTE: u8 = 0;
}

// SAFETY: numbers and addresses are what their bytes say.
unsafe impl Plain for usize {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for i32 {
    /// Of the numbers of descriptors -1 is none, and 0 is one.
    const EMPTY_BYTE: u8 = 0xff;
}
// SAFETY: as above.
unsafe impl<T> Plain for *mut T {}
// SAFETY: as above.
unsafe impl<T> Plain for *const T {}

/// Where the caller wants a value; [nothing](Plain::NOTHING) is there if the call fails, whatever for.
#[derive(Debug)]
pub(crate) struct Out<'a, T> {
    place: *mut T,
    lives: PhantomData<&'a mut T>,
}

impl<T: Plain> Argument for Out<'_, T> {
    type Raw = *mut T;

    unsafe fn clear(raw: *mut T, _: usize) {
        if !raw.is_null() && raw.is_aligned() {
            // SAFETY: not NULL, aligned, and the caller promised room.
            unsafe { raw.write_bytes(T::EMPTY_BYTE, 1) };
        }
    }
}

impl<T: Plain> FromC for Out<'_, T> {
    unsafe fn from_c(operation: &'static CStr, name: &'static str, raw: *mut T) -> Result<Self> {
        check_pointer(operation, name, raw)?;
        Ok(Self { place: raw, lives: PhantomData })
    }
}

impl<T: Plain> Out<'_, T> {
    /// Done, as the body of a function ends.
    pub(crate) fn put(self, value: T) -> Result<()> {
        // SAFETY: as when it was made.
        unsafe { self.place.write(value) };
        Ok(())
    }
}

/// A structure that the caller wants filled, as far as he knows it; zeros, if the call fails.
#[derive(Debug)]
pub(crate) struct OutStruct<'a, T> {
    place: *mut u8,
    size: usize,
    lives: PhantomData<&'a mut T>,
}

impl<T: Layout> Argument for OutStruct<'_, T> {
    type Raw = *mut T;

    unsafe fn clear(raw: *mut T, size: usize) {
        if !raw.is_null() && raw.is_aligned() && is_possible::<T>(size) {
            // SAFETY: not NULL, and the caller promised room.
            unsafe { raw.cast::<u8>().write_bytes(0, size) };
        }
    }
}

impl<T: Layout> OutStruct<'_, T> {
    /// # Safety
    /// There is room for so many bytes.
    pub(crate) unsafe fn from_c(
        operation: &'static CStr,
        name: &'static str,
        raw: *mut T,
        size: usize,
    ) -> Result<Self> {
        check_pointer(operation, name, raw)?;
        check_size::<T>(operation, name, size)?;
        Ok(Self { place: raw.cast(), size, lives: PhantomData })
    }

    /// Fills it. The value may be one with another lifetime: only C reads it.
    pub(crate) fn put<U: Layout>(self, value: U) -> Result<()> {
        const { assert!(size_of::<U>() == size_of::<T>()) };
        let known = self.size.min(size_of::<U>());
        // SAFETY: both are that long, and one is ours. Bytes between fields may be anything;
        // layouts have none.
        unsafe { ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), self.place, known) };
        Ok(())
    }

    /// How much of it the caller knows.
    pub(crate) fn size(&self) -> usize {
        self.size
    }
}

/// The same, or NULL if he does not want it.
#[derive(Debug)]
pub(crate) struct OptionalOutStruct<'a, T>(pub(crate) Option<OutStruct<'a, T>>);

impl<T: Layout> Argument for OptionalOutStruct<'_, T> {
    type Raw = *mut T;

    unsafe fn clear(raw: *mut T, size: usize) {
        // SAFETY: as the caller promised.
        unsafe { OutStruct::<T>::clear(raw, size) };
    }
}

impl<T: Layout> OptionalOutStruct<'_, T> {
    /// # Safety
    /// There is room for so many bytes, or the pointer is NULL.
    pub(crate) unsafe fn from_c(
        operation: &'static CStr,
        name: &'static str,
        raw: *mut T,
        size: usize,
    ) -> Result<Self> {
        if raw.is_null() {
            return Ok(Self(None));
        }
        // SAFETY: as the caller promised.
        Ok(Self(Some(unsafe { OutStruct::from_c(operation, name, raw, size) }?)))
    }
}

/// The longest structure that a caller can mean.
const LONGEST_STRUCTURE: usize = 4096;

fn is_possible<T: Layout>(size: usize) -> bool {
    (T::MIN_SIZE..=LONGEST_STRUCTURE).contains(&size)
}

fn check_size<T: Layout>(operation: &'static CStr, name: &str, size: usize) -> Result<()> {
    if !is_possible::<T>(size) {
        let detail = format_args!(
            "the structure \"{name}\" has a size of {size}: from {} to {LONGEST_STRUCTURE} is possible",
            T::MIN_SIZE
        );
        return Err(Failure::invalid(operation, detail));
    }
    Ok(())
}

/// A structure that begins with its size; its usual values where C gives NULL.
#[derive(Debug)]
pub(crate) struct OptionalStruct<T>(pub(crate) Option<T>);

impl<T> Argument for OptionalStruct<T> {
    type Raw = *const T;
}

impl<T: WithDefaults> FromC for OptionalStruct<T> {
    unsafe fn from_c(operation: &'static CStr, name: &'static str, raw: *const T) -> Result<Self> {
        if raw.is_null() {
            return Ok(Self(None));
        }
        check_pointer(operation, name, raw)?;
        // SAFETY: not NULL, aligned, and the structure begins with its size.
        let size = unsafe { raw.cast::<usize>().read() };
        check_size::<T>(operation, name, size)?;
        let known = size.min(size_of::<T>());
        // SAFETY: the caller's structure is that long, as it says itself.
        let unknown =
            unsafe { std::slice::from_raw_parts(raw.cast::<u8>().add(known), size - known) };
        if unknown.iter().any(|byte| *byte != 0) {
            let what = "sets what this version of the library does not know";
            return refuse(operation, name, what);
        }
        let mut value = T::defaults();
        // SAFETY: both are that long, and any bytes are a value of a layout.
        unsafe {
            ptr::copy_nonoverlapping(raw.cast::<u8>(), (&raw mut value).cast::<u8>(), known);
        }
        Ok(Self(Some(value)))
    }
}
