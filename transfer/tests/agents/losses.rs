//! Peers that disconnect or die, and regions that are withdrawn.

use std::process::Command;
use std::time::{Duration, Instant};

use gpu::{Block, emulated};
use transfer::path::Policy;
use transfer::{Agent, AgentOptions, Condition, Departure, ErrorKind, Event, HostBuffer, Rights};

use crate::common::{LENGTH, LeakCheck, TIMEOUT, alone, device};
use crate::fixture::{AgentFixture, END, SLEEP, SUM, WITHDRAW, notice, sum_of};
use crate::rails::tcp;

const WHOLE: [Block; 1] = [Block { to: 0, from: 0, length: LENGTH }];

fn slow(delay: Duration) {
    for number in 0..emulated::COUNT {
        emulated::configure_faults(number, emulated::FaultConfig { delay, ..Default::default() });
    }
}

/// The outcome is the same if the process has already exited at the check.
#[test]
fn peer_that_closed_cleanly_is_not_reported_dead() {
    let _alone = alone();
    for is_killed in [false, true] {
        let mut fixture = AgentFixture::open();
        let mut peer_process = fixture.peer_process("host", &[]);
        // Without `Joined` there would be no `Left`.
        while !matches!(fixture.agent.next_event(TIMEOUT).unwrap(), Event::Joined { .. }) {}
        if is_killed {
            peer_process.other.kill();
        } else {
            fixture.notify_peer(&peer_process, END, 0);
            peer_process.other.finish();
        }
        loop {
            if let Event::Left { is_dead, .. } = fixture.agent.next_event(TIMEOUT).unwrap() {
                break assert_eq!(is_dead, is_killed);
            }
        }
    }
}

/// Of a peer by a fabric as well: the event of a killed one comes after its timeout.
#[test]
fn departure_tells_a_killed_peer_from_a_closed_one() {
    let _alone = alone();
    for (is_remote, is_killed) in [(false, false), (false, true), (true, false), (true, true)] {
        let (mut fixture, role) = match is_remote {
            false => (AgentFixture::open(), "host".to_owned()),
            true => (AgentFixture::open_remote(tcp(), 2), format!("remote by {} 2: host", tcp())),
        };
        let mut peer_process = fixture.peer_process(&role, &[]);
        let peer = peer_process.peer;
        fixture.request(&peer_process, SUM, 0);
        assert_eq!(fixture.agent.departure(peer), None);
        if is_killed {
            peer_process.other.kill();
        } else {
            fixture.notify_peer(&peer_process, END, 0);
            peer_process.other.finish();
        }
        let end = Instant::now() + TIMEOUT;
        let departure = loop {
            if let Some(departure) = fixture.agent.departure(peer) {
                break departure;
            }
            assert!(Instant::now() < end, "remote {is_remote}, killed {is_killed}");
            let _ = fixture.agent.notify(peer, notice(SLEEP, 0));
            std::thread::sleep(Duration::from_millis(10));
        };
        let expected = if is_killed { Departure::Dead } else { Departure::Closed };
        assert_eq!(departure, expected, "remote {is_remote}");
        loop {
            if let Event::Left { is_dead, .. } = fixture.agent.next_event(TIMEOUT).unwrap() {
                break assert_eq!(is_dead, is_killed, "remote {is_remote}");
            }
        }
    }
}

/// The socket of a killed peer is closed before its process has ended.
#[test]
fn each_killed_peer_is_reported_dead() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    for round in 0..8 {
        let mut peer_process = fixture.peer_process("host", &[]);
        while !matches!(fixture.agent.next_event(TIMEOUT).unwrap(), Event::Joined { .. }) {}
        let process = peer_process.other.0.id().to_string();
        // The test does not wait for it.
        Command::new("kill").args(["-KILL", &process]).status().unwrap();
        loop {
            if let Event::Left { is_dead, .. } = fixture.agent.next_event(TIMEOUT).unwrap() {
                break assert!(is_dead, "round {round}");
            }
        }
        peer_process.other.kill();
    }
}

