//! A pool of shareable memory for the allocators of frameworks, in the order of streams.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use threads::lock;

use crate::block_allocator::{BlockAllocator, rounded};
use crate::device::Device;
use crate::device_name::DeviceName;
use crate::error::{Error, ErrorKind, Result, proves_idle};
use crate::event::Point;
use crate::memory::Memory;

const ALLOCATE: &str = "allocate from pool";
/// The pool grows by segments of this length, or by one for a longer block alone.
const SEGMENT_LENGTH: u64 = 32 << 20;
/// Freed blocks of the stream that are considered for a new one.
const CONSIDERED: usize = 64;
/// How long an allocation waits for the work on freed blocks, if there is no other memory.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// Memory in use, in bytes, and the events so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolStatistics {
    /// Memory of the device that the pool has.
    pub reserved: u64,
    /// Blocks in use.
    pub allocated: u64,
    /// Freed blocks whose stream may still use them.
    pub waiting: u64,
    /// The highest value of `allocated`.
    pub peak: u64,
    /// Allocations so far.
    pub allocations: u64,
    /// Segments that the pool allocated from the device so far.
    pub grown: u64,
}

/// A freed block, until the work that was in its stream before is done.
#[derive(Debug)]
struct Waiting {
    address: u64,
    length: u64,
    stream: u64,
    /// None if it is not known when the work is done: then only the same stream uses it again.
    point: Option<Point>,
}

#[derive(Debug)]
struct State {
    blocks: BlockAllocator,
    segments: BTreeMap<u64, Memory>,
    /// Unused segments and their lengths.
    idle: BTreeMap<u64, u64>,
    waiting: VecDeque<Waiting>,
    /// The addresses of `waiting`.
    freed: HashSet<u64>,
    statistics: PoolStatistics,
}

/// Memory of a device for the allocator of a framework: every block can be exported to other
/// processes, and all devices that the device reaches may access it.
///
/// Blocks are freed in the order of a stream: another stream gets one when the work before is done,
/// the same stream at once. Segments that are not used at all are given back to the device, but for
/// some.
///
/// ```
/// use gpu::{Device, Pool};
/// let device = Device::open("emulated:0".parse()?)?;
/// let pool = Pool::new(&device);
/// // SAFETY: 0 is the default stream.
/// let address = unsafe { pool.allocate(1 << 20, 0) }?;
/// // … work on the stream uses it …
/// unsafe { pool.free(address, 0) };
/// // SAFETY: as above.
/// assert_eq!(unsafe { pool.allocate(1 << 20, 0) }?, address);
/// # Ok::<(), gpu::Error>(())
/// ```
#[derive(Debug)]
pub struct Pool {
    device: Device,
    peers: Vec<DeviceName>,
    /// Unused segments that are kept, in bytes.
    max_idle: u64,
    state: Mutex<State>,
}

