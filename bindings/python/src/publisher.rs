//! Publishers, and messages that are written in place.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use gpu::{Block, CopyMethod, DEFAULT_TIMEOUT, DeviceName};
use pubsub::{Attempt, Loan, MAX_METADATA, Publisher, PublisherEvent, Sent};
use pyo3::exceptions::PyBufferError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use threads::lock;

use crate::arguments::{contiguous, data_type_of, shape_of};
use crate::array::{Array, Owner, Source, gather};
use crate::closable::Closable;
use crate::data_type::DataType;
use crate::devices::open_device;
use crate::failure::{Failure, Result};
use crate::kept::Kept;
use crate::layout::Layout;
use crate::message_type::MessageType;
use crate::release::{drop_after, leave};
use crate::streams::{UsingStreams, last_use};
use crate::waits::{Timeout, unless_late, wait, wait_for_work};

const PUBLISH: &str = "publish to topic";
const NO_METADATA: &[u8] = b"";
const LOAN: &str = "loan memory of topic";
/// Between two attempts while calls in progress have all loans.
const LOAN_PAUSE: Duration = Duration::from_millis(1);
const PUBLISHED: &str = "the loan was published or given back";

/// Publishes messages of a topic.
#[pyclass(frozen, name = "Publisher", module = "fabricast")]
#[derive(Debug)]
pub(crate) struct PyPublisher {
    publisher: Closable<Arc<Publisher>>,
    /// What all messages have in common.
    message_type: Option<MessageType>,
    /// Calls in progress that publish copies.
    calls: PublishingCalls,
    /// Loans of tasks of an event loop, which go on only when its thread does.
    task_loans: AtomicU32,
}

/// What happened to a published message.
#[pyclass(frozen, name = "Sent", module = "fabricast", get_all)]
#[derive(Debug)]
pub(crate) struct PySent {
    /// Position of the message in the order of the topic's messages on this node; None if it had no
    /// subscriber, or was dropped.
    position: Option<u64>,
    /// Number of subscribers that it was delivered to.
    subscribers: u32,
    /// There was no room, and the topic drops messages then.
    is_dropped: bool,
}

#[pymethods]
impl PySent {
    fn __repr__(&self) -> String {
        let Self { position, subscribers, is_dropped } = self;
        let position = position.map_or("None".to_owned(), |position| position.to_string());
        let is_dropped = if *is_dropped { "True" } else { "False" };
        format!("Sent(position={position}, subscribers={subscribers}, is_dropped={is_dropped})")
    }
}

/// Metadata of a message: what its reader needs to know type and shape, and the caller's.
fn header(
    operation: &'static str,
    topic: Option<&MessageType>,
    (data_type, layout): (DataType, &Layout),
    metadata: &[u8],
) -> Result<Vec<u8>> {
    if let Some(expected) = topic {
        expected.check(operation, data_type, layout)?;
    }
    let is_known = match topic {
        Some(expected) => expected.layout().is_some(),
        // A reader takes plain bytes for what they are.
        None => data_type == DataType::UINT8 && layout.shape().len() == 1,
    };
    let mut header = if is_known { Vec::new() } else { layout.header(data_type) };
    let own = header.len();
    header.extend(metadata);
    if header.len() > MAX_METADATA {
        let cause = match MAX_METADATA.checked_sub(own) {
            Some(left) => format!(
                "{} bytes of metadata, {left} are the maximum for this array",
                metadata.len()
            ),
            None => format!(
                "type and shape take {own} bytes, and {MAX_METADATA} are the maximum: give the topic \
                 dtype and shape, or the fields shorter names"
            ),
        };
        return Err(Failure::invalid(operation, cause));
    }
    Ok(header)
}

