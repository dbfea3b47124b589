//! Processes that send garbage, lie, or are somebody else's.

use std::fs::{File, Permissions};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::{Duration, Instant};

use gpu::Uuid;
use ipc::Channel;
use transfer::{
    Admission, ErrorKind, Handle, HandleType, Opener, ShareClient, SharedBuffer, Tensor,
};

use crate::common::{LENGTH, LeakCheck, TIMEOUT, alone, start};
use crate::fixture::{ServiceFixture, check, receive, tensor};

/// Another user than root.
const NOBODY_UID: u32 = 65_534;

/// None where this process cannot start others as somebody else.
fn open_for_others(admission: Admission) -> Option<ServiceFixture> {
    if ipc::Credentials::of_this_process().user != 0 {
        testkit::skip::record(module_path!(), "only root can be somebody else");
        return None;
    }
    Some(ServiceFixture::open_for(admission))
}

/// What every test here ends with.
fn an_honest_one_is_served(fixture: &ServiceFixture) {
    let client = ShareClient::connect(&fixture.path(), TIMEOUT).unwrap();
    let opened = client.open("numbers", None, TIMEOUT).unwrap();
    check(&opened.memory, 1);
}

#[test]
fn garbage_costs_nobody_else_anything() {
    let _alone = alone();
    // The first time a driver keeps things for later; and when a service is gone, it holds
    // no connection any more.
    an_honest_one_is_served(&ServiceFixture::open());
    let fixture = ServiceFixture::open();
    let leak_check = LeakCheck::now(&fixture.device);
    let silent: Vec<_> =
        (0..5).map(|_| Channel::connect(&fixture.path(), TIMEOUT).unwrap()).collect();
    let file = File::open("/dev/null").unwrap();
    let long = vec![b'x'; 60_000];
    let garbage: [&[u8]; 6] =
        [b"", b"\x01", b"\x01\x07numbers and more", b"GET / HTTP/1.1\r\n\r\n", &[0xff; 300], &long];
    for bytes in garbage {
        let channel = Channel::connect(&fixture.path(), TIMEOUT).unwrap();
        // Descriptors that nobody asked for are closed.
        channel.send(bytes, &[file.as_fd(), file.as_fd()], TIMEOUT).unwrap();
        if let Ok(answer) = channel.receive(TIMEOUT) {
            assert_eq!(answer.bytes, [1, 3], "{bytes:?}");
        }
    }
    let start = Instant::now();
    an_honest_one_is_served(&fixture);
    assert!(start.elapsed() < Duration::from_secs(5), "held up by the silent ones");
    drop(silent);
    drop(file);
    leak_check.compare(&fixture.device);
}

#[test]
fn the_idlest_make_room_for_the_newest() {
    let _alone = alone();
    let fixture = ServiceFixture::open();
    let client = ShareClient::connect(&fixture.path(), TIMEOUT).unwrap();
    check(&client.open("numbers", None, TIMEOUT).unwrap().memory, 1);
    let crowd: Vec<_> =
        (0..100).map(|_| Channel::connect(&fixture.path(), TIMEOUT).unwrap()).collect();
    // In turn, so it is served when all of them have been let in.
    let newest = ShareClient::connect(&fixture.path(), TIMEOUT).unwrap();
    check(&newest.open("numbers", None, TIMEOUT).unwrap().memory, 1);
    let is_closed = |channel: &&Channel| {
        matches!(channel.receive(Duration::ZERO), Err(ipc::ChannelError::Closed))
    };
    let (first, last) = crowd.split_at(85);
    assert_eq!(first.iter().filter(is_closed).count(), 85);
    assert_eq!(last.iter().filter(is_closed).count(), 0);
    // One whose connection was taken away makes another.
    check(&client.open("numbers", None, TIMEOUT).unwrap().memory, 1);
    assert_eq!(last.iter().filter(is_closed).count(), 1);
}

