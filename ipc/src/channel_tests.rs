//! Channels, and violations of their rules.

use std::io::Read;
use std::os::unix::fs::PermissionsExt;

use super::*;

const SOON: Duration = Duration::from_millis(20);
const TIMEOUT: Duration = Duration::from_secs(20);

fn directory(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("fabricast-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// Runs in a child with limits of its own.
fn in_a_child(test: impl FnOnce()) {
    assert!(testkit::children::ForkedChild::new(test).wait().success());
}

fn set_limit(resource: libc::__rlimit_resource_t, value: u64) {
    let limit = libc::rlimit { rlim_cur: value, rlim_max: value };
    // SAFETY: a valid limit.
    assert_eq!(unsafe { libc::setrlimit(resource, &raw const limit) }, 0);
}

#[test]
fn received_descriptors_close_with_their_message() {
    in_a_child(|| {
        let (a, b) = Channel::pair().unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        let before = testkit::processes::open_descriptors();
        a.send(b"files", &[null.as_fd(); 3], TIMEOUT).unwrap();
        let message = b.receive(TIMEOUT).unwrap();
        assert_eq!(
            (message.descriptors.len(), testkit::processes::open_descriptors()),
            (3, before + 3)
        );
        drop(message);
        assert_eq!(testkit::processes::open_descriptors(), before);
    });
}

#[test]
fn lost_descriptors_are_reported_with_the_limit() {
    in_a_child(|| {
        let (a, b) = Channel::pair().unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        a.send(b"files", &[null.as_fd(); 40], TIMEOUT).unwrap();
        a.send(b"next", &[null.as_fd(); 2], TIMEOUT).unwrap();
        // The open file descriptors, and a few more.
        let soft = 10 + u64::from(null.as_fd().as_raw_fd() as u32);
        set_limit(libc::RLIMIT_NOFILE, soft);
        let error = b.receive(TIMEOUT).unwrap_err();
        let text = error.to_string();
        let ChannelError::DescriptorsLost { bytes, sent, received, .. } = error else {
            panic!("{text}")
        };
        assert!(bytes == b"files" && sent == 40 && received < 40, "{text}");
        for part in ["ulimit -n", &format!(" of {soft} descriptors are open")] {
            assert!(text.contains(part), "{text}");
        }
        // None of them leaks, and the next message arrives.
        assert_eq!(b.receive(TIMEOUT).unwrap().descriptors.len(), 2);
    });
}

#[test]
fn a_segment_beyond_the_longest_file_is_an_error() {
    in_a_child(|| {
        const LAYOUT: crate::Layout = crate::Layout::new("test", 1);
        set_limit(libc::RLIMIT_FSIZE, 1 << 20);
        // By SIGXFSZ, which ends a process by default.
        let error = crate::Segment::create(LAYOUT, 1 << 21).unwrap_err().to_string();
        assert!(error.contains("may have 1048576 bytes") && error.contains("ulimit -f"), "{error}");
        crate::Segment::create(LAYOUT, 1 << 12).unwrap();
    });
}

/// A user may have as many file descriptors in flight as one process may open, unless it is
/// root: so this runs in an unprivileged child.
#[test]
fn sending_descriptors_waits_for_those_in_flight() {
    let test = || -> bool {
        let few = libc::rlimit { rlim_cur: 64, rlim_max: 64 };
        // SAFETY: no pointers, or a valid one.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const few) } < 0 {
            return false;
        }
        let (Ok((a, b)), Ok(null)) = (Channel::pair(), std::fs::File::open("/dev/null")) else {
            return false;
        };
        let files = [null.as_fd(); 40];
        let mut sent = 0;
        let why = loop {
            match a.send(b"files", &files, SOON) {
                Ok(()) if sent < 10 => sent += 1,
                Ok(()) => return false,
                Err(error) => break error,
            }
        };
        // A message without file descriptors is sent nevertheless.
        let is_refused = matches!(why, ChannelError::TooManyDescriptorsInFlight);
        let sends_without_descriptors = a.send(b"none", &[], Duration::ZERO).is_ok();
        let all_arrived = (0..=sent).all(|_| b.receive(TIMEOUT).is_ok());
        is_refused
            && sends_without_descriptors
            && all_arrived
            && a.send(b"files", &files, TIMEOUT).is_ok()
    };
    // SAFETY: the child takes no lock that another thread could hold except the allocator's,
    // which survives a fork, and exits at once.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: no pointers. The child has one thread, as a user namespace requires.
            let is_unprivileged = unsafe { libc::unshare(libc::CLONE_NEWUSER) } == 0;
            let code = if is_unprivileged { i32::from(!test()) } else { 77 };
            // SAFETY: ends the child.
            unsafe { libc::_exit(code) }
        }
        child => {
            let mut status = 0;
            // SAFETY: space for the result.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert!(libc::WIFEXITED(status), "{status}");
            match libc::WEXITSTATUS(status) {
                77 => testkit::skip!("creating a user namespace is not permitted"),
                code => assert_eq!(code, 0),
            }
        }
    }
}

