//! The user of attackers, and namespaces that allow a user other than that of the node.
#![allow(unsafe_code)]

use std::io;
use std::process::{Command, Stdio};
use std::time::Duration;

use testkit::children::{self, Child};

use crate::network;

/// User and group of attackers: `nobody` of the system.
const OTHER: libc::uid_t = 65_534;
/// Namespaces of a test that runs as root. A new user namespace would map no other user.
const UNSHARE: [&str; 2] = ["unshare", "--net"];

fn is_root() -> bool {
    // SAFETY: no arguments; returns a number.
    unsafe { libc::geteuid() == 0 }
}

/// Runs this program again in namespaces. If this process is root of the machine, the new one stays
/// root, so that attackers can run as another user.
pub fn run_inside_for(arguments: &str, timeout: Duration) {
    let attempt = "ip link add hub type bridge && \
                   ip link add veth type veth peer name wire && unshare --net true";
    let can_keep_users = is_root()
        && Command::new(UNSHARE[0])
            .args(&UNSHARE[1..])
            .args(["sh", "-c", attempt])
            .output()
            .is_ok_and(|output| output.status.success());
    if !can_keep_users {
        return network::run_inside_for(arguments, timeout);
    }
    let mut command = children::respawn_with(&UNSHARE, ["inside", arguments]);
    Child::start(command.stdout(Stdio::inherit())).finish(timeout);
}

/// Can this process change to the other user?
pub fn has_other() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let maps_other = |line: &str| {
        let numbers: Vec<u64> = line.split_whitespace().flat_map(str::parse).collect();
        let other = u64::from(OTHER);
        matches!(numbers[..], [first, _, count] if (first..first + count).contains(&other))
    };
    is_root() && map.lines().any(maps_other)
}

/// The user of attackers, for the report.
pub fn of_attackers() -> String {
    match has_other() {
        true => format!("user {OTHER}"),
        false => "the user of the node, since this test is not root".to_owned(),
    }
}

/// Changes this process to the other user for good.
///
/// # Panics
/// If the system refuses.
pub fn become_other() {
    let check = |code: i32, call: &str| {
        assert_eq!(code, 0, "{call}: {}", io::Error::last_os_error());
    };
    // SAFETY: with a count of 0 no group is read from the null pointer.
    check(unsafe { libc::setgroups(0, std::ptr::null()) }, "setgroups");
    // SAFETY: no pointers; the C library changes all threads of the process.
    check(unsafe { libc::setresgid(OTHER, OTHER, OTHER) }, "setresgid");
    // SAFETY: as above.
    check(unsafe { libc::setresuid(OTHER, OTHER, OTHER) }, "setresuid");
    // SAFETY: no pointers. Success would mean that the process can become root again.
    assert_ne!(unsafe { libc::setuid(0) }, 0, "the process is still root");
}
