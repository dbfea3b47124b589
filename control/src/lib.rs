//! The control plane that all parts of Fabricast share.
//!
//! - [`codec`] writes and reads the messages that processes and nodes exchange to agree on
//!   something, as opposed to payload.
//! - [`launcher`] gets rank and size from the launcher that started this process (`mpirun`, `srun`,
//!   `torchrun`), and exchanges bytes among all ranks through it.
//!
//! Modules, each importing only those before it: `codec`, `launcher`.

pub mod codec;
pub mod launcher;
