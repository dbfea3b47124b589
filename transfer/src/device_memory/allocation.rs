//! How device memory was allocated, as far as fabrics are concerned.

use gpu::Allocator;
use serde::{Deserialize, Serialize};

use crate::path::{ExportObstacle, Exportability};

/// How device memory was allocated. Providers differ in what they register of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Allocation {
    /// By `cudaMalloc`.
    Plain,
    /// Mapped from physical memory (VMM).
    Mapped,
}

impl Allocation {
    /// None for memory that is never registered.
    pub(crate) fn of(allocator: Allocator) -> Option<Self> {
        match allocator {
            Allocator::Plain => Some(Self::Plain),
            Allocator::Mapped { .. } => Some(Self::Mapped),
            Allocator::Pool | Allocator::Managed | Allocator::Host => None,
        }
    }

    pub(super) fn of_exported(exportability: Exportability) -> Option<Self> {
        match exportability {
            Exportability::ByDescriptors | Exportability::Not(ExportObstacle::NotExportable) => {
                Some(Self::Mapped)
            }
            Exportability::ByLegacyHandle | Exportability::Not(ExportObstacle::NoLegacyHandle) => {
                Some(Self::Plain)
            }
            Exportability::Not(_) => None,
        }
    }
}
