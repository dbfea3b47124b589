//! Copies by the copy service between memory of this process and memory that it has, but cannot map.
//!
//! A process of a topic has the descriptors of the topic's memory. Without the device file of its GPU
//! the driver maps none of it here; a copy service that sees the device copies to and from it.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fabric::MemoryRegion;
use gpu::{Block, Memory, Uuid};
use ipc::WaitStrategy;
use threads::lock;

use crate::admission::Admission;
use crate::agent::LocalTarget;
use crate::copy_requests::{CopyClient, ExportedPiece, PairRemote, ServicePair};
use crate::error::{Error, ErrorKind, Result};
use crate::path::{Exportability, MemoryType, Operation};
use crate::region::{Buffer, RegionDescriptor, RegionOwner, RegisteredRegion, Rights};

const COPY: &str = "copy by the copy service";
/// How often the service is looked for during a wait.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// The copies of a process by the copy service of a directory. It connects when the first pair is
/// opened, and again after the service was restarted.
pub struct ServiceCopies {
    local_target: LocalTarget,
    client: Mutex<CopyClient<u64>>,
    outcomes: Mutex<Outcomes>,
    last: AtomicU64,
}

/// Outcomes that no thread has taken yet.
#[derive(Default)]
struct Outcomes {
    known: HashMap<u64, Result<()>>,
    /// Copies that timed out, with the number of those of their pair.
    late: HashMap<u64, Arc<AtomicUsize>>,
}

impl fmt::Debug for ServiceCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceCopies").finish_non_exhaustive()
    }
}

/// Memory of this process, and exported memory that the service copies to and from.
#[derive(Debug)]
pub struct CopyPair {
    pair: Arc<ServicePair>,
    /// Copies that timed out, and may still write.
    late: Arc<AtomicUsize>,
}

/// Local memory that only the service knows.
#[derive(Debug)]
struct NoAgent;

impl RegionOwner for NoAgent {
    fn retire(&self, _region: u64, _memories: Vec<Option<MemoryRegion>>, _buffer: &Buffer) {}

    fn dropped(self: Arc<Self>, _region: &RegisteredRegion) {}
}

impl ServiceCopies {
    /// The copies of this process, under a label, by the service of a directory, whose user is
    /// trusted by this admission.
    ///
    /// # Errors
    /// [`Failed`](ErrorKind::Failed) without file descriptors or memory.
    pub fn new(directory: &Path, label: &str, admission: Admission) -> Result<Self> {
        let local_target = LocalTarget::new(label.to_owned(), admission)?;
        let identity = local_target.as_client_of_copy_service()?;
        Ok(Self {
            client: Mutex::new(CopyClient::new(directory, identity)),
            local_target,
            outcomes: Mutex::default(),
            last: AtomicU64::new(0),
        })
    }

    /// Opens a pair of memory of this process, which must be exportable, and an exported piece of
    /// memory on the device with this UUID.
    ///
    /// # Errors
    /// [`Failed`](ErrorKind::Failed) or [`Closed`](ErrorKind::Closed) if there is no service;
    /// [`Denied`](ErrorKind::Denied) if it is another user's; its refusal, otherwise.
    pub fn open_pair(
        &self,
        local: &Memory,
        device: Uuid,
        piece: OwnedFd,
        length: u64,
        timeout: Duration,
    ) -> Result<CopyPair> {
        let identity = self.local_target.identity;
        let number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let buffer = Buffer::from(local);
        let described =
            RegionDescriptor { number, rights: Rights::ALL, ..buffer.describe(identity)? };
        let exported = RegionDescriptor {
            memory_type: MemoryType::Device(Exportability::ByDescriptors),
            device: Some(device),
            length,
            offset: 0,
            pieces: 1,
            legacy: None,
            ..described.clone()
        };
        let owner = Arc::new(NoAgent);
        let local = Arc::new(RegisteredRegion::new(owner, buffer, described, Vec::new()));
        let remote = PairRemote::Exported(ExportedPiece::new(exported, piece));
        let pair = lock(&self.client).open_pair(&local, remote, ipc::deadline(timeout))?;
        Ok(CopyPair { pair, late: Arc::default() })
    }

    /// Copies a block between the two memories of a pair, and waits: a put from the local memory, a
    /// get into it.
    ///
    /// # Errors
    /// [`Closed`](ErrorKind::Closed) if the service has ended, and the next one did not start within
    /// two seconds; [`DeadlineExceeded`](ErrorKind::DeadlineExceeded): the copy may still write, and
    /// others of this pair fail until it is over.
    pub fn copy(
        &self,
        pair: &CopyPair,
        operation: Operation,
        block: Block,
        timeout: Duration,
    ) -> Result<()> {
        self.collect();
        if pair.late.load(Ordering::Acquire) > 0 {
            let detail = "an earlier copy timed out, and may still write";
            return Err(Error::new(COPY, ErrorKind::Failed, detail));
        }
        let copy = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        lock(&self.client).begin(copy, &pair.pair, operation, (&[block]).into(), None);
        let end = ipc::deadline(timeout);
        let mut strategy = WaitStrategy::default();
        loop {
            let until = end.min(ipc::deadline(CHECK_INTERVAL));
            let doorbell = &self.local_target.doorbell;
            if let Some(outcome) = doorbell.wait(&mut strategy, until, || self.outcome(copy)) {
                return outcome;
            }
            if Instant::now() >= end {
                let mut outcomes = lock(&self.outcomes);
                if let Some(outcome) = outcomes.known.remove(&copy) {
                    return outcome;
                }
                pair.late.fetch_add(1, Ordering::AcqRel);
                outcomes.late.insert(copy, Arc::clone(&pair.late));
                let detail = format!("{} bytes were not copied within {timeout:?}", block.length);
                return Err(Error::new(COPY, ErrorKind::DeadlineExceeded, detail));
            }
        }
    }

    /// The outcome of a copy, once. Collects those of other threads as well.
    fn outcome(&self, copy: u64) -> Option<Result<()>> {
        self.collect();
        lock(&self.outcomes).known.remove(&copy)
    }

    fn collect(&self) {
        let mut outcomes = lock(&self.outcomes);
        let Outcomes { known, late } = &mut *outcomes;
        lock(&self.client).progress(|copy, outcome| match late.remove(&copy) {
            Some(of_pair) => _ = of_pair.fetch_sub(1, Ordering::AcqRel),
            None => _ = known.insert(copy, outcome),
        });
    }
}
