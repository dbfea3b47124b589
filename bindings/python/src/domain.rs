//! Communication domains: collective operations between arrays in host memory, and of CUDA devices.

use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use collective::{Blocks, CollectiveCall, CommDomain, DeviceDomain, Operation, ReduceOp};
use gpu::{DeviceName, Stream};
use launch::{Group, GroupOptions};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use threads::lock;

use crate::array::{ArrayCall, Operand, Source};
use crate::caller_stream::CallerStream;
use crate::devices::open_device;
use crate::elements::{Elements, UnequalBlocks, reduce_op};
use crate::exchange::PyExchange;
use crate::exclusive::Exclusive;
use crate::failure::{Failure, Result};
use crate::param_store::{
    PyParameters, domain_key, domain_options, op_key, saved_parameters, wait_strategy,
};
use crate::waits::{LONGEST_CALL, Timeout, interruptibly, unless_late, wait};

const JOIN: &str = "join communication domain";
/// A device domain gives up within this time after a deadline.
const LATE: Duration = Duration::from_secs(2);

thread_local! {
    /// The exception of a signal handler that ran while this thread waited.
    static INTERRUPTED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Lets Python's signal handlers run. Returns whether one raised an exception.
fn is_interrupted() -> bool {
    let raised = Python::try_attach(|py| py.check_signals().err()).flatten();
    let is_interrupted = raised.is_some();
    if is_interrupted {
        INTERRUPTED.set(raised);
    }
    is_interrupted
}

/// A new array of the library of another one, with its type of elements.
fn empty<'py>(array: &Bound<'py, PyAny>, shape: &[u64]) -> Result<Bound<'py, PyAny>> {
    let py = array.py();
    let module = py.import(intern!(py, "fabricast._collective"))?;
    Ok(module.call_method1(intern!(py, "empty"), (array, PyTuple::new(py, shape)?))?)
}

/// An array for the result: the one that is given, or a new one.
fn result_array<'py>(
    like: &Bound<'py, PyAny>,
    out: Option<&Bound<'py, PyAny>>,
    shape: &[u64],
) -> Result<Bound<'py, PyAny>> {
    out.map_or_else(|| empty(like, shape), |out| Ok(out.clone()))
}

/// The ranks that carry out collective operations together, as one of them sees them: with arrays in host memory
/// (NumPy, PyTorch, `fabricast.Array`, buffers) or, on one machine, of a CUDA device each.
///
/// All ranks call the same operations in the same order. If a rank has ended, is late, or calls something
/// else, the operation raises on all ranks, `ranks` of the exception names it, and the domain is over.
/// Arrays are contiguous.
///
/// >>> import tempfile
/// >>> import numpy
/// >>> from fabricast.collective import Domain
/// >>> directory = tempfile.TemporaryDirectory()
/// >>> with Domain.join(0, 1, directory=directory.name) as domain:
/// ...     domain.all_reduce(numpy.ones(3))
/// array([1., 1., 1.])
/// >>> directory.cleanup()
#[pyclass(frozen, weakref, name = "Domain", module = "fabricast.collective")]
#[derive(Debug)]
pub(crate) struct PyDomain {
    domain: Exclusive<CommDomain>,
    rank: u32,
    size: u32,
    reads_peers: bool,
    /// None until an operation has arrays of a device. Locked without the lock of the interpreter only.
    devices: Mutex<Option<DeviceDomain>>,
    /// The stream on which operations of the device start; None for the default one.
    stream: Mutex<Option<Arc<Stream>>>,
}

impl PyDomain {
    fn of(domain: CommDomain) -> Self {
        let (rank, size, reads_peers) = (domain.rank(), domain.size(), domain.reads_peers());
        let domain = Exclusive::new("communication domain", domain);
        let (devices, stream) = (Mutex::default(), Mutex::default());
        Self { domain, rank, size, reads_peers, devices, stream }
    }

    /// The domain of all ranks of a group.
    pub(crate) fn of_group(group: &mut Group, timeout: Duration) -> Result<Self> {
        let options = collective::DomainOptions::new().timeout(timeout);
        let options = options.interruption(is_interrupted);
        Ok(Self::of(CommDomain::of_group(group, &options)?))
    }

    /// Leaves without waiting for the others.
    pub(crate) fn leave(&self, py: Python<'_>) {
        let domain = self.domain.take(py);
        py.detach(move || {
            drop(lock(&self.devices).take());
            drop(domain);
        });
    }