/// Publishes a loan, on the streams that write it. If there is no room in time, the loan is left.
fn publish(
    py: Python<'_>,
    next: &mut Option<Loan>,
    streams: &UsingStreams,
    timeout: Timeout,
) -> Result<PySent> {
    let stream = match next.as_ref().and_then(Loan::device) {
        Some(device) if !streams.are_done(device)? => streams.joined(device)?,
        _ => None,
    };
    let cause = || "no room for the message".to_owned();
    let published = wait(py, PUBLISH, timeout, cause, |slice| {
        let Some(loan) = next.take() else {
            return Err(Failure::new("Closed", PUBLISH, "the message was published"));
        };
        let attempt = match &stream {
            Some(stream) => loan.publish_on_within(stream, slice)?,
            None => loan.publish_within(slice)?,
        };
        match attempt {
            Attempt::Sent(sent) => Ok(Some(sent)),
            Attempt::Full(loan) => {
                *next = Some(loan);
                Ok(None)
            }
        }
    });
    if let Some(stream) = stream {
        leave(stream);
    }
    let published = published.map_err(|failure| match &*next {
        Some(loan) if failure.is_of("DeadlineExceeded") => loan.no_room_error(PUBLISH).into(),
        _ => failure,
    });
    let Sent { position, subscribers, is_dropped, .. } = published?;
    Ok(PySent { position, subscribers, is_dropped })
}

impl PyPublisher {
    pub(crate) fn new(publisher: Publisher, message_type: Option<MessageType>) -> Self {
        let publisher = Closable::new("the publisher was closed", Arc::new(publisher));
        Self {
            publisher,
            message_type,
            calls: PublishingCalls::default(),
            task_loans: AtomicU32::new(0),
        }
    }

    /// Memory for a message. With all loans in use, it waits for those that calls in progress return
    /// by themselves. A caller that does not wait is told so, too, if tasks have them.
    fn borrow(
        &self,
        py: Python<'_>,
        length: u64,
        timeout: Timeout,
    ) -> Result<(PublishingCall<'_>, Loan)> {
        let publisher = &*self.publisher.get(LOAN)?;
        let cause = || no_room(length);
        wait(py, LOAN, timeout, cause, |slice| {
            let returned = self.calls.returned.load(SeqCst);
            self.calls.waiting.fetch_add(1, SeqCst);
            let found = unless_late(publisher.loan(length, slice));
            let found = found.map(|loan| loan.map(|loan| (PublishingCall::new(&self.calls), loan)));
            self.calls.waiting.fetch_sub(1, SeqCst);
            let tasks = if timeout.is_zero() { self.task_loans.load(SeqCst) } else { 0 };
            match found {
                Err(failure)
                    if failure.is_of("TooManyLoans")
                        && (tasks > 0 || self.calls.had_loans_since(returned)) =>
                {
                    std::thread::sleep(slice.min(LOAN_PAUSE));
                    Ok(None)
                }
                other => other,
            }
        })
    }
}

/// Calls in progress that publish copies, which return their loans by themselves.
///
/// Such a call waits for a loan, has it, and has returned it. It is counted in each of these states before it is no
/// longer counted in the one before.
#[derive(Debug, Default)]
struct PublishingCalls {
    waiting: AtomicU32,
    with_loan: AtomicU32,
    /// The number of calls that no longer have a loan.
    returned: AtomicU32,
}

impl PublishingCalls {
    /// Returns whether one of the calls may have had a loan since this count of returned ones was read.
    fn had_loans_since(&self, returned: u32) -> bool {
        // In the order in which a call goes through them: none is missed.
        self.waiting.load(SeqCst) > 0
            || self.with_loan.load(SeqCst) > 0
            || self.returned.load(SeqCst) != returned
    }
}

/// A call that has a loan. It is dropped after the loan.
struct PublishingCall<'a>(&'a PublishingCalls);

impl<'a> PublishingCall<'a> {
    fn new(calls: &'a PublishingCalls) -> Self {
        calls.with_loan.fetch_add(1, SeqCst);
        Self(calls)
    }
}

impl Drop for PublishingCall<'_> {
    fn drop(&mut self) {
        self.0.returned.fetch_add(1, SeqCst);
        self.0.with_loan.fetch_sub(1, SeqCst);
    }
}

fn no_room(length: u64) -> String {
    format!("no room for {length} bytes")
}

/// Memory for a message of this length, when there is room.
fn borrow(py: Python<'_>, publisher: &Publisher, length: u64, timeout: Timeout) -> Result<Loan> {
    wait(py, LOAN, timeout, || no_room(length), |slice| unless_late(publisher.loan(length, slice)))
}

