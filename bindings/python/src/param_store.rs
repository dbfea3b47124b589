//! Parameters of collective operations, and stores of which all ranks read the same ones.

use std::path::PathBuf;
use std::time::Duration;

use collective::{
    Aggregation, AggregationPoint, Algorithm, Choices, CommDomainKey, DataType, DomainOptions,
    Entry, ErrorKind, ExecStat, LearningOptions, OpKey, Operation, Parameters, SavedParameters,
    ShmParamStore, SizeClass,
};
use ipc::WaitStrategy;
use pyo3::prelude::*;

use crate::arguments::data_type_of;
use crate::exclusive::Exclusive;
use crate::failure::{Failure, Result};
use crate::waits::{LONGEST_CALL, Timeout, interruptibly, wait};

const ATTACH: &str = "attach to parameter store";
const ENTER: &str = "enter operation";

/// The value of a name.
fn named<T: Copy>(
    operation: &'static str,
    what: &str,
    name: &str,
    all: &[T],
    name_of: fn(T) -> &'static str,
) -> Result<T> {
    let found = all.iter().copied().find(|value| name_of(*value) == name);
    found.ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|value| name_of(*value)).collect();
        Failure::invalid(operation, format!("{what}=\"{name}\": {}", names.join(", ")))
    })
}

/// The type of elements that are reduced; None for types that collective operations only move.
pub(crate) fn element_type(data_type: crate::data_type::DataType) -> Option<DataType> {
    Some(match data_type.codes() {
        (0, 8, 1) => DataType::I8,
        (0, 16, 1) => DataType::I16,
        (0, 32, 1) => DataType::I32,
        (0, 64, 1) => DataType::I64,
        (1, 8, 1) => DataType::U8,
        (1, 16, 1) => DataType::U16,
        (1, 32, 1) => DataType::U32,
        (1, 64, 1) => DataType::U64,
        (2, 16, 1) => DataType::F16,
        (2, 32, 1) => DataType::F32,
        (2, 64, 1) => DataType::F64,
        (4, 16, 1) => DataType::Bf16,
        _ => return None,
    })
}

/// How ranks wait for each other.
pub(crate) fn wait_strategy(operation: &'static str, name: &str) -> Result<WaitStrategy> {
    match name {
        "adaptive" => Ok(WaitStrategy::default()),
        "busy" => Ok(WaitStrategy::Busy),
        "block" => Ok(WaitStrategy::Block),
        other => {
            let cause = format!("waiting=\"{other}\": adaptive, busy or block");
            Err(Failure::invalid(operation, cause))
        }
    }
}

/// The key of a domain or store: of all ranks of a job of `size`, or of those that are given.
pub(crate) fn domain_key(size: u32, ranks: Option<Vec<u32>>, topology_hash: u64) -> CommDomainKey {
    let ranks = ranks.unwrap_or_else(|| (0..size).collect());
    CommDomainKey { world_size: size, ranks, topology_hash }
}

/// Options that domains and stores have.
pub(crate) fn domain_options(
    operation: &'static str,
    job: &str,
    directory: Option<PathBuf>,
    timeout: Option<f64>,
) -> Result<DomainOptions> {
    let timeout = Timeout::new(operation, timeout)?.or(LONGEST_CALL);
    let options = DomainOptions::new().job(job).timeout(timeout);
    Ok(directory.map_or(options.clone(), |directory| options.directory(&directory)))
}

/// Saved parameters of a topology.
pub(crate) fn saved_parameters(
    operation: &'static str,
    json: &str,
    topology: &str,
) -> Result<SavedParameters> {
    let saved = SavedParameters::from_json(json, topology);
    saved.map_err(|error| Failure::new("Malformed", operation, error))
}

/// Parameters of a collective operation, which are the same on all ranks.
///
/// `alpha` is the share of the bytes that the fast path moves, in thousandths; 2**`chunk_bits` bytes are
/// moved at once, and a path uses `stripes` streams or links: 0 is the default of both. `algorithm` is
/// "automatic", "one-step", "two-step", "direct" or, for operations of another library, "library".
///
/// >>> from fabricast.collective import Parameters
/// >>> Parameters(algorithm="two-step")
/// Parameters(alpha=1000, chunk_bits=0, stripes=0, algorithm='two-step')
#[pyclass(frozen, eq, name = "Parameters", module = "fabricast.collective")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PyParameters(Parameters);

