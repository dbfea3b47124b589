//! Registering memory: for peers, each time anew, and for own use, once.
//!
//! A peer that was told of a region has its key, and what is withdrawn must be refused. So a
//! registration that peers can use goes with its region, and is nobody else's: not even another
//! region's of the same memory, whose life would keep the key of the first one good. What is for
//! own use has a key that nobody was told, and rights that allow peers nothing. Those are kept, since
//! pinning pages takes half a second for each gibibyte, and engines register the same buffers again
//! and again. What nobody uses makes room, the one first that was not used for the longest time.
//!
//! A kept registration keeps its memory alive, since a fabric may never have pages that were
//! given to somebody else; and so the memory's name in the cache is never another's. But
//! memory is not kept for the cache's sake: it is looked often whether anybody else has a handle,
//! and if nobody has, the registration goes and the memory with it. That is why all caches of a
//! process have *one* handle to a buffer together, however many rails it is registered with:
//! with one each, each would take the others for users.

use std::collections::HashMap;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, Weak};

use fabric::{Access, Capabilities, MemoryRegion, MrMode, RegistrationOptions};

use super::driver::Driver;
use super::{RAIL_TIMEOUT, RailHandle, RailOptions, memory};
use crate::error::{Error, Result};
use crate::host_buffer::HostBuffer;
use crate::lock;
use crate::path::metrics::Count;
use crate::region::{Buffer, Rights};

/// Whose memory is registered. A name is good as long as the buffer lives. Memory of devices is not
/// registered; its name would be the number that the driver gives each allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum BufferKey {
    Host(usize),
    /// Memory of the host, as a device knows it.
    Pinned(usize),
}

impl BufferKey {
    fn of(buffer: &Buffer) -> Self {
        match buffer {
            Buffer::Host(buffer) => Self::Host(buffer.identity()),
            Buffer::Device(memory) => Self::Pinned(memory.identity()),
        }
    }
}

/// The one handle to a buffer that all caches of this process have.
fn cache_handle(key: BufferKey, buffer: Buffer) -> Arc<Buffer> {
    static KNOWN: Mutex<Option<HashMap<BufferKey, Weak<Buffer>>>> = Mutex::new(None);
    let mut known = lock(&KNOWN);
    let known = known.get_or_insert_default();
    // A name may be another buffer's by now; its handle is gone then.
    known.retain(|_, handle| handle.strong_count() > 0);
    if let Some(handle) = known.get(&key).and_then(Weak::upgrade) {
        return handle;
    }
    let handle = Arc::new(buffer);
    known.insert(key, Arc::downgrade(&handle));
    handle
}

/// How much is kept, in use or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CacheLimits {
    pub(crate) bytes: u64,
    pub(crate) count: usize,
}

/// A registration, and what it is of.
#[derive(Debug)]
struct CachedRegistration {
    // The fabric's handle goes first.
    region: MemoryRegion,
    buffer: Arc<Buffer>,
    /// When it was used last, by a count of uses.
    used: u64,
}

impl Drop for CachedRegistration {
    fn drop(&mut self) {
        Count::CacheBytes.take(self.buffer.length());
        Count::CacheEntries.take(1);
    }
}

impl CachedRegistration {
    /// Has nobody a handle to the memory but caches?
    fn is_unreferenced(&self) -> bool {
        !match &*self.buffer {
            Buffer::Host(buffer) => buffer.is_shared(),
            Buffer::Device(memory) => memory.is_shared(),
        }
    }
}

/// What a rail registered for own use.
#[derive(Debug)]
pub(super) struct RegistrationCache {
    limits: CacheLimits,
    /// None where the provider asks for no registration: then there is nothing to keep.
    pub(super) options: Option<RegistrationOptions>,
    cached: HashMap<BufferKey, CachedRegistration>,
    uses: u64,
    /// The rail's thread is gone: nothing more is kept.
    has_ended: bool,
}

impl RegistrationCache {
    pub(super) fn new(settings: &RailOptions, facts: &Capabilities) -> Self {
        let is_needed = settings.always_registers || facts.needs_local_registration();
        let options = is_needed.then(|| RegistrationOptions::new(Access::LOCAL));
        Self { limits: settings.cached, options, cached: HashMap::new(), uses: 0, has_ended: false }
    }

    /// Lets go of all, and keeps nothing more.
    pub(super) fn end(&mut self) {
        self.has_ended = true;
        self.cached.clear();
    }

    /// Lets go of memory that nobody else has a handle to any more.
    pub(super) fn release(&mut self) {
        self.cached.retain(|_, cached| !cached.is_unreferenced());
    }

    fn lookup(&mut self, key: BufferKey) -> Option<MemoryRegion> {
        self.uses += 1;
        let Some(cached) = self.cached.get_mut(&key) else {
            Count::CacheMisses.add(1);
            return None;
        };
        Count::CacheHits.add(1);
        cached.used = self.uses;
        Some(cached.region.clone())
    }

    /// Lets go of what nobody uses until so many bytes more can be kept. False if they cannot be: then
    /// nothing was let go of.
    fn make_room(&mut self, length: u64) -> bool {
        let limits = self.limits;
        let has_room = |cached: &HashMap<BufferKey, CachedRegistration>,
                        counts: fn(&CachedRegistration) -> bool| {
            let cached = cached.values().filter(|cached| counts(cached));
            let (count, bytes) = cached.fold((0, length), |(n, sum), cached| {
                (n + 1, cached.buffer.length().saturating_add(sum))
            });
            count < limits.count && bytes <= limits.bytes
        };
        has_room(&self.cached, |cached| cached.region.is_shared()) && {
            while !has_room(&self.cached, |_| true) && self.evict_one() {}
            has_room(&self.cached, |_| true)
        }
    }

