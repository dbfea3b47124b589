//! Waiting for subscribers, and iterators of samples.

use super::*;

#[test]
fn publisher_waits_for_enough_subscribers() {
    let node = TestNode::new(&settings());
    let publisher = node.publisher();
    let error = publisher.wait_for_subscribers(1, SHORT_TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert!(error.to_string().contains("0 subscribers of 1"), "{error}");
    let first = node.subscriber();
    assert_eq!(publisher.wait_for_subscribers(1, TEST_TIMEOUT).unwrap(), 1);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| publisher.wait_for_subscribers(2, TEST_TIMEOUT).unwrap());
        let _second = node.subscriber();
        assert_eq!(waiting.join().unwrap(), 2);
    });
    drop(first);
    node.service.is_closed.store(true, Release);
    let error = publisher.wait_for_subscribers(2, TEST_TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "the wait ends when the node is closed");
}

#[test]
fn samples_end_with_the_error_of_the_deadline() {
    let node = TestNode::new(&settings());
    let (publisher, mut subscriber) = (node.publisher(), node.subscriber());
    for number in 0..3_u8 {
        publisher.push(&[number], TEST_TIMEOUT).unwrap();
    }
    let mut samples = subscriber.samples(SHORT_TIMEOUT);
    let numbers: Vec<_> =
        samples.by_ref().take(3).map(|sample| sample.unwrap().to_vec().unwrap()).collect();
    assert_eq!(numbers, [[0], [1], [2]]);
    let error = samples.next().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    publisher.push(&[3], TEST_TIMEOUT).unwrap();
    assert!(samples.next().is_none(), "the error was the last");
    // Another iterator continues.
    assert_eq!(subscriber.samples(SHORT_TIMEOUT).next().unwrap().unwrap().to_vec().unwrap(), [3]);
}
