//! Regular processes.
#![allow(unsafe_code)]

use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering::{Acquire, Release};

use gpu::emulated;
use ipc::{Channel, ChannelListener, Layout, Segment, Words};
use transfer::{Admission, ErrorKind, Opener, ShareClient, ShareService, SharedBuffer, Tensor};

use crate::common::{LENGTH, LeakCheck, TIMEOUT, alone, device, next_device, numbers, start};
use crate::fixture::{ServiceFixture, check, fill, receive, send, tensor};

#[test]
fn another_process_reads_and_writes_shared_memory() {
    let _alone = alone();
    let fixture = ServiceFixture::open();
    start("reads-and-writes", &fixture.path(), &[], None).finish();
    check(&fixture.memory, 7);
}

/// As with `CUDA_VISIBLE_DEVICES`: the other process sees another device, or none.
#[test]
fn process_that_does_not_see_the_device_uses_its_memory() {
    let _alone = alone();
    let fixture = ServiceFixture::open();
    let is_emulated = fixture.device.name().implementation == gpu::Implementation::Emulated;
    if !is_emulated && std::env::var_os("TEST_PEER_DEVICES").is_none() {
        testkit::skip!("the other process sees the same devices; gpu-tests hides others");
    }
    start("sees-another-device", &fixture.path(), &[], None).finish();
    check(&fixture.memory, 7);
    if is_emulated {
        start("sees-no-device", &fixture.path(), &[], None).finish();
    }
}

/// With their own /proc, as containers have: CUDA does not start without.
const UNSHARE: [&str; 8] =
    ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--ipc", "--net"];

fn has_namespaces() -> bool {
    let works =
        Command::new("unshare").args(&UNSHARE[1..]).arg("true").stderr(Stdio::null()).status();
    let has_them = works.is_ok_and(|status| status.success());
    if !has_them {
        testkit::skip::record(module_path!(), "namespaces cannot be created here");
    }
    has_them
}

#[test]
fn process_in_other_namespaces_reads_and_writes_shared_memory() {
    let _alone = alone();
    if !has_namespaces() {
        return;
    }
    let fixture = ServiceFixture::open();
    start("reads-and-writes", &fixture.path(), &UNSHARE, None).finish();
    check(&fixture.memory, 7);
}

/// Both have process id 1, as in two containers. The driver recognises its own legacy handles by
/// the id.
#[test]
fn processes_with_the_same_id_share_memory() {
    let _alone = alone();
    if !has_namespaces() {
        return;
    }
    let fixture = ServiceFixture::open();
    let has_legacy = fixture.device.properties().handle_types.legacy;
    for role in ["serves-as-number-one", "serves-plain-as-number-one"] {
        if role.contains("plain") && !has_legacy {
            let reason = format!("{} has no legacy handles", fixture.device.name());
            testkit::skip::record(module_path!(), &reason);
            continue;
        }
        let path = fixture.directory().join(role);
        let mut other = start(role, &path, &UNSHARE, None);
        start("reads-as-number-one", &path, &UNSHARE, None).finish();
        other.kill();
    }
}

#[test]
fn memory_survives_the_kill_of_its_owner() {
    let _alone = alone();
    let fixture = ServiceFixture::open();
    let path = fixture.directory().join("other");
    let listener = ChannelListener::bind(&path).unwrap();
    let mut other = start("sends", &path, &[], None);
    let channel = listener.accept(TIMEOUT).unwrap();
    let opened = receive(&Opener::default(), &channel).unwrap();
    other.kill();
    check(opened.memory().unwrap(), 3);
    assert!(matches!(channel.receive(TIMEOUT), Err(ipc::ChannelError::Closed)));
}

