//! Histogram of many samples in little memory, accurate to 0.1 %, so that ratios of two quantiles
//! are meaningful.

use hdrhistogram::Histogram as Counts;
use serde::{Deserialize, Serialize};

/// Significant digits of a sample.
const DIGITS: u8 = 3;

/// Counts of samples, which can be sent and merged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(from = "Vec<(u64, u64)>", into = "Vec<(u64, u64)>")]
pub struct Histogram(Counts<u64>);

impl Default for Histogram {
    fn default() -> Self {
        Self::up_to(u64::from(u16::MAX))
    }
}

/// Serialized form: samples, and how many of each.
impl From<Histogram> for Vec<(u64, u64)> {
    fn from(all: Histogram) -> Self {
        all.buckets()
    }
}

impl From<Vec<(u64, u64)>> for Histogram {
    fn from(counted: Vec<(u64, u64)>) -> Self {
        let mut all = Self::default();
        for (sample, count) in counted {
            all.add_several(sample, count);
        }
        all
    }
}

impl FromIterator<u64> for Histogram {
    fn from_iter<I: IntoIterator<Item = u64>>(samples: I) -> Self {
        let mut all = Self::default();
        samples.into_iter().for_each(|sample| all.add(sample));
        all
    }
}

impl<'a> FromIterator<&'a Self> for Histogram {
    fn from_iter<I: IntoIterator<Item = &'a Self>>(parts: I) -> Self {
        let mut all = Self::default();
        parts.into_iter().for_each(|part| all.merge(part));
        all
    }
}

impl Histogram {
    /// Adds a sample.
    #[inline]
    pub fn add(&mut self, sample: u64) {
        self.add_several(sample, 1);
    }

    #[inline]
    fn add_several(&mut self, sample: u64, count: u64) {
        // The histogram grows, so no sample is out of range.
        let added = self.0.record_n(sample, count);
        debug_assert!(added.is_ok(), "{added:?}");
    }

    /// A histogram with space for all samples up to this one, so that adding them allocates
    /// nothing.
    ///
    /// # Panics
    /// Never: the bounds and the three digits are valid.
    #[must_use]
    pub fn up_to(sample: u64) -> Self {
        let mut counts = Counts::new_with_bounds(1, sample.max(2), DIGITS).expect("valid bounds");
        counts.auto(true);
        Self(counts)
    }

    /// Adds all samples of another histogram.
    ///
    /// # Panics
    /// Never: the histogram grows.
    pub fn merge(&mut self, other: &Self) {
        self.0.add(&other.0).expect("it grows");
    }

    /// The number of samples.
    #[must_use]
    pub fn samples(&self) -> u64 {
        self.0.len()
    }

    /// The smallest value that at least this part of all samples do not exceed; None without
    /// samples.
    #[must_use]
    pub fn quantile(&self, quantile: f64) -> Option<u64> {
        (!self.0.is_empty()).then(|| self.0.value_at_quantile(quantile))
    }

    /// Like [`Self::quantile`], of samples in nanoseconds.
    #[must_use]
    pub fn microseconds(&self, quantile: f64) -> Option<f64> {
        self.quantile(quantile).map(|nanoseconds| nanoseconds as f64 / 1000.0)
    }

    /// The samples, rounded to the digits, and how many of each.
    #[must_use]
    pub fn buckets(&self) -> Vec<(u64, u64)> {
        let all = self.0.iter_recorded();
        all.map(|it| (it.value_iterated_to(), it.count_at_value())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_equal_those_of_the_samples() {
        assert_eq!(Histogram::default().quantile(0.5), None);
        let mut all = Histogram::default();
        for sample in 0..=1000 {
            let mut one = Histogram::up_to(1);
            one.add(sample);
            all.merge(&one);
        }
        assert_eq!(all.samples(), 1001);
        let quantiles = [0.0, 0.5, 0.99, 1.0].map(|quantile| all.quantile(quantile));
        assert_eq!(quantiles, [0, 500, 990, 1000].map(Some));
        let one: Histogram = [70_001].into_iter().collect();
        let [least, most] = [0.001, 0.999].map(|quantile| one.quantile(quantile).unwrap());
        assert_eq!(least, most);
        assert!(most.abs_diff(70_001) <= 70, "{most}");
    }

    #[test]
    fn histogram_survives_serialization() {
        let samples = [3, 3, 70_000, 11_010_047, 900_000_000_000, u64::MAX];
        let all: Histogram = samples.into_iter().collect();
        let sent = serde_json::to_string(&all).unwrap();
        assert!(sent.len() < 120, "{sent}");
        let received: Histogram = serde_json::from_str(&sent).unwrap();
        assert_eq!((received.samples(), received.buckets()), (6, all.buckets()));
    }
}
