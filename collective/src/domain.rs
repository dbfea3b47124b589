//! A communication domain: the ranks that carry out collective operations together.

use std::sync::Arc;
use std::time::{Duration, Instant};

use launch::Group;

use crate::call::Call;
use crate::collective_call::{Blocks, CheckedCall, CollectiveCall};
use crate::controller::{Change, Choices, Controller};
use crate::domain_key::{CommDomainKey, digest};
use crate::domain_options::{DomainOptions, JOIN, segment_too_small};
use crate::element::Element;
use crate::error::{Error, ErrorKind, Result};
use crate::host_operations::{self as operations, Ranks, Reduction, Route, Stores, Way};
use crate::host_steps::{HostOperation, HostSteps};
use crate::members::{Failure, Members, Outcome};
use crate::operation::{OpKey, Operation, SizeClass};
use crate::param_table::ParamTable;
use crate::parameters::{Algorithm, Parameters};
use crate::peer_memory;
use crate::place::Place;
use crate::rendezvous::Offer;
use crate::saved_parameters::SavedParameters;
use crate::statistics::ExecStat;
use reduction::ReduceOp;

const PAGE: usize = 4096;
/// Memory for the steps of all ranks, at most.
const MAX_SLOTS: usize = 64 << 20;
/// Bytes of a step of a rank, at least and at most.
const SLOT_BYTES: [usize; 2] = [64 << 10, 1 << 20];
/// Up to this size each rank reduces all elements, instead of a share.
const ONE_STEP_BYTES: u64 = 8 << 10;
/// From this size on parameters are learnt: smaller operations take as long with all of them.
const LEARNT_BYTES: u64 = 128 << 10;
/// The bytes of a chunk that suit the caches, if nothing was learnt.
const CHUNK_BYTES: usize = 128 << 10;

/// The ranks that carry out collective operations together, as one of them sees them.
///
/// All ranks call the same operations in the same order. If a rank has ended, is late, or calls
/// something else, the operation fails on all ranks with an error that names it, and the domain is over.
///
/// ```
/// use std::time::Duration;
/// use collective::{CommDomain, CommDomainKey, DomainOptions, ReduceOp};
/// # let directory = std::env::temp_dir().join(format!("fabricast-domain-{}", std::process::id()));
/// let timeout = Duration::from_secs(10);
/// let options = DomainOptions::new().job("example");
/// # let options = options.directory(&directory);
/// let key = CommDomainKey::of_first_ranks(2);
/// let rank = |number: u32| {
///     let mut domain = CommDomain::join(&key, number, &options)?;
///     let mut sums = [1.0, f64::from(number)];
///     domain.all_reduce(&mut sums, ReduceOp::Sum, timeout)?;
///     domain.close(timeout)?;
///     Ok::<_, collective::Error>(sums)
/// };
/// // Usually each rank is a process.
/// std::thread::scope(|scope| {
///     let other = scope.spawn(|| rank(1));
///     assert_eq!(rank(0).unwrap(), [2.0, 1.0]);
///     assert_eq!(other.join().unwrap().unwrap(), [2.0, 1.0]);
/// });
/// # std::fs::remove_dir(&directory).unwrap();
/// ```
#[derive(Debug)]
pub struct CommDomain {
    key: CommDomainKey,
    members: Arc<Members>,
    /// None once the domain was left.
    table: Option<ParamTable>,
    steps: HostSteps,
    /// A digest of all calls so far.
    calls: u64,
    fixed: Option<Parameters>,
    /// Ranks read the memory of each other.
    reads_peers: bool,
}