#[test]
fn forked_child_does_not_close_listeners_or_locks() {
    let directory = directory("forked-listener");
    let connected = directory.join("socket");
    let listener = ChannelListener::bind(&connected).unwrap();
    let lock = DirectoryLock::take(&directory).unwrap();
    let client = Channel::connect(&connected, TIMEOUT).unwrap();
    let server = listener.accept(TIMEOUT).unwrap();
    let mut inherited = Some((listener, lock, client, server));
    let child = testkit::children::ForkedChild::new(|| drop(inherited.take()));
    assert!(child.wait().success());
    let (listener, lock, client, server) = inherited.take().unwrap();
    client.send(b"still here", &[], TIMEOUT).unwrap();
    assert_eq!(server.receive(TIMEOUT).unwrap().bytes, b"still here");
    let again = Channel::connect(&connected, TIMEOUT).expect("the socket still has its path");
    drop((listener.accept(TIMEOUT).unwrap(), again));
    // A forked child that keeps the socket does not listen for its parent.
    let child = testkit::children::ForkedChild::new(|| std::thread::sleep(TIMEOUT));
    let kept = connected.with_extension("kept");
    std::fs::hard_link(&connected, &kept).unwrap();
    let waiting = Channel::connect(&connected, TIMEOUT).unwrap();
    drop(listener);
    assert!(!connected.exists(), "the parent removes its own path");
    match Channel::connect(&kept, TIMEOUT) {
        Err(ChannelError::System { cause, .. }) => {
            assert_eq!(cause.kind(), io::ErrorKind::ConnectionRefused);
        }
        other => panic!("{other:?}"),
    }
    let error = waiting.receive(TIMEOUT).unwrap_err();
    assert!(matches!(error, ChannelError::Closed), "{error:?}");
    std::fs::remove_file(&kept).unwrap();
    child.kill();
    assert!(child.was_killed());
    let file = std::fs::File::open(&directory).unwrap();
    // SAFETY: a file owned here.
    let taken = unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) };
    assert_eq!(taken, -1, "the directory must be locked");
    drop(lock);
    std::fs::remove_dir(directory).unwrap();
}

#[test]
fn unreceived_messages_are_detected() {
    let (a, b) = Channel::pair().unwrap();
    assert!(!a.has_unreceived());
    a.send(b"x", &[], TIMEOUT).unwrap();
    assert!(a.has_unreceived());
    b.receive(TIMEOUT).unwrap();
    assert!(!a.has_unreceived());
}

#[test]
fn messages_keep_boundaries_and_descriptors() {
    let (a, b) = Channel::pair().unwrap();
    a.send(b"", &[], TIMEOUT).unwrap();
    a.send(&[7; MAX_MESSAGE_BYTES], &[], TIMEOUT).unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    a.send(b"files", &[null.as_fd(); MAX_DESCRIPTORS], TIMEOUT).unwrap();
    assert_eq!(b.receive(TIMEOUT).unwrap().bytes, b"");
    assert_eq!(b.receive(TIMEOUT).unwrap().bytes, [7; MAX_MESSAGE_BYTES]);
    let message = b.receive(TIMEOUT).unwrap();
    assert_eq!(message.descriptors.len(), MAX_DESCRIPTORS);
    for fd in message.descriptors {
        // SAFETY: a file descriptor owned here.
        let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
        assert_ne!(flags & libc::FD_CLOEXEC, 0);
        let mut nothing = [0; 1];
        assert_eq!(std::fs::File::from(fd).read(&mut nothing).unwrap(), 0);
    }
    let late = b.receive(SOON).unwrap_err();
    assert!(matches!(late, ChannelError::DeadlineExceeded { waiting_for: "a message" }));
    drop(a);
    assert!(matches!(b.receive(TIMEOUT), Err(ChannelError::Closed)));
    assert!(matches!(b.send(b"x", &[], TIMEOUT), Err(ChannelError::Closed)));
}