/// Copies an array into a message. Then the source is not used any more.
fn copy(py: Python<'_>, source: &Source, loan: &mut Loan) -> Result<()> {
    let (data_type, layout) = (source.data_type(), source.layout());
    if source.length() == 0 {
        return Ok(());
    }
    // Also refuses elements that share bytes, in an array with gaps.
    let (first, length) = source.extent(PUBLISH)?;
    match source.cuda_device() {
        None => {
            let (bytes, layout, device) = (source.host_bytes(), layout.clone(), loan.device());
            py.detach(|| {
                if device.is_some_and(|device| !is_emulated(device)) {
                    let mut gathered = vec![0; loan.length() as usize];
                    // SAFETY: of the source, which the caller keeps; of its length.
                    unsafe { bytes.copy(data_type, &layout, gathered.as_mut_ptr()) };
                    return Ok(loan.write(0, &gathered)?);
                }
                let target = ptr::with_exposed_provenance_mut(loan.address() as usize);
                // SAFETY: of the source, which the caller keeps; the loan has its length, and
                // memory of the host or of an emulated device.
                unsafe { bytes.copy(data_type, &layout, target) };
                Ok(())
            })
        }
        Some(number) => {
            let device = open_device(DeviceName::cuda(number))?;
            let start = source.address().wrapping_add_signed(first);
            // SAFETY: of the source, which outlives the copy: it is waited for.
            let memory = unsafe { device.adopt(start, length, ()) }?;
            let layout = layout.clone();
            let stream = device.default_stream()?;
            // Ctrl-C ends this wait; the copy itself is waited for.
            wait_for_work(py, PUBLISH, &stream)?;
            py.detach(|| {
                if loan.device().is_some() {
                    match layout.is_contiguous() {
                        true => stream.copy(loan.slice(), &memory.whole())?,
                        false => {
                            let blocks = row_blocks(data_type, &layout, first);
                            let method = CopyMethod::Best;
                            stream.copy_blocks(loan.slice(), &memory.whole(), &blocks, method)?;
                        }
                    }
                    return Ok(stream.synchronize(DEFAULT_TIMEOUT)?);
                }
                let mut bytes = vec![0; length as usize];
                stream.download(&memory.whole(), &mut bytes, DEFAULT_TIMEOUT)?;
                if layout.is_contiguous() {
                    return Ok(loan.write(0, &bytes)?);
                }
                let mut gathered = vec![0; loan.length() as usize];
                gather(data_type, &layout, &bytes, &mut gathered);
                Ok(loan.write(0, &gathered)?)
            })
        }
    }
}

/// Keeps array and loan until a copy between them that was not waited for is done.
fn keep_while_copied(source: Source, loan: Loan) {
    let Some(number) = source.cuda_device() else { return };
    let point = open_device(DeviceName::cuda(number))
        .and_then(|device| device.default_stream())
        .and_then(|stream| stream.point());
    match point {
        Ok(point) => drop_after(point, (Kept::new(source), loan)),
        // The copy may go on: the memory is never freed.
        Err(_) => std::mem::forget((Kept::new(source), loan)),
    }
}

/// The rows of a strided array, whose first byte has this offset from the first element.
fn row_blocks(data_type: DataType, layout: &Layout, first: i64) -> Vec<Block> {
    let (row, offsets) = layout.rows();
    let length = data_type.bytes(row).unwrap_or(0);
    let item_size = data_type.item_size().unwrap_or(1) as i64;
    let block = |(number, offset): (usize, i64)| {
        let from = (offset * item_size - first) as u64;
        Block { to: number as u64 * length, from, length }
    };
    offsets.enumerate().map(block).collect()
}

fn is_emulated(device: DeviceName) -> bool {
    device.implementation == gpu::Implementation::Emulated
}