impl Pool {
    /// An empty pool.
    #[must_use]
    pub fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            peers: device.peers(),
            max_idle: 8 * SEGMENT_LENGTH,
            state: Mutex::new(State {
                blocks: BlockAllocator::new(),
                segments: BTreeMap::new(),
                idle: BTreeMap::new(),
                waiting: VecDeque::new(),
                freed: HashSet::new(),
                statistics: PoolStatistics::default(),
            }),
        }
    }

    /// The device of its memory.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Allocates a block, for use in the order of this stream of a framework: its handle, as for
    /// [`adopt_stream`](Device::adopt_stream). The address is a multiple of 512.
    ///
    /// # Safety
    /// `stream` is a stream of the device now.
    ///
    /// # Errors
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) or [`OverBudget`](ErrorKind::OverBudget), also after
    /// a wait for the work on freed blocks.
    pub unsafe fn allocate(&self, length: u64, stream: u64) -> Result<u64> {
        // SAFETY: as the caller promises.
        self.allocate_after(length, stream, &|point| unsafe {
            self.device.delay_stream(stream, point).ok()
        })
    }

    /// Frees a block, in the order of this stream. During a graph capture the end of its work is not
    /// known: then only this stream uses the block again. False if it is no block of this pool, or
    /// was freed before.
    ///
    /// # Safety
    /// As for [`allocate`](Self::allocate).
    pub unsafe fn free(&self, address: u64, stream: u64) -> bool {
        // SAFETY: as the caller promises. A stream that is being captured is refused.
        let adopted = unsafe { self.device.adopt_stream(stream) };
        self.free_after(address, stream, adopted.and_then(|stream| stream.point()).ok())
    }

    /// `follow` lets the stream wait for a point, and returns None if it cannot: a block that it freed
    /// itself may be used again at once. Without it a handle that a new stream has got from a
    /// destroyed one would be taken for the same stream.
    fn allocate_after(
        &self,
        length: u64,
        stream: u64,
        follow: &dyn Fn(&Point) -> Option<()>,
    ) -> Result<u64> {
        let Some(length) = rounded(length) else {
            let detail = format!("{length} bytes");
            return Err(Error::new(ALLOCATE, ErrorKind::InvalidArgument, detail));
        };
        let mut state = lock(&self.state);
        let found = state.take_of_stream(length, stream, follow).or_else(|| {
            self.collect(&mut state);
            state.take(length)
        });
        let address = match found {
            Some(address) => address,
            None => self.grow(&mut state, length)?,
        };
        let length = state.blocks.length(address).unwrap_or(length);
        state.statistics.allocations += 1;
        state.statistics.allocated += length;
        state.statistics.peak = state.statistics.peak.max(state.statistics.allocated);
        Ok(address)
    }

    /// `point` is the end of the work that was in the stream; None if that is not known.
    fn free_after(&self, address: u64, stream: u64, point: Option<Point>) -> bool {
        let mut state = lock(&self.state);
        let Some(length) = state.blocks.length(address) else { return false };
        if !state.freed.insert(address) {
            return false;
        }
        state.statistics.allocated -= length;
        state.statistics.waiting += length;
        state.waiting.push_back(Waiting { address, length, stream, point });
        self.collect(&mut state);
        true
    }

    /// Gives all unused segments back to the device.
    pub fn trim(&self) {
        let mut state = lock(&self.state);
        self.collect(&mut state);
        state.release_idle(0);
    }

    /// Memory in use, and the events so far.
    #[must_use]
    pub fn statistics(&self) -> PoolStatistics {
        lock(&self.state).statistics
    }

    /// The memory of the device that contains this address; None if it is not of the pool. It is in
    /// one piece, and exists as long as blocks of it are in use.
    #[must_use]
    pub fn segment(&self, address: u64) -> Option<Memory> {
        let state = lock(&self.state);
        let (start, memory) = state.segments.range(..=address).next_back()?;
        (address - start < memory.length()).then(|| memory.clone())
    }

    /// Frees blocks whose work is done.
    fn collect(&self, state: &mut State) {
        // Work of one stream is done in its order: after one that is not done, no later one is.
        let mut busy: Vec<u64> = Vec::new();
        for _ in 0..state.waiting.len() {
            let Some(block) = state.waiting.pop_front() else { break };
            let is_done = !busy.contains(&block.stream)
                && block.point.as_ref().is_some_and(|point| {
                    point.is_done().unwrap_or_else(|error| proves_idle(&error))
                });
            if is_done {
                state.free_now(&block);
            } else {
                if block.point.is_some() {
                    busy.push(block.stream);
                }
                state.waiting.push_back(block);
            }
        }
        state.release_idle(self.max_idle);
    }

    fn grow(&self, state: &mut State, length: u64) -> Result<u64> {
        let end = Instant::now() + LONGEST_WAIT;
        loop {
            let grown = self.add_segment(state, length.max(SEGMENT_LENGTH));
            let grown = match grown {
                Err(error) if is_exhausted(&error) && length < SEGMENT_LENGTH => {
                    self.add_segment(state, length)
                }
                grown => grown,
            };
            let error = match grown {
                Err(error) if is_exhausted(&error) => error,
                grown => {
                    grown?;
                    let missing =
                        || Error::new(ALLOCATE, ErrorKind::Other, "no block in the segment");
                    return state.take(length).ok_or_else(missing);
                }
            };
            if state.release_idle(0) > 0 {
                continue;
            }
            let left = end.saturating_duration_since(Instant::now());
            let oldest = state.waiting.iter().find_map(|block| block.point.as_ref());
            if oldest.is_none_or(|point| point.wait(left).is_err()) {
                return Err(error);
            }
            self.collect(state);
            if let Some(address) = state.take(length) {
                return Ok(address);
            }
        }
    }

    fn add_segment(&self, state: &mut State, length: u64) -> Result<()> {
        let memory = self.device.allocate_shared(length, &self.peers)?;
        let (address, length) = (memory.address(), memory.length());
        // Whole granules: the rest behind the requested length is used, too.
        state.blocks.add(address, length);
        state.idle.insert(address, length);
        state.segments.insert(address, memory);
        state.statistics.reserved += length;
        state.statistics.grown += 1;
        Ok(())
    }
}

