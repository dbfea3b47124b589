//! A domain of ranks on several machines.
//!
//! Ranks with the same place on their machines are counterparts. Operations that would send the same bytes
//! several times to a machine are carried out in parts: among the ranks of each machine in common memory,
//! and among counterparts over a fabric, so that all ranks share the transfer. On machines with different
//! numbers of ranks all operations are exchanges among all ranks.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use launch::Group;

use crate::block_lengths::exchange_lengths;
use crate::call::Call;
use crate::collective_call::CheckedCall;
use crate::controller::{Change, Choices, Controller};
use crate::domain_key::{CommDomainKey, digest};
use crate::domain_options::{DomainOptions, JOIN, Kind};
use crate::error::{Error, ErrorKind, Result};
use crate::host_operations::{Ranks, Reduction, share};
use crate::introduction;
use crate::machine_domain::{MachineDomain, Part};
use crate::members::Outcome;
use crate::operation::{OpKey, Operation, SizeClass};
use crate::parameters::Parameters;
use crate::place::Place;
use crate::remote_operations as remote;
use crate::remote_ranks::RemoteRanks;
use crate::remote_steps::{RemoteCall, RemoteOperation, RemoteSet};
use crate::replicated_parameters::ReplicatedParameters;
use crate::saved_parameters::SavedParameters;
use crate::status_file::DomainKind;
use crate::topology::Topology;
use reduction::ReduceOp;

/// Up to this size each rank reduces all elements, instead of a share.
const ONE_STEP_BYTES: u64 = 8 << 10;
/// Up to this size a broadcast is not shared among the ranks of a machine.
const UNDIVIDED_BYTES: u64 = 64 << 10;
/// From this size on parameters are learnt.
const LEARNT_BYTES: u64 = 128 << 10;
/// The bytes of a chunk, if nothing was learnt.
const CHUNK_BYTES: usize = 256 << 10;
/// How long a rank that leaves waits until other machines have its messages.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);
/// Chunks to try: of 256 KiB, 1 MiB and 64 KiB.
const CHUNK_BITS: [u8; 3] = [0, 20, 16];

/// The ranks of all machines, as one of them sees them.
#[derive(Debug)]
pub(crate) struct Machines {
    topology: Topology,
    remote: RemoteRanks,
    sets: Sets,
    parameters: ReplicatedParameters,
    fixed: Option<Parameters>,
    /// The number of the last operation.
    number: u64,
    /// A digest of all calls so far.
    calls: u64,
}

/// Sets of ranks that exchange bytes by the fabric.
#[derive(Debug)]
struct Sets {
    /// The counterparts; None if machines have different numbers of ranks, or one each.
    counterparts: Option<RemoteSet>,
    /// All ranks, of which those of this machine are no peers: they exchange by common memory.
    remote_only: RemoteSet,
    /// All ranks, which are all peers.
    all: RemoteSet,
}

impl Machines {
    /// Joins the ranks of a group whose ranks are on several machines.
    pub(crate) fn join(
        group: &mut Group,
        key: &CommDomainKey,
        options: &DomainOptions,
    ) -> Result<(MachineDomain, Self)> {
        let deadline = ipc::deadline(options.join_timeout());
        let rank = group.rank();
        let topology = Topology::new(group.ranks_by_machine(), rank)
            .ok_or_else(|| Error::new(JOIN, ErrorKind::Failed, "this rank has no machine"))?;
        let setup = options.setup(key, build(&topology));
        let remote = introduction::connect_ranks(group, &topology, setup, deadline)?;
        let local = topology.local().to_vec();
        let local_key = CommDomainKey { ranks: local.clone(), ..key.clone() };
        let place = topology.own_place() as u32;
        let machine = MachineDomain::join(&local_key, place, Some(&local), options);
        // A rank that cannot take part would look as if it had ended.
        let joined = machine.as_ref().map(|_| ()).map_err(ToString::to_string);
        introduction::exchange(group, joined, deadline)?;
        let machine = machine?;
        let everyone: Vec<u32> = (0..group.size()).collect();
        let counterparts = topology.counterparts().filter(|_| local.len() > 1);
        let sets = Sets {
            counterparts: counterparts.map(|ranks| RemoteSet::new(ranks, rank, |_| true)),
            remote_only: RemoteSet::new(everyone.clone(), rank, |rank| !local.contains(&rank)),
            all: RemoteSet::new(everyone, rank, |_| true),
        };
        let kind = Kind::new("machines", DomainKind::Machines, 0);
        let status = options.status_file(kind, key, machine.members());
        let parameters = ReplicatedParameters::new(choices, status);
        let fixed = options.fixed();
        let machines = Self { topology, remote, sets, parameters, fixed, number: 0, calls: 0 };
        Ok((machine, machines))
    }

