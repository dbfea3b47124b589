//! What is ordered, and what waits for it.

use std::time::{Duration, Instant};

use gpu::{Block, emulated};
use transfer::path::Policy;
use transfer::{Agent, AgentOptions, ErrorKind, Event, Rights};

use crate::common::{LENGTH, TIMEOUT, alone, device};
use crate::fixture::{
    AgentFixture, DROP_AGENT, FILL, SUM, WITHDRAW, fill, notice, read, sum_of, write,
};
use crate::rails::tcp;

fn slow(delay: Duration) {
    for number in 0..emulated::COUNT {
        emulated::configure_faults(number, emulated::FaultConfig { delay, ..Default::default() });
    }
}

fn part(at: u64, length: u64) -> [Block; 1] {
    [Block { to: at, from: at, length }]
}

/// A large transfer and a small one have streams of their own, and a notice has none.
#[test]
fn ordered_notice_comes_behind_all_that_was_begun_before() {
    let _alone = alone();
    let is_emulated = device().name().implementation == gpu::Implementation::Emulated;
    let how = [AgentFixture::open as fn() -> AgentFixture, || AgentFixture::open_remote(tcp(), 2)];
    for (is_far, open) in how.into_iter().enumerate() {
        let mut fixture = open();
        let far = format!("far by {} 2: shared", tcp());
        let role = if is_far == 1 { &far } else { "shared" };
        let peer_process = fixture.peer_process(role, &[]);
        let route = fixture.join(&peer_process);
        for round in 1..=10 {
            fill(&fixture.memory, LENGTH, round);
            slow(Duration::from_millis(if is_emulated { 20 } else { 0 }));
            let large = fixture.agent.put(&route, &part(0, LENGTH - 4096), None).unwrap();
            let small = fixture.agent.put(&route, &part(LENGTH - 4096, 4096), None).unwrap();
            fixture.agent.forget(large);
            fixture.agent.forget(small);
            // The other side compares when it hears of it.
            let tell = notice(100, sum_of(LENGTH, round));
            let told = fixture.agent.notify_ordered(peer_process.peer, tell).unwrap();
            slow(Duration::ZERO);
            fixture.agent.wait(told, TIMEOUT).unwrap();
            assert_eq!(fixture.answer(), 1, "round {round}, far {is_far}");
        }
        fixture.end(peer_process);
    }
}

#[test]
fn fence_holds_what_comes_behind_it() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only stand-ins are slow when they are told");
    }
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("shared", &[]);
    let route = fixture.join(&peer_process);
    slow(Duration::from_millis(100));
    // The later one is shorter, and has a stream without a queue.
    let start = Instant::now();
    let first = fixture.agent.put(&route, &part(0, LENGTH), None).unwrap();
    fixture.agent.fence(peer_process.peer).unwrap();
    let second = fixture.agent.put(&route, &part(0, 4096), None).unwrap();
    let third = fixture.agent.notify(peer_process.peer, notice(SUM, 0)).unwrap();
    while fixture.agent.test(first).is_none() {
        assert!(fixture.agent.test(second).is_none() && fixture.agent.test(third).is_none());
        assert!(start.elapsed() < TIMEOUT, "the first put is not done");
        std::thread::sleep(Duration::from_millis(1));
    }
    slow(Duration::ZERO);
    fixture.agent.flush(peer_process.peer, TIMEOUT).unwrap();
    for token in [second, third] {
        fixture.agent.test(token).expect("over").unwrap();
    }
    assert!(start.elapsed() >= Duration::from_millis(100), "nothing was slow");
    assert_eq!(fixture.answer(), sum_of(LENGTH, 1));
    fixture.end(peer_process);
}

#[test]
fn flush_has_a_deadline_and_names_the_peer() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only stand-ins are slow when they are told");
    }
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("shared", &[]);
    let route = fixture.join(&peer_process);
    fixture.agent.flush(peer_process.peer, Duration::ZERO).unwrap();
    slow(Duration::from_millis(200));
    let token = fixture.agent.put(&route, &part(0, LENGTH), None).unwrap();
    fixture.agent.forget(token);
    let late = fixture.agent.flush(peer_process.peer, Duration::from_millis(20)).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::DeadlineExceeded);
    let text = late.to_string();
    let named = format!("1 operations in flight after 20ms, one of them put {token}");
    assert!(text.contains("shared") && text.contains(&named), "{text}");
    slow(Duration::ZERO);
    fixture.agent.flush(peer_process.peer, TIMEOUT).unwrap();
    assert_eq!(fixture.agent.in_flight(), 0);
    fixture.end(peer_process);
}

