//! Endpoints: where operations are posted.
//!
//! An endpoint belongs to one domain and reports to one queue. Each post is checked here before
//! libfabric is called: access, bounds, widths and the peer, against facts read when the
//! endpoint was opened. Providers answer a wrong argument with a bare `EINVAL`, with `EAGAIN`
//! for ever, or not at all.
//!
//! Four rules hold throughout. A post takes only the queue that was bound at opening. Memory of
//! a post stays alive until the provider releases it, not until the caller stops waiting. An
//! endpoint is closed before its buffers are released, because only closing ends a started
//! transfer. Registrations bound to an endpoint are closed before it.
#![allow(unsafe_code)]

mod atomic;
mod connection;
mod idle_connections;
#[cfg(test)]
mod inject_tests;
mod message;
mod nonblocking;
mod post;
#[cfg(test)]
mod removal_tests;
mod rma;
mod vectors;

pub use atomic::{AtomicForm, AtomicOperation, AtomicRequest, Datatype};
pub use connection::Listener;
pub(crate) use nonblocking::{InjectOutcome, RemoteTarget};
pub use post::PostOptions;
pub(crate) use vectors::LocalSegment;

use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;

use libfabric_sys as sys;

use crate::error::number::TOO_SMALL;
use crate::event::EventQueueShared;
use crate::handle::Handle;
use crate::hazard::HazardPointer;
use crate::memory::BoundRegistrations;
use crate::queue::{Member, QueueShared};
use crate::quirks::{injects_without_context, must_drain_before_close};
use crate::shm_files;
use crate::{
    Access, Address, AddressVector, Caps, Completion, CompletionQueue, Counter, Domain,
    EndpointKind, Error, ErrorKind, EventQueue, MemoryRegion, MrMode, Offer, Peer, Result, Version,
};

/// An endpoint. A post takes `&mut` of the endpoint and of the queue that will report the
/// outcome, so both have one user at a time, and neither needs a lock.
///
/// ```
/// use std::time::Duration;
/// use fabric::*;
///
/// let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
/// let domain = Domain::open(&offer)?;
/// let addresses = AddressVector::open(&domain)?;
/// let mut queue = CompletionQueue::open(&domain)?;
/// let mut endpoint =
///     Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
/// let me = addresses.insert(&endpoint.address()?)?;
///
/// let inbox = domain.register(HostMemory::zeroed(64)?, Access::ALL)?;
/// let outbox = domain.register(HostMemory::from_vec(b"ping".to_vec())?, Access::ALL)?;
/// let receive = endpoint.receive(&mut queue, &inbox.all(), 1)?;
/// let send = endpoint.send(&mut queue, me, &outbox.all(), 2)?;
/// let got = queue.complete(receive, Duration::from_secs(5))?;
/// queue.complete(send, Duration::from_secs(5))?;
/// assert_eq!((got.length, got.token), (4, 1));
///
/// let mut text = [0; 4];
/// inbox.read(0, &mut text)?;
/// assert_eq!(&text, b"ping");
/// endpoint.close()?;
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug)]
pub struct Endpoint {
    handle: ManuallyDrop<Handle<sys::fid_ep>>,
    is_closed: bool,
    /// Declared before the queue: rxm keeps megabytes of a vector that is closed after its
    /// queue.
    addresses: Option<AddressVector>,
    hazard: Arc<HazardPointer>,
    queue_binding: QueueBinding,
    limits: Limits,
    /// Regions that are closed before the endpoint.
    bound: BoundRegistrations,
    counters: Vec<Counter>,
    events: Option<Arc<EventQueueShared>>,
    domain: Domain,
}

/// The index of the endpoint in its queue.
#[derive(Debug, Clone)]
struct QueueBinding {
    member: Arc<Member>,
    queue: Arc<QueueShared>,
    number: u32,
}

/// Facts that every post checks, next to each other.
#[derive(Debug, Clone, Copy)]
struct Limits {
    immediate_mask: u64,
    inject_size: usize,
    /// Limits of one-sided writes, and of writes with an immediate.
    inject_write_size: usize,
    inject_write_data_size: usize,
    max_message: usize,
    iov_limit: usize,
    has_message: bool,
    has_rma: bool,
    has_tagged: bool,
    has_atomic: bool,
}

