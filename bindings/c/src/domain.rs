//! Communication domains: collective operations in host memory.

use std::ffi::c_char;
use std::path::Path;
use std::ptr;
use std::time::{Duration, Instant};

use collective::{Blocks, CollectiveCall, CommDomain, Operation as Collective, ReduceOp};
use launch::{Group, GroupOptions};

use crate::caller_memory::run_collective;
use crate::exclusive::Exclusive;
use crate::failure::{Operation, Result, c_text, last_ranks};
use crate::ffi::{Array, CallerBuffer, Out, OutArray, OutStruct, Text, WithDefaults, export};
use crate::handle::{Handle, kind};
use crate::layout::{RawDomainOptions, RawParameters, data_type, flag, op_key, reduce_op};
use crate::param_store::saved_parameters;
use crate::registry::{self, Registry};
use crate::timeout::Timeout;
use crate::variables;

/// A domain, and the group by which its ranks were found.
#[derive(Debug)]
struct JoinedDomain {
    domain: CommDomain,
    group: Option<Group>,
}

impl JoinedDomain {
    fn close(self, timeout: Duration) -> Result<()> {
        let end = Instant::now() + timeout;
        self.domain.close(timeout)?;
        let left = end.saturating_duration_since(Instant::now());
        self.group.map_or(Ok(()), |group| Ok(group.close(left)?))
    }
}

#[derive(Debug)]
pub(crate) struct OpenDomain {
    domain: Exclusive<JoinedDomain>,
    rank: u32,
    size: u32,
}

kind!(OpenDomain, 16, "communication domain", |open: &Self| open.domain.end());

/// What a function of C is called with, beside the buffers.
#[derive(Debug, Clone, Copy)]
struct Kind {
    operation: Collective,
    data_type: u32,
    /// None for operations that only move elements.
    reduce_op: Option<u32>,
    root: u32,
}

/// A buffer, and its blocks.
type Side<'a> = (CallerBuffer<'a>, Blocks<'a>);

impl OpenDomain {
    fn new(domain: CommDomain, group: Option<Group>) -> Self {
        let (rank, size) = (domain.rank(), domain.size());
        Self { domain: Exclusive::new(JoinedDomain { domain, group }), rank, size }
    }

    /// Uses the domain, when no other thread does.
    fn with<R>(&self, operation: Operation, act: impl FnOnce(&mut CommDomain) -> R) -> Result<R> {
        self.domain.with(operation, Timeout::Forever, |joined| Ok(act(&mut joined.domain)))
    }

    fn run(
        &self,
        operation: Operation,
        kind: Kind,
        from: Side<'_>,
        to: Side<'_>,
        timeout: Timeout,
    ) -> Result<()> {
        let ((input, send), (output, receive)) = (from, to);
        let call = CollectiveCall {
            operation: kind.operation,
            data_type: data_type(operation, kind.data_type)?,
            reduce_op: kind.reduce_op.map_or(Ok(ReduceOp::Sum), |op| reduce_op(operation, op))?,
            root: kind.root,
            input: ptr::null(),
            send,
            output: ptr::null_mut(),
            receive,
        };
        let end = timeout.end();
        self.domain.with(operation, timeout, |joined| {
            let left = end.saturating_duration_since(Instant::now());
            run_collective(operation, &mut joined.domain, call, input, output, left)
        })
    }

