//! The fast Fourier transform of rows.

use std::f64::consts::TAU;
use std::ops::{Add, Mul, Sub};

/// A complex number.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Complex {
    /// Real part.
    pub re: f64,
    /// Imaginary part.
    pub im: f64,
}

impl Complex {
    /// Bytes of a number.
    pub const BYTES: u64 = size_of::<Self>() as u64;

    /// The square of its absolute value.
    #[must_use]
    pub fn norm_squared(self) -> f64 {
        self.re * self.re + self.im * self.im
    }
}

impl Add for Complex {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { re: self.re + other.re, im: self.im + other.im }
    }
}

impl Sub for Complex {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self { re: self.re - other.re, im: self.im - other.im }
    }
}

impl Mul for Complex {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        Self {
            re: self.re * other.re - self.im * other.im,
            im: self.re * other.im + self.im * other.re,
        }
    }
}

/// The transform of rows of one length.
#[derive(Debug, Clone)]
pub struct Fft {
    /// e^(-2πik / length), for the first half of k.
    factors: Vec<Complex>,
    length: usize,
}

impl Fft {
    /// For rows of this length, a power of two; None for other lengths.
    #[must_use]
    pub fn new(length: usize) -> Option<Self> {
        let factor = |k| {
            let (im, re) = (-TAU * k as f64 / length as f64).sin_cos();
            Complex { re, im }
        };
        length
            .is_power_of_two()
            .then(|| Self { factors: (0..length / 2).map(factor).collect(), length })
    }

    /// Transforms each row of a matrix in place (radix 2, decimation in time).
    pub fn transform_rows(&self, matrix: &mut [Complex]) {
        matrix.chunks_exact_mut(self.length).for_each(|row| self.transform(row));
    }

    fn transform(&self, row: &mut [Complex]) {
        let bits = self.length.trailing_zeros();
        for at in 0..self.length {
            let other = at.reverse_bits().checked_shr(usize::BITS - bits).unwrap_or(0);
            if at < other {
                row.swap(at, other);
            }
        }
        let mut half = 1;
        while half < self.length {
            let stride = self.length / (2 * half);
            for pair in row.chunks_exact_mut(2 * half) {
                let (even, odd) = pair.split_at_mut(half);
                for (at, (even, odd)) in even.iter_mut().zip(odd).enumerate() {
                    let turned = self.factors[at * stride] * *odd;
                    (*even, *odd) = (*even + turned, *even - turned);
                }
            }
            half *= 2;
        }
    }
}

/// The transpose of a matrix with this number of columns.
#[must_use]
pub fn transposed(matrix: &[Complex], columns: usize) -> Vec<Complex> {
    /// Rows and columns of tiles that fit into the cache.
    const TILE: usize = 32;
    let rows = matrix.len() / columns;
    let mut result = vec![Complex::default(); matrix.len()];
    for first_row in (0..rows).step_by(TILE) {
        for first_column in (0..columns).step_by(TILE) {
            for row in first_row..rows.min(first_row + TILE) {
                for column in first_column..columns.min(first_column + TILE) {
                    result[column * rows + row] = matrix[row * columns + column];
                }
            }
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transform_equals_the_sum_of_its_definition() {
        for length in [1_usize, 2, 8, 64] {
            let value = |at: usize| Complex { re: (at * at % 7) as f64, im: (at % 5) as f64 - 1.0 };
            let row: Vec<_> = (0..length).map(value).collect();
            let mut found = row.clone();
            Fft::new(length).unwrap().transform_rows(&mut found);
            for (k, found) in found.iter().enumerate() {
                let turned = |(at, value): (usize, &Complex)| {
                    let (im, re) = (-TAU * (k * at) as f64 / length as f64).sin_cos();
                    *value * Complex { re, im }
                };
                let expected =
                    row.iter().enumerate().map(turned).fold(Complex::default(), Complex::add);
                assert!((*found - expected).norm_squared() < 1e-18, "{length} {k}");
            }
        }
        assert!(Fft::new(12).is_none());
    }

    #[test]
    fn transpose_of_a_transpose_is_the_matrix() {
        let matrix: Vec<_> = (0..40 * 70).map(|at| Complex { re: at as f64, im: 0.0 }).collect();
        let other = transposed(&matrix, 70);
        assert_eq!(other[1], matrix[70]);
        assert!(transposed(&other, 40) == matrix);
    }
}
