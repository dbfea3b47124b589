//! Starts all processes, makes them fail, and compares what was published with what came.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::libc::SIGCONT;
use testkit::children::{self, Child};
use testkit::processes::status;

use crate::account::Account;
use crate::network::{Network, cut, make_hub, mend};
use crate::topics::{self, LONGEST};

const NODES: [u8; 2] = [1, 2];
const PUBLISHERS: usize = 2;
const READERS: usize = 3;
/// From a start, or the end of all failures, until everything goes on as without them.
const SETTLING: Duration = Duration::from_secs(10);
/// How long processes are looked at that have nothing to do, and the most processor time that each may
/// take meanwhile.
const IDLE: Duration = Duration::from_secs(10);
const MAX_IDLE_CPU: Duration = IDLE.checked_div(100).unwrap();
/// Descriptors and memory that a process may have beyond what it had at the beginning.
const MORE_DESCRIPTORS: usize = 8;
const MORE_MEMORY: u64 = 32 << 20;
/// Messages that a publisher may have published behind the last one that any reader got, when it was
/// killed.
const UNSEEN: u64 = 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    Service,
    Publisher,
    Reader,
}

impl Role {
    fn word(self) -> &'static str {
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
    /// Of a publisher.
    id: Option<u64>,
    /// When it goes on, if it is stopped.
    resumes: Option<Instant>,
    was_stopped: bool,
}

/// What a process holds.
#[derive(Debug, Clone, Copy)]
struct Resources {
    descriptors: usize,
    memory: u64,
    processor: Duration,
}

impl Process {
    fn start(role: Role, node: u8, network: &Network, directory: &Path) -> Self {
        let words = [role.word(), directory.to_str().expect("a path of text"), &node.to_string()];
        let words = &words[..if role == Role::Service { 3 } else { 2 }];
        let mut command = children::respawn(words);
        command.stdout(Stdio::piped());
        let mut child = network.within(|| Child::start(&mut command));
        let id = match role {
            Role::Service => None,
            Role::Publisher | Role::Reader => {
                let line = child.line(LONGEST).expect("a process that is ready");
                line.strip_prefix("ready ").map(|id| id.parse().expect("an identity"))
            }
        };
        Self { role, node, child, id, resumes: None, was_stopped: false }
    }

    fn resources(&self) -> Resources {
        let place = PathBuf::from(format!("/proc/{}", self.child.id()));
        let memory = status(&place, "VmRSS");
        let memory = memory.split(' ').next().and_then(|it| it.parse::<u64>().ok()).unwrap_or(0);
        let line = std::fs::read_to_string(place.join("stat")).expect("a process that lives");
        let fields: Vec<&str> =
            line.rsplit_once(')').expect("a name").1.split_whitespace().collect();
        let ticks: u64 = fields[11..13].iter().map(|it| it.parse::<u64>().expect("ticks")).sum();
        // USER_HZ is 100 on all architectures.
        let processor = Duration::from_millis(10 * ticks);
        Resources { descriptors: self.child.descriptors(), memory: memory << 10, processor }
    }
}

/// Failures that were made, by name.
type Failures = BTreeMap<&'static str, u64>;

struct World {
    processes: Vec<Process>,
    networks: Vec<Network>,
    directories: Vec<PathBuf>,
    random: u64,
    mends: Option<Instant>,
    failures: Failures,
    /// On which node each publisher is, or was.
    publishers: BTreeMap<u64, u8>,
}

impl World {
    fn start(seed: u64) -> Self {
        make_hub();
        let name = |node: &u8| format!("fabricast-soak-{}-{node}", std::process::id());
        let mut world = Self {
            processes: Vec::new(),
            networks: NODES.iter().map(|node| Network::new(*node)).collect(),
            directories: NODES.iter().map(|node| std::env::temp_dir().join(name(node))).collect(),
            random: seed | 1,
            mends: None,
            failures: Failures::new(),
            publishers: BTreeMap::new(),
        };
        let of = |role, count| std::iter::repeat_n(role, count);
        for role in of(Role::Service, 1)
            .chain(of(Role::Reader, READERS))
            .chain(of(Role::Publisher, PUBLISHERS))
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

    /// A number below this one (xorshift).
    fn below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
    }

