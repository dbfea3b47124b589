//! The user that attackers run as, and the namespaces that allow another one.
#![allow(unsafe_code)]

use std::io;
use std::process::{Command, Stdio};
use std::time::Duration;

use testkit::children::{self, Child};

use crate::network;

/// The user and the group of attackers: the system's "nobody".
const OTHER: libc::uid_t = 65_534;
/// Namespaces of a test that runs as root. A user namespace of its own would have no other user.
const UNSHARE: [&str; 2] = ["unshare", "--net"];

fn is_root() -> bool {
    // SAFETY: only asks for a number.
    unsafe { libc::geteuid() == 0 }
}

/// Runs this program again in namespaces, as root of the machine if this process is that: then
/// attackers can be another user.
pub fn run_inside_for(arguments: &str, longest: Duration) {
    let attempt = "ip link add hub type bridge && \
                   ip link add cable type veth peer name wire && unshare --net true";
    let can_keep_users = is_root()
        && Command::new(UNSHARE[0])
            .args(&UNSHARE[1..])
            .args(["sh", "-c", attempt])
            .output()
            .is_ok_and(|output| output.status.success());
    if !can_keep_users {
        return network::run_inside_for(arguments, longest);
    }
    let mut command = children::respawn_with(&UNSHARE, ["inside", arguments]);
    Child::start(command.stdout(Stdio::inherit())).finish(longest);
}

/// Can this process become the other user?
pub fn has_other() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let has = |line: &str| {
        let numbers: Vec<u64> = line.split_whitespace().flat_map(str::parse).collect();
        let other = u64::from(OTHER);
        matches!(numbers[..], [first, _, count] if (first..first + count).contains(&other))
    };
    is_root() && map.lines().any(has)
}

/// Which user attackers are, in words.
pub fn of_attackers() -> String {
    match has_other() {
        true => format!("user {OTHER}"),
        false => "the user of the node: this test is not root".to_owned(),
    }
}

/// Makes this process one of the other user, for good.
///
/// # Panics
/// If the system refuses it: the attack would be one of another kind.
pub fn become_other() {
    let check = |code: i32, what: &str| {
        assert_eq!(code, 0, "{what}: {}", io::Error::last_os_error());
    };
    // SAFETY: no group is read from the null pointer, since there are 0.
    check(unsafe { libc::setgroups(0, std::ptr::null()) }, "setgroups");
    // SAFETY: no pointers; the C library changes all threads of the process.
    check(unsafe { libc::setresgid(OTHER, OTHER, OTHER) }, "setresgid");
    // SAFETY: as above.
    check(unsafe { libc::setresuid(OTHER, OTHER, OTHER) }, "setresuid");
    // SAFETY: no pointers; root could be had again if this succeeded.
    assert_ne!(unsafe { libc::setuid(0) }, 0, "the process is still root");
}
