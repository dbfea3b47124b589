//! Processes that send garbage, lie, or are somebody else's.

use std::fs::{File, Permissions};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use gpu::Uuid;
use ipc::Channel;
use transfer::{Client, ErrorKind, Handle, Opener, Route, Shared, Tensor};

use crate::house::{Ground, House, LENGTH, PATIENCE, check, tensor};
use crate::other_side::{is_here, start};

/// What every test here ends with.
fn an_honest_one_is_served(house: &House) {
    let client = Client::connect(&house.path(), PATIENCE).unwrap();
    let opened = client.open("numbers", None, PATIENCE).unwrap();
    check(&opened.memory, 1);
}

#[test]
fn garbage_costs_nobody_else_anything() {
    if is_here() {
        return;
    }
    let house = House::open();
    an_honest_one_is_served(&house);
    let ground = Ground::now(&house.device);
    let silent: Vec<_> =
        (0..5).map(|_| Channel::connect(&house.path(), PATIENCE).unwrap()).collect();
    let file = File::open("/dev/null").unwrap();
    let long = vec![b'x'; 60_000];
    let garbage: [&[u8]; 6] =
        [b"", b"FcRQ", b"FcRQ\x02\x00numbers", b"GET / HTTP/1.1\r\n\r\n", &[0xff; 300], &long];
    for bytes in garbage {
        let channel = Channel::connect(&house.path(), PATIENCE).unwrap();
        // Descriptors that nobody asked for are closed.
        channel.send(bytes, &[file.as_fd(), file.as_fd()], PATIENCE).unwrap();
        if let Ok(answer) = channel.receive(PATIENCE) {
            assert_eq!(answer.bytes, b"FcAN\x01\x00\x03", "{bytes:?}");
        }
    }
    assert!(house.service().served().malformed >= 4, "{:?}", house.service().served());
    let start = Instant::now();
    an_honest_one_is_served(&house);
    assert!(start.elapsed() < Duration::from_secs(5), "held up by the silent ones");
    drop(silent);
    drop(file);
    ground.compare(&house.device);
}

