//! The functions of HCCL, and the synchronization of its streams.
#![allow(unsafe_code, non_snake_case, unreachable_pub)]

use std::ffi::c_void;

use collective::{DataType, Operation, ReduceOp};

use super::loader::{Originals, at_exit, replaced};
use crate::communicator::digest;
use crate::engine::{Engine, Join};
use crate::error::Result;
use crate::interposer::{Code, Interposer, Library};
use crate::request::{ElementType, PointToPoint, Request};
use crate::timer_engine::TimerEngine;

static HCCL: Originals = Originals::new("libhccl.so", c"libhccl.so", "FABRICAST_HCCL_LIBRARY");
static ACL: Originals =
    Originals::new("libascendcl.so", c"libascendcl.so", "FABRICAST_ASCENDCL_LIBRARY");
static INTERPOSER: Interposer<Hccl> = Interposer::new();

type Comm = *mut c_void;
type Stream = *mut c_void;
type Buffer = *mut c_void;
/// `HcclRootInfo`.
type RootInfo = [u8; 4108];

/// Types and reductions, by their numbers.
#[rustfmt::skip]
const ELEMENTS: [DataType; 12] = [
    DataType::I8, DataType::I16, DataType::I32, DataType::F16, DataType::F32, DataType::I64,
    DataType::U64, DataType::U8, DataType::U16, DataType::U32, DataType::F64, DataType::Bf16,
];
const REDUCTIONS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Max, ReduceOp::Min];

#[derive(Debug)]
struct Hccl;

impl Library for Hccl {
    const NAME: &'static str = "hccl";
    const SUCCESS: Code = 0;
    const INTERNAL_ERROR: Code = 4;
    const SYSTEM_ERROR: Code = 8;
    const REMOTE_ERROR: Code = 21;
    const HAS_OPERATIONS: bool = false;

    fn element(data_type: i32) -> Option<ElementType> {
        let found = ELEMENTS.get(usize::try_from(data_type).ok()?).copied();
        found.map(ElementType::Reducible)
    }

    fn reduce_op(op: i32) -> Option<ReduceOp> {
        REDUCTIONS.get(usize::try_from(op).ok()?).copied()
    }

    fn prepare(_handle: usize) -> Result<Join> {
        Ok(Box::new(|_, _, _| Ok(Box::new(TimerEngine::default()) as Box<dyn Engine>)))
    }

    fn send_or_receive(_handle: usize, _one: &PointToPoint) -> Code {
        Self::SYSTEM_ERROR
    }
}

fn address(pointer: *const c_void) -> usize {
    pointer.expose_provenance()
}

/// A request, or the reason why it is left.
fn request(
    operation: Operation,
    data_type: i32,
    op: Option<i32>,
    count: u64,
) -> std::result::Result<Request, &'static str> {
    let element = Hccl::element(data_type).ok_or("unknown type")?;
    let count = usize::try_from(count).map_err(|_| "too many elements")?;
    let made = match op {
        None => Request::moving(operation, element, count, 0, 0),
        Some(op) => {
            let op = Hccl::reduce_op(op).ok_or("custom reduction")?;
            Request::reducing(operation, element, op, count, 0, 0)
        }
    };
    made.ok_or("too many elements")
}

replaced! { HCCL, Hccl;
    fn HcclCommInitRootInfo(ranks: u32, info: *const RootInfo, rank: u32, place: *mut Comm) |original| {
        extern "C" fn report() {
            INTERPOSER.report();
        }
        at_exit(&INTERPOSER, report);
        let code = original();
        // SAFETY: the program's places, which HCCL has accepted.
        let (info, comm) = unsafe { (info.as_ref(), place.as_ref()) };
        if let (Hccl::SUCCESS, Some(info), Some(comm)) = (code, info, comm) {
            INTERPOSER.add(address(*comm), ranks, rank, digest(info.iter().copied()), None);
        }
        code
    };
    fn HcclCommDestroy(comm: Comm) |original| {
        INTERPOSER.remove(address(comm));
        original()
    };
}

/// Functions of collective operations, and their requests.
macro_rules! collectives {
    ($(fn $name:ident($($argument:ident: $type:ty),*) => $request:expr;)*) => {
        replaced! { HCCL, Hccl;
            $(fn $name($($argument: $type),*, comm: Comm, stream: Stream) |original| {
                INTERPOSER.operation(address(comm), $request, address(stream), original)
            };)*
        }
    };
}

collectives! {
    fn HcclAllReduce(from: Buffer, to: Buffer, count: u64, element: i32, op: i32) =>
        request(Operation::AllReduce, element, Some(op), count);
    fn HcclReduceScatter(from: Buffer, to: Buffer, count: u64, element: i32, op: i32) =>
        request(Operation::ReduceScatter, element, Some(op), count);
    fn HcclAllGather(from: Buffer, to: Buffer, count: u64, element: i32) =>
        request(Operation::AllGather, element, None, count);
    fn HcclBroadcast(buffer: Buffer, count: u64, element: i32, root: u32) =>
        request(Operation::Broadcast, element, None, count);
    fn HcclAlltoAll(from: Buffer, count: u64, element: i32, to: Buffer, to_count: u64, to_element: i32) =>
        request(Operation::AllToAll, element, None, count);
}

replaced! { ACL, Hccl;
    fn aclrtSynchronizeStream(stream: Stream) |original| {
        let code = original();
        if code == 0 {
            INTERPOSER.synchronized(address(stream));
        }
        code
    };
}
