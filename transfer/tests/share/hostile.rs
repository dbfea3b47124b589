//! Processes that send garbage or false claims, or belong to another user.

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

/// A user other than root.
const NOBODY_UID: u32 = 65_534;

/// None if this process cannot start processes as another user.
fn open_for_others(admission: Admission) -> Option<ServiceFixture> {
    if ipc::Credentials::of_this_process().user != 0 {
        testkit::skip::record(module_path!(), "only root can start processes as another user");
        return None;
    }
    Some(ServiceFixture::open_for(admission))
}

/// The end of every test.
fn check_service(fixture: &ServiceFixture) {
    let client = ShareClient::connect(&fixture.path(), TIMEOUT).unwrap();
    let opened = client.open("numbers", None, TIMEOUT).unwrap();
    check(opened.memory().unwrap(), 1);
}

#[test]
fn garbage_does_not_affect_other_clients() {
    let _alone = alone();
    // Drivers allocate some state at the first use; a service that ended holds no connections.
    check_service(&ServiceFixture::open());
    let fixture = ServiceFixture::open();
    let leak_check = LeakCheck::begin(&fixture.device);
    let silent: Vec<_> =
        (0..5).map(|_| Channel::connect(&fixture.path(), TIMEOUT).unwrap()).collect();
    let file = File::open("/dev/null").unwrap();
    let long = vec![b'x'; 60_000];
    let garbage: [&[u8]; 6] = [
        b"",
        b"\x01",
        b"\x03\x00\x07numbers and more",
        b"GET / HTTP/1.1\r\n\r\n",
        &[0xff; 300],
        &long,
    ];
    for bytes in garbage {
        let channel = Channel::connect(&fixture.path(), TIMEOUT).unwrap();
        // Unexpected descriptors are closed.
        channel.send(bytes, &[file.as_fd(), file.as_fd()], TIMEOUT).unwrap();
        if let Ok(reply) = channel.receive(TIMEOUT) {
            assert_eq!(reply.bytes, [3, 4], "{bytes:?}");
        }
    }
    let start = Instant::now();
    check_service(&fixture);
    assert!(start.elapsed() < Duration::from_secs(5), "delayed by silent clients");
    drop(silent);
    drop(file);
    leak_check.compare(&fixture.device);
}

#[test]
fn longest_idle_connection_is_evicted_for_a_new_one() {
    let _alone = alone();
    let fixture = ServiceFixture::open();
    let client = ShareClient::connect(&fixture.path(), TIMEOUT).unwrap();
    check(client.open("numbers", None, TIMEOUT).unwrap().memory().unwrap(), 1);
    let channels: Vec<_> =
        (0..100).map(|_| Channel::connect(&fixture.path(), TIMEOUT).unwrap()).collect();
    // Served in order, so it is served after all others were accepted.
    let newest = ShareClient::connect(&fixture.path(), TIMEOUT).unwrap();
    check(newest.open("numbers", None, TIMEOUT).unwrap().memory().unwrap(), 1);
    let is_closed = |channel: &&Channel| {
        matches!(channel.receive(Duration::ZERO), Err(ipc::ChannelError::Closed))
    };
    let (first, last) = channels.split_at(85);
    assert_eq!(first.iter().filter(is_closed).count(), 85);
    assert_eq!(last.iter().filter(is_closed).count(), 0);
    // A client whose connection was closed connects again.
    check(client.open("numbers", None, TIMEOUT).unwrap().memory().unwrap(), 1);
    assert_eq!(last.iter().filter(is_closed).count(), 1);
}

#[test]
fn client_that_does_not_read_blocks_no_other() {
    let _alone = alone();
    let mut fixture = ServiceFixture::open();
    let request = b"\x03\x00\x07numbers\x00";
    // Each requests more than it reads, and is disconnected for that.
    let channels: Vec<_> = (0..32)
        .map(|_| {
            let channel = Channel::connect(&fixture.path(), TIMEOUT).unwrap();
            let end = Instant::now() + TIMEOUT;
            while channel.send(request, &[], Duration::from_millis(50)).is_ok() {
                assert!(Instant::now() < end, "the client is never disconnected");
            }
            channel
        })
        .collect();
    let start = Instant::now();
    check_service(&fixture);
    assert!(start.elapsed() < Duration::from_secs(4), "delayed by {:?}", start.elapsed());
    drop(channels);
    let start = Instant::now();
    fixture.service = None;
    assert!(start.elapsed() < Duration::from_secs(4), "delayed by {:?}", start.elapsed());
}

#[test]
fn unadmitted_user_is_refused_and_not_counted() {
    let _alone = alone();
    // Open to others, but not to this user.
    let Some(fixture) = open_for_others(Admission { users: vec![0, 65_533], groups: vec![65_533] })
    else {
        return;
    };
    let mut channels = start("is-not-served", &fixture.path(), &[], Some(NOBODY_UID));
    let end = Instant::now() + Duration::from_secs(1);
    while Instant::now() < end {
        check_service(&fixture);
    }
    channels.finish();
    check_service(&fixture);
}

#[test]
fn admitted_user_is_served() {
    let _alone = alone();
    let own = Admission::own_user();
    let by_user = Admission { users: vec![0, NOBODY_UID], ..own.clone() };
    let Some(fixture) = open_for_others(by_user) else { return };
    start("reads-and-writes", &fixture.path(), &[], Some(NOBODY_UID)).finish();
    check(&fixture.memory, 7);
    // Admitted by a supplementary group.
    let with_group = ["setpriv", "--reuid=65534", "--regid=65534", "--groups=4711,4712"];
    let works = Command::new("setpriv").args(&with_group[1..]).arg("true").status();
    if !works.is_ok_and(|status| status.success()) {
        testkit::skip!("setpriv is missing");
    }
    let by_group = Admission { groups: vec![4712], ..own };
    let fixture = open_for_others(by_group).unwrap();
    start("reads-and-writes", &fixture.path(), &with_group, None).finish();
    check(&fixture.memory, 7);
}

