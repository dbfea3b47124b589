//! The memory of a ring at its reader, and views into it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::capacity::QueueShare;
use super::header::{HEADER, Header};
use super::reader::Place;
use super::shape::{FLAG, Layout, Shape};
use crate::{
    Access, Domain, Endpoint, Error, ErrorKind, HostMemory, Memory, MemoryRegion, RegionSlice,
    Result, Waker,
};

/// Where memory is registered.
#[derive(Debug, Clone, Copy)]
pub(super) struct Site<'a> {
    pub(super) domain: &'a Domain,
    /// What it is bound to, where the provider demands that. None: a thread has it, and the
    /// provider is one that does not.
    endpoint: Option<&'a Endpoint>,
}

impl<'a> Site<'a> {
    pub(super) fn of(endpoint: &'a Endpoint) -> Self {
        Self { domain: endpoint.domain(), endpoint: Some(endpoint) }
    }

    /// Of an endpoint that is not at hand.
    pub(super) fn away(domain: &'a Domain) -> Self {
        Self { domain, endpoint: None }
    }
}

/// One epoch's memory. Views hold it: it is let go of when the last one is.
#[derive(Debug)]
pub(super) struct RingMemory {
    pub(super) shape: Shape,
    pub(super) region: MemoryRegion,
    /// Headers that lie apart.
    pub(super) headers: Option<MemoryRegion>,
    /// The same memory and headers, as the domains of further lanes know them.
    pub(super) others: Vec<(MemoryRegion, Option<MemoryRegion>)>,
    /// Chunks whose views were dropped, a bit each, by number: set by whichever thread drops
    /// one, cleared by the reader.
    released: Box<[AtomicU64]>,
    /// The reader sleeps, and wants to know of views that are dropped.
    is_asleep: AtomicBool,
    /// Its share of the queue is another ring's when nothing more can come.
    pub(super) share: QueueShare,
    waker: OnceLock<Waker>,
}

impl RingMemory {
    /// Memory that somebody made: of a device, or shared. To be written through the endpoints at
    /// all of these sites, of which there is at least one.
    pub(super) fn over(
        sites: &[Site<'_>],
        shape: Shape,
        memory: impl Memory,
        share: QueueShare,
    ) -> Result<Self> {
        if (memory.len() as u64) < shape.capacity() {
            let detail = format!("{} bytes, for a ring of {}", memory.len(), shape.capacity());
            return Err(Error::new(ErrorKind::OutOfBounds, "opening a ring", detail));
        }
        let memory = Arc::new(memory);
        let headers = match shape.layout() {
            Layout::Apart => {
                Some(Arc::new(HostMemory::zeroed((shape.most_chunks() * HEADER) as usize)?))
            }
            Layout::Together | Layout::Flagged => None,
        };
        let mut lanes = Vec::with_capacity(sites.len());
        for site in sites {
            let region = site.domain.register(Arc::clone(&memory), Access::REMOTE_WRITE)?;
            activate(&region, *site)?;
            let headers = match &headers {
                Some(headers) => {
                    let headers = Arc::clone(headers);
                    let headers = site.domain.register(headers, Access::REMOTE_WRITE)?;
                    activate(&headers, *site)?;
                    Some(headers)
                }
                None => None,
            };
            lanes.push((region, headers));
        }
        if lanes.is_empty() {
            let detail = "without an endpoint";
            return Err(Error::new(ErrorKind::InvalidArgument, "opening a ring", detail));
        }
        let (region, headers) = lanes.remove(0);
        let words = shape.most_chunks().div_ceil(64);
        let released = (0..words).map(|_| AtomicU64::new(0)).collect();
        if shape.layout() == Layout::Flagged {
            // Flags are words, which not all memory has at its start.
            region.load_u64(0)?;
            // Whoever looks for flags wants clean memory.
            region.fill(0..shape.capacity() as usize, 0)?;
        }
        let (is_asleep, waker) = (AtomicBool::new(false), OnceLock::new());
        Ok(Self { shape, region, headers, others: lanes, released, is_asleep, share, waker })
    }

    /// A header.
    #[inline]
    pub(super) fn look(&self, place: Place) -> [u8; HEADER as usize] {
        let mut bytes = [0; HEADER as usize];
        // Offsets are inside of the ring; beyond it there is no header.
        let _ = match (place, &self.headers) {
            (Place::Ring(offset), _) => self.region.read(offset as usize, &mut bytes),
            (Place::Headers(offset), Some(headers)) => headers.read(offset as usize, &mut bytes),
            (Place::Headers(_), None) => Ok(()),
        };
        bytes
    }

    /// A flag.
    #[inline]
    pub(super) fn flag(&self, offset: u64) -> u64 {
        self.region.load_u64(offset as usize).unwrap_or(0)
    }

    /// Who sleeps is woken by this.
    pub(super) fn wakes(&self, waker: Waker) {
        let _ = self.waker.set(waker);
    }

    /// The reader is about to sleep, and looks once more after this; or does not any more.
    pub(super) fn sleeps(&self, is_asleep: bool) {
        self.is_asleep.store(is_asleep, Ordering::SeqCst);
    }

    /// Was the view of this chunk dropped? If so, says it once.
    #[inline]
    pub(super) fn take_released(&self, sequence: u64) -> bool {
        let (word, bit) = self.place(sequence);
        // Seen set, it stays set until it is cleared here.
        if word.load(Ordering::SeqCst) & bit == 0 {
            return false;
        }
        word.fetch_and(!bit, Ordering::Relaxed);
        true
    }

    #[inline]
    fn place(&self, sequence: u64) -> (&AtomicU64, u64) {
        let number = sequence % self.shape.most_chunks();
        (&self.released[(number / 64) as usize], 1 << (number % 64))
    }
}

/// A chunk of a message, where it lies in the ring. Dropping it, on whichever thread,
/// gives its place back; the writer is told when the receiver next looks.
#[derive(Debug)]
#[must_use = "what is dropped may be written again"]
pub struct View {
    header: Header,
    is_last: bool,
    offset: u64,
    memory: Arc<RingMemory>,
}

impl View {
    #[inline]
    pub(super) fn new(header: Header, is_last: bool, offset: u64, memory: Arc<RingMemory>) -> Self {
        Self { header, is_last, offset, memory }
    }

