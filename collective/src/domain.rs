//! A communication domain: the ranks that carry out collective operations together.

use std::time::Duration;

use gpu::Device;
use launch::Group;

use crate::collective_call::{Blocks, CollectiveCall};
use crate::controller::{Change, Controller};
use crate::device_domain::DeviceDomain;
use crate::domain_key::CommDomainKey;
use crate::domain_options::{DomainOptions, JOIN};
use crate::element::Element;
use crate::error::{Error, ErrorKind, Result};
use crate::machine_domain::{MachineDomain, Part};
use crate::machines::Machines;
use crate::operation::{OpKey, Operation};
use crate::param_table::ParamTable;
use crate::parameters::Parameters;
use crate::saved_parameters::SavedParameters;
use reduction::ReduceOp;

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
    rank: u32,
    options: DomainOptions,
    machine: MachineDomain,
    /// None if all ranks are on this machine.
    machines: Option<Machines>,
}

impl CommDomain {
    /// Joins the domain of this key, as its rank of this number, with all ranks on this machine. Waits
    /// until all have come.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a rank or options that are invalid,
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) with the ranks that have not come,
    /// [`VersionMismatch`](ErrorKind::VersionMismatch) if ranks are of different builds or have different
    /// options.
    pub fn join(key: &CommDomainKey, rank: u32, options: &DomainOptions) -> Result<Self> {
        let machine = MachineDomain::join(key, rank, None, options)?;
        let options = options.clone();
        Ok(Self { key: key.clone(), rank, options, machine, machines: None })
    }

    /// Joins the domain of all ranks of a launched job, which may be on several machines. All ranks call
    /// it. The job and the directory of the options are those of the group.
    ///
    /// ```
    /// use std::time::Duration;
    /// use collective::{CommDomain, DomainOptions, ReduceOp};
    /// let timeout = Duration::from_secs(10);
    /// let mut group = launch::Group::start()?;
    /// let mut domain = CommDomain::of_group(&mut group, &DomainOptions::new())?;
    /// let mut ranks = [1];
    /// domain.all_reduce(&mut ranks, ReduceOp::Sum, timeout)?;
    /// assert_eq!(ranks[0], group.size());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`join`](Self::join).
    pub fn of_group(group: &mut Group, options: &DomainOptions) -> Result<Self> {
        let key = CommDomainKey::of_first_ranks(group.size());
        let options = options.clone().directory(group.directory()).job(group.job());
        if group.ranks_by_machine().len() == 1 {
            return Self::join(&key, group.rank(), &options);
        }
        let (machine, machines) = Machines::join(group, &key, &options)?;
        Ok(Self { key, rank: group.rank(), options, machine, machines: Some(machines) })
    }

    /// Joins the same ranks for operations of device memory. All ranks call it, with a device each.
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use collective::{CommDomain, DomainOptions};
    /// let mut group = launch::Group::start()?;
    /// let mut domain = CommDomain::of_group(&mut group, &DomainOptions::new())?;
    /// let device = gpu::Device::open("cuda:0".parse()?)?;
    /// let devices = domain.device_domain(&device, Duration::from_secs(30))?;
    /// assert_eq!(devices.size(), group.size());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Unavailable`](ErrorKind::Unavailable) if the ranks are on several machines; as for
    /// [`barrier`](Self::barrier), and for [`DeviceDomain::join`].
    pub fn device_domain(&mut self, device: &Device, timeout: Duration) -> Result<DeviceDomain> {
        if self.machines.is_some() {
            let detail = "device memory of several machines. Copy to the host, or use NCCL";
            return Err(Error::new(JOIN, ErrorKind::Unavailable, detail));
        }
        // Ranks that call something else learn it here.
        self.barrier(timeout)?;
        DeviceDomain::join(&self.key, self.rank, device, &self.options.clone().timeout(timeout))
    }

    /// The key.
    #[must_use]
    pub fn key(&self) -> &CommDomainKey {
        &self.key
    }

    /// This process' rank in the domain, from 0.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// The number of ranks.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.key.ranks.len() as u32
    }

    /// Returns whether ranks of this machine read the memory of each other by the kernel.
    #[must_use]
    pub fn reads_peers(&self) -> bool {
        self.machine.reads_peers()
    }

    /// The parameters of a key in the last operation: the same on all ranks. In a domain of several
    /// machines those of the next one, between the machines.
    #[must_use]
    pub fn parameters(&self, key: OpKey) -> Parameters {
        match (&self.machines, self.machine.table()) {
            (Some(machines), _) => machines.parameters(key),
            (None, Some(table)) => table.parameters(key),
            _ => Parameters::default(),
        }
    }

    /// Parameters to save: on rank 0 those that it has settled on, on others those in use.
    #[must_use]
    pub fn saved_parameters(&self) -> SavedParameters {
        match &self.machines {
            Some(machines) => machines.saved(),
            None => self.machine.table().map_or_else(SavedParameters::default, ParamTable::saved),
        }
    }

    /// Changes of the parameters of a key, the latest first; none if this rank does not learn.
    #[must_use]
    pub fn history(&self, key: OpKey) -> Vec<Change> {
        if let Some(machines) = &self.machines {
            return machines.history(key);
        }
        let controller = self.machine.table().and_then(ParamTable::controller);
        controller.map_or_else(Vec::new, |controller| controller.history(key).copied().collect())
    }

    /// Changes what is learnt: it stops, continues, or loads what was learnt before. On one machine rank 0
    /// does so; on other ranks there is no effect, and the result is false. In a domain of several machines
    /// all ranks make the same change before the same operation.
    pub fn with_controller(&mut self, change: impl FnOnce(&mut Controller)) -> bool {
        if let Some(machines) = &mut self.machines {
            machines.with_controller(change);
            return true;
        }
        self.machine.table_mut().is_some_and(|table| table.with_controller(change))
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
        self.machine.members().check_fork(operation)?;
        let checked = call.check(self.rank(), self.size())?;
        let deadline = ipc::deadline(timeout);
        let Self { machine, machines, .. } = self;
        // SAFETY: the caller's promise.
        let done = unsafe {
            match machines {
                Some(machines) => machines.run(machine, &checked, deadline),
                None => {
                    let part = Part::new(checked.call(), &checked, deadline);
                    machine.run(part).map(|_| ())
                }
            }
        };
        done.map_err(|failure| self.machine.members().error(operation, failure))
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
        let members = self.machine.members();
        if let Some(machines) = self.machines.take()
            && members.check_fork("leave communication domain").is_ok()
        {
            machines.leave(members.failure().is_some());
        }
        self.machine.leave();
    }
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
