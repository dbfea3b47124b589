//! The buffers of a rank: what it contributes, and what it gets, with the expected values.
#![allow(unsafe_code)]

use collective::Operation;

/// The buffers of a rank for an operation with f32.
#[derive(Debug)]
pub(crate) struct Buffers {
    operation: Operation,
    rank: usize,
    ranks: usize,
    count: usize,
    input: Vec<f32>,
    output: Vec<f32>,
}

/// An element of a rank. Sums of all ranks are exact.
fn element(rank: usize, at: usize) -> f32 {
    ((at * 7 + rank * 13) % 1021) as f32
}

fn as_bytes(floats: &[f32]) -> &[u8] {
    // SAFETY: floats have no padding.
    unsafe { std::slice::from_raw_parts(floats.as_ptr().cast(), size_of_val(floats)) }
}

impl Buffers {
    /// For blocks of so many elements.
    pub(crate) fn new(operation: Operation, rank: u32, ranks: u32, count: usize) -> Self {
        let (rank, ranks) = (rank as usize, ranks as usize);
        let is_root = rank == 0;
        let (sent, received) = match operation {
            Operation::AllGather => (count, count * ranks),
            Operation::Gather => (count, if is_root { count * ranks } else { 0 }),
            Operation::ReduceScatter => (count * ranks, count),
            Operation::Scatter => (if is_root { count * ranks } else { 0 }, count),
            Operation::AllToAll => (count * ranks, count * ranks),
            Operation::Broadcast => (0, count),
            Operation::Barrier => (0, 0),
            _ => (count, count),
        };
        let input = (0..sent).map(|at| element(rank, at)).collect();
        let mut new = Self { operation, rank, ranks, count, input, output: vec![-1.0; received] };
        new.clear();
        new
    }

    /// Elements of a block.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The bytes of both buffers.
    pub(crate) fn bytes(&self) -> (&[u8], &[u8]) {
        (as_bytes(&self.input), as_bytes(&self.output))
    }

    pub(crate) fn output_bytes(&mut self) -> &mut [u8] {
        let length = size_of_val(self.output.as_slice());
        // SAFETY: floats of any bits.
        unsafe { std::slice::from_raw_parts_mut(self.output.as_mut_ptr().cast(), length) }
    }

    pub(crate) fn input(&self) -> *const f32 {
        self.input.as_ptr()
    }

    pub(crate) fn output(&mut self) -> *mut f32 {
        self.output.as_mut_ptr()
    }

    /// Overwrites what an operation before has left.
    pub(crate) fn clear(&mut self) {
        if self.operation == Operation::Broadcast && self.rank == 0 {
            (0..self.count).for_each(|at| self.output[at] = element(0, at));
        } else {
            self.output.fill(-1.0);
        }
    }

    /// Returns whether the result is as expected.
    pub(crate) fn is_right(&self) -> bool {
        let Self { count, rank, ranks, .. } = *self;
        let sum = |at: usize| (0..ranks).map(|rank| element(rank, at)).sum::<f32>();
        let expected = |at: usize| match self.operation {
            Operation::AllReduce | Operation::Reduce => sum(at),
            Operation::ReduceScatter => sum(rank * count + at),
            Operation::Broadcast => element(0, at),
            Operation::Scatter => element(0, rank * count + at),
            Operation::AllToAll => element(at / count, rank * count + at % count),
            _ => element(at / count, at % count),
        };
        let is_used = self.operation != Operation::Reduce || rank == 0;
        !is_used || self.output.iter().enumerate().all(|(at, found)| *found == expected(at))
    }
}
