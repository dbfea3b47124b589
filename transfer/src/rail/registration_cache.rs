//! Registration of memory: for peers each time, for local-only use once.
//!
//! Peers hold the key of a region, and a withdrawn region must be refused. So registrations for
//! peers end with their region and are never shared, not even with another region of the same
//! memory: that would keep the old key valid. Local-only registrations have a secret key and grant
//! peers nothing. They are cached, because pinning takes half a second per gibibyte, and engines
//! register the same buffers repeatedly. Unused ones are evicted, least recently used first.
//!
//! A cached registration keeps its memory alive, because a fabric must never access pages that were
//! reused; so a buffer's key in the cache stays unique. But memory is not kept only for the cache:
//! it is released when no other handle to it exists. That is why all caches of a process share
//! *one* handle to a buffer: with one each, caches would count each other as users.

use std::collections::HashMap;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, Weak};

use fabric::{Access, Capabilities, MemoryRegion, MrMode, RegistrationOptions};
use threads::lock;

use super::{RAIL_TIMEOUT, RailHandle, RailOptions};
use crate::device_memory::{DeviceFacts, obstacle, registration};
use crate::error::{Context, Result};
use crate::path::Registration;
use crate::path::metrics::Count;
use crate::region::{Buffer, RailMemory, Rights};

/// The identity of a registered buffer, unique as long as the buffer exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum BufferKey {
    Host(usize),
    /// Memory of a device, or host memory that is registered with one.
    Device(usize),
}

impl BufferKey {
    fn of(buffer: &Buffer) -> Self {
        match buffer {
            Buffer::Host(buffer) => Self::Host(buffer.identity()),
            Buffer::Device(memory) => Self::Device(memory.identity()),
        }
    }
}

/// The handle to a buffer that all caches of this process share.
fn cache_handle(key: BufferKey, buffer: Buffer) -> Arc<Buffer> {
    static KNOWN: Mutex<Option<HashMap<BufferKey, Weak<Buffer>>>> = Mutex::new(None);
    let mut known = lock(&KNOWN);
    let known = known.get_or_insert_default();
    // Keys are reused after their handle is dropped.
    known.retain(|_, handle| handle.strong_count() > 0);
    if let Some(handle) = known.get(&key).and_then(Weak::upgrade) {
        return handle;
    }
    let handle = Arc::new(buffer);
    known.insert(key, Arc::downgrade(&handle));
    handle
}

/// Limits of a cache, including registrations in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CacheLimits {
    pub(crate) bytes: u64,
    pub(crate) count: usize,
}

#[derive(Debug)]
struct CachedRegistration {
    // First, so that it is dropped first.
    region: MemoryRegion,
    buffer: Arc<Buffer>,
    /// The time of the last use, as a count of uses.
    used: u64,
}

impl Drop for CachedRegistration {
    fn drop(&mut self) {
        Count::CacheBytes.take(self.buffer.length());
        Count::CacheEntries.take(1);
    }
}

/// The cache of local-only registrations of a rail.
#[derive(Debug)]
pub(super) struct RegistrationCache {
    limits: CacheLimits,
    /// False if the provider needs no registration, so nothing is cached.
    is_used: bool,
    cached: HashMap<BufferKey, CachedRegistration>,
    uses: u64,
    /// The rail's thread has ended: nothing is cached any more.
    has_ended: bool,
}

impl RegistrationCache {
    pub(super) fn new(settings: &RailOptions, facts: &Capabilities) -> Self {
        let is_used = settings.always_registers || facts.needs_local_registration();
        Self { limits: settings.cached, is_used, cached: HashMap::new(), uses: 0, has_ended: false }
    }

    pub(super) fn is_used(&self) -> bool {
        self.is_used
    }

    /// Drops all entries, and caches nothing from now on.
    pub(super) fn end(&mut self) {
        self.has_ended = true;
        self.cached.clear();
    }