fn is_exhausted(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::OutOfMemory | ErrorKind::OverBudget)
}

impl State {
    fn take(&mut self, length: u64) -> Option<u64> {
        let address = self.blocks.allocate(length)?;
        // The first block of an unused segment starts with it.
        self.idle.remove(&address);
        Some(address)
    }

    /// A block that this stream has freed, of about this length: its work comes before any later.
    fn take_of_stream(
        &mut self,
        length: u64,
        stream: u64,
        follow: &dyn Fn(&Point) -> Option<()>,
    ) -> Option<u64> {
        let fits = |block: &Waiting| {
            block.stream == stream
                && block.length >= length
                && block.length - length <= block.length / 8
        };
        let newest = self.waiting.iter().enumerate().rev().take(CONSIDERED);
        let (index, _) = newest.into_iter().find(|(_, block)| fits(block))?;
        if let Some(point) = &self.waiting.get(index)?.point {
            follow(point)?;
        }
        let block = self.waiting.remove(index)?;
        self.freed.remove(&block.address);
        self.statistics.waiting -= block.length;
        Some(block.address)
    }

    fn free_now(&mut self, block: &Waiting) {
        self.freed.remove(&block.address);
        self.statistics.waiting -= block.length;
        if let Some((start, length)) = self.blocks.free(block.address) {
            self.idle.insert(start, length);
        }
    }

