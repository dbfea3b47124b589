//! What is ordered, and what waits for it.

use std::time::{Duration, Instant};

use gpu::{Block, stand_in};
use transfer::path::Policy;
use transfer::{Agent, AgentOptions, ErrorKind, Event, Rights};

use crate::common::{LENGTH, PATIENCE, alone, device};
use crate::house::{DROP_AGENT, FILL, House, SUM, WITHDRAW, fill, notice, read, sum_of, write};
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
    let start = Instant::now();
    let first = house.agent.put(&route, &part(0, LENGTH), None).unwrap();
    house.agent.fence(neighbour.peer).unwrap();
    let second = house.agent.put(&route, &part(0, 4096), None).unwrap();
    let third = house.agent.notify(neighbour.peer, notice(SUM, 0)).unwrap();
    while house.agent.test(first).is_none() {
        assert!(house.agent.test(second).is_none() && house.agent.test(third).is_none());
        assert!(start.elapsed() < PATIENCE, "the first put is not done");
        std::thread::sleep(Duration::from_millis(1));
    }
    slow(Duration::ZERO);
    house.agent.flush(neighbour.peer, PATIENCE).unwrap();
    for token in [second, third] {
        house.agent.test(token).expect("over").unwrap();
    }
    assert!(start.elapsed() >= Duration::from_millis(100), "nothing was slow");
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
    let text = late.to_string();
    let named = format!("1 operations are under way after 20ms, among them put {token}");
    assert!(text.contains("shared") && text.contains(&named), "{text}");
    slow(Duration::ZERO);
    house.agent.flush(neighbour.peer, PATIENCE).unwrap();
    assert_eq!(house.agent.under_way(), 0);
    house.end(neighbour);
}

/// What waits behind a fence ends with the peer; with a region that was withdrawn nothing begins.
#[test]
fn deferred_transfers_fail_when_region_or_peer_is_gone() {
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
    house.agent.fence(neighbour.peer).unwrap();
    // Behind the fence as long as it is there, and refused at once when it is not.
    let end = Instant::now() + PATIENCE;
    let mut deferred = Vec::new();
    let error = loop {
        match house.agent.put(&route, &part(0, 4096), None) {
            Ok(token) => deferred.push(token),
            Err(error) => break error,
        }
        assert!(Instant::now() < end, "it is not withdrawn");
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(error.kind(), ErrorKind::Stale);
    slow(Duration::ZERO);
    house.agent.wait(first, PATIENCE).unwrap();
    for token in deferred {
        let error = house.agent.wait(token, PATIENCE).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
    }
    house.answer();
    drop(route);
    // The same with a peer that is killed while something is deferred.
    let next = house.neighbour("shared", &[]);
    let route = house.join(&next);
    // Longer than it takes to kill a process, also on a machine that has much to do.
    slow(Duration::from_secs(2));
    let first = house.agent.put(&route, &part(0, LENGTH), None).unwrap();
    house.agent.fence(next.peer).unwrap();
    let deferred = house.agent.put(&route, &part(0, 4096), None).unwrap();
    let mut next = next;
    next.other.kill();
    house.agent.wait(first, PATIENCE).unwrap();
    slow(Duration::ZERO);
    let error = house.agent.wait(deferred, PATIENCE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    while !matches!(house.agent.next_event(PATIENCE).unwrap(), Event::Left { .. }) {}
    neighbour.other.kill();
}

/// The peer is told nothing of data that did not come.
#[test]
fn nothing_that_waits_for_a_failed_put_is_begun() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::StandIn {
        testkit::skip!("only stand-ins fail when they are told");
    }
    let how = [House::open as fn() -> House, || House::open_far(tcp(), 1)];
    for (is_far, open) in how.into_iter().enumerate() {
        let mut house = open();
        let far = format!("far by {} 1: shared", tcp());
        let neighbour = house.neighbour(if is_far == 1 { &far } else { "shared" }, &[]);
        let route = house.join(&neighbour);
        let before = house.ask(&neighbour, SUM, 0);
        slow(Duration::from_millis(20));
        stand_in::fail_after(0, 0);
        let agent = &mut house.agent;
        let failing = agent.put(&route, &part(0, LENGTH), None).unwrap();
        let told = agent.notify_ordered(neighbour.peer, notice(FILL, 1)).unwrap();
        agent.fence(neighbour.peer).unwrap();
        let deferred = agent.put(&route, &part(0, 4096), Some(notice(FILL, 2))).unwrap();
        let failure = agent.wait(failing, PATIENCE).unwrap_err();
        assert_eq!(failure.kind(), ErrorKind::Failed, "{failure}");
        // Also what is begun when the failure is known.
        let late = agent.notify_ordered(neighbour.peer, notice(FILL, 3)).unwrap();
        let named = format!("put {failing} failed");
        for token in [told, deferred, late] {
            let error = agent.wait(token, PATIENCE).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Cancelled, "far {is_far}: {error}");
            assert!(error.to_string().contains(&named), "{error}");
        }
        // Until the failure was told of.
        let error = agent.flush(neighbour.peer, PATIENCE).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Failed, "{error}");
        assert!(error.to_string().contains(&named), "{error}");
        agent.flush(neighbour.peer, PATIENCE).unwrap();
        let ordered = agent.notify_ordered(neighbour.peer, notice(SUM, 0)).unwrap();
        agent.wait(ordered, PATIENCE).unwrap();
        assert_eq!(house.answer(), before, "far {is_far}: it heard of what was not there");
        slow(Duration::ZERO);
        house.end(neighbour);
    }
}