    /// The parameters of the next operation.
    pub(crate) fn parameters(&self, key: OpKey) -> Parameters {
        self.fixed.unwrap_or_else(|| self.parameters.parameters(key))
    }

    pub(crate) fn saved(&self) -> SavedParameters {
        SavedParameters { parameters: self.parameters.controller().learnt().collect() }
    }

    pub(crate) fn history(&self, key: OpKey) -> Vec<Change> {
        self.parameters.controller().history(key).copied().collect()
    }

    pub(crate) fn with_controller(&mut self, change: impl FnOnce(&mut Controller)) {
        self.parameters.with_controller(change);
    }

    /// Leaves the other machines. Waits until they have all messages of this rank, unless an operation has
    /// failed: without these they would take it for one that left too early.
    pub(crate) fn leave(self, failed: bool) {
        let time = if failed { Duration::ZERO } else { LEAVE_TIMEOUT };
        self.remote.leave(Instant::now() + time);
    }

    /// Carries out an operation.
    ///
    /// # Safety
    /// The places of the call are valid. Until the return only this call accesses them.
    pub(crate) unsafe fn run(
        &mut self,
        machine: &mut MachineDomain,
        checked: &CheckedCall,
        deadline: Instant,
    ) -> Outcome<()> {
        // SAFETY: the caller's promise.
        let done = unsafe { self.run_parts(machine, checked, deadline) };
        if let Err(failure) = done {
            let failure = machine.members().failure().unwrap_or(failure);
            self.remote.report(failure, &machine.members().calls_of_failure());
            return Err(failure);
        }
        Ok(())
    }

    unsafe fn run_parts(
        &mut self,
        machine: &mut MachineDomain,
        checked: &CheckedCall,
        deadline: Instant,
    ) -> Outcome<()> {
        if let Some(failure) = machine.members().failure() {
            return Err(failure);
        }
        // An error of the port is found by the operation.
        let _ = self.remote.poll();
        if let Some((failure, calls)) = self.remote.reported() {
            return Err(machine.members().fail_with(failure, &calls));
        }
        self.number += 1;
        let call = checked.call();
        let (operation, data_type) = (call.operation, call.data_type);
        let key = OpKey { operation, size_class: SizeClass::of(checked.bytes()), data_type };
        let is_large = checked.bytes() >= LEARNT_BYTES && operation != Operation::Barrier;
        let used = if is_large { self.parameters(key) } else { self.fixed.unwrap_or_default() };
        // Ranks with different parameters would wait for each other's chunks.
        self.calls = digest([self.calls, call.signature(), used.encode()]);
        let chunk = match used.chunk_bits {
            0 => CHUNK_BYTES,
            bits => 1_usize << bits.clamp(12, 30),
        };
        let carried = self.parameters.carried();
        let mut run = Run {
            machine,
            remote: &mut self.remote,
            topology: &self.topology,
            checked,
            call: RemoteCall::new(self.number, call.encode(), self.calls, carried),
            chunk,
            begun: None,
            deadline,
        };
        let Sets { counterparts, remote_only, all } = &self.sets;
        // SAFETY: the caller's promise.
        let done = unsafe {
            match counterparts {
                Some(counterparts) if run.can_divide() => run.in_parts(counterparts),
                Some(_) if run.moves_blocks() => run.move_blocks(remote_only, all),
                _ => {
                    let longest = run.longest(all)?;
                    run.among(all, longest)
                }
            }
        };
        let begun = run.begun;
        let greatest = run.call.carried();
        done?;
        let is_complete =
            !matches!(operation, Operation::Broadcast | Operation::Gather | Operation::Scatter);
        self.parameters.complete(is_complete.then_some(greatest));
        if let Some(begun) = begun.filter(|_| is_large && self.fixed.is_none()) {
            self.parameters.record(key, used, checked.bytes(), begun.elapsed());
        }
        Ok(())
    }
}

