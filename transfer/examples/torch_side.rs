//! An agent behind a C interface, for the test `tests/gpu/torch_transfer` only: it calls it by
//! ctypes, with memory that PyTorch allocated.
//!
//! A process has one agent. Every function returns a number from 0 on, or a negative one: then
//! `torch_side_error` has the text. Regions, peers, routes and operations have numbers.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path as FilePath;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpu::emulated::ForeignMemory;
use gpu::{Allocator, Block, CopyMethod, Device, LinkCounters};
use ipc::WaitStrategy;
use transfer::path::{Operation, Path, Policy, metrics};
use transfer::{
    Agent, AgentOptions, Buffer, ErrorKind, Event, Notice, PeerId, Region, Rights, Route, Token,
};

/// Error codes.
const FAILED: i64 = -1;
const TOO_LATE: i64 = -2;
const PANICKED: i64 = -3;

/// Numbers of operations.
const PUT: u32 = 0;
const GET: u32 = 1;
/// Length of the tag at the start of a notice.
const TAG: usize = size_of::<u64>();

static SIDE: Mutex<Option<Side>> = Mutex::new(None);
static ERROR: Mutex<String> = Mutex::new(String::new());

/// The state of this process, in order of destruction.
struct Side {
    agent: Agent,
    routes: Vec<Route>,
    regions: Vec<Region>,
    peers: Vec<PeerId>,
    begun: HashMap<u64, (Token, Path)>,
    next: u64,
    /// Emulates the memory of another library without a GPU.
    emulated_memory: Vec<ForeignMemory>,
}

struct Failure {
    code: i64,
    text: String,
}

type Outcome = Result<i64, Failure>;

fn failed(text: impl Into<String>) -> Failure {
    Failure { code: FAILED, text: text.into() }
}

impl From<transfer::Error> for Failure {
    fn from(error: transfer::Error) -> Self {
        let is_late = error.kind() == ErrorKind::DeadlineExceeded;
        Self { code: if is_late { TOO_LATE } else { FAILED }, text: error.to_string() }
    }
}

impl From<gpu::Error> for Failure {
    fn from(error: gpu::Error) -> Self {
        failed(error.to_string())
    }
}

/// A panic of another thread does not matter here.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with_side(act: impl FnOnce(&mut Side) -> Outcome) -> Outcome {
    let mut side = lock(&SIDE);
    act(side.as_mut().ok_or_else(|| failed("no agent was started"))?)
}

/// A number, or an error code with its text stored.
fn run(act: impl FnOnce() -> Outcome) -> i64 {
    let outcome = catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        let text = format!("panicked: {}", text.unwrap_or("unknown cause"));
        Err(Failure { code: PANICKED, text })
    });
    outcome.unwrap_or_else(|Failure { code, text }| {
        *lock(&ERROR) = text;
        code
    })
}

/// An argument in its C form.
trait Argument {
    type Value;

    /// # Safety
    /// The pointer points at valid memory without other users, as long as the value lives.
    unsafe fn value(self) -> Self::Value;
}

impl Argument for u32 {
    type Value = Self;

    unsafe fn value(self) -> Self {
        self
    }
}

impl Argument for u64 {
    type Value = Self;

    unsafe fn value(self) -> Self {
        self
    }
}

/// Bytes from the caller.
#[repr(C)]
#[derive(Debug)]
pub struct Bytes<'a> {
    address: *const u8,
    length: u64,
    lives: PhantomData<&'a [u8]>,
}

impl<'a> Argument for Bytes<'a> {
    type Value = &'a [u8];

    unsafe fn value(self) -> &'a [u8] {
        if self.address.is_null() || self.length == 0 {
            return &[];
        }
        // SAFETY: the caller promised this many bytes.
        unsafe { std::slice::from_raw_parts(self.address, self.length as usize) }
    }
}

/// Room for bytes to the caller.
#[repr(C)]
#[derive(Debug)]
pub struct Room<'a> {
    address: *mut u8,
    length: u64,
    lives: PhantomData<&'a mut [u8]>,
}

impl<'a> Argument for Room<'a> {
    type Value = &'a mut [u8];

    unsafe fn value(self) -> &'a mut [u8] {
        if self.address.is_null() || self.length == 0 {
            return &mut [];
        }
        // SAFETY: the caller promised this many bytes, for this call alone.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.length as usize) }
    }
}

fn text(bytes: &[u8]) -> Result<&str, Failure> {
    std::str::from_utf8(bytes).map_err(|error| failed(error.to_string()))
}

