//! Operations: that they do what they should, in order, while the caller goes on.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gpu::stand_in::{Behaviour, behave};
use gpu::{ErrorKind, HostMapping, PATIENCE};

use super::{Skip, second, skip};
use crate::house::{House, pattern};

/// Memory of the host, as a shared segment would be.
#[derive(Debug)]
pub struct Pages(pub Box<[std::sync::atomic::AtomicU64]>);

impl Pages {
    pub fn new(length: usize) -> Self {
        Self((0..length / 8).map(|_| 0.into()).collect())
    }
}

// SAFETY: a box of atomics, which stays where it is and is reached by nobody else.
#[allow(unsafe_code)]
unsafe impl HostMapping for Pages {
    fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }
    fn length(&self) -> u64 {
        self.0.len() as u64 * 8
    }
}

/// The same, looked at meanwhile.
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

pub fn bytes_arrive_whatever_their_number(house: &House) -> Result<(), Skip> {
    let (from, to) = (
        house.first.allocate(20 << 20).unwrap(),
        house.first.allocate_shared(20 << 20, &[]).unwrap(),
    );
    for (seed, (length, offset)) in
        [(0, 0), (1, 0), (7, 3), (4096, 1), (65_537, 4095), ((1 << 20) + 3, 9), (16 << 20, 64)]
            .into_iter()
            .enumerate()
    {
        let seed = seed as u64 + 1;
        let (part, target) =
            (from.slice(offset, length).unwrap(), to.slice(2 * offset, length).unwrap());
        house.fill(&part, seed);
        house.stream.copy(&target, &part).unwrap();
        house.check(&target, seed);
    }
    Ok(())
}

pub fn the_host_is_reached_by_registered_memory(house: &House) -> Result<(), Skip> {
    let length = 4 << 20;
    let host = house.first.register(Pages::new(length)).unwrap();
    assert_eq!(host.device(), None);
    let device = house.first.allocate(length as u64).unwrap();
    house.fill(&device.whole(), 1);
    house.stream.copy(&host.whole(), &device.whole()).unwrap();
    house.stream.fill(&device.whole(), 0).unwrap();
    house.stream.copy(&device.whole(), &host.whole()).unwrap();
    house.check(&device.whole(), 1);
    house.check(&host.slice(100, 1000).unwrap().slice(0, 0).unwrap(), 1);
    if let Some(other) = &house.second {
        // Registered once, for all devices.
        let stream = other.stream().unwrap();
        let theirs = other.allocate(length as u64).unwrap();
        stream.copy(&theirs.whole(), &host.whole()).unwrap();
        let sum = stream.checksum(&theirs.whole(), PATIENCE).unwrap();
        assert_eq!(sum, gpu::checksum(&pattern(length, 1)));
    }
    Ok(())
}

pub fn filling_fills_exactly_that(house: &House) -> Result<(), Skip> {
    let memory = house.first.allocate(10_000).unwrap();
    house.stream.fill(&memory.whole(), 1).unwrap();
    house.stream.fill(&memory.slice(1001, 2000).unwrap(), 2).unwrap();
    let mut bytes = vec![0; 10_000];
    house.stream.download(&memory.whole(), &mut bytes, PATIENCE).unwrap();
    let expected = |at| if (1001..3001).contains(&at) { 2 } else { 1 };
    assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == expected(at)));
    Ok(())
}

/// The default stream is everywhere.
#[allow(unsafe_code)]
pub fn a_stream_of_others_is_used(house: &House) -> Result<(), Skip> {
    let memory = house.first.allocate(1 << 20).unwrap();
    for _ in 0..2 {
        // SAFETY: there always is a default stream.
        let stream = unsafe { house.first.adopt_stream(0) }.unwrap();
        stream.fill(&memory.whole(), 7).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        let mut bytes = vec![0; 1 << 20];
        stream.download(&memory.whole(), &mut bytes, PATIENCE).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 7));
    }
    // SAFETY: it is refused.
    let refused = unsafe { house.first.adopt_stream(2) }.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NotSupported);
    Ok(())
}

