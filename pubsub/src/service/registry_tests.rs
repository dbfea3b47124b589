use std::sync::Barrier;

use ipc::AlwaysAlive;

use super::*;
use crate::{Reliability, TopicSettings};

const LOCAL: PoolId = PoolId { place: SharedLocation::Host, direction: Direction::Local };
const SETTINGS: TopicSettings = TopicSettings {
    memory: crate::MemoryLocation::Host,
    reliability: Reliability::Reliable,
    max_held: 1,
    depth: 8,
    largest: 4096,
    loans: 4,
    release_deadline: Duration::from_secs(5),
    type_name: None,
};

fn me() -> Caller<'static> {
    let me = Participant::new(0, 1).unwrap();
    Caller { timeout: Duration::from_millis(20), ..Caller::new(me, &AlwaysAlive) }
}

fn registry() -> Registry {
    Registry::new(Budgets { host: Some(1 << 30), device: None })
}

fn shared(settings: &TopicSettings) -> SharedSettings {
    SharedSettings::of(settings).unwrap()
}

/// A registry with a topic and its pools.
fn with_a_topic() -> Registry {
    let mut registry = registry();
    registry.open("first", Some(shared(&SETTINGS)), None, || 7).unwrap();
    registry
}

/// A service that takes over, before any piece is returned to it.
fn successor(last: &Registry) -> Registry {
    let mut next = registry();
    for id in last.pools.keys() {
        next.restore_pool(*id, last.control_segment(*id).unwrap()).unwrap();
    }
    next
}

/// Admits a piece, like the service once all processes have it.
fn admit_piece(registry: &Registry, number: usize) {
    registry.pools[&LOCAL].admit_piece(&me(), number).unwrap();
}

fn pieces_of(pool: &Pool) -> impl Iterator<Item = Piece> + '_ {
    (0..pool.held()).map(|number| pool.piece(number).unwrap().unwrap())
}

#[test]
fn unused_pieces_are_admitted_before_new_ones() {
    let registry = with_a_topic();
    assert_eq!(registry.grow(&me(), LOCAL, 1).unwrap(), Some(NextPiece::Held(0)));
    // As if its creator had died, and a process returned it late.
    assert_eq!(registry.grow(&me(), LOCAL, 1).unwrap(), Some(NextPiece::Held(0)));
    admit_piece(&registry, 0);
    assert_eq!(registry.grow(&me(), LOCAL, 1).unwrap(), Some(NextPiece::Held(1)));
}

#[test]
fn admitted_piece_is_never_recreated() {
    let last = with_a_topic();
    last.grow(&me(), LOCAL, 1).unwrap();
    admit_piece(&last, 0);
    let mut next = successor(&last);
    assert_eq!(next.grow(&me(), LOCAL, 1).unwrap_err().kind(), ErrorKind::NotFound);
    // The process that has it rejoins.
    let pool = Arc::clone(&last.pools[&LOCAL]);
    assert_eq!(next.restore_pieces(LOCAL, 0, pieces_of(&pool)).unwrap(), (1, None));
    assert_eq!(next.grow(&me(), LOCAL, 1).unwrap(), Some(NextPiece::Held(1)));
}

#[test]
fn late_process_with_a_wrong_piece_gets_the_right_one() {
    let last = with_a_topic();
    last.grow(&me(), LOCAL, 1).unwrap();
    let mut next = successor(&last);
    next.grow(&me(), LOCAL, 1).unwrap();
    let late = Arc::clone(&last.pools[&LOCAL]);
    assert_eq!(next.restore_pieces(LOCAL, 0, pieces_of(&late)).unwrap(), (0, None));
    admit_piece(&next, 0);
    assert_eq!(next.restore_pieces(LOCAL, 0, pieces_of(&late)).unwrap(), (0, None));
    // The result is the same if the wrong piece is returned first.
    let mut third = successor(&next);
    let right = Arc::clone(&next.pools[&LOCAL]);
    assert_eq!(third.restore_pieces(LOCAL, 0, pieces_of(&late)).unwrap(), (0, None));
    assert_eq!(third.restore_pieces(LOCAL, 0, pieces_of(&right)).unwrap(), (1, None));
}

