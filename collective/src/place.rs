//! Bytes in the memory of a rank.
#![allow(unsafe_code)]

/// Bytes in the memory of a rank. They are valid for reads and writes as their use requires.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    at: *mut u8,
    bytes: usize,
}

impl Place {
    pub(crate) const NONE: Self = Self { at: std::ptr::null_mut(), bytes: 0 };

    pub(crate) fn new(at: *mut u8, bytes: usize) -> Self {
        Self { at, bytes }
    }

    pub(crate) fn at(self) -> *mut u8 {
        self.at
    }

    pub(crate) fn bytes(self) -> usize {
        self.bytes
    }

    /// The part that begins at an offset, with at most so many bytes.
    pub(crate) fn part(self, offset: usize, bytes: usize) -> Self {
        let offset = offset.min(self.bytes);
        // SAFETY: inside of the place, or its end.
        Self { at: unsafe { self.at.add(offset) }, bytes: bytes.min(self.bytes - offset) }
    }
}
