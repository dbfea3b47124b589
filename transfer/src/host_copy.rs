//! Copies by the CPU between memory that other processes may write at the same time.
#![allow(unsafe_code)]

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::blocks::Run;

const WORD: usize = size_of::<u64>();

/// As with any shared memory, other processes may write the same bytes. So the C library copies: the
/// compiler assumes nothing about it.
///
/// # Safety
/// Both ranges are mapped, and only the caller holds references to their bytes.
pub(crate) unsafe fn copy(to: *mut u8, from: *const u8, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { libc::memmove(to.cast(), from.cast(), length) };
}

/// Copies rows; `to` and `from` are the first ones. Short rows are copied as words: a call of the C
/// library for each takes several times longer.
///
/// # Safety
/// As for [`copy`], for each row.
pub(crate) unsafe fn copy_rows(to: *mut u8, from: *const u8, rows: &Run) {
    let length = rows.first.length as usize;
    let places = to.addr() | from.addr() | (rows.to_stride | rows.from_stride) as usize;
    let words = if (places | length).is_multiple_of(WORD) { length / WORD } else { 0 };
    // SAFETY: the caller's promise; rows are copied as words if all of them are aligned words.
    unsafe {
        match words {
            1 => copy_word_rows::<1>(to, from, rows),
            2 => copy_word_rows::<2>(to, from, rows),
            3 => copy_word_rows::<3>(to, from, rows),
            4 => copy_word_rows::<4>(to, from, rows),
            _ => {
                for row in 0..rows.count {
                    let (to, from) = place(to, from, rows, row);
                    copy(to, from, length);
                }
            }
        }
    }
}

/// Copies rows of `WORDS` aligned words.
///
/// # Safety
/// As for [`copy_rows`].
unsafe fn copy_word_rows<const WORDS: usize>(to: *mut u8, from: *const u8, rows: &Run) {
    for row in 0..rows.count {
        // SAFETY: the caller's promise. The source is only loaded from.
        unsafe {
            let (to, from) = place(to, from, rows, row);
            for word in 0..WORDS {
                #[expect(clippy::cast_ptr_alignment, reason = "aligned, by the caller's promise")]
                let words = (to.cast::<u64>(), from.cast_mut().cast::<u64>());
                let (to, from) = (words.0.add(word), words.1.add(word));
                let value = AtomicU64::from_ptr(from).load(Relaxed);
                AtomicU64::from_ptr(to).store(value, Relaxed);
            }
        }
    }
}

/// Where a row begins at both ends.
///
/// # Safety
/// It does.
#[inline]
unsafe fn place(to: *mut u8, from: *const u8, rows: &Run, row: u64) -> (*mut u8, *const u8) {
    let (to_offset, from_offset) = (row * rows.to_stride, row * rows.from_stride);
    // SAFETY: the caller's promise.
    unsafe { (to.add(to_offset as usize), from.add(from_offset as usize)) }
}

#[cfg(test)]
mod tests {
    use gpu::Block;

    use super::*;

    #[test]
    fn rows_of_any_length_and_alignment_are_copied() {
        let source: Vec<u8> = (0..2000_u32).map(|at| (at * 31 + at / 250) as u8).collect();
        for length in [1, 7, 8, 16, 20, 24, 32, 40, 48] {
            for (start, to_stride, from_stride) in
                [(0, 64, 56), (0, 49, 64), (3, 64, 64), (8, 96, 0)]
            {
                let first = Block { to: start, from: 2 * start, length };
                let rows = Run { first, count: 11, to_stride, from_stride };
                let mut target = vec![0; 1200];
                let mut expected = target.clone();
                for row in 0..rows.count {
                    let (to, from) = (start + row * to_stride, 2 * start + row * from_stride);
                    let row = &source[from as usize..][..length as usize];
                    expected[to as usize..][..length as usize].copy_from_slice(row);
                }
                let (to, from) = (first.to as usize, first.from as usize);
                // SAFETY: all rows are inside of both vectors.
                unsafe {
                    copy_rows(target.as_mut_ptr().add(to), source.as_ptr().add(from), &rows);
                }
                assert!(target == expected, "{rows:?}");
            }
        }
    }
}
