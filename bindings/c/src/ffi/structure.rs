//! Outputs and structures of C.

use std::marker::PhantomData;
use std::ptr;

use super::argument::{Argument, Name, check_pointer, refuse};
use crate::failure::{Failure, Result};

/// Types that C can be given: any pattern of bytes is a value, zeros included.
///
/// # Safety
/// That is so.
pub(crate) unsafe trait Plain: Copy {
    /// The byte of which an empty value consists.
    const EMPTY_BYTE: u8 = 0;
}

// SAFETY: numbers and addresses are valid for any bytes.
unsafe impl Plain for usize {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for i64 {}
// SAFETY: as above.
unsafe impl Plain for u8 {}
// SAFETY: as above; three numbers in C layout.
unsafe impl Plain for gpu::Block {}
// SAFETY: as above; two numbers.
unsafe impl Plain for gpu::Range {}
// SAFETY: as above; three numbers.
unsafe impl Plain for gpu::View {}
// SAFETY: as above.
unsafe impl Plain for i32 {
    /// Descriptor -1 is none, since 0 is valid.
    const EMPTY_BYTE: u8 = 0xff;
}
// SAFETY: as above.
unsafe impl<T> Plain for *mut T {}
// SAFETY: as above.
unsafe impl<T> Plain for *const T {}

/// A structure that C passes or receives.
///
/// # Safety
/// The type is `repr(C)` without gaps, and any pattern of bytes is a value; structures that C
/// passes begin with their size.
pub(crate) unsafe trait Layout: Copy {
    /// The structure's size in the first version of the interface.
    const MIN_SIZE: usize;
}

/// A structure that C passes: missing fields have their default.
pub(crate) trait WithDefaults: Layout {
    /// With all defaults, and this size in its first field.
    fn defaults(size: usize) -> Self;
}

/// An output; it is [empty](Plain::EMPTY_BYTE) if the call fails, for any reason.
#[derive(Debug)]
pub(crate) struct Out<'a, T> {
    target: *mut T,
    lives: PhantomData<&'a mut T>,
}

impl<T: Plain> Argument for Out<'_, T> {
    type Raw = *mut T;

    unsafe fn clear(raw: *mut T, _: usize) {
        if !raw.is_null() && raw.is_aligned() {
            // SAFETY: not NULL, aligned, and valid as the caller guarantees.
            unsafe { raw.write_bytes(T::EMPTY_BYTE, 1) };
        }
    }

    unsafe fn from_c(name: Name<'_>, raw: *mut T, _: usize) -> Result<Self> {
        check_pointer(name, raw)?;
        Ok(Self { target: raw, lives: PhantomData })
    }
}

impl<T: Plain> Out<'_, T> {
    /// Writes the value, as the last step of a function.
    pub(crate) fn put(self, value: T) -> Result<()> {
        // SAFETY: checked when it was created.
        unsafe { self.target.write(value) };
        Ok(())
    }
}

/// An output structure in the size that the caller knows; zeros, if the call fails.
#[derive(Debug)]
pub(crate) struct OutStruct<'a, T> {
    target: *mut u8,
    size: usize,
    lives: PhantomData<&'a mut T>,
}

impl<T: Layout> Argument for OutStruct<'_, T> {
    type Raw = *mut T;

    unsafe fn clear(raw: *mut T, size: usize) {
        if !raw.is_null() && raw.is_aligned() && is_possible::<T>(size) {
            // SAFETY: not NULL, and valid as the caller guarantees.
            unsafe { raw.cast::<u8>().write_bytes(0, size) };
        }
    }

    unsafe fn from_c(name: Name<'_>, raw: *mut T, size: usize) -> Result<Self> {
        check_pointer(name, raw)?;
        check_size::<T>(name, size)?;
        Ok(Self { target: raw.cast(), size, lives: PhantomData })
    }
}

impl<T: Layout> OutStruct<'_, T> {
    /// Writes it. The value may have another lifetime: only C reads it.
    pub(crate) fn put<U: Layout>(self, value: U) -> Result<()> {
        const { assert!(size_of::<U>() == size_of::<T>()) };
        let known = self.size.min(size_of::<U>());
        // SAFETY: both have that length, and one is owned. Bytes between fields may be anything;
        // layouts have none.
        unsafe { ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), self.target, known) };
        Ok(())
    }

    /// The size that the caller knows.
    pub(crate) fn size(&self) -> usize {
        self.size
    }
}

impl<T: WithDefaults> OutStruct<'_, T> {
    /// Writes the defaults, with the caller's size, so that unknown fields that it sets are detected.
    pub(crate) fn put_defaults(self) -> Result<()> {
        let size = self.size;
        self.put(T::defaults(size))
    }
}

/// Outputs that may be NULL.
macro_rules! optional {
    ($($output:ident: $bound:ident),*) => {$(
        impl<T: $bound> Argument for Option<$output<'_, T>> {
            type Raw = *mut T;

            unsafe fn clear(raw: *mut T, size: usize) {
                // SAFETY: as the caller guarantees.
                unsafe { $output::<T>::clear(raw, size) };
            }

            unsafe fn from_c(name: Name<'_>, raw: *mut T, size: usize) -> Result<Self> {
                // SAFETY: as the caller guarantees.
                (!raw.is_null()).then(|| unsafe { $output::from_c(name, raw, size) }).transpose()
            }
        }
    )*};
}

optional!(Out: Plain, OutStruct: Layout);

/// Maximum size of a structure of any version.
const LONGEST_STRUCTURE: usize = 8192;

fn is_possible<T: Layout>(size: usize) -> bool {
    (T::MIN_SIZE..=LONGEST_STRUCTURE).contains(&size)
}

fn check_size<T: Layout>((operation, name): Name<'_>, size: usize) -> Result<()> {
    if !is_possible::<T>(size) {
        let detail = format_args!(
            "the structure \"{name}\" has a size of {size}: from {} to {LONGEST_STRUCTURE} is possible",
            T::MIN_SIZE
        );
        return Err(Failure::invalid(operation, detail));
    }
    Ok(())
}

/// A structure that begins with its size; NULL means the defaults.
impl<T: WithDefaults> Argument for Option<T> {
    type Raw = *const T;

    unsafe fn from_c(name: Name<'_>, raw: *const T, _: usize) -> Result<Self> {
        if raw.is_null() {
            return Ok(None);
        }
        check_pointer(name, raw)?;
        // SAFETY: not NULL, aligned, and the structure begins with its size.
        let size = unsafe { raw.cast::<usize>().read() };
        check_size::<T>(name, size)?;
        let known = size.min(size_of::<T>());
        // SAFETY: the caller's structure has the size that it contains.
        let unknown =
            unsafe { std::slice::from_raw_parts(raw.cast::<u8>().add(known), size - known) };
        if unknown.iter().any(|byte| *byte != 0) {
            let what = "sets what this version of the library does not know";
            return refuse(name, what);
        }
        let mut value = T::defaults(size_of::<T>());
        // SAFETY: both have that length, and any bytes are a value of a layout.
        unsafe {
            ptr::copy_nonoverlapping(raw.cast::<u8>(), (&raw mut value).cast::<u8>(), known);
        }
        Ok(Some(value))
    }
}
