//! Fixtures of the tests.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use fabric::{Caps, EndpointKind, Offer, Query};
use gpu::{Block, Device, Memory, emulated};
use transfer::path::Policy;
use transfer::{Agent, AgentOptions, Buffer, Event, Notice, PeerId, Region, Rights, Route};

use crate::common::{ChildProcess, LENGTH, TIMEOUT, device, next_device, numbers, start};

// Commands to the other side, by the tags of notices.
/// Fill its region from this number on.
pub const FILL: u64 = 1;
/// Return the checksum of its region.
pub const SUM: u64 = 2;
/// Withdraw its region.
pub const WITHDRAW: u64 = 3;
/// Send nothing more.
pub const SLEEP: u64 = 4;
/// End.
pub const END: u64 = 5;
/// The tag of replies.
pub const REPLY: u64 = 6;
/// Drop the agent but not the region, and write the contents of the region to files from then on.
pub const DROP_AGENT: u64 = 7;
/// Put its whole region into the fixture's, with a device delay of this many milliseconds.
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

/// Fills a buffer of any kind.
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

/// The whole region in blocks of this length, the last first.
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

/// Writes a file atomically.
pub fn write(path: &Path, bytes: &[u8]) {
    let part = path.with_extension("part");
    std::fs::write(&part, bytes).unwrap();
    std::fs::rename(part, path).unwrap();
}

pub fn notice(tag: u64, number: u64) -> Notice {
    Notice::new(tag, &number.to_le_bytes()).unwrap()
}

/// An offer of shm with device memory.
pub fn shm_with_devices() -> fabric::Result<Offer> {
    let caps = Caps::MESSAGE | Caps::RMA | Caps::DEVICE_MEMORY;
    Query::new(EndpointKind::Rdm).caps(caps).provider("shm").first()
}

/// Adds rails over the loopback interface.
pub fn with_rails(options: AgentOptions, provider: &str, rails: usize) -> AgentOptions {
    let query = Query::new(EndpointKind::Rdm).caps(Caps::MESSAGE | Caps::RMA).provider(provider);
    let offer = match provider {
        "shm" => query.first(),
        "shm-with-devices" => shm_with_devices(),
        _ => query.source("127.0.0.1").first(),
    };
    let offer = offer.unwrap();
    (0..rails).fold(options, |options, _| options.fabric(&offer))
}

/// Adds one rail from each address.
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

/// An agent in its own directory, and the agents of other processes.
pub struct AgentFixture {
    pub agent: Agent,
    pub memory: Memory,
    pub region: Region,
    pub directory: PathBuf,
}

/// The agent of another process, with one region.
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

    /// Forced remote, with a number of rails of a provider.
    pub fn open_remote(provider: &str, rails: usize) -> Self {
        Self::open_with(|options| with_rails(options.force_remote(), provider, rails))
    }

    /// With shared memory and rails.
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
        let options = adjust(AgentOptions::new("fixture").directory(&directory));
        let agent = Agent::start(options).unwrap();
        write(&directory.join("card"), &agent.card().encode().unwrap());
        let memory = device().allocate_shared(LENGTH, &[]).unwrap();
        fill(&memory, LENGTH, 1);
        let region = agent.register(&memory, Rights::ALL).unwrap();
        Self { agent, memory, region, directory }
    }

    /// Starts another process with a role, through another program if one is named.
    pub fn peer_process(&mut self, role: &str, wrapper: &[&str]) -> PeerProcess {
        for name in ["peer-card", "peer-region"] {
            let _ = std::fs::remove_file(self.directory.join(name));
        }
        let other = start(role, &self.directory, wrapper, None);
        self.connect_to(other)
    }

    /// Connects to the agent of a started process.
    pub fn connect_to(&mut self, other: ChildProcess) -> PeerProcess {
        let card = read(&self.directory.join("peer-card"));
        let descriptor = read(&self.directory.join("peer-region"));
        let peer = self.agent.connect(&card, TIMEOUT).unwrap();
        PeerProcess { other, peer, card, descriptor }
    }

    pub fn join(&mut self, peer_process: &PeerProcess) -> Route {
        let (peer, policy) = (peer_process.peer, Policy::default());
        self.agent.join(peer, &self.region, &peer_process.descriptor, &policy, TIMEOUT).unwrap()
    }

    pub fn notify_peer(&mut self, peer_process: &PeerProcess, tag: u64, number: u64) {
        let token = self.agent.notify(peer_process.peer, notice(tag, number)).unwrap();
        self.agent.wait(token, TIMEOUT).unwrap();
    }

    /// The reply of the other side.
    pub fn request(&mut self, peer_process: &PeerProcess, tag: u64, number: u64) -> u64 {
        self.notify_peer(peer_process, tag, number);
        self.reply()
    }

    pub fn reply(&mut self) -> u64 {
        loop {
            if let Event::Notice { notice, .. } = self.agent.next_event(TIMEOUT).unwrap() {
                assert_eq!(notice.tag, REPLY);
                return u64::from_le_bytes(notice.data().try_into().unwrap());
            }
        }
    }

    pub fn end(&mut self, mut peer_process: PeerProcess) {
        self.notify_peer(&peer_process, END, 0);
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

/// A metric of this process; 0 if it is missing.
pub fn metric(name: &str) -> u64 {
    let text = transfer::path::metrics();
    let value = text.lines().find_map(|line| line.strip_prefix(&format!("fabricast_{name} ")));
    value.map_or(0, |value| value.parse().unwrap())
}
