//! By which way bytes travel, and why: the one table that chooses, as pure data.
//!
//! Everything that a choice depends on is in [`Facts`] and [`Policy`]; [`choose`] is a
//! pure function of them, which gives a verdict for *every* path, so that nobody has to
//! guess why bytes went where they went. `docs/paths.md` is the same table for readers;
//! a test holds them together.

mod facts;
pub(crate) mod metrics;
mod policy;
mod reason;
mod situations;
mod table;
#[cfg(test)]
mod tests;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use facts::{
    DeviceAccess, ExportObstacle, Exportability, Fabric, Facts, Locality, MemoryType, Operation,
    Registration,
};
pub use metrics::metrics;
pub use policy::Policy;
pub use reason::Reason;
pub use situations::{Situation, situations};
pub use table::{Candidate, Choice, Verdict, choose};

/// A way that bytes can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Path {
    /// Both memories belong to this process: one copy.
    SameProcess,
    /// The peer's device memory is mapped into this process, and a device copies.
    CudaIpc,
    /// The peer's host memory is mapped into this process; a device or the processor
    /// copies.
    SharedMemory,
    /// The fabric reads and writes both memories itself.
    FabricDirect,
    /// By way of pinned host memory, on the side whose memory the fabric cannot reach,
    /// in chunks that overlap.
    FabricStaged,
}

impl Path {
    /// All there are, the best first.
    pub const ALL: [Self; 5] = [
        Self::SameProcess,
        Self::CudaIpc,
        Self::SharedMemory,
        Self::FabricDirect,
        Self::FabricStaged,
    ];

    /// As policies, metrics and people call it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SameProcess => "same-process",
            Self::CudaIpc => "cuda-ipc",
            Self::SharedMemory => "shared-memory",
            Self::FabricDirect => "fabric-direct",
            Self::FabricStaged => "fabric-staged",
        }
    }

    /// The path of a name.
    ///
    /// ```
    /// use transfer::path::Path;
    /// assert_eq!(Path::named("cuda-ipc"), Some(Path::CudaIpc));
    /// assert_eq!(Path::named("tcp"), None); // a provider, not a path
    /// ```
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|path| path.name() == name)
    }

    /// Does it need the two to be on one machine?
    #[must_use]
    pub const fn is_local(self) -> bool {
        matches!(self, Self::SameProcess | Self::CudaIpc | Self::SharedMemory)
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
