//! Cached registrations, and their eviction.

use fabric::{Caps, Domain, EndpointKind, Query};

use super::*;
use crate::host_buffer::HostBuffer;
use crate::rail::CacheLimits;

struct World {
    registration_cache: RegistrationCache,
    domain: Domain,
}

impl World {
    fn new(bytes: u64, count: usize) -> Self {
        let query = Query::new(EndpointKind::Rdm).caps(Caps::MESSAGE | Caps::RMA);
        let query = query.source("127.0.0.1");
        let offer = query.clone().provider("tcp").first();
        let offer = offer.or_else(|_| query.provider("net").first()).unwrap();
        let domain = Domain::open(&offer).unwrap();
        let cached = CacheLimits { bytes, count };
        let settings = RailOptions { cached, always_registers: true, ..RailOptions::default() };
        Self {
            registration_cache: RegistrationCache::new(&settings, domain.capabilities()),
            domain,
        }
    }

    /// Makes room and caches a registration, as [`RailHandle`] does. The returned handle counts as
    /// a use.
    fn insert(&mut self, length: u64) -> Option<(BufferKey, MemoryRegion)> {
        let buffer = Buffer::Host(HostBuffer::new(length).unwrap());
        let (key, buffer) = (BufferKey::of(&buffer), Arc::new(buffer));
        assert!(self.registration_cache.is_used());
        let options = RegistrationOptions::new(Access::LOCAL);
        let region = registration::register(&self.domain, Arc::clone(&buffer), options).unwrap();
        let before = self.registration_cache.cached.len();
        self.registration_cache.insert(key, region.clone(), buffer);
        assert!(self.registration_cache.cached.len() <= before + 1);
        self.registration_cache.cached.contains_key(&key).then_some((key, region))
    }

    fn has(&self, key: BufferKey) -> bool {
        self.registration_cache.cached.contains_key(&key)
    }
}

#[test]
fn least_recently_used_is_evicted_and_used_stay() {
    for (bytes, count) in [(3 * 4096, 100), (u64::MAX, 3)] {
        let mut world = World::new(bytes, count);
        let (first, is_used) = world.insert(4096).unwrap();
        let [second, third] = [(); 2].map(|()| world.insert(4096).unwrap().0);
        assert!(world.registration_cache.lookup(second).is_some());
        // The first is the oldest, but in use; the second was looked up again.
        let fourth = world.insert(4096).unwrap().0;
        assert!(!world.has(third) && world.registration_cache.lookup(third).is_none());
        assert!(world.has(first) && world.has(second) && world.has(fourth));
        // Evicts more than one at a time.
        if count > 3 {
            assert!(world.registration_cache.make_room(8192));
            assert!(world.has(first) && !world.has(second) && !world.has(fourth));
        }
        drop(is_used);
        assert!(world.registration_cache.evict_unused());
        assert!(
            !world.registration_cache.evict_unused() && world.registration_cache.cached.is_empty()
        );
    }
}

#[test]
fn registrations_in_use_are_never_evicted() {
    let mut world = World::new(u64::MAX, 2);
    let uses = [(); 2].map(|()| world.insert(4096).unwrap());
    assert!(world.insert(4096).is_none());
    assert!(!world.registration_cache.evict_unused());
    assert!(uses.iter().all(|(key, _)| world.has(*key)));
    drop(uses);
    assert!(world.insert(4096).is_some());
    assert_eq!(world.registration_cache.cached.len(), 2);
}

#[test]
fn too_large_registration_is_not_cached_and_evicts_nothing() {
    let mut world = World::new(3 * 4096, 2);
    let (first, is_used) = world.insert(4096).unwrap();
    let second = world.insert(4096).unwrap().0;
    // Longer than the limit, too long beside those in use, and beyond 64 bits.
    assert!(world.insert(4 * 4096).is_none() && world.insert(3 * 4096).is_none());
    assert!(!world.registration_cache.make_room(u64::MAX));
    assert!(world.has(first) && world.has(second));
    assert!(world.insert(2 * 4096).is_some());
    assert!(world.has(first) && !world.has(second));
    drop(is_used);
    assert!(World::new(u64::MAX, 0).insert(4096).is_none());
    // A rail that has ended caches nothing.
    world.registration_cache.end();
    assert!(world.registration_cache.cached.is_empty() && world.insert(4096).is_none());
}
