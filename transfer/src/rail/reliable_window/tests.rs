//! Two sides, and a network between them that loses, doubles and reorders, and forgets all that is on
//! its way when it breaks.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_millis(400);

fn reliable_window() -> ReliableWindow<u32> {
    ReliableWindow::new(FIRST, LONGEST)
}

/// What is on its way: a number, or none, what is said, and up to where the other was heard.
#[derive(Debug, Clone, Copy)]
struct Frame {
    sent: Option<(u64, u32)>,
    acknowledged: u64,
}

struct Side {
    reliable_window: ReliableWindow<u32>,
    sent: u32,
    taken: Vec<u32>,
    way: Vec<Frame>,
}

impl Side {
    fn new() -> Self {
        Self { reliable_window: reliable_window(), sent: 0, taken: Vec::new(), way: Vec::new() }
    }

    fn send_message(&mut self, now: Instant) {
        if let Some(number) = self.reliable_window.send_message(self.sent, now) {
            let frame = Frame {
                sent: Some((number, self.sent)),
                acknowledged: self.reliable_window.acknowledge(),
            };
            self.sent += 1;
            self.way.push(frame);
        }
    }

    fn look(&mut self, now: Instant) {
        let due_retransmits: Vec<_> = self
            .reliable_window
            .due_retransmits(now)
            .map(|(number, message)| (number, *message))
            .collect();
        for sent in due_retransmits {
            let frame =
                Frame { sent: Some(sent), acknowledged: self.reliable_window.acknowledge() };
            self.way.push(frame);
        }
        if self.reliable_window.ack_is_due(now) {
            let frame = Frame { sent: None, acknowledged: self.reliable_window.acknowledge() };
            self.way.push(frame);
        }
    }

