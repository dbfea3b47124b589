//! Connecting endpoints that have one peer.
#![allow(unsafe_code)]

use std::os::raw::c_void;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libfabric_sys as sys;

use super::{Endpoint, local_address};
use crate::address::Address;
use crate::domain::Fabric;
use crate::error::{Error, ErrorKind, Result};
use crate::event::{ConnectionRequest, Event, EventQueue, EventQueueShared};
use crate::handle::Handle;
use crate::offer::Offer;

/// Waits for peers that want to connect (`fid_pep`). Their requests arrive on
/// the event queue it was opened with.
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
        let code = unsafe { sys::fi_pep_bind(handle.as_ptr(), events.as_fid(), 0) };
        Error::check("fi_pep_bind", i64::from(code)).map_err(blame)?;
        // SAFETY: the listener is alive and bound.
        let code = unsafe { sys::fi_listen(handle.as_ptr()) };
        Error::check("fi_listen", i64::from(code)).map_err(blame)?;
        Ok(Self { handle, events: events.share(), fabric: fabric.clone() })
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
    /// # Errors
    /// What the provider says.
    pub fn reject(&self, request: ConnectionRequest, reason: &[u8]) -> Result<()> {
        // SAFETY: the request's info is alive; its handle names the connection.
        let code = unsafe {
            let handle = (*request.offer.info.as_ptr()).handle;
            sys::fi_reject(
                self.handle.as_ptr(),
                handle,
                reason.as_ptr().cast::<c_void>(),
                reason.len(),
            )
        };
        Error::check("fi_reject", i64::from(code))
            .map(drop)
            .map_err(|e| e.with_provider(self.fabric.provider()))
    }
}

impl Endpoint {
    /// Starts connecting to a listener. The event queue tells the outcome: an
    /// [`Event::Connected`], or an error.
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
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match events.wait(left)? {
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
    /// # Errors
    /// What the provider says.
    pub fn disconnect(&mut self) -> Result<()> {
        // SAFETY: the endpoint is alive; flags must be 0.
        let code = unsafe { sys::fi_shutdown(self.handle.as_ptr(), 0) };
        Error::check("fi_shutdown", i64::from(code)).map(drop).map_err(|e| self.domain.blame(e))
    }

    /// The address of the other end of a connection.
    ///
    /// # Errors
    /// `ConnectionLost` if there is none; what the provider says.
    pub fn peer_address(&self) -> Result<Address> {
        let mut bytes = vec![0_u8; 256];
        let mut length = bytes.len();
        // SAFETY: the buffer's length is passed.
        let code = unsafe {
            sys::fi_getpeer(self.handle.as_ptr(), bytes.as_mut_ptr().cast(), &mut length)
        };
        Error::check("fi_getpeer", i64::from(code)).map_err(|e| self.domain.blame(e))?;
        bytes.truncate(length);
        Ok(Address(bytes))
    }

    fn print(&self, address: &Address) -> String {
        let format = self.domain.capabilities().address_format;
        crate::offer::print_address(format, address.0.as_ptr(), address.0.len())
    }
}