impl CommDomain {
    /// Joins the domain of this key, as its rank of this number. Waits until all ranks have come.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a rank or options that are invalid,
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) with the ranks that have not come,
    /// [`VersionMismatch`](ErrorKind::VersionMismatch) if ranks are of different builds or have different
    /// options.
    pub fn join(key: &CommDomainKey, rank: u32, options: &DomainOptions) -> Result<Self> {
        let slot_bytes = |ranks: u32| {
            let bytes = (MAX_SLOTS / 2 / ranks.max(1) as usize).clamp(SLOT_BYTES[0], SLOT_BYTES[1]);
            bytes / PAGE * PAGE
        };
        let words = |ranks| HostSteps::required_words(ranks, slot_bytes(ranks));
        let constants = [CHUNK_BYTES as u64, ONE_STEP_BYTES, LEARNT_BYTES, OpKey::COUNT.into()];
        let joined =
            options.join("domain", key, rank, digest(constants), words, Offer::default())?;
        let (first_table, first_extra) = (joined.first_table(), joined.first_extra());
        let deadline = joined.deadline();
        let members = joined.into_members().0;
        let ranks = members.count();
        let slot_bytes = slot_bytes(ranks);
        let strategy = options.strategy();
        let steps = HostSteps::new(Arc::clone(&members), first_extra, slot_bytes, strategy);
        let mut steps = steps.ok_or_else(segment_too_small)?;
        let is_wanted = options.wants_to_read_peers() && ranks > 1;
        let reads_peers = try_reading(&mut steps.operation(0, deadline), &members, is_wanted)
            .map_err(|failure| members.error(JOIN, failure, |_, _| None))?;
        let choices = move |key| choices(key, ranks, slot_bytes, reads_peers);
        let learning = options.learning_options();
        let table = ParamTable::new(Arc::clone(&members), first_table, learning, choices, false);
        let table = Some(table.ok_or_else(segment_too_small)?);
        let fixed = options.fixed();
        Ok(Self { key: key.clone(), members, table, steps, calls: 0, fixed, reads_peers })
    }

    /// Joins the domain of all ranks of a launched job. The job and the directory of the options are those
    /// of the group.
    ///
    /// ```
    /// use std::time::Duration;
    /// use collective::{CommDomain, DomainOptions, ReduceOp};
    /// let timeout = Duration::from_secs(10);
    /// let group = launch::Group::start()?;
    /// let mut domain = CommDomain::of_group(&group, &DomainOptions::new())?;
    /// let mut ranks = [1];
    /// domain.all_reduce(&mut ranks, ReduceOp::Sum, timeout)?;
    /// assert_eq!(ranks[0], group.size());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`join`](Self::join).
    pub fn of_group(group: &Group, options: &DomainOptions) -> Result<Self> {
        if group.machines() > 1 {
            let detail = format!("the ranks are on {} machines", group.machines());
            return Err(Error::new(JOIN, ErrorKind::Unavailable, detail));
        }
        let key = CommDomainKey::of_first_ranks(group.size());
        let options = options.clone().directory(group.directory()).job(group.job());
        Self::join(&key, group.rank(), &options)
    }

    /// The key.
    #[must_use]
    pub fn key(&self) -> &CommDomainKey {
        &self.key
    }

    /// This process' rank in the domain, from 0.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.members.rank()
    }

    /// The number of ranks.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.members.count()
    }

    /// Returns whether ranks read the memory of each other by the kernel.
    #[must_use]
    pub fn reads_peers(&self) -> bool {
        self.reads_peers
    }

    /// The parameters of a key in the last operation: the same on all ranks.
    #[must_use]
    pub fn parameters(&self, key: OpKey) -> Parameters {
        self.table.as_ref().map_or_else(Parameters::default, |table| table.parameters(key))
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
        self.table.as_mut().is_some_and(|table| table.with_controller(change))
    }

    /// Waits until all ranks have called it.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn barrier(&mut self, timeout: Duration) -> Result<()> {
        let none = Blocks::One(0);
        let call = CollectiveCall::moving::<u8>(Operation::Barrier, 0, &[], none, &mut [], none);
        self.run_safe(&call, timeout)
    }

    /// Reduces the elements of all ranks to those of each.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn all_reduce<T: Element>(
        &mut self,
        elements: &mut [T],
        op: ReduceOp,
        timeout: Duration,
    ) -> Result<()> {
        let count = Blocks::One(elements.len());
        let call = CollectiveCall::in_place(Operation::AllReduce, op, 0, elements, count, count);
        self.run_safe(&call, timeout)
    }

    /// Reduces the elements of all ranks to those of the rank `root`. Those of the others stay.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn reduce<T: Element>(
        &mut self,
        root: u32,
        elements: &mut [T],
        op: ReduceOp,
        timeout: Duration,
    ) -> Result<()> {
        let count = Blocks::One(elements.len());
        let call = CollectiveCall::in_place(Operation::Reduce, op, root, elements, count, count);
        self.run_safe(&call, timeout)
    }

    /// Gives the elements of the rank `root` to all.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn broadcast<T: Element>(
        &mut self,
        root: u32,
        elements: &mut [T],
        timeout: Duration,
    ) -> Result<()> {
        let count = Blocks::One(elements.len());
        let call = CollectiveCall::in_place(
            Operation::Broadcast,
            ReduceOp::Sum,
            root,
            elements,
            count,
            count,
        );
        self.run_safe(&call, timeout)
    }

    /// Gives the elements of each rank to all, in the order of the ranks: `all` has those of all ranks.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn all_gather<T: Element>(
        &mut self,
        own: &[T],
        all: &mut [T],
        timeout: Duration,
    ) -> Result<()> {
        self.check_count(Operation::AllGather, all.len(), own.len())?;
        let (send, receive) = (Blocks::One(own.len()), Blocks::Each(own.len()));
        let call = CollectiveCall::moving(Operation::AllGather, 0, own, send, all, receive);
        self.run_safe(&call, timeout)
    }

    /// Gives different numbers of elements of each rank to all: `counts` has that of each.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn all_gather_unequal<T: Element>(
        &mut self,
        own: &[T],
        all: &mut [T],
        counts: &[usize],
        timeout: Duration,
    ) -> Result<()> {
        let offsets = self.offsets(Operation::AllGather, counts, all.len())?;
        let receive = Blocks::Unequal { counts, offsets: &offsets };
        let send = Blocks::One(own.len());
        let call = CollectiveCall::moving(Operation::AllGather, 0, own, send, all, receive);
        self.run_safe(&call, timeout)
    }

    /// Reduces a block for each rank: rank n gets the reduction of the nth blocks of all.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn reduce_scatter<T: Element>(
        &mut self,
        blocks: &[T],
        own: &mut [T],
        op: ReduceOp,
        timeout: Duration,
    ) -> Result<()> {
        self.check_count(Operation::ReduceScatter, blocks.len(), own.len())?;
        let (send, receive) = (Blocks::Each(own.len()), Blocks::One(own.len()));
        let call = CollectiveCall::moving(Operation::ReduceScatter, 0, blocks, send, own, receive);
        self.run_safe(&CollectiveCall { reduce_op: op, ..call }, timeout)
    }

    /// Reduces blocks of different numbers of elements: `counts` has that of each rank.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn reduce_scatter_unequal<T: Element>(
        &mut self,
        blocks: &[T],
        own: &mut [T],
        counts: &[usize],
        op: ReduceOp,
        timeout: Duration,
    ) -> Result<()> {
        let offsets = self.offsets(Operation::ReduceScatter, counts, blocks.len())?;
        let send = Blocks::Unequal { counts, offsets: &offsets };
        let receive = Blocks::One(own.len());
        let call = CollectiveCall::moving(Operation::ReduceScatter, 0, blocks, send, own, receive);
        self.run_safe(&CollectiveCall { reduce_op: op, ..call }, timeout)
    }

    /// Gives the nth block of each rank to rank n.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn all_to_all<T: Element>(
        &mut self,
        send: &[T],
        receive: &mut [T],
        timeout: Duration,
    ) -> Result<()> {
        let each = send.len() / self.size() as usize;
        self.check_count(Operation::AllToAll, send.len(), each)?;
        self.check_count(Operation::AllToAll, receive.len(), each)?;
        let blocks = Blocks::Each(each);
        let call = CollectiveCall::moving(Operation::AllToAll, 0, send, blocks, receive, blocks);
        self.run_safe(&call, timeout)
    }

    /// Gives blocks of different numbers of elements to the ranks.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn all_to_all_unequal<T: Element>(
        &mut self,
        send: &[T],
        send_counts: &[usize],
        receive: &mut [T],
        receive_counts: &[usize],
        timeout: Duration,
    ) -> Result<()> {
        let from = self.offsets(Operation::AllToAll, send_counts, send.len())?;
        let to = self.offsets(Operation::AllToAll, receive_counts, receive.len())?;
        let blocks = Blocks::Unequal { counts: send_counts, offsets: &from };
        let places = Blocks::Unequal { counts: receive_counts, offsets: &to };
        let call = CollectiveCall::moving(Operation::AllToAll, 0, send, blocks, receive, places);
        self.run_safe(&call, timeout)
    }

    /// Gives the elements of each rank to the rank `root`, in whose `all` they are in the order of the
    /// ranks. Other ranks have no `all`.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn gather<T: Element>(
        &mut self,
        root: u32,
        own: &[T],
        all: &mut [T],
        timeout: Duration,
    ) -> Result<()> {
        if self.rank() == root {
            self.check_count(Operation::Gather, all.len(), own.len())?;
        }
        let (send, receive) = (Blocks::One(own.len()), Blocks::Each(own.len()));
        let call = CollectiveCall::moving(Operation::Gather, root, own, send, all, receive);
        self.run_safe(&call, timeout)
    }

    /// Gives a block of the rank `root` to each. Other ranks have no `blocks`.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn scatter<T: Element>(
        &mut self,
        root: u32,
        blocks: &[T],
        own: &mut [T],
        timeout: Duration,
    ) -> Result<()> {
        if self.rank() == root {
            self.check_count(Operation::Scatter, blocks.len(), own.len())?;
        }
        let (send, receive) = (Blocks::Each(own.len()), Blocks::One(own.len()));
        let call = CollectiveCall::moving(Operation::Scatter, root, blocks, send, own, receive);
        self.run_safe(&call, timeout)
    }

    fn check_count(&self, operation: Operation, all: usize, each: usize) -> Result<()> {
        let ranks = self.size() as usize;
        if each.checked_mul(ranks) == Some(all) {
            return Ok(());
        }
        let detail = format!("{all} elements are not {ranks} blocks of {each}");
        Err(Error::new(operation.name(), ErrorKind::InvalidArgument, detail))
    }

    /// Where blocks begin that follow each other.
    fn offsets(&self, operation: Operation, counts: &[usize], all: usize) -> Result<Vec<usize>> {
        let mut total = 0_usize;
        let offsets = counts.iter().map(|count| {
            let offset = total;
            total = total.saturating_add(*count);
            offset
        });
        let offsets: Vec<_> = offsets.collect();
        let detail = match (counts.len(), total) {
            (given, _) if given != self.size() as usize => {
                format!("{given} counts for {} ranks", self.size())
            }
            (_, total) if total != all => {
                format!("{total} elements by the counts, {all} are given")
            }
            _ => return Ok(offsets),
        };
        Err(Error::new(operation.name(), ErrorKind::InvalidArgument, detail))
    }

    /// Runs a call whose places are slices that the caller borrows.
    #[allow(unsafe_code)]
    fn run_safe(&mut self, call: &CollectiveCall<'_>, timeout: Duration) -> Result<()> {
        // SAFETY: the slices have as many elements as the call says, and are borrowed until the return.
        unsafe { self.run(call, timeout) }
    }

    /// Carries out an operation.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument), for which the domain goes on. After each other
    /// error the domain is over, on all ranks: [`Mismatch`](ErrorKind::Mismatch) if ranks called
    /// different operations, [`RankFailed`](ErrorKind::RankFailed), [`Closed`](ErrorKind::Closed) and
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) with the rank.
    ///
    /// # Safety
    /// Input and output are valid for the blocks of the call, and apart from each other or placed as the
    /// call allows. Until the return only this call accesses them.
    #[allow(unsafe_code)]
    pub unsafe fn run(&mut self, call: &CollectiveCall<'_>, timeout: Duration) -> Result<()> {
        let operation = call.operation.name();
        self.members.check_fork(operation)?;
        let checked = call.check(self.rank(), self.size())?;
        let deadline = ipc::deadline(timeout);
        // SAFETY: the caller's promise.
        unsafe { self.run_checked(&checked, deadline) }
            .map_err(|failure| self.error(operation, failure))
    }

    fn error(&self, operation: &'static str, failure: Failure) -> Error {
        let announcement =
            |rank, step| self.table.as_ref().and_then(|table| table.announcement(rank, step));
        self.members.error(operation, failure, announcement)
    }

    #[allow(unsafe_code)]
    unsafe fn run_checked(&mut self, checked: &CheckedCall, deadline: Instant) -> Outcome<()> {
        if let Some(failure) = self.members.failure() {
            return Err(failure);
        }
        let Some(table) = &mut self.table else { return Err(Failure::Left { rank: 0 }) };
        let step = table.enter(checked.call(), deadline)?;
        let key = OpKey {
            operation: checked.call().operation,
            size_class: SizeClass::of(checked.bytes()),
            data_type: checked.call().data_type,
        };
        let is_large = checked.bytes() >= LEARNT_BYTES && self.members.count() > 1;
        let is_learnt = is_large && self.fixed.is_none();
        let parameters = match self.fixed {
            Some(fixed) => fixed,
            None if is_learnt => table.parameters(key),
            None => Parameters::default(),
        };
        self.calls = digest([self.calls, checked.call().signature()]);
        let mut on = self.steps.operation(self.calls, deadline);
        // SAFETY: the caller's promise.
        let done = unsafe { carry_out(&mut on, checked, parameters, self.reads_peers) };
        let begun = on.begun();
        match done {
            Err(Failure::Mismatch { one, other, .. }) => {
                let collective = first_difference(table, one, other);
                return Err(self.members.fail(Failure::Mismatch { one, other, collective }));
            }
            Err(failure) => return Err(failure),
            Ok(()) => {}
        }
        if let Some(begun) = begun.filter(|_| is_learnt) {
            let stat = ExecStat {
                fast_time: begun.elapsed(),
                fast_bytes: checked.bytes(),
                success: true,
                ..ExecStat::default()
            };
            table.record(step, key, parameters, &stat);
        }
        Ok(())
    }

    /// Leaves after all ranks have called it.
    ///
    /// # Errors
    /// As for [`run`](Self::run); the rank has left nevertheless.
    pub fn close(mut self, timeout: Duration) -> Result<()> {
        self.barrier(timeout)
    }
}

