//! Descriptors of the driver for other processes, which get them without the right to trace this
//! one: PyTorch's expandable segments are shared by process id and descriptor number, with
//! `pidfd_getfd`.
//!
//! The socket is in a directory of this user. Both sides check the user of the other.
#![allow(unsafe_code)]

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use ipc::{Channel, ChannelListener, Credentials, NotInherited, PerProcess};

use crate::settings::{log, settings};

/// How long the other side may take for its message.
const TIMEOUT: Duration = Duration::from_secs(5);

fn socket_of(process: i32) -> PathBuf {
    settings().directory.join(format!("hook-{process}"))
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
        let directory = &settings().directory;
        let _ = fs::DirBuilder::new().mode(0o700).recursive(true).create(directory);
        let path = socket_of(std::process::id() as i32);
        let listener = is_private(directory).then(|| ChannelListener::bind(&path));
        let Some(Ok(listener)) = listener else {
            log(|| format!("no socket in {}", directory.display()));
            return false;
        };
        let serving = threads::spawn("fabricast-hook", move || {
            let _not_inherited = NotInherited::new(&listener);
            loop {
                if let Ok(channel) = listener.accept(Duration::MAX) {
                    let _ = answer(&channel);
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
    let shown = fs::read_link(format!("/proc/self/fd/{number}")).ok()?;
    if !shown.to_str()?.starts_with(&settings().descriptors) {
        return channel.send(b"refused", &[], TIMEOUT).ok();
    }
    // SAFETY: it was open a moment ago; another one of this number is not of this library.
    let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
    channel.send(b"", &[descriptor], TIMEOUT).ok()
}

/// The descriptor of this number of another process, by its pidfd.
pub(crate) fn request(pidfd: RawFd, number: RawFd) -> Option<RawFd> {
    let information = fs::read_to_string(format!("/proc/self/fdinfo/{pidfd}")).ok()?;
    let process = information.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    let process: i32 = process.trim().parse().ok()?;
    if !is_private(&settings().directory) {
        return None;
    }
    let channel = Channel::connect(&socket_of(process), TIMEOUT).ok()?;
    let peer = channel.credentials().ok()?;
    if ![0, Credentials::of_this_process().user].contains(&peer.user) {
        return None;
    }
    channel.send(&number.to_ne_bytes(), &[], TIMEOUT).ok()?;
    let descriptor = channel.receive(TIMEOUT).ok()?.descriptors.pop()?;
    log(|| format!("pidfd_getfd: descriptor {number} of process {process}"));
    let _ = descriptor.as_fd();
    Some(descriptor.into_raw_fd())
}
