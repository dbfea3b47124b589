//! Late replies, and services that start late or close connections.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use ipc::ChannelListener;

use super::*;

const SOON: Duration = Duration::from_millis(50);
const TIMEOUT: Duration = Duration::from_secs(20);

fn directory(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("fabricast-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&path).unwrap();
    path
}

fn open(name: &str) -> Option<String> {
    Some(name.to_owned())
}

/// The name that is requested.
fn requested_name(bytes: &[u8]) -> Option<String> {
    match Request::decode(bytes)? {
        Request::Open(name, _) => Some(name),
        _ => None,
    }
}

#[test]
fn late_reply_is_not_taken_for_the_next_one() {
    let directory = directory("late");
    let path = directory.join("socket");
    let listener = ChannelListener::bind(&path).unwrap();
    let client = ShareClient::connect(&path, TIMEOUT).unwrap();
    let first = listener.accept(TIMEOUT).unwrap();
    let error = client.handle("first", SOON).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
    let (mut here, there) = UnixStream::pair().unwrap();
    let requested = |service: &Channel| requested_name(&service.receive(TIMEOUT).unwrap().bytes);
    assert_eq!(requested(&first), open("first"));
    let late = Reply::Handle { bytes: b"a handle".to_vec(), is_for_one: false }.encode();
    let _ = first.send(&late, &[there.as_fd()], TIMEOUT);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let second = listener.accept(TIMEOUT).unwrap();
            assert_eq!(requested(&second), open("second"));
            second.send(&Reply::Unknown.encode(), &[], TIMEOUT).unwrap();
        });
        let error = client.handle("second", TIMEOUT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
        assert!(error.to_string().contains("second"), "{error}");
    });
    // The descriptor of the late reply is closed: the other end has no owner.
    drop(there);
    here.set_read_timeout(Some(TIMEOUT)).unwrap();
    assert_eq!(here.read(&mut [0; 1]).unwrap(), 0);
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn client_waits_for_a_service_that_starts_late() {
    let directory = directory("awaited");
    let path = directory.join("socket");
    let error = ShareClient::connect(&path, SOON).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
    let text = error.to_string();
    assert_eq!(text.matches(&path.display().to_string()).count(), 1, "{text}");
    assert!(text.contains("No such file"), "{text}");
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| ShareClient::connect(&path, TIMEOUT));
        std::thread::sleep(SOON);
        let _listener = ChannelListener::bind(&path).unwrap();
        connecting.join().unwrap().unwrap();
    });
    std::fs::remove_dir_all(&directory).unwrap();
}

/// Services close connections when clients of the same user exceed their limit.
#[test]
fn closed_connection_is_reopened_until_the_timeout() {
    let directory = directory("given-up");
    let path = directory.join("socket");
    let listener = ChannelListener::bind(&path).unwrap();
    let client = ShareClient::connect(&path, TIMEOUT).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            (0..4).for_each(|_| drop(listener.accept(TIMEOUT).unwrap()));
            let last = listener.accept(TIMEOUT).unwrap();
            let requested = requested_name(&last.receive(TIMEOUT).unwrap().bytes);
            assert_eq!(requested, open("one"));
            last.send(&Reply::Unknown.encode(), &[], TIMEOUT).unwrap();
            // The next call uses it, and then new ones until its timeout.
            drop(last);
            while let Ok(channel) = listener.accept(4 * SOON) {
                drop(channel);
            }
        });
        let error = client.handle("one", TIMEOUT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
        let begun = Instant::now();
        let error = client.handle("two", 2 * SOON).unwrap_err();
        // `DeadlineExceeded` if the last connection was not closed before the timeout.
        let is_over = matches!(error.kind(), ErrorKind::Closed | ErrorKind::DeadlineExceeded);
        assert!(is_over, "{error}");
        assert!(begun.elapsed() < TIMEOUT);
    });
    drop(listener);
    // No service listens: the call fails at once.
    let begun = Instant::now();
    let error = client.handle("three", TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    assert!(begun.elapsed() < TIMEOUT / 2);
    std::fs::remove_dir_all(&directory).unwrap();
}
