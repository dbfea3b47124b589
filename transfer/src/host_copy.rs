//! Copies by the CPU between memory that other processes may write at the same time.
//!
//! Stores may bypass the caches: then a peer finds the bytes after a later store that releases them.
#![allow(unsafe_code)]

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::blocks::Run;

const WORD: usize = size_of::<u64>();
/// Bytes of a cache line.
const LINE: usize = 64;

/// Copies bytes that other processes may write at the same time. So the C library copies: the
/// compiler assumes nothing about it.
///
/// ```
/// let (from, mut to) = ([1, 2, 3], [0; 3]);
/// // SAFETY: two arrays of three bytes.
/// unsafe { transfer::host_copy::copy(to.as_mut_ptr(), from.as_ptr(), 3) };
/// assert_eq!(to, from);
/// ```
///
/// # Safety
/// Both ranges are mapped, and only the caller holds references to their bytes.
pub unsafe fn copy(to: *mut u8, from: *const u8, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { libc::memmove(to.cast(), from.cast(), length) };
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CacheUse {
    Normal,
    /// Rows that are long enough bypass them.
    Bypass,
}

impl CacheUse {
    /// From this length on, the two ends of a request do not fit into the caches of a core: a store
    /// that bypasses them does not fetch its line first. Measured on AMD EPYC 7003: equal at 2 MiB,
    /// twice as fast at 4 MiB.
    const MIN_BYPASS: u64 = 2 << 20;
    /// Parts of lines at both ends of shorter rows would take longer than the rest.
    const MIN_ROW: u64 = 4096;

    pub(crate) fn of_request(bytes: u64) -> Self {
        if bytes >= Self::MIN_BYPASS { Self::Bypass } else { Self::Normal }
    }
}

/// Copies as [`copy`], by stores that bypass the caches where the processor has them.
///
/// ```
/// let (from, mut to) = (vec![7_u8; 100_000], vec![0_u8; 100_000]);
/// // SAFETY: two vectors of so many bytes.
/// unsafe { transfer::host_copy::copy_around_caches(to.as_mut_ptr(), from.as_ptr(), from.len()) };
/// assert_eq!(to, from);
/// ```
///
/// # Safety
/// As for [`copy`]; the ranges do not overlap.
pub unsafe fn copy_around_caches(to: *mut u8, from: *const u8, length: usize) {
    let head = to.align_offset(LINE).min(length);
    let lines = if cfg!(target_arch = "x86_64") { (length - head) / LINE } else { 0 };
    let tail = head + lines * LINE;
    // SAFETY: three parts of the ranges; the second one begins at a line of the target.
    unsafe {
        copy(to, from, head);
        copy_lines(to.add(head), from.add(head), lines);
        copy(to.add(tail), from.add(tail), length - tail);
    }
}

/// Copies lines, whose stores are visible before later ones.
///
/// # Safety
/// As for [`copy`]; `to` is aligned to a line.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_lines(to: *mut u8, from: *const u8, lines: usize) {
    if lines == 0 {
        return;
    }
    // SAFETY: reads and writes only the lines, by instructions that each x86-64 processor has. Other
    // processes may write them: the compiler assumes nothing about them.
    unsafe {
        std::arch::asm!(
            "2:",
            "movdqu {a}, [{from}]",
            "movdqu {b}, [{from} + 16]",
            "movdqu {c}, [{from} + 32]",
            "movdqu {d}, [{from} + 48]",
            "movntdq [{to}], {a}",
            "movntdq [{to} + 16], {b}",
            "movntdq [{to} + 32], {c}",
            "movntdq [{to} + 48], {d}",
            "add {from}, 64",
            "add {to}, 64",
            "dec {lines}",
            "jnz 2b",
            "sfence",
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            lines = inout(reg) lines => _,
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            options(nostack),
        );
    }
}

/// Does nothing: there are no lines to copy.
///
/// # Safety
/// None needed.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_lines(_: *mut u8, _: *const u8, _: usize) {}

/// Copies rows; `to` and `from` are the first ones. Short rows are copied as words: a call of the C
/// library for each takes several times longer.
///
/// # Safety
/// As for [`copy`], for each row.
pub(crate) unsafe fn copy_rows(to: *mut u8, from: *const u8, rows: &Run, cache_use: CacheUse) {
    let length = rows.first.length as usize;
    let bypasses = cache_use == CacheUse::Bypass && rows.first.length >= CacheUse::MIN_ROW;
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
                    match bypasses && to.addr().abs_diff(from.addr()) >= length {
                        true => copy_around_caches(to, from, length),
                        false => copy(to, from, length),
                    }
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
/// Both ranges have this row.
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
    fn copies_around_caches_have_all_bytes() {
        let source: Vec<u8> = (0..5000_u32).map(|at| (at * 31 + at / 250) as u8).collect();
        for length in [0, 1, 63, 64, 65, 127, 200, 4096] {
            for (to, from) in [(0, 0), (1, 0), (0, 1), (63, 64), (17, 33)] {
                let mut target = vec![0; 5000];
                let mut expected = target.clone();
                expected[to..to + length].copy_from_slice(&source[from..from + length]);
                // SAFETY: inside of both vectors.
                unsafe {
                    let (to, from) = (target.as_mut_ptr().add(to), source.as_ptr().add(from));
                    copy_around_caches(to, from, length);
                }
                assert!(target == expected, "{length} bytes from {from} to {to}");
            }
        }
    }

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
                    let (to, from) = (target.as_mut_ptr().add(to), source.as_ptr().add(from));
                    copy_rows(to, from, &rows, CacheUse::Bypass);
                }
                assert!(target == expected, "{rows:?}");
            }
        }
    }
}
