//! A fabric: the network that domains, event queues and listeners belong to.

use std::borrow::Cow;
use std::sync::Arc;

use libfabric_sys as sys;

use crate::handle::Handle;
use crate::{Error, ErrorKind, Result};

/// A network that one provider reaches. Cheap to clone; closes with its last user.
#[derive(Debug, Clone)]
pub struct Fabric(Arc<FabricInner>);

#[derive(Debug)]
struct FabricInner {
    handle: Handle<sys::fid_fabric>,
    provider: String,
}

impl Fabric {
    pub(crate) fn new(handle: Handle<sys::fid_fabric>, provider: String) -> Self {
        Self(Arc::new(FabricInner { handle, provider }))
    }

    /// Like [`Error::check`], with the provider's name.
    pub(crate) fn check(&self, operation: &'static str, code: i32) -> Result<()> {
        Error::check(operation, code).map(drop).map_err(|e| e.with_provider(&self.0.provider))
    }

    /// Like [`Error::new`], with the provider's name.
    pub(crate) fn error(
        &self,
        kind: ErrorKind,
        operation: &'static str,
        detail: impl Into<Cow<'static, str>>,
    ) -> Error {
        Error::new(kind, operation, detail).with_provider(&self.0.provider)
    }

    /// Name of the provider.
    #[must_use]
    pub fn provider(&self) -> &str {
        &self.0.provider
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::fid_fabric {
        self.0.handle.as_ptr()
    }
}
