//! Names of devices.

use std::fmt;

/// The implementation behind the interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Implementation {
    /// NVIDIA's driver.
    Cuda,
    /// Host memory and threads, for machines without a GPU and for tests.
    Emulated,
}

impl fmt::Display for Implementation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cuda => "cuda",
            Self::Emulated => "emulated",
        })
    }
}

/// A device of this process, as `cuda:0` or `emulated:1`.
///
/// The number is local to this process: another process may see the same device under another
/// number. The [UUID](crate::Uuid) names a device in all processes.
///
/// ```
/// use gpu::{DeviceName, Implementation};
/// let name: DeviceName = "cuda:1".parse().unwrap();
/// assert_eq!((name.implementation, name.number), (Implementation::Cuda, 1));
/// assert_eq!(name.to_string(), "cuda:1");
/// assert!("cuda".parse::<DeviceName>().is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceName {
    /// The implementation.
    pub implementation: Implementation,
    /// The index, from 0.
    pub number: u32,
}

impl DeviceName {
    /// A CUDA device.
    #[must_use]
    pub const fn cuda(number: u32) -> Self {
        Self { implementation: Implementation::Cuda, number }
    }

    /// An emulated device.
    #[must_use]
    pub const fn emulated(number: u32) -> Self {
        Self { implementation: Implementation::Emulated, number }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.implementation, self.number)
    }
}
