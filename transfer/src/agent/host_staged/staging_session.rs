//! A target's side of a host-staged session, between the socket's thread and the copying one.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use threads::lock;

use super::staged_end::StagedEnd;
use super::staging_segment::StagingSegment;
use crate::error::Result;
use crate::region::RegisteredRegion;

/// Opened regions after which withdrawn ones are forgotten.
const FORGET_AFTER: usize = 1024;

/// The agent whose regions are copied.
pub(in crate::agent) trait StagingOwner: Send + Sync {
    /// The region with this number and ticket, unless it is withdrawn.
    fn staged_region(&self, number: u64, ticket: u64) -> Option<Arc<RegisteredRegion>>;

    /// All copies for an initiator that left are over.
    fn staging_session_over(&self);
}

#[derive(Debug)]
pub(in crate::agent) struct StagingSession {
    segment: StagingSegment,
    label: Arc<str>,
    /// Tickets by the numbers of the regions that the initiator has opened.
    opened: Mutex<HashMap<u64, u64>>,
    /// The initiator disconnected or died.
    has_left: AtomicBool,
    /// No copy for it is in flight, and none will begin.
    is_over: AtomicBool,
}

impl StagingSession {
    pub(super) fn new(label: &str) -> Result<Self> {
        Ok(Self {
            segment: StagingSegment::create()?,
            label: Arc::from(label),
            opened: Mutex::default(),
            has_left: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
        })
    }

    /// Opens a region, whose ticket was checked, and pins the slots for its device.
    pub(in crate::agent) fn open_region(
        &self,
        region: &RegisteredRegion,
        owner: &dyn StagingOwner,
    ) -> Result<()> {
        StagedEnd::new(&region.buffer, region.descriptor.length, self.segment.slots())?;
        let mut opened = lock(&self.opened);
        if opened.len() >= FORGET_AFTER && opened.len().is_power_of_two() {
            opened.retain(|number, ticket| owner.staged_region(*number, *ticket).is_some());
        }
        opened.insert(region.descriptor.number, region.descriptor.ticket);
        Ok(())
    }

    /// The ticket of a region, if the initiator has opened it.
    pub(super) fn ticket_of(&self, region: u64) -> Option<u64> {
        lock(&self.opened).get(&region).copied()
    }

    /// No request of the initiator is begun from now on.
    pub(in crate::agent) fn leave(&self) {
        self.has_left.store(true, Ordering::Release);
    }

    pub(super) fn has_left(&self) -> bool {
        self.has_left.load(Ordering::Acquire)
    }

    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    /// Are all copies for the initiator over?
    pub(in crate::agent) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    pub(super) fn segment(&self) -> &StagingSegment {
        &self.segment
    }

    pub(super) fn label(&self) -> &Arc<str> {
        &self.label
    }
}
