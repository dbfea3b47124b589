//! Topics that somebody waits at, or nobody.

use super::*;
use crate::pool::Ledger;
use crate::topic::Entry;

/// Until whoever is in the way is removed.
const SHORT: Duration = Duration::from_millis(20);
/// Reached only if something is wrong.
const FAR: Duration = Duration::from_secs(60);

fn settings() -> SharedSettings {
    let settings = crate::TopicSettings {
        depth: 2,
        largest: 64,
        release_deadline: SHORT,
        ..crate::TopicSettings::default()
    };
    SharedSettings::of(&settings).unwrap()
}

/// One who holds what fills a topic that another one publishes.
struct Full {
    publisher: u64,
    holder: ipc::Subscriber,
}

impl Full {
    fn new(topic: &Topic, here: &Ledger<MappedWords>, who: Participant) -> Self {
        let caller = Caller::new(who, &Immortal);
        let mut holder = topic.here().subscribe(&caller).unwrap();
        let publisher = topic.claim(who).unwrap();
        for sequence in 1.. {
            let owner = ipc::Owner::participant(who);
            let (block, place) = here.allocate(&caller, owner, 8).unwrap();
            let entry = Entry {
                block,
                offset: place.offset,
                length: 8,
                publisher,
                sequence,
                published_at: 0,
                metadata: 0,
                has_origin: false,
                turn: None,
            };
            if topic.publish_in(&caller, entry, here).is_err() {
                break;
            }
            topic.here().take(&mut holder).unwrap();
        }
        Self { publisher, holder }
    }

    fn is_removed(&self, topic: &Topic) -> bool {
        !topic.here().is_subscribed(&self.holder)
    }
}

fn until(what: &str, service: &mut Reception, is_so: impl Fn() -> bool) {
    let end = Instant::now() + FAR;
    while !is_so() {
        turns(service);
        assert!(Instant::now() < end, "waited for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn only_where_somebody_waits_it_is_looked_who_is_in_the_way() {
    let ground = Ground::new();
    let mut service = ground.service();
    let member = ground.member();
    member.says_hello();
    turns(&mut service);
    let who = member.welcome().unwrap();
    seat(&service).hall.attend(who);
    for number in 0..50 {
        let (name, settings) = (format!("idle {number}"), Some(settings()));
        member.say(&Request::Open { request: number, name, settings }, &[]);
        turns(&mut service);
    }
    for ticket in 1..service.next_ticket {
        member.say(&Request::Mapped { ticket }, &[]);
    }
    let topics: Vec<_> =
        service.registry.topics.values().map(|kept| Arc::clone(&kept.topic)).collect();
    let here = Arc::clone(&service.registry.pools[&HERE].pool);
    turns(&mut service);
    // All are full, and nobody minds.
    let full: Vec<_> = topics.iter().map(|topic| Full::new(topic, here.ledger(), who)).collect();
    for topic in &topics {
        member.say(&Request::Changed { number: topic.number() }, &[]);
    }
    for _ in 0..10 {
        turns(&mut service);
    }
    assert_eq!(service.watches.looks, 0);
    assert!(!service.watches.has_any() && service.longest_wait() > LOOK);

    topics[7].publisher(full[7].publisher).pressure().begin();
    member.say(&Request::Waits { number: topics[7].number() }, &[]);
    // One that it does not use is none of its business.
    member.say(&Request::Waits { number: 12345 }, &[]);
    turns(&mut service);
    assert!(service.longest_wait() <= LOOK);
    until("it to be removed", &mut service, || full[7].is_removed(&topics[7]));
    let (looks, turned) = (service.watches.looks, 5);
    (0..turned).for_each(|_| turns(&mut service));
    assert!(service.watches.looks - looks <= 4 * turned, "others are looked at");
    assert_eq!(full.iter().zip(&topics).filter(|(it, topic)| it.is_removed(topic)).count(), 1);
}

#[test]
fn one_who_waited_before_the_service_took_over_waits_no_longer_for_that() {
    let ground = Ground::new();
    let (mut service, hall, _held) = ground.successor();
    let who = hall.roster().admit(life()).unwrap();
    hall.attend(who);
    let pool = |direction| {
        let pool = Pool::create(PoolId { direction, ..HERE }, 1 << 20, 64).unwrap();
        pool.follow_piece(0, pool.make_piece(1 << 16).unwrap()).unwrap();
        pool.admit_piece(&Caller::new(who, &Immortal), 0).unwrap();
        pool
    };
    let (here, arrivals) = (pool(Direction::Here), pool(Direction::Arrivals));
    let topic = Topic::create(4, "brought", &settings()).unwrap();
    let full = Full::new(&topic, here.ledger(), who);
    topic.publisher(full.publisher).pressure().begin();
    // It was said to the last service, and is not said again yet.
    let member = ground.member();
    member.comes_back(who, &hall);
    member.brings(&[&here, &arrivals], &topic);
    member.say(&Request::Returned, &[]);
    until("it to be removed", &mut service, || full.is_removed(&topic));
}
