//! The queue with interleavings at moments that a test chooses.

use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::*;
use crate::doorbell::WaitStrategy;
use crate::participant::{AlwaysAlive, Caller};
use crate::words::LocalWords;

type Act = Box<dyn FnOnce()>;

/// Words of an interrupted thread: one of these actions runs before each compare-and-exchange.
#[derive(Clone)]
struct InterleavedWords {
    words: &'static LocalWords,
    acts: Rc<RefCell<VecDeque<Act>>>,
}

impl Words for InterleavedWords {
    fn count(&self) -> usize {
        self.words.count()
    }
    fn word(&self, at: usize) -> Option<&AtomicU64> {
        self.words.word(at)
    }
    fn compare_exchange(&self, at: usize, current: u64, new: u64) -> std::result::Result<u64, u64> {
        let act = self.acts.borrow_mut().pop_front();
        if let Some(act) = act {
            act();
        }
        self.words.compare_exchange(at, current, new)
    }
}

type Acts = Rc<RefCell<VecDeque<Act>>>;

/// An empty queue of an interrupted thread, with the words for others, and its actions.
fn interrupted_queue(setup: QueueSetup) -> (&'static LocalWords, Acts, Queue<InterleavedWords, 1>) {
    let count = Queue::<InterleavedWords, 1>::required_words(setup);
    let words: &LocalWords = Box::leak(Box::new(LocalWords::zeroed(count)));
    let acts = Acts::default();
    let interrupted = InterleavedWords { words, acts: Rc::clone(&acts) };
    (words, acts, Queue::format(interrupted, setup).unwrap())
}

#[test]
fn removal_during_a_mistaken_claim_leaves_no_mark() {
    let setup = QueueSetup { depth: 2, max_held: 2, overflow_policy: OverflowPolicy::DropOldest };
    let (words, acts, queue) = interrupted_queue(setup);
    let others = || Queue::<_, 1>::attach(words).unwrap();
    let me = Caller::new(Participant::new(0, 1).unwrap(), &AlwaysAlive);
    let mut reader = queue.subscribe(&me).unwrap();
    let bystander = queue.subscribe(&me).unwrap();
    queue.publish(&me, [0], |_| {}).unwrap();
    // It claims the entry in the slot, which by then holds another entry. When it detects that
    // and reverts the claim, it is removed.
    let (first, second, subscription_id) = (others(), others(), reader.subscription_id());
    acts.borrow_mut().push_back(Box::new(move || {
        let me = Caller::new(Participant::new(1, 1).unwrap(), &AlwaysAlive);
        while first.position() <= first.depth {
            first.publish(&me, [1], |_| {}).unwrap();
        }
    }));
    acts.borrow_mut().push_back(Box::new(move || {
        let me = Caller::new(Participant::new(1, 1).unwrap(), &AlwaysAlive);
        second.evict(&me, subscription_id, |_| {}).unwrap();
    }));
    assert_eq!(queue.take(&mut reader), None);
    assert!(acts.borrow().is_empty(), "all actions have run");
    let marks = layout::marks(subscription_id.index());
    assert!(queue.entries_with(marks).next().is_none());
    assert!(queue.is_subscribed(&bystander));
}

/// A reader claims an entry of which the slot gets another one, and then another place: it reads that
/// entry in its turn.
#[test]
fn entry_claimed_by_mistake_is_read_in_its_turn() {
    let setup = QueueSetup { depth: 2, max_held: 2, overflow_policy: OverflowPolicy::DropOldest };
    let (words, acts, queue) = interrupted_queue(setup);
    let me = Caller::new(Participant::new(0, 1).unwrap(), &AlwaysAlive);
    let mut reader = queue.subscribe(&me).unwrap();
    let publish_until = |end| {
        let others = Queue::<_, 1>::attach(words).unwrap();
        Box::new(move || {
            let me = Caller::new(Participant::new(1, 1).unwrap(), &AlwaysAlive);
            while others.position() < end {
                others.publish(&me, [others.position()], |_| {}).unwrap();
            }
        }) as Act
    };
    publish_until(1)();
    // Before the claim entry 2 gets the slot, and before its revert entry 4 gets another one.
    acts.borrow_mut().extend([publish_until(3), publish_until(5)]);
    let mut missed = 0;
    for position in 2..5 {
        let taken = queue.take(&mut reader).unwrap();
        missed += taken.missed;
        assert_eq!((taken.entry, taken.position, missed), ([position], position, 2));
        assert_eq!(queue.release(&reader, position), Some([position]));
    }
    assert!(acts.borrow().is_empty(), "all actions have run");
    assert_eq!(queue.take(&mut reader), None);
    assert_eq!(queue.find_unreleased(0, |_| true), None);
}

