//! The structures of communication domains and parameter stores.

use std::time::Duration;

use collective::{
    Aggregation, AggregationPoint, Algorithm, Choices, CommDomainKey, DataType, DomainOptions,
    Entry, ExecStat, LearningOptions, OpKey, Operation as Collective, Parameters, ReduceOp,
    SizeClass,
};

use super::values::{flag, nanoseconds, time, unknown, wait_strategy};
use crate::failure::{Failure, Operation, Result};
use crate::ffi::{Array, Text, WithDefaults};
use crate::timeout::Timeout;

/// The default of a percentile.
const PERCENTILE: u32 = 90;
/// How long rank 0 waits for the statistics of a round.
const ROUND_TIMEOUT: Duration = Duration::from_millis(1);

/// The value of a number of C, as `from` knows it.
fn numbered<T>(
    operation: Operation,
    name: &str,
    number: u32,
    from: impl FnOnce(u8) -> Option<T>,
) -> Result<T> {
    let known = u8::try_from(number).ok().and_then(from);
    known.ok_or_else(|| unknown(operation, name, number))
}

/// The type of a `FABRICAST_TYPE_` number.
pub(crate) fn data_type(operation: Operation, number: u32) -> Result<DataType> {
    numbered(operation, "type", number, DataType::from_number)
}

/// How elements are reduced, by a `FABRICAST_REDUCE_` number.
pub(crate) fn reduce_op(operation: Operation, number: u32) -> Result<ReduceOp> {
    numbered(operation, "op", number, ReduceOp::from_number)
}

/// The key of a collective operation, by its numbers of C.
pub(crate) fn op_key(
    operation: Operation,
    collective: u32,
    bytes: u64,
    kind: u32,
) -> Result<OpKey> {
    Ok(OpKey {
        operation: numbered(operation, "operation", collective, Collective::from_number)?,
        size_class: SizeClass::of(bytes),
        data_type: data_type(operation, kind)?,
    })
}

/// `fabricast_parameters`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct RawParameters {
    alpha: u32,
    chunk_bits: u32,
    stripes: u32,
    algorithm: u32,
}

impl RawParameters {
    pub(crate) fn of(parameters: Parameters) -> Self {
        let Parameters { alpha, chunk_bits, stripes, algorithm } = parameters;
        let number = Algorithm::ALL.iter().position(|known| *known == algorithm);
        Self {
            alpha: alpha.into(),
            chunk_bits: chunk_bits.into(),
            stripes: stripes.into(),
            algorithm: number.unwrap_or(0) as u32,
        }
    }

    pub(crate) fn to_parameters(self, operation: Operation) -> Result<Parameters> {
        let invalid = |name, number| unknown(operation, name, number);
        Ok(Parameters {
            alpha: alpha(operation, "alpha", self.alpha)?,
            chunk_bits: u8::try_from(self.chunk_bits)
                .ok()
                .filter(|bits| *bits <= Parameters::MAX_CHUNK_BITS)
                .ok_or_else(|| invalid("chunk_bits", self.chunk_bits))?,
            stripes: u8::try_from(self.stripes).map_err(|_| invalid("stripes", self.stripes))?,
            algorithm: Algorithm::ALL
                .get(self.algorithm as usize)
                .copied()
                .ok_or_else(|| invalid("algorithm", self.algorithm))?,
        })
    }
}

/// The share of the fast path, in thousandths.
fn alpha(operation: Operation, name: &str, number: u32) -> Result<u16> {
    let alpha = u16::try_from(number).ok().filter(|alpha| *alpha <= Parameters::FAST_ONLY);
    alpha.ok_or_else(|| unknown(operation, name, number))
}

/// `fabricast_domain_options`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct RawDomainOptions {
    size: usize,
    directory: Text<'static>,
    job: Text<'static>,
    ranks: Array<'static, u32>,
    rank_count: usize,
    candidates: Array<'static, RawParameters>,
    candidate_count: usize,
    topology_hash: u64,
    timeout: i64,
    round_timeout: i64,
    waiting: u32,
    window: u32,
    aggregation: u32,
    percentile: u32,
    aggregation_point: u32,
    first_alpha: u32,
    reads_peers: u32,
    is_fixed: u32,
    parameters: RawParameters,
}

impl WithDefaults for RawDomainOptions {
    fn defaults(size: usize) -> Self {
        Self {
            size,
            timeout: nanoseconds(Duration::from_secs(30)),
            round_timeout: nanoseconds(ROUND_TIMEOUT),
            window: LearningOptions::default().window,
            percentile: PERCENTILE,
            first_alpha: Parameters::FAST_ONLY.into(),
            reads_peers: 1,
            parameters: RawParameters::of(Parameters::default()),
            ..Self::default()
        }
    }
}

impl RawDomainOptions {
    pub(crate) fn timeout(&self) -> Timeout {
        Timeout::of_nanoseconds(self.timeout)
    }

