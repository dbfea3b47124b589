//! Ordered operations and what they wait for.

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

/// Large and small transfers have different streams, and a notice has none.
#[test]
fn ordered_notice_follows_all_earlier_operations() {
    let _alone = alone();
    let is_emulated = device().name().implementation == gpu::Implementation::Emulated;
    let open_functions =
        [AgentFixture::open as fn() -> AgentFixture, || AgentFixture::open_remote(tcp(), 2)];
    for (is_remote, open) in open_functions.into_iter().enumerate() {
        let mut fixture = open();
        let remote = format!("remote by {} 2: shared", tcp());
        let role = if is_remote == 1 { &remote } else { "shared" };
        let peer_process = fixture.peer_process(role, &[]);
        let route = fixture.join(&peer_process);
        for round in 1..=10 {
            fill(&fixture.memory, LENGTH, round);
            slow(Duration::from_millis(if is_emulated { 20 } else { 0 }));
            let large = fixture.agent.put(&route, &part(0, LENGTH - 4096), None).unwrap();
            let small = fixture.agent.put(&route, &part(LENGTH - 4096, 4096), None).unwrap();
            fixture.agent.forget(large);
            fixture.agent.forget(small);
            // The other side compares when the notice arrives.
            let on_arrival = notice(100, sum_of(LENGTH, round));
            let ordered = fixture.agent.notify_ordered(peer_process.peer, on_arrival).unwrap();
            slow(Duration::ZERO);
            fixture.agent.wait(ordered, TIMEOUT).unwrap();
            assert_eq!(fixture.reply(), 1, "round {round}, remote {is_remote}");
        }
        fixture.end(peer_process);
    }
}

#[test]
fn fence_delays_later_operations() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only emulated devices can be slowed down");
    }
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("shared", &[]);
    let route = fixture.join(&peer_process);
    slow(Duration::from_millis(100));
    // The later put is shorter, and has a stream without a queue.
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
    assert!(start.elapsed() >= Duration::from_millis(100), "the device was not slow");
    assert_eq!(fixture.reply(), sum_of(LENGTH, 1));
    fixture.end(peer_process);
}

#[test]
fn flush_has_a_deadline_and_names_the_peer() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only emulated devices can be slowed down");
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

/// Operations behind a fence fail with the peer, and do not start with a withdrawn region.
#[test]
fn deferred_transfers_fail_if_region_or_peer_is_lost() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only emulated devices can be slowed down");
    }
    let mut fixture = AgentFixture::open();
    let mut peer_process = fixture.peer_process("shared", &[]);
    let route = fixture.join(&peer_process);
    slow(Duration::from_millis(300));
    let first = fixture.agent.put(&route, &part(0, LENGTH), None).unwrap();
    fixture.notify_peer(&peer_process, WITHDRAW, 0);
    fixture.agent.fence(peer_process.peer).unwrap();
    // Deferred as long as the region exists, and refused at once after that.
    let end = Instant::now() + TIMEOUT;
    let mut deferred = Vec::new();
    let error = loop {
        match fixture.agent.put(&route, &part(0, 4096), None) {
            Ok(token) => deferred.push(token),
            Err(error) => break error,
        }
        assert!(Instant::now() < end, "the region is not withdrawn");
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(error.kind(), ErrorKind::Stale);
    slow(Duration::ZERO);
    fixture.agent.wait(first, TIMEOUT).unwrap();
    for token in deferred {
        let error = fixture.agent.wait(token, TIMEOUT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
    }
    fixture.reply();
    drop(route);
    // The same with a peer that is killed while a put is deferred.
    let next = fixture.peer_process("shared", &[]);
    let route = fixture.join(&next);
    // Longer than killing a process takes on a busy machine.
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

/// The peer gets no notice of data that did not arrive.
#[test]
fn operations_behind_a_failed_put_are_cancelled() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only emulated devices fail on request");
    }
    let open_functions =
        [AgentFixture::open as fn() -> AgentFixture, || AgentFixture::open_remote(tcp(), 1)];
    for (is_remote, open) in open_functions.into_iter().enumerate() {
        let mut fixture = open();
        let remote = format!("remote by {} 1: shared", tcp());
        let peer_process =
            fixture.peer_process(if is_remote == 1 { &remote } else { "shared" }, &[]);
        let route = fixture.join(&peer_process);
        let before = fixture.request(&peer_process, SUM, 0);
        slow(Duration::from_millis(20));
        emulated::fail_after(0, 0);
        let agent = &mut fixture.agent;
        let failing = agent.put(&route, &part(0, LENGTH), None).unwrap();
        let ordered = agent.notify_ordered(peer_process.peer, notice(FILL, 1)).unwrap();
        agent.fence(peer_process.peer).unwrap();
        let deferred = agent.put(&route, &part(0, 4096), Some(notice(FILL, 2))).unwrap();
        let failure = agent.wait(failing, TIMEOUT).unwrap_err();
        assert_eq!(failure.kind(), ErrorKind::Failed, "{failure}");
        // Also operations that start after the failure is known.
        let late = agent.notify_ordered(peer_process.peer, notice(FILL, 3)).unwrap();
        let named = format!("put {failing} failed");
        for token in [ordered, deferred, late] {
            let error = agent.wait(token, TIMEOUT).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Cancelled, "remote {is_remote}: {error}");
            assert!(error.to_string().contains(&named), "{error}");
        }
        // Until the failure was reported.
        let error = agent.flush(peer_process.peer, TIMEOUT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Failed, "{error}");
        assert!(error.to_string().contains(&named), "{error}");
        agent.flush(peer_process.peer, TIMEOUT).unwrap();
        let ordered = agent.notify_ordered(peer_process.peer, notice(SUM, 0)).unwrap();
        agent.wait(ordered, TIMEOUT).unwrap();
        assert_eq!(fixture.reply(), before, "remote {is_remote}: a notice without data arrived");
        slow(Duration::ZERO);
        fixture.end(peer_process);
    }
}