fn milliseconds(timeout: u64) -> Duration {
    Duration::from_millis(timeout)
}

/// Copies bytes to the caller, and returns their number.
fn give(bytes: &[u8], room: &mut [u8]) -> Outcome {
    let Some(target) = room.get_mut(..bytes.len()) else {
        return Err(failed(format!("{} bytes, room for {}", bytes.len(), room.len())));
    };
    target.copy_from_slice(bytes);
    Ok(bytes.len() as i64)
}

/// Stores a value, and returns its number.
fn keep<T>(all: &mut Vec<T>, one: T) -> Outcome {
    all.push(one);
    Ok(all.len() as i64 - 1)
}

fn get<T>(all: &[T], number: u32) -> Result<&T, Failure> {
    all.get(number as usize).ok_or_else(|| failed(format!("number {number} does not exist")))
}

/// Functions for C: converts arguments, returns error codes, and catches panics.
macro_rules! interface {
    ($($(#[doc = $doc:literal])* fn $name:ident($($argument:ident: $type:ty),*) $body:block)*) => {$(
        $(#[doc = $doc])*
        ///
        /// # Safety
        /// The pointers are valid and without other users until this returns.
        // SAFETY: the names that begin with torch_side are unique.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> i64 {
            // SAFETY: as the caller promised.
            $(let $argument = unsafe { Argument::value($argument) };)*
            run(move || $body)
        }
    )*};
}

interface! {
    /// The error of the last function that failed.
    fn torch_side_error(room: Room<'_>) {
        let error = lock(&ERROR);
        let length = error.len().min(room.len());
        give(&error.as_bytes()[..length], room)
    }

    /// Starts the agent with its socket in this directory, spinning while it waits if it is eager.
    fn torch_side_start(directory: Bytes<'_>, label: Bytes<'_>, is_eager: u32) {
        let options = AgentOptions::new(text(label)?).directory(FilePath::new(text(directory)?));
        let wait_strategy = if is_eager == 0 { WaitStrategy::default() } else { WaitStrategy::Busy };
        let side = Side {
            agent: Agent::start(options.wait_strategy(wait_strategy))?,
            routes: Vec::new(),
            regions: Vec::new(),
            peers: Vec::new(),
            begun: HashMap::new(),
            next: 0,
            emulated_memory: Vec::new(),
        };
        *lock(&SIDE) = Some(side);
        Ok(0)
    }

    /// Ends the agent, and releases all memory.
    fn torch_side_end() {
        let side = lock(&SIDE).take();
        drop(side);
        Ok(0)
    }

    /// The agent's card.
    fn torch_side_card(room: Room<'_>) {
        with_side(|side| give(&side.agent.card().encode()?, room))
    }

    /// Memory as of expandable segments, in a number of pieces, on an emulated device; returns its
    /// address.
    fn torch_side_play(number: u32, piece: u64, count: u32) {
        with_side(|side| {
            let pieces = vec![piece; count as usize];
            let allocator = Allocator::Mapped { exportable: true };
            let memory = ForeignMemory::new(number, &pieces, allocator)?;
            let address = memory.address() as i64;
            side.emulated_memory.push(memory);
            Ok(address)
        })
    }

    /// Registers foreign memory on the device with this name. It must stay until the agents of this
    /// process and of its peers have ended.
    fn torch_side_register(device: Bytes<'_>, address: u64, length: u64) {
        with_side(|side| {
            let device = Device::open(text(device)?.parse()?)?;
            // SAFETY: the caller keeps it until its last use.
            let memory = unsafe { device.adopt(address, length, ()) }?;
            let region = side.agent.register(memory, Rights::ALL)?;
            keep(&mut side.regions, region)
        })
    }

    /// The number of exported pieces of a region; 0 if it is not exported in pieces.
    fn torch_side_pieces(region: u32) {
        with_side(|side| match get(&side.regions, region)?.buffer() {
            Buffer::Device(memory) => {
                Ok(memory.pieces().map_or(0, |pieces| pieces.lengths.len() as i64))
            }
            Buffer::Host(_) => Ok(0),
        })
    }

    /// The offset of a region in its first piece.
    fn torch_side_offset(region: u32) {
        with_side(|side| match get(&side.regions, region)?.buffer() {
            Buffer::Device(memory) => Ok(memory.pieces()?.offset as i64),
            Buffer::Host(_) => Ok(0),
        })
    }

    /// A region's descriptor.
    fn torch_side_descriptor(region: u32, room: Room<'_>) {
        with_side(|side| give(&get(&side.regions, region)?.descriptor().encode()?, room))
    }

    /// Connects to the agent of this card.
    fn torch_side_connect(card: Bytes<'_>, timeout: u64) {
        with_side(|side| {
            let peer = side.agent.connect(card, milliseconds(timeout))?;
            keep(&mut side.peers, peer)
        })
    }

    /// Joins a region with a peer's, by this policy.
    fn torch_side_join(
        peer: u32, region: u32, descriptor: Bytes<'_>, policy: Bytes<'_>, timeout: u64
    ) {
        with_side(|side| {
            let policy: Policy = text(policy)?.parse()?;
            let (peer, region) = (*get(&side.peers, peer)?, get(&side.regions, region)?);
            let timeout = milliseconds(timeout);
            let route = side.agent.join(peer, region, descriptor, &policy, timeout)?;
            if let Some(reason) = route.fallback() {
                return Err(failed(format!("fallback to {}: {reason}", route.path())));
            }
            keep(&mut side.routes, route)
        })
    }

    /// The name of a route's path.
    fn torch_side_path(route: u32, room: Room<'_>) {
        with_side(|side| give(get(&side.routes, route)?.path().name().as_bytes(), room))
    }

    /// Starts to put (0) or get (1) one block. The notice, if any, has tag and data in one.
    fn torch_side_begin(
        operation: u32, route: u32, to: u64, from: u64, length: u64, notice: Bytes<'_>
    ) {
        with_side(|side| {
            let operation = match operation {
                PUT => Operation::Put,
                GET => Operation::Get,
                other => return Err(failed(format!("unknown operation {other}"))),
            };
            let route = get(&side.routes, route)?;
            let block = [Block { to, from, length }];
            let notice = if notice.is_empty() { None } else { Some(notice_of(notice)?) };
            let token = side.agent.begin(operation, route, &block, notice, CopyMethod::Best)?;
            side.next += 1;
            side.begun.insert(side.next, (token, route.path()));
            Ok(side.next as i64)
        })
    }

    /// Waits for an operation; returns its bytes. Fails if they took another path than the route's.
    fn torch_side_wait(operation: u64, timeout: u64) {
        with_side(|side| {
            let Some(&(token, path)) = side.begun.get(&operation) else {
                return Err(failed(format!("operation {operation} is unknown or done")));
            };
            let done = side.agent.wait(token, milliseconds(timeout))?;
            side.begun.remove(&operation);
            if done.path != Some(path) {
                return Err(failed(format!("path {:?} instead of {path}", done.path)));
            }
            Ok(done.bytes as i64)
        })
    }

    /// Sends a notice without data: tag and bytes.
    fn torch_side_notify(peer: u32, notice: Bytes<'_>, timeout: u64) {
        with_side(|side| {
            let token = side.agent.notify(*get(&side.peers, peer)?, notice_of(notice)?)?;
            side.agent.wait(token, milliseconds(timeout))?;
            Ok(0)
        })
    }

    /// The next notice: tag and bytes. Fails if a peer has left before.
    fn torch_side_next_notice(timeout: u64, room: Room<'_>) {
        with_side(|side| loop {
            match side.agent.next_event(milliseconds(timeout))? {
                Event::Left { label, .. } => return Err(failed(format!("{label} has disconnected"))),
                Event::Notice { notice, .. } => {
                    let mut bytes = notice.tag.to_le_bytes().to_vec();
                    bytes.extend_from_slice(notice.data());
                    return give(&bytes, room);
                }
                _ => {}
            }
        })
    }

    /// Bytes that the links of a device carried so far, as JSON: NVLink sent and received, PCIe
    /// sent and received; null for missing counters.
    fn torch_side_links(device: Bytes<'_>, room: Room<'_>) {
        let device = Device::open(text(device)?.parse()?)?;
        let bytes = LinkCounters::of(&device)?.read()?;
        let numbers =
            [bytes.nvlink_sent, bytes.nvlink_received, bytes.pcie_sent, bytes.pcie_received];
        let text = serde_json::to_string(&numbers).map_err(|error| failed(error.to_string()))?;
        give(text.as_bytes(), room)
    }

    /// The metrics of the paths, as text.
    fn torch_side_metrics(room: Room<'_>) {
        give(metrics().as_bytes(), room)
    }
}

fn notice_of(bytes: &[u8]) -> Result<Notice, Failure> {
    let Some((tag, data)) = bytes.split_first_chunk::<TAG>() else {
        return Err(failed("a notice starts with a tag of 8 bytes"));
    };
    Ok(Notice::new(u64::from_le_bytes(*tag), data)?)
}
