//! The functions of NCCL.
#![allow(unsafe_code, non_snake_case, unreachable_pub)]

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::time::Duration;

use collective::{DataType, Operation, ReduceOp};
use gpu::{Device, DeviceName};

use super::loader::{Originals, at_exit, original, replaced};
use crate::communicator::digest;
use crate::device_engine::DeviceEngine;
use crate::engine::{Engine, Join};
use crate::error::{Error, Result};
use crate::group;
use crate::host_engine::{EmulatedStreams, HostEngine};
use crate::interposer::{Code, Interposer, Library};
use crate::request::{ElementType, PointToPoint, Request, StreamHandle};

static NCCL: Originals = Originals::new("libnccl.so", c"libnccl.so.2", "FABRICAST_NCCL_LIBRARY");
static INTERPOSER: Interposer<Nccl> = Interposer::new();

type Comm = *mut c_void;
type Stream = *mut c_void;
type From = *const c_void;
type To = *mut c_void;

/// `ncclUniqueId`, which functions get by value.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct UniqueId([u8; 128]);

/// The first fields of `ncclConfig_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

/// Types and reductions, by their numbers.
#[rustfmt::skip]
const ELEMENTS: [DataType; 10] = [
    DataType::I8, DataType::U8, DataType::I32, DataType::U32, DataType::I64,
    DataType::U64, DataType::F16, DataType::F32, DataType::F64, DataType::Bf16,
];
const REDUCTIONS: [ReduceOp; 5] =
    [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Max, ReduceOp::Min, ReduceOp::Mean];

const NON_BLOCKING: &str = "it is non-blocking";

#[derive(Debug)]
struct Nccl;

impl Library for Nccl {
    const NAME: &'static str = "nccl";
    const SUCCESS: Code = 0;
    const SYSTEM_ERROR: Code = 2;
    const INTERNAL_ERROR: Code = 3;
    const REMOTE_ERROR: Code = 6;
    const HAS_OPERATIONS: bool = true;

    fn element(data_type: i32) -> Option<ElementType> {
        let number = usize::try_from(data_type).ok()?;
        match ELEMENTS.get(number) {
            Some(data_type) => Some(ElementType::Reducible(*data_type)),
            // Two types of 8 bits.
            None => (number < ELEMENTS.len() + 2).then_some(ElementType::Movable(1)),
        }
    }

    fn reduce_op(op: i32) -> Option<ReduceOp> {
        REDUCTIONS.get(usize::try_from(op).ok()?).copied()
    }

    fn prepare(handle: usize) -> Result<Join> {
        if let Some(streams) = emulated_streams() {
            return Ok(Box::new(move |key, rank, options| {
                let engine = HostEngine::join(key, rank, options, streams)?;
                Ok(Box::new(engine) as Box<dyn Engine>)
            }));
        }
        let number_of = original!(NCCL, ncclCommCuDevice: fn(Comm, *mut c_int) -> Code);
        let mut number = -1;
        // SAFETY: a communicator that was made; space for a number.
        let code = number_of.map(|it| unsafe { it(pointer(handle), &raw mut number) });
        let number = u32::try_from(number).ok().filter(|_| code == Some(Self::SUCCESS));
        let unknown = || Error::Unavailable("its device is not known".to_owned());
        let device = Device::open(DeviceName::cuda(number.ok_or_else(unknown)?))?;
        Ok(Box::new(move |key, rank, options| {
            let engine = DeviceEngine::join(key, rank, options, &device)?;
            Ok(Box::new(engine) as Box<dyn Engine>)
        }))
    }

    fn send_or_receive(handle: usize, one: &PointToPoint) -> Code {
        let comm: Comm = pointer(handle);
        one.call(|is_send, address, count, data_type, peer, stream| {
            let (buffer, stream): (*mut c_void, Stream) = (pointer(address), pointer(stream));
            let function = if is_send {
                original!(NCCL, ncclSend: fn(*mut c_void, usize, c_int, c_int, Comm, Stream) -> Code)
            } else {
                original!(NCCL, ncclRecv: fn(*mut c_void, usize, c_int, c_int, Comm, Stream) -> Code)
            };
            let Some(function) = function else { return Self::SYSTEM_ERROR };
            // SAFETY: the program's arguments.
            unsafe { function(buffer, count, data_type, peer, comm, stream) }
        })
    }
}

