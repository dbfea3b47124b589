//! MPI messages of parts of memory: the calls of MPI that rsmpi has no safe form of.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::time::{Duration, Instant};

use fabricast::ipc::WaitStrategy;
use mpi::ffi;

use crate::Result;

/// What a message consists of.
#[derive(Debug)]
pub struct Datatype {
    raw: ffi::MPI_Datatype,
    count: c_int,
    /// Bytes from the start of a message to its end, with gaps.
    extent: usize,
    is_derived: bool,
}

fn check(name: &'static str, code: c_int) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(format!("{name} failed: code {code}").into()) }
}

fn int(value: usize) -> Result<c_int> {
    Ok(c_int::try_from(value)?)
}

impl Datatype {
    /// Contiguous bytes.
    ///
    /// # Errors
    /// For 2 GiB and more.
    pub fn bytes(count: usize) -> Result<Self> {
        // SAFETY: MPI sets its constants before the program starts.
        let raw = unsafe { ffi::RSMPI_UINT8_T };
        Ok(Self { raw, count: int(count)?, extent: count, is_derived: false })
    }

    /// A part of an array of doubles: `MPI_Type_create_subarray`. The slowest dimension is first.
    ///
    /// # Errors
    /// If MPI refuses it.
    pub fn subarray(array: &[u64], part: &[u64], start: &[u64]) -> Result<Self> {
        let ints =
            |list: &[u64]| list.iter().map(|it| int(*it as usize)).collect::<Result<Vec<_>>>();
        let (sizes, parts, starts) = (ints(array)?, ints(part)?, ints(start)?);
        if parts.len() != sizes.len() || starts.len() != sizes.len() {
            return Err("subarray failed: lists differ in length".into());
        }
        // SAFETY: the lists have as many numbers as there are dimensions; MPI is initialized.
        let raw = unsafe {
            let mut raw = ffi::RSMPI_DATATYPE_NULL;
            let created = ffi::MPI_Type_create_subarray(
                int(sizes.len())?,
                sizes.as_ptr(),
                parts.as_ptr(),
                starts.as_ptr(),
                ffi::MPI_ORDER_C as c_int,
                ffi::RSMPI_DOUBLE,
                &mut raw,
            );
            check("MPI_Type_create_subarray", created)?;
            check("MPI_Type_commit", ffi::MPI_Type_commit(&mut raw))?;
            raw
        };
        let extent = array.iter().product::<u64>() as usize * size_of::<f64>();
        Ok(Self { raw, count: 1, extent, is_derived: true })
    }
}

impl Drop for Datatype {
    fn drop(&mut self) {
        if self.is_derived && !mpi::environment::is_finalized() {
            // SAFETY: created by `subarray`; operations with it keep what they need.
            unsafe { ffi::MPI_Type_free(&mut self.raw) };
        }
    }
}

/// Waits for an operation, and yields to other processes meanwhile. Returns false at the deadline.
fn wait_until(request: &mut ffi::MPI_Request, end: Instant) -> Result<bool> {
    loop {
        let mut is_done = 0;
        // SAFETY: the request was started, and is complete only after the last iteration.
        let tested = unsafe { ffi::MPI_Test(request, &mut is_done, ffi::RSMPI_STATUS_IGNORE) };
        check("MPI_Test", tested)?;
        if is_done != 0 {
            return Ok(true);
        }
        if Instant::now() > end {
            return Ok(false);
        }
        std::thread::yield_now();
    }
}

/// Gathers the bytes of all ranks: `MPI_Iallgather` of the lengths, and `MPI_Iallgatherv`. Blocking
/// calls poll, in some libraries until the time slice of the process is over. All ranks call it.
/// None: not all ranks have come in time.
///
/// # Errors
/// Errors of MPI.
pub fn all_gather(own: &[u8], ranks: usize, timeout: Duration) -> Result<Option<Vec<Vec<u8>>>> {
    let end = Instant::now() + timeout;
    let own = own.to_vec();
    let length = Box::new(int(own.len())?);
    let mut lengths: Vec<c_int> = vec![0; ranks];
    // SAFETY: the memory is for a number of each rank, and stays until the operation is complete.
    let mut request = unsafe {
        let mut request = ffi::RSMPI_REQUEST_NULL;
        let (from, to) = ((&raw const *length).cast(), lengths.as_mut_ptr().cast());
        let (kind, world) = (ffi::RSMPI_INT32_T, ffi::RSMPI_COMM_WORLD);
        let started = ffi::MPI_Iallgather(from, 1, kind, to, 1, kind, world, &mut request);
        check("MPI_Iallgather", started)?;
        request
    };
    if !wait_until(&mut request, end)? {
        std::mem::forget((length, lengths));
        return Ok(None);
    }
    let mut starts: Vec<c_int> = Vec::with_capacity(ranks);
    let mut all: c_int = 0;
    for length in &lengths {
        starts.push(all);
        all = all.checked_add(*length).ok_or("gather failed: more than 2 GiB in all")?;
    }
    let mut bytes = vec![0_u8; all as usize];
    // SAFETY: the memory is for the bytes of each rank, and stays until the operation is complete.
    let mut request = unsafe {
        let mut request = ffi::RSMPI_REQUEST_NULL;
        let (from, to) = (own.as_ptr().cast(), bytes.as_mut_ptr().cast());
        let (kind, world) = (ffi::RSMPI_UINT8_T, ffi::RSMPI_COMM_WORLD);
        let (counts, places) = (lengths.as_ptr(), starts.as_ptr());
        let started = ffi::MPI_Iallgatherv(
            from,
            *length,
            kind,
            to,
            counts,
            places,
            kind,
            world,
            &mut request,
        );
        check("MPI_Iallgatherv", started)?;
        request
    };
    if !wait_until(&mut request, end)? {
        std::mem::forget((own, lengths, starts, bytes));
        return Ok(None);
    }
    let part = |(start, length): (&c_int, &c_int)| {
        bytes[*start as usize..(*start + *length) as usize].to_vec()
    };
    Ok(Some(starts.iter().zip(&lengths).map(part).collect()))
}