#[test]
fn one_that_does_not_read_holds_up_nobody() {
    let _alone = alone();
    let mut fixture = ServiceFixture::open();
    let request = b"\x01\x07numbers";
    // Each asks for more than it takes, and is let go of for that.
    let crowd: Vec<_> = (0..32)
        .map(|_| {
            let channel = Channel::connect(&fixture.path(), TIMEOUT).unwrap();
            let end = Instant::now() + TIMEOUT;
            while channel.send(request, &[], Duration::from_millis(50)).is_ok() {
                assert!(Instant::now() < end, "it is answered for ever");
            }
            channel
        })
        .collect();
    let start = Instant::now();
    an_honest_one_is_served(&fixture);
    assert!(start.elapsed() < Duration::from_secs(4), "held up for {:?}", start.elapsed());
    drop(crowd);
    let start = Instant::now();
    fixture.service = None;
    assert!(start.elapsed() < Duration::from_secs(4), "held up for {:?}", start.elapsed());
}

#[test]
fn another_user_is_not_served_and_holds_no_place() {
    let _alone = alone();
    // Open to others, but not to this one.
    let Some(fixture) = open_for_others(Admission { users: vec![0, 65_533], groups: vec![65_533] })
    else {
        return;
    };
    let mut crowd = start("is-not-served", &fixture.path(), &[], Some(NOBODY_UID));
    let end = Instant::now() + Duration::from_secs(1);
    while Instant::now() < end {
        an_honest_one_is_served(&fixture);
    }
    crowd.finish();
    an_honest_one_is_served(&fixture);
}

#[test]
fn another_user_that_is_admitted_is_served() {
    let _alone = alone();
    let own = Admission::own_user();
    let by_user = Admission { users: vec![0, NOBODY_UID], ..own.clone() };
    let Some(fixture) = open_for_others(by_user) else { return };
    start("reads-and-writes", &fixture.path(), &[], Some(NOBODY_UID)).finish();
    check(&fixture.memory, 7);
    // By one of its groups, which is not its first.
    let with_group = ["setpriv", "--reuid=65534", "--regid=65534", "--groups=4711,4712"];
    let works = Command::new("setpriv").args(&with_group[1..]).arg("true").status();
    if !works.is_ok_and(|status| status.success()) {
        testkit::skip!("no setpriv here");
    }
    let by_group = Admission { groups: vec![4712], ..own };
    let fixture = open_for_others(by_group).unwrap();
    start("reads-and-writes", &fixture.path(), &with_group, None).finish();
    check(&fixture.memory, 7);
}

