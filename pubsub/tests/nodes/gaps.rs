//! Gaps that subscribers of another node are notified of.

use pubsub::{Event, Reliability, TopicSettings};

use crate::between::{address, is_replicated, join, network, until_replicated};
use crate::support::{TIMEOUT, TestDir, number_of, publish, settings, until};

#[test]
fn messages_before_a_subscription_are_no_gap() {
    for reliability in [Reliability::Reliable, Reliability::DropNewest, Reliability::DropOldest] {
        // Deep enough that no message is dropped while the acknowledgements are still on their way.
        let settings = TopicSettings { reliability, depth: 64, ..settings() };
        let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
        let first = join(test_dirs[0].path(), network(addresses[0], &[]));
        let second = join(test_dirs[1].path(), network(addresses[1], &[addresses[0]]));
        let topic = first.topic("numbers", &settings).unwrap();
        let (publisher, mut local) = (topic.publisher().unwrap(), topic.subscriber().unwrap());
        // Keeps the topic of the second node while it has no subscriber.
        let remote_topic = second.topic("numbers", &settings).unwrap();
        let mut next = 0;
        for _ in 0..3 {
            let mut remote = remote_topic.subscriber().unwrap();
            until_replicated(&first, "numbers");
            for number in next..next + 10 {
                publish(&publisher, number..number + 1);
                assert_eq!(number_of(&local.pull(TIMEOUT).unwrap()), number);
                assert_eq!(number_of(&remote.pull(TIMEOUT).unwrap()), number);
            }
            assert_eq!(remote.missed(), 0, "{reliability:?}, from {next} on");
            let event = remote.poll_event();
            assert!(!matches!(event, Some(Event::Gap { .. })), "{event:?}");
            drop(remote);
            until("no remote subscriber", || !is_replicated(&first, "numbers"));
            for number in next + 10..next + 50 {
                publish(&publisher, number..number + 1);
                assert_eq!(number_of(&local.pull(TIMEOUT).unwrap()), number);
            }
            next += 50;
        }
    }
}
