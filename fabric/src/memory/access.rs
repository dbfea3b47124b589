//! Local access to the bytes of a region.
//!
//! A region's bytes may change while they are read: a peer may write them, or another thread
//! with a clone of the region. So they are never lent by reference, and copies use atomic
//! accesses: bytes at the edges, words in between. Such a copy may be torn, half old and half
//! new, but it is not undefined behaviour. On x86 and ARM these accesses are plain loads and
//! stores; at most half the speed of `memcpy` is lost, in the cache.
//!
//! Two limits. Writes by a network card or another process are outside any language's memory
//! model, and are treated as atomic stores. And two overlapping copies with different word
//! sizes are outside Rust's model of atomics; the resulting instructions are well defined.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::Ordering::{self, Relaxed};
use std::sync::atomic::{AtomicU8, AtomicU64, fence};

use super::MemoryRegion;
use crate::{Error, ErrorKind, Result};

const WORD: usize = size_of::<u64>();

impl MemoryRegion {
    #[inline]
    fn host_range(&self, operation: &'static str, offset: usize, length: usize) -> Result<*mut u8> {
        if self.contains(offset, length) && !self.0.extent.kind.is_device() {
            // SAFETY: inside the region, just checked.
            return Ok(unsafe { self.0.extent.base.add(offset) });
        }
        Err(self.not_accessible(operation, offset, length))
    }

    #[cold]
    fn not_accessible(&self, operation: &'static str, offset: usize, length: usize) -> Error {
        let (kind, total) = (self.0.extent.kind, self.0.extent.contiguous_length);
        if kind.is_device() {
            let detail = format!("the region is {kind} memory, which the CPU cannot access");
            return Error::new(ErrorKind::InvalidArgument, operation, detail);
        }
        let detail = format!("{length} bytes at {offset} of a region of {total} bytes");
        Error::new(ErrorKind::OutOfBounds, operation, detail)
    }

    /// Copies bytes out of the region. If a peer or another thread writes at the same time, the
    /// copy may hold old and new bytes.
    ///
    /// # Errors
    /// `OutOfBounds`, or `InvalidArgument` for device memory.
    #[inline]
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        let from = self.host_range("read region", offset, into.len())?;
        // SAFETY: valid for as long as `self`, and accessed by atomics only.
        unsafe { load(from, into) };
        Ok(())
    }

    /// Copies bytes into the region.
    ///
    /// # Errors
    /// `OutOfBounds`, or `InvalidArgument` for device memory.
    #[inline]
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        let into = self.host_range("write region", offset, from.len())?;
        // SAFETY: as in `read`.
        unsafe { store(from, into) };
        Ok(())
    }

    /// Fills a range with one byte.
    ///
    /// # Errors
    /// `OutOfBounds`, or `InvalidArgument` for device memory.
    pub fn fill(&self, range: Range<usize>, byte: u8) -> Result<()> {
        let into = self.host_range("fill region", range.start, range.len())?;
        // SAFETY: as in `read`.
        unsafe { fill(into, range.len(), byte) };
        Ok(())
    }

    /// Loads an aligned 64-bit word, with acquire ordering towards the peer that wrote it last.
    ///
    /// # Errors
    /// `OutOfBounds`, or `InvalidArgument` if it is not aligned or device memory.
    #[inline]
    pub fn load_u64(&self, offset: usize) -> Result<u64> {
        Ok(self.word(offset)?.load(Ordering::Acquire))
    }

    /// Stores an aligned 64-bit word, with release ordering.
    ///
    /// # Errors
    /// As [`load_u64`](Self::load_u64).
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<()> {
        self.word(offset)?.store(value, Ordering::Release);
        Ok(())
    }

    #[inline]
    fn word(&self, offset: usize) -> Result<&AtomicU64> {
        let address = self.host_range("access word of region", offset, WORD)?;
        if !(address as usize).is_multiple_of(WORD) {
            return Err(not_aligned(offset));
        }
        // SAFETY: 8 valid, aligned bytes, alive as long as `self`; atomics allow concurrent
        // change by the peer.
        Ok(unsafe { AtomicU64::from_ptr(address.cast()) })
    }
}

#[cold]
fn not_aligned(offset: usize) -> Error {
    let detail = format!("offset {offset} is not aligned to 8 bytes");
    Error::new(ErrorKind::InvalidArgument, "access word of region", detail)
}

/// The number of the `length` bytes that precede the first aligned word.
#[inline]
fn before_words(shared: *mut u8, length: usize) -> usize {
    shared.align_offset(WORD).min(length)
}

/// # Safety
/// `from` is valid for as many bytes as `into` has. Threads of this process access these bytes
/// by atomics only.
unsafe fn load(from: *mut u8, into: &mut [u8]) {
    // A caller that read a flag before this call must see the writes before that flag.
    fence(Ordering::Acquire);
    let (head, rest) = into.split_at_mut(before_words(from, into.len()));
    let (words, tail) = rest.as_chunks_mut::<WORD>();
    // SAFETY: `from`, then what follows, stays within the range by construction; the
    // words are aligned because the head ends where alignment begins.
    unsafe {
        for (at, byte) in head.iter_mut().enumerate() {
            *byte = AtomicU8::from_ptr(from.add(at)).load(Relaxed);
        }
        let first: *mut u64 = from.add(head.len()).cast();
        for (at, word) in words.iter_mut().enumerate() {
            *word = AtomicU64::from_ptr(first.add(at)).load(Relaxed).to_ne_bytes();
        }
        let last: *mut u8 = first.add(words.len()).cast();
        for (at, byte) in tail.iter_mut().enumerate() {
            *byte = AtomicU8::from_ptr(last.add(at)).load(Relaxed);
        }
    }
    // A caller that reads a flag after this call can detect whether the copy was torn.
    fence(Ordering::Acquire);
}