#[pymethods]
impl PyPublisher {
    /// Publishes a copy of an array or of bytes: of anything that has a buffer, DLPack or an array
    /// interface. A reliable topic waits for room.
    #[pyo3(
        signature = (array, *, metadata=NO_METADATA, timeout=30.0),
        text_signature = "($self, array, *, metadata=b'', timeout=30.0)"
    )]
    fn publish(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        metadata: &[u8],
        timeout: Option<f64>,
    ) -> Result<PySent> {
        let timeout = Timeout::new(PUBLISH, timeout)?;
        let source = Source::of(PUBLISH, array)?;
        let header = header(
            PUBLISH,
            self.message_type.as_ref(),
            (source.data_type(), source.layout()),
            metadata,
        )?;
        let (_call, mut loan) = self.borrow(py, source.length(), timeout)?;
        loan.set_metadata(&header)?;
        if let Err(failure) = copy(py, &source, &mut loan) {
            keep_while_copied(source, loan);
            return Err(failure);
        }
        publish(py, &mut Some(loan), &UsingStreams::default(), timeout)
    }

    /// Counts the loan of a task, which returns it by itself: when it is taken, and when it is returned.
    fn _count_task_loan(&self, is_taken: bool) {
        match is_taken {
            true => self.task_loans.fetch_add(1, SeqCst),
            false => self.task_loans.fetch_sub(1, SeqCst),
        };
    }

    /// A loan that has a copy of an array; `WouldBlock` without room.
    fn _loan_copy(&self, py: Python<'_>, array: &Bound<'_, PyAny>) -> Result<PyLoan> {
        let source = Source::of(PUBLISH, array)?;
        let (data_type, shape) = (source.data_type(), source.layout().shape().to_vec());
        let (layout, _) = contiguous(PUBLISH, data_type, shape)?;
        header(PUBLISH, self.message_type.as_ref(), (data_type, &layout), &[])?;
        let (_call, mut loan) =
            self.borrow(py, source.length(), Timeout::new(PUBLISH, Some(0.0))?)?;
        if let Err(failure) = copy(py, &source, &mut loan) {
            keep_while_copied(source, loan);
            return Err(failure);
        }
        let publisher = self.publisher.get(PUBLISH)?;
        Ok(PyLoan::of(loan, (data_type, layout), self.message_type.clone(), publisher))
    }

    /// `publish` for asyncio: `await publisher.publish_async(array)`. A task that is cancelled has
    /// published nothing.
    #[pyo3(
        signature = (array, *, metadata=NO_METADATA, timeout=30.0),
        text_signature = "($self, array, *, metadata=b'', timeout=30.0)"
    )]
    fn publish_async<'py>(
        slf: Bound<'py, Self>,
        array: Bound<'py, PyAny>,
        metadata: &[u8],
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, timeout) = (slf.py(), Timeout::new(PUBLISH, timeout)?.seconds());
        let publish =
            py.import(intern!(py, "fabricast._asyncio"))?.getattr(intern!(py, "publish"))?;
        publish.call1((slf, array, metadata, timeout))
    }

    /// `loan` for asyncio: `await publisher.loan_async((480, 640))`.
    #[pyo3(signature = (shape=None, dtype=None, *, timeout=30.0))]
    fn loan_async<'py>(
        slf: Bound<'py, Self>,
        shape: Option<Bound<'py, PyAny>>,
        dtype: Option<Bound<'py, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, timeout) = (slf.py(), Timeout::new(LOAN, timeout)?.seconds());
        let loan = py.import(intern!(py, "fabricast._asyncio"))?.getattr(intern!(py, "loan"))?;
        loan.call1((slf, shape, dtype, timeout))
    }

    /// Loans memory for a message, to be written in place: see `Loan`. The topic's type and shape
    /// are the default.
    #[pyo3(signature = (shape=None, dtype=None, *, timeout=30.0))]
    fn loan(
        &self,
        py: Python<'_>,
        shape: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> Result<PyLoan> {
        let timeout = Timeout::new(LOAN, timeout)?;
        let topic = self.message_type.as_ref();
        let data_type = match (dtype, topic) {
            (Some(dtype), _) => data_type_of(LOAN, dtype)?,
            (None, Some(topic)) => topic.data_type(),
            (None, None) => {
                let cause = "the topic has no type. Pass that of the message: loan(480, \"uint8\")";
                return Err(Failure::invalid(LOAN, cause));
            }
        };
        let shape = match (shape, topic.and_then(MessageType::layout)) {
            (Some(shape), _) => shape_of(LOAN, shape)?,
            (None, Some(layout)) => layout.shape().to_vec(),
            (None, None) => {
                let cause =
                    "the topic has no shape. Pass the shape of the message: loan((480, 640))";
                return Err(Failure::invalid(LOAN, cause));
            }
        };
        let (layout, length) = contiguous(LOAN, data_type, shape)?;
        // Before the memory: a wrong type is reported at once.
        header(LOAN, self.message_type.as_ref(), (data_type, &layout), &[])?;
        let (_, loan) = self.borrow(py, length, timeout)?;
        let publisher = self.publisher.get(LOAN)?;
        Ok(PyLoan::of(loan, (data_type, layout), self.message_type.clone(), publisher))
    }

    /// Waits until this many subscribers would receive a message. Returns their number.
    #[pyo3(signature = (count=1, timeout=30.0))]
    fn wait_for_subscribers(
        &self,
        py: Python<'_>,
        count: u32,
        timeout: Option<f64>,
    ) -> Result<u32> {
        let operation = "wait for subscribers";
        let timeout = Timeout::new(operation, timeout)?;
        let publisher = self.publisher.get(operation)?;
        let cause = || format!("fewer than {count} subscribers");
        wait(py, operation, timeout, cause, |slice| {
            unless_late(publisher.wait_for_subscribers(count, slice))
        })
    }

    /// Waits until no subscriber is left, on this node and on others.
    #[pyo3(signature = (timeout=30.0))]
    fn wait_for_no_subscribers(&self, py: Python<'_>, timeout: Option<f64>) -> Result<()> {
        let operation = "wait for end of subscribers";
        let timeout = Timeout::new(operation, timeout)?;
        let publisher = self.publisher.get(operation)?;
        let cause = || "subscribers are left".to_owned();
        wait(py, operation, timeout, cause, |slice| {
            unless_late(publisher.wait_for_no_subscribers(slice))
        })
    }

    /// The next event, as a dictionary; None without one. `no-subscribers`: the last subscriber has
    /// left or died, on this node and on others.
    fn poll_event<'py>(&self, py: Python<'py>) -> Result<Option<Bound<'py, PyDict>>> {
        let event = self.publisher.get("poll event of publisher")?.poll_event();
        let Some(event) = event else { return Ok(None) };
        let fields = PyDict::new(py);
        match event {
            PublisherEvent::NoSubscribers => fields.set_item("event", "no-subscribers")?,
            other => fields.set_item("event", format!("{other:?}"))?,
        }
        Ok(Some(fields))
    }

    /// Number of subscribers that would receive a message.
    #[getter]
    fn subscribers(&self) -> Result<u32> {
        Ok(self.publisher.get("count subscribers")?.subscribers())
    }

    /// Name of the publisher's topic.
    #[getter]
    fn topic(&self) -> Result<String> {
        Ok(self.publisher.get("get topic of publisher")?.topic().to_owned())
    }

    /// Closes it at once: calls that wait in other threads raise `Closed`, and its loans cannot be
    /// published any more.
    fn close(&self, py: Python<'_>) {
        let publisher = self.publisher.close();
        py.detach(move || publisher.inspect(|publisher| publisher.close()).map(drop));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.close(py);
    }
}

