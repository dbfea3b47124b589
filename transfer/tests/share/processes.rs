//! Honest processes.
#![allow(unsafe_code)]

use std::process::{Command, Stdio};
use std::sync::atomic::Ordering::{Acquire, Release};

use gpu::{Pool, stand_in};
use ipc::{Channel, ChannelListener, Layout, Segment, Words};
use transfer::{Client, ErrorKind, Opener, Shared, Tensor};

use crate::house::{Ground, House, LENGTH, PATIENCE, check, device, fill, numbers, peer, tensor};
use crate::other_side::{is_here, start};

#[test]
fn another_process_reads_and_writes_what_is_shared() {
    if is_here() {
        return;
    }
    let house = House::open();
    start("reads-and-writes", &house.path(), &[], None).finish();
    check(&house.memory, 7);
}

#[test]
fn so_does_one_in_other_namespaces() {
    if is_here() {
        return;
    }
    // With a /proc of their own, as containers have: CUDA does not start without.
    let unshare =
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--ipc", "--net"];
    let works =
        Command::new("unshare").args(&unshare[1..]).arg("true").stderr(Stdio::null()).status();
    if !works.is_ok_and(|status| status.success()) {
        println!("skipped: no namespaces can be made here");
        return;
    }
    let house = House::open();
    start("reads-and-writes", &house.path(), &unshare, None).finish();
    check(&house.memory, 7);
}