#[test]
fn another_pool_of_the_same_identity_is_rejected() {
    let (mut one, other) = (with_a_topic(), with_a_topic());
    one.restore_pool(LOCAL, one.control_segment(LOCAL).unwrap()).unwrap();
    let error = one.restore_pool(LOCAL, other.control_segment(LOCAL).unwrap()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
}

#[test]
fn budget_limits_the_number_of_messages_too() {
    let deepest = TopicSettings { depth: TopicSettings::MAX_DEPTH, largest: 64, ..SETTINGS };
    let mut registry = registry();
    let mut opened = 0;
    let error = loop {
        match registry.open(&format!("t{opened}"), Some(shared(&deepest)), None, || opened) {
            Ok(_) => opened += 1,
            Err(error) => break error,
        }
    };
    assert_eq!((opened, error.kind()), (3, ErrorKind::OverBudget));
    assert!(
        error.to_string().contains("65542 messages for queue, held samples and loans"),
        "{error}"
    );
    // Subscribers may hold as many, and evicted ones.
    let held = TopicSettings { max_held: 0, ..deepest };
    assert_eq!(held.reserves(1).blocks, 3 * 65536 + 4);
    assert_eq!(held.reserves(1).bytes, (3 * 65536 + 4) * 256);
}

#[test]
fn reserved_number_of_messages_fits() {
    let mut registry = registry();
    let deepest = TopicSettings { depth: TopicSettings::MAX_DEPTH, largest: 64, ..SETTINGS };
    registry.open("deep", Some(shared(&deepest)), None, || 1).unwrap();
    let pool = Arc::clone(&registry.pools[&LOCAL]);
    let mut blocks = Vec::new();
    while (blocks.len() as u64) < deepest.reserves(1).blocks {
        match pool.allocate(&me(), 64) {
            Ok((block, _)) => blocks.push(block),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                let next = registry.grow(&me(), LOCAL, 64).unwrap();
                let Some(NextPiece::Held(number)) = next else { panic!("{next:?}") };
                admit_piece(&registry, number);
            }
        }
    }
    // Worst case: each free block is isolated.
    for block in blocks.iter().step_by(2) {
        pool.free(&me(), *block).unwrap();
    }
    for _ in blocks.iter().step_by(2) {
        pool.allocate(&me(), 64).unwrap();
    }
}

/// A publisher of topic 7, and whether it was admitted.
fn publish(registry: &Registry, participant: Participant) -> (u64, Result<()>) {
    let id = registry.topic_and_pools(7).unwrap().0.claim(participant).unwrap();
    (id, registry.admit_publisher(7, participant, id))
}

#[test]
fn loans_of_each_publisher_are_reserved() {
    // Room for 8 messages, two held ones, and the loans of two publishers.
    let mut registry = Registry::new(Budgets { host: Some(18 * 4096), device: None });
    registry.open("it", Some(shared(&SETTINGS)), None, || 7).unwrap();
    let refused = |error: Error| {
        assert_eq!((error.kind(), error.subject()), (ErrorKind::OverBudget, Some("it")));
        assert!(
            error.to_string().contains("4 messages for queue, held samples and loans × 4096"),
            "{error}"
        );
    };
    let (participant, other) = (Participant::new(5, 1).unwrap(), Participant::new(6, 1).unwrap());
    let (first, admitted) = publish(&registry, participant);
    admitted.unwrap();
    let (second, admitted) = publish(&registry, participant);
    admitted.unwrap();
    // Once more, as after a takeover.
    registry.admit_publisher(7, participant, first).unwrap();
    let (third, admitted) = publish(&registry, other);
    refused(admitted.unwrap_err());
    // Other topics cannot use the reserved memory either.
    let small = TopicSettings { depth: 1, loans: 1, ..SETTINGS };
    let error = registry.open("small", Some(shared(&small)), None, || 8).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OverBudget);
    let topic = Arc::clone(registry.topic_and_pools(7).unwrap().0);
    topic.publisher(second).give_back();
    registry.admit_publisher(7, other, third).unwrap();
    // So is the reservation of a dead process.
    refused(publish(&registry, participant).1.unwrap_err());
    registry.reclaim(&me(), participant).unwrap();
    let (_, admitted) = publish(&registry, other);
    admitted.unwrap();
    assert_eq!(topic.reserved_publishers(), 2);
}

