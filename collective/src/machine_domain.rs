//! The ranks of a domain on this machine: their operations in common memory, with parameters that they
//! learn and agree on.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use crate::block_lengths::{WordExchange, exchange_lengths};
use crate::call::Call;
use crate::collective_call::CheckedCall;
use crate::controller::Choices;
use crate::domain_key::{CommDomainKey, digest};
use crate::domain_options::{DomainOptions, JOIN, Kind, segment_too_small};
use crate::error::Result;
use crate::host_operations::{self as operations, Ranks, Reduction, Route, Stores, Way};
use crate::host_steps::{HostOperation, HostSteps};
use crate::members::{Failure, Members, Outcome};
use crate::operation::{OpKey, Operation, SizeClass};
use crate::param_table::ParamTable;
use crate::parameters::{Algorithm, Parameters};
use crate::peer_memory;
use crate::place::Place;
use crate::rendezvous::Offer;
use crate::statistics::ExecStat;
use crate::status_file::DomainKind;
use reduction::ReduceOp;

const PAGE: usize = 4096;
/// Memory for the steps of all ranks, at most.
const MAX_SLOTS: usize = 64 << 20;
/// Bytes of a step of a rank, at least and at most.
const SLOT_BYTES: [usize; 2] = [64 << 10, 1 << 20];
/// Up to this size each rank reduces all elements, instead of a share.
const ONE_STEP_BYTES: u64 = 8 << 10;
/// From this size on parameters are learnt: smaller operations take as long with all of them.
const LEARNT_BYTES: u64 = 64 << 10;
/// The bytes of a chunk that suit the caches, if nothing was learnt.
const CHUNK_BYTES: usize = 128 << 10;

/// The ranks of this machine, as one of them sees them.
#[derive(Debug)]
pub(crate) struct MachineDomain {
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

/// A part of an operation that the ranks of this machine carry out together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part<'a> {
    /// What this rank calls: it is compared with the calls of the others.
    announced: &'a Call,
    checked: &'a CheckedCall,
    /// A word of which all ranks get the greatest.
    carried: u64,
    /// The number of the operation in the domain; None if each operation has one part.
    number: Option<u64>,
    deadline: Instant,
}

impl<'a> Part<'a> {
    pub(crate) fn new(announced: &'a Call, checked: &'a CheckedCall, deadline: Instant) -> Self {
        Self { announced, checked, carried: 0, number: None, deadline }
    }

    pub(crate) fn of_operation(self, number: u64, carried: u64) -> Self {
        Self { number: Some(number), carried, ..self }
    }
}

impl MachineDomain {
    /// Joins the ranks of this machine, as the rank of this number among them. `names` are their ranks in
    /// the domain, if that has further ones.
    pub(crate) fn join(
        key: &CommDomainKey,
        rank: u32,
        names: Option<&[u32]>,
        options: &DomainOptions,
    ) -> Result<Self> {
        let slot_bytes = |ranks: u32| {
            let bytes = (MAX_SLOTS / 2 / ranks.max(1) as usize).clamp(SLOT_BYTES[0], SLOT_BYTES[1]);
            bytes / PAGE * PAGE
        };
        let words = |ranks| HostSteps::required_words(ranks, slot_bytes(ranks));
        let kind = Kind::new("domain", DomainKind::HostMemory, Self::build());
        let mut joined = options.join(kind, key, rank, names, words, Offer::default())?;
        let (first_table, first_extra) = (joined.first_table(), joined.first_extra());
        let (deadline, status) = (joined.deadline(), joined.take_status());
        let members = joined.into_members().0;
        let ranks = members.count();
        let slot_bytes = slot_bytes(ranks);
        let strategy = options.strategy();
        let steps = HostSteps::new(Arc::clone(&members), first_extra, slot_bytes, strategy);
        let mut steps = steps.ok_or_else(segment_too_small)?;
        let is_wanted = options.wants_to_read_peers() && ranks > 1;
        let reads_peers =
            try_reading(&mut steps.operation(0, 0, false, deadline), &members, is_wanted)
                .map_err(|failure| members.error(JOIN, failure))?;
        let choices = move |key| choices(key, ranks, slot_bytes, reads_peers);
        let learning = options.learning_options();
        let table =
            ParamTable::new(Arc::clone(&members), first_table, learning, choices, status, false);
        let table = Some(table.ok_or_else(segment_too_small)?);
        let fixed = options.fixed();
        Ok(Self { members, table, steps, calls: 0, fixed, reads_peers })
    }

