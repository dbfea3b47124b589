//! Arguments of C: numbers, handles, texts, and memory.

use std::ffi::{CStr, c_char, c_void};
use std::marker::PhantomData;
use std::ptr;

use crate::failure::{Failure, Operation, Result};
use crate::handle::{Handle, Kind};
use crate::timeout::Timeout;

/// Maximum length of a text: that of a path.
const LONGEST_TEXT: usize = 4096;

/// Operation and name of an argument, for messages.
pub(crate) type Name<'a> = (Operation, &'a str);

/// An argument of C.
pub(crate) trait Argument: Sized {
    /// The argument's C type.
    type Raw: Copy;

    /// Clears an output, whatever fails afterwards, with the size that was passed, if any.
    ///
    /// # Safety
    /// The pointer is valid, if it is not NULL.
    unsafe fn clear(_: Self::Raw, _: usize) {}

    /// Converts the argument, with the length that was passed, if any.
    ///
    /// # Safety
    /// The pointer is valid for the length while the value is used, if it is not NULL, and no other
    /// thread changes its memory meanwhile.
    unsafe fn from_c(name: Name<'_>, raw: Self::Raw, length: usize) -> Result<Self>;
}

/// Arguments that are passed on unchanged.
macro_rules! plain {
    ($($type:ty),*) => {$(
        impl $crate::ffi::Argument for $type {
            type Raw = Self;

            unsafe fn from_c(
                _: $crate::ffi::Name<'_>,
                raw: Self,
                _: usize,
            ) -> $crate::failure::Result<Self> {
                Ok(raw)
            }
        }
    )*};
}
pub(crate) use plain;

plain!(usize, i32, u32, u64, *mut c_char);

impl Argument for Timeout {
    type Raw = i64;

    unsafe fn from_c(_: Name<'_>, raw: i64, _: usize) -> Result<Self> {
        Ok(Self::of_nanoseconds(raw))
    }
}

impl<K: Kind> Argument for Handle<K> {
    type Raw = *mut K;

    unsafe fn from_c((operation, _): Name<'_>, raw: *mut K, _: usize) -> Result<Self> {
        Self::of_pointer(operation, raw)
    }
}

/// A handle, or NULL.
impl<K: Kind> Argument for Option<Handle<K>> {
    type Raw = *mut K;

    unsafe fn from_c((operation, _): Name<'_>, raw: *mut K, _: usize) -> Result<Self> {
        if raw.is_null() { Ok(None) } else { Handle::of_pointer(operation, raw).map(Some) }
    }
}

/// A caller's memory of any kind: it is not accessed here.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallerRange<'a> {
    address: u64,
    length: usize,
    lives: PhantomData<&'a [u8]>,
}

impl Argument for CallerRange<'_> {
    type Raw = *const c_void;

    unsafe fn from_c(name: Name<'_>, raw: *const c_void, length: usize) -> Result<Self> {
        check_length(name, raw, length)?;
        // Other code dereferences the number.
        let address = raw.expose_provenance() as u64;
        if address.checked_add(length as u64).is_none() {
            return refuse(name, "is longer than memory can be");
        }
        Ok(Self { address, length, lives: PhantomData })
    }
}

impl CallerRange<'_> {
    pub(crate) fn address(self) -> u64 {
        self.address
    }

    pub(crate) fn length(self) -> usize {
        self.length
    }
}

/// A caller's buffer whose length other arguments state: it is not accessed here. May be NULL.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallerBuffer<'a> {
    start: *mut u8,
    lives: PhantomData<&'a mut [u8]>,
}

impl CallerBuffer<'_> {
    pub(crate) const NULL: Self = Self { start: ptr::null_mut(), lives: PhantomData };

    /// This buffer, or the other one if it is NULL.
    pub(crate) fn or(self, other: Self) -> Self {
        if self.start.is_null() { other } else { self }
    }

    /// The buffer from a byte on; NULL stays NULL.
    pub(crate) fn behind(self, bytes: usize) -> Self {
        let start = if self.start.is_null() { self.start } else { self.start.wrapping_add(bytes) };
        Self { start, lives: PhantomData }
    }

    pub(crate) fn start(self) -> *mut u8 {
        self.start
    }

    pub(crate) fn is_null(self) -> bool {
        self.start.is_null()
    }
}

