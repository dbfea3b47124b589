//! Five nodes on a network: each in a network namespace of its own, with a cable to a
//! bridge. One of the cables is cut and mended.
//!
//! The test makes the bridge in a user and a network namespace of its own. A network
//! namespace belongs to a thread, so all five nodes are in one process.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};
use pubsub::TopicSettings;
use pubsub::peers::{Event, Interest, NodeIdentity, Peers, PeersOptions, Reason, SessionNumber};

/// Only reached when something is wrong.
const PATIENCE: Duration = Duration::from_secs(60);
/// In the process that is in the namespaces already.
const INSIDE: &str = "FABRICAST_TEST_INSIDE";
const NODES: u8 = 5;
const PORT: u16 = 7000;

fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {output:?}");
}

fn address(number: u8) -> IpAddr {
    Ipv4Addr::new(10, 77, 0, number).into()
}

/// Starts a node in a network of its own, with a cable to the bridge.
fn start(number: u8) -> Peers {
    let (say, hear): (Sender<i32>, _) = channel();
    let (go, may_go) = channel();
    let node = std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        say.send(nix::unistd::gettid().as_raw()).unwrap();
        may_go.recv().unwrap();
        ip(&format!("address add {}/24 dev wire", address(number)));
        ip("link set wire up");
        let mut options = PeersOptions::new(NodeIdentity([number; 16]), format!("node {number}"));
        options.listen = Some(SocketAddr::new(address(number), PORT));
        options.rendezvous = Some(SocketAddr::new(address(1), PORT).to_string());
        options.insecure = true;
        // Other builds may keep both processors busy.
        options.lost_after = Duration::from_secs(6);
        // Its thread is in the namespace of the one that starts it.
        Peers::start(options).unwrap()
    });
    let thread = hear.recv().unwrap();
    ip(&format!("link add cable{number} type veth peer name wire netns {thread}"));
    ip(&format!("link set cable{number} master hub up"));
    go.send(()).unwrap();
    node.join().unwrap()
}

/// A node, and what is known there by its events.
struct Node {
    number: u8,
    peers: Peers,
    sessions: BTreeMap<u8, (SessionNumber, Vec<String>)>,
    vanished: Vec<(u8, Reason)>,
}

impl Node {
    fn new(number: u8, peers: Peers) -> Self {
        let topic = format!("topic {number}");
        let interest = Interest::new(topic, true, false, &TopicSettings::default()).unwrap();
        peers.set_interests([interest]).unwrap();
        Self { number, peers, sessions: BTreeMap::new(), vanished: Vec::new() }
    }

    /// Reads events until it is so.
    fn wait(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !is_so(self) {
            let Some(event) = self.peers.next_event() else {
                let left = end.saturating_duration_since(Instant::now());
                let (number, reports) = (self.number, self.peers.reports());
                assert!(!left.is_zero(), "node {number} never had {what}: {reports:#?}");
                let mut entries = [PollFd::new(self.peers.descriptor(), PollFlags::POLLIN)];
                poll(&mut entries, PollTimeout::try_from(left).unwrap()).unwrap();
                continue;
            };
            match event {
                Event::Appeared { node, session, ours, theirs, .. } => {
                    assert_eq!(ours.ip(), address(self.number));
                    assert_eq!(theirs.ip(), address(node.0[0]));
                    let before = self.sessions.insert(node.0[0], (session, Vec::new()));
                    assert_eq!(before, None);
                }
                Event::Interests { node, session, changes } => {
                    let known = self.sessions.get_mut(&node.0[0]).unwrap();
                    assert_eq!(known.0, session);
                    for change in changes {
                        match change {
                            pubsub::peers::Change::Set(set) => known.1.push(set.topic),
                            other => panic!("{other:?}"),
                        }
                    }
                }
                Event::Letter { .. } => panic!("nobody wrote"),
                Event::Vanished { node, session, reason } => {
                    let known = self.sessions.remove(&node.0[0]).unwrap();
                    assert_eq!(known.0, session);
                    self.vanished.push((node.0[0], reason));
                }
            }
        }
    }

    fn has_all_of(&self, others: impl IntoIterator<Item = u8>) -> bool {
        others.into_iter().filter(|other| *other != self.number).all(|other| {
            self.sessions
                .get(&other)
                .is_some_and(|(_, topics)| *topics == [format!("topic {other}")])
        })
    }
}

/// What happens in the namespaces.
#[test]
fn the_inside() {
    if std::env::var_os(INSIDE).is_none() {
        return;
    }
    ip("link add hub type bridge");
    ip("link set hub up");
    // The one that all ask is not the first to be there.
    let mut nodes: Vec<_> =
        [4, 2, 1, 5, 3].map(|number| Node::new(number, start(number))).into_iter().collect();
    for node in &mut nodes {
        node.wait("all others", |node| node.has_all_of(1..=NODES));
        assert_eq!(node.vanished, []);
    }

    // Nothing tells either side that the cable is cut.
    let last = NODES;
    ip(&format!("link set cable{last} nomaster"));
    for node in &mut nodes {
        if node.number == last {
            node.wait("nobody any more", |node| node.sessions.is_empty());
        } else {
            node.wait("one less", |node| !node.sessions.contains_key(&last));
            // What the others have with each other goes on.
            assert!(node.has_all_of(1..last));
            assert_eq!(node.vanished.len(), 1, "{:?}", node.vanished);
        }
    }
    ip(&format!("link set cable{last} master hub"));
    for node in &mut nodes {
        node.wait("all others again", |node| node.has_all_of(1..=NODES));
        if node.number != last {
            assert_eq!(node.vanished.len(), 1, "{:?}", node.vanished);
        }
    }
    // Both ends of each call their session the same.
    for one in &nodes {
        for two in nodes.iter().filter(|two| two.number != one.number) {
            assert_eq!(one.sessions[&two.number].0, two.sessions[&one.number].0);
        }
    }

    // One that leaves in order is not waited for.
    let left = nodes.remove(0);
    let number = left.number;
    drop(left);
    for node in &mut nodes {
        node.wait("one that left", |node| !node.sessions.contains_key(&number));
        assert!(node.vanished.contains(&(number, Reason::Left)), "{:?}", node.vanished);
    }
}

#[test]
fn five_nodes_find_each_other_and_one_is_cut_off_for_a_while() {
    if std::env::var_os(INSIDE).is_some() {
        return;
    }
    let namespaces = ["--user", "--map-root-user", "--net"];
    // Does all that is needed work here?
    let attempt = "ip link add hub type bridge && \
                   ip link add cable type veth peer name wire && unshare --net true";
    let output = Command::new("unshare").args(namespaces).args(["sh", "-c", attempt]).output();
    match output {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            let why = String::from_utf8_lossy(&output.stderr).into_owned();
            return println!("skipped: no networks can be made here: {}", why.trim());
        }
        Err(error) => return println!("skipped: there is no unshare here: {error}"),
    }
    let status = Command::new("unshare")
        .args(namespaces)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "the_inside", "--nocapture"])
        .env(INSIDE, "1")
        .stdin(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
}