impl PyParameters {
    pub(crate) fn of(parameters: Parameters) -> Self {
        Self(parameters)
    }

    pub(crate) fn get(self) -> Parameters {
        self.0
    }
}

#[pymethods]
impl PyParameters {
    #[new]
    #[pyo3(signature = (*, alpha=1000, chunk_bits=0, stripes=0, algorithm="automatic"))]
    fn new(alpha: u16, chunk_bits: u8, stripes: u8, algorithm: &str) -> Result<Self> {
        const MAKE: &str = "make parameters";
        let out_of_range = |name: &str, most: u16, found: u16| {
            Err(Failure::invalid(MAKE, format!("{name}={found}: 0 to {most}")))
        };
        if alpha > Parameters::FAST_ONLY {
            return out_of_range("alpha", Parameters::FAST_ONLY, alpha);
        }
        if chunk_bits > Parameters::MAX_CHUNK_BITS {
            return out_of_range(
                "chunk_bits",
                Parameters::MAX_CHUNK_BITS.into(),
                chunk_bits.into(),
            );
        }
        let algorithm = named(MAKE, "algorithm", algorithm, &Algorithm::ALL, Algorithm::name)?;
        Ok(Self(Parameters { alpha, chunk_bits, stripes, algorithm }))
    }

    /// The share of the bytes that the fast path moves, in thousandths.
    #[getter]
    fn alpha(&self) -> u16 {
        self.0.alpha
    }

    /// The bytes that are moved at once, as a power of two; 0 for the default.
    #[getter]
    fn chunk_bits(&self) -> u8 {
        self.0.chunk_bits
    }

    /// The streams or links that a path uses; 0 for the default.
    #[getter]
    fn stripes(&self) -> u8 {
        self.0.stripes
    }

    /// The algorithm.
    #[getter]
    fn algorithm(&self) -> &'static str {
        self.0.algorithm.name()
    }

    fn __repr__(&self) -> String {
        let Parameters { alpha, chunk_bits, stripes, algorithm } = self.0;
        format!(
            "Parameters(alpha={alpha}, chunk_bits={chunk_bits}, stripes={stripes}, algorithm='{algorithm}')"
        )
    }
}

/// The key of an operation on arrays of this type, in which a rank contributes or gets so many bytes.
pub(crate) fn op_key(
    of: &'static str,
    operation: &str,
    bytes: u64,
    dtype: Option<&Bound<'_, PyAny>>,
) -> Result<OpKey> {
    let name = operation.replace('_', "-");
    let operation = named(of, "operation", &name, &Operation::ALL, Operation::name)?;
    let data_type = match dtype {
        None => DataType::U8,
        Some(dtype) => {
            let found = data_type_of(of, dtype)?;
            element_type(found).ok_or_else(|| {
                let cause =
                    format!("dtype={found}: parameters are learnt for numbers; uint8 for others");
                Failure::invalid(of, cause)
            })?
        }
    };
    Ok(OpKey { operation, size_class: SizeClass::of(bytes), data_type })
}

/// An operation that a rank has entered, by `ParamStore.enter`.
#[pyclass(frozen, name = "ParamEntry", module = "fabricast.collective")]
#[derive(Debug)]
pub(crate) struct PyParamEntry(Entry);

#[pymethods]
impl PyParamEntry {
    /// The number of the operation, from 1: the same on all ranks.
    #[getter]
    fn number(&self) -> u64 {
        self.0.number
    }

    /// The name of the operation.
    #[getter]
    fn operation(&self) -> &'static str {
        self.0.key.operation.name()
    }

    /// The parameters: the same on all ranks.
    #[getter]
    fn parameters(&self) -> PyParameters {
        PyParameters(self.0.parameters)
    }

    /// The bytes of `total` that the fast path moves: a multiple of `granule`, or all.
    #[pyo3(signature = (total, granule=4096))]
    fn fast_bytes(&self, total: u64, granule: u64) -> u64 {
        self.0.parameters.fast_bytes(total, granule)
    }

    fn __repr__(&self) -> String {
        let Entry { number, key, parameters } = self.0;
        format!("<operation {number}, {key}: {}>", PyParameters(parameters).__repr__())
    }
}

