//! Starts all processes, injects failures, and compares published with received messages.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::libc::SIGCONT;
use testkit::children::{self, Child};
use testkit::processes::status;

use crate::account::Account;
use crate::network::{Network, create_hub, cut_link, restore_link};
use crate::topics::{self, TIMEOUT};

const NODES: [u8; 2] = [1, 2];
const PUBLISHERS: usize = 2;
const READERS: usize = 3;
/// Time until all processes run normally after the start or the last failure.
const SETTLING: Duration = Duration::from_secs(10);
/// Duration of the measurement of idle processes, and the processor time that each may use in it.
const IDLE: Duration = Duration::from_secs(10);
const MAX_IDLE_CPU: Duration = IDLE.checked_div(100).unwrap();
/// Growth of descriptors and memory that a process may show since the beginning.
const MORE_DESCRIPTORS: usize = 8;
const MORE_MEMORY: u64 = 32 << 20;
/// Messages of a killed publisher that no reader may have received.
const UNSEEN: u64 = 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    Service,
    Publisher,
    Reader,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::Service => "service",
            Self::Publisher => "publisher",
            Self::Reader => "reader",
        }
    }
}

struct Process {
    role: Role,
    node: u8,
    child: Child,
    /// Only of a publisher.
    id: Option<u64>,
    /// When to resume it, if it is stopped.
    resumes: Option<Instant>,
    was_stopped: bool,
}

#[derive(Debug, Clone, Copy)]
struct Resources {
    descriptors: usize,
    memory: u64,
    processor: Duration,
}

impl Process {
    fn start(role: Role, node: u8, network: &Network, directory: &Path) -> Self {
        let args = [role.name(), directory.to_str().expect("a path in UTF-8"), &node.to_string()];
        let args = &args[..if role == Role::Service { 3 } else { 2 }];
        let mut command = children::respawn(args);
        command.stdout(Stdio::piped());
        let mut child = network.within(|| Child::start(&mut command));
        let id = match role {
            Role::Service => None,
            Role::Publisher | Role::Reader => {
                let line = child.line(TIMEOUT).expect("a line when the child is ready");
                line.strip_prefix("ready ").map(|id| id.parse().expect("a publisher id"))
            }
        };
        Self { role, node, child, id, resumes: None, was_stopped: false }
    }

    fn resources(&self) -> Resources {
        let proc_dir = PathBuf::from(format!("/proc/{}", self.child.id()));
        let memory = status(&proc_dir, "VmRSS");
        let memory = memory.split(' ').next().and_then(|it| it.parse::<u64>().ok()).unwrap_or(0);
        let line = std::fs::read_to_string(proc_dir.join("stat")).expect("read /proc/PID/stat");
        let fields: Vec<&str> =
            line.rsplit_once(')').expect("a command name").1.split_whitespace().collect();
        let ticks: u64 = fields[11..13].iter().map(|it| it.parse::<u64>().expect("ticks")).sum();
        // USER_HZ is 100 on all architectures.
        let processor = Duration::from_millis(10 * ticks);
        Resources { descriptors: self.child.descriptors(), memory: memory << 10, processor }
    }
}

/// Number of injected failures, by name.
type Failures = BTreeMap<&'static str, u64>;

struct World {
    processes: Vec<Process>,
    networks: Vec<Network>,
    directories: Vec<PathBuf>,
    random: u64,
    /// When to restore the link, if it is cut.
    link_restores: Option<Instant>,
    failures: Failures,
    /// The node of each publisher, including killed ones.
    publishers: BTreeMap<u64, u8>,
}

impl World {
    fn start(seed: u64) -> Self {
        create_hub();
        let name = |node: &u8| format!("fabricast-soak-{}-{node}", std::process::id());
        let mut world = Self {
            processes: Vec::new(),
            networks: NODES.iter().map(|node| Network::new(*node)).collect(),
            directories: NODES.iter().map(|node| std::env::temp_dir().join(name(node))).collect(),
            random: seed | 1,
            link_restores: None,
            failures: Failures::new(),
            publishers: BTreeMap::new(),
        };
        let repeat = |role, count| std::iter::repeat_n(role, count);
        for role in repeat(Role::Service, 1)
            .chain(repeat(Role::Reader, READERS))
            .chain(repeat(Role::Publisher, PUBLISHERS))
        {
            for node in NODES {
                world.add(role, node);
            }
        }
        world
    }

