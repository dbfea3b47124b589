//! Network namespaces, and veth links from them to a hub.
//!
//! All of them are inside a user and a network namespace of the test, and end with its last process.
//! A network namespace belongs to a thread, so a thread that has entered it starts all processes
//! and threads of a node.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use nix::sched::{CloneFlags, setns, unshare};
use testkit::children::{self, Child};

pub const NODES: u8 = 5;
const UNSHARE: [&str; 4] = ["unshare", "--user", "--map-root-user", "--net"];
/// Timeout of a test in namespaces.
const TIMEOUT: Duration = Duration::from_secs(600);

#[track_caller]
pub fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {output:?}");
}

/// The listen address of a node.
pub fn address(number: u8) -> SocketAddr {
    SocketAddr::new(ip_of(number), 7000)
}

pub fn ip_of(number: u8) -> IpAddr {
    Ipv4Addr::new(10, 77, 0, number).into()
}

/// Runs this program again in namespaces, in a role. Skips the test if namespaces are not permitted.
#[track_caller]
pub fn run_inside(role: &str) {
    run_inside_for(role, TIMEOUT);
}

/// Like [`run_inside`], with a timeout.
#[track_caller]
pub fn run_inside_for(role: &str, timeout: Duration) {
    let attempt = "ip link add hub type bridge && \
                   ip link add veth type veth peer name wire && unshare --net true";
    let output = Command::new(UNSHARE[0]).args(&UNSHARE[1..]).args(["sh", "-c", attempt]).output();
    match output {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            let cause = String::from_utf8_lossy(&output.stderr).into_owned();
            testkit::skip!("network namespaces are not permitted: {}", cause.trim());
        }
        Err(error) => testkit::skip!("cannot run unshare: {error}"),
    }
    let mut command = children::respawn_with(&UNSHARE, ["inside", role]);
    Child::start(command.stdout(Stdio::inherit())).finish(timeout);
}

/// Creates the bridge that all links connect to.
pub fn create_hub() {
    ip("link add hub type bridge");
    ip("link set hub up");
}

/// A network namespace with one end of a veth link.
pub struct Network(File);

impl Network {
    pub fn new(number: u8) -> Self {
        let (thread_id, thread_ids) = channel();
        let (link_created, links_created) = channel();
        let creator = std::thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            thread_id.send(nix::unistd::gettid().as_raw()).unwrap();
            links_created.recv().unwrap();
            ip("link set lo up");
            ip(&format!("address add {}/24 dev wire", ip_of(number)));
            ip("link set wire up");
            File::open("/proc/thread-self/ns/net").unwrap()
        });
        let thread: i32 = thread_ids.recv().unwrap();
        ip(&format!("link add veth{number} type veth peer name wire netns {thread}"));
        restore_link(number);
        ip(&format!("link set veth{number} up"));
        link_created.send(()).unwrap();
        Self(creator.join().unwrap())
    }

    /// Runs a function in the namespace. Processes and threads that it starts stay there.
    pub fn within<T: Send>(&self, function: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                setns(&self.0, CloneFlags::CLONE_NEWNET).unwrap();
                function()
            });
            thread.join().unwrap()
        })
    }
}

/// Cuts a link. Both ends stay up, so neither node is notified.
pub fn cut_link(number: u8) {
    ip(&format!("link set veth{number} nomaster"));
}

pub fn restore_link(number: u8) {
    ip(&format!("link set veth{number} master hub"));
}