/// A digest of what is built in, and of the ranks of each machine.
fn build(topology: &Topology) -> u64 {
    let built_in = [MachineDomain::build(), ONE_STEP_BYTES, UNDIVIDED_BYTES, LEARNT_BYTES];
    let ranks = topology.machines().iter().flat_map(|ranks| {
        std::iter::once(u64::MAX).chain(ranks.iter().map(|rank| u64::from(*rank)))
    });
    digest(built_in.into_iter().chain([CHUNK_BYTES as u64]).chain(ranks))
}

/// What all ranks choose from.
fn choices(key: OpKey) -> Choices {
    // Of others some ranks do not know when all had begun.
    let has_begin = matches!(
        key.operation,
        Operation::AllReduce
            | Operation::Reduce
            | Operation::ReduceScatter
            | Operation::AllGather
            | Operation::AllToAll
    );
    let is_learnt = key.size_class.largest() >= LEARNT_BYTES && has_begin;
    let with = |chunk_bits| Parameters { chunk_bits, ..Parameters::default() };
    let candidates = CHUNK_BITS.iter().filter(|_| is_learnt).map(|bits| with(*bits));
    Choices { candidates: candidates.collect(), first_alpha: None }
}

/// An operation of a rank.
struct Run<'a> {
    machine: &'a mut MachineDomain,
    remote: &'a mut RemoteRanks,
    topology: &'a Topology,
    checked: &'a CheckedCall,
    /// What it calls; the carried word is the greatest so far.
    call: RemoteCall,
    chunk: usize,
    begun: Option<Instant>,
    deadline: Instant,
}

