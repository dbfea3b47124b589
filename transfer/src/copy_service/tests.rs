//! A service, an agent with a region, and clients that use only messages and the ring.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU32;

use gpu::{Block, Device, Memory};
use ipc::{Channel, PidFd, Segment, Words};

use super::*;
use crate::agent::{Agent, AgentOptions, LocalTarget};
use crate::copy_requests::{
    ClientRing, OfferedPieces, Opening, RegionName, Remote, Reply, Request,
};
use crate::path::Operation;
use crate::region::{Buffer, Region, RegionDescriptor, Rights};
use crate::service_copies::ServiceCopies;

const TIMEOUT: Duration = Duration::from_secs(20);
const LENGTH: u64 = 4 << 20;

struct Setting {
    directory: PathBuf,
    service: CopyService,
    owner: Agent,
    device: Device,
}

impl Setting {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fabricast-copy-service-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).unwrap();
        let service = CopyService::start(&directory, Admission::own_user()).unwrap();
        let owner = Agent::start(AgentOptions::new("owner").directory(&directory)).unwrap();
        let device = Device::open("emulated:0".parse().unwrap()).unwrap();
        Self { directory, service, owner, device }
    }

    fn memory(&self) -> Memory {
        self.device.allocate_shared(LENGTH, &[]).unwrap()
    }

    fn region(&self, rights: Rights) -> Region {
        self.owner.register(self.memory(), rights).unwrap()
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// A client of its own making.
struct RawClient {
    channel: Channel,
    ring: ClientRing,
    ring_segment: OwnedFd,
    memory: Memory,
    next_pair: u32,
    _local_target: LocalTarget,
}

impl RawClient {
    fn connect(setting: &Setting) -> Self {
        let local_target = LocalTarget::new("raw".to_owned(), Admission::own_user()).unwrap();
        let channel = Channel::connect(setting.service.socket(), TIMEOUT).unwrap();
        let pidfd = PidFd::of_this_process().unwrap();
        let doorbell = local_target.shared_files().unwrap().1;
        let descriptors = [pidfd.as_fd(), doorbell];
        let hello = Request::Hello([7; 16], "raw".to_owned()).encode();
        channel.send(&hello, &descriptors, TIMEOUT).unwrap();
        let mut message = channel.receive(TIMEOUT).unwrap();
        assert_eq!(Reply::read("test", &message.bytes).unwrap(), Reply::Welcome);
        let ring_segment = message.descriptors.pop().unwrap();
        let ring = ClientRing::open(ring_segment.try_clone().unwrap()).unwrap();
        let memory = setting.memory();
        Self { channel, ring, ring_segment, memory, next_pair: 1, _local_target: local_target }
    }

    fn described(&self) -> RegionDescriptor {
        let described = Buffer::from(&self.memory).describe([7; 16]).unwrap();
        RegionDescriptor { rights: Rights::ALL, ..described }
    }

    /// Requests a pair with memory that is described like this, and returns the outcome.
    fn open(
        &mut self,
        local: &RegionDescriptor,
        remote: RegionName,
        files: Option<Vec<OwnedFd>>,
    ) -> std::result::Result<u32, ErrorKind> {
        let pair = self.next_pair;
        self.next_pair += 1;
        let described = local.encode().unwrap();
        let opening = Opening::new(pair, u64::from(pair), Some(described), Remote::Region(remote));
        self.channel.send(&Request::Open(opening).encode(), &[], TIMEOUT).unwrap();
        let files = files.unwrap_or_else(|| {
            (0..local.pieces as usize).map(|at| self.memory.export_piece(at).unwrap().0).collect()
        });
        if !files.is_empty() {
            let lengths = vec![LENGTH; files.len()];
            let pieces = OfferedPieces::new(local.pieces, LENGTH, lengths);
            let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            let _ = self.channel.send(&Request::Pieces(pieces).encode(), &files, TIMEOUT);
        }
        let reply = self.channel.receive(TIMEOUT).map_err(|_| ErrorKind::Closed)?;
        match Reply::read("test", &reply.bytes).unwrap() {
            Reply::Opened(opened) => {
                assert_eq!(opened, pair);
                Ok(pair)
            }
            Reply::Refused(_, refusal) => Err(refusal.into_error("test").kind()),
            Reply::Welcome => panic!("a second welcome"),
        }
    }

    fn open_with(&mut self, region: &Region) -> u32 {
        let described = self.described();
        self.open(&described, RegionName::of(region.descriptor()), None).unwrap()
    }

    fn copy(&mut self, pair: u32, operation: Operation, block: Block) -> Result<()> {
        let number = self.ring.post(pair, operation, &[block], false);
        self.ring.ring();
        let end = ipc::deadline(TIMEOUT);
        loop {
            if let Some(outcome) = self.ring.outcome(number) {
                return outcome;
            }
            assert!(crate::remaining(end) > Duration::ZERO, "no outcome");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn refused_copy(&mut self, pair: u32, operation: Operation, block: Block) -> ErrorKind {
        self.copy(pair, operation, block).unwrap_err().kind()
    }
}

const BLOCK: Block = Block { to: 8, from: 16, length: 4096 };

#[test]
fn each_request_is_checked_against_the_exported_region() {
    let setting = Setting::new();
    let [all, read] = [Rights::ALL, Rights::READ].map(|rights| setting.region(rights));
    let mut client = RawClient::connect(&setting);
    let (pair, read_only) = (client.open_with(&all), client.open_with(&read));
    client.copy(pair, Operation::Put, BLOCK).unwrap();
    client.copy(read_only, Operation::Get, BLOCK).unwrap();
    let refused = |client: &mut RawClient, pair, operation, block| {
        client.refused_copy(pair, operation, block)
    };
    assert_eq!(refused(&mut client, read_only, Operation::Put, BLOCK), ErrorKind::NotAllowed);
    assert_eq!(refused(&mut client, 77, Operation::Put, BLOCK), ErrorKind::Unknown);
    for outside in [
        Block { to: LENGTH, ..BLOCK },
        Block { from: LENGTH - 4095, ..BLOCK },
        Block { to: u64::MAX, ..BLOCK },
        Block { length: u64::MAX, ..BLOCK },
    ] {
        for operation in [Operation::Put, Operation::Get] {
            assert_eq!(refused(&mut client, pair, operation, outside), ErrorKind::OutOfBounds);
        }
    }
    client.copy(pair, Operation::Put, Block { length: 0, ..BLOCK }).unwrap();
    client.channel.send(&Request::Close(pair).encode(), &[], TIMEOUT).unwrap();
    while client.copy(pair, Operation::Get, BLOCK).is_ok() {}
    drop(all);
}

#[test]
fn region_is_opened_only_with_its_ticket() {
    let setting = Setting::new();
    let region = setting.region(Rights::ALL);
    let mut client = RawClient::connect(&setting);
    let described = client.described();
    let name = || RegionName::of(region.descriptor());
    for (remote, expected) in [
        (RegionName::new(name().agent(), name().number(), 1), ErrorKind::Stale),
        (RegionName::new(name().agent(), 900, name().ticket()), ErrorKind::Stale),
        (RegionName::new([9; 16], name().number(), name().ticket()), ErrorKind::Closed),
    ] {
        let refused = client.open(&described, remote, None).unwrap_err();
        assert_eq!(refused, expected);
    }
    let opened = client.open(&described, name(), None).unwrap();
    client.copy(opened, Operation::Put, BLOCK).unwrap();
}

#[test]
fn false_descriptions_of_local_memory_are_refused() {
    let setting = Setting::new();
    let region = setting.region(Rights::ALL);
    let mut client = RawClient::connect(&setting);
    let good = client.described();
    let null = || -> OwnedFd { std::fs::File::open("/dev/null").unwrap().into() };
    let other = Device::open("emulated:1".parse().unwrap()).unwrap();
    for (described, files) in [
        (RegionDescriptor { length: LENGTH + 1, ..good.clone() }, None),
        (RegionDescriptor { length: u64::MAX, ..good.clone() }, None),
        (RegionDescriptor { offset: u64::MAX, ..good.clone() }, None),
        (RegionDescriptor { device: Some(other.properties().uuid), ..good.clone() }, None),
        (good.clone(), Some(vec![null()])),
    ] {
        // A description that cannot be decoded ends the connection.
        let mut client = RawClient::connect(&setting);
        let remote = RegionName::of(region.descriptor());
        let refused = client.open(&described, remote, files);
        assert!(refused.is_err(), "{described:?}");
    }
    let pair = client.open_with(&region);
    client.copy(pair, Operation::Put, BLOCK).unwrap();
    // More pieces than described: the connection ends.
    let files = vec![null(), null()];
    let remote = RegionName::of(region.descriptor());
    assert!(client.open(&good, remote, Some(files)).is_err());
    assert!(client.channel.receive(TIMEOUT).is_err());
}

/// Both memories are the client's: it has the descriptors of both.
#[test]
fn memory_of_another_process_is_copied_for_a_client_that_has_it() {
    let setting = Setting::new();
    let copies = ServiceCopies::new(&setting.directory, "topic", Admission::own_user()).unwrap();
    let (local, remote) = (setting.memory(), setting.memory());
    let stream = setting.device.stream().unwrap();
    let fill = |memory: &Memory, byte| {
        stream.fill(&memory.whole(), byte).unwrap();
        stream.synchronize(TIMEOUT).unwrap();
    };
    let bytes = |memory: &Memory| {
        let mut bytes = vec![0; LENGTH as usize];
        stream.download(&memory.whole(), &mut bytes, TIMEOUT).unwrap();
        bytes
    };
    let uuid = setting.device.properties().uuid;
    let open = |device, file, length| copies.open_pair(&local, device, file, length, TIMEOUT);
    let piece = || remote.export_piece(0).unwrap().0;
    let pair = open(uuid, piece(), LENGTH).unwrap();
    let copy = |operation, block| copies.copy(&pair, operation, block, TIMEOUT);
    fill(&local, 1);
    fill(&remote, 2);
    copy(Operation::Get, Block { to: 0, from: 0, length: 8 }).unwrap();
    copy(Operation::Put, Block { to: LENGTH - 9, from: 100, length: 9 }).unwrap();
    assert_eq!((&bytes(&local)[..9], bytes(&remote)[0]), (&[2, 2, 2, 2, 2, 2, 2, 2, 1][..], 2));
    assert_eq!(bytes(&remote)[LENGTH as usize - 10..], [2, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
    let outside = Block { to: 0, from: LENGTH - 7, length: 8 };
    assert_eq!(copy(Operation::Get, outside).unwrap_err().kind(), ErrorKind::OutOfBounds);

    let null = || -> OwnedFd { std::fs::File::open("/dev/null").unwrap().into() };
    let other = Device::open("emulated:1".parse().unwrap()).unwrap().properties().uuid;
    for refused in [
        open(uuid, null(), LENGTH),
        open(uuid, piece(), 4 * LENGTH),
        open(uuid, piece(), u64::MAX),
        open(other, piece(), LENGTH),
    ] {
        assert!(refused.is_err());
    }
    copy(Operation::Get, BLOCK).unwrap();
    open(uuid, piece(), LENGTH).unwrap();
}

#[test]
fn threads_copy_at_a_time_and_a_late_copy_blocks_its_pair_only_until_it_is_over() {
    let setting = Setting::new();
    let copies = ServiceCopies::new(&setting.directory, "topic", Admission::own_user()).unwrap();
    let (local, remote) = (setting.memory(), setting.memory());
    let stream = setting.device.stream().unwrap();
    let pattern: Vec<u8> = (0..LENGTH).map(|at| (at * 7 + at / 251) as u8).collect();
    stream.upload(&remote.whole(), &pattern, TIMEOUT).unwrap();
    let uuid = setting.device.properties().uuid;
    let file = remote.export_piece(0).unwrap().0;
    let pair = copies.open_pair(&local, uuid, file, LENGTH, TIMEOUT).unwrap();
    let part = LENGTH / 256;
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (copies, pair) = (&copies, &pair);
            scope.spawn(move || {
                for number in 0..32 {
                    let at = (number * 8 + thread) * part;
                    let block = Block { to: at, from: at, length: part };
                    copies.copy(pair, Operation::Get, block, TIMEOUT).unwrap();
                }
            });
        }
    });
    let mut found = vec![0; LENGTH as usize];
    stream.download(&local.whole(), &mut found, TIMEOUT).unwrap();
    assert!(found == pattern);

    let delay = Duration::from_millis(300);
    let slow = gpu::emulated::FaultConfig { delay, ..Default::default() };
    gpu::emulated::configure_faults(0, slow);
    let copy = |timeout| copies.copy(&pair, Operation::Get, BLOCK, timeout);
    let late = copy(Duration::from_millis(20)).unwrap_err();
    let refused = copy(TIMEOUT).unwrap_err();
    gpu::emulated::configure_faults(0, gpu::emulated::FaultConfig::default());
    assert_eq!(late.kind(), ErrorKind::DeadlineExceeded);
    assert!(refused.to_string().contains("an earlier copy timed out"), "{refused}");
    std::thread::sleep(3 * delay / 2);
    copy(TIMEOUT).unwrap();
}

/// The client's export failed in the middle.
#[test]
fn opening_without_its_pieces_is_replaced_by_the_next() {
    let setting = Setting::new();
    let region = setting.region(Rights::ALL);
    let mut client = RawClient::connect(&setting);
    let described = client.described().encode().unwrap();
    let given_up = Opening::new(
        900,
        900,
        Some(described),
        Remote::Region(RegionName::of(region.descriptor())),
    );
    client.channel.send(&Request::Open(given_up).encode(), &[], TIMEOUT).unwrap();
    let pair = client.open_with(&region);
    client.copy(pair, Operation::Put, BLOCK).unwrap();
    assert_eq!(client.refused_copy(900, Operation::Put, BLOCK), ErrorKind::Unknown);
}

#[test]
fn client_with_false_requests_is_disconnected() {
    let setting = Setting::new();
    let region = setting.region(Rights::ALL);
    let mut client = RawClient::connect(&setting);
    let pair = client.open_with(&region);
    client.copy(pair, Operation::Put, BLOCK).unwrap();
    let layout = ipc::Layout::new("copy requests", 1);
    let words = Segment::open(client.ring_segment.try_clone().unwrap(), layout).unwrap().words();
    words.store(8, 0, Ordering::SeqCst);
    client.ring.ring();
    assert!(client.channel.receive(TIMEOUT).is_err());
    while setting.service.clients() > 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    while !client.ring.has_ended() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn client_that_writes_garbage_disturbs_no_other() {
    let setting = Setting::new();
    let region = setting.region(Rights::ALL);
    let mut good = RawClient::connect(&setting);
    let pair = good.open_with(&region);
    for at in [8, 64, 65, 70] {
        let bad = RawClient::connect(&setting);
        let layout = ipc::Layout::new("copy requests", 1);
        let words = Segment::open(bad.ring_segment.try_clone().unwrap(), layout).unwrap().words();
        for word in 0..words.count() {
            if word == at || at == 70 {
                words.store(word, u64::MAX, Ordering::SeqCst);
            }
        }
        words.store(8, 1, Ordering::SeqCst);
        bad.ring.ring();
        good.copy(pair, Operation::Put, BLOCK).unwrap();
        // Garbage at the socket.
        let _ = bad.channel.send(&[1, 99, 3], &[], TIMEOUT);
        good.copy(pair, Operation::Get, BLOCK).unwrap();
    }
    let idle: Vec<_> =
        (0..100).filter_map(|_| Channel::connect(setting.service.socket(), TIMEOUT).ok()).collect();
    good.copy(pair, Operation::Get, BLOCK).unwrap();
    let again = RawClient::connect(&setting);
    while setting.service.clients() < 2 {
        std::thread::sleep(Duration::from_millis(5));
    }
    drop((idle, again));
    while setting.service.clients() > 1 {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(setting.service.copied_bytes(), 9 * BLOCK.length);
}

#[test]
fn second_service_of_a_directory_is_refused() {
    let setting = Setting::new();
    let error = CopyService::start(&setting.directory, Admission::own_user()).unwrap_err();
    assert!(error.to_string().contains("another process listens there"), "{error}");
}
