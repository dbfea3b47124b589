//! Memory that is shared by tokens, and the memory that a service holds for its clients.
#![allow(unsafe_code)]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gpu::Device;
use ipc::Channel;
use transfer::{
    Buffer, ElementType, ErrorKind, HostBuffer, OpenedBuffer, Opener, Rights, ShareClient,
    SharedBuffer, Tensor,
};

use crate::common::{ChildProcess, LENGTH, LeakCheck, TIMEOUT, alone, device, numbers, start};
use crate::fixture::{ServiceFixture, check, tensor};

struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let name = format!("fabricast-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// Another process that shares memory, and the token for everyone.
    fn start(&self, role: &str) -> (ChildProcess, Vec<u8>) {
        let path = self.0.join("token");
        let child = start(role, &path, &[], None);
        let end = Instant::now() + TIMEOUT;
        while !path.exists() {
            assert!(Instant::now() < end, "no token");
            std::thread::sleep(Duration::from_millis(5));
        }
        (child, std::fs::read(path).unwrap())
    }

    fn open(&self, token: &[u8]) -> transfer::Result<OpenedBuffer> {
        transfer::open(token, &self.0, None, TIMEOUT)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[track_caller]
fn check_host(opened: &OpenedBuffer, first: u32) {
    let Buffer::Host(host) = opened.buffer() else { panic!("{opened:?}") };
    let mut bytes = vec![0; LENGTH as usize];
    host.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, numbers(LENGTH, first));
}

#[track_caller]
fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn host_memory_of_another_process_is_opened_by_its_token() {
    let _alone = alone();
    let directory = Directory::new("token");
    let (mut other, token) = directory.start("shares");
    let opened = directory.open(&token).unwrap();
    assert_eq!(opened.tensor(), &tensor());
    check_host(&opened, 3);
    let Buffer::Host(host) = opened.buffer() else { panic!() };
    host.write(0, &numbers(LENGTH, 9)).unwrap();
    check_host(&directory.open(&token).unwrap(), 9);
    // For one receiver.
    let once = std::fs::read(directory.0.join("once")).unwrap();
    check_host(&directory.open(&once).unwrap(), 3);
    let error = directory.open(&once).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
    other.kill();
    check_host(&opened, 9);
    // The memory is still open here.
    check_host(&directory.open(&token).unwrap(), 9);
    drop(opened);
    let error = directory.open(&token).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    assert!(error.to_string().contains("has ended"), "{error}");
    // The next process in the directory removes the socket of the killed one.
    let own = transfer::share(&directory.0, host_share()).unwrap();
    let sockets = directory.0.read_dir().unwrap().flatten();
    let is_socket = |name: &str| name.starts_with("share-");
    let names: Vec<_> = sockets
        .map(|it| it.file_name().into_string().unwrap())
        .filter(|it| is_socket(it))
        .collect();
    assert_eq!(names.len(), 1, "{names:?}");
    // Also in the same process.
    assert_eq!(directory.open(own.token()).unwrap().tensor(), &tensor());
    let token = own.token().to_owned();
    drop(own);
    let error = directory.open(&token).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
}

fn host_share() -> SharedBuffer {
    SharedBuffer::new(HostBuffer::new(LENGTH).unwrap(), &tensor()).unwrap()
}

/// A receiver that opens memory by messages of its own, and has not read the reply.
fn send_request(directory: &Path, token: &[u8]) -> Channel {
    let digits = |bytes: &[u8]| -> String { bytes.iter().map(|it| format!("{it:02x}")).collect() };
    let socket = directory.join(format!("share-{}", digits(&token[8..24])));
    let channel = Channel::connect(&socket, TIMEOUT).unwrap();
    let name = digits(&token[24..40]);
    channel.send(&[b"\x03\x00\x20", name.as_bytes(), b"\x00"].concat(), &[], TIMEOUT).unwrap();
    channel
}

/// One that has read the reply, and has not mapped the memory.
fn request(directory: &Path, token: &[u8]) -> Channel {
    let channel = send_request(directory, token);
    let reply = channel.receive(TIMEOUT).unwrap();
    assert_eq!(reply.bytes[..2], *b"\x03\x00", "a handle");
    channel
}

#[test]
fn memory_for_one_receiver_is_available_again_only_without_a_use() {
    let _alone = alone();
    let directory = Directory::new("token-one");
    let (shared, is_free) = watched(4096);
    let once = transfer::share(&directory.0, shared).unwrap().for_one_receiver().unwrap();
    let failing = request(&directory.0, &once);
    assert_eq!(directory.open(&once).unwrap_err().kind(), ErrorKind::Unknown);
    // Released without a use.
    failing.send(b"\x03\x02\x00\x00", &[], TIMEOUT).unwrap();
    wait_until("it is not available again", || directory.open(&once).is_ok());
    // The last opening was a use.
    wait_until("it is still held", &is_free);
    assert_eq!(directory.open(&once).unwrap_err().kind(), ErrorKind::Unknown);
    // The receiver ends before it says anything.
    let (shared, is_free) = watched(4096);
    let once = transfer::share(&directory.0, shared).unwrap().for_one_receiver().unwrap();
    drop(request(&directory.0, &once));
    wait_until("it is held for a receiver that has ended", is_free);
    assert_eq!(directory.open(&once).unwrap_err().kind(), ErrorKind::Unknown);
}

/// A receiver whose wait was ended has not read the reply when it gives the memory back and ends.
#[test]
fn memory_for_one_receiver_is_given_back_with_an_unread_reply() {
    let _alone = alone();
    let directory = Directory::new("token-unread");
    for _ in 0..30 {
        let once = transfer::share(&directory.0, host_share()).unwrap().for_one_receiver().unwrap();
        let ended = send_request(&directory.0, &once);
        std::thread::sleep(Duration::from_millis(2));
        ended.send(b"\x03\x02\x00\x00", &[], TIMEOUT).unwrap();
        ended.end();
        drop(ended);
        wait_until("it is not available again", || directory.open(&once).is_ok());
    }
}

#[test]
fn withdrawn_memory_is_not_given_back() {
    let _alone = alone();
    let directory = Directory::new("token-withdrawn");
    let (shared, is_free) = watched(4096);
    let share = transfer::share(&directory.0, shared).unwrap();
    share.limit_to_one().unwrap();
    let token = share.token().to_vec();
    let receiver = request(&directory.0, &token);
    drop(share);
    receiver.send(b"\x03\x02\x00\x00", &[], TIMEOUT).unwrap();
    wait_until("it is still held", is_free);
    assert_eq!(directory.open(&token).unwrap_err().kind(), ErrorKind::Unknown);
    assert!(transfer::wait_for_receivers(Duration::from_secs(10), &|| true));
}

#[test]
fn end_waits_for_the_receivers_of_what_was_left() {
    let _alone = alone();
    let directory = Directory::new("token-wait");
    let shared = host_share();
    let once = transfer::share(&directory.0, shared).unwrap().for_one_receiver().unwrap();
    assert!(!transfer::wait_for_receivers(Duration::from_millis(10), &|| true));
    assert!(!transfer::wait_for_receivers(TIMEOUT, &|| false));
    let opened = directory.open(&once).unwrap();
    assert!(transfer::wait_for_receivers(TIMEOUT, &|| true));
    drop(opened);
}

/// The share's token is sent before the memory is left to the receiver, since that may fail.
#[test]
fn limited_memory_ends_with_its_share_unless_it_is_left() {
    let _alone = alone();
    let directory = Directory::new("token-limited");
    let (shared, is_free) = watched(4096);
    let share = transfer::share(&directory.0, shared).unwrap();
    share.limit_to_one().unwrap();
    let opened = directory.open(share.token()).unwrap();
    assert_eq!(directory.open(share.token()).unwrap_err().kind(), ErrorKind::Unknown);
    share.leave();
    drop(opened);
    wait_until("it is still held", is_free);
    let (shared, is_free) = watched(4096);
    let share = transfer::share(&directory.0, shared).unwrap();
    share.limit_to_one().unwrap();
    let token = share.token().to_vec();
    drop(share);
    assert!(is_free());
    assert_eq!(directory.open(&token).unwrap_err().kind(), ErrorKind::Unknown);
}

#[test]
fn directory_that_was_removed_is_made_again() {
    let _alone = alone();
    let directory = Directory::new("token-removed");
    let (shared, _) = watched(4096);
    let before = transfer::share(&directory.0, shared).unwrap();
    std::fs::remove_dir_all(&directory.0).unwrap();
    let error = directory.open(before.token()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert!(error.to_string().contains("token-removed"), "{error}");
    let (shared, _) = watched(4096);
    let after = transfer::share(&directory.0, shared).unwrap();
    directory.open(after.token()).unwrap();
}

/// A child of the owner keeps neither its socket nor its connections open.
#[test]
fn end_of_an_owner_is_seen_although_its_child_lives() {
    let _alone = alone();
    let directory = Directory::new("token-child");
    let (mut other, token) = directory.start("shares-with-child");
    let opened = directory.open(&token).unwrap();
    other.kill();
    check_host(&opened, 3);
    drop(opened);
    let begun = Instant::now();
    let error = directory.open(&token).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    assert!(begun.elapsed() < TIMEOUT / 4, "{:?}", begun.elapsed());
}

/// Containers with other mounts see the socket in another directory.
#[test]
fn socket_is_found_in_another_directory() {
    let _alone = alone();
    let directory = Directory::new("token-moved");
    let (mut other, token) = directory.start("shares");
    let moved = Directory(directory.0.with_extension("moved"));
    std::fs::rename(&directory.0, &moved.0).unwrap();
    check_host(&moved.open(&token).unwrap(), 3);
    let error = transfer::open(&token, Path::new("/nowhere"), None, TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    other.kill();
}

#[test]
fn short_token_is_for_receivers_with_the_same_directory() {
    let _alone = alone();
    let directory = Directory::new("token-short");
    let share = transfer::share(&directory.0, host_share()).unwrap();
    let token = share.short_token();
    assert_eq!(token.len(), transfer::SHORT_TOKEN_LENGTH);
    assert!(transfer::is_token(&token) && transfer::is_token(share.token()));
    assert!(!transfer::is_token(&token[1..]));
    assert_eq!(directory.open(&token).unwrap().tensor(), &tensor());
    let error = transfer::open(&token, Path::new("/nowhere"), None, TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
}

#[test]
fn changed_tokens_are_refused() {
    let _alone = alone();
    let directory = Directory::new("token-changed");
    let share = transfer::share(&directory.0, host_share()).unwrap();
    let token = share.token();
    for length in 0..token.len() {
        let error = directory.open(&token[..length]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
    }
    for at in 0..token.len() {
        let mut changed = token.to_owned();
        changed[at] ^= 0x10;
        let kind = directory.open(&changed).unwrap_err().kind();
        assert!(matches!(kind, ErrorKind::Malformed | ErrorKind::VersionMismatch), "{kind:?}");
    }
}

#[test]
fn forked_child_shares_and_opens() {
    let _alone = alone();
    let directory = Directory::new("token-forked");
    let share = transfer::share(&directory.0, host_share()).unwrap();
    let opened = directory.open(share.token()).unwrap();
    // SAFETY: the child exits without running destructors of the parent's objects.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let works = || -> transfer::Result<bool> {
            let of_parent = directory.open(share.token())?;
            let own = transfer::share(&directory.0, host_share())?;
            let opened = directory.open(own.token())?;
            Ok(of_parent.tensor() == opened.tensor())
        };
        let code = i32::from(!works().unwrap_or_else(|error| {
            eprintln!("{error}");
            false
        }));
        // SAFETY: ends this process, at once.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: a child of this process and a valid pointer.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child failed");
    assert_eq!(directory.open(share.token()).unwrap().address(), opened.address());
}

#[test]
fn read_only_memory_cannot_be_written() {
    let _alone = alone();
    let directory = Directory::new("token-read");
    let buffer = HostBuffer::new(4096).unwrap();
    let shared = SharedBuffer::read_only(&buffer, &Tensor::bytes(4096)).unwrap();
    let share = transfer::share(&directory.0, shared).unwrap();
    let opened = directory.open(share.token()).unwrap();
    assert!(opened.is_read_only());
    let Buffer::Host(host) = opened.buffer() else { panic!("{opened:?}") };
    assert_eq!(host.write(0, &[1]).unwrap_err().kind(), ErrorKind::NotAllowed);
    buffer.write(0, &[5]).unwrap();
    let mut byte = [0];
    host.read(0, &mut byte).unwrap();
    assert_eq!(byte, [5]);
    let wrapped = HostBuffer::from_vec(vec![0; 4096]).unwrap();
    let error = SharedBuffer::new(wrapped, &Tensor::bytes(4096)).unwrap_err();
    assert!(error.to_string().contains("cannot map"), "{error}");
    let _ = Rights::READ;
}

/// More pieces than a message has descriptors, from the middle of a piece on.
#[test]
fn memory_of_many_pieces_is_shared() {
    let _alone = alone();
    let fixture = ServiceFixture::open();
    let device: Device = device();
    let granule = device.properties().granularity;
    let lengths: Vec<_> = (0..150).map(|at| granule * (1 + at % 2)).collect();
    let memory = device.allocate_pieces(&lengths).unwrap();
    let (skipped, length) = (granule / 2 + 4096, memory.length() - granule);
    let stream = device.stream().unwrap();
    let part = memory.slice(skipped, length).unwrap();
    stream.upload(&part, &numbers(length, 5), TIMEOUT).unwrap();
    // SAFETY: the memory is its own owner.
    let part = unsafe { device.adopt(part.address(), length, memory.clone()) }.unwrap();
    let shared = SharedBuffer::new(&part, &Tensor::bytes(length)).unwrap();
    assert!(shared.metadata().pieces() > 128, "{}", shared.metadata().pieces());
    fixture.service().publish("pieces", shared).unwrap();
    let client = ShareClient::connect(&fixture.path(), TIMEOUT).unwrap();
    // The driver keeps memory of its own after the first mapping and the first copy out of it.
    check(client.open("pieces", None, TIMEOUT).unwrap().memory().unwrap(), 5);
    let leak_check = LeakCheck::begin(&device);
    for _ in 0..3 {
        let opened = client.open("pieces", None, TIMEOUT).unwrap();
        check(opened.memory().unwrap(), 5);
        drop(opened);
    }
    leak_check.compare(&device);
    let handle = client.handle("pieces", TIMEOUT).unwrap();
    check(Opener::default().open(&handle, None).unwrap().memory().unwrap(), 5);
}

/// The owner of memory, which is dropped when nothing uses the memory any more.
fn watched(length: usize) -> (SharedBuffer, impl Fn() -> bool) {
    let device = device();
    let memory = device.allocate_shared(length as u64, &[]).unwrap();
    let watch = std::sync::Arc::new(());
    let weak = std::sync::Arc::downgrade(&watch);
    let address = memory.address();
    // SAFETY: the owner has the memory.
    let adopted = unsafe { device.adopt(address, length as u64, (memory, watch)) }.unwrap();
    let shared = SharedBuffer::new(&adopted, &Tensor::bytes(length as u64)).unwrap();
    (shared, move || weak.upgrade().is_none())
}

#[test]
fn service_holds_memory_as_long_as_it_is_used() {
    let _alone = alone();
    let fixture = ServiceFixture::open();
    let (shared, is_free) = watched(4096);
    fixture.service().publish("held", shared).unwrap();
    let client = ShareClient::connect(&fixture.path(), TIMEOUT).unwrap();
    let opened = client.open("held", None, TIMEOUT).unwrap();
    let again = client.open("held", None, TIMEOUT).unwrap();
    let clone = opened.clone();
    drop(fixture.service().withdraw("held").unwrap());
    drop((opened, again));
    std::thread::sleep(Duration::from_millis(100));
    assert!(!is_free(), "one user is left");
    drop(clone);
    wait_until("it is still held", &is_free);
    // A process that ends releases what it holds.
    let (shared, is_free) = watched(4096);
    fixture.service().publish("numbers", shared).unwrap();
    let opened = client.open("numbers", None, TIMEOUT).unwrap();
    drop(fixture.service().withdraw("numbers").unwrap());
    assert!(!is_free());
    drop(client);
    std::thread::sleep(Duration::from_millis(100));
    assert!(!is_free(), "the buffer outlives the client");
    drop(opened);
    wait_until("it is still held after the end", is_free);
}

#[test]
fn element_types_of_any_width_are_shared() {
    let _alone = alone();
    let directory = Directory::new("token-types");
    for (element, bytes) in [
        (ElementType::BF16, 32),
        (ElementType::F8_E4M3, 16),
        (ElementType::new(17, 4, 2).unwrap(), 16),
        (ElementType::new(17, 4, 1).unwrap(), 8),
    ] {
        let buffer = HostBuffer::new(bytes).unwrap();
        let tensor = Tensor::contiguous(element, &[4, 4]);
        let share =
            transfer::share(&directory.0, SharedBuffer::new(&buffer, &tensor).unwrap()).unwrap();
        assert_eq!(directory.open(share.token()).unwrap().tensor(), &tensor);
        let larger = Tensor::contiguous(element, &[4, 5]);
        let error = SharedBuffer::new(&buffer, &larger).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{error}");
    }
}

#[test]
fn thousands_of_shares_leave_nothing() {
    let _alone = alone();
    let directory = Directory::new("token-loop");
    let rounds = |count| {
        for number in 0..count {
            let buffer = HostBuffer::new(4096).unwrap();
            let tensor = Tensor::bytes(4096);
            let share = transfer::share(&directory.0, SharedBuffer::new(&buffer, &tensor).unwrap());
            let token = match number % 2 {
                0 => share.unwrap().for_one_receiver().unwrap(),
                _ => share.unwrap().token().to_owned(),
            };
            if let Ok(opened) = directory.open(&token) {
                assert_eq!(opened.tensor(), &tensor);
            }
        }
    };
    rounds(10);
    let leak_check = LeakCheck::begin(&device());
    rounds(2000);
    leak_check.compare(&device());
}

#[test]
fn memory_is_found_by_its_name_as_long_as_it_has_one() {
    let directory = Directory::new("shared-name");
    let share = transfer::share(&directory.0, host_share()).unwrap();
    let find = |name| transfer::shared_under_name(&directory.0, name).unwrap();
    assert_eq!(find("weights"), None);
    let name = share.publish_name("weights").unwrap();
    assert_eq!(find("weights").as_deref(), Some(share.token()));
    assert_eq!(directory.open(&find("weights").unwrap()).unwrap().tensor(), &tensor());
    let taken = share.publish_name("weights").unwrap_err();
    assert_eq!(taken.kind(), ErrorKind::TooMany);
    assert!(taken.to_string().contains("Use another name"), "{taken}");
    let other = share.publish_name("a b.c").unwrap();
    drop(name);
    assert_eq!((find("weights"), find("a b.c").as_deref()), (None, Some(share.token())));
    drop(share.publish_name("weights").unwrap());
    for name in ["", "a/b", "a\n", &"x".repeat(transfer::MAX_SHARED_NAME_LENGTH + 1)] {
        assert_eq!(share.publish_name(name).unwrap_err().kind(), ErrorKind::Malformed);
        let refused = transfer::shared_under_name(&directory.0, name).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Malformed);
    }
    drop(other);
    assert_eq!(find("a b.c"), None);
}

#[test]
fn name_of_a_killed_process_is_removed_and_can_be_used_again() {
    let directory = Directory::new("stale-name");
    // The token of a process that has ended: nothing listens at its socket.
    let stale = {
        let gone = Directory::new("stale-name-gone");
        transfer::share(&gone.0, host_share()).unwrap().token().to_owned()
    };
    let file = directory.0.join("shared-weights");
    let write = || std::fs::write(&file, &stale).unwrap();
    write();
    assert_eq!(transfer::shared_under_name(&directory.0, "weights").unwrap(), None);
    let clean = |dry_run| transfer::clean_names(&directory.0, dry_run).unwrap();
    assert!(clean(true) == clean(false) && !file.exists());
    assert!(!file.exists());
    write();
    let share = transfer::share(&directory.0, host_share()).unwrap();
    // Starting to share removed it.
    assert!(!file.exists());
    write();
    let name = share.publish_name("weights").unwrap();
    assert_eq!(transfer::clean_names(&directory.0, false).unwrap(), [] as [PathBuf; 0]);
    drop(name);
    // What is no token names nothing, and is removed, too; links and directories are left.
    std::fs::write(&file, b"no token").unwrap();
    std::os::unix::fs::symlink("/etc/passwd", directory.0.join("shared-link")).unwrap();
    std::fs::create_dir(directory.0.join("shared-directory")).unwrap();
    assert!(transfer::shared_under_name(&directory.0, "link").is_err());
    assert_eq!(transfer::clean_names(&directory.0, false).unwrap(), [file]);
    let own = share.publish_name("link").unwrap_err();
    assert_eq!(own.kind(), ErrorKind::Failed);
}

#[test]
fn memory_of_users_that_are_not_trusted_is_refused() {
    let directory = Directory::new("other-users");
    let own = ipc::Credentials::of_this_process().user;
    let others = transfer::Admission { users: vec![own + 1], groups: Vec::new() };
    let share = transfer::share_with(&directory.0, host_share(), &others).unwrap();
    assert_eq!(directory.open(share.token()).unwrap_err().kind(), ErrorKind::Denied);
    let both = transfer::Admission { users: vec![own, own + 1], groups: Vec::new() };
    let share = transfer::share_with(&directory.0, host_share(), &both).unwrap();
    assert_eq!(directory.open(share.token()).unwrap().tensor(), &tensor());
    let opened =
        transfer::open_of(share.token(), &directory.0, &[own + 1], None, TIMEOUT, &|| true)
            .unwrap();
    assert_eq!(opened.tensor(), &tensor());
}
