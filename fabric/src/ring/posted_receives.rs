//! Receives that are posted ahead for notices: for messages, and where immediates consume receives.

use super::credit_format;
use super::memory::RegistrationScope;
use super::notify::{CREDIT_NOTICE_LEN, NOTICE_LEN, NOTICE_TAG, NotifyMode, has_tags};
use super::queue_budget::immediate_receive_count;
use super::{EndpointIo, ReceivedNotice};
use crate::{Access, Completion, CompletionKind, Domain, HostMemory, MemoryRegion, Result};

/// Messages that may have arrived and not been handled: the chunks in flight of two rings. Beyond
/// that some providers buffer, and some block the sender.
const MESSAGE_RECEIVES: u16 = 1024;
const RECEIVE_LEN: usize = 32;
/// Tokens of receives for messages: this, and the slot.
const RECEIVE_TOKEN: u64 = 0x5263_7620 << 32;

#[derive(Debug)]
pub(super) struct PostedReceives {
    /// Buffers of messages, once a ring needs them.
    messages: Option<MemoryRegion>,
    tagged: bool,
    /// Receives without a buffer still to be posted, for immediates where messages have receives of
    /// their own.
    missing_receives: usize,
    uses_receives: bool,
    /// Slots whose receive is still to be posted.
    unposted: Vec<u16>,
}

impl PostedReceives {
    pub(super) fn new(domain: &Domain) -> Self {
        let uses_receives = domain.capabilities().immediates_consume_receives();
        let tagged = has_tags(domain.capabilities());
        let missing_receives = match uses_receives && tagged {
            true => immediate_receive_count(domain.capabilities()),
            false => 0,
        };
        Self { messages: None, tagged, missing_receives, uses_receives, unposted: Vec::new() }
    }

    /// Prepares for a ring in this notify mode, and posts missing receives.
    pub(super) fn prepare_for(&mut self, io: &mut EndpointIo, mode: NotifyMode) -> Result<()> {
        // An immediate consumes the next receive, and so does a message: then every receive needs a
        // buffer.
        let is_shared = self.uses_receives && !self.tagged;
        if self.messages.is_some() || !(is_shared || mode == NotifyMode::Message) {
            return self.refill(io);
        }
        let capabilities = io.endpoint.domain().capabilities();
        let most = match is_shared {
            true => immediate_receive_count(capabilities),
            false => capabilities.limits.receive_depth.min(MESSAGE_RECEIVES.into()),
        };
        let count = u16::try_from(most).unwrap_or(u16::MAX).max(1);
        let memory = HostMemory::zeroed(usize::from(count) * RECEIVE_LEN)?;
        let region = RegistrationScope::of(&io.endpoint).register(memory, Access::RECEIVE)?;
        self.messages = Some(region);
        self.unposted = (0..count).rev().collect();
        self.refill(io)
    }

    /// Posts missing receives as far as there is room.
    #[inline]
    pub(super) fn refill(&mut self, io: &mut EndpointIo) -> Result<()> {
        if self.missing_receives == 0 && self.unposted.is_empty() {
            return Ok(());
        }
        self.post_missing(io)
    }

    fn post_missing(&mut self, io: &mut EndpointIo) -> Result<()> {
        while self.missing_receives > 0 {
            if !io.endpoint.try_receive(&mut io.queue, None, None, 0)? {
                return Ok(());
            }
            self.missing_receives -= 1;
        }
        let Some(region) = &self.messages else { return Ok(()) };
        while let Some(slot) = self.unposted.last().copied() {
            let at = usize::from(slot) * RECEIVE_LEN;
            let into = region.slice(at..at + CREDIT_NOTICE_LEN)?;
            let (tag, token) = (self.tagged.then_some(NOTICE_TAG), RECEIVE_TOKEN | u64::from(slot));
            if !io.endpoint.try_receive(&mut io.queue, Some(&into), tag, token)? {
                return Ok(());
            }
            self.unposted.pop();
        }
        Ok(())
    }

    /// Decodes a completion if it is a notice. A consumed receive is to be [posted
    /// again](Self::refill).
    #[inline]
    pub(super) fn handle_notice(
        &mut self,
        completion: &Completion,
    ) -> Result<Option<ReceivedNotice>> {
        match (completion.kind, completion.data) {
            (CompletionKind::RemoteWrite, Some(data)) => {
                if Self::owns_token(completion.token) {
                    self.unposted.push(completion.token as u16);
                } else if self.uses_receives && completion.operation.is_some() {
                    self.missing_receives += 1;
                }
                let (bits, length) = (data as u32, completion.length as u64);
                Ok(Some(ReceivedNotice { bits, length, credit: None }))
            }
            (CompletionKind::Receive, _) if Self::owns_token(completion.token) => {
                self.message(completion)
            }
            _ => Ok(None),
        }
    }

    fn message(&mut self, completion: &Completion) -> Result<Option<ReceivedNotice>> {
        let slot = completion.token as u16;
        self.unposted.push(slot);
        let Some(region) = &self.messages else { return Ok(None) };
        let (mut bits, mut credit) = ([0; NOTICE_LEN], [0; credit_format::LENGTH]);
        let at = usize::from(slot) * RECEIVE_LEN;
        region.read(at, &mut bits)?;
        region.read(at + NOTICE_LEN, &mut credit)?;
        let credit = match completion.length {
            NOTICE_LEN => None,
            CREDIT_NOTICE_LEN => Some(credit),
            // A message of another length is no notice.
            _ => return Ok(None),
        };
        Ok(Some(ReceivedNotice { bits: u32::from_le_bytes(bits), length: 0, credit }))
    }

    /// One of these receives failed: the message was too long for a notice and is lost.
    pub(super) fn receive_failed(&mut self, token: u64) {
        self.unposted.push(token as u16);
    }

    pub(super) fn owns_token(token: u64) -> bool {
        token >> 32 == RECEIVE_TOKEN >> 32
    }
}
