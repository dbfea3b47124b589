//! The memory of a ring at its reader, and views into it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::inline_data;
use super::queue_budget::QueueQuota;
use super::{
    ArrivedChunk, ChunkHeader, ChunkLayout, HEADER_LEN, HeaderLocation, LaneOffer, RingGeometry,
};
use crate::{
    Access, Domain, Endpoint, Error, ErrorKind, HostMemory, Memory, MemoryRegion, RegionSlice,
    Result, Waker,
};

/// Where memory is registered.
#[derive(Debug, Clone, Copy)]
pub(super) struct RegistrationScope<'a> {
    domain: &'a Domain,
    /// The endpoint that memory is bound to where the provider requires it. None: the endpoint
    /// belongs to a lane thread, and the provider does not require it.
    endpoint: Option<&'a Endpoint>,
}

impl<'a> RegistrationScope<'a> {
    pub(super) fn of(endpoint: &'a Endpoint) -> Self {
        Self { domain: endpoint.domain(), endpoint: Some(endpoint) }
    }

    /// For an endpoint that another thread owns.
    pub(super) fn domain_only(domain: &'a Domain) -> Self {
        Self { domain, endpoint: None }
    }

    pub(super) fn domain(self) -> &'a Domain {
        self.domain
    }

    /// Registers memory, and binds and enables it where the provider demands it.
    pub(super) fn register(self, memory: impl Memory, access: Access) -> Result<MemoryRegion> {
        self.enable(self.domain.register(memory, access)?)
    }

    /// Binds and enables a region of this domain where the provider demands it.
    pub(super) fn enable(self, region: MemoryRegion) -> Result<MemoryRegion> {
        match self.endpoint {
            Some(endpoint) => region.enable_for(endpoint)?,
            None if region.is_registered() => region.enable()?,
            None => {}
        }
        Ok(region)
    }
}

/// The memory of one epoch, shared by its views and freed with the last of them.
#[derive(Debug)]
pub(super) struct RingMemory {
    geometry: RingGeometry,
    region: MemoryRegion,
    /// Separate headers, if the layout has them.
    headers: Option<MemoryRegion>,
    /// Memory and headers, registered with the domains of extra lanes.
    lane_regions: Vec<(MemoryRegion, Option<MemoryRegion>)>,
    /// Chunks whose views were dropped, a bit each, by number: set by the thread that drops a view,
    /// cleared by the reader.
    released: Box<[AtomicU64]>,
    /// The reader sleeps and must be woken when a view is dropped.
    is_asleep: AtomicBool,
    /// The quota of the queue is returned once nothing more can arrive.
    quota: QueueQuota,
    waker: Waker,
}

