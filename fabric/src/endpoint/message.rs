//! Two-sided messages, with and without tags.
//!
//! A message needs a receive that was posted for it. What happens to one that
//! comes early is the provider's affair: most keep it, without a bound, and some
//! crash on thousands of them. Bound what is in flight by credits of your own.
//!
//! `inject` copies the bytes before it returns, so nothing stays in flight and the
//! source may be any slice; its limit is `Capabilities::inject_size`.

use libfabric_sys as sys;

use super::Endpoint;
use super::post::{Options, Posting, Side, keep_region};
use super::rma::parts;
use super::vectors::Vectors;
use crate::address::Peer;
use crate::error::{ErrorKind, Result};
use crate::flags::Access;
use crate::memory::RegionSlice;
use crate::queue::{CompletionKind, CompletionQueue, OperationId};

const SEND: (Side, CompletionKind) = (Side::Transmit, CompletionKind::Send);
const RECEIVE: (Side, CompletionKind) = (Side::Receive, CompletionKind::Receive);

impl Endpoint {
    /// Sends a message (`fi_send`).
    ///
    /// # Errors
    /// `AccessDenied`, `Truncated` above the largest message; `DeadlineExceeded`
    /// if the provider takes nothing for as long as the options say.
    #[inline]
    pub fn send(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        local: &RegionSlice,
        options: impl Into<Options>,
    ) -> Result<OperationId> {
        let options = options.into();
        if !options.flags.is_empty() {
            return self.send_gathered(queue, to, &[local], None, options);
        }
        let operation = "fi_send";
        self.check_message(operation)?;
        self.check_length(operation, local.len())?;
        self.check_local(operation, local, Access::SEND)?;
        let peer = self.resolve(operation, to)?;
        let (pointer, length, descriptor) = parts(local);
        self.submit(
            Posting::new(operation, SEND, to, &options),
            queue,
            |slot| keep_region(slot, local),
            #[allow(unsafe_code)]
            // SAFETY: the slot keeps the range alive until completion.
            move |endpoint, context| unsafe {
                sys::direct::fi_send(endpoint, pointer, length, descriptor, peer, context)
            },
        )
    }

    /// Sends a message with an immediate (`fi_senddata`).
    ///
    /// # Errors
    /// As [`send`](Self::send); `OutOfBounds` for an immediate wider than the
    /// provider carries.
    pub fn send_data(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        local: &RegionSlice,
        data: u64,
        options: impl Into<Options>,
    ) -> Result<OperationId> {
        self.send_gathered(queue, to, &[local], Some(data), options)
    }

    /// Gathers several slices into one message (`fi_sendmsg`).
    ///
    /// # Errors
    /// As [`send_data`](Self::send_data); `InvalidArgument` for too many slices.
    pub fn send_gathered(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        local: &[&RegionSlice],
        data: Option<u64>,
        options: impl Into<Options>,
    ) -> Result<OperationId> {
        let options = options.into();
        let operation = "fi_sendmsg";
        if let Some(data) = data {
            self.check_message_data(operation, data)?;
        }
        self.check_message(operation)?;
        let vectors = Vectors::new(self, operation, local, Access::SEND)?;
        self.check_length(operation, vectors.length)?;
        self.check_injected(operation, &options, vectors.length)?;
        let peer = self.resolve(operation, to)?;
        let flags =
            options.flags.bits() | sys::FI_COMPLETION | data.map_or(0, |_| sys::FI_REMOTE_CQ_DATA);
        self.submit(
            Posting::new(operation, SEND, to, &options),
            queue,
            |slot| local.iter().for_each(|slice| keep_region(slot, slice)),
            |endpoint, context| {
                let message = vectors.message(peer, context, data.unwrap_or(0));
                #[allow(unsafe_code)]
                // SAFETY: the vectors live for the call, what they name until completion.
                unsafe {
                    sys::fi_sendmsg(endpoint, &message, flags)
                }
            },
        )
    }

    /// Sends a few bytes that are copied at once (`fi_inject`, or
    /// `fi_injectdata` with an immediate). No completion is reported.
    ///
    /// # Errors
    /// As [`send`](Self::send); `Truncated` above the provider's inject size.
    pub fn inject(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        bytes: &[u8],
        data: Option<u64>,
    ) -> Result<()> {
        let operation = "fi_inject";
        self.check_message(operation)?;
        if let Some(data) = data {
            self.check_message_data(operation, data)?;
        }
        let peer = self.check_inject(operation, to, bytes.len())?;
        let (pointer, length) = (bytes.as_ptr().cast(), bytes.len());
        self.submit_injected(
            operation,
            queue,
            to,
            #[allow(unsafe_code)]
            // SAFETY: the bytes are copied before the call returns.
            |endpoint| unsafe {
                match data {
                    Some(data) => sys::fi_injectdata(endpoint, pointer, length, data, peer),
                    None => sys::fi_inject(endpoint, pointer, length, peer),
                }
            },
        )
    }

