//! Between a loan and the drop of its sample nothing is allocated, and nobody is called who
//! need not be: an allocator that counts, for each thread.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Instant;

use super::{FAR, Home, Spin, TopicSettings, settings};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    // Not any more when the thread ends.
    let _ = ALLOCATIONS.try_with(|allocations| allocations.set(allocations.get() + 1));
}

// SAFETY: all is left to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: by the caller's contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: by the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: by the caller's contract.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn nothing_is_allocated_per_message() {
    const ROUNDS: u32 = 10_000;
    let home = Home::new(&TopicSettings { depth: 8, ..settings() });
    let (mut subscriber, publisher) = (home.subscriber(), home.publisher());
    subscriber.set_spin(Spin::Always);
    publisher.push(&[0; 64], FAR).unwrap();
    drop(subscriber.pull(FAR).unwrap());
    let before = ALLOCATIONS.get();
    let start = Instant::now();
    for _ in 0..ROUNDS {
        let loan = publisher.loan(64, FAR).unwrap();
        loan.publish(FAR).unwrap();
        drop(subscriber.try_pull().unwrap().unwrap());
    }
    let took = start.elapsed();
    for number in 0..ROUNDS {
        publisher.push(&number.to_le_bytes(), FAR).unwrap();
        let sample = subscriber.pull(FAR).unwrap();
        let mut found = [0; 4];
        sample.read(0, &mut found).unwrap();
        assert_eq!(found, number.to_le_bytes());
        assert!(sample.metadata().is_empty() && sample.times().published > 0);
        assert_eq!(subscriber.poll_event(), None);
    }
    assert_eq!(ALLOCATIONS.get() - before, 0);
    println!("loan, publish, pull and drop: {:?}", took / ROUNDS);
}
