//! Threads of a worker that copy large pieces of messages from the ring into memory that the CPU
//! reaches.
//!
//! One thread copies only a fraction of the throughput of several lanes, and does nothing else
//! meanwhile. So a worker with several lanes has copy threads. They work as a device's copy engines
//! do for device memory: a copy is begun, and polled later. The threads start with the first piece,
//! and sleep while there is none.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, bounded};
use fabric::RegionSlice;
use gpu::Slice;

use crate::error::Result;
use crate::replication::transport::host_memory;

/// Shorter pieces are not worth waking a thread.
pub(super) const MIN_COPY_LENGTH: usize = 64 << 10;
const MAX_COPY_JOBS: usize = 64;
/// Limit of threads: they copy as much as eight lanes deliver.
const MAX_THREADS: usize = 4;

/// A piece to copy. It keeps both memories alive; the submitter ensures that the target is not
/// written.
struct CopyJob {
    from: RegionSlice,
    to: Slice,
    at: u64,
    number: u64,
}

/// For each slot, the number of the last piece copied there, plus one.
type CompletedJobs = Arc<[AtomicU64; MAX_COPY_JOBS]>;

fn slot_of(number: u64) -> usize {
    number as usize % MAX_COPY_JOBS
}

#[derive(Debug)]
pub(super) struct CopyThreads {
    thread_count: usize,
    jobs: Option<Sender<CopyJob>>,
    threads: Vec<JoinHandle<()>>,
    done: CompletedJobs,
    next: u64,
}

impl CopyThreads {
    /// For a worker with this number of lanes: none for one lane.
    pub(super) fn of(lanes: usize) -> Self {
        Self {
            thread_count: (lanes / 2).min(MAX_THREADS),
            jobs: None,
            threads: Vec::new(),
            // As if one piece had been copied in each slot.
            done: Arc::new(std::array::from_fn(|slot| AtomicU64::new(slot as u64 + 1))),
            next: MAX_COPY_JOBS as u64,
        }
    }

    /// Begins to copy a part of a chunk, which has to be kept until [`is_done`](Self::is_done).
    /// None if the caller has to copy: there are no threads, their queue is full, or the chunk lies
    /// in device memory.
    pub(super) fn submit(
        &mut self,
        part: impl FnOnce() -> Result<Option<RegionSlice>>,
        to: &Slice,
        at: u64,
    ) -> Result<Option<u64>> {
        // The previous piece of the next slot may not be copied.
        if self.thread_count == 0 || !self.is_done(self.next - MAX_COPY_JOBS as u64) {
            return Ok(None);
        }
        let Some(from) = part()? else { return Ok(None) };
        host_memory::check_range(from.len(), to, at)?;
        if self.jobs.is_none() {
            self.start();
        }
        let Some(jobs) = &self.jobs else { return Ok(None) };
        let number = self.next;
        // The queue has as many entries as there are slots.
        if jobs.try_send(CopyJob { from, to: to.clone(), at, number }).is_err() {
            return Ok(None);
        }
        self.next += 1;
        Ok(Some(number))
    }

    /// Returns true if a begun piece is copied.
    pub(super) fn is_done(&self, number: u64) -> bool {
        // A later piece takes the slot only when the earlier one is copied.
        self.done[slot_of(number)].load(Ordering::Acquire) > number
    }

    fn start(&mut self) {
        let (sender, receiver) = bounded(MAX_COPY_JOBS);
        for _ in 0..self.thread_count {
            let (jobs, done) = (receiver.clone(), Arc::clone(&self.done));
            match threads::spawn("fabricast-copy", move || run_jobs(&jobs, &done)) {
                Ok(thread) => self.threads.push(thread),
                Err(error) => {
                    tracing::warn!(
                        %error,
                        "starting a copy thread failed; the worker copies large messages"
                    );
                    break;
                }
            }
        }
        self.thread_count = self.threads.len();
        self.jobs = (self.thread_count > 0).then_some(sender);
    }
}

fn run_jobs(jobs: &Receiver<CopyJob>, done: &CompletedJobs) {
    while let Ok(CopyJob { from, to, at, number }) = jobs.recv() {
        if let Err(error) = host_memory::unload_part(&from, &to, at) {
            // The range was checked before; the piece must not count as copied.
            tracing::error!(%error, "copying a piece of a message failed");
            continue;
        }
        // Both memories are released before the piece counts as copied.
        drop((from, to));
        done[slot_of(number)].store(number + 1, Ordering::Release);
    }
}

