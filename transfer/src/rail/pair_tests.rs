//! An initiator and its target over the loopback interface, without threads.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use fabric::{Caps, Domain, EndpointKind, Query};
use threads::lock;

use super::driver::Driver;
use super::message::Message;
use super::reliable_window::MAX_UNACKNOWLEDGED;
use super::session::SessionKey;
use super::{LinkTarget, RAIL_TIMEOUT, RailEvent, RailOptions, RailShared};
use crate::admission::Admission;
use crate::agent::LocalTarget;
use crate::error::ErrorKind;
use crate::host_buffer::HostBuffer;
use crate::refusal::Refusal;
use crate::region::{Region, Rights};

/// Reached only if the test fails.
pub(super) const END: Duration = Duration::from_secs(60);
/// Long enough for a busy machine.
pub(super) const LOST_AFTER: Duration = Duration::from_secs(40);
pub(super) const LINK: u32 = 3;
/// More than the window of unacknowledged messages.
const MANY: usize = 2 * MAX_UNACKNOWLEDGED + 50;

pub(super) struct Side {
    pub(super) driver: Driver,
    shared: Arc<RailShared>,
    pub(super) local_target: Arc<LocalTarget>,
    pub(super) events: Vec<RailEvent>,
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
        let shared = Arc::new(RailShared::new(0, &settings, domain.capabilities()));
        let driver =
            Driver::new(&domain, Arc::clone(&shared), local_target.clone(), settings, channel().1);
        Self { driver: driver.unwrap(), shared, local_target, events: Vec::new() }
    }

    pub(super) fn poll_once(&mut self) -> bool {
        let has_moved = self.driver.poll_once();
        self.events.extend(lock(&self.shared.rail_events).drain(..));
        has_moved
    }

    fn count(&self, is_match: impl Fn(&RailEvent) -> bool) -> usize {
        self.events.iter().filter(|event| is_match(event)).count()
    }
}

pub(super) struct Pair {
    pub(super) initiator: Side,
    pub(super) target: Side,
}

impl Pair {
    fn new(lost_after: Duration) -> Self {
        Self {
            initiator: Side::new("initiator", lost_after),
            target: Side::new("target", lost_after),
        }
    }

