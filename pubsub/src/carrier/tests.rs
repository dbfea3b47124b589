//! Carriers of nodes in one process, over the loopback address, with other nodes that do what they
//! should or do not.

mod losses;
mod providers;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::bounded;
use ipc::{Caller, Life, Participant, QueueError};

use super::beginnings::Start;
use super::published::QuietPublishers;
use super::room::Room;
use super::sink::TopicSink;
use super::{Carrier, Crowded, Facts, Household, NetworkOptions, Settling};
use crate::bridge::{Finished, MessageHeader, Metadata, Sink, Stages};
use crate::hall::Hall;
use crate::peers::{Event, Interest, NodeIdentity, Peers};
use crate::pool::{Direction, Pool, PoolId};
use crate::report::Row;
use crate::settings::{Reliability, SharedPlace, SharedSettings};
use crate::subscriber::{Account, Arrival};
use crate::topic::{Entry, LostPublisher, OriginId, Topic};
use crate::wake::WakeFd;

/// Reached only if something is wrong.
const FAR: Duration = Duration::from_secs(60);
const NUMBER: u32 = 7;
const NAME: &str = "numbers";
const DEPTH: u64 = 4;
/// A node that never comes.
const NOBODY: [u8; 16] = [9; 16];

fn settings() -> SharedSettings {
    SharedSettings {
        place: SharedPlace::Host,
        reliability: Reliability::Reliable,
        depth: DEPTH as u32,
        largest: 64,
        loans: 4,
        release_microseconds: 100_000,
        type_name: None,
    }
}

fn network() -> NetworkOptions {
    NetworkOptions {
        listen: Some("127.0.0.1:0".parse().unwrap()),
        lost_after: Duration::from_millis(500),
        insecure: true,
        ..NetworkOptions::default()
    }
}

/// A node: what outlives its services.
struct Place {
    hall: Hall,
    me: Participant,
    topic: Arc<Topic>,
    here: Arc<Pool>,
    arrivals: Arc<Pool>,
    publisher: u64,
    /// What its reader missed.
    account: RefCell<Account>,
}

impl Place {
    fn new(identity: u8) -> Self {
        Self::with(identity, settings())
    }

    fn with(identity: u8, settings: SharedSettings) -> Self {
        let hall = Hall::create(NodeIdentity([identity; 16])).unwrap();
        let me = hall.roster().admit(Life::of_this_process().unwrap()).unwrap();
        let caller = Caller::new(me, &**hall.roster());
        let pool = |direction| {
            let id = PoolId { place: settings.place, direction };
            let pool = Pool::create(id, 16 << 20, 256).unwrap();
            pool.follow_piece(0, pool.make_piece(1 << 20).unwrap()).unwrap();
            pool.admit_piece(&caller, 0).unwrap();
            Arc::new(pool)
        };
        let (here, arrivals) = (pool(Direction::Here), pool(Direction::Arrivals));
        let topic = Arc::new(Topic::create(NUMBER, NAME, &settings).unwrap());
        let publisher = topic.claim(me).unwrap();
        let account = RefCell::new(Account::new(&topic.published(), 0, (&[], 0), 0));
        Self { hall, me, topic, here, arrivals, publisher, account }
    }

    /// The topic, and where what comes from other nodes lies.
    fn incoming(&self) -> (&Arc<Topic>, &Arc<Pool>) {
        (&self.topic, &self.arrivals)
    }

