//! A collective operation as a rank calls it: its buffers in host or device memory, checked and laid out.

use crate::call::Call;
use crate::domain_key::digest;
use crate::error::{Error, ErrorKind, Result};
use crate::operation::Operation;
use crate::place::Place;
use reduction::{DataType, ReduceOp};

/// Elements of a buffer, as blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blocks<'a> {
    /// One block of so many elements. Without elements the buffer is not used.
    One(usize),
    /// A block of so many elements for each rank, one after the other.
    Each(usize),
    /// Blocks of these elements, one for each rank.
    Unequal {
        /// The elements of each block.
        counts: &'a [usize],
        /// Where each block begins, in elements.
        offsets: &'a [usize],
    },
}

/// A collective operation, as a rank calls it: in host memory for a [`CommDomain`](crate::CommDomain), in
/// device memory for a [`DeviceDomain`](crate::DeviceDomain).
#[derive(Debug, Clone, Copy)]
pub struct CollectiveCall<'a> {
    /// The operation.
    pub operation: Operation,
    /// The type of the elements.
    pub data_type: DataType,
    /// How elements are reduced; not used by operations that only move them.
    pub reduce_op: ReduceOp,
    /// The rank that has or gets all elements; not used by operations without such a rank.
    pub root: u32,
    /// The elements that this rank contributes.
    pub input: *const u8,
    /// The blocks of the input: one, or for scatter, reduce-scatter and all-to-all one for each rank.
    pub send: Blocks<'a>,
    /// Where the result goes: apart from the input, or over it. In all-gather, gather and scatter, the
    /// input or the result may be this rank's block of the other one; in reduce-scatter the result may also
    /// begin where the input does.
    pub output: *mut u8,
    /// The blocks of the output: one, or for all-gather, gather and all-to-all one for each rank.
    pub receive: Blocks<'a>,
}

/// A checked call of a rank.
#[derive(Debug)]
pub(crate) struct CheckedCall {
    call: Call,
    /// One place, or one for each rank.
    from: Vec<Place>,
    to: Vec<Place>,
    /// The longest block that any rank gives; None if the ranks must ask each other.
    longest: Option<usize>,
    /// Bytes by which the parameters are chosen.
    bytes: u64,
    /// Blocks of the output are where the input is.
    is_in_place: bool,
}

impl CheckedCall {
    /// A part of an operation, with blocks that are at most so long; None if the ranks must ask each other.
    pub(crate) fn of_part(
        call: Call,
        from: Vec<Place>,
        to: Vec<Place>,
        longest: Option<usize>,
    ) -> Self {
        let first = |places: &[Place]| places.first().map(|place| place.at());
        let is_in_place = first(&from) == first(&to);
        Self { call, from, to, longest, bytes: longest.unwrap_or(0) as u64, is_in_place }
    }

    pub(crate) fn call(&self) -> &Call {
        &self.call
    }

    /// Where the blocks are that this rank gives.
    pub(crate) fn from(&self) -> &[Place] {
        &self.from
    }

    /// Where the blocks go that this rank gets.
    pub(crate) fn to(&self) -> &[Place] {
        &self.to
    }