/// Binds the objects that an endpoint needs, then opens it.
///
/// All objects are bound before `fi_enable`, because libfabric does not allow it later. A
/// connectionless endpoint needs a queue and an address vector, a connected one a queue and an
/// event queue; a missing object is found without a call.
///
/// ```
/// use fabric::*;
/// let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
/// let domain = Domain::open(&offer)?;
/// let mut queue = CompletionQueue::open(&domain)?;
/// let error = Endpoint::builder(&domain).queue(&mut queue).open().unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::InvalidArgument);
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug)]
#[must_use]
pub struct EndpointBuilder<'q> {
    domain: Domain,
    offer: Offer,
    queue: Option<&'q mut CompletionQueue>,
    addresses: Option<AddressVector>,
    events: Option<Arc<EventQueueShared>>,
    counters: Vec<(Counter, Access)>,
    destination: Option<Address>,
    peer_to_peer: Option<PeerToPeer>,
}

impl<'q> EndpointBuilder<'q> {
    /// The queue that reports completed operations and arrived messages.
    pub fn queue(mut self, queue: &'q mut CompletionQueue) -> Self {
        self.queue = Some(queue);
        self
    }

    /// The peers of a connectionless endpoint.
    pub fn addresses(mut self, addresses: &AddressVector) -> Self {
        self.addresses = Some(addresses.clone());
        self
    }

    /// The event queue that reports the connection of a connected endpoint.
    pub fn events(mut self, events: &EventQueue) -> Self {
        self.events = Some(events.shared_handle());
        self
    }

    /// A counter of operations by access: `WRITE` counts completed writes of this endpoint,
    /// `REMOTE_WRITE` those of peers.
    ///
    /// Can be called several times, and one counter may serve several endpoints. The completion
    /// queue is still needed, because it owns the memory in flight.
    pub fn counter(mut self, counter: &Counter, events: Access) -> Self {
        self.counters.push((counter.clone(), events));
        self
    }

    /// Uses another offer than the domain's: that of a
    /// [`ConnectionRequest`](crate::ConnectionRequest) of the same fabric.
    pub fn offer(mut self, offer: &Offer) -> Self {
        self.offer = offer.clone();
        self
    }

    /// The listener that a connected endpoint will connect to: some providers choose the device
    /// by it when the endpoint is opened.
    pub fn towards(mut self, listener: &Address) -> Self {
        self.destination = Some(listener.clone());
        self
    }

    /// Sets the policy for device memory that may go peer to peer (`FI_OPT_FI_HMEM_P2P`). A
    /// provider without this choice ignores it; one that cannot obey refuses the endpoint.
    pub fn peer_to_peer(mut self, policy: PeerToPeer) -> Self {
        self.peer_to_peer = Some(policy);
        self
    }