    fn add(&mut self, role: Role, node: u8) {
        let index = usize::from(node) - 1;
        let process = Process::start(role, node, &self.networks[index], &self.directories[index]);
        if let Some(id) = process.id {
            self.publishers.insert(id, node);
        }
        self.processes.push(process);
    }

    /// A random number below a limit (xorshift).
    fn below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
    }

    fn pick(&mut self, filter: impl Fn(&Process) -> bool) -> Option<usize> {
        let all: Vec<usize> =
            (0..self.processes.len()).filter(|index| filter(&self.processes[*index])).collect();
        let index = self.below(all.len().max(1) as u64) as usize;
        all.get(index).copied()
    }

    /// Injects one failure.
    fn fail(&mut self) {
        let name = match self.below(10) {
            0 => self.replace(Role::Publisher, "publisher killed", Child::kill),
            1 | 2 => self.replace(Role::Reader, "reader killed", Child::kill),
            3 => self.replace(Role::Service, "service killed", Child::kill),
            4 => self.replace(Role::Service, "service ended", |service| service.end(TIMEOUT)),
            5..=7 => {
                let Some(index) = self.pick(|process| process.resumes.is_none()) else { return };
                let millis = 100 + self.below(4900);
                let process = &mut self.processes[index];
                process.child.stop(TIMEOUT);
                process.resumes = Some(Instant::now() + Duration::from_millis(millis));
                process.was_stopped = true;
                match process.role {
                    Role::Service => "service stopped",
                    Role::Publisher => "publisher stopped",
                    Role::Reader => "reader stopped",
                }
            }
            _ if self.link_restores.is_some() => return,
            _ => {
                // Some cuts are longer than the session timeout.
                let limit = if self.below(4) == 0 { 30_000 } else { 3_000 };
                let millis = 100 + self.below(limit);
                cut_link(NODES[0]);
                self.link_restores = Some(Instant::now() + Duration::from_millis(millis));
                "link cut"
            }
        };
        *self.failures.entry(name).or_default() += 1;
    }

    /// Ends a process of a role, and starts another one.
    fn replace(
        &mut self,
        role: Role,
        failure: &'static str,
        end: impl FnOnce(&mut Child),
    ) -> &'static str {
        let index = self.pick(|process| process.role == role).expect("a process of each role");
        let mut process = self.processes.swap_remove(index);
        if process.resumes.is_some() {
            process.child.signal(SIGCONT);
        }
        end(&mut process.child);
        // The new process cannot join while its service is stopped.
        self.resume(|other| other.role == Role::Service && other.node == process.node);
        self.add(role, process.node);
        failure
    }

    /// Resumes stopped processes.
    fn resume(&mut self, filter: impl Fn(&Process) -> bool) {
        for process in self.processes.iter_mut().filter(|process| filter(process)) {
            if process.resumes.take().is_some() {
                process.child.resume();
            }
        }
    }

    /// Ends the failures that are due, or all of them.
    fn end_failures(&mut self, all: bool) {
        let now = Instant::now();
        let is_due = |end: &Instant| all || *end <= now;
        if self.link_restores.as_ref().is_some_and(is_due) {
            restore_link(NODES[0]);
            self.link_restores = None;
        }
        self.resume(|process| process.resumes.as_ref().is_some_and(is_due));
    }

    fn check_running(&mut self) {
        for process in &mut self.processes {
            let status = process.child.try_wait();
            assert!(status.is_none(), "a {} ended: {status:?}", process.role.name());
        }
    }

    /// Stops all processes of a role, and returns the line of each for each topic.
    fn stop(&mut self, role: Role) -> Vec<(usize, Vec<String>)> {
        let has_role = |index: &usize| self.processes[*index].role == role;
        let all: Vec<usize> = (0..self.processes.len()).filter(has_role).collect();
        for index in &all {
            self.processes[*index].child.say("stop");
        }
        let mut lines = Vec::new();
        for index in all {
            let child = &mut self.processes[index].child;
            let mut line = || child.line(TIMEOUT).expect("a line for each topic");
            lines.push((index, topics::all().iter().map(|_| line()).collect()));
        }
        lines
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.processes.clear();
        for directory in &self.directories {
            let _ = std::fs::remove_dir_all(directory);
        }
    }
}

