//! The split of large operations of devices between two paths: rank 0 learns it from the times of all ranks.
//!
//! The report of a rank travels with the agreement on buffers: whether it can use the second path, the times of an
//! earlier operation, and from rank 0 the parameters of this one. So all ranks split alike.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use gpu::{Device, Event, Stream};

use crate::buffer_agreement::ReportWords;
use crate::controller::{Change, Choices, Controller};
use crate::operation::{OpKey, Operation};
use crate::parameters::Parameters;
use crate::statistics::ExecStat;
use crate::status_file::StatusFile;

/// From this number of bytes of a block on the second path is worth its latency.
const MIN_BYTES: u64 = 128 << 20;
/// The first split to try, in thousandths: NVLink has about ten times the rate of a copy through the host.
const FIRST_ALPHA: u16 = 930;
/// Operations that are measured at a time, and whose times are awaited.
const MAX_MEASURED: usize = 16;
/// Of settled operations one of so many is measured, to notice changes.
const SAMPLED: u64 = 8;

/// Report of a rank, as words: its parameters, whether it can use the second path, and the number and the
/// times of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct PathReport {
    parameters: Parameters,
    can_use_both: bool,
    number: u64,
    times: [u64; 2],
}

impl PathReport {
    fn encode(self) -> ReportWords {
        let Self { parameters, can_use_both, number, times } = self;
        [parameters.encode(), u64::from(can_use_both), number, times[0], times[1]]
    }

    fn decode(report: &ReportWords) -> Self {
        let [parameters, can_use_both, number, fast, second] = *report;
        let parameters = Parameters::decode(parameters).unwrap_or_default();
        Self { parameters, can_use_both: can_use_both == 1, number, times: [fast, second] }
    }
}

/// An operation that the device measures.
#[derive(Debug)]
pub(crate) struct Measurement {
    number: u64,
    begin: Event,
    /// Of the fast path, and of the second one.
    ends: [Vec<Event>; 2],
}

impl Measurement {
    /// Marks the end of a part of a path on its stream.
    pub(crate) fn end(&mut self, path: usize, device: &Device, stream: &Stream) -> gpu::Result<()> {
        let event = device.event_with_time()?;
        stream.record(&event)?;
        self.ends[path].push(event);
        Ok(())
    }

    /// The times of both paths in nanoseconds; None while one is not known.
    fn times(&self) -> gpu::Result<Option<[u64; 2]>> {
        let mut times = [0; 2];
        for (time, ends) in times.iter_mut().zip(&self.ends) {
            for end in ends {
                let Some(took) = end.time_since(&self.begin)? else { return Ok(None) };
                *time = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).max(1).max(*time);
            }
        }
        Ok(Some(times))
    }
}

/// An operation whose times rank 0 awaits.
#[derive(Debug)]
struct Awaited {
    key: OpKey,
    used: Parameters,
    bytes: [u64; 2],
    times: Vec<Option<[u64; 2]>>,
}

/// The split, as one rank has it.
#[derive(Debug)]
pub(crate) struct DevicePaths {
    ranks: u32,
    fixed: Option<Parameters>,
    /// Only of rank 0.
    controller: Option<Controller>,
    /// The number of the last operation that ranks split.
    number: u64,
    running: VecDeque<Measurement>,
    /// The times of the last operation that is known here.
    known: (u64, [u64; 2]),
    awaited: BTreeMap<u64, Awaited>,
    /// What was used last for each key.
    used: BTreeMap<OpKey, Parameters>,
    status: Option<StatusFile>,
}

impl DevicePaths {
    pub(crate) fn new(
        rank: u32,
        ranks: u32,
        fixed: Option<Parameters>,
        status: Option<StatusFile>,
    ) -> Self {
        let choices = |key: OpKey| {
            let first_alpha =
                can_split(key.operation, key.size_class.largest()).then_some(FIRST_ALPHA);
            Choices { candidates: vec![Parameters::default()], first_alpha }
        };
        Self {
            ranks,
            fixed,
            controller: (rank == 0).then(|| Controller::new(choices)),
            number: 0,
            running: VecDeque::new(),
            known: (0, [0; 2]),
            awaited: BTreeMap::new(),
            used: BTreeMap::new(),
            status,
        }
    }

