//! Arguments of C: numbers, handles, texts, and memory.

use std::ffi::{CStr, c_char, c_void};
use std::marker::PhantomData;
use std::ptr;

use crate::failure::{Failure, Result};
use crate::handle::{Handle, Kind};
use crate::timeout::Timeout;

/// Maximum length of a text: that of a path.
const LONGEST_TEXT: usize = 4096;

/// An argument of C.
pub(crate) trait Argument {
    /// Its C type.
    type Raw: Copy;

    /// Clears an output, whatever fails afterwards, with the size that was passed, if any.
    ///
    /// # Safety
    /// The pointer is valid, if it is not NULL.
    unsafe fn clear(_: Self::Raw, _: usize) {}
}

/// Arguments that are passed on unchanged.
macro_rules! plain {
    ($($type:ident),*) => {$(
        impl Argument for $type {
            type Raw = Self;
        }

        impl FromC for $type {
            unsafe fn from_c(_: &'static CStr, _: &'static str, raw: Self) -> Result<Self> {
                Ok(raw)
            }
        }
    )*};
}

/// Converts the argument.
pub(crate) trait FromC: Argument + Sized {
    /// # Safety
    /// The pointer is valid while the value is used, if it is not NULL, and no other thread changes
    /// its memory meanwhile.
    unsafe fn from_c(operation: &'static CStr, name: &'static str, raw: Self::Raw) -> Result<Self>;
}

plain!(usize, i32, u64);

impl Argument for Timeout {
    type Raw = i64;
}

impl FromC for Timeout {
    unsafe fn from_c(_: &'static CStr, _: &'static str, raw: i64) -> Result<Self> {
        Ok(Self::of_nanoseconds(raw))
    }
}

impl<K> Argument for Handle<K> {
    type Raw = *mut K;
}

impl<K: Kind> FromC for Handle<K> {
    unsafe fn from_c(operation: &'static CStr, _: &'static str, raw: *mut K) -> Result<Self> {
        Self::of_pointer(operation, raw)
    }
}

/// A handle, or NULL.
impl<K> Argument for Option<Handle<K>> {
    type Raw = *mut K;
}

impl<K: Kind> FromC for Option<Handle<K>> {
    unsafe fn from_c(operation: &'static CStr, _: &'static str, raw: *mut K) -> Result<Self> {
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
}

impl CallerRange<'_> {
    /// # Safety
    /// The memory of this length is valid, of any kind, and not written while the value is used.
    pub(crate) unsafe fn from_c(
        operation: &'static CStr,
        name: &'static str,
        raw: *const c_void,
        length: usize,
    ) -> Result<Self> {
        check_length(operation, name, raw, length)?;
        // Other code dereferences the number.
        let address = raw.expose_provenance() as u64;
        if address.checked_add(length as u64).is_none() {
            return refuse(operation, name, "is longer than memory can be");
        }
        Ok(Self { address, length, lives: PhantomData })
    }

    pub(crate) fn address(self) -> u64 {
        self.address
    }

    pub(crate) fn length(self) -> usize {
        self.length
    }
}

/// An address that names an object of this library, and is not dereferenced.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Address(pub(crate) usize);

impl Argument for Address {
    type Raw = *mut c_char;
}

impl FromC for Address {
    unsafe fn from_c(_: &'static CStr, _: &'static str, raw: *mut c_char) -> Result<Self> {
        Ok(Self(raw.addr()))
    }
}

/// User data of a callback; not accessed here.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UserData(*mut c_void);

// SAFETY: the header requires callbacks that any thread may call.
unsafe impl Send for UserData {}

impl Argument for UserData {
    type Raw = *mut c_void;
}

impl FromC for UserData {
    unsafe fn from_c(_: &'static CStr, _: &'static str, raw: *mut c_void) -> Result<Self> {
        Ok(Self(raw))
    }
}

impl UserData {
    pub(crate) fn pointer(self) -> *mut c_void {
        self.0
    }
}

