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

/// From this length on bytes are copied by vector registers. The C library uses `rep movsb` then, up to about
/// a MiB: on AMD Zen a twentieth as fast (2 GB/s) where the target begins 1 to 47 bytes behind the source,
/// modulo 4096, as a large vector does behind memory that was mapped.
const MIN_VECTORS: usize = 2048;

/// Copies bytes that other processes may write at the same time. So the C library or assembly copies: the
/// compiler assumes nothing about them.
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
#[inline]
pub unsafe fn copy(to: *mut u8, from: *const u8, length: usize) {
    let is_apart = to.addr().abs_diff(from.addr()) >= length;
    let copied = if length >= MIN_VECTORS && is_apart {
        // SAFETY: the caller's promise; the ranges do not overlap.
        unsafe { copy_vectors(to, from, length) }
    } else {
        0
    };
    // SAFETY: the caller's promise, for the rest.
    unsafe { libc::memmove(to.add(copied).cast(), from.add(copied).cast(), length - copied) };
}

/// Copies bytes by vector registers, as far as these are whole. Returns how many were copied.
///
/// # Safety
/// As for [`copy`]; the ranges do not overlap.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_vectors(to: *mut u8, from: *const u8, length: usize) -> usize {
    let blocks = length / BLOCK;
    if blocks == 0 || !std::arch::is_x86_feature_detected!("avx") {
        return 0;
    }
    // SAFETY: the processor has these registers; whole blocks of the ranges.
    unsafe { copy_blocks(to, from, blocks) };
    blocks * BLOCK
}

/// Bytes that are copied in one turn.
#[cfg(target_arch = "x86_64")]
const BLOCK: usize = 128;

/// Copies blocks.
///
/// # Safety
/// As for [`copy_vectors`]; there is at least one block.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
#[inline(never)] // `vzeroupper` changes all vector registers, as any function may
unsafe fn copy_blocks(to: *mut u8, from: *const u8, blocks: usize) {
    // SAFETY: reads and writes only the blocks. Other processes may write them: the compiler assumes nothing
    // about them.
    unsafe {
        std::arch::asm!(
            "2:",
            "vmovdqu {a}, [{from}]",
            "vmovdqu {b}, [{from} + 32]",
            "vmovdqu {c}, [{from} + 64]",
            "vmovdqu {d}, [{from} + 96]",
            "vmovdqu [{to}], {a}",
            "vmovdqu [{to} + 32], {b}",
            "vmovdqu [{to} + 64], {c}",
            "vmovdqu [{to} + 96], {d}",
            "sub {from}, -128",
            "sub {to}, -128",
            "dec {blocks}",
            "jnz 2b",
            "vzeroupper",
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            blocks = inout(reg) blocks => _,
            a = out(ymm_reg) _,
            b = out(ymm_reg) _,
            c = out(ymm_reg) _,
            d = out(ymm_reg) _,
            options(nostack),
        );
    }
}

/// Copies nothing.
///
/// # Safety
/// None needed.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_vectors(_: *mut u8, _: *const u8, _: usize) -> usize {
    0
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
    fn copies_have_all_bytes_and_no_others() {
        let source: Vec<u8> = (0..9000_u32).map(|at| (at * 31 + at / 250) as u8).collect();
        for length in [0, 1, 63, 64, 65, 127, 200, 2047, 2048, 2049, 4096, 8191] {
            for (to, from) in [(0, 0), (1, 0), (0, 1), (63, 64), (17, 33)] {
                for copies in [copy, copy_around_caches] {
                    let mut target = vec![0; 9000];
                    let mut expected = target.clone();
                    expected[to..to + length].copy_from_slice(&source[from..from + length]);
                    // SAFETY: inside of both vectors.
                    unsafe {
                        let (to, from) = (target.as_mut_ptr().add(to), source.as_ptr().add(from));
                        copies(to, from, length);
                    }
                    assert!(target == expected, "{length} bytes from {from} to {to}");
                }
            }
        }
    }

    #[test]
    fn ranges_that_overlap_are_copied_as_if_they_did_not() {
        for (to, from) in [(0, 100), (100, 0), (4000, 0)] {
            let mut bytes: Vec<u8> = (0..9000_u32).map(|at| (at * 31 + at / 250) as u8).collect();
            let mut expected = bytes.clone();
            expected.copy_within(from..from + 5000, to);
            let start = bytes.as_mut_ptr();
            // SAFETY: inside of the vector.
            unsafe { copy(start.add(to), start.add(from), 5000) };
            assert!(bytes == expected, "from {from} to {to}");
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