#[test]
fn publisher_that_left_gets_no_reservation() {
    let registry = with_a_topic();
    let participant = Participant::new(5, 1).unwrap();
    let topic = registry.topic_and_pools(7).unwrap().0;
    let id = topic.claim(participant).unwrap();
    let unknown = |number, participant, id| {
        let error = registry.admit_publisher(number, participant, id).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert_eq!(topic.reserved_publishers(), 0);
    };
    unknown(8, participant, id);
    unknown(7, Participant::new(6, 1).unwrap(), id);
    unknown(7, participant, id + (1 << 8));
    unknown(7, participant, u64::MAX);
    topic.publisher(id).give_back();
    unknown(7, participant, id);
}

#[test]
fn owners_of_slots_and_subscriptions_are_listed() {
    let registry = with_a_topic();
    assert!(registry.owners(&me()).unwrap().is_empty());
    let other = Participant::new(5, 2).unwrap();
    let (topic, _) = registry.topic_and_pools(7).unwrap();
    topic.claim(other).unwrap();
    let third = Participant::new(6, 1).unwrap();
    topic.local().subscribe(&Caller::new(third, &AlwaysAlive)).unwrap();
    assert_eq!(registry.owners(&me()).unwrap().into_iter().collect::<Vec<_>>(), [third, other]);
}

#[test]
fn held_lock_of_a_topic_does_not_stop_reclaim_of_others() {
    let mut registry = with_a_topic();
    registry.open("second", Some(shared(&SETTINGS)), None, || 8).unwrap();
    let [dead, stopped] = [5, 6].map(|place| Participant::new(place, 1).unwrap());
    let [first, second] =
        [7, 8].map(|number| Arc::clone(registry.topic_and_pools(number).unwrap().0));
    for topic in [&first, &second] {
        topic.claim(dead).unwrap();
        topic.local().subscribe(&Caller::new(dead, &AlwaysAlive)).unwrap();
    }
    first.local().publish(&Caller::new(stopped, &AlwaysAlive), Default::default(), |_| {}).unwrap();
    let is_clean = |topic: &Topic| topic.publishers().is_empty() && topic.subscribers().is_empty();
    let (is_held, may_continue) = (Barrier::new(2), Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let hold = |_| {
                is_held.wait();
                may_continue.wait();
            };
            first.local().find_entries(&Caller::new(stopped, &AlwaysAlive), hold).unwrap();
        });
        is_held.wait();
        let error = registry.reclaim(&me(), dead).unwrap_err();
        let (held, others) = (is_clean(&first), is_clean(&second));
        may_continue.wait();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
        assert!(!held && others, "the reclaim of other topics waits for one lock");
    });
    registry.reclaim(&me(), dead).unwrap();
    assert!(is_clean(&first));
}

#[test]
fn node_has_a_limited_number_of_topics() {
    let mut registry = with_a_topic();
    registry.max_topics = 2;
    registry.open("second", Some(shared(&SETTINGS)), None, || 8).unwrap();
    let error = registry.open("third", Some(shared(&SETTINGS)), None, || 9).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooMany);
    assert!(error.to_string().contains("at most 2 topics"), "{error}");
    registry.open("first", None, None, || 10).unwrap();
    assert!(registry.remove_unused(8));
    registry.open("third", Some(shared(&SETTINGS)), None, || 9).unwrap();
}

#[test]
fn other_type_is_refused_with_both_names_and_the_creator() {
    let mut registry = registry();
    let of_type = |name: Option<&str>| {
        let type_name = name.map(|name| name.parse().unwrap());
        Some(shared(&TopicSettings { type_name, ..SETTINGS }))
    };
    registry.open("pose", of_type(Some("Pose")), None, || 7).unwrap();
    registry.set_creator(7, "process 42 (\"pilot\")".to_owned());
    let error = registry.open("pose", of_type(Some("Twist")), None, || 8).unwrap_err();
    assert_eq!((error.kind(), error.subject()), (ErrorKind::SettingsDiffer, Some("pose")));
    for part in ["type Pose", "created by process 42 (\"pilot\")", "type Twist", "type: "] {
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
    // Without a type name any type is accepted.
    assert_eq!(registry.open("pose", of_type(None), None, || 8).unwrap(), 7);
    assert_eq!(registry.open("pose", None, None, || 8).unwrap(), 7);
    registry.open("bytes", of_type(None), None, || 9).unwrap();
    assert_eq!(registry.open("bytes", of_type(Some("Pose")), None, || 10).unwrap(), 9);
}
