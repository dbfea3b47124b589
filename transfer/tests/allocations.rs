//! Transfers that run allocate nothing: neither who puts and gets, nor who is told.
//!
//! A test in a program of its own, whose allocator counts for each thread. What the threads of
//! the emulated do does not matter: a device's work is not ours.
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
/// As many as a stream has events for: beyond, it makes some.
const AT_ONCE: u64 = 60;

/// Two agents, both driven by this thread.
struct Two {
    here: Agent,
    there: Agent,
    route: Route,
    /// Withdrawn when it is dropped.
    _theirs: Region,
}

impl Two {
    fn joined(mine: impl Into<Buffer>, theirs: impl Into<Buffer>) -> Self {
        let mut here = Agent::start(AgentOptions::new("here")).unwrap();
        let there = Agent::start(AgentOptions::new("there")).unwrap();
        let mine = here.register(mine, Rights::ALL).unwrap();
        let theirs = there.register(theirs, Rights::ALL).unwrap();
        let peer = here.connect(&there.card().encode().unwrap(), TIMEOUT).unwrap();
        let descriptor = theirs.descriptor().encode().unwrap();
        let route = here.join(peer, &mine, &descriptor, &Policy::default(), TIMEOUT).unwrap();
        assert_eq!(route.path(), Path::SameProcess);
        Self { here, there, route, _theirs: theirs }
    }

    /// Put and get with a notice, which the other one hears of.
    fn exchange<'a>(&mut self, blocks: impl Into<Blocks<'a>>, tag: u64) {
        let blocks = blocks.into();
        let notice = Notice::new(tag, b"it is there").unwrap();
        let put = self.here.put(&self.route, blocks, Some(notice)).unwrap();
        self.here.wait(put, TIMEOUT).unwrap();
        self.hear(tag);
        let get = self.here.get(&self.route, blocks, Some(notice)).unwrap();
        self.here.wait(get, TIMEOUT).unwrap();
        self.hear(tag);
    }

    fn hear(&mut self, tag: u64) {
        loop {
            match self.there.next_event(TIMEOUT).unwrap() {
                Event::Notice { notice, .. } => return assert_eq!(notice.tag, tag),
                Event::Left { .. } => panic!("it left"),
                _ => {}
            }
        }
    }

    /// Many at once, nobody waits for any of them before all are begun.
    fn burst<'a>(&mut self, blocks: impl Into<Blocks<'a>>) {
        let blocks = blocks.into();
        for _ in 0..AT_ONCE {
            let put = self.here.put(&self.route, blocks, None).unwrap();
            self.here.forget(put);
        }
        while self.here.in_flight() > 0 {
            self.here.progress();
        }
    }

    fn pass(&mut self, rounds: u64) {
        let one = [Block { to: 4096, from: 0, length: 64 }];
        // Of both lanes.
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
            // Made and gone through each time: a rectangle of few rows, a tile of many short ones.
            let rows = Strided::rows(5, 4096, 8192, 65_536).unwrap().shifted(1 << 16, 0).unwrap();
            self.exchange(&rows, round);
            self.exchange(&face(), round);
            self.burst(&rows);
        }
    }
}

/// A row for each of 900 cells.
fn face() -> Strided {
    let cube = [32; 3];
    let place = |origin| Subarray { extents: &cube, origin };
    Strided::tile(8, &[30, 30, 1], place(&[1, 1, 30]), place(&[1, 1, 0])).unwrap()
}

fn slow(delay: Duration) {
    for number in 0..emulated::COUNT {
        emulated::configure_faults(number, emulated::FaultConfig { delay, ..Default::default() });
    }
}

#[test]
fn nothing_is_allocated_per_transfer() {
    let device = Device::open("emulated:0".parse().unwrap()).unwrap();
    let next = Device::open("emulated:1".parse().unwrap()).unwrap();
    // In one process memory has to be made for both.
    let on = |first: &Device, second| first.allocate_shared(LENGTH, &[second]).unwrap();
    let host = || HostBuffer::new(LENGTH).unwrap();
    for (what, mut two) in [
        ("device to device", Two::joined(on(&device, &next), on(&next, &device))),
        ("device to host", Two::joined(on(&device, &next), host())),
        ("host to device", Two::joined(host(), on(&device, &next))),
        ("host to host", Two::joined(host(), host())),
    ] {
        // What grows grows in the first rounds, as far as it can where nothing is done for a
        // while: as many lists and events are made as are ever in use at once.
        slow(Duration::from_millis(2));
        two.pass(3);
        slow(Duration::ZERO);
        two.pass(20);
        // On a busy machine more may be in use at once than ever before: once, not each time.
        let counts = (0..5).map(|_| {
            let before = of_this_thread();
            two.pass(50);
            of_this_thread() - before
        });
        let counts: Vec<_> = counts.collect();
        assert_eq!(counts.iter().min(), Some(&0), "{what}: {counts:?}");
    }
}