    /// Drops entries whose memory has no other handles.
    pub(super) fn release(&mut self) {
        self.cached.retain(|_, cached| match &*cached.buffer {
            Buffer::Host(buffer) => buffer.is_shared(),
            Buffer::Device(memory) => memory.is_shared(),
        });
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

    /// Evicts unused entries until `length` more bytes fit. Evicts nothing and returns false if
    /// they cannot fit.
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

    /// Evicts all unused entries, because the system is out of resources. False if there were none.
    pub(super) fn evict_unused(&mut self) -> bool {
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

    /// Caches a registration, if there is [room](Self::make_room).
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
    /// Registers memory with the rail's domain: with rights for peers, or local-only, which may
    /// reuse a cached registration. Or tells why it is not registered.
    ///
    /// Registering may take many seconds and runs on the calling thread, because the rail's thread
    /// has to answer peers.
    pub(crate) fn register(&self, buffer: &Buffer, rights: Option<Rights>) -> RailMemory {
        if let Some(device) = DeviceFacts::of(buffer)?
            && let Some(obstacle) = obstacle(&self.device_facts(), &device)
        {
            return Err(obstacle);
        }
        let is_cached = rights.is_none() && lock(&self.shared.registration_cache).is_used;
        let registered = match is_cached {
            true => self.register_local(buffer),
            false => self.register_with(buffer.clone().into(), registration::access(rights).into()),
        };
        registered.map_err(|error| {
            // The table of paths reports the staging.
            tracing::warn!(%error, "registering memory failed: transfers are staged");
            Registration::Refused { cause: error.to_string() }
        })
    }

    /// Registers local-only memory, unless it is cached.
    fn register_local(&self, buffer: &Buffer) -> Result<MemoryRegion> {
        let options = RegistrationOptions::new(Access::LOCAL);
        let _one_at_a_time = lock(&self.shared.registration_lock);
        let key = BufferKey::of(buffer);
        let has_room = {
            let mut registration_cache = lock(&self.shared.registration_cache);
            registration_cache.release();
            if let Some(found) = registration_cache.lookup(key) {
                return Ok(found);
            }
            // Make room first: pinned memory must never exceed the limit.
            registration_cache.make_room(buffer.length())
        };
        if !has_room {
            return self.register_with(buffer.clone().into(), options);
        }
        let buffer = cache_handle(key, buffer.clone());
        let region = self.register_with(Arc::clone(&buffer), options)?;
        lock(&self.shared.registration_cache).insert(key, region.clone(), buffer);
        Ok(region)
    }

    fn register_with(
        &self,
        buffer: Arc<Buffer>,
        options: RegistrationOptions,
    ) -> Result<MemoryRegion> {
        let register = || {
            let region = registration::register(&self.domain, Arc::clone(&buffer), options.clone());
            region.and_then(|region| self.enable(region))
        };
        register_or_evict(register, || lock(&self.shared.registration_cache).evict_unused())
    }

    /// Enables a registration; on the rail's thread if the provider binds it to the endpoint.
    fn enable(&self, region: MemoryRegion) -> fabric::Result<MemoryRegion> {
        if !region.is_registered() || region.is_enabled() {
            return Ok(region);
        }
        if !self.domain.capabilities().registration.mr_mode.contains(MrMode::ENDPOINT) {
            return region.enable().map(|()| region);
        }
        let (reply, enabled_reply) = sync_channel(1);
        let enabled = region.clone();
        self.send_command(move |driver| {
            let _ = reply.try_send(driver.enable(&enabled));
        });
        match enabled_reply.recv_timeout(RAIL_TIMEOUT) {
            Ok(outcome) => outcome.map(|()| region),
            // It fails by itself until it is enabled.
            Err(_) => Ok(region),
        }
    }
}

/// Retries once after evicting unused entries, if the system is out of resources.
pub(super) fn register_or_evict(
    register: impl Fn() -> fabric::Result<MemoryRegion>,
    evict_unused: impl FnOnce() -> bool,
) -> Result<MemoryRegion> {
    use fabric::ErrorKind::{ResourceExhausted, WouldBlock};
    let mut outcome = register();
    if matches!(&outcome, Err(error) if [ResourceExhausted, WouldBlock].contains(&error.kind()))
        && evict_unused()
    {
        outcome = register();
    }
    outcome.during("register region")
}

#[cfg(test)]
mod tests;