/// Parameters of collective operations that the program carries out itself, on two paths: all ranks use
/// the same ones in the operation of the same number. Rank 0 learns them from what all ranks record.
///
/// >>> import tempfile
/// >>> from fabricast.collective import ParamStore
/// >>> directory = tempfile.TemporaryDirectory()
/// >>> with ParamStore.attach(0, 1, directory=directory.name, first_alpha=900) as store:
/// ...     for _ in range(8):
/// ...         entry = store.enter("all-gather", 1 << 24)
/// ...         fast = entry.fast_bytes(1 << 24)
/// ...         second = (1 << 24) - fast
/// ...         store.record(entry, fast_time=fast / 300e9, second_time=second / 30e9,
/// ...                      fast_bytes=fast, second_bytes=second)
/// ...     880 < store.parameters("all-gather", 1 << 24).alpha < 930
/// True
/// >>> directory.cleanup()
#[pyclass(frozen, name = "ParamStore", module = "fabricast.collective")]
#[derive(Debug)]
pub(crate) struct PyParamStore {
    store: Exclusive<ShmParamStore>,
    rank: u32,
    size: u32,
}

impl PyParamStore {
    fn with<R: Send>(
        &self,
        py: Python<'_>,
        operation: &'static str,
        act: impl FnOnce(&mut ShmParamStore) -> Result<R> + Send,
    ) -> Result<R> {
        self.store.with(py, operation, act)
    }
}

/// How the times of ranks become one, by a name or a percentile.
fn aggregation(how: &Bound<'_, PyAny>) -> Result<Aggregation> {
    match (how.extract::<u8>(), how.extract::<String>().as_deref()) {
        (Ok(percent), _) if percent <= 100 => Ok(Aggregation::Percentile(percent)),
        (_, Ok("max")) => Ok(Aggregation::Max),
        (_, Ok("mean")) => Ok(Aggregation::Mean),
        _ => {
            let cause =
                format!("aggregation={}: max, mean, or a percentile from 0 to 100", how.repr()?);
            Err(Failure::invalid(ATTACH, cause))
        }
    }
}

fn duration(operation: &'static str, name: &str, seconds: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| Failure::invalid(operation, format!("{name}={seconds}: at least 0 seconds")))
}

