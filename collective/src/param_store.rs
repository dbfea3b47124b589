//! The parameter store: a table of parameters in shared memory, without operations.
//!
//! It is for programs that carry out collective operations themselves, and need the same parameters on
//! all ranks.

use std::sync::Arc;
use std::time::Duration;

use crate::call::Call;
use crate::controller::{Change, Choices, Controller};
use crate::domain_key::{CommDomainKey, digest};
use crate::domain_options::{DomainOptions, Kind, segment_too_small};
use crate::error::{Error, ErrorKind, Result};
use crate::members::{Failure, Members};
use crate::operation::OpKey;
use crate::param_table::ParamTable;
use crate::parameters::Parameters;
use crate::rendezvous::Offer;
use crate::saved_parameters::SavedParameters;
use crate::statistics::ExecStat;
use crate::status_file::DomainKind;

/// An operation that a rank has entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The number of the operation, from 1: the same on all ranks.
    pub number: u64,
    /// The key.
    pub key: OpKey,
    /// The parameters: the same on all ranks.
    pub parameters: Parameters,
}

/// Parameters of collective operations in shared memory, as one rank of a machine sees them.
///
/// Rank 0 learns from what all ranks record, and writes the table; all use the same parameters in the
/// operation of the same number. Ranks enter operations in the same order. Dead ranks are left behind;
/// after the death of rank 0 the parameters stay as they are.
///
/// ```
/// use std::time::Duration;
/// use collective::{Choices, CommDomainKey, DataType, DomainOptions, ExecStat, OpKey, Operation};
/// use collective::{Parameters, ShmParamStore, SizeClass};
/// # let directory = std::env::temp_dir().join(format!("fabricast-store-{}", std::process::id()));
/// let options = DomainOptions::new().job("example");
/// # let options = options.directory(&directory);
/// let domain = CommDomainKey::of_first_ranks(1);
/// // The second path gets a tenth of the bytes at first.
/// let choices = |_| Choices { candidates: vec![Parameters::default()], first_alpha: Some(900) };
/// let mut store = ShmParamStore::attach(&domain, 0, &options, choices)?;
/// let key = OpKey {
///     operation: Operation::AllGather,
///     size_class: SizeClass::of(1 << 24),
///     data_type: DataType::U8,
/// };
/// for _ in 0..8 {
///     let entry = store.enter(key, Duration::from_secs(10))?;
///     let fast_bytes = entry.parameters.fast_bytes(1 << 24, 4096);
///     // The operation is carried out here, and both paths are measured.
///     let fast_time = Duration::from_nanos(fast_bytes / 300);
///     let second_bytes = (1 << 24) - fast_bytes;
///     let second_time = Duration::from_nanos(second_bytes / 30);
///     let stat = ExecStat { fast_time, second_time, fast_bytes, second_bytes, success: true };
///     store.record(&entry, &stat)?;
/// }
/// assert!(store.parameters(key).alpha < 1000);
/// let json = store.saved_parameters().to_json("a topology");
/// assert!(collective::SavedParameters::from_json(&json, "a topology").is_ok());
/// store.leave();
/// # std::fs::remove_dir(&directory).unwrap();
/// # Ok::<(), collective::Error>(())
/// ```
#[derive(Debug)]
pub struct ShmParamStore {
    members: Arc<Members>,
    /// None once the store was left.
    table: Option<ParamTable>,
}

impl ShmParamStore {
    /// Attaches to the store of a domain, as its rank of this number. Waits until all ranks have come:
    /// the first one makes the memory, which ends with the last one. `choices` are the parameters of
    /// which rank 0 chooses.
    ///
    /// # Errors
    /// As for [`CommDomain::join`](crate::CommDomain::join).
    pub fn attach(
        key: &CommDomainKey,
        rank: u32,
        options: &DomainOptions,
        choices: impl Fn(OpKey) -> Choices + Send + 'static,
    ) -> Result<Self> {
        let kind =
            Kind::new("store", DomainKind::ParameterStore, digest([u64::from(OpKey::COUNT)]));
        let mut joined = options.join(kind, key, rank, None, |_| 0, Offer::default())?;
        let (first_table, status) = (joined.first_table(), joined.take_status());
        let members = joined.into_members().0;
        let learning = options.learning_options();
        let table =
            ParamTable::new(Arc::clone(&members), first_table, learning, choices, status, true);
        Ok(Self { members, table: Some(table.ok_or_else(segment_too_small)?) })
    }