    /// Gives unused segments back, the shortest first, until at most this many bytes of them are
    /// left. Returns how many were given back.
    fn release_idle(&mut self, most: u64) -> usize {
        let mut left: u64 = self.idle.values().sum();
        let mut released = 0;
        while left > most
            && let Some((start, length)) =
                self.idle.iter().map(|(start, length)| (*start, *length)).min_by_key(|it| it.1)
        {
            self.idle.remove(&start);
            if self.blocks.remove(start) {
                self.segments.remove(&start);
                self.statistics.reserved -= length;
                released += 1;
            }
            left -= length;
        }
        released
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEBI: u64 = 1 << 20;

    impl Pool {
        /// For streams that are numbers only.
        fn take(&self, length: u64, stream: u64) -> Result<u64> {
            self.allocate_after(length, stream, &|_| Some(()))
        }
    }

    fn device() -> Device {
        Device::open("emulated:0".parse().unwrap()).unwrap()
    }

    #[test]
    fn blocks_return_to_their_stream_at_once_and_to_others_later() {
        let device = device();
        let pool = Pool { max_idle: 0, ..Pool::new(&device) };
        let stream = device.stream().unwrap();
        let gate = device.allocate(4).unwrap();
        stream.fill(&gate.whole(), 0).unwrap();
        stream.synchronize(LONGEST_WAIT).unwrap();
        let block = pool.take(MEBI, 1).unwrap();
        // The work of the stream is not done.
        stream.wait_for_word(&gate.whole(), 1).unwrap();
        assert!(pool.free_after(block, 1, Some(stream.point().unwrap())));
        assert!(!pool.free_after(block + 1, 1, None) && !pool.free_after(0, 1, None));
        assert!(!pool.free_after(block, 1, None), "twice");
        let other = pool.take(MEBI, 2).unwrap();
        assert_ne!(other, block);
        assert_eq!(pool.take(MEBI, 1).unwrap(), block);
        let expected = PoolStatistics {
            reserved: SEGMENT_LENGTH,
            allocated: 2 * MEBI,
            waiting: 0,
            peak: 2 * MEBI,
            allocations: 3,
            grown: 1,
        };
        assert_eq!(pool.statistics(), expected);
        // Freed at an unknown time: never for others.
        assert!(pool.free_after(block, 1, None) && pool.free_after(other, 2, None));
        let opener = device.stream().unwrap();
        opener.write_word(&gate.whole(), 1).unwrap();
        stream.synchronize(LONGEST_WAIT).unwrap();
        assert!(![block, other].contains(&pool.take(MEBI, 3).unwrap()));
        assert_eq!(pool.take(MEBI - 4096, 2).unwrap(), other);
    }

    #[test]
    fn unused_segments_are_given_back() {
        let device = device();
        let pool = Pool { max_idle: SEGMENT_LENGTH, ..Pool::new(&device) };
        let stream = device.stream().unwrap();
        let point = || Some(stream.point().unwrap());
        let large = pool.take(3 * SEGMENT_LENGTH, 1).unwrap();
        let small: Vec<_> = (0..10).map(|_| pool.take(MEBI, 1).unwrap()).collect();
        assert_eq!(pool.segment(large + 5).unwrap().address(), large);
        assert!(pool.segment(small[9]).is_some() && pool.segment(0).is_none());
        assert_eq!(pool.statistics().reserved, 4 * SEGMENT_LENGTH);
        pool.free_after(large, 1, point());
        stream.synchronize(LONGEST_WAIT).unwrap();
        small.iter().for_each(|block| assert!(pool.free_after(*block, 1, point())));
        stream.synchronize(LONGEST_WAIT).unwrap();
        let last = pool.take(MEBI, 9).unwrap();
        assert!(pool.statistics().reserved <= 2 * SEGMENT_LENGTH, "{:?}", pool.statistics());
        pool.free_after(last, 9, point());
        stream.synchronize(LONGEST_WAIT).unwrap();
        pool.trim();
        let statistics = pool.statistics();
        assert_eq!((statistics.reserved, statistics.allocated, statistics.waiting), (0, 0, 0));
    }

    #[test]
    fn blocks_are_exported_with_their_segment_only() {
        let device = device();
        let pool = Pool::new(&device);
        let blocks: Vec<_> = (0..3).map(|_| pool.take(SEGMENT_LENGTH, 1).unwrap()).collect();
        // SAFETY: memory of the pool, which outlives it.
        let adopted = unsafe { device.adopt(blocks[1] + 4096, MEBI, ()) }.unwrap();
        let pieces = adopted.pieces().unwrap();
        assert_eq!((pieces.offset, pieces.lengths), (4096, vec![SEGMENT_LENGTH]));
    }

    #[test]
    fn pool_ends_with_an_error_at_its_limit() {
        let device = Device::open("emulated:1".parse().unwrap()).unwrap();
        let (before, used) = device.budget();
        device.set_budget(used + 2 * SEGMENT_LENGTH);
        let pool = Pool::new(&device);
        let stream = device.stream().unwrap();
        let first = pool.take(SEGMENT_LENGTH, 1).unwrap();
        let second = pool.take(SEGMENT_LENGTH, 1).unwrap();
        assert_eq!(pool.take(MEBI, 1).unwrap_err().kind(), ErrorKind::OverBudget);
        // Freed blocks are waited for.
        pool.free_after(first, 1, Some(stream.point().unwrap()));
        pool.free_after(second, 1, Some(stream.point().unwrap()));
        let whole = pool.take(2 * SEGMENT_LENGTH, 2);
        device.set_budget(before);
        assert!(whole.is_ok(), "{whole:?}");
    }
}
