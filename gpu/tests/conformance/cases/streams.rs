//! Operations: correct, in order, and asynchronous.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gpu::emulated::{FaultConfig, configure_faults};
use gpu::{DEFAULT_TIMEOUT, ErrorKind, HostMapping};

use super::{Skip, second, skip};
use testkit::bytes::pattern;

use crate::fixture::Fixture;

/// Host memory, like a shared segment.
#[derive(Debug)]
pub struct Pages(pub Box<[std::sync::atomic::AtomicU64]>);

impl Pages {
    pub fn new(length: usize) -> Self {
        Self((0..length / 8).map(|_| 0.into()).collect())
    }
}

// SAFETY: a box of atomics that does not move, and that no other code uses.
#[allow(unsafe_code)]
unsafe impl HostMapping for Pages {
    fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }
    fn length(&self) -> u64 {
        self.0.len() as u64 * 8
    }
}

/// [`Pages`] that are read during a wait.
#[derive(Debug)]
pub struct Shared(pub std::sync::Arc<Pages>);

// SAFETY: the same.
#[allow(unsafe_code)]
unsafe impl HostMapping for Shared {
    fn address(&self) -> u64 {
        self.0.address()
    }
    fn length(&self) -> u64 {
        self.0.length()
    }
}

pub fn copies_of_any_length_arrive(fixture: &Fixture) -> Result<(), Skip> {
    let (from, to) = (
        fixture.first.allocate(20 << 20).unwrap(),
        fixture.first.allocate_shared(20 << 20, &[]).unwrap(),
    );
    for (seed, (length, offset)) in
        [(0, 0), (1, 0), (7, 3), (4096, 1), (65_537, 4095), ((1 << 20) + 3, 9), (16 << 20, 64)]
            .into_iter()
            .enumerate()
    {
        let seed = seed as u64 + 1;
        let (part, target) =
            (from.slice(offset, length).unwrap(), to.slice(2 * offset, length).unwrap());
        fixture.fill(&part, seed);
        fixture.stream.copy(&target, &part).unwrap();
        fixture.check(&target, seed);
    }
    Ok(())
}

pub fn registered_host_memory_is_accessible(fixture: &Fixture) -> Result<(), Skip> {
    let length = 4 << 20;
    let host = fixture.first.register(Pages::new(length)).unwrap();
    assert_eq!(host.device(), None);
    let device = fixture.first.allocate(length as u64).unwrap();
    fixture.fill(&device.whole(), 1);
    fixture.stream.copy(&host.whole(), &device.whole()).unwrap();
    fixture.stream.fill(&device.whole(), 0).unwrap();
    fixture.stream.copy(&device.whole(), &host.whole()).unwrap();
    fixture.check(&device.whole(), 1);
    fixture.check(&host.slice(100, 1000).unwrap().slice(0, 0).unwrap(), 1);
    if let Some(other) = &fixture.second {
        // Registered once, for all devices.
        let stream = other.stream().unwrap();
        let theirs = other.allocate(length as u64).unwrap();
        stream.copy(&theirs.whole(), &host.whole()).unwrap();
        let sum = stream.checksum(&theirs.whole(), DEFAULT_TIMEOUT).unwrap();
        assert_eq!(sum, gpu::checksum(&pattern(length, 1)));
    }
    Ok(())
}

pub fn fill_changes_exactly_its_range(fixture: &Fixture) -> Result<(), Skip> {
    let memory = fixture.first.allocate(10_000).unwrap();
    fixture.stream.fill(&memory.whole(), 1).unwrap();
    fixture.stream.fill(&memory.slice(1001, 2000).unwrap(), 2).unwrap();
    let mut bytes = vec![0; 10_000];
    fixture.stream.download(&memory.whole(), &mut bytes, DEFAULT_TIMEOUT).unwrap();
    let expected = |at| if (1001..3001).contains(&at) { 2 } else { 1 };
    assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == expected(at)));
    Ok(())
}