fn pointer(address: usize) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address)
}

fn address(pointer: *const c_void) -> usize {
    pointer.expose_provenance()
}

/// What a library that emulates NCCL in host memory tells about its streams; None for NCCL.
fn emulated_streams() -> Option<EmulatedStreams> {
    fn is_capturing(stream: StreamHandle) -> bool {
        let ask = original!(NCCL, fabricast_fake_is_capturing: fn(Stream) -> Code);
        // SAFETY: the function takes any handle.
        ask.is_some_and(|ask| unsafe { ask(pointer(stream)) } != 0)
    }
    let delay = original!(NCCL, fabricast_fake_engine_delay: fn() -> Code)?;
    // SAFETY: a function without arguments.
    let micros = unsafe { delay() };
    let delay = Duration::from_micros(micros.max(0).cast_unsigned().into());
    Some(EmulatedStreams::new(is_capturing, delay))
}

thread_local! {
    /// Communicators that the group of this thread makes at its end.
    static MADE_IN_GROUP: RefCell<Vec<Made>> = const { RefCell::new(Vec::new()) };
}

/// A communicator that was made, at a place of the program.
#[derive(Debug, Clone, Copy)]
struct Made {
    place: *mut Comm,
    /// The number of ranks and the rank; None if NCCL has to be asked.
    ranks: Option<[c_int; 2]>,
    seed: u64,
    /// Why it is left to NCCL.
    reason: Option<&'static str>,
}

impl Made {
    fn add(&self) {
        extern "C" fn report() {
            INTERPOSER.report();
        }
        at_exit(&INTERPOSER, report);
        // SAFETY: NCCL has stored the communicator there.
        let comm = unsafe { *self.place };
        if comm.is_null() {
            return;
        }
        let [ranks, rank] = self.ranks.unwrap_or_else(|| ranks_of(comm)).map(u32::try_from);
        let (ranks, rank, reason) = match (ranks, rank) {
            (Ok(ranks), Ok(rank)) => (ranks, rank, self.reason),
            _ => (0, 0, Some("its rank is not known")),
        };
        INTERPOSER.add(address(comm), ranks, rank, self.seed, reason);
    }

    /// After the original function, whose code this is.
    fn done(self, code: Code) -> Code {
        if code != Nccl::SUCCESS || self.place.is_null() {
            return code;
        }
        if group::is_open() {
            MADE_IN_GROUP.with_borrow_mut(|all| all.push(self));
        } else {
            self.add();
        }
        code
    }
}

/// The reason why a communicator of this configuration is left to NCCL.
fn reason_of(config: *const Config) -> Option<&'static str> {
    let by_variable = std::env::var("NCCL_COMM_BLOCKING").ok().as_deref() == Some("0");
    // SAFETY: null, or the program's configuration.
    let by_config = unsafe { config.as_ref() }.is_some_and(|config| config.blocking == 0);
    (by_variable || by_config).then_some(NON_BLOCKING)
}

/// The number of ranks and the rank of a communicator; -1 if they are not known.
fn ranks_of(comm: Comm) -> [c_int; 2] {
    let count = original!(NCCL, ncclCommCount: fn(Comm, *mut c_int) -> Code);
    let rank = original!(NCCL, ncclCommUserRank: fn(Comm, *mut c_int) -> Code);
    [count, rank].map(|function| {
        let mut number = -1;
        // SAFETY: a communicator; space for a number.
        let code = function.map(|function| unsafe { function(comm, &raw mut number) });
        if code == Some(Nccl::SUCCESS) { number } else { -1 }
    })
}

/// A request that reduces, or the reason why it is left.
fn reducing(
    operation: Operation,
    data_type: c_int,
    op: c_int,
    count: usize,
    input: *const c_void,
    output: *const c_void,
) -> std::result::Result<Request, &'static str> {
    let op = Nccl::reduce_op(op).ok_or("custom reduction")?;
    let element = Nccl::element(data_type).ok_or("unknown type")?;
    let request = Request::reducing(operation, element, op, count, address(input), address(output));
    request.ok_or("type is not reduced")
}

