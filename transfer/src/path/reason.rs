//! Why a path was not taken.

use std::fmt;

use serde::Serialize;

use super::Path;
use super::facts::ExportObstacle;

/// Why a path was not taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "reason", rename_all = "kebab-case")]
pub enum Reason {
    /// They are different processes.
    OtherProcess,
    /// They are the same process, so nothing is exported.
    SameProcess,
    /// They are on different machines.
    OtherMachine,
    /// No descriptor can be passed between them.
    NoDescriptorPassing {
        /// The attempt, and how it failed.
        cause: String,
    },
    /// The configuration forces them to be remote.
    ForcedRemote,
    /// The peer's memory is not on a device.
    NoDeviceMemory,
    /// The peer's memory is not on the host.
    NoHostMemory,
    /// The peer's memory cannot be exported.
    ExportObstacle {
        /// The obstacle.
        cause: ExportObstacle,
    },
    /// The local memory cannot be exported to the copy service.
    LocalExportObstacle {
        /// The obstacle.
        cause: ExportObstacle,
    },
    /// No copy service copies for this process.
    NoCopyService {
        /// The attempt, and how it failed.
        cause: String,
    },
    /// This process does not see the peer's device, and the driver does not map its memory.
    MappingRefused {
        /// The driver's error.
        cause: String,
    },
    /// This process sees no device that could copy.
    NoLocalDevice,
    /// The devices cannot reach each other directly.
    NoPeerAccess,
    /// The devices are of different implementations.
    ForeignDevice,
    /// They have no provider in common.
    NoFabric {
        /// The attempt, and how it failed.
        cause: String,
    },
    /// The provider has no one-sided reads and writes.
    NoRemoteAccess {
        /// Name of the provider.
        provider: String,
    },
    /// The provider does not register memory of this kind.
    NotRegistered {
        /// Name of the provider.
        provider: String,
        /// The side of the memory: "local" or "remote".
        side: &'static str,
    },
    /// The setting `device_fabric` of this process is off.
    DeviceFabricOff,
    /// The memory cannot be registered, or must not be.
    RegistrationRefused {
        /// The side of the memory: "local" or "remote".
        side: &'static str,
        /// The cause.
        cause: String,
    },
    /// Transfers of device memory were not probed yet.
    NotProbed {
        /// The provider.
        provider: String,
    },
    /// Probed transfers of device memory were not reliable.
    ProbeFailed {
        /// The provider.
        provider: String,
        /// The first observation.
        cause: String,
    },
    /// Notices of this peer do not come by the fabric, so they may overtake device memory.
    LocalNotices,
    /// The fabric accesses both memories, so nothing is staged.
    NothingToStage,
    /// The policy denies it.
    Denied,
    /// The policy requires other paths.
    NotRequired,
    /// Possible, but another path is better or preferred.
    Better {
        /// The path that was taken.
        taken: Path,
    },
}