/// `c_char` is signed on some processors, and unsigned on others.
#[test]
fn path_bytes_are_unchanged_in_an_address() {
    let bytes: Vec<u8> = (1..=107).map(|byte: u8| byte.wrapping_mul(2).wrapping_add(1)).collect();
    let (to, _) = address(Path::new(std::ffi::OsStr::from_bytes(&bytes))).unwrap();
    let written = to.sun_path.map(|character| character.to_ne_bytes()[0]);
    assert_eq!((&written[..107], written[107]), (&bytes[..], 0));
}

#[test]
fn too_long_message_is_not_sent() {
    let (a, _b) = Channel::pair().unwrap();
    let error = a.send(&[0; MAX_MESSAGE_BYTES + 1], &[], TIMEOUT).unwrap_err();
    assert!(matches!(error, ChannelError::TooLong { .. }), "{error}");
    let null = std::fs::File::open("/dev/null").unwrap();
    let error = a.send(b"", &[null.as_fd(); MAX_DESCRIPTORS + 1], TIMEOUT).unwrap_err();
    assert!(matches!(error, ChannelError::TooLong { .. }), "{error}");
}

#[test]
fn message_beyond_the_limits_is_discarded() {
    let (a, b) = Channel::pair().unwrap();
    let long = [9_u8; MAX_MESSAGE_BYTES + 100];
    // SAFETY: the bytes are valid, with their length.
    let sent = unsafe { libc::send(a.as_fd().as_raw_fd(), long.as_ptr().cast(), long.len(), 0) };
    assert_eq!(sent as usize, long.len());
    assert!(matches!(b.receive(TIMEOUT), Err(ChannelError::TooLong { .. })));
    // Three file descriptors are announced, and none is sent. SAFETY: as above.
    unsafe { libc::send(a.as_fd().as_raw_fd(), [3_u8].as_ptr().cast(), 1, 0) };
    assert!(matches!(b.receive(TIMEOUT), Err(ChannelError::TooLong { .. })));
    a.send(b"good again", &[], TIMEOUT).unwrap();
    assert_eq!(b.receive(TIMEOUT).unwrap().bytes, b"good again");
}

#[test]
fn send_to_a_full_channel_times_out() {
    let (a, _b) = Channel::pair().unwrap();
    let error = loop {
        if let Err(error) = a.send(&[1; 4096], &[], SOON) {
            break error;
        }
    };
    let room = ChannelError::DeadlineExceeded { waiting_for: "space for a message" };
    assert_eq!(error.to_string(), room.to_string());
}

