//! A guest and its host, who talk to each other on the loopback interface: without threads.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use fabric::{Caps, Domain, EndpointKind, Query};

use super::driver::{Driver, Party};
use super::hearing::MOST_UNHEARD;
use super::links::State;
use super::message::Message;
use super::{PATIENCE, Report, Settings, Shared, Target};
use crate::agent::{Home, Refusal};
use crate::error::ErrorKind;
use crate::host::HostBuffer;
use crate::lock;
use crate::region::{Region, Rights};
use crate::service::Admission;

/// Only reached when something is wrong.
const END: Duration = Duration::from_secs(60);
/// Nobody is lost because the machine is busy.
const LOST_AFTER: Duration = Duration::from_secs(40);
const LINK: u32 = 3;
/// More than can be said before an answer comes.
const MANY: usize = 2 * MOST_UNHEARD + 50;

struct Side {
    driver: Driver,
    shared: Arc<Shared>,
    home: Arc<Home>,
    told: Vec<Report>,
}

impl Side {
    fn new(label: &str, lost_after: Duration) -> Self {
        let query = Query::new(EndpointKind::Rdm).caps(Caps::MESSAGE | Caps::RMA);
        let query = query.source("127.0.0.1");
        let offer = query.clone().provider("tcp").first();
        let offer = offer.or_else(|_| query.provider("net").first()).unwrap();
        let domain = Domain::open(&offer).unwrap();
        let home = Arc::new(Home::new(label.to_owned(), Admission::own_user()).unwrap());
        let settings = Settings { lost_after, ..Settings::default() };
        let shared = Arc::new(Shared::new(&settings, domain.capabilities()));
        let driver =
            Driver::new(&domain, Arc::clone(&shared), Arc::clone(&home), settings, channel().1);
        Self { driver: driver.unwrap(), shared, home, told: Vec::new() }
    }

    fn turn(&mut self) -> bool {
        let has_moved = self.driver.turn();
        self.told.extend(lock(&self.shared.reports).drain(..));
        has_moved
    }

    fn count(&self, is_it: impl Fn(&Report) -> bool) -> usize {
        self.told.iter().filter(|report| is_it(report)).count()
    }
}

struct Pair {
    guest: Side,
    host: Side,
}

impl Pair {
    fn new(lost_after: Duration) -> Self {
        Self { guest: Side::new("guest", lost_after), host: Side::new("host", lost_after) }
    }

    fn met(lost_after: Duration) -> Self {
        let mut pair = Self::new(lost_after);
        let target = pair.target();
        pair.guest.driver.meet(LINK, target, END);
        pair.until("they have met", |pair| pair.ups() == 1);
        pair.until("it has come", |pair| !pair.host.told.is_empty());
        pair
    }

    fn target(&self) -> Target {
        let (identity, address) = (self.host.home.identity, self.host.driver.address().to_vec());
        Target { identity, address, visit: 5 }
    }