/// The memory of a message that is being written.
#[derive(Debug)]
struct LoanMemory {
    /// Closed when it is published.
    loan: Closable<Loan>,
    streams: UsingStreams,
}

/// A loan that is not published is given back when the work on the streams that write it is done.
impl Drop for LoanMemory {
    fn drop(&mut self) {
        let Some(loan) = self.loan.close() else { return };
        let Some(device) = loan.device() else { return };
        if let Some((point, stream)) = last_use(device, &self.streams) {
            drop_after(point, (loan, stream));
        }
    }
}

impl LoanMemory {
    /// Copies what was written into another loan of the same length, after the work of the streams
    /// that write it.
    fn copy_into(&self, py: Python<'_>, target: Loan) -> Result<Loan> {
        let place = |loan: &Loan| (loan.address(), loan.length(), loan.device());
        let (address, length, device) = self.loan.with(PUBLISH, place)?;
        if let Some(device) = device.filter(|device| !is_emulated(*device)) {
            let stream = match self.streams.joined(device)? {
                Some(stream) => stream,
                None => {
                    // The loan is not given back before the copy, either.
                    self.streams.add(0);
                    open_device(device)?.default_stream()?
                }
            };
            self.loan.with(PUBLISH, |loan| stream.copy(target.slice(), loan.slice()))??;
            return match wait_for_work(py, PUBLISH, &stream) {
                Ok(()) => Ok(target),
                Err(failure) => {
                    match stream.point() {
                        Ok(point) => drop_after(point, (target, stream)),
                        // The copy may go on: the memory is never used again.
                        Err(_) => std::mem::forget(target),
                    }
                    Err(failure)
                }
            };
        }
        let into = target.address() as usize;
        py.detach(|| {
            let from: *const u8 = ptr::with_exposed_provenance(address as usize);
            let into = ptr::with_exposed_provenance_mut(into);
            // SAFETY: both loans have this length, in memory of the host or of an emulated device, and
            // exist: this one, since its owner does.
            unsafe { ptr::copy_nonoverlapping(from, into, length as usize) };
        });
        Ok(target)
    }
}

