//! The cache alone, and against one that looks through a list.

use std::rc::Rc;

use proptest::prelude::*;

use super::*;

type Registration = Rc<u32>;

impl Kept for Registration {
    fn is_used(&self) -> bool {
        Rc::strong_count(self) > 1
    }
}

fn cache(bytes: u64, count: usize) -> Cache<u8, Registration> {
    Cache::new(Limits { bytes, count })
}

fn found(cache: &mut Cache<u8, Registration>, wanted: u8) -> Option<u32> {
    cache.find(&wanted).map(|kept| **kept)
}

#[test]
fn what_was_kept_is_found_and_nothing_else() {
    let mut cache = cache(1000, 10);
    assert!(cache.keep(1, 100, Rc::new(7)));
    assert_eq!(found(&mut cache, 1), Some(7));
    assert_eq!(found(&mut cache, 2), None, "other memory");
    let counts = cache.counts();
    assert_eq!((counts.hits, counts.misses, counts.evictions), (1, 1, 0));
    assert_eq!((counts.bytes, counts.entries), (100, 1));
}

#[test]
fn what_was_not_used_for_longest_makes_room_and_what_is_used_stays() {
    let mut cache = cache(300, 3);
    let first = Rc::new(1);
    cache.keep(1, 100, Rc::clone(&first));
    cache.keep(2, 100, Rc::new(2));
    cache.keep(3, 100, Rc::new(3));
    assert_eq!(found(&mut cache, 2), Some(2));
    // The first is the oldest, and used; the second was used again.
    assert!(cache.keep(4, 100, Rc::new(4)));
    assert_eq!(found(&mut cache, 3), None);
    assert_eq!(found(&mut cache, 1), Some(1));
    assert_eq!(found(&mut cache, 2), Some(2));
    drop(first);
    assert!(cache.evict_unused());
    assert!(!cache.evict_unused());
    let counts = cache.counts();
    assert_eq!((counts.bytes, counts.entries, counts.evictions), (0, 0, 4));
}

#[test]
fn what_has_no_room_is_not_kept_and_nothing_goes_for_it() {
    let mut cache = cache(300, 2);
    cache.keep(1, 100, Rc::new(1));
    let second = Rc::new(2);
    cache.keep(2, 100, Rc::clone(&second));
    assert!(!cache.keep(3, 301, Rc::new(3)), "longer than all that may be kept");
    assert!(!cache.keep(3, 201, Rc::new(3)), "too long beside what is used");
    assert!(!cache.make_room(u64::MAX));
    assert_eq!((cache.counts().entries, cache.counts().evictions), (2, 0));
    assert!(cache.keep(3, 200, Rc::new(3)));
    assert_eq!(cache.counts().bytes, 300);
    let mut none = Cache::new(Limits { bytes: u64::MAX, count: 0 });
    assert!(!none.keep(1, 1, Rc::new(1)));
}

#[test]
fn memory_that_goes_is_not_found_again_and_its_registrations_are_dropped() {
    let mut cache = cache(1000, 10);
    let registration = Rc::new(1);
    let weak = Rc::downgrade(&registration);
    cache.keep(1, 100, registration);
    cache.keep(2, 100, Rc::new(3));
    cache.let_go(|owner, _| *owner == 1);
    assert!(weak.upgrade().is_none());
    // Its name is another memory's now.
    assert_eq!(found(&mut cache, 1), None);
    assert_eq!(found(&mut cache, 2), Some(3));
    let counts = cache.counts();
    assert_eq!((counts.bytes, counts.entries, counts.evictions), (100, 1, 0));
}

#[derive(Debug, Clone)]
enum Step {
    Want {
        owner: u8,
        uses: bool,
    },
    /// The oldest user is through with what it has.
    EndUse,
    Goes {
        owner: u8,
    },
    EvictUnused,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let want = (0..12_u8, any::<bool>()).prop_map(|(owner, uses)| Step::Want { owner, uses });
    let step = prop_oneof![
        8 => want,
        4 => Just(Step::EndUse),
        1 => (0..12_u8).prop_map(|owner| Step::Goes { owner }),
        1 => Just(Step::EvictUnused),
    ];
    proptest::collection::vec(step, 0..80)
}

