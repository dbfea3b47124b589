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

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::words::Words;

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

const WORD: usize = size_of::<u64>();

/// A value in shared memory that one writes and any number read, whole at any time.
///
/// There are two copies, and a count that tells which one holds: a writer that dies
/// half way has changed the other one.
///
/// ```
/// use ipc::{LocalWords, SharedValue};
/// let words = LocalWords::zeroed(SharedValue::<LocalWords, [u32; 3]>::WORDS);
/// let shared = SharedValue::<_, [u32; 3]>::new(&words).unwrap();
/// assert_eq!(shared.read(), Some([0; 3]));
/// shared.write(&[1, 2, 3]);
/// assert_eq!(shared.read(), Some([1, 2, 3]));
/// ```
#[derive(Debug)]
pub struct SharedValue<W, T> {
    words: W,
    value: PhantomData<T>,
}

impl<W: Words, T: Plain> SharedValue<W, T> {
    const COPY: usize = size_of::<T>().div_ceil(WORD);
    /// Words that it takes; zeroed, they are the value of zeroes.
    pub const WORDS: usize = 1 + 2 * Self::COPY;

    /// The value in these words; None if they are too few.
    #[must_use]
    pub fn new(words: W) -> Option<Self> {
        (words.count() >= Self::WORDS).then_some(Self { words, value: PhantomData })
    }

    fn copy(count: u64) -> usize {
        1 + (count % 2) as usize * Self::COPY
    }

    /// Changes the value. Only one may write at a time.
    pub fn write(&self, value: &T) {
        let count = self.words.load(0, Acquire).wrapping_add(1);
        let first = Self::copy(count);
        for (at, bytes) in bytes_of(value).chunks(WORD).enumerate() {
            let mut word = [0; WORD];
            word[..bytes.len()].copy_from_slice(bytes);
            // Release: not before the copy was given up, by the count before.
            self.words.store(first + at, u64::from_ne_bytes(word), Release);
        }
        self.words.store(0, count, Release);
    }

    /// The value; None if it was changed again and again while being read.
    #[must_use]
    pub fn read(&self) -> Option<T> {
        const ATTEMPTS: usize = 1000;
        let mut bytes = vec![0; Self::COPY * WORD];
        for _ in 0..ATTEMPTS {
            let count = self.words.load(0, Acquire);
            let first = Self::copy(count);
            for (at, to) in bytes.chunks_exact_mut(WORD).enumerate() {
                to.copy_from_slice(&self.words.load(first + at, Acquire).to_ne_bytes());
            }
            // One change since went into the other copy, and a second may have begun.
            if self.words.load(0, Relaxed).wrapping_sub(count) == 0 {
                return from_bytes(&bytes[..size_of::<T>()]);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::LocalWords;

    #[test]
    fn bytes_there_and_back() {
        let value = [1_u16, 0x203, 4];
        assert_eq!(from_bytes(bytes_of(&value)), Some(value));
        assert_eq!(from_bytes::<u32>(&[1, 2, 3]), None);
    }

    #[test]
    fn a_value_is_never_seen_half_changed() {
        let words = LocalWords::zeroed(SharedValue::<LocalWords, [u64; 5]>::WORDS);
        let shared = SharedValue::<_, [u64; 5]>::new(&words).unwrap();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for number in 1..20_000 {
                    shared.write(&[number; 5]);
                }
            });
            let mut last = 0;
            while !writer.is_finished() {
                if let Some(value) = shared.read() {
                    assert!(value.iter().all(|number| *number == value[0]), "{value:?}");
                    assert!(value[0] >= last, "{} after {last}", value[0]);
                    last = value[0];
                }
            }
        });
        assert_eq!(shared.read(), Some([19_999; 5]));
        assert!(SharedValue::<_, [u64; 5]>::new(LocalWords::zeroed(10)).is_none());
    }
}
