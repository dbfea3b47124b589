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
use crate::progress::{Progress, Published};
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
    /// Only of a reader.
    joined: Joined,
}

/// What was published before a reader subscribed: at least, and at most.
#[derive(Default)]
struct Joined {
    before: PublishedByAll,
    after: PublishedByAll,
    /// The nodes could not reach each other for sure: what its node misses, it misses, too.
    in_outage: bool,
}

/// By publisher: its numbers on each topic.
type PublishedByAll = BTreeMap<u64, Vec<Published>>;

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
        let joined = Joined::default();
        Self { role, node, child, id, resumes: None, was_stopped: false, joined }
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
    /// The end of the last failure of a link or a service.
    outage_ended: Option<Instant>,
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
            outage_ended: None,
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
        let before = self.published();
        let mut process =
            Process::start(role, node, &self.networks[index], &self.directories[index]);
        if let Some(id) = process.id {
            self.publishers.insert(id, node);
        }
        if role == Role::Reader {
            let (after, in_outage) = (self.published(), self.is_in_outage());
            process.joined = Joined { before, after, in_outage };
        }
        self.processes.push(process);
    }

    /// What all publishers have published, killed ones, too.
    fn published(&self) -> PublishedByAll {
        let topics = topics::all().len();
        let read = |(id, node): (&u64, &u8)| {
            (*id, Progress::read(&self.directories[usize::from(*node) - 1], *id, topics))
        };
        self.publishers.iter().map(read).collect()
    }

    fn is_in_outage(&self) -> bool {
        let is_stopped =
            |process: &Process| process.role == Role::Service && process.resumes.is_some();
        self.link_restores.is_some()
            || self.processes.iter().any(is_stopped)
            || self.outage_ended.is_some_and(|ended| ended.elapsed() < SETTLING)
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
        if role == Role::Service {
            self.outage_ended = Some(Instant::now());
        }
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
                if process.role == Role::Service {
                    self.outage_ended = Some(Instant::now());
                }
            }
        }
    }

    /// Ends the failures that are due, or all of them.
    fn end_failures(&mut self, all: bool) {
        let now = Instant::now();
        let is_due = |end: &Instant| all || *end <= now;
        if self.link_restores.as_ref().is_some_and(is_due) {
            restore_link(NODES[0]);
            (self.link_restores, self.outage_ended) = (None, Some(now));
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

    world.stop(Role::Publisher);
    let published = world.published();
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

/// Compares published messages with those received and those counted as missed: for each reader and
/// topic both together are what was published since it subscribed. What was published while it
/// subscribed may count, or not, and the message during which a publisher was killed.
fn compare(
    world: &World,
    published: &PublishedByAll,
    accounts: &[(usize, Vec<Account>)],
) -> Vec<String> {
    let mut faults = Vec::new();
    let (mut received_count, mut missed, mut open) = (0, 0, 0);
    for (index, accounts) in accounts {
        let process = &world.processes[*index];
        for (topic, account) in accounts.iter().enumerate() {
            let name = format!("{} on node {}", account.topic, process.node);
            let (mut least, mut most, mut gaps, mut received) = (0, 0, 0, 0);
            for (id, all) in published {
                let [before, after] = [&process.joined.before, &process.joined.after]
                    .map(|known| known.get(id).map_or_else(Published::default, |all| all[topic]));
                least += all[topic].done.saturating_sub(after.begun);
                most += all[topic].begun - before.done;
                let Some(of_publisher) = account.publishers.get(id) else { continue };
                received += of_publisher.count;
                gaps += of_publisher.gaps();
                let is_local = world.publishers.get(id) == Some(&process.node);
                if is_local && !process.was_stopped && of_publisher.gaps() > 0 {
                    faults.push(format!(
                        "{name}: a reader that was never stopped missed {} messages of its own node",
                        of_publisher.gaps()
                    ));
                }
            }
            received_count += received;
            missed += account.missed;
            if account.evictions > 0 {
                continue;
            }
            let total = received + account.missed;
            let is_too_many = total > most && !process.joined.in_outage;
            if total < least || is_too_many || account.missed < gaps {
                faults.push(format!(
                    "{name}: {least} to {most} messages were published, {received} received and {} \
                     counted as missed: {account:?}",
                    account.missed
                ));
            }
            open += most - least;
        }
    }
    println!(
        "messages: {received_count} received, {missed} counted as missed; {open} were published \
         while a reader subscribed, or their publisher was killed: they may count, or not"
    );
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
