//! Measured times.

use std::time::Duration;

/// Times in nanoseconds.
#[derive(Debug, Clone, Default)]
pub struct Samples(Vec<u64>);

impl Samples {
    /// With space for this number of samples.
    #[must_use]
    pub fn with_capacity(count: usize) -> Self {
        Self(Vec::with_capacity(count))
    }

    /// Adds a sample.
    pub fn add(&mut self, time: Duration) {
        self.0.push(time.as_nanos() as u64);
    }

    /// The smallest sample that this part of all do not exceed, in microseconds; NaN without samples.
    #[must_use]
    pub fn quantile(&self, part: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let at = ((sorted.len() as f64 * part).ceil() as usize).clamp(1, sorted.len().max(1)) - 1;
        sorted.get(at).map_or(f64::NAN, |time| *time as f64 / 1e3)
    }

    /// The median, in microseconds; NaN without samples.
    #[must_use]
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// Adds all samples of others.
    pub fn append(&mut self, others: &Self) {
        self.0.extend_from_slice(&others.0);
    }

    /// The mean, in microseconds; NaN without samples.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.0.iter().sum::<u64>() as f64 / self.0.len() as f64 / 1e3
    }

    /// The number of samples.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

impl Extend<Duration> for Samples {
    fn extend<I: IntoIterator<Item = Duration>>(&mut self, times: I) {
        times.into_iter().for_each(|time| self.add(time));
    }
}

/// The median of numbers; NaN without numbers.
#[must_use]
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The order of two measured programs in pairs: A B, B A, A B, …; true is A.
pub fn interleaved(pairs: u32) -> impl Iterator<Item = (u32, bool)> {
    (0..pairs).flat_map(|pair| [(pair, pair % 2 == 0), (pair, pair % 2 != 0)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_samples() {
        let mut samples = Samples::default();
        assert!(samples.median().is_nan());
        samples.extend((1..=100).rev().map(Duration::from_micros));
        let quantiles = [0.0, 0.5, 0.99, 1.0].map(|part| samples.quantile(part));
        assert_eq!(quantiles, [1.0, 50.0, 99.0, 100.0]);
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
    }

    #[test]
    fn pairs_alternate() {
        let order: Vec<_> = interleaved(2).collect();
        assert_eq!(order, [(0, true), (0, false), (1, false), (1, true)]);
    }
}
