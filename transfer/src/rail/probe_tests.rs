//! Requests for direct access and probes, with sides that violate the protocol, over the loopback
//! interface without threads. The memory is of the host, for which an initiator may demand a probe.

use std::time::{Duration, Instant};

use super::message::Message;
use super::pair_tests::{END, LINK, LOST_AFTER, Pair};
use super::session::SessionKey;
use super::{DirectOutcome, DirectRequest, RailEvent};
use crate::device_memory::{LocalEnd, MemoryEnd};
use crate::error::ErrorKind;
use crate::host_buffer::HostBuffer;
use crate::refusal::Refusal;
use crate::region::{Region, RegionDescriptor, Rights};

/// The request of a hostile initiator.
const REQUEST: u64 = 77;
const FROM: MemoryEnd = MemoryEnd::Host;

fn ticket(region: &Region) -> (u64, u64) {
    let RegionDescriptor { number, ticket, .. } = *region.descriptor();
    (number, ticket)
}

impl Pair {
    fn session(&self) -> u64 {
        self.initiator.driver.initiator().session_id(LINK).unwrap()
    }

    fn request_direct(&mut self, region: &Region, timeout: Duration) {
        let (region, until) = (ticket(region), Instant::now() + timeout);
        let wanted = DirectRequest::new(region, LocalEnd::Host, true, until);
        self.initiator.driver.request_direct(LINK, wanted);
    }

    fn outcome(&self) -> Option<DirectOutcome> {
        self.initiator.events.iter().rev().find_map(|event| match event {
            RailEvent::Direct { outcome, .. } => Some(outcome.clone()),
            _ => None,
        })
    }

    /// The cause of the outcome, once there is one, without polling the target.
    fn cause(&mut self) -> String {
        while self.outcome().is_none() {
            self.initiator.poll_once();
        }
        match self.outcome() {
            Some(DirectOutcome::Granted { .. }) => "granted".to_owned(),
            Some(DirectOutcome::Refused { kind, cause }) => format!("{kind:?}: {cause}"),
            Some(DirectOutcome::Failed { cause, is_final: false }) => format!("not final: {cause}"),
            Some(DirectOutcome::Failed { cause, .. } | DirectOutcome::Lost { cause }) => cause,
            None => "none".to_owned(),
        }
    }

    fn counts(&self) -> (usize, usize, usize) {
        self.target.driver.target().probe_counts()
    }

    /// A message of an initiator.
    fn at_target(&mut self, session: u64, message: Message) {
        self.target.driver.handle_at_target(session, message);
    }

    /// Another initiator that has opened a region. Its address is the target's own.
    fn join_initiator(&mut self, session: u64, region: &Region) {
        let to = self.target.local_target.identity;
        let address = self.target.driver.address().to_vec();
        let (from, connection_id) = ([session as u8; 16], session);
        let label = format!("initiator {session}");
        self.at_target(session, Message::Hello { to, from, connection_id, label, address });
        let (region, ticket) = ticket(region);
        self.at_target(session, Message::Open { request: 1, region, ticket });
    }

    fn ask_at_target(&mut self, session: u64, region: &Region) {
        let (region, ticket) = ticket(region);
        let message =
            Message::RequestDirect { request: REQUEST, region, ticket, from: FROM, probes: true };
        self.at_target(session, message);
    }
}

#[test]
fn host_memory_passes_a_demanded_probe() {
    let (mut pair, regions) = Pair::with_regions(1);
    pair.request_direct(&regions[0], END);
    pair.until("no outcome", |pair| pair.outcome().is_some());
    let outcome = pair.outcome();
    let expected =
        matches!(outcome, Some(DirectOutcome::Granted { memory: None, is_probed: true }));
    assert!(expected, "{outcome:?}");
    assert_eq!(pair.counts(), (0, 0, 0));
    // Then it is granted without another probe, unless one is demanded.
    pair.initiator.events.clear();
    let (region, until) = (ticket(&regions[0]), Instant::now() + END);
    let wanted = DirectRequest::new(region, LocalEnd::Host, false, until);
    pair.initiator.driver.request_direct(LINK, wanted);
    pair.until("no outcome", |pair| pair.outcome().is_some());
    let outcome = pair.outcome();
    let expected =
        matches!(outcome, Some(DirectOutcome::Granted { memory: None, is_probed: false }));
    assert!(expected, "{outcome:?}");
}

