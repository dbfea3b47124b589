//! PMIx, by a library that is loaded at run time.

use std::time::Duration;

use super::error::{Error, ErrorKind, Result};
use super::exchange::Exchange;

/// A job whose launcher is reached through PMIx.
#[derive(Debug)]
pub(super) struct Pmix {}

impl Pmix {
    /// Loads the library and connects to the launcher.
    pub(super) fn connect(_timeout: Duration) -> Result<Self> {
        Err(Error::new("connect to launcher", ErrorKind::Unavailable, "not implemented"))
    }
}

impl Exchange for Pmix {
    fn name(&self) -> &str {
        "PMIx"
    }

    fn job(&self) -> &str {
        ""
    }

    fn rank(&self) -> u32 {
        0
    }

    fn size(&self) -> u32 {
        1
    }

    fn all_gather(&mut self, _own: &[u8], _timeout: Duration) -> Result<Vec<Vec<u8>>> {
        Ok(Vec::new())
    }
}