    /// Opens and enables the endpoint. A connected endpoint is not connected yet.
    ///
    /// # Errors
    /// `InvalidArgument` if a queue is missing, or the address vector of a connectionless
    /// endpoint; `NotSupported` if the provider cannot obey the choice of
    /// [peer-to-peer transfers](Self::peer_to_peer); the provider's error.
    pub fn open(self) -> Result<Endpoint> {
        let domain = self.domain;
        let refuse =
            |why: &'static str| domain.error(ErrorKind::InvalidArgument, "fi_endpoint", why);
        let connectionless = domain.capabilities().endpoint != EndpointKind::Msg;
        if connectionless && self.addresses.is_none() {
            return Err(refuse("a connectionless endpoint needs an address vector"));
        }
        if !connectionless && self.events.is_none() {
            return Err(refuse("a connected endpoint needs an event queue"));
        }
        let Some(queue) = self.queue else { return Err(refuse("no completion queue")) };
        // Providers cast bound objects without a check.
        if !queue.domain().is_same(&domain)
            || self.addresses.as_ref().is_some_and(|a| !a.domain().is_same(&domain))
            || self.counters.iter().any(|(counter, _)| !counter.domain().is_same(&domain))
            || self.events.as_ref().is_some_and(|events| !events.is_on(domain.fabric()))
        {
            return Err(refuse("a queue, counter or address vector belongs to another domain"));
        }
        let domain_facts = domain.capabilities();
        let offer_facts = self.offer.capabilities();
        // Some providers omit their name in connection requests.
        let named = !offer_facts.provider.is_empty();
        if (named && domain_facts.provider != offer_facts.provider)
            || domain_facts.endpoint != offer_facts.endpoint
        {
            return Err(refuse("the offer is of another provider than the domain"));
        }
        self.offer.info.check_fabric(domain.fabric(), "fi_endpoint")?;
        if self.destination.is_some() && self.offer.info.is_request() {
            return Err(refuse("a connection request already has a destination"));
        }
        self.offer.info.claim("fi_endpoint").map_err(|e| domain.add_provider(e))?;
        let destination = self.destination.as_ref();
        let towards = destination.map(|to| self.offer.info.towards(&to.0)).transpose()?;
        let info = towards.as_ref().unwrap_or(&self.offer.info);
        // SAFETY: domain and offer are alive; the object is owned here.
        let opened = unsafe {
            Handle::open("fi_endpoint", &domain_facts.provider, |endpoint| {
                sys::fi_endpoint(domain.as_ptr(), info.as_ptr(), endpoint, ptr::null_mut())
            })
        };
        let lost = !connectionless && self.destination.is_none();
        let handle = opened.map_err(|e| match e.kind() {
            ErrorKind::InvalidArgument if lost => e.with_detail(
                "the provider may need the address of the listener when the endpoint is opened. Set it with EndpointBuilder::towards",
            ),
            _ => e,
        })?;
        let bind = |operation, fid: *mut sys::fid, flags: u64| {
            // SAFETY: both objects are alive, and the endpoint below retains them.
            let code = unsafe { sys::fi_bind(handle.as_fid(), fid, flags) };
            domain.check(operation, code)
        };
        if let Some(addresses) = &self.addresses
            && connectionless
        {
            bind("fi_ep_bind (address vector)", addresses.as_fid(), 0)?;
        }
        if let Some(events) = &self.events {
            bind("fi_ep_bind (event queue)", events.as_fid(), 0)?;
        }
        let flags = sys::FI_TRANSMIT | sys::FI_RECV;
        bind("fi_ep_bind (completion queue)", queue.shared_handle().as_fid(), flags)?;
        let mut counters = self.counters;
        let counts_writes = |(_, events): &(_, Access)| events.contains(Access::WRITE);
        if injects_without_context(&domain_facts.provider)
            && domain_facts.caps.contains(Caps::RMA)
            && !counters.iter().any(counts_writes)
        {
            // The counter is never read. With it, rxm tracks injected writes like others.
            counters.push((Counter::open(&domain)?, Access::WRITE));
        }
        for (counter, events) in &counters {
            bind("fi_ep_bind (counter)", counter.as_fid(), events.bits())?;
        }
        if let Some(policy) = self.peer_to_peer {
            // Some providers take it only before the endpoint is enabled. Another answer than this
            // one means that the provider has no such option.
            match set_peer_to_peer(handle.as_fid(), policy) {
                code if code == -sys::FI_EOPNOTSUPP => {
                    domain.check("fi_setopt (FI_OPT_FI_HMEM_P2P)", code).map_err(|error| {
                        error.with_detail(format!(
                            "the provider cannot obey {policy:?}: the devices and the network card \
                             may have no direct path, or FI_HMEM_DISABLE_P2P is set"
                        ))
                    })?;
                }
                code => tracing::trace!(code, "peer-to-peer option"),
            }
        }
        if self.offer.info.has_shm_source() {
            shm_files::remove_of_ended_processes();
        }
        let code = {
            let _blocked = threads::BlockedSignals::new();
            // SAFETY: the endpoint is alive and all objects that it needs are bound.
            unsafe { sys::fi_enable(handle.as_fid()) }
        };
        domain.check("fi_enable", code).map_err(explain_enable)?;
        if connectionless && let Ok(address) = local_address(handle.as_fid()) {
            idle_connections::defer_accept(&address);
        }
        let limits = limits(&domain, &handle);
        // Only now: a queue must not count an endpoint that failed to open.
        let named = if connectionless { self.addresses.clone() } else { None };
        let (number, member) = queue.join(handle.as_fid(), named);
        if let Some(name) = info.destination() {
            member.connects_to(name);
        }
        let queue_binding = QueueBinding { queue: queue.shared_handle(), number, member };
        let hazard = self.addresses.as_ref().map_or_else(Arc::default, AddressVector::add_hazard);
        Ok(Endpoint {
            handle: ManuallyDrop::new(handle),
            is_closed: false,
            queue_binding,
            limits,
            bound: BoundRegistrations::new(),
            addresses: self.addresses,
            hazard,
            counters: counters.into_iter().map(|(counter, _)| counter).collect(),
            events: self.events,
            domain,
        })
    }
}