impl Argument for CallerBuffer<'_> {
    type Raw = *mut c_void;

    unsafe fn from_c(_: Name<'_>, raw: *mut c_void, _: usize) -> Result<Self> {
        Ok(Self { start: raw.cast(), lives: PhantomData })
    }
}

/// User data of a callback; not accessed here.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UserData(*mut c_void);

// SAFETY: the header requires callbacks that any thread may call.
unsafe impl Send for UserData {}
// SAFETY: as above.
unsafe impl Sync for UserData {}

impl Argument for UserData {
    type Raw = *mut c_void;

    unsafe fn from_c(_: Name<'_>, raw: *mut c_void, _: usize) -> Result<Self> {
        Ok(Self(raw))
    }
}

impl UserData {
    pub(crate) fn pointer(self) -> *mut c_void {
        self.0
    }
}

pub(super) fn refuse<T>((operation, name): Name<'_>, what: &str) -> Result<T> {
    Err(Failure::invalid(operation, format_args!("the argument \"{name}\" {what}")))
}

/// Not NULL, and aligned for a `T`.
pub(super) fn check_pointer<T>(name: Name<'_>, raw: *const T) -> Result<()> {
    if raw.is_null() {
        return refuse(name, "is NULL");
    }
    if !raw.is_aligned() {
        return refuse(name, "is not aligned");
    }
    Ok(())
}

/// A text of C, as an argument or in a structure; may be NULL.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Text<'a> {
    start: *const c_char,
    lives: PhantomData<&'a c_char>,
}

impl Default for Text<'_> {
    fn default() -> Self {
        Self { start: ptr::null(), lives: PhantomData }
    }
}

impl<'a> Text<'a> {
    /// A text of Rust.
    pub(crate) fn of(text: &'a CStr) -> Self {
        Self { start: text.as_ptr(), lives: PhantomData }
    }

    /// The text; None if it is NULL.
    pub(crate) fn get(self, operation: Operation, name: &str) -> Result<Option<&'a str>> {
        if self.start.is_null() {
            return Ok(None);
        }
        let start = self.start.cast::<u8>();
        // SAFETY: its creator guarantees a zero-terminated text; nothing after the zero is read.
        let length = (0..=LONGEST_TEXT).find(|at| unsafe { *start.add(*at) } == 0);
        let Some(length) = length else {
            return refuse((operation, name), "is a text of more than 4096 bytes");
        };
        // SAFETY: these bytes were just read.
        let bytes = unsafe { std::slice::from_raw_parts(start, length) };
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(Some(text)),
            Err(_) => refuse((operation, name), "is a text that is not UTF-8"),
        }
    }

    /// The text; NULL is an error.
    pub(crate) fn required(self, operation: Operation, name: &str) -> Result<&'a str> {
        self.get(operation, name)?.map_or_else(|| refuse((operation, name), "is NULL"), Ok)
    }
}

impl Argument for Text<'_> {
    type Raw = *const c_char;

    unsafe fn from_c(_: Name<'_>, raw: *const c_char, _: usize) -> Result<Self> {
        Ok(Self { start: raw, lives: PhantomData })
    }
}

/// Bytes of the caller, for reading.
impl Argument for &[u8] {
    type Raw = *const c_void;

    unsafe fn from_c(name: Name<'_>, raw: *const c_void, length: usize) -> Result<Self> {
        check_length(name, raw, length)?;
        if length == 0 {
            return Ok(&[]);
        }
        // SAFETY: not NULL, not longer than `isize::MAX`, and valid as the caller guarantees.
        Ok(unsafe { std::slice::from_raw_parts(raw.cast(), length) })
    }
}

/// Bytes of the caller, for writing.
impl Argument for &mut [u8] {
    type Raw = *mut c_void;

    unsafe fn from_c(name: Name<'_>, raw: *mut c_void, length: usize) -> Result<Self> {
        check_length(name, raw, length)?;
        if length == 0 {
            return Ok(&mut []);
        }
        // SAFETY: not NULL, not longer than `isize::MAX`, and valid as the caller guarantees.
        // Memory that C left uninitialised has some value, as seen from here.
        Ok(unsafe { std::slice::from_raw_parts_mut(raw.cast(), length) })
    }
}

fn check_length(name: Name<'_>, raw: *const c_void, length: usize) -> Result<()> {
    if length > isize::MAX as usize {
        return refuse(name, "is longer than memory can be");
    }
    if raw.is_null() && length > 0 {
        return refuse(name, "is NULL, but its length is not 0");
    }
    Ok(())
}
