//! The queue where others come between, at a moment that a test chooses.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::*;
use crate::participant::{Caller, Immortal};
use crate::words::LocalWords;

type Act = Box<dyn FnOnce()>;

/// Words of one who is interrupted: before each compare-and-exchange one of these happens.
#[derive(Clone)]
struct Interrupted {
    words: &'static LocalWords,
    acts: Rc<RefCell<VecDeque<Act>>>,
}

impl Words for Interrupted {
    fn count(&self) -> usize {
        self.words.count()
    }
    fn load(&self, at: usize, order: Ordering) -> u64 {
        self.words.load(at, order)
    }
    fn store(&self, at: usize, value: u64, order: Ordering) {
        self.words.store(at, value, order);
    }
    fn compare_exchange(&self, at: usize, current: u64, new: u64) -> std::result::Result<u64, u64> {
        let act = self.acts.borrow_mut().pop_front();
        if let Some(act) = act {
            act();
        }
        self.words.compare_exchange(at, current, new)
    }
    fn swap(&self, at: usize, value: u64) -> u64 {
        self.words.swap(at, value)
    }
    fn fetch_and(&self, at: usize, bits: u64) -> u64 {
        self.words.fetch_and(at, bits)
    }
    fn fetch_or(&self, at: usize, bits: u64) -> u64 {
        self.words.fetch_or(at, bits)
    }
    fn fetch_add(&self, at: usize, value: u64) -> u64 {
        self.words.fetch_add(at, value)
    }
    fn sleep(&self, at: usize, low: u32, longest: Duration) {
        self.words.sleep(at, low, longest);
    }
    fn wake(&self, at: usize, how_many: u32) {
        self.words.wake(at, how_many);
    }
    fn pause(&self) {
        self.words.pause();
    }
    fn fence(&self) {
        self.words.fence();
    }
}

#[test]
fn one_removed_while_it_claims_another_entry_leaves_no_mark() {
    let setup = QueueSetup { depth: 2, when_full: WhenFull::DropOldest };
    let words = LocalWords::zeroed(Queue::<Interrupted, 1>::words_needed(setup));
    let words: &'static LocalWords = Box::leak(Box::new(words));
    let acts: Rc<RefCell<VecDeque<Act>>> = Rc::default();
    let interrupted = Interrupted { words, acts: Rc::clone(&acts) };
    let others = || Queue::<_, 1>::attach(words).unwrap();
    let queue = Queue::<_, 1>::format(interrupted, setup).unwrap();
    let me = Caller::new(Participant::new(0, 1).unwrap(), &Immortal);
    let mut reader = queue.subscribe(&me).unwrap();
    let bystander = queue.subscribe(&me).unwrap();
    queue.publish(&me, [0], |_| {}).unwrap();
    // It claims what is in the slot, which has come round to another entry; and when it finds
    // out and puts that back, it is removed.
    let (first, second, seat) = (others(), others(), reader.seat());
    acts.borrow_mut().push_back(Box::new(move || {
        let me = Caller::new(Participant::new(1, 1).unwrap(), &Immortal);
        while first.position() <= first.slots {
            first.publish(&me, [1], |_| {}).unwrap();
        }
    }));
    acts.borrow_mut().push_back(Box::new(move || {
        let me = Caller::new(Participant::new(1, 1).unwrap(), &Immortal);
        second.evict(&me, seat, |_| {}).unwrap();
    }));
    assert_eq!(queue.take(&mut reader), None);
    assert!(acts.borrow().is_empty(), "all of it came between");
    let marks = layout::waiting(seat.place) | layout::holding(seat.place);
    let marked = (0..queue.slots).map(|slot| queue.words.load(queue.slot(slot), Acquire) & marks);
    assert_eq!(marked.fold(0, |all, marks| all | marks), 0);
    assert!(queue.is_subscribed(&bystander));
}
