//! The wishes of the user.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::Path;
use crate::error::{Error, ErrorKind, Result};

const OPERATION: &str = "parse policy";

/// Which paths are preferred, required or denied.
///
/// ```
/// use transfer::path::{Path, Policy};
/// let policy: Policy = "shared-memory,^fabric-staged".parse()?;
/// assert_eq!(policy.prefer, [Path::SharedMemory]);
/// assert_eq!(policy.deny, [Path::FabricStaged]);
/// let must: Policy = "=cuda-ipc".parse()?;
/// assert_eq!(must.require, [Path::CudaIpc]);
/// assert!("=cuda-ipc,^cuda-ipc".parse::<Policy>().is_err());
/// # Ok::<(), transfer::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// Tried first, in this order.
    pub prefer: Vec<Path>,
    /// Only these may be taken.
    pub require: Vec<Path>,
    /// Never taken.
    pub deny: Vec<Path>,
}

impl Policy {
    /// Fails for policies that no path satisfies.
    ///
    /// # Errors
    /// [`Malformed`](ErrorKind::Malformed) if every required path is denied, too.
    pub fn check(&self) -> Result<()> {
        let is_denied = |path: &Path| self.deny.contains(path);
        if !self.require.is_empty() && self.require.iter().all(is_denied) {
            let detail = "every required path is also denied";
            return Err(Error::new(OPERATION, ErrorKind::Malformed, detail));
        }
        Ok(())
    }

    /// All paths in the order of preference.
    pub(super) fn order(&self) -> impl Iterator<Item = Path> {
        let mut paths = self.prefer.clone();
        paths.extend(self.require.iter().copied());
        paths.extend(Path::ALL);
        let mut seen = Vec::with_capacity(Path::ALL.len());
        paths.retain(|path| {
            let is_new = !seen.contains(path);
            seen.push(*path);
            is_new
        });
        paths.into_iter()
    }
}

impl FromStr for Policy {
    type Err = Error;

    /// A comma-separated list: `name` prefers, `=name` requires, `^name` denies.
    fn from_str(text: &str) -> Result<Self> {
        let mut policy = Self::default();
        for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            let (list, name) = match item.split_at_checked(1) {
                Some(("^", name)) => (&mut policy.deny, name),
                Some(("=", name)) => (&mut policy.require, name),
                _ => (&mut policy.prefer, item),
            };
            let Some(path) = Path::named(name.trim()) else {
                let names = Path::ALL.map(Path::name).join(", ");
                let detail = format!("unknown path \"{name}\". Choose from {names}");
                return Err(Error::new(OPERATION, ErrorKind::Malformed, detail));
            };
            list.push(path);
        }
        policy.check()?;
        Ok(policy)
    }
}
