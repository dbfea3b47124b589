//! Rails by cables that are cut and mended: two network namespaces, and pairs of interfaces between
//! them, all of which the test makes itself.

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

/// On both sides. A busy machine does not take so long to answer.
pub const LOST_AFTER: Duration = Duration::from_secs(3);
/// Connections that waited long take as long again before they look. Only reached when something is
/// wrong.
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

/// Runs this program again, in this role, where it may do with its network what it likes.
fn between_namespaces(role: &str) {
    let _alone = alone();
    let pair = ["ip", "link", "add", "a0", "type", "veth", "peer", "name", "b0"];
    if !run(&[&UNSHARE[..], &pair].concat()) {
        testkit::skip!("no network namespaces, or no pairs of interfaces, can be made here");
    }
    let directory = std::env::temp_dir();
    start(&format!("inside {role}"), &directory, &UNSHARE, None).finish();
}

#[test]
fn one_of_two_cables_is_cut_in_the_middle_and_mended() {
    between_namespaces("two cables");
}

#[test]
fn the_only_cable_is_cut_for_long_and_mended() {
    between_namespaces("one cable, for long");
}

#[test]
fn the_only_cable_is_cut_for_a_moment() {
    between_namespaces("one cable, for a moment");
}

/// What is done where there is a network of its own.
pub fn inside(role: &str) {
    must("ip link set lo up");
    match role {
        "two cables" => two_cables(),
        "one cable, for long" => one_cable_for_long(),
        "one cable, for a moment" => one_cable_for_a_moment(),
        other => panic!("no role {other}"),
    }
}

/// This side's end of the cables, and the one at the other side of them.
struct Ends {
    fixture: AgentFixture,
    peer_process: PeerProcess,
    mine: HostBuffer,
    _region: Region,
    route: Route,
    cables: usize,
    /// What happened here.
    told: String,
}

