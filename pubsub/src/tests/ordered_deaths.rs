//! Processes that die while streams are at messages.

use gpu::{Device, DeviceName};
use testkit::children::ForkedChild;

use super::deaths::life_of;
use super::ordered::{Gate, home_with, on_a_device};
use super::*;
use crate::Event;
use crate::Readiness;

fn sleep_for_ever() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

#[test]
fn a_stream_goes_on_when_the_publisher_it_waits_for_is_killed() {
    let (home, device) = home_with(&TopicSettings { depth: 8, ..on_a_device() });
    let who = home.admit();
    let mut subscriber = home.subscriber();
    let mut slow = home.subscriber();
    let child = ForkedChild::new(|| {
        let home = home.joined(who);
        let device = Device::open(DeviceName::stand_in(0)).unwrap();
        let (publisher, stream) = (home.publisher(), device.stream().unwrap());
        let from = device.allocate(4096).unwrap();
        publisher.push_on(&stream, &from.whole(), FAR).unwrap();
        stream.synchronize(FAR).unwrap();
        Gate::new(&device).stop(&stream);
        for _ in 0..3 {
            publisher.push_on(&stream, &from.whole(), FAR).unwrap();
        }
        publisher.push(b"ready", FAR).unwrap();
        sleep_for_ever();
    });
    home.clerk.roster.learn(who, life_of(&child));
    let waiting = device.stream().unwrap();
    let first = subscriber.pull(FAR).unwrap();
    let lost = subscriber.pull_on(&waiting, FAR).unwrap();
    let released = subscriber.pull_on(&waiting, FAR).unwrap();
    released.release_on(&waiting).unwrap();
    // One that is pulled and dropped.
    drop(subscriber.pull_on(&waiting, FAR).unwrap());
    let last = subscriber.pull(FAR).unwrap();
    assert_eq!(last.to_vec().unwrap(), b"ready");
    assert!(!waiting.is_done().unwrap());
    child.kill();
    home.bury(who);
    waiting.synchronize(FAR).unwrap();
    assert!(child.was_killed());
    assert_eq!(lost.readiness().unwrap(), Readiness::Poisoned);
    assert_eq!(first.readiness().unwrap(), Readiness::Ready);
    assert_eq!(lost.to_vec().unwrap_err().kind(), ErrorKind::Poisoned);
    assert_eq!(first.length(), 4096);
    drop((first, lost, last));
    assert!(subscriber.try_pull().unwrap().is_none());
    // Who comes later passes over what was never written.
    assert_eq!(slow.pull(FAR).unwrap().length(), 4096);
    assert_eq!(slow.pull(FAR).unwrap().to_vec().unwrap(), b"ready");
    assert_eq!(slow.missed(), 3);
    assert_eq!(slow.poll_event(), Some(Event::Gap { missed: 3 }));
    home.here.free_what_is_done(&home.caller());
    assert_eq!(home.blocks_taken(), 0);
}

#[test]
fn what_the_stream_of_a_dead_reader_held_is_given_back() {
    let (home, _device) = home_with(&TopicSettings { depth: 4, ..on_a_device() });
    let who = home.admit();
    let publisher = home.publisher();
    let mut witness = home.subscriber();
    let child = ForkedChild::new(|| {
        let home = home.joined(who);
        let device = Device::open(DeviceName::stand_in(0)).unwrap();
        let (mut subscriber, stream) = (home.subscriber(), device.stream().unwrap());
        let publisher = home.publisher();
        publisher.push(b"here", FAR).unwrap();
        drop(subscriber.pull(FAR).unwrap());
        Gate::new(&device).stop(&stream);
        for _ in 0..2 {
            subscriber.pull_on(&stream, FAR).unwrap().release_on(&stream).unwrap();
        }
        publisher.push(b"ready", FAR).unwrap();
        sleep_for_ever();
    });
    home.clerk.roster.learn(who, life_of(&child));
    drop(witness.pull(FAR).unwrap());
    publisher.push(b"x", FAR).unwrap();
    publisher.push(b"y", FAR).unwrap();
    for _ in 0..3 {
        drop(witness.pull(FAR).unwrap());
    }
    // One of them is taken from it before it dies.
    let (_, seats) = (0, home.topic.here().seats().collect::<Vec<_>>());
    let seat = seats.into_iter().find(|seat| seat.who() == Some(who)).unwrap();
    let held_for = Duration::from_secs(1);
    home.topic.evict_in(&home.caller(), (Direction::Here, seat), held_for, home.ledgers()).unwrap();
    home.here.free_what_is_done(&home.caller());
    assert_eq!(home.blocks_taken(), 2, "its stream is at them");
    child.kill();
    home.bury(who);
    assert!(child.was_killed());
    assert_eq!(home.blocks_taken(), 0);
}