/// In the order of a stream, between streams of two devices, and by the host.
pub fn words_tell_who_waits_for_them(house: &House) -> Result<(), Skip> {
    let pages = std::sync::Arc::new(Pages::new(4096));
    let words = house.first.register(Shared(pages.clone())).unwrap();
    let length = 8 << 20;
    let (from, to) = (house.first.allocate(length), house.first.allocate(length));
    let (from, to) = (from.unwrap().whole(), to.unwrap().whole());
    let other = house.second.as_ref().unwrap_or(&house.first);
    let waiting = house.first.stream().unwrap();
    let (word, gone) = (words.slice(0, 4).unwrap(), words.slice(12, 4).unwrap());
    // Begun before anybody writes; numbers go round.
    pages.0[0].store(u64::from(u32::MAX), Ordering::Release);
    waiting.wait_for_word(&word, u32::MAX - 1).unwrap();
    waiting.wait_for_word(&word, 2).unwrap();
    waiting.copy(&to, &from).unwrap();
    waiting.write_word(&gone, 9).unwrap();
    house.fill(&from, 5);
    assert!(!waiting.is_done().unwrap());
    let writing = other.stream().unwrap();
    writing.write_word(&word, 3).unwrap();
    waiting.synchronize(PATIENCE).unwrap();
    house.check(&to, 5);
    let word_at = |at: usize| (pages.0[at / 8].load(Ordering::Acquire) >> (at % 8 * 8)) as u32;
    assert_eq!((word_at(0), word_at(4), word_at(12)), (3, 0, 9));
    // The host writes, too.
    waiting.wait_for_word(&word, 4).unwrap();
    assert!(!waiting.is_done().unwrap());
    pages.0[0].store(4, Ordering::Release);
    waiting.synchronize(PATIENCE).unwrap();
    for bad in [words.slice(0, 8), words.slice(2, 4), words.slice(0, 0)] {
        let bad = bad.unwrap();
        let (wrote, waited) = (waiting.write_word(&bad, 1), waiting.wait_for_word(&bad, 1));
        assert_eq!(wrote.unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert_eq!(waited.unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    Ok(())
}

pub fn the_checksum_is_that_of_the_host(house: &House) -> Result<(), Skip> {
    let length = 3 << 20;
    let memory = house.first.allocate(length as u64).unwrap();
    house.fill(&memory.whole(), 9);
    let bytes = pattern(length, 9);
    for (offset, length) in
        [(0, 0), (0, 1), (0, 8), (3, 5), (1, 64), (5, 4093), (8, 65_536), (7, 1 << 20), (0, length)]
    {
        let part = memory.slice(offset as u64, length as u64).unwrap();
        let sum = house.stream.checksum(&part, PATIENCE).unwrap();
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
        self.stream.synchronize(PATIENCE).unwrap();
    }
}

// SAFETY: the pages' own promise.
#[allow(unsafe_code)]
unsafe impl HostMapping for Waits {
    fn address(&self) -> u64 {
        self.pages.address()
    }
    fn length(&self) -> u64 {
        self.pages.length()
    }
}

pub fn owners_may_do_anything_when_they_are_dropped(house: &House) -> Result<(), Skip> {
    let stream = std::sync::Arc::new(house.first.stream().unwrap());
    let device = house.first.allocate(1 << 20).unwrap();
    let owner = Waits { pages: Pages::new(1 << 20), stream: stream.clone() };
    let host = house.first.register(owner).unwrap();
    for _ in 0..200 {
        stream.copy(&device.whole(), &host.whole()).unwrap();
    }
    // The stream has the last reference; it goes in the middle of one of these calls.
    drop(host);
    for _ in 0..200 {
        stream.fill(&device.whole(), 3).unwrap();
    }
    // A time that is no end.
    stream.synchronize(Duration::MAX).unwrap();
    let mut bytes = [0; 100];
    stream.download(&device.slice(0, 100).unwrap(), &mut bytes, Duration::MAX).unwrap();
    assert_eq!(bytes, [3; 100]);
    stream.upload(&device.slice(0, 100).unwrap(), &[4; 100], Duration::MAX).unwrap();
    Ok(())
}

/// Makes a stand-in slow enough to be watched; a GPU gets more to do instead.
pub fn slow(house: &House, delay: Duration) {
    if house.is_stand_in() {
        behave(0, Behaviour { delay, ..Behaviour::default() });
    }
}

pub fn events_order_streams(house: &House) -> Result<(), Skip> {
    let length = 64 << 20;
    let first = house.first.stream().unwrap();
    let second = house.first.stream().unwrap();
    let event = house.first.event().unwrap();
    assert!(event.is_done().unwrap(), "never recorded");
    let (from, to) = (house.first.allocate(length).unwrap(), house.first.allocate(length).unwrap());
    slow(house, Duration::from_millis(5));
    for round in 1..6 {
        first.fill(&from.whole(), round).unwrap();
        first.record(&event).unwrap();
        second.wait_for(&event).unwrap();
        second.copy(&to.whole(), &from.whole()).unwrap();
        let back = house.first.event().unwrap();
        second.record(&back).unwrap();
        // The next round must not fill what is still being copied.
        first.wait_for(&back).unwrap();
        back.wait(PATIENCE).unwrap();
        let mut end = [0; 16];
        second.download(&to.slice(length - 16, 16).unwrap(), &mut end, PATIENCE).unwrap();
        assert_eq!(end, [round; 16]);
    }
    slow(house, Duration::ZERO);
    Ok(())
}

pub fn memory_lives_as_long_as_its_operations(house: &House) -> Result<(), Skip> {
    let length = 32 << 20;
    let to = house.first.allocate(length).unwrap();
    let stream = house.first.stream().unwrap();
    let (_, used) = house.first.budget();
    slow(house, Duration::from_millis(20));
    for seed in 0..4 {
        let from = house.first.allocate_shared(length, &[]).unwrap();
        house.fill(&from.slice(0, 1 << 20).unwrap(), seed);
        for _ in 0..20 {
            stream.copy(&to.whole(), &from.whole()).unwrap();
        }
        // Nobody holds it any more but the stream.
        drop(from);
        stream.synchronize(PATIENCE).unwrap();
        assert_eq!(house.first.budget().1, used, "and when they are done it goes");
        house.check(&to.slice(0, 1 << 20).unwrap(), seed);
        slow(house, Duration::ZERO);
    }
    Ok(())
}

pub fn the_caller_goes_on_meanwhile(house: &House) -> Result<(), Skip> {
    let length = 1 << 30;
    // A stand-in's pages are not touched: it is slow by being told so, not by its length.
    let length = if house.is_stand_in() { 1 << 20 } else { length };
    let (from, to) = (house.first.allocate(length).unwrap(), house.first.allocate(length).unwrap());
    house.stream.synchronize(PATIENCE).unwrap();
    slow(house, Duration::from_millis(5));
    let start = Instant::now();
    for _ in 0..20 {
        house.stream.copy(&to.whole(), &from.whole()).unwrap();
    }
    let begun = start.elapsed();
    let was_done = house.stream.is_done().unwrap();
    house.stream.synchronize(PATIENCE).unwrap();
    let done = start.elapsed();
    slow(house, Duration::ZERO);
    assert!(!was_done && begun < done / 2, "begun after {begun:?}, done after {done:?}");
    Ok(())
}

pub fn a_deadline_is_kept(house: &House) -> Result<(), Skip> {
    let length = if house.is_stand_in() { 1 << 20 } else { 1 << 30 };
    let (from, to) = (house.first.allocate(length).unwrap(), house.first.allocate(length).unwrap());
    house.fill(&from.slice(0, 4096).unwrap(), 1);
    slow(house, Duration::from_millis(10));
    for _ in 0..20 {
        house.stream.copy(&to.whole(), &from.whole()).unwrap();
    }
    let event = house.first.event().unwrap();
    house.stream.record(&event).unwrap();
    let little = Duration::from_micros(200);
    assert_eq!(event.wait(little).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    let error = house.stream.synchronize(little).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    // The caller's bytes are not touched after its deadline.
    let mut bytes = [7; 4096];
    let error = house.stream.download(&to.slice(0, 4096).unwrap(), &mut bytes, little);
    assert_eq!(error.unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    slow(house, Duration::ZERO);
    house.stream.synchronize(PATIENCE).unwrap();
    assert_eq!(bytes, [7; 4096]);
    house.check(&to.slice(0, 4096).unwrap(), 1);
    Ok(())
}

pub fn a_peer_is_reached_directly(house: &House) -> Result<(), Skip> {
    let other = second(house)?;
    let length = 8 << 20;
    let (here, there) = (house.first.allocate(length).unwrap(), other.allocate(length).unwrap());
    house.first.enable_peer(other).unwrap();
    house.first.enable_peer(other).unwrap();
    house.fill(&here.whole(), 1);
    house.stream.copy(&there.whole(), &here.whole()).unwrap();
    house.stream.fill(&here.whole(), 0).unwrap();
    house.stream.copy(&here.whole(), &there.whole()).unwrap();
    house.check(&here.whole(), 1);
    // A kernel reads over the link.
    let sum = house.stream.checksum(&there.whole(), PATIENCE).unwrap();
    assert_eq!(sum, gpu::checksum(&pattern(length as usize, 1)));
    Ok(())
}

pub fn a_peer_is_not_reached_without_leave(house: &House) -> Result<(), Skip> {
    let other = second(house)?;
    // Leave is given for good: so from the other side, where no case gives it.
    let (here, there) = (house.first.allocate(4096).unwrap(), other.allocate(4096).unwrap());
    let stream = other.stream().unwrap();
    for result in [
        stream.copy(&here.whole(), &there.whole()),
        stream.copy(&there.whole(), &here.whole()),
        stream.fill(&here.whole(), 0),
        stream.checksum(&here.whole(), PATIENCE).map(drop),
    ] {
        let error = result.unwrap_err();
        assert_eq!((error.kind(), error.device()), (ErrorKind::NoPeerAccess, Some(other.name())));
    }
    Ok(())
}

pub fn lengths_and_bounds_are_checked(house: &House) -> Result<(), Skip> {
    let memory = house.first.allocate(1000).unwrap();
    for (offset, length) in [(0, 1001), (1000, 1), (1001, 0), (u64::MAX, 2), (2, u64::MAX)] {
        let error = memory.slice(offset, length).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds);
    }
    let part = memory.slice(500, 500).unwrap();
    assert_eq!(part.slice(1, 500).unwrap_err().kind(), ErrorKind::OutOfBounds);
    let error = house.stream.copy(&part, &memory.whole()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let error = house.stream.upload(&part, &[0; 501], PATIENCE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    if house.is_stand_in() {
        return Ok(());
    }
    // Different makers' memory does not go together.
    let Ok(stand_in) = gpu::Device::open(gpu::DeviceName::stand_in(0)) else {
        return skip("no stand-in beside it");
    };
    let foreign = stand_in.allocate(500).unwrap();
    assert!(house.stream.copy(&part, &foreign.whole()).is_err());
    Ok(())
}
