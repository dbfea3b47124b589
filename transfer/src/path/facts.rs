//! What a choice depends on, asked at run time.

use serde::Serialize;

/// Which way the bytes go, seen from who begins it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Operation {
    /// From here to the peer.
    Put,
    /// From the peer to here.
    Get,
}

/// What the two processes can give each other. A fact about a *pair*, found out by trying.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub enum Locality {
    /// They are one.
    SameProcess,
    /// A descriptor was passed from one to the other.
    SameMachine,
    /// They run on one machine, as far as its kernel tells, but nothing can be passed.
    NoDescriptorPassing {
        /// What was tried, and how it failed.
        cause: String,
    },
    /// On one machine, perhaps, but the configuration says that they are to be taken for
    /// remote.
    ForcedRemote,
    /// On different machines.
    OtherMachine,
}

/// How memory can leave its process for another one of the same machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub enum Exportability {
    /// As file descriptors.
    ByDescriptors,
    /// By the driver's handle of a plain allocation.
    ByLegacyHandle,
    /// Not at all.
    Not(ExportObstacle),
}

/// Why memory cannot leave its process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub enum ExportObstacle {
    /// It was mapped from pieces that were not made to be exported.
    NotExportable,
    /// It was allocated the plain way, and its device makes no handles of such memory.
    NoLegacyHandle,
    /// A stream-ordered pool allocated it.
    StreamOrderedPool,
    /// It moves between host and device by itself.
    Managed,
    /// Memory of the host that is in no shared segment.
    PrivateHostMemory,
    /// Its owner registered it for own use only.
    LocalOnly,
}

/// Where memory lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub enum MemoryType {
    /// On a device.
    Device(Exportability),
    /// On the host.
    Host(Exportability),
}

impl MemoryType {
    /// On a device?
    #[must_use]
    pub const fn is_device(self) -> bool {
        matches!(self, Self::Device(_))
    }

    /// How it leaves its process.
    #[must_use]
    pub const fn exportability(self) -> Exportability {
        match self {
            Self::Device(exportability) | Self::Host(exportability) => exportability,
        }
    }
}

/// How the device that would copy reaches the memory at the other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub enum DeviceAccess {
    /// It is the same device, or memory of the host that it can be given access to.
    Same,
    /// Directly, by NVLink or PCIe.
    Direct,
    /// Not directly: its driver would go by way of the host.
    None,
    /// This process does not see the peer's device.
    Invisible,
    /// The two are devices of different implementations.
    Foreign,
    /// No device has part in it.
    NoDevice,
}

/// Whether the fabric can reach memory by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub enum Registration {
    /// It is registered, and what was tried with it arrived.
    Works,
    /// The provider takes no memory of this kind, or refused it.
    NotOffered,
    /// The provider takes it, but what it says of it cannot be relied on: its completions
    /// run ahead of the data, or it takes device memory for the host's.
    NotSafe,
}

/// What the fabric between the two can do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub enum Fabric {
    /// They share none.
    None {
        /// What was tried, and how it failed.
        cause: String,
    },
    /// They are connected.
    Connected {
        /// The provider's name, to be shown; nothing depends on it.
        provider: String,
        /// Can it read and write the peer's memory?
        remote_access: bool,
        /// The memory here.
        local: Registration,
        /// The memory there.
        remote: Registration,
    },
}

/// What a choice depends on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Facts {
    /// Which way the bytes go.
    pub operation: Operation,
    /// Who the two are to each other.
    pub locality: Locality,
    /// The memory of who begins it.
    pub local: MemoryType,
    /// The peer's memory.
    pub remote: MemoryType,
    /// How the copying device reaches the peer's memory.
    pub device_access: DeviceAccess,
    /// What the fabric can do.
    pub fabric: Fabric,
}