    /// A digest of what is built in.
    pub(crate) fn build() -> u64 {
        digest([CHUNK_BYTES as u64, ONE_STEP_BYTES, LEARNT_BYTES, OpKey::COUNT.into()])
    }

    pub(crate) fn members(&self) -> &Members {
        &self.members
    }

    pub(crate) fn table(&self) -> Option<&ParamTable> {
        self.table.as_ref()
    }

    pub(crate) fn table_mut(&mut self) -> Option<&mut ParamTable> {
        self.table.as_mut()
    }

    pub(crate) fn reads_peers(&self) -> bool {
        self.reads_peers
    }

    /// Carries out a part of an operation. Returns the greatest of the carried words.
    ///
    /// # Safety
    /// The places of the call are valid. Until the return only this call accesses them.
    pub(crate) unsafe fn run(&mut self, part: Part<'_>) -> Outcome<u64> {
        let Part { announced, checked, carried, number, deadline } = part;
        if let Some(failure) = self.members.failure() {
            return Err(failure);
        }
        let Some(table) = &mut self.table else { return Err(Failure::Left { rank: 0 }) };
        let step = table.enter(announced, deadline)?;
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
        self.calls = digest([self.calls, announced.signature()]);
        let mut on = self.steps.operation(self.calls, carried, is_learnt, deadline);
        // SAFETY: the caller's promise.
        let done = unsafe { carry_out(&mut on, checked, parameters, self.reads_peers) };
        let (time, carried) = (is_learnt.then(|| on.time()), on.carried());
        match done {
            Err(Failure::Mismatch { one, other, .. }) => {
                return Err(self.fail_with_calls(one, other, number));
            }
            Err(failure) => return Err(failure),
            Ok(()) => {}
        }
        if let Some(fast_time) = time {
            let stat = ExecStat {
                fast_time,
                fast_bytes: checked.bytes(),
                success: true,
                ..ExecStat::default()
            };
            table.record(step, key, parameters, &stat);
        }
        Ok(carried)
    }

    /// Ends the operations, because two ranks called different ones.
    fn fail_with_calls(&self, one: u32, other: u32, number: Option<u64>) -> Failure {
        let Some(table) = &self.table else { return Failure::Left { rank: one } };
        let local = |name| (0..self.members.count()).find(|rank| self.members.name(*rank) == name);
        let ranks = [one, other].map(|name| local(name).unwrap_or(0));
        let step = first_difference(table, ranks);
        let call = |rank| table.announcement(rank, step).unwrap_or([0; 4]);
        let collective = number.unwrap_or(step);
        let failure = Failure::Mismatch { one, other, collective };
        self.members.fail_with(failure, &ranks.map(call))
    }

    /// Tells the others that this rank leaves.
    pub(crate) fn leave(&mut self) {
        if self.members.check_fork("leave communication domain").is_ok() {
            self.members.leave();
            if let Some(table) = self.table.take() {
                table.leave();
            }
        }
    }
}

/// The first operation of those known in which two ranks announced different calls.
fn first_difference(table: &ParamTable, ranks: [u32; 2]) -> u64 {
    let last = table.step();
    let differ = |step: &u64| {
        let calls = ranks.map(|rank| table.announcement(rank, *step));
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

impl WordExchange for HostOperation<'_> {
    fn ranks(&self) -> [u32; 2] {
        [self.rank(), HostOperation::ranks(self)]
    }

    fn includes(&self, _: u32) -> bool {
        true
    }

    fn exchange(&mut self, own: &[u64]) -> Outcome<Vec<Vec<u64>>> {
        HostOperation::exchange(self, own)
    }

    fn mismatch(&self, rank: u32) -> Failure {
        HostOperation::mismatch(self, rank)
    }
}
