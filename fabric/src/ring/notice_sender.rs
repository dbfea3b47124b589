//! Sends notices without a chunk: credit, and the closing of either side.

use super::credit_format;
use super::memory::RegistrationScope;
use super::notify::{CREDIT_NOTICE_LEN, NOTICE_LEN, NOTICE_TAG};
use super::{Credit, EndpointIo, NotifyMode};
use crate::endpoint::{InjectOutcome, LocalSegment, RemoteTarget};
use crate::{
    Access, Caps, Domain, Error, ErrorKind, HostMemory, MemoryRegion, Order, Peer, PostOptions,
    RemoteMemory, RemoteRegion, Result, TransferFlags,
};

/// Token of writes that cannot be injected.
pub(super) const NOTICE_TOKEN: u64 = 0x5361_6964 << 32;
/// Token of the last notice, whose completion means that it arrived: this, and a number of the
/// caller.
pub(super) const LAST_NOTICE_TOKEN: u64 = 0x4c61_7374 << 32;

/// Token of a credit for which the next one waits: this, and a number of the caller.
const CREDIT_TOKEN: u64 = 0x4372_6564 << 32;

#[inline]
pub(super) fn parse_credit_token(token: u64) -> Option<u32> {
    (token >> 32 == CREDIT_TOKEN >> 32).then_some(token as u32)
}

/// Sends notices to one peer, in the notify mode of its ring.
#[derive(Debug)]
pub(super) struct NoticeSender {
    mode: NotifyMode,
    tag: Option<u64>,
    peer: Peer,
    /// Target of writes that carry an immediate.
    credit_memory: RemoteMemory,
    credit_offset: u64,
    /// Source of writes that are not injected.
    words: MemoryRegion,
}

impl NoticeSender {
    pub(super) fn new(
        scope: RegistrationScope<'_>,
        (mode, tagged): (NotifyMode, bool),
        peer: Peer,
        (credit_memory, credit_offset): (&RemoteRegion, usize),
    ) -> Result<Self> {
        let domain = scope.domain();
        if mode == NotifyMode::Message {
            let caps = domain.capabilities().caps;
            let needed = if tagged { Caps::TAGGED } else { Caps::MESSAGE };
            if !caps.contains(needed) {
                let with = if tagged { "with" } else { "without" };
                let detail =
                    format!("the peer requires messages {with} tags, which this domain lacks");
                return Err(Error::new(ErrorKind::NotSupported, "open ring", detail));
            }
        }
        let credit_memory = domain.attach(credit_memory)?;
        let credit_offset = credit_offset as u64;
        if credit_memory.len() < credit_offset + credit_format::LENGTH as u64 {
            let detail =
                format!("the offered credit memory has only {} bytes", credit_memory.len());
            return Err(Error::new(ErrorKind::MalformedDescriptor, "open ring", detail));
        }
        let words = scope.register(HostMemory::zeroed(credit_format::LENGTH)?, Access::WRITE)?;
        let tag = tagged.then_some(NOTICE_TAG);
        Ok(Self { mode, tag, peer, credit_memory, credit_offset, words })
    }

    /// Sends a notice. False if there is no room now.
    #[inline]
    pub(super) fn send_notice(&self, io: &mut EndpointIo, bits: u32) -> Result<bool> {
        match self.mode {
            NotifyMode::Immediate => self.write(io, &[0; 8], 0, Some(bits.into())),
            NotifyMode::Message => {
                io.endpoint.try_inject(&io.queue, self.peer, &bits.to_le_bytes(), self.tag)
            }
        }
    }

    /// Sends the last notice before the endpoint is closed, as an immediate. A completion with
    /// [`LAST_NOTICE_TOKEN`] and this number reports its arrival. False if there is no room now.
    pub(super) fn send_last_notice(
        &self,
        io: &mut EndpointIo,
        bits: u32,
        number: u32,
    ) -> Result<bool> {
        let options = PostOptions::token(LAST_NOTICE_TOKEN | u64::from(number))
            .flags(TransferFlags::DELIVERY_COMPLETE);
        self.write_words(io, (8, 0), Some(bits.into()), &options)
    }

    /// May a credit overtake an earlier one, which would then overwrite it in their common slot?
    /// Messages have no common slot.
    pub(super) fn credits_may_reorder(&self, domain: &Domain) -> bool {
        let guarantees = &domain.capabilities().order;
        let order = guarantees.send_order & guarantees.receive_order;
        let is_ordered = order.contains(Order::WRITE_AFTER_WRITE)
            && guarantees.max_ordered_write >= credit_format::LENGTH;
        self.mode == NotifyMode::Immediate && !is_ordered
    }

    /// Returns credit to a writer. With a number, a completion that [carries
    /// it](parse_credit_token) reports that the credit arrived. False if there is no room now.
    pub(super) fn send_credit(
        &self,
        io: &mut EndpointIo,
        (bits, credit): (u32, Credit),
        number: Option<u32>,
    ) -> Result<bool> {
        let (credit, data) = (credit.encode(), Some(bits.into()));
        match (self.mode, number) {
            (NotifyMode::Immediate, Some(number)) => {
                self.words.write(0, &credit)?;
                let options = PostOptions::token(CREDIT_TOKEN | u64::from(number))
                    .flags(TransferFlags::DELIVERY_COMPLETE);
                self.write_words(io, (credit.len(), self.credit_offset), data, &options)
            }
            (NotifyMode::Immediate, None) => self.write(io, &credit, self.credit_offset, data),
            (NotifyMode::Message, _) => {
                let mut bytes = [0; CREDIT_NOTICE_LEN];
                bytes[..NOTICE_LEN].copy_from_slice(&bits.to_le_bytes());
                bytes[NOTICE_LEN..].copy_from_slice(&credit);
                io.endpoint.try_inject(&io.queue, self.peer, &bytes, self.tag)
            }
        }
    }

    #[inline]
    fn write(
        &self,
        io: &mut EndpointIo,
        bytes: &[u8],
        offset: u64,
        data: Option<u64>,
    ) -> Result<bool> {
        let target = RemoteTarget { memory: &self.credit_memory, offset };
        match io.endpoint.try_inject_write(&io.queue, self.peer, bytes, target, data)? {
            InjectOutcome::Accepted => return Ok(true),
            InjectOutcome::WouldBlock => return Ok(false),
            InjectOutcome::NotSupported => {}
        }
        // An earlier write may still read these bytes: it then carries the newer credit.
        self.words.write(0, bytes)?;
        let options = PostOptions::token(NOTICE_TOKEN);
        self.write_words(io, (bytes.len(), offset), data, &options)
    }

    fn write_words(
        &self,
        io: &mut EndpointIo,
        (length, offset): (usize, u64),
        data: Option<u64>,
        options: &PostOptions,
    ) -> Result<bool> {
        let target = RemoteTarget { memory: &self.credit_memory, offset };
        let words = [LocalSegment { region: &self.words, offset: 0, length }];
        io.endpoint.try_write_segments(&mut io.queue, self.peer, &words, target, data, options)
    }

    pub(super) fn peer(&self) -> Peer {
        self.peer
    }
}
