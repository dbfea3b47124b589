//! State shared by an agent's socket thread, its rails and its owner: identity, regions and local
//! initiators.

mod initiators;
mod local_server;
mod reclaim;
mod region_table;
mod staged_regions;

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use ipc::{Doorbell, Layout, LimitReached, MappedWords, PidFd, Segment, SegmentError};
use threads::{DeferredDrop, lock};

use self::reclaim::RetainedMemory;
use self::region_table::RegionTable;
use super::host_staged::StagingTarget;
use super::local_protocol::{Introduction, Request};
use super::{CONNECT, START};
use crate::admission::Admission;
use crate::copy_requests::ClientIdentity;
use crate::device_memory::WrittenDevices;
use crate::error::{Error, ErrorKind, Result, failed};
use crate::rail::{RailHandle, RailOwner};
use crate::region::{Buffer, REGISTER, RegisteredRegion};
use crate::share::random;
use crate::wire::malformed;

pub(super) use initiators::{InitiatorKind, LocalInitiator, OutstandingCopies};
pub(super) use local_server::LocalServer;
pub(super) use region_table::ReadOnlyRegionTable;

const DOORBELL_LAYOUT: Layout = Layout::new("agent doorbell", 1);

#[derive(Debug, Default)]
struct Regions {
    last: u64,
    all: HashMap<u64, Weak<RegisteredRegion>>,
}

#[derive(Debug)]
pub(crate) struct LocalTarget {
    pub(crate) identity: [u8; 16],
    pub(crate) label: String,
    admission: Admission,
    is_copy_service: bool,
    pidfd: PidFd,
    doorbell_segment: Segment,
    pub(crate) doorbell: Doorbell<MappedWords>,
    is_over: AtomicBool,
    region_table: RegionTable,
    regions: Mutex<Regions>,
    initiators: Mutex<Vec<Arc<LocalInitiator>>>,
    /// Incremented when initiators connect or disconnect.
    changes: AtomicU64,
    /// Handles of the rails, once these are started.
    rail_handles: OnceLock<Vec<RailHandle>>,
    written_devices: WrittenDevices,
    /// Of dropped regions.
    retained_memory: DeferredDrop<RetainedMemory>,
    staging: StagingTarget,
}

impl LocalTarget {
    pub(crate) fn new(label: String, admission: Admission) -> Result<Self> {
        let length = Doorbell::<MappedWords>::WORDS * size_of::<u64>();
        let doorbell_segment = Segment::create(DOORBELL_LAYOUT, length).map_err(failed(START))?;
        doorbell_segment.mark_ready();
        Ok(Self {
            identity: random(START)?,
            label,
            admission,
            is_copy_service: false,
            pidfd: PidFd::of_this_process().map_err(failed(START))?,
            doorbell: Doorbell::new(doorbell_segment.words())
                .ok_or("the doorbell segment is too short")
                .map_err(failed(START))?,
            doorbell_segment,
            is_over: AtomicBool::new(false),
            region_table: RegionTable::create().map_err(failed(START))?,
            regions: Mutex::default(),
            initiators: Mutex::default(),
            changes: AtomicU64::new(0),
            rail_handles: OnceLock::new(),
            written_devices: WrittenDevices::default(),
            retained_memory: DeferredDrop::default(),
            staging: StagingTarget::default(),
        })
    }

    /// The copy service, which has no regions and no initiators.
    pub(crate) fn of_copy_service(admission: Admission) -> Result<Self> {
        let target = Self::new("copy service".to_owned(), admission)?;
        Ok(Self { is_copy_service: true, ..target })
    }

    pub(super) fn introduction(&self) -> Introduction {
        Introduction { identity: self.identity, label: self.label.clone() }
    }

    /// The first message to another agent.
    pub(super) fn hello(&self) -> Request {
        match self.is_copy_service {
            true => Request::HelloOfCopyService(self.introduction()),
            false => Request::Hello(self.introduction()),
        }
    }

    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// The agent as it introduces itself to the copy service.
    pub(crate) fn as_client_of_copy_service(&self) -> Result<ClientIdentity> {
        let copy = |file: BorrowedFd<'_>| {
            file.try_clone_to_owned().map_err(LimitReached::explain).map_err(failed(CONNECT))
        };
        let (pidfd, doorbell) = (copy(self.pidfd.as_fd())?, copy(self.doorbell_segment.as_fd())?);
        let users = self.admission.users.clone();
        Ok(ClientIdentity::new(self.identity, &self.label, pidfd, doorbell, users))
    }

    /// May agents of this user be connected to?
    pub(super) fn trusts(&self, user: u32) -> bool {
        user == 0 || self.admission.users.contains(&user)
    }

    /// What an initiator opens: region table and doorbell.
    pub(crate) fn shared_files(
        &self,
    ) -> std::result::Result<(OwnedFd, BorrowedFd<'_>), SegmentError> {
        Ok((self.region_table.read_only()?, self.doorbell_segment.as_fd()))
    }

    /// Maps the doorbell of another agent.
    pub(crate) fn open_doorbell(file: OwnedFd) -> Result<Doorbell<MappedWords>> {
        let wrong = |cause: String| malformed("open local session", cause);
        let segment = Segment::open(file, DOORBELL_LAYOUT);
        let words = segment.map_err(|error| wrong(error.to_string()))?.words();
        Doorbell::new(words).ok_or_else(|| wrong("the doorbell segment is too short".to_owned()))
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
        let ticket = u64::from_le_bytes(random(REGISTER)?);
        let mut regions = lock(&self.regions);
        let Some(number) = self.region_table.insert_after(regions.last) else {
            return Err(Error::new(REGISTER, ErrorKind::TooMany, "the region table is full"));
        };
        regions.last = number;
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

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// The agent ends: withdraws all regions.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.region_table.close();
        let all = std::mem::take(&mut lock(&self.regions).all);
        all.into_keys().for_each(|number| self.region_table.remove(number));
        self.staging.end();
    }

    /// The agent's own copies to and from its regions.
    pub(super) fn staging(&self) -> &StagingTarget {
        &self.staging
    }

    /// Frees the memory of a withdrawn region: now, or when no other process copies to or from it
    /// any more. Does not wait.
    pub(crate) fn release(self: &Arc<Self>, number: u64, buffer: Buffer) {
        let mut copies = OutstandingCopies::of(self, Some(number)).of_other_processes();
        if copies.are_over() {
            self.forget_region(number);
        } else {
            reclaim::retain_until_done(self, copies, number, buffer);
        }
    }

    /// The region with this number, if the ticket is right.
    pub(crate) fn region(&self, number: u64, ticket: u64) -> Option<Arc<RegisteredRegion>> {
        let found = lock(&self.regions).all.get(&number)?.upgrade()?;
        (self.region_table.contains(number) && found.descriptor.ticket == ticket).then_some(found)
    }
}

impl RailOwner for LocalTarget {
    fn identity(&self) -> [u8; 16] {
        self.identity
    }

    fn label(&self) -> &str {
        &self.label
    }

    fn find_region(&self, number: u64, ticket: u64) -> Option<Arc<RegisteredRegion>> {
        self.region(number, ticket)
    }

    fn written_devices(&self) -> &WrittenDevices {
        &self.written_devices
    }

    fn wake(&self) {
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