/// So long is what an owner has, each time.
fn length_of(owner: u8) -> u64 {
    1 + 7 * u64::from(owner) % 40
}

/// What there is, the one first that was not used for longest.
#[derive(Default)]
struct Naive {
    all: Vec<(u8, Registration)>,
    counts: RegistrationCache,
}

impl Naive {
    fn has_room(
        &self,
        length: u64,
        limits: Limits,
        is_counted: impl Fn(&Registration) -> bool,
    ) -> bool {
        let counted: Vec<_> = self.all.iter().filter(|(_, kept)| is_counted(kept)).collect();
        let bytes: u64 = counted.iter().map(|(owner, _)| length_of(*owner)).sum();
        bytes + length <= limits.bytes && counted.len() < limits.count
    }

    fn evict(&mut self) -> bool {
        // One handle is here, and one in the cache.
        let unused = self.all.iter().position(|(_, kept)| Rc::strong_count(kept) == 2);
        unused.map(|at| self.all.remove(at)).inspect(|_| self.counts.evictions += 1).is_some()
    }
}

/// As the cache holds it: the model has a handle, too.
struct InCache(Registration);

impl Kept for InCache {
    fn is_used(&self) -> bool {
        Rc::strong_count(&self.0) > 2
    }
}

proptest! {
    #[test]
    fn it_does_what_a_list_would(
        steps in steps(),
        bytes in 0..120_u64,
        count in 0..6_usize,
    ) {
        let limits = Limits { bytes, count };
        let mut cache = Cache::<u8, InCache>::new(limits);
        let mut naive = Naive::default();
        let mut users = std::collections::VecDeque::new();
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Want { owner, uses } => {
                    let length = length_of(owner);
                    let has_any = naive.all.iter().any(|(other, _)| *other == owner);
                    let kept = match cache.find(&owner) {
                        Some(InCache(kept)) => {
                            let at = naive.all.iter().position(|(_, other)| Rc::ptr_eq(other, kept));
                            let found = naive.all.remove(at.expect("it was let go of before"));
                            prop_assert_eq!(found.0, owner);
                            naive.all.push(found);
                            naive.counts.hits += 1;
                            Rc::clone(kept)
                        }
                        None => {
                            prop_assert!(!has_any, "{:?} was there", owner);
                            naive.counts.misses += 1;
                            let kept = Rc::new(number as u32);
                            let fits = naive.has_room(length, limits, |kept| Rc::strong_count(kept) > 2);
                            // The model lets go first, so what it let go of is not used in the cache's eyes, too.
                            if fits {
                                while !naive.has_room(length, limits, |_| true) {
                                    prop_assert!(naive.evict());
                                }
                            }
                            prop_assert_eq!(cache.make_room(length), fits);
                            if fits {
                                naive.all.push((owner, Rc::clone(&kept)));
                            }
                            let is_kept = cache.keep(owner, length, InCache(Rc::clone(&kept)));
                            prop_assert_eq!(is_kept, fits);
                            kept
                        }
                    };
                    if uses {
                        users.push_back(kept);
                    }
                }
                Step::EndUse => drop(users.pop_front()),
                Step::Goes { owner } => {
                    cache.let_go(|other, _| *other == owner);
                    naive.all.retain(|(other, _)| *other != owner);
                }
                Step::EvictUnused => {
                    let mut has_any = false;
                    while naive.evict() {
                        has_any = true;
                    }
                    prop_assert_eq!(cache.evict_unused(), has_any);
                }
            }
            naive.counts.entries = naive.all.len() as u64;
            naive.counts.bytes = naive.all.iter().map(|(owner, _)| length_of(*owner)).sum();
            prop_assert_eq!(cache.counts(), naive.counts);
            prop_assert!(naive.counts.bytes <= bytes && naive.all.len() <= count);
        }
    }
}
