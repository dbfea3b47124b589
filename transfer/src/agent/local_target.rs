//! State shared by an agent's socket thread and its owner: identity, regions and local initiators.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use ipc::{Doorbell, Layout, MappedWords, PidFd, Segment};

use super::protocol::Introduction;
use super::reclaim::{OutstandingCopies, Reclaim};
use super::region_table::RegionTable;
use super::session_segment::TargetSegment;
use crate::admission::Admission;
use crate::error::{Error, ErrorKind, Result};
use crate::lock;
use crate::rail::RailHandle;
use crate::region::{Buffer, RegisteredRegion};
use crate::share::random;

const DOORBELL_LAYOUT: Layout = Layout::new("agent doorbell", 1);
/// How long dropping an agent waits for copies of other processes.
pub(super) const SETTLE_TIMEOUT: Duration = Duration::from_secs(1);

/// An initiator of this machine that is connected to this agent.
#[derive(Debug)]
pub(super) struct LocalInitiator {
    pub(crate) identity: [u8; 16],
    pub(crate) label: String,
    pub(super) pidfd: PidFd,
    /// It disconnected or died; its pending notices can still be read.
    pub(super) has_left: AtomicBool,
    /// Its departure was reported as an event.
    pub(super) departure_reported: AtomicBool,
    pub(super) local_session: Mutex<TargetSegment>,
    /// The regions it opened whose memory is not freed yet: numbers and lengths.
    opened: Mutex<HashMap<u64, u64>>,
    /// It belongs to this process, and itself keeps the memory of its copies alive.
    pub(super) is_in_process: bool,
}

impl LocalInitiator {
    pub(super) fn new(
        (identity, label): ([u8; 16], String),
        pidfd: PidFd,
        local_session: TargetSegment,
        is_in_process: bool,
    ) -> Self {
        let (has_left, departure_reported) = (AtomicBool::new(false), AtomicBool::new(false));
        let (local_session, opened) = (Mutex::new(local_session), Mutex::default());
        Self {
            identity,
            label,
            pidfd,
            has_left,
            departure_reported,
            local_session,
            opened,
            is_in_process,
        }
    }

    /// Records that it opens a region. Called before it receives the export.
    pub(super) fn record_opened(&self, region: &RegisteredRegion) {
        lock(&self.opened).insert(region.descriptor.number, region.descriptor.length);
    }

    /// Has it opened this region, or any?
    pub(super) fn has_opened(&self, region: Option<u64>) -> bool {
        let opened = lock(&self.opened);
        region.map_or(!opened.is_empty(), |number| opened.contains_key(&number))
    }

    /// Bytes of all regions that it opened.
    pub(super) fn bytes_opened(&self) -> u64 {
        lock(&self.opened).values().sum()
    }

    /// The number of copies that it has started.
    pub(super) fn begun(&self) -> u64 {
        lock(&self.local_session).begun()
    }

    /// Have all copies completed that were started when `begun` was read?
    pub(super) fn is_settled(&self, begun: u64) -> bool {
        lock(&self.local_session).is_settled(begun) || self.pidfd.is_over()
    }

    /// Can it access a region, now or later? A lost connection does not stop its copies with open
    /// regions; only a clean close or the end of its process does.
    fn may_copy(&self) -> bool {
        let local_session = lock(&self.local_session);
        let has_finished =
            local_session.left_cleanly() && local_session.is_settled(local_session.begun());
        drop(local_session);
        self.has_opened(None) && !has_finished && !self.pidfd.is_over()
    }
}

#[derive(Debug, Default)]
struct Regions {
    last: u64,
    all: HashMap<u64, Weak<RegisteredRegion>>,
}

/// State shared by the two threads of an agent.
#[derive(Debug)]
pub(crate) struct LocalTarget {
    pub(crate) identity: [u8; 16],
    pub(crate) label: String,
    pub(super) admission: Admission,
    pub(super) pidfd: PidFd,
    pub(super) region_table: RegionTable,
    pub(super) doorbell_segment: Segment,
    pub(crate) doorbell: Doorbell<MappedWords>,
    pub(super) is_over: AtomicBool,
    regions: Mutex<Regions>,
    pub(super) local_initiators: Mutex<Vec<Arc<LocalInitiator>>>,
    /// Incremented when initiators connect or disconnect.
    pub(super) changes: AtomicU64,
    /// Handles of the rails, once these are started.
    pub(super) rail_handles: OnceLock<Vec<RailHandle>>,
    reclaim: Reclaim,
}

impl LocalTarget {
    pub(crate) fn new(label: String, admission: Admission) -> Result<Self> {
        let operation = "start an agent";
        let failed = |why: &dyn ToString| Error::new(operation, ErrorKind::Failed, why.to_string());
        let identity = random(operation)?;
        let doorbell_segment =
            Segment::create(DOORBELL_LAYOUT, Doorbell::<MappedWords>::WORDS * size_of::<u64>())
                .map_err(|error| failed(&error))?;
        doorbell_segment.mark_ready();
        let doorbell = Doorbell::new(doorbell_segment.words())
            .ok_or_else(|| failed(&"the doorbell segment is too short"))?;
        Ok(Self {
            identity,
            label,
            admission,
            pidfd: PidFd::of_this_process().map_err(|error| failed(&error))?,
            region_table: RegionTable::create().map_err(|error| failed(&error))?,
            doorbell_segment,
            doorbell,
            is_over: AtomicBool::new(false),
            regions: Mutex::default(),
            local_initiators: Mutex::default(),
            changes: AtomicU64::new(0),
            rail_handles: OnceLock::new(),
            reclaim: Reclaim::default(),
        })
    }

