//! What the choice of a path depends on, found out at run time.

use serde::Serialize;

/// The direction of a transfer, as the initiator sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Operation {
    /// From the initiator to the peer.
    Put,
    /// From the peer to the initiator.
    Get,
}

impl Operation {
    /// Returns `put` or `get`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Put => "put",
            Self::Get => "get",
        }
    }

    /// The end that is written to, and the end that is read from.
    pub(crate) fn to_and_from<T>(self, local: T, remote: T) -> (T, T) {
        match self {
            Self::Put => (remote, local),
            Self::Get => (local, remote),
        }
    }
}

/// How two processes can pass memory to each other, if at all. A fact about a *pair*, found by
/// trying.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub enum Locality {
    /// Both sides are the same process.
    SameProcess,
    /// A descriptor was passed between them.
    SameMachine,
    /// They run under one kernel, but cannot pass descriptors.
    NoDescriptorPassing {
        /// The attempt, and how it failed.
        cause: String,
    },
    /// The configuration forces them to be treated as remote.
    ForcedRemote,
    /// On different machines.
    OtherMachine,
}

/// How memory can be exported to another process of the same machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub enum Exportability {
    /// By file descriptors.
    ByDescriptors,
    /// By the driver's handle of a `cudaMalloc` allocation.
    ByLegacyHandle,
    /// Not at all.
    Not(ExportObstacle),
}

/// Why memory cannot be exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub enum ExportObstacle {
    /// The memory was mapped from pieces without exportable handles.
    NotExportable,
    /// The memory is from `cudaMalloc`, and its device exports no legacy handles.
    NoLegacyHandle,
    /// A stream-ordered pool allocated it.
    StreamOrderedPool,
    /// The memory is managed: it migrates between host and device.
    Managed,
    /// Host memory outside of any shared segment.
    PrivateHostMemory,
    /// The owner registered the memory as local-only.
    LocalOnly,
}

/// Device or host memory.
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

    /// How it can be exported.
    #[must_use]
    pub const fn exportability(self) -> Exportability {
        match self {
            Self::Device(exportability) | Self::Host(exportability) => exportability,
        }
    }
}

/// How the copying device accesses the memory of the peer.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub enum DeviceAccess {
    /// Memory of the copying device itself, or host memory that it can access.
    Same,
    /// Directly, by NVLink or PCIe.
    Direct,
    /// Not directly: its driver would stage through the host.
    None,
    /// This process does not see the peer's device. Joining two regions maps the memory, which shows
    /// whether there is access.
    NotTried,
    /// The driver refused to map the memory of a device that this process does not see.
    Refused {
        /// The driver's error.
        cause: String,
    },
    /// This process sees no device that could copy.
    NoLocalDevice,
    /// The devices are of different implementations.
    Foreign,
    /// No device takes part.
    NoDevice,
}

/// What is known about the copy service of this machine.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub enum CopyServiceState {
    /// A service whose socket is there, or that has copied for this agent before.
    Available,
    /// No service, or one that refused.
    Unavailable {
        /// The attempt, and how it failed.
        cause: String,
    },
}

/// Access of a fabric itself to memory, or why it has none.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub enum Registration {
    /// The memory is registered; of a peer's device memory: the peer was not asked yet.
    Works,
    /// The provider does not register memory of this kind.
    NotOffered,
    /// [`DeviceFabric::Off`](super::DeviceFabric::Off) is set on this side.
    Off,
    /// The memory cannot be registered, or must not be.
    Refused {
        /// The cause.
        cause: String,
    },
}

/// What is known about transfers of device memory between the two over the fabric.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub enum Probe {
    /// Neither memory is on a device.
    NotNeeded,
    /// The probe was not made yet. Joining two regions makes it.
    NotMade,
    /// All bytes arrived, and before their notices.
    Passed,
    /// The settings of both sides say that none is needed.
    Skipped,
    /// Transfers are not reliable, or could not be tried.
    Failed {
        /// The first observation.
        cause: String,
    },
}

/// The capabilities of the fabric between the two.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub enum Fabric {
    /// They have no provider in common.
    None {
        /// The attempt, and how it failed.
        cause: String,
    },
    /// They are connected.
    Connected {
        /// The provider's name, for reports only.
        provider: String,
        /// Can it read and write the memory of the peer?
        remote_access: bool,
        /// Registration of the local memory.
        local: Registration,
        /// Registration of the remote memory.
        remote: Registration,
        /// Outcome of the probe of device memory.
        probe: Probe,
    },
}

/// What a choice depends on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Facts {
    /// The direction of the transfer.
    pub operation: Operation,
    /// How the two can pass memory.
    pub locality: Locality,
    /// The memory of the initiator.
    pub local: MemoryType,
    /// The peer's memory.
    pub remote: MemoryType,
    /// How the copying device accesses the peer's memory.
    pub device_access: DeviceAccess,
    /// The copy service of this machine.
    pub copy_service: CopyServiceState,
    /// The capabilities of the fabric.
    pub fabric: Fabric,
}

impl Facts {
    /// Is one of the memories on a device?
    #[must_use]
    pub const fn has_device_memory(&self) -> bool {
        self.local.is_device() || self.remote.is_device()
    }
}
