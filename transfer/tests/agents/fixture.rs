//! What the tests have in common.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use fabric::{Caps, EndpointKind, Query};
use gpu::{Block, Device, Memory, emulated};
use transfer::path::Policy;
use transfer::{Agent, AgentOptions, Buffer, Event, Notice, PeerId, Region, Rights, Route};

use crate::common::{ChildProcess, LENGTH, TIMEOUT, device, next_device, numbers, start};

// What the other side is told, by a notice's tag.
/// To fill its region from this number on.
pub const FILL: u64 = 1;
/// To say what its region's checksum is.
pub const SUM: u64 = 2;
/// To withdraw its region.
pub const WITHDRAW: u64 = 3;
/// To say nothing more.
pub const SLEEP: u64 = 4;
/// To end.
pub const END: u64 = 5;
/// What it answers.
pub const ANSWER: u64 = 6;
/// To drop its agent while it has its region, and to say in files what that holds from then on.
pub const DROP_AGENT: u64 = 7;
/// To put all of its region into the house's, with a device that takes so many milliseconds.
pub const PUT_SLOWLY: u64 = 8;

/// Another device of the same kind, or the same one if there is no other.
pub fn other_device() -> Device {
    let first = device();
    next_device(&first).unwrap_or(first)
}

pub fn fill(memory: &Memory, length: u64, first: u64) {
    let stream = memory.mapped_for().stream().unwrap();
    let range = memory.slice(0, length).unwrap();
    stream.upload(&range, &numbers(length, first as u32), TIMEOUT).unwrap();
}

pub fn sum(memory: &Memory, length: u64) -> u64 {
    let stream = memory.mapped_for().stream().unwrap();
    stream.checksum(&memory.slice(0, length).unwrap(), TIMEOUT).unwrap()
}

/// All of a buffer, of whatever kind.
pub fn fill_buffer(buffer: &Buffer, first: u64) {
    match buffer {
        Buffer::Device(memory) => fill(memory, LENGTH, first),
        Buffer::Host(host) => host.write(0, &numbers(LENGTH, first as u32)).unwrap(),
    }
}

pub fn sum_of_buffer(buffer: &Buffer) -> u64 {
    match buffer {
        Buffer::Device(memory) => sum(memory, LENGTH),
        Buffer::Host(host) => {
            let mut bytes = vec![0; LENGTH as usize];
            host.read(0, &mut bytes).unwrap();
            gpu::checksum(&bytes)
        }
    }
}

/// All of it in blocks of so many bytes, the last first.
pub fn blocks_of(length: u64) -> Vec<Block> {
    (0..LENGTH.div_ceil(length))
        .rev()
        .map(|number| {
            let at = number * length;
            Block { to: at, from: at, length: length.min(LENGTH - at) }
        })
        .collect()
}

pub fn sum_of(length: u64, first: u64) -> u64 {
    gpu::checksum(&numbers(length, first as u32))
}

