//! The kind of memory of a buffer.
//!
//! A pointer does not tell what it points to, and a provider that takes a device pointer for a
//! host pointer reads garbage or crashes. So the kind travels with every buffer, and with every
//! region descriptor.

use std::fmt;

use libfabric_sys as sys;
use serde::{Deserialize, Serialize};

/// The kind of memory that holds a buffer. To this crate a device is an interface number and a
/// device number: it neither allocates nor copies device memory.
///
/// ```
/// use fabric::MemoryKind;
/// assert_eq!(MemoryKind::default(), MemoryKind::Host);
/// assert_eq!(MemoryKind::Cuda(1).to_string(), "cuda:1");
/// assert!(!MemoryKind::Host.is_device());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MemoryKind {
    /// Host memory.
    #[default]
    Host,
    /// NVIDIA memory on the device with this CUDA ordinal.
    Cuda(i32),
    /// AMD memory.
    Rocr,
    /// Intel memory on this device index.
    LevelZero(i32),
    /// AWS Trainium.
    Neuron(i32),
    /// Habana Gaudi.
    SynapseAi(i32),
    /// Host memory that acts as memory of the device with this number. libfabric does not know it:
    /// only the emulated provider of tests registers it.
    Emulated(i32),
}

/// The interface number of emulated memory in region descriptors, far from those of libfabric.
const EMULATED: u32 = u32::from_le_bytes(*b"FcEm");

impl MemoryKind {
    /// Number and name of the interface, and the device number within it, if it has one.
    fn parts(self) -> (u32, &'static str, Option<i32>) {
        match self {
            Self::Host => (sys::FI_HMEM_SYSTEM, "host", None),
            Self::Cuda(n) => (sys::FI_HMEM_CUDA, "cuda", Some(n)),
            Self::Rocr => (sys::FI_HMEM_ROCR, "rocr", None),
            Self::LevelZero(n) => (sys::FI_HMEM_ZE, "ze", Some(n)),
            Self::Neuron(n) => (sys::FI_HMEM_NEURON, "neuron", Some(n)),
            Self::SynapseAi(n) => (sys::FI_HMEM_SYNAPSEAI, "synapseai", Some(n)),
            Self::Emulated(n) => (EMULATED, "emulated", Some(n)),
        }
    }

    /// libfabric's number of the interface.
    pub(crate) fn interface(self) -> u32 {
        self.parts().0
    }

    /// The device number within the interface, 0 if there is none.
    pub(crate) fn device(self) -> i32 {
        self.parts().2.unwrap_or(0)
    }

    pub(crate) fn from_parts(interface: u32, device: i32) -> Option<Self> {
        Some(match interface {
            // These interfaces have no device numbers: a number would be lost.
            sys::FI_HMEM_SYSTEM if device == 0 => Self::Host,
            sys::FI_HMEM_CUDA => Self::Cuda(device),
            sys::FI_HMEM_ROCR if device == 0 => Self::Rocr,
            sys::FI_HMEM_ZE => Self::LevelZero(device),
            sys::FI_HMEM_NEURON => Self::Neuron(device),
            sys::FI_HMEM_SYNAPSEAI => Self::SynapseAi(device),
            EMULATED => Self::Emulated(device),
            _ => return None,
        })
    }

    /// Is this memory of a device?
    #[must_use]
    pub fn is_device(self) -> bool {
        self != Self::Host
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (_, name, device) = self.parts();
        f.write_str(name)?;
        device.map_or(Ok(()), |number| write!(f, ":{number}"))
    }
}