impl Reason {
    /// The reason's name in metrics.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.properties().0
    }

    /// Is it natural in this situation, so that the path was never expected? Taking a worse path
    /// for any other reason is a *fallback*, which is logged and counted.
    #[must_use]
    pub const fn is_expected(&self) -> bool {
        self.properties().1
    }

    /// The reason's name, whether it is natural in its situation, and its text without parameters.
    const fn properties(&self) -> (&'static str, bool, &'static str) {
        match self {
            Self::OtherProcess => ("other-process", true, "they are different processes"),
            Self::SameProcess => ("same-process", true, "they are the same process"),
            Self::OtherMachine => ("other-machine", true, "they are on different machines"),
            Self::NoDescriptorPassing { .. } => ("no-descriptor-passing", false, ""),
            Self::ForcedRemote => {
                ("forced-remote", true, "the configuration forces them to be remote")
            }
            Self::NoDeviceMemory => ("no-device-memory", true, "the peer's memory is on the host"),
            Self::NoHostMemory => ("no-host-memory", true, "the peer's memory is on a device"),
            Self::ExportObstacle { cause } => match cause {
                ExportObstacle::NotExportable => {
                    let text =
                        "the peer's memory was mapped from pieces without exportable handles";
                    ("not-exportable", false, text)
                }
                ExportObstacle::NoLegacyHandle => {
                    let text = "the peer's memory is from cudaMalloc, and its device (emulated?) \
                         exports no legacy handles";
                    ("no-legacy-handle", false, text)
                }
                ExportObstacle::StreamOrderedPool => {
                    let text = "the peer's memory is from a stream-ordered pool, which cannot be \
                         exported";
                    ("stream-ordered-pool", false, text)
                }
                ExportObstacle::Managed => {
                    ("managed", false, "the peer's memory is managed, which cannot be exported")
                }
                ExportObstacle::PrivateHostMemory => {
                    ("private-host-memory", true, "the peer's memory is in no shared segment")
                }
                ExportObstacle::LocalOnly => {
                    ("local-only", false, "the peer registered its memory as local-only")
                }
            },
            Self::LocalExportObstacle { .. } => {
                let text = "the local memory cannot be exported to the copy service";
                ("local-not-exportable", false, text)
            }
            Self::NoCopyService { .. } => ("no-copy-service", false, ""),
            Self::MappingRefused { .. } => ("mapping-refused", false, ""),
            Self::NoLocalDevice => {
                ("no-local-device", false, "this process sees no device that could copy")
            }
            Self::NoPeerAccess => {
                let text = "the devices cannot reach each other's memory directly";
                ("no-peer-access", false, text)
            }
            Self::ForeignDevice => {
                ("foreign-device", false, "the devices are of different implementations")
            }
            Self::NoFabric { .. } => ("no-fabric", false, ""),
            Self::NoRemoteAccess { .. } => ("no-remote-access", false, ""),
            Self::NotRegistered { .. } => ("not-registered", false, ""),
            Self::DeviceFabricOff => {
                ("device-fabric-off", true, "the setting device_fabric is off")
            }
            Self::RegistrationRefused { .. } => ("registration-refused", false, ""),
            Self::NotProbed { .. } => ("not-probed", false, ""),
            Self::ProbeFailed { .. } => ("probe-failed", false, ""),
            Self::LocalNotices => {
                let text = "notices between processes of one machine do not use the fabric, and \
                     could overtake device memory";
                ("local-notices", false, text)
            }
            Self::NothingToStage => {
                ("nothing-to-stage", true, "the fabric accesses both memories itself")
            }
            Self::Denied => ("denied", true, "the policy denies it"),
            Self::NotRequired => ("not-required", true, "the policy requires other paths"),
            Self::Better { .. } => ("better", true, ""),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDescriptorPassing { cause } => {
                write!(f, "no descriptor can be passed between them: {cause}")
            }
            Self::MappingRefused { cause } => {
                write!(
                    f,
                    "this process does not see the peer's device, and the driver does not map its \
                     memory: {cause}"
                )
            }
            Self::NoCopyService { cause } => write!(f, "no copy service copies for it: {cause}"),
            Self::NoFabric { cause } => write!(f, "they have no provider in common: {cause}"),
            Self::NoRemoteAccess { provider } => {
                write!(f, "{provider} has no one-sided reads and writes")
            }
            Self::NotRegistered { provider, side } => {
                write!(f, "{provider} does not reach the {side} memory")
            }
            Self::RegistrationRefused { side, cause } => {
                write!(f, "the {side} memory is not registered: {cause}")
            }
            Self::NotProbed { provider } => {
                write!(f, "{provider} was not probed with this memory yet; a join does it")
            }
            Self::ProbeFailed { provider, cause } => {
                write!(f, "{provider} failed the probe: {cause}")
            }
            Self::Better { taken } => write!(f, "possible, but {taken} comes first"),
            _ => f.write_str(self.properties().2),
        }
    }
}
