//! Regions that the agent's own thread copies for local initiators.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{LocalInitiator, LocalTarget};
use crate::agent::host_staged::StagingOwner;
use crate::error::Result;
use crate::region::RegisteredRegion;

impl LocalTarget {
    /// Opens a region for an initiator, and its session if it has none: then the initiator gets
    /// these files.
    pub(super) fn open_staged(
        self: &Arc<Self>,
        initiator: &LocalInitiator,
        region: &RegisteredRegion,
    ) -> Result<Vec<OwnedFd>> {
        if let Some(session) = initiator.staging() {
            session.open_region(region, &**self)?;
            return Ok(Vec::new());
        }
        let owner: Arc<dyn StagingOwner> = self.clone();
        let (session, files) = self.staging.open_session(owner, initiator.label(), region)?;
        initiator.set_staging(session);
        Ok(files.into())
    }
}

impl StagingOwner for LocalTarget {
    fn staged_region(&self, number: u64, ticket: u64) -> Option<Arc<RegisteredRegion>> {
        self.region(number, ticket)
    }

    fn staging_session_over(&self) {
        self.notify_change();
    }
}