    /// Posts a buffer for one message from anybody (`fi_recv`).
    ///
    /// # Errors
    /// `AccessDenied`, or what the provider says.
    #[inline]
    pub fn receive(
        &mut self,
        queue: &mut CompletionQueue,
        into: &RegionSlice,
        options: impl Into<Options>,
    ) -> Result<OperationId> {
        let options = options.into();
        let operation = "fi_recv";
        self.check_message(operation)?;
        self.check_no_flags(operation, &options)?;
        self.check_local(operation, into, Access::RECEIVE)?;
        let (pointer, length, descriptor) = parts(into);
        let peer = sys::FI_ADDR_UNSPEC;
        self.submit(
            Posting::new(operation, RECEIVE, Peer::ANY, &options),
            queue,
            |slot| keep_region(slot, into),
            #[allow(unsafe_code)]
            // SAFETY: the slot keeps the range alive until completion.
            move |endpoint, context| unsafe {
                sys::direct::fi_recv(endpoint, pointer, length, descriptor, peer, context)
            },
        )
    }

    /// Posts a receive without a buffer: one for each immediate that is expected,
    /// where immediates consume receives
    /// ([`immediates_consume_receives`](crate::Capabilities::immediates_consume_receives)).
    ///
    /// # Errors
    /// What the provider says.
    pub fn receive_notice(
        &mut self,
        queue: &mut CompletionQueue,
        options: impl Into<Options>,
    ) -> Result<OperationId> {
        let options = options.into();
        self.check_message("fi_recv")?;
        self.check_no_flags("fi_recv", &options)?;
        let peer = sys::FI_ADDR_UNSPEC;
        let null = std::ptr::null_mut();
        self.submit(
            Posting::new("fi_recv", RECEIVE, Peer::ANY, &options),
            queue,
            |_| {},
            #[allow(unsafe_code)]
            // SAFETY: no buffer.
            move |endpoint, context| unsafe {
                sys::direct::fi_recv(endpoint, null, 0, null, peer, context)
            },
        )
    }

    /// Scatters one message into several slices (`fi_recvv`).
    ///
    /// # Errors
    /// As [`receive`](Self::receive); `InvalidArgument` for too many slices.
    pub fn receive_scattered(
        &mut self,
        queue: &mut CompletionQueue,
        into: &[&RegionSlice],
        options: impl Into<Options>,
    ) -> Result<OperationId> {
        let options = options.into();
        let operation = "fi_recvv";
        self.check_message(operation)?;
        let vectors = Vectors::new(self, operation, into, Access::RECEIVE)?;
        self.submit(
            Posting::new(operation, RECEIVE, Peer::ANY, &options),
            queue,
            |slot| into.iter().for_each(|slice| keep_region(slot, slice)),
            |endpoint, context| {
                let message = vectors.message(sys::FI_ADDR_UNSPEC, context, 0);
                #[allow(unsafe_code)]
                // SAFETY: as in `send_gathered`.
                unsafe {
                    sys::fi_recvmsg(endpoint, &message, options.flags.bits() | sys::FI_COMPLETION)
                }
            },
        )
    }

    /// Sends a message with a tag (`fi_tsend`), and an immediate if there is one.
    ///
    /// # Errors
    /// As [`send`](Self::send); `NotSupported` without `Caps::TAGGED`.
    pub fn send_tagged(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        local: &RegionSlice,
        tag: u64,
        data: Option<u64>,
        options: impl Into<Options>,
    ) -> Result<OperationId> {
        let options = options.into();
        let operation = "fi_tsendmsg";
        self.check_tagged(operation)?;
        if let Some(data) = data {
            self.check_message_data(operation, data)?;
        }
        let vectors = Vectors::new(self, operation, &[local], Access::SEND)?;
        self.check_length(operation, vectors.length)?;
        self.check_injected(operation, &options, vectors.length)?;
        let peer = self.resolve(operation, to)?;
        let flags =
            options.flags.bits() | sys::FI_COMPLETION | data.map_or(0, |_| sys::FI_REMOTE_CQ_DATA);
        self.submit(
            Posting::new(operation, SEND, to, &options),
            queue,
            |slot| keep_region(slot, local),
            |endpoint, context| {
                let message = vectors.tagged(peer, (tag, 0), context, data.unwrap_or(0));
                #[allow(unsafe_code)]
                // SAFETY: as in `send_gathered`.
                unsafe {
                    sys::fi_tsendmsg(endpoint, &message, flags)
                }
            },
        )
    }

