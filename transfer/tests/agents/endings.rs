//! Regions, agents and processes that end during transfers, in any order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpu::{Allocator, Block, Device, emulated};
use transfer::path::Policy;
use transfer::{Agent, AgentOptions, ErrorKind, Event, HostBuffer, Rights};

use crate::common::{LENGTH, TIMEOUT, alone, device};
use crate::fixture::{AgentFixture, DROP_AGENT, PUT_SLOWLY, fill, notice, read, with_rails, write};

const WHOLE: [Block; 1] = [Block { to: 0, from: 0, length: LENGTH }];

fn slow(delay: Duration) {
    for number in 0..emulated::COUNT {
        emulated::configure_faults(number, emulated::FaultConfig { delay, ..Default::default() });
    }
}

fn are_emulated() -> bool {
    device().name().implementation == gpu::Implementation::Emulated
}

/// Peers of the agent get errors at once, and no byte is copied any more.
#[test]
fn regions_of_an_ended_agent_are_refused() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    for role in ["shared", "host"] {
        let mut peer_process = fixture.peer_process(role, &[]);
        let route = fixture.join(&peer_process);
        let number = |name| {
            let bytes = read(&fixture.directory.join(name));
            u64::from_le_bytes(bytes.try_into().unwrap())
        };
        let token = fixture.agent.notify(peer_process.peer, notice(DROP_AGENT, 0)).unwrap();
        fixture.agent.wait(token, TIMEOUT).unwrap();
        let before = number("at-the-end");
        fill(&fixture.memory, LENGTH, 77);
        let agent = &mut fixture.agent;
        let errors = [
            agent.put(&route, &WHOLE, None).unwrap_err(),
            agent.get(&route, &WHOLE, None).unwrap_err(),
            agent.notify(peer_process.peer, notice(1, 1)).unwrap_err(),
        ];
        let other = agent.register(HostBuffer::new(LENGTH).unwrap(), Rights::ALL).unwrap();
        let (peer, descriptor) = (peer_process.peer, &peer_process.descriptor);
        let again = agent.join(peer, &other, descriptor, &Policy::default(), TIMEOUT);
        for error in errors.into_iter().chain(again.err()) {
            assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
            assert!(error.to_string().contains("the agent has ended"), "{error}");
        }
        agent.progress();
        write(&fixture.directory.join("look"), b"");
        assert_eq!(number("later"), before, "bytes moved, {role}");
        write(&fixture.directory.join("leave"), b"");
        peer_process.other.finish();
        for name in ["look", "leave", "at-the-end", "later"] {
            std::fs::remove_file(fixture.directory.join(name)).unwrap();
        }
    }
}

/// Agents of one process get errors at once, too.
#[test]
fn ended_agent_of_the_same_process_is_refused() {
    let _alone = alone();
    let mut here = Agent::start(AgentOptions::new("here")).unwrap();
    let there = Agent::start(AgentOptions::new("there")).unwrap();
    let card = there.card().encode().unwrap();
    let (local, remote) = [&here, &there]
        .map(|agent| agent.register(HostBuffer::new(LENGTH).unwrap(), Rights::ALL).unwrap())
        .into();
    let peer = here.connect(&card, TIMEOUT).unwrap();
    let descriptor = remote.descriptor().encode().unwrap();
    let route = here.join(peer, &local, &descriptor, &Policy::default(), TIMEOUT).unwrap();
    drop(there);
    let errors = [
        here.put(&route, &WHOLE, None).unwrap_err(),
        here.join(peer, &local, &descriptor, &Policy::default(), TIMEOUT).unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Closed);
        let text = error.to_string();
        assert!(text.contains("(peer there)") && text.contains("the agent has ended"), "{text}");
    }
    drop(remote);
    // The card of an ended agent leads to no agent of this process.
    assert_eq!(here.connect(&card, TIMEOUT).unwrap_err().kind(), ErrorKind::NoPath);
    let peer = here.inspect(&card, TIMEOUT).unwrap();
    let error = here.join(peer, &local, &descriptor, &Policy::default(), TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoPath, "{error}");
}