    fn turn(&mut self) {
        let has_moved = self.guest.turn() | self.host.turn();
        if !has_moved {
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    #[track_caller]
    fn until(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let end = Instant::now() + END;
        while !is_so(self) {
            assert!(Instant::now() < end, "{what}: {:?}", self.guest.told.last());
            self.turn();
        }
    }

    /// How often the guest was told that its host is there.
    fn ups(&self) -> usize {
        self.guest.count(|report| matches!(report, Report::Up { .. }))
    }

    fn downs(&self) -> usize {
        self.guest.count(|report| matches!(report, Report::Down { .. }))
    }

    /// How often a region was opened.
    fn opened(&self) -> usize {
        self.guest.count(|report| matches!(report, Report::Opened { outcome: Ok(()), .. }))
    }

    /// Regions of the host that the guest knows.
    fn with_regions(count: usize) -> (Self, Vec<Region>) {
        let mut pair = Self::met(LOST_AFTER);
        let buffer = HostBuffer::new(4096).unwrap();
        let region = || Region::new(&pair.host.home, buffer.clone().into(), Rights::ALL).unwrap();
        let regions: Vec<_> = (0..count).map(|_| region()).collect();
        for (before, region) in regions.iter().enumerate() {
            let told = region.descriptor();
            pair.guest.driver.open(LINK, (told.number, told.ticket), false);
            pair.until("it is open", |pair| pair.opened() == before + 1);
        }
        (pair, regions)
    }

    fn withdraw(&mut self, region: &Region) {
        let number = region.descriptor().number;
        self.host.home.withdraw(number);
        self.host.driver.retire(number, None, region.buffer().clone());
    }
}

#[test]
fn who_is_back_is_asked_for_however_many_regions_were_known() {
    let (mut pair, regions) = Pair::with_regions(MANY);
    pair.guest.driver.lose(Party::Link(LINK), "it does not answer any more");
    // One goes meanwhile.
    pair.host.home.withdraw(regions[0].descriptor().number);
    pair.until("it is back", |pair| pair.ups() == 2);
    assert_eq!(pair.opened(), MANY + MANY - 1);
    assert_eq!(pair.downs(), 1, "it came back at once");
}

#[test]
fn however_many_regions_are_withdrawn_at_once_nobody_is_lost_for_that() {
    let (mut pair, regions) = Pair::with_regions(MANY);
    regions.iter().for_each(|region| pair.withdraw(region));
    pair.until("nobody is at them", |pair| lock(&pair.host.shared.retiring).is_empty());
    let withdrawn = pair.guest.count(|report| matches!(report, Report::Withdrawn { .. }));
    assert_eq!((withdrawn, pair.downs(), pair.host.driver.guests.len()), (MANY, 0, 1));
    let gone = pair.host.count(|report| matches!(report, Report::Gone { .. }));
    assert_eq!(gone, 0);
    assert!(pair.guest.driver.links[&LINK].withdrawn.is_empty(), "nothing is left of them");
}

/// The host shows a region, and cannot stage then; or what it says of its memory is of no use. To the
/// guest it was never there.
#[test]
fn a_region_that_came_to_nothing_for_a_guest_can_be_withdrawn() {
    let mut pair = Pair::met(LOST_AFTER);
    let buffer = HostBuffer::new(4096).unwrap();
    let region = Region::new(&pair.host.home, buffer.into(), Rights::ALL).unwrap();
    let told = region.descriptor();
    pair.guest.driver.open(LINK, (told.number, told.ticket), false);
    let link = &pair.guest.driver.links[&LINK];
    let (session, request) = (link.session.id, *link.asked.keys().next().unwrap());
    let refusal = Refusal::new(ErrorKind::TooMany, "64 guests have some");
    pair.guest.driver.guest_hears(session, Message::Refused { request, refusal });
    let end = Instant::now() + Duration::from_millis(100);
    while Instant::now() < end {
        pair.turn();
    }
    pair.withdraw(&region);
    pair.until("it is let go of", |pair| lock(&pair.host.shared.retiring).is_empty());
}

#[test]
fn peers_may_be_silent_for_as_long_as_can_be_said() {
    let mut pair = Pair::met(Duration::MAX);
    let end = Instant::now() + Duration::from_millis(200);
    while Instant::now() < end {
        pair.turn();
    }
    // Also where it is tried again.
    pair.guest.driver.lose(Party::Link(LINK), "it does not answer any more");
    pair.until("it is back", |pair| pair.ups() == 2);
}

#[test]
fn who_asks_for_a_peer_that_is_tried_just_now_has_all_the_time_that_was_given() {
    let mut pair = Pair::new(Duration::from_secs(1));
    let target = pair.target();
    pair.guest.driver.meet(LINK, target.clone(), Duration::from_millis(1));
    let patience = 6 * PATIENCE;
    let end = Instant::now() + patience;
    pair.guest.driver.meet(LINK, target.clone(), patience);
    let until = |pair: &Pair| match pair.guest.driver.links[&LINK].state {
        State::Meeting { until, .. } => until,
        _ => panic!("nobody has answered"),
    };
    assert!(until(&pair) >= end);
    pair.guest.driver.meet(LINK, target, Duration::ZERO);
    assert!(until(&pair) >= end, "who has less time takes none of it");
}
