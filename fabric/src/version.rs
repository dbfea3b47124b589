//! Which libfabric this was built against, and which one is running.

use std::fmt;

use libfabric_sys as sys;
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};

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
        let [a, b, c, d] = packed.to_be_bytes();
        Self { major: u16::from_be_bytes([a, b]), minor: u16::from_be_bytes([c, d]) }
    }

    pub(crate) fn packed(self) -> u32 {
        u32::from(self.major) << 16 | u32::from(self.minor)
    }

    /// The library that this process uses; 0.0 if there is none. Loads it.
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

    /// The headers this program was built against.
    #[must_use]
    pub fn headers() -> Self {
        #[allow(unsafe_code)]
        // SAFETY: no arguments, no preconditions.
        Self::from_packed(unsafe { sys::fcs_headers_version() })
    }

    /// The interface version to ask for: the older of the two, since structures
    /// grow between versions and neither side may write past what the other has.
    #[must_use]
    pub fn api_version() -> Self {
        Self::running().min(Self::headers())
    }

    /// Do endpoints tell of each kind of operation how much they inject?
    pub(crate) fn has_inject_size_option() -> bool {
        Self::running() >= Self { major: 2, minor: 0 }
    }

    /// Do the headers this was built against describe dma-buf registration?
    #[must_use]
    pub fn has_dma_buf() -> bool {
        #[allow(unsafe_code)]
        // SAFETY: no arguments, no preconditions.
        let headers = unsafe { sys::fcs_headers_have_dmabuf() } != 0;
        headers && Self::running() >= Self { major: 1, minor: 20 }
    }
}

/// Loads the library, for what needs it first.
pub(crate) fn load_library(operation: &'static str) -> Result<()> {
    sys::load().map_err(|why| Error::new(ErrorKind::NoLibrary, operation, why))
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
