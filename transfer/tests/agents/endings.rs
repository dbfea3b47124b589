//! Regions, agents and processes that end while transfers are under way, in whatever order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpu::{Allocator, Block, Device, stand_in};
use transfer::path::Policy;
use transfer::{Agent, AgentOptions, ErrorKind, HostBuffer, Rights};

use crate::common::{LENGTH, PATIENCE, alone, device};
use crate::house::{DROP_AGENT, House, PUT_SLOWLY, fill, notice, read, with_rails, write};

const WHOLE: [Block; 1] = [Block { to: 0, from: 0, length: LENGTH }];

fn slow(delay: Duration) {
    for number in 0..stand_in::COUNT {
        stand_in::behave(number, stand_in::Behaviour { delay, ..Default::default() });
    }
}

fn are_emulated() -> bool {
    device().name().implementation == gpu::Implementation::StandIn
}

/// Its peers are told so at once, and not a byte moves any more.
#[test]
fn regions_of_an_agent_that_ended_are_out_of_reach() {
    let _alone = alone();
    let mut house = House::open();
    for role in ["shared", "host"] {
        let mut neighbour = house.neighbour(role, &[]);
        let route = house.join(&neighbour);
        let number = |name| {
            let bytes = read(&house.directory.join(name));
            u64::from_le_bytes(bytes.try_into().unwrap())
        };
        let tell = house.agent.notify(neighbour.peer, notice(DROP_AGENT, 0)).unwrap();
        house.agent.wait(tell, PATIENCE).unwrap();
        let before = number("at-the-end");
        fill(&house.memory, LENGTH, 77);
        let agent = &mut house.agent;
        let errors = [
            agent.put(&route, &WHOLE, None).unwrap_err(),
            agent.get(&route, &WHOLE, None).unwrap_err(),
            agent.notify(neighbour.peer, notice(1, 1)).unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::Closed);
            assert!(error.to_string().contains("the agent has ended"), "{error}");
        }
        agent.progress();
        write(&house.directory.join("look"), b"");
        assert_eq!(number("later"), before, "bytes moved, {role}");
        write(&house.directory.join("leave"), b"");
        neighbour.other.finish();
        for name in ["look", "leave", "at-the-end", "later"] {
            std::fs::remove_file(house.directory.join(name)).unwrap();
        }
    }
}

/// The same among agents of one process.
#[test]
fn an_agent_that_ended_in_this_process_is_out_of_reach() {
    let _alone = alone();
    let mut here = Agent::start(AgentOptions::new("here")).unwrap();
    let there = Agent::start(AgentOptions::new("there")).unwrap();
    let card = there.card().encode().unwrap();
    let (mine, theirs) = [&here, &there]
        .map(|agent| agent.register(HostBuffer::new(LENGTH).unwrap(), Rights::ALL).unwrap())
        .into();
    let peer = here.connect(&card, PATIENCE).unwrap();
    let descriptor = theirs.descriptor().encode().unwrap();
    let route = here.join(peer, &mine, &descriptor, &Policy::default(), PATIENCE).unwrap();
    drop(there);
    let error = here.put(&route, &WHOLE, None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert!(
        error.to_string().contains("\"there\"") || error.to_string().contains("there"),
        "{error}"
    );
    let again = here.join(peer, &mine, &descriptor, &Policy::default(), PATIENCE).unwrap_err();
    assert!(matches!(again.kind(), ErrorKind::Stale | ErrorKind::Closed), "{again}");
    drop(theirs);
    // Nobody is found by the card of one that ended.
    let found = here.connect(&card, Duration::from_millis(100));
    assert!(
        found.is_err()
            || here
                .join(
                    found.unwrap(),
                    &mine,
                    &descriptor,
                    &Policy::default(),
                    Duration::from_millis(100)
                )
                .is_err()
    );
}

/// The parent's agents, peers, routes and regions are left as they are, and so are socket and card.
#[test]
fn a_forked_child_that_drops_agents_leaves_them_to_its_parent() {
    let _alone = alone();
    let mut house = House::open();
    let mut neighbour = house.neighbour("host", &[]);
    let route = house.join(&neighbour);
    let mut here = Agent::start(with_rails(AgentOptions::new("here"), "tcp;ofi_rxm", 1)).unwrap();
    let directory = house.directory.join("there");
    std::fs::create_dir(&directory).unwrap();
    let options = AgentOptions::new("there").directory(&directory);
    let there = Agent::start(with_rails(options, "tcp;ofi_rxm", 1)).unwrap();
    let names = || std::fs::read_dir(&directory).unwrap().count();
    let before = names();
    let memory = || HostBuffer::new(LENGTH).unwrap();
    let (mine, theirs) =
        (here.register(memory(), Rights::ALL), there.register(memory(), Rights::ALL));
    let (mine, theirs) = (mine.unwrap(), theirs.unwrap());
    let peer = here.connect(&there.card().encode().unwrap(), PATIENCE).unwrap();
    let descriptor = theirs.descriptor().encode().unwrap();
    let beside = here.join(peer, &mine, &descriptor, &Policy::default(), PATIENCE).unwrap();

    let mut all = Some((house, route, here, there, mine, theirs, beside));
    let child = testkit::children::ForkedChild::new(|| {
        let (mut house, route, here, there, mine, theirs, beside) = all.take().unwrap();
        let refused = house.agent.put(&route, &WHOLE, None).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Forked);
        drop((here, theirs, beside, mine, there, route));
        // The directory is the parent's.
        std::mem::forget(house);
    });
    assert!(child.wait().success());
    assert!(before > 0 && names() == before, "{before} names, now {}", names());
    let (mut house, route, mut here, mut there, mine, theirs, beside) = all.take().unwrap();
    let put = here.put(&beside, &WHOLE, None).unwrap();
    here.wait(put, PATIENCE).unwrap();
    let put = house.agent.put(&route, &WHOLE, None).unwrap();
    house.agent.wait(put, PATIENCE).unwrap();
    // Others still find it.
    let mut later = Agent::start(AgentOptions::new("later")).unwrap();
    later.connect(&there.card().encode().unwrap(), PATIENCE).unwrap();
    there.withdraw(&theirs, PATIENCE).unwrap();
    drop((here, mine));
    let tell = house.agent.notify(neighbour.peer, notice(crate::house::END, 0)).unwrap();
    house.agent.wait(tell, PATIENCE).unwrap();
    neighbour.other.finish();
}