pub(super) fn refuse<T>(operation: &'static CStr, name: &str, what: &str) -> Result<T> {
    Err(Failure::invalid(operation, format_args!("the argument \"{name}\" {what}")))
}

/// Not NULL, and aligned for a `T`.
pub(super) fn check_pointer<T>(operation: &'static CStr, name: &str, raw: *const T) -> Result<()> {
    if raw.is_null() {
        return refuse(operation, name, "is NULL");
    }
    if !raw.is_aligned() {
        return refuse(operation, name, "is not aligned");
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
    pub(crate) fn get(self, operation: &'static CStr, name: &str) -> Result<Option<&'a str>> {
        if self.start.is_null() {
            return Ok(None);
        }
        let start = self.start.cast::<u8>();
        // SAFETY: its creator guarantees a zero-terminated text; nothing after the zero is read.
        let length = (0..=LONGEST_TEXT).find(|at| unsafe { *start.add(*at) } == 0);
        let Some(length) = length else {
            return refuse(operation, name, "is a text of more than 4096 bytes");
        };
        // SAFETY: these bytes were just read.
        let bytes = unsafe { std::slice::from_raw_parts(start, length) };
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(Some(text)),
            Err(_) => refuse(operation, name, "is a text that is not UTF-8"),
        }
    }

    /// The text; NULL is an error.
    pub(crate) fn required(self, operation: &'static CStr, name: &str) -> Result<&'a str> {
        match self.get(operation, name)? {
            Some(text) => Ok(text),
            None => refuse(operation, name, "is NULL"),
        }
    }
}

impl Argument for Text<'_> {
    type Raw = *const c_char;
}

impl FromC for Text<'_> {
    unsafe fn from_c(_: &'static CStr, _: &'static str, raw: *const c_char) -> Result<Self> {
        Ok(Self { start: raw, lives: PhantomData })
    }
}

/// Bytes of the caller, for reading.
#[derive(Debug)]
pub(crate) struct Bytes<'a>(pub(crate) &'a [u8]);

impl Argument for Bytes<'_> {
    type Raw = *const c_void;
}

impl Bytes<'_> {
    /// # Safety
    /// The memory of this length is valid, and not written while the value is used.
    pub(crate) unsafe fn from_c(
        operation: &'static CStr,
        name: &'static str,
        raw: *const c_void,
        length: usize,
    ) -> Result<Self> {
        check_length(operation, name, raw, length)?;
        if length == 0 {
            return Ok(Self(&[]));
        }
        // SAFETY: not NULL, not longer than `isize::MAX`, and valid as the caller guarantees.
        Ok(Self(unsafe { std::slice::from_raw_parts(raw.cast(), length) }))
    }
}

/// Bytes of the caller, for writing.
#[derive(Debug)]
pub(crate) struct OutBytes<'a>(pub(crate) &'a mut [u8]);

impl Argument for OutBytes<'_> {
    type Raw = *mut c_void;
}

impl OutBytes<'_> {
    /// # Safety
    /// The memory of this length is valid, and not used by others while the value is used.
    pub(crate) unsafe fn from_c(
        operation: &'static CStr,
        name: &'static str,
        raw: *mut c_void,
        length: usize,
    ) -> Result<Self> {
        check_length(operation, name, raw, length)?;
        if length == 0 {
            return Ok(Self(&mut []));
        }
        // SAFETY: not NULL, not longer than `isize::MAX`, and valid as the caller guarantees.
        // Memory that C left uninitialised has some value, as seen from here.
        Ok(Self(unsafe { std::slice::from_raw_parts_mut(raw.cast(), length) }))
    }
}

fn check_length(
    operation: &'static CStr,
    name: &str,
    raw: *const c_void,
    length: usize,
) -> Result<()> {
    if length > isize::MAX as usize {
        return refuse(operation, name, "is longer than memory can be");
    }
    if raw.is_null() && length > 0 {
        return refuse(operation, name, "is NULL, but its length is not 0");
    }
    Ok(())
}