    /// Lets go of all that nobody uses: the system has no room for more. False if there was nothing of
    /// the kind.
    fn evict_unused(&mut self) -> bool {
        let before = self.cached.len();
        while self.evict_one() {}
        self.cached.len() < before
    }

    fn evict_one(&mut self) -> bool {
        let unused = self.cached.iter().filter(|(_, cached)| !cached.region.is_shared());
        let oldest = unused.min_by_key(|(_, cached)| cached.used).map(|(key, _)| *key);
        let Some(key) = oldest else { return false };
        self.cached.remove(&key);
        Count::CacheEvictions.add(1);
        true
    }

    /// Keeps a registration, if there is [room](Self::make_room).
    fn insert(&mut self, key: BufferKey, region: MemoryRegion, buffer: Arc<Buffer>) {
        if self.has_ended || !self.make_room(buffer.length()) {
            return;
        }
        self.uses += 1;
        Count::CacheBytes.add(buffer.length());
        Count::CacheEntries.add(1);
        self.cached.insert(key, CachedRegistration { region, buffer, used: self.uses });
    }
}

impl RailHandle {
    /// Registers memory with the rail's domain: for peers with these rights, or for own use, and
    /// then what was registered before may be used again. None for memory that no fabric reaches.
    ///
    /// It can take many seconds, and is done by who calls: the rail's thread has peers to answer.
    pub(crate) fn register(
        &self,
        buffer: &Buffer,
        rights: Option<Rights>,
    ) -> Result<Option<MemoryRegion>> {
        if !memory::can_be_registered(buffer) {
            return Ok(None);
        }
        match rights {
            Some(_) => {
                let options = memory::access(rights).into();
                self.register_with(&Arc::new(buffer.clone()), &options).map(Some)
            }
            None => self.register_local(buffer).map(Some),
        }
    }

    /// Registers memory for own use, unless it is registered so.
    fn register_local(&self, buffer: &Buffer) -> Result<MemoryRegion> {
        let Some(options) = lock(&self.shared.registration_cache).options.clone() else {
            let options = memory::access(None).into();
            return self.register_with(&Arc::new(buffer.clone()), &options);
        };
        let _one_at_a_time = lock(&self.shared.registration_lock);
        let key = BufferKey::of(buffer);
        let has_room = {
            let mut registration_cache = lock(&self.shared.registration_cache);
            registration_cache.release();
            if let Some(found) = registration_cache.lookup(key) {
                return Ok(found);
            }
            // Before: what is pinned must not be more than the limit even for a while.
            registration_cache.make_room(buffer.length())
        };
        if !has_room {
            return self.register_with(&Arc::new(buffer.clone()), &options);
        }
        let buffer = cache_handle(key, buffer.clone());
        let region = self.register_with(&buffer, &options)?;
        lock(&self.shared.registration_cache).insert(key, region.clone(), buffer);
        Ok(region)
    }

    fn register_with(
        &self,
        buffer: &Arc<Buffer>,
        options: &RegistrationOptions,
    ) -> Result<MemoryRegion> {
        let register = || {
            let region = memory::register(&self.domain, Arc::clone(buffer), options.clone());
            region.and_then(|region| self.enable(region))
        };
        registered(register, || lock(&self.shared.registration_cache).evict_unused())
    }

    /// Enables a registration: by the rail's thread, which has the endpoint, where it is bound to that.
    fn enable(&self, region: MemoryRegion) -> fabric::Result<MemoryRegion> {
        if !region.is_registered() || region.is_enabled() {
            return Ok(region);
        }
        if !self.domain.capabilities().mr_mode.contains(MrMode::ENDPOINT) {
            return region.enable().map(|()| region);
        }
        let (answer, answered) = sync_channel(1);
        let enabled = region.clone();
        self.send_command(move |driver| {
            let _ = answer.try_send(enabled.enable_for(&driver.endpoint));
        });
        match answered.recv_timeout(RAIL_TIMEOUT) {
            Ok(outcome) => outcome.map(|()| region),
            // It is of no use until it is enabled, and says so itself.
            Err(_) => Ok(region),
        }
    }
}

/// Tries it once more if the system pins only so much, and what is kept and not used could make room.
fn registered(
    register: impl Fn() -> fabric::Result<MemoryRegion>,
    evict_unused: impl FnOnce() -> bool,
) -> Result<MemoryRegion> {
    use fabric::ErrorKind::{ResourceExhausted, WouldBlock};
    let mut registered = register();
    let has_no_room =
        |error: &fabric::Error| matches!(error.kind(), ResourceExhausted | WouldBlock);
    if registered.as_ref().is_err_and(has_no_room) && evict_unused() {
        registered = register();
    }
    registered.map_err(|error| Error::of_fabric("register a region", error))
}

impl Driver {
    /// Registers slots for staging, which are few.
    pub(super) fn register_slots(
        &self,
        buffer: &HostBuffer,
        rights: Option<Rights>,
    ) -> Result<MemoryRegion> {
        let buffer = Arc::new(Buffer::Host(buffer.clone()));
        let register = || {
            let region =
                memory::register(&self.domain, Arc::clone(&buffer), memory::access(rights))?;
            region.enable_for(&self.endpoint)?;
            Ok(region)
        };
        // Whoever registers memory just now may take its time; it is not waited for here.
        registered(register, || {
            self.shared
                .registration_cache
                .try_lock()
                .is_ok_and(|mut registration_cache| registration_cache.evict_unused())
        })
    }
}

#[cfg(test)]
mod tests;
