//! Two agents, a region and a route that end in every order, with transfers under way.
//!
//! One test has both agents in this process, the other one has the initiator in a child, which is
//! killed at times. `FABRICAST_TEST_ROUNDS` says how often each order is tried.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use gpu::{Block, Device, Memory, stand_in};
use testkit::children::{self, Child};
use transfer::path::Policy;
use transfer::{Agent, AgentOptions, Buffer, HostBuffer, Region, Rights, Route};

use crate::common::{PATIENCE, alone, device};

/// Of a region, and of what lies before and behind it in the same allocation.
const LENGTH: u64 = 64 << 10;
/// What is longer than this was not ended by a deadline of the agents.
const LONGEST: Duration = Duration::from_secs(5);
const PUTS: usize = 6;

fn rounds(usual: u32) -> u32 {
    let set = std::env::var("FABRICAST_TEST_ROUNDS").ok();
    set.map_or(usual, |set| set.parse().expect("FABRICAST_TEST_ROUNDS is a number"))
}

fn slow(delay: Duration) {
    for number in 0..stand_in::COUNT {
        stand_in::behave(number, stand_in::Behaviour { delay, ..Default::default() });
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

/// Memory with a byte pattern in it, of which peers may reach all but the ends.
struct Guarded {
    all: Memory,
}

impl Guarded {
    fn new(device: &Device) -> Self {
        let guarded = Self { all: device.allocate_shared(3 * LENGTH, &[]).unwrap() };
        guarded.fill(0..3 * LENGTH, 0x11);
        guarded
    }

    fn fill(&self, range: std::ops::Range<u64>, byte: u8) {
        let stream = self.all.mapped_for().stream().unwrap();
        let slice = self.all.slice(range.start, range.end - range.start).unwrap();
        stream.upload(&slice, &vec![byte; (range.end - range.start) as usize], PATIENCE).unwrap();
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; 3 * LENGTH as usize];
        let stream = self.all.mapped_for().stream().unwrap();
        stream.download(&self.all.whole(), &mut bytes, PATIENCE).unwrap();
        bytes
    }

    /// After the end of the region: what is there now stays, and its ends were never touched.
    fn check(&self, after: &[u8], what: &str) {
        let bytes = self.bytes();
        assert!(bytes == after, "{what}: bytes moved behind the end");
        let (inner, length) = (LENGTH as usize..2 * LENGTH as usize, 3 * LENGTH as usize);
        let outside = (0..inner.start).chain(inner.end..length);
        assert!(outside.into_iter().all(|at| bytes[at] == 0x11), "{what}: bytes outside");
    }
}

/// The middle of it. Its ends are behind what peers can name.
fn block(number: usize) -> [Block; 1] {
    let length = LENGTH / PUTS as u64;
    let at = number as u64 * length;
    [Block { to: LENGTH + at, from: at, length }]
}

/// What ends.
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
    for round in 0..rounds(20) {
        for order in orders() {
            for is_host in [false, true] {
                let guarded = Guarded::new(&device);
                let host = HostBuffer::new(3 * LENGTH).unwrap();
                let theirs: Buffer =
                    if is_host { host.clone().into() } else { (&guarded.all).into() };
                let mine: Buffer = if is_host {
                    HostBuffer::new(LENGTH).unwrap().into()
                } else {
                    device.allocate(LENGTH).unwrap().into()
                };
                let mut here = Agent::start(AgentOptions::new("here")).unwrap();
                let there = Agent::start(AgentOptions::new("there")).unwrap();
                let mine = here.register(mine, Rights::ALL).unwrap();
                let region = there.register(theirs, Rights::ALL).unwrap();
                let peer = here.connect(&there.card().encode().unwrap(), PATIENCE).unwrap();
                let descriptor = region.descriptor().encode().unwrap();
                let route =
                    here.join(peer, &mine, &descriptor, &Policy::default(), PATIENCE).unwrap();
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
                guarded.fill(LENGTH..2 * LENGTH, 0x33);
                let after = guarded.bytes();
                guarded.check(&after, &what);
            }
        }
    }
}

/// In a child: the initiator. Each line says what to do next.
pub fn initiator(directory: &Path) {
    let device = device();
    let (mut agent, mut route, mut mine) = (None, None, None);
    let (lines, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        while let Some(line) = children::next_line() {
            lines.send(line).unwrap();
        }
    });
    loop {
        // Whoever is left goes on.
        if let (Some(agent), Some(route)) = (&mut agent, &route) {
            begin(agent, route, 1);
        }
        let line = loop {
            match told.recv_timeout(Duration::from_micros(200)) {
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
                let peer = new.connect(&card, PATIENCE).unwrap();
                let policy = Policy::default();
                let joined = new.join(peer, &region, &descriptor, &policy, PATIENCE).unwrap();
                slow(Duration::from_micros(u64::from(delay) * 100));
                begin(&mut new, &joined, PUTS);
                (agent, route, mine) = (Some(new), Some(joined), Some(region));
            }
            "agent" => drop(agent.take()),
            "route" => drop((route.take(), mine.take())),
            other => panic!("no such word: {other}"),
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
    Child::start(children::again(words).stdout(Stdio::piped()))
}

fn tell(child: &mut Child, line: &str) {
    child.say(line);
    assert_eq!(child.line(PATIENCE).as_deref(), Some("done"), "{line}");
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
    let mut number = 0_u32;
    for round in 0..rounds(4) {
        for order in orders() {
            number += 1;
            let guarded = Guarded::new(&device);
            let there = Agent::start(AgentOptions::new("there").directory(&directory)).unwrap();
            let region = there.register(&guarded.all, Rights::ALL).unwrap();
            let card = hex(&there.card().encode().unwrap());
            let descriptor = hex(&region.descriptor().encode().unwrap());
            let delay = hex(&[number as u8 % 16]);
            tell(&mut child, &format!("begin {card} {descriptor} {delay}"));
            let (mut there, mut region) = (Some(there), Some(region));
            let start_of_end = Instant::now();
            // Each of the child's two turns is its death at times.
            let mut is_killed = false;
            let mut after = None;
            for (at, what) in order.into_iter().enumerate() {
                match what {
                    0 | 3 if is_killed => {}
                    0 | 3 if number % 11 == 5 + at as u32 => {
                        child.kill();
                        is_killed = true;
                    }
                    0 => tell(&mut child, "agent"),
                    1 => drop(there.take()),
                    2 => drop(region.take()),
                    _ => tell(&mut child, "route"),
                }
                if there.is_none() && region.is_none() && after.is_none() {
                    guarded.fill(LENGTH..2 * LENGTH, 0x33);
                    after = Some(guarded.bytes());
                }
            }
            let took = start_of_end.elapsed();
            let what = format!("round {round}, order {order:?}, killed {is_killed}");
            assert!(took < LONGEST, "{what}: {took:?}");
            guarded.check(&after.unwrap(), &what);
            if is_killed {
                child = start(&directory);
            }
        }
    }
    child.end(PATIENCE);
    std::fs::remove_dir_all(&directory).unwrap();
}
