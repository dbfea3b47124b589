//! What is ordered, and what waits for it.

use std::time::{Duration, Instant};

use gpu::{Block, stand_in};
use transfer::{ErrorKind, Event};

use crate::common::{LENGTH, PATIENCE, alone, device};
use crate::house::{House, SUM, WITHDRAW, fill, notice, sum_of};
use crate::rails::tcp;

fn slow(delay: Duration) {
    for number in 0..stand_in::COUNT {
        stand_in::behave(number, stand_in::Behaviour { delay, ..Default::default() });
    }
}

fn part(at: u64, length: u64) -> [Block; 1] {
    [Block { to: at, from: at, length }]
}

/// A large transfer and a small one have streams of their own, and a notice has none.
#[test]
fn ordered_notice_comes_behind_all_that_was_begun_before() {
    let _alone = alone();
    let is_emulated = device().name().implementation == gpu::Implementation::StandIn;
    let how = [House::open as fn() -> House, || House::open_far(tcp(), 2)];
    for (is_far, open) in how.into_iter().enumerate() {
        let mut house = open();
        let far = format!("far by {} 2: shared", tcp());
        let role = if is_far == 1 { &far } else { "shared" };
        let neighbour = house.neighbour(role, &[]);
        let route = house.join(&neighbour);
        for round in 1..=10 {
            fill(&house.memory, LENGTH, round);
            slow(Duration::from_millis(if is_emulated { 20 } else { 0 }));
            let large = house.agent.put(&route, &part(0, LENGTH - 4096), None).unwrap();
            let small = house.agent.put(&route, &part(LENGTH - 4096, 4096), None).unwrap();
            house.agent.forget(large);
            house.agent.forget(small);
            // The other side compares when it hears of it.
            let tell = notice(100, sum_of(LENGTH, round));
            let told = house.agent.notify_ordered(neighbour.peer, tell).unwrap();
            slow(Duration::ZERO);
            house.agent.wait(told, PATIENCE).unwrap();
            assert_eq!(house.answer(), 1, "round {round}, far {is_far}");
        }
        house.end(neighbour);
    }
}

#[test]
fn fence_holds_what_comes_behind_it() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::StandIn {
        testkit::skip!("only stand-ins are slow when they are told");
    }
    let mut house = House::open();
    let neighbour = house.neighbour("shared", &[]);
    let route = house.join(&neighbour);
    slow(Duration::from_millis(100));
    // The later one is shorter, and has a stream without a queue.
    let first = house.agent.put(&route, &part(0, LENGTH), None).unwrap();
    house.agent.fence(neighbour.peer).unwrap();
    // The first one has begun.
    std::thread::sleep(Duration::from_millis(20));
    slow(Duration::ZERO);
    let second = house.agent.put(&route, &part(0, 4096), None).unwrap();
    let third = house.agent.notify(neighbour.peer, notice(SUM, 0)).unwrap();
    let start = Instant::now();
    while house.agent.test(first).is_none() {
        assert!(house.agent.test(second).is_none() && house.agent.test(third).is_none());
        std::thread::sleep(Duration::from_millis(1));
    }
    house.agent.flush(neighbour.peer, PATIENCE).unwrap();
    for token in [second, third] {
        house.agent.test(token).expect("over").unwrap();
    }
    assert!(start.elapsed() >= Duration::from_millis(40));
    assert_eq!(house.answer(), sum_of(LENGTH, 1));
    house.end(neighbour);
}

#[test]
fn flush_has_a_deadline_and_names_the_peer() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::StandIn {
        testkit::skip!("only stand-ins are slow when they are told");
    }
    let mut house = House::open();
    let neighbour = house.neighbour("shared", &[]);
    let route = house.join(&neighbour);
    house.agent.flush(neighbour.peer, Duration::ZERO).unwrap();
    slow(Duration::from_millis(200));
    let token = house.agent.put(&route, &part(0, LENGTH), None).unwrap();
    house.agent.forget(token);
    let late = house.agent.flush(neighbour.peer, Duration::from_millis(20)).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::DeadlineExceeded);
    assert!(late.to_string().contains("shared"), "{late}");
    slow(Duration::ZERO);
    house.agent.flush(neighbour.peer, PATIENCE).unwrap();
    assert_eq!(house.agent.under_way(), 0);
    house.end(neighbour);
}

/// What waits behind a fence ends with the region, or with the peer.
#[test]
fn held_transfers_fail_when_region_or_peer_is_gone() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::StandIn {
        testkit::skip!("only stand-ins are slow when they are told");
    }
    let mut house = House::open();
    let mut neighbour = house.neighbour("shared", &[]);
    let route = house.join(&neighbour);
    slow(Duration::from_millis(300));
    let first = house.agent.put(&route, &part(0, LENGTH), None).unwrap();
    house.tell(&neighbour, WITHDRAW, 0);
    std::thread::sleep(Duration::from_millis(100));
    house.agent.fence(neighbour.peer).unwrap();
    slow(Duration::ZERO);
    // It was withdrawn meanwhile: told at once.
    let error = house.agent.put(&route, &part(0, 4096), None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stale);
    house.agent.wait(first, PATIENCE).unwrap();
    house.answer();
    drop(route);
    // The same with a peer that is killed while something is held.
    let next = house.neighbour("shared", &[]);
    let route = house.join(&next);
    // Longer than it takes to kill a process, also on a machine that has much to do.
    slow(Duration::from_secs(2));
    let first = house.agent.put(&route, &part(0, LENGTH), None).unwrap();
    house.agent.fence(next.peer).unwrap();
    let held = house.agent.put(&route, &part(0, 4096), None).unwrap();
    let mut next = next;
    next.other.kill();
    slow(Duration::ZERO);
    house.agent.wait(first, PATIENCE).unwrap();
    let error = house.agent.wait(held, PATIENCE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    while !matches!(house.agent.next_event(PATIENCE).unwrap(), Event::Left { .. }) {}
    neighbour.other.kill();
}

/// Who connects or joins waits for one peer, and the others do not wait for that.
#[test]
fn connecting_and_joining_go_on_with_other_peers() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::StandIn {
        testkit::skip!("only stand-ins are slow when they are told");
    }
    let mut house = House::open();
    let neighbour = house.neighbour("shared", &[]);
    let route = house.join(&neighbour);
    let mut stopped = house.neighbour("host", &[]);
    let signal = |signal| {
        let pid = nix::unistd::Pid::from_raw(stopped.other.0.id() as i32);
        nix::sys::signal::kill(pid, signal).unwrap();
    };
    signal(nix::sys::signal::Signal::SIGSTOP);
    let short = Duration::from_millis(500);
    for joins in [true, false] {
        slow(Duration::from_millis(100));
        let tell = Some(notice(100, sum_of(LENGTH, 1)));
        let token = house.agent.put(&route, &part(0, LENGTH), tell).unwrap();
        house.agent.forget(token);
        assert_eq!(house.agent.under_way(), 1);
        let policy = transfer::path::Policy::default();
        if joins {
            let (peer, descriptor) = (stopped.peer, &stopped.descriptor);
            let joined = house.agent.join(peer, &house.region, descriptor, &policy, short);
            assert!(joined.is_err());
        } else {
            assert!(house.agent.connect(&stopped.card, short).is_err());
        }
        assert_eq!(house.agent.under_way(), 0, "joins: {joins}");
        slow(Duration::ZERO);
        assert_eq!(house.answer(), 1);
    }
    stopped.other.kill();
    house.end(neighbour);
}