#[test]
fn cuda_malloc_memory_is_shared_if_the_device_exports_it() {
    let _alone = alone();
    let fixture = ServiceFixture::open();
    if !fixture.device.properties().handle_types.legacy {
        let memory = fixture.device.allocate(LENGTH).unwrap();
        let error = SharedBuffer::new(&memory, &tensor()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Failed, "{error}");
        testkit::skip!("{} has no legacy handles", fixture.device.name());
    }
    let path = fixture.directory().join("other");
    let listener = ChannelListener::bind(&path).unwrap();
    let mut other = start("sends-plain", &path, &[], None);
    let channel = listener.accept(TIMEOUT).unwrap();
    let opened = receive(&Opener::default(), &channel).unwrap();
    check(opened.memory().unwrap(), 3);
    drop(opened);
    drop(channel);
    other.finish();
    assert_eq!(gpu::open_legacy_handles(), 0);
}

#[test]
fn memory_is_mapped_once() {
    let _alone = alone();
    let fixture = ServiceFixture::open();
    let shared = SharedBuffer::new(&fixture.memory, &tensor()).unwrap();
    let opener = Opener::default();
    // Drivers allocate some state at the first use.
    drop(opener.open(&shared.handle().unwrap(), None).unwrap());
    let before = LeakCheck::begin(&fixture.device);
    let first = opener.open(&shared.handle().unwrap(), None).unwrap();
    let leak_check = LeakCheck::begin(&fixture.device);
    let again: Vec<_> =
        (0..10).map(|_| opener.open(&shared.handle().unwrap(), None).unwrap()).collect();
    assert!(
        again
            .iter()
            .all(|opened| opened.memory().unwrap().address() == first.memory().unwrap().address())
    );
    // Nothing more is mapped.
    leak_check.compare(&fixture.device);
    // Another tensor in the same memory shares the mapping.
    let mut handle = shared.handle().unwrap();
    handle.metadata.tensor = Tensor::bytes(100);
    let bytes = opener.open(&handle, None).unwrap();
    assert_eq!(
        (bytes.memory().unwrap().address(), bytes.slice().unwrap().length()),
        (first.memory().unwrap().address(), 100)
    );
    // Unmapped with its last user, and mapped again on request.
    drop((again, first, bytes, handle));
    before.compare(&fixture.device);
    let opened = opener.open(&shared.handle().unwrap(), None).unwrap();
    check(opened.memory().unwrap(), 1);
}

#[test]
fn clients_of_one_process_map_a_memory_once() {
    let _alone = alone();
    let fixture = ServiceFixture::open();
    let connect = || ShareClient::connect(&fixture.path(), TIMEOUT).unwrap();
    let open = |client: &ShareClient| client.open("numbers", None, TIMEOUT).unwrap();
    let (one, other) = (connect(), connect());
    let address = open(&one).memory().unwrap().clone();
    assert_eq!(open(&other).memory().unwrap().address(), address.address());
    let handle = connect().handle("numbers", TIMEOUT).unwrap();
    let elsewhere = Opener::default().open(&handle, None).unwrap().memory().unwrap().clone();
    assert_ne!(elsewhere.address(), address.address());
    check(&elsewhere, 1);
}

#[test]
fn threads_share_a_client() {
    let _alone = alone();
    let fixture = ServiceFixture::open();
    let publish = |name: &str, length| {
        let shared = SharedBuffer::new(&fixture.memory, &Tensor::bytes(length)).unwrap();
        fixture.service().publish(name, shared).unwrap();
    };
    (1..5).for_each(|number| publish(&number.to_string(), number));
    let client = ShareClient::connect(&fixture.path(), TIMEOUT).unwrap();
    std::thread::scope(|scope| {
        for number in 1..5 {
            let client = &client;
            scope.spawn(move || {
                for _ in 0..100 {
                    let handle = client.handle(&number.to_string(), TIMEOUT).unwrap();
                    assert_eq!(handle.metadata.tensor, Tensor::bytes(number));
                }
            });
        }
    });
}