#[test]
fn memory_stays_when_its_maker_is_killed() {
    if is_here() {
        return;
    }
    let house = House::open();
    let path = house.directory().join("theirs");
    let listener = ChannelListener::bind(&path).unwrap();
    let other = start("sends", &path, &[], None);
    let channel = listener.accept(PATIENCE).unwrap();
    let opened = Opener::default().receive(&channel, None, PATIENCE).unwrap();
    other.kill();
    check(&opened.memory, 3);
    let error = Opener::default().receive(&channel, None, PATIENCE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
}

#[test]
fn plain_memory_is_shared_where_the_device_can() {
    if is_here() {
        return;
    }
    let house = House::open();
    if !house.device.properties().handle_types.legacy {
        let memory = house.device.allocate(LENGTH).unwrap();
        let error = Shared::new(&memory, &tensor()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Failed, "{error}");
        println!("skipped: {} has no legacy handles", house.device.name());
        return;
    }
    let path = house.directory().join("theirs");
    let listener = ChannelListener::bind(&path).unwrap();
    let other = start("sends-plain", &path, &[], None);
    let channel = listener.accept(PATIENCE).unwrap();
    let opened = Opener::default().receive(&channel, None, PATIENCE).unwrap();
    check(&opened.memory, 3);
    drop(opened);
    drop(channel);
    other.finish();
    assert_eq!(gpu::open_legacy_handles(), 0);
}

#[test]
fn a_memory_is_mapped_once() {
    if is_here() {
        return;
    }
    let house = House::open();
    let shared = Shared::new(&house.memory, &tensor()).unwrap();
    let opener = Opener::default();
    let first = opener.open(&shared.handle().unwrap(), None).unwrap();
    let ground = Ground::now(&house.device);
    let again: Vec<_> =
        (0..10).map(|_| opener.open(&shared.handle().unwrap(), None).unwrap()).collect();
    assert!(again.iter().all(|opened| opened.memory.address() == first.memory.address()));
    assert_eq!(ground, Ground::now(&house.device), "nothing more is mapped");
    // Another tensor in the same memory is no other mapping.
    let mut handle = shared.handle().unwrap();
    handle.facts.tensor = Tensor::bytes(100);
    let bytes = opener.open(&handle, None).unwrap();
    assert_eq!((bytes.memory.address(), bytes.slice().length()), (first.memory.address(), 100));
    // Gone when the last user goes, and there again when somebody wants it.
    drop((again, first, bytes));
    let opened = opener.open(&shared.handle().unwrap(), None).unwrap();
    check(&opened.memory, 1);
}

#[test]
fn a_segment_is_copied_from_and_to() {
    if is_here() {
        return;
    }
    let device = device();
    let segment = Segment::create(Layout::new("test", 1), LENGTH as usize).unwrap();
    let pinned = transfer::pin(&segment, &device).unwrap();
    assert!(transfer::pin(&segment, &device).is_err(), "twice");
    let memory = device.allocate(pinned.length()).unwrap();
    fill(&memory, 1);
    let stream = device.stream().unwrap();
    stream.copy(&pinned.whole(), &memory.whole()).unwrap();
    stream.synchronize(PATIENCE).unwrap();
    // As the words of the segment are numbered: two to each.
    let words = segment.words();
    for at in [0, 1, words.count() - 1] {
        let first = 1 + 2 * at as u64;
        assert_eq!(words.load(at, Acquire), first | (first + 1) << 32);
    }
    words.store(3, 0, Release);
    stream.copy(&memory.whole(), &pinned.whole()).unwrap();
    let mut bytes = [1; 8];
    stream.download(&memory.slice(24, 8).unwrap(), &mut bytes, PATIENCE).unwrap();
    assert_eq!(bytes, [0; 8]);
}

#[test]
fn a_pool_is_shared_with_all_its_pieces() {
    if is_here() {
        return;
    }
    let device = device();
    let granule = device.properties().granularity;
    let pool = Pool::new(&device, 8 * granule, &[]).unwrap();
    for _ in 0..3 {
        pool.grow(2 * granule).unwrap();
    }
    let bytes = numbers(pool.length(), 5);
    let stream = device.stream().unwrap();
    stream.upload(&pool.memory().whole(), &bytes, PATIENCE).unwrap();
    let shared = Shared::new(pool.memory(), &Tensor::bytes(pool.length())).unwrap();
    let (one, other) = Channel::pair().unwrap();
    shared.send(&one, PATIENCE).unwrap();
    let opened = Opener::default().receive(&other, None, PATIENCE).unwrap();
    let sum = stream.checksum(&opened.slice(), PATIENCE).unwrap();
    assert_eq!(sum, gpu::checksum(&bytes));
}

#[test]
fn devices_that_do_not_reach_each_other_are_told_apart() {
    if is_here() {
        return;
    }
    let device = device();
    let Some(peer) = peer(&device).filter(|_| device.name().to_string().starts_with("stand-in"))
    else {
        println!("skipped: these devices cannot be kept apart");
        return;
    };
    let memory = device.allocate_shared(4096, &[]).unwrap();
    let shared = Shared::new(&memory, &Tensor::bytes(4096)).unwrap();
    let apart = stand_in::Behaviour { are_peers: false, ..stand_in::Behaviour::default() };
    stand_in::behave(1, apart);
    let error = Opener::default().open(&shared.handle().unwrap(), Some(&peer)).unwrap_err();
    stand_in::behave(1, stand_in::Behaviour::default());
    assert_eq!(error.kind(), ErrorKind::NoPeerAccess, "{error}");
}

#[test]
fn handles_say_that_the_process_forked() {
    if is_here() {
        return;
    }
    let house = House::open();
    let shared = Shared::new(&house.memory, &tensor()).unwrap();
    let handle = shared.handle().unwrap();
    let opener = Opener::default();
    let (one, _other) = Channel::pair().unwrap();
    // SAFETY: the child asks handles, and leaves without running anybody's clean-up.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let is_forked = |result: transfer::Result<()>| {
            result.is_err_and(|error| error.kind() == ErrorKind::Forked)
        };
        let all = is_forked(shared.handle().map(drop))
            && is_forked(shared.send(&one, PATIENCE))
            && is_forked(opener.open(&handle, None).map(drop));
        // SAFETY: ends this process, at once.
        unsafe { libc::_exit(i32::from(!all)) };
    }
    let mut status = 0;
    // SAFETY: our child, one valid number.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "not every handle said so");
    assert!(opener.open(&handle, None).is_ok(), "the parent's are as good as before");
}

#[test]
fn nothing_is_left_behind() {
    if is_here() {
        return;
    }
    let device = device();
    let round = || {
        let house = House::open();
        start("reads-and-writes", &house.path(), &[], None).finish();
        let client = Client::connect(&house.path(), PATIENCE).unwrap();
        let opened = client.open("numbers", None, PATIENCE).unwrap();
        fill(&opened.memory, 2);
        check(&house.memory, 2);
    };
    // The first time a driver keeps things for later.
    round();
    let ground = Ground::now(&device);
    (0..3).for_each(|_| round());
    ground.compare(&device);
}