pub fn read(path: &Path) -> Vec<u8> {
    let end = Instant::now() + TIMEOUT;
    loop {
        match std::fs::read(path) {
            Ok(bytes) => return bytes,
            Err(error) => assert!(Instant::now() < end, "{}: {error}", path.display()),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whole, or not there.
pub fn write(path: &Path, bytes: &[u8]) {
    let part = path.with_extension("part");
    std::fs::write(&part, bytes).unwrap();
    std::fs::rename(part, path).unwrap();
}

pub fn notice(tag: u64, number: u64) -> Notice {
    Notice::new(tag, &number.to_le_bytes()).unwrap()
}

/// Reaches others by a fabric of this machine.
pub fn with_rails(options: AgentOptions, provider: &str, rails: usize) -> AgentOptions {
    let query = Query::new(EndpointKind::Rdm).caps(Caps::MESSAGE | Caps::RMA).provider(provider);
    let query = if provider == "shm" { query } else { query.source("127.0.0.1") };
    let offer = query.first().unwrap();
    (0..rails).fold(options, |options, _| options.fabric(&offer))
}

/// Reaches others from these addresses, one rail from each.
pub fn with_cables(options: AgentOptions, lost_after: Duration, from: &[&str]) -> AgentOptions {
    let offer = |address: &&str| {
        let query = Query::new(EndpointKind::Rdm).caps(Caps::MESSAGE | Caps::RMA);
        let query = query.source(*address);
        let offer = query.clone().provider("tcp").first();
        offer.or_else(|_| query.provider("net").first()).unwrap()
    };
    let options = options.force_remote().lost_after(lost_after);
    from.iter().map(offer).fold(options, |options, offer| options.fabric(&offer))
}

/// An agent, in a directory of its own, and the agents of other processes.
pub struct AgentFixture {
    pub agent: Agent,
    pub memory: Memory,
    pub region: Region,
    pub directory: PathBuf,
}

/// Another process's agent, with one region.
pub struct PeerProcess {
    pub other: ChildProcess,
    pub peer: PeerId,
    pub card: Vec<u8>,
    pub descriptor: Vec<u8>,
}

impl AgentFixture {
    pub fn open() -> Self {
        Self::open_with(|options| options)
    }

    /// One that shares memory with nobody, and is reached by so many rails of a provider.
    pub fn open_remote(provider: &str, rails: usize) -> Self {
        Self::open_with(|options| with_rails(options.force_remote(), provider, rails))
    }

    /// One that shares memory and is reached by rails, too.
    pub fn open_with_rails(provider: &str, rails: usize) -> Self {
        Self::open_with(|options| with_rails(options, provider, rails))
    }

    pub fn open_with(adjust: impl FnOnce(AgentOptions) -> AgentOptions) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fabricast-agents-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).unwrap();
        Self::open_at(&directory, adjust)
    }

    pub fn open_at(directory: &Path, adjust: impl FnOnce(AgentOptions) -> AgentOptions) -> Self {
        let directory = directory.to_owned();
        let options = adjust(AgentOptions::new("house").directory(&directory));
        let agent = Agent::start(options).unwrap();
        write(&directory.join("card"), &agent.card().encode().unwrap());
        let memory = device().allocate_shared(LENGTH, &[]).unwrap();
        fill(&memory, LENGTH, 1);
        let region = agent.register(&memory, Rights::ALL).unwrap();
        Self { agent, memory, region, directory }
    }

    /// Starts another process in this role, by way of another program if one is named.
    pub fn peer_process(&mut self, role: &str, by_way_of: &[&str]) -> PeerProcess {
        for name in ["their-card", "their-region"] {
            let _ = std::fs::remove_file(self.directory.join(name));
        }
        let other = start(role, &self.directory, by_way_of, None);
        self.connect_to(other)
    }

    /// Gets to know a process that was started.
    pub fn connect_to(&mut self, other: ChildProcess) -> PeerProcess {
        let card = read(&self.directory.join("their-card"));
        let descriptor = read(&self.directory.join("their-region"));
        let peer = self.agent.connect(&card, TIMEOUT).unwrap();
        PeerProcess { other, peer, card, descriptor }
    }

    pub fn join(&mut self, peer_process: &PeerProcess) -> Route {
        let (peer, policy) = (peer_process.peer, Policy::default());
        self.agent.join(peer, &self.region, &peer_process.descriptor, &policy, TIMEOUT).unwrap()
    }

    pub fn tell(&mut self, peer_process: &PeerProcess, tag: u64, number: u64) {
        let token = self.agent.notify(peer_process.peer, notice(tag, number)).unwrap();
        self.agent.wait(token, TIMEOUT).unwrap();
    }

    /// What it answers.
    pub fn ask(&mut self, peer_process: &PeerProcess, tag: u64, number: u64) -> u64 {
        self.tell(peer_process, tag, number);
        self.answer()
    }

    pub fn answer(&mut self) -> u64 {
        loop {
            if let Event::Notice { notice, .. } = self.agent.next_event(TIMEOUT).unwrap() {
                assert_eq!(notice.tag, ANSWER);
                return u64::from_le_bytes(notice.data().try_into().unwrap());
            }
        }
    }

    pub fn end(&mut self, mut peer_process: PeerProcess) {
        self.tell(&peer_process, END, 0);
        peer_process.other.finish();
    }
}

impl Drop for AgentFixture {
    fn drop(&mut self) {
        for number in 0..emulated::COUNT {
            emulated::configure_faults(number, emulated::FaultConfig::default());
        }
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// One of the metrics of this process; 0 if it is not told of.
pub fn metric(name: &str) -> u64 {
    let text = transfer::path::metrics();
    let value = text.lines().find_map(|line| line.strip_prefix(&format!("fabricast_{name} ")));
    value.map_or(0, |value| value.parse().unwrap())
}