    /// Returns whether an operation with blocks of so many bytes may use two paths.
    pub(crate) fn may_split(&self, operation: Operation, bytes: u64) -> bool {
        match self.fixed {
            Some(fixed) => gives_to_all(operation) && fixed.alpha < Parameters::FAST_ONLY,
            None => can_split(operation, bytes),
        }
    }

    /// Report of this rank in the next operation.
    pub(crate) fn report(&mut self, key: OpKey, can_use_both: bool) -> ReportWords {
        while let Some(first) = self.running.front() {
            let number = first.number;
            match first.times() {
                Ok(None) => break,
                Ok(Some(times)) => self.known = (number, times),
                Err(error) => tracing::debug!(%error, "times of a path are not known"),
            }
            self.running.pop_front();
        }
        let learnt = self.controller.as_ref().map(|controller| controller.parameters(key));
        let parameters = self.fixed.or(learnt).unwrap_or_default();
        let (number, times) = self.known;
        PathReport { parameters, can_use_both, number, times }.encode()
    }

    /// The parameters of the operation in which the ranks gave these reports: the same on all ranks.
    pub(crate) fn agree(&mut self, key: OpKey, reports: &[ReportWords]) -> Parameters {
        let all: Vec<PathReport> = reports.iter().map(PathReport::decode).collect();
        self.learn(&all);
        self.number += 1;
        let first = all.first().copied().unwrap_or_default();
        let parameters = match all.iter().all(|report| report.can_use_both) {
            true => first.parameters,
            false => Parameters { alpha: Parameters::FAST_ONLY, ..first.parameters },
        };
        self.used.insert(key, parameters);
        parameters
    }

    /// Measures the operation that was agreed on, if it is to be measured.
    pub(crate) fn measure(
        &mut self,
        key: OpKey,
        used: Parameters,
        bytes: [u64; 2],
        begin: impl FnOnce() -> gpu::Result<Event>,
    ) -> gpu::Result<Option<Measurement>> {
        let is_settled = self.controller.as_ref().is_some_and(|it| it.is_settled(key));
        if let Some(controller) = &self.controller
            && controller.parameters(key) == used
            && (!is_settled || self.number.is_multiple_of(SAMPLED))
        {
            if self.awaited.len() >= MAX_MEASURED {
                self.awaited.pop_first();
            }
            let times = vec![None; self.ranks as usize];
            self.awaited.insert(self.number, Awaited { key, used, bytes, times });
        }
        if self.fixed.is_some() || self.running.len() >= MAX_MEASURED {
            return Ok(None);
        }
        Ok(Some(Measurement { number: self.number, begin: begin()?, ends: Default::default() }))
    }

    /// Keeps a measurement whose ends were marked.
    pub(crate) fn keep(&mut self, measurement: Measurement) {
        self.running.push_back(measurement);
    }

    fn learn(&mut self, all: &[PathReport]) {
        let Self { controller: Some(controller), awaited, status, .. } = self else { return };
        for (rank, report) in all.iter().enumerate() {
            if let Some(awaited) = awaited.get_mut(&report.number) {
                awaited.times[rank] = Some(report.times);
            }
        }
        let complete = awaited.iter().find(|(_, it)| it.times.iter().all(Option::is_some));
        let Some(number) = complete.map(|(number, _)| *number) else { return };
        // Those before it are of ranks that have reported later ones.
        let mut later = awaited.split_off(&number);
        let Some(Awaited { key, used, bytes, times }) = later.remove(&number) else { return };
        *awaited = later;
        let longest = |path: usize| {
            let of_path = times.iter().flatten().map(|times| times[path]);
            Duration::from_nanos(of_path.max().unwrap_or(0))
        };
        let stat = ExecStat {
            fast_time: longest(0),
            second_time: longest(1),
            fast_bytes: bytes[0],
            second_bytes: bytes[1],
            success: true,
        };
        controller.update(key, used, &stat);
        if let Some(status) = status {
            status.update(controller);
        }
    }