#[test]
fn regions_that_are_unknown_or_not_opened_are_refused() {
    let (mut pair, regions) = Pair::with_regions(1);
    let session = pair.session();
    let buffer = HostBuffer::new(4096).unwrap();
    let other = pair.target.local_target.register(buffer.into(), Rights::ALL).unwrap();
    pair.ask_at_target(session, &other);
    let (region, ticket) = ticket(&regions[0]);
    let ticket = ticket ^ 1;
    let message =
        Message::RequestDirect { request: REQUEST, region, ticket, from: FROM, probes: false };
    pair.at_target(session, message);
    assert_eq!(pair.counts(), (0, 0, 0));
    // The initiator is told.
    pair.request_direct(&other, END);
    pair.until("no outcome", |pair| pair.outcome().is_some());
    assert_eq!(pair.cause(), "Denied: the region was not opened");
}

#[test]
fn initiators_that_do_not_follow_the_steps_lose_their_probe() {
    for number in 0..5 {
        let (mut pair, regions) = Pair::with_regions(1);
        let session = pair.session();
        pair.ask_at_target(session, &regions[0]);
        let (probe, _) = pair.target.driver.target().probe_of(session).unwrap();
        // Of another session, or about another probe.
        pair.join_initiator(900, &regions[0]);
        pair.at_target(900, Message::ProbePassed { probe });
        pair.at_target(session, Message::ProbePassed { probe: probe ^ 1 });
        pair.at_target(session, Message::ProbeWritten { probe: probe ^ 1, step: 0 });
        assert_eq!(pair.counts(), (1, 0, 0));
        let hostile = match number {
            0 => Message::ProbeWritten { probe, step: 1 },
            1 => Message::ProbeWritten { probe, step: u32::MAX },
            // The first step is a write.
            2 => Message::RequestProbeFill { probe, step: 0 },
            3 => Message::ProbePassed { probe },
            _ => {
                let message = Message::ProbeWritten { probe, step: 0 };
                pair.at_target(session, message.clone());
                assert_eq!(pair.counts(), (1, 0, 0));
                // While the target still looks.
                message
            }
        };
        pair.at_target(session, hostile.clone());
        assert_eq!(pair.counts(), (0, 0, 1), "{hostile:?}");
        // The session goes on.
        pair.request_direct(&regions[0], END);
        pair.until("no outcome", |pair| pair.outcome().is_some());
        assert_eq!(pair.cause(), "granted");
    }
}

/// The bytes are not there: the initiator only claims that it wrote them.
#[test]
fn bytes_that_were_not_written_are_found() {
    let (mut pair, regions) = Pair::with_regions(1);
    let session = pair.session();
    pair.ask_at_target(session, &regions[0]);
    let (probe, _) = pair.target.driver.target().probe_of(session).unwrap();
    pair.at_target(session, Message::ProbeWritten { probe, step: 0 });
    pair.until("the probe goes on", |pair| pair.counts() == (0, 0, 1));
}

#[test]
fn probes_wait_for_others_and_their_memory_is_bounded() {
    let (mut pair, regions) = Pair::with_regions(1);
    let region = &regions[0];
    for session in 1..=6 {
        pair.join_initiator(session, region);
        // The second request replaces the first one.
        pair.ask_at_target(session, region);
        if session > 2 {
            pair.ask_at_target(session, region);
        }
    }
    assert_eq!(pair.counts(), (2, 4, 0));
    let (probe, _) = pair.target.driver.target().probe_of(1).unwrap();
    pair.at_target(1, Message::ProbeAbandoned { probe });
    assert_eq!(pair.counts(), (2, 3, 1));
    assert!(pair.target.driver.target().probe_of(3).is_some(), "the first in the queue is next");
    for (session, expected) in [(2, (2, 2, 2)), (6, (2, 1, 2)), (3, (2, 0, 3))] {
        pair.target.driver.close_lost(SessionKey::Initiator(session), "a test");
        assert_eq!(pair.counts(), expected, "{session}");
    }
    // Initiators that do nothing more.
    pair.target.driver.check_initiators(Instant::now() + Duration::from_secs(21));
    assert_eq!(pair.counts(), (0, 0, 5));
    pair.target.driver.check_initiators(Instant::now() + Duration::from_secs(120));
    assert_eq!(pair.counts(), (0, 0, 0));
}