/// Neither its socket, its card nor its connections seem alive by what a child inherited.
#[test]
fn end_of_an_agent_is_seen_although_its_child_lives() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let mut peer_process = fixture.peer_process("parent", &[]);
    while !matches!(fixture.agent.next_event(TIMEOUT).unwrap(), Event::Joined { .. }) {}
    let begin = Instant::now();
    peer_process.other.kill();
    loop {
        if let Event::Left { is_dead, .. } = fixture.agent.next_event(TIMEOUT).unwrap() {
            break assert!(is_dead);
        }
    }
    // The next agent removes its files.
    let mut other = Agent::start(AgentOptions::new("other").directory(&fixture.directory)).unwrap();
    let error = other.connect(&peer_process.card, TIMEOUT).unwrap_err();
    assert!(error.to_string().contains("has ended"), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    let left = transfer::clean(&fixture.directory, false).unwrap();
    assert!(left.iter().all(|one| matches!(one.condition, Condition::Alive(_))), "{left:?}");
}

#[test]
fn peer_is_killed_during_a_thousand_puts() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    // Drivers allocate some state at the first use.
    let first = fixture.peer_process("shared", &[]);
    drop(fixture.join(&first));
    fixture.agent.disconnect(first.peer, TIMEOUT).unwrap();
    drop(first);
    while let Ok(_event) = fixture.agent.next_event(Duration::from_millis(300)) {}
    let leak_check = LeakCheck::begin(&device());
    let mut peer_process = fixture.peer_process("shared", &[]);
    let route = fixture.join(&peer_process);
    slow(Duration::from_micros(300));
    let block = |number: u64| [Block { to: number * 4096, from: number * 4096, length: 4096 }];
    let tokens: Vec<_> = (0..1000)
        .map(|number| {
            let on_arrival = Some(notice(100, 0));
            fixture.agent.put(&route, &block(number), on_arrival).unwrap()
        })
        .collect();
    assert!(fixture.agent.in_flight() > 500);
    peer_process.other.kill();
    let start = Instant::now();
    let (mut arrived, mut lost) = (0, 0);
    for token in tokens {
        match fixture.agent.wait(token, TIMEOUT) {
            Ok(_) => arrived += 1,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
                lost += 1;
            }
        }
    }
    assert_eq!((arrived + lost, fixture.agent.in_flight()), (1000, 0));
    assert!(start.elapsed() < TIMEOUT, "{arrived} arrived, {lost} lost");
    // No operation with a dead peer starts.
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match fixture.agent.notify(peer_process.peer, notice(1, 1)) {
            Err(error) => break assert_eq!(error.kind(), ErrorKind::Closed),
            Ok(token) => fixture.agent.forget(token),
        }
        assert!(Instant::now() < deadline, "notices to a dead peer are accepted");
        fixture.agent.progress();
    }
    slow(Duration::ZERO);
    fixture.agent.disconnect(peer_process.peer, TIMEOUT).unwrap();
    drop((route, peer_process));
    while let Ok(_event) = fixture.agent.next_event(Duration::from_millis(300)) {}
    leak_check.compare(&device());
    // The next peer works.
    let next = fixture.peer_process("shared", &[]);
    let route = fixture.join(&next);
    let token = fixture.agent.put(&route, &WHOLE, Some(notice(100, sum_of(LENGTH, 1)))).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    assert_eq!(fixture.reply(), 1);
    fixture.end(next);
}

#[test]
fn withdrawn_region_is_refused_before_a_byte_is_copied() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("shared", &[]);
    let route = fixture.join(&peer_process);
    fixture.request(&peer_process, WITHDRAW, 0);
    for put in [true, false] {
        let started = match put {
            true => fixture.agent.put(&route, &WHOLE, None),
            false => fixture.agent.get(&route, &WHOLE, None),
        };
        assert_eq!(started.unwrap_err().kind(), ErrorKind::Stale);
    }
    assert_eq!(fixture.request(&peer_process, SUM, 0), sum_of(LENGTH, 0), "bytes were copied");
    let policy = Policy::default();
    let (peer, descriptor) = (peer_process.peer, &peer_process.descriptor);
    drop(route);
    let again = fixture.agent.join(peer, &fixture.region, descriptor, &policy, TIMEOUT);
    assert_eq!(again.unwrap_err().kind(), ErrorKind::Stale);
    assert_eq!(fixture.agent.in_flight(), 0);
    fixture.end(peer_process);
}

