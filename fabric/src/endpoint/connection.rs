//! Connecting endpoints that have one peer.
//!
//! libfabric splits a connection into four steps, each reported by an event queue: a request at
//! the listener, an acceptance, and one `Connected` on each side. The blocking calls here wait
//! for the event of one side only, which suits two processes. If both ends live in one thread,
//! start both and poll both queues: some providers advance the handshake only while a queue is
//! read.
//!
//! Providers copy connection data into a buffer of fixed size, and some do not check its
//! length. So each call queries the limit and refuses longer data.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use libfabric_sys as sys;

use super::{Endpoint, local_address};
use crate::event::{EventQueueShared, MAX_CONNECTION_DATA};
use crate::handle::Handle;
use crate::waiting::Deadline;
use crate::{
    Address, ConnectionRequest, Error, ErrorKind, Event, EventQueue, Fabric, Offer, Result,
};

/// Connection data that every provider with connected endpoints accepts: verbs has the smallest
/// limit, 55 bytes, and less with shared connections. Used for providers that report no limit.
const MIN_CONNECTION_DATA: usize = 32;

/// How many bytes of connection data an endpoint or listener takes.
fn connection_data_limit(fid: *mut sys::fid) -> usize {
    let (mut limit, option) = (0, sys::FI_OPT_CM_DATA_SIZE as i32);
    // SAFETY: the caller's object is alive.
    let code = unsafe { sys::size_option(fid, option, &mut limit) };
    // More than this would not fit the peer's event queue.
    if code == 0 { limit.min(MAX_CONNECTION_DATA) } else { MIN_CONNECTION_DATA }
}

fn check_connection_data(operation: &'static str, fid: *mut sys::fid, data: &[u8]) -> Result<()> {
    let (length, limit) = (data.len(), connection_data_limit(fid));
    if length <= limit {
        return Ok(());
    }
    let detail = format!(
        "{length} bytes of connection data, the provider takes at most {limit}. Send the rest \
         as a message once connected"
    );
    Err(Error::new(ErrorKind::Truncated, operation, detail))
}

/// Waits for peers that connect (`fid_pep`). Their requests arrive on the event queue that it
/// was opened with.
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
///     // The client's queue is read as well, because that advances the handshake.
///     client_events.poll()?;
///     if let Some(Event::ConnectionRequest(request)) = requests.poll()? {
///         break request;
///     }
///     assert!(Instant::now() < end, "no request arrived");
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
    _events: Arc<EventQueueShared>,
    fabric: Fabric,
}

impl Listener {
    /// Starts listening at the offer's source address.
    ///
    /// # Errors
    /// The provider's error.
    pub fn open(fabric: &Fabric, offer: &Offer, events: &EventQueue) -> Result<Self> {
        let events = events.shared_handle();
        if !events.is_on(fabric) || offer.capabilities().provider != fabric.provider() {
            let detail = "offer and event queue must be of the fabric that listens";
            return Err(fabric.error(ErrorKind::InvalidArgument, "fi_passive_ep", detail));
        }
        // SAFETY: fabric and offer are alive; the object is owned here.
        let handle = unsafe {
            Handle::open("fi_passive_ep", fabric.provider(), |listener| {
                sys::fi_passive_ep(fabric.as_ptr(), offer.info.as_ptr(), listener, ptr::null_mut())
            })?
        };
        // SAFETY: both objects are alive; the listener retains the queue.
        let code = unsafe { sys::fi_bind(handle.as_fid(), events.as_fid(), 0) };
        fabric.check("fi_pep_bind", code)?;
        // SAFETY: the listener is alive and bound.
        let code = unsafe { sys::fi_listen(handle.as_ptr()) };
        fabric.check("fi_listen", code)?;
        Ok(Self { handle, _events: events, fabric: fabric.clone() })
    }

    /// The address to connect to.
    ///
    /// # Errors
    /// The provider's error.
    pub fn address(&self) -> Result<Address> {
        local_address(self.handle.as_fid()).map_err(|e| e.with_provider(self.fabric.provider()))
    }

    /// How many bytes of connection data [`reject`](Self::reject) takes, as
    /// [`Endpoint::connection_data_limit`].
    #[must_use]
    pub fn connection_data_limit(&self) -> usize {
        connection_data_limit(self.handle.as_fid())
    }

    /// Rejects a connection request, with a reason in bytes.
    ///
    /// The peer's event queue reports `ConnectionRefused` or `ConnectionLost`, depending on the
    /// provider.
    ///
    /// # Errors
    /// `Truncated` for a reason longer than
    /// [`connection_data_limit`](Self::connection_data_limit): the request can still be
    /// rejected or accepted. `InvalidArgument` for a request of another fabric, or a request
    /// that was already accepted or rejected. The provider's error.
    pub fn reject(&self, request: &ConnectionRequest, reason: &[u8]) -> Result<()> {
        let add_provider = |e: Error| e.with_provider(self.fabric.provider());
        if !request.offer.info.is_request() {
            let detail = "the offer is not that of a connection request";
            return Err(self.fabric.error(ErrorKind::InvalidArgument, "fi_reject", detail));
        }
        request.offer.info.check_fabric(&self.fabric, "fi_reject")?;
        check_connection_data("fi_reject", self.handle.as_fid(), reason).map_err(add_provider)?;
        request.offer.info.claim("fi_reject").map_err(add_provider)?;
        // SAFETY: the request's info is alive; its handle names the connection and is used only
        // here.
        let code = unsafe {
            let handle = (*request.offer.info.as_ptr()).handle;
            sys::fi_reject(self.handle.as_ptr(), handle, reason.as_ptr().cast(), reason.len())
        };
        self.fabric.check("fi_reject", code)
    }
}