    fn pick(&mut self, is_one: impl Fn(&Process) -> bool) -> Option<usize> {
        let all: Vec<usize> =
            (0..self.processes.len()).filter(|at| is_one(&self.processes[*at])).collect();
        let at = self.below(all.len().max(1) as u64) as usize;
        all.get(at).copied()
    }

    /// One failure.
    fn fail(&mut self) {
        let what = match self.below(10) {
            0 => self.replace(Role::Publisher, "publisher killed", Child::kill),
            1 | 2 => self.replace(Role::Reader, "reader killed", Child::kill),
            3 => self.replace(Role::Service, "service killed", Child::kill),
            4 => self.replace(Role::Service, "service ended", |service| service.end(LONGEST)),
            5..=7 => {
                let Some(at) = self.pick(|process| process.resumes.is_none()) else { return };
                let millis = 100 + self.below(4900);
                let process = &mut self.processes[at];
                process.child.stop(LONGEST);
                process.resumes = Some(Instant::now() + Duration::from_millis(millis));
                process.was_stopped = true;
                match process.role {
                    Role::Service => "service stopped",
                    Role::Publisher => "publisher stopped",
                    Role::Reader => "reader stopped",
                }
            }
            _ if self.mends.is_some() => return,
            _ => {
                // Some longer than a node is waited for.
                let limit = if self.below(4) == 0 { 30_000 } else { 3_000 };
                let millis = 100 + self.below(limit);
                cut(NODES[0]);
                self.mends = Some(Instant::now() + Duration::from_millis(millis));
                "link cut"
            }
        };
        *self.failures.entry(what).or_default() += 1;
    }