impl Drop for CommDomain {
    fn drop(&mut self) {
        if self.members.check_fork("leave communication domain").is_ok() {
            self.members.leave();
            if let Some(table) = self.table.take() {
                table.leave();
            }
        }
    }
}

/// The first operation of those known in which two ranks announced different calls.
fn first_difference(table: &ParamTable, one: u32, other: u32) -> u64 {
    let last = table.step();
    let differ = |step: &u64| {
        let calls = [one, other].map(|rank| table.announcement(rank, *step));
        calls[0].is_some() && calls[1].is_some() && calls[0] != calls[1]
    };
    (last.saturating_sub(8)..=last).find(differ).unwrap_or(last)
}

/// Tries to read the memory of all other ranks. Returns whether all ranks can.
#[allow(unsafe_code)]
fn try_reading(on: &mut HostOperation<'_>, members: &Members, is_wanted: bool) -> Outcome<bool> {
    let nonce = 0x6661_6272_6963_6173_u64 ^ u64::from(members.rank());
    let address = (&raw const nonce).expose_provenance() as u64;
    let all = on.exchange(&[address])?;
    let can_read = |rank: u32| {
        let mut found = 0_u64;
        let (from, to) = (all[rank as usize][0], (&raw mut found).cast());
        let process = members.process_id(rank);
        // SAFETY: one word, of this process.
        let read = unsafe { peer_memory::read(process, from, to, size_of::<u64>()) };
        read.is_ok() && found ^ u64::from(rank) == nonce ^ u64::from(members.rank())
    };
    let can_read_all = is_wanted && (0..members.count()).all(can_read);
    let all = on.exchange(&[u64::from(can_read_all)])?;
    Ok(all.iter().all(|can| can[0] == 1))
}

