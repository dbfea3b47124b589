//! An agent and initiators that use only the messages at the socket.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use gpu::{Allocator, Device, emulated};

use super::*;
use crate::agent::local_protocol::Introduction;
use crate::agent::session_segment::InitiatorSegment;
use crate::agent::{Agent, AgentOptions};
use crate::{Event, HostBuffer, Region, Rights};

const TIMEOUT: Duration = Duration::from_secs(20);
/// Too short for a copy to end by itself.
const SOON: Duration = Duration::from_millis(50);

/// An agent in its own directory.
struct Owner {
    agent: Option<Agent>,
    directory: PathBuf,
}

impl Owner {
    fn start() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fabricast-local-server-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).unwrap();
        let agent = Agent::start(AgentOptions::new("owner").directory(&directory)).unwrap();
        Self { agent: Some(agent), directory }
    }

    fn agent(&mut self) -> &mut Agent {
        self.agent.as_mut().unwrap()
    }

    fn region(&mut self) -> Region {
        self.agent().register(HostBuffer::new(4096).unwrap(), Rights::ALL).unwrap()
    }

    fn wait_until_left(&mut self) {
        while !matches!(self.agent().next_event(TIMEOUT).unwrap(), Event::Left { .. }) {}
    }

    fn withdraw(&mut self, region: &Region) -> Option<ErrorKind> {
        self.agent().withdraw(region, SOON).err().map(|error| error.kind())
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        drop(self.agent.take());
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// An initiator's side of a session.
struct Raw {
    channel: Channel,
    segment: InitiatorSegment,
    region_table: OwnedFd,
}

impl Raw {
    fn session(owner: &mut Owner) -> Self {
        let pidfd = PidFd::of_this_process().unwrap();
        Self::session_as(owner, pidfd.as_fd().try_clone_to_owned().unwrap())
    }

    fn session_as(owner: &mut Owner, pidfd: OwnedFd) -> Self {
        let channel = Channel::connect(&owner.agent().card().socket.unwrap(), TIMEOUT).unwrap();
        let introduction = Introduction { identity: [7; 16], label: "raw".to_owned() };
        channel.send(&Request::Hello(introduction).encode(), &[pidfd.as_fd()], TIMEOUT).unwrap();
        let message = channel.receive(TIMEOUT).unwrap();
        let (_, [_, region_table, _, session]) = Reply::read_welcome("test", message).unwrap();
        Self { channel, segment: InitiatorSegment::open(session).unwrap(), region_table }
    }

    fn request(&self, region: &Region) {
        let descriptor = region.descriptor();
        self.channel
            .send(&Request::Open(descriptor.number, descriptor.ticket).encode(), &[], TIMEOUT)
            .unwrap();
    }

    fn open(&self, region: &Region) {
        self.request(region);
        let message = self.channel.receive(TIMEOUT).unwrap();
        assert!(Reply::read_pieces("test", &message).is_ok());
    }
}

/// An initiator may start copies until it closes cleanly, even if its connection is lost.
#[test]
fn broken_connection_does_not_end_the_wait_for_copies() {
    let mut owner = Owner::start();
    for begins_before in [true, false] {
        let region = owner.region();
        let Raw { channel, mut segment, .. } = {
            let raw = Raw::session(&mut owner);
            raw.open(&region);
            raw
        };
        let number = begins_before.then(|| segment.begin());
        channel.end();
        owner.wait_until_left();
        let number = number.unwrap_or_else(|| segment.begin());
        assert_eq!(owner.withdraw(&region), Some(ErrorKind::DeadlineExceeded), "{begins_before}");
        segment.end(number);
        assert_eq!(owner.withdraw(&region), None);
        drop(segment);
    }
}

#[test]
fn copies_delay_only_regions_that_the_initiator_opened() {
    let mut owner = Owner::start();
    let (opened, other) = (owner.region(), owner.region());
    let mut raw = Raw::session(&mut owner);
    raw.segment.begin();
    assert_eq!(owner.withdraw(&other), None, "it opened nothing");
    raw.open(&opened);
    let device = Device::open("emulated:0".parse().unwrap()).unwrap();
    let memory = device.allocate(4096).unwrap();
    let (weak, third) = (memory.downgrade(), owner.agent().register(memory, Rights::ALL).unwrap());
    drop(third);
    assert!(weak.upgrade().is_none(), "it did not open this one");
    assert_eq!(owner.withdraw(&opened), Some(ErrorKind::DeadlineExceeded));
    // Withdrawn again, it is still in use.
    assert_eq!(owner.withdraw(&opened), Some(ErrorKind::DeadlineExceeded));
}

#[test]
fn initiator_is_the_process_at_the_socket_whatever_it_sends() {
    let mut owner = Owner::start();
    let region = owner.region();
    let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    // SAFETY: no pointers; a child of this process, not reaped.
    #[allow(unsafe_code)]
    let pidfd = unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_open, other.id(), 0);
        assert!(fd >= 0);
        <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fd as i32)
    };
    let mut raw = Raw::session_as(&mut owner, pidfd);
    raw.open(&region);
    raw.segment.begin();
    other.kill().unwrap();
    other.wait().unwrap();
    assert_eq!(owner.withdraw(&region), Some(ErrorKind::DeadlineExceeded));
}

