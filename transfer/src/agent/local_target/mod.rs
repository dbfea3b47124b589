//! State shared by an agent's socket thread, its rails and its owner: identity, regions and local
//! initiators.

mod initiators;
mod local_server;
mod reclaim;
mod region_registry;
mod region_table;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use ipc::{Doorbell, Layout, MappedWords, PidFd, Segment, SegmentError};

use self::initiators::LocalInitiators;
use self::reclaim::Reclaim;
use self::region_registry::RegionRegistry;
use super::protocol::Introduction;
use crate::error::{Error, ErrorKind, Result};
use crate::lock;
use crate::rail::RailHandle;
use crate::region::{Buffer, RegisteredRegion};
use crate::share::random;
use crate::share_service::Admission;

pub(super) use initiators::{LocalInitiator, OutstandingCopies};
pub(super) use local_server::LocalServer;
pub(super) use region_table::ReadOnlyRegionTable;

const DOORBELL_LAYOUT: Layout = Layout::new("agent doorbell", 1);

/// State shared by the threads of an agent.
#[derive(Debug)]
pub(crate) struct LocalTarget {
    pub(crate) identity: [u8; 16],
    pub(crate) label: String,
    admission: Admission,
    pidfd: PidFd,
    doorbell_segment: Segment,
    pub(crate) doorbell: Doorbell<MappedWords>,
    is_over: AtomicBool,
    regions: RegionRegistry,
    initiators: LocalInitiators,
    /// Handles of the rails, once these are started.
    rail_handles: OnceLock<Vec<RailHandle>>,
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
            doorbell_segment,
            doorbell,
            is_over: AtomicBool::new(false),
            regions: RegionRegistry::create().map_err(|error| failed(&error))?,
            initiators: LocalInitiators::default(),
            rail_handles: OnceLock::new(),
            reclaim: Reclaim::default(),
        })
    }

    pub(super) fn introduction(&self) -> Introduction {
        Introduction { identity: self.identity, label: self.label.clone() }
    }

    pub(super) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// May agents of this user be connected to?
    pub(super) fn trusts(&self, user: u32) -> bool {
        user == 0 || self.admission.users.contains(&user)
    }

    /// What an initiator opens: region table and doorbell.
    pub(super) fn shared_files(
        &self,
    ) -> std::result::Result<(OwnedFd, BorrowedFd<'_>), SegmentError> {
        Ok((self.regions.table()?, self.doorbell_segment.as_fd()))
    }

    /// Maps the doorbell of another agent.
    pub(super) fn open_doorbell(file: OwnedFd) -> Result<Doorbell<MappedWords>> {
        let operation = "open a local session";
        let wrong =
            |why: &dyn ToString| Error::new(operation, ErrorKind::Malformed, why.to_string());
        let segment = Segment::open(file, DOORBELL_LAYOUT).map_err(|error| wrong(&error))?;
        Doorbell::new(segment.words()).ok_or_else(|| wrong(&"the doorbell segment is too short"))
    }

    pub(super) fn set_rail_handles(&self, handles: Vec<RailHandle>) {
        let _ = self.rail_handles.set(handles);
    }

    pub(crate) fn rail_handles(&self) -> &[RailHandle] {
        self.rail_handles.get().map_or(&[], Vec::as_slice)
    }

    /// Adds a region to the table under a new number and ticket.
    pub(crate) fn add_region(
        &self,
        make: impl FnOnce(u64, u64) -> Arc<RegisteredRegion>,
    ) -> Result<Arc<RegisteredRegion>> {
        self.regions.add(make)
    }

    /// A number for a local-only region, which is in no table.
    pub(crate) fn next_region_number(&self) -> u64 {
        self.regions.next_number()
    }

    /// No new operation uses the region from now on.
    pub(crate) fn withdraw(&self, number: u64) {
        self.regions.remove(number);
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// The agent ends: withdraws all regions.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.regions.close();
    }

    /// Frees the memory of a withdrawn region: now, or when no other process copies to or from it
    /// any more. Does not wait.
    pub(crate) fn release(self: &Arc<Self>, number: u64, buffer: Buffer) {
        let mut copies = self.copies_of_other_processes(Some(number));
        if copies.are_over() {
            self.initiators.forget_region(number);
        } else {
            self.reclaim.retain_until_done(copies, number, buffer, self);
        }
    }

    /// The copies in flight of all initiators that opened this region, or any.
    pub(super) fn copies(&self, region: Option<u64>) -> OutstandingCopies {
        self.initiators.copies(region, true)
    }

    /// The copies of other processes. Agents of this process keep the memory of their copies alive
    /// themselves.
    pub(super) fn copies_of_other_processes(&self, region: Option<u64>) -> OutstandingCopies {
        self.initiators.copies(region, false)
    }

    /// The region with this number, if the ticket is right.
    pub(crate) fn region(&self, number: u64, ticket: u64) -> Option<Arc<RegisteredRegion>> {
        self.regions.find(number, ticket)
    }

    pub(super) fn add_initiator(&self, initiator: Arc<LocalInitiator>) {
        self.initiators.add(initiator);
        self.notify_change();
    }

    /// The connection of an initiator has ended.
    pub(super) fn initiator_left(&self, initiator: &LocalInitiator) {
        initiator.leave();
        self.notify_change();
    }

    /// The initiators whose departure was not reported, if any connected or disconnected since
    /// `seen`.
    pub(super) fn changed_initiators(&self, seen: &mut u64) -> Option<Vec<Arc<LocalInitiator>>> {
        self.initiators.changed(seen)
    }

    /// Removes disconnected initiators that cannot access any region.
    pub(super) fn remove_departed(&self) {
        self.initiators.remove_departed();
    }

    fn notify_change(&self) {
        self.initiators.count_change();
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
    agents.find(|local_target| local_target.identity == identity && !local_target.is_over())
}