#[test]
fn region_of_another_agent_is_not_withdrawn() {
    let agent = |label| Agent::start(AgentOptions::new(label)).unwrap();
    let (mut here, there) = (agent("here"), agent("there"));
    let own = here.register(HostBuffer::new(4096).unwrap(), Rights::ALL).unwrap();
    let others = there.register(HostBuffer::new(4096).unwrap(), Rights::ALL).unwrap();
    assert_eq!(own.descriptor().number, others.descriptor().number);
    let refused = here.withdraw(&others, TIMEOUT).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Stale, "{refused}");
    here.publish("own", &own).unwrap();
    assert_eq!(here.card().regions.len(), 1, "the own region with that number exists");
    here.withdraw(&own, TIMEOUT).unwrap();
    assert!(here.card().regions.is_empty());
}

#[test]
fn withdrawing_a_region_waits_for_its_users() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only emulated devices can be slowed down");
    }
    let peer_process = fixture.peer_process("shared", &[]);
    let route = fixture.join(&peer_process);
    slow(Duration::from_millis(300));
    let token = fixture.agent.put(&route, &WHOLE, None).unwrap();
    let start = Instant::now();
    fixture.notify_peer(&peer_process, WITHDRAW, 0);
    // It replies only when the copy is done, which this side controls.
    let waited = fixture.agent.next_event(Duration::from_millis(150));
    let early = matches!(waited, Ok(Event::Notice { .. }));
    assert!(!early, "withdraw did not wait");
    fixture.agent.wait(token, TIMEOUT).unwrap();
    fixture.reply();
    assert!(start.elapsed() >= Duration::from_millis(300));
    fixture.end(peer_process);
}

#[test]
fn descriptor_from_before_a_restart_is_stale() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let mut old = fixture.peer_process("shared", &[]);
    old.other.kill();
    let new = fixture.peer_process("shared", &[]);
    let policy = Policy::default();
    let joined = fixture.agent.join(new.peer, &fixture.region, &old.descriptor, &policy, TIMEOUT);
    assert_eq!(joined.unwrap_err().kind(), ErrorKind::Stale);
    // The dead process's socket is out of reach, which is reported as a reason.
    let short = Duration::from_millis(200);
    assert_eq!(fixture.agent.connect(&old.card, short).unwrap_err().kind(), ErrorKind::NoPath);
    let peer = fixture.agent.inspect(&old.card, short).unwrap();
    let error =
        fixture.agent.join(peer, &fixture.region, &old.descriptor, &policy, short).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoPath);
    assert!(error.to_string().contains("no descriptor can be passed"), "{error}");
    fixture.end(new);
}

#[test]
fn silent_peer_blocks_no_other_and_is_named_in_errors() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let silent = fixture.peer_process("shared", &[]);
    let route = fixture.join(&silent);
    fixture.notify_peer(&silent, SLEEP, 0);
    // More notices than the queue holds.
    let tokens: Vec<_> = (0..1500)
        .map(|number| fixture.agent.notify(silent.peer, notice(100, number)).unwrap())
        .collect();
    let taken = tokens.iter().filter(|token| fixture.agent.test(**token).is_some()).count();
    assert!((1000..1100).contains(&taken), "{taken} were taken");
    let start = Instant::now();
    let error = fixture.agent.wait(tokens[1499], Duration::from_millis(100)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert!(error.to_string().contains("shared"), "the peer is not named: {error}");
    assert!(start.elapsed() < Duration::from_secs(5));
    // Data is still transferred, and so is data of other peers.
    let token = fixture.agent.put(&route, &WHOLE, None).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    let other = fixture.peer_process("shared", &[]);
    assert_eq!(fixture.request(&other, SUM, 0), sum_of(LENGTH, 0));
    fixture.end(other);
    // Undelivered notices fail with the peer.
    let left = fixture.agent.disconnect(silent.peer, Duration::from_millis(100));
    assert_eq!(left.unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(fixture.agent.wait(tokens[1499], TIMEOUT).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn failing_device_fails_its_operations() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    if device().name().implementation != gpu::Implementation::Emulated {
        testkit::skip!("only emulated devices fail on request");
    }
    let peer_process = fixture.peer_process("shared", &[]);
    let route = fixture.join(&peer_process);
    emulated::fail_after(0, 2);
    let tokens: Vec<_> = (0..5).map(|_| fixture.agent.put(&route, &WHOLE, None).unwrap()).collect();
    let outcomes: Vec<_> =
        tokens.into_iter().map(|token| fixture.agent.wait(token, TIMEOUT).is_ok()).collect();
    assert_eq!(outcomes, [true, true, false, false, false]);
    fixture.end(peer_process);
}