    pub(crate) fn longest(&self) -> Option<usize> {
        self.longest
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn is_in_place(&self) -> bool {
        self.is_in_place
    }
}

impl CollectiveCall<'_> {
    /// Checks the call of a rank, and computes where its blocks are.
    pub(crate) fn check(&self, rank: u32, ranks: u32) -> Result<CheckedCall> {
        use Operation::{
            AllGather, AllReduce, AllToAll, Barrier, Broadcast, Gather, Reduce, ReduceScatter,
            Scatter,
        };
        let operation = self.operation;
        let invalid =
            |detail: String| Error::new(operation.name(), ErrorKind::InvalidArgument, detail);
        let has_root = matches!(operation, Broadcast | Gather | Scatter | Reduce);
        if has_root && self.root >= ranks {
            let root = self.root;
            return Err(invalid(format!(
                "rank {root} does not exist: the domain has {ranks} ranks"
            )));
        }
        let is_root = has_root && rank == self.root;
        // Whether there is one block, one for each rank, or none, on either side.
        let (sends_each, receives_each) = match operation {
            ReduceScatter => (true, false),
            Scatter => (true, false),
            AllGather | Gather => (false, true),
            AllToAll => (true, true),
            AllReduce | Broadcast | Reduce | Barrier => (false, false),
        };
        let sends =
            !matches!(operation, Barrier) && (is_root || !matches!(operation, Broadcast | Scatter));
        let receives =
            !matches!(operation, Barrier) && (is_root || !matches!(operation, Gather | Reduce));
        let size = self.data_type.size();
        let places = |name, at: *mut u8, blocks, is_each: bool, is_used: bool| {
            let spans =
                if is_used { self.spans(blocks, is_each, ranks, size) } else { Ok(Vec::new()) };
            let spans = spans.map_err(|why| invalid(format!("{name}: {why}")))?;
            if at.is_null() && spans.iter().any(|(_, bytes)| *bytes > 0) {
                return Err(invalid(format!("{name}: there is no buffer")));
            }
            let place = |(offset, bytes)| Place::new(at.wrapping_add(offset), bytes);
            Ok(spans.into_iter().map(place).collect::<Vec<_>>())
        };
        let from = places("input", self.input.cast_mut(), self.send, sends_each, sends)?;
        let to = places("output", self.output, self.receive, receives_each, receives)?;
        self.check_lengths(rank, &from, &to).map_err(invalid)?;
        let is_unequal = |blocks| matches!(blocks, Blocks::Unequal { .. });
        let asks = matches!(operation, Gather | Scatter | AllToAll)
            && (is_unequal(self.send) || is_unequal(self.receive));
        let all = if receives_each { &to } else { &from };
        let total: usize = all.iter().map(|place| place.bytes()).sum();
        let longest = all.iter().map(|place| place.bytes()).max().unwrap_or(0);
        let each = matches!(operation, AllGather | ReduceScatter)
            && (is_unequal(self.send) || is_unequal(self.receive));
        let one = from.first().or(to.first()).map_or(0, |place| place.bytes());
        let (count, blocks, bytes) = if asks {
            (0, 1, 0)
        } else if each {
            let lengths = all.iter().map(|place| place.bytes() as u64);
            (total / size, digest(lengths) | 1, total / ranks as usize)
        } else {
            (one / size, 0, one)
        };
        let call = Call {
            operation,
            data_type: self.data_type,
            reduce_op: matches!(operation, AllReduce | ReduceScatter | Reduce)
                .then_some(self.reduce_op),
            root: has_root.then_some(self.root),
            count: count as u64,
            blocks,
        };
        let longest = (!asks).then_some(if each { longest } else { one });
        let is_in_place = self.input == self.output.cast_const();
        Ok(CheckedCall { call, from, to, longest, bytes: bytes as u64, is_in_place })
    }

    /// The offset and length in bytes of each block.
    fn spans(
        &self,
        blocks: Blocks<'_>,
        is_each: bool,
        ranks: u32,
        size: usize,
    ) -> std::result::Result<Vec<(usize, usize)>, String> {
        let too_long = || "more elements than memory has".to_owned();
        let limit = isize::MAX.cast_unsigned();
        let bytes =
            |count: usize| count.checked_mul(size).filter(|it| *it <= limit).ok_or_else(too_long);
        match blocks {
            Blocks::One(count) if !is_each => Ok(vec![(0, bytes(count)?)]),
            Blocks::Each(count) if is_each => {
                bytes(count.checked_mul(ranks as usize).ok_or_else(too_long)?)?;
                let length = bytes(count)?;
                Ok((0..ranks as usize).map(|rank| (rank * length, length)).collect())
            }
            Blocks::Unequal { counts, offsets } if is_each => {
                let (given, expected) = (counts.len().min(offsets.len()), ranks as usize);
                if counts.len() != expected || offsets.len() != expected {
                    return Err(format!("{given} blocks for {expected} ranks"));
                }
                let span = |(count, offset): (&usize, &usize)| {
                    bytes(count.checked_add(*offset).ok_or_else(too_long)?)?;
                    Ok((bytes(*offset)?, bytes(*count)?))
                };
                counts.iter().zip(offsets).map(span).collect()
            }
            Blocks::One(_) => Err("one block, where each rank has one".to_owned()),
            _ => Err("several blocks, where there is one".to_owned()),
        }
    }

    /// Compares the lengths of input and output that must be equal.
    fn check_lengths(
        &self,
        rank: u32,
        from: &[Place],
        to: &[Place],
    ) -> std::result::Result<(), String> {
        let at = |places: &[Place]| {
            let place = if places.len() == 1 { places.first() } else { places.get(rank as usize) };
            place.map(|place| place.bytes())
        };
        let (Some(given), Some(taken)) = (at(from), at(to)) else { return Ok(()) };
        let size = self.data_type.size();
        match given == taken {
            true => Ok(()),
            false => Err(format!(
                "this rank gives {} elements to itself, and takes {}",
                given / size,
                taken / size
            )),
        }
    }
}