#[pymethods]
impl PyParamStore {
    /// Attaches to the store of a job of `size` processes, and waits until all have come. Arguments but
    /// `rank` and `timeout` are equal on all ranks.
    ///
    /// `first_alpha` is the first share of the fast path that is tried, in thousandths; None without a
    /// second path. `aggregation` is "max", "mean" or a percentile. Rank 0 aggregates at its next
    /// entrance or, with a `round_timeout` in seconds, when it records: then it waits for the others.
    #[staticmethod]
    #[pyo3(signature = (rank, size, *, job="", directory=None, ranks=None, topology_hash=0, timeout=30.0,
        first_alpha=None, candidates=None, aggregation=None, round_timeout=None, window=2))]
    #[allow(clippy::too_many_arguments)] // keywords
    fn attach(
        py: Python<'_>,
        rank: u32,
        size: u32,
        job: &str,
        directory: Option<PathBuf>,
        ranks: Option<Vec<u32>>,
        topology_hash: u64,
        timeout: Option<f64>,
        first_alpha: Option<u16>,
        candidates: Option<Vec<PyRef<'_, PyParameters>>>,
        aggregation: Option<&Bound<'_, PyAny>>,
        round_timeout: Option<f64>,
        window: u32,
    ) -> Result<Self> {
        if first_alpha.is_some_and(|alpha| alpha > Parameters::FAST_ONLY) {
            return Err(Failure::invalid(ATTACH, "first_alpha is 0 to 1000"));
        }
        let mut candidates: Vec<_> =
            candidates.unwrap_or_default().iter().map(|candidate| candidate.0).collect();
        if candidates.is_empty() {
            candidates.push(Parameters::default());
        }
        let aggregation = aggregation.map_or(Ok(Aggregation::Max), self::aggregation)?;
        let aggregation_point = match round_timeout {
            None => AggregationPoint::NextEntrance,
            Some(seconds) => {
                let timeout = duration(ATTACH, "round_timeout", seconds)?;
                AggregationPoint::CountedRounds { timeout }
            }
        };
        let learning = LearningOptions { aggregation, aggregation_point, window };
        let options = domain_options(ATTACH, job, directory, timeout)?.learning(learning);
        let key = domain_key(size, ranks, topology_hash);
        let choices = Choices { candidates, first_alpha };
        let store = interruptibly(py, ATTACH, move || {
            ShmParamStore::attach(&key, rank, &options, move |_| choices.clone())
        })?;
        let (rank, size) = (store.rank(), store.size());
        Ok(Self { store: Exclusive::new("parameter store", store), rank, size })
    }

    /// This process' rank, from 0.
    #[getter]
    fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of ranks.
    #[getter]
    fn size(&self) -> u32 {
        self.size
    }

    /// Enters the next operation, of so many bytes. A rank that is too far ahead of another one waits.
    /// Ranks whose process has ended are left behind.
    #[pyo3(signature = (operation, bytes, dtype=None, timeout=30.0))]
    fn enter(
        &self,
        py: Python<'_>,
        operation: &str,
        bytes: u64,
        dtype: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> Result<PyParamEntry> {
        let key = op_key(ENTER, operation, bytes, dtype)?;
        let timeout = Timeout::new(ENTER, timeout)?;
        let cause = || "another rank is too far behind".to_owned();
        let mut late = None;
        let entered = wait(py, ENTER, timeout, cause, |slice| {
            self.store.step(ENTER, |store| match store.enter(key, slice) {
                Ok(entry) => Ok(Some(entry)),
                Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {
                    late = Some(error);
                    Ok(None)
                }
                Err(error) => Err(error.into()),
            })
        });
        match (entered, late) {
            (Ok(entry), _) => Ok(PyParamEntry(entry)),
            (Err(failure), Some(late)) if failure.is_of("DeadlineExceeded") => Err(late.into()),
            (Err(failure), _) => Err(failure),
        }
    }

    /// Records how an operation went on this rank: seconds and bytes of both paths.
    #[pyo3(signature = (entry, *, fast_time, fast_bytes, second_time=0.0, second_bytes=0, success=true))]
    #[allow(clippy::too_many_arguments)] // keywords
    fn record(
        &self,
        py: Python<'_>,
        entry: PyRef<'_, PyParamEntry>,
        fast_time: f64,
        fast_bytes: u64,
        second_time: f64,
        second_bytes: u64,
        success: bool,
    ) -> Result<()> {
        const RECORD: &str = "record operation";
        let fast_time = duration(RECORD, "fast_time", fast_time)?;
        let second_time = duration(RECORD, "second_time", second_time)?;
        let stat = ExecStat { fast_time, second_time, fast_bytes, second_bytes, success };
        let entry = entry.0;
        self.with(py, RECORD, move |store| Ok(store.record(&entry, &stat)?))
    }

    /// The parameters in the operation that was entered last.
    #[pyo3(signature = (operation, bytes, dtype=None))]
    fn parameters(
        &self,
        py: Python<'_>,
        operation: &str,
        bytes: u64,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> Result<PyParameters> {
        const GET: &str = "get parameters";
        let key = op_key(GET, operation, bytes, dtype)?;
        self.with(py, GET, |store| Ok(PyParameters(store.parameters(key))))
    }

    /// Has rank 0 ended or left? Then the parameters stay as they are.
    #[getter]
    fn has_lost_writer(&self, py: Python<'_>) -> Result<bool> {
        self.with(py, "find the writer of parameters", |store| Ok(store.has_lost_writer()))
    }

    /// Stops or continues learning. Without effect on other ranks than 0.
    #[pyo3(signature = (is_frozen=true))]
    fn freeze(&self, py: Python<'_>, is_frozen: bool) -> Result<()> {
        self.with(py, "freeze parameters", |store| {
            store.with_controller(|controller| controller.freeze(is_frozen));
            Ok(())
        })
    }

    /// The parameters as JSON: on rank 0 those that it has settled on, on others those in use.
    #[pyo3(signature = (topology=""))]
    fn save(&self, py: Python<'_>, topology: &str) -> Result<String> {
        let saved = self.with(py, "save parameters", |store| Ok(store.saved_parameters()))?;
        Ok(saved.to_json(topology))
    }

    /// Uses saved parameters from now on. Without effect on other ranks than 0.
    #[pyo3(signature = (json, topology=""))]
    fn load(&self, py: Python<'_>, json: &str, topology: &str) -> Result<()> {
        const LOAD: &str = "load parameters";
        let saved = saved_parameters(LOAD, json, topology)?;
        self.with(py, LOAD, |store| {
            store.with_controller(|controller| saved.load_into(controller));
            Ok(())
        })
    }

    /// Leaves: no rank waits for this one any more.
    fn close(&self, py: Python<'_>) {
        let store = self.store.take(py);
        py.detach(move || drop(store));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) {
        self.close(py);
    }
}
