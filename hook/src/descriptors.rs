//! Descriptors of the driver for other processes, which get them without the right to trace this
//! one: PyTorch's expandable segments are shared by process id and descriptor number, with
//! `pidfd_getfd`.
//!
//! The socket is in a directory of this user. Both sides check the user of the other.
#![allow(unsafe_code)]

use std::fs;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use ipc::{Channel, ChannelListener, Credentials, PerProcess};

use crate::settings::{log, settings};

/// How long the other side may take for its message.
const TIMEOUT: Duration = Duration::from_secs(1);
/// After an error of the socket.
const PAUSE: Duration = Duration::from_millis(100);

/// Process ids are those of a PID namespace: containers that share the directory have the same ones.
fn socket_of(process: u32) -> PathBuf {
    let namespace = fs::metadata("/proc/self/ns/pid").map_or(0, |found| found.ino());
    settings().directory().join(format!("hook-{namespace}-{process}"))
}

/// Is the directory of this user alone? Otherwise another user could have made the socket.
fn is_private(directory: &std::path::Path) -> bool {
    fs::metadata(directory).is_ok_and(|found| {
        found.uid() == Credentials::of_this_process().user && found.mode() & 0o022 == 0
    })
}

/// Serves other processes from now on, in a thread.
pub(crate) fn serve() {
    static SERVED: PerProcess<OnceLock<bool>> = PerProcess::new();
    SERVED.get().get_or_init(|| {
        let directory = settings().directory();
        let _ = fs::DirBuilder::new().mode(0o700).recursive(true).create(directory);
        let path = socket_of(std::process::id());
        let listener = is_private(directory).then(|| ChannelListener::bind(&path));
        let Some(Ok(listener)) = listener else {
            log(|| format!("no socket in {}", directory.display()));
            return false;
        };
        let serving = threads::spawn("fabricast-hook", move || {
            loop {
                match listener.accept(Duration::MAX) {
                    Ok(channel) => drop(answer(&channel)),
                    // For example without descriptors.
                    Err(_) => std::thread::sleep(PAUSE),
                }
            }
        });
        serving.is_ok()
    });
}

/// Sends one descriptor, if it is of the driver.
fn answer(channel: &Channel) -> Option<()> {
    let user = channel.credentials().ok()?.user;
    if ![0, Credentials::of_this_process().user].contains(&user) {
        return None;
    }
    let request = channel.receive(TIMEOUT).ok()?;
    let number = RawFd::from_ne_bytes(request.bytes.try_into().ok()?);
    // SAFETY: a number that is no descriptor is refused; the copy is owned here.
    let copy = unsafe {
        let copy = libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0);
        (copy >= 0).then(|| OwnedFd::from_raw_fd(copy))?
    };
    let shown = fs::read_link(format!("/proc/self/fd/{}", copy.as_raw_fd())).ok()?;
    if !settings().sends(&shown) {
        return channel.send(b"refused", &[], TIMEOUT).ok();
    }
    channel.send(b"", &[copy.as_fd()], TIMEOUT).ok()
}

/// The descriptor of this number of another process, by its pidfd.
pub(crate) fn request(pidfd: RawFd, number: RawFd) -> Option<RawFd> {
    let information = fs::read_to_string(format!("/proc/self/fdinfo/{pidfd}")).ok()?;
    let process = information.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    let process: u32 = process.trim().parse().ok()?;
    if !is_private(settings().directory()) {
        return None;
    }
    let channel = Channel::connect(&socket_of(process), TIMEOUT).ok()?;
    let peer = channel.credentials().ok()?;
    let is_trusted = [0, Credentials::of_this_process().user].contains(&peer.user);
    if !is_trusted || peer.process != Some(process) {
        return None;
    }
    channel.send(&number.to_ne_bytes(), &[], TIMEOUT).ok()?;
    let descriptor = channel.receive(TIMEOUT).ok()?.descriptors.pop()?;
    log(|| format!("pidfd_getfd: descriptor {number} of process {process}"));
    Some(descriptor.into_raw_fd())
}
