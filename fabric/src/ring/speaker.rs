//! Says what has no chunk: credit, and ends.

use super::memory::{Site, activate};
use super::notify::{Notify, TAG};
use crate::endpoint::{Piece, Target};
use crate::{
    Access, Caps, CompletionQueue, Endpoint, Error, ErrorKind, HostMemory, MemoryRegion, Options,
    Peer, RemoteMemory, RemoteRegion, Result, TransferFlags,
};

/// What is written: a head and its complement, or nothing of meaning.
const WORDS: usize = 16;
/// The token of what is written, where it cannot be injected.
pub(super) const SAID: u64 = 0x5361_6964 << 32;
/// The token of what is said last, and is known to have come once it completes: this, and
/// a number that the caller chooses.
pub(super) const LAST: u64 = 0x4c61_7374 << 32;

/// Says bits to one peer, in the form that its ring is told in.
#[derive(Debug)]
pub(super) struct Speaker {
    pub(super) form: Notify,
    /// Do messages to the peer have a tag?
    tagged: bool,
    peer: Peer,
    /// Where a write goes that brings them.
    slate: RemoteMemory,
    /// What it is written from, where it is not injected.
    words: MemoryRegion,
}

impl Speaker {
    pub(super) fn new(
        site: Site<'_>,
        (form, tagged): (Notify, bool),
        peer: Peer,
        slate: &RemoteRegion,
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
        let slate = domain.attach(slate)?;
        if slate.len() < WORDS as u64 {
            let detail = format!("{} bytes to write notices to", slate.len());
            return Err(Error::new(ErrorKind::MalformedDescriptor, "opening a ring", detail));
        }
        let words = domain.register(HostMemory::zeroed(WORDS)?, Access::WRITE)?;
        activate(&words, site)?;
        Ok(Self { form, tagged, peer, slate, words })
    }

    /// Says bits. Nobody is told of a ring that is polled. False if there is no room now.
    #[inline]
    pub(super) fn say(
        &self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
        bits: u32,
    ) -> Result<bool> {
        match self.form {
            Notify::Immediate => self.write(endpoint, queue, &[0; 8], Some(bits.into())),
            Notify::Message => {
                let tag = self.tagged.then_some(TAG);
                endpoint.try_inject(queue, self.peer, &bits.to_le_bytes(), tag)
            }
            Notify::Polling => Ok(true),
        }
    }

    /// As [`say`](Self::say), for the last time before the endpoint is closed: a completion with
    /// the token [`LAST`] and this number tells that it came. None if there is no telling: then it
    /// was said. False if there is no room now.
    pub(super) fn say_last(
        &self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
        bits: u32,
        number: u32,
    ) -> Result<Option<bool>> {
        if self.form != Notify::Immediate {
            return Ok((!self.say(endpoint, queue, bits)?).then_some(false));
        }
        let target = Target { memory: &self.slate, offset: 0 };
        let words = [Piece { region: &self.words, offset: 0, length: 8 }];
        let options =
            Options::token(LAST | u64::from(number)).flags(TransferFlags::DELIVERY_COMPLETE);
        let data = Some(bits.into());
        endpoint.try_write_pieces(queue, self.peer, &words, target, data, &options).map(Some)
    }

    /// Writes a reader's head to where the writer of a polled ring looks for it.
    pub(super) fn show(
        &self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
        head: u64,
    ) -> Result<bool> {
        let words = u128::from(head) | u128::from(!head) << 64;
        self.write(endpoint, queue, &words.to_le_bytes(), None)
    }

    #[inline]
    fn write(
        &self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
        bytes: &[u8],
        data: Option<u64>,
    ) -> Result<bool> {
        let target = Target { memory: &self.slate, offset: 0 };
        if bytes.len() <= endpoint.inject_limit() {
            return endpoint.try_inject_write(queue, self.peer, bytes, target, data);
        }
        // What an earlier one is written from may change under it: it then tells more.
        self.words.write(0, bytes)?;
        let words = Piece { region: &self.words, offset: 0, length: bytes.len() };
        endpoint.try_write_pieces(queue, self.peer, &[words], target, data, &Options::token(SAID))
    }

    pub(super) fn peer(&self) -> Peer {
        self.peer
    }
}