/// What rank 0 may choose from.
fn choices(key: OpKey, ranks: u32, slot_bytes: usize, reads_peers: bool) -> Choices {
    let mut candidates = Vec::new();
    if key.size_class.largest() >= LEARNT_BYTES && ranks > 1 && key.operation != Operation::Barrier
    {
        candidates.push(Parameters::default());
        if slot_bytes > CHUNK_BYTES {
            let chunk_bits = slot_bytes.ilog2() as u8;
            candidates.push(Parameters { chunk_bits, ..Parameters::default() });
        }
        if reads_peers {
            candidates.push(Parameters { algorithm: Algorithm::Direct, ..Parameters::default() });
        }
    }
    Choices { candidates, first_alpha: None }
}

#[allow(unsafe_code)]
unsafe fn carry_out(
    on: &mut HostOperation<'_>,
    checked: &CheckedCall,
    parameters: Parameters,
    reads_peers: bool,
) -> Outcome<()> {
    let call = checked.call();
    let Call { operation, data_type, .. } = *call;
    let root = call.root.unwrap_or(0);
    let is_direct = parameters.algorithm == Algorithm::Direct && reads_peers;
    let chunk = match parameters.chunk_bits {
        0 => CHUNK_BYTES,
        bits => 1_usize << bits.clamp(12, 30),
    };
    let chunk = chunk.min(on.slot_bytes());
    let route = if is_direct { Route::Direct } else { Route::Chunks(chunk) };
    let all = |places: &[Place]| places.iter().map(|place| place.bytes()).sum::<usize>();
    let stores = match operation {
        Operation::Broadcast => Stores::of_operation(all(checked.to()), on.ranks()),
        _ if checked.is_in_place() => Stores::Cached,
        _ => Stores::of_operation(all(checked.from()) + all(checked.to()), on.ranks()),
    };
    let way = Way::new(route, stores);
    let one = |places: &[Place]| places.first().copied().unwrap_or(Place::NONE);
    let (from, to) = (one(checked.from()), one(checked.to()));
    let reduction = Reduction::new(call.reduce_op.unwrap_or(ReduceOp::Sum), data_type);
    let longest = match checked.longest() {
        Some(longest) => longest,
        None => exchange_lengths(on, checked)?,
    };
    let getters = match operation {
        Operation::Gather | Operation::Reduce => Ranks::One(root),
        _ => Ranks::All,
    };
    let givers = match operation {
        Operation::Broadcast | Operation::Scatter => Ranks::One(root),
        _ => Ranks::All,
    };
    // SAFETY: the caller's promise.
    unsafe {
        match operation {
            Operation::Barrier => on.barrier(),
            Operation::AllReduce | Operation::Reduce => {
                let is_small =
                    checked.bytes() <= ONE_STEP_BYTES && parameters.algorithm != Algorithm::TwoStep;
                if is_small || parameters.algorithm == Algorithm::OneStep {
                    operations::reduce_one_step(on, chunk, stores, reduction, getters, from, to)
                } else {
                    operations::reduce_two_steps(on, way, reduction, getters, from, to)
                }
            }
            Operation::ReduceScatter => {
                operations::reduce_scatter(on, way, reduction, checked.from(), to, longest)
            }
            Operation::Broadcast => {
                let blocks = vec![to; on.ranks() as usize];
                operations::gather(on, way, givers, getters, from, &blocks, longest)
            }
            Operation::AllGather | Operation::Gather => {
                operations::gather(on, way, givers, getters, from, checked.to(), longest)
            }
            Operation::AllToAll => {
                let (from, to) = (checked.from(), checked.to());
                operations::scatter(on, way, givers, from, to, longest, checked.is_in_place())
            }
            Operation::Scatter => {
                let blocks = vec![to; on.ranks() as usize];
                operations::scatter(on, way, givers, checked.from(), &blocks, longest, false)
            }
        }
    }
}

