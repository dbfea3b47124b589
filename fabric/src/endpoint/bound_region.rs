//! Regions that are bound to an endpoint.

use super::Endpoint;
use crate::{MemoryRegion, MrMode, Result};

impl MemoryRegion {
    /// Binds the region to one endpoint (`fi_mr_bind` with an endpoint), as `MrMode::ENDPOINT`
    /// requires before `enable` and before any post.
    ///
    /// From then on no other endpoint accepts the region. Its registration ends when the
    /// endpoint is closed, if not earlier: then peers cannot access it, and nothing can be
    /// posted with it. Its bytes stay until the region is dropped.
    ///
    /// # Errors
    /// The provider's error.
    pub fn bind_endpoint(&self, endpoint: &Endpoint) -> Result<()> {
        // SAFETY: the endpoint is open.
        unsafe { self.bind_to(&endpoint.domain, endpoint.as_fid(), &endpoint.bound) }
    }

    /// Binds the region to this endpoint, where the provider requires that, and enables it;
    /// does nothing for a region that is not registered.
    ///
    /// # Errors
    /// The provider's error.
    pub fn enable_for(&self, endpoint: &Endpoint) -> Result<()> {
        if !self.is_registered() || self.is_enabled() {
            return Ok(());
        }
        if self.domain().capabilities().registration.mr_mode.contains(MrMode::ENDPOINT) {
            self.bind_endpoint(endpoint)?;
        }
        self.enable()
    }
}
