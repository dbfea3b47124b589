//! Says what has no chunk: credit, and ends.

use super::credit::{self, Credit};
use super::memory::{Site, activate};
use super::notify::{CREDIT_NOTICE, NOTICE, Notify, TAG, longest_ordered_write};
use crate::endpoint::{Injected, Piece, Target};
use crate::{
    Access, Caps, CompletionQueue, Domain, Endpoint, Error, ErrorKind, HostMemory, MemoryRegion,
    Options, Peer, RemoteMemory, RemoteRegion, Result, TransferFlags,
};

/// The token of what is written, where it cannot be injected.
pub(super) const NOTICE_TOKEN: u64 = 0x5361_6964 << 32;
/// The token of what is said last, and is known to have come once it completes: this, and
/// a number that the caller chooses.
pub(super) const LAST: u64 = 0x4c61_7374 << 32;

/// The token of a credit that the next one waits for: this, and a number that the caller
/// chooses.
const CREDIT: u64 = 0x4372_6564 << 32;

/// The number of the credit that a token names.
#[inline]
pub(super) fn of_credit(token: u64) -> Option<u32> {
    (token >> 32 == CREDIT >> 32).then_some(token as u32)
}

/// Says bits to one peer, in the form that its ring is told in.
#[derive(Debug)]
pub(super) struct Speaker {
    pub(super) form: Notify,
    /// Do messages to the peer have a tag?
    tagged: bool,
    peer: Peer,
    /// Where a write goes that brings them.
    credit_memory: RemoteMemory,
    /// Where in it credit goes.
    credit_at: u64,
    /// What it is written from, where it is not injected.
    words: MemoryRegion,
}

impl Speaker {
    pub(super) fn new(
        site: Site<'_>,
        (form, tagged): (Notify, bool),
        peer: Peer,
        (credit_memory, credit_at): (&RemoteRegion, usize),
    ) -> Result<Self> {
        let domain = site.domain;
        if form == Notify::Message {
            let caps = domain.capabilities().caps;
            let needed = if tagged { Caps::TAGGED } else { Caps::MESSAGE };
            if !caps.contains(needed) {
                let with = if tagged { "with" } else { "without" };
                let detail = format!("the peer wants messages {with} tags, and there are none");
                return Err(Error::new(ErrorKind::NotSupported, "opening a ring", detail));
            }
        }
        let credit_memory = domain.attach(credit_memory)?;
        let credit_at = credit_at as u64;
        if credit_memory.len() < credit_at + credit::LENGTH as u64 {
            let detail = format!("{} bytes to write notices to", credit_memory.len());
            return Err(Error::new(ErrorKind::MalformedDescriptor, "opening a ring", detail));
        }
        let words = domain.register(HostMemory::zeroed(credit::LENGTH)?, Access::WRITE)?;
        activate(&words, site)?;
        Ok(Self { form, tagged, peer, credit_memory, credit_at, words })
    }

    /// Says bits. Nobody is told of a ring that is polled. False if there is no room now.
    #[inline]
    pub(super) fn send_notice(
        &self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
        bits: u32,
    ) -> Result<bool> {
        match self.form {
            Notify::Immediate => self.write(endpoint, queue, &[0; 8], 0, Some(bits.into())),
            Notify::Message => {
                let tag = self.tagged.then_some(TAG);
                endpoint.try_inject(queue, self.peer, &bits.to_le_bytes(), tag)
            }
            Notify::Polling => Ok(true),
        }
    }

    /// As [`send_notice`](Self::send_notice), for the last time before the endpoint is closed: a completion with
    /// the token [`LAST`] and this number tells that it came. None if there is no telling: then it
    /// was said. False if there is no room now.
    pub(super) fn send_last_notice(
        &self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
        bits: u32,
        number: u32,
    ) -> Result<Option<bool>> {
        if self.form != Notify::Immediate {
            return Ok((!self.send_notice(endpoint, queue, bits)?).then_some(false));
        }
        let options =
            Options::token(LAST | u64::from(number)).flags(TransferFlags::DELIVERY_COMPLETE);
        self.write_words(endpoint, queue, (8, 0), Some(bits.into()), &options).map(Some)
    }

    /// May a credit overtake an earlier one, and hide it in the one place that both are written
    /// to? Messages have a place each.
    pub(super) fn may_overtake(&self, domain: &Domain) -> bool {
        let ordered = longest_ordered_write(domain.capabilities());
        self.form == Notify::Immediate && ordered < credit::LENGTH as u64
    }

    /// Tells a writer how far its reader is. With a number, a completion says that the credit
    /// arrived, and [names](of_credit) it. False if there is no room now.
    pub(super) fn send_credit(
        &self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
        (bits, credit): (u32, Credit),
        number: Option<u32>,
    ) -> Result<bool> {
        let (credit, data) = (credit.encode(), Some(bits.into()));
        match (self.form, number) {
            (Notify::Immediate, Some(number)) => {
                self.words.write(0, &credit)?;
                let options = Options::token(CREDIT | u64::from(number))
                    .flags(TransferFlags::DELIVERY_COMPLETE);
                self.write_words(endpoint, queue, (credit.len(), self.credit_at), data, &options)
            }
            (Notify::Immediate, None) => self.write(endpoint, queue, &credit, self.credit_at, data),
            (Notify::Polling, _) => self.write(endpoint, queue, &credit, self.credit_at, None),
            (Notify::Message, _) => {
                let mut bytes = [0; CREDIT_NOTICE];
                bytes[..NOTICE].copy_from_slice(&bits.to_le_bytes());
                bytes[NOTICE..].copy_from_slice(&credit);
                endpoint.try_inject(queue, self.peer, &bytes, self.tagged.then_some(TAG))
            }
        }
    }

    #[inline]
    fn write(
        &self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
        bytes: &[u8],
        offset: u64,
        data: Option<u64>,
    ) -> Result<bool> {
        let target = Target { memory: &self.credit_memory, offset };
        match endpoint.try_inject_write(queue, self.peer, bytes, target, data)? {
            Injected::Taken => return Ok(true),
            Injected::NoRoom => return Ok(false),
            Injected::Refused => {}
        }
        // What an earlier one is written from may change under it: it then tells more.
        self.words.write(0, bytes)?;
        let options = Options::token(NOTICE_TOKEN);
        self.write_words(endpoint, queue, (bytes.len(), offset), data, &options)
    }

    fn write_words(
        &self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
        (length, offset): (usize, u64),
        data: Option<u64>,
        options: &Options,
    ) -> Result<bool> {
        let target = Target { memory: &self.credit_memory, offset };
        let words = [Piece { region: &self.words, offset: 0, length }];
        endpoint.try_write_pieces(queue, self.peer, &words, target, data, options)
    }

    pub(super) fn peer(&self) -> Peer {
        self.peer
    }
}
