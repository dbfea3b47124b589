//! The service and its clients in one thread: the test decides when messages are handled.

mod requested_pieces;
mod waiting_publishers;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::AtomicU32;

use ipc::{AlwaysAlive, Channel, ChannelError, Liveness};

use super::*;
use crate::budgets::Budgets;
use crate::ids::NodeId;
use crate::pool::tests::is_held_by;
use crate::pool::{Direction, GrowthRequest, Pool, PoolId};
use crate::replication::{ServiceContext, WaitingArrivals};
use crate::report::Row;
use crate::service::election::{self, socket_path};
use crate::service::protocol::{self, Notice, Request};
use crate::service::registry::NextPiece;
use crate::settings::{SharedLocation, SharedSettings};
use crate::topic::Topic;

const LOCAL: PoolId = PoolId { place: SharedLocation::Host, direction: Direction::Local };
const BUDGETS: Budgets = Budgets { host: Some(1 << 28), device: None };
const PLACES: usize = (Participant::SLOTS - Participant::ROLES) as usize;

/// A node's directory, removed on drop.
struct TestDir(PathBuf);

impl TestDir {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fabricast-service-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        election::prepare("test", &directory).unwrap();
        Self(directory)
    }

    fn service(&self) -> Service {
        let options = NodeOptions {
            directory: self.0.clone(),
            label: "test".into(),
            budgets: BUDGETS,
            ..NodeOptions::default()
        };
        let listener = ChannelListener::bind(&socket_path(&self.0)).unwrap();
        let bell = Arc::new(WakeFd::new().unwrap());
        Service::new(options, Arc::default(), None, listener, bell, Arc::default()).unwrap()
    }

    /// A service that takes over a node with members and this segment.
    fn successor(&self) -> (Service, NodeSegment, MemberLock) {
        let node_segment = NodeSegment::create(NodeId::random().unwrap()).unwrap();
        MemberLock::write_node_id("test", &self.0, Some(node_segment.identity())).unwrap();
        let member_lock = MemberLock::hold("test", &self.0).unwrap();
        (self.service(), node_segment, member_lock)
    }

    /// A service and a member of its node.
    fn joined(&self) -> (Service, Member, Participant) {
        let (mut service, member) = (self.service(), self.member());
        let participant = member.join(&mut service);
        (service, member, participant)
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

/// A client: it sends only what the test sends.
struct Member(Channel);

impl Member {
    fn send_request(&self, request: &Request, files: &[BorrowedFd<'_>]) {
        self.0.send(&protocol::encode(request), files, Duration::from_secs(20)).unwrap();
    }

    fn send_hello(&self) {
        self.send_request(&Request::Hello { label: "test".into() }, &[pidfd().as_fd()]);
    }

    /// Joins, and marks itself as a member.
    fn join(&self, service: &mut Service) -> Participant {
        self.send_hello();
        run_several(service);
        let participant = self.welcome().unwrap();
        served_node(service).node_segment.mark_member(participant);
        participant
    }

    fn rejoin(&self, participant: Participant, node_segment: &NodeSegment) {
        let again = Request::Rejoin { label: "test".into(), participant: participant.number() };
        self.send_request(&again, &[pidfd().as_fd(), node_segment.as_fd()]);
    }

    fn return_objects(&self, pools: &[&Pool], topic: &Topic) {
        for pool in pools {
            self.send_request(&Request::Pool { pool: pool.id() }, &[pool.control_segment()]);
        }
        self.send_request(&Request::Topic { number: topic.number() }, &[topic.segment()]);
    }

    fn receive_all(&self) -> Vec<Notice> {
        let mut notices = Vec::new();
        while let Ok(message) = self.0.receive(Duration::ZERO) {
            notices.push(protocol::decode("test", &message.bytes).unwrap());
        }
        notices
    }

    fn welcome(&self) -> Option<Participant> {
        self.receive_all().into_iter().find_map(|notice| match notice {
            Notice::Welcome { participant, .. } => Participant::from_number(participant),
            _ => None,
        })
    }

    fn is_rejected(&self) -> bool {
        self.receive_all().iter().any(|notice| matches!(notice, Notice::Rejected { .. }))
    }
}

fn served_node(service: &Service) -> &ServedNode {
    service.served_node.as_ref().unwrap()
}

/// The pool of the topics in host memory.
fn local_pool(service: &Service) -> Arc<Pool> {
    let topics = service.broker.registry().local_topics();
    topics.into_values().next().unwrap().local
}

/// A topic with its pools, as members of a node have them.
fn topic_with_pools() -> ([Pool; 2], Topic) {
    let settings = SharedSettings::of(&crate::TopicSettings::default()).unwrap();
    let pool = |direction| Pool::create(PoolId { direction, ..LOCAL }, 1 << 28, 64).unwrap();
    let topic = Topic::create(4, "returned", &settings).unwrap();
    ([pool(Direction::Local), pool(Direction::Inbound)], topic)
}

#[test]
fn node_is_handed_over_only_to_the_process_with_priority() {
    let test_dir = TestDir::new();
    let (mut service, member, participant) = test_dir.joined();
    let request_take_over = |service: &mut Service| {
        member.send_request(&Request::TakeOver, &[]);
        run_several(service);
        service.is_over.load(Ordering::Acquire)
    };
    assert!(!request_take_over(&mut service), "no process has priority");
    let priority_lock = election::PriorityLock::take("test", &test_dir.0).unwrap().unwrap();
    service.has_priority.store(true, Ordering::Release);
    assert!(!request_take_over(&mut service), "the service itself has priority");
    service.has_priority.store(false, Ordering::Release);
    let own = service.broker.set_process(participant, 1);
    assert!(!request_take_over(&mut service), "another process has priority");
    service.broker.set_process(participant, own);
    service.min_term_until = Some(Instant::now() + Duration::from_secs(600));
    assert!(!request_take_over(&mut service), "the minimum term is not over");
    service.min_term_until = Some(Instant::now());
    assert!(request_take_over(&mut service));
    drop(priority_lock);
}

#[test]
fn participant_that_never_became_a_member_is_freed() {
    let test_dir = TestDir::new();
    let mut service = test_dir.service();
    let joining_client = test_dir.member();
    joining_client.send_hello();
    run_several(&mut service);
    let participant = joining_client.welcome().unwrap();
    assert_eq!(served_node(&service).participants.free_slots(), PLACES - 2);
    // The client fails before it becomes a member.
    drop(joining_client);
    run_several(&mut service);
    assert_eq!(served_node(&service).participants.free_slots(), PLACES - 1);
    assert!(!service.reclaimer.watches(participant));
    // Another client is a member, and only loses its connection.
    let member = test_dir.member();
    member.join(&mut service);
    drop(member);
    run_several(&mut service);
    assert_eq!(served_node(&service).participants.free_slots(), PLACES - 2);
}

#[test]
fn process_that_left_unnoticed_is_reclaimed_later() {
    let test_dir = TestDir::new();
    let (mut service, member, participant) = test_dir.joined();
    drop(member);
    served_node(&service).participants.leave(participant);
    service.reclaimer.expire_liveness_check();
    run_several(&mut service);
    assert_eq!(served_node(&service).participants.free_slots(), PLACES - 1);
}

#[test]
fn pidfds_are_sent_before_the_welcome() {
    let test_dir = TestDir::new();
    let mut service = test_dir.service();
    let (first, second) = (test_dir.member(), test_dir.member());
    first.send_hello();
    run_several(&mut service);
    second.send_hello();
    run_several(&mut service);
    for (member, known) in [(first, 1), (second, 2)] {
        let notices = member.receive_all();
        let Some(Notice::Pidfds { participants }) = notices.first() else { panic!("{notices:?}") };
        assert_eq!(participants.len(), known);
        assert!(matches!(notices[1], Notice::Welcome { .. }), "{notices:?}");
    }
}

#[test]
fn unknown_participants_do_not_delay_a_takeover() {
    let test_dir = TestDir::new();
    let (mut service, node_segment, _held) = test_dir.successor();
    // The last service was killed after it admitted a process, before it sent the pidfd.
    let (participant, stray) = (
        node_segment.participants().admit(pidfd()).unwrap(),
        node_segment.participants().admit(pidfd()).unwrap(),
    );
    node_segment.mark_member(participant);
    let member = test_dir.member();
    member.rejoin(participant, &node_segment);
    run_several(&mut service);
    assert_eq!(member.welcome(), Some(participant));
    assert!(service.takeover.is_some());
    member.send_request(&Request::RejoinDone, &[]);
    run_several(&mut service);
    assert!(service.takeover.is_none(), "it waits for an unknown participant");
    assert!(node_segment.participants().is_dead(Some(stray)));
    assert_eq!(node_segment.participants().free_slots(), PLACES - 2);
}

#[test]
fn segment_of_an_earlier_node_is_rejected() {
    let test_dir = TestDir::new();
    let (mut service, node_segment, _held) = test_dir.successor();
    let stale = NodeSegment::create(NodeId::random().unwrap()).unwrap();
    let (late, participant) = (
        stale.participants().admit(pidfd()).unwrap(),
        node_segment.participants().admit(pidfd()).unwrap(),
    );
    node_segment.mark_member(participant);
    stale.mark_member(late);
    let (first, member) = (test_dir.member(), test_dir.member());
    first.rejoin(late, &stale);
    run_several(&mut service);
    assert!(first.is_rejected());
    member.rejoin(participant, &node_segment);
    run_several(&mut service);
    assert_eq!(member.welcome(), Some(participant));
    assert_eq!(served_node(&service).node_segment.identity(), node_segment.identity());
}

#[test]
fn node_is_recreated_once_its_last_member_is_gone() {
    let test_dir = TestDir::new();
    let (mut service, node_segment, held) = test_dir.successor();
    let joining_client = test_dir.member();
    joining_client.send_hello();
    run_several(&mut service);
    assert!(service.takeover.is_some() && joining_client.welcome().is_none());
    let node = MemberLock::read_node_id("test", &test_dir.0).unwrap();
    assert_eq!(node, Some(node_segment.identity()), "the identity changed while there are members");
    // As a member does that ends together with its service.
    drop(held);
    run_several(&mut service);
    assert!(joining_client.welcome().is_some());
    let node = MemberLock::read_node_id("test", &test_dir.0).unwrap();
    assert_eq!(node, Some(served_node(&service).node_segment.identity()));
    assert_ne!(node, Some(node_segment.identity()));
}

#[test]
fn participant_slots_are_reserved_for_services() {
    let test_dir = TestDir::new();
    let (mut service, node_segment, _held) = test_dir.successor();
    let participant = node_segment.participants().admit(pidfd()).unwrap();
    node_segment.mark_member(participant);
    while node_segment.participants().free_slots() > RESERVED_PARTICIPANT_SLOTS {
        let other = node_segment.participants().admit(pidfd()).unwrap();
        node_segment.mark_member(other);
    }
    let (member, joining_client) = (test_dir.member(), test_dir.member());
    member.rejoin(participant, &node_segment);
    joining_client.send_hello();
    run_several(&mut service);
    assert_eq!(member.welcome(), Some(participant));
    // The timeout for other members is over.
    let takeover = service.takeover.as_mut().unwrap();
    takeover.set_awaited(Instant::now() - Duration::from_secs(60), BTreeSet::from([participant]));
    run_several(&mut service);
    assert!(joining_client.is_rejected());
    assert!(served_node(&service).participants.free_slots() > 0);
}

#[test]
fn late_objects_are_reclaimed_after_removed_participants() {
    let test_dir = TestDir::new();
    let (mut service, node_segment, _held) = test_dir.successor();
    let admit = || node_segment.participants().admit(pidfd()).unwrap();
    let (first, late, dead) = (admit(), admit(), admit());
    node_segment.mark_member(first);
    let member = test_dir.member();
    member.rejoin(first, &node_segment);
    member.send_request(&Request::Pidfds { participants: vec![late.number()] }, &[pidfd().as_fd()]);
    member.send_request(&Request::RejoinDone, &[]);
    run_several(&mut service);
    assert!(service.takeover.is_none());
    let ([local, inbound], topic) = topic_with_pools();
    topic.claim(dead).unwrap();
    topic.local().subscribe(&Caller::new(dead, &AlwaysAlive)).unwrap();
    topic.claim(late).unwrap();
    node_segment.participants().free_slot(dead);
    node_segment.mark_member(late);

    let other = test_dir.member();
    other.rejoin(late, &node_segment);
    other.return_objects(&[&local, &inbound], &topic);
    other.send_request(&Request::RejoinDone, &[]);
    run_several(&mut service);
    assert_eq!(topic.owners().into_iter().collect::<Vec<_>>(), [late]);
    let topics = service.broker.registry().local_topics();
    assert!(topics["returned"].publishes, "its participants were not checked");
    // The process reconnects to the same service, and has closed the topic in the meantime.
    let again = test_dir.member();
    again.rejoin(late, &node_segment);
    again.send_request(&Request::RejoinDone, &[]);
    run_several(&mut service);
    assert_eq!(service.broker.members().len(), 2);
    assert!(service.broker.registry().topic_numbers().is_empty(), "a topic without users remains");
}

#[test]
fn report_lists_the_process_that_requests_it() {
    let test_dir = TestDir::new();
    let (mut service, member, participant) = test_dir.joined();
    member.send_request(&Request::Report { request: 1 }, &[]);
    run_several(&mut service);
    let notices = member.receive_all();
    let [Notice::Rows { rows, is_last: true, .. }] = &notices[..] else { panic!("{notices:?}") };
    let is_it = |row: &Row| matches!(row, Row::Process { participant: found, .. } if *found == participant.to_string());
    assert!(rows.iter().any(is_it), "{rows:?}");
}

#[test]
fn topic_is_removed_once_all_grants_are_closed() {
    let test_dir = TestDir::new();
    let (mut service, member, _) = test_dir.joined();
    let settings = SharedSettings::of(&crate::TopicSettings::default()).unwrap();
    let open = |request| Request::Open { request, name: "it".into(), settings: Some(settings) };
    member.send_request(&open(1), &[]);
    member.send_request(&open(2), &[]);
    run_several(&mut service);
    let number = service.broker.registry().topic_numbers()[0];
    // The second grant was in flight when the first one was closed.
    member.send_request(&Request::CloseTopic { number, granted: 1 }, &[]);
    run_several(&mut service);
    assert_eq!(service.broker.registry().topic_numbers().len(), 1);
    member.send_request(&Request::CloseTopic { number, granted: 1 }, &[]);
    run_several(&mut service);
    assert!(service.broker.registry().topic_numbers().is_empty());
}

#[test]
fn stopped_client_does_not_keep_a_pool_from_growing() {
    let test_dir = TestDir::new();
    let (mut service, member, _) = test_dir.joined();
    let settings = SharedSettings::of(&crate::TopicSettings::default()).unwrap();
    member.send_request(
        &Request::Open { request: 1, name: "it".into(), settings: Some(settings) },
        &[],
    );
    run_several(&mut service);
    // The first piece is created at once, and the member never acknowledges it.
    let admitted = |service: &Service| local_pool(service).admitted();
    assert_eq!(admitted(&service), 0);
    service.broker.expire_acknowledgements();
    run_several(&mut service);
    assert_eq!(admitted(&service), 1);
    assert!(
        member.receive_all().contains(&Notice::PoolGrown { pool: LOCAL }),
        "the notice is queued"
    );
}

#[test]
fn piece_is_admitted_once_the_lock_is_free() {
    let test_dir = TestDir::new();
    let mut service = test_dir.service();
    let settings = SharedSettings::of(&crate::TopicSettings::default()).unwrap();
    let id = served_node(&service).me;
    service.broker.open(id, "it", Some(settings), "", || 7).unwrap();
    let pool = local_pool(&service);
    let me = Caller { timeout: Duration::from_millis(20), ..Caller::new(id, &AlwaysAlive) };
    let next = service.broker.registry().grow(&me, LOCAL, 1).unwrap();
    let Some(NextPiece::Held(number)) = next else { panic!("{next:?}") };
    let broker = &mut service.broker;
    // A stopped process holds the allocator's lock.
    is_held_by(&pool, Participant::new(9, 1));
    let error = pool.admit_piece(&me, number).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    broker.resume_growth(&me);
    assert!(broker.is_growing(), "the piece is not admitted later");
    let request = GrowthRequest::new(LOCAL, 0, 1);
    broker.grow_as_requested(&me, request);
    assert_eq!((pool.held(), pool.admitted()), (1, 0));
    is_held_by(&pool, None);
    broker.check_growth(&me);
    assert!(!broker.is_growing());
    assert_eq!(pool.admitted(), 1);
    // The request was sent before the piece was admitted.
    broker.grow_as_requested(&me, request);
    assert_eq!(pool.held(), 1);
    broker.grow_as_requested(&me, GrowthRequest::new(LOCAL, 1, 1));
    assert_eq!(pool.held(), 2);
}

#[test]
fn held_lock_does_not_block_the_service() {
    let test_dir = TestDir::new();
    let (mut service, member, id) = test_dir.joined();
    let settings = SharedSettings::of(&crate::TopicSettings::default()).unwrap();
    member.send_request(
        &Request::Open { request: 1, name: "it".into(), settings: Some(settings) },
        &[],
    );
    run_several(&mut service);
    let other = served_node(&service).participants.admit(pidfd()).unwrap();
    let pool = local_pool(&service);
    is_held_by(&pool, Some(other));
    member.send_request(&Request::Leave, &[]);
    let start = Instant::now();
    run_several(&mut service);
    assert!(start.elapsed() < Caller::DEFAULT_TIMEOUT, "it waited for {:?}", start.elapsed());
    assert!(service.reclaimer.awaits_reclaim(id) && !member.receive_all().contains(&Notice::Left));
    is_held_by(&pool, None);
    run_several(&mut service);
    assert!(member.receive_all().contains(&Notice::Left));
}

#[test]
fn service_with_a_running_worker_keeps_its_participant() {
    for has_workers in [true, false] {
        let test_dir = TestDir::new();
        let mut service = test_dir.service();
        let (participants, me) =
            (Arc::clone(&served_node(&service).participants), served_node(&service).me);
        let service_context = Arc::new(ServiceContext {
            me,
            role: Participant::role(0).unwrap(),
            node_segment: Arc::clone(&served_node(&service).node_segment),
            participants: Arc::clone(&participants),
            growth: crossbeam_channel::bounded(1).0,
            bell: Arc::clone(&service.bell),
            waiting_arrivals: WaitingArrivals::default(),
            arrival_repair_lock: Arc::clone(service.replication.arrival_repair_lock()),
        });
        service.replication.set_context(&service_context);
        let worker = has_workers.then_some(service_context);
        service.close();
        assert_eq!(participants.is_dead(Some(me)), !has_workers);
        drop(worker);
    }
}

#[test]
fn connections_end_with_the_service_despite_duplicates() {
    let test_dir = TestDir::new();
    let mut service = test_dir.service();
    let (member, pending_client) = (test_dir.member(), test_dir.member());
    member.send_hello();
    run_several(&mut service);
    // As in a child of this process.
    let copies: Vec<_> = service
        .broker
        .connections()
        .map(|(_, connection)| connection)
        .chain(service.admission.connections())
        .map(|connection| connection.as_fd().try_clone_to_owned().unwrap())
        .collect();
    assert_eq!(copies.len(), 2);
    service.close();
    while member.0.receive(Duration::ZERO).is_ok() {}
    for end in [member, pending_client] {
        assert!(matches!(end.0.receive(Duration::ZERO), Err(ChannelError::Closed)));
    }
}