/// The service limits the connections of a user.
#[test]
fn more_threads_than_connections_share_a_client() {
    let _alone = alone();
    let fixture = ServiceFixture::open();
    let client = ShareClient::connect(&fixture.path(), TIMEOUT).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..32 {
            scope.spawn(|| {
                for _ in 0..100 {
                    let handle = client.handle("numbers", TIMEOUT).unwrap();
                    assert_eq!(handle.metadata.tensor, tensor());
                }
            });
        }
    });
}

#[test]
fn client_reconnects_to_a_restarted_service() {
    let _alone = alone();
    let mut fixture = ServiceFixture::open();
    let client = ShareClient::connect(&fixture.path(), TIMEOUT).unwrap();
    client.handle("numbers", TIMEOUT).unwrap();
    fixture.service = None;
    let error = client.handle("numbers", TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    let service = ShareService::start(&fixture.path(), Admission::own_user()).unwrap();
    service.publish("numbers", SharedBuffer::new(&fixture.memory, &tensor()).unwrap()).unwrap();
    check(client.open("numbers", None, TIMEOUT).unwrap().memory().unwrap(), 1);
}

#[test]
fn device_copies_from_and_to_a_segment() {
    let _alone = alone();
    let device = device();
    let segment = Segment::create(Layout::new("test", 1), LENGTH as usize).unwrap();
    let pinned = transfer::pin(&segment, &device).unwrap();
    assert!(transfer::pin(&segment, &device).is_err(), "twice");
    let memory = device.allocate(pinned.length()).unwrap();
    fill(&memory, 1);
    let stream = device.stream().unwrap();
    stream.copy(&pinned.whole(), &memory.whole()).unwrap();
    stream.synchronize(TIMEOUT).unwrap();
    // Each word of the segment has two numbers.
    let words = segment.words();
    for at in [0, 1, words.count() - 1] {
        let first = 1 + 2 * at as u64;
        assert_eq!(words.load(at, Acquire), first | (first + 1) << 32);
    }
    words.store(3, 0, Release);
    stream.copy(&memory.whole(), &pinned.whole()).unwrap();
    let mut bytes = [1; 8];
    stream.download(&memory.slice(24, 8).unwrap(), &mut bytes, TIMEOUT).unwrap();
    assert_eq!(bytes, [0; 8]);
}

#[test]
fn memory_in_pieces_is_shared_completely() {
    let _alone = alone();
    let device = device();
    let granule = device.properties().granularity;
    let memory = device.allocate_pieces(&[2 * granule; 3]).unwrap();
    let bytes = numbers(memory.length(), 5);
    let stream = device.stream().unwrap();
    stream.upload(&memory.whole(), &bytes, TIMEOUT).unwrap();
    let shared = SharedBuffer::new(&memory, &Tensor::bytes(memory.length())).unwrap();
    let (one, other) = Channel::pair().unwrap();
    send(&shared, &one).unwrap();
    let opened = receive(&Opener::default(), &other).unwrap();
    let sum = stream.checksum(&opened.slice().unwrap(), TIMEOUT).unwrap();
    assert_eq!(sum, gpu::checksum(&bytes));
}

#[test]
fn growing_memory_is_shared_with_the_length_of_its_pieces() {
    let _alone = alone();
    let device = device();
    let granule = device.properties().granularity;
    let (piece, length) =
        device.allocate_shared(granule, &[]).and_then(|piece| piece.export_piece(0)).unwrap();
    let importer = device.importer(32 * granule).unwrap();
    let grow = || importer.add(piece.as_fd(), length);
    grow().unwrap();
    if importer.memory().export_piece(0).is_err() {
        testkit::skip!("this device does not export imported memory");
    }
    std::thread::scope(|scope| {
        let growing = scope.spawn(|| while grow().is_ok() {});
        loop {
            let is_last = growing.is_finished();
            let shared = SharedBuffer::new(importer.memory(), &Tensor::bytes(granule)).unwrap();
            let bytes = shared.metadata().encode();
            assert_eq!(transfer::HandleMetadata::decode(&bytes).unwrap(), *shared.metadata());
            if is_last {
                assert_eq!(shared.metadata().length, 32 * granule);
                return;
            }
        }
    });
}

#[test]
fn opening_without_peer_access_fails() {
    let _alone = alone();
    let device = device();
    let Some(peer) =
        next_device(&device).filter(|_| device.name().to_string().starts_with("emulated"))
    else {
        testkit::skip!("peer access of these devices cannot be disabled");
    };
    let memory = device.allocate_shared(4096, &[]).unwrap();
    let shared = SharedBuffer::new(&memory, &Tensor::bytes(4096)).unwrap();
    let separate = emulated::FaultConfig { are_peers: false, ..emulated::FaultConfig::default() };
    emulated::configure_faults(1, separate);
    let error = Opener::default().open(&shared.handle().unwrap(), Some(&peer)).unwrap_err();
    emulated::configure_faults(1, emulated::FaultConfig::default());
    assert_eq!(error.kind(), ErrorKind::NoPeerAccess, "{error}");
}

#[test]
fn handles_fail_in_a_forked_process() {
    let _alone = alone();
    let mut fixture = ServiceFixture::open();
    let shared = SharedBuffer::new(&fixture.memory, &tensor()).unwrap();
    let handle = shared.handle().unwrap();
    let opener = Opener::default();
    let (one, _other) = Channel::pair().unwrap();
    let client = ShareClient::connect(&fixture.path(), TIMEOUT).unwrap();
    client.handle("numbers", TIMEOUT).unwrap();
    let more = SharedBuffer::new(&fixture.memory, &tensor()).unwrap();
    // SAFETY: the child uses handles, and exits without running destructors.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let is_forked = |result: transfer::Result<()>| {
            result.is_err_and(|error| error.kind() == ErrorKind::Forked)
        };
        let all = is_forked(shared.handle().map(drop))
            && is_forked(send(&shared, &one))
            && is_forked(opener.open(&handle, None).map(drop))
            && is_forked(client.handle("numbers", TIMEOUT).map(drop))
            && is_forked(fixture.service().withdraw("numbers").map(drop))
            && is_forked(fixture.service().publish("more", more).map(drop));
        let service = AssertUnwindSafe(|| drop(fixture.service.take()));
        let all = all && catch_unwind(service).is_ok();
        // SAFETY: ends this process, at once.
        unsafe { libc::_exit(i32::from(!all)) };
    }
    let mut status = 0;
    // SAFETY: a child of this process and a valid pointer.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "not every handle failed with Forked");
    assert!(opener.open(&handle, None).is_ok(), "the parent's opener fails");
    check(client.open("numbers", None, TIMEOUT).unwrap().memory().unwrap(), 1);
}

/// An infinite timeout.
#[test]
fn timeouts_may_be_infinite() {
    const EVER: std::time::Duration = std::time::Duration::MAX;
    let _alone = alone();
    let fixture = ServiceFixture::open();
    let client = ShareClient::connect(&fixture.path(), EVER).unwrap();
    client.handle("numbers", EVER).unwrap();
    check(client.open("numbers", None, EVER).unwrap().memory().unwrap(), 1);
}

#[test]
fn sharing_leaks_nothing() {
    let _alone = alone();
    let device = device();
    let round = || {
        let fixture = ServiceFixture::open();
        start("reads-and-writes", &fixture.path(), &[], None).finish();
        let client = ShareClient::connect(&fixture.path(), TIMEOUT).unwrap();
        let opened = client.open("numbers", None, TIMEOUT).unwrap();
        fill(opened.memory().unwrap(), 2);
        check(&fixture.memory, 2);
    };
    // Drivers allocate some state at the first use.
    round();
    let leak_check = LeakCheck::begin(&device);
    (0..3).for_each(|_| round());
    leak_check.compare(&device);
}
