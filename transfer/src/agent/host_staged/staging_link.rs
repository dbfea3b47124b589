//! An initiator's side of a host-staged session: what is shared by the session, its routes and its
//! copies.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use ipc::{Doorbell, MappedWords};

use super::staging_segment::{StagingSegment, open_doorbell};
use crate::error::Result;

/// Descriptors that a target sends for the first region: of requests, slots and doorbell.
pub(in crate::agent) const STAGING_DESCRIPTORS: usize = 3;

/// The shared memory, the target's doorbell, and the end of the session.
#[derive(Debug)]
pub(in crate::agent) struct StagingLink {
    segment: StagingSegment,
    doorbell: Doorbell<MappedWords>,
    /// Why no answer will come.
    end_cause: OnceLock<&'static str>,
}

impl StagingLink {
    /// Maps what the target has sent.
    pub(in crate::agent) fn open(descriptors: [OwnedFd; STAGING_DESCRIPTORS]) -> Result<Self> {
        let [control, slots, doorbell] = descriptors;
        Ok(Self {
            segment: StagingSegment::open(control, slots)?,
            doorbell: open_doorbell(doorbell)?,
            end_cause: OnceLock::new(),
        })
    }

    /// The session has ended: transfers in flight fail for this cause.
    pub(in crate::agent) fn end(&self, cause: &'static str) {
        let _ = self.end_cause.set(cause);
    }

    pub(super) fn end_cause(&self) -> Option<&'static str> {
        self.end_cause.get().copied()
    }

    pub(super) fn segment(&self) -> &StagingSegment {
        &self.segment
    }

    /// Wakes the target's thread, if it sleeps.
    pub(super) fn wake_target(&self) {
        self.doorbell.ring();
    }
}