/// It is over when the next one is, and the owner can have its memory back.
#[test]
fn put_whose_end_was_not_marked_settles_at_its_owner() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::StandIn {
        testkit::skip!("only stand-ins refuse what they are told to");
    }
    let mut house = House::open();
    let neighbour = house.neighbour("shared", &[]);
    let route = house.join(&neighbour);
    slow(Duration::from_millis(100));
    stand_in::refuse_records(0, true);
    let start = Instant::now();
    let token = house.agent.put(&route, &part(0, LENGTH), None).unwrap();
    assert!(start.elapsed() < Duration::from_millis(100), "the put waited");
    house.agent.progress();
    stand_in::refuse_records(0, false);
    let error = house.agent.wait(token, PATIENCE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Failed, "{error}");
    assert!(start.elapsed() >= Duration::from_millis(100), "told while it is under way");
    slow(Duration::ZERO);
    house.ask(&neighbour, WITHDRAW, 0);
    house.end(neighbour);
}

/// Neither a put's notice nor an ordered one is taken for told.
#[test]
fn notices_to_an_agent_that_ended_meanwhile_fail() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::StandIn {
        testkit::skip!("only stand-ins are slow when they are told");
    }
    let mut here = Agent::start(AgentOptions::new("here")).unwrap();
    let there = Agent::start(AgentOptions::new("there")).unwrap();
    let memory = || device().allocate_shared(LENGTH, &[]).unwrap();
    let mine = here.register(memory(), Rights::ALL).unwrap();
    let theirs = there.register(memory(), Rights::ALL).unwrap();
    let peer = here.connect(&there.card().encode().unwrap(), PATIENCE).unwrap();
    let descriptor = theirs.descriptor().encode().unwrap();
    let route = here.join(peer, &mine, &descriptor, &Policy::default(), PATIENCE).unwrap();
    slow(Duration::from_millis(100));
    let put = here.put(&route, &part(0, LENGTH), Some(notice(1, 1))).unwrap();
    let ordered = here.notify_ordered(peer, notice(1, 2)).unwrap();
    drop(there);
    slow(Duration::ZERO);
    let error = here.wait(put, PATIENCE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    assert!(error.to_string().contains("the agent has ended"), "{error}");
    let error = here.wait(ordered, PATIENCE).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Closed | ErrorKind::Cancelled), "{error}");
    assert!(error.to_string().contains("the agent has ended"), "{error}");
    // One that was left is no peer any more, and that is said as by `notify`.
    here.disconnect(peer, PATIENCE).unwrap();
    for error in [
        here.notify(peer, notice(1, 3)).unwrap_err(),
        here.notify_ordered(peer, notice(1, 4)).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    }
}

/// Who shares no memory with it hears so by the fabric.
#[test]
fn fabric_peers_of_an_agent_that_ended_are_told_so() {
    let _alone = alone();
    let mut house = House::open_far(tcp(), 1);
    let mut neighbour = house.neighbour(&format!("far by {} 1: shared", tcp()), &[]);
    let route = house.join(&neighbour);
    house.tell(&neighbour, DROP_AGENT, 0);
    read(&house.directory.join("at-the-end"));
    let end = Instant::now() + PATIENCE;
    let error = loop {
        match house.agent.put(&route, &part(0, 4096), None) {
            Ok(token) => house.agent.forget(token),
            Err(error) => break error,
        }
        assert!(Instant::now() < end, "it is still there");
        house.agent.progress();
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    assert!(error.to_string().contains("the agent has ended"), "{error}");
    write(&house.directory.join("look"), b"");
    write(&house.directory.join("leave"), b"");
    neighbour.other.finish();
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
        let policy = Policy::default();
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
