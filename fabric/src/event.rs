//! Control events: connections, asynchronous registrations.
//!
//! This queue reports when connections are made, refused and lost; it carries no payload. An
//! event queue belongs to a fabric, not to a domain, so that a listener can exist before any
//! domain is open.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use libfabric_sys as sys;

use crate::handle::Handle;
use crate::offer::{Info, string};
use crate::waiting::{Backoff, Deadline};
use crate::{Error, ErrorKind, Fabric, Offer, Result, Threading};

/// Space for connection data: providers carry less, and longer data is refused.
pub(crate) const MAX_CONNECTION_DATA: usize = 1024;

/// A queue of control events (`fid_eq`). Read by one owner at a time.
///
/// ```
/// use std::time::Duration;
/// use fabric::*;
/// let offer = Query::new(EndpointKind::Msg).provider("tcp").source("127.0.0.1").first()?;
/// let fabric = Fabric::open(&offer)?;
/// let mut events = EventQueue::open(&fabric)?;
/// let listener = Listener::open(&fabric, &offer, &events)?;
/// println!("listening at {:?}", listener.address()?);
/// let timed_out = events.wait(Duration::from_millis(5)).unwrap_err();
/// assert_eq!(timed_out.kind(), ErrorKind::DeadlineExceeded);
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug)]
pub struct EventQueue(Arc<EventQueueShared>);

#[derive(Debug)]
pub(crate) struct EventQueueShared {
    handle: Handle<sys::fid_eq>,
    fabric: Fabric,
}

/// A control event.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// A peer requests a connection to a listener.
    ConnectionRequest(ConnectionRequest),
    /// A connection is up on this side. The accepting side gets this event too, without data.
    Connected {
        /// The endpoint, see [`Endpoint::is`](crate::Endpoint::is).
        endpoint: usize,
        /// Data of the accepting side.
        data: Vec<u8>,
    },
    /// A connection ended. Some providers report it only while the endpoint's completion queue
    /// is polled as well.
    Shutdown {
        /// The endpoint, see [`Endpoint::is`](crate::Endpoint::is).
        endpoint: usize,
    },
    /// An asynchronous registration is complete.
    RegistrationComplete(RegistrationDone),
    /// An event that this library did not request.
    Other {
        /// libfabric's event number.
        number: u32,
    },
}

/// Names a completed registration: see
/// [`PendingRegion::is_done_by`](crate::PendingRegion::is_done_by). Only libfabric makes these
/// values, so that a caller cannot finish a registration in flight.
#[derive(Debug)]
pub struct RegistrationDone {
    /// The context that the registration was started with.
    number: usize,
    /// The libfabric object that the provider names: the region, or its domain.
    object: usize,
}

impl RegistrationDone {
    /// Is this the registration of this region, started with the context `number`? Where a
    /// provider loses the context, the event names the region itself.
    pub(crate) fn is_of(&self, number: usize, region: *mut sys::fid) -> bool {
        self.number == number || (self.number == 0 && self.object == region as usize)
    }
}

/// A peer's connection request. Accept it with an endpoint made from its offer
/// ([`EndpointBuilder::offer`](crate::EndpointBuilder::offer)), or reject it with
/// [`Listener::reject`](crate::Listener::reject).
///
/// Dropping it does neither: the request is freed without an answer, the half-open connection
/// remains, and the peer waits until its own deadline.
#[derive(Debug)]
pub struct ConnectionRequest {
    /// The offer of the connection: its endpoint is opened from it.
    pub offer: Offer,
    /// Data of the connecting side.
    pub data: Vec<u8>,
}

#[repr(C)]
struct ConnectionEntry {
    head: sys::fi_eq_cm_entry,
    data: [u8; MAX_CONNECTION_DATA],
}

impl EventQueueShared {
    pub(crate) fn is_on(&self, fabric: &Fabric) -> bool {
        self.fabric.is_same(fabric)
    }

    pub(crate) fn as_fid(&self) -> *mut sys::fid {
        self.handle.as_fid()
    }
}

impl EventQueue {
    /// Opens an event queue.
    ///
    /// # Errors
    /// The provider's error.
    pub fn open(fabric: &Fabric) -> Result<Self> {
        let mut attributes =
            sys::fi_eq_attr { wait_obj: sys::FI_WAIT_UNSPEC, ..Default::default() };
        // SAFETY: the fabric is alive; the object is owned here.
        let handle = unsafe {
            Handle::open("fi_eq_open", fabric.provider(), |queue| {
                sys::fi_eq_open(fabric.as_ptr(), &mut attributes, queue, ptr::null_mut())
            })?
        };
        Ok(Self(Arc::new(EventQueueShared { handle, fabric: fabric.clone() })))
    }