/// The put completes with the next one, and its owner can reuse the memory.
#[test]
fn put_without_an_event_settles_at_its_owner() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only emulated devices refuse on request");
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
    assert!(start.elapsed() >= Duration::from_millis(100), "reported while in flight");
    slow(Duration::ZERO);
    fixture.request(&peer_process, WITHDRAW, 0);
    fixture.end(peer_process);
}

/// Neither a put's notice nor an ordered one counts as sent.
#[test]
fn notices_to_an_agent_that_ended_meanwhile_fail() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only emulated devices can be slowed down");
    }
    let mut here = Agent::start(AgentOptions::new("here")).unwrap();
    let there = Agent::start(AgentOptions::new("there")).unwrap();
    let memory = || device().allocate_shared(LENGTH, &[]).unwrap();
    let local = here.register(memory(), Rights::ALL).unwrap();
    let remote_region = there.register(memory(), Rights::ALL).unwrap();
    let peer = here.connect(&there.card().encode().unwrap(), TIMEOUT).unwrap();
    let descriptor = remote_region.descriptor().encode().unwrap();
    let route = here.join(peer, &local, &descriptor, &Policy::default(), TIMEOUT).unwrap();
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
    // After `disconnect` the peer is unknown, with the same error as for `notify`.
    here.disconnect(peer, TIMEOUT).unwrap();
    for error in [
        here.notify(peer, notice(1, 3)).unwrap_err(),
        here.notify_ordered(peer, notice(1, 4)).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    }
}

/// Without shared memory, the fabric reports the end.
#[test]
fn fabric_peers_detect_that_an_agent_ended() {
    let _alone = alone();
    let mut fixture = AgentFixture::open_remote(tcp(), 1);
    let mut peer_process = fixture.peer_process(&format!("remote by {} 1: shared", tcp()), &[]);
    let route = fixture.join(&peer_process);
    fixture.notify_peer(&peer_process, DROP_AGENT, 0);
    read(&fixture.directory.join("at-the-end"));
    let end = Instant::now() + TIMEOUT;
    let error = loop {
        match fixture.agent.put(&route, &part(0, 4096), None) {
            Ok(token) => fixture.agent.forget(token),
            Err(error) => break error,
        }
        assert!(Instant::now() < end, "the agent has not ended");
        fixture.agent.progress();
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    assert!(error.to_string().contains("the agent has ended"), "{error}");
    write(&fixture.directory.join("look"), b"");
    write(&fixture.directory.join("leave"), b"");
    peer_process.other.finish();
}

/// Connecting and joining wait for one peer, while other peers progress.
#[test]
fn connecting_and_joining_progress_other_peers() {
    let _alone = alone();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only emulated devices can be slowed down");
    }
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("shared", &[]);
    let route = fixture.join(&peer_process);
    let mut stopped = fixture.peer_process("host", &[]);
    // All of its threads: one of them would answer.
    stopped.other.0.stop(TIMEOUT);
    let short = Duration::from_millis(500);
    for joins in [true, false] {
        slow(Duration::from_millis(100));
        let on_arrival = Some(notice(100, sum_of(LENGTH, 1)));
        let token = fixture.agent.put(&route, &part(0, LENGTH), on_arrival).unwrap();
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
        assert_eq!(fixture.reply(), 1);
    }
    stopped.other.kill();
    fixture.end(peer_process);
}