#[test]
fn listener_is_unique_and_replaces_a_stale_socket() {
    let directory = directory("listener");
    let path = directory.join("socket");
    let no_listener = Channel::connect(&path, SOON).unwrap_err().to_string();
    assert!(no_listener.contains("socket: No such file"), "{no_listener}");
    let listener = ChannelListener::bind(&path).unwrap();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let client = Channel::connect(&path, TIMEOUT).unwrap();
    let server = listener.accept(TIMEOUT).unwrap();
    let credentials = server.credentials().unwrap();
    assert_eq!(credentials.process, Some(std::process::id()));
    client.send(b"hello", &[], TIMEOUT).unwrap();
    assert_eq!(server.receive(TIMEOUT).unwrap().bytes, b"hello");
    assert!(matches!(ChannelListener::bind(&path), Err(ChannelError::InUse(_))));
    // As after a kill: the path remains, without a listener.
    let left = path.with_extension("left");
    std::fs::rename(&path, &left).unwrap();
    drop(listener);
    assert!(left.exists());
    let successor = ChannelListener::bind(&left).unwrap();
    drop(successor);
    assert!(!left.exists());
    // Other files are not touched.
    std::fs::write(&path, "not a socket").unwrap();
    let error = ChannelListener::bind(&path).unwrap_err();
    assert!(matches!(error, ChannelError::NotASocket { .. }), "{error}");
    assert!(error.to_string().contains("is a regular file, not a socket. Remove it"), "{error}");
    assert!(path.exists());
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn invalid_socket_paths_are_refused() {
    for path in ["", "a\0b", &"x".repeat(108)] {
        let error = ChannelListener::bind(Path::new(path)).unwrap_err();
        assert!(matches!(error, ChannelError::InvalidPath(_)), "{error}");
        assert!(error.to_string().contains("1 to 107 bytes"), "{error}");
        assert!(error.to_string().contains(&format!("this has {}", path.len())), "{error}");
    }
}

#[test]
fn socket_mode_limits_access() {
    let directory = directory("mode");
    let path = directory.join("socket");
    let listener = ChannelListener::bind_with_mode(&path, 0o666).unwrap();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o666);
    drop(listener);
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn only_one_of_many_replaces_a_stale_socket() {
    let directory = directory("many");
    let path = directory.join("socket");
    for round in 0..20 {
        let elsewhere = directory.join("elsewhere");
        let dead = ChannelListener::bind(&elsewhere).unwrap();
        std::fs::rename(&elsewhere, &path).unwrap();
        drop(dead);
        let barrier = std::sync::Barrier::new(8);
        let results: Vec<_> = std::thread::scope(|scope| {
            let bind = || {
                barrier.wait();
                ChannelListener::bind(&path)
            };
            let binding: Vec<_> = (0..8).map(|_| scope.spawn(bind)).collect();
            binding.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let (good, bad): (Vec<_>, Vec<_>) = results.into_iter().partition(|found| found.is_ok());
        assert_eq!(good.len(), 1, "round {round}: {bad:?}");
        assert!(bad.iter().all(|found| matches!(found, Err(ChannelError::InUse(_)))), "{bad:?}");
        Channel::connect(&path, TIMEOUT).unwrap();
        let listener = good.into_iter().next().unwrap().unwrap();
        listener.accept(TIMEOUT).unwrap();
    }
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn groups_of_the_peer_are_reported() {
    let (here, _there) = Channel::pair().unwrap();
    let mut own = vec![0_u32; 1 << 16];
    // SAFETY: space for as many groups as a process can have.
    let count = unsafe { libc::getgroups(own.len() as i32, own.as_mut_ptr()) };
    own.truncate(count as usize);
    assert_eq!(here.groups().unwrap(), own);
}

#[test]
fn shutdown_wakes_waiting_threads() {
    let (here, there) = Channel::pair().unwrap();
    here.send(b"sent before", &[], TIMEOUT).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| here.receive(TIMEOUT));
        std::thread::sleep(SOON);
        here.end();
        assert!(matches!(waiting.join().unwrap(), Err(ChannelError::Closed)));
    });
    assert_eq!(there.receive(TIMEOUT).unwrap().bytes, b"sent before");
    assert!(matches!(there.receive(TIMEOUT), Err(ChannelError::Closed)));
    assert!(matches!(there.send(b"x", &[], TIMEOUT), Err(ChannelError::Closed)));
}

/// A caller may request an unlimited timeout.
#[test]
fn timeout_may_be_unlimited() {
    let directory = directory("endless");
    let path = directory.join("socket");
    let listener = ChannelListener::bind(&path).unwrap();
    let here = Channel::connect(&path, Duration::MAX).unwrap();
    let there = listener.accept(Duration::MAX).unwrap();
    here.send(b"hello", &[], Duration::MAX).unwrap();
    assert_eq!(there.receive(Duration::MAX).unwrap().bytes, b"hello");
    drop(here);
    assert!(matches!(there.receive(Duration::MAX), Err(ChannelError::Closed)));
    drop(listener);
    std::fs::remove_dir_all(directory).unwrap();
}