    fn caller(&self) -> Caller<'_> {
        Caller::new(self.me, &**self.hall.roster())
    }

    fn role(&self) -> Participant {
        self.hall.roster().admit_role(0).unwrap()
    }

    fn household(&self) -> Arc<Household> {
        let (growth, _) = bounded(1);
        Arc::new(Household {
            me: self.me,
            role: self.role(),
            roster: Arc::clone(self.hall.roster()),
            growth,
            bell: Arc::new(WakeFd::new().unwrap()),
            crowded: Crowded::default(),
            settling: Settling::default(),
        })
    }

    fn carrier(&self, options: &NetworkOptions) -> Carrier {
        let (identity, bell) = (self.hall.identity(), Arc::clone(self.hall.outward()));
        Carrier::start(options, identity, "test", self.household(), bell).unwrap()
    }

    /// The next message that came from another node, if there is one; it is given back.
    fn take(&self, subscriber: &mut ipc::Subscriber) -> Option<Entry> {
        let taken = self.topic.arrivals().take(subscriber)?;
        let at = (Direction::Arrivals, subscriber.seat());
        let entry = Entry::from_words(taken.entry);
        let arrival = Arrival::of(&self.arrivals.ledger().note(entry.block));
        self.account.borrow_mut().takes_arrival(arrival, entry.publisher, entry.sequence);
        self.topic.release_in(&self.caller(), at, taken.position, self.arrivals.ledger());
        Some(entry)
    }

    /// Messages that its reader did not get.
    fn not_come(&self) -> u64 {
        self.account.borrow().missed()
    }

    /// Its reader subscribes now.
    fn reads_anew(&self) {
        let position = self.topic.arrivals().position();
        *self.account.borrow_mut() = Account::new(&self.topic.published(), 0, (&[], 0), position);
    }

    fn topics(&self, publishes: bool, subscribes: bool) -> BTreeMap<String, Facts> {
        let facts = Facts {
            topic: Arc::clone(&self.topic),
            here: Arc::clone(&self.here),
            arrivals: Arc::clone(&self.arrivals),
            publishes,
            subscribes,
        };
        BTreeMap::from([(NAME.to_owned(), facts)])
    }

    fn publish(&self, sequence: u64) -> Result<(), QueueError> {
        let published = self.publish_silently(sequence);
        if published.is_ok() {
            self.hall.outward().ring(NUMBER);
        }
        published
    }

    /// As one who dies before it has told.
    fn publish_silently(&self, sequence: u64) -> Result<(), QueueError> {
        let (block, place) = self.here.allocate(&self.caller(), 8).unwrap();
        let entry = Entry {
            block,
            offset: place.offset,
            length: 8,
            publisher: self.publisher,
            sequence,
            published_at: 0,
            metadata: 0,
            has_origin: false,
            turn: None,
        };
        let published = self.topic.publish_in(&self.caller(), entry, self.here.ledger());
        if published.is_err() {
            self.here.free(&self.caller(), block).unwrap();
        }
        published.map(drop)
    }

    /// Publishes until there is no room.
    fn fill(&self) {
        assert!((0..=DEPTH).any(|number| self.publish(number) == Err(QueueError::Full)));
    }

    /// As an earlier service left it: with messages that are owed to a node.
    fn owes(&self, to: &[u8; 16]) {
        assert!(self.topic.note_destination(to));
        self.topic.carry(&self.caller(), self.role(), &self.here).unwrap();
        self.topic.set_carried(true);
        self.fill();
    }

    fn is_owed(&self) -> bool {
        self.topic.here().seats_of(self.role()).next().is_some()
    }

    /// Messages of the publisher that nodes missed which were given up, and how often one was.
    fn missed(&self) -> (u64, u64) {
        let missed = self.topic.missed_by_nodes();
        assert_eq!(self.topic.missed_by_nodes_of(self.publisher), missed.messages);
        (missed.messages, missed.nodes)
    }

    /// Nothing of it is kept for other nodes.
    #[track_caller]
    fn is_free(&self) {
        assert!(!self.is_owed() && self.topic.destinations().is_empty());
        assert!(!self.topic.is_carried());
        assert_eq!(self.here.statistics(&self.caller()).unwrap().blocks_taken, 0);
        assert_eq!(self.publish(0), Err(QueueError::NoSubscribers));
    }
}