impl Run<'_> {
    /// Returns whether the operation is carried out in parts, if machines have as many ranks.
    fn can_divide(&self) -> bool {
        let Call { reduce_op, data_type, .. } = *self.checked.call();
        // A mean of integers is not the mean of those of the machines.
        let is_exact = reduce_op != Some(ReduceOp::Mean) || data_type.is_floating_point();
        is_exact && !self.moves_blocks()
    }

    /// Returns whether each block is for one rank, so that none goes twice to a machine.
    fn moves_blocks(&self) -> bool {
        use Operation::{AllToAll, Gather, Scatter};
        matches!(self.checked.call().operation, Gather | Scatter | AllToAll)
    }

    fn reduction(&self) -> Reduction {
        let Call { reduce_op, data_type, .. } = *self.checked.call();
        Reduction::new(reduce_op.unwrap_or(ReduceOp::Sum), data_type)
    }

    /// A part among ranks of other machines.
    fn between<T>(
        &mut self,
        set: &RemoteSet,
        part: impl FnOnce(&mut RemoteOperation<'_>) -> Outcome<T>,
    ) -> Outcome<T> {
        let members = self.machine.members();
        let mut on = RemoteOperation::new(set, self.remote, members, self.call, self.deadline);
        let done = part(&mut on);
        let (begun, carried) = (on.begun(), on.carried());
        self.begun = self.begun.or(begun);
        self.call.carry(carried);
        self.call.end_part();
        done
    }

    /// A part among the ranks of this machine.
    ///
    /// # Safety
    /// The places are valid.
    unsafe fn within(
        &mut self,
        operation: Operation,
        root: Option<u32>,
        from: Vec<Place>,
        to: Vec<Place>,
        longest: Option<usize>,
    ) -> Outcome<()> {
        let announced = *self.checked.call();
        let call = Call { operation, root, blocks: 0, ..announced };
        let checked = CheckedCall::of_part(call, from, to, longest);
        let part = Part::new(&announced, &checked, self.deadline);
        let part = part.of_operation(self.call.number(), self.call.carried());
        // SAFETY: the caller's promise.
        let greatest = unsafe { self.machine.run(part)? };
        self.call.carry(greatest);
        Ok(())
    }

    /// Gather, scatter and all-to-all: ranks of this machine exchange blocks by common memory.
    ///
    /// # Safety
    /// As for [`Machines::run`].
    unsafe fn move_blocks(&mut self, remote_only: &RemoteSet, all: &RemoteSet) -> Outcome<()> {
        let longest = self.longest(all)?;
        let checked = self.checked;
        let Call { operation, root, .. } = *checked.call();
        let local = self.topology.local();
        let (root_machine, root_place) = self.topology.find(root.unwrap_or(0));
        let is_local_root = root.is_none() || root_machine == self.topology.own_machine();
        let blocks = |places: &[Place]| match places {
            [one] => vec![*one],
            [] => Vec::new(),
            all => local.iter().map(|rank| all[*rank as usize]).collect(),
        };
        if is_local_root {
            let (from, to) = (blocks(checked.from()), blocks(checked.to()));
            let root = root.map(|_| root_place as u32);
            // SAFETY: the caller's promise.
            unsafe { self.within(operation, root, from, to, Some(longest))? };
        }
        // SAFETY: the caller's promise.
        unsafe { self.among(remote_only, longest) }
    }

    /// The longest block of all ranks.
    fn longest(&mut self, all: &RemoteSet) -> Outcome<usize> {
        let checked = self.checked;
        match checked.longest() {
            Some(longest) => Ok(longest),
            None => self.between(all, |on| exchange_lengths(on, checked)),
        }
    }

    /// The operation as exchanges among the ranks of a set, which are all ranks.
    ///
    /// # Safety
    /// As for [`Machines::run`].
    unsafe fn among(&mut self, all: &RemoteSet, longest: usize) -> Outcome<()> {
        let (checked, chunk, reduction) = (self.checked, self.chunk, self.reduction());
        let Call { operation, root, .. } = *checked.call();
        let root = root.unwrap_or(0);
        let is_small = checked.bytes() <= ONE_STEP_BYTES;
        let one = |places: &[Place]| places.first().copied().unwrap_or(Place::NONE);
        let (from, to) = (one(checked.from()), one(checked.to()));
        self.between(all, |on| {
            let count = on.count();
            // SAFETY: the caller's promise.
            unsafe {
                match operation {
                    Operation::Barrier => on.barrier(),
                    Operation::AllReduce | Operation::Reduce => {
                        let getters = match operation {
                            Operation::Reduce => Ranks::One(root),
                            _ => Ranks::All,
                        };
                        if is_small {
                            remote::reduce_one_step(on, reduction, getters, from, to)
                        } else {
                            remote::reduce_two_steps(on, chunk, reduction, getters, from, to)
                        }
                    }
                    Operation::ReduceScatter => {
                        let from = checked.from();
                        remote::reduce_scatter(on, chunk, reduction, from, to, longest)
                    }
                    Operation::Broadcast => {
                        let (givers, blocks) = (Ranks::One(root), vec![to; count]);
                        remote::gather(on, chunk, givers, Ranks::All, from, &blocks, longest)
                    }
                    Operation::AllGather => {
                        let (all, to) = (Ranks::All, checked.to());
                        remote::gather(on, chunk, all, all, from, to, longest)
                    }
                    Operation::Gather => {
                        let (getters, to) = (Ranks::One(root), checked.to());
                        remote::gather(on, chunk, Ranks::All, getters, from, to, longest)
                    }
                    Operation::AllToAll => {
                        let (from, to) = (checked.from(), checked.to());
                        remote::scatter(on, chunk, Ranks::All, from, to, longest)
                    }
                    Operation::Scatter => {
                        let (givers, blocks) = (Ranks::One(root), vec![to; count]);
                        remote::scatter(on, chunk, givers, checked.from(), &blocks, longest)
                    }
                }
            }
        })
    }

    /// The operation in parts within machines, and between them.
    ///
    /// # Safety
    /// As for [`Machines::run`].
    unsafe fn in_parts(&mut self, counterparts: &RemoteSet) -> Outcome<()> {
        // SAFETY: the caller's promise.
        unsafe {
            match self.checked.call().operation {
                Operation::AllReduce | Operation::Reduce => self.reduce(counterparts),
                Operation::ReduceScatter => self.reduce_scatter(counterparts),
                Operation::AllGather => self.all_gather(counterparts),
                Operation::Broadcast => self.broadcast(counterparts),
                _ => {
                    self.within(Operation::Barrier, None, Vec::new(), Vec::new(), Some(0))?;
                    self.between(counterparts, |on| on.barrier())
                }
            }
        }
    }

    /// The shares of the ranks of this machine.
    fn shares(&self, of: Place, total: usize) -> Vec<Place> {
        let ranks = self.topology.local().len() as u32;
        let part = |place| {
            let (begin, length) = share(total, place, ranks);
            of.part(begin, length)
        };
        (0..ranks).map(part).collect()
    }

    /// All-reduce, and reduce to a root.
    unsafe fn reduce(&mut self, counterparts: &RemoteSet) -> Outcome<()> {
        let (checked, chunk, reduction) = (self.checked, self.chunk, self.reduction());
        let root = checked.call().root.map(|root| self.topology.find(root));
        let own_machine = self.topology.own_machine();
        let place = self.topology.own_place();
        let from = checked.from()[0];
        let getters = match root {
            Some((machine, _)) => Ranks::One(machine as u32),
            None => Ranks::All,
        };
        let is_getting_machine = root.is_none_or(|(machine, _)| machine == own_machine);
        // Ranks that get no result need memory for their parts of it.
        let mut memory = match checked.to().is_empty() {
            true => vec![0_u8; from.bytes()],
            false => Vec::new(),
        };
        let to = checked.to().first().copied();
        let to = to.unwrap_or_else(|| Place::new(memory.as_mut_ptr(), memory.len()));
        if checked.bytes() <= ONE_STEP_BYTES {
            let (from, to) = (vec![from], vec![to]);
            // SAFETY: the caller's promise.
            unsafe {
                self.within(Operation::AllReduce, None, from, to.clone(), Some(to[0].bytes()))?
            };
            return self.between(counterparts, |on| {
                // SAFETY: the caller's promise.
                unsafe { remote::reduce_one_step(on, reduction, Ranks::All, to[0], to[0]) }
            });
        }
        let (inputs, results) = (self.shares(from, from.bytes()), self.shares(to, from.bytes()));
        let (own, longest) = (results[place], results[0].bytes());
        // SAFETY: the caller's promise.
        unsafe { self.within(Operation::ReduceScatter, None, inputs, vec![own], Some(longest))? };
        self.between(counterparts, |on| {
            // SAFETY: the caller's promise.
            unsafe { remote::reduce_two_steps(on, chunk, reduction, getters, own, own) }
        })?;
        match root {
            // SAFETY: the caller's promise.
            None => unsafe {
                self.within(Operation::AllGather, None, vec![own], results, Some(longest))
            },
            Some((_, local_root)) if is_getting_machine => {
                let results = if place == local_root { results } else { Vec::new() };
                let root = Some(local_root as u32);
                // SAFETY: the caller's promise.
                unsafe { self.within(Operation::Gather, root, vec![own], results, Some(longest)) }
            }
            Some(_) => Ok(()),
        }
    }

    unsafe fn reduce_scatter(&mut self, counterparts: &RemoteSet) -> Outcome<()> {
        let (checked, chunk, reduction) = (self.checked, self.chunk, self.reduction());
        let place = self.topology.own_place();
        let longest = checked.longest().unwrap_or(0);
        // For each machine the block of this rank's counterpart there, reduced over this machine.
        let machines = self.topology.machines();
        let block = |rank: &u32| checked.from()[*rank as usize];
        let lengths = machines.iter().map(|ranks| block(&ranks[place]).bytes());
        let mut memory: Vec<Vec<u8>> = lengths.map(|bytes| vec![0; bytes]).collect();
        let parts: Vec<Place> =
            memory.iter_mut().map(|it| Place::new(it.as_mut_ptr(), it.len())).collect();
        for (ranks, part) in machines.iter().zip(&parts) {
            let from = ranks.iter().map(block).collect();
            // SAFETY: the caller's promise.
            unsafe {
                self.within(Operation::ReduceScatter, None, from, vec![*part], Some(longest))?
            };
        }
        let to = checked.to()[0];
        self.between(counterparts, |on| {
            // SAFETY: the caller's promise.
            unsafe { remote::reduce_scatter(on, chunk, reduction, &parts, to, longest) }
        })
    }

    unsafe fn all_gather(&mut self, counterparts: &RemoteSet) -> Outcome<()> {
        let (checked, chunk) = (self.checked, self.chunk);
        let (own_machine, place) = (self.topology.own_machine(), self.topology.own_place());
        let longest = checked.longest().unwrap_or(0);
        let machines = self.topology.machines();
        let block = |rank: u32| checked.to()[rank as usize];
        let own = checked.from()[0];
        let blocks: Vec<Place> = machines.iter().map(|ranks| block(ranks[place])).collect();
        self.between(counterparts, |on| {
            // SAFETY: the caller's promise.
            unsafe { remote::gather(on, chunk, Ranks::All, Ranks::All, own, &blocks, longest) }
        })?;
        for (machine, ranks) in machines.iter().enumerate() {
            let own = if machine == own_machine { own } else { blocks[machine] };
            let to = ranks.iter().map(|rank| block(*rank)).collect();
            // SAFETY: the caller's promise.
            unsafe { self.within(Operation::AllGather, None, vec![own], to, Some(longest))? };
        }
        Ok(())
    }

    unsafe fn broadcast(&mut self, counterparts: &RemoteSet) -> Outcome<()> {
        let (checked, chunk) = (self.checked, self.chunk);
        let root = checked.call().root.unwrap_or(0);
        let (root_machine, root_place) = self.topology.find(root);
        let (own_machine, place) = (self.topology.own_machine(), self.topology.own_place());
        let to = checked.to()[0];
        let from = checked.from().first().copied();
        let givers = Ranks::One(root_machine as u32);
        let local_root = Some(root_place as u32);
        let machines = self.topology.machines().len();
        if checked.bytes() <= UNDIVIDED_BYTES {
            if place == root_place {
                let own = from.unwrap_or(Place::NONE);
                let blocks = vec![to; machines];
                self.between(counterparts, |on| {
                    let (all, longest) = (Ranks::All, to.bytes());
                    // SAFETY: the caller's promise.
                    unsafe { remote::gather(on, chunk, givers, all, own, &blocks, longest) }
                })?;
            }
            let own = if place == root_place { vec![from.unwrap_or(to)] } else { Vec::new() };
            let longest = to.bytes();
            // SAFETY: the caller's promise.
            return unsafe {
                self.within(Operation::Broadcast, local_root, own, vec![to], Some(longest))
            };
        }
        // Each rank of the root's machine sends a share.
        let shares = self.shares(to, to.bytes());
        let (own, longest) = (shares[place], shares[0].bytes());
        if own_machine == root_machine {
            let inputs = from.map_or_else(Vec::new, |from| self.shares(from, to.bytes()));
            // SAFETY: the caller's promise.
            unsafe {
                self.within(Operation::Scatter, local_root, inputs, vec![own], Some(longest))?
            };
        }
        let blocks = vec![own; machines];
        self.between(counterparts, |on| {
            // SAFETY: the caller's promise.
            unsafe { remote::gather(on, chunk, givers, Ranks::All, own, &blocks, longest) }
        })?;
        // SAFETY: the caller's promise.
        unsafe { self.within(Operation::AllGather, None, vec![own], shares, Some(longest)) }
    }
}
