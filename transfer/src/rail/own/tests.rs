//! What is kept for own use, and what makes room.

use fabric::{Caps, Domain, EndpointKind, Query};

use super::*;
use crate::rail::Limits;

struct World {
    own: OwnUse,
    domain: Domain,
}

impl World {
    fn new(bytes: u64, count: usize) -> Self {
        let query = Query::new(EndpointKind::Rdm).caps(Caps::MESSAGE | Caps::RMA);
        let query = query.source("127.0.0.1");
        let offer = query.clone().provider("tcp").first();
        let offer = offer.or_else(|_| query.provider("net").first()).unwrap();
        let domain = Domain::open(&offer).unwrap();
        let kept = Limits { bytes, count };
        let settings = Settings { kept, always_registers: true, ..Settings::default() };
        Self { own: OwnUse::new(&settings, domain.capabilities()), domain }
    }

    /// Makes room and keeps a registration, as a [line](Line) does. What is given back is a use of it.
    fn keep(&mut self, length: u64) -> Option<(Owner, MemoryRegion)> {
        let buffer = Buffer::Host(HostBuffer::new(length).unwrap());
        let (owner, buffer) = (Owner::of(&buffer), Arc::new(buffer));
        let options = self.own.options.clone().unwrap();
        let region = memory::register(&self.domain, Arc::clone(&buffer), options).unwrap();
        let before = self.own.kept.len();
        self.own.keep(owner, region.clone(), buffer);
        assert!(self.own.kept.len() <= before + 1);
        self.own.kept.contains_key(&owner).then_some((owner, region))
    }

    fn has(&self, owner: Owner) -> bool {
        self.own.kept.contains_key(&owner)
    }
}

#[test]
fn what_was_unused_longest_makes_room_and_what_is_used_stays() {
    for (bytes, count) in [(3 * 4096, 100), (u64::MAX, 3)] {
        let mut world = World::new(bytes, count);
        let (first, is_used) = world.keep(4096).unwrap();
        let [second, third] = [(); 2].map(|()| world.keep(4096).unwrap().0);
        assert!(world.own.find(second).is_some());
        // The first is the oldest, and used; the second was used again.
        let fourth = world.keep(4096).unwrap().0;
        assert!(!world.has(third) && world.own.find(third).is_none());
        assert!(world.has(first) && world.has(second) && world.has(fourth));
        // For more than one at a time.
        if count > 3 {
            assert!(world.own.make_room(8192));
            assert!(world.has(first) && !world.has(second) && !world.has(fourth));
        }
        drop(is_used);
        assert!(world.own.evict_unused());
        assert!(!world.own.evict_unused() && world.own.kept.is_empty());
    }
}

#[test]
fn what_is_used_is_never_evicted() {
    let mut world = World::new(u64::MAX, 2);
    let uses = [(); 2].map(|()| world.keep(4096).unwrap());
    assert!(world.keep(4096).is_none());
    assert!(!world.own.evict_unused());
    assert!(uses.iter().all(|(owner, _)| world.has(*owner)));
    drop(uses);
    assert!(world.keep(4096).is_some());
    assert_eq!(world.own.kept.len(), 2);
}

#[test]
fn what_has_no_room_is_not_kept_and_nothing_goes_for_it() {
    let mut world = World::new(3 * 4096, 2);
    let (first, is_used) = world.keep(4096).unwrap();
    let second = world.keep(4096).unwrap().0;
    // Longer than all that may be kept, too long beside what is used, and beyond all numbers.
    assert!(world.keep(4 * 4096).is_none() && world.keep(3 * 4096).is_none());
    assert!(!world.own.make_room(u64::MAX));
    assert!(world.has(first) && world.has(second));
    assert!(world.keep(2 * 4096).is_some());
    assert!(world.has(first) && !world.has(second));
    drop(is_used);
    assert!(World::new(u64::MAX, 0).keep(4096).is_none());
    // A rail that has ended keeps nothing.
    world.own.end();
    assert!(world.own.kept.is_empty() && world.keep(4096).is_none());
}