/// A bare EINVAL here has a known cause that the code does not reveal.
fn explain_enable(error: Error) -> Error {
    if error.kind() == ErrorKind::Busy {
        return error.with_detail(
            "the source name is in use by a running process, or by a file that a killed process left in \
             /dev/shm. Choose another source, or none",
        );
    }
    if error.kind() != ErrorKind::InvalidArgument {
        return error;
    }
    let universe =
        std::env::var("FI_UNIVERSE_SIZE").unwrap_or_else(|_| "256 (the default)".to_owned());
    error.with_detail(format!(
        "the device may have no space for the queues of FI_UNIVERSE_SIZE = {universe}. Set it to 64"
    ))
}

fn limits(domain: &Domain, handle: &Handle<sys::fid_ep>) -> Limits {
    let capabilities = domain.capabilities();
    // SAFETY: the endpoint is alive, and no other thread changes its tables now.
    let endpoint = unsafe { &*handle.as_ptr() };
    let has = |is_absent: bool, caps| !is_absent && capabilities.caps.contains(caps);
    // Since 2.0 endpoints report the inject limit of each kind of operation.
    let inject_write_size = match Version::running() >= (Version { major: 2, minor: 0 }) {
        true => inject_write_size(handle, capabilities.inject_size),
        false => capabilities.inject_size,
    };
    Limits {
        immediate_mask: capabilities.immediate_mask(),
        inject_size: capabilities.inject_size,
        inject_write_size,
        inject_write_data_size: inject_write_size,
        max_message: capabilities.max_message_size,
        iov_limit: capabilities.limits.iov_limit,
        has_message: has(endpoint.msg.is_null(), Caps::MESSAGE),
        has_rma: has(endpoint.rma.is_null(), Caps::RMA),
        has_tagged: has(endpoint.tagged.is_null(), Caps::TAGGED),
        has_atomic: has(endpoint.atomic.is_null(), Caps::ATOMIC),
    }
}

/// Some providers inject messages but only short writes, or none.
fn inject_write_size(handle: &Handle<sys::fid_ep>, most: usize) -> usize {
    let mut size = 0;
    // SAFETY: the endpoint is alive, and `size` receives the answer.
    let code = unsafe { sys::size_option(handle.as_fid(), sys::INJECT_RMA_SIZE, &mut size) };
    if code == 0 { size.min(most) } else { most }
}

impl Endpoint {
    #[cold]
    pub(crate) fn name_of(&self, peer: Peer) -> Option<String> {
        self.queue_binding.member.name_of(peer)
    }

    /// Starts building an endpoint of a domain.
    pub fn builder<'q>(domain: &Domain) -> EndpointBuilder<'q> {
        EndpointBuilder {
            domain: domain.clone(),
            offer: domain.offer().clone(),
            queue: None,
            addresses: None,
            events: None,
            counters: Vec::new(),
            destination: None,
            peer_to_peer: None,
        }
    }

    /// The address that peers use to reach this endpoint.
    ///
    /// # Errors
    /// The provider's error.
    pub fn address(&self) -> Result<Address> {
        local_address(self.handle.as_fid()).map_err(|e| self.domain.add_provider(e))
    }

    /// The sender of a completed message, if the query asked for `Caps::SOURCE` and the sender
    /// is in the address vector.
    #[must_use]
    pub fn sender(&self, completion: &Completion) -> Option<Peer> {
        self.addresses.as_ref()?.peer_of(completion.source)
    }

    /// The domain of the endpoint.
    #[must_use]
    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    /// Is this the endpoint an event names?
    ///
    /// Several connected endpoints can share one event queue. Events carry the endpoint's
    /// identity as a number, which may be reused after it is closed.
    #[must_use]
    pub fn is(&self, endpoint: usize) -> bool {
        self.handle.as_fid() as usize == endpoint
    }

    /// Sets the policy for device memory that may go peer to peer (`FI_OPT_FI_HMEM_P2P`).
    ///
    /// # Errors
    /// `NotSupported` if the provider has no such choice.
    pub fn set_peer_to_peer(&mut self, policy: PeerToPeer) -> Result<()> {
        // `&mut self` serialises against its operations.
        let code = set_peer_to_peer(self.handle.as_fid(), policy);
        self.domain.check("fi_setopt (FI_OPT_FI_HMEM_P2P)", code)
    }

    /// Closes the endpoint and reports a failure; dropping the endpoint only logs it. The queue
    /// reports operations in flight as failed, and releases their memory.
    ///
    /// # Errors
    /// The provider's error.
    pub fn close(mut self) -> Result<()> {
        self.close_once().map_err(|e| self.domain.add_provider(e))
    }