/// Entries that others have not read yet stay when one of their subscribers stops.
#[test]
fn stopping_keeps_entries_that_others_have_not_read() {
    for overflow_policy in
        [OverflowPolicy::Reject, OverflowPolicy::DropOldest, OverflowPolicy::DropNewest]
    {
        let setup = QueueSetup { depth: 3, max_held: 3, overflow_policy };
        let words = LocalWords::zeroed(Queue::<LocalWords, 1>::required_words(setup));
        let queue = Queue::<_, 1>::format(words, setup).unwrap();
        let me = Caller::new(Participant::new(0, 1).unwrap(), &AlwaysAlive);
        let [mut reader, mut other] = [(); 2].map(|()| queue.subscribe(&me).unwrap());
        let publish = |value| queue.publish(&me, [value], |_| {}).unwrap();
        (0..2).for_each(|value| assert_eq!(publish(value).readers, 2));
        assert_eq!(queue.take(&mut reader).map(|taken| taken.entry), Some([0]));
        queue.stop(&me, &mut reader, |entry| panic!("{entry:?} was disposed of unread")).unwrap();
        assert_eq!(queue.take(&mut reader), None, "{overflow_policy:?}");
        // Nor does it miss entries that are published now.
        assert_eq!(publish(2).readers, 1);
        assert_eq!(queue.take(&mut reader), None, "{overflow_policy:?}");
        assert_eq!(reader.missed(), 0, "{overflow_policy:?}");
        for value in 0..3 {
            let taken = queue.take(&mut other).unwrap();
            assert_eq!((taken.entry, taken.missed), ([value], 0), "{overflow_policy:?}");
            let is_last = value > 0;
            assert_eq!(
                queue.release(&other, value).is_some(),
                is_last,
                "{overflow_policy:?}: {value}"
            );
        }
        assert_eq!(queue.release(&reader, 0), Some([0]), "the subscriber held the entry");
    }
}

/// Words that record which cache lines are read and written, and the previous owner of each.
#[derive(Clone)]
struct RecordedWords {
    words: &'static LocalWords,
    read: Rc<RefCell<BTreeSet<usize>>>,
    written: Rc<RefCell<BTreeSet<usize>>>,
}

impl RecordedWords {
    fn reads(&self, at: usize) -> &'static LocalWords {
        self.read.borrow_mut().insert(at / layout::LINE);
        self.words
    }

    fn writes(&self, at: usize) -> &'static LocalWords {
        self.written.borrow_mut().insert(at / layout::LINE);
        self.words
    }

    /// Lines that were read and not written, and lines that were written, since the last call.
    fn lines(&self) -> (Vec<usize>, Vec<usize>) {
        let written = std::mem::take(&mut *self.written.borrow_mut());
        let read = std::mem::take(&mut *self.read.borrow_mut());
        (read.difference(&written).copied().collect(), written.into_iter().collect())
    }
}

impl Words for RecordedWords {
    fn count(&self) -> usize {
        self.words.count()
    }
    fn word(&self, at: usize) -> Option<&AtomicU64> {
        self.words.word(at)
    }
    fn load(&self, at: usize, order: Ordering) -> u64 {
        self.reads(at).load(at, order)
    }
    fn store(&self, at: usize, value: u64, order: Ordering) {
        self.writes(at).store(at, value, order);
    }
    fn compare_exchange(&self, at: usize, current: u64, new: u64) -> std::result::Result<u64, u64> {
        self.writes(at).compare_exchange(at, current, new)
    }
    fn swap(&self, at: usize, value: u64) -> u64 {
        self.writes(at).swap(at, value)
    }
    fn fetch_and(&self, at: usize, bits: u64) -> u64 {
        self.writes(at).fetch_and(at, bits)
    }
    fn fetch_or(&self, at: usize, bits: u64) -> u64 {
        self.writes(at).fetch_or(at, bits)
    }
    fn fetch_add(&self, at: usize, value: u64) -> u64 {
        self.writes(at).fetch_add(at, value)
    }
}