impl Owner for LoanMemory {
    fn read(&self, address: u64, into: &mut [u8]) -> Result<()> {
        let read = |loan: &Loan| match loan.device().filter(|device| !is_emulated(*device)) {
            Some(device) => {
                let stream = open_device(device)?.default_stream()?;
                let start = address - loan.address();
                let part = loan.slice().slice(start, into.len() as u64)?;
                Ok(stream.download(&part, into, DEFAULT_TIMEOUT)?)
            }
            None => {
                let from: *const u8 = ptr::with_exposed_provenance(address as usize);
                // SAFETY: these bytes are in memory of the host, which the loan keeps.
                unsafe { ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
                Ok(())
            }
        };
        self.loan.with("read loan", read)?
    }

    fn used_by(&self, stream: u64) {
        self.streams.add(stream);
    }
}

/// Memory of a message that is written in place and then published. Without `publish` it is given
/// back.
///
/// >>> import tempfile
/// >>> import fabricast
/// >>> directory = tempfile.TemporaryDirectory()
/// >>> with fabricast.Node(directory.name) as node:
/// ...     topic = node.topic("frames")
/// ...     subscriber, publisher = topic.subscriber(), topic.publisher()
/// ...     with publisher.loan((2, 3), "int32") as loan:
/// ...         loan.array[...] = 7
/// ...     subscriber.pull().array[1]
/// array([7, 7, 7], dtype=int32)
/// >>> directory.cleanup()
#[pyclass(frozen, name = "Loan", module = "fabricast")]
#[derive(Debug)]
pub(crate) struct PyLoan {
    /// None after it was published or given back.
    memory: Mutex<Option<Arc<LoanMemory>>>,
    data_type: DataType,
    layout: Layout,
    topic: Option<MessageType>,
    publisher: Arc<Publisher>,
}

impl PyLoan {
    fn of(
        loan: Loan,
        (data_type, layout): (DataType, Layout),
        topic: Option<MessageType>,
        publisher: Arc<Publisher>,
    ) -> Self {
        let loan = Closable::new(PUBLISHED, loan);
        let memory = LoanMemory { loan, streams: UsingStreams::default() };
        let memory = Mutex::new(Some(Arc::new(memory)));
        Self { memory, data_type, layout, topic, publisher }
    }

    /// A copy of memory that views may still write, with a warning.
    fn copied(&self, py: Python<'_>, viewed: &LoanMemory, timeout: Timeout) -> Result<Loan> {
        let length = viewed.loan.with(PUBLISH, Loan::length)?;
        let copied = match borrow(py, &self.publisher, length, timeout) {
            Err(failure) if failure.is_of("TooManyLoans") => {
                let cause = "publish to topic failed: views of the loan's array exist, which could write \
                             to the message, and there is no further loan for a copy. Write \
                             loan.array[...] = x, delete the views (del) before, or give the topic more \
                             loans=";
                return Err(PyBufferError::new_err(cause).into());
            }
            copied => copied?,
        };
        let category = py.import(intern!(py, "fabricast.errors"))?.getattr("CopyWarning")?;
        let text =
            c"views of the loan's array exist, which could write to the message: a copy of it \
                     is published. Write loan.array[...] = x, or delete the views (del) before";
        PyErr::warn(py, &category, text, 1)?;
        viewed.copy_into(py, copied)
    }
}

fn published(operation: &'static str) -> Failure {
    Failure::new("Closed", operation, PUBLISHED)
}

#[pymethods]
impl PyLoan {
    /// The loan's memory, as an array to be written.
    #[getter]
    fn array(&self) -> Result<Array> {
        let memory = lock(&self.memory).clone();
        let memory = memory.ok_or_else(|| published("access loan"))?;
        let place = |loan: &Loan| (loan.address(), loan.device());
        let (address, device) = memory.loan.with("access loan", place)?;
        let kind = (self.data_type, self.layout.clone());
        Ok(Array::new((address, device), kind, false, memory))
    }

