//! Connecting endpoints that have one peer.
//!
//! libfabric splits a connection into four steps, each reported by an event queue:
//! a request at the listener, an acceptance, and one `Connected` on either side.
//! The blocking calls here wait for one side's event only, which is what two
//! processes want. Where both ends live in one thread, start both and poll both
//! queues: some providers move the handshake only while somebody reads.
#![allow(unsafe_code)]

use std::os::raw::c_void;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use libfabric_sys as sys;

use super::{Endpoint, local_address};
use crate::address::Address;
use crate::domain::Fabric;
use crate::error::{Error, ErrorKind, Result};
use crate::event::{ConnectionRequest, Event, EventQueue, EventQueueShared};
use crate::handle::Handle;
use crate::offer::Offer;
use crate::waiting::Deadline;

/// Waits for peers that want to connect (`fid_pep`). Their requests arrive on
/// the event queue it was opened with.
///
/// Both ends in one thread, over TCP on the loopback interface:
///
/// ```
/// use std::time::{Duration, Instant};
/// use fabric::*;
///
/// let offer = Query::new(EndpointKind::Msg).provider("tcp").source("127.0.0.1").first()?;
/// let domain = Domain::open(&offer)?;
/// let mut requests = EventQueue::open(domain.fabric())?;
/// let listener = Listener::open(domain.fabric(), &offer, &requests)?;
/// let to = listener.address()?;
///
/// let mut client_events = EventQueue::open(domain.fabric())?;
/// let mut client_queue = CompletionQueue::open(&domain)?;
/// let mut client = Endpoint::builder(&domain)
///     .queue(&mut client_queue)
///     .events(&client_events)
///     .towards(&to)
///     .open()?;
/// client.start_connecting(&to, b"let me in")?;
///
/// let end = Instant::now() + Duration::from_secs(5);
/// let request = loop {
///     // The client's side is read too: that moves the handshake.
///     client_events.poll()?;
///     if let Some(Event::ConnectionRequest(request)) = requests.poll()? {
///         break request;
///     }
///     assert!(Instant::now() < end, "no request came");
/// };
/// assert!(request.data.starts_with(b"let me in"));
///
/// let mut server_events = EventQueue::open(domain.fabric())?;
/// let mut server_queue = CompletionQueue::open(&domain)?;
/// let mut server = Endpoint::builder(&domain)
///     .offer(&request.offer)
///     .queue(&mut server_queue)
///     .events(&server_events)
///     .open()?;
/// server.start_accepting(b"welcome")?;
///
/// let (mut client_up, mut server_up) = (false, false);
/// while !(client_up && server_up) {
///     if let Some(Event::Connected { endpoint, data }) = client_events.poll()? {
///         client_up = client.is(endpoint);
///         assert!(data.starts_with(b"welcome"));
///     }
///     if let Some(Event::Connected { endpoint, .. }) = server_events.poll()? {
///         server_up = server.is(endpoint);
///     }
///     assert!(Instant::now() < end, "not connected");
/// }
/// client.disconnect()?;
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug)]
pub struct Listener {
    handle: Handle<sys::fid_pep>,
    #[allow(dead_code)] // kept alive: bound to the listener
    events: Arc<EventQueueShared>,
    fabric: Fabric,
}

impl Listener {
    /// Starts listening at the offer's source address.
    ///
    /// # Errors
    /// What the provider says.
    pub fn open(fabric: &Fabric, offer: &Offer, events: &EventQueue) -> Result<Self> {
        let blame = |e: Error| e.with_provider(fabric.provider());
        if !events.shared.is_on(fabric) || offer.capabilities().provider != fabric.provider() {
            return Err(blame(Error::new(
                ErrorKind::InvalidArgument,
                "fi_passive_ep",
                "offer and event queue must be of the fabric that listens",
            )));
        }
        let mut listener = ptr::null_mut();
        // SAFETY: fabric and offer are alive; `listener` receives the object.
        let handle = unsafe {
            let code = sys::fi_passive_ep(
                fabric.as_ptr(),
                offer.info.as_ptr(),
                &mut listener,
                ptr::null_mut(),
            );
            Error::check("fi_passive_ep", i64::from(code)).map_err(blame)?;
            Handle::adopt("fi_passive_ep", listener)?
        };
        // SAFETY: both objects are alive; the queue is kept.
        let code = unsafe { sys::fi_bind(handle.as_fid(), events.shared.as_fid(), 0) };
        Error::check("fi_pep_bind", i64::from(code)).map_err(blame)?;
        // SAFETY: the listener is alive and bound.
        let code = unsafe { sys::fi_listen(handle.as_ptr()) };
        Error::check("fi_listen", i64::from(code)).map_err(blame)?;
        Ok(Self { handle, events: Arc::clone(&events.shared), fabric: fabric.clone() })
    }

    /// The address to connect to.
    ///
    /// # Errors
    /// What the provider says.
    pub fn address(&self) -> Result<Address> {
        local_address(self.handle.as_fid()).map_err(|e| e.with_provider(self.fabric.provider()))
    }

