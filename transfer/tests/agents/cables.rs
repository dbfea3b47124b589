//! Rails over cables that are cut and restored: two network namespaces connected by veth pairs,
//! which the test creates.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use gpu::Block;
use transfer::path::{Path, Policy};
use transfer::{ErrorKind, Event, HostBuffer, Region, Rights, Route};

use crate::common::{ChildProcess, LENGTH, alone, numbers, start};
use crate::fixture::{
    AgentFixture, FILL, PeerProcess, SUM, blocks_of, notice, sum_of, with_cables, write,
};
use crate::rails::COMPARE;

/// On both sides; longer than a busy machine takes to answer.
pub const LOST_AFTER: Duration = Duration::from_secs(3);
/// Connections double their timeouts while they wait. Reached only if the test fails.
const TIMEOUT: Duration = Duration::from_secs(120);

const UNSHARE: [&str; 4] = ["unshare", "--user", "--map-root-user", "--net"];

fn run(command: &[&str]) -> bool {
    let mut process = Command::new(command[0]);
    let status = process.args(&command[1..]).stderr(Stdio::null()).stdout(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

#[track_caller]
fn must(command: &str) {
    let words: Vec<_> = command.split(' ').collect();
    assert!(run(&words), "{command}");
}

/// Runs this program again with a role, in a network namespace that it may configure.
fn between_namespaces(role: &str) {
    let _alone = alone();
    let pair = ["ip", "link", "add", "a0", "type", "veth", "peer", "name", "b0"];
    if !run(&[&UNSHARE[..], &pair].concat()) {
        testkit::skip!("network namespaces or veth pairs cannot be created here");
    }
    let directory = std::env::temp_dir();
    start(&format!("inside {role}"), &directory, &UNSHARE, None).finish();
}

#[test]
fn one_of_two_cables_is_cut_during_transfers_and_restored() {
    between_namespaces("two cables");
}

#[test]
fn the_only_cable_is_cut_for_long_and_restored() {
    between_namespaces("one cable, for long");
}

#[test]
fn the_only_cable_is_cut_briefly() {
    between_namespaces("one cable, for a moment");
}

/// The roles within a network namespace.
pub fn inside(role: &str) {
    must("ip link set lo up");
    match role {
        "two cables" => two_cables(),
        "one cable, for long" => one_cable_for_long(),
        "one cable, for a moment" => one_cable_for_a_moment(),
        other => panic!("no role {other}"),
    }
}

/// This side of the cables, and the process at the other side.
struct Ends {
    fixture: AgentFixture,
    peer_process: PeerProcess,
    local: HostBuffer,
    _region: Region,
    route: Route,
    cables: usize,
    /// The events of this side, as letters.
    events: String,
}

impl Ends {
    fn new(cables: usize) -> Self {
        let network = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net"));
        let addresses = |side: u32| -> Vec<String> {
            (0..cables).map(|cable| format!("10.77.{cable}.{side}")).collect()
        };
        let role = format!("remote by cables {}: host", addresses(2).join(","));
        let interfaces = |other: &ChildProcess| {
            let number = other.0.id().to_string();
            let end = Instant::now() + TIMEOUT;
            while network(&number).ok().is_none_or(|remote| remote == network("self").unwrap()) {
                assert!(Instant::now() < end, "the process stays in this network namespace");
                std::thread::sleep(Duration::from_millis(5));
            }
            for cable in 0..cables {
                let there = format!("nsenter --target {number} --net");
                must(&format!("ip link add a{cable} type veth peer name b{cable} netns {number}"));
                must(&format!("ip address add 10.77.{cable}.1/24 dev a{cable}"));
                must(&format!("ip link set a{cable} up"));
                must(&format!("{there} ip address add 10.77.{cable}.2/24 dev b{cable}"));
                must(&format!("{there} ip link set b{cable} up"));
            }
            must(&format!("nsenter --target {number} --net ip link set lo up"));
        };
        let directory = std::env::temp_dir().join(format!(
            "fabricast-cables-{}-{}",
            std::process::id(),
            cables
        ));
        std::fs::create_dir_all(&directory).unwrap();
        let other = start(&role, &directory, &["unshare", "--net"], None);
        interfaces(&other);
        write(&directory.join("laid"), b"");
        let from = addresses(1);
        let from: Vec<_> = from.iter().map(String::as_str).collect();
        let mut fixture =
            AgentFixture::open_at(&directory, |options| with_cables(options, LOST_AFTER, &from));
        let peer_process = fixture.connect_to(other);
        let local = HostBuffer::new(LENGTH).unwrap();
        let region = fixture.agent.register(&local, Rights::ALL).unwrap();
        let (peer, descriptor) = (peer_process.peer, &peer_process.descriptor);
        let policy = Policy::default();
        let route = fixture.agent.join(peer, &region, descriptor, &policy, TIMEOUT).unwrap();
        assert_eq!(route.path(), Path::FabricDirect, "{}", route.choice());
        let events = String::new();
        let mut ends =
            Self { fixture, peer_process, local, _region: region, route, cables, events };
        // All cables carry, although the first answer may have used one of them.
        let end = Instant::now() + TIMEOUT;
        while !ends.all_carry(1) {
            assert!(Instant::now() < end, "not all cables carry: {}", ends.events);
        }
        ends
    }

    fn cut(&self, cable: usize) {
        must(&format!("ip link set a{cable} down"));
    }

    fn restore(&self, cable: usize) {
        must(&format!("ip link set a{cable} up"));
    }

    fn poll(&mut self) {
        while let Some(event) = self.fixture.agent.poll_event() {
            match event {
                Event::Joined { .. } => self.events.push('J'),
                Event::Left { .. } => self.events.push('L'),
                Event::RailLost { rail, reason, .. } => {
                    assert!(!reason.is_empty());
                    self.events.push_str(&format!("-{rail}"));
                }
                Event::RailRestored { rail, .. } => self.events.push_str(&format!("+{rail}")),
                other => panic!("{other:?}"),
            }
        }
    }

    #[track_caller]
    fn wait_until_event(&mut self, what: &str) {
        let end = Instant::now() + TIMEOUT;
        while !self.events.contains(what) {
            assert!(Instant::now() < end, "{what} in {}", self.events);
            self.fixture.agent.progress();
            self.poll();
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn reply(&mut self) -> u64 {
        loop {
            match self.fixture.agent.next_event(TIMEOUT).unwrap() {
                Event::Notice { notice, .. } => {
                    return u64::from_le_bytes(notice.data().try_into().unwrap());
                }
                Event::Joined { .. } => self.events.push('J'),
                Event::Left { .. } => self.events.push('L'),
                Event::RailLost { rail, .. } => self.events.push_str(&format!("-{rail}")),
                Event::RailRestored { rail, .. } => self.events.push_str(&format!("+{rail}")),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Puts all bytes and has the other side compare them, then gets other bytes.
    #[track_caller]
    fn check_transfer(&mut self, first: u64) {
        let blocks = blocks_of(64 << 10);
        self.local.write(0, &numbers(LENGTH, first as u32)).unwrap();
        let on_arrival = Some(notice(COMPARE, sum_of(LENGTH, first)));
        let token = self.fixture.agent.put(&self.route, &blocks, on_arrival).unwrap();
        self.fixture.agent.wait(token, TIMEOUT).unwrap();
        assert_eq!(self.reply(), 1, "the other side has wrong bytes");
        let token =
            self.fixture.agent.notify(self.peer_process.peer, notice(FILL, first + 7)).unwrap();
        self.fixture.agent.wait(token, TIMEOUT).unwrap();
        self.reply();
        let token = self.fixture.agent.get(&self.route, &blocks, None).unwrap();
        self.fixture.agent.wait(token, TIMEOUT).unwrap();
        let mut bytes = vec![0; LENGTH as usize];
        self.local.read(0, &mut bytes).unwrap();
        assert!(bytes == numbers(LENGTH, first as u32 + 7), "wrong bytes arrived");
    }

    /// Bytes sent by each cable.
    fn sent(&self) -> Vec<u64> {
        let text = std::fs::read_to_string("/proc/self/net/dev").unwrap();
        let of = |cable: usize| {
            let line = text.lines().find_map(|line| {
                line.trim_start().strip_prefix(&format!("a{cable}:")).map(str::to_owned)
            });
            line.unwrap().split_whitespace().nth(8).unwrap().parse().unwrap()
        };
        (0..self.cables).map(of).collect()
    }

    /// Does each cable carry its part?
    fn all_carry(&mut self, first: u64) -> bool {
        let before = self.sent();
        self.check_transfer(first);
        let after = self.sent();
        let part = LENGTH / self.cables as u64 / 2;
        before.iter().zip(&after).all(|(before, after)| after - before > part)
    }

    fn end(mut self) {
        let directory = self.fixture.directory.clone();
        self.fixture.end(self.peer_process);
        drop(self.fixture);
        let _ = std::fs::remove_dir_all(directory);
    }
}

fn two_cables() {
    let mut ends = Ends::new(2);
    ends.poll();
    let blocks = blocks_of(256 << 10);
    let whole = [Block { to: 0, from: 0, length: LENGTH }];
    for round in 0..2 {
        ends.events.clear();
        ends.local.write(0, &numbers(LENGTH, 100)).unwrap();
        let mut tokens: Vec<_> = (0..300)
            .map(|number| {
                let blocks = if number % 2 == 0 { &blocks[..] } else { &whole };
                ends.fixture.agent.put(&ends.route, blocks, None).unwrap()
            })
            .collect();
        // During the transfers.
        for token in tokens.drain(..20) {
            ends.fixture.agent.wait(token, TIMEOUT).unwrap();
        }
        ends.cut(1);
        let mut failed = 0;
        for token in tokens {
            if let Err(error) = ends.fixture.agent.wait(token, TIMEOUT) {
                assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
                failed += 1;
            }
            ends.poll();
        }
        assert_eq!(ends.fixture.agent.in_flight(), 0);
        ends.wait_until_event("-1");
        // Each side detects the loss by itself: this one when all bytes use the other cable.
        let end = Instant::now() + TIMEOUT;
        loop {
            let token = ends.fixture.agent.put(&ends.route, &blocks, None).unwrap();
            match ends.fixture.agent.wait(token, TIMEOUT) {
                Ok(_) => break,
                Err(error) => assert_eq!(error.kind(), ErrorKind::Closed, "{error}"),
            }
            assert!(Instant::now() < end, "what is left does not carry");
            ends.poll();
        }
        // The remaining cable carries all bytes, and the right ones.
        let before = ends.sent();
        ends.check_transfer(200 + round);
        assert!(ends.sent()[0] - before[0] > LENGTH, "{before:?}");
        ends.restore(1);
        ends.wait_until_event("+1");
        ends.check_transfer(300 + round);
        let end = Instant::now() + TIMEOUT;
        while !ends.all_carry(400 + round) {
            assert!(Instant::now() < end, "the restored cable does not carry");
        }
        assert_eq!(ends.events, "-1+1", "{failed} of 280 failed");
    }
    ends.end();
}

fn one_cable_for_long() {
    let mut ends = Ends::new(1);
    ends.poll();
    ends.events.clear();
    ends.local.write(0, &numbers(LENGTH, 100)).unwrap();
    let whole = [Block { to: 0, from: 0, length: LENGTH }];
    let tokens: Vec<_> =
        (0..100).map(|_| ends.fixture.agent.put(&ends.route, &whole, None).unwrap()).collect();
    ends.fixture.agent.wait(tokens[5], TIMEOUT).unwrap();
    ends.cut(0);
    ends.wait_until_event("-0");
    ends.wait_until_event("L");
    // Each side detects the loss by itself.
    let end = Instant::now() + TIMEOUT;
    let refused = loop {
        match ends.fixture.agent.put(&ends.route, &[whole[0]; 0], Some(notice(SUM, 0))) {
            Ok(token) => ends.fixture.agent.forget(token),
            Err(refused) => break refused,
        }
        assert!(Instant::now() < end, "the rail is not lost");
        ends.poll();
        std::thread::sleep(Duration::from_millis(50));
    };
    assert_eq!(refused.kind(), ErrorKind::Closed, "{refused}");
    for (number, token) in tokens.into_iter().enumerate() {
        if number == 5 {
            continue;
        }
        if let Err(error) = ends.fixture.agent.wait(token, TIMEOUT) {
            assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        }
        ends.poll();
    }
    // Several reconnects have failed by now.
    std::thread::sleep(LOST_AFTER);
    ends.restore(0);
    // Both directions, without joining again.
    ends.wait_until_event("+0");
    ends.wait_until_event("J");
    ends.check_transfer(300);
    assert_eq!(ends.events.matches('L').count(), 1, "{}", ends.events);
    assert_eq!(ends.events.matches('J').count(), 1, "{}", ends.events);
    ends.end();
}

fn one_cable_for_a_moment() {
    let mut ends = Ends::new(1);
    ends.poll();
    ends.events.clear();
    ends.local.write(0, &numbers(LENGTH, 100)).unwrap();
    let blocks = blocks_of(256 << 10);
    for round in 0..3 {
        let tokens: Vec<_> =
            (0..30).map(|_| ends.fixture.agent.put(&ends.route, &blocks, None).unwrap()).collect();
        let notified: Vec<_> = (0..50)
            .map(|_| ends.fixture.agent.notify(ends.peer_process.peer, notice(SUM, 0)).unwrap())
            .collect();
        ends.cut(0);
        std::thread::sleep(LOST_AFTER / 10);
        ends.restore(0);
        for token in tokens.into_iter().chain(notified) {
            ends.fixture.agent.wait(token, TIMEOUT).unwrap();
        }
        for _ in 0..50 {
            ends.reply();
        }
        ends.check_transfer(300 + round);
    }
    assert_eq!(ends.events, "", "nothing was lost");
    ends.end();
}
