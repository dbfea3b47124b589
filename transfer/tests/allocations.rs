//! Transfers allocate nothing in steady state, at the initiator nor at the target.
//!
//! A program of its own, whose allocator counts per thread. Threads of emulated devices do not
//! count.
#![allow(missing_docs)]

use std::time::Duration;

use gpu::{Block, Device, emulated};
use testkit::allocations::{CountingAllocator, of_this_thread};
use transfer::path::{Path, Policy};
use transfer::{
    Agent, AgentOptions, Blocks, Buffer, Event, HostBuffer, Notice, Region, Rights, Route, Strided,
    Subarray,
};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

const TIMEOUT: Duration = Duration::from_secs(20);
const LENGTH: u64 = 8 << 20;
/// The number of events of a stream: beyond that it allocates more.
const BURST: u64 = 60;

/// Two agents, both driven by this thread.
struct Two {
    here: Agent,
    there: Agent,
    route: Route,
    /// Withdrawn on drop.
    _remote: Region,
}

impl Two {
    fn joined(local: impl Into<Buffer>, remote: impl Into<Buffer>) -> Self {
        let mut here = Agent::start(AgentOptions::new("here")).unwrap();
        let there = Agent::start(AgentOptions::new("there")).unwrap();
        let local = here.register(local, Rights::ALL).unwrap();
        let remote = there.register(remote, Rights::ALL).unwrap();
        let peer = here.connect(&there.card().encode().unwrap(), TIMEOUT).unwrap();
        let descriptor = remote.descriptor().encode().unwrap();
        let route = here.join(peer, &local, &descriptor, &Policy::default(), TIMEOUT).unwrap();
        assert_eq!(route.path(), Path::SameProcess);
        Self { here, there, route, _remote: remote }
    }

    /// Put and get with a notice that the peer receives.
    fn exchange<'a>(&mut self, blocks: impl Into<Blocks<'a>>, tag: u64) {
        let blocks = blocks.into();
        let notice = Notice::new(tag, b"arrived").unwrap();
        let put = self.here.put(&self.route, blocks, Some(notice.clone())).unwrap();
        self.here.wait(put, TIMEOUT).unwrap();
        self.expect_notice(tag);
        let get = self.here.get(&self.route, blocks, Some(notice)).unwrap();
        self.here.wait(get, TIMEOUT).unwrap();
        self.expect_notice(tag);
    }

    fn expect_notice(&mut self, tag: u64) {
        loop {
            match self.there.next_event(TIMEOUT).unwrap() {
                Event::Notice { notice, .. } => return assert_eq!(notice.tag, tag),
                Event::Left { .. } => panic!("the peer left"),
                _ => {}
            }
        }
    }

    /// Many transfers in flight at once.
    fn burst<'a>(&mut self, blocks: impl Into<Blocks<'a>>) {
        let blocks = blocks.into();
        for _ in 0..BURST {
            let put = self.here.put(&self.route, blocks, None).unwrap();
            self.here.forget(put);
        }
        while self.here.in_flight() > 0 {
            self.here.progress();
        }
    }

    fn run_rounds(&mut self, rounds: u64) {
        let one = [Block { to: 4096, from: 0, length: 64 }];
        // On both streams.
        let large = [Block { to: 0, from: 0, length: LENGTH / 2 }];
        let many: [_; 100] = std::array::from_fn(|number| {
            let at = number as u64 * 8192;
            Block { to: at, from: LENGTH / 2 - at - 8192, length: 4096 }
        });
        for round in 0..rounds {
            for blocks in [&one[..], &large, &many, &many[..3], &[]] {
                self.exchange(blocks, round);
            }
            self.burst(&many[..5]);
            // Created and iterated each time: few long rows, and many short ones.
            let rows = Strided::rows(5, 4096, 8192, 65_536).unwrap().shifted(1 << 16, 0).unwrap();
            self.exchange(&rows, round);
            self.exchange(&face(), round);
            self.burst(&rows);
        }
    }
}

/// 900 rows of one cell.
fn face() -> Strided {
    let cube = [32; 3];
    let subarray = |origin| Subarray { extents: &cube, origin };
    Strided::tile(8, &[30, 30, 1], subarray(&[1, 1, 30]), subarray(&[1, 1, 0])).unwrap()
}

fn slow(delay: Duration) {
    for number in 0..emulated::COUNT {
        emulated::configure_faults(number, emulated::FaultConfig { delay, ..Default::default() });
    }
}

#[test]
fn transfers_allocate_nothing() {
    let device = Device::open("emulated:0".parse().unwrap()).unwrap();
    let next = Device::open("emulated:1".parse().unwrap()).unwrap();
    // Within a process, memory has to be accessible by both devices.
    let on =
        |first: &Device, second: &Device| first.allocate_shared(LENGTH, &[second.name()]).unwrap();
    let host = || HostBuffer::new(LENGTH).unwrap();
    for (what, mut two) in [
        ("device to device", Two::joined(on(&device, &next), on(&next, &device))),
        ("device to host", Two::joined(on(&device, &next), host())),
        ("host to device", Two::joined(host(), on(&device, &next))),
        ("host to host", Two::joined(host(), host())),
    ] {
        // Warm up: the first rounds allocate as many lists and events as are ever in use at once.
        // Delays maximise that number.
        slow(Duration::from_millis(2));
        two.run_rounds(3);
        slow(Duration::ZERO);
        two.run_rounds(20);
        // A busy machine may exceed that number once, but not repeatedly.
        let counts = (0..5).map(|_| {
            let before = of_this_thread();
            two.run_rounds(50);
            of_this_thread() - before
        });
        let counts: Vec<_> = counts.collect();
        assert_eq!(counts.iter().min(), Some(&0), "{what}: {counts:?}");
    }
}
