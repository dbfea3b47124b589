//! The processes under attack, and the attacking processes.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use testkit::children::{self, Child};

use crate::attacks::Target;
use crate::logs::{Log, Logged};
use crate::network::{Network, address, ip_of, make_hub};
use crate::phases::{Actors, Phase, User};
use crate::topics::{self, LONGEST};
use crate::window::Counts;
use crate::{handshake, service, user};

const NODES: [u8; 2] = [1, 2];
/// Where the handshake of a node that leaves is recorded, in the network of node 2.
const RECORDER: u16 = 7100;
/// Nodes that join and leave, at most.
const ATTEMPTS: usize = 8;
/// Until messages go between the nodes.
const CONNECTED: Duration = Duration::from_secs(30);

/// A child, and its log.
pub struct Process {
    pub name: String,
    pub child: Child,
    pub log: Log,
}

/// Both nodes, with their networks, directories and processes.
pub struct World {
    pub services: Vec<Process>,
    publisher: Option<Process>,
    /// One at each node, healthy.
    readers: Vec<Process>,
    pub networks: Vec<Network>,
    directories: Vec<PathBuf>,
    logs: PathBuf,
}

impl World {
    /// Starts all processes; their logs go into this directory.
    pub fn start(logs: &Path) -> Self {
        make_hub();
        let name = |node: &u8| format!("fabricast-hostile-{}-{node}", std::process::id());
        let mut world = Self {
            services: Vec::new(),
            publisher: None,
            readers: Vec::new(),
            networks: NODES.iter().map(|node| Network::new(*node)).collect(),
            directories: [&NODES[..], &[service::DEPARTING]]
                .concat()
                .iter()
                .map(|node| std::env::temp_dir().join(name(node)))
                .collect(),
            logs: logs.to_owned(),
        };
        for node in NODES {
            let peer = address(3 - node).to_string();
            let service = world.service(node, &peer);
            world.services.push(service);
        }
        for node in NODES {
            let directory = world.directory(node).to_str().expect("a path of text").to_owned();
            let reader = world.process(&format!("reader-{node}"), node, &["reader", &directory]);
            world.readers.push(reader);
        }
        let directory = world.directory(1).to_str().expect("a path of text").to_owned();
        world.publisher = Some(world.process("publisher", 1, &["publisher", &directory]));
        world.wait_for_messages();
        world
    }

    fn directory(&self, node: u8) -> &Path {
        // That of the node which leaves stands last.
        let at = NODES.iter().position(|number| *number == node).unwrap_or(NODES.len());
        &self.directories[at]
    }

    /// Starts a child in the network of a node, and waits until it is ready.
    pub fn process(&self, name: &str, node: u8, words: &[&str]) -> Process {
        let mut process = self.begin(name, node, words);
        process.wait_until_ready();
        process
    }

    /// Starts a child in the network of a node.
    fn begin(&self, name: &str, node: u8, words: &[&str]) -> Process {
        let (log, file) = Log::create(self.logs.join(format!("{name}.log")));
        let mut command = children::respawn(words);
        command.stdout(Stdio::piped()).stderr(file);
        let network = &self.networks[usize::from(node) - 1];
        let child = network.within(|| Child::start(&mut command));
        Process { name: name.to_owned(), child, log }
    }

    fn service(&self, number: u8, peer: &str) -> Process {
        let directory = self.directory(number).to_str().expect("a path of text");
        let network = if number == service::DEPARTING { 2 } else { number };
        let words = ["service", directory, &number.to_string(), peer];
        self.process(&format!("service-{number}"), network, &words)
    }

    fn wait_for_messages(&mut self) {
        let end = Instant::now() + CONNECTED;
        loop {
            std::thread::sleep(Duration::from_millis(500));
            let all = self.windows();
            if all.iter().flatten().all(|counts| counts.messages > 0) {
                return;
            }
            assert!(Instant::now() < end, "no messages at a reader: {all:?}");
        }
    }