/// A late reply would be taken for the reply to the next request, so the connection is closed, and
/// the peer reads no notices any more.
#[test]
fn nothing_starts_after_a_join_missed_its_deadline() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("mappings of a CUDA device also serve host memory");
    }
    let mut fixture = AgentFixture::open();
    let mut peer_process = fixture.peer_process("shared", &[]);
    let route = fixture.join(&peer_process);
    let agent = &mut fixture.agent;
    // Another kind of memory, for which the region is requested again.
    let other = agent.register(HostBuffer::new(LENGTH).unwrap(), Rights::ALL).unwrap();
    peer_process.other.0.stop(TIMEOUT);
    let (peer, descriptor) = (peer_process.peer, &peer_process.descriptor);
    let short = Duration::from_millis(50);
    let error = agent.join(peer, &other, descriptor, &Policy::default(), short).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
    for error in [
        agent.put(&route, &WHOLE, None).unwrap_err(),
        agent.notify(peer, notice(1, 1)).unwrap_err(),
        agent.join(peer, &other, descriptor, &Policy::default(), short).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Closed);
        assert!(error.to_string().contains("Connect again"), "{error}");
    }
    peer_process.other.kill();
}

/// Agents, peers, routes, regions, sockets and card files of the parent stay intact.
#[test]
fn dropping_agents_in_a_forked_child_does_not_affect_the_parent() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let mut peer_process = fixture.peer_process("host", &[]);
    let route = fixture.join(&peer_process);
    let mut here = Agent::start(with_rails(AgentOptions::new("here"), "tcp;ofi_rxm", 1)).unwrap();
    let directory = fixture.directory.join("there");
    std::fs::create_dir(&directory).unwrap();
    let options = AgentOptions::new("there").directory(&directory);
    let there = Agent::start(with_rails(options, "tcp;ofi_rxm", 1)).unwrap();
    let names = || std::fs::read_dir(&directory).unwrap().count();
    let before = names();
    let memory = || HostBuffer::new(LENGTH).unwrap();
    let (local, remote) =
        (here.register(memory(), Rights::ALL), there.register(memory(), Rights::ALL));
    let (local, remote) = (local.unwrap(), remote.unwrap());
    let peer = here.connect(&there.card().encode().unwrap(), TIMEOUT).unwrap();
    let descriptor = remote.descriptor().encode().unwrap();
    let local_route = here.join(peer, &local, &descriptor, &Policy::default(), TIMEOUT).unwrap();

    let mut all = Some((fixture, route, here, there, local, remote, local_route));
    let child = testkit::children::ForkedChild::new(|| {
        let (mut fixture, route, here, there, local, remote, local_route) = all.take().unwrap();
        let refused = fixture.agent.put(&route, &WHOLE, None).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Forked);
        drop((here, remote, local_route, local, there, route));
        // The directory is the parent's.
        std::mem::forget(fixture);
    });
    assert!(child.wait().success());
    assert!(before > 0 && names() == before, "{before} names, now {}", names());
    let (mut fixture, route, mut here, mut there, local, remote, local_route) = all.take().unwrap();
    let put = here.put(&local_route, &WHOLE, None).unwrap();
    here.wait(put, TIMEOUT).unwrap();
    let put = fixture.agent.put(&route, &WHOLE, None).unwrap();
    fixture.agent.wait(put, TIMEOUT).unwrap();
    // Other agents can still connect.
    let mut later = Agent::start(AgentOptions::new("later")).unwrap();
    later.connect(&there.card().encode().unwrap(), TIMEOUT).unwrap();
    there.withdraw(&remote, TIMEOUT).unwrap();
    drop((here, local));
    let token = fixture.agent.notify(peer_process.peer, notice(crate::fixture::END, 0)).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    peer_process.other.finish();
}

/// Operations of an agent that ended or disconnected do not block the owners of regions.
#[test]
fn initiators_that_end_or_disconnect_settle_their_operations() {
    let _alone = alone();
    if !are_emulated() {
        testkit::skip!("only emulated devices can be slowed down");
    }
    for leaves in [false, true] {
        let mut here = Agent::start(AgentOptions::new("here")).unwrap();
        let mut there = Agent::start(AgentOptions::new("there")).unwrap();
        let memory = || device().allocate_shared(LENGTH, &[]).unwrap();
        let local = here.register(memory(), Rights::ALL).unwrap();
        let remote = there.register(memory(), Rights::ALL).unwrap();
        let peer = here.connect(&there.card().encode().unwrap(), TIMEOUT).unwrap();
        let descriptor = remote.descriptor().encode().unwrap();
        let route = here.join(peer, &local, &descriptor, &Policy::default(), TIMEOUT).unwrap();
        slow(Duration::from_millis(100));
        let token = here.put(&route, &WHOLE, None).unwrap();
        if leaves {
            let left = here.disconnect(peer, Duration::from_millis(10)).unwrap_err();
            assert_eq!(left.kind(), ErrorKind::DeadlineExceeded);
        } else {
            here.forget(token);
            drop(here);
        }
        slow(Duration::ZERO);
        there.withdraw(&remote, Duration::from_secs(2)).unwrap();
    }
}

