//! Calls that must work while a stream waits for a slow process.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gpu::{Block, CopyMethod, DEFAULT_TIMEOUT, Stream};

use super::Skip;
use super::streams::{Pages, Shared};
use crate::fixture::Fixture;

/// A stream that waits until the first word of the pages is 1.
fn waiting(fixture: &Fixture, pages: &Arc<Pages>) -> Stream {
    let stream = fixture.first.stream().unwrap();
    wait_for_first_word(fixture, &stream, pages);
    stream
}

fn wait_for_first_word(fixture: &Fixture, stream: &Stream, pages: &Arc<Pages>) {
    let words = fixture.first.register(Shared(pages.clone())).unwrap();
    stream.wait_for_word(&words.slice(0, 4).unwrap(), 1).unwrap();
}

/// Freed memory stays allocated until no stream waits, and can be reused before.
pub fn frees_are_deferred_until_no_stream_waits(fixture: &Fixture) -> Result<(), Skip> {
    let device = &fixture.first;
    let before = device.budget().1;
    let (pages, others) = (Arc::new(Pages::new(4096)), Arc::new(Pages::new(8192)));
    let touched = device.allocate(4096).unwrap();
    let other = device.stream().unwrap();
    other.fill(&touched.whole(), 1).unwrap();
    let stream = waiting(fixture, &pages);
    let start = Instant::now();
    // Held by another stream, which releases it at its next query.
    drop(touched);
    other.synchronize(DEFAULT_TIMEOUT).unwrap();
    let memory = device.allocate(3 << 20).unwrap();
    let address = memory.address();
    drop(memory);
    let again = device.allocate(3 << 20).unwrap();
    assert_eq!(again.address(), address, "deferred memory is reused first");
    drop(again);
    // Host memory stays registered, and mapped as long as that.
    drop(device.register(Shared(others.clone())).unwrap());
    assert_eq!(Arc::strong_count(&others), 2);
    let registered = device.register(Shared(others.clone())).unwrap();
    other.fill(&registered.whole(), 7).unwrap();
    other.synchronize(DEFAULT_TIMEOUT).unwrap();
    assert_eq!(others.0[1].load(Ordering::Acquire) as u8, 7);
    drop(registered);
    // The same holds for memory of another device.
    if let Some(second) = &fixture.second {
        drop(second.allocate(1 << 20).unwrap());
        let stream = second.stream().unwrap();
        let memory = second.allocate(1 << 20).unwrap();
        stream.fill(&memory.whole(), 3).unwrap();
        stream.checksum(&memory.whole(), DEFAULT_TIMEOUT).unwrap();
    }
    assert!(!stream.is_done().unwrap());
    assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
    assert!(device.budget().1 > before);
    pages.0[0].store(1, Ordering::Release);
    stream.synchronize(DEFAULT_TIMEOUT).unwrap();
    assert_eq!(device.budget().1, before, "all is free");
    assert_eq!(Arc::strong_count(&others), 1);
    Ok(())
}

/// Kernels start, perhaps for the first time, streams end, and all copies proceed.
pub fn other_streams_run_while_one_waits(fixture: &Fixture) -> Result<(), Skip> {
    let device = &fixture.first;
    let pages = Arc::new(Pages::new(4096));
    let (from, to) = (device.allocate(1 << 20).unwrap(), device.allocate(1 << 20).unwrap());
    let (from, to) = (from.whole(), to.whole());
    let stream = waiting(fixture, &pages);
    let start = Instant::now();
    for round in 0..3 {
        fixture.fill(&from, round);
        let other = device.stream().unwrap();
        let sum = other.checksum(&from, DEFAULT_TIMEOUT).unwrap();
        let blocks =
            (0..256).map(|number| Block { to: number * 4096, from: number * 4096, length: 4096 });
        let blocks: Vec<_> = blocks.collect();
        other.copy_blocks(&to, &from, &blocks, CopyMethod::Kernel).unwrap();
        other.synchronize(DEFAULT_TIMEOUT).unwrap();
        assert_eq!(other.checksum(&to, DEFAULT_TIMEOUT).unwrap(), sum);
        fixture.check(&to, round);
        let event = device.event().unwrap();
        other.record(&event).unwrap();
        event.wait(DEFAULT_TIMEOUT).unwrap();
    }
    assert!(!stream.is_done().unwrap());
    assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
    pages.0[0].store(1, Ordering::Release);
    stream.synchronize(DEFAULT_TIMEOUT).unwrap();
    Ok(())
}

/// A foreign stream is never queried: its owner may destroy it.
pub fn frees_are_deferred_for_foreign_streams(fixture: &Fixture) -> Result<(), Skip> {
    let device = &fixture.first;
    let before = device.budget().1;
    let pages = Arc::new(Pages::new(4096));
    let stream = device.default_stream().unwrap();
    wait_for_first_word(fixture, &stream, &pages);
    let start = Instant::now();
    drop(device.allocate(2 << 20).unwrap());
    assert!(device.budget().1 > before);
    assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
    pages.0[0].store(1, Ordering::Release);
    drop(stream);
    drop(device.allocate(4096).unwrap());
    assert_eq!(device.budget().1, before, "all is free");
    Ok(())
}

/// With many threads: after one thread has released memory, no other thread may still be about
/// to free it.
pub fn memory_is_free_at_once_without_waiting_streams(fixture: &Fixture) -> Result<(), Skip> {
    let device = &fixture.first;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let pages = Arc::new(Pages::new(4096));
                for _ in 0..200 {
                    drop(device.register(Shared(pages.clone())).unwrap());
                    assert_eq!(Arc::strong_count(&pages), 1);
                }
            });
        }
    });
    Ok(())
}