    /// What message it belongs to, and where in it.
    #[must_use]
    #[inline]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Is the message whole with it?
    #[must_use]
    #[inline]
    pub fn is_last(&self) -> bool {
        self.is_last
    }

    /// Bytes of the chunk.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.header.payload as usize
    }

    /// Where it lies, to be sent on from or given to a device; None if there are no bytes.
    /// A slice keeps the memory, but not the place: what it names is the writer's again
    /// when the view is dropped.
    #[must_use]
    pub fn slice(&self) -> Option<RegionSlice> {
        let from = self.offset as usize;
        self.memory.region.slice(from..from + self.len()).ok().filter(|slice| !slice.is_empty())
    }

    /// Where its bytes begin: valid until the view is dropped.
    #[must_use]
    #[inline]
    pub fn as_ptr(&self) -> *const u8 {
        self.memory.region.as_ptr().wrapping_add(self.offset as usize)
    }

    /// Copies bytes out, from an offset of the chunk on.
    ///
    /// # Errors
    /// `OutOfBounds`; `InvalidArgument` for device memory.
    #[inline]
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        if offset.checked_add(into.len()).is_none_or(|end| end > self.len()) {
            let detail = format!("{} bytes at {offset} of a chunk of {}", into.len(), self.len());
            return Err(Error::new(ErrorKind::OutOfBounds, "reading from a ring", detail));
        }
        self.memory.region.read(self.offset as usize + offset, into)
    }
}

impl Drop for View {
    #[inline]
    fn drop(&mut self) {
        let shape = &self.memory.shape;
        // A forked child may share the memory with its parent, who still reads it.
        if shape.layout() == Layout::Flagged && !self.memory.region.domain().is_parents() {
            clean(&self.memory.region, shape, &self.header);
        }
        let (word, bit) = self.memory.place(self.header.sequence);
        // After all that was done with the bytes. Either the reader sees this before it sleeps, or
        // it is seen here to sleep.
        word.fetch_or(bit, Ordering::SeqCst);
        if self.memory.is_asleep.load(Ordering::SeqCst)
            && let Some(waker) = self.memory.waker.get()
        {
            waker.nudge();
        }
    }
}

/// Whoever looks for flags must not find what an earlier chunk left.
fn clean(region: &MemoryRegion, shape: &Shape, header: &Header) {
    let start = shape.offset(header.position) as usize;
    let end = start + (shape.flag(header.payload.into()) + FLAG) as usize;
    // The chunk lay inside of the ring.
    let _ = region.fill(start..end, 0);
}

/// Binds and enables a region where the provider demands it.
pub(super) fn activate(region: &MemoryRegion, site: Site<'_>) -> Result<()> {
    match site.endpoint {
        Some(endpoint) => region.enable_for(endpoint),
        None if region.is_registered() => region.enable(),
        None => Ok(()),
    }
}
