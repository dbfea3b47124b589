//! Topics with and without waiting publishers.

use super::*;
use crate::pool::PoolControl;
use crate::topic::Entry;

/// Release deadline of the topics.
const SHORT: Duration = Duration::from_millis(20);
/// Reached only on failure.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

fn settings() -> SharedSettings {
    let settings = crate::TopicSettings {
        depth: 2,
        largest: 64,
        release_deadline: SHORT,
        ..crate::TopicSettings::default()
    };
    SharedSettings::of(&settings).unwrap()
}

/// A publisher and a subscriber that fills its topic by holding messages.
struct Full {
    publisher: u64,
    holder: ipc::Subscriber,
}

impl Full {
    fn new(topic: &Topic, local: &PoolControl<MappedWords>, id: Participant) -> Self {
        let caller = Caller::new(id, &AlwaysAlive);
        let mut holder = topic.local().subscribe(&caller).unwrap();
        let publisher = topic.claim(id).unwrap();
        for sequence in 1.. {
            let owner = ipc::Owner::participant(id);
            let (block, place) = local.allocate(&caller, owner, 8).unwrap();
            let entry = Entry {
                block,
                offset: place.offset,
                length: 8,
                publisher,
                sequence,
                published_at: 0,
                metadata: 0,
                has_origin: false,
                sync_point: None,
            };
            if topic.publish_in(&caller, entry, local).is_err() {
                break;
            }
            topic.local().take(&mut holder).unwrap();
        }
        Self { publisher, holder }
    }

    fn is_evicted(&self, topic: &Topic) -> bool {
        !topic.local().is_subscribed(&self.holder)
    }
}

fn until(what: &str, service: &mut Service, is_so: impl Fn() -> bool) {
    let end = Instant::now() + TEST_TIMEOUT;
    while !is_so() {
        run_several(service);
        assert!(Instant::now() < end, "waited for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn only_topics_with_waiting_publishers_are_monitored() {
    let test_dir = TestDir::new();
    let mut service = test_dir.service();
    let member = test_dir.member();
    member.send_hello();
    run_several(&mut service);
    let id = member.welcome().unwrap();
    served_node(&service).node_segment.mark_member(id);
    for number in 0..50 {
        let (name, settings) = (format!("idle {number}"), Some(settings()));
        member.send_request(&Request::Open { request: number, name, settings }, &[]);
        run_several(&mut service);
    }
    for ticket in service.broker.tickets() {
        member.send_request(&Request::AcknowledgePieces { ticket }, &[]);
    }
    let topics: Vec<_> =
        service.broker.registry().local_topics().into_values().map(|it| it.topic).collect();
    let local = local_pool(&service);
    run_several(&mut service);
    // All topics are full, without a waiting publisher.
    let full: Vec<_> = topics.iter().map(|topic| Full::new(topic, local.control(), id)).collect();
    for topic in &topics {
        member.send_request(&Request::ParticipantsChanged { number: topic.number() }, &[]);
    }
    for _ in 0..10 {
        run_several(&mut service);
    }
    assert_eq!(service.eviction_monitor.checks, 0);
    assert!(!service.eviction_monitor.has_any() && service.max_poll_timeout() > POLL_INTERVAL);

    topics[7].publisher(full[7].publisher).backpressure().begin();
    member.send_request(&Request::PublisherBlocked { number: topics[7].number() }, &[]);
    // Ignored for a topic that it does not use.
    member.send_request(&Request::PublisherBlocked { number: 12345 }, &[]);
    run_several(&mut service);
    assert!(service.max_poll_timeout() <= POLL_INTERVAL);
    until("the eviction", &mut service, || full[7].is_evicted(&topics[7]));
    let (checks, iterations) = (service.eviction_monitor.checks, 5);
    (0..iterations).for_each(|_| run_several(&mut service));
    assert!(service.eviction_monitor.checks - checks <= 4 * iterations, "other topics are checked");
    assert_eq!(full.iter().zip(&topics).filter(|(it, topic)| it.is_evicted(topic)).count(), 1);
}

#[test]
fn blocking_subscriber_is_evicted_after_a_takeover() {
    let test_dir = TestDir::new();
    let (mut service, node_segment, _held) = test_dir.successor();
    let id = node_segment.participants().admit(pidfd()).unwrap();
    node_segment.mark_member(id);
    let pool = |direction| {
        let pool = Pool::create(PoolId { direction, ..LOCAL }, 1 << 20, 64).unwrap();
        pool.adopt_piece(0, pool.make_piece(1 << 16).unwrap()).unwrap();
        pool.admit_piece(&Caller::new(id, &AlwaysAlive), 0).unwrap();
        pool
    };
    let (local, inbound) = (pool(Direction::Local), pool(Direction::Inbound));
    let topic = Topic::create(4, "returned", &settings()).unwrap();
    let full = Full::new(&topic, local.control(), id);
    topic.publisher(full.publisher).backpressure().begin();
    // The wait was reported to the last service only.
    let member = test_dir.member();
    member.rejoin(id, &node_segment);
    member.return_objects(&[&local, &inbound], &topic);
    member.send_request(&Request::RejoinDone, &[]);
    until("the eviction", &mut service, || full.is_evicted(&topic));
}