impl RingMemory {
    /// The memory of the caller, which may be device or shared memory, registered for writes through
    /// each of these endpoints, of which there is at least one.
    pub(super) fn new(
        registration_scopes: &[RegistrationScope<'_>],
        geometry: RingGeometry,
        regions: Vec<MemoryRegion>,
        (quota, waker): (QueueQuota, Waker),
    ) -> Result<Self> {
        let needed = geometry.capacity();
        if let Some(short) = regions.iter().map(MemoryRegion::len).find(|it| (*it as u64) < needed)
        {
            let detail = format!("the memory has {short} bytes, the ring needs {needed}");
            return Err(Error::new(ErrorKind::OutOfBounds, "open ring", detail));
        }
        let header_bytes = (geometry.max_chunks() * geometry.header_stride()) as usize;
        let headers = (geometry.layout() == ChunkLayout::SeparateHeader)
            .then(|| HostMemory::zeroed(header_bytes).map(Arc::new))
            .transpose()?;
        let mut lanes = Vec::with_capacity(registration_scopes.len());
        for (scope, region) in registration_scopes.iter().zip(regions) {
            let headers = headers.clone().map(|it| scope.register(it, Access::REMOTE_WRITE));
            lanes.push((region, headers.transpose()?));
        }
        if lanes.is_empty() {
            let detail = "no endpoint was given";
            return Err(Error::new(ErrorKind::InvalidArgument, "open ring", detail));
        }
        let (region, headers) = lanes.remove(0);
        let words = geometry.max_chunks().div_ceil(64);
        let released = (0..words).map(|_| AtomicU64::new(0)).collect();
        let (lane_regions, is_asleep) = (lanes, AtomicBool::new(false));
        Ok(Self { geometry, region, headers, lane_regions, released, is_asleep, quota, waker })
    }

    /// Where each lane writes the ring, and the credit memory that it notifies.
    pub(super) fn lane_offers(&self, credit_memories: &[MemoryRegion]) -> Result<Vec<LaneOffer>> {
        let first = (&self.region, self.headers.as_ref());
        let extra = self.lane_regions.iter().map(|(region, headers)| (region, headers.as_ref()));
        let lanes = std::iter::once(first).chain(extra).zip(credit_memories);
        let lanes = lanes.map(|((ring, headers), credit_memory)| {
            Ok(LaneOffer {
                ring: ring.describe()?,
                headers: headers.map(MemoryRegion::describe).transpose()?,
                credit_memory: credit_memory.describe()?,
            })
        });
        lanes.collect()
    }

    pub(super) fn lanes(&self) -> usize {
        1 + self.lane_regions.len()
    }

    /// The domain of the first lane.
    pub(super) fn domain(&self) -> &Domain {
        self.region.domain()
    }

    pub(super) fn capacity(&self) -> u64 {
        self.geometry.capacity()
    }

    pub(super) fn quota(&self) -> &QueueQuota {
        &self.quota
    }

    #[inline]
    pub(super) fn read_header(&self, location: HeaderLocation) -> [u8; HEADER_LEN as usize] {
        let mut bytes = [0; HEADER_LEN as usize];
        // Offsets are inside the ring; beyond it there is no header.
        let _ = match (location, &self.headers) {
            (HeaderLocation::Ring(offset), _) => self.region.read(offset as usize, &mut bytes),
            (HeaderLocation::Headers(offset), Some(headers)) => {
                let _ = headers.read(offset as usize, &mut bytes);
                // A header counts once the bytes behind it are there.
                if self.geometry.inline_data() > 0
                    && let Some(header) = ChunkHeader::decode(&bytes)
                    && self.read_inline(&header).is_none()
                {
                    bytes.fill(0);
                }
                Ok(())
            }
            (HeaderLocation::Headers(_), None) => Ok(()),
        };
        bytes
    }

    /// The bytes of the writer behind a separate header, if they have arrived.
    fn read_inline(&self, header: &ChunkHeader) -> Option<Vec<u8>> {
        let (geometry, Some(headers)) = (&self.geometry, &self.headers) else { return None };
        if geometry.inline_data() == 0 {
            return Some(Vec::new());
        }
        let stride = geometry.header_stride();
        let at = header.sequence % geometry.max_chunks() * stride + HEADER_LEN;
        let mut behind = vec![0; (stride - HEADER_LEN) as usize];
        headers.read(at as usize, &mut behind).ok()?;
        inline_data::decode(header, &behind).map(<[u8]>::to_vec)
    }

    /// Set before the reader polls a last time and sleeps; cleared afterwards.
    pub(super) fn set_sleeping(&self, is_asleep: bool) {
        self.is_asleep.store(is_asleep, Ordering::SeqCst);
    }

    /// Was the view of this chunk dropped? True once.
    #[inline]
    pub(super) fn take_released(&self, sequence: u64) -> bool {
        let (word, bit) = self.released_bit(sequence);
        // A set bit is cleared only below.
        if word.load(Ordering::SeqCst) & bit == 0 {
            return false;
        }
        word.fetch_and(!bit, Ordering::Relaxed);
        true
    }

    #[inline]
    fn released_bit(&self, sequence: u64) -> (&AtomicU64, u64) {
        let number = sequence % self.geometry.max_chunks();
        (&self.released[(number / 64) as usize], 1 << (number % 64))
    }
}

/// A chunk of a message in the ring's memory. Dropping it, on any thread, releases its part of the
/// ring; the writer gets the credit on the receiver's next progress.
#[derive(Debug)]
#[must_use = "the writer may overwrite a dropped view"]
pub struct ChunkView {
    header: ChunkHeader,
    is_last: bool,
    offset: u64,
    memory: Arc<RingMemory>,
}

impl ChunkView {
    #[inline]
    pub(super) fn new(arrived: &ArrivedChunk, memory: Arc<RingMemory>) -> Self {
        Self { header: arrived.header, is_last: arrived.is_last, offset: arrived.offset, memory }
    }

    /// The header: message, topic and offset in the message.
    #[must_use]
    #[inline]
    pub fn header(&self) -> &ChunkHeader {
        &self.header
    }

    /// Does the message end with this chunk?
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

    /// The bytes in the ring, to be sent on or passed to a device; None if there are none. The
    /// slice keeps the memory registered, but once the view is dropped the writer may overwrite it.
    #[must_use]
    pub fn slice(&self) -> Option<RegionSlice> {
        let from = self.offset as usize;
        self.memory.region.slice(from..from + self.len()).ok().filter(|slice| !slice.is_empty())
    }

    /// Start of the bytes: valid until the view is dropped.
    #[must_use]
    #[inline]
    pub fn as_ptr(&self) -> *const u8 {
        self.memory.region.as_ptr().wrapping_add(self.offset as usize)
    }

    /// The bytes of the writer that [accompany](super::Port::push_with) the chunk.
    ///
    /// # Errors
    /// `ConnectionLost` if the writer has overwritten them, against the protocol.
    pub fn inline_data(&self) -> Result<Vec<u8>> {
        if self.memory.headers.is_none() {
            return Ok(Vec::new());
        }
        self.memory.read_inline(&self.header).ok_or_else(|| {
            let detail = "the writer changed a header after its notice";
            Error::new(ErrorKind::ConnectionLost, "read from ring", detail)
        })
    }

    /// Copies bytes out, from an offset of the chunk.
    ///
    /// # Errors
    /// `OutOfBounds`; `InvalidArgument` for device memory.
    #[inline]
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        if offset.checked_add(into.len()).is_none_or(|end| end > self.len()) {
            let detail = format!("{} bytes at {offset} exceed chunk of {}", into.len(), self.len());
            return Err(Error::new(ErrorKind::OutOfBounds, "read from ring", detail));
        }
        self.memory.region.read(self.offset as usize + offset, into)
    }
}

impl Drop for ChunkView {
    #[inline]
    fn drop(&mut self) {
        let (word, bit) = self.memory.released_bit(self.header.sequence);
        // After all uses of the bytes. Either the reader sees this bit before it sleeps, or it is
        // seen here to sleep.
        word.fetch_or(bit, Ordering::SeqCst);
        if self.memory.is_asleep.load(Ordering::SeqCst) {
            self.memory.waker.wake_best_effort();
        }
    }
}
