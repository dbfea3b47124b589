//! Elementwise reduction of the memory of several ranks into a target.
//!
//! A step loads the same [`LANES`] elements of each source, combines them in a local array, which the
//! compiler keeps in vector registers, and stores the result last: so the target may be one of the
//! sources. Processors with AVX2 and F16C run loops of their own, which return the same bits.
#![allow(unsafe_code)]

use crate::data_type::{DataType, ReduceOp};

/// Number of elements of a step. With 256 the array no longer fits into the registers, and sums of 1
/// MiB take 15 % longer.
const LANES: usize = 64;

/// Bytes that a non-temporal store writes, to an address that is a multiple of them.
const STREAM_BYTES: usize = 32;

/// Reduces `count` elements of each source into `target`, in the order of the sources.
///
/// Each NaN of the result is the positive quiet NaN without payload, except that a single source is
/// copied unchanged. Without sources the target remains unchanged.
///
/// ```
/// use reduction::{DataType, ReduceOp, reduce};
/// let (one, other, mut sum) = ([1_u32, 2, 3], [10_u32, 20, 30], [0_u32; 3]);
/// let sources = [one.as_ptr().cast(), other.as_ptr().cast()];
/// // SAFETY: arrays of three elements.
/// unsafe { reduce(ReduceOp::Sum, DataType::U32, sum.as_mut_ptr().cast(), &sources, 3) };
/// assert_eq!(sum, [11, 22, 33]);
/// ```
///
/// # Safety
/// Each source is readable, and the target writable, for `count` elements, at any alignment. The target
/// is identical to one or more of the sources, or overlaps with none. Until the return no thread or
/// process writes the sources, or accesses the target.
pub unsafe fn reduce(
    op: ReduceOp,
    data_type: DataType,
    target: *mut u8,
    sources: &[*const u8],
    count: usize,
) {
    if let [source] = sources {
        // SAFETY: as the caller promises.
        unsafe { target.copy_from(*source, count * data_type.size()) };
        return;
    }
    let version = Version::of_processor();
    let reduction = Reduction { op, target, sources, count, version, streams: false };
    // SAFETY: as the caller promises.
    unsafe { reduction.run(data_type) };
}

/// Reduces as [`reduce`] does, past the caches where the processor can: for a target that is larger than
/// they are. Targets that are one of the sources are in the cache, and stored there.
///
/// On a Zen 5 with 32 MiB of cache, reductions of 2, 4 and 8 sources of 32 MiB take 20, 13 and 10 % less
/// time.
///
/// ```
/// use reduction::{DataType, ReduceOp, reduce_streaming};
/// let (one, other, mut least) = (vec![1.0_f32; 1000], vec![2.0_f32; 1000], vec![0.0_f32; 1000]);
/// let sources = [one.as_ptr().cast(), other.as_ptr().cast()];
/// let to = least.as_mut_ptr().cast();
/// // SAFETY: vectors of so many elements.
/// unsafe { reduce_streaming(ReduceOp::Min, DataType::F32, to, &sources, 1000) };
/// assert_eq!(least, one);
/// ```
///
/// # Safety
/// As for [`reduce`].
pub unsafe fn reduce_streaming(
    op: ReduceOp,
    data_type: DataType,
    target: *mut u8,
    sources: &[*const u8],
    count: usize,
) {
    let version = Version::of_processor();
    let streams = !sources.contains(&target.cast_const());
    let reduction = Reduction { op, target, sources, count, version, streams };
    // SAFETY: as the caller promises.
    unsafe { reduction.run(data_type) };
}

/// Instruction sets that the loops are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    /// The instructions that each processor of the architecture has.
    Plain,
    /// AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl Version {
    /// Returns the fastest version that the processor can run.
    fn of_processor() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            return Self::Avx2;
        }
        Self::Plain
    }
}

/// Parameters of a reduction.
struct Reduction<'a> {
    op: ReduceOp,
    target: *mut u8,
    sources: &'a [*const u8],
    count: usize,
    version: Version,
    /// Set if results are stored past the caches.
    streams: bool,
}

