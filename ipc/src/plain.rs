//! Values that may lie in shared memory, whoever wrote them.
//!
//! A reference or a pointer means nothing to another process, and a value of which
//! not all bytes are valid is a trap laid for whoever reads it. So only [`Plain`]
//! types are shared, and the derive macro refuses the others:
//!
//! ```compile_fail
//! #[derive(Clone, Copy, ipc::Plain)]
//! #[repr(C)]
//! struct Bad {
//!     name: &'static str,
//! }
//! ```
//! ```compile_fail
//! #[derive(Clone, Copy, ipc::Plain)]
//! #[repr(C)]
//! struct Bad {
//!     next: *mut u64,
//! }
//! ```
//! ```compile_fail
//! #[derive(Clone, Copy, ipc::Plain)]
//! #[repr(C)]
//! struct Bad {
//!     yes: bool, // not every byte is one
//! }
//! ```
//! ```compile_fail
//! #[derive(Clone, Copy, ipc::Plain)]
//! struct Bad {
//!     layout: u64, // the compiler may lay it out as it likes
//! }
//! ```
//! ```compile_fail
//! #[derive(Clone, Copy, ipc::Plain)]
//! #[repr(C)]
//! struct Bad {
//!     small: u8, // and then seven bytes of nobody knows what
//!     large: u64,
//! }
//! ```
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

/// A type of which any bytes are a value, that has no padding, the same layout in
/// every program, and nothing in it that means something to one process only.
///
/// ```
/// #[derive(Debug, Clone, Copy, PartialEq, ipc::Plain)]
/// #[repr(C)]
/// struct Pose {
///     position: [f32; 3],
///     camera: u32,
///     time: u64,
/// }
/// ```
///
/// # Safety
/// All of the above holds. Use the derive macro, which checks it.
pub unsafe trait Plain: Copy + Send + Sync + 'static {}

macro_rules! plain {
    ($($number:ty)*) => {
        $(
            // SAFETY: a number, of which all bytes are values.
            unsafe impl Plain for $number {}
        )*
    };
}
plain!(u8 u16 u32 u64 u128 i8 i16 i32 i64 i128 f32 f64);

// SAFETY: one after the other, without gaps.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// The bytes of a value.
#[must_use]
pub fn bytes_of<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: no padding, so all bytes are set; they live as long as the value.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// The value that these bytes are; None if they are not exactly as many.
#[must_use]
pub fn from_bytes<T: Plain>(bytes: &[u8]) -> Option<T> {
    if bytes.len() != size_of::<T>() {
        return None;
    }
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: as many bytes as the value has, of which any are a value.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.as_mut_ptr().cast(), bytes.len());
        Some(value.assume_init())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_there_and_back() {
        let value = [1_u16, 0x203, 4];
        assert_eq!(from_bytes(bytes_of(&value)), Some(value));
        assert_eq!(from_bytes::<u32>(&[1, 2, 3]), None);
    }
}