/// What waits behind a fence ends with the peer; with a region that was withdrawn nothing begins.
#[test]
fn deferred_transfers_fail_when_region_or_peer_is_gone() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only stand-ins are slow when they are told");
    }
    let mut fixture = AgentFixture::open();
    let mut peer_process = fixture.peer_process("shared", &[]);
    let route = fixture.join(&peer_process);
    slow(Duration::from_millis(300));
    let first = fixture.agent.put(&route, &part(0, LENGTH), None).unwrap();
    fixture.tell(&peer_process, WITHDRAW, 0);
    fixture.agent.fence(peer_process.peer).unwrap();
    // Behind the fence as long as it is there, and refused at once when it is not.
    let end = Instant::now() + TIMEOUT;
    let mut deferred = Vec::new();
    let error = loop {
        match fixture.agent.put(&route, &part(0, 4096), None) {
            Ok(token) => deferred.push(token),
            Err(error) => break error,
        }
        assert!(Instant::now() < end, "it is not withdrawn");
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(error.kind(), ErrorKind::Stale);
    slow(Duration::ZERO);
    fixture.agent.wait(first, TIMEOUT).unwrap();
    for token in deferred {
        let error = fixture.agent.wait(token, TIMEOUT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
    }
    fixture.answer();
    drop(route);
    // The same with a peer that is killed while something is deferred.
    let next = fixture.peer_process("shared", &[]);
    let route = fixture.join(&next);
    // Longer than it takes to kill a process, also on a machine that has much to do.
    slow(Duration::from_secs(2));
    let first = fixture.agent.put(&route, &part(0, LENGTH), None).unwrap();
    fixture.agent.fence(next.peer).unwrap();
    let deferred = fixture.agent.put(&route, &part(0, 4096), None).unwrap();
    let mut next = next;
    next.other.kill();
    fixture.agent.wait(first, TIMEOUT).unwrap();
    slow(Duration::ZERO);
    let error = fixture.agent.wait(deferred, TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    while !matches!(fixture.agent.next_event(TIMEOUT).unwrap(), Event::Left { .. }) {}
    peer_process.other.kill();
}

/// The peer is told nothing of data that did not come.
#[test]
fn nothing_that_waits_for_a_failed_put_is_begun() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only stand-ins fail when they are told");
    }
    let how = [AgentFixture::open as fn() -> AgentFixture, || AgentFixture::open_remote(tcp(), 1)];
    for (is_far, open) in how.into_iter().enumerate() {
        let mut fixture = open();
        let far = format!("far by {} 1: shared", tcp());
        let peer_process = fixture.peer_process(if is_far == 1 { &far } else { "shared" }, &[]);
        let route = fixture.join(&peer_process);
        let before = fixture.ask(&peer_process, SUM, 0);
        slow(Duration::from_millis(20));
        emulated::fail_after(0, 0);
        let agent = &mut fixture.agent;
        let failing = agent.put(&route, &part(0, LENGTH), None).unwrap();
        let told = agent.notify_ordered(peer_process.peer, notice(FILL, 1)).unwrap();
        agent.fence(peer_process.peer).unwrap();
        let deferred = agent.put(&route, &part(0, 4096), Some(notice(FILL, 2))).unwrap();
        let failure = agent.wait(failing, TIMEOUT).unwrap_err();
        assert_eq!(failure.kind(), ErrorKind::Failed, "{failure}");
        // Also what is begun when the failure is known.
        let late = agent.notify_ordered(peer_process.peer, notice(FILL, 3)).unwrap();
        let named = format!("put {failing} failed");
        for token in [told, deferred, late] {
            let error = agent.wait(token, TIMEOUT).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Cancelled, "far {is_far}: {error}");
            assert!(error.to_string().contains(&named), "{error}");
        }
        // Until the failure was told of.
        let error = agent.flush(peer_process.peer, TIMEOUT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Failed, "{error}");
        assert!(error.to_string().contains(&named), "{error}");
        agent.flush(peer_process.peer, TIMEOUT).unwrap();
        let ordered = agent.notify_ordered(peer_process.peer, notice(SUM, 0)).unwrap();
        agent.wait(ordered, TIMEOUT).unwrap();
        assert_eq!(fixture.answer(), before, "far {is_far}: it heard of what was not there");
        slow(Duration::ZERO);
        fixture.end(peer_process);
    }
}