    pub(crate) fn directory(&self, operation: Operation) -> Result<Option<&'static str>> {
        self.directory.get(operation, "directory")
    }

    /// The key of a job of this size.
    pub(crate) fn key(&self, operation: Operation, world_size: u32) -> Result<CommDomainKey> {
        let ranks = if self.ranks.is_null() && self.rank_count == 0 {
            (0..world_size).collect()
        } else {
            self.ranks.get(operation, "ranks", self.rank_count)?.to_vec()
        };
        Ok(CommDomainKey { world_size, ranks, topology_hash: self.topology_hash })
    }

    /// Fails if options are set that a launched job has already.
    pub(crate) fn check_launched(&self, operation: Operation) -> Result<()> {
        let set = [
            ("job", self.job.get(operation, "job")?.is_some()),
            ("ranks", !self.ranks.is_null() || self.rank_count > 0),
            ("topology_hash", self.topology_hash != 0),
        ];
        match set.into_iter().find(|(_, is_set)| *is_set) {
            None => Ok(()),
            Some((name, _)) => {
                Err(Failure::invalid(operation, format_args!("\"{name}\" is that of the launcher")))
            }
        }
    }

    pub(crate) fn to_options(self, operation: Operation) -> Result<DomainOptions> {
        let aggregation = match self.aggregation {
            0 => Aggregation::Max,
            1 => Aggregation::Mean,
            2 => match u8::try_from(self.percentile) {
                Ok(percent) if percent <= 100 => Aggregation::Percentile(percent),
                _ => return Err(unknown(operation, "percentile", self.percentile)),
            },
            other => return Err(unknown(operation, "aggregation", other)),
        };
        let aggregation_point = match self.aggregation_point {
            0 => AggregationPoint::NextEntrance,
            1 => AggregationPoint::CountedRounds {
                timeout: time(operation, "round_timeout", self.round_timeout)?,
            },
            other => return Err(unknown(operation, "aggregation_point", other)),
        };
        let learning = LearningOptions { aggregation, aggregation_point, window: self.window };
        let mut options = DomainOptions::new()
            .timeout(self.timeout().as_duration())
            .wait_strategy(wait_strategy(operation, self.waiting)?)
            .learning(learning)
            .reads_peers(flag(operation, "reads_peers", self.reads_peers)?);
        if let Some(directory) = self.directory(operation)? {
            options = options.directory(directory.as_ref());
        }
        if let Some(job) = self.job.get(operation, "job")? {
            options = options.job(job);
        }
        if flag(operation, "is_fixed", self.is_fixed)? {
            options = options.fixed_parameters(self.parameters.to_parameters(operation)?);
        }
        Ok(options)
    }

    /// What rank 0 of a parameter store chooses from, for each key the same.
    pub(crate) fn choices(&self, operation: Operation) -> Result<Choices> {
        let candidates = self.candidates.get(operation, "candidates", self.candidate_count)?;
        let candidates: Result<Vec<_>> =
            candidates.iter().map(|candidate| candidate.to_parameters(operation)).collect();
        let mut candidates = candidates?;
        if candidates.is_empty() {
            candidates.push(Parameters::default());
        }
        let first_alpha = alpha(operation, "first_alpha", self.first_alpha)?;
        let first_alpha = (first_alpha < Parameters::FAST_ONLY).then_some(first_alpha);
        Ok(Choices { candidates, first_alpha })
    }
}

/// `fabricast_param_entry`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RawParamEntry {
    number: u64,
    bytes: u64,
    operation: u32,
    data_type: u32,
    parameters: RawParameters,
}

impl RawParamEntry {
    pub(crate) fn of(entry: &Entry) -> Self {
        Self {
            number: entry.number,
            bytes: entry.key.size_class.largest(),
            operation: entry.key.operation as u32,
            data_type: entry.key.data_type as u32,
            parameters: RawParameters::of(entry.parameters),
        }
    }

    pub(crate) fn to_entry(self, operation: Operation) -> Result<Entry> {
        Ok(Entry {
            number: self.number,
            key: op_key(operation, self.operation, self.bytes, self.data_type)?,
            parameters: self.parameters.to_parameters(operation)?,
        })
    }
}

/// `fabricast_exec_stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RawExecStat {
    fast_time: u64,
    second_time: u64,
    fast_bytes: u64,
    second_bytes: u64,
    success: u64,
}

impl RawExecStat {
    pub(crate) fn to_stat(self) -> ExecStat {
        ExecStat {
            fast_time: Duration::from_nanos(self.fast_time),
            second_time: Duration::from_nanos(self.second_time),
            fast_bytes: self.fast_bytes,
            second_bytes: self.second_bytes,
            success: self.success != 0,
        }
    }
}

#[cfg(test)]
#[path = "collectives_tests.rs"]
mod tests;
