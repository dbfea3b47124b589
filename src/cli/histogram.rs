//! Many samples in little room: counts by size, to less than half a per cent, so that ratios of two
//! of them can be told from each other.

use serde::{Deserialize, Serialize};

/// Parts of each power of two, as a power of two.
const PART_BITS: u32 = 8;
const PARTS: u64 = 1 << PART_BITS;

/// Counts of samples, which can be sent and added up.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Sparse", into = "Sparse")]
pub(crate) struct Histogram {
    counts: Vec<u64>,
}

/// As it is sent: the buckets that have samples. What is beyond all of them is not taken.
#[derive(Debug, Serialize, Deserialize)]
struct Sparse(Vec<(u32, u64)>);

impl From<Histogram> for Sparse {
    fn from(all: Histogram) -> Self {
        let counts = (0..).zip(all.counts);
        Self(counts.filter(|(_, count)| *count > 0).collect())
    }
}

impl From<Sparse> for Histogram {
    fn from(Sparse(counted): Sparse) -> Self {
        let last = bucket(u64::MAX);
        let counted = || counted.iter().filter(|(bucket, _)| *bucket as usize <= last);
        let length = counted().map(|(bucket, _)| *bucket as usize + 1).max().unwrap_or(0);
        let mut counts = vec![0_u64; length];
        for (bucket, count) in counted() {
            counts[*bucket as usize] = counts[*bucket as usize].saturating_add(*count);
        }
        Self { counts }
    }
}

fn bucket(sample: u64) -> usize {
    if sample < PARTS {
        return sample as usize;
    }
    let log = u64::BITS - 1 - sample.leading_zeros();
    let part = (sample >> (log - PART_BITS)) - PARTS;
    ((u64::from(log - PART_BITS) + 1) * PARTS + part) as usize
}

/// The largest sample of a bucket.
fn top(bucket: usize) -> u64 {
    let (level, part) = (bucket as u64 / PARTS, bucket as u64 % PARTS);
    match level {
        0 => part,
        level => ((PARTS + part) << (level - 1)) + ((1 << (level - 1)) - 1),
    }
}

impl Histogram {
    #[inline]
    pub(crate) fn add(&mut self, sample: u64) {
        let bucket = bucket(sample);
        if bucket >= self.counts.len() {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] += 1;
    }

    /// Room for all samples up to this one, so that adding them allocates nothing.
    pub(crate) fn up_to(sample: u64) -> Self {
        Self { counts: vec![0; bucket(sample) + 1] }
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        self.counts.resize(self.counts.len().max(other.counts.len()), 0);
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
    }

    pub(crate) fn samples(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// What this part of all samples does not exceed; None without samples.
    pub(crate) fn quantile(&self, quantile: f64) -> Option<u64> {
        let all = self.samples();
        let rank = (quantile * all.checked_sub(1)? as f64).round() as u64;
        let mut seen = 0;
        let position = self.counts.iter().position(|count| {
            seen += count;
            seen > rank
        });
        position.map(top)
    }

    /// The same, of samples in nanoseconds.
    pub(crate) fn microseconds(&self, quantile: f64) -> Option<f64> {
        self.quantile(quantile).map(|nanoseconds| nanoseconds as f64 / 1000.0)
    }

    /// The buckets that have samples: the largest of each, and how many.
    pub(crate) fn buckets(&self) -> Vec<(u64, u64)> {
        let counted = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        counted.map(|(bucket, count)| (top(bucket), *count)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_is_near_the_top_of_its_bucket() {
        for sample in (0..70).map(|power| 2_f64.powf(f64::from(power) * 0.9) as u64) {
            let top = top(bucket(sample));
            assert!(top >= sample && top - sample <= sample / 256 + 1, "{sample}: {top}");
        }
        assert_eq!(top(bucket(u64::MAX / 2)), u64::MAX / 2);
        assert_eq!(top(bucket(u64::MAX)), u64::MAX, "also of the last one");
    }

    #[test]
    fn quantiles_are_those_of_the_samples() {
        let mut all = Histogram::default();
        assert_eq!(all.quantile(0.5), None);
        for sample in 0..=1000 {
            let mut one = Histogram::up_to(1);
            one.add(sample);
            all.merge(&one);
        }
        assert_eq!(all.samples(), 1001);
        let middle = all.quantile(0.5).unwrap();
        assert!((500..=502).contains(&middle), "{middle}");
        assert!(all.quantile(1.0).unwrap() >= 1000);
        assert_eq!(all.quantile(0.0), Some(0));
        assert_eq!(all.buckets().iter().map(|(_, count)| count).sum::<u64>(), 1001);
    }

    #[test]
    fn what_is_sent_comes_as_it_was() {
        let mut all = Histogram::up_to(600_000_000_000);
        [3, 3, 70_000, 11_010_047, u64::MAX].into_iter().for_each(|sample| all.add(sample));
        let sent = serde_json::to_string(&all).unwrap();
        assert!(sent.len() < 100, "{sent}");
        let come: Histogram = serde_json::from_str(&sent).unwrap();
        assert_eq!((come.samples(), come.buckets()), (5, all.buckets()));
        let beyond: Histogram = serde_json::from_str("[[4294967295,7],[1,2]]").unwrap();
        assert_eq!(beyond.buckets(), [(1, 2)]);
    }
}
