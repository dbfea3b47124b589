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
    /// This process does not see the peer's device.
    DeviceNotVisible,
    /// The devices cannot reach each other directly.
    NoPeerAccess,
    /// The devices are of different implementations.
    ForeignDevice,
    /// They have no fabric in common.
    NoFabric {
        /// The attempt, and how it failed.
        cause: String,
    },
    /// The provider has no one-sided reads and writes.
    NoRemoteAccess {
        /// Its name.
        provider: String,
    },
    /// The provider does not register memory of this kind.
    NotRegistered {
        /// Its name.
        provider: String,
        /// The side of the memory: "local" or "remote".
        side: &'static str,
    },
    /// The provider registers memory of this kind, but unreliably.
    NotSafe {
        /// Its name.
        provider: String,
        /// The side of the memory: "local" or "remote".
        side: &'static str,
    },
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
    /// Its name in metrics.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::OtherProcess => "other-process",
            Self::SameProcess => "same-process",
            Self::OtherMachine => "other-machine",
            Self::NoDescriptorPassing { .. } => "no-descriptor-passing",
            Self::ForcedRemote => "forced-remote",
            Self::NoDeviceMemory => "no-device-memory",
            Self::NoHostMemory => "no-host-memory",
            Self::ExportObstacle { cause: ExportObstacle::NotExportable } => "not-exportable",
            Self::ExportObstacle { cause: ExportObstacle::NoLegacyHandle } => "no-legacy-handle",
            Self::ExportObstacle { cause: ExportObstacle::StreamOrderedPool } => {
                "stream-ordered-pool"
            }
            Self::ExportObstacle { cause: ExportObstacle::Managed } => "managed",
            Self::ExportObstacle { cause: ExportObstacle::PrivateHostMemory } => {
                "private-host-memory"
            }
            Self::ExportObstacle { cause: ExportObstacle::LocalOnly } => "local-only",
            Self::DeviceNotVisible => "device-not-visible",
            Self::NoPeerAccess => "no-peer-access",
            Self::ForeignDevice => "foreign-device",
            Self::NoFabric { .. } => "no-fabric",
            Self::NoRemoteAccess { .. } => "no-remote-access",
            Self::NotRegistered { .. } => "not-registered",
            Self::NotSafe { .. } => "not-safe",
            Self::NothingToStage => "nothing-to-stage",
            Self::Denied => "denied",
            Self::NotRequired => "not-required",
            Self::Better { .. } => "better",
        }
    }

    /// Is it natural in this situation, so that the path was never expected? Taking a worse path
    /// for any other reason is a *fallback*, which is logged and counted.
    #[must_use]
    pub const fn is_expected(&self) -> bool {
        matches!(
            self,
            Self::OtherProcess
                | Self::SameProcess
                | Self::OtherMachine
                | Self::ForcedRemote
                | Self::NoDeviceMemory
                | Self::NoHostMemory
                | Self::ExportObstacle { cause: ExportObstacle::PrivateHostMemory }
                | Self::NothingToStage
                | Self::Denied
                | Self::NotRequired
                | Self::Better { .. }
        )
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherProcess => f.write_str("they are different processes"),
            Self::SameProcess => f.write_str("they are the same process"),
            Self::OtherMachine => f.write_str("they are on different machines"),
            Self::NoDescriptorPassing { cause } => {
                write!(f, "no descriptor can be passed between them: {cause}")
            }
            Self::ForcedRemote => f.write_str("the configuration forces them to be remote"),
            Self::NoDeviceMemory => f.write_str("the peer's memory is on the host"),
            Self::NoHostMemory => f.write_str("the peer's memory is on a device"),
            Self::ExportObstacle { cause } => f.write_str(match cause {
                ExportObstacle::NotExportable => {
                    "the peer's memory was mapped from pieces without exportable handles"
                }
                ExportObstacle::NoLegacyHandle => {
                    "the peer's memory is from cudaMalloc, and its device (emulated?) exports no \
                     legacy handles"
                }
                ExportObstacle::StreamOrderedPool => {
                    "the peer's memory is from a stream-ordered pool, which cannot be exported"
                }
                ExportObstacle::Managed => "the peer's memory is managed, which cannot be exported",
                ExportObstacle::PrivateHostMemory => "the peer's memory is in no shared segment",
                ExportObstacle::LocalOnly => "the peer registered its memory as local-only",
            }),
            Self::DeviceNotVisible => f.write_str("this process does not see the peer's device"),
            Self::NoPeerAccess => {
                f.write_str("the devices cannot reach each other's memory directly")
            }
            Self::ForeignDevice => f.write_str("the devices are of different implementations"),
            Self::NoFabric { cause } => write!(f, "they have no fabric in common: {cause}"),
            Self::NoRemoteAccess { provider } => {
                write!(f, "{provider} has no one-sided reads and writes")
            }
            Self::NotRegistered { provider, side } => {
                write!(f, "{provider} does not reach the {side} memory")
            }
            Self::NotSafe { provider, side } => {
                write!(f, "{provider} registers the {side} memory, but not reliably")
            }
            Self::NothingToStage => f.write_str("the fabric accesses both memories itself"),
            Self::Denied => f.write_str("the policy denies it"),
            Self::NotRequired => f.write_str("the policy requires other paths"),
            Self::Better { taken } => write!(f, "possible, but {taken} comes first"),
        }
    }
}