#[test]
fn another_users_service_is_not_trusted_unless_told_so() {
    let _alone = alone();
    let Some(fixture) = open_for_others(Admission::own_user()) else { return };
    let directory = fixture.directory().join("theirs");
    std::fs::create_dir(&directory).unwrap();
    std::fs::set_permissions(&directory, Permissions::from_mode(0o777)).unwrap();
    let path = directory.join("socket");
    let mut service = start("serves", &path, &[], Some(NOBODY_UID));
    let error = ShareClient::connect(&path, TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let error = ShareClient::connect_trusting(&path, &[NOBODY_UID - 1], TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let client = ShareClient::connect_trusting(&path, &[NOBODY_UID], TIMEOUT).unwrap();
    // It listens a moment before it has something to offer.
    let end = Instant::now() + TIMEOUT;
    let opened = loop {
        match client.open("numbers", None, TIMEOUT) {
            Ok(opened) => break opened,
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    check(&opened.memory, 3);
    service.kill();
    let error = client.handle("numbers", TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
}

#[test]
fn names_that_are_not_shared_are_unknown() {
    let _alone = alone();
    let fixture = ServiceFixture::open();
    let client = ShareClient::connect(&fixture.path(), TIMEOUT).unwrap();
    let error = client.handle("letters", TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unknown);
    assert!(error.to_string().contains("letters"), "{error}");
    assert_eq!(error.peer(), Some(fixture.path().display().to_string().as_str()));
    assert_eq!(client.handle("", TIMEOUT).unwrap_err().kind(), ErrorKind::Malformed);
    let opened = client.open("numbers", None, TIMEOUT).unwrap();
    assert!(fixture.service().withdraw("numbers").unwrap().is_some());
    assert_eq!(client.handle("numbers", TIMEOUT).unwrap_err().kind(), ErrorKind::Unknown);
    check(&opened.memory, 1);
    let shared = SharedBuffer::new(&fixture.memory, &tensor()).unwrap();
    assert!(fixture.service().publish("numbers", shared).unwrap().is_none());
    for name in ["", &"x".repeat(256)] {
        let shared = SharedBuffer::new(&fixture.memory, &tensor()).unwrap();
        let error = fixture.service().publish(name, shared).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
    }
    an_honest_one_is_served(&fixture);
}

#[test]
fn handles_that_lie_are_found_out() {
    let _alone = alone();
    let fixture = ServiceFixture::open();
    let shared = SharedBuffer::new(&fixture.memory, &tensor()).unwrap();
    let opener = Opener::default();
    // Looking for a device starts every driver there is, which keep what they open.
    assert!(gpu::Device::find(Uuid([9; 16])).is_err());
    let leak_check = LeakCheck::now(&fixture.device);
    let good = || shared.handle().unwrap();
    let refused = |handle: &Handle| opener.open(handle, None).unwrap_err();

    let mut handle = good();
    handle.metadata.device = Uuid([9; 16]);
    assert_eq!(refused(&handle).kind(), ErrorKind::NoSuchDevice);

    // Not memory at all; then another number of descriptors than was said.
    handle = good();
    handle.descriptors = vec![File::open("/dev/null").unwrap().into()];
    assert_eq!(refused(&handle).kind(), ErrorKind::WrongMemory);
    handle.descriptors.clear();
    assert_eq!(refused(&handle).kind(), ErrorKind::Malformed);

    // Longer than it is.
    handle = good();
    handle.metadata.length = 64 * LENGTH;
    handle.metadata.handle_type = HandleType::Descriptors { pieces: vec![64 * LENGTH] };
    assert_eq!(refused(&handle).kind(), ErrorKind::WrongMemory);

    // A tensor beyond its memory, made by hand and not decoded.
    handle = good();
    handle.metadata.tensor = Tensor::bytes(LENGTH + 1);
    assert_eq!(refused(&handle).kind(), ErrorKind::OutOfBounds);

    // A legacy handle of nothing.
    handle = good();
    handle.descriptors.clear();
    let legacy = gpu::LegacyHandle { bytes: [0x5a; 64], offset: 0, length: LENGTH };
    handle.metadata.handle_type = HandleType::Legacy(legacy);
    let kind = refused(&handle).kind();
    assert!(matches!(kind, ErrorKind::WrongMemory | ErrorKind::Failed), "{kind:?}");
    drop(handle);
    leak_check.compare(&fixture.device);

    // Another memory under the name of one that is mapped.
    let opened = opener.open(&good(), None).unwrap();
    let other = fixture.device.allocate_shared(2 * LENGTH, &[]).unwrap();
    let mut handle = SharedBuffer::new(&other, &tensor()).unwrap().handle().unwrap();
    handle.metadata.identity = shared.metadata().identity;
    assert_eq!(refused(&handle).kind(), ErrorKind::WrongMemory);
    check(&opened.memory, 1);
}

#[test]
fn handles_that_are_cut_off_are_refused_on_their_way() {
    let _alone = alone();
    let fixture = ServiceFixture::open();
    let shared = SharedBuffer::new(&fixture.memory, &tensor()).unwrap();
    let leak_check = LeakCheck::now(&fixture.device);
    let bytes = shared.metadata().encode();
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
        one.send(bytes, &descriptors, TIMEOUT).unwrap();
        let error = receive(&opener, &other).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
    }
    drop(handle);
    leak_check.compare(&fixture.device);
}