/// The cost of a message is the number of transfers of cache lines between processors.
#[test]
fn entry_reaches_its_readers_in_one_cache_line() {
    const ENTRY: usize = 6;
    let setup = QueueSetup { depth: 2, max_held: 2, overflow_policy: OverflowPolicy::Reject };
    static WORDS: OnceLock<LocalWords> = OnceLock::new();
    let words = WORDS
        .get_or_init(|| LocalWords::zeroed(Queue::<RecordedWords, ENTRY>::required_words(setup)));
    let noted = RecordedWords { words, read: Rc::default(), written: Rc::default() };
    let queue = Queue::<_, ENTRY>::format(noted.clone(), setup).unwrap();
    let me = Caller::new(Participant::new(0, 1).unwrap(), &AlwaysAlive);
    let mut readers = [(); 3].map(|()| queue.subscribe(&me).unwrap());
    for position in 0..6 {
        let slot = queue.slot(position) / layout::LINE;
        // It rarely changes.
        let ring = layout::RING / layout::LINE;
        let marks = slot + 1;
        noted.lines();
        queue.publish(&me, [position; ENTRY], |_| {}).unwrap();
        let (lock, doorbell) = (layout::LOCK / layout::LINE, layout::MESSAGES / layout::LINE);
        let tail = layout::TAIL / layout::LINE;
        let (read, written) = noted.lines();
        assert_eq!((read, written), (vec![doorbell, ring], vec![lock, tail, slot, marks]));
        for reader in &mut readers {
            let own_line = layout::subscriber(reader.index(), 0) / layout::LINE;
            assert_eq!(queue.take(reader).unwrap().entry, [position; ENTRY]);
            let expected = (vec![ring, slot], vec![own_line]);
            assert_eq!(noted.lines(), expected, "entry, and its own line");
        }
        // The first readers release it while the others may not have seen it yet.
        for reader in &readers[..2] {
            assert_eq!(queue.release(reader, position), None);
            assert_eq!(noted.lines().1, [marks]);
        }
        assert!(queue.release(&readers[2], position).is_some());
        queue.mark_disposed(position);
        // The next publisher to this slot need not read the entry's line, while its readers do.
        let next = position + queue.depth;
        noted.lines();
        assert!(queue.was_disposed(queue.slot(next), next));
        assert_eq!(noted.lines().0, [ring, marks]);
    }
}

#[test]
fn entry_not_marked_as_disposed_is_checked() {
    let setup = QueueSetup { depth: 1, max_held: 1, overflow_policy: OverflowPolicy::Reject };
    let words = LocalWords::zeroed(Queue::<LocalWords, 1>::required_words(setup));
    let queue = Queue::<_, 1>::format(words, setup).unwrap();
    let me = Caller::new(Participant::new(0, 1).unwrap(), &AlwaysAlive);
    let mut reader = queue.subscribe(&me).unwrap();
    for position in 0..5 {
        let mut disposed = Vec::new();
        queue.publish(&me, [position], |entry: [u64; 1]| disposed.push(entry[0])).unwrap();
        // The reader of every second entry dies after it releases it.
        let expected = position.checked_sub(1).filter(|before| before % 2 == 0);
        assert_eq!(disposed, Vec::from_iter(expected));
        queue.take(&mut reader).unwrap();
        assert_eq!(queue.release(&reader, position), Some([position]));
        if position % 2 == 1 {
            queue.mark_disposed(position);
        }
    }
}

#[test]
fn woken_waiter_does_not_set_the_sleepers_flag() {
    let setup = QueueSetup { depth: 1, max_held: 1, overflow_policy: OverflowPolicy::Reject };
    let words = LocalWords::zeroed(Queue::<LocalWords, 1>::required_words(setup));
    let queue = Queue::<_, 1>::format(words, setup).unwrap();
    let me = Caller::new(Participant::new(0, 1).unwrap(), &AlwaysAlive);
    let mut reader = queue.subscribe(&me).unwrap();
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            reader.set_wait_strategy(WaitStrategy::Block);
            let far = Instant::now() + Duration::from_secs(60);
            queue.take_until(&mut reader, far).unwrap().entry
        });
        while queue.words.load(layout::MESSAGES + 1, Acquire) == 0 {
            std::thread::yield_now();
        }
        queue.publish(&me, [3], |_| {}).unwrap();
        assert_eq!(sleeper.join().unwrap(), [3]);
    });
    // The next publisher need not make a system call.
    assert_eq!(queue.words.load(layout::MESSAGES + 1, Acquire), 0);
}