/// It is over when the next one is, and the owner can have its memory back.
#[test]
fn put_whose_end_was_not_marked_settles_at_its_owner() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only stand-ins refuse what they are told to");
    }
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("shared", &[]);
    let route = fixture.join(&peer_process);
    slow(Duration::from_millis(100));
    emulated::refuse_records(0, true);
    let start = Instant::now();
    let token = fixture.agent.put(&route, &part(0, LENGTH), None).unwrap();
    assert!(start.elapsed() < Duration::from_millis(100), "the put waited");
    fixture.agent.progress();
    emulated::refuse_records(0, false);
    let error = fixture.agent.wait(token, TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Failed, "{error}");
    assert!(start.elapsed() >= Duration::from_millis(100), "told while it is under way");
    slow(Duration::ZERO);
    fixture.ask(&peer_process, WITHDRAW, 0);
    fixture.end(peer_process);
}

/// Neither a put's notice nor an ordered one is taken for told.
#[test]
fn notices_to_an_agent_that_ended_meanwhile_fail() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only stand-ins are slow when they are told");
    }
    let mut here = Agent::start(AgentOptions::new("here")).unwrap();
    let there = Agent::start(AgentOptions::new("there")).unwrap();
    let memory = || device().allocate_shared(LENGTH, &[]).unwrap();
    let mine = here.register(memory(), Rights::ALL).unwrap();
    let theirs = there.register(memory(), Rights::ALL).unwrap();
    let peer = here.connect(&there.card().encode().unwrap(), TIMEOUT).unwrap();
    let descriptor = theirs.descriptor().encode().unwrap();
    let route = here.join(peer, &mine, &descriptor, &Policy::default(), TIMEOUT).unwrap();
    slow(Duration::from_millis(100));
    let put = here.put(&route, &part(0, LENGTH), Some(notice(1, 1))).unwrap();
    let ordered = here.notify_ordered(peer, notice(1, 2)).unwrap();
    drop(there);
    slow(Duration::ZERO);
    let error = here.wait(put, TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    assert!(error.to_string().contains("the agent has ended"), "{error}");
    let error = here.wait(ordered, TIMEOUT).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Closed | ErrorKind::Cancelled), "{error}");
    assert!(error.to_string().contains("the agent has ended"), "{error}");
    // One that was left is no peer any more, and that is said as by `notify`.
    here.disconnect(peer, TIMEOUT).unwrap();
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
    let mut fixture = AgentFixture::open_remote(tcp(), 1);
    let mut peer_process = fixture.peer_process(&format!("far by {} 1: shared", tcp()), &[]);
    let route = fixture.join(&peer_process);
    fixture.tell(&peer_process, DROP_AGENT, 0);
    read(&fixture.directory.join("at-the-end"));
    let end = Instant::now() + TIMEOUT;
    let error = loop {
        match fixture.agent.put(&route, &part(0, 4096), None) {
            Ok(token) => fixture.agent.forget(token),
            Err(error) => break error,
        }
        assert!(Instant::now() < end, "it is still there");
        fixture.agent.progress();
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    assert!(error.to_string().contains("the agent has ended"), "{error}");
    write(&fixture.directory.join("look"), b"");
    write(&fixture.directory.join("leave"), b"");
    peer_process.other.finish();
}

/// Who connects or joins waits for one peer, and the others do not wait for that.
#[test]
fn connecting_and_joining_go_on_with_other_peers() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only stand-ins are slow when they are told");
    }
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("shared", &[]);
    let route = fixture.join(&peer_process);
    let mut stopped = fixture.peer_process("host", &[]);
    let signal = |signal| {
        let pid = nix::unistd::Pid::from_raw(stopped.other.0.id() as i32);
        nix::sys::signal::kill(pid, signal).unwrap();
    };
    signal(nix::sys::signal::Signal::SIGSTOP);
    let short = Duration::from_millis(500);
    for joins in [true, false] {
        slow(Duration::from_millis(100));
        let tell = Some(notice(100, sum_of(LENGTH, 1)));
        let token = fixture.agent.put(&route, &part(0, LENGTH), tell).unwrap();
        fixture.agent.forget(token);
        assert_eq!(fixture.agent.in_flight(), 1);
        let policy = Policy::default();
        if joins {
            let (peer, descriptor) = (stopped.peer, &stopped.descriptor);
            let joined = fixture.agent.join(peer, &fixture.region, descriptor, &policy, short);
            assert!(joined.is_err());
        } else {
            assert!(fixture.agent.connect(&stopped.card, short).is_err());
        }
        assert_eq!(fixture.agent.in_flight(), 0, "joins: {joins}");
        slow(Duration::ZERO);
        assert_eq!(fixture.answer(), 1);
    }
    stopped.other.kill();
    fixture.end(peer_process);
}
