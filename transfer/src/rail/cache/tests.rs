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

fn span(owner: u8, range: Range<u64>) -> Span<u8> {
    Span { owner, range, access: Access::LOCAL }
}

fn cache(bytes: u64, count: usize) -> Cache<u8, Registration> {
    Cache::new(Limits { bytes, count })
}

fn found(cache: &mut Cache<u8, Registration>, wanted: &Span<u8>) -> Option<u32> {
    cache.find(wanted).map(|(kept, _)| **kept)
}

#[test]
fn what_contains_the_wanted_range_is_found_and_nothing_else() {
    let mut cache = cache(1000, 10);
    assert!(cache.keep(span(1, 100..200), Rc::new(7)));
    for inside in [100..200, 100..101, 199..200, 130..170] {
        assert_eq!(cache.find(&span(1, inside)).map(|(kept, at)| (**kept, at)), Some((7, 100)));
    }
    for outside in [99..200, 100..201, 0..1, 200..201, 50..300] {
        assert_eq!(found(&mut cache, &span(1, outside)), None);
    }
    assert_eq!(found(&mut cache, &span(2, 100..200)), None, "the same range of other memory");
    let counts = cache.counts();
    assert_eq!((counts.hits, counts.misses, counts.evictions), (4, 6, 0));
    assert_eq!((counts.bytes, counts.entries), (100, 1));
}

#[test]
fn a_shorter_one_that_begins_later_does_not_hide_a_longer_one() {
    let mut cache = cache(1000, 10);
    cache.keep(span(1, 0..500), Rc::new(1));
    cache.keep(span(1, 100..110), Rc::new(2));
    cache.keep(span(1, 100..105), Rc::new(3));
    assert_eq!(found(&mut cache, &span(1, 104..300)), Some(1));
    assert_eq!(found(&mut cache, &span(1, 100..110)), Some(2));
}

#[test]
fn rights_that_are_missing_are_a_miss() {
    let mut cache = cache(1000, 10);
    let with = |access| Span { access, ..span(1, 0..100) };
    cache.keep(with(Access::READ), Rc::new(1));
    assert_eq!(found(&mut cache, &with(Access::READ)), Some(1));
    assert_eq!(found(&mut cache, &with(Access::LOCAL)), None);
    cache.keep(with(Access::LOCAL), Rc::new(2));
    assert_eq!(found(&mut cache, &with(Access::LOCAL)), Some(2));
    assert_eq!(found(&mut cache, &with(Access::LOCAL | Access::REMOTE_READ)), None);
}

#[test]
fn what_was_not_used_for_longest_makes_room_and_what_is_used_stays() {
    let mut cache = cache(300, 3);
    let first = Rc::new(1);
    cache.keep(span(1, 0..100), Rc::clone(&first));
    cache.keep(span(2, 0..100), Rc::new(2));
    cache.keep(span(3, 0..100), Rc::new(3));
    assert_eq!(found(&mut cache, &span(2, 0..100)), Some(2));
    // The first is the oldest, and used; the second was used again.
    assert!(cache.keep(span(4, 0..100), Rc::new(4)));
    assert_eq!(found(&mut cache, &span(3, 0..100)), None);
    assert_eq!(found(&mut cache, &span(1, 0..100)), Some(1));
    assert_eq!(found(&mut cache, &span(2, 0..100)), Some(2));
    drop(first);
    assert!(cache.evict_unused());
    assert!(!cache.evict_unused());
    let counts = cache.counts();
    assert_eq!((counts.bytes, counts.entries, counts.evictions), (0, 0, 4));
}

#[test]
fn what_has_no_room_is_not_kept_and_nothing_goes_for_it() {
    let mut cache = cache(300, 2);
    cache.keep(span(1, 0..100), Rc::new(1));
    let second = Rc::new(2);
    cache.keep(span(2, 0..100), Rc::clone(&second));
    assert!(!cache.keep(span(3, 0..301), Rc::new(3)), "longer than all that may be kept");
    assert!(!cache.keep(span(3, 0..201), Rc::new(3)), "too long beside what is used");
    assert!(!cache.make_room(u64::MAX));
    assert_eq!((cache.counts().entries, cache.counts().evictions), (2, 0));
    assert!(cache.keep(span(3, 0..200), Rc::new(3)));
    assert_eq!(cache.counts().bytes, 300);
    let mut none = Cache::new(Limits { bytes: u64::MAX, count: 0 });
    assert!(!none.keep(span(1, 0..1), Rc::new(1)));
}

#[test]
fn memory_that_goes_is_not_found_again_and_its_registrations_are_dropped() {
    let mut cache = cache(1000, 10);
    let registration = Rc::new(1);
    let weak = Rc::downgrade(&registration);
    cache.keep(span(1, 0..100), registration);
    cache.keep(span(1, 200..300), Rc::new(2));
    cache.keep(span(2, 0..100), Rc::new(3));
    cache.let_go(|owner, _| *owner == 1);
    assert!(weak.upgrade().is_none());
    // Its name is another memory's now.
    assert_eq!(found(&mut cache, &span(1, 0..100)), None);
    assert_eq!(found(&mut cache, &span(2, 0..100)), Some(3));
    let counts = cache.counts();
    assert_eq!((counts.bytes, counts.entries, counts.evictions), (100, 1, 0));
}

#[derive(Debug, Clone)]
enum Step {
    Want {
        owner: u8,
        start: u64,
        length: u64,
        access: bool,
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
    let want = (0..3_u8, 0..40_u64, 1..40_u64, any::<bool>(), any::<bool>()).prop_map(
        |(owner, start, length, access, uses)| Step::Want { owner, start, length, access, uses },
    );
    let step = prop_oneof![
        8 => want,
        4 => Just(Step::EndUse),
        1 => (0..3_u8).prop_map(|owner| Step::Goes { owner }),
        1 => Just(Step::EvictUnused),
    ];
    proptest::collection::vec(step, 0..80)
}

/// What there is, the one first that was not used for longest.
#[derive(Default)]
struct Naive {
    all: Vec<(Span<u8>, Registration)>,
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
        let bytes: u64 = counted.iter().map(|(span, _)| span.length()).sum();
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
                Step::Want { owner, start, length, access, uses } => {
                    let access = if access { Access::LOCAL } else { Access::READ };
                    let wanted = Span { owner, range: start..start + length, access };
                    let contains = |(span, _): &(Span<u8>, Registration)| {
                        span.owner == owner
                            && span.range.start <= start
                            && span.range.end >= start + length
                            && span.access.contains(access)
                    };
                    let has_any = naive.all.iter().any(contains);
                    let kept = match cache.find(&wanted) {
                        Some((InCache(kept), begins)) => {
                            let at = naive.all.iter().position(|(_, other)| Rc::ptr_eq(other, kept));
                            let found = naive.all.remove(at.expect("it was let go of before"));
                            prop_assert!(contains(&found));
                            prop_assert_eq!(found.0.range.start, begins);
                            naive.all.push(found);
                            naive.counts.hits += 1;
                            Rc::clone(kept)
                        }
                        None => {
                            prop_assert!(!has_any, "{:?} was there", wanted);
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
                                naive.all.push((wanted.clone(), Rc::clone(&kept)));
                            }
                            let is_kept = cache.keep(wanted, InCache(Rc::clone(&kept)));
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
                    naive.all.retain(|(span, _)| span.owner != owner);
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
            naive.counts.bytes = naive.all.iter().map(|(span, _)| span.length()).sum();
            prop_assert_eq!(cache.counts(), naive.counts);
            prop_assert!(naive.counts.bytes <= bytes && naive.all.len() <= count);
        }
    }
}
