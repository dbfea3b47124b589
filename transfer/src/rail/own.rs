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
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use fabric::{Access, Capabilities, MemoryRegion, MrMode, RegistrationOptions};

use super::cache::{Cache, Kept};
use super::driver::{Driver, enable};
use super::{Command, Line, PATIENCE, Settings, lock, memory};
use crate::error::{Error, Result};
use crate::host::HostBuffer;
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
    /// The rail's thread is gone: nothing more is kept.
    has_ended: bool,
}

impl OwnUse {
    pub(super) fn new(settings: &Settings, facts: &Capabilities) -> Self {
        let is_needed = settings.always_registers || facts.needs_local_registration();
        Self {
            cache: Cache::new(settings.kept),
            told: RegistrationCache::default(),
            options: is_needed.then(|| RegistrationOptions::new(Access::LOCAL)),
            has_ended: false,
        }
    }

    pub(super) fn is_keeping(&self) -> bool {
        self.options.is_some()
    }

    /// Lets go of all, and keeps nothing more.
    pub(super) fn end(&mut self) {
        self.has_ended = true;
        self.cache.let_go(|_, _| true);
        self.tell();
    }

    fn evict_unused(&mut self) -> bool {
        let has_any = self.cache.evict_unused();
        self.tell();
        has_any
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
        self.end();
    }
}

impl Line {
    /// Registers memory with the rail's domain: for peers with these rights, or for own use, and
    /// then what was registered before may be used again. None for memory that no fabric reaches.
    ///
    /// It can take many seconds, and is done by who calls: the rail's thread has peers to answer.
    pub(crate) fn register(
        &self,
        buffer: &Buffer,
        rights: Option<Rights>,
    ) -> Result<Option<MemoryRegion>> {
        if !memory::is_reachable(buffer) {
            return Ok(None);
        }
        match rights {
            Some(_) => {
                let options = memory::access(rights).into();
                self.register_with(&Arc::new(buffer.clone()), &options).map(Some)
            }
            None => self.register_own(buffer).map(Some),
        }
    }

    /// Registers memory for own use, unless it is registered so.
    fn register_own(&self, buffer: &Buffer) -> Result<MemoryRegion> {
        let Some(options) = lock(&self.shared.own).options.clone() else {
            let options = memory::access(None).into();
            return self.register_with(&Arc::new(buffer.clone()), &options);
        };
        let _one_at_a_time = lock(&self.shared.registering);
        let owner = Owner::of(buffer);
        let has_room = {
            let mut own = lock(&self.shared.own);
            own.let_go();
            let found = own.cache.find(&owner).map(|found| found.region.clone());
            own.tell();
            if let Some(found) = found {
                return Ok(found);
            }
            // Before: what is pinned must not be more than the limit even for a while.
            own.cache.make_room(buffer.length())
        };
        if !has_room {
            return self.register_with(&Arc::new(buffer.clone()), &options);
        }
        let buffer = handle_for_caches(owner, buffer.clone());
        let region = self.register_with(&buffer, &options)?;
        let mut own = lock(&self.shared.own);
        if !own.has_ended {
            let length = buffer.length();
            own.cache.keep(owner, length, Registration { region: region.clone(), buffer });
        }
        own.tell();
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
        let mut registered = register();
        // The system pins only so much: what is kept and not used makes room.
        if registered.as_ref().is_err_and(has_no_room) && lock(&self.shared.own).evict_unused() {
            registered = register();
        }
        registered.map_err(|error| Error::of_fabric("register a region", error))
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
        self.tell(Command::Enable(region.clone(), answer));
        match answered.recv_timeout(PATIENCE) {
            Ok(outcome) => outcome.map(|()| region),
            // It is of no use until it is enabled, and says so itself.
            Err(_) => Ok(region),
        }
    }
}

fn has_no_room(error: &fabric::Error) -> bool {
    matches!(error.kind(), fabric::ErrorKind::ResourceExhausted | fabric::ErrorKind::WouldBlock)
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
            enable(&region, &self.endpoint)?;
            Ok(region)
        };
        let mut registered = register();
        // Whoever registers memory just now may take its time; it is not waited for here.
        if registered.as_ref().is_err_and(has_no_room)
            && self.shared.own.try_lock().is_ok_and(|mut own| own.evict_unused())
        {
            registered = register();
        }
        registered.map_err(|error| Error::of_fabric("register a region", error))
    }
}
