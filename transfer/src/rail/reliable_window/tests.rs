//! Two sides, and a network that loses, duplicates and reorders frames, and drops all frames in
//! flight when it breaks.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_millis(400);

fn reliable_window() -> ReliableWindow<u32> {
    ReliableWindow::new(FIRST, LONGEST)
}

/// A frame in flight: an optional numbered message, and the acknowledged number.
#[derive(Debug, Clone, Copy)]
struct Frame {
    sent: Option<(u64, u32)>,
    acknowledged: u64,
}

struct Side {
    reliable_window: ReliableWindow<u32>,
    sent: u32,
    received: Vec<u32>,
    in_flight: Vec<Frame>,
}

impl Side {
    fn new() -> Self {
        Self {
            reliable_window: reliable_window(),
            sent: 0,
            received: Vec::new(),
            in_flight: Vec::new(),
        }
    }

    fn send_message(&mut self, now: Instant) {
        if let Some(number) = self.reliable_window.send_message(self.sent, now) {
            let frame = Frame {
                sent: Some((number, self.sent)),
                acknowledged: self.reliable_window.acknowledge(),
            };
            self.sent += 1;
            self.in_flight.push(frame);
        }
    }

    fn poll(&mut self, now: Instant) {
        let due_retransmits: Vec<_> = self
            .reliable_window
            .due_retransmits(now)
            .map(|(number, message)| (number, *message))
            .collect();
        for sent in due_retransmits {
            let frame =
                Frame { sent: Some(sent), acknowledged: self.reliable_window.acknowledge() };
            self.in_flight.push(frame);
        }
        if self.reliable_window.ack_is_due(now) {
            let frame = Frame { sent: None, acknowledged: self.reliable_window.acknowledge() };
            self.in_flight.push(frame);
        }
    }