pub fn run(time: Duration, seed: u64) {
    let mut world = World::start(seed);
    std::thread::sleep(SETTLING);
    let before: BTreeMap<(Role, u8), Resources> = world
        .processes
        .iter()
        .map(|process| ((process.role, process.node), process.resources()))
        .collect();

    let end = Instant::now() + time;
    let mut next = Instant::now();
    while Instant::now() < end {
        world.check_running();
        world.end_failures(false);
        if Instant::now() >= next {
            world.fail();
            next = Instant::now() + Duration::from_millis(300 + world.below(1700));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    world.end_failures(true);
    std::thread::sleep(SETTLING);
    world.check_running();

    let mut published: BTreeMap<(String, u64), u64> = BTreeMap::new();
    for (_, lines) in world.stop(Role::Publisher) {
        for line in lines {
            let [topic, id, last] =
                line.split(' ').collect::<Vec<_>>().try_into().expect("three words");
            published.insert(
                (topic.to_owned(), id.parse().expect("a publisher id")),
                last.parse().expect("a number"),
            );
        }
    }
    std::thread::sleep(SETTLING);
    let accounts: Vec<(usize, Vec<Account>)> = world
        .stop(Role::Reader)
        .into_iter()
        .map(|(index, lines)| (index, lines.iter().map(|line| Account::of(line)).collect()))
        .collect();
    let faults = compare(&world, &published, &accounts);
    let idle = check_idle(&world, &before);
    println!("failures: {:?}", world.failures);
    for fault in faults.iter().chain(&idle) {
        println!("{fault}");
    }
    assert!(faults.is_empty() && idle.is_empty(), "{} faults", faults.len() + idle.len());
}

/// Compares published messages with those received and those counted as missed.
fn compare(
    world: &World,
    published: &BTreeMap<(String, u64), u64>,
    accounts: &[(usize, Vec<Account>)],
) -> Vec<String> {
    let mut faults = Vec::new();
    let (mut received_count, mut missed) = (0, 0);
    for (index, accounts) in accounts {
        let process = &world.processes[*index];
        for account in accounts {
            let name = format!("{} on node {}", account.topic, process.node);
            let (mut min_missed, mut max_missed) = (0, 0);
            for (id, received) in &account.publishers {
                received_count += received.count;
                let last = published.get(&(account.topic.clone(), *id)).copied();
                let tail = last.map(|last| last - received.last);
                min_missed += received.gaps() + tail.unwrap_or(0);
                // Messages before the first received one, and after the last one of a killed publisher.
                max_missed += received.gaps() + received.first - 1 + tail.unwrap_or(UNSEEN);
                let is_local = world.publishers.get(id) == Some(&process.node);
                if is_local && !process.was_stopped && received.gaps() > 0 {
                    faults.push(format!(
                        "{name}: a reader that was never stopped missed {} messages of its own node",
                        received.gaps()
                    ));
                }
            }
            // Publishers of which it received nothing.
            for ((topic, id), last) in published {
                if *topic == account.topic && !account.publishers.contains_key(id) {
                    max_missed += last;
                }
            }
            missed += account.missed;
            if account.evictions == 0 && account.missed < min_missed {
                faults.push(format!(
                    "{name}: {min_missed} messages are missing, {} were counted as missed: {account:?}",
                    account.missed
                ));
            }
            let is_complete = account
                .publishers
                .keys()
                .all(|id| published.contains_key(&(account.topic.clone(), *id)));
            if is_complete && account.missed > max_missed {
                faults.push(format!(
                    "{name}: at most {max_missed} messages are missing, {} were counted as missed: {account:?}",
                    account.missed
                ));
            }
        }
    }
    println!("messages: {received_count} received, {missed} counted as missed");
    faults
}

/// Checks the resources of idle processes.
fn check_idle(world: &World, before: &BTreeMap<(Role, u8), Resources>) -> Vec<String> {
    let mut faults = Vec::new();
    let start: Vec<Resources> = world.processes.iter().map(Process::resources).collect();
    std::thread::sleep(IDLE);
    for (process, start) in world.processes.iter().zip(start) {
        let (now, first) = (process.resources(), before[&(process.role, process.node)]);
        let name = format!("a {} of node {}", process.role.name(), process.node);
        let used = now.processor - start.processor;
        if used > MAX_IDLE_CPU {
            faults.push(format!("{name} used {used:?} of processor time in {IDLE:?} of idling"));
        }
        if now.descriptors > first.descriptors + MORE_DESCRIPTORS {
            faults.push(format!(
                "{name} has {} descriptors open, {} at the beginning",
                now.descriptors, first.descriptors
            ));
        }
        if now.memory > first.memory + first.memory / 2 + MORE_MEMORY {
            faults.push(format!(
                "{name} has {} bytes of memory, {} at the beginning",
                now.memory, first.memory
            ));
        }
    }
    faults
}
