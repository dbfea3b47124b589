//! Memory that the fabric may access: its owners, its registration, and its description for
//! peers.
//!
//! A peer can access registered memory without asking. So the worst bug of this crate would be
//! memory that is freed or reused under a transfer. Hence the order of ownership:
//!
//! - a registration takes ownership of its [`Memory`](crate::Memory), which is freed after it;
//! - a [`MemoryRegion`] is held by its slices, and by every operation in flight;
//! - a registration bound to an endpoint is closed before it, and its memory freed after it;
//! - a registration that cannot be closed keeps its memory permanently.

mod access;
mod bound;
mod descriptor;
mod pending;
mod range;
mod region;
mod registration;
mod remote;

pub use descriptor::{RemoteKey, RemoteRegion};
pub use pending::PendingRegion;
pub use registration::{DmaBuf, RegistrationOptions, registrations};
pub use remote::{RemoteMemory, RemoteSlice};

pub(crate) use bound::BoundRegistrations;
pub(crate) use remote::MappedKey;

use std::os::raw::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

use crate::deregistration::Keepalive;
use crate::{Access, Counter, Domain, MemoryKind};
use bound::Registration;

/// Memory that is registered with a domain. Cheap to clone. When the last clone, slice and
/// operation in flight is gone, the registration is closed and then the memory freed.
///
/// A peer may change the bytes of a region at any time. They are therefore accessed by copying
/// ([`read`](Self::read), [`write`](Self::write)), never by reference.
///
/// ```
/// use fabric::*;
/// let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
/// let domain = Domain::open(&offer)?;
/// let region = domain.register(HostMemory::zeroed(4096)?, Access::ALL)?;
/// region.write(8, b"payload")?;
/// let mut copy = [0; 7];
/// region.read(8, &mut copy)?;
/// assert_eq!(&copy, b"payload");
/// assert_eq!(region.read(4090, &mut copy).unwrap_err().kind(), ErrorKind::OutOfBounds);
///
/// // A word that peers change as well: loads and stores are atomic.
/// region.store_u64(0, 17)?;
/// assert_eq!(region.load_u64(0)?, 17);
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct MemoryRegion(Arc<RegionInner>);

#[derive(Debug)]
struct RegionInner {
    /// None: the provider needs no registration for this use of the region.
    registration: Option<Arc<Registration>>,
    /// The number of the endpoint that it is bound to; 0: none.
    bound_to: AtomicU64,
    extent: Extent,
    access: Access,
    /// The local descriptor for transfer calls: null unless the provider requires one.
    descriptor: *mut c_void,
    enabled: AtomicBool,
    /// Counters bound to the region, which must live as long as the region.
    counters: Mutex<Vec<Counter>>,
    domain: Domain,
    memory: Option<Keepalive>,
}

#[derive(Debug, Clone, Copy)]
struct Extent {
    base: *mut u8,
    /// The length that peers see: all buffers together.
    length: usize,
    /// The number of bytes at `base`; less than `length` for a region of several buffers, of
    /// which only the first can be sliced and copied.
    contiguous_length: usize,
    kind: MemoryKind,
}

/// A part of a registered region. It holds the region, so that memory in use by an operation
/// cannot be freed.
///
/// ```
/// use fabric::*;
/// # let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
/// # let domain = Domain::open(&offer)?;
/// let region = domain.register(HostMemory::zeroed(4096)?, Access::LOCAL)?;
/// let slot = region.slice(1024..2048)?;
/// drop(region);
/// // The slice holds the registration; the region can be had back from it.
/// assert_eq!((slot.offset(), slot.len(), slot.region().len()), (1024, 1024, 4096));
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RegionSlice {
    region: MemoryRegion,
    offset: usize,
    length: usize,
}
