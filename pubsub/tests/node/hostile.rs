//! Those that do not keep to the rules: nobody else notices.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use ipc::{Channel, Life};

use crate::ground::{Ground, PATIENCE, message, number_of, settings};

fn connect(directory: &Path) -> Channel {
    Channel::connect(&directory.join("node.sock"), PATIENCE).unwrap()
}

/// What the service says before it ends the connection, if anything.
fn answer(channel: &Channel) -> Vec<u8> {
    channel.receive(PATIENCE).map(|message| message.bytes).unwrap_or_default()
}

/// Messages still flow.
#[track_caller]
fn is_well(ground: &Ground) {
    let node = ground.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    topic.publisher().unwrap().push(&message(7), PATIENCE).unwrap();
    assert_eq!(number_of(&subscriber.pull(PATIENCE).unwrap()), 7);
}

#[test]
fn garbage_is_turned_away() {
    let ground = Ground::new();
    let _node = ground.join();
    let life = Life::of_this_process().unwrap();
    let null: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    // Version 3; hello with an empty label; what is wrong with each is told.
    let cases: [(&[u8], Vec<&OwnedFd>); 6] = [
        (b"", vec![]),
        (b"\x09\x00\x00", vec![]),
        (b"\x03\xff\xff\xff\xff\xff", vec![]),
        (b"\x03\x00\x00", vec![]),
        (b"\x03\x00\x00", vec![&null]),
        (b"\x03\x00\x00trailing", vec![&null]),
    ];
    for (bytes, files) in cases {
        let channel = connect(ground.path());
        let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
        channel.send(bytes, &files, PATIENCE).unwrap();
        assert!(!answer(&channel).is_empty(), "{bytes:?} was not answered");
        assert!(channel.receive(PATIENCE).is_err(), "{bytes:?} was not the end");
    }
    // A member that speaks nonsense afterwards.
    let channel = connect(ground.path());
    channel.send(b"\x03\x00\x00", &[life.as_fd()], PATIENCE).unwrap();
    assert!(!channel.receive(PATIENCE).unwrap().descriptors.is_empty(), "it is no member");
    channel.send(&[3; 5000], &[], PATIENCE).unwrap();
    while channel.receive(PATIENCE).is_ok() {}
    is_well(&ground);
}

#[test]
fn a_crowd_that_says_nothing_holds_up_nobody() {
    let ground = Ground::new();
    let _node = ground.join();
    let crowd: Vec<_> = (0..300).map(|_| connect(ground.path())).collect();
    is_well(&ground);
    drop(crowd);
    is_well(&ground);
}

#[test]
fn one_who_does_not_listen_is_given_up() {
    let ground = Ground::new();
    let _node = ground.join();
    let channel = connect(ground.path());
    let life = Life::of_this_process().unwrap();
    channel.send(b"\x03\x00\x00", &[life.as_fd()], PATIENCE).unwrap();
    // Reports, many of them, and none is ever taken.
    for number in 0..20_000_u32 {
        let mut request = vec![3, 12];
        request.push((number % 100) as u8);
        if channel.send(&request, &[], PATIENCE).is_err() {
            break;
        }
    }
    is_well(&ground);
}

#[test]
fn a_fork_is_noticed() {
    let ground = Ground::new();
    let node = ground.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    let publisher = topic.publisher().unwrap();
    // In a process with one thread it would be a plain fork; here the child only asks.
    let kinds = crate::ground::in_a_child(|| {
        let refused = [
            node.topic("other", &settings()).err().map(|error| error.kind()),
            publisher.push(&message(1), PATIENCE).err().map(|error| error.kind()),
            subscriber.try_pull().err().map(|error| error.kind()),
        ];
        refused.iter().all(|kind| *kind == Some(pubsub::ErrorKind::Forked))
    });
    assert!(kinds, "the child took itself for its parent");
    publisher.push(&message(2), PATIENCE).unwrap();
    assert_eq!(number_of(&subscriber.pull(PATIENCE).unwrap()), 2);
}