    /// Ends a process of this role, and starts another one in its place.
    fn replace(
        &mut self,
        role: Role,
        what: &'static str,
        end: impl FnOnce(&mut Child),
    ) -> &'static str {
        let at = self.pick(|process| process.role == role).expect("a process of each role");
        let mut process = self.processes.swap_remove(at);
        if process.resumes.is_some() {
            process.child.signal(SIGCONT);
        }
        end(&mut process.child);
        // The new one cannot join while its service is stopped.
        self.resume(|other| other.role == Role::Service && other.node == process.node);
        self.add(role, process.node);
        what
    }

    /// Ends stops before their time.
    fn resume(&mut self, which: impl Fn(&Process) -> bool) {
        for process in self.processes.iter_mut().filter(|process| which(process)) {
            if process.resumes.take().is_some() {
                process.child.resume();
            }
        }
    }

    /// Ends the failures whose time it is, or all of them.
    fn mend(&mut self, all: bool) {
        let now = Instant::now();
        let is_due = |end: &Instant| all || *end <= now;
        if self.mends.as_ref().is_some_and(is_due) {
            mend(NODES[0]);
            self.mends = None;
        }
        self.resume(|process| process.resumes.as_ref().is_some_and(is_due));
    }

    fn look(&mut self) {
        for process in &mut self.processes {
            let ended = process.child.try_wait();
            assert!(ended.is_none(), "a {} ended: {ended:?}", process.role.word());
        }
    }

    /// Tells all of a role to stop, and has their lines, one for each topic.
    fn stop(&mut self, role: Role) -> Vec<(usize, Vec<String>)> {
        let of = |process: &Process| process.role == role;
        let all: Vec<usize> =
            (0..self.processes.len()).filter(|at| of(&self.processes[*at])).collect();
        for at in &all {
            self.processes[*at].child.say("stop");
        }
        let mut lines = Vec::new();
        for at in all {
            let child = &mut self.processes[at].child;
            let mut line = || child.line(LONGEST).expect("a line for each topic");
            lines.push((at, topics::all().iter().map(|_| line()).collect()));
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
        world.look();
        world.mend(false);
        if Instant::now() >= next {
            world.fail();
            next = Instant::now() + Duration::from_millis(300 + world.below(1700));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    world.mend(true);
    std::thread::sleep(SETTLING);
    world.look();

    let mut published: BTreeMap<(String, u64), u64> = BTreeMap::new();
    for (_, lines) in world.stop(Role::Publisher) {
        for line in lines {
            let [topic, id, last] =
                line.split(' ').collect::<Vec<_>>().try_into().expect("three words");
            published.insert(
                (topic.to_owned(), id.parse().expect("an identity")),
                last.parse().expect("a number"),
            );
        }
    }
    std::thread::sleep(SETTLING);
    let accounts: Vec<(usize, Vec<Account>)> = world
        .stop(Role::Reader)
        .into_iter()
        .map(|(at, lines)| (at, lines.iter().map(|line| Account::of(line)).collect()))
        .collect();
    let faults = compare(&world, &published, &accounts);
    let idle = idle(&world, &before);
    println!("failures: {:?}", world.failures);
    for fault in faults.iter().chain(&idle) {
        println!("{fault}");
    }
    assert!(faults.is_empty() && idle.is_empty(), "{} faults", faults.len() + idle.len());
}

/// Compares what was published with what came and what was counted as missed.
fn compare(
    world: &World,
    published: &BTreeMap<(String, u64), u64>,
    accounts: &[(usize, Vec<Account>)],
) -> Vec<String> {
    let mut faults = Vec::new();
    let (mut came, mut missed) = (0, 0);
    for (at, accounts) in accounts {
        let process = &world.processes[*at];
        for account in accounts {
            let name = format!("{} at node {}", account.topic, process.node);
            let (mut least, mut most) = (0, 0);
            for (id, received) in &account.publishers {
                came += received.count;
                let last = published.get(&(account.topic.clone(), *id)).copied();
                let behind = last.map(|last| last - received.last);
                least += received.gaps() + behind.unwrap_or(0);
                // What it missed before the first one that came, and of one that was killed behind the last.
                most += received.gaps() + received.first - 1 + behind.unwrap_or(UNSEEN);
                let is_local = world.publishers.get(id) == Some(&process.node);
                if is_local && !process.was_stopped && received.gaps() > 0 {
                    faults.push(format!(
                        "{name}: a reader that was never stopped missed {} messages of its own node",
                        received.gaps()
                    ));
                }
            }
            // Publishers that it got nothing of.
            for ((topic, id), last) in published {
                if *topic == account.topic && !account.publishers.contains_key(id) {
                    most += last;
                }
            }
            missed += account.missed;
            if account.evictions == 0 && account.missed < least {
                faults.push(format!(
                    "{name}: {least} messages did not come, {} were counted as missed: {account:?}",
                    account.missed
                ));
            }
            let is_whole = account
                .publishers
                .keys()
                .all(|id| published.contains_key(&(account.topic.clone(), *id)));
            if is_whole && account.missed > most {
                faults.push(format!(
                    "{name}: {most} messages may not have come, {} were counted as missed: {account:?}",
                    account.missed
                ));
            }
        }
    }
    println!("messages: {came} came, {missed} were counted as missed");
    faults
}

/// Looks at processes that have nothing to do.
fn idle(world: &World, before: &BTreeMap<(Role, u8), Resources>) -> Vec<String> {
    let mut faults = Vec::new();
    let start: Vec<Resources> = world.processes.iter().map(Process::resources).collect();
    std::thread::sleep(IDLE);
    for (process, start) in world.processes.iter().zip(start) {
        let (now, first) = (process.resources(), before[&(process.role, process.node)]);
        let name = format!("a {} of node {}", process.role.word(), process.node);
        let taken = now.processor - start.processor;
        if taken > MAX_IDLE_CPU {
            faults.push(format!("{name} took {taken:?} of the processor within {IDLE:?}, idle"));
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