#[test]
fn too_many_are_turned_away_and_come_back() {
    if is_here() {
        return;
    }
    let house = House::open();
    let crowd: Vec<_> =
        (0..100).map(|_| Channel::connect(&house.path(), PATIENCE).unwrap()).collect();
    let refused = crowd.iter().filter(|channel| {
        channel.receive(Duration::from_millis(20)).is_ok_and(|answer| answer.bytes[6] == 4)
    });
    assert!(refused.count() >= 30);
    drop(crowd);
    let end = Instant::now() + PATIENCE;
    loop {
        let client = Client::connect(&house.path(), PATIENCE).unwrap();
        match client.open("numbers", None, PATIENCE) {
            Ok(opened) => return check(&opened.memory, 1),
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn another_user_is_not_served_and_does_not_trust() {
    if is_here() {
        return;
    }
    let house = House::open();
    if ipc::Credentials::of_this_process().user != 0 {
        println!("skipped: only root can be somebody else");
        return;
    }
    let nobody = Some(65_534);
    // As the service makes it, others do not even reach the socket; so open it for them.
    std::fs::set_permissions(house.path(), Permissions::from_mode(0o666)).unwrap();
    start("is-not-served", &house.path(), &[], nobody).finish();
    assert_eq!(house.service().served().denied, 1);
    // The other way round: a socket of theirs, which root's processes do not trust.
    an_honest_one_is_served(&house);
}

#[test]
fn names_that_are_not_shared_are_unknown() {
    if is_here() {
        return;
    }
    let house = House::open();
    let client = Client::connect(&house.path(), PATIENCE).unwrap();
    let error = client.handle("letters", PATIENCE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unknown);
    assert!(error.to_string().contains("letters"), "{error}");
    assert_eq!(error.peer(), Some(house.path().display().to_string().as_str()));
    assert_eq!(client.handle("", PATIENCE).unwrap_err().kind(), ErrorKind::Malformed);
    let opened = client.open("numbers", None, PATIENCE).unwrap();
    assert!(house.service().withdraw("numbers").is_some());
    assert_eq!(client.handle("numbers", PATIENCE).unwrap_err().kind(), ErrorKind::Unknown);
    check(&opened.memory, 1);
    let shared = Shared::new(&house.memory, &tensor()).unwrap();
    assert!(house.service().offer("numbers", shared).is_none());
    an_honest_one_is_served(&house);
}

#[test]
fn handles_that_lie_are_found_out() {
    if is_here() {
        return;
    }
    let house = House::open();
    let shared = Shared::new(&house.memory, &tensor()).unwrap();
    let opener = Opener::default();
    // Looking for a device starts every driver there is, which keep what they open.
    assert!(gpu::Device::find(Uuid([9; 16])).is_err());
    let ground = Ground::now(&house.device);
    let good = || shared.handle().unwrap();
    let refused = |handle: &Handle| opener.open(handle, None).unwrap_err();

    let mut handle = good();
    handle.facts.device = Uuid([9; 16]);
    assert_eq!(refused(&handle).kind(), ErrorKind::NoSuchDevice);

    // Not memory at all; then another number of descriptors than was said.
    handle = good();
    handle.descriptors = vec![File::open("/dev/null").unwrap().into()];
    assert_eq!(refused(&handle).kind(), ErrorKind::WrongMemory);
    handle.descriptors.clear();
    assert_eq!(refused(&handle).kind(), ErrorKind::Malformed);

    // Longer than it is.
    handle = good();
    handle.facts.length = 64 * LENGTH;
    handle.facts.route = Route::Descriptors { pieces: vec![64 * LENGTH] };
    assert_eq!(refused(&handle).kind(), ErrorKind::WrongMemory);

    // A tensor beyond its memory, made by hand and not decoded.
    handle = good();
    handle.facts.tensor = Tensor::bytes(LENGTH + 1);
    assert_eq!(refused(&handle).kind(), ErrorKind::OutOfBounds);

    // A legacy handle of nothing.
    handle = good();
    handle.descriptors.clear();
    let legacy = gpu::LegacyHandle { bytes: [0x5a; 64], offset: 0, length: LENGTH };
    handle.facts.route = Route::Legacy(legacy);
    let kind = refused(&handle).kind();
    assert!(matches!(kind, ErrorKind::WrongMemory | ErrorKind::Failed), "{kind:?}");
    drop(handle);
    ground.compare(&house.device);

    // Another memory under the name of one that is mapped.
    let opened = opener.open(&good(), None).unwrap();
    let other = house.device.allocate_shared(2 * LENGTH, &[]).unwrap();
    let mut handle = Shared::new(&other, &tensor()).unwrap().handle().unwrap();
    handle.facts.identity = shared.facts().identity;
    assert_eq!(refused(&handle).kind(), ErrorKind::WrongMemory);
    check(&opened.memory, 1);
}

#[test]
fn handles_that_are_cut_off_are_refused_on_their_way() {
    if is_here() {
        return;
    }
    let house = House::open();
    let shared = Shared::new(&house.memory, &tensor()).unwrap();
    let ground = Ground::now(&house.device);
    let bytes = shared.facts().encode();
    let opener = Opener::default();
    let mut of_another_version = bytes.clone();
    of_another_version[4] = 2;
    let none: &[&OwnedFd] = &[];
    let handle = shared.handle().unwrap();
    let descriptor = &handle.descriptors[0];
    for (bytes, descriptors, kind) in [
        (&bytes[..40], &[descriptor][..], ErrorKind::Malformed),
        (&bytes[..0], &[descriptor], ErrorKind::Malformed),
        (&bytes[..], none, ErrorKind::Malformed),
        (&bytes[..], &[descriptor, descriptor], ErrorKind::Malformed),
        (&of_another_version[..], &[descriptor], ErrorKind::VersionMismatch),
    ] {
        let (one, other) = Channel::pair().unwrap();
        let descriptors: Vec<_> = descriptors.iter().map(|fd| fd.as_fd()).collect();
        one.send(bytes, &descriptors, PATIENCE).unwrap();
        let error = opener.receive(&other, None, PATIENCE).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
    }
    drop(handle);
    ground.compare(&house.device);
}