impl Ends {
    fn new(cables: usize) -> Self {
        let network = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net"));
        let addresses = |side: u32| -> Vec<String> {
            (0..cables).map(|cable| format!("10.77.{cable}.{side}")).collect()
        };
        let role = format!("far by cables {}: host", addresses(2).join(","));
        let interfaces = |other: &ChildProcess| {
            let number = other.0.id().to_string();
            let end = Instant::now() + TIMEOUT;
            while network(&number).ok().is_none_or(|theirs| theirs == network("self").unwrap()) {
                assert!(Instant::now() < end, "it stays in this network");
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
        let place = std::env::temp_dir().join(format!(
            "fabricast-cables-{}-{}",
            std::process::id(),
            cables
        ));
        std::fs::create_dir_all(&place).unwrap();
        let other = start(&role, &place, &["unshare", "--net"], None);
        interfaces(&other);
        write(&place.join("laid"), b"");
        let from = addresses(1);
        let from: Vec<_> = from.iter().map(String::as_str).collect();
        let mut fixture =
            AgentFixture::open_at(&place, |options| with_cables(options, LOST_AFTER, &from));
        let peer_process = fixture.connect_to(other);
        let mine = HostBuffer::new(LENGTH).unwrap();
        let region = fixture.agent.register(&mine, Rights::ALL).unwrap();
        let (peer, descriptor) = (peer_process.peer, &peer_process.descriptor);
        let policy = Policy::default();
        let route = fixture.agent.join(peer, &region, descriptor, &policy, TIMEOUT).unwrap();
        assert_eq!(route.path(), Path::FabricDirect, "{}", route.choice());
        let told = String::new();
        let mut ends = Self { fixture, peer_process, mine, _region: region, route, cables, told };
        // All cables carry: also where the first answer came by one of them.
        let end = Instant::now() + TIMEOUT;
        while !ends.all_carry(1) {
            assert!(Instant::now() < end, "not all cables carry: {}", ends.told);
        }
        ends
    }

    fn cut(&self, cable: usize) {
        must(&format!("ip link set a{cable} down"));
    }

    fn mend(&self, cable: usize) {
        must(&format!("ip link set a{cable} up"));
    }

    fn look(&mut self) {
        while let Some(event) = self.fixture.agent.poll_event() {
            match event {
                Event::Joined { .. } => self.told.push('J'),
                Event::Left { .. } => self.told.push('L'),
                Event::RailLost { rail, reason, .. } => {
                    assert!(!reason.is_empty());
                    self.told.push_str(&format!("-{rail}"));
                }
                Event::RailRestored { rail, .. } => self.told.push_str(&format!("+{rail}")),
                other => panic!("{other:?}"),
            }
        }
    }

    #[track_caller]
    fn until_told(&mut self, what: &str) {
        let end = Instant::now() + TIMEOUT;
        while !self.told.contains(what) {
            assert!(Instant::now() < end, "{what} in {}", self.told);
            self.fixture.agent.progress();
            self.look();
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn answer(&mut self) -> u64 {
        loop {
            match self.fixture.agent.next_event(TIMEOUT).unwrap() {
                Event::Notice { notice, .. } => {
                    return u64::from_le_bytes(notice.data().try_into().unwrap());
                }
                Event::Joined { .. } => self.told.push('J'),
                Event::Left { .. } => self.told.push('L'),
                Event::RailLost { rail, .. } => self.told.push_str(&format!("-{rail}")),
                Event::RailRestored { rail, .. } => self.told.push_str(&format!("+{rail}")),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Puts all of it and has the other side compare, then gets something else.
    #[track_caller]
    fn carries(&mut self, first: u64) {
        let blocks = blocks_of(64 << 10);
        self.mine.write(0, &numbers(LENGTH, first as u32)).unwrap();
        let tell = Some(notice(COMPARE, sum_of(LENGTH, first)));
        let token = self.fixture.agent.put(&self.route, &blocks, tell).unwrap();
        self.fixture.agent.wait(token, TIMEOUT).unwrap();
        assert_eq!(self.answer(), 1, "the other side saw other bytes");
        let token =
            self.fixture.agent.notify(self.peer_process.peer, notice(FILL, first + 7)).unwrap();
        self.fixture.agent.wait(token, TIMEOUT).unwrap();
        self.answer();
        let token = self.fixture.agent.get(&self.route, &blocks, None).unwrap();
        self.fixture.agent.wait(token, TIMEOUT).unwrap();
        let mut bytes = vec![0; LENGTH as usize];
        self.mine.read(0, &mut bytes).unwrap();
        assert!(bytes == numbers(LENGTH, first as u32 + 7), "other bytes came");
    }

    /// Bytes that went by each cable.
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
        self.carries(first);
        let after = self.sent();
        let part = LENGTH / self.cables as u64 / 2;
        before.iter().zip(&after).all(|(before, after)| after - before > part)
    }

    fn end(mut self) {
        let place = self.fixture.directory.clone();
        self.fixture.end(self.peer_process);
        drop(self.fixture);
        let _ = std::fs::remove_dir_all(place);
    }
}

fn two_cables() {
    let mut ends = Ends::new(2);
    ends.look();
    let blocks = blocks_of(256 << 10);
    let whole = [Block { to: 0, from: 0, length: LENGTH }];
    for round in 0..2 {
        ends.told.clear();
        ends.mine.write(0, &numbers(LENGTH, 100)).unwrap();
        let mut tokens: Vec<_> = (0..300)
            .map(|number| {
                let blocks = if number % 2 == 0 { &blocks[..] } else { &whole };
                ends.fixture.agent.put(&ends.route, blocks, None).unwrap()
            })
            .collect();
        // In the middle.
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
            ends.look();
        }
        assert_eq!(ends.fixture.agent.in_flight(), 0);
        ends.until_told("-1");
        // Each side misses the other one when it does: we do when all goes by what is left.
        let end = Instant::now() + TIMEOUT;
        loop {
            let token = ends.fixture.agent.put(&ends.route, &blocks, None).unwrap();
            match ends.fixture.agent.wait(token, TIMEOUT) {
                Ok(_) => break,
                Err(error) => assert_eq!(error.kind(), ErrorKind::Closed, "{error}"),
            }
            assert!(Instant::now() < end, "what is left does not carry");
            ends.look();
        }
        // What is left carries, all of it, and the right bytes.
        let before = ends.sent();
        ends.carries(200 + round);
        assert!(ends.sent()[0] - before[0] > LENGTH, "{before:?}");
        ends.mend(1);
        ends.until_told("+1");
        ends.carries(300 + round);
        let end = Instant::now() + TIMEOUT;
        while !ends.all_carry(400 + round) {
            assert!(Instant::now() < end, "the cable that was mended does not carry");
        }
        assert_eq!(ends.told, "-1+1", "{failed} of 280 failed");
    }
    ends.end();
}

fn one_cable_for_long() {
    let mut ends = Ends::new(1);
    ends.look();
    ends.told.clear();
    ends.mine.write(0, &numbers(LENGTH, 100)).unwrap();
    let whole = [Block { to: 0, from: 0, length: LENGTH }];
    let tokens: Vec<_> =
        (0..100).map(|_| ends.fixture.agent.put(&ends.route, &whole, None).unwrap()).collect();
    ends.fixture.agent.wait(tokens[5], TIMEOUT).unwrap();
    ends.cut(0);
    ends.until_told("-0");
    ends.until_told("L");
    // Each side misses the other one when it does.
    let end = Instant::now() + TIMEOUT;
    let refused = loop {
        match ends.fixture.agent.put(&ends.route, &[whole[0]; 0], Some(notice(SUM, 0))) {
            Ok(token) => ends.fixture.agent.forget(token),
            Err(refused) => break refused,
        }
        assert!(Instant::now() < end, "it is not lost");
        ends.look();
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
        ends.look();
    }
    // It has tried in vain several times by now.
    std::thread::sleep(LOST_AFTER);
    ends.mend(0);
    // Both ways, and nobody joins again.
    ends.until_told("+0");
    ends.until_told("J");
    ends.carries(300);
    assert_eq!(ends.told.matches('L').count(), 1, "{}", ends.told);
    assert_eq!(ends.told.matches('J').count(), 1, "{}", ends.told);
    ends.end();
}

fn one_cable_for_a_moment() {
    let mut ends = Ends::new(1);
    ends.look();
    ends.told.clear();
    ends.mine.write(0, &numbers(LENGTH, 100)).unwrap();
    let blocks = blocks_of(256 << 10);
    for round in 0..3 {
        let tokens: Vec<_> =
            (0..30).map(|_| ends.fixture.agent.put(&ends.route, &blocks, None).unwrap()).collect();
        let told: Vec<_> = (0..50)
            .map(|_| ends.fixture.agent.notify(ends.peer_process.peer, notice(SUM, 0)).unwrap())
            .collect();
        ends.cut(0);
        std::thread::sleep(LOST_AFTER / 10);
        ends.mend(0);
        for token in tokens.into_iter().chain(told) {
            ends.fixture.agent.wait(token, TIMEOUT).unwrap();
        }
        for _ in 0..50 {
            ends.answer();
        }
        ends.carries(300 + round);
    }
    assert_eq!(ends.told, "", "nothing was lost");
    ends.end();
}