/// Every device has a default stream.
#[allow(unsafe_code)]
pub fn foreign_stream_is_usable(fixture: &Fixture) -> Result<(), Skip> {
    let memory = fixture.first.allocate(1 << 20).unwrap();
    for _ in 0..2 {
        // SAFETY: the default stream always exists.
        let stream = unsafe { fixture.first.adopt_stream(0) }.unwrap();
        stream.fill(&memory.whole(), 7).unwrap();
        stream.synchronize(DEFAULT_TIMEOUT).unwrap();
        let mut bytes = vec![0; 1 << 20];
        stream.download(&memory.whole(), &mut bytes, DEFAULT_TIMEOUT).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 7));
    }
    // SAFETY: it is refused.
    let refused = unsafe { fixture.first.adopt_stream(2) }.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NotSupported);
    Ok(())
}

/// Order within a stream, between streams of two devices, and on the host.
pub fn written_words_wake_waiting_streams(fixture: &Fixture) -> Result<(), Skip> {
    let pages = std::sync::Arc::new(Pages::new(4096));
    let words = fixture.first.register(Shared(pages.clone())).unwrap();
    let length = 8 << 20;
    let (from, to) = (fixture.first.allocate(length), fixture.first.allocate(length));
    let (from, to) = (from.unwrap().whole(), to.unwrap().whole());
    let other = fixture.second.as_ref().unwrap_or(&fixture.first);
    let waiting = fixture.first.stream().unwrap();
    let (word, wrapped) = (words.slice(0, 4).unwrap(), words.slice(12, 4).unwrap());
    // Started before the word is written; numbers wrap.
    pages.0[0].store(u64::from(u32::MAX), Ordering::Release);
    waiting.wait_for_word(&word, u32::MAX - 1).unwrap();
    waiting.wait_for_word(&word, 2).unwrap();
    waiting.copy(&to, &from).unwrap();
    waiting.write_word(&wrapped, 9).unwrap();
    fixture.fill(&from, 5);
    assert!(!waiting.is_done().unwrap());
    let writing = other.stream().unwrap();
    writing.write_word(&word, 3).unwrap();
    waiting.synchronize(DEFAULT_TIMEOUT).unwrap();
    fixture.check(&to, 5);
    let word_at = |at: usize| (pages.0[at / 8].load(Ordering::Acquire) >> (at % 8 * 8)) as u32;
    assert_eq!((word_at(0), word_at(4), word_at(12)), (3, 0, 9));
    // The host writes, too.
    waiting.wait_for_word(&word, 4).unwrap();
    assert!(!waiting.is_done().unwrap());
    pages.0[0].store(4, Ordering::Release);
    waiting.synchronize(DEFAULT_TIMEOUT).unwrap();
    for bad in [words.slice(0, 8), words.slice(2, 4), words.slice(0, 0)] {
        let bad = bad.unwrap();
        let (wrote, waited) = (waiting.write_word(&bad, 1), waiting.wait_for_word(&bad, 1));
        assert_eq!(wrote.unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert_eq!(waited.unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    Ok(())
}

pub fn device_checksum_equals_host_checksum(fixture: &Fixture) -> Result<(), Skip> {
    let length = 3 << 20;
    let memory = fixture.first.allocate(length as u64).unwrap();
    fixture.fill(&memory.whole(), 9);
    let bytes = pattern(length, 9);
    for (offset, length) in
        [(0, 0), (0, 1), (0, 8), (3, 5), (1, 64), (5, 4093), (8, 65_536), (7, 1 << 20), (0, length)]
    {
        let part = memory.slice(offset as u64, length as u64).unwrap();
        let sum = fixture.stream.checksum(&part, DEFAULT_TIMEOUT).unwrap();
        assert_eq!(sum, gpu::checksum(&bytes[offset..offset + length]), "{offset} + {length}");
    }
    Ok(())
}

/// Memory whose owner waits for the stream when it is dropped.
#[derive(Debug)]
struct Waits {
    pages: Pages,
    stream: std::sync::Arc<gpu::Stream>,
}

impl Drop for Waits {
    fn drop(&mut self) {
        self.stream.synchronize(DEFAULT_TIMEOUT).unwrap();
    }
}

// SAFETY: the promise of the pages.
#[allow(unsafe_code)]
unsafe impl HostMapping for Waits {
    fn address(&self) -> u64 {
        self.pages.address()
    }
    fn length(&self) -> u64 {
        self.pages.length()
    }
}

pub fn owners_may_call_back_when_dropped(fixture: &Fixture) -> Result<(), Skip> {
    let stream = std::sync::Arc::new(fixture.first.stream().unwrap());
    let device = fixture.first.allocate(1 << 20).unwrap();
    let owner = Waits { pages: Pages::new(1 << 20), stream: stream.clone() };
    let host = fixture.first.register(owner).unwrap();
    for _ in 0..200 {
        stream.copy(&device.whole(), &host.whole()).unwrap();
    }
    // The stream has the last reference, which is dropped in the middle of one of these calls.
    drop(host);
    for _ in 0..200 {
        stream.fill(&device.whole(), 3).unwrap();
    }
    // A timeout without an end.
    stream.synchronize(Duration::MAX).unwrap();
    let mut bytes = [0; 100];
    stream.download(&device.slice(0, 100).unwrap(), &mut bytes, Duration::MAX).unwrap();
    assert_eq!(bytes, [3; 100]);
    stream.upload(&device.slice(0, 100).unwrap(), &[4; 100], Duration::MAX).unwrap();
    Ok(())
}

/// Makes an emulated device slow enough to be observed; a GPU gets more work instead.
pub fn slow(fixture: &Fixture, delay: Duration) {
    if fixture.is_emulated() {
        configure_faults(0, FaultConfig { delay, ..FaultConfig::default() });
    }
}

pub fn events_order_streams(fixture: &Fixture) -> Result<(), Skip> {
    let length = 64 << 20;
    let first = fixture.first.stream().unwrap();
    let second = fixture.first.stream().unwrap();
    let event = fixture.first.event().unwrap();
    assert!(event.is_done().unwrap(), "never recorded");
    let (from, to) =
        (fixture.first.allocate(length).unwrap(), fixture.first.allocate(length).unwrap());
    slow(fixture, Duration::from_millis(5));
    for round in 1..6 {
        first.fill(&from.whole(), round).unwrap();
        first.record(&event).unwrap();
        second.wait_for(&event).unwrap();
        second.copy(&to.whole(), &from.whole()).unwrap();
        let back = fixture.first.event().unwrap();
        second.record(&back).unwrap();
        // The next round must not fill bytes that are still being copied.
        first.wait_for(&back).unwrap();
        back.wait(DEFAULT_TIMEOUT).unwrap();
        let mut end = [0; 16];
        second.download(&to.slice(length - 16, 16).unwrap(), &mut end, DEFAULT_TIMEOUT).unwrap();
        assert_eq!(end, [round; 16]);
    }
    slow(fixture, Duration::ZERO);
    Ok(())
}

pub fn memory_outlives_its_operations(fixture: &Fixture) -> Result<(), Skip> {
    let length = 32 << 20;
    let to = fixture.first.allocate(length).unwrap();
    let stream = fixture.first.stream().unwrap();
    let (_, used) = fixture.first.budget();
    slow(fixture, Duration::from_millis(20));
    for seed in 0..4 {
        let from = fixture.first.allocate_shared(length, &[]).unwrap();
        fixture.fill(&from.slice(0, 1 << 20).unwrap(), seed);
        for _ in 0..20 {
            stream.copy(&to.whole(), &from.whole()).unwrap();
        }
        // Only the stream still holds it.
        drop(from);
        stream.synchronize(DEFAULT_TIMEOUT).unwrap();
        assert_eq!(fixture.first.budget().1, used, "released when the copies are done");
        fixture.check(&to.slice(0, 1 << 20).unwrap(), seed);
        slow(fixture, Duration::ZERO);
    }
    Ok(())
}

pub fn operations_are_asynchronous(fixture: &Fixture) -> Result<(), Skip> {
    let length = 1 << 30;
    // The pages of an emulated device are not touched: its delay is configured, and does not
    // depend on the length.
    let length = if fixture.is_emulated() { 1 << 20 } else { length };
    let (from, to) =
        (fixture.first.allocate(length).unwrap(), fixture.first.allocate(length).unwrap());
    fixture.stream.synchronize(DEFAULT_TIMEOUT).unwrap();
    slow(fixture, Duration::from_millis(5));
    let start = Instant::now();
    for _ in 0..20 {
        fixture.stream.copy(&to.whole(), &from.whole()).unwrap();
    }
    let started = start.elapsed();
    let was_done = fixture.stream.is_done().unwrap();
    fixture.stream.synchronize(DEFAULT_TIMEOUT).unwrap();
    let done = start.elapsed();
    slow(fixture, Duration::ZERO);
    assert!(!was_done && started < done / 2, "started after {started:?}, done after {done:?}");
    Ok(())
}

pub fn wait_ends_at_its_deadline(fixture: &Fixture) -> Result<(), Skip> {
    let length = if fixture.is_emulated() { 1 << 20 } else { 1 << 30 };
    let (from, to) =
        (fixture.first.allocate(length).unwrap(), fixture.first.allocate(length).unwrap());
    fixture.fill(&from.slice(0, 4096).unwrap(), 1);
    slow(fixture, Duration::from_millis(10));
    for _ in 0..20 {
        fixture.stream.copy(&to.whole(), &from.whole()).unwrap();
    }
    let event = fixture.first.event().unwrap();
    fixture.stream.record(&event).unwrap();
    let little = Duration::from_micros(200);
    assert_eq!(event.wait(little).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    let error = fixture.stream.synchronize(little).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    // The caller's bytes are not touched after its deadline.
    let mut bytes = [7; 4096];
    let error = fixture.stream.download(&to.slice(0, 4096).unwrap(), &mut bytes, little);
    assert_eq!(error.unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    slow(fixture, Duration::ZERO);
    fixture.stream.synchronize(DEFAULT_TIMEOUT).unwrap();
    assert_eq!(bytes, [7; 4096]);
    fixture.check(&to.slice(0, 4096).unwrap(), 1);
    Ok(())
}

pub fn peer_is_accessed_directly(fixture: &Fixture) -> Result<(), Skip> {
    let other = second(fixture)?;
    let length = 8 << 20;
    let (here, there) = (fixture.first.allocate(length).unwrap(), other.allocate(length).unwrap());
    fixture.first.enable_peer(other).unwrap();
    fixture.first.enable_peer(other).unwrap();
    fixture.fill(&here.whole(), 1);
    fixture.stream.copy(&there.whole(), &here.whole()).unwrap();
    fixture.stream.fill(&here.whole(), 0).unwrap();
    fixture.stream.copy(&here.whole(), &there.whole()).unwrap();
    fixture.check(&here.whole(), 1);
    // A kernel reads over the link.
    let sum = fixture.stream.checksum(&there.whole(), DEFAULT_TIMEOUT).unwrap();
    assert_eq!(sum, gpu::checksum(&pattern(length as usize, 1)));
    Ok(())
}

pub fn peer_without_access_is_refused(fixture: &Fixture) -> Result<(), Skip> {
    let other = second(fixture)?;
    // Access cannot be withdrawn, so this uses the other direction, which no case enables.
    let (here, there) = (fixture.first.allocate(4096).unwrap(), other.allocate(4096).unwrap());
    let stream = other.stream().unwrap();
    for result in [
        stream.copy(&here.whole(), &there.whole()),
        stream.copy(&there.whole(), &here.whole()),
        stream.fill(&here.whole(), 0),
        stream.checksum(&here.whole(), DEFAULT_TIMEOUT).map(drop),
    ] {
        let error = result.unwrap_err();
        assert_eq!((error.kind(), error.device()), (ErrorKind::NoPeerAccess, Some(other.name())));
    }
    Ok(())
}

pub fn lengths_and_bounds_are_checked(fixture: &Fixture) -> Result<(), Skip> {
    let memory = fixture.first.allocate(1000).unwrap();
    for (offset, length) in [(0, 1001), (1000, 1), (1001, 0), (u64::MAX, 2), (2, u64::MAX)] {
        let error = memory.slice(offset, length).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds);
    }
    let part = memory.slice(500, 500).unwrap();
    assert_eq!(part.slice(1, 500).unwrap_err().kind(), ErrorKind::OutOfBounds);
    let error = fixture.stream.copy(&part, &memory.whole()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let error = fixture.stream.upload(&part, &[0; 501], DEFAULT_TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    if fixture.is_emulated() {
        return Ok(());
    }
    // Memory of different implementations cannot be combined.
    let Ok(emulated) = gpu::Device::open(gpu::DeviceName::emulated(0)) else {
        return skip("the emulated device is the device under test");
    };
    let foreign = emulated.allocate(500).unwrap();
    assert!(fixture.stream.copy(&part, &foreign.whole()).is_err());
    Ok(())
}
