//! Statistics of executions of operations, on one rank and on all.

use std::time::Duration;

use crate::operation::OpKey;
use crate::parameters::Parameters;

/// Statistics of an execution of an operation: on one rank, or aggregated over all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExecStat {
    /// Time of the fast path; zero if it moved nothing.
    pub fast_time: Duration,
    /// Time of the second path; zero if it moved nothing.
    pub second_time: Duration,
    /// The bytes that the fast path moved.
    pub fast_bytes: u64,
    /// The bytes that the second path moved.
    pub second_bytes: u64,
    /// Set if all bytes arrived.
    pub success: bool,
}

impl ExecStat {
    /// Time of the operation: that of its slower path.
    #[must_use]
    pub fn time(&self) -> Duration {
        self.fast_time.max(self.second_time)
    }

    /// The bytes of both paths.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.fast_bytes.saturating_add(self.second_bytes)
    }

    /// Words of a report, with the key and the parameters of the execution.
    #[must_use]
    pub fn encode(&self, key: OpKey, parameters: Parameters) -> ipc::Report {
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        [
            u64::from(key.row()) << 1 | u64::from(self.success),
            nanoseconds(self.fast_time),
            nanoseconds(self.second_time),
            self.fast_bytes,
            self.second_bytes,
            parameters.encode(),
            0,
        ]
    }

    /// The execution of a report. None if [`encode`](Self::encode) gives no such words.
    #[must_use]
    pub fn decode(report: &ipc::Report) -> Option<(OpKey, Parameters, Self)> {
        let [row, fast_time, second_time, fast_bytes, second_bytes, parameters, 0] = *report else {
            return None;
        };
        let key = OpKey::of_row(u32::try_from(row >> 1).ok()?)?;
        let stat = Self {
            fast_time: Duration::from_nanos(fast_time),
            second_time: Duration::from_nanos(second_time),
            fast_bytes,
            second_bytes,
            success: row & 1 == 1,
        };
        Some((key, Parameters::decode(parameters)?, stat))
    }
}

/// Aggregation of the times of the ranks to the time of the operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Aggregation {
    /// The longest time: an operation is over when its last rank is.
    #[default]
    Max,
    /// The mean.
    Mean,
    /// The shortest time that so many percent of the ranks did not exceed.
    Percentile(u8),
}

impl Aggregation {
    /// The statistics of the operation. None without any.
    #[must_use]
    pub fn of(self, ranks: &[ExecStat]) -> Option<ExecStat> {
        let first = ranks.first()?;
        let time = |of: fn(&ExecStat) -> Duration| self.time(ranks.iter().map(of));
        Some(ExecStat {
            fast_time: time(|stat| stat.fast_time),
            second_time: time(|stat| stat.second_time),
            fast_bytes: ranks.iter().map(|stat| stat.fast_bytes).max().unwrap_or(first.fast_bytes),
            second_bytes: ranks.iter().map(|stat| stat.second_bytes).max().unwrap_or(0),
            success: ranks.iter().all(|stat| stat.success),
        })
    }

    fn time(self, times: impl ExactSizeIterator<Item = Duration>) -> Duration {
        let count = times.len();
        match self {
            Self::Max => times.max().unwrap_or_default(),
            Self::Mean => times.sum::<Duration>() / count as u32,
            Self::Percentile(percent) => {
                let mut times = Vec::from_iter(times);
                times.sort_unstable();
                let rank = (count * usize::from(percent.min(100))).div_ceil(100);
                times[rank.saturating_sub(1)]
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::parameters::tests::any_parameters;

    pub(crate) fn any_stat() -> impl Strategy<Value = ExecStat> {
        // Random numbers are rarely extreme or equal.
        let number = || prop_oneof![Just(0), Just(1), Just(u64::MAX), 0_u64..1 << 40, any::<u64>()];
        let time = || number().prop_map(Duration::from_nanos);
        let parts = (time(), time(), number(), number(), any::<bool>());
        parts.prop_map(|(fast_time, second_time, fast_bytes, second_bytes, success)| ExecStat {
            fast_time,
            second_time,
            fast_bytes,
            second_bytes,
            success,
        })
    }

    proptest! {
        #[test]
        fn encoded_executions_are_decoded(
            row in 0..OpKey::COUNT,
            parameters in any_parameters(),
            stat in any_stat(),
        ) {
            let key = OpKey::of_row(row).unwrap();
            let report = stat.encode(key, parameters);
            prop_assert_eq!(ExecStat::decode(&report), Some((key, parameters, stat)));
        }

        #[test]
        fn reports_that_are_no_encoding_give_none(
            random: ipc::Report,
            row in 0..OpKey::COUNT,
            parameters in any_parameters(),
            stat in any_stat(),
            word in 0_usize..7,
            bit in 0_u32..64,
        ) {
            let mut changed = stat.encode(OpKey::of_row(row).unwrap(), parameters);
            changed[word] ^= 1 << bit;
            let mut shortened = changed;
            shortened[word] >>= bit;
            for report in [random, changed, shortened] {
                if let Some((key, parameters, stat)) = ExecStat::decode(&report) {
                    let mut expected = stat.encode(key, parameters);
                    // The default parameters have a second encoding.
                    expected[5] = if report[5] == 0 { 0 } else { expected[5] };
                    prop_assert_eq!(expected, report);
                }
            }
        }

        #[test]
        fn aggregated_times_are_between_those_of_the_ranks(
            ranks in prop::collection::vec(any_stat(), 1..9),
            percent: u8,
        ) {
            for how in [Aggregation::Max, Aggregation::Mean, Aggregation::Percentile(percent)] {
                let all = how.of(&ranks).unwrap();
                let times = || ranks.iter().map(|rank| rank.fast_time);
                prop_assert!(times().min().unwrap() <= all.fast_time);
                prop_assert!(all.fast_time <= times().max().unwrap());
                prop_assert_eq!(all.success, ranks.iter().all(|rank| rank.success));
            }
        }
    }

    #[test]
    fn rows_without_a_key_give_none() {
        let key = OpKey::of_row(0).unwrap();
        let report = ExecStat::default().encode(key, Parameters::default());
        for row in [u64::from(OpKey::COUNT), u64::from(u32::MAX) + 1, u64::MAX >> 1] {
            let mut report = report;
            report[0] = row << 1;
            assert_eq!(ExecStat::decode(&report), None);
        }
    }

    #[test]
    fn aggregations_choose_among_ranks() {
        let ranks: Vec<ExecStat> = (1..=10)
            .map(|rank| ExecStat { fast_time: Duration::from_micros(rank), ..ExecStat::default() })
            .collect();
        let time = |how: Aggregation| how.of(&ranks).unwrap().fast_time;
        assert_eq!(time(Aggregation::Max), Duration::from_micros(10));
        assert_eq!(time(Aggregation::Mean), Duration::from_nanos(5_500));
        assert_eq!(time(Aggregation::Percentile(0)), Duration::from_micros(1));
        assert_eq!(time(Aggregation::Percentile(90)), Duration::from_micros(9));
        assert_eq!(time(Aggregation::Percentile(255)), Duration::from_micros(10));
        assert_eq!(Aggregation::Max.of(&[]), None);
    }
}
