//! The service and those that come to it, in one thread: what each says is heard in turn.

mod waiting;

use std::path::PathBuf;
use std::sync::atomic::AtomicU32;

use ipc::{AlwaysAlive, Liveness};

use super::*;
use crate::node::Budgets;
use crate::peers::NodeId;
use crate::pool::tests::is_held_by;
use crate::pool::{Direction, Pool};
use crate::replication::{ServiceContext, WaitingArrivals};
use crate::report::Row;
use crate::service::election::{self, socket_path};
use crate::service::protocol;
use crate::settings::{SharedLocation, SharedSettings};
use crate::topic::Topic;

const LOCAL: PoolId = PoolId { place: SharedLocation::Host, direction: Direction::Local };
const BUDGETS: Budgets = Budgets { host: Some(1 << 28), device: None };
const PLACES: usize = (Participant::SLOTS - Participant::ROLES) as usize;

/// A node's directory, gone with the test.
struct TestDir(PathBuf);

impl TestDir {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fabricast-reception-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        election::prepare("test", &directory).unwrap();
        Self(directory)
    }

    fn service(&self) -> Service {
        let options = ServiceOptions {
            directory: self.0.clone(),
            label: "test".into(),
            budgets: BUDGETS,
            network: None,
            has_priority: Arc::default(),
            min_term_until: None,
            identity: NodeId::random().unwrap(),
        };
        let listener = ChannelListener::bind(&socket_path(&self.0)).unwrap();
        let bell = Arc::new(WakeFd::new().unwrap());
        Service::new(options, listener, bell, Arc::default()).unwrap()
    }

    /// A service that finds members of a node, whose hall this is.
    fn successor(&self) -> (Service, NodeSegment, MemberLock) {
        let node_segment = NodeSegment::create(NodeId::random().unwrap()).unwrap();
        MemberLock::write_node_id("test", &self.0, Some(node_segment.identity())).unwrap();
        let member_lock = MemberLock::hold("test", &self.0).unwrap();
        (self.service(), node_segment, member_lock)
    }

    /// A service, and a member of its node.
    fn joined(&self) -> (Service, Member, Participant) {
        let (mut service, member) = (self.service(), self.member());
        let who = member.joins(&mut service);
        (service, member, who)
    }

    fn member(&self) -> Member {
        Member(Channel::connect(&socket_path(&self.0), Duration::from_secs(20)).unwrap())
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn run_several(service: &mut Service) {
    for _ in 0..4 {
        service.bell.ring();
        service.run_once();
    }
}

fn pidfd() -> PidFd {
    PidFd::of_this_process().unwrap()
}

/// One that comes: it says only what the test lets it say.
struct Member(Channel);

impl Member {
    fn send_request(&self, request: &Request, files: &[BorrowedFd<'_>]) {
        self.0.send(&protocol::encode(request), files, Duration::from_secs(20)).unwrap();
    }

    fn says_hello(&self) {
        self.send_request(&Request::Hello { label: "test".into() }, &[pidfd().as_fd()]);
    }

    /// Knows that it is a member, and says so.
    fn joins(&self, service: &mut Service) -> Participant {
        self.says_hello();
        run_several(service);
        let who = self.welcome().unwrap();
        served_node(service).node_segment.mark_member(who);
        who
    }

    fn comes_back(&self, who: Participant, node_segment: &NodeSegment) {
        let again = Request::Rejoin { label: "test".into(), participant: who.number() };
        self.send_request(&again, &[pidfd().as_fd(), node_segment.as_fd()]);
    }

    fn brings(&self, pools: &[&Pool], topic: &Topic) {
        for pool in pools {
            self.send_request(&Request::Pool { pool: pool.id() }, &[pool.control_segment()]);
        }
        self.send_request(&Request::Topic { number: topic.number() }, &[topic.segment()]);
    }

    fn receive_all(&self) -> Vec<Notice> {
        let mut heard = Vec::new();
        while let Ok(message) = self.0.receive(Duration::ZERO) {
            heard.push(protocol::decode("test", &message.bytes).unwrap());
        }
        heard
    }

    fn welcome(&self) -> Option<Participant> {
        self.receive_all().into_iter().find_map(|notice| match notice {
            Notice::Welcome { participant, .. } => Participant::from_number(participant),
            _ => None,
        })
    }

    fn is_seen_off(&self) -> bool {
        self.receive_all().iter().any(|notice| matches!(notice, Notice::Rejected { .. }))
    }
}

fn served_node(service: &Service) -> &ServedNode {
    service.served_node.as_ref().unwrap()
}

/// A topic with its pools, as members of a node have them.
fn topic_with_pools() -> ([Pool; 2], Topic) {
    let settings = SharedSettings::of(&crate::TopicSettings::default()).unwrap();
    let pool = |direction| Pool::create(PoolId { direction, ..LOCAL }, 1 << 28, 64).unwrap();
    let topic = Topic::create(4, "brought", &settings).unwrap();
    ([pool(Direction::Local), pool(Direction::Inbound)], topic)
}

#[test]
fn only_to_one_that_is_there_to_serve_the_office_is_given() {
    let test_dir = TestDir::new();
    let (mut service, member, who) = test_dir.joined();
    let asks = |service: &mut Service| {
        member.send_request(&Request::TakeOver, &[]);
        run_several(service);
        service.is_over.load(Ordering::Acquire)
    };
    assert!(!asks(&mut service), "nobody is there");
    let claim = election::PriorityLock::take("test", &test_dir.0).unwrap().unwrap();
    service.options.has_priority.store(true, Ordering::Release);
    assert!(!asks(&mut service), "it is the one");
    service.options.has_priority.store(false, Ordering::Release);
    let own = std::mem::replace(&mut service.clients.get_mut(&who).unwrap().process, 1);
    assert!(!asks(&mut service), "another process is");
    service.clients.get_mut(&who).unwrap().process = own;
    service.options.min_term_until = Some(Instant::now() + Duration::from_secs(600));
    assert!(!asks(&mut service), "it had its time");
    service.options.min_term_until = Some(Instant::now());
    assert!(asks(&mut service));
    drop(claim);
}

#[test]
fn a_name_that_nobody_took_is_given_back() {
    let test_dir = TestDir::new();
    let mut service = test_dir.service();
    let joining_client = test_dir.member();
    joining_client.says_hello();
    run_several(&mut service);
    let who = joining_client.welcome().unwrap();
    assert_eq!(served_node(&service).roster.free_slots(), PLACES - 2);
    // Something failed before it knew that it is a member.
    drop(joining_client);
    run_several(&mut service);
    assert_eq!(served_node(&service).roster.free_slots(), PLACES - 1);
    assert!(!service.pidfds.contains_key(&who));
    // Another one is a member, and has only lost its connection.
    let member = test_dir.member();
    member.joins(&mut service);
    drop(member);
    run_several(&mut service);
    assert_eq!(served_node(&service).roster.free_slots(), PLACES - 2);
}

#[test]
fn one_who_left_when_nobody_listened_is_seen_to_later() {
    let test_dir = TestDir::new();
    let (mut service, member, who) = test_dir.joined();
    drop(member);
    served_node(&service).roster.leave(who);
    service.checked_liveness_at -= LIVENESS_CHECK;
    run_several(&mut service);
    assert_eq!(served_node(&service).roster.free_slots(), PLACES - 1);
}

#[test]
fn a_member_knows_all_lives_before_it_is_welcome() {
    let test_dir = TestDir::new();
    let mut service = test_dir.service();
    let (first, second) = (test_dir.member(), test_dir.member());
    first.says_hello();
    run_several(&mut service);
    second.says_hello();
    run_several(&mut service);
    for (member, known) in [(first, 1), (second, 2)] {
        let heard = member.receive_all();
        let Some(Notice::Pidfds { participants }) = heard.first() else { panic!("{heard:?}") };
        assert_eq!(participants.len(), known);
        assert!(matches!(heard[1], Notice::Welcome { .. }), "{heard:?}");
    }
}

#[test]
fn names_of_nobody_hold_up_no_takeover_and_are_struck_off() {
    let test_dir = TestDir::new();
    let (mut service, node_segment, _held) = test_dir.successor();
    // The last service was killed between letting one in and telling of its life.
    let (who, stray) = (
        node_segment.roster().admit(pidfd()).unwrap(),
        node_segment.roster().admit(pidfd()).unwrap(),
    );
    node_segment.mark_member(who);
    let member = test_dir.member();
    member.comes_back(who, &node_segment);
    run_several(&mut service);
    assert_eq!(member.welcome(), Some(who));
    assert!(service.takeover.is_some());
    member.send_request(&Request::RejoinDone, &[]);
    run_several(&mut service);
    assert!(service.takeover.is_none(), "it waits for a name that nobody has");
    assert!(node_segment.roster().is_dead(Some(stray)));
    assert_eq!(node_segment.roster().free_slots(), PLACES - 2);
}

#[test]
fn the_hall_of_a_node_that_is_no_more_is_not_taken() {
    let test_dir = TestDir::new();
    let (mut service, node_segment, _held) = test_dir.successor();
    let stale = NodeSegment::create(NodeId::random().unwrap()).unwrap();
    let (late, who) =
        (stale.roster().admit(pidfd()).unwrap(), node_segment.roster().admit(pidfd()).unwrap());
    node_segment.mark_member(who);
    stale.mark_member(late);
    let (first, member) = (test_dir.member(), test_dir.member());
    first.comes_back(late, &stale);
    run_several(&mut service);
    assert!(first.is_seen_off());
    member.comes_back(who, &node_segment);
    run_several(&mut service);
    assert_eq!(member.welcome(), Some(who));
    assert_eq!(served_node(&service).node_segment.identity(), node_segment.identity());
}

#[test]
fn a_node_is_founded_as_soon_as_nobody_can_bring_its_hall() {
    let test_dir = TestDir::new();
    let (mut service, node_segment, held) = test_dir.successor();
    let joining_client = test_dir.member();
    joining_client.says_hello();
    run_several(&mut service);
    assert!(service.takeover.is_some() && joining_client.welcome().is_none());
    let node = MemberLock::read_node_id("test", &test_dir.0).unwrap();
    assert_eq!(node, Some(node_segment.identity()), "it was named while there are members");
    // As one that ends, with its service, lets go.
    drop(held);
    run_several(&mut service);
    assert!(joining_client.welcome().is_some());
    let node = MemberLock::read_node_id("test", &test_dir.0).unwrap();
    assert_eq!(node, Some(served_node(&service).node_segment.identity()));
    assert_ne!(node, Some(node_segment.identity()));
}

#[test]
fn places_are_kept_for_those_that_take_over() {
    let test_dir = TestDir::new();
    let (mut service, node_segment, _held) = test_dir.successor();
    let who = node_segment.roster().admit(pidfd()).unwrap();
    node_segment.mark_member(who);
    while node_segment.roster().free_slots() > RESERVED_ROSTER_SLOTS {
        let other = node_segment.roster().admit(pidfd()).unwrap();
        node_segment.mark_member(other);
    }
    let (member, joining_client) = (test_dir.member(), test_dir.member());
    member.comes_back(who, &node_segment);
    joining_client.says_hello();
    run_several(&mut service);
    assert_eq!(member.welcome(), Some(who));
    // As if the others had had their time.
    let takeover = service.takeover.as_mut().unwrap();
    takeover.set_awaited(Instant::now() - Duration::from_secs(60), BTreeSet::from([who]));
    run_several(&mut service);
    assert!(joining_client.is_seen_off());
    assert!(served_node(&service).roster.free_slots() > 0);
}

#[test]
fn what_comes_late_is_cleaned_up_after_those_who_were_struck_off() {
    let test_dir = TestDir::new();
    let (mut service, node_segment, _held) = test_dir.successor();
    let admit = || node_segment.roster().admit(pidfd()).unwrap();
    let (first, late, dead) = (admit(), admit(), admit());
    node_segment.mark_member(first);
    let member = test_dir.member();
    member.comes_back(first, &node_segment);
    member.send_request(&Request::Pidfds { participants: vec![late.number()] }, &[pidfd().as_fd()]);
    member.send_request(&Request::RejoinDone, &[]);
    run_several(&mut service);
    assert!(service.takeover.is_none());
    let ([local, inbound], topic) = topic_with_pools();
    topic.claim(dead).unwrap();
    topic.local().subscribe(&Caller::new(dead, &AlwaysAlive)).unwrap();
    topic.claim(late).unwrap();
    node_segment.roster().free_slot(dead);
    node_segment.mark_member(late);

    let other = test_dir.member();
    other.comes_back(late, &node_segment);
    other.brings(&[&local, &inbound], &topic);
    other.send_request(&Request::RejoinDone, &[]);
    run_several(&mut service);
    assert_eq!(topic.owners().into_iter().collect::<Vec<_>>(), [late]);
    assert!(service.registry.topics[&4].publishes, "nobody looked who uses it");
    // It comes again, to the same service, and has let go of it meanwhile.
    let again = test_dir.member();
    again.comes_back(late, &node_segment);
    again.send_request(&Request::RejoinDone, &[]);
    run_several(&mut service);
    assert_eq!(service.clients.len(), 2);
    assert!(service.registry.topics.is_empty(), "a topic stays that nobody uses");
}

#[test]
fn one_who_asks_who_is_there_is_there() {
    let test_dir = TestDir::new();
    let (mut service, member, who) = test_dir.joined();
    member.send_request(&Request::Report { request: 1 }, &[]);
    run_several(&mut service);
    let heard = member.receive_all();
    let [Notice::Rows { rows, is_last: true, .. }] = &heard[..] else { panic!("{heard:?}") };
    let is_it = |row: &Row| matches!(row, Row::Process { participant, .. } if *participant == who.to_string());
    assert!(rows.iter().any(is_it), "{rows:?}");
}

#[test]
fn a_topic_is_forgotten_when_all_that_was_given_is() {
    let test_dir = TestDir::new();
    let (mut service, member, _) = test_dir.joined();
    let settings = SharedSettings::of(&crate::TopicSettings::default()).unwrap();
    let open = |request| Request::Open { request, name: "it".into(), settings: Some(settings) };
    member.send_request(&open(1), &[]);
    member.send_request(&open(2), &[]);
    run_several(&mut service);
    let number = *service.registry.topics.keys().next().unwrap();
    // The second was on its way when the first was let go of.
    member.send_request(&Request::CloseTopic { number, granted: 1 }, &[]);
    run_several(&mut service);
    assert_eq!(service.registry.topics.len(), 1);
    member.send_request(&Request::CloseTopic { number, granted: 1 }, &[]);
    run_several(&mut service);
    assert!(service.registry.topics.is_empty());
}

#[test]
fn one_who_is_stopped_does_not_keep_a_pool_from_growing() {
    let test_dir = TestDir::new();
    let (mut service, member, _) = test_dir.joined();
    let settings = SharedSettings::of(&crate::TopicSettings::default()).unwrap();
    member.send_request(
        &Request::Open { request: 1, name: "it".into(), settings: Some(settings) },
        &[],
    );
    run_several(&mut service);
    // The first piece is made at once, and the member never says that it has it.
    let admitted = |service: &Service| service.registry.pools[&LOCAL].pool.admitted();
    assert_eq!(admitted(&service), 0);
    let pending_piece =
        service.registry.pools.get_mut(&LOCAL).unwrap().pending_piece.as_mut().unwrap();
    pending_piece.since -= Duration::from_secs(60);
    run_several(&mut service);
    assert_eq!(admitted(&service), 1);
    assert!(
        member.receive_all().contains(&Notice::PoolGrown { pool: LOCAL }),
        "it finds it in its line"
    );
}

#[test]
fn nobody_holds_up_the_service_who_holds_a_lock() {
    let test_dir = TestDir::new();
    let (mut service, member, who) = test_dir.joined();
    let settings = SharedSettings::of(&crate::TopicSettings::default()).unwrap();
    member.send_request(
        &Request::Open { request: 1, name: "it".into(), settings: Some(settings) },
        &[],
    );
    run_several(&mut service);
    let other = served_node(&service).roster.admit(pidfd()).unwrap();
    let pool = Arc::clone(&service.registry.pools[&LOCAL].pool);
    is_held_by(&pool, Some(other));
    member.send_request(&Request::Leave, &[]);
    let start = Instant::now();
    run_several(&mut service);
    assert!(start.elapsed() < Caller::DEFAULT_TIMEOUT, "it waited for {:?}", start.elapsed());
    assert!(service.unreclaimed.contains(&who) && !member.receive_all().contains(&Notice::Left));
    is_held_by(&pool, None);
    run_several(&mut service);
    assert!(member.receive_all().contains(&Notice::Left));
}

#[test]
fn a_service_whose_worker_is_still_there_keeps_its_name() {
    for has_workers in [true, false] {
        let test_dir = TestDir::new();
        let mut service = test_dir.service();
        let (roster, me) = (Arc::clone(&served_node(&service).roster), served_node(&service).me);
        let service_context = Arc::new(ServiceContext {
            me,
            role: Participant::role(0).unwrap(),
            roster: Arc::clone(&roster),
            growth: crossbeam_channel::bounded(1).0,
            bell: Arc::clone(&service.bell),
            waiting_arrivals: WaitingArrivals::default(),
            arrival_repair_lock: service.replication.arrival_repair_lock(),
        });
        service.replication.service_context = Arc::downgrade(&service_context);
        let worker = has_workers.then_some(service_context);
        service.close();
        assert_eq!(roster.is_dead(Some(me)), !has_workers);
        drop(worker);
    }
}

#[test]
fn connections_end_with_the_service_also_if_a_child_keeps_them() {
    let test_dir = TestDir::new();
    let mut service = test_dir.service();
    let (member, pending_client) = (test_dir.member(), test_dir.member());
    member.says_hello();
    run_several(&mut service);
    // As a child of this process has them.
    let copies: Vec<_> = service
        .clients
        .values()
        .map(|client| &client.connection)
        .chain(service.pending_clients.iter().map(|pending_client| &pending_client.connection))
        .map(|connection| connection.as_fd().try_clone_to_owned().unwrap())
        .collect();
    assert_eq!(copies.len(), 2);
    service.close();
    while member.0.receive(Duration::ZERO).is_ok() {}
    for end in [member, pending_client] {
        assert!(matches!(end.0.receive(Duration::ZERO), Err(ChannelError::Closed)));
    }
}