    /// This process' rank, from 0.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.members.rank()
    }

    /// The number of ranks.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.members.count()
    }

    /// Enters the next operation. A rank waits while another one is too far behind.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) with that rank; the operation is not entered.
    pub fn enter(&mut self, key: OpKey, timeout: Duration) -> Result<Entry> {
        const OPERATION: &str = "enter operation";
        self.members.check_fork(OPERATION)?;
        let call = Call {
            operation: key.operation,
            data_type: key.data_type,
            reduce_op: None,
            root: None,
            count: key.size_class.largest(),
            blocks: 0,
        };
        // Without a wait the clock is not read.
        let entered = self.table_mut().try_enter(&call);
        let entered = match entered {
            Some(number) => Ok(number),
            None => self.table_mut().enter(&call, ipc::deadline(timeout)),
        };
        let number = entered.map_err(|failure| match failure {
            Failure::Late { rank, .. } => {
                let detail = format!("rank {rank} is too far behind: it may be stopped");
                Error::new(OPERATION, ErrorKind::DeadlineExceeded, detail).of_ranks([rank])
            }
            failure => self.members.error(OPERATION, failure),
        })?;
        self.members.ring();
        Ok(Entry { number, key, parameters: self.parameters(key) })
    }

    /// Records how an operation went on this rank.
    ///
    /// # Errors
    /// [`Forked`](ErrorKind::Forked).
    pub fn record(&mut self, entry: &Entry, stat: &ExecStat) -> Result<()> {
        self.members.check_fork("record operation")?;
        self.table_mut().record(entry.number, entry.key, entry.parameters, stat);
        Ok(())
    }

    /// The parameters of a key in the operation that was entered last.
    #[must_use]
    pub fn parameters(&self, key: OpKey) -> Parameters {
        self.table.as_ref().map_or_else(Parameters::default, |table| table.parameters(key))
    }

    /// Returns whether rank 0 has ended or left: then the parameters stay as they are.
    #[must_use]
    pub fn has_lost_writer(&self) -> bool {
        self.members.has_ended(0) || self.table.as_ref().is_some_and(|table| table.has_left(0))
    }

    /// Parameters to save: on rank 0 those that it has settled on, on others those in use.
    #[must_use]
    pub fn saved_parameters(&self) -> SavedParameters {
        self.table.as_ref().map_or_else(SavedParameters::default, ParamTable::saved)
    }

    /// Changes of the parameters of a key, the latest first; none if this is not rank 0.
    #[must_use]
    pub fn history(&self, key: OpKey) -> Vec<Change> {
        let controller = self.table.as_ref().and_then(ParamTable::controller);
        controller.map_or_else(Vec::new, |controller| controller.history(key).copied().collect())
    }

    /// Changes what rank 0 learns: it stops, continues, or loads what was learnt before. False, and
    /// without effect, on other ranks.
    pub fn with_controller(&mut self, change: impl FnOnce(&mut Controller)) -> bool {
        self.table_mut().with_controller(change)
    }

    /// Leaves: no rank waits for this one any more. Dropping the store does the same.
    pub fn leave(self) {}

    fn table_mut(&mut self) -> &mut ParamTable {
        self.table.as_mut().expect("only the end of the store takes the table")
    }
}

impl Drop for ShmParamStore {
    fn drop(&mut self) {
        if self.members.check_fork("leave parameter store").is_ok()
            && let Some(table) = self.table.take()
        {
            table.leave();
        }
    }
}