    /// Publishes it. A reliable topic waits for room; the loan can be published again if there was none
    /// in time.
    ///
    /// If views of its array exist, a copy is published, with a `CopyWarning`: nothing may be written to
    /// a message after it was published. `loan.array[...] = x` leaves no view; `del` deletes one.
    #[pyo3(
        signature = (*, metadata=NO_METADATA, timeout=30.0),
        text_signature = "($self, *, metadata=b'', timeout=30.0)"
    )]
    fn publish(&self, py: Python<'_>, metadata: &[u8], timeout: Option<f64>) -> Result<PySent> {
        let timeout = Timeout::new(PUBLISH, timeout)?;
        let header =
            header(PUBLISH, self.topic.as_ref(), (self.data_type, &self.layout), metadata)?;
        let memory = lock(&self.memory).take().ok_or_else(|| published(PUBLISH))?;
        let mut memory = match Arc::try_unwrap(memory) {
            Ok(memory) => memory,
            Err(viewed) => {
                let sent = self.copied(py, &viewed, timeout).and_then(|mut copied| {
                    copied.set_metadata(&header)?;
                    publish(py, &mut Some(copied), &UsingStreams::default(), timeout)
                });
                if sent.is_err() {
                    *lock(&self.memory) = Some(viewed);
                }
                return sent;
            }
        };
        let mut loan = memory.loan.close();
        let outcome = match &mut loan {
            Some(loan) => loan.set_metadata(&header).map_err(Failure::from),
            None => Err(published(PUBLISH)),
        };
        let outcome = outcome.and_then(|()| publish(py, &mut loan, &memory.streams, timeout));
        if let Some(loan) = loan {
            memory.loan = Closable::new(PUBLISHED, loan);
            *lock(&self.memory) = Some(Arc::new(memory));
        }
        outcome
    }

    /// A loan that has a copy, if views of the array exist; `WouldBlock` without room.
    fn _copy_if_viewed(&self, py: Python<'_>) -> Result<Option<Self>> {
        let viewed = lock(&self.memory).clone().ok_or_else(|| published(PUBLISH))?;
        // One is in this function.
        if Arc::strong_count(&viewed) <= 2 {
            return Ok(None);
        }
        let copied = self.copied(py, &viewed, Timeout::new(PUBLISH, Some(0.0))?)?;
        let kind = (self.data_type, self.layout.clone());
        Ok(Some(Self::of(copied, kind, self.topic.clone(), Arc::clone(&self.publisher))))
    }

    /// `publish` for asyncio. A task that is cancelled has published nothing.
    #[pyo3(
        signature = (*, metadata=NO_METADATA, timeout=30.0),
        text_signature = "($self, *, metadata=b'', timeout=30.0)"
    )]
    fn publish_async<'py>(
        slf: Bound<'py, Self>,
        metadata: &[u8],
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, timeout) = (slf.py(), Timeout::new(PUBLISH, timeout)?.seconds());
        let module = py.import(intern!(py, "fabricast._asyncio"))?;
        module.getattr(intern!(py, "publish_loan"))?.call1((slf, metadata, timeout))
    }

    /// Gives the memory back without publishing it, when views of its array are gone, too.
    fn discard(&self) {
        drop(lock(&self.memory).take());
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Publishes it, or gives it back after an exception.
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> Result<()> {
        if !kind.is_none() {
            self.discard();
        } else if lock(&self.memory).is_some() {
            self.publish(py, NO_METADATA, Some(30.0))?;
        }
        Ok(())
    }
}
