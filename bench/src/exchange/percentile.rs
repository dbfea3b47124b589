//! Percentiles over all samples.

/// The values that a report gives, in the unit of the samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Percentiles {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
}

impl Percentiles {
    /// Sorts the samples. Each value is one that was measured, the nearest in
    /// rank: nothing is interpolated. None without samples.
    pub(crate) fn of(samples: &mut [u64]) -> Option<Self> {
        samples.sort_unstable();
        let last = samples.len().checked_sub(1)?;
        let at = |quantile: f64| samples[(quantile * last as f64 + 0.5) as usize] as f64;
        Some(Self { p50: at(0.5), p99: at(0.99), p999: at(0.999) })
    }

    /// The same, with every value multiplied.
    pub(crate) fn scaled(self, factor: f64) -> Self {
        Self { p50: self.p50 * factor, p99: self.p99 * factor, p999: self.p999 * factor }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_the_nearest_in_rank() {
        let mut samples: Vec<u64> = (0..=1000).rev().collect();
        let all = Percentiles::of(&mut samples).unwrap();
        assert_eq!(all, Percentiles { p50: 500.0, p99: 990.0, p999: 999.0 });
        assert_eq!(all.scaled(0.5).p99, 495.0);
    }

    #[test]
    fn few_samples_are_enough() {
        assert_eq!(Percentiles::of(&mut []), None);
        let one = Percentiles::of(&mut [7]).unwrap();
        assert_eq!(one, Percentiles { p50: 7.0, p99: 7.0, p999: 7.0 });
        let two = Percentiles::of(&mut [9, 1]).unwrap();
        assert_eq!((two.p50, two.p99), (9.0, 9.0));
    }
}