/// What an agent had begun when it ended, or when it left, holds up no owner.
#[test]
fn initiators_that_end_or_leave_settle_what_they_began() {
    let _alone = alone();
    if !are_emulated() {
        testkit::skip!("only stand-ins are slow when they are told");
    }
    for leaves in [false, true] {
        let mut here = Agent::start(AgentOptions::new("here")).unwrap();
        let mut there = Agent::start(AgentOptions::new("there")).unwrap();
        let memory = || device().allocate_shared(LENGTH, &[]).unwrap();
        let mine = here.register(memory(), Rights::ALL).unwrap();
        let theirs = there.register(memory(), Rights::ALL).unwrap();
        let peer = here.connect(&there.card().encode().unwrap(), PATIENCE).unwrap();
        let descriptor = theirs.descriptor().encode().unwrap();
        let route = here.join(peer, &mine, &descriptor, &Policy::default(), PATIENCE).unwrap();
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
        there.withdraw(&theirs, Duration::from_secs(2)).unwrap();
    }
}

/// Memory of somebody else's, which says when it is given back.
#[derive(Debug)]
struct Owner {
    _memory: stand_in::ForeignMemory,
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
    let memory = stand_in::ForeignMemory::new(device.name().number, &[length], kind).unwrap();
    let address = memory.address();
    let owner = Owner { _memory: memory, is_free: Arc::clone(&is_free) };
    // SAFETY: all of what the owner has, which goes along.
    #[allow(unsafe_code)]
    let memory = unsafe { device.adopt(address, LENGTH, owner) }.unwrap();
    (memory, is_free)
}

#[test]
fn memory_of_a_dropped_region_is_kept_until_a_peers_copy_is_over() {
    let _alone = alone();
    if !are_emulated() {
        testkit::skip!("only stand-ins are slow when they are told");
    }
    // In time, and later than anybody waits; before and after the agent ends.
    for (delay, ends_first) in [(300, false), (2500, false), (300, true), (2500, true)] {
        let mut house = Some(House::open());
        let at = house.as_mut().unwrap();
        let (memory, is_free) = owned(&device());
        let region = at.agent.register(memory, Rights::ALL).unwrap();
        write(&at.directory.join("house-region"), &region.descriptor().encode().unwrap());
        let mut neighbour = at.neighbour("shared", &[]);
        let begun = Instant::now();
        at.ask(&neighbour, PUT_SLOWLY, delay);
        if ends_first {
            house = None;
        }
        drop(region);
        let waited = begun.elapsed();
        assert!(waited < Duration::from_millis(2400), "the drop took {waited:?}");
        let delay = Duration::from_millis(delay);
        if delay < Duration::from_secs(1) {
            assert!(is_free.load(Ordering::Acquire));
            // From when it was asked on, which was a little earlier.
            assert!(waited >= delay, "free after {waited:?}");
        }
        while !is_free.load(Ordering::Acquire) {
            assert!(begun.elapsed() < PATIENCE, "it is never free");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(begun.elapsed() >= delay, "free after {:?}", begun.elapsed());
        drop(house);
        neighbour.other.kill();
    }
}

/// Whoever is killed copies no more.
#[test]
fn memory_is_not_kept_for_the_dead() {
    let _alone = alone();
    if !are_emulated() {
        testkit::skip!("only stand-ins are slow when they are told");
    }
    let mut house = House::open();
    let (memory, is_free) = owned(&device());
    let region = house.agent.register(memory, Rights::ALL).unwrap();
    write(&house.directory.join("house-region"), &region.descriptor().encode().unwrap());
    let mut neighbour = house.neighbour("shared", &[]);
    house.ask(&neighbour, PUT_SLOWLY, 20_000);
    neighbour.other.kill();
    let start = Instant::now();
    drop(region);
    assert!(start.elapsed() < Duration::from_millis(500) && is_free.load(Ordering::Acquire));
}