    fn source(&self, operation: &'static str, array: &Bound<'_, PyAny>) -> Result<Source> {
        let has_stream = lock(&self.stream).is_some();
        Source::ordered(operation, array, !has_stream)
    }

    /// Starts an operation on arrays of a device. Without a stream of the caller it waits for the end.
    fn run_on_device(
        &self,
        py: Python<'_>,
        call: &ArrayCall<'_>,
        device: DeviceName,
        timeout: Duration,
    ) -> Result<()> {
        let name = call.name();
        let started = py.detach(|| {
            let mut devices = lock(&self.devices);
            let domain = match &mut *devices {
                Some(domain) if domain.device().name() == device => domain,
                Some(domain) => {
                    let first = domain.device().name();
                    let cause = format!("the array is on {device}, the domain has {first}");
                    return Err(Failure::invalid(name, cause));
                }
                none => {
                    let device = open_device(device)?;
                    let joined = self
                        .domain
                        .detached(name, |domain| Ok(domain.device_domain(&device, timeout)?))?;
                    none.insert(joined)
                }
            };
            let stream = lock(&self.stream).clone();
            if let Some(stream) = stream {
                call.start(domain, &stream, timeout)?;
                return Ok(None);
            }
            let stream = open_device(device)?.default_stream()?;
            call.start(domain, &stream, timeout)?;
            Ok(Some((stream.point()?, stream, domain.abort_handle())))
        })?;
        let Some((point, stream, abort)) = started else { return Ok(()) };
        // Before this is over, the domain gives up, and names the rank that is late.
        let longest = Timeout::new(name, Some((timeout + LATE).as_secs_f64()))?;
        let cause = || format!("the work on {device} is not done");
        let waited = wait(py, name, longest, cause, |slice| unless_late(point.wait(slice)));
        // This error names the rank that is late.
        let checked = abort.check(name);
        if waited.is_err() {
            abort.abort();
        }
        py.detach(|| drop(stream));
        checked?;
        waited
    }

    fn check_devices(&self, py: Python<'_>, operation: &'static str) -> Result<()> {
        py.detach(|| match &*lock(&self.devices) {
            Some(domain) => Ok(domain.check(operation)?),
            None => Ok(()),
        })
    }

