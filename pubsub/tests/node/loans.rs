//! Memory reserved for publishers, and loans that exceed the reservation.

use std::time::Duration;

use pubsub::{
    Attempt, Budgets, Error, ErrorKind, Loan, Node, NodeOptions, Publisher, Row, TopicSettings,
};

use crate::support::{
    ChildProcess, TIMEOUT, TestDir, number_of, options, publish, settings, until,
};

const MEBIBYTE: u64 = 1 << 20;
const LOANS: u32 = 4;

/// Serves a node with a memory budget for topics.
fn join(test_dir: &TestDir, mebibytes: u64) -> Node {
    let budget = Some(mebibytes * MEBIBYTE);
    let budgets = Budgets { host: budget, device: budget };
    Node::join(NodeOptions { budgets, ..options(test_dir.path()) }).unwrap()
}

/// Settings for messages of 1 MiB.
fn large(depth: u32, loans: u32) -> TopicSettings {
    TopicSettings { depth, max_held: 1, loans, largest: MEBIBYTE, ..settings() }
}

fn is_refused(error: &Error, kind: ErrorKind, topic: &str) {
    assert_eq!((error.kind(), error.subject()), (kind, Some(topic)), "{error}");
}

/// Takes loans until one is refused.
fn all_loans(publisher: &Publisher) -> Vec<Loan> {
    let mut loans = Vec::new();
    while let Ok(loan) = publisher.loan(MEBIBYTE, Duration::from_secs(1)) {
        loans.push(loan);
    }
    loans
}

#[test]
fn loans_of_one_topic_leave_reservations_of_others() {
    let test_dir = TestDir::new();
    // Eight messages, two held ones and four loans; one message, two held ones, and the eight loans
    // of two publishers each.
    let node = join(&test_dir, 14 + 3 + 16);
    let calm = node.topic("calm", &large(8, LOANS)).unwrap();
    let greedy = node.topic("greedy", &large(1, 8)).unwrap();
    let takers = [greedy.publisher().unwrap(), greedy.publisher().unwrap()];
    let refused = greedy.publisher().unwrap_err();
    is_refused(&refused, ErrorKind::OverBudget, "greedy");
    let figures = "8 messages for queue, held samples and loans × 1048576 bytes = 8388608 bytes; topics already \
                   reserve 34603008 of a budget of 34603008 bytes";
    assert_eq!(refused.detail(), figures);
    let taken: Vec<_> = takers.iter().map(all_loans).collect();
    assert_eq!(taken.iter().map(Vec::len).collect::<Vec<_>>(), [8, 8]);
    is_refused(&takers[0].try_loan(1).unwrap_err(), ErrorKind::TooManyLoans, "greedy");
    // The other topic gets its whole reservation, although no loan is released.
    let (mut reader, publisher) = (calm.subscriber().unwrap(), calm.publisher().unwrap());
    for _ in 0..8 {
        publisher.loan(MEBIBYTE, TIMEOUT).unwrap().publish(TIMEOUT).unwrap();
    }
    let mut loans = all_loans(&publisher);
    assert_eq!(loans.len(), LOANS as usize);
    let Attempt::Full(last) = loans.pop().unwrap().try_publish().unwrap() else {
        panic!("a full queue accepted a message")
    };
    drop(reader.pull(TIMEOUT).unwrap());
    last.publish(TIMEOUT).unwrap();
    drop(publisher.loan(MEBIBYTE, TIMEOUT).unwrap());
    // The memory of a dropped publisher is free when its last loan is dropped, too.
    let [first, second] = takers;
    drop(first);
    is_refused(&greedy.publisher().unwrap_err(), ErrorKind::OverBudget, "greedy");
    drop(taken);
    greedy.publisher().unwrap();
    drop(second);
}

#[test]
fn reservation_of_a_killed_publisher_is_freed() {
    let test_dir = TestDir::new();
    // Eight messages, two held ones, and the loans of two publishers.
    let node = join(&test_dir, 8 + 2 + 2 * 4);
    let topic = node.topic("numbers", &large(8, LOANS)).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    for _ in 0..3 {
        // The child has two publishers.
        let mut other = ChildProcess::start("loans numbers 4", test_dir.path());
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), 0);
        is_refused(&topic.publisher().unwrap_err(), ErrorKind::OverBudget, "numbers");
        other.kill();
        until("the publishers to be reclaimed", || {
            let rows = node.report().unwrap();
            !rows.iter().any(|row| matches!(row, Row::Publisher { .. }))
        });
        drop((topic.publisher().unwrap(), topic.publisher().unwrap()));
    }
}

#[test]
fn reservations_survive_a_takeover() {
    let test_dir = TestDir::new();
    let mut service = ChildProcess::start("serves", test_dir.path());
    let served = test_dir.join_served();
    let topic = served.topic("numbers", &large(8, LOANS)).unwrap();
    let mut publishers = vec![topic.publisher().unwrap(), topic.publisher().unwrap()];
    // Takes over when the service is killed.
    let node = join(&test_dir, 8 + 2 + 2 * 4);
    service.kill();
    until("the node to be served again", || node.serves());
    is_refused(&topic.publisher().unwrap_err(), ErrorKind::OverBudget, "numbers");
    publishers.pop();
    publishers.push(topic.publisher().unwrap());
    let mut subscriber = topic.subscriber().unwrap();
    publish(&publishers[1], 0..3);
    for expected in 0..3 {
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
    }
}

#[test]
fn publishers_join_while_services_are_killed() {
    let test_dir = TestDir::new();
    let mut service = ChildProcess::start("serves", test_dir.path());
    let node = test_dir.join_served();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    std::thread::scope(|scope| {
        let joining = scope.spawn(|| {
            for number in 0..400 {
                publish(&topic.publisher().unwrap(), number..number + 1);
            }
        });
        for _ in 0..4 {
            std::thread::sleep(Duration::from_millis(20));
            service.kill();
            service = ChildProcess::start("serves", test_dir.path());
        }
        for expected in 0..400 {
            assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
        }
        joining.join().unwrap();
    });
    until("all publishers to be removed", || {
        let rows = node.report().unwrap_or_default();
        !rows.is_empty() && !rows.iter().any(|row| matches!(row, Row::Publisher { .. }))
    });
}

#[test]
fn loans_are_a_setting_like_others() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    assert_eq!(topic.settings().unwrap().loans, TopicSettings::default().loans);
    let rows = node.report().unwrap();
    assert!(rows.iter().any(|row| matches!(row, Row::Topic { loans: 4, .. })), "{rows:?}");
    let other = TopicSettings { loans: 5, ..settings() };
    let error = node.topic("numbers", &other).unwrap_err();
    is_refused(&error, ErrorKind::SettingsDiffer, "numbers");
    for words in ["4 loans", "5 loans", "Open it without settings"] {
        assert!(error.detail().contains(words), "{words}: {error}");
    }
    let deeper = TopicSettings { depth: 9, ..other };
    let error = node.topic("numbers", &deeper).unwrap_err();
    assert!(error.detail().contains("loans, depth: "), "{error}");
    for loans in [0, TopicSettings::MAX_LOANS + 1] {
        let error = node.topic("others", &TopicSettings { loans, ..settings() }).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
}
