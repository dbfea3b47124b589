//! A counting allocator checks that nothing is allocated from loan to drop of the sample.

use std::time::Instant;

use testkit::allocations::{CountingAllocator, of_this_thread};

use super::{TEST_TIMEOUT, TestNode, TopicSettings, WaitStrategy, settings};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

#[test]
fn messages_are_delivered_without_allocations() {
    const ROUNDS: u32 = 10_000;
    let node = TestNode::new(&TopicSettings { depth: 8, ..settings() });
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    subscriber.set_wait_strategy(WaitStrategy::Busy);
    publisher.push(&[0; 64], TEST_TIMEOUT).unwrap();
    drop(subscriber.pull(TEST_TIMEOUT).unwrap());
    let before = of_this_thread();
    let start = Instant::now();
    for _ in 0..ROUNDS {
        let loan = publisher.loan(64, TEST_TIMEOUT).unwrap();
        loan.publish(TEST_TIMEOUT).unwrap();
        drop(subscriber.try_pull().unwrap().unwrap());
    }
    let took = start.elapsed();
    for number in 0..ROUNDS {
        publisher.push(&number.to_le_bytes(), TEST_TIMEOUT).unwrap();
        let sample = subscriber.pull(TEST_TIMEOUT).unwrap();
        let mut found = [0; 4];
        sample.read(0, &mut found).unwrap();
        assert_eq!(found, number.to_le_bytes());
        assert!(sample.metadata().is_empty() && sample.times().published > 0);
        assert_eq!(subscriber.poll_event(), None);
    }
    assert_eq!(of_this_thread() - before, 0);
    println!("loan, publish, pull and drop: {:?}", took / ROUNDS);
}
