//! Networks, and cables from them to a hub.
//!
//! All of it is in a user and a network namespace of the test's own, and goes with the last
//! process that is there. A network namespace belongs to a thread: what is to be in one is
//! started by a thread that has gone there.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use nix::sched::{CloneFlags, setns, unshare};
use testkit::children::{self, Child};

pub const NODES: u8 = 5;
const UNSHARE: [&str; 4] = ["unshare", "--user", "--map-root-user", "--net"];
/// How long a test in namespaces may take.
const LONGEST: Duration = Duration::from_secs(600);

#[track_caller]
pub fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {output:?}");
}

/// Where the node with this number listens.
pub fn address(number: u8) -> SocketAddr {
    SocketAddr::new(ip_of(number), 7000)
}

pub fn ip_of(number: u8) -> IpAddr {
    Ipv4Addr::new(10, 77, 0, number).into()
}

/// Runs this program again in namespaces, in the role of this name, if that is permitted here.
#[track_caller]
pub fn run_inside(role: &str) {
    run_inside_for(role, LONGEST);
}

/// The same, for so long at most.
#[track_caller]
pub fn run_inside_for(role: &str, longest: Duration) {
    // Does all that is needed work here?
    let attempt = "ip link add hub type bridge && \
                   ip link add cable type veth peer name wire && unshare --net true";
    let output = Command::new(UNSHARE[0]).args(&UNSHARE[1..]).args(["sh", "-c", attempt]).output();
    match output {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            let why = String::from_utf8_lossy(&output.stderr).into_owned();
            testkit::skip!("no networks can be made here: {}", why.trim());
        }
        Err(error) => testkit::skip!("there is no unshare here: {error}"),
    }
    let mut command = children::respawn_with(&UNSHARE, ["inside", role]);
    Child::start(command.stdout(Stdio::inherit())).finish(longest);
}

/// Makes what all cables lead to.
pub fn make_hub() {
    ip("link add hub type bridge");
    ip("link set hub up");
}

/// A network with nothing in it but the end of a cable.
pub struct Network(File);

impl Network {
    pub fn new(number: u8) -> Self {
        let (say, hear) = channel();
        let (go, may_go) = channel();
        let maker = std::thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            say.send(nix::unistd::gettid().as_raw()).unwrap();
            may_go.recv().unwrap();
            ip("link set lo up");
            ip(&format!("address add {}/24 dev wire", ip_of(number)));
            ip("link set wire up");
            File::open("/proc/thread-self/ns/net").unwrap()
        });
        let thread: i32 = hear.recv().unwrap();
        ip(&format!("link add cable{number} type veth peer name wire netns {thread}"));
        mend(number);
        ip(&format!("link set cable{number} up"));
        go.send(()).unwrap();
        Self(maker.join().unwrap())
    }

    /// Does this in the network: processes and threads that it starts stay there.
    pub fn within<T: Send>(&self, this: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let there = scope.spawn(|| {
                setns(&self.0, CloneFlags::CLONE_NEWNET).unwrap();
                this()
            });
            there.join().unwrap()
        })
    }
}

/// Nothing tells either side that the cable is cut.
pub fn cut(number: u8) {
    ip(&format!("link set cable{number} nomaster"));
}

pub fn mend(number: u8) {
    ip(&format!("link set cable{number} master hub"));
}