/// Late bytes could reach memory that is freed early: further probes are refused instead.
#[test]
fn quarantined_memory_is_not_freed_early() {
    let (mut pair, regions) = Pair::with_regions(1);
    let session = pair.session();
    for failed in 1..=8 {
        pair.ask_at_target(session, &regions[0]);
        let (probe, _) = pair.target.driver.target().probe_of(session).unwrap();
        pair.at_target(session, Message::ProbeAbandoned { probe });
        assert_eq!(pair.counts(), (0, 0, failed));
    }
    pair.request_direct(&regions[0], END);
    pair.until("no outcome", |pair| pair.outcome().is_some());
    assert_eq!(pair.cause(), "TooMany: too many probes failed at the peer within a minute");
    assert_eq!(pair.counts(), (0, 0, 8));
    pair.target.driver.check_initiators(Instant::now() + Duration::from_secs(120));
    pair.initiator.events.clear();
    pair.request_direct(&regions[0], END);
    pair.until("no outcome", |pair| pair.outcome().is_some());
    assert_eq!(pair.cause(), "granted");
}

/// What a target may send instead of the right answer.
fn hostile_answers(pair: &Pair, request: u64, short: &[u8]) -> Vec<(Vec<Message>, &'static str)> {
    let (probe, step) = (5, 0);
    let (_, memory) = pair.target.driver.target().probe_of(pair.session()).unwrap();
    let ready = Message::ProbeReady { request, probe, memory };
    let with = |memory: &[u8]| Message::ProbeReady { request, probe, memory: memory.to_vec() };
    let failure = Some(Refusal::new(ErrorKind::Failed, "8 bytes arrived late"));
    vec![
        (vec![with(&[1; 90])], "not final: probe device memory failed"),
        (vec![with(short)], "the memory of the peer is too short"),
        (
            vec![ready.clone(), Message::Direct { request, memory: Vec::new() }],
            "the peer ended the probe too early",
        ),
        (
            vec![ready.clone(), Message::ProbeChecked { probe, step, failure: None }],
            "the peer looked at another step",
        ),
        (vec![ready.clone(), Message::ProbeFilled { probe, step }], "the peer filled another step"),
        (
            // The second offer is ignored.
            vec![ready.clone(), with(short), Message::ProbeChecked { probe, step, failure }],
            "the peer looked at another step",
        ),
        (vec![Message::Direct { request, memory: vec![1; 90] }], "Malformed: its key is unusable"),
        (
            vec![Message::Refused { request, refusal: Refusal::new(ErrorKind::NoPath, "no") }],
            "NoPath: no",
        ),
    ]
}

#[test]
fn targets_that_do_not_follow_the_steps_get_no_access() {
    let count = {
        let (mut pair, regions) = Pair::with_regions(1);
        let session = pair.session();
        pair.ask_at_target(session, &regions[0]);
        hostile_answers(&pair, 1, &[]).len()
    };
    for number in 0..count {
        let (mut pair, regions) = Pair::with_regions(1);
        let session = pair.session();
        pair.ask_at_target(session, &regions[0]);
        let little = pair.target.driver.register(&HostBuffer::new(4096).unwrap());
        let short = little.describe().unwrap().encode();
        pair.request_direct(&regions[0], END);
        let request = pair.initiator.driver.initiator().direct_requests()[0];
        let (messages, expected) = hostile_answers(&pair, request, &short).swap_remove(number);
        for message in messages {
            // Messages of another session are ignored.
            pair.initiator.driver.handle_at_initiator(session ^ 1, message.clone());
            pair.initiator.driver.handle_at_initiator(session, message);
        }
        let cause = pair.cause();
        assert!(cause.starts_with(expected), "{number}: {cause}");
        assert!(pair.initiator.driver.initiator().direct_requests().is_empty());
    }
}

#[test]
fn silent_and_lost_targets_are_reported() {
    let (mut pair, regions) = Pair::with_regions(1);
    pair.request_direct(&regions[0], Duration::from_millis(20));
    assert_eq!(pair.cause(), "not final: the peer did not answer in time");
    pair.initiator.events.clear();
    pair.request_direct(&regions[0], LOST_AFTER);
    pair.initiator.driver.close_lost(SessionKey::Link(LINK), "it does not answer");
    assert_eq!(pair.cause(), "it does not answer");
    // Not connected any more.
    pair.initiator.events.clear();
    pair.request_direct(&regions[0], LOST_AFTER);
    assert_eq!(pair.cause(), "the peer is not connected");
}
