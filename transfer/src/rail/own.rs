//! Registering memory: for peers, each time anew, and for own use, once.
//!
//! A peer that was told of a region has its key, and what is withdrawn must be refused. So a
//! registration that peers can use goes with its region, and is nobody else's: not even another
//! region's of the same memory, whose life would keep the key of the first one good. What is for
//! own use has a key that nobody was told, and rights that allow peers nothing. Those are
//! [kept](super::cache).
//!
//! A kept registration keeps its memory alive, since a fabric may never have pages that were
//! given to somebody else; and so the memory's name in the cache is never another's. But
//! memory is not kept for the cache's sake: it is looked often whether anybody else has a handle,
//! and if nobody has, the registration goes and the memory with it. That is why all caches of a
//! process have *one* handle to a buffer together, however many rails it is registered with:
//! with one each, each would take the others for users.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use fabric::{Access, Capabilities, MemoryRegion, RegistrationOptions};

use super::cache::{Cache, Kept, Span};
use super::driver::{Driver, enable};
use super::{Settings, memory};
use crate::error::{Error, Result};
use crate::path::RegistrationCache;
use crate::path::metrics::count_registrations;
use crate::region::{Buffer, Rights};

/// Whose memory is registered. A name is good as long as the buffer lives. Memory of devices is not
/// registered; its name would be the number that the driver gives each allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Owner {
    Host(usize),
    /// Memory of the host, as a device knows it.
    Pinned(usize),
}

impl Owner {
    fn of(buffer: &Buffer) -> Self {
        match buffer {
            Buffer::Host(buffer) => Self::Host(buffer.identity()),
            Buffer::Device(memory) => Self::Pinned(memory.identity()),
        }
    }
}

/// The one handle to a buffer that all caches of this process have.
fn handle_for_caches(owner: Owner, buffer: Buffer) -> Arc<Buffer> {
    static KNOWN: Mutex<Option<HashMap<Owner, Weak<Buffer>>>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    // A name may be another buffer's by now; its handle is gone then.
    known.retain(|_, handle| handle.strong_count() > 0);
    if let Some(handle) = known.get(&owner).and_then(Weak::upgrade) {
        return handle;
    }
    let handle = Arc::new(buffer);
    known.insert(owner, Arc::downgrade(&handle));
    handle
}

/// A registration, and what it is of.
#[derive(Debug)]
struct Registration {
    // The fabric's handle goes first.
    region: MemoryRegion,
    buffer: Arc<Buffer>,
}

impl Kept for Registration {
    fn is_used(&self) -> bool {
        self.region.is_shared()
    }
}

impl Registration {
    /// Has nobody a handle to the memory but caches?
    fn is_left_alone(&self) -> bool {
        !match &*self.buffer {
            Buffer::Host(buffer) => buffer.is_shared(),
            Buffer::Device(memory) => memory.is_shared(),
        }
    }
}

/// What a rail registered for own use.
#[derive(Debug)]
pub(super) struct OwnUse {
    cache: Cache<Owner, Registration>,
    told: RegistrationCache,
    /// None where the provider asks for no registration: then there is nothing to keep.
    options: Option<RegistrationOptions>,
}

impl OwnUse {
    pub(super) fn new(settings: &Settings, facts: &Capabilities) -> Self {
        let is_needed = settings.always_registers || facts.needs_local_registration();
        Self {
            cache: Cache::new(settings.kept),
            told: RegistrationCache::default(),
            options: is_needed.then(|| RegistrationOptions::new(Access::LOCAL)),
        }
    }

    /// Lets go of memory that nobody else has a handle to any more.
    pub(super) fn let_go(&mut self) {
        self.cache.let_go(|_, registration| registration.is_left_alone());
        self.tell();
    }

    fn tell(&mut self) {
        let counts = self.cache.counts();
        count_registrations(std::mem::replace(&mut self.told, counts), counts);
    }
}

impl Drop for OwnUse {
    fn drop(&mut self) {
        self.cache.let_go(|_, _| true);
        self.tell();
    }
}

impl Driver {
    /// Registers memory for whoever asks, and enables it where that is a step of its own.
    pub(super) fn register(
        &mut self,
        buffer: &Buffer,
        rights: Option<Rights>,
    ) -> Result<Option<MemoryRegion>> {
        if !memory::is_reachable(buffer) {
            return Ok(None);
        }
        let options = memory::access(rights).into();
        self.register_with(&Arc::new(buffer.clone()), &options).map(Some)
    }

    fn register_with(
        &mut self,
        buffer: &Arc<Buffer>,
        options: &RegistrationOptions,
    ) -> Result<MemoryRegion> {
        let register = || {
            let region = memory::register(&self.domain, Arc::clone(buffer), options.clone())?;
            enable(&region, &self.endpoint)?;
            Ok(region)
        };
        let mut registered = register();
        // The system pins only so much: what is kept and not used makes room.
        let has_no_room = registered.as_ref().is_err_and(|error: &fabric::Error| {
            matches!(
                error.kind(),
                fabric::ErrorKind::ResourceExhausted | fabric::ErrorKind::WouldBlock
            )
        });
        if has_no_room && self.own.cache.evict_unused() {
            registered = register();
        }
        self.own.tell();
        registered.map_err(|error| Error::of_fabric("register a region", error))
    }

    /// Registers memory for own use, unless it is registered so.
    pub(super) fn register_own(&mut self, buffer: Buffer) -> Result<Option<MemoryRegion>> {
        if !memory::is_reachable(&buffer) {
            return Ok(None);
        }
        let Some(options) = self.own.options.clone() else { return self.register(&buffer, None) };
        self.own.let_go();
        let owner = Owner::of(&buffer);
        let wanted = Span { owner, range: 0..buffer.length(), access: Access::LOCAL };
        // All of a buffer is registered, so what is found begins where it does.
        let found = self.own.cache.find(&wanted).map(|(found, _)| found.region.clone());
        if found.is_some() {
            self.own.tell();
            return Ok(found);
        }
        // Before: what is pinned must not be more than the limit even for a while.
        if !self.own.cache.make_room(buffer.length()) {
            return self.register_with(&Arc::new(buffer), &options).map(Some);
        }
        let buffer = handle_for_caches(owner, buffer);
        let region = self.register_with(&buffer, &options)?;
        self.own.cache.keep(wanted, Registration { region: region.clone(), buffer });
        self.own.tell();
        Ok(Some(region))
    }
}
