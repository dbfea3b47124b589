//! Those that leave, die, or are withdrawn.

use std::time::{Duration, Instant};

use gpu::{Block, stand_in};
use transfer::path::Policy;
use transfer::{ErrorKind, Event};

use crate::common::{Ground, LENGTH, PATIENCE, alone, device};
use crate::house::{END, House, SLEEP, SUM, WITHDRAW, notice, sum_of};

const WHOLE: [Block; 1] = [Block { to: 0, from: 0, length: LENGTH }];

fn slow(delay: Duration) {
    for number in 0..stand_in::COUNT {
        stand_in::behave(number, stand_in::Behaviour { delay, ..Default::default() });
    }
}

/// Whether a process is there any more when somebody looks is another matter.
#[test]
fn one_that_left_in_order_is_not_taken_for_dead() {
    let _alone = alone();
    for is_killed in [false, true] {
        let mut house = House::open();
        let mut neighbour = house.neighbour("host", &[]);
        // It has not come yet, maybe, and would not leave then.
        while !matches!(house.agent.next_event(PATIENCE).unwrap(), Event::Joined { .. }) {}
        if is_killed {
            neighbour.other.kill();
        } else {
            house.tell(&neighbour, END, 0);
            neighbour.other.finish();
        }
        loop {
            if let Event::Left { is_dead, .. } = house.agent.next_event(PATIENCE).unwrap() {
                break assert_eq!(is_dead, is_killed);
            }
        }
    }
}

#[test]
fn a_peer_is_killed_under_a_thousand_puts() {
    let _alone = alone();
    let mut house = House::open();
    // The first time a driver keeps things for later.
    let first = house.neighbour("shared", &[]);
    drop(house.join(&first));
    house.agent.disconnect(first.peer, PATIENCE).unwrap();
    drop(first);
    while let Ok(_event) = house.agent.next_event(Duration::from_millis(300)) {}
    let ground = Ground::now(&device());
    let mut neighbour = house.neighbour("shared", &[]);
    let route = house.join(&neighbour);
    slow(Duration::from_micros(300));
    let block = |number: u64| [Block { to: number * 4096, from: number * 4096, length: 4096 }];
    let tokens: Vec<_> = (0..1000)
        .map(|number| {
            let tell = Some(notice(100, 0));
            house.agent.put(&route, &block(number), tell).unwrap()
        })
        .collect();
    assert!(house.agent.under_way() > 500);
    neighbour.other.kill();
    let start = Instant::now();
    let (mut arrived, mut lost) = (0, 0);
    for token in tokens {
        match house.agent.wait(token, PATIENCE) {
            Ok(_) => arrived += 1,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
                lost += 1;
            }
        }
    }
    assert_eq!((arrived + lost, house.agent.under_way()), (1000, 0));
    assert!(start.elapsed() < PATIENCE, "{arrived} arrived, {lost} lost");
    // Nothing is begun with the dead.
    let deadline = Instant::now() + PATIENCE;
    loop {
        match house.agent.notify(neighbour.peer, notice(1, 1)) {
            Err(error) => break assert_eq!(error.kind(), ErrorKind::Closed),
            Ok(token) => house.agent.forget(token),
        }
        assert!(Instant::now() < deadline, "notices to the dead are taken");
        house.agent.progress();
    }
    slow(Duration::ZERO);
    house.agent.disconnect(neighbour.peer, PATIENCE).unwrap();
    drop((route, neighbour));
    while let Ok(_event) = house.agent.next_event(Duration::from_millis(300)) {}
    ground.compare(&device());
    // The next one works.
    let next = house.neighbour("shared", &[]);
    let route = house.join(&next);
    let token = house.agent.put(&route, &WHOLE, Some(notice(100, sum_of(LENGTH, 1)))).unwrap();
    house.agent.wait(token, PATIENCE).unwrap();
    assert_eq!(house.answer(), 1);
    house.end(next);
}

#[test]
fn a_region_that_was_withdrawn_is_refused_before_a_byte_moves() {
    let _alone = alone();
    let mut house = House::open();
    let neighbour = house.neighbour("shared", &[]);
    let route = house.join(&neighbour);
    house.ask(&neighbour, WITHDRAW, 0);
    for put in [true, false] {
        let begun = match put {
            true => house.agent.put(&route, &WHOLE, None),
            false => house.agent.get(&route, &WHOLE, None),
        };
        assert_eq!(begun.unwrap_err().kind(), ErrorKind::Stale);
    }
    assert_eq!(house.ask(&neighbour, SUM, 0), sum_of(LENGTH, 0), "something moved");
    let policy = Policy::default();
    let (peer, descriptor) = (neighbour.peer, &neighbour.descriptor);
    drop(route);
    let again = house.agent.join(peer, &house.region, descriptor, &policy, PATIENCE);
    assert_eq!(again.unwrap_err().kind(), ErrorKind::Stale);
    assert_eq!(house.agent.under_way(), 0);
    house.end(neighbour);
}

