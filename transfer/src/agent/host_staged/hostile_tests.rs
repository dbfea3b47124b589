//! Initiators and targets that write garbage into the memory that they share.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gpu::Block;
use threads::lock;

use super::slot_layout::{MAX_RANGES, SLOT_BYTES, SLOTS, slot_start};
use super::staged_copies::{StagedCopies, StagedMover};
use super::staging_link::StagingLink;
use super::staging_segment::{RegionRange, StagingDoorbell, StagingSegment};
use super::staging_session::{StagingOwner, StagingSession};
use super::staging_target::{StagingFiles, StagingTarget};
use crate::agent::{Agent, AgentOptions};
use crate::error::{ErrorKind, Result};
use crate::path::Operation;
use crate::refusal::Refusal;
use crate::region::RegisteredRegion;
use crate::{Buffer, HostBuffer, Rights};

const LENGTH: u64 = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Debug, Default)]
struct TestOwner {
    regions: Mutex<Vec<Arc<RegisteredRegion>>>,
    over: AtomicUsize,
}

impl StagingOwner for TestOwner {
    fn staged_region(&self, number: u64, ticket: u64) -> Option<Arc<RegisteredRegion>> {
        let regions = lock(&self.regions);
        let found = |it: &&Arc<RegisteredRegion>| {
            (it.descriptor.number, it.descriptor.ticket) == (number, ticket)
        };
        regions.iter().find(found).cloned()
    }

    fn staging_session_over(&self) {
        self.over.fetch_add(1, Ordering::Relaxed);
    }
}

/// A target with three regions: for everything, read-only, and not opened.
struct Target {
    _agent: Agent,
    owner: Arc<TestOwner>,
    staging: StagingTarget,
    buffers: Vec<HostBuffer>,
    numbers: Vec<u64>,
}

impl Target {
    fn new() -> Self {
        let agent = Agent::start(AgentOptions::new("target")).unwrap();
        let owner = Arc::new(TestOwner::default());
        let (mut buffers, mut numbers) = (Vec::new(), Vec::new());
        for rights in [Rights::ALL, Rights::READ, Rights::ALL] {
            let buffer = HostBuffer::from_vec(vec![7; LENGTH as usize]).unwrap();
            let region = agent.register(buffer.clone(), rights).unwrap();
            numbers.push(region.0.descriptor.number);
            lock(&owner.regions).push(Arc::clone(&region.0));
            buffers.push(buffer);
        }
        Self { _agent: agent, owner, staging: StagingTarget::default(), buffers, numbers }
    }

    fn session(&self) -> (Arc<StagingSession>, StagingLink) {
        let (session, files) = self.open_session("raw").unwrap();
        session.open_region(&lock(&self.owner.regions)[1], &*self.owner).unwrap();
        (session, StagingLink::open(files).unwrap())
    }

    fn open_session(&self, label: &str) -> Result<(Arc<StagingSession>, StagingFiles)> {
        let first = Arc::clone(&lock(&self.owner.regions)[0]);
        self.staging.open_session(self.owner.clone(), label, &first)
    }

    fn are_untouched(&self) -> bool {
        self.buffers.iter().all(|buffer| bytes_of(buffer).iter().all(|byte| *byte == 7))
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.staging.end();
        self.staging.join(Instant::now() + TIMEOUT);
    }
}

fn bytes_of(buffer: &HostBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.length() as usize];
    buffer.read(0, &mut bytes).unwrap();
    bytes
}

fn answer(link: &StagingLink, slot: usize, sequence: u64) -> std::result::Result<(), ErrorKind> {
    let end = Instant::now() + TIMEOUT;
    loop {
        if let Some(answer) = link.segment().answer_to(slot, sequence) {
            return answer.map_err(|refusal| refusal.kind);
        }
        assert!(Instant::now() < end, "no answer");
        std::thread::sleep(Duration::from_micros(50));
    }
}

#[test]
fn false_requests_are_refused_and_write_nothing() {
    let target = Target::new();
    let (_session, link) = target.session();
    let [all, read_only, not_opened] = target.numbers[..] else { panic!() };
    link.segment().slots().write(0, &vec![9; SLOT_BYTES as usize]).unwrap();
    let range = RegionRange::new;
    let (put, get) = (Operation::Put, Operation::Get);
    use ErrorKind::{Malformed, NotAllowed, OutOfBounds, Stale};
    for (number, (operation, region, ranges, expected)) in [
        (put, not_opened, vec![range(0, 1)], Stale),
        (put, 0, vec![range(0, 1)], Stale),
        (put, u64::MAX, vec![range(0, 1)], Stale),
        (put, read_only, vec![range(0, 1)], NotAllowed),
        (put, all, vec![range(LENGTH, 1)], OutOfBounds),
        (put, all, vec![range(u64::MAX, 2)], OutOfBounds),
        (put, all, vec![range(8, 8), range(1, u64::MAX)], OutOfBounds),
        (get, all, vec![range(0, LENGTH); 5], Malformed),
        (put, all, vec![range(0, 0)], Malformed),
        (put, all, Vec::new(), Malformed),
        (put, all, vec![range(0, 1); MAX_RANGES + 1], Malformed),
    ]
    .into_iter()
    .enumerate()
    {
        let (slot, sequence) = (number % 8, number as u64 + 1);
        link.segment().post(slot, sequence, operation, region, &ranges);
        link.wake_target();
        assert_eq!(answer(&link, slot, sequence), Err(expected), "request {number}");
    }
    assert!(target.are_untouched());
    // The session still works.
    link.segment().post(3, 100, put, all, &[range(5, 2)]);
    link.wake_target();
    assert_eq!(answer(&link, 3, 100), Ok(()));
    assert_eq!(bytes_of(&target.buffers[0])[4..8], [7, 9, 9, 7]);
}