#[track_caller]
fn until(what: &str, carriers: &mut [&mut Carrier], mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + FAR;
    loop {
        carriers.iter_mut().for_each(|carrier| carrier.turn());
        if is_so() {
            return;
        }
        assert!(Instant::now() < end, "waited for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn what_an_earlier_service_promised_is_kept_for_a_while() {
    let place = Place::new(1);
    place.owes(&NOBODY);
    let mut carrier = place.carrier(&network());
    assert!(super::is_owed(&place.topic) && !carrier.holds(NUMBER));
    carrier.set_topics(place.topics(false, false));
    // There are no workers yet, and it is kept all the same.
    assert!(carrier.holds(NUMBER) && place.is_owed());
    until("nobody to come", &mut [&mut carrier], || !place.is_owed());
    assert!(!carrier.holds(NUMBER));
    place.is_free();
    assert_eq!(place.missed(), (DEPTH, 1));
}

#[test]
fn what_is_kept_for_nobody_is_let_go_of() {
    // A service died when it had forgotten whom it was for.
    let place = Place::new(1);
    place.owes(&NOBODY);
    place.topic.forget_destination(&NOBODY);
    let mut carrier = place.carrier(&network());
    carrier.set_topics(place.topics(true, false));
    until("it", &mut [&mut carrier], || !place.is_owed());
    place.is_free();
    // And so where a service has no way to other nodes.
    let place = Place::new(1);
    place.owes(&NOBODY);
    for is_new in [true, false] {
        let done = super::let_go(&place.topic, &place.here, &place.caller(), place.role());
        assert_eq!(done.unwrap(), is_new);
        place.is_free();
        assert_eq!(place.missed(), (DEPTH, 1), "once");
    }
}

/// Another node that wants the topic, and answers no letter.
fn one_that_wants(carrier: &Carrier, identity: u8) -> Peers {
    let network = NetworkOptions {
        peers: vec![carrier.listens().unwrap()],
        lost_after: FAR,
        name: "silent".to_owned(),
        insecure: true,
        ..NetworkOptions::default()
    };
    let peers = Peers::start_open(&network, NodeIdentity([identity; 16]));
    let peers = peers.unwrap();
    peers
        .set_interests([Interest {
            topic: NAME.into(),
            publishes: false,
            subscribes: true,
            settings: settings(),
        }])
        .unwrap();
    peers
}

#[test]
fn where_nothing_can_be_sent_nothing_is_kept() {
    let place = Place::new(1);
    place.owes(&[2; 16]);
    let provider = Some("no-such-provider".to_owned());
    let mut carrier = place.carrier(&NetworkOptions { provider, ..network() });
    let _other = one_that_wants(&carrier, 2);
    carrier.set_topics(place.topics(true, false));
    until("it", &mut [&mut carrier], || !place.is_owed());
    place.is_free();
    let why = |row| match row {
        Row::NotCarried { why, .. } => Some(why),
        _ => None,
    };
    let expected = "no provider here is called \"no-such-provider\"; there are ";
    let end = Instant::now() + FAR;
    loop {
        let why = carrier.rows().into_iter().find_map(why).unwrap();
        if why.contains(expected) {
            break;
        }
        // On a busy machine it takes long to find that out.
        assert!(Instant::now() < end && why.contains("takes longer than"), "{why}");
        carrier.turn();
        std::thread::sleep(Duration::from_millis(2));
    }
    // What is due is done, and then it waits.
    let waits = |carrier: &Carrier| {
        carrier.longest_wait(Instant::now()).is_some_and(|wait| wait > Duration::ZERO)
    };
    while !waits(&carrier) {
        assert!(Instant::now() < end);
        carrier.turn();
    }
}

#[test]
fn a_node_that_does_not_answer_is_waited_for_until_others_wait_for_too_long() {
    let place = Place::new(1);
    let mut carrier = place.carrier(&network());
    let _other = one_that_wants(&carrier, 2);
    carrier.set_topics(place.topics(true, false));
    until("the topic to be carried", &mut [&mut carrier], || place.topic.is_carried());
    place.fill();
    let patience = carrier.patience(NUMBER);
    assert_eq!(patience, Duration::from_millis(1200));
    // Nobody has said that it is in the way.
    let end = Instant::now() + 2 * patience;
    until("time to pass", &mut [&mut carrier], || Instant::now() >= end);
    assert_eq!(place.publish(0), Err(QueueError::Full));
    let end = Instant::now() + FAR;
    while place.is_owed() {
        assert!(Instant::now() < end, "it is still waited for");
        carrier.is_in_the_way(NUMBER);
        carrier.turn();
        std::thread::sleep(Duration::from_millis(2));
    }
    place.is_free();
    assert_eq!(place.missed(), (DEPTH, 1));
}

#[test]
fn nobody_here_waits_for_a_node_that_does_not_answer_if_not_all_is_to_arrive() {
    let loose = SharedSettings { reliability: Reliability::DropNewest, ..settings() };
    let place = Place::with(1, loose);
    let mut carrier = place.carrier(&network());
    let other = one_that_wants(&carrier, 2);
    let wants =
        Interest { topic: NAME.into(), publishes: false, subscribes: true, settings: loose };
    other.set_interests([wants]).unwrap();
    carrier.set_topics(place.topics(true, false));
    until("the topic to be carried", &mut [&mut carrier], || place.topic.is_carried());
    for number in 0..10 * DEPTH {
        until("room", &mut [&mut carrier], || place.publish(number).is_ok());
    }
}

#[test]
fn who_wants_a_topic_that_is_not_received_is_told_so() {
    let (writing, reading) = (Place::new(1), Place::new(2));
    let mut writer = writing.carrier(&network());
    let mut reader = reading.carrier(&NetworkOptions {
        peers: vec![writer.listens().unwrap()],
        // No messages can come here.
        provider: Some("no-such-provider".into()),
        ..network()
    });
    writer.set_topics(writing.topics(true, false));
    reader.set_topics(reading.topics(false, true));
    let (one, two) = (&mut writer, &mut reader);
    until("the topic to be carried", &mut [&mut *one, &mut *two], || writing.topic.is_carried());
    // Each wish is answered, long before the writer's own patience is over.
    let broke = |carrier: &Carrier| {
        let mut all = carrier.plan.destinations(NUMBER);
        all.any(|(_, standing)| matches!(standing, super::plan::Standing::Broken { .. }))
    };
    let end = Instant::now() + Duration::from_secs(9);
    while !broke(one) {
        one.turn();
        two.turn();
        assert!(Instant::now() < end, "it was not answered");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn what_could_not_be_carried_is_tried_again() {
    let place = Place::new(1);
    let mut carrier = place.carrier(&network());
    let mut others: Vec<_> =
        std::iter::from_fn(|| place.topic.here().subscribe_as(&place.caller(), place.me).ok())
            .collect();
    // The place that is left for what goes to other nodes.
    let in_the_way = Participant::role(1).unwrap();
    others.push(place.topic.here().subscribe_as(&place.caller(), in_the_way).unwrap());
    let _other = one_that_wants(&carrier, 2);
    carrier.set_topics(place.topics(true, false));
    until("it to fail", &mut [&mut carrier], || !place.topic.destinations().is_empty());
    for _ in 0..10 {
        carrier.turn();
    }
    assert!(!place.topic.is_carried() && carrier.longest_wait(Instant::now()).is_some());
    let one = others.pop().unwrap();
    place.topic.here().unsubscribe(&place.caller(), &one, |_| {}).unwrap();
    until("the topic to be carried", &mut [&mut carrier], || place.topic.is_carried());
}

#[test]
fn topic_leaves_its_node_beside_as_many_subscribers_as_there_can_be() {
    let place = Place::new(1);
    let mut carrier = place.carrier(&network());
    let others: Vec<_> =
        std::iter::from_fn(|| place.topic.here().subscribe(&place.caller()).ok()).collect();
    let _other = one_that_wants(&carrier, 2);
    carrier.set_topics(place.topics(true, false));
    until("the topic to be carried", &mut [&mut carrier], || place.topic.is_carried());
    assert_eq!(place.topic.here().subscribers() as usize, others.len() + 1);
}

/// Both nodes', which carry the topic to a subscriber at the second one.
fn carriers(writing: &Place, reading: &Place) -> (Carrier, Carrier, ipc::Subscriber) {
    // Nobody is given up meanwhile, however slow all is.
    let network = || NetworkOptions { lost_after: FAR, ..network() };
    let mut writer = writing.carrier(&network());
    let peers = vec![writer.listens().unwrap()];
    let mut reader = reading.carrier(&NetworkOptions { peers, ..network() });
    let subscriber = reading.topic.arrivals().subscribe(&reading.caller()).unwrap();
    writer.set_topics(writing.topics(true, false));
    reader.set_topics(reading.topics(false, true));
    let both = &mut [&mut writer, &mut reader];
    until("the topic to be carried", both, || writing.topic.is_carried());
    (writer, reader, subscriber)
}

#[test]
fn workers_that_end_are_followed_by_others_that_lose_nothing() {
    let (writing, reading) = (Place::new(1), Place::new(2));
    let arrivals = reading.topic.arrivals();
    let (mut writer, mut reader, mut subscriber) = carriers(&writing, &reading);
    let (one, two) = (&mut writer, &mut reader);
    for number in 0..60 {
        if number % 20 == 10 {
            let at = if number < 20 { &*one } else { &*two };
            at.workers.iter().flat_map(super::Workers::all).for_each(super::Worker::ends);
        }
        let carriers = &mut [&mut *one, &mut *two];
        until("room", carriers, || {
            let published = writing.publish(number);
            assert_ne!(published, Err(QueueError::NoSubscribers));
            published.is_ok()
        });
        until("a message", &mut [&mut *one, &mut *two], || {
            let Some(entry) = reading.take(&mut subscriber) else { return false };
            assert_eq!(entry.sequence, number);
            true
        });
    }
    assert_eq!(reading.not_come(), 0);
    assert!(arrivals.take(&mut subscriber).is_none(), "one came twice");
}

#[test]
fn who_subscribes_again_before_the_other_node_knows_is_told_what_does_not_come() {
    let (writing, reading) = (Place::new(1), Place::new(2));
    let (mut writer, mut reader, mut subscriber) = carriers(&writing, &reading);
    let (mut next, mut last) = (1, 0);
    for _ in 0..5 {
        for subscribes in [false, true] {
            reader.set_topics(reading.topics(false, subscribes));
        }
        let again = reading.topic.arrivals().subscribe(&reading.caller()).unwrap();
        let before = std::mem::replace(&mut subscriber, again);
        let dispose = |words| {
            reading.topic.dispose(&reading.caller(), reading.arrivals.ledger(), words);
        };
        reading.topic.arrivals().unsubscribe(&reading.caller(), &before, dispose).unwrap();
        reading.reads_anew();
        // The other node may hear of both at once, or let go of some between them: of what was begun
        // before something may still come first, and what is let go of after that is told.
        let (mut has_any, mut missing) = (false, 0);
        until("messages", &mut [&mut writer, &mut reader], || {
            next += u64::from(writing.publish(next).is_ok());
            let Some(entry) = reading.take(&mut subscriber) else { return false };
            assert!(entry.sequence > last, "{} after {last}", entry.sequence);
            let between = entry.sequence - last - 1;
            if std::mem::replace(&mut has_any, true) {
                missing += between;
            } else {
                missing = reading.not_come();
                assert!(missing <= between, "{missing} of {between}");
            }
            assert_eq!(reading.not_come(), missing);
            last = entry.sequence;
            last % 8 == 0
        });
    }
}

/// Of a message of 8 bytes, one of each number of one publisher.
fn header_at(position: u64) -> MessageHeader {
    let (length, publisher, sequence) = (8, 1, position + 1);
    let (published, posted, metadata) = (0, 0, Metadata::NONE);
    MessageHeader { position, length, publisher, sequence, published, posted, metadata }
}

#[test]
fn publisher_that_is_quiet_is_found_while_another_one_publishes() {
    let mut place = Place::new(1);
    let (mut quiet, caller) =
        (QuietPublishers::default(), Caller::new(place.me, &**place.hall.roster()));
    place.topic.here().subscribe(&caller).unwrap();
    let (first, second) = (place.publisher, place.topic.claim(place.me).unwrap());
    place.publish(1).unwrap();
    assert_eq!(quiet.look(&place.topic), []);
    place.publisher = second;
    place.publish(1).unwrap();
    assert_eq!(quiet.look(&place.topic), [(first, 1)]);
    place.publish(2).unwrap();
    assert_eq!(quiet.look(&place.topic), [], "that is known, and the other one published");
    assert_eq!(quiet.look(&place.topic), [(second, 2)]);
    assert_eq!(quiet.look(&place.topic), []);
}

/// What is on its way may still arrive.
#[test]
fn publisher_is_not_quiet_before_its_messages_are_delivered_to_other_nodes() {
    let place = Place::new(1);
    let (mut quiet, here) = (QuietPublishers::default(), place.topic.here());
    let mut carried = place.topic.carry(&place.caller(), place.role(), &place.here).unwrap();
    place.publish(1).unwrap();
    let taken = here.take(&mut carried).unwrap();
    for _ in 0..3 {
        assert_eq!(quiet.look(&place.topic), []);
    }
    let at = (Direction::Here, carried.seat());
    place.topic.release_in(&place.caller(), at, taken.position, place.here.ledger());
    assert_eq!(quiet.look(&place.topic), [(place.publisher, 1)]);
}

#[test]
fn what_is_missing_before_one_that_found_no_room_is_told_with_the_next_one() {
    let settings = SharedSettings { reliability: Reliability::DropNewest, ..settings() };
    let place = Place::with(1, settings);
    let mut subscriber = place.topic.arrivals().subscribe(&place.caller()).unwrap();
    let (room, alive) = (Arc::new(Room::new()), Arc::new(()));
    let origin = OriginId { node: NOBODY, topic: 3 };
    let household = place.household();
    let mut sink =
        TopicSink::new(&household, place.incoming(), origin, Start::default(), &room, alive);
    let mut comes = |position: u64| {
        let header = header_at(position);
        assert!(sink.begin(&header).unwrap().is_some());
        assert_eq!(sink.finish(&header, &Stages::default()).unwrap(), Finished::Published);
    };
    (0..DEPTH).for_each(&mut comes);
    // One was never written there, and the next one is dropped here.
    comes(DEPTH + 1);
    let mut take = || place.take(&mut subscriber).map(|entry| (entry.sequence, place.not_come()));
    for number in 0..DEPTH {
        assert_eq!(take(), Some((number + 1, 0)));
    }
    comes(DEPTH + 2);
    assert_eq!(take(), Some((DEPTH + 3, 2)));
    comes(DEPTH + 3);
    assert_eq!((take(), take()), (Some((DEPTH + 4, 2)), None));
}

#[test]
fn a_reader_is_in_nobodys_way_once_what_was_refused_does_not_come_again() {
    let settings = SharedSettings { reliability: Reliability::DropNewest, ..settings() };
    let place = Place::with(1, settings);
    let mut subscriber = place.topic.arrivals().subscribe(&place.caller()).unwrap();
    let (room, alive) = (Arc::new(Room::new()), Arc::new(()));
    let origin = OriginId { node: NOBODY, topic: 3 };
    let household = place.household();
    let mut sink =
        TopicSink::new(&household, place.incoming(), origin, Start::default(), &room, alive);
    let mut position = 0;
    // Its reader holds all messages that there may be.
    while place.topic.arrivals().has_room() {
        let header = header_at(position);
        assert!(sink.begin(&header).unwrap().is_some());
        assert!(!room.is_wanted(FAR));
        assert_eq!(sink.finish(&header, &Stages::default()).unwrap(), Finished::Published);
        place.topic.arrivals().take(&mut subscriber).unwrap();
        position += 1;
    }
    let header = header_at(position);
    assert!(sink.begin(&header).unwrap().is_some());
    assert_eq!(sink.finish(&header, &Stages::default()).unwrap(), Finished::Published);
    assert!(room.is_wanted(FAR), "one was refused");
    std::thread::sleep(place.topic.refusal_holds());
    assert!(!room.is_wanted(place.topic.refusal_holds()), "and none came after it");
}

#[test]
fn a_node_says_nothing_before_it_knows_what_it_wants() {
    let place = Place::new(1);
    let mut carrier = place.carrier(&network());
    let other = one_that_wants(&carrier, 2);
    let next = |carrier: &mut Carrier, what: &str| {
        let mut event = None;
        until(what, &mut [carrier], || {
            event = event.take().or_else(|| other.next_event());
            event.is_some()
        });
        event.unwrap()
    };
    assert!(matches!(next(&mut carrier, "the node"), Event::Appeared { .. }));
    // Its provider is all that it says, which is before what it wants.
    assert!(matches!(next(&mut carrier, "its provider"), Event::Letter { .. }));
    let end = Instant::now() + Duration::from_millis(300);
    until("time to pass", &mut [&mut carrier], || Instant::now() >= end);
    assert_eq!(other.next_event(), None);
    // That there is nothing is said, too, but only now.
    carrier.set_topics(BTreeMap::new());
    assert!(matches!(next(&mut carrier, "its interests"), Event::Interests { .. }));
    // And to one that comes later, too, in this order.
    let other = one_that_wants(&carrier, 3);
    let mut heard = Vec::new();
    until("all that it says", &mut [&mut carrier], || {
        heard.extend(std::iter::from_fn(|| other.next_event()));
        heard.len() == 3
    });
    assert!(
        matches!(
            &heard[..],
            [Event::Appeared { .. }, Event::Letter { .. }, Event::Interests { .. }]
        ),
        "{heard:?}"
    );
}

#[test]
fn what_nobody_told_of_is_sent_all_the_same() {
    let (writing, reading) = (Place::new(1), Place::new(2));
    let arrivals = reading.topic.arrivals();
    let (mut writer, mut reader, mut subscriber) = carriers(&writing, &reading);
    for number in 0..2 {
        // Until nobody looks by itself any more.
        std::thread::sleep(Duration::from_millis(300));
        writing.publish_silently(number).unwrap();
        let carriers = &mut [&mut writer, &mut reader];
        until("a message", carriers, || arrivals.take(&mut subscriber).is_some());
    }
}

#[test]
fn a_turn_looks_at_what_something_happened_to() {
    const COUNT: u32 = 300;
    let place = Place::new(1);
    let mut carrier = place.carrier(&network());
    let other = one_that_wants(&carrier, 2);
    let topics: BTreeMap<_, _> = (0..COUNT)
        .map(|number| {
            let name = if number == NUMBER { NAME.to_owned() } else { format!("idle {number}") };
            let mut facts = place.topics(false, false).remove(NAME).unwrap();
            if number != NUMBER {
                facts.topic = Arc::new(Topic::create(number, &name, &settings()).unwrap());
            }
            (name, facts)
        })
        .collect();
    carrier.set_topics(topics.clone());
    until("the topic to be carried", &mut [&mut carrier], || place.topic.is_carried());
    // Nothing new, and again nothing.
    let (start, looks) = (Instant::now(), carrier.looks);
    for _ in 0..100 {
        carrier.turn();
        carrier.set_topics(topics.clone());
    }
    let rounds = start.elapsed().as_secs() + 1;
    let seen = carrier.looks - looks;
    assert!(seen <= 100 + rounds * u64::from(COUNT), "{seen} looks");
    // A node that comes, or wants another one, has to do with what it wants.
    let looks = carrier.looks;
    let wants = |name: &str| Interest {
        topic: name.into(),
        publishes: false,
        subscribes: true,
        settings: settings(),
    };
    other.set_interests([wants(NAME), wants("idle 9")]).unwrap();
    let idle = Arc::clone(&topics["idle 9"].topic);
    until("another topic to be carried", &mut [&mut carrier], || idle.is_carried());
    let rounds = start.elapsed().as_secs() + 1;
    assert!(carrier.looks - looks <= 100 + rounds * u64::from(COUNT));
    // One that is not there any more is let go of.
    carrier.set_topics(BTreeMap::new());
    until("it to be let go of", &mut [&mut carrier], || !idle.is_carried());
}