impl Drop for CopyThreads {
    /// Copies all pending pieces first.
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use fabric::{Access, Domain, EndpointKind, HostMemory, MemoryRegion, Query};
    use gpu::{Device, Memory};

    use super::*;

    const LENGTH: usize = 1 << 20;

    fn region() -> MemoryRegion {
        let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
        let domain = Domain::open(&offer).unwrap();
        domain.register(HostMemory::zeroed(LENGTH).unwrap(), Access::ALL).unwrap()
    }

    fn filled() -> (MemoryRegion, Vec<u8>) {
        let bytes: Vec<u8> = (0..LENGTH).map(|at| (at * 7 + at / 251) as u8).collect();
        let region = region();
        region.write(0, &bytes).unwrap();
        (region, bytes)
    }

    fn memory() -> Memory {
        Device::open("emulated:0".parse().unwrap()).unwrap().allocate(LENGTH as u64).unwrap()
    }

    fn bytes_of(memory: &Memory) -> Vec<u8> {
        let (region, mut bytes) = (region(), vec![0; LENGTH]);
        host_memory::gather(&memory.whole(), LENGTH, &region, 0).unwrap();
        region.read(0, &mut bytes).unwrap();
        bytes
    }

    fn wait(copy_threads: &CopyThreads, number: u64) {
        let end = Instant::now() + Duration::from_secs(20);
        while !copy_threads.is_done(number) {
            assert!(Instant::now() < end, "{number}");
            std::thread::yield_now();
        }
    }

    /// More pieces than slots.
    #[test]
    fn pieces_are_copied_to_their_offsets() {
        let ((from, expected), to) = (filled(), memory());
        let mut copy_threads = CopyThreads::of(8);
        let (piece, mut begun, mut refused) = (4096, Vec::new(), 0);
        for at in (0..LENGTH).step_by(piece) {
            let part = || Ok(Some(from.slice(at..at + piece).unwrap()));
            let number = loop {
                match copy_threads.submit(part, &to.whole(), at as u64).unwrap() {
                    Some(number) => break number,
                    None => refused += 1,
                }
                std::thread::yield_now();
            };
            begun.push(number);
        }
        begun.iter().for_each(|number| wait(&copy_threads, *number));
        assert_eq!(begun.len(), LENGTH / piece);
        assert!(bytes_of(&to) == expected, "{refused} times the queue was full");
        assert!(
            !copy_threads.is_done(begun[begun.len() - 1] + 1),
            "a piece that was not begun is not done"
        );
    }

    #[test]
    fn pending_pieces_are_copied_before_drop() {
        let ((from, expected), to) = (filled(), memory());
        let mut copy_threads = CopyThreads::of(2);
        let mut begun = 0;
        for at in (0..LENGTH).step_by(MIN_COPY_LENGTH) {
            let part = || Ok(Some(from.slice(at..at + MIN_COPY_LENGTH).unwrap()));
            begun +=
                usize::from(copy_threads.submit(part, &to.whole(), at as u64).unwrap().is_some());
        }
        drop(copy_threads);
        assert_eq!(begun, LENGTH / MIN_COPY_LENGTH, "each piece has a slot");
        assert!(bytes_of(&to) == expected);
    }

    #[test]
    fn one_lane_has_no_threads_and_no_copy_exceeds_the_target() {
        let (from, to) = (region(), memory());
        let part = || Ok(Some(from.slice(0..MIN_COPY_LENGTH).unwrap()));
        assert_eq!(CopyThreads::of(1).submit(part, &to.whole(), 0).unwrap(), None);
        let mut copy_threads = CopyThreads::of(2);
        assert!(copy_threads.threads.is_empty(), "threads start with the first piece");
        for at in [LENGTH as u64 - MIN_COPY_LENGTH as u64 + 1, u64::MAX] {
            let error = copy_threads.submit(part, &to.whole(), at).unwrap_err();
            assert_eq!(error.kind(), crate::error::ErrorKind::InvalidArgument);
        }
        assert!(copy_threads.threads.is_empty());
    }
}