    /// The parameters that were used last for a key.
    pub(crate) fn parameters(&self, key: OpKey) -> Parameters {
        self.used.get(&key).copied().unwrap_or_default()
    }

    pub(crate) fn history(&self, key: OpKey) -> Vec<Change> {
        let controller = self.controller.as_ref();
        controller.map_or_else(Vec::new, |controller| controller.history(key).copied().collect())
    }
}

fn can_split(operation: Operation, bytes: u64) -> bool {
    gives_to_all(operation) && bytes >= MIN_BYTES
}

/// Returns whether ranks give the same bytes to all others: then they are copied to the host once.
fn gives_to_all(operation: Operation) -> bool {
    matches!(operation, Operation::AllGather | Operation::Broadcast)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::SizeClass;
    use reduction::DataType;

    const BYTES: u64 = 1 << 30;

    fn key() -> OpKey {
        let size_class = SizeClass::of(BYTES);
        OpKey { operation: Operation::AllGather, size_class, data_type: DataType::U8 }
    }

    /// Two ranks, whose paths have these bytes per nanosecond; the second one is slower.
    fn run(fast: f64, second: f64, operations: usize) -> Vec<[Parameters; 2]> {
        let mut ranks = [0, 1].map(|rank| DevicePaths::new(rank, 2, None, None));
        let mut used = Vec::new();
        for _ in 0..operations {
            let reports = ranks.each_mut().map(|rank| rank.report(key(), true));
            let agreed = ranks.each_mut().map(|rank| rank.agree(key(), &reports));
            used.push(agreed);
            for (at, rank) in ranks.iter_mut().enumerate() {
                let bytes = agreed[0].fast_bytes(BYTES, 1 << 20);
                let bytes = [bytes, BYTES - bytes];
                let measured = rank.measure(key(), agreed[0], bytes, || {
                    Device::open(gpu::DeviceName::emulated(0))?.event_with_time()
                });
                measured.unwrap();
                let slower = 1.0 + at as f64 / 10.0;
                let time = |bytes: u64, rate: f64| (bytes as f64 / rate * slower) as u64;
                rank.known = (rank.number, [time(bytes[0], fast), time(bytes[1], second)]);
            }
        }
        used
    }

    #[test]
    fn ranks_split_alike_and_settle_within_twenty_operations() {
        let used = run(380.0, 36.0, 40);
        assert!(used.iter().all(|[one, other]| one == other));
        let alpha = |at: usize| f64::from(used[at][0].alpha) / 1000.0;
        let best = 380.0 / (380.0 + 36.0);
        assert!((alpha(20) - best).abs() < 0.015, "{}", alpha(20));
        assert_eq!(used[20], used[39]);
    }

    #[test]
    fn second_path_without_gain_is_left() {
        let used = run(380.0, 1.0, 40);
        assert_eq!(used[39][0].alpha, Parameters::FAST_ONLY);
    }

    #[test]
    fn rank_without_second_path_keeps_all_on_the_fast_one() {
        let mut ranks = [0, 1].map(|rank| {
            DevicePaths::new(
                rank,
                2,
                Some(Parameters { alpha: 900, ..Parameters::default() }),
                None,
            )
        });
        for can_use in [false, true] {
            let reports = [ranks[0].report(key(), true), ranks[1].report(key(), can_use)];
            let agreed = ranks.each_mut().map(|rank| rank.agree(key(), &reports));
            let expected = if can_use { 900 } else { Parameters::FAST_ONLY };
            assert_eq!(agreed.map(|it| it.alpha), [expected; 2]);
        }
    }
}