    /// A second call does nothing.
    fn close_once(&mut self) -> Result<()> {
        // In a forked child, endpoint, queue and memory belong to the parent.
        if std::mem::replace(&mut self.is_closed, true) || self.handle.is_inherited() {
            return Ok(());
        }
        self.queue_binding.member.begin_close();
        if must_drain_before_close(&self.domain.capabilities().provider) {
            self.queue_binding.queue.drain_entries();
        }
        self.bound.close();
        // SAFETY: taken once, since this code runs once, and not used afterwards: `close`
        // consumes the endpoint, and otherwise it is being dropped.
        let handle = unsafe { ManuallyDrop::take(&mut self.handle) };
        let result = handle.close();
        if result.is_ok() {
            self.queue_binding.member.finish_close(&self.queue_binding.queue);
        } else {
            // The provider may still use all of it: the objects of the endpoint, and the memory
            // in its queues, must never be freed.
            std::mem::forget((self.queue_binding.clone(), self.addresses.clone()));
            std::mem::forget((self.events.clone(), self.counters.clone(), self.domain.clone()));
        }
        result
    }

    pub(crate) fn as_fid(&self) -> *mut sys::fid {
        self.handle.as_fid()
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if let Err(error) = self.close_once() {
            // Its buffers are quarantined: the provider may still use them.
            tracing::error!(%error, "an endpoint could not be closed");
        }
    }
}

impl MemoryRegion {
    /// Binds the region to one endpoint (`fi_mr_bind` with an endpoint), as `MrMode::ENDPOINT`
    /// requires before `enable` and before any post.
    ///
    /// From then on no other endpoint accepts the region. Its registration ends when the
    /// endpoint is closed, if not earlier: then peers cannot access it, and nothing can be
    /// posted with it. Its bytes stay until the region is dropped.
    ///
    /// # Errors
    /// The provider's error.
    pub fn bind_endpoint(&self, endpoint: &Endpoint) -> Result<()> {
        // SAFETY: the endpoint is open.
        unsafe { self.bind_to(&endpoint.domain, endpoint.as_fid(), &endpoint.bound) }
    }

    /// Binds the region to this endpoint, where the provider requires that, and enables it;
    /// does nothing for a region that is not registered.
    ///
    /// # Errors
    /// The provider's error.
    pub fn enable_for(&self, endpoint: &Endpoint) -> Result<()> {
        if !self.is_registered() || self.is_enabled() {
            return Ok(());
        }
        if self.domain().capabilities().registration.mr_mode.contains(MrMode::ENDPOINT) {
            self.bind_endpoint(endpoint)?;
        }
        self.enable()
    }
}

/// Policy for transfers of device memory directly between devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum PeerToPeer {
    /// The provider decides for each transfer, and may stage through host memory
    /// (`FI_HMEM_P2P_ENABLED`, libfabric's default).
    Enabled = 0,
    /// Every transfer goes directly, or fails: for benchmarks of the direct path
    /// (`FI_HMEM_P2P_REQUIRED`).
    Required = 1,
    /// Directly where the hardware can, staged otherwise (`FI_HMEM_P2P_PREFERRED`).
    Preferred = 2,
    /// Always staged through host memory (`FI_HMEM_P2P_DISABLED`).
    Disabled = 3,
}

/// Callers pass an open endpoint that no other thread uses.
fn set_peer_to_peer(endpoint: *mut sys::fid, policy: PeerToPeer) -> i32 {
    let policy = policy as i32;
    // SAFETY: the endpoint is alive; the option is an `int`.
    unsafe {
        sys::fi_setopt(
            endpoint,
            sys::FI_OPT_ENDPOINT as i32,
            sys::FI_OPT_FI_HMEM_P2P as i32,
            ptr::from_ref(&policy).cast(),
            size_of_val(&policy),
        )
    }
}

fn local_address(fid: *mut sys::fid) -> Result<Address> {
    let mut bytes = vec![0_u8; 256];
    for _ in 0..2 {
        let mut length = bytes.len();
        // SAFETY: the buffer's length is passed.
        let code = unsafe { sys::fi_getname(fid, bytes.as_mut_ptr().cast(), &mut length) };
        if code == -TOO_SMALL && length > bytes.len() {
            bytes.resize(length, 0);
            continue;
        }
        Error::check("fi_getname", code)?;
        bytes.truncate(length);
        return Ok(Address(bytes));
    }
    Err(Error::from_code("fi_getname", TOO_SMALL))
}