/// A request that moves elements, or the reason why it is left.
fn moving(
    operation: Operation,
    data_type: c_int,
    count: usize,
    input: *const c_void,
    output: *const c_void,
) -> std::result::Result<Request, &'static str> {
    let element = Nccl::element(data_type).ok_or("unknown type")?;
    let request = Request::moving(operation, element, count, address(input), address(output));
    request.ok_or("too many elements")
}

fn rooted(
    request: std::result::Result<Request, &'static str>,
    root: c_int,
) -> std::result::Result<Request, &'static str> {
    request?.with_root(root.into()).ok_or("invalid root")
}

fn digest_of(ids: &[UniqueId]) -> u64 {
    digest(ids.iter().flat_map(|id| id.0))
}

/// Functions of collective operations, and their requests.
macro_rules! collectives {
    ($(fn $name:ident($($argument:ident: $type:ty),*) => $request:expr;)*) => {
        replaced! { NCCL, Nccl;
            $(fn $name($($argument: $type),*, comm: Comm, stream: Stream) |original| {
                INTERPOSER.operation(address(comm), $request, address(stream), original)
            };)*
        }
    };
}

collectives! {
    fn ncclAllReduce(from: From, to: To, count: usize, element: c_int, op: c_int) =>
        reducing(Operation::AllReduce, element, op, count, from, to);
    fn ncclReduceScatter(from: From, to: To, count: usize, element: c_int, op: c_int) =>
        reducing(Operation::ReduceScatter, element, op, count, from, to);
    fn ncclReduce(from: From, to: To, count: usize, element: c_int, op: c_int, root: c_int) =>
        rooted(reducing(Operation::Reduce, element, op, count, from, to), root);
    fn ncclAllGather(from: From, to: To, count: usize, element: c_int) =>
        moving(Operation::AllGather, element, count, from, to);
    fn ncclAlltoAll(from: From, to: To, count: usize, element: c_int) =>
        moving(Operation::AllToAll, element, count, from, to);
    fn ncclBroadcast(from: From, to: To, count: usize, element: c_int, root: c_int) =>
        rooted(moving(Operation::Broadcast, element, count, from, to), root);
    fn ncclBcast(buffer: To, count: usize, element: c_int, root: c_int) =>
        rooted(moving(Operation::Broadcast, element, count, buffer, buffer), root);
    fn ncclGather(from: From, to: To, count: usize, element: c_int, root: c_int) =>
        rooted(moving(Operation::Gather, element, count, from, to), root);
    fn ncclScatter(from: From, to: To, count: usize, element: c_int, root: c_int) =>
        rooted(moving(Operation::Scatter, element, count, from, to), root);
}

