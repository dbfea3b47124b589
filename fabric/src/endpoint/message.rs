//! Two-sided messages, with and without tags.
//!
//! A message needs a posted receive. Providers differ in what they do with a message that
//! arrives before its receive: most buffer it, without a bound, and some crash on thousands of
//! them. Applications must bound messages in flight by credits.

use std::os::raw::c_void;

use libfabric_sys as sys;

use super::Endpoint;
use super::post::PostOptions;
use super::rma::parts;
use super::vectors::Vectors;
use crate::{
    Access, CompletionKind, CompletionQueue, OperationId, Peer, RegionSlice, Result, TransferFlags,
};

impl Endpoint {
    /// Sends a message (`fi_send`).
    ///
    /// # Errors
    /// `AccessDenied`, `Truncated` above the largest message; `DeadlineExceeded` if the
    /// provider accepts no operation within the timeout of the options.
    #[inline]
    pub fn send(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        local: &RegionSlice,
        options: impl Into<PostOptions>,
    ) -> Result<OperationId> {
        self.send_message(queue, to, local, None, options.into())
    }

    /// Sends a message with a tag (`fi_tsendmsg`).
    ///
    /// # Errors
    /// As [`send`](Self::send); `NotSupported` without `Caps::TAGGED`.
    pub fn send_tagged(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        local: &RegionSlice,
        tag: u64,
        options: impl Into<PostOptions>,
    ) -> Result<OperationId> {
        self.send_message(queue, to, local, Some(tag), options.into())
    }

    /// Uses the short form without flags and tag; otherwise the form with a message structure.
    #[inline]
    fn send_message(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        local: &RegionSlice,
        tag: Option<u64>,
        options: PostOptions,
    ) -> Result<OperationId> {
        let operation = if tag.is_some() { "fi_tsendmsg" } else { "fi_send" };
        self.check_messages(operation, tag.is_some())?;
        self.check_length(operation, local.len())?;
        if options.flags.contains(TransferFlags::INJECT) {
            self.check_injected(operation, local.len(), self.limits.inject_size)?;
        }
        self.check_local(operation, local, Access::SEND)?;
        let peer = self.resolve(operation, to)?;
        let (pointer, length, descriptor) = parts(local);
        let flags = options.flags.bits();
        self.post(
            (operation, CompletionKind::Send, to),
            &options,
            queue,
            |slot| slot.keep_region(local.as_region()),
            #[allow(unsafe_code)]
            // SAFETY: the slot keeps the range alive until completion; the vectors live for the
            // call.
            move |endpoint, context| unsafe {
                if tag.is_none() && flags == 0 {
                    return sys::fi_send(endpoint, pointer, length, descriptor, peer, context);
                }
                let vectors = Vectors::raw(pointer, length, descriptor);
                let flags = flags | sys::FI_COMPLETION;
                match tag {
                    Some(tag) => {
                        sys::fi_tsendmsg(endpoint, &vectors.tagged(peer, tag, context), flags)
                    }
                    None => sys::fi_sendmsg(endpoint, &vectors.message(peer, context), flags),
                }
            },
        )
    }

    /// Posts a buffer for one message from any peer (`fi_recv`).
    ///
    /// # Errors
    /// `AccessDenied`, or the provider's error.
    #[inline]
    pub fn receive(
        &mut self,
        queue: &mut CompletionQueue,
        into: &RegionSlice,
        options: impl Into<PostOptions>,
    ) -> Result<OperationId> {
        self.receive_message(queue, Some(into), None, options.into())
    }

    /// Posts a receive without a buffer: one for each expected immediate, if immediates consume
    /// receives
    /// ([`immediates_consume_receives`](crate::Capabilities::immediates_consume_receives)).
    ///
    /// # Errors
    /// The provider's error.
    pub fn receive_immediate(
        &mut self,
        queue: &mut CompletionQueue,
        options: impl Into<PostOptions>,
    ) -> Result<OperationId> {
        self.receive_message(queue, None, None, options.into())
    }

