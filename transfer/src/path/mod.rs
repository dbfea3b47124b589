//! Which path bytes take, and why: one table, as pure data.
//!
//! A choice depends on [`Facts`] and [`Policy`] alone; [`choose`] is a pure function of them. It
//! gives a verdict for *every* path, so users need not guess. `docs/reference/paths.md` has the
//! same table for readers; a test compares them.

mod device_fabric;
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

pub use device_fabric::DeviceFabric;
pub use facts::{
    CopyServiceState, DeviceAccess, ExportObstacle, Exportability, Fabric, Facts, Locality,
    MemoryType, Operation, Probe, Registration,
};
pub use metrics::metrics;
pub use policy::Policy;
pub use reason::Reason;
pub use situations::{Situation, situations};
pub use table::{Candidate, Choice, Verdict, choose};

/// A path of bytes between two memories.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Path {
    /// Both memories belong to this process: one copy.
    SameProcess,
    /// The peer's device memory is mapped into this process, and a device copies.
    CudaIpc,
    /// The peer's host memory is mapped into this process; a device or the CPU copies.
    SharedMemory,
    /// The copy service of this machine, which sees both devices, maps both memories and copies.
    ServiceCopied,
    /// Through a pinned segment that both processes map: each copies between it and its own memory,
    /// in overlapping chunks.
    HostStaged,
    /// The fabric reads and writes both memories itself.
    FabricDirect,
    /// Through pinned host memory, on the side whose memory the fabric cannot access, in
    /// overlapping chunks.
    FabricStaged,
}

impl Path {
    /// All paths, the best first.
    pub const ALL: [Self; 7] = [
        Self::SameProcess,
        Self::CudaIpc,
        Self::SharedMemory,
        Self::ServiceCopied,
        Self::HostStaged,
        Self::FabricDirect,
        Self::FabricStaged,
    ];

    /// The path's name in policies, metrics and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SameProcess => "same-process",
            Self::CudaIpc => "cuda-ipc",
            Self::SharedMemory => "shared-memory",
            Self::ServiceCopied => "service-copied",
            Self::HostStaged => "host-staged",
            Self::FabricDirect => "fabric-direct",
            Self::FabricStaged => "fabric-staged",
        }
    }

    /// The path with a name.
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

    /// Does it require both sides on one machine?
    #[must_use]
    pub const fn is_local(self) -> bool {
        !matches!(self, Self::FabricDirect | Self::FabricStaged)
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