replaced! { NCCL, Nccl;
    fn ncclCommInitRank(place: *mut Comm, ranks: c_int, id: UniqueId, rank: c_int) |original| {
        let (ranks, seed) = (Some([ranks, rank]), digest_of(&[id]));
        Made { place, ranks, seed, reason: reason_of(std::ptr::null()) }.done(original())
    };
    fn ncclCommInitRankConfig(
        place: *mut Comm, ranks: c_int, id: UniqueId, rank: c_int, config: *mut Config
    ) |original| {
        let (ranks, seed) = (Some([ranks, rank]), digest_of(&[id]));
        Made { place, ranks, seed, reason: reason_of(config) }.done(original())
    };
    fn ncclCommInitRankScalable(
        place: *mut Comm, ranks: c_int, rank: c_int, count: c_int, ids: *const UniqueId,
        config: *mut Config
    ) |original| {
        let code = original();
        let count = usize::try_from(count).unwrap_or(0);
        if code != Nccl::SUCCESS || ids.is_null() || count == 0 {
            return code;
        }
        // SAFETY: so many ids of the program, which NCCL has accepted.
        let seed = digest_of(unsafe { std::slice::from_raw_parts(ids, count) });
        Made { place, ranks: Some([ranks, rank]), seed, reason: reason_of(config) }.done(code)
    };
    fn ncclCommInitAll(places: *mut Comm, count: c_int, devices: *const c_int) |original| {
        let code = original();
        for rank in 0..count.max(0) {
            // SAFETY: NCCL has stored so many communicators.
            let place = unsafe { places.add(rank.cast_unsigned() as usize) };
            let reason = Some("its ranks are in one process");
            Made { place, ranks: Some([count, rank]), seed: 0, reason }.done(code);
        }
        code
    };
    fn ncclCommSplit(
        comm: Comm, color: c_int, key: c_int, place: *mut Comm, config: *mut Config
    ) |original| {
        let parent = INTERPOSER.find(address(comm));
        // Communicators without a seed of their own would have the name of others.
        let seed = parent.as_ref().and_then(|parent| parent.split_seed(color)).unwrap_or(0);
        let reason = match parent {
            None => Some("its parent is not known"),
            Some(_) if seed == 0 => Some("its parent has no name that all ranks know"),
            Some(parent) if parent.is_left_because(NON_BLOCKING) => Some(NON_BLOCKING),
            Some(_) => reason_of(config),
        };
        Made { place, ranks: None, seed, reason }.done(original())
    };
    fn ncclCommShrink(
        comm: Comm, excluded: *mut c_int, count: c_int, place: *mut Comm, config: *mut Config,
        flags: c_int
    ) |original| {
        let reason = Some("it was made by ncclCommShrink");
        Made { place, ranks: None, seed: 0, reason }.done(original())
    };
    fn ncclCommFinalize(comm: Comm) |original| {
        if let Some(found) = INTERPOSER.find(address(comm)) {
            found.drain();
        }
        original()
    };
    fn ncclCommDestroy(comm: Comm) |original| {
        INTERPOSER.remove(address(comm));
        original()
    };
    fn ncclCommAbort(comm: Comm) |original| {
        // It waits for operations behind those of NCCL, which this ends.
        let removed = INTERPOSER.abort(address(comm), true);
        let code = original();
        drop(removed);
        code
    };
    fn ncclCommRevoke(comm: Comm, flags: c_int) |original| {
        drop(INTERPOSER.abort(address(comm), false));
        original()
    };
    fn ncclCommGetAsyncError(comm: Comm, result: *mut c_int) |original| {
        let code = original();
        if code == Nccl::SUCCESS
            && let Some(error) = INTERPOSER.asynchronous_error(address(comm))
            // SAFETY: null, or the program's place, to which NCCL has written.
            && let Some(result) = unsafe { result.as_mut() }
            && *result == Nccl::SUCCESS
        {
            *result = error;
        }
        code
    };

    fn ncclSend(
        buffer: *const c_void, count: usize, data_type: c_int, peer: c_int, comm: Comm,
        stream: Stream
    ) |_original| {
        let stream = address(stream);
        let one = PointToPoint::new(true, address(buffer), count, data_type, peer, stream);
        INTERPOSER.point_to_point(address(comm), one)
    };
    fn ncclRecv(
        buffer: *mut c_void, count: usize, data_type: c_int, peer: c_int, comm: Comm,
        stream: Stream
    ) |_original| {
        let stream = address(stream);
        let one = PointToPoint::new(false, address(buffer), count, data_type, peer, stream);
        INTERPOSER.point_to_point(address(comm), one)
    };

    fn ncclGroupStart() |original| {
        let code = original();
        if code == Nccl::SUCCESS {
            group::start();
        }
        code
    };
    fn ncclGroupEnd() |original| {
        let is_outermost = group::is_outermost();
        let code = INTERPOSER.group_end(original);
        if is_outermost {
            // Several would wait for each other's ranks, one after the other.
            let (made, several) = (MADE_IN_GROUP.take(), Some("it was made in a group with others"));
            let is_one = made.len() == 1;
            for made in made.into_iter().filter(|_| code == Nccl::SUCCESS) {
                Made { reason: if is_one { made.reason } else { several }, ..made }.add();
            }
        }
        code
    };
    fn ncclGroupSimulateEnd(information: *mut c_void) |original| {
        INTERPOSER.group_simulate_end(original)
    };
}