    /// For objects that are bound to the queue.
    pub(crate) fn shared_handle(&self) -> Arc<EventQueueShared> {
        Arc::clone(&self.0)
    }

    /// The next event, if there is one.
    ///
    /// # Errors
    /// The reason of a failed operation, such as a refused connection.
    pub fn poll(&mut self) -> Result<Option<Event>> {
        let mut number = 0;
        // SAFETY: all bytes zero is a valid entry.
        let mut entry: ConnectionEntry = unsafe { std::mem::zeroed() };
        // SAFETY: the buffer's length is passed.
        let got = unsafe {
            sys::fi_eq_read(
                self.0.handle.as_ptr(),
                &mut number,
                ptr::from_mut(&mut entry).cast(),
                size_of::<ConnectionEntry>(),
                0,
            )
        };
        if got == -sys::FI_EAGAIN as isize || got == 0 {
            return Ok(None);
        }
        if got == -crate::error::number::AVAILABLE as isize {
            return Err(self.read_error());
        }
        let length = Error::check("fi_eq_read", got as i64)
            .map_err(|e| e.with_provider(self.0.fabric.provider()))? as usize;
        // SAFETY: libfabric wrote an entry of the kind that `number` names; this process owns
        // the info of a connection request.
        Ok(Some(unsafe { decode(number, &entry, length, &self.0.fabric) }))
    }

    /// Waits for the next event.
    ///
    /// # Errors
    /// `DeadlineExceeded`, or the reason of a failed operation.
    pub fn wait(&mut self, timeout: Duration) -> Result<Event> {
        let deadline = Deadline::after(timeout);
        // Connection events take many microseconds, and some providers make progress only while
        // the queue is read: so short sleeps instead of one long one.
        let mut backoff = Backoff::sleeping(Backoff::MAX_PAUSE);
        loop {
            if let Some(event) = self.poll()? {
                return Ok(event);
            }
            if !backoff.pause(&deadline) {
                let detail = format!("no event within {timeout:?}");
                let kind = ErrorKind::DeadlineExceeded;
                return Err(self.0.fabric.error(kind, "wait for event", detail));
            }
        }
    }

    fn read_error(&self) -> Error {
        // SAFETY: all bytes zero is a valid entry; the library fills what it knows.
        let mut entry: sys::fi_eq_err_entry = unsafe { std::mem::zeroed() };
        // SAFETY: the entry is valid.
        let got = unsafe { sys::fi_eq_readerr(self.0.handle.as_ptr(), &mut entry, 0) };
        if got < 0 {
            return Error::from_code("fi_eq_readerr", got as i64)
                .with_provider(self.0.fabric.provider());
        }
        let mut buffer = [0_u8; 256];
        // SAFETY: the entry was just read; the buffer's length is passed.
        let text = unsafe {
            let text = sys::fi_eq_strerror(
                self.0.handle.as_ptr(),
                entry.prov_errno,
                entry.err_data,
                buffer.as_mut_ptr().cast(),
                buffer.len(),
            );
            string(text)
        };
        Error::from_code("connection management", i64::from(entry.err))
            .with_provider(self.0.fabric.provider())
            .with_provider_text(entry.prov_errno, text)
    }
}

/// # Safety
/// `entry` holds `length` bytes of an event with this number.
unsafe fn decode(number: u32, entry: &ConnectionEntry, length: usize, fabric: &Fabric) -> Event {
    let head = size_of::<sys::fi_eq_cm_entry>();
    let data_length = length.saturating_sub(head).min(MAX_CONNECTION_DATA);
    let data = || entry.data[..data_length].to_vec();
    match number {
        sys::FI_CONNREQ => {
            // SAFETY: by contract this process owns the info.
            match unsafe { Info::adopt(entry.head.info) } {
                Some(info) => Event::ConnectionRequest(ConnectionRequest {
                    offer: Offer::adopt(info.for_request(fabric), Threading::Safe),
                    data: data(),
                }),
                None => Event::Other { number },
            }
        }
        sys::FI_CONNECTED => Event::Connected { endpoint: entry.head.fid as usize, data: data() },
        sys::FI_SHUTDOWN => Event::Shutdown { endpoint: entry.head.fid as usize },
        // The context distinguishes registrations: some providers return the domain's fid in
        // place of the region's.
        sys::FI_MR_COMPLETE => Event::RegistrationComplete(RegistrationDone {
            number: entry.head.info as usize,
            object: entry.head.fid as usize,
        }),
        number => Event::Other { number },
    }
}
