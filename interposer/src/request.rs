//! An operation that a program calls, in the words of this project.

use collective::{Blocks, CollectiveCall, DataType, OpKey, Operation, ReduceOp, SizeClass};

/// A stream of the program, by its handle.
pub(crate) type StreamHandle = usize;

/// The type of elements: how they are reduced, and how long they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ElementType {
    Reducible(DataType),
    /// Elements of so many bytes that this project only moves.
    Movable(usize),
}

impl ElementType {
    fn bytes(self) -> usize {
        match self {
            Self::Reducible(data_type) => data_type.size(),
            Self::Movable(bytes) => bytes,
        }
    }
}

/// An operation, as a rank calls it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    operation: Operation,
    data_type: DataType,
    reduce_op: ReduceOp,
    root: u32,
    input: usize,
    output: usize,
    /// Elements of a block.
    count: usize,
}

impl Request {
    /// An operation that moves blocks of so many elements. None for too many.
    pub(crate) fn moving(
        operation: Operation,
        element: ElementType,
        count: usize,
        input: usize,
        output: usize,
    ) -> Option<Self> {
        let count = count.checked_mul(element.bytes()).filter(|it| isize::try_from(*it).is_ok())?;
        let (data_type, reduce_op) = (DataType::U8, ReduceOp::Sum);
        Some(Self { operation, data_type, reduce_op, root: 0, input, output, count })
    }

    /// An operation that reduces. None for elements that this project cannot reduce.
    pub(crate) fn reducing(
        operation: Operation,
        element: ElementType,
        reduce_op: ReduceOp,
        count: usize,
        input: usize,
        output: usize,
    ) -> Option<Self> {
        let ElementType::Reducible(data_type) = element else { return None };
        Some(Self { operation, data_type, reduce_op, root: 0, input, output, count })
    }

    pub(crate) fn with_root(self, root: i64) -> Option<Self> {
        Some(Self { root: u32::try_from(root).ok()?, ..self })
    }

    pub(crate) fn operation(&self) -> Operation {
        self.operation
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Bytes of a block.
    pub(crate) fn bytes(&self) -> u64 {
        self.count as u64 * self.data_type.size() as u64
    }

    /// The key under which its choice is learnt.
    pub(crate) fn key(&self) -> OpKey {
        let size_class = SizeClass::of(self.bytes());
        OpKey { operation: self.operation, size_class, data_type: self.data_type }
    }

    /// The call of a domain. Its pointers are the program's.
    pub(crate) fn call(&self) -> CollectiveCall<'static> {
        use Operation::{AllGather, AllToAll, Gather, ReduceScatter, Scatter};
        let (one, each) = (Blocks::One(self.count), Blocks::Each(self.count));
        let is_split = matches!(self.operation, ReduceScatter | Scatter | AllToAll);
        let is_joined = matches!(self.operation, AllGather | Gather | AllToAll);
        CollectiveCall {
            operation: self.operation,
            data_type: self.data_type,
            reduce_op: self.reduce_op,
            root: self.root,
            input: std::ptr::with_exposed_provenance(self.input),
            send: if is_split { each } else { one },
            output: std::ptr::with_exposed_provenance_mut(self.output),
            receive: if is_joined { each } else { one },
        }
    }
}

/// A send or receive of a group.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PointToPoint {
    is_send: bool,
    address: usize,
    count: usize,
    data_type: i32,
    peer: i32,
    stream: StreamHandle,
}

impl PointToPoint {
    pub(crate) fn new(
        is_send: bool,
        address: usize,
        count: usize,
        data_type: i32,
        peer: i32,
        stream: StreamHandle,
    ) -> Self {
        Self { is_send, address, count, data_type, peer, stream }
    }

    /// Calls the original function of a send or a receive, with its arguments.
    pub(crate) fn call<T>(
        &self,
        original: impl FnOnce(bool, usize, usize, i32, i32, StreamHandle) -> T,
    ) -> T {
        original(self.is_send, self.address, self.count, self.data_type, self.peer, self.stream)
    }
}

/// The all-to-all that sends and receives of a rank make together, and its stream. None unless there is one of
/// each for each rank, of equal lengths, and their blocks follow each other.
pub(crate) fn all_to_all(
    all: &[PointToPoint],
    ranks: u32,
    element: impl Fn(i32) -> Option<ElementType>,
) -> Option<(Request, StreamHandle)> {
    let first = all.first()?;
    let element = element(first.data_type)?;
    let length = first.count.checked_mul(element.bytes())?;
    let is_alike = |it: &&PointToPoint| {
        (it.count, it.data_type, it.stream) == (first.count, first.data_type, first.stream)
    };
    if all.len() != 2 * ranks as usize || !all.iter().all(|it| is_alike(&it)) {
        return None;
    }
    let base = |is_send: bool| {
        let mut blocks: Vec<_> = all.iter().filter(|it| it.is_send == is_send).collect();
        blocks.sort_unstable_by_key(|it| it.peer);
        let base = blocks.first()?.address;
        let is_in_order = (0..ranks).zip(&blocks).all(|(peer, it)| {
            i64::from(it.peer) == i64::from(peer) && it.address == base + peer as usize * length
        });
        (is_in_order && blocks.len() == ranks as usize).then_some(base)
    };
    let (input, output) = (base(true)?, base(false)?);
    let request = Request::moving(Operation::AllToAll, element, first.count, input, output)?;
    Some((request, first.stream))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTE: ElementType = ElementType::Reducible(DataType::U8);

    fn group() -> Vec<PointToPoint> {
        let one = |is_send: bool, peer: i32| PointToPoint {
            is_send,
            address: if is_send { 4096 } else { 8192 } + peer as usize * 100,
            count: 100,
            data_type: 0,
            peer,
            stream: 5,
        };
        (0..3).rev().flat_map(|peer| [one(true, peer), one(false, peer)]).collect()
    }

    #[test]
    fn equal_contiguous_sends_and_receives_are_an_all_to_all() {
        let (request, stream) = all_to_all(&group(), 3, |_| Some(BYTE)).unwrap();
        let call = request.call();
        assert_eq!((call.input.addr(), call.output.addr(), stream), (4096, 8192, 5));
        assert_eq!((call.send, call.receive), (Blocks::Each(100), Blocks::Each(100)));
    }

    #[test]
    fn other_groups_are_none() {
        let changes: [fn(&mut Vec<PointToPoint>); 5] = [
            |all| all.truncate(5),
            |all| all[1].count = 99,
            |all| all[2].address += 1,
            |all| all[0].stream = 6,
            |all| all[0].peer = 1,
        ];
        for change in changes {
            let mut all = group();
            change(&mut all);
            assert!(all_to_all(&all, 3, |_| Some(BYTE)).is_none());
        }
        assert!(all_to_all(&group(), 4, |_| Some(BYTE)).is_none());
        assert!(all_to_all(&[], 3, |_| Some(BYTE)).is_none());
    }
}