/// Whatever stands in the words, other sessions are served.
#[test]
fn garbage_of_one_initiator_does_not_stop_others() {
    let target = Target::new();
    let (garbage, good) = (target.session(), target.session());
    let all = target.numbers[0];
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for round in 1..200 {
        for _ in 0..50 {
            garbage.1.segment().write_garbage(next(), next(), next());
        }
        garbage.1.wake_target();
        let slot = round as usize % SLOTS;
        let range = RegionRange::new(16 * round, 8);
        good.1.segment().slots().write(slot_start(slot), &[3; 8]).unwrap();
        good.1.segment().post(slot, round, Operation::Put, all, &[range]);
        good.1.wake_target();
        assert_eq!(answer(&good.1, slot, round), Ok(()));
    }
    for buffer in &target.buffers[1..] {
        assert!(bytes_of(buffer).iter().all(|byte| *byte == 7), "a region without the right");
    }
    garbage.0.leave();
    good.0.leave();
    target.staging.wake();
    let end = Instant::now() + TIMEOUT;
    while target.owner.over.load(Ordering::Relaxed) < 2 {
        assert!(Instant::now() < end, "a session does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(garbage.0.is_over() && good.0.is_over());
    assert_eq!(target.staging.user_of(None), None);
}

#[test]
fn sessions_beyond_the_maximum_are_refused_until_one_ends() {
    let target = Target::new();
    let mut sessions: Vec<_> = (0..128).map(|_| target.session()).collect();
    let error = target.open_session("more").unwrap_err();
    assert!(error.to_string().contains("the maximum"), "{error}");
    sessions.pop().unwrap().0.leave();
    target.staging.wake();
    let end = Instant::now() + TIMEOUT;
    while target.open_session("more").is_err() {
        assert!(Instant::now() < end, "no room");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Local memory beside the blocks of a get, and all of it in a put, stays as it is.
#[test]
fn target_that_answers_garbage_writes_only_to_blocks() {
    let segment = StagingSegment::create().unwrap();
    let [control, slots] = segment.export().unwrap();
    let doorbell = StagingDoorbell::create().unwrap().export().unwrap();
    let link = Arc::new(StagingLink::open([control, slots, doorbell]).unwrap());
    segment.slots().write(0, &vec![0xee; SLOT_BYTES as usize]).unwrap();
    let agent = Agent::start(AgentOptions::new("initiator")).unwrap();
    let remote = HostBuffer::new(8 * LENGTH).unwrap();
    let remote = agent.register(remote, Rights::ALL).unwrap();
    let buffer = HostBuffer::from_vec(vec![7; LENGTH as usize]).unwrap();
    let local = Buffer::from(buffer.clone());
    let mover = StagedMover::new(Arc::clone(&link), &local, remote.descriptor()).unwrap();
    let mut copies = StagedCopies::default();
    let blocks: [Block; 2] =
        [(100, 50), (500_000, 300_000)].map(|(to, length)| Block { to, from: 0, length });
    let run = |copies: &mut StagedCopies<u32>, operation, garbage: &dyn Fn(u64)| {
        let queue = VecDeque::from(blocks.to_vec()).into();
        copies.begin(1, operation, &mover, queue, 300_050, 5);
        let mut outcome: Option<Result<()>> = None;
        for round in 0..100 {
            garbage(round);
            copies.progress(|_, result| outcome = Some(result));
        }
        outcome
    };
    let refusal = Refusal::new(ErrorKind::TooMany, "out of slots");
    // Answers to all requests, before and after they are posted, and of other sequences.
    let outcome = run(&mut copies, Operation::Get, &|round| {
        for slot in 0..SLOTS {
            segment.answer(slot, round % 7, None);
        }
    });
    assert!(outcome.is_some_and(|outcome| outcome.is_ok()), "answered before its bytes");
    let mut expected = vec![7; LENGTH as usize];
    for Block { to, length, .. } in blocks {
        expected[to as usize..(to + length) as usize].fill(0xee);
    }
    assert!(bytes_of(&buffer) == expected);
    let outcome = run(&mut copies, Operation::Put, &|round| {
        for slot in 0..SLOTS {
            segment.answer(slot, round % 31, Some(&refusal));
        }
    });
    let error = outcome.expect("refused").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooMany);
    assert!(bytes_of(&buffer) == expected);
    // Without an answer it ends with the session.
    (0..SLOTS).for_each(|slot| segment.answer(slot, 0, None));
    let outcome = run(&mut copies, Operation::Get, &|round| {
        if round == 50 {
            link.end("its process has ended");
        }
    });
    assert_eq!(outcome.expect("ended").unwrap_err().kind(), ErrorKind::Closed);
    assert!(bytes_of(&buffer) == expected && !copies.is_busy_with(1));
}
