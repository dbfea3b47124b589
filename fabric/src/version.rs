//! The libfabric versions: of the headers at build time, and of the loaded library.

use std::fmt;

use libfabric_sys as sys;
use serde::{Deserialize, Serialize};

use crate::{Error, ErrorKind, Result};

/// A version of libfabric's interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Version {
    /// Major version.
    pub major: u16,
    /// Minor version.
    pub minor: u16,
}

impl Version {
    pub(crate) fn from_packed(packed: u32) -> Self {
        Self { major: (packed >> 16) as u16, minor: packed as u16 }
    }

    pub(crate) fn packed(self) -> u32 {
        u32::from(self.major) << 16 | u32::from(self.minor)
    }

    /// The version of the loaded library; 0.0 if there is none. Loads it.
    ///
    /// ```
    /// use fabric::Version;
    /// assert!(Version::running() >= Version { major: 1, minor: 17 });
    /// ```
    #[must_use]
    pub fn running() -> Self {
        #[allow(unsafe_code)]
        // SAFETY: no arguments, no preconditions.
        Self::from_packed(unsafe { sys::fi_version() })
    }

    /// The version of the headers that this program was built against.
    #[must_use]
    pub fn headers() -> Self {
        #[allow(unsafe_code)]
        // SAFETY: no arguments, no preconditions.
        Self::from_packed(unsafe { sys::fcs_headers_version() })
    }

    /// The interface version to request: the older of the two. Structures grow between
    /// versions, and neither side may write past the end of the other's.
    #[must_use]
    pub fn api_version() -> Self {
        Self::running().min(Self::headers())
    }

    /// Do the headers of this build describe dma-buf registration?
    #[must_use]
    pub fn has_dma_buf() -> bool {
        #[allow(unsafe_code)]
        // SAFETY: no arguments, no preconditions.
        let headers = unsafe { sys::fcs_headers_have_dmabuf() } != 0;
        headers && Self::running() >= Self { major: 1, minor: 20 }
    }
}

/// Loads the library before the first use that needs it.
pub(crate) fn load_library(operation: &'static str) -> Result<()> {
    sys::load().map_err(|why| Error::new(ErrorKind::NoLibrary, operation, why))
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