    pub(super) fn introduction(&self) -> Introduction {
        Introduction { identity: self.identity, label: self.label.clone() }
    }

    /// Maps the doorbell of another agent.
    pub(super) fn open_doorbell(file: std::os::fd::OwnedFd) -> Result<Doorbell<MappedWords>> {
        let operation = "open a local session";
        let wrong =
            |why: &dyn ToString| Error::new(operation, ErrorKind::Malformed, why.to_string());
        let segment = Segment::open(file, DOORBELL_LAYOUT).map_err(|error| wrong(&error))?;
        Doorbell::new(segment.words()).ok_or_else(|| wrong(&"the doorbell segment is too short"))
    }

    pub(crate) fn rail_handles(&self) -> &[RailHandle] {
        self.rail_handles.get().map_or(&[], Vec::as_slice)
    }

    /// Adds a region to the table under a new number and ticket.
    pub(crate) fn add_region(
        &self,
        make: impl FnOnce(u64, u64) -> Arc<RegisteredRegion>,
    ) -> Result<Arc<RegisteredRegion>> {
        let operation = "register a region";
        let ticket: [u8; 16] = random(operation)?;
        let mut regions = lock(&self.regions);
        let Some(number) = self.region_table.insert_after(regions.last) else {
            let detail = "the region table is full";
            return Err(Error::new(operation, ErrorKind::TooMany, detail));
        };
        regions.last = number;
        let ticket = u64::from_le_bytes(ticket[..8].try_into().unwrap_or_default());
        let region = make(number, ticket);
        regions.all.insert(number, Arc::downgrade(&region));
        Ok(region)
    }

    /// A number for a local-only region, which is in no table.
    pub(crate) fn next_region_number(&self) -> u64 {
        let mut regions = lock(&self.regions);
        regions.last += 1;
        regions.last
    }

    /// No new operation uses the region from now on.
    pub(crate) fn withdraw(&self, number: u64) {
        self.region_table.remove(number);
        lock(&self.regions).all.remove(&number);
    }

    /// The agent ends: withdraws all regions.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.region_table.close();
        let all = std::mem::take(&mut lock(&self.regions).all);
        all.into_keys().for_each(|number| self.region_table.remove(number));
    }

    /// Frees the memory of a withdrawn region: now, or when no other process copies to or from it
    /// any more. Does not wait.
    pub(crate) fn release(self: &Arc<Self>, number: u64, buffer: Buffer) {
        let mut copies = OutstandingCopies::of_other_processes(self, Some(number));
        if copies.are_over() {
            self.forget_region(number);
        } else {
            self.reclaim.retain_until_done(copies, number, buffer, self);
        }
    }

    /// Its memory is freed, so no initiator can use it any more.
    pub(super) fn forget_region(&self, number: u64) {
        for initiator in lock(&self.local_initiators).iter() {
            lock(&initiator.opened).remove(&number);
        }
    }

    /// Removes disconnected initiators that cannot access any region.
    pub(super) fn remove_departed(&self) {
        let departure_reported =
            |initiator: &LocalInitiator| initiator.departure_reported.load(Ordering::Relaxed);
        lock(&self.local_initiators)
            .retain(|initiator| !departure_reported(initiator) || initiator.may_copy());
    }

    pub(super) fn reclaim(&self) -> &Reclaim {
        &self.reclaim
    }

    /// The region with this number, if the ticket is right.
    pub(crate) fn region(&self, number: u64, ticket: u64) -> Option<Arc<RegisteredRegion>> {
        let found = lock(&self.regions).all.get(&number)?.upgrade()?;
        (self.region_table.contains(number) && found.descriptor.ticket == ticket).then_some(found)
    }

    pub(super) fn notify_change(&self) {
        self.changes.fetch_add(1, Ordering::Release);
        self.doorbell.ring();
    }
}

/// Agents of this process, which need no socket among each other.
static IN_PROCESS_AGENTS: Mutex<Vec<Weak<LocalTarget>>> = Mutex::new(Vec::new());

pub(super) fn add_to_process_list(local_target: &Arc<LocalTarget>) {
    let mut in_process = lock(&IN_PROCESS_AGENTS);
    in_process.retain(|other| other.strong_count() > 0);
    in_process.push(Arc::downgrade(local_target));
}

/// The agent with this identity, if it belongs to this process.
pub(super) fn find_in_process(identity: [u8; 16]) -> Option<Arc<LocalTarget>> {
    let in_process = lock(&IN_PROCESS_AGENTS);
    let mut agents = in_process.iter().filter_map(Weak::upgrade);
    agents.find(|local_target| {
        local_target.identity == identity && !local_target.is_over.load(Ordering::Acquire)
    })
}