#[test]
fn who_withdraws_a_region_waits_for_those_that_are_at_it() {
    let _alone = alone();
    let mut house = House::open();
    if device().name().implementation != gpu::Implementation::StandIn {
        testkit::skip!("only stand-ins are slow when they are told");
    }
    let neighbour = house.neighbour("shared", &[]);
    let route = house.join(&neighbour);
    slow(Duration::from_millis(300));
    let token = house.agent.put(&route, &WHOLE, None).unwrap();
    let start = Instant::now();
    house.tell(&neighbour, WITHDRAW, 0);
    // It says so only when the copy is done, which is up to us.
    let waited = house.agent.next_event(Duration::from_millis(150));
    let early = matches!(waited, Ok(Event::Notice { .. }));
    assert!(!early, "it did not wait");
    house.agent.wait(token, PATIENCE).unwrap();
    house.answer();
    assert!(start.elapsed() >= Duration::from_millis(300));
    house.end(neighbour);
}

#[test]
fn a_descriptor_of_a_process_that_was_started_anew_is_stale() {
    let _alone = alone();
    let mut house = House::open();
    let mut old = house.neighbour("shared", &[]);
    old.other.kill();
    let new = house.neighbour("shared", &[]);
    let policy = Policy::default();
    let joined = house.agent.join(new.peer, &house.region, &old.descriptor, &policy, PATIENCE);
    assert_eq!(joined.unwrap_err().kind(), ErrorKind::Stale);
    // The dead one's socket leads nowhere, and that is told as a reason.
    let short = Duration::from_millis(200);
    assert_eq!(house.agent.connect(&old.card, short).unwrap_err().kind(), ErrorKind::NoPath);
    let peer = house.agent.inspect(&old.card, short).unwrap();
    let error = house.agent.join(peer, &house.region, &old.descriptor, &policy, short).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoPath);
    assert!(error.to_string().contains("no descriptor can be passed"), "{error}");
    house.end(new);
}

#[test]
fn one_that_does_not_listen_holds_up_nobody_and_is_named() {
    let _alone = alone();
    let mut house = House::open();
    let deaf = house.neighbour("shared", &[]);
    let route = house.join(&deaf);
    house.tell(&deaf, SLEEP, 0);
    // More notices than there is room for.
    let tokens: Vec<_> = (0..1500)
        .map(|number| house.agent.notify(deaf.peer, notice(100, number)).unwrap())
        .collect();
    let taken = tokens.iter().filter(|token| house.agent.test(**token).is_some()).count();
    assert!((1000..1100).contains(&taken), "{taken} were taken");
    let start = Instant::now();
    let error = house.agent.wait(tokens[1499], Duration::from_millis(100)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert!(error.to_string().contains("shared"), "it is named: {error}");
    assert!(start.elapsed() < Duration::from_secs(5));
    // Data goes on, and so do others.
    let token = house.agent.put(&route, &WHOLE, None).unwrap();
    house.agent.wait(token, PATIENCE).unwrap();
    let other = house.neighbour("shared", &[]);
    assert_eq!(house.ask(&other, SUM, 0), sum_of(LENGTH, 0));
    house.end(other);
    // What it never hears of ends with it.
    let left = house.agent.disconnect(deaf.peer, Duration::from_millis(100));
    assert_eq!(left.unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(house.agent.wait(tokens[1499], PATIENCE).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn a_device_that_fails_ends_what_was_begun() {
    let _alone = alone();
    let mut house = House::open();
    if device().name().implementation != gpu::Implementation::StandIn {
        testkit::skip!("only stand-ins fail when they are told");
    }
    let neighbour = house.neighbour("shared", &[]);
    let route = house.join(&neighbour);
    stand_in::fail_after(0, 2);
    let tokens: Vec<_> = (0..5).map(|_| house.agent.put(&route, &WHOLE, None).unwrap()).collect();
    let outcomes: Vec<_> =
        tokens.into_iter().map(|token| house.agent.wait(token, PATIENCE).is_ok()).collect();
    assert_eq!(outcomes, [true, true, false, false, false]);
    house.end(neighbour);
}
