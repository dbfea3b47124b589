//! Two agents, a region and a route that end in every order, during transfers.
//!
//! One test has both agents in this process. The other one has the initiator in a child, which is
//! sometimes killed. `TEST_ROUNDS` sets how often each order is tried.

use std::collections::VecDeque;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use gpu::{Block, Device, Memory, emulated};
use testkit::bytes::all_are;
use testkit::children::{self, Child};
use transfer::path::Policy;
use transfer::{Agent, AgentOptions, Buffer, HostBuffer, Region, Rights, Route};

use crate::common::{TIMEOUT, alone, device};

/// The length of a region, and of the memory before and after it in the same allocation.
const LENGTH: u64 = 64 << 10;
/// Longer than this means that no deadline of the agents ended it.
const LONGEST: Duration = Duration::from_secs(5);
const PUTS: usize = 6;

fn rounds(usual: u32) -> u32 {
    let set = std::env::var("TEST_ROUNDS").ok();
    set.map_or(usual, |set| set.parse().expect("TEST_ROUNDS is a number"))
}

fn slow(delay: Duration) {
    for number in 0..emulated::COUNT {
        emulated::configure_faults(number, emulated::FaultConfig { delay, ..Default::default() });
    }
}

/// All orders of four.
fn orders() -> Vec<[usize; 4]> {
    let mut orders = Vec::new();
    for number in 0..256_usize {
        let order = [0, 2, 4, 6].map(|shift| number >> shift & 3);
        if (0..4).all(|what| order.contains(&what)) {
            orders.push(order);
        }
    }
    assert_eq!(orders.len(), 24);
    orders
}

const OUTSIDE: u8 = 0x11;
/// Written by the owner to the memory of the ended region.
const AFTER: u8 = 0x33;

/// Memory in which peers may access only a region.
enum Guarded {
    /// The region is the middle third of the allocation.
    Device { all: Memory, region: Memory },
    /// The region is the whole buffer.
    Host(HostBuffer),
}

impl Guarded {
    fn new(device: &Device) -> Self {
        let all = device.allocate_shared(3 * LENGTH, &[]).unwrap();
        // SAFETY: inside of the allocation, which is moved along.
        #[allow(unsafe_code)]
        let region = unsafe { device.adopt(all.address() + LENGTH, LENGTH, all.clone()) }.unwrap();
        let guarded = Self::Device { all, region };
        guarded.fill(0..3 * LENGTH, OUTSIDE);
        guarded
    }

    fn on_host() -> Self {
        Self::Host(HostBuffer::new(LENGTH).unwrap())
    }

    fn region(&self) -> Buffer {
        match self {
            Self::Device { region, .. } => region.into(),
            Self::Host(host) => host.into(),
        }
    }

    fn fill(&self, range: std::ops::Range<u64>, byte: u8) {
        let bytes = vec![byte; (range.end - range.start) as usize];
        match self {
            Self::Device { all, .. } => {
                let slice = all.slice(range.start, bytes.len() as u64).unwrap();
                let stream = all.mapped_for().stream().unwrap();
                stream.upload(&slice, &bytes, TIMEOUT).unwrap();
            }
            Self::Host(host) => host.write(range.start, &bytes).unwrap(),
        }
    }

    /// Reuses the memory of the region.
    fn fill_after(&self) {
        match self {
            Self::Device { .. } => self.fill(LENGTH..2 * LENGTH, AFTER),
            Self::Host(_) => self.fill(0..LENGTH, AFTER),
        }
    }

    /// The bytes before, in and after the region.
    fn bytes(&self) -> [Vec<u8>; 3] {
        let length = LENGTH as usize;
        match self {
            Self::Device { all, .. } => {
                let mut bytes = vec![0; 3 * length];
                let stream = all.mapped_for().stream().unwrap();
                stream.download(&all.whole(), &mut bytes, TIMEOUT).unwrap();
                [0, 1, 2].map(|part| bytes[part * length..][..length].to_vec())
            }
            Self::Host(host) => {
                let mut bytes = vec![0; length];
                host.read(0, &mut bytes).unwrap();
                [vec![OUTSIDE; length], bytes, vec![OUTSIDE; length]]
            }
        }
    }