/// Adopted memory that records when it is freed.
#[derive(Debug)]
struct Owner {
    _memory: emulated::ForeignMemory,
    is_free: Arc<AtomicBool>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.is_free.store(true, Ordering::Release);
    }
}

fn owned(device: &Device) -> (gpu::Memory, Arc<AtomicBool>) {
    let is_free = Arc::new(AtomicBool::new(false));
    let kind = Allocator::Mapped { exportable: true };
    let granule = device.properties().granularity;
    let length = LENGTH.next_multiple_of(granule);
    let memory = emulated::ForeignMemory::new(device.name().number, &[length], kind).unwrap();
    let address = memory.address();
    let owner = Owner { _memory: memory, is_free: Arc::clone(&is_free) };
    // SAFETY: all of the owner's memory, which is moved along.
    #[allow(unsafe_code)]
    let memory = unsafe { device.adopt(address, LENGTH, owner) }.unwrap();
    (memory, is_free)
}

fn wait_until_free(is_free: &AtomicBool) {
    let start = Instant::now();
    while !is_free.load(Ordering::Acquire) {
        assert!(start.elapsed() < TIMEOUT, "it is never freed");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn dropped_region_keeps_its_memory_until_a_peers_copy_ends() {
    let _alone = alone();
    if !are_emulated() {
        testkit::skip!("only emulated devices can be slowed down");
    }
    // Before and after the agent ends; later than the timeout of its drop.
    for (delay, ends_first) in [(300, false), (2500, false), (300, true), (2500, true)] {
        let mut fixture = Some(AgentFixture::open());
        let owner = fixture.as_mut().unwrap();
        let (memory, is_free) = owned(&device());
        let region = owner.agent.register(memory, Rights::ALL).unwrap();
        write(&owner.directory.join("fixture-region"), &region.descriptor().encode().unwrap());
        let mut peer_process = owner.peer_process("shared", &[]);
        let begun = Instant::now();
        owner.request(&peer_process, PUT_SLOWLY, delay);
        if ends_first {
            fixture = None;
        }
        let start = Instant::now();
        drop(region);
        let waited = start.elapsed();
        assert!(waited < Duration::from_millis(800), "the drop took {waited:?}");
        wait_until_free(&is_free);
        // Measured from the request, which was a little earlier.
        let kept = begun.elapsed();
        assert!(kept >= Duration::from_millis(delay), "free after {kept:?}");
        drop(fixture);
        peer_process.other.kill();
    }
}

/// The error names the peer whose copy is in flight, and no memory in use is freed.
#[test]
fn closing_an_agent_waits_for_copies_of_peers() {
    let _alone = alone();
    if !are_emulated() {
        testkit::skip!("only emulated devices can be slowed down");
    }
    for (delay, timeout) in [(200, TIMEOUT), (2500, Duration::from_millis(50))] {
        let mut fixture = AgentFixture::open();
        let (memory, is_free) = owned(&device());
        let region = fixture.agent.register(memory, Rights::ALL).unwrap();
        write(&fixture.directory.join("fixture-region"), &region.descriptor().encode().unwrap());
        let mut peer_process = fixture.peer_process("shared", &[]);
        let begun = Instant::now();
        fixture.request(&peer_process, PUT_SLOWLY, delay);
        let agent = std::mem::replace(
            &mut fixture.agent,
            Agent::start(AgentOptions::new("another one")).unwrap(),
        );
        let closed = agent.close(timeout);
        if timeout == TIMEOUT {
            closed.unwrap();
            assert!(begun.elapsed() >= Duration::from_millis(delay));
            // No copy is in flight, so it is freed at once.
            drop(region);
            assert!(is_free.load(Ordering::Acquire));
        } else {
            let error = closed.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
            let text = error.to_string();
            assert!(text.contains("(peer shared)") && text.contains(&LENGTH.to_string()), "{text}");
            drop(region);
            wait_until_free(&is_free);
            assert!(begun.elapsed() >= Duration::from_millis(delay));
        }
        peer_process.other.kill();
    }
}

/// Otherwise its memory could be reused during a copy of the other agent.
#[test]
fn closing_an_agent_waits_for_agents_of_the_same_process() {
    let _alone = alone();
    let mut here = Agent::start(AgentOptions::new("here")).unwrap();
    let there = Agent::start(AgentOptions::new("there")).unwrap();
    let region = |agent: &Agent| {
        agent.register(device().allocate_shared(LENGTH, &[]).unwrap(), Rights::ALL).unwrap()
    };
    let (local, remote) = (region(&here), region(&there));
    let peer = here.connect(&there.card().encode().unwrap(), TIMEOUT).unwrap();
    let descriptor = remote.descriptor().encode().unwrap();
    let route = here.join(peer, &local, &descriptor, &Policy::default(), TIMEOUT).unwrap();
    // The copy completes when its agent polls, which it does not do meanwhile.
    let token = here.put(&route, &WHOLE, None).unwrap();
    let error = there.close(Duration::from_millis(20)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert!(error.to_string().contains("(peer here)"), "{error}");
    here.wait(token, TIMEOUT).unwrap();
}

/// Operations are completed, and notices are sent.
#[test]
fn closing_an_agent_completes_its_operations() {
    let _alone = alone();
    let mut here = Agent::start(AgentOptions::new("here")).unwrap();
    let mut there = Agent::start(AgentOptions::new("there")).unwrap();
    let region = |agent: &Agent| {
        agent.register(device().allocate_shared(LENGTH, &[]).unwrap(), Rights::ALL).unwrap()
    };
    let (local, remote) = (region(&here), region(&there));
    let peer = here.connect(&there.card().encode().unwrap(), TIMEOUT).unwrap();
    let descriptor = remote.descriptor().encode().unwrap();
    let route = here.join(peer, &local, &descriptor, &Policy::default(), TIMEOUT).unwrap();
    // More than the driver gets at a time.
    for number in 0..400 {
        let block = [Block { to: number * 4096, from: number * 4096, length: 4096 }];
        let token = here.put(&route, &block, Some(notice(number, 0))).unwrap();
        here.forget(token);
    }
    here.close(TIMEOUT).unwrap();
    let mut seen = 0;
    loop {
        match there.next_event(TIMEOUT).unwrap() {
            Event::Notice { notice, .. } => {
                assert_eq!(notice.tag, seen);
                seen += 1;
            }
            Event::Left { .. } => break,
            _ => {}
        }
    }
    assert_eq!(seen, 400);
    there.withdraw(&remote, Duration::ZERO).unwrap();
}

/// Copies of the killed peer have ended, and no memory is kept for it.
#[test]
fn memory_is_not_kept_for_a_killed_peer() {
    let _alone = alone();
    if !are_emulated() {
        testkit::skip!("only emulated devices can be slowed down");
    }
    let mut fixture = AgentFixture::open();
    let (memory, is_free) = owned(&device());
    let region = fixture.agent.register(memory, Rights::ALL).unwrap();
    write(&fixture.directory.join("fixture-region"), &region.descriptor().encode().unwrap());
    let mut peer_process = fixture.peer_process("shared", &[]);
    fixture.request(&peer_process, PUT_SLOWLY, 20_000);
    peer_process.other.kill();
    drop(region);
    assert!(is_free.load(Ordering::Acquire));
}

/// A garbage collector may drop two regions at once, each with a copy of the other's agent in
/// flight, which makes no progress meanwhile.
#[test]
fn dropping_a_region_does_not_wait_for_the_peers_progress() {
    let _alone = alone();
    if !are_emulated() {
        testkit::skip!("only emulated devices can be slowed down");
    }
    let mut fixture = AgentFixture::open();
    let (memory, is_free) = owned(&device());
    let region = fixture.agent.register(memory, Rights::ALL).unwrap();
    write(&fixture.directory.join("fixture-region"), &region.descriptor().encode().unwrap());
    let peer_process = fixture.peer_process("shared", &[]);
    fixture.request(&peer_process, PUT_SLOWLY, 300);
    peer_process.other.0.stop(TIMEOUT);
    let start = Instant::now();
    drop(region);
    assert!(start.elapsed() < Duration::from_millis(800), "{:?}", start.elapsed());
    peer_process.other.0.resume();
    wait_until_free(&is_free);
    fixture.end(peer_process);
}
