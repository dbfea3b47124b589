//! What a launcher provides.

use std::time::Duration;

use super::error::Result;

/// The rank of a process among those of its job on the same machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalRank {
    /// From 0.
    pub rank: u32,
    /// Number of ranks on the machine.
    pub size: u32,
}

/// One rank's connection to its job: its rank, and an exchange of bytes among all ranks.
///
/// Launchers implement it; [`start`](super::start) returns the one that started this process.
/// Programs that already have a communicator implement it by that:
///
/// ```
/// use std::time::Duration;
/// use control::launcher::{Exchange, Result};
///
/// #[derive(Debug)]
/// struct Communicator { /* an MPI communicator */ }
///
/// impl Exchange for Communicator {
///     fn name(&self) -> &str { "MPI" }
///     fn job(&self) -> &str { "4711" }
///     fn rank(&self) -> u32 { 0 }
///     fn size(&self) -> u32 { 1 }
///     fn all_gather(&mut self, own: &[u8], _: Duration) -> Result<Vec<Vec<u8>>> {
///         Ok(vec![own.to_vec()]) // MPI_Allgather of the lengths, MPI_Allgatherv of the bytes
///     }
/// }
/// # let mut exchange = Communicator {};
/// # assert_eq!(exchange.all_gather(b"card", Duration::from_secs(1))?, [b"card"]);
/// # Ok::<(), control::launcher::Error>(())
/// ```
pub trait Exchange: Send + std::fmt::Debug {
    /// The launcher or its protocol, for messages: `PMI-1`, `PMIx`.
    fn name(&self) -> &str;

    /// The job: the same text for all its ranks, and another one for each other job of the user.
    fn job(&self) -> &str;

    /// This process' rank, below [`size`](Self::size).
    fn rank(&self) -> u32;

    /// The number of ranks.
    fn size(&self) -> u32;

    /// This process' rank on its machine, if the launcher reports it.
    fn local(&self) -> Option<LocalRank> {
        None
    }

    /// Gathers the bytes of all ranks, in the order of the ranks. All ranks call it equally often.
    /// After an error it is not called again.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](super::ErrorKind::DeadlineExceeded) with the ranks that did not call
    /// it, if they are known; errors of the launcher.
    fn all_gather(&mut self, own: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>>;
}