    /// Only the owner wrote to the region since its end, and no peer ever wrote outside.
    fn check(&self, what: &str) {
        let [before, inside, behind] = self.bytes();
        assert!(all_are(&inside, AFTER), "{what}: bytes were written after the end");
        assert!(all_are(&before, OUTSIDE) && all_are(&behind, OUTSIDE), "{what}: bytes outside");
    }
}

/// Memory that is checked now, and again later.
#[derive(Default)]
struct Checks(VecDeque<(Instant, Guarded, String)>);

impl Checks {
    /// Longer than any copy takes.
    const LATER: Duration = Duration::from_millis(200);

    fn check(&mut self, guarded: Guarded, what: String) {
        guarded.check(&what);
        self.0.push_back((Instant::now(), guarded, what));
        while self.0.front().is_some_and(|(since, ..)| since.elapsed() > Self::LATER) {
            self.check_first();
        }
    }

    fn check_first(&mut self) {
        let Some((_, guarded, what)) = self.0.pop_front() else { return };
        guarded.check(&format!("{what}, later"));
    }

    fn end(mut self) {
        std::thread::sleep(Self::LATER);
        while !self.0.is_empty() {
            self.check_first();
        }
    }
}

fn block(number: usize) -> [Block; 1] {
    let length = LENGTH / PUTS as u64;
    let at = number as u64 * length;
    [Block { to: at, from: at, length }]
}

/// The four objects that end.
struct Four {
    here: Option<Agent>,
    there: Option<Agent>,
    region: Option<Region>,
    route: Option<Route>,
}

impl Four {
    fn end(&mut self, what: usize) {
        match what {
            0 => drop(self.here.take()),
            1 => drop(self.there.take()),
            2 => drop(self.region.take()),
            _ => drop(self.route.take()),
        }
    }
}

fn begin(agent: &mut Agent, route: &Route, puts: usize) {
    for number in 0..puts {
        match agent.put(route, &block(number), None) {
            Ok(token) => agent.forget(token),
            // The other side has ended already.
            Err(_) => return,
        }
    }
}

#[test]
fn ends_in_every_order_within_a_process() {
    let _alone = alone();
    let device = device();
    let mut checks = Checks::default();
    for round in 0..rounds(20) {
        for order in orders() {
            for is_host in [false, true] {
                let guarded = if is_host { Guarded::on_host() } else { Guarded::new(&device) };
                let local: Buffer = if is_host {
                    HostBuffer::new(LENGTH).unwrap().into()
                } else {
                    device.allocate(LENGTH).unwrap().into()
                };
                let mut here = Agent::start(AgentOptions::new("here")).unwrap();
                let there = Agent::start(AgentOptions::new("there")).unwrap();
                let local = here.register(local, Rights::ALL).unwrap();
                let region = there.register(guarded.region(), Rights::ALL).unwrap();
                let peer = here.connect(&there.card().encode().unwrap(), TIMEOUT).unwrap();
                let descriptor = region.descriptor().encode().unwrap();
                let route =
                    here.join(peer, &local, &descriptor, &Policy::default(), TIMEOUT).unwrap();
                slow(Duration::from_micros(u64::from(round % 4) * 100));
                begin(&mut here, &route, PUTS);
                let start = Instant::now();
                let mut four = Four {
                    here: Some(here),
                    there: Some(there),
                    region: Some(region),
                    route: Some(route),
                };
                for what in order {
                    four.end(what);
                    if let (Some(here), Some(route)) = (&mut four.here, &four.route) {
                        begin(here, route, 1);
                        here.progress();
                    }
                }
                let took = start.elapsed();
                let what = format!("round {round}, order {order:?}, host {is_host}");
                assert!(took < LONGEST, "{what}: {took:?}");
                slow(Duration::ZERO);
                guarded.fill_after();
                checks.check(guarded, what);
            }
        }
    }
    checks.end();
}