impl Reduction<'_> {
    /// # Safety
    /// As for [`reduce`]; the processor can run the version.
    unsafe fn run(&self, data_type: DataType) {
        match self.sources {
            [] => return,
            [source] => {
                if *source != self.target {
                    let length = self.count * data_type.size();
                    // SAFETY: as the caller promises: different pointers do not overlap.
                    unsafe { self.target.copy_from_nonoverlapping(*source, length) };
                }
                return;
            }
            _ => {}
        }
        // SAFETY: as the caller promises; the types have the size of the data type.
        unsafe {
            match data_type {
                DataType::U8 => self.run_type::<u8>(),
                DataType::I8 => self.run_type::<i8>(),
                DataType::U16 => self.run_type::<u16>(),
                DataType::I16 => self.run_type::<i16>(),
                DataType::U32 => self.run_type::<u32>(),
                DataType::I32 => self.run_type::<i32>(),
                DataType::U64 => self.run_type::<u64>(),
                DataType::I64 => self.run_type::<i64>(),
                DataType::F16 => self.run_type::<F16>(),
                DataType::Bf16 => self.run_type::<Bf16>(),
                DataType::F32 => self.run_type::<f32>(),
                DataType::F64 => self.run_type::<f64>(),
            }
        }
    }

    /// Compiles the loops for each operation; with `MEAN` they divide each total by the number of ranks.
    ///
    /// # Safety
    /// As for [`Self::run`], with elements of type `E`, and at least two sources.
    unsafe fn run_type<E: Element>(&self) {
        // SAFETY: as the caller promises.
        unsafe {
            match self.op {
                ReduceOp::Sum => self.run_loops::<E, false>(E::Accumulator::sum),
                ReduceOp::Product => self.run_loops::<E, false>(E::Accumulator::product),
                ReduceOp::Min => self.run_loops::<E, false>(E::Accumulator::min_of),
                ReduceOp::Max => self.run_loops::<E, false>(E::Accumulator::max_of),
                ReduceOp::Mean => self.run_loops::<E, true>(E::Accumulator::sum),
            }
        }
    }

    /// # Safety
    /// As for [`Self::run_type`].
    unsafe fn run_loops<E: Element, const MEAN: bool>(
        &self,
        combine: impl Fn(E::Accumulator, E::Accumulator) -> E::Accumulator,
    ) {
        // SAFETY: as the caller promises.
        unsafe {
            match self.version {
                Version::Plain => self.fold::<E, MEAN, false>(combine),
                #[cfg(target_arch = "x86_64")]
                Version::Avx2 => self.fold_avx2::<E, MEAN>(combine),
            }
        }
    }

    /// # Safety
    /// As for [`Self::run_type`]; the processor has AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn fold_avx2<E: Element, const MEAN: bool>(
        &self,
        combine: impl Fn(E::Accumulator, E::Accumulator) -> E::Accumulator,
    ) {
        // SAFETY: as the caller promises.
        unsafe { self.fold::<E, MEAN, true>(combine) };
    }

    /// # Safety
    /// As for [`Self::run_type`]; with `AVX2` the processor has AVX2 and F16C.
    #[inline(always)]
    unsafe fn fold<E: Element, const MEAN: bool, const AVX2: bool>(
        &self,
        combine: impl Fn(E::Accumulator, E::Accumulator) -> E::Accumulator,
    ) {
        let unaligned = self.target.align_offset(STREAM_BYTES);
        let streams = AVX2 && self.streams && unaligned.is_multiple_of(size_of::<E>());
        let head = if streams { self.count.min(unaligned / size_of::<E>()) } else { 0 };
        let tail = self.count - (self.count - head) % LANES;
        // SAFETY: all steps are inside of the elements, and the parts are shorter than a step. Streaming
        // begins at a multiple of STREAM_BYTES, of which the bytes of a step are one.
        unsafe {
            self.fold_part::<E, MEAN, AVX2>(0, head, &combine);
            for start in (head..tail).step_by(LANES) {
                let load = |source: *const u8| source.cast::<E>().wrapping_add(start);
                let target = self.target.cast::<E>().add(start);
                if streams {
                    let mut reduced = [E::default(); LANES];
                    self.step::<E, MEAN, AVX2>(load, reduced.as_mut_ptr(), &combine);
                    stream(&reduced, target);
                } else {
                    self.step::<E, MEAN, AVX2>(load, target, &combine);
                }
            }
            self.fold_part::<E, MEAN, AVX2>(tail, self.count - tail, &combine);
            // Streaming stores are not ordered before later ones, which may tell others that they are done.
            #[cfg(target_arch = "x86_64")]
            if streams {
                std::arch::x86_64::_mm_sfence();
            }
        }
    }

    /// Reduces fewer elements than those of a step.
    ///
    /// # Safety
    /// As for [`Self::fold`]; the part lies inside of the elements.
    #[inline(always)]
    unsafe fn fold_part<E: Element, const MEAN: bool, const AVX2: bool>(
        &self,
        start: usize,
        count: usize,
        combine: impl Fn(E::Accumulator, E::Accumulator) -> E::Accumulator,
    ) {
        if count == 0 {
            return;
        }
        let (offset, length) = (start * size_of::<E>(), count * size_of::<E>());
        let mut padded = [E::default(); LANES];
        let mut reduced = [E::default(); LANES];
        // SAFETY: as the caller promises; the arrays are longer.
        unsafe {
            let load = |source: *const u8| {
                let bytes = padded.as_mut_ptr().cast::<u8>();
                bytes.copy_from_nonoverlapping(source.add(offset), length);
                padded.as_ptr()
            };
            self.step::<E, MEAN, AVX2>(load, reduced.as_mut_ptr(), combine);
            self.target.add(offset).copy_from_nonoverlapping(reduced.as_ptr().cast(), length);
        }
    }

    /// Reduces the elements of a step. `load` returns where they begin in a source, or in a copy of it.
    ///
    /// # Safety
    /// As for [`Self::fold`].
    #[inline(always)]
    unsafe fn step<E: Element, const MEAN: bool, const AVX2: bool>(
        &self,
        mut load: impl FnMut(*const u8) -> *const E,
        target: *mut E,
        combine: impl Fn(E::Accumulator, E::Accumulator) -> E::Accumulator,
    ) {
        let mut totals = [E::Accumulator::default(); LANES];
        // SAFETY: as the caller promises.
        unsafe {
            E::load::<AVX2>(load(self.sources[0]), |lane, element| totals[lane] = element);
            for source in &self.sources[1..] {
                E::load::<AVX2>(load(*source), |lane, element| {
                    totals[lane] = combine(totals[lane], element);
                });
            }
            if MEAN {
                for total in &mut totals {
                    *total = total.divide(self.sources.len());
                }
            }
            E::store::<AVX2>(target, &totals);
        }
    }
}