    fn receive(&mut self, frame: Frame, now: Instant) {
        self.reliable_window.acknowledge_up_to(frame.acknowledged).unwrap();
        if let Some((number, message)) = frame.sent {
            self.received.extend(self.reliable_window.receive(number, message, now).unwrap());
        }
        while let Some(message) = self.reliable_window.next_in_order() {
            self.received.push(message);
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Send(bool),
    /// Any frame in flight arrives.
    Arrive(bool, prop::sample::Index),
    /// A frame is lost, or duplicated.
    Lose(bool, prop::sample::Index),
    Duplicate(bool, prop::sample::Index),
    /// The connection breaks, and all frames in flight are lost. One side may detect it.
    Break(bool),
    Wait(u16),
}

fn step() -> impl Strategy<Value = Step> {
    let which = any::<prop::sample::Index>;
    prop_oneof![
        6 => any::<bool>().prop_map(Step::Send),
        8 => (any::<bool>(), which()).prop_map(|(side, at)| Step::Arrive(side, at)),
        2 => (any::<bool>(), which()).prop_map(|(side, at)| Step::Lose(side, at)),
        2 => (any::<bool>(), which()).prop_map(|(side, at)| Step::Duplicate(side, at)),
        1 => any::<bool>().prop_map(Step::Break),
        3 => (0_u16..300).prop_map(Step::Wait),
    ]
}

proptest! {
    #[test]
    fn messages_are_delivered_once_and_in_order(steps in proptest::collection::vec(step(), 0..400)) {
        let mut now = Instant::now();
        let mut sides = [Side::new(), Side::new()];
        for step in steps {
            match step {
                Step::Send(side) => sides[usize::from(side)].send_message(now),
                Step::Arrive(side, at) => {
                    let from = usize::from(side);
                    if !sides[from].in_flight.is_empty() {
                        let at = at.index(sides[from].in_flight.len());
                        let frame = sides[from].in_flight.swap_remove(at);
                        sides[1 - from].receive(frame, now);
                    }
                }
                Step::Lose(side, at) => {
                    let in_flight = &mut sides[usize::from(side)].in_flight;
                    if !in_flight.is_empty() {
                        in_flight.swap_remove(at.index(in_flight.len()));
                    }
                }
                Step::Duplicate(side, at) => {
                    let in_flight = &mut sides[usize::from(side)].in_flight;
                    if !in_flight.is_empty() {
                        in_flight.push(in_flight[at.index(in_flight.len())]);
                    }
                }
                Step::Break(side) => {
                    sides.iter_mut().for_each(|side| side.in_flight.clear());
                    sides[usize::from(side)].reliable_window.retransmit_soon(now);
                }
                Step::Wait(milliseconds) => {
                    now += Duration::from_millis(milliseconds.into());
                    sides.iter_mut().for_each(|side| side.poll(now));
                }
            }
            for side in &sides {
                prop_assert!(side.received.iter().copied().eq(0..side.received.len() as u32));
            }
        }
        // Without further losses all messages are acknowledged, and the sides become silent.
        for _ in 0..6 {
            now += LONGEST;
            sides.iter_mut().for_each(|side| side.poll(now));
            for from in [0, 1] {
                for frame in std::mem::take(&mut sides[from].in_flight) {
                    sides[1 - from].receive(frame, now);
                }
            }
        }
        for from in [0, 1] {
            prop_assert_eq!(sides[1 - from].received.len() as u32, sides[from].sent);
            prop_assert!(sides[from].reliable_window.unacknowledged.is_empty());
        }
    }

    #[test]
    fn any_numbers_never_panic_nor_exceed_the_window(
        numbers in proptest::collection::vec((any::<u64>(), any::<u64>()), 0..100),
        near in proptest::collection::vec((0_u64..2000, 0_u64..5), 0..2000),
    ) {
        let now = Instant::now();
        let mut reliable_window = reliable_window();
        reliable_window.send_message(1, now).unwrap();
        for (number, acknowledged) in numbers.into_iter().chain(near) {
            let _ = reliable_window.acknowledge_up_to(acknowledged);
            let _ = reliable_window.receive(number, 5, now);
            prop_assert!(reliable_window.out_of_order.len() <= MAX_UNACKNOWLEDGED);
        }
    }
}

#[test]
fn acknowledging_an_unsent_message_is_a_violation() {
    let now = Instant::now();
    let mut reliable_window = reliable_window();
    assert_eq!(reliable_window.acknowledge_up_to(0), Ok(()));
    assert_eq!(reliable_window.acknowledge_up_to(1), Err(ProtocolViolation::Acknowledged));
    assert_eq!(reliable_window.send_message(7, now), Some(1));
    assert_eq!(reliable_window.acknowledge_up_to(1), Ok(()));
    assert_eq!(reliable_window.acknowledge_up_to(u64::MAX), Err(ProtocolViolation::Acknowledged));
}

#[test]
fn sending_beyond_the_window_is_a_violation() {
    let now = Instant::now();
    let mut reliable_window = reliable_window();
    let window_size = MAX_UNACKNOWLEDGED as u64;
    assert_eq!(reliable_window.receive(window_size, 7, now), Ok(None));
    assert_eq!(reliable_window.receive(window_size + 1, 7, now), Err(ProtocolViolation::Sent));
    assert_eq!(reliable_window.next_in_order(), None, "the first is missing");
}

#[test]
fn full_window_refuses_messages() {
    let now = Instant::now();
    let mut reliable_window = reliable_window();
    let sent =
        (0..).take_while(|number| reliable_window.send_message(*number, now).is_some()).count();
    assert_eq!(sent, MAX_UNACKNOWLEDGED);
    reliable_window.acknowledge_up_to(1).unwrap();
    assert!(reliable_window.send_message(0, now).is_some());
}

#[test]
fn pauses_grow_and_a_detected_loss_shortens_them() {
    let start = Instant::now();
    let mut reliable_window = reliable_window();
    reliable_window.send_message(7, start).unwrap();
    let times: Vec<_> = (0..2000)
        .filter(|ms| {
            reliable_window.due_retransmits(start + Duration::from_millis(*ms)).count() > 0
        })
        .collect();
    assert_eq!(times, [100, 300, 700, 1100, 1500, 1900]);
    let now = start + Duration::from_millis(2000);
    assert_eq!(reliable_window.due_retransmits(now).count(), 0);
    reliable_window.retransmit_soon(now);
    assert_eq!(reliable_window.due_retransmits(now).next(), Some((1, &7)));
}

#[test]
fn acknowledgement_is_due_after_a_delay_or_many_messages() {
    let now = Instant::now();
    let mut reliable_window = reliable_window();
    assert_eq!(reliable_window.receive(1, 7, now), Ok(Some(7)));
    assert!(!reliable_window.ack_is_due(now) && reliable_window.ack_is_due(now + MAX_ACK_DELAY));
    assert_eq!((reliable_window.next_in_order(), reliable_window.acknowledge()), (None, 1));
    assert!(!reliable_window.ack_is_due(now + MAX_ACK_DELAY));
    for number in 2..=17 {
        reliable_window.receive(number, 7, now).unwrap();
    }
    assert!(reliable_window.ack_is_due(now), "many messages received");
    reliable_window.acknowledge();
    reliable_window.receive(5, 7, now).unwrap();
    assert!(reliable_window.ack_is_due(now + MAX_ACK_DELAY), "its acknowledgement may be lost");
}
