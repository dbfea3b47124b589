//! Why a path was not taken.

use std::fmt;

use serde::Serialize;

use super::Path;
use super::facts::ExportObstacle;

/// Why a path was not taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "reason", rename_all = "kebab-case")]
pub enum Reason {
    /// They are two processes.
    OtherProcess,
    /// They are one process: nothing has to leave it.
    SameProcess,
    /// They are on different machines.
    OtherMachine,
    /// No descriptor can be passed between them.
    NoDescriptorPassing {
        /// What was tried, and how it failed.
        cause: String,
    },
    /// The configuration says that they are remote.
    ForcedRemote,
    /// The peer's memory does not lie on a device.
    NoDeviceMemory,
    /// The peer's memory does not lie on the host.
    NoHostMemory,
    /// The peer's memory cannot leave its process.
    ExportObstacle {
        /// Why it cannot.
        cause: ExportObstacle,
    },
    /// This process does not see the peer's device.
    DeviceNotVisible,
    /// The devices cannot reach each other directly.
    NoPeerAccess,
    /// The devices are of different implementations.
    ForeignDevice,
    /// They share no fabric.
    NoFabric {
        /// What was tried, and how it failed.
        cause: String,
    },
    /// The provider has no one-sided reads and writes.
    NoRemoteAccess {
        /// Its name.
        provider: String,
    },
    /// The provider does not reach memory of this kind.
    NotRegistered {
        /// Its name.
        provider: String,
        /// Whose memory: "local" or "remote".
        side: &'static str,
    },
    /// The provider registers memory of this kind, and cannot be relied on with it.
    NotSafe {
        /// Its name.
        provider: String,
        /// Whose memory: "local" or "remote".
        side: &'static str,
    },
    /// The fabric reaches both memories: there is nothing to stage.
    NothingToStage,
    /// The policy denies it.
    Denied,
    /// The policy requires others.
    NotRequired,
    /// It could be had; another one is better, or preferred.
    Better {
        /// The one that was taken.
        taken: Path,
    },
}

impl Reason {
    /// As metrics call it.
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

    /// Does it lie in the nature of the thing, so that nobody would have expected the
    /// path? Taking a worse path for any other reason is a *fallback*, which is told and
    /// counted.
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
            Self::OtherProcess => f.write_str("they are two processes"),
            Self::SameProcess => f.write_str("they are one process: nothing has to leave it"),
            Self::OtherMachine => f.write_str("they are on different machines"),
            Self::NoDescriptorPassing { cause } => write!(f, "no descriptor can be passed between them: {cause}"),
            Self::ForcedRemote => f.write_str("the configuration takes them for remote"),
            Self::NoDeviceMemory => f.write_str("the peer's memory lies on the host"),
            Self::NoHostMemory => f.write_str("the peer's memory lies on a device"),
            Self::ExportObstacle { cause } => f.write_str(match cause {
                ExportObstacle::NotExportable => {
                    "the peer's memory was mapped from pieces that were not made to be exported"
                }
                ExportObstacle::NoLegacyHandle => {
                    "the peer's memory was allocated the plain way, and its device (a emulated?) makes no \
                     handles of such memory"
                }
                ExportObstacle::StreamOrderedPool => {
                    "the peer's memory comes from a stream-ordered pool, which cannot be exported"
                }
                ExportObstacle::Managed => "the peer's memory is managed, which cannot be exported",
                ExportObstacle::PrivateHostMemory => "the peer's memory is in no shared segment",
                ExportObstacle::LocalOnly => "the peer registered its memory for own use only",
            }),
            Self::DeviceNotVisible => f.write_str("this process does not see the peer's device"),
            Self::NoPeerAccess => {
                f.write_str("the devices cannot reach each other's memory directly")
            }
            Self::ForeignDevice => f.write_str("the devices are of different implementations"),
            Self::NoFabric { cause } => write!(f, "they share no fabric: {cause}"),
            Self::NoRemoteAccess { provider } => {
                write!(f, "{provider} has no one-sided reads and writes")
            }
            Self::NotRegistered { provider, side } => {
                write!(f, "{provider} does not reach the {side} memory")
            }
            Self::NotSafe { provider, side } => {
                write!(f, "{provider} takes the {side} memory, but cannot be relied on with it")
            }
            Self::NothingToStage => f.write_str("the fabric reaches both memories by itself"),
            Self::Denied => f.write_str("the policy denies it"),
            Self::NotRequired => f.write_str("the policy requires another"),
            Self::Better { taken } => write!(f, "possible, but {taken} comes first"),
        }
    }
}