/// Stores a step past the caches.
///
/// # Safety
/// The target is writable, and its address a multiple of [`STREAM_BYTES`]; the processor has AVX2.
#[inline(always)]
unsafe fn stream<E: Element>(reduced: &[E; LANES], target: *mut E) {
    #[cfg(target_arch = "x86_64")]
    for at in 0..size_of_val(reduced) / STREAM_BYTES {
        use std::arch::x86_64::{__m256i, _mm256_stream_si256};
        // SAFETY: inside of the array, and as the caller promises.
        unsafe {
            let vector = reduced.as_ptr().cast::<__m256i>().add(at).read_unaligned();
            _mm256_stream_si256(target.cast::<__m256i>().add(at), vector);
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    unreachable!("streaming of {reduced:p} to {target:p} without AVX2");
}

/// A type that elements are combined in.
trait Number: Copy + Default {
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    /// The lesser number, the first of equal ones, or a NaN.
    fn min_of(self, other: Self) -> Self;
    /// The greater number, the first of equal ones, or a NaN.
    fn max_of(self, other: Self) -> Self;
    /// The quotient, of integers rounded towards zero.
    ///
    /// # Safety
    /// The divisor is at least 2.
    unsafe fn divide(self, divisor: usize) -> Self;
    /// The number itself, or the quiet NaN.
    #[inline(always)]
    fn canonical(self) -> Self {
        self
    }
}

/// A type of elements in memory.
trait Element: Copy + Default {
    type Accumulator: Number;

    fn widen(self) -> Self::Accumulator;
    fn narrow(total: Self::Accumulator) -> Self;

    /// Calls `take` with each element of a step, and its index.
    ///
    /// # Safety
    /// The elements are readable; with `AVX2` the processor has AVX2 and F16C.
    #[inline(always)]
    unsafe fn load<const AVX2: bool>(
        elements: *const Self,
        mut take: impl FnMut(usize, Self::Accumulator),
    ) {
        for lane in 0..LANES {
            // SAFETY: as the caller promises.
            take(lane, unsafe { elements.add(lane).read_unaligned() }.widen());
        }
    }

    /// Stores the totals of a step.
    ///
    /// # Safety
    /// The elements are writable; with `AVX2` the processor has AVX2 and F16C.
    #[inline(always)]
    unsafe fn store<const AVX2: bool>(elements: *mut Self, totals: &[Self::Accumulator; LANES]) {
        for (lane, total) in totals.iter().enumerate() {
            // SAFETY: as the caller promises.
            unsafe { elements.add(lane).write_unaligned(Self::narrow(*total)) };
        }
    }
}

impl<N: Number> Element for N {
    type Accumulator = Self;

    #[inline(always)]
    fn widen(self) -> Self {
        self
    }

    #[inline(always)]
    fn narrow(total: Self) -> Self {
        total.canonical()
    }
}

macro_rules! integers {
    ($($integer:ty: $divide:expr;)*) => {$(
        impl Number for $integer {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn min_of(self, other: Self) -> Self {
                self.min(other)
            }

            #[inline(always)]
            fn max_of(self, other: Self) -> Self {
                self.max(other)
            }

            #[inline(always)]
            unsafe fn divide(self, divisor: usize) -> Self {
                $divide(self, divisor)
            }
        }
    )*};
}

// Processors divide only floats as vectors. The quotient is exact after rounding towards zero: with a mantissa
// longer than the integers, a quotient below an integer is not rounded up to it.
macro_rules! float_quotient {
    ($float:ty) => {
        |total, divisor| {
            // SAFETY: a quotient of 32 bits by 2 or more fits into an i32.
            unsafe { (<$float>::from(total) / divisor as $float).to_int_unchecked::<i32>() as Self }
        }
    };
}

integers! {
    u8: float_quotient!(f32);
    i8: float_quotient!(f32);
    u16: float_quotient!(f32);
    i16: float_quotient!(f32);
    u32: float_quotient!(f64);
    i32: float_quotient!(f64);
    u64: |total: u64, divisor| total / divisor as u64;
    i64: |total: i64, divisor| total / divisor as i64;
}

macro_rules! floats {
    ($($float:ty: $nan:expr;)*) => {$(
        impl Number for $float {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self * other
            }

            #[inline(always)]
            fn min_of(self, other: Self) -> Self {
                if (other < self) | other.is_nan() { other } else { self }
            }

            #[inline(always)]
            fn max_of(self, other: Self) -> Self {
                if (other > self) | other.is_nan() { other } else { self }
            }

            #[inline(always)]
            unsafe fn divide(self, divisor: usize) -> Self {
                self / divisor as Self
            }

            #[inline(always)]
            fn canonical(self) -> Self {
                if self.is_nan() { Self::from_bits($nan) } else { self }
            }
        }
    )*};
}

// The quiet NaN. Which one an operation of several NaNs returns depends on the order of its operands, which
// the compiler may choose.
floats! {
    f32: 0x7fc0_0000;
    f64: 0x7ff8_0000_0000_0000;
}

/// The upper half of an `f32`.
#[derive(Clone, Copy, Default)]
struct Bf16(u16);

impl Element for Bf16 {
    type Accumulator = f32;

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    #[inline(always)]
    fn narrow(total: f32) -> Self {
        let bits = total.canonical().to_bits();
        let to_nearest_even = 0x7fff + (bits >> 16 & 1);
        Self((bits.wrapping_add(to_nearest_even) >> 16) as u16)
    }
}

/// A number of half precision: 5 bits of exponent, 10 of mantissa.
#[derive(Clone, Copy, Default)]
struct F16(u16);

/// Exponents in the position of `f32`: of the least normal `f16`, the difference of the two biases, and
/// of infinity.
const LEAST_NORMAL: u32 = 113 << 23;
const BIAS: u32 = 112 << 23;
const F32_INFINITY: u32 = 255 << 23;

impl Element for F16 {
    type Accumulator = f32;

    #[inline(always)]
    fn widen(self) -> f32 {
        let sign = u32::from(self.0 & 0x8000) << 16;
        let magnitude = u32::from(self.0 & 0x7fff) << 13;
        // With a leading one that is subtracted again, a subnormal number becomes a normal one.
        let subnormal = f32::from_bits(magnitude + LEAST_NORMAL) - f32::from_bits(LEAST_NORMAL);
        let normal = magnitude + BIAS;
        let finite = if magnitude < 1 << 23 { subnormal.to_bits() } else { normal };
        let bits = if magnitude < 31 << 23 { finite } else { magnitude | F32_INFINITY };
        f32::from_bits(sign | bits)
    }

    #[inline(always)]
    fn narrow(total: f32) -> Self {
        let sign = total.to_bits() >> 16 & 0x8000;
        let magnitude = total.to_bits() & 0x7fff_ffff;
        // The last bit of the mantissa of 0.5 is the least subnormal number: the addition rounds.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let to_nearest_even = 0xfff + (magnitude >> 13 & 1);
        let normal = magnitude.wrapping_sub(BIAS).wrapping_add(to_nearest_even) >> 13;
        let finite = if magnitude < LEAST_NORMAL { subnormal } else { normal.min(0x7c00) };
        let bits = if magnitude > F32_INFINITY { 0x7e00 } else { sign | finite };
        Self(bits as u16)
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load<const AVX2: bool>(elements: *const Self, mut take: impl FnMut(usize, f32)) {
        use std::arch::x86_64::{__m128i, _mm256_cvtph_ps, _mm256_storeu_ps};
        let mut wide = [0.0; LANES];
        for lane in (0..LANES).step_by(if AVX2 { 8 } else { 1 }) {
            // SAFETY: as the caller promises; 8 elements inside of the step.
            unsafe {
                let (from, to) = (elements.add(lane), wide.as_mut_ptr().add(lane));
                if AVX2 {
                    let vector = from.cast::<__m128i>().read_unaligned();
                    _mm256_storeu_ps(to, _mm256_cvtph_ps(vector));
                } else {
                    *to = from.read_unaligned().widen();
                }
            }
        }
        for (lane, element) in wide.iter().enumerate() {
            take(lane, *element);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn store<const AVX2: bool>(elements: *mut Self, totals: &[f32; LANES]) {
        use std::arch::x86_64::{__m128i, _mm256_cvtps_ph, _mm256_loadu_ps};
        let mut totals = *totals;
        for total in &mut totals {
            *total = total.canonical();
        }
        for lane in (0..LANES).step_by(if AVX2 { 8 } else { 1 }) {
            // SAFETY: as the caller promises; 8 elements inside of the step.
            unsafe {
                let (from, to) = (totals.as_ptr().add(lane), elements.add(lane));
                if AVX2 {
                    // 0 is rounding to the nearest, of two to the even one.
                    let vector = _mm256_cvtps_ph::<0>(_mm256_loadu_ps(from));
                    to.cast::<__m128i>().write_unaligned(vector);
                } else {
                    to.write_unaligned(Self::narrow(*from));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the value of a half-precision number, by its definition.
    fn f16_value(bits: u16) -> f64 {
        let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 0x3ff));
        let magnitude = match exponent {
            31 if mantissa != 0.0 => return f64::NAN,
            31 => f64::INFINITY,
            0 => mantissa * 2f64.powi(-24),
            _ => (1024.0 + mantissa) * 2f64.powi(exponent - 25),
        };
        if bits >> 15 == 1 { -magnitude } else { magnitude }
    }

    fn bf16_value(bits: u16) -> f64 {
        f64::from(f32::from_bits(u32::from(bits) << 16))
    }

    /// Returns the nearest number of 16 bits, by a search among all positive ones.
    fn nearest(number: f32, value: fn(u16) -> f64, infinity: u16, nan: u16) -> u16 {
        if number.is_nan() {
            return nan;
        }
        let magnitude = f64::from(number.abs());
        let (mut low, mut high) = (0, infinity);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if value(middle) <= magnitude { low = middle } else { high = middle }
        }
        // Infinity is rounded to as if it were the number that follows the largest.
        let next = if high == infinity { 2.0 * value(low) - value(low - 1) } else { value(high) };
        let (below, above) = (magnitude - value(low), next - magnitude);
        let is_above = above < below || (above == below && low & 1 == 1);
        (if is_above { high } else { low }) | if number.is_sign_negative() { 0x8000 } else { 0 }
    }

    fn nearest_f16(number: f32) -> u16 {
        nearest(number, f16_value, 0x7c00, 0x7e00)
    }

    fn nearest_bf16(number: f32) -> u16 {
        nearest(number, bf16_value, 0x7f80, 0x7fc0)
    }

    fn bytes_of(word: u64, size: usize) -> Vec<u8> {
        word.to_le_bytes()[..size].to_vec()
    }

    fn word_of(bytes: &[u8]) -> u64 {
        bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
    }

    fn fold_integers(op: ReduceOp, data_type: DataType, words: &[u64]) -> u64 {
        let unused = 128 - 8 * data_type.size();
        let is_signed = data_type.name().starts_with('i');
        let wrap = |number: i128| match is_signed {
            true => number << unused >> unused,
            false => ((number as u128) << unused >> unused) as i128,
        };
        let numbers = words.iter().map(|word| wrap(i128::from(*word)));
        let total = numbers.reduce(|total, number| match op {
            ReduceOp::Sum | ReduceOp::Mean => wrap(total + number),
            ReduceOp::Product => wrap(total.wrapping_mul(number)),
            ReduceOp::Min => total.min(number),
            ReduceOp::Max => total.max(number),
        });
        let divisor = if op == ReduceOp::Mean { words.len() as i128 } else { 1 };
        (total.unwrap() / divisor) as u64
    }

    macro_rules! fold_floats {
        ($name:ident, $float:ty) => {
            fn $name(op: ReduceOp, numbers: impl Iterator<Item = $float>, ranks: usize) -> $float {
                let total = numbers.reduce(|total, number| match op {
                    ReduceOp::Sum | ReduceOp::Mean => total + number,
                    ReduceOp::Product => total * number,
                    _ if total.is_nan() => total,
                    ReduceOp::Min if number >= total => total,
                    ReduceOp::Max if number <= total => total,
                    _ => number,
                });
                let total = total.unwrap();
                if op == ReduceOp::Mean { total / ranks as $float } else { total }
            }
        };
    }

    fold_floats!(fold_f32, f32);
    fold_floats!(fold_f64, f64);

    /// Returns the bits of the reduction of one element of each source.
    fn fold_serially(op: ReduceOp, data_type: DataType, words: &[u64]) -> u64 {
        let (halves, ranks) = (words.iter().map(|word| *word as u16), words.len());
        match data_type {
            _ if ranks == 1 => words[0],
            DataType::F16 => {
                let total = fold_f32(op, halves.map(|half| f16_value(half) as f32), ranks);
                u64::from(nearest_f16(total))
            }
            DataType::Bf16 => {
                let total = fold_f32(op, halves.map(|half| bf16_value(half) as f32), ranks);
                u64::from(nearest_bf16(total))
            }
            DataType::F32 => {
                let numbers = words.iter().map(|word| f32::from_bits(*word as u32));
                let total = fold_f32(op, numbers, ranks);
                u64::from(if total.is_nan() { 0x7fc0_0000 } else { total.to_bits() })
            }
            DataType::F64 => {
                let total = fold_f64(op, words.iter().map(|word| f64::from_bits(*word)), ranks);
                if total.is_nan() { 0x7ff8 << 48 } else { total.to_bits() }
            }
            _ => fold_integers(op, data_type, words),
        }
    }

    /// Returns pseudo-random bits of an element, among floats often special ones or moderate ones.
    fn element(data_type: DataType, state: &mut u64) -> u64 {
        *state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let random = state.rotate_left(32);
        let special = [
            f64::NAN,
            -f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
            0.0,
            -0.0,
            6e-8,
            -1e-40,
            65504.0,
            1e308,
        ];
        let number = match random >> 60 {
            0 => special[(random % special.len() as u64) as usize],
            1..5 => return random,
            _ => f64::from((random >> 16) as i16) / 256.0,
        };
        match data_type {
            DataType::F16 => u64::from(nearest_f16(number as f32)),
            DataType::Bf16 => u64::from(nearest_bf16(number as f32)),
            DataType::F32 => u64::from((number as f32).to_bits()),
            DataType::F64 => number.to_bits(),
            _ => random,
        }
    }

    /// Bytes with space for elements that begin `offset` after a multiple of 64.
    struct Memory {
        bytes: Vec<u8>,
        start: usize,
        length: usize,
    }

    impl Memory {
        fn new(elements: &[u8], offset: usize) -> Self {
            let length = elements.len();
            let mut bytes = vec![0xa5; length + offset + 256];
            let start = bytes.as_ptr().align_offset(64) + offset;
            bytes[start..start + length].copy_from_slice(elements);
            Self { bytes, start, length }
        }

        fn pointer(&mut self) -> *mut u8 {
            self.bytes[self.start..].as_mut_ptr()
        }

        fn elements(&self) -> &[u8] {
            let (before, rest) = self.bytes.split_at(self.start);
            let (elements, after) = rest.split_at(self.length);
            assert!(before.iter().chain(after).all(|byte| *byte == 0xa5), "written outside");
            elements
        }
    }

    fn versions() -> Vec<Version> {
        let fastest = Version::of_processor();
        if fastest == Version::Plain { vec![fastest] } else { vec![Version::Plain, fastest] }
    }

    /// Compares all versions, with a target of its own and with each source as the target.
    fn check(op: ReduceOp, data_type: DataType, ranks: usize, count: usize, offset: usize) {
        let size = data_type.size();
        let mut state = (ranks * 10_000 + count) as u64;
        let words: Vec<Vec<u64>> = (0..count)
            .map(|_| (0..ranks).map(|_| element(data_type, &mut state)).collect())
            .collect();
        let source = |rank: usize| -> Vec<u8> {
            words.iter().flat_map(|words| bytes_of(words[rank], size)).collect()
        };
        let truncated = |words: &Vec<u64>| -> Vec<u64> {
            words.iter().map(|word| word_of(&bytes_of(*word, size))).collect()
        };
        let expected: Vec<u8> = words
            .iter()
            .flat_map(|words| bytes_of(fold_serially(op, data_type, &truncated(words)), size))
            .collect();
        for version in versions() {
            for (in_place, streams) in
                (0..ranks).map(|rank| (Some(rank), false)).chain([(None, false), (None, true)])
            {
                let mut memory: Vec<Memory> = (0..ranks)
                    .map(|rank| Memory::new(&source(rank), offset * (rank + 1) % 64))
                    .collect();
                memory.push(Memory::new(&vec![0; count * size], offset));
                let pointers: Vec<*mut u8> = memory.iter_mut().map(Memory::pointer).collect();
                let sources: Vec<*const u8> =
                    pointers[..ranks].iter().map(|pointer| pointer.cast_const()).collect();
                let at = in_place.unwrap_or(ranks);
                let (target, sources) = (pointers[at], sources.as_slice());
                let reduction = Reduction { op, target, sources, count, version, streams };
                // SAFETY: memory of this length each, and this processor's version.
                unsafe { reduction.run(data_type) };
                let what =
                    format!("{op} of {ranks} x {count} {data_type}, {version:?} {in_place:?}");
                for (rank, memory) in memory.iter().enumerate() {
                    let wanted = match rank {
                        _ if rank == at => expected.clone(),
                        _ if rank == ranks => vec![0; count * size],
                        _ => source(rank),
                    };
                    let found = memory.elements();
                    let differs =
                        found.iter().zip(&wanted).position(|(found, wanted)| found != wanted);
                    if let Some(byte) = differs {
                        let element = byte / size;
                        let range = element * size..(element + 1) * size;
                        panic!(
                            "{what}: element {element} of {:x?} became {:x?} instead of {:x?}",
                            words[element],
                            &found[range.clone()],
                            &wanted[range]
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn all_types_and_operations_equal_a_serial_fold() {
        for data_type in DataType::ALL {
            for op in ReduceOp::ALL {
                for ranks in 1..=5 {
                    for count in [0, 1, 7, 63, 64, 65, 1000] {
                        check(op, data_type, ranks, count, if count == 65 { 3 } else { 0 });
                    }
                }
                check(op, data_type, 3, 4099, 8);
            }
        }
    }

    #[test]
    fn more_ranks_than_an_integer_can_count_are_divided_by() {
        for data_type in [DataType::U8, DataType::I8, DataType::F16] {
            check(ReduceOp::Mean, data_type, 300, 5, 0);
        }
    }

    #[test]
    fn no_source_leaves_the_target_unchanged() {
        let mut memory = Memory::new(&[1, 2, 3], 0);
        // SAFETY: 3 bytes.
        unsafe { reduce(ReduceOp::Sum, DataType::U8, memory.pointer(), &[], 3) };
        assert_eq!(memory.elements(), [1, 2, 3]);
    }

    #[test]
    fn first_of_equal_zeros_is_kept_and_nan_wins() {
        for (op, sources, expected) in [
            (ReduceOp::Min, [0.0, -0.0], 0.0f32),
            (ReduceOp::Min, [-0.0, 0.0], -0.0),
            (ReduceOp::Max, [-0.0, 0.0], -0.0),
            (ReduceOp::Max, [0.0, -0.0], 0.0),
            (ReduceOp::Max, [-f32::NAN, 1.0], f32::from_bits(0x7fc0_0000)),
            (ReduceOp::Min, [1.0, f32::from_bits(0xff80_0001)], f32::from_bits(0x7fc0_0000)),
            (ReduceOp::Sum, [f32::INFINITY, f32::NEG_INFINITY], f32::from_bits(0x7fc0_0000)),
        ] {
            let mut target = 0.0f32;
            let pointers = [(&raw const sources[0]).cast(), (&raw const sources[1]).cast()];
            // SAFETY: one number each.
            unsafe { reduce(op, DataType::F32, (&raw mut target).cast(), &pointers, 1) };
            assert_eq!(target.to_bits(), expected.to_bits(), "{op} of {sources:?}");
        }
    }

    /// Returns the elements of a step in single precision.
    fn widened<E: Element<Accumulator = f32>>(
        version: Version,
        elements: &[E; LANES],
    ) -> [f32; LANES] {
        let mut wide = [0.0; LANES];
        // SAFETY: a step of elements, and a version that the processor can run.
        unsafe {
            match version {
                Version::Plain => E::load::<false>(elements.as_ptr(), |lane, to| wide[lane] = to),
                #[cfg(target_arch = "x86_64")]
                Version::Avx2 => E::load::<true>(elements.as_ptr(), |lane, to| wide[lane] = to),
            }
        }
        wide
    }

    fn narrowed<E: Element<Accumulator = f32>>(
        version: Version,
        totals: &[f32; LANES],
    ) -> [E; LANES] {
        let mut elements = [E::default(); LANES];
        // SAFETY: a step of elements, and a version that the processor can run.
        unsafe {
            match version {
                Version::Plain => E::store::<false>(elements.as_mut_ptr(), totals),
                #[cfg(target_arch = "x86_64")]
                Version::Avx2 => E::store::<true>(elements.as_mut_ptr(), totals),
            }
        }
        elements
    }

    #[test]
    fn all_half_precision_numbers_are_widened_exactly() {
        for start in (0..=u16::MAX).step_by(LANES) {
            let bits: [u16; LANES] = std::array::from_fn(|lane| start + lane as u16);
            for version in versions() {
                let wide = widened(version, &bits.map(F16));
                for (bits, wide) in bits.iter().zip(wide) {
                    let expected = f16_value(*bits) as f32;
                    let is_same = wide.to_bits() == expected.to_bits();
                    assert!(is_same || wide.is_nan() && expected.is_nan(), "{version:?} {bits:x}");
                }
            }
        }
    }

    #[test]
    fn single_precision_is_rounded_to_the_nearest_half() {
        // All exponents, and between them numbers that are ties, and those before and after ties.
        let near = |bits: u32| (-1..=1).map(move |step| bits.wrapping_add_signed(step));
        let steps = (0..1 << 16).flat_map(|upper: u32| {
            [0, 0x0fff, 0x1000, 0x8000, upper.wrapping_mul(40_503) & 0xffff]
                .into_iter()
                .flat_map(move |lower| near(upper << 16 | lower))
        });
        let mut numbers: Vec<f32> = steps.map(f32::from_bits).collect();
        numbers.resize(numbers.len().next_multiple_of(LANES), 0.0);
        for totals in numbers.chunks_exact(LANES) {
            let totals: &[f32; LANES] = totals.try_into().unwrap();
            let plain: [F16; LANES] = narrowed(Version::Plain, totals);
            let fast: [F16; LANES] = narrowed(Version::of_processor(), totals);
            let upper: [Bf16; LANES] = narrowed(Version::Plain, totals);
            for (lane, total) in totals.iter().enumerate() {
                let bits = total.to_bits();
                assert_eq!(plain[lane].0, fast[lane].0, "{bits:x}");
                if bits % 3 == 0 {
                    assert_eq!(plain[lane].0, nearest_f16(*total), "{bits:x}");
                    assert_eq!(upper[lane].0, nearest_bf16(*total), "{bits:x}");
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn unaligned_elements_equal_a_serial_fold(
            (op, data_type) in (1u8..=5, 1u8..=12),
            (ranks, count, offset) in (2usize..=4, 0usize..300, 0usize..64),
        ) {
            let op = ReduceOp::from_number(op).unwrap();
            check(op, DataType::from_number(data_type).unwrap(), ranks, count, offset);
        }
    }
}