/// In a child: the initiator. Each line is a command.
pub fn initiator(directory: &Path) {
    let device = device();
    let (mut agent, mut route, mut local) = (None, None, None);
    let (lines, commands) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        while let Some(line) = children::next_line() {
            lines.send(line).unwrap();
        }
    });
    loop {
        // The remaining objects continue.
        if let (Some(agent), Some(route)) = (&mut agent, &route) {
            begin(agent, route, 1);
        }
        let line = loop {
            match commands.recv_timeout(Duration::from_micros(200)) {
                Ok(line) => break line,
                Err(RecvTimeoutError::Timeout) => drop(agent.as_mut().map(Agent::progress)),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        };
        let mut words = line.split(' ');
        match words.next().unwrap() {
            "begin" => {
                let mut next = || unhex(words.next().unwrap());
                let (card, descriptor, delay) = (next(), next(), next()[0]);
                let mut new =
                    Agent::start(AgentOptions::new("child").directory(directory)).unwrap();
                let region = device.allocate(LENGTH).unwrap();
                let region = new.register(region, Rights::ALL).unwrap();
                let peer = new.connect(&card, TIMEOUT).unwrap();
                let policy = Policy::default();
                let joined = new.join(peer, &region, &descriptor, &policy, TIMEOUT).unwrap();
                slow(Duration::from_micros(u64::from(delay) * 100));
                begin(&mut new, &joined, PUTS);
                (agent, route, local) = (Some(new), Some(joined), Some(region));
            }
            "agent" => drop(agent.take()),
            "route" => drop((route.take(), local.take())),
            other => panic!("unknown command: {other}"),
        }
        children::say("done");
    }
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

pub fn unhex(text: &str) -> Vec<u8> {
    let digit = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(digit).collect()
}

fn start(directory: &Path) -> Child {
    let words = ["initiator".as_ref(), directory.as_os_str()];
    Child::start(children::respawn(words).stdout(Stdio::piped()))
}

fn send_command(child: &mut Child, line: &str) {
    child.say(line);
    assert_eq!(child.line(TIMEOUT).as_deref(), Some("done"), "{line}");
}

fn directory() -> PathBuf {
    let name = format!("fabricast-orders-{}", std::process::id());
    let directory = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&directory).unwrap();
    directory
}

#[test]
fn ends_in_every_order_between_processes() {
    let _alone = alone();
    let (device, directory) = (device(), directory());
    let mut child = start(&directory);
    let (mut number, mut checks) = (0_u32, Checks::default());
    for round in 0..rounds(4) {
        for order in orders() {
            number += 1;
            let guarded = Guarded::new(&device);
            let there = Agent::start(AgentOptions::new("there").directory(&directory)).unwrap();
            let region = there.register(guarded.region(), Rights::ALL).unwrap();
            let card = hex(&there.card().encode().unwrap());
            let descriptor = hex(&region.descriptor().encode().unwrap());
            let delay = hex(&[number as u8 % 16]);
            send_command(&mut child, &format!("begin {card} {descriptor} {delay}"));
            let (mut there, mut region) = (Some(there), Some(region));
            let start_of_end = Instant::now();
            // Sometimes the child is killed instead of one of its two commands.
            let mut is_killed = false;
            let mut is_reused = false;
            for (at, what) in order.into_iter().enumerate() {
                match what {
                    0 | 3 if is_killed => {}
                    0 | 3 if number % 11 == 5 + at as u32 => {
                        child.kill();
                        is_killed = true;
                    }
                    0 => send_command(&mut child, "agent"),
                    1 => drop(there.take()),
                    2 => drop(region.take()),
                    _ => send_command(&mut child, "route"),
                }
                if there.is_none() && region.is_none() && !is_reused {
                    guarded.fill_after();
                    is_reused = true;
                }
            }
            let took = start_of_end.elapsed();
            let what = format!("round {round}, order {order:?}, killed {is_killed}");
            assert!(took < LONGEST, "{what}: {took:?}");
            checks.check(guarded, what);
            if is_killed {
                child = start(&directory);
            }
        }
    }
    checks.end();
    child.end(TIMEOUT);
    std::fs::remove_dir_all(&directory).unwrap();
}