    /// Turns a peer down, with a reason in bytes.
    ///
    /// The peer's event queue reports `ConnectionRefused` or `ConnectionLost`, by provider.
    ///
    /// # Errors
    /// What the provider says.
    pub fn reject(&self, request: ConnectionRequest, reason: &[u8]) -> Result<()> {
        let blame = |e: Error| e.with_provider(self.fabric.provider());
        if !request.offer.info.is_request() {
            let why = "the offer is not that of a connection request";
            return Err(blame(Error::new(ErrorKind::InvalidArgument, "fi_reject", why)));
        }
        request.offer.info.claim("fi_reject").map_err(blame)?;
        // SAFETY: the request's info is alive; its handle names the connection, and
        // is used this once.
        let code = unsafe {
            let handle = (*request.offer.info.as_ptr()).handle;
            sys::fi_reject(
                self.handle.as_ptr(),
                handle,
                reason.as_ptr().cast::<c_void>(),
                reason.len(),
            )
        };
        Error::check("fi_reject", i64::from(code)).map(drop).map_err(blame)
    }
}

impl Endpoint {
    /// Starts connecting to a listener. The event queue tells the outcome: an
    /// [`Event::Connected`], or an error.
    ///
    /// `data` travels with the request. How much fits is the provider's affair
    /// (`FI_OPT_CM_DATA_SIZE`; verbs has less than 56 bytes), and some pad it with zeros:
    /// put a length in front of what may vary.
    ///
    /// # Errors
    /// What the provider says at once.
    pub fn start_connecting(&mut self, to: &Address, data: &[u8]) -> Result<()> {
        let mut address = to.0.clone();
        // Providers read whole sockaddr unions.
        address.resize(address.len().max(256), 0);
        // SAFETY: endpoint, address and data are valid for the call.
        let code = unsafe {
            sys::fi_connect(
                self.handle.as_ptr(),
                address.as_ptr().cast(),
                data.as_ptr().cast::<c_void>(),
                data.len(),
            )
        };
        self.attached.member.connects_to(self.print(to));
        Error::check("fi_connect", i64::from(code))
            .map(drop)
            .map_err(|e| self.domain.blame(e).with_peer(self.print(to)))
    }

    /// Accepts the request that this endpoint was opened for. The event queue
    /// tells when the connection is up.
    ///
    /// # Errors
    /// What the provider says at once.
    pub fn start_accepting(&mut self, data: &[u8]) -> Result<()> {
        // SAFETY: endpoint and data are valid for the call.
        let code = unsafe {
            sys::fi_accept(self.handle.as_ptr(), data.as_ptr().cast::<c_void>(), data.len())
        };
        Error::check("fi_accept", i64::from(code)).map(drop).map_err(|e| self.domain.blame(e))
    }

    /// Connects and waits until the connection is up; returns the data that the
    /// accepting side sent along.
    ///
    /// Events of other endpoints on the same queue are dropped meanwhile, so give an
    /// endpoint that connects this way an event queue of its own.
    ///
    /// # Errors
    /// `ConnectionRefused`, `ConnectionLost`, `DeadlineExceeded`.
    pub fn connect(
        &mut self,
        events: &mut EventQueue,
        to: &Address,
        data: &[u8],
        timeout: Duration,
    ) -> Result<Vec<u8>> {
        self.start_connecting(to, data)?;
        self.await_connection(events, timeout).map_err(|e| e.with_peer(self.print(to)))
    }

    /// Accepts and waits until the connection is up.
    ///
    /// # Errors
    /// `ConnectionLost`, `DeadlineExceeded`.
    pub fn accept(
        &mut self,
        events: &mut EventQueue,
        data: &[u8],
        timeout: Duration,
    ) -> Result<()> {
        self.start_accepting(data)?;
        self.await_connection(events, timeout).map(drop)
    }

    /// Waits for this endpoint's connection; other events on the queue are dropped.
    fn await_connection(&self, events: &mut EventQueue, timeout: Duration) -> Result<Vec<u8>> {
        let deadline = Deadline::after(timeout);
        loop {
            match events.wait(deadline.left())? {
                Event::Connected { endpoint, data } if self.is(endpoint) => return Ok(data),
                Event::Shutdown { endpoint } if self.is(endpoint) => {
                    return Err(self.domain.blame(Error::new(
                        ErrorKind::ConnectionLost,
                        "fi_connect",
                        "the peer closed the connection before it was up",
                    )));
                }
                other => tracing::debug!(?other, "an event was dropped while connecting"),
            }
        }
    }

    /// Ends the connection; the peer sees [`Event::Shutdown`].
    ///
    /// Operations in flight fail or are lost; finish them first. The endpoint cannot
    /// connect again: close it and open another.
    ///
    /// # Errors
    /// What the provider says.
    pub fn disconnect(&mut self) -> Result<()> {
        // SAFETY: the endpoint is alive; flags must be 0.
        let code = unsafe { sys::fi_shutdown(self.handle.as_ptr(), 0) };
        Error::check("fi_shutdown", i64::from(code)).map(drop).map_err(|e| self.domain.blame(e))
    }

    fn print(&self, address: &Address) -> String {
        super::print(&self.domain, address)
    }
}