    /// Sends a few bytes with a tag that are copied at once (`fi_tinject`).
    ///
    /// # Errors
    /// As [`inject`](Self::inject) and [`send_tagged`](Self::send_tagged).
    pub fn inject_tagged(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        bytes: &[u8],
        tag: u64,
    ) -> Result<()> {
        let operation = "fi_tinject";
        self.check_tagged(operation)?;
        let peer = self.check_inject(operation, to, bytes.len())?;
        self.submit_injected(
            operation,
            queue,
            to,
            #[allow(unsafe_code)]
            // SAFETY: the bytes are copied before the call returns.
            |endpoint| unsafe {
                sys::fi_tinject(endpoint, bytes.as_ptr().cast(), bytes.len(), peer, tag)
            },
        )
    }

    /// Posts a buffer for one message whose tag equals `tag` in all bits that
    /// `ignore` leaves (`fi_trecv`).
    ///
    /// A set bit of `ignore` matches anything: 0 wants the exact tag, `u64::MAX` takes
    /// any message that has one. The completion's `tag` tells what came.
    ///
    /// ```
    /// use std::time::Duration;
    /// use fabric::*;
    /// # let caps = Caps::MESSAGE | Caps::TAGGED;
    /// # let offer = Query::new(EndpointKind::Rdm).caps(caps).source("127.0.0.1").first()?;
    /// # let domain = Domain::open(&offer)?;
    /// # let addresses = AddressVector::open(&domain)?;
    /// # let mut queue = CompletionQueue::open(&domain)?;
    /// # let mut endpoint =
    /// #     Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
    /// # let me = addresses.insert(&endpoint.address()?)?;
    /// # let inbox = domain.register(HostMemory::zeroed(8)?, Access::ALL)?;
    /// # let outbox = domain.register(HostMemory::zeroed(8)?, Access::ALL)?;
    /// // The low byte is a sequence number that the receiver does not choose by.
    /// let receive = endpoint.receive_tagged(&mut queue, None, &inbox.all(), (0x500, 0xff), 0)?;
    /// endpoint.send_tagged(&mut queue, me, &outbox.all(), 0x507, None, 0)?;
    /// assert_eq!(queue.complete(receive, Duration::from_secs(5))?.tag, 0x507);
    /// # Ok::<(), fabric::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`receive`](Self::receive); `NotSupported` without `Caps::TAGGED`.
    pub fn receive_tagged(
        &mut self,
        queue: &mut CompletionQueue,
        from: Option<Peer>,
        into: &RegionSlice,
        (tag, ignore): (u64, u64),
        options: impl Into<Options>,
    ) -> Result<OperationId> {
        let options = options.into();
        let operation = "fi_trecv";
        self.check_tagged(operation)?;
        self.check_no_flags(operation, &options)?;
        self.check_local(operation, into, Access::RECEIVE)?;
        let peer = self.source(operation, from)?;
        let (pointer, length, descriptor) = parts(into);
        self.submit(
            Posting::new(operation, RECEIVE, from.unwrap_or(Peer::ANY), &options),
            queue,
            |slot| keep_region(slot, into),
            #[allow(unsafe_code)]
            // SAFETY: the slot keeps the range alive until completion.
            move |endpoint, context| unsafe {
                sys::fi_trecv(endpoint, pointer, length, descriptor, peer, tag, ignore, context)
            },
        )
    }

    #[inline]
    fn source(&self, operation: &'static str, from: Option<Peer>) -> Result<u64> {
        match from {
            Some(peer) => self.resolve(operation, peer),
            None => Ok(sys::FI_ADDR_UNSPEC),
        }
    }

    pub(super) fn check_tagged(&self, operation: &'static str) -> Result<()> {
        if self.limits.has_tagged {
            return Ok(());
        }
        Err(self.refuse(
            operation,
            ErrorKind::NotSupported,
            "the endpoint has no tagged messages: ask for Caps::TAGGED".to_owned(),
        ))
    }
}
