//! Problems of real devices only: graphs captured by another thread, and `cudaMalloc` memory that
//! its owner frees and allocates again.
#![allow(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use gpu::{Block, Device, Implementation, Memory, emulated};
use testkit::children::{self, Child};
use transfer::path::{Path as Way, Policy};
use transfer::{Agent, AgentOptions, Rights};

use crate::common::{LENGTH, TIMEOUT, alone, device};
use crate::fixture::{AgentFixture, FILL, SUM, blocks_of, fill, notice, other_device, sum, sum_of};
use crate::orders::{hex, unhex};

/// A stream captured in global mode, as by a framework.
struct Capture {
    device: i32,
    stream: sys::CUstream,
}

fn check(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

impl Capture {
    fn begin(device: &Device) -> Self {
        let number = device.name().number as i32;
        let (mut context, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: valid calls with room for the handles.
        unsafe {
            check(sys::cuDevicePrimaryCtxRetain(&raw mut context, number));
            check(sys::cuCtxPushCurrent_v2(context));
            check(sys::cuStreamCreate(&raw mut stream, 1));
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
            check(sys::cuStreamBeginCapture_v2(stream, mode));
        }
        Self { device: number, stream }
    }

    /// The capture must not be invalidated.
    fn end(self) {
        let (mut graph, mut popped) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: undoes what was done above.
        unsafe {
            check(sys::cuStreamEndCapture(self.stream, &raw mut graph));
            assert!(!graph.is_null(), "the capture was invalidated");
            check(sys::cuGraphDestroy(graph));
            check(sys::cuStreamDestroy_v2(self.stream));
            check(sys::cuCtxPopCurrent_v2(&raw mut popped));
            check(sys::cuDevicePrimaryCtxRelease_v2(self.device));
        }
    }
}

/// Runs a function while another thread captures a graph.
fn while_captured(device: &Device, what: impl FnOnce()) {
    if device.name().implementation == Implementation::Emulated {
        return what();
    }
    let (started, is_started) = std::sync::mpsc::channel();
    let (done, is_done) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let capturing = scope.spawn(move || {
            let capture = Capture::begin(device);
            started.send(()).unwrap();
            // Ends also if the other thread panics.
            let _ = is_done.recv_timeout(3 * TIMEOUT);
            capture.end();
        });
        is_started.recv_timeout(TIMEOUT).expect("a capture");
        what();
        drop(done);
        capturing.join().unwrap();
    });
}

/// Memory is shared, joined, put into and got from during a graph capture; an emulated device runs
/// the same without one.
#[test]
fn agents_transfer_during_a_graph_capture() {
    let _alone = alone();
    let first = device();
    let mut fixture = AgentFixture::open();
    // `cudaMalloc` memory is exported by legacy handles, where the device has those.
    let roles: &[_] = match first.properties().handle_types.legacy {
        true => &["shared", "plain"],
        false => &["shared"],
    };
    for role in roles {
        let peer_process = fixture.peer_process(role, &[]);
        while_captured(&first, || {
            let memory = first.allocate_shared(LENGTH, &[]).unwrap();
            fill(&memory, LENGTH, 50);
            let region = fixture.agent.register(&memory, Rights::ALL).unwrap();
            let (peer, policy) = (peer_process.peer, Policy::default());
            let descriptor = &peer_process.descriptor;
            let route = fixture.agent.join(peer, &region, descriptor, &policy, TIMEOUT).unwrap();
            assert_eq!(route.path(), Way::CudaIpc, "{role}: {}", route.choice());
            for length in [LENGTH, 4096] {
                let first_number = 60 + length;
                fill(&memory, LENGTH, first_number);
                let blocks = blocks_of(length);
                let on_arrival = Some(notice(100, sum_of(LENGTH, first_number)));
                let token = fixture.agent.put(&route, &blocks, on_arrival).unwrap();
                fixture.agent.wait(token, TIMEOUT).unwrap();
                assert_eq!(
                    fixture.reply(),
                    1,
                    "{role}: wrong bytes arrived, by blocks of {length}"
                );
                fixture.request(&peer_process, FILL, 70 + length);
                let token = fixture.agent.get(&route, &blocks, None).unwrap();
                fixture.agent.wait(token, TIMEOUT).unwrap();
                assert_eq!(sum(&memory, LENGTH), sum_of(LENGTH, 70 + length), "{role}");
            }
            assert_eq!(fixture.request(&peer_process, SUM, 0), sum_of(LENGTH, 70 + 4096));
            // Memory may be freed during a capture, too.
            drop((route, region, memory));
        });
        fixture.end(peer_process);
    }
}

/// The length of a region and of its neighbours, several of which share a block of the driver.
const SMALL: u64 = 64 << 10;
const PUTS: usize = 1000;