    /// Posts a buffer for one message whose tag equals `tag` in all bits that `ignore` does not
    /// set (`fi_trecv`).
    ///
    /// A set bit of `ignore` matches any value: 0 requires the exact tag, `u64::MAX` takes any
    /// tagged message. The completion's `tag` is the tag of the message.
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
    /// // The low byte is a sequence number, which the receiver ignores.
    /// let receive = endpoint.receive_tagged(&mut queue, &inbox.all(), (0x500, 0xff), 0)?;
    /// endpoint.send_tagged(&mut queue, me, &outbox.all(), 0x507, 0)?;
    /// assert_eq!(queue.complete(receive, Duration::from_secs(5))?.tag, 0x507);
    /// # Ok::<(), fabric::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`receive`](Self::receive); `NotSupported` without `Caps::TAGGED`.
    pub fn receive_tagged(
        &mut self,
        queue: &mut CompletionQueue,
        into: &RegionSlice,
        tag_and_ignore: (u64, u64),
        options: impl Into<PostOptions>,
    ) -> Result<OperationId> {
        self.receive_message(queue, Some(into), Some(tag_and_ignore), options.into())
    }

    #[inline]
    fn receive_message(
        &mut self,
        queue: &mut CompletionQueue,
        into: Option<&RegionSlice>,
        tag_and_ignore: Option<(u64, u64)>,
        options: PostOptions,
    ) -> Result<OperationId> {
        let (operation, call) = self.receive_call(into, tag_and_ignore)?;
        self.check_no_flags(operation, &options)?;
        self.post(
            (operation, CompletionKind::Receive, Peer::ANY),
            &options,
            queue,
            |slot| into.into_iter().for_each(|into| slot.keep_region(into.as_region())),
            call,
        )
    }

    /// Like the calls above, with the whole tag matched; false if the queue has no space now.
    pub(crate) fn try_receive(
        &mut self,
        queue: &mut CompletionQueue,
        into: Option<&RegionSlice>,
        tag: Option<u64>,
        token: u64,
    ) -> Result<bool> {
        let (operation, call) = self.receive_call(into, tag.map(|tag| (tag, 0)))?;
        let member = self.check_queue(operation, queue)?;
        let slot = queue.take(member, CompletionKind::Receive, Peer::ANY, token)?;
        let (id, context) = (slot.id(), slot.context());
        let code = call(self.handle.as_ptr(), context);
        if code == 0 {
            into.into_iter().for_each(|into| slot.keep_region(into.as_region()));
            return Ok(true);
        }
        queue.put_back(id);
        self.false_if_would_block(operation, Peer::ANY, code)
    }

    /// The checked call that posts a receive, with its name. The buffer must stay alive until
    /// completion.
    #[inline]
    fn receive_call(
        &self,
        into: Option<&RegionSlice>,
        tag_and_ignore: Option<(u64, u64)>,
    ) -> Result<(&'static str, impl Fn(*mut sys::fid_ep, *mut c_void) -> isize + Copy + use<>)>
    {
        let operation = if tag_and_ignore.is_some() { "fi_trecv" } else { "fi_recv" };
        self.check_messages(operation, tag_and_ignore.is_some())?;
        if let Some(into) = into {
            self.check_local(operation, into, Access::RECEIVE)?;
        }
        let null = std::ptr::null_mut();
        let (pointer, length, descriptor) = into.map_or((null, 0, null), parts);
        let peer = sys::FI_ADDR_UNSPEC;
        #[allow(unsafe_code)]
        // SAFETY: the caller that posts keeps the range alive until completion, where there is
        // one.
        let call = move |endpoint, context| unsafe {
            match tag_and_ignore {
                Some((tag, ignore)) => {
                    sys::fi_trecv(endpoint, pointer, length, descriptor, peer, tag, ignore, context)
                }
                None => sys::fi_recv(endpoint, pointer, length, descriptor, peer, context),
            }
        };
        Ok((operation, call))
    }
}