    pub(super) fn connected(lost_after: Duration) -> Self {
        let mut pair = Self::new(lost_after);
        let target = pair.target();
        pair.initiator.driver.connect(LINK, target, END);
        pair.until("the link is not up", |pair| pair.ups() == 1);
        pair.until("the session is not open", |pair| !pair.target.events.is_empty());
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
    pub(super) fn until(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let end = Instant::now() + END;
        while !is_so(self) {
            assert!(Instant::now() < end, "{what}: {:?}", self.initiator.events.last());
            self.poll_once();
        }
    }

    /// Number of `Up` events of the initiator.
    fn ups(&self) -> usize {
        self.initiator.count(|report| matches!(report, RailEvent::Up { .. }))
    }

    fn downs(&self) -> usize {
        self.initiator.count(|report| matches!(report, RailEvent::Down { .. }))
    }

    /// Number of opened regions.
    fn opened(&self) -> usize {
        self.initiator.count(|report| matches!(report, RailEvent::Opened { outcome: Ok(()), .. }))
    }

    /// A connected pair whose initiator has opened regions.
    pub(super) fn with_regions(count: usize) -> (Self, Vec<Region>) {
        let mut pair = Self::connected(LOST_AFTER);
        let buffer = HostBuffer::new(4096).unwrap();
        let region =
            || pair.target.local_target.register(buffer.clone().into(), Rights::ALL).unwrap();
        let regions: Vec<_> = (0..count).map(|_| region()).collect();
        for (before, region) in regions.iter().enumerate() {
            let descriptor = region.descriptor();
            pair.initiator.driver.open(LINK, (descriptor.number, descriptor.ticket), false);
            pair.until("the region is not open", |pair| pair.opened() == before + 1);
        }
        (pair, regions)
    }

    pub(super) fn withdraw(&mut self, region: &Region) {
        let number = region.descriptor().number;
        self.target.local_target.withdraw(number);
        self.target.driver.retire(number, None, region.buffer().clone());
    }
}

#[test]
fn reconnected_link_reopens_any_number_of_regions() {
    let (mut pair, regions) = Pair::with_regions(MANY);
    pair.initiator.driver.close_lost(SessionKey::Link(LINK), "it does not answer");
    // One region is withdrawn meanwhile.
    pair.target.local_target.withdraw(regions[0].descriptor().number);
    pair.until("the link is not up again", |pair| pair.ups() == 2);
    assert_eq!(pair.opened(), MANY + MANY - 1);
    assert_eq!(pair.downs(), 1, "it reconnected at once");
}

#[test]
fn mass_withdrawal_of_regions_does_not_lose_peers() {
    let (mut pair, regions) = Pair::with_regions(MANY);
    regions.iter().for_each(|region| pair.withdraw(region));
    pair.until("regions are not released", |pair| lock(&pair.target.shared.retiring).is_empty());
    let withdrawn = pair.initiator.count(|report| matches!(report, RailEvent::Withdrawn { .. }));
    assert_eq!((withdrawn, pair.downs(), pair.target.driver.target().count()), (MANY, 0, 1));
    let lost = pair.target.count(|report| matches!(report, RailEvent::SessionClosed { .. }));
    assert_eq!(lost, 0);
    let (withdrawn, _) = pair.initiator.driver.initiator().withdrawn_and_wanted(LINK);
    assert_eq!(withdrawn, 0, "withdrawn regions remain");
}

/// The target opens a region but cannot stage, or its staging memory is invalid. The initiator
/// never uses the region.
#[test]
fn region_with_a_failed_open_can_be_withdrawn() {
    let mut pair = Pair::connected(LOST_AFTER);
    let buffer = HostBuffer::new(4096).unwrap();
    let region = pair.target.local_target.register(buffer.into(), Rights::ALL).unwrap();
    let descriptor = region.descriptor();
    pair.initiator.driver.open(LINK, (descriptor.number, descriptor.ticket), false);
    let initiator = pair.initiator.driver.initiator();
    let (session, request) =
        (initiator.session_id(LINK).unwrap(), initiator.pending_opens(LINK)[0]);
    let refusal = Refusal::new(ErrorKind::TooMany, "64 initiators have some");
    pair.initiator.driver.handle_at_initiator(session, Message::Refused { request, refusal });
    let end = Instant::now() + Duration::from_millis(100);
    while Instant::now() < end {
        pair.poll_once();
    }
    pair.withdraw(&region);
    pair.until("the region is not released", |pair| lock(&pair.target.shared.retiring).is_empty());
}

#[test]
fn lost_after_may_be_the_maximum_duration() {
    let mut pair = Pair::connected(Duration::MAX);
    let end = Instant::now() + Duration::from_millis(200);
    while Instant::now() < end {
        pair.poll_once();
    }
    // Also for a retried link.
    pair.initiator.driver.close_lost(SessionKey::Link(LINK), "it does not answer");
    pair.until("the link is not up again", |pair| pair.ups() == 2);
}

#[test]
fn connect_extends_the_deadline_of_a_running_attempt() {
    let mut pair = Pair::new(Duration::from_secs(1));
    let target = pair.target();
    pair.initiator.driver.connect(LINK, target.clone(), Duration::from_millis(1));
    let timeout = 6 * RAIL_TIMEOUT;
    let end = Instant::now() + timeout;
    pair.initiator.driver.connect(LINK, target.clone(), timeout);
    let until = |pair: &Pair| pair.initiator.driver.initiator().connect_deadline(LINK);
    assert!(until(&pair) >= end);
    pair.initiator.driver.connect(LINK, target, Duration::ZERO);
    assert!(until(&pair) >= end, "a shorter timeout changed the deadline");
}

/// A connection to an earlier process at the address breaks with the first message.
#[test]
fn broken_connection_is_replaced_once() {
    const CAUSE: &str = "the connection broke";
    let mut pair = Pair::new(LOST_AFTER);
    let target = pair.target();
    pair.initiator.driver.connect(LINK, target, END);
    pair.initiator.driver.break_connection(LINK, CAUSE);
    pair.until("the link is not up", |pair| pair.ups() == 1);
    assert_eq!(pair.downs(), 0);

    let mut pair = Pair::new(LOST_AFTER);
    let target = pair.target();
    pair.initiator.driver.connect(LINK, target, END);
    (0..2).for_each(|_| pair.initiator.driver.break_connection(LINK, CAUSE));
    pair.initiator.poll_once();
    let is_told = |event: &RailEvent| matches!(event, RailEvent::Down { error, .. } if error.to_string().contains(CAUSE));
    assert_eq!(pair.initiator.count(is_told), 1);
}
