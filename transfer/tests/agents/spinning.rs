//! Agents that spin while they wait, with fewer cores than threads.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use gpu::Block;
use ipc::WaitStrategy;
use transfer::path::{Path, Policy};
use transfer::{Agent, AgentOptions, Event, HostBuffer, Notice, Rights};

use crate::common::{TIMEOUT, alone};
use crate::fixture::with_rails;
use crate::rails::tcp;

/// Pins this thread, and the threads that it starts, to one core.
fn stay_on_one_core() {
    // SAFETY: the set has the given size, and lives during the calls; all bytes zero is an empty
    // set.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        assert_eq!(libc::sched_getaffinity(0, size_of_val(&set), &raw mut set), 0);
        let first = (0..libc::CPU_SETSIZE as usize).find(|core| libc::CPU_ISSET(*core, &set));
        libc::CPU_ZERO(&mut set);
        libc::CPU_SET(first.unwrap(), &mut set);
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&set), &raw const set), 0);
    }
}

/// The median time of a put until its notice is received, with the wait strategy of both agents.
fn round_trip(wait_strategy: WaitStrategy) -> Duration {
    let start = |label| {
        let options = AgentOptions::new(label).force_remote().wait_strategy(wait_strategy);
        Agent::start(with_rails(options, tcp(), 1)).unwrap()
    };
    let (mut here, mut there) = (start("here"), start("there"));
    let register =
        |agent: &Agent| agent.register(HostBuffer::new(4096).unwrap(), Rights::ALL).unwrap();
    let (local, remote) = (register(&here), register(&there));
    let peer = here.connect(&there.card().encode().unwrap(), TIMEOUT).unwrap();
    let descriptor = remote.descriptor().encode().unwrap();
    let route = here.join(peer, &local, &descriptor, &Policy::default(), TIMEOUT).unwrap();
    assert_eq!(route.path(), Path::FabricDirect);
    let block = [Block { to: 0, from: 0, length: 64 }];
    let mut times: Vec<_> = (0..101)
        .map(|_| {
            let begun = Instant::now();
            let put = here.put(&route, &block, Some(Notice::new(1, b"").unwrap())).unwrap();
            here.wait(put, TIMEOUT).unwrap();
            while !matches!(there.next_event(TIMEOUT).unwrap(), Event::Notice { .. }) {}
            begun.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2]
}

/// A rail's thread gets the core when it has work, and not only when the system preempts the
/// spinning thread.
#[test]
fn spinning_agents_yield_the_core_to_their_rails() {
    let _alone = alone();
    std::thread::spawn(|| {
        stay_on_one_core();
        let (sleeping, spinning) =
            (round_trip(WaitStrategy::Block), round_trip(WaitStrategy::Busy));
        assert!(spinning < 4 * sleeping + Duration::from_micros(200), "{spinning:?}, {sleeping:?}");
    })
    .join()
    .unwrap();
}