fn allocate(device: &Device) -> Memory {
    match device.properties().handle_types.legacy {
        true => device.allocate(SMALL).unwrap(),
        // An emulated device does not export `cudaMalloc` memory.
        false => device.allocate_shared(SMALL, &[]).unwrap(),
    }
}

fn set(memory: &Memory, byte: u8) {
    let stream = memory.mapped_for().stream().unwrap();
    stream.fill(&memory.whole(), byte).unwrap();
    stream.synchronize(TIMEOUT).unwrap();
}

fn has_only(memory: &Memory, byte: u8) -> bool {
    let mut bytes = vec![0; SMALL as usize];
    let stream = memory.mapped_for().stream().unwrap();
    stream.download(&memory.whole(), &mut bytes, TIMEOUT).unwrap();
    testkit::bytes::all_are(&bytes, byte)
}

/// In a child: registers memory between other memory, frees it on command, and allocates again.
pub fn owner(directory: &Path) {
    let device = other_device();
    while let Some(line) = children::next_line() {
        assert_eq!(line, "begin");
        let agent = Agent::start(AgentOptions::new("owner").directory(directory)).unwrap();
        let [before, middle, after] = [(); 3].map(|()| allocate(&device));
        [&before, &middle, &after].into_iter().for_each(|memory| set(memory, 0x11));
        let region = agent.register(&middle, Rights::ALL).unwrap();
        drop(middle);
        let (card, descriptor) = (agent.card().encode(), region.descriptor().encode());
        children::say(&format!("{} {}", hex(&card.unwrap()), hex(&descriptor.unwrap())));
        assert_eq!(children::next_line().as_deref(), Some("free"));
        drop(region);
        let reused = [(); 16].map(|()| allocate(&device));
        reused.iter().for_each(|memory| set(memory, 0x33));
        children::say("free");
        assert_eq!(children::next_line().as_deref(), Some("compare"));
        let is_whole = has_only(&before, 0x11) && has_only(&after, 0x11);
        let is_unchanged = reused.iter().all(|memory| has_only(memory, 0x33));
        children::say(&format!("{is_whole} {is_unchanged}"));
    }
}

fn directory() -> PathBuf {
    let directory = std::env::temp_dir().join(format!("fabricast-owner-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    directory
}

/// Copies in flight write to the memory of the region, and nowhere else.
#[test]
fn memory_freed_during_a_peers_puts_is_not_written_after_reuse() {
    let _alone = alone();
    let (device, directory) = (device(), directory());
    let words = ["owner".as_ref(), directory.as_os_str()];
    let mut child = Child::start(children::respawn(words).stdout(Stdio::piped()));
    let mut here = Agent::start(AgentOptions::new("here").directory(&directory)).unwrap();
    let memory = device.allocate_shared(SMALL, &[]).unwrap();
    set(&memory, 0x77);
    let local = here.register(&memory, Rights::ALL).unwrap();
    for round in 0..5 {
        child.say("begin");
        let line = child.line(TIMEOUT).expect("its card");
        let (card, descriptor) = line.split_once(' ').unwrap();
        let (card, descriptor) = (unhex(card), unhex(descriptor));
        let peer = here.connect(&card, TIMEOUT).unwrap();
        let route = here.join(peer, &local, &descriptor, &Policy::default(), TIMEOUT).unwrap();
        assert_eq!(route.path(), Way::CudaIpc, "{}", route.choice());
        let delay = Duration::from_micros(50);
        emulated::configure_faults(0, emulated::FaultConfig { delay, ..Default::default() });
        let block = [Block { to: 0, from: 0, length: SMALL }];
        for _ in 0..PUTS {
            let token = here.put(&route, &block, None).unwrap();
            here.forget(token);
        }
        // Most of them are in flight when the region is dropped.
        assert!(here.in_flight() > PUTS / 2, "{}", here.in_flight());
        child.say("free");
        let end = Instant::now() + TIMEOUT;
        while here.put(&route, &block, None).map(|token| here.forget(token)).is_ok() {
            assert!(Instant::now() < end, "the region is not withdrawn");
            std::thread::sleep(Duration::from_millis(1));
        }
        here.flush(peer, TIMEOUT).unwrap();
        assert_eq!(child.line(TIMEOUT).as_deref(), Some("free"));
        child.say("compare");
        assert_eq!(child.line(TIMEOUT).as_deref(), Some("true true"), "round {round}");
        drop(route);
        here.disconnect(peer, TIMEOUT).unwrap();
    }
    emulated::configure_faults(0, emulated::FaultConfig::default());
    child.end(TIMEOUT);
    let _ = std::fs::remove_dir_all(&directory);
}
