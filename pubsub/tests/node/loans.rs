//! Memory that is promised to publishers, and loans that are more than was promised.

use std::time::Duration;

use pubsub::{
    Attempt, Budgets, Error, ErrorKind, Loan, Node, NodeOptions, Publisher, Row, TopicSettings,
};

use crate::support::{
    ChildProcess, TIMEOUT, TestDir, number_of, options, publish, settings, until,
};

const MEBIBYTE: u64 = 1 << 20;
const LOANS: u32 = 4;

/// Serves a node where topics may take so many MiB.
fn join(test_dir: &TestDir, budget: u64) -> Node {
    let budget = Some(budget * MEBIBYTE);
    let budgets = Budgets { host: budget, device: budget };
    Node::join(NodeOptions { budgets, ..options(test_dir.path()) }).unwrap()
}

/// Of messages of 1 MiB.
fn large(depth: u32, loans: u32) -> TopicSettings {
    TopicSettings { depth, loans, largest: MEBIBYTE, ..settings() }
}

fn is_refused(error: &Error, kind: ErrorKind, topic: &str) {
    assert_eq!((error.kind(), error.subject()), (kind, Some(topic)), "{error}");
}

/// All that it may have, and whatever it can get beyond that.
fn all_loans(publisher: &Publisher) -> Vec<Loan> {
    let mut loans = Vec::new();
    while let Ok(loan) = publisher.loan(MEBIBYTE, Duration::from_secs(1)) {
        loans.push(loan);
    }
    loans
}

#[test]
fn what_others_borrow_takes_nothing_of_what_a_topic_was_promised() {
    let test_dir = TestDir::new();
    // Eight messages and four loans; one message, and the eight loans of two publishers each.
    let node = join(&test_dir, 12 + 1 + 16);
    let calm = node.topic("calm", &large(8, LOANS)).unwrap();
    let greedy = node.topic("greedy", &large(1, 8)).unwrap();
    let takers = [greedy.publisher().unwrap(), greedy.publisher().unwrap()];
    let refused = greedy.publisher().unwrap_err();
    is_refused(&refused, ErrorKind::OverBudget, "greedy");
    let figures = "8 messages for queue and loans × 1048576 bytes = 8388608 bytes; topics already \
                   reserve 30408704 of a budget of 30408704 bytes";
    assert_eq!(refused.detail(), figures);
    let taken: Vec<_> = takers.iter().map(all_loans).collect();
    assert_eq!(taken.iter().map(Vec::len).collect::<Vec<_>>(), [8, 8]);
    is_refused(&takers[0].try_loan(1).unwrap_err(), ErrorKind::TooManyLoans, "greedy");
    // All that the other topic was promised is there: nobody has to give anything back for it.
    let (mut reader, publisher) = (calm.subscriber().unwrap(), calm.publisher().unwrap());
    for _ in 0..8 {
        publisher.loan(MEBIBYTE, TIMEOUT).unwrap().publish(TIMEOUT).unwrap();
    }
    let mut loans = all_loans(&publisher);
    assert_eq!(loans.len(), LOANS as usize);
    let Attempt::Full(last) = loans.pop().unwrap().try_publish().unwrap() else {
        panic!("there is no room in the queue")
    };
    drop(reader.pull(TIMEOUT).unwrap());
    last.publish(TIMEOUT).unwrap();
    drop(publisher.loan(MEBIBYTE, TIMEOUT).unwrap());
    // A publisher that goes leaves its memory to another one, when its last loan has gone, too.
    let [first, second] = takers;
    drop(first);
    is_refused(&greedy.publisher().unwrap_err(), ErrorKind::OverBudget, "greedy");
    drop(taken);
    greedy.publisher().unwrap();
    drop(second);
}

#[test]
fn what_was_promised_to_one_who_is_killed_is_promised_to_others() {
    let test_dir = TestDir::new();
    // Eight messages, and the loans of two publishers.
    let node = join(&test_dir, 8 + 2 * 4);
    let topic = node.topic("numbers", &large(8, LOANS)).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    for _ in 0..3 {
        // It has two.
        let mut other = ChildProcess::start("loans numbers 4", test_dir.path());
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), 0);
        is_refused(&topic.publisher().unwrap_err(), ErrorKind::OverBudget, "numbers");
        other.kill();
        until("its publishers to be forgotten", || {
            let rows = node.report().unwrap();
            !rows.iter().any(|row| matches!(row, Row::Publisher { .. }))
        });
        drop((topic.publisher().unwrap(), topic.publisher().unwrap()));
    }
}

#[test]
fn the_next_service_keeps_what_the_last_one_promised() {
    let test_dir = TestDir::new();
    let mut service = ChildProcess::start("serves", test_dir.path());
    let served = test_dir.join_served();
    let topic = served.topic("numbers", &large(8, LOANS)).unwrap();
    let mut publishers = vec![topic.publisher().unwrap(), topic.publisher().unwrap()];
    // It serves when the first one has gone.
    let node = join(&test_dir, 8 + 2 * 4);
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
fn publishers_come_while_services_die() {
    let test_dir = TestDir::new();
    let mut service = ChildProcess::start("serves", test_dir.path());
    let node = test_dir.join_served();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    std::thread::scope(|scope| {
        let coming = scope.spawn(|| {
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
        coming.join().unwrap();
    });
    until("all publishers to be gone", || {
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
    for words in ["4 loans", "5 loans", ": another loans. Opened without settings"] {
        assert!(error.detail().contains(words), "{words}: {error}");
    }
    let deeper = TopicSettings { depth: 9, ..other };
    let error = node.topic("numbers", &deeper).unwrap_err();
    assert!(error.detail().contains(": another loans, depth. "), "{error}");
    for loans in [0, TopicSettings::MAX_LOANS + 1] {
        let error = node.topic("others", &TopicSettings { loans, ..settings() }).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
}
