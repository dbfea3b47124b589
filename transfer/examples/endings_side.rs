//! Agents, regions and routes behind a C interface, for `tests/destruction_order` only: C++
//! destructors and Python's garbage collector end them there in any order.
//!
//! Each handle is created by one function and ended once by another one of the same kind. A
//! function that fails returns NULL or a negative number.
#![allow(unsafe_code, missing_docs)]

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpu::{Block, Device, Memory, emulated};
use transfer::path::Policy;
use transfer::{Agent, AgentOptions, Region, Rights, Route};

const TIMEOUT: Duration = Duration::from_secs(10);
/// The length of a region, and of the memory before and after it.
const LENGTH: u64 = 64 << 10;
const PUTS: u64 = 6;
const INSIDE: u8 = 0x33;
const OUTSIDE: u8 = 0x11;

/// Checked memory, and the time of the check.
static CHECKED: Mutex<VecDeque<(Instant, Memory)>> = Mutex::new(VecDeque::new());
/// When it is checked again: longer than any copy takes.
const LATER: Duration = Duration::from_millis(200);

/// A region, which is the middle third of its allocation, and the allocation.
#[derive(Debug)]
pub struct Guarded {
    region: Option<Region>,
    memory: Memory,
}

/// A route and its local region.
#[derive(Debug)]
pub struct Joined {
    route: Route,
    _local: Region,
}

fn boxed<T>(make: impl FnOnce() -> Option<T>) -> *mut T {
    make().map_or(std::ptr::null_mut(), |made| Box::into_raw(Box::new(made)))
}

/// # Safety
/// The pointer was returned by `boxed`, and is not ended twice.
unsafe fn end<T>(object: *mut T) {
    if !object.is_null() {
        // SAFETY: the caller's promise.
        drop(unsafe { Box::from_raw(object) });
    }
}

fn fill(memory: &Memory, offset: u64, length: u64, byte: u8) -> Option<()> {
    let stream = memory.mapped_for().stream().ok()?;
    let bytes = vec![byte; length as usize];
    stream.upload(&memory.slice(offset, length).ok()?, &bytes, TIMEOUT).ok()
}

/// Sets the time of each copy in microseconds.
#[unsafe(no_mangle)]
pub extern "C" fn endings_delay(microseconds: u64) {
    for number in 0..emulated::COUNT {
        let delay = Duration::from_micros(microseconds);
        emulated::configure_faults(number, emulated::FaultConfig { delay, ..Default::default() });
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn endings_agent() -> *mut Agent {
    boxed(|| Agent::start(AgentOptions::new("endings")).ok())
}

/// # Safety
/// An agent that has not ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn endings_region(agent: *mut Agent) -> *mut Guarded {
    // SAFETY: the caller's promise.
    let agent = unsafe { &*agent };
    boxed(|| {
        let device = Device::open("emulated:0".parse().ok()?).ok()?;
        let memory = device.allocate_shared(3 * LENGTH, &[]).ok()?;
        fill(&memory, 0, 3 * LENGTH, OUTSIDE)?;
        // SAFETY: inside of the allocation, which is moved along.
        let middle = unsafe { device.adopt(memory.address() + LENGTH, LENGTH, memory.clone()) };
        let region = agent.register(middle.ok()?, Rights::ALL).ok()?;
        Some(Guarded { region: Some(region), memory })
    })
}

/// Joins two regions.
///
/// # Safety
/// Two agents and a region of the second one, which have not ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn endings_route(
    here: *mut Agent,
    there: *mut Agent,
    region: *mut Guarded,
) -> *mut Joined {
    // SAFETY: the caller's promise; the two agents are different ones.
    let (here, there, region) = unsafe { (&mut *here, &*there, &*region) };
    boxed(|| {
        let device = Device::open("emulated:0".parse().ok()?).ok()?;
        let local = here.register(device.allocate_shared(LENGTH, &[]).ok()?, Rights::ALL).ok()?;
        let peer = here.connect(&there.card().encode().ok()?, TIMEOUT).ok()?;
        let descriptor = region.region.as_ref()?.descriptor().encode().ok()?;
        let route = here.join(peer, &local, &descriptor, &Policy::default(), TIMEOUT).ok()?;
        Some(Joined { route, _local: local })
    })
}

/// Starts some puts; returns their number.
///
/// # Safety
/// An agent and its route, which have not ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn endings_put(here: *mut Agent, route: *mut Joined) -> i32 {
    // SAFETY: the caller's promise.
    let (here, route) = unsafe { (&mut *here, &*route) };
    let length = LENGTH / PUTS;
    let mut started = 0;
    for number in 0..PUTS {
        let block = [Block { to: number * length, from: number * length, length }];
        if let Ok(token) = here.put(&route.route, &block, None) {
            here.forget(token);
            started += 1;
        }
    }
    started
}

/// # Safety
/// An agent that has not ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn endings_drop_agent(agent: *mut Agent) {
    // SAFETY: the caller's promise.
    unsafe { end(agent) };
}

/// Ends the region; its memory can be [checked](endings_check) until that is ended too.
///
/// # Safety
/// A region.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn endings_drop_region(region: *mut Guarded) {
    // SAFETY: the caller's promise.
    drop(unsafe { (*region).region.take() });
}

/// # Safety
/// A route that has not ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn endings_drop_route(route: *mut Joined) {
    // SAFETY: the caller's promise.
    unsafe { end(route) };
}

/// After all has ended: 0 if no byte is written any more, and none outside ever was. Checked again
/// later, by a call for another region or [at the end](endings_check_later).
///
/// # Safety
/// A region, for the last time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn endings_check(region: *mut Guarded) -> i32 {
    // SAFETY: the caller's promise.
    let Guarded { memory, .. } = *unsafe { Box::from_raw(region) };
    if fill(&memory, LENGTH, LENGTH, INSIDE).is_none() {
        return -1;
    }
    let mut checked = CHECKED.lock().unwrap_or_else(PoisonError::into_inner);
    let mut outcome = check(&memory);
    checked.push_back((Instant::now(), memory));
    while checked.front().is_some_and(|(since, _)| since.elapsed() > LATER) {
        outcome = outcome.max(checked.pop_front().map_or(0, |(_, memory)| check(&memory)));
    }
    outcome
}

/// Checks all memory that was not checked again yet.
#[unsafe(no_mangle)]
pub extern "C" fn endings_check_later() -> i32 {
    std::thread::sleep(LATER);
    let mut checked = CHECKED.lock().unwrap_or_else(PoisonError::into_inner);
    checked.drain(..).map(|(_, memory)| check(&memory)).max().unwrap_or(0)
}

/// 0 if every byte has its filled value.
fn check(memory: &Memory) -> i32 {
    let mut bytes = vec![0; 3 * LENGTH as usize];
    let downloaded = memory
        .mapped_for()
        .stream()
        .and_then(|stream| stream.download(&memory.whole(), &mut bytes, TIMEOUT));
    if downloaded.is_err() {
        return 2;
    }
    let inside = LENGTH as usize..2 * LENGTH as usize;
    let is_right = |(index, byte): (usize, &u8)| {
        *byte == if inside.contains(&index) { INSIDE } else { OUTSIDE }
    };
    i32::from(!bytes.iter().enumerate().all(is_right))
}