#[test]
fn service_of_another_user_is_trusted_only_on_request() {
    let _alone = alone();
    let Some(fixture) = open_for_others(Admission::own_user()) else { return };
    let directory = fixture.directory().join("other");
    std::fs::create_dir(&directory).unwrap();
    std::fs::set_permissions(&directory, Permissions::from_mode(0o777)).unwrap();
    let path = directory.join("socket");
    let mut service = start("serves", &path, &[], Some(NOBODY_UID));
    let error = ShareClient::connect(&path, TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let error = ShareClient::connect_trusting(&path, &[NOBODY_UID - 1], TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let client = ShareClient::connect_trusting(&path, &[NOBODY_UID], TIMEOUT).unwrap();
    // It listens a moment before it publishes.
    let end = Instant::now() + TIMEOUT;
    let opened = loop {
        match client.open("numbers", None, TIMEOUT) {
            Ok(opened) => break opened,
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    check(opened.memory().unwrap(), 3);
    service.kill();
    let error = client.handle("numbers", TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
}

#[test]
fn unpublished_names_are_unknown() {
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
    check(opened.memory().unwrap(), 1);
    let shared = SharedBuffer::new(&fixture.memory, &tensor()).unwrap();
    assert!(fixture.service().publish("numbers", shared).unwrap().is_none());
    for name in ["", &"x".repeat(256)] {
        let shared = SharedBuffer::new(&fixture.memory, &tensor()).unwrap();
        let error = fixture.service().publish(name, shared).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
    }
    check_service(&fixture);
}

#[test]
fn false_handles_are_refused() {
    let _alone = alone();
    let fixture = ServiceFixture::open();
    let shared = SharedBuffer::new(&fixture.memory, &tensor()).unwrap();
    let opener = Opener::default();
    // Searching for a device starts all drivers, which keep their state.
    assert!(gpu::Device::find(Uuid([9; 16])).is_err());
    let leak_check = LeakCheck::begin(&fixture.device);
    let good = || shared.handle().unwrap();
    let refused = |handle: &Handle| opener.open(handle, None).unwrap_err();

    let mut handle = good();
    handle.metadata.device = Some(Uuid([9; 16]));
    // The named GPU is not seen; the memory is mapped for one that is, if there is one.
    let has_gpu = gpu::Device::count(gpu::Implementation::Cuda).is_ok_and(|count| count > 0);
    let expected = if has_gpu { ErrorKind::WrongMemory } else { ErrorKind::NoSuchDevice };
    assert_eq!(refused(&handle).kind(), expected);

    // Not device memory; then a wrong number of descriptors.
    handle = good();
    handle.descriptors = vec![File::open("/dev/null").unwrap().into()];
    assert_eq!(refused(&handle).kind(), ErrorKind::WrongMemory);
    handle.descriptors.clear();
    assert_eq!(refused(&handle).kind(), ErrorKind::Malformed);

    // False length.
    handle = good();
    handle.metadata.length = 64 * LENGTH;
    handle.metadata.handle_type = HandleType::Descriptors { pieces: vec![64 * LENGTH], offset: 0 };
    assert_eq!(refused(&handle).kind(), ErrorKind::WrongMemory);

    // A tensor beyond its memory, built without decoding.
    handle = good();
    handle.metadata.tensor = Tensor::bytes(LENGTH + 1);
    assert_eq!(refused(&handle).kind(), ErrorKind::OutOfBounds);

    // An invalid legacy handle.
    handle = good();
    handle.descriptors.clear();
    let legacy = gpu::LegacyHandle { bytes: [0x5a; 64], offset: 0, length: LENGTH };
    handle.metadata.handle_type = HandleType::Legacy(legacy);
    let kind = refused(&handle).kind();
    assert!(matches!(kind, ErrorKind::WrongMemory | ErrorKind::Failed), "{kind:?}");
    drop(handle);
    leak_check.compare(&fixture.device);

    // Another memory with the identity of a mapped one.
    let opened = opener.open(&good(), None).unwrap();
    let other = fixture.device.allocate_shared(2 * LENGTH, &[]).unwrap();
    let mut handle = SharedBuffer::new(&other, &tensor()).unwrap().handle().unwrap();
    handle.metadata.identity = shared.metadata().identity;
    assert_eq!(refused(&handle).kind(), ErrorKind::WrongMemory);
    check(opened.memory().unwrap(), 1);
}

#[test]
fn truncated_handles_are_refused() {
    let _alone = alone();
    let fixture = ServiceFixture::open();
    let shared = SharedBuffer::new(&fixture.memory, &tensor()).unwrap();
    let leak_check = LeakCheck::begin(&fixture.device);
    let bytes = shared.metadata().encode();
    let opener = Opener::default();
    let mut other_version = bytes.clone();
    other_version[4] = 2;
    let none: &[&OwnedFd] = &[];
    let handle = shared.handle().unwrap();
    let descriptor = &handle.descriptors[0];
    for (bytes, descriptors, kind) in [
        (&bytes[..40], &[descriptor][..], ErrorKind::Malformed),
        (&bytes[..0], &[descriptor], ErrorKind::Malformed),
        (&bytes[..], none, ErrorKind::Malformed),
        (&bytes[..], &[descriptor, descriptor], ErrorKind::Malformed),
        (&other_version[..], &[descriptor], ErrorKind::VersionMismatch),
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
