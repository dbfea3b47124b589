//! The service and those that come to it, in one thread: what each says is heard in turn.

mod waiting;

use std::path::PathBuf;
use std::sync::atomic::AtomicU32;

use ipc::{Fate, Immortal};

use super::*;
use crate::carrier::{Crowded, Household};
use crate::node::Budgets;
use crate::peers::NodeIdentity;
use crate::pool::tests::is_held_by;
use crate::pool::{Direction, Pool};
use crate::report::Row;
use crate::service::election::{self, socket_in};
use crate::service::protocol;
use crate::settings::{SharedPlace, SharedSettings};
use crate::topic::Topic;

const HERE: PoolId = PoolId { place: SharedPlace::Host, direction: Direction::Here };
const BUDGETS: Budgets = Budgets { host: Some(1 << 28), device: None };
const PLACES: usize = (Participant::PLACES - Participant::ROLES) as usize;

/// A node's directory, gone with the test.
struct Ground(PathBuf);

impl Ground {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fabricast-reception-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        election::prepare("test", &directory).unwrap();
        Self(directory)
    }

    fn service(&self) -> Reception {
        let options = ServiceOptions {
            directory: self.0.clone(),
            label: "test".into(),
            budgets: BUDGETS,
            network: None,
            stands: Arc::default(),
            stays_until: None,
            identity: NodeIdentity::random().unwrap(),
        };
        let listener = ChannelListener::bind(&socket_in(&self.0)).unwrap();
        let bell = Arc::new(WakeFd::new().unwrap());
        Reception::new(options, listener, bell, Arc::default()).unwrap()
    }

    /// A service that finds members of a node, whose hall this is.
    fn successor(&self) -> (Reception, Hall, Membership) {
        let hall = Hall::create(NodeIdentity::random().unwrap()).unwrap();
        Membership::name_node("test", &self.0, Some(hall.identity())).unwrap();
        let membership = Membership::hold("test", &self.0).unwrap();
        (self.service(), hall, membership)
    }

    /// A service, and a member of its node.
    fn joined(&self) -> (Reception, Member, Participant) {
        let (mut service, member) = (self.service(), self.member());
        let who = member.joins(&mut service);
        (service, member, who)
    }

    fn member(&self) -> Member {
        Member(Channel::connect(&socket_in(&self.0), Duration::from_secs(20)).unwrap())
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn turns(service: &mut Reception) {
    for _ in 0..4 {
        service.bell.ring();
        service.turn();
    }
}

fn life() -> Life {
    Life::of_this_process().unwrap()
}

/// One that comes: it says only what the test lets it say.
struct Member(Channel);

impl Member {
    fn say(&self, request: &Request, files: &[BorrowedFd<'_>]) {
        self.0.send(&protocol::encode(request), files, Duration::from_secs(20)).unwrap();
    }

    fn says_hello(&self) {
        self.say(&Request::Hello { label: "test".into() }, &[life().as_fd()]);
    }

    /// Knows that it is a member, and says so.
    fn joins(&self, service: &mut Reception) -> Participant {
        self.says_hello();
        turns(service);
        let who = self.welcome().unwrap();
        seat(service).hall.attend(who);
        who
    }

    fn comes_back(&self, who: Participant, hall: &Hall) {
        let again = Request::Again { label: "test".into(), participant: who.number() };
        self.say(&again, &[life().as_fd(), hall.as_fd()]);
    }

    fn brings(&self, pools: &[&Pool], topic: &Topic) {
        for pool in pools {
            self.say(&Request::Pool { pool: pool.id() }, &[pool.books()]);
        }
        self.say(&Request::Topic { number: topic.number() }, &[topic.segment()]);
    }

    fn hears(&self) -> Vec<Notice> {
        let mut heard = Vec::new();
        while let Ok(message) = self.0.receive(Duration::ZERO) {
            heard.push(protocol::decode("test", &message.bytes).unwrap());
        }
        heard
    }

    fn welcome(&self) -> Option<Participant> {
        self.hears().into_iter().find_map(|notice| match notice {
            Notice::Welcome { participant, .. } => Participant::from_number(participant),
            _ => None,
        })
    }

    fn is_seen_off(&self) -> bool {
        self.hears().iter().any(|notice| matches!(notice, Notice::SeenOff { .. }))
    }
}

fn seat(service: &Reception) -> &Seat {
    service.seat.as_ref().unwrap()
}

/// A topic with its pools, as members of a node have them.
fn belongings() -> ([Pool; 2], Topic) {
    let settings = SharedSettings::of(&crate::TopicSettings::default()).unwrap();
    let pool = |direction| Pool::create(PoolId { direction, ..HERE }, 1 << 28, 64).unwrap();
    let topic = Topic::create(4, "brought", &settings).unwrap();
    ([pool(Direction::Here), pool(Direction::Arrivals)], topic)
}

#[test]
fn only_to_one_that_is_there_to_serve_the_office_is_given() {
    let ground = Ground::new();
    let (mut service, member, who) = ground.joined();
    let asks = |service: &mut Reception| {
        member.say(&Request::TakeOver, &[]);
        turns(service);
        service.is_over.load(Ordering::Acquire)
    };
    assert!(!asks(&mut service), "nobody is there");
    let claim = election::Claim::take("test", &ground.0).unwrap().unwrap();
    service.options.stands.store(true, Ordering::Release);
    assert!(!asks(&mut service), "it is the one");
    service.options.stands.store(false, Ordering::Release);
    let own = std::mem::replace(&mut service.guests.get_mut(&who).unwrap().process, 1);
    assert!(!asks(&mut service), "another process is");
    service.guests.get_mut(&who).unwrap().process = own;
    service.options.stays_until = Some(Instant::now() + Duration::from_secs(600));
    assert!(!asks(&mut service), "it had its time");
    service.options.stays_until = Some(Instant::now());
    assert!(asks(&mut service));
    drop(claim);
}

#[test]
fn a_name_that_nobody_took_is_given_back() {
    let ground = Ground::new();
    let mut service = ground.service();
    let newcomer = ground.member();
    newcomer.says_hello();
    turns(&mut service);
    let who = newcomer.welcome().unwrap();
    assert_eq!(seat(&service).roster.vacancies(), PLACES - 2);
    // Something failed before it knew that it is a member.
    drop(newcomer);
    turns(&mut service);
    assert_eq!(seat(&service).roster.vacancies(), PLACES - 1);
    assert!(!service.lives.contains_key(&who));
    // Another one is a member, and has only lost its connection.
    let member = ground.member();
    member.joins(&mut service);
    drop(member);
    turns(&mut service);
    assert_eq!(seat(&service).roster.vacancies(), PLACES - 2);
}

#[test]
fn one_who_left_when_nobody_listened_is_seen_to_later() {
    let ground = Ground::new();
    let (mut service, member, who) = ground.joined();
    drop(member);
    seat(&service).roster.resign(who);
    service.roll_call -= ROLL_CALL;
    turns(&mut service);
    assert_eq!(seat(&service).roster.vacancies(), PLACES - 1);
}

#[test]
fn a_member_knows_all_lives_before_it_is_welcome() {
    let ground = Ground::new();
    let mut service = ground.service();
    let (first, second) = (ground.member(), ground.member());
    first.says_hello();
    turns(&mut service);
    second.says_hello();
    turns(&mut service);
    for (member, known) in [(first, 1), (second, 2)] {
        let heard = member.hears();
        let Some(Notice::Lives { participants }) = heard.first() else { panic!("{heard:?}") };
        assert_eq!(participants.len(), known);
        assert!(matches!(heard[1], Notice::Welcome { .. }), "{heard:?}");
    }
}

#[test]
fn names_of_nobody_hold_up_no_takeover_and_are_struck_off() {
    let ground = Ground::new();
    let (mut service, hall, _held) = ground.successor();
    // The last service was killed between letting one in and telling of its life.
    let (who, stray) = (hall.roster().admit(life()).unwrap(), hall.roster().admit(life()).unwrap());
    hall.attend(who);
    let member = ground.member();
    member.comes_back(who, &hall);
    turns(&mut service);
    assert_eq!(member.welcome(), Some(who));
    assert!(service.gathering.is_some());
    member.say(&Request::Returned, &[]);
    turns(&mut service);
    assert!(service.gathering.is_none(), "it waits for a name that nobody has");
    assert!(hall.roster().is_dead(Some(stray)));
    assert_eq!(hall.roster().vacancies(), PLACES - 2);
}

#[test]
fn the_hall_of_a_node_that_is_no_more_is_not_taken() {
    let ground = Ground::new();
    let (mut service, hall, _held) = ground.successor();
    let stale = Hall::create(NodeIdentity::random().unwrap()).unwrap();
    let (late, who) = (stale.roster().admit(life()).unwrap(), hall.roster().admit(life()).unwrap());
    hall.attend(who);
    stale.attend(late);
    let (first, member) = (ground.member(), ground.member());
    first.comes_back(late, &stale);
    turns(&mut service);
    assert!(first.is_seen_off());
    member.comes_back(who, &hall);
    turns(&mut service);
    assert_eq!(member.welcome(), Some(who));
    assert_eq!(seat(&service).hall.identity(), hall.identity());
}

#[test]
fn a_node_is_founded_as_soon_as_nobody_can_bring_its_hall() {
    let ground = Ground::new();
    let (mut service, hall, held) = ground.successor();
    let newcomer = ground.member();
    newcomer.says_hello();
    turns(&mut service);
    assert!(service.gathering.is_some() && newcomer.welcome().is_none());
    let node = Membership::node_of("test", &ground.0).unwrap();
    assert_eq!(node, Some(hall.identity()), "it was named while there are members");
    // As one that ends, with its service, lets go.
    drop(held);
    turns(&mut service);
    assert!(newcomer.welcome().is_some());
    let node = Membership::node_of("test", &ground.0).unwrap();
    assert_eq!(node, Some(seat(&service).hall.identity()));
    assert_ne!(node, Some(hall.identity()));
}

#[test]
fn places_are_kept_for_those_that_take_over() {
    let ground = Ground::new();
    let (mut service, hall, _held) = ground.successor();
    let who = hall.roster().admit(life()).unwrap();
    hall.attend(who);
    while hall.roster().vacancies() > KEPT_PLACES {
        let other = hall.roster().admit(life()).unwrap();
        hall.attend(other);
    }
    let (member, newcomer) = (ground.member(), ground.member());
    member.comes_back(who, &hall);
    newcomer.says_hello();
    turns(&mut service);
    assert_eq!(member.welcome(), Some(who));
    // As if the others had had their time.
    let gathering = service.gathering.as_mut().unwrap();
    gathering.awaits(Instant::now() - Duration::from_secs(60), BTreeSet::from([who]));
    turns(&mut service);
    assert!(newcomer.is_seen_off());
    assert!(seat(&service).roster.vacancies() > 0);
}

#[test]
fn what_comes_late_is_cleaned_up_after_those_who_were_struck_off() {
    let ground = Ground::new();
    let (mut service, hall, _held) = ground.successor();
    let admit = || hall.roster().admit(life()).unwrap();
    let (first, late, dead) = (admit(), admit(), admit());
    hall.attend(first);
    let member = ground.member();
    member.comes_back(first, &hall);
    member.say(&Request::Lives { participants: vec![late.number()] }, &[life().as_fd()]);
    member.say(&Request::Returned, &[]);
    turns(&mut service);
    assert!(service.gathering.is_none());
    let ([here, arrivals], topic) = belongings();
    topic.claim(dead).unwrap();
    topic.here().subscribe(&Caller::new(dead, &Immortal)).unwrap();
    topic.claim(late).unwrap();
    hall.roster().strike_off(dead);
    hall.attend(late);

    let other = ground.member();
    other.comes_back(late, &hall);
    other.brings(&[&here, &arrivals], &topic);
    other.say(&Request::Returned, &[]);
    turns(&mut service);
    assert_eq!(topic.names().into_iter().collect::<Vec<_>>(), [late]);
    assert!(service.registry.topics[&4].publishes, "nobody looked who uses it");
    // It comes again, to the same service, and has let go of it meanwhile.
    let again = ground.member();
    again.comes_back(late, &hall);
    again.say(&Request::Returned, &[]);
    turns(&mut service);
    assert_eq!(service.guests.len(), 2);
    assert!(service.registry.topics.is_empty(), "a topic stays that nobody uses");
}

#[test]
fn one_who_asks_who_is_there_is_there() {
    let ground = Ground::new();
    let (mut service, member, who) = ground.joined();
    member.say(&Request::Report { request: 1 }, &[]);
    turns(&mut service);
    let heard = member.hears();
    let [Notice::Rows { rows, is_last: true, .. }] = &heard[..] else { panic!("{heard:?}") };
    let is_it = |row: &Row| matches!(row, Row::Process { participant, .. } if *participant == who.to_string());
    assert!(rows.iter().any(is_it), "{rows:?}");
}

#[test]
fn a_topic_is_forgotten_when_all_that_was_given_is() {
    let ground = Ground::new();
    let (mut service, member, _) = ground.joined();
    let settings = SharedSettings::of(&crate::TopicSettings::default()).unwrap();
    let open = |request| Request::Open { request, name: "it".into(), settings: Some(settings) };
    member.say(&open(1), &[]);
    member.say(&open(2), &[]);
    turns(&mut service);
    let number = *service.registry.topics.keys().next().unwrap();
    // The second was on its way when the first was let go of.
    member.say(&Request::Forget { number, given: 1 }, &[]);
    turns(&mut service);
    assert_eq!(service.registry.topics.len(), 1);
    member.say(&Request::Forget { number, given: 1 }, &[]);
    turns(&mut service);
    assert!(service.registry.topics.is_empty());
}

#[test]
fn one_who_is_stopped_does_not_keep_a_pool_from_growing() {
    let ground = Ground::new();
    let (mut service, member, _) = ground.joined();
    let settings = SharedSettings::of(&crate::TopicSettings::default()).unwrap();
    member.say(&Request::Open { request: 1, name: "it".into(), settings: Some(settings) }, &[]);
    turns(&mut service);
    // The first piece is made at once, and the member never says that it has it.
    let admitted = |service: &Reception| service.registry.pools[&HERE].pool.admitted();
    assert_eq!(admitted(&service), 0);
    let growing = service.registry.pools.get_mut(&HERE).unwrap().growing.as_mut().unwrap();
    growing.since -= Duration::from_secs(60);
    turns(&mut service);
    assert_eq!(admitted(&service), 1);
    assert!(member.hears().contains(&Notice::Grown { pool: HERE }), "it finds it in its line");
}

#[test]
fn nobody_holds_up_the_service_who_holds_a_lock() {
    let ground = Ground::new();
    let (mut service, member, who) = ground.joined();
    let settings = SharedSettings::of(&crate::TopicSettings::default()).unwrap();
    member.say(&Request::Open { request: 1, name: "it".into(), settings: Some(settings) }, &[]);
    turns(&mut service);
    let other = seat(&service).roster.admit(life()).unwrap();
    let pool = Arc::clone(&service.registry.pools[&HERE].pool);
    is_held_by(&pool, Some(other));
    member.say(&Request::Leave, &[]);
    let start = Instant::now();
    turns(&mut service);
    assert!(start.elapsed() < Caller::PATIENCE, "it waited for {:?}", start.elapsed());
    assert!(service.unburied.contains(&who) && !member.hears().contains(&Notice::Left));
    is_held_by(&pool, None);
    turns(&mut service);
    assert!(member.hears().contains(&Notice::Left));
}

#[test]
fn a_service_whose_worker_is_still_there_keeps_its_name() {
    for is_at_work in [true, false] {
        let ground = Ground::new();
        let mut service = ground.service();
        let (roster, me) = (Arc::clone(&seat(&service).roster), seat(&service).me);
        let household = Arc::new(Household {
            me,
            role: Participant::role(0).unwrap(),
            roster: Arc::clone(&roster),
            growth: crossbeam_channel::bounded(1).0,
            bell: Arc::clone(&service.bell),
            crowded: Crowded::default(),
            settling: service.carrying.settling(),
        });
        service.carrying.household = Arc::downgrade(&household);
        let worker = is_at_work.then_some(household);
        service.close();
        assert_eq!(roster.is_dead(Some(me)), !is_at_work);
        drop(worker);
    }
}

#[test]
fn connections_end_with_the_service_also_if_a_child_keeps_them() {
    let ground = Ground::new();
    let mut service = ground.service();
    let (member, stranger) = (ground.member(), ground.member());
    member.says_hello();
    turns(&mut service);
    // As a child of this process has them.
    let copies: Vec<_> = service
        .guests
        .values()
        .map(|guest| &guest.connection)
        .chain(service.strangers.iter().map(|stranger| &stranger.connection))
        .map(|connection| connection.as_fd().try_clone_to_owned().unwrap())
        .collect();
    assert_eq!(copies.len(), 2);
    service.close();
    while member.0.receive(Duration::ZERO).is_ok() {}
    for end in [member, stranger] {
        assert!(matches!(end.0.receive(Duration::ZERO), Err(ChannelError::Closed)));
    }
}
