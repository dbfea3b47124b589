//! The processes under attack, and the attacking processes.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use testkit::children::{self, Child};

use crate::attacks::Target;
use crate::logs::{Log, Logged};
use crate::network::{Network, address, create_hub, ip_of};
use crate::phases::{Actors, Phase, User};
use crate::topics::{self, TIMEOUT};
use crate::window::Counts;
use crate::{handshake, service, user};

const NODES: [u8; 2] = [1, 2];
/// Port in the network of node 2 that records the handshake of a departing node.
const RECORDER: u16 = 7100;
/// Limit of departing nodes.
const ATTEMPTS: usize = 8;
/// Timeout for the first messages between the nodes.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// A child process and its log.
pub struct Process {
    pub name: String,
    pub child: Child,
    pub log: Log,
}

/// Both nodes, with their networks, directories and processes.
pub struct World {
    pub services: Vec<Process>,
    publisher: Option<Process>,
    /// The healthy readers, one on each node.
    readers: Vec<Process>,
    pub networks: Vec<Network>,
    directories: Vec<PathBuf>,
    logs: PathBuf,
}

impl World {
    /// Starts all processes, which log into a directory.
    pub fn start(logs: &Path) -> Self {
        create_hub();
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
            let service = world.start_service(node, &peer);
            world.services.push(service);
        }
        for node in NODES {
            let directory = world.directory(node).to_str().expect("a path in UTF-8").to_owned();
            let name = format!("reader-{node}");
            let reader = world.start_process(&name, node, &["reader", &directory]);
            world.readers.push(reader);
        }
        let directory = world.directory(1).to_str().expect("a path in UTF-8").to_owned();
        world.publisher = Some(world.start_process("publisher", 1, &["publisher", &directory]));
        world.wait_for_messages();
        world
    }

    fn directory(&self, node: u8) -> &Path {
        // The directory of departing nodes is the last one.
        let index = NODES.iter().position(|number| *number == node).unwrap_or(NODES.len());
        &self.directories[index]
    }

    /// Starts a child in the network of a node, and waits until it is ready.
    pub fn start_process(&self, name: &str, node: u8, args: &[&str]) -> Process {
        let mut process = self.spawn(name, node, args);
        process.wait_until_ready();
        process
    }

    /// Starts a child in the network of a node.
    fn spawn(&self, name: &str, node: u8, args: &[&str]) -> Process {
        let (log, file) = Log::create(self.logs.join(format!("{name}.log")));
        let mut command = children::respawn(args);
        command.stdout(Stdio::piped()).stderr(file);
        let network = &self.networks[usize::from(node) - 1];
        let child = network.within(|| Child::start(&mut command));
        Process { name: name.to_owned(), child, log }
    }

    fn start_service(&self, number: u8, peer: &str) -> Process {
        let directory = self.directory(number).to_str().expect("a path in UTF-8");
        let network = if number == service::DEPARTING { 2 } else { number };
        let args = ["service", directory, &number.to_string(), peer];
        self.start_process(&format!("service-{number}"), network, &args)
    }

    fn wait_for_messages(&mut self) {
        let end = Instant::now() + CONNECT_TIMEOUT;
        loop {
            std::thread::sleep(Duration::from_millis(500));
            let all = self.take_windows();
            if all.iter().flatten().all(|counts| counts.messages > 0) {
                return;
            }
            assert!(Instant::now() < end, "timeout: a reader has no messages: {all:?}");
        }
    }

    /// The provider that the service of node 1 logs.
    pub fn provider(&self) -> String {
        let log = self.services[0].log.text();
        let name = log.split("provider=").nth(1).expect("a provider in the log");
        name.split_whitespace().next().unwrap_or_default().trim_matches('"').to_owned()
    }

    /// What an attacker knows. Nodes join and leave until node 1 is the acceptor for one of them, whose
    /// handshake is recorded.
    pub fn target(&self, seed: u64) -> Target {
        let recorder = (ip_of(2), RECORDER);
        let network = &self.networks[1];
        let listener = network.within(|| TcpListener::bind(recorder).expect("bind a free port"));
        let peer = listener.local_addr().expect("a local address").to_string();
        let hellos = [1, 2].map(|node| network.within(|| handshake::hello_of(address(node))));
        let mut departed = Vec::new();
        for _ in 0..ATTEMPTS {
            let mut departing = self.start_service(service::DEPARTING, &peer);
            departed = network.within(|| handshake::record(&listener, address(1)));
            departing.child.end(TIMEOUT);
            // Gives the next node another id.
            let _ = std::fs::remove_dir_all(self.directory(service::DEPARTING));
            if handshake::node_id(&departed) < handshake::node_id(&hellos[0]) {
                break;
            }
        }
        Target {
            services: [0, 1].map(|index| self.services[index].child.id()),
            directory: self.directory(1).to_owned(),
            seed,
            departed,
            hellos,
        }
    }

    /// Starts the processes of an attack.
    pub fn attack(&self, phase: &Phase, target: &Target) -> Vec<Process> {
        let name = |index: usize| format!("{}-{index}", phase.name);
        match &phase.actors {
            Actors::None => Vec::new(),
            Actors::Attacker(attack) => {
                let user =
                    if phase.user == User::Other && user::has_other() { "other" } else { "same" };
                let target = target.args();
                let mut args = vec!["attack", user, attack];
                args.extend(target.iter().map(String::as_str));
                vec![self.start_process(&name(0), 2, &args)]
            }
            Actors::Members(members) => {
                let directory = self.directory(1).to_str().expect("a path in UTF-8");
                let spawn = |(index, member): (usize, &String)| {
                    self.spawn(&name(index), 1, &["member", member, directory])
                };
                let mut all: Vec<_> = members.iter().enumerate().map(spawn).collect();
                all.iter_mut().for_each(Process::wait_until_ready);
                all
            }
        }
    }

    /// Counts of each reader and topic since the last call.
    pub fn take_windows(&mut self) -> Vec<Vec<Counts>> {
        self.readers.iter_mut().for_each(|reader| reader.child.say("window"));
        let counts = |reader: &mut Process| {
            let mut line = || reader.child.line(TIMEOUT).expect("a line for each topic");
            topics::ALL.iter().map(|_| Counts::of(&line())).collect()
        };
        self.readers.iter_mut().map(counts).collect()
    }

    pub fn check_running(&mut self) {
        for process in self.all() {
            let status = process.child.try_wait();
            let log = process.log.text();
            assert!(status.is_none(), "{} ended: {status:?}\n{log}", process.name);
        }
    }

    /// Log lines of each healthy process since the last call.
    pub fn take_logs(&mut self) -> Vec<(String, Logged)> {
        self.all().map(|process| (process.name.clone(), process.log.take())).collect()
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Process> {
        self.services.iter_mut().chain(&mut self.publisher).chain(&mut self.readers)
    }
}

impl Process {
    fn wait_until_ready(&mut self) {
        let line = self.child.line(TIMEOUT);
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