/// Tells the others the length of each block, and returns the longest of all. Ranks whose lengths differ
/// call different operations.
fn exchange_lengths(on: &mut HostOperation<'_>, checked: &CheckedCall) -> Outcome<usize> {
    let (rank, ranks) = (on.rank(), on.ranks() as usize);
    let mut own = vec![0_u64; ranks];
    match checked.from() {
        // For each rank the same.
        [one] => own.fill(one.bytes() as u64),
        blocks => own.iter_mut().zip(blocks).for_each(|(to, block)| *to = block.bytes() as u64),
    }
    let all = on.exchange(&own)?;
    for (other, lengths) in all.iter().enumerate() {
        let given = lengths[rank as usize];
        let taken = match (checked.call().operation, checked.to()) {
            (Operation::Scatter, [block]) if checked.call().root == Some(other as u32) => {
                block.bytes()
            }
            (Operation::Scatter, _) | (_, []) => continue,
            (_, blocks) => blocks[other].bytes(),
        };
        if given != taken as u64 {
            let collective = 0;
            return Err(Failure::Mismatch { one: rank, other: other as u32, collective });
        }
    }
    let longest = all.iter().flatten().max().copied().unwrap_or(0);
    Ok(usize::try_from(longest).unwrap_or(0))
}

impl<'a> CollectiveCall<'a> {
    /// A call that moves elements of one slice to another one.
    fn moving<T: Element>(
        operation: Operation,
        root: u32,
        input: &[T],
        send: Blocks<'a>,
        output: &mut [T],
        receive: Blocks<'a>,
    ) -> Self {
        Self {
            operation,
            data_type: T::DATA_TYPE,
            reduce_op: ReduceOp::Sum,
            root,
            input: input.as_ptr().cast(),
            send,
            output: output.as_mut_ptr().cast(),
            receive,
        }
    }

    /// A call whose result takes the place of the input.
    fn in_place<T: Element>(
        operation: Operation,
        reduce_op: ReduceOp,
        root: u32,
        elements: &mut [T],
        send: Blocks<'a>,
        receive: Blocks<'a>,
    ) -> Self {
        let (data_type, output) = (T::DATA_TYPE, elements.as_mut_ptr().cast::<u8>());
        Self { operation, data_type, reduce_op, root, input: output, send, output, receive }
    }
}
