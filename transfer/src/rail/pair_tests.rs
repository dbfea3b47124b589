//! A guest and its host, who talk to each other on the loopback interface: without threads.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use fabric::{Caps, Domain, EndpointKind, Query};

use super::driver::{Driver, SessionKey};
use super::links::LinkState;
use super::message::Message;
use super::reliable_window::MAX_UNACKNOWLEDGED;
use super::{LinkTarget, RAIL_TIMEOUT, RailEvent, RailOptions, RailShared};
use crate::agent::{LocalTarget, Refusal};
use crate::error::ErrorKind;
use crate::host_buffer::HostBuffer;
use crate::lock;
use crate::region::{Region, Rights};
use crate::share_service::Admission;

/// Only reached when something is wrong.
const END: Duration = Duration::from_secs(60);
/// Nobody is lost because the machine is busy.
const LOST_AFTER: Duration = Duration::from_secs(40);
const LINK: u32 = 3;
/// More than can be said before an answer comes.
const MANY: usize = 2 * MAX_UNACKNOWLEDGED + 50;

struct Side {
    driver: Driver,
    shared: Arc<RailShared>,
    local_target: Arc<LocalTarget>,
    told: Vec<RailEvent>,
}

impl Side {
    fn new(label: &str, lost_after: Duration) -> Self {
        let query = Query::new(EndpointKind::Rdm).caps(Caps::MESSAGE | Caps::RMA);
        let query = query.source("127.0.0.1");
        let offer = query.clone().provider("tcp").first();
        let offer = offer.or_else(|_| query.provider("net").first()).unwrap();
        let domain = Domain::open(&offer).unwrap();
        let local_target =
            Arc::new(LocalTarget::new(label.to_owned(), Admission::own_user()).unwrap());
        let settings = RailOptions { lost_after, ..RailOptions::default() };
        let shared = Arc::new(RailShared::new(&settings, domain.capabilities()));
        let driver = Driver::new(
            &domain,
            Arc::clone(&shared),
            Arc::clone(&local_target),
            settings,
            channel().1,
        );
        Self { driver: driver.unwrap(), shared, local_target, told: Vec::new() }
    }

    fn poll_once(&mut self) -> bool {
        let has_moved = self.driver.poll_once();
        self.told.extend(lock(&self.shared.rail_events).drain(..));
        has_moved
    }

    fn count(&self, is_it: impl Fn(&RailEvent) -> bool) -> usize {
        self.told.iter().filter(|report| is_it(report)).count()
    }
}

struct Pair {
    initiator: Side,
    target: Side,
}

impl Pair {
    fn new(lost_after: Duration) -> Self {
        Self { initiator: Side::new("guest", lost_after), target: Side::new("host", lost_after) }
    }

    fn connected(lost_after: Duration) -> Self {
        let mut pair = Self::new(lost_after);
        let target = pair.target();
        pair.initiator.driver.connect(LINK, target, END);
        pair.until("they have met", |pair| pair.ups() == 1);
        pair.until("it has come", |pair| !pair.target.told.is_empty());
        pair
    }

    fn target(&self) -> LinkTarget {
        let (identity, address) =
            (self.target.local_target.identity, self.target.driver.address().to_vec());
        LinkTarget { identity, address, connection_id: 5 }
    }