/// A message to or from a rank.
#[derive(Debug, Clone, Copy)]
pub struct Part<'a> {
    /// Byte offset in the memory.
    pub at: usize,
    /// The message's contents from there.
    pub datatype: &'a Datatype,
    /// The other rank.
    pub rank: u32,
    /// The message's tag.
    pub tag: u32,
}

/// Memory of which messages are sent and received.
#[derive(Debug)]
pub struct MessageMemory<T> {
    memory: Vec<T>,
    requests: Vec<ffi::MPI_Request>,
    /// The bytes of each message in flight.
    places: Vec<Range<usize>>,
}

/// Numbers, which any bytes are.
pub trait Number: Copy + Default {}
impl Number for u8 {}
impl Number for f64 {}

impl<T: Number> MessageMemory<T> {
    /// Zeroed memory.
    #[must_use]
    pub fn new(length: usize) -> Self {
        Self { memory: vec![T::default(); length], requests: Vec::new(), places: Vec::new() }
    }

    /// The memory, while no message is in flight.
    ///
    /// # Panics
    /// While messages are in flight.
    pub fn memory(&mut self) -> &mut [T] {
        assert!(self.requests.is_empty(), "messages are in flight");
        &mut self.memory
    }

    /// Messages in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.requests.len()
    }

    /// Writes bytes of which no message is in flight.
    ///
    /// # Errors
    /// If they exceed the memory, or a message of them is in flight; errors of `write`.
    pub fn write_with(
        &mut self,
        at: usize,
        bytes: usize,
        write: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let end = at.checked_add(bytes).filter(|end| *end <= size_of_val(&*self.memory));
        let end = end.ok_or("write to message memory failed: beyond its end")?;
        if self.places.iter().any(|place| place.start < end && at < place.end) {
            return Err("write to message memory failed: a message of it is in flight".into());
        }
        // SAFETY: inside of the memory, whose bytes are numbers; MPI accesses only the messages in
        // flight, and `self` is borrowed.
        write(unsafe {
            std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast::<u8>().add(at), bytes)
        })
    }

    fn place(&mut self, part: Part<'_>) -> Result<(*mut c_void, c_int, c_int)> {
        let end = part.at.checked_add(part.datatype.extent);
        if end.is_none_or(|end| end > size_of_val(&*self.memory)) {
            return Err("start message failed: it exceeds the memory".into());
        }
        // SAFETY: inside of the memory.
        let start = unsafe { self.memory.as_mut_ptr().cast::<u8>().add(part.at) };
        Ok((start.cast(), int(part.rank as usize)?, int(part.tag as usize)?))
    }

    /// Starts to receive a message: `MPI_Irecv`.
    ///
    /// # Errors
    /// If it exceeds the memory; errors of MPI.
    pub fn receive(&mut self, part: Part<'_>) -> Result<()> {
        let (start, rank, tag) = self.place(part)?;
        let Datatype { raw, count, .. } = *part.datatype;
        // SAFETY: the memory stays, and is not accessible, until the request is complete: its owner
        // leaks it otherwise.
        unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            let world = ffi::RSMPI_COMM_WORLD;
            let started = ffi::MPI_Irecv(start, count, raw, rank, tag, world, &mut request);
            check("MPI_Irecv", started)?;
            self.requests.push(request);
        }
        self.places.push(part.at..part.at + part.datatype.extent);
        Ok(())
    }

    /// Starts to send a message: `MPI_Isend`.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    pub fn send(&mut self, part: Part<'_>) -> Result<()> {
        let (start, rank, tag) = self.place(part)?;
        let Datatype { raw, count, .. } = *part.datatype;
        // SAFETY: as in `receive`.
        unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            let world = ffi::RSMPI_COMM_WORLD;
            let started = ffi::MPI_Isend(start, count, raw, rank, tag, world, &mut request);
            check("MPI_Isend", started)?;
            self.requests.push(request);
        }
        self.places.push(part.at..part.at + part.datatype.extent);
        Ok(())
    }

    /// Waits for all messages: `MPI_Waitall`. If ranks share cores, `MPI_Testall` and a yield to
    /// other processes: some libraries poll without that until their time slice is over.
    ///
    /// # Errors
    /// Errors of MPI.
    pub fn wait(&mut self, strategy: WaitStrategy) -> Result<()> {
        let count = int(self.requests.len())?;
        let requests = self.requests.as_mut_ptr();
        // SAFETY: these requests were started and are not complete.
        unsafe {
            if strategy == WaitStrategy::Busy {
                let waited = ffi::MPI_Waitall(count, requests, ffi::RSMPI_STATUSES_IGNORE);
                check("MPI_Waitall", waited)?;
            } else {
                let mut is_done = 0;
                loop {
                    let statuses = ffi::RSMPI_STATUSES_IGNORE;
                    let tested = ffi::MPI_Testall(count, requests, &mut is_done, statuses);
                    check("MPI_Testall", tested)?;
                    if is_done != 0 {
                        break;
                    }
                    std::thread::yield_now();
                }
            }
        }
        self.requests.clear();
        self.places.clear();
        Ok(())
    }
}

impl<T> Drop for MessageMemory<T> {
    fn drop(&mut self) {
        if !self.requests.is_empty() {
            // MPI may still access it.
            std::mem::forget(std::mem::take(&mut self.memory));
        }
    }
}