    fn hear(&mut self, frame: Frame, now: Instant) {
        self.reliable_window.is_heard(frame.acknowledged).unwrap();
        if let Some((number, message)) = frame.sent {
            self.taken.extend(self.reliable_window.hear(number, message, now).unwrap());
        }
        while let Some(message) = self.reliable_window.take() {
            self.taken.push(message);
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Say(bool),
    /// One that is on its way arrives, whichever it is.
    Arrive(bool, prop::sample::Index),
    /// One is lost; one comes twice.
    Lose(bool, prop::sample::Index),
    Double(bool, prop::sample::Index),
    /// The connection breaks: nothing of what is on its way arrives. One side may hear of it.
    Break(bool),
    Wait(u16),
}

fn step() -> impl Strategy<Value = Step> {
    let which = any::<prop::sample::Index>;
    prop_oneof![
        6 => any::<bool>().prop_map(Step::Say),
        8 => (any::<bool>(), which()).prop_map(|(side, at)| Step::Arrive(side, at)),
        2 => (any::<bool>(), which()).prop_map(|(side, at)| Step::Lose(side, at)),
        2 => (any::<bool>(), which()).prop_map(|(side, at)| Step::Double(side, at)),
        1 => any::<bool>().prop_map(Step::Break),
        3 => (0_u16..300).prop_map(Step::Wait),
    ]
}

proptest! {
    #[test]
    fn all_is_taken_once_and_in_order(steps in proptest::collection::vec(step(), 0..400)) {
        let mut now = Instant::now();
        let mut sides = [Side::new(), Side::new()];
        for step in steps {
            match step {
                Step::Say(side) => sides[usize::from(side)].send_message(now),
                Step::Arrive(side, at) => {
                    let from = usize::from(side);
                    if !sides[from].way.is_empty() {
                        let at = at.index(sides[from].way.len());
                        let frame = sides[from].way.swap_remove(at);
                        sides[1 - from].hear(frame, now);
                    }
                }
                Step::Lose(side, at) => {
                    let way = &mut sides[usize::from(side)].way;
                    if !way.is_empty() {
                        way.swap_remove(at.index(way.len()));
                    }
                }
                Step::Double(side, at) => {
                    let way = &mut sides[usize::from(side)].way;
                    if !way.is_empty() {
                        way.push(way[at.index(way.len())]);
                    }
                }
                Step::Break(side) => {
                    sides.iter_mut().for_each(|side| side.way.clear());
                    sides[usize::from(side)].reliable_window.retransmit_soon(now);
                }
                Step::Wait(milliseconds) => {
                    now += Duration::from_millis(milliseconds.into());
                    sides.iter_mut().for_each(|side| side.look(now));
                }
            }
            for side in &sides {
                prop_assert!(side.taken.iter().copied().eq(0..side.taken.len() as u32));
            }
        }
        // Nothing is lost any more: all is heard, on both sides, and then nothing more is said.
        for _ in 0..6 {
            now += LONGEST;
            sides.iter_mut().for_each(|side| side.look(now));
            for from in [0, 1] {
                for frame in std::mem::take(&mut sides[from].way) {
                    sides[1 - from].hear(frame, now);
                }
            }
        }
        for from in [0, 1] {
            prop_assert_eq!(sides[1 - from].taken.len() as u32, sides[from].sent);
            prop_assert!(sides[from].reliable_window.unacknowledged.is_empty());
        }
    }

    #[test]
    fn numbers_from_outside_never_panic_and_never_take_more_than_can_be(
        numbers in proptest::collection::vec((any::<u64>(), any::<u64>()), 0..100),
        near in proptest::collection::vec((0_u64..2000, 0_u64..5), 0..2000),
    ) {
        let now = Instant::now();
        let mut reliable_window = reliable_window();
        reliable_window.send_message(1, now).unwrap();
        for (number, acknowledged) in numbers.into_iter().chain(near) {
            let _ = reliable_window.is_heard(acknowledged);
            let _ = reliable_window.hear(number, 5, now);
            prop_assert!(reliable_window.out_of_order.len() <= MAX_UNACKNOWLEDGED);
        }
    }
}

#[test]
fn who_hears_what_was_not_said_lies() {
    let now = Instant::now();
    let mut reliable_window = reliable_window();
    assert_eq!(reliable_window.is_heard(0), Ok(()));
    assert_eq!(reliable_window.is_heard(1), Err(ProtocolViolation::Acknowledged));
    assert_eq!(reliable_window.send_message(7, now), Some(1));
    assert_eq!(reliable_window.is_heard(1), Ok(()));
    assert_eq!(reliable_window.is_heard(u64::MAX), Err(ProtocolViolation::Acknowledged));
}

#[test]
fn who_says_more_than_may_be_on_its_way_lies() {
    let now = Instant::now();
    let mut reliable_window = reliable_window();
    let most = MAX_UNACKNOWLEDGED as u64;
    assert_eq!(reliable_window.hear(most, 7, now), Ok(None));
    assert_eq!(reliable_window.hear(most + 1, 7, now), Err(ProtocolViolation::Sent));
    assert_eq!(reliable_window.take(), None, "the first is missing");
}

#[test]
fn there_is_an_end_to_what_may_be_unheard() {
    let now = Instant::now();
    let mut reliable_window = reliable_window();
    let sent =
        (0..).take_while(|number| reliable_window.send_message(*number, now).is_some()).count();
    assert_eq!(sent, MAX_UNACKNOWLEDGED);
    reliable_window.is_heard(1).unwrap();
    assert!(reliable_window.send_message(0, now).is_some());
}

#[test]
fn pauses_grow_and_what_is_known_to_be_lost_does_not_wait_for_them() {
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
fn what_came_is_told_after_a_while_or_when_it_is_much() {
    let now = Instant::now();
    let mut reliable_window = reliable_window();
    assert_eq!(reliable_window.hear(1, 7, now), Ok(Some(7)));
    assert!(!reliable_window.ack_is_due(now) && reliable_window.ack_is_due(now + MAX_ACK_DELAY));
    assert_eq!((reliable_window.take(), reliable_window.acknowledge()), (None, 1));
    assert!(!reliable_window.ack_is_due(now + MAX_ACK_DELAY));
    for number in 2..=17 {
        reliable_window.hear(number, 7, now).unwrap();
    }
    assert!(reliable_window.ack_is_due(now), "many came");
    reliable_window.acknowledge();
    reliable_window.hear(5, 7, now).unwrap();
    assert!(reliable_window.ack_is_due(now + MAX_ACK_DELAY), "the answer to it was lost");
}