    fn poll_once(&mut self) {
        let has_moved = self.initiator.poll_once() | self.target.poll_once();
        if !has_moved {
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    #[track_caller]
    fn until(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let end = Instant::now() + END;
        while !is_so(self) {
            assert!(Instant::now() < end, "{what}: {:?}", self.initiator.told.last());
            self.poll_once();
        }
    }

    /// How often the guest was told that its host is there.
    fn ups(&self) -> usize {
        self.initiator.count(|report| matches!(report, RailEvent::Up { .. }))
    }

    fn downs(&self) -> usize {
        self.initiator.count(|report| matches!(report, RailEvent::Down { .. }))
    }

    /// How often a region was opened.
    fn opened(&self) -> usize {
        self.initiator.count(|report| matches!(report, RailEvent::Opened { outcome: Ok(()), .. }))
    }

    /// Regions of the host that the guest knows.
    fn with_regions(count: usize) -> (Self, Vec<Region>) {
        let mut pair = Self::connected(LOST_AFTER);
        let buffer = HostBuffer::new(4096).unwrap();
        let region =
            || Region::new(&pair.target.local_target, buffer.clone().into(), Rights::ALL).unwrap();
        let regions: Vec<_> = (0..count).map(|_| region()).collect();
        for (before, region) in regions.iter().enumerate() {
            let told = region.descriptor();
            pair.initiator.driver.open(LINK, (told.number, told.ticket), false);
            pair.until("it is open", |pair| pair.opened() == before + 1);
        }
        (pair, regions)
    }

    fn withdraw(&mut self, region: &Region) {
        let number = region.descriptor().number;
        self.target.local_target.withdraw(number);
        self.target.driver.retire(number, None, region.buffer().clone());
    }
}

#[test]
fn who_is_back_is_asked_for_however_many_regions_were_known() {
    let (mut pair, regions) = Pair::with_regions(MANY);
    pair.initiator.driver.close_lost(SessionKey::Link(LINK), "it does not answer any more");
    // One goes meanwhile.
    pair.target.local_target.withdraw(regions[0].descriptor().number);
    pair.until("it is back", |pair| pair.ups() == 2);
    assert_eq!(pair.opened(), MANY + MANY - 1);
    assert_eq!(pair.downs(), 1, "it came back at once");
}

#[test]
fn however_many_regions_are_withdrawn_at_once_nobody_is_lost_for_that() {
    let (mut pair, regions) = Pair::with_regions(MANY);
    regions.iter().for_each(|region| pair.withdraw(region));
    pair.until("nobody is at them", |pair| lock(&pair.target.shared.retiring).is_empty());
    let withdrawn = pair.initiator.count(|report| matches!(report, RailEvent::Withdrawn { .. }));
    assert_eq!((withdrawn, pair.downs(), pair.target.driver.initiators.len()), (MANY, 0, 1));
    let gone = pair.target.count(|report| matches!(report, RailEvent::SessionClosed { .. }));
    assert_eq!(gone, 0);
    assert!(pair.initiator.driver.links[&LINK].withdrawn.is_empty(), "nothing is left of them");
}

/// The host shows a region, and cannot stage then; or what it says of its memory is of no use. To the
/// guest it was never there.
#[test]
fn a_region_that_came_to_nothing_for_a_guest_can_be_withdrawn() {
    let mut pair = Pair::connected(LOST_AFTER);
    let buffer = HostBuffer::new(4096).unwrap();
    let region = Region::new(&pair.target.local_target, buffer.into(), Rights::ALL).unwrap();
    let told = region.descriptor();
    pair.initiator.driver.open(LINK, (told.number, told.ticket), false);
    let link = &pair.initiator.driver.links[&LINK];
    let (session, request) = (link.session.id, *link.pending_opens.keys().next().unwrap());
    let refusal = Refusal::new(ErrorKind::TooMany, "64 guests have some");
    pair.initiator.driver.handle_at_initiator(session, Message::Refused { request, refusal });
    let end = Instant::now() + Duration::from_millis(100);
    while Instant::now() < end {
        pair.poll_once();
    }
    pair.withdraw(&region);
    pair.until("it is let go of", |pair| lock(&pair.target.shared.retiring).is_empty());
}

#[test]
fn peers_may_be_silent_for_as_long_as_can_be_said() {
    let mut pair = Pair::connected(Duration::MAX);
    let end = Instant::now() + Duration::from_millis(200);
    while Instant::now() < end {
        pair.poll_once();
    }
    // Also where it is tried again.
    pair.initiator.driver.close_lost(SessionKey::Link(LINK), "it does not answer any more");
    pair.until("it is back", |pair| pair.ups() == 2);
}

#[test]
fn who_asks_for_a_peer_that_is_tried_just_now_has_all_the_time_that_was_given() {
    let mut pair = Pair::new(Duration::from_secs(1));
    let target = pair.target();
    pair.initiator.driver.connect(LINK, target.clone(), Duration::from_millis(1));
    let timeout = 6 * RAIL_TIMEOUT;
    let end = Instant::now() + timeout;
    pair.initiator.driver.connect(LINK, target.clone(), timeout);
    let until = |pair: &Pair| match pair.initiator.driver.links[&LINK].state {
        LinkState::Connecting { until, .. } => until,
        _ => panic!("nobody has answered"),
    };
    assert!(until(&pair) >= end);
    pair.initiator.driver.connect(LINK, target, Duration::ZERO);
    assert!(until(&pair) >= end, "who has less time takes none of it");
}
