//! Two sides, and a network between them that loses, doubles and reorders, and forgets all that is on
//! its way when it breaks.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_millis(400);

fn hearing() -> Hearing<u32> {
    Hearing::new(FIRST, LONGEST)
}

/// What is on its way: a number, or none, what is said, and up to where the other was heard.
#[derive(Debug, Clone, Copy)]
struct Frame {
    said: Option<(u64, u32)>,
    heard: u64,
}

struct Side {
    hearing: Hearing<u32>,
    said: u32,
    taken: Vec<u32>,
    way: Vec<Frame>,
}

impl Side {
    fn new() -> Self {
        Self { hearing: hearing(), said: 0, taken: Vec::new(), way: Vec::new() }
    }

    fn say(&mut self, now: Instant) {
        if let Some(number) = self.hearing.say(self.said, now) {
            let frame = Frame { said: Some((number, self.said)), heard: self.hearing.answer() };
            self.said += 1;
            self.way.push(frame);
        }
    }

    fn look(&mut self, now: Instant) {
        let again: Vec<_> =
            self.hearing.again(now).map(|(number, message)| (number, *message)).collect();
        for said in again {
            let frame = Frame { said: Some(said), heard: self.hearing.answer() };
            self.way.push(frame);
        }
        if self.hearing.owes(now) {
            let frame = Frame { said: None, heard: self.hearing.answer() };
            self.way.push(frame);
        }
    }

    fn hear(&mut self, frame: Frame, now: Instant) {
        self.hearing.is_heard(frame.heard).unwrap();
        if let Some((number, message)) = frame.said {
            self.taken.extend(self.hearing.hear(number, message, now).unwrap());
        }
        while let Some(message) = self.hearing.take() {
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
                Step::Say(side) => sides[usize::from(side)].say(now),
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
                    sides[usize::from(side)].hearing.hurry(now);
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
            prop_assert_eq!(sides[1 - from].taken.len() as u32, sides[from].said);
            prop_assert!(sides[from].hearing.unheard.is_empty());
        }
    }

    #[test]
    fn numbers_from_outside_never_panic_and_never_take_more_than_can_be(
        numbers in proptest::collection::vec((any::<u64>(), any::<u64>()), 0..100),
        near in proptest::collection::vec((0_u64..2000, 0_u64..5), 0..2000),
    ) {
        let now = Instant::now();
        let mut hearing = hearing();
        hearing.say(1, now).unwrap();
        for (number, heard) in numbers.into_iter().chain(near) {
            let _ = hearing.is_heard(heard);
            let _ = hearing.hear(number, 5, now);
            prop_assert!(hearing.early.len() <= MOST_UNHEARD);
        }
    }
}

#[test]
fn who_hears_what_was_not_said_lies() {
    let now = Instant::now();
    let mut hearing = hearing();
    assert_eq!(hearing.is_heard(0), Ok(()));
    assert_eq!(hearing.is_heard(1), Err(Lie::Heard));
    assert_eq!(hearing.say(7, now), Some(1));
    assert_eq!(hearing.is_heard(1), Ok(()));
    assert_eq!(hearing.is_heard(u64::MAX), Err(Lie::Heard));
}

#[test]
fn who_says_more_than_may_be_on_its_way_lies() {
    let now = Instant::now();
    let mut hearing = hearing();
    let most = MOST_UNHEARD as u64;
    assert_eq!(hearing.hear(most, 7, now), Ok(None));
    assert_eq!(hearing.hear(most + 1, 7, now), Err(Lie::Said));
    assert_eq!(hearing.take(), None, "the first is missing");
}

#[test]
fn there_is_an_end_to_what_may_be_unheard() {
    let now = Instant::now();
    let mut hearing = hearing();
    let said = (0..).take_while(|number| hearing.say(*number, now).is_some()).count();
    assert_eq!(said, MOST_UNHEARD);
    hearing.is_heard(1).unwrap();
    assert!(hearing.say(0, now).is_some());
}

#[test]
fn pauses_grow_and_what_is_known_to_be_lost_does_not_wait_for_them() {
    let start = Instant::now();
    let mut hearing = hearing();
    hearing.say(7, start).unwrap();
    let times: Vec<_> = (0..2000)
        .filter(|ms| hearing.again(start + Duration::from_millis(*ms)).count() > 0)
        .collect();
    assert_eq!(times, [100, 300, 700, 1100, 1500, 1900]);
    let now = start + Duration::from_millis(2000);
    assert_eq!(hearing.again(now).count(), 0);
    hearing.hurry(now);
    assert_eq!(hearing.again(now).next(), Some((1, &7)));
}

#[test]
fn what_came_is_told_after_a_while_or_when_it_is_much() {
    let now = Instant::now();
    let mut hearing = hearing();
    assert_eq!(hearing.hear(1, 7, now), Ok(Some(7)));
    assert!(!hearing.owes(now) && hearing.owes(now + LONGEST_OWED));
    assert_eq!((hearing.take(), hearing.answer()), (None, 1));
    assert!(!hearing.owes(now + LONGEST_OWED));
    for number in 2..=17 {
        hearing.hear(number, 7, now).unwrap();
    }
    assert!(hearing.owes(now), "many came");
    hearing.answer();
    hearing.hear(5, 7, now).unwrap();
    assert!(hearing.owes(now + LONGEST_OWED), "the answer to it was lost");
}