#[test]
fn reconnecting_without_a_clean_close_leaks_nothing() {
    let mut owner = Owner::start();
    for _ in 0..3 * MAX_LOCAL_INITIATORS {
        let mut raw = Raw::session(&mut owner);
        raw.segment.begin();
        raw.channel.end();
        owner.wait_until_left();
        std::mem::forget(raw.segment);
    }
    assert!(lock(&owner.agent().local_target.initiators).len() <= 1);
}

/// Their connections are lost, but they may still copy.
#[test]
fn disconnected_initiators_with_copies_count_for_the_limit() {
    let mut owner = Owner::start();
    let region = owner.region();
    let mut all = Vec::new();
    for _ in 0..MAX_LOCAL_INITIATORS {
        let raw = Raw::session(&mut owner);
        raw.open(&region);
        raw.channel.end();
        all.push(raw.segment);
        owner.wait_until_left();
    }
    let path = owner.agent().card().socket.unwrap();
    let say_hello = || {
        let channel = Channel::connect(&path, TIMEOUT).unwrap();
        let introduction = Introduction { identity: [7; 16], label: "raw".to_owned() };
        let pidfd = PidFd::of_this_process().unwrap();
        channel.send(&Request::Hello(introduction).encode(), &[pidfd.as_fd()], TIMEOUT).unwrap();
        Reply::read_welcome("test", channel.receive(TIMEOUT).unwrap())
    };
    let error = say_hello().unwrap_err().to_string();
    assert!(error.contains("local initiators, the maximum"), "{error}");
    // One of them closes cleanly.
    all.pop();
    say_hello().unwrap();
}

#[test]
fn region_table_is_read_only_for_initiators() {
    let mut owner = Owner::start();
    let raw = Raw::session(&mut owner);
    let region_table = File::from(raw.region_table);
    assert!(region_table.write_at(&[1; 8], 0).is_err(), "an initiator can write the region table");
}

#[test]
fn agent_ends_while_an_initiator_reads_its_reply_slowly() {
    const PIECES: u64 = 150;
    let mut owner = Owner::start();
    let small = owner.region();
    let device = Device::open("emulated:0".parse().unwrap()).unwrap();
    let granule = device.properties().granularity;
    let kind = Allocator::Mapped { exportable: true };
    let pieces = vec![granule; PIECES as usize];
    let foreign = emulated::ForeignMemory::new(0, &pieces, kind).unwrap();
    let address = foreign.address();
    // SAFETY: all of the owner's memory, which is moved along.
    #[allow(unsafe_code)]
    let memory = unsafe { device.adopt(address, PIECES * granule, foreign) }.unwrap();
    let large = owner.agent().register(memory, Rights::ALL).unwrap();
    let raw = Raw::session(&mut owner);
    raw.request(&small);
    let reply = raw.channel.receive(TIMEOUT).unwrap();
    let descriptors: Vec<_> = reply.descriptors.iter().map(AsFd::as_fd).collect();
    let (one, _other) = Channel::pair().unwrap();
    // Fill the socket with unread replies.
    while one.send(&reply.bytes, &descriptors, Duration::ZERO).is_ok() {
        raw.request(&small);
    }
    raw.request(&large);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1500));
                let _ = raw.channel.receive(Duration::ZERO);
            }
        });
        std::thread::sleep(Duration::from_millis(300));
        let start = Instant::now();
        drop(owner.agent.take());
        let took = start.elapsed();
        is_over.store(true, Ordering::Release);
        assert!(took < Duration::from_secs(1), "it took {took:?}");
    });
}

/// Adopted memory that records when it is freed.
#[derive(Debug)]
struct ForeignOwner {
    _memory: emulated::ForeignMemory,
    is_free: Arc<AtomicBool>,
    panics: bool,
}

impl Drop for ForeignOwner {
    fn drop(&mut self) {
        self.is_free.store(true, Ordering::Release);
        assert!(!self.panics, "requested by a test");
    }
}

#[test]
fn retained_memory_is_freed_after_another_owner_panicked() {
    let mut owner = Owner::start();
    let device = Device::open("emulated:0".parse().unwrap()).unwrap();
    let mut raw = Raw::session(&mut owner);
    let retained = [true, false].map(|panics| {
        let length = device.properties().granularity;
        let kind = Allocator::Mapped { exportable: true };
        let memory = emulated::ForeignMemory::new(0, &[length], kind).unwrap();
        let (address, is_free) = (memory.address(), Arc::new(AtomicBool::new(false)));
        let foreign = ForeignOwner { _memory: memory, is_free: Arc::clone(&is_free), panics };
        // SAFETY: all of the owner's memory, which is moved along.
        #[allow(unsafe_code)]
        let memory = unsafe { device.adopt(address, length, foreign) }.unwrap();
        let region = owner.agent().register(memory, Rights::ALL).unwrap();
        raw.open(&region);
        let number = raw.segment.begin();
        drop(region);
        (number, is_free)
    });
    for (number, is_free) in retained {
        assert!(!is_free.load(Ordering::Acquire), "freed under a copy");
        raw.segment.end(number);
        let end = Instant::now() + TIMEOUT;
        while !is_free.load(Ordering::Acquire) {
            assert!(Instant::now() < end, "it is never freed");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