    fn call(
        operation: Operation,
        elements: Elements,
        reduce_op: Option<ReduceOp>,
        root: u32,
    ) -> CollectiveCall<'static> {
        CollectiveCall {
            operation,
            data_type: elements.data_type(),
            reduce_op: reduce_op.unwrap_or(ReduceOp::Sum),
            root,
            input: std::ptr::null(),
            send: Blocks::One(0),
            output: std::ptr::null_mut(),
            receive: Blocks::One(0),
        }
    }

    fn run(
        &self,
        py: Python<'_>,
        call: &CollectiveCall<'_>,
        from: Option<(&Source, Blocks<'_>)>,
        to: Option<(&Source, Blocks<'_>)>,
        timeout: Option<f64>,
    ) -> Result<()> {
        let name = call.operation.name();
        let timeout = Timeout::new(name, timeout)?.or(LONGEST_CALL);
        let from = from.map(|(source, blocks)| Operand::new(name, source, blocks)).transpose()?;
        let to = to.map(|(source, blocks)| Operand::new(name, source, blocks)).transpose()?;
        let call = ArrayCall::new(call, from, to, [self.rank, self.size])?;
        let done = match call.cuda_device().map(DeviceName::cuda) {
            Some(device) => self.run_on_device(py, &call, device, timeout),
            None => self.domain.with(py, name, |domain| call.run(domain, timeout)),
        };
        match INTERRUPTED.take() {
            Some(raised) => Err(raised.into()),
            None => done,
        }
    }

    /// Fails if an array for the result has elements of another type.
    fn check_result(
        operation: &'static str,
        elements: Elements,
        source: &Source,
        result: &Source,
    ) -> Result<()> {
        let is_equal = Elements::moved(operation, result)
            .is_ok_and(|found| found.is_of(elements) || source.data_type() == result.data_type());
        if is_equal {
            return Ok(());
        }
        let (given, taken) = (source.data_type(), result.data_type());
        let cause = format!("the array has elements of {given}, that for the result of {taken}");
        Err(Failure::invalid(operation, cause))
    }

    /// Fails unless the first axis of an array has an index for each rank. Returns the shape of a block.
    fn block_shape<'a>(&self, operation: &'static str, source: &'a Source) -> Result<&'a [u64]> {
        match source.layout().shape() {
            [first, rest @ ..] if *first == u64::from(self.size) => Ok(rest),
            shape => {
                let cause = format!(
                    "the array has shape {shape:?}, whose first axis does not have an index for each of {} \
                     ranks: reshape it, or pass out",
                    self.size
                );
                Err(Failure::invalid(operation, cause))
            }
        }
    }

    /// The shape of an array with a block for each rank.
    fn stacked_shape(&self, source: &Source) -> Vec<u64> {
        std::iter::once(self.size.into()).chain(source.layout().shape().iter().copied()).collect()
    }

    /// The elements of each rank's block in an array.
    fn each(&self, operation: &'static str, elements: Elements, source: &Source) -> Result<usize> {
        let (count, ranks) = (elements.count(source), self.size as usize);
        if count.is_multiple_of(ranks * elements.each()) {
            return Ok(count / ranks);
        }
        let cause =
            format!("{} elements are not blocks for {ranks} ranks", count / elements.each());
        Err(Failure::invalid(operation, cause))
    }
}

impl Drop for PyDomain {
    fn drop(&mut self) {
        let (devices, stream) = (lock(&self.devices).take(), lock(&self.stream).take());
        if devices.is_some() || stream.is_some() {
            // They wait for operations that are not done.
            Python::try_attach(|py| py.detach(|| drop((devices, stream))));
        }
    }
}

#[pymethods]
impl PyDomain {
    /// Joins the domain of a job of `size` processes, and waits until all have come. Arguments but `rank`
    /// and `timeout` are equal on all ranks. Domains of different jobs, of any names, do not mix.
    ///
    /// `ranks` are those of the job that belong to the domain; then `rank` counts among them.
    /// `parameters` are used in all operations, instead of learning which are best. `waiting` is
    /// "adaptive", "busy" or "block".
    #[staticmethod]
    #[pyo3(signature = (rank, size, *, job="", directory=None, ranks=None, topology_hash=0, timeout=30.0,
        waiting="adaptive", parameters=None, reads_peers=true))]
    #[allow(clippy::too_many_arguments)] // keywords
    fn join(
        py: Python<'_>,
        rank: u32,
        size: u32,
        job: &str,
        directory: Option<PathBuf>,
        ranks: Option<Vec<u32>>,
        topology_hash: u64,
        timeout: Option<f64>,
        waiting: &str,
        parameters: Option<PyRef<'_, PyParameters>>,
        reads_peers: bool,
    ) -> Result<Self> {
        let mut options = domain_options(JOIN, job, directory, timeout)?
            .wait_strategy(wait_strategy(JOIN, waiting)?)
            .reads_peers(reads_peers)
            .interruption(is_interrupted);
        if let Some(parameters) = parameters {
            options = options.fixed_parameters(parameters.get());
        }
        let key = domain_key(size, ranks, topology_hash);
        let domain = interruptibly(py, JOIN, move || CommDomain::join(&key, rank, &options))?;
        Ok(Self::of(domain))
    }

    /// Joins the domain of ranks that may be on several machines. `gather` is a function that gathers bytes of
    /// all ranks, of which each has the same `job`: `(bytes, seconds) -> list[bytes]`.
    #[staticmethod]
    #[pyo3(signature = (rank, size, gather, *, job, timeout=30.0))]
    fn _join_over(
        py: Python<'_>,
        rank: u32,
        size: u32,
        gather: Py<PyAny>,
        job: String,
        timeout: Option<f64>,
    ) -> Result<Self> {
        let timeout = Timeout::new(JOIN, timeout)?.or(LONGEST_CALL);
        let exchange = PyExchange::new(gather, job, [rank, size]);
        let domain = interruptibly(py, JOIN, move || {
            let options = GroupOptions::from_environment()?.timeout(timeout);
            let mut group = Group::start_over(exchange, options)?;
            let options = collective::DomainOptions::new().timeout(timeout);
            Ok::<_, Failure>(CommDomain::of_group(
                &mut group,
                &options.interruption(is_interrupted),
            )?)
        })?;
        Ok(Self::of(domain))
    }

    /// This process' rank in the domain, from 0.
    #[getter]
    fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of ranks.
    #[getter]
    fn size(&self) -> u32 {
        self.size
    }

    /// Do ranks read the memory of each other by the kernel?
    #[getter]
    fn reads_peers(&self) -> bool {
        self.reads_peers
    }

    /// Starts operations on arrays of a device on this stream from now on, in its order: they do not wait
    /// for their end, and `check` says whether results are valid. The program orders the stream behind
    /// the work that writes the arrays, and keeps these until it is done. None: operations start on the default
    /// stream, behind the work that writes the arrays, and wait for their end.
    #[pyo3(signature = (stream))]
    fn use_stream(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> Result<()> {
        let stream = CallerStream::adopted("use stream", stream, None)?.map(Arc::new);
        let before = std::mem::replace(&mut *lock(&self.stream), stream);
        // This waits for the operations on it.
        py.detach(|| drop(before));
        Ok(())
    }

    /// Raises if operations on arrays of a device were given up: because a rank has ended, did not call them
    /// in time, or called something else. Results of operations that were done before are valid.
    fn check(&self, py: Python<'_>) -> Result<()> {
        self.check_devices(py, "check communication domain")
    }

    /// Waits until all ranks have called it.
    #[pyo3(signature = (timeout=30.0))]
    fn barrier(&self, py: Python<'_>, timeout: Option<f64>) -> Result<()> {
        self.run(py, &Self::call(Operation::Barrier, Elements::NONE, None, 0), None, None, timeout)
    }

    /// Reduces the arrays of all ranks, element by element. `op` is "sum", "product", "min", "max" or
    /// "mean". In place, if the array can be written and there is no `out`. Returns the array with the
    /// result.
    #[pyo3(signature = (array, op="sum", *, out=None, timeout=30.0))]
    pub(crate) fn all_reduce<'py>(
        &self,
        py: Python<'py>,
        array: &Bound<'py, PyAny>,
        op: &str,
        out: Option<&Bound<'py, PyAny>>,
        timeout: Option<f64>,
    ) -> Result<Bound<'py, PyAny>> {
        const NAME: &str = "all-reduce";
        let source = self.source(NAME, array)?;
        let op = reduce_op(NAME, op)?;
        let elements = Elements::reduced(NAME, &source, op)?;
        let call = Self::call(Operation::AllReduce, elements, Some(op), 0);
        let blocks = Blocks::One(elements.count(&source));
        if out.is_none() && !source.is_read_only() {
            self.run(py, &call, Some((&source, blocks)), Some((&source, blocks)), timeout)?;
            return Ok(array.clone());
        }
        let result = result_array(array, out, source.layout().shape())?;
        let target = self.source(NAME, &result)?;
        Self::check_result(NAME, elements, &source, &target)?;
        let to = (&target, Blocks::One(elements.count(&target)));
        self.run(py, &call, Some((&source, blocks)), Some(to), timeout)?;
        Ok(result)
    }

    /// Reduces the arrays of all ranks to that of the rank `root`, as `all_reduce`. Those of the others
    /// stay. Returns the array with the result; None on other ranks.
    #[pyo3(signature = (array, root=0, op="sum", *, out=None, timeout=30.0))]
    #[allow(clippy::too_many_arguments)] // keywords
    pub(crate) fn reduce<'py>(
        &self,
        py: Python<'py>,
        array: &Bound<'py, PyAny>,
        root: u32,
        op: &str,
        out: Option<&Bound<'py, PyAny>>,
        timeout: Option<f64>,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        const NAME: &str = "reduce";
        let source = self.source(NAME, array)?;
        let op = reduce_op(NAME, op)?;
        let elements = Elements::reduced(NAME, &source, op)?;
        let call = Self::call(Operation::Reduce, elements, Some(op), root);
        let from = (&source, Blocks::One(elements.count(&source)));
        if self.rank != root {
            self.run(py, &call, Some(from), Some(from), timeout)?;
            return Ok(None);
        }
        if out.is_none() && !source.is_read_only() {
            self.run(py, &call, Some(from), Some(from), timeout)?;
            return Ok(Some(array.clone()));
        }
        let result = result_array(array, out, source.layout().shape())?;
        let target = self.source(NAME, &result)?;
        Self::check_result(NAME, elements, &source, &target)?;
        let to = (&target, Blocks::One(elements.count(&target)));
        self.run(py, &call, Some(from), Some(to), timeout)?;
        Ok(Some(result))
    }

    /// Copies the array of the rank `root` to those of all. Returns the array.
    #[pyo3(signature = (array, root=0, *, timeout=30.0))]
    pub(crate) fn broadcast<'py>(
        &self,
        py: Python<'py>,
        array: &Bound<'py, PyAny>,
        root: u32,
        timeout: Option<f64>,
    ) -> Result<Bound<'py, PyAny>> {
        const NAME: &str = "broadcast";
        let source = self.source(NAME, array)?;
        let elements = Elements::moved(NAME, &source)?;
        let call = Self::call(Operation::Broadcast, elements, None, root);
        let side = (&source, Blocks::One(elements.count(&source)));
        self.run(py, &call, Some(side), Some(side), timeout)?;
        Ok(array.clone())
    }

    /// Copies the arrays of all ranks to each, in the order of the ranks: into `out`, or into a new array
    /// of the shape (size, …). With `counts`, the elements that each rank has, the new array has one axis.
    #[pyo3(signature = (array, *, out=None, counts=None, timeout=30.0))]
    pub(crate) fn all_gather<'py>(
        &self,
        py: Python<'py>,
        array: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
        counts: Option<Vec<usize>>,
        timeout: Option<f64>,
    ) -> Result<Bound<'py, PyAny>> {
        const NAME: &str = "all-gather";
        let source = self.source(NAME, array)?;
        let elements = Elements::moved(NAME, &source)?;
        let call = Self::call(Operation::AllGather, elements, None, 0);
        let count = elements.count(&source);
        let from = (&source, Blocks::One(count));
        let shape = match &counts {
            Some(counts) => vec![counts.iter().sum::<usize>() as u64],
            None => self.stacked_shape(&source),
        };
        let result = result_array(array, out, &shape)?;
        let target = self.source(NAME, &result)?;
        Self::check_result(NAME, elements, &source, &target)?;
        match counts.map(|counts| UnequalBlocks::new(&counts, elements.each())) {
            Some(blocks) => {
                self.run(py, &call, Some(from), Some((&target, blocks.get())), timeout)?
            }
            None => {
                let each = self.each(NAME, elements, &target)?;
                self.run(py, &call, Some(from), Some((&target, Blocks::Each(each))), timeout)?;
            }
        }
        Ok(result)
    }

    /// Reduces a block for each rank: rank n gets the reduction of the nth blocks of all, in `out` or in a
    /// new array. The first axis of the array has an index for each rank; with `out`, or with `counts`,
    /// the elements of each block, any array.
    #[pyo3(signature = (array, op="sum", *, out=None, counts=None, timeout=30.0))]
    #[allow(clippy::too_many_arguments)] // keywords
    pub(crate) fn reduce_scatter<'py>(
        &self,
        py: Python<'py>,
        array: &Bound<'py, PyAny>,
        op: &str,
        out: Option<&Bound<'py, PyAny>>,
        counts: Option<Vec<usize>>,
        timeout: Option<f64>,
    ) -> Result<Bound<'py, PyAny>> {
        const NAME: &str = "reduce-scatter";
        let source = self.source(NAME, array)?;
        let op = reduce_op(NAME, op)?;
        let elements = Elements::reduced(NAME, &source, op)?;
        let call = Self::call(Operation::ReduceScatter, elements, Some(op), 0);
        let shape = match (out, &counts) {
            (Some(_), _) => Vec::new(),
            (None, Some(counts)) => {
                vec![counts.get(self.rank as usize).copied().unwrap_or(0) as u64]
            }
            (None, None) => self.block_shape(NAME, &source)?.to_vec(),
        };
        let result = result_array(array, out, &shape)?;
        let target = self.source(NAME, &result)?;
        Self::check_result(NAME, elements, &source, &target)?;
        let to = (&target, Blocks::One(elements.count(&target)));
        match counts.map(|counts| UnequalBlocks::new(&counts, elements.each())) {
            Some(blocks) => {
                self.run(py, &call, Some((&source, blocks.get())), Some(to), timeout)?
            }
            None => {
                let each = self.each(NAME, elements, &source)?;
                self.run(py, &call, Some((&source, Blocks::Each(each))), Some(to), timeout)?;
            }
        }
        Ok(result)
    }

    /// Copies the nth block of each rank to rank n: into `out`, which may be the array itself, or into a
    /// new array. With `send_counts` and `receive_counts`, the elements of each block, the new array has
    /// one axis.
    #[pyo3(signature = (array, *, out=None, send_counts=None, receive_counts=None, timeout=30.0))]
    #[allow(clippy::too_many_arguments)] // keywords
    pub(crate) fn all_to_all<'py>(
        &self,
        py: Python<'py>,
        array: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
        send_counts: Option<Vec<usize>>,
        receive_counts: Option<Vec<usize>>,
        timeout: Option<f64>,
    ) -> Result<Bound<'py, PyAny>> {
        const NAME: &str = "all-to-all";
        let source = self.source(NAME, array)?;
        let elements = Elements::moved(NAME, &source)?;
        let call = Self::call(Operation::AllToAll, elements, None, 0);
        let shape = match &receive_counts {
            Some(counts) => vec![counts.iter().sum::<usize>() as u64],
            None => source.layout().shape().to_vec(),
        };
        let result = result_array(array, out, &shape)?;
        let target = self.source(NAME, &result)?;
        Self::check_result(NAME, elements, &source, &target)?;
        match (send_counts, receive_counts) {
            (Some(send), Some(receive)) => {
                let send = UnequalBlocks::new(&send, elements.each());
                let receive = UnequalBlocks::new(&receive, elements.each());
                let (from, to) = ((&source, send.get()), (&target, receive.get()));
                self.run(py, &call, Some(from), Some(to), timeout)?;
            }
            (None, None) => {
                let from = Blocks::Each(self.each(NAME, elements, &source)?);
                let to = Blocks::Each(self.each(NAME, elements, &target)?);
                self.run(py, &call, Some((&source, from)), Some((&target, to)), timeout)?;
            }
            _ => {
                let cause = "send_counts and receive_counts are given together";
                return Err(Failure::invalid(NAME, cause));
            }
        }
        Ok(result)
    }

    /// Copies the arrays of all ranks to the rank `root`, in the order of the ranks: into `out`, or into a
    /// new array of the shape (size, …). With `counts` at the root, the elements that each rank has, the
    /// new array has one axis; the other ranks pass counts, too, which are not used. None on other ranks.
    #[pyo3(signature = (array, root=0, *, out=None, counts=None, timeout=30.0))]
    #[allow(clippy::too_many_arguments)] // keywords
    pub(crate) fn gather<'py>(
        &self,
        py: Python<'py>,
        array: &Bound<'py, PyAny>,
        root: u32,
        out: Option<&Bound<'py, PyAny>>,
        counts: Option<Vec<usize>>,
        timeout: Option<f64>,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        const NAME: &str = "gather";
        let source = self.source(NAME, array)?;
        let elements = Elements::moved(NAME, &source)?;
        let call = Self::call(Operation::Gather, elements, None, root);
        let from = (&source, Blocks::One(elements.count(&source)));
        let blocks = counts.as_ref().map(|counts| UnequalBlocks::new(counts, elements.each()));
        if self.rank != root {
            // Not used, but the kind of its blocks is.
            let none = empty(array, &[0])?;
            let target = self.source(NAME, &none)?;
            let no_blocks = Blocks::Unequal { counts: &[], offsets: &[] };
            let to = blocks.map(|_| (&target, no_blocks));
            self.run(py, &call, Some(from), to, timeout)?;
            return Ok(None);
        }
        let shape = match &counts {
            Some(counts) => vec![counts.iter().sum::<usize>() as u64],
            None => self.stacked_shape(&source),
        };
        let result = result_array(array, out, &shape)?;
        let target = self.source(NAME, &result)?;
        Self::check_result(NAME, elements, &source, &target)?;
        match blocks {
            Some(blocks) => {
                self.run(py, &call, Some(from), Some((&target, blocks.get())), timeout)?
            }
            None => {
                let each = self.each(NAME, elements, &target)?;
                self.run(py, &call, Some(from), Some((&target, Blocks::Each(each))), timeout)?;
            }
        }
        Ok(Some(result))
    }

    /// Copies a block of the array of the rank `root` to each: into `out`, which other ranks than the root
    /// always pass. At the root the first axis of the array has an index for each rank, or there are
    /// `out` or `counts`, the elements of each block; the others pass None for the array, and any counts if
    /// the root passes them.
    #[pyo3(signature = (array, root=0, *, out=None, counts=None, timeout=30.0))]
    #[allow(clippy::too_many_arguments)] // keywords
    pub(crate) fn scatter<'py>(
        &self,
        py: Python<'py>,
        array: Option<&Bound<'py, PyAny>>,
        root: u32,
        out: Option<&Bound<'py, PyAny>>,
        counts: Option<Vec<usize>>,
        timeout: Option<f64>,
    ) -> Result<Bound<'py, PyAny>> {
        const NAME: &str = "scatter";
        let missing =
            |what| Err(Failure::invalid(NAME, format!("rank {} passes {what}", self.rank)));
        if self.rank != root {
            let Some(out) = out else { return missing("out, an array for its block") };
            let target = self.source(NAME, out)?;
            let elements = Elements::moved(NAME, &target)?;
            let call = Self::call(Operation::Scatter, elements, None, root);
            let to = (&target, Blocks::One(elements.count(&target)));
            let no_blocks = Blocks::Unequal { counts: &[], offsets: &[] };
            // Not used, but the kind of its blocks is.
            let from = counts.map(|_| (&target, no_blocks));
            self.run(py, &call, from, Some(to), timeout)?;
            return Ok(out.clone());
        }
        let Some(array) = array else { return missing("the array with the blocks") };
        let source = self.source(NAME, array)?;
        let elements = Elements::moved(NAME, &source)?;
        let call = Self::call(Operation::Scatter, elements, None, root);
        let shape = match (out, &counts) {
            (Some(_), _) => Vec::new(),
            (None, Some(counts)) => {
                vec![counts.get(self.rank as usize).copied().unwrap_or(0) as u64]
            }
            (None, None) => self.block_shape(NAME, &source)?.to_vec(),
        };
        let result = result_array(array, out, &shape)?;
        let target = self.source(NAME, &result)?;
        Self::check_result(NAME, elements, &source, &target)?;
        let to = (&target, Blocks::One(elements.count(&target)));
        match counts.map(|counts| UnequalBlocks::new(&counts, elements.each())) {
            Some(blocks) => {
                self.run(py, &call, Some((&source, blocks.get())), Some(to), timeout)?
            }
            None => {
                let each = self.each(NAME, elements, &source)?;
                self.run(py, &call, Some((&source, Blocks::Each(each))), Some(to), timeout)?;
            }
        }
        Ok(result)
    }

    /// The parameters of an operation of so many bytes in the last one: the same on all ranks.
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
        self.domain.with(py, GET, |domain| Ok(PyParameters::of(domain.parameters(key))))
    }

    /// Stops or continues learning. On one machine without effect on other ranks than 0; on several machines all ranks
    /// call it before the same operation.
    #[pyo3(signature = (is_frozen=true))]
    fn freeze(&self, py: Python<'_>, is_frozen: bool) -> Result<()> {
        self.domain.with(py, "freeze parameters", |domain| {
            domain.with_controller(|controller| controller.freeze(is_frozen));
            Ok(())
        })
    }

    /// The parameters as JSON: on rank 0 those that it has settled on, on others those in use.
    #[pyo3(signature = (topology=""))]
    fn save(&self, py: Python<'_>, topology: &str) -> Result<String> {
        let saved =
            self.domain.with(py, "save parameters", |domain| Ok(domain.saved_parameters()))?;
        Ok(saved.to_json(topology))
    }

    /// Uses saved parameters from now on. On one machine without effect on other ranks than 0; on several machines all ranks
    /// call it before the same operation.
    #[pyo3(signature = (json, topology=""))]
    fn load(&self, py: Python<'_>, json: &str, topology: &str) -> Result<()> {
        const LOAD: &str = "load parameters";
        let saved = saved_parameters(LOAD, json, topology)?;
        self.domain.with(py, LOAD, |domain| {
            domain.with_controller(|controller| saved.load_into(controller));
            Ok(())
        })
    }

    /// Leaves, when all ranks have called it.
    #[pyo3(signature = (timeout=30.0))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> Result<()> {
        const CLOSE: &str = "close communication domain";
        let timeout = Timeout::new(CLOSE, timeout)?.or(LONGEST_CALL);
        let closed = match self.domain.take(py) {
            Some(domain) => interruptibly(py, CLOSE, move || domain.close(timeout)),
            None => Ok(()),
        };
        py.detach(|| drop(lock(&self.devices).take()));
        closed
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Closes it. After an exception it leaves without waiting for other ranks.
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> Result<()> {
        if kind.is_none() {
            return self.close(py, Some(30.0));
        }
        self.leave(py);
        Ok(())
    }
}