    /// Which provider carries the messages.
    pub fn provider(&self) -> String {
        let log = self.services[0].log.text();
        let name = log.split("provider=").nth(1).expect("the service names its provider");
        name.split_whitespace().next().unwrap_or_default().trim_matches('"').to_owned()
    }

    /// What an attacker knows. Nodes join and leave until node 1 accepts the claims of one of them; the
    /// handshake of that node is recorded.
    pub fn target(&self, seed: u64) -> Target {
        let recorder = (ip_of(2), RECORDER);
        let network = &self.networks[1];
        let listener = network.within(|| TcpListener::bind(recorder).expect("a port that is free"));
        let peer = listener.local_addr().expect("an address").to_string();
        let hellos = [1, 2].map(|node| network.within(|| handshake::hello_of(address(node))));
        let mut departed = Vec::new();
        for _ in 0..ATTEMPTS {
            let mut departing = self.service(service::DEPARTING, &peer);
            departed = network.within(|| handshake::record(&listener, address(1)));
            departing.child.end(LONGEST);
            // The next one has another identity.
            let _ = std::fs::remove_dir_all(self.directory(service::DEPARTING));
            if handshake::identity(&departed) < handshake::identity(&hellos[0]) {
                break;
            }
        }
        Target {
            services: [0, 1].map(|at| self.services[at].child.id()),
            directory: self.directory(1).to_owned(),
            seed,
            departed,
            hellos,
        }
    }

    /// Starts the processes of an attack.
    pub fn attack(&self, phase: &Phase, target: &Target) -> Vec<Process> {
        let name = |at: usize| format!("{}-{at}", phase.name);
        match &phase.actors {
            Actors::None => Vec::new(),
            Actors::Attacker(attack) => {
                let user =
                    if phase.user == User::Other && user::has_other() { "other" } else { "same" };
                let target = target.words();
                let mut words = vec!["attack", user, attack];
                words.extend(target.iter().map(String::as_str));
                vec![self.process(&name(0), 2, &words)]
            }
            Actors::Members(members) => {
                let directory = self.directory(1).to_str().expect("a path of text");
                let begin = |(at, member): (usize, &String)| {
                    self.begin(&name(at), 1, &["member", member, directory])
                };
                let mut all: Vec<_> = members.iter().enumerate().map(begin).collect();
                all.iter_mut().for_each(Process::wait_until_ready);
                all
            }
        }
    }

    /// What each reader got of each topic since this was asked last.
    pub fn windows(&mut self) -> Vec<Vec<Counts>> {
        self.readers.iter_mut().for_each(|reader| reader.child.say("window"));
        let counts = |reader: &mut Process| {
            let mut line = || reader.child.line(LONGEST).expect("a line for each topic");
            topics::ALL.iter().map(|_| Counts::of(&line())).collect()
        };
        self.readers.iter_mut().map(counts).collect()
    }

    /// Refuses that one of the processes has ended.
    pub fn look(&mut self) {
        for process in self.all() {
            let ended = process.child.try_wait();
            let log = process.log.text();
            assert!(ended.is_none(), "{} ended: {ended:?}\n{log}", process.name);
        }
    }

    /// What was logged since this was asked last: by each process that is not hostile.
    pub fn logged(&mut self) -> Vec<(String, Logged)> {
        self.all().map(|process| (process.name.clone(), process.log.take())).collect()
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Process> {
        self.services.iter_mut().chain(&mut self.publisher).chain(&mut self.readers)
    }
}

impl Process {
    fn wait_until_ready(&mut self) {
        let line = self.child.line(LONGEST);
        assert_eq!(line.as_deref(), Some("ready"), "{}: {}", self.name, self.log.text());
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.readers.clear();
        self.publisher = None;
        self.services.clear();
        for directory in &self.directories {
            let _ = std::fs::remove_dir_all(directory);
        }
    }
}