    /// This rank's block of a buffer with a block for each rank.
    fn own_block<'a>(
        &self,
        operation: Operation,
        buffer: CallerBuffer<'a>,
        blocks: Blocks<'_>,
        kind: u32,
    ) -> Result<CallerBuffer<'a>> {
        let rank = self.rank as usize;
        let first = match blocks {
            Blocks::Each(count) => count.saturating_mul(rank),
            Blocks::Unequal { offsets, .. } => offsets.get(rank).copied().unwrap_or(0),
            Blocks::One(_) => 0,
        };
        let size = data_type(operation, kind)?.size();
        Ok(buffer.behind(first.saturating_mul(size)))
    }

    /// The blocks of C's lists: one after the other without offsets.
    fn unequal<'a>(
        &self,
        operation: Operation,
        counts: Array<'a, usize>,
        offsets: Array<'a, usize>,
    ) -> Result<UnequalBlocks<'a>> {
        let ranks = self.size as usize;
        let counts = counts.get(operation, "counts", ranks)?;
        if !offsets.is_null() {
            let offsets = offsets.get(operation, "offsets", ranks)?;
            return Ok(UnequalBlocks { counts, offsets: offsets.to_vec() });
        }
        let mut total = 0_usize;
        let offsets = counts.iter().map(|count| {
            let offset = total;
            total = total.saturating_add(*count);
            offset
        });
        Ok(UnequalBlocks { counts, offsets: offsets.collect() })
    }
}

/// Blocks of different numbers of elements.
#[derive(Debug, Default)]
struct UnequalBlocks<'a> {
    counts: &'a [usize],
    offsets: Vec<usize>,
}

impl UnequalBlocks<'_> {
    fn get(&self) -> Blocks<'_> {
        Blocks::Unequal { counts: self.counts, offsets: &self.offsets }
    }
}

fn moving(operation: Collective, data_type: u32, root: u32) -> Kind {
    Kind { operation, data_type, reduce_op: None, root }
}

/// Starts the group of a launcher, and joins the domain of all its ranks.
fn join_launched(operation: Operation, raw: RawDomainOptions) -> Result<OpenDomain> {
    raw.check_launched(operation)?;
    let options = raw.to_options(operation)?;
    let mut of_group = GroupOptions::from_environment()?.timeout(raw.timeout().as_duration());
    if let Some(directory) = raw.directory(operation)? {
        of_group = of_group.directory(Path::new(directory));
    }
    let mut group = Group::start_with(of_group)?;
    let domain = CommDomain::of_group(&mut group, &options)?;
    Ok(OpenDomain::new(domain, Some(group)))
}