impl Endpoint {
    /// Bytes of data that may travel with [`connect`](Self::connect) or
    /// [`accept`](Self::accept): the provider's limit (`FI_OPT_CM_DATA_SIZE`; 256 for tcp, 55
    /// for verbs), at most 1024, and 32 if the provider reports none.
    ///
    /// ```
    /// use fabric::*;
    /// let offer = Query::new(EndpointKind::Msg).provider("tcp").source("127.0.0.1").first()?;
    /// let domain = Domain::open(&offer)?;
    /// let events = EventQueue::open(domain.fabric())?;
    /// let listener = Listener::open(domain.fabric(), &offer, &events)?;
    /// let to = listener.address()?;
    /// let mut queue = CompletionQueue::open(&domain)?;
    /// let mut endpoint =
    ///     Endpoint::builder(&domain).queue(&mut queue).events(&events).towards(&to).open()?;
    /// let too_much = vec![0; endpoint.connection_data_limit() + 1];
    /// let refused = endpoint.start_connecting(&to, &too_much).unwrap_err();
    /// assert_eq!(refused.kind(), ErrorKind::Truncated);
    /// # Ok::<(), fabric::Error>(())
    /// ```
    #[must_use]
    pub fn connection_data_limit(&self) -> usize {
        connection_data_limit(self.handle.as_fid())
    }

    fn check_connection_data(&self, operation: &'static str, data: &[u8]) -> Result<()> {
        check_connection_data(operation, self.handle.as_fid(), data)
            .map_err(|e| self.domain.add_provider(e))
    }

    /// Starts connecting to a listener. The event queue reports the outcome: an
    /// [`Event::Connected`], or an error.
    ///
    /// `data` travels with the request: at most
    /// [`connection_data_limit`](Self::connection_data_limit) bytes. Some providers pad it with
    /// zeros: data of variable length needs a length field.
    ///
    /// # Errors
    /// `Truncated` for longer data, which is not passed to the provider; the provider's error,
    /// if immediate.
    pub fn start_connecting(&mut self, to: &Address, data: &[u8]) -> Result<()> {
        self.check_connection_data("fi_connect", data)
            .map_err(|e| e.with_peer(to.display(&self.domain)))?;
        let mut address = to.0.clone();
        // Providers read a whole sockaddr union.
        address.resize(address.len().max(256), 0);
        // SAFETY: endpoint, address and data are valid for the call.
        let code = unsafe {
            sys::fi_connect(
                self.handle.as_ptr(),
                address.as_ptr().cast(),
                data.as_ptr().cast(),
                data.len(),
            )
        };
        self.queue_binding.member.connects_to(to.display(&self.domain));
        self.domain.check("fi_connect", code).map_err(|e| e.with_peer(to.display(&self.domain)))
    }

    /// Accepts the request that this endpoint was opened for. The event queue reports when the
    /// connection is up.
    ///
    /// # Errors
    /// `Truncated` for data longer than [`connection_data_limit`](Self::connection_data_limit):
    /// the request can still be accepted. The provider's error, if immediate.
    pub fn start_accepting(&mut self, data: &[u8]) -> Result<()> {
        self.check_connection_data("fi_accept", data)?;
        // SAFETY: endpoint and data are valid for the call.
        let code =
            unsafe { sys::fi_accept(self.handle.as_ptr(), data.as_ptr().cast(), data.len()) };
        self.domain.check("fi_accept", code)
    }

    /// Connects and waits until the connection is up; returns the data of the accepting side.
    ///
    /// Events of other endpoints on the same queue are dropped during the call, so an endpoint
    /// that connects this way needs its own event queue.
    ///
    /// # Errors
    /// `ConnectionRefused`, `ConnectionLost`, `DeadlineExceeded`; as
    /// [`start_connecting`](Self::start_connecting).
    pub fn connect(
        &mut self,
        events: &mut EventQueue,
        to: &Address,
        data: &[u8],
        timeout: Duration,
    ) -> Result<Vec<u8>> {
        self.start_connecting(to, data)?;
        self.await_connection(events, timeout).map_err(|e| e.with_peer(to.display(&self.domain)))
    }

    /// Accepts and waits until the connection is up.
    ///
    /// # Errors
    /// `ConnectionLost`, `DeadlineExceeded`; as [`start_accepting`](Self::start_accepting).
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
                    let detail = "the peer closed the connection before it was up";
                    return Err(self.domain.error(ErrorKind::ConnectionLost, "fi_connect", detail));
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
    /// The provider's error.
    pub fn disconnect(&mut self) -> Result<()> {
        // SAFETY: the endpoint is alive; flags must be 0.
        let code = unsafe { sys::fi_shutdown(self.handle.as_ptr(), 0) };
        self.domain.check("fi_shutdown", code)
    }
}