/// # Safety
/// As [`load`].
unsafe fn store(from: &[u8], into: *mut u8) {
    let (head, rest) = from.split_at(before_words(into, from.len()));
    let (words, tail) = rest.as_chunks::<WORD>();
    // SAFETY: as in `load`.
    unsafe {
        for (at, byte) in head.iter().enumerate() {
            AtomicU8::from_ptr(into.add(at)).store(*byte, Relaxed);
        }
        let first: *mut u64 = into.add(head.len()).cast();
        for (at, word) in words.iter().enumerate() {
            AtomicU64::from_ptr(first.add(at)).store(u64::from_ne_bytes(*word), Relaxed);
        }
        let last: *mut u8 = first.add(words.len()).cast();
        for (at, byte) in tail.iter().enumerate() {
            AtomicU8::from_ptr(last.add(at)).store(*byte, Relaxed);
        }
    }
}

/// # Safety
/// As [`load`], for `length` bytes.
unsafe fn fill(into: *mut u8, length: usize, byte: u8) {
    let head = before_words(into, length);
    let words = (length - head) / WORD;
    let word = u64::from_ne_bytes([byte; WORD]);
    // SAFETY: as in `load`.
    unsafe {
        let first: *mut u64 = into.add(head).cast();
        for at in (0..head).chain(head + words * WORD..length) {
            AtomicU8::from_ptr(into.add(at)).store(byte, Relaxed);
        }
        if words >= LONG {
            fill_long(first, words, word);
        } else {
            for at in 0..words {
                AtomicU64::from_ptr(first.add(at)).store(word, Relaxed);
            }
        }
    }
}

/// Number of words from which [`fill_long`] is faster: measured, 1 KiB.
const LONG: usize = 128;

/// Fills with `rep stosq`, because the compiler does not merge atomic stores: a loop of words takes
/// 1.2 to 4 times as long as `memset` from 1 KiB on. `memset` itself is not permitted, since its
/// plain stores would race with a thread that reads. Any instruction is permitted that acts like
/// some loop of relaxed atomic stores. `rep stos` stores each word whole or by bytes, in any order,
/// but before the later stores of the thread; relaxed stores of bytes promise less. Measured: as
/// fast as `memset` from 16 KiB on, 1.1 to 1.2 times as long at 4 KiB, 2.3 to 3.4 times at 1 KiB.
///
/// # Safety
/// As [`load`], for `count` words; aligned.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn fill_long(first: *mut u64, count: usize, word: u64) {
    // SAFETY: stores into the range, and nothing else; the direction flag is clear wherever
    // Rust's code runs.
    unsafe {
        std::arch::asm!(
            "rep stosq",
            inout("rcx") count => _,
            inout("rdi") first => _,
            in("rax") word,
            options(nostack, preserves_flags),
        );
    }
}

/// Elsewhere, word by word.
///
/// # Safety
/// As [`load`], for `count` words; aligned.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn fill_long(first: *mut u64, count: usize, word: u64) {
    for at in 0..count {
        // SAFETY: as in `load`.
        unsafe { AtomicU64::from_ptr(first.add(at)).store(word, Relaxed) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_complete_at_every_alignment_and_length() {
        for offset in 0..10 {
            for length in 0..40 {
                let mut shared = [0xEE_u8; 64];
                let base = shared.as_mut_ptr();
                let bytes: Vec<u8> = (1..=length as u8).collect();
                let mut back = vec![0; length];
                // SAFETY: inside the array, which only this test uses.
                unsafe {
                    store(&bytes, base.add(offset));
                    load(base.add(offset), &mut back);
                }
                assert_eq!(back, bytes, "{length} bytes at {offset}");
                assert!(shared[..offset].iter().all(|byte| *byte == 0xEE));
                assert!(shared[offset + length..].iter().all(|byte| *byte == 0xEE));
                // SAFETY: as above.
                unsafe { fill(shared.as_mut_ptr().add(offset), length, 7) };
                assert!(shared[offset..offset + length].iter().all(|byte| *byte == 7));
                assert_eq!(shared.iter().filter(|byte| **byte == 0xEE).count(), 64 - length);
            }
        }
    }

    #[test]
    fn long_fills_stay_within_their_range() {
        for offset in 0..10 {
            for length in (LONG * WORD - 20..LONG * WORD + 20).chain([10_000, 65_536]) {
                let mut shared = vec![0xEE_u8; length + 32];
                // SAFETY: inside the vector, which only this test uses.
                unsafe { fill(shared.as_mut_ptr().add(offset), length, 7) };
                assert!(shared[offset..offset + length].iter().all(|byte| *byte == 7));
                assert_eq!(shared.iter().filter(|byte| **byte == 0xEE).count(), 32);
            }
        }
    }
}