export! {
    fn fabricast_domain_options_init(
        options: OutStruct<'_, RawDomainOptions>[size],
    ) -> i32, c"initialize domain options" {
        options.put_defaults()
    }

    fn fabricast_domain_join(
        world_size: u32,
        rank: u32,
        options: Option<RawDomainOptions>,
        domain: Out<'_, *mut OpenDomain>,
    ) -> i32, c"join communication domain" {
        variables::apply(OPERATION)?;
        let raw = options.unwrap_or_else(|| RawDomainOptions::defaults(size_of::<RawDomainOptions>()));
        let key = raw.key(OPERATION, world_size)?;
        let joined = CommDomain::join(&key, rank, &raw.to_options(OPERATION)?)?;
        domain.put(registry::open(OPERATION, OpenDomain::new(joined, None))?)
    }

    fn fabricast_domain_join_launched(
        options: Option<RawDomainOptions>,
        domain: Out<'_, *mut OpenDomain>,
    ) -> i32, c"join communication domain" {
        variables::apply(OPERATION)?;
        let raw = options.unwrap_or_else(|| RawDomainOptions::defaults(size_of::<RawDomainOptions>()));
        domain.put(registry::open(OPERATION, join_launched(OPERATION, raw)?)?)
    }

    /// Leaves the domain. With a timeout of 0 the other ranks are not waited for.
    fn fabricast_domain_close(
        domain: Option<Handle<OpenDomain>>,
        timeout: Timeout,
    ) -> i32, c"close communication domain" {
        let Some(domain) = domain else { return Ok(()) };
        let (end, open) = (timeout.end(), domain.close(OPERATION)?);
        let joined = open.domain.end_and_remove(OPERATION, timeout)?;
        if timeout == Timeout::Now {
            return Ok(());
        }
        joined.close(end.saturating_duration_since(Instant::now()))
    }

    fn fabricast_domain_rank(
        domain: Handle<OpenDomain>,
        rank: Out<'_, u32>,
    ) -> i32, c"get rank in domain" {
        rank.put(domain.find(OPERATION)?.rank)
    }

    fn fabricast_domain_size(
        domain: Handle<OpenDomain>,
        size: Out<'_, u32>,
    ) -> i32, c"get size of domain" {
        size.put(domain.find(OPERATION)?.size)
    }

    fn fabricast_domain_parameters(
        domain: Handle<OpenDomain>,
        collective: u32,
        bytes: u64,
        data_type: u32,
        parameters: Out<'_, RawParameters>,
    ) -> i32, c"get parameters" {
        let key = op_key(OPERATION, collective, bytes, data_type)?;
        let found = domain.find(OPERATION)?.with(OPERATION, |domain| domain.parameters(key))?;
        parameters.put(RawParameters::of(found))
    }

    /// Stops or continues learning.
    fn fabricast_domain_freeze(
        domain: Handle<OpenDomain>,
        is_frozen: u32,
    ) -> i32, c"freeze parameters" {
        let is_frozen = flag(OPERATION, "is_frozen", is_frozen)?;
        domain.find(OPERATION)?.with(OPERATION, |domain| {
            domain.with_controller(|controller| controller.freeze(is_frozen));
        })
    }

    /// The parameters that were learnt, as JSON.
    fn fabricast_domain_save(
        domain: Handle<OpenDomain>,
        topology: Text<'_>,
        json: Out<'_, *mut c_char>,
    ) -> i32, c"save parameters" {
        let topology = topology.get(OPERATION, "topology")?.unwrap_or_default();
        let saved = domain.find(OPERATION)?.with(OPERATION, |domain| domain.saved_parameters())?;
        json.put(Registry::current().lend_text(c_text(saved.to_json(topology))))
    }

    fn fabricast_domain_load(
        domain: Handle<OpenDomain>,
        topology: Text<'_>,
        json: &[u8] [length],
    ) -> i32, c"load parameters" {
        let saved = saved_parameters(OPERATION, &topology, json)?;
        domain.find(OPERATION)?.with(OPERATION, |domain| {
            domain.with_controller(|controller| saved.load_into(controller));
        })
    }

    fn fabricast_domain_barrier(
        domain: Handle<OpenDomain>,
        timeout: Timeout,
    ) -> i32, c"barrier" {
        let none = (CallerBuffer::NULL, Blocks::One(0));
        let kind = moving(Collective::Barrier, collective::DataType::U8 as u32, 0);
        domain.find(OPERATION)?.run(OPERATION, kind, none, none, timeout)
    }

    fn fabricast_domain_all_reduce(
        domain: Handle<OpenDomain>,
        input: CallerBuffer<'_>,
        output: CallerBuffer<'_>,
        count: usize,
        data_type: u32,
        op: u32,
        timeout: Timeout,
    ) -> i32, c"all-reduce" {
        let blocks = Blocks::One(count);
        let reduce_op = Some(op);
        let kind = Kind { operation: Collective::AllReduce, data_type, reduce_op, root: 0 };
        let from = (input.or(output), blocks);
        domain.find(OPERATION)?.run(OPERATION, kind, from, (output, blocks), timeout)
    }

    fn fabricast_domain_reduce(
        domain: Handle<OpenDomain>,
        input: CallerBuffer<'_>,
        output: CallerBuffer<'_>,
        count: usize,
        data_type: u32,
        op: u32,
        root: u32,
        timeout: Timeout,
    ) -> i32, c"reduce" {
        let blocks = Blocks::One(count);
        let kind = Kind { operation: Collective::Reduce, data_type, reduce_op: Some(op), root };
        let from = (input.or(output), blocks);
        domain.find(OPERATION)?.run(OPERATION, kind, from, (output, blocks), timeout)
    }

    fn fabricast_domain_broadcast(
        domain: Handle<OpenDomain>,
        buffer: CallerBuffer<'_>,
        count: usize,
        data_type: u32,
        root: u32,
        timeout: Timeout,
    ) -> i32, c"broadcast" {
        let side = (buffer, Blocks::One(count));
        let kind = moving(Collective::Broadcast, data_type, root);
        domain.find(OPERATION)?.run(OPERATION, kind, side, side, timeout)
    }

    fn fabricast_domain_all_gather(
        domain: Handle<OpenDomain>,
        input: CallerBuffer<'_>,
        output: CallerBuffer<'_>,
        count: usize,
        data_type: u32,
        timeout: Timeout,
    ) -> i32, c"all-gather" {
        let open = domain.find(OPERATION)?;
        let receive = Blocks::Each(count);
        let input = input.or(open.own_block(OPERATION, output, receive, data_type)?);
        let kind = moving(Collective::AllGather, data_type, 0);
        open.run(OPERATION, kind, (input, Blocks::One(count)), (output, receive), timeout)
    }

    fn fabricast_domain_all_gather_unequal(
        domain: Handle<OpenDomain>,
        input: CallerBuffer<'_>,
        count: usize,
        output: CallerBuffer<'_>,
        counts: Array<'_, usize>,
        offsets: Array<'_, usize>,
        data_type: u32,
        timeout: Timeout,
    ) -> i32, c"all-gather" {
        let open = domain.find(OPERATION)?;
        let blocks = open.unequal(OPERATION, counts, offsets)?;
        let input = input.or(open.own_block(OPERATION, output, blocks.get(), data_type)?);
        let kind = moving(Collective::AllGather, data_type, 0);
        open.run(OPERATION, kind, (input, Blocks::One(count)), (output, blocks.get()), timeout)
    }

    fn fabricast_domain_reduce_scatter(
        domain: Handle<OpenDomain>,
        input: CallerBuffer<'_>,
        output: CallerBuffer<'_>,
        count: usize,
        data_type: u32,
        op: u32,
        timeout: Timeout,
    ) -> i32, c"reduce-scatter" {
        let reduce_op = Some(op);
        let kind = Kind { operation: Collective::ReduceScatter, data_type, reduce_op, root: 0 };
        let (from, to) = ((input.or(output), Blocks::Each(count)), (output, Blocks::One(count)));
        domain.find(OPERATION)?.run(OPERATION, kind, from, to, timeout)
    }

    /// Reduces and scatters blocks of different numbers of elements.
    fn fabricast_domain_reduce_scatter_unequal(
        domain: Handle<OpenDomain>,
        input: CallerBuffer<'_>,
        output: CallerBuffer<'_>,
        counts: Array<'_, usize>,
        offsets: Array<'_, usize>,
        data_type: u32,
        op: u32,
        timeout: Timeout,
    ) -> i32, c"reduce-scatter" {
        let open = domain.find(OPERATION)?;
        let blocks = open.unequal(OPERATION, counts, offsets)?;
        let own = blocks.counts.get(open.rank as usize).copied().unwrap_or(0);
        let reduce_op = Some(op);
        let kind = Kind { operation: Collective::ReduceScatter, data_type, reduce_op, root: 0 };
        let (from, to) = ((input.or(output), blocks.get()), (output, Blocks::One(own)));
        open.run(OPERATION, kind, from, to, timeout)
    }

    fn fabricast_domain_all_to_all(
        domain: Handle<OpenDomain>,
        input: CallerBuffer<'_>,
        output: CallerBuffer<'_>,
        count: usize,
        data_type: u32,
        timeout: Timeout,
    ) -> i32, c"all-to-all" {
        let blocks = Blocks::Each(count);
        let kind = moving(Collective::AllToAll, data_type, 0);
        let from = (input.or(output), blocks);
        domain.find(OPERATION)?.run(OPERATION, kind, from, (output, blocks), timeout)
    }

    /// Exchanges blocks of different numbers of elements.
    fn fabricast_domain_all_to_all_unequal(
        domain: Handle<OpenDomain>,
        input: CallerBuffer<'_>,
        send_counts: Array<'_, usize>,
        send_offsets: Array<'_, usize>,
        output: CallerBuffer<'_>,
        receive_counts: Array<'_, usize>,
        receive_offsets: Array<'_, usize>,
        data_type: u32,
        timeout: Timeout,
    ) -> i32, c"all-to-all" {
        let open = domain.find(OPERATION)?;
        let receive = open.unequal(OPERATION, receive_counts, receive_offsets)?;
        let kind = moving(Collective::AllToAll, data_type, 0);
        let to = (output, receive.get());
        if input.is_null() && send_counts.is_null() {
            return open.run(OPERATION, kind, to, to, timeout);
        }
        let send = open.unequal(OPERATION, send_counts, send_offsets)?;
        open.run(OPERATION, kind, (input, send.get()), to, timeout)
    }

    fn fabricast_domain_gather(
        domain: Handle<OpenDomain>,
        input: CallerBuffer<'_>,
        output: CallerBuffer<'_>,
        count: usize,
        data_type: u32,
        root: u32,
        timeout: Timeout,
    ) -> i32, c"gather" {
        let open = domain.find(OPERATION)?;
        let receive = Blocks::Each(count);
        let input = match open.rank == root {
            true => input.or(open.own_block(OPERATION, output, receive, data_type)?),
            false => input,
        };
        let kind = moving(Collective::Gather, data_type, root);
        open.run(OPERATION, kind, (input, Blocks::One(count)), (output, receive), timeout)
    }

    fn fabricast_domain_gather_unequal(
        domain: Handle<OpenDomain>,
        input: CallerBuffer<'_>,
        count: usize,
        output: CallerBuffer<'_>,
        counts: Array<'_, usize>,
        offsets: Array<'_, usize>,
        data_type: u32,
        root: u32,
        timeout: Timeout,
    ) -> i32, c"gather" {
        let open = domain.find(OPERATION)?;
        let (mut blocks, mut input) = (UnequalBlocks::default(), input);
        if open.rank == root {
            blocks = open.unequal(OPERATION, counts, offsets)?;
            input = input.or(open.own_block(OPERATION, output, blocks.get(), data_type)?);
        }
        let kind = moving(Collective::Gather, data_type, root);
        open.run(OPERATION, kind, (input, Blocks::One(count)), (output, blocks.get()), timeout)
    }

    fn fabricast_domain_scatter(
        domain: Handle<OpenDomain>,
        input: CallerBuffer<'_>,
        output: CallerBuffer<'_>,
        count: usize,
        data_type: u32,
        root: u32,
        timeout: Timeout,
    ) -> i32, c"scatter" {
        let open = domain.find(OPERATION)?;
        let send = Blocks::Each(count);
        let output = match open.rank == root {
            true => output.or(open.own_block(OPERATION, input, send, data_type)?),
            false => output,
        };
        let kind = moving(Collective::Scatter, data_type, root);
        open.run(OPERATION, kind, (input, send), (output, Blocks::One(count)), timeout)
    }

    fn fabricast_domain_scatter_unequal(
        domain: Handle<OpenDomain>,
        input: CallerBuffer<'_>,
        counts: Array<'_, usize>,
        offsets: Array<'_, usize>,
        output: CallerBuffer<'_>,
        count: usize,
        data_type: u32,
        root: u32,
        timeout: Timeout,
    ) -> i32, c"scatter" {
        let open = domain.find(OPERATION)?;
        let (mut blocks, mut output) = (UnequalBlocks::default(), output);
        if open.rank == root {
            blocks = open.unequal(OPERATION, counts, offsets)?;
            output = output.or(open.own_block(OPERATION, input, blocks.get(), data_type)?);
        }
        let kind = moving(Collective::Scatter, data_type, root);
        open.run(OPERATION, kind, (input, blocks.get()), (output, Blocks::One(count)), timeout)
    }

    /// The ranks that caused the thread's last error; returns their number.
    fn fabricast_error_ranks(
        ranks: OutArray<'_, u32>,
        capacity: usize,
    ) -> usize, c"get ranks of error" {
        let all = last_ranks();
        ranks.put(OPERATION, "ranks", capacity, &all[..all.len().min(capacity)])?;
        Ok(all.len())
    }
}
