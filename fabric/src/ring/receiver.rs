//! The side that reads, on an endpoint.

use super::Shape;
use super::header::{HEADER, Header};
use super::immediate::Immediate;
use super::reader::{Reader, Span};
use super::sender::activate;
use crate::{
    Access, CompletionKind, CompletionQueue, Endpoint, Error, ErrorKind, HostMemory, MemoryRegion,
    Options, Outcome, Peer, RegionSlice, RemoteMemory, Result,
};

/// A chunk of a message, where it lies in the ring. To be given back with
/// [`release`](RingReceiver::release).
#[derive(Debug)]
#[must_use = "what is not released is never written again"]
pub struct View {
    /// What message it belongs to, and where in it.
    pub header: Header,
    /// Whether the message is whole with it.
    pub is_last: bool,
    /// Its bytes; None if there are none.
    pub payload: Option<RegionSlice>,
    span: Span,
}

/// A ring in this process's memory, which one peer writes.
#[derive(Debug)]
pub struct RingReceiver {
    reader: Reader,
    region: MemoryRegion,
    /// Where to tell what was released, once the peer said so.
    writer: Option<(Peer, RemoteMemory)>,
    word: MemoryRegion,
    /// Credit that the provider had no room for.
    unsent: Option<u32>,
}

impl RingReceiver {
    /// A ring in fresh memory, which tells its writer of every `watermark` bytes that are
    /// released. Its [region](Self::region) is to be described to the peer.
    ///
    /// # Errors
    /// If the memory cannot be had or registered.
    pub fn new(endpoint: &Endpoint, shape: Shape, epoch: u32, watermark: u64) -> Result<Self> {
        let domain = endpoint.domain();
        let capacity = usize::try_from(shape.capacity()).map_err(|_| {
            let detail = "larger than this machine can address";
            Error::new(ErrorKind::InvalidArgument, "opening a ring", detail)
        })?;
        let region = domain.register(HostMemory::zeroed(capacity)?, Access::REMOTE_WRITE)?;
        activate(&region, endpoint)?;
        let word = domain.register(HostMemory::zeroed(8)?, Access::WRITE)?;
        activate(&word, endpoint)?;
        let reader = Reader::new(shape, epoch, watermark);
        Ok(Self { reader, region, writer: None, word, unsent: None })
    }

    /// The ring's memory.
    #[must_use]
    pub fn region(&self) -> &MemoryRegion {
        &self.region
    }

    /// Where the writer wants to be told of credit.
    pub fn connect(&mut self, writer: Peer, credit: RemoteMemory) {
        self.writer = Some((writer, credit));
    }

    /// Looks at what a queue gave: true if it was a notice. Whose ring it speaks of is
    /// looked at then: notices of others are counted, not believed.
    ///
    /// # Errors
    /// A peer that breaks the protocol.
    pub fn accept(&mut self, outcome: &Outcome) -> Result<bool> {
        match outcome {
            Ok(completion) if completion.kind == CompletionKind::RemoteWrite => {
                let Some(data) = completion.data else { return Ok(false) };
                let notice = self.reader.notice(&Immediate::decode(data as u32));
                notice.map_err(broken)?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// The next chunk, if it is there.
    ///
    /// # Errors
    /// A peer that breaks the protocol.
    pub fn take(&mut self) -> Result<Option<View>> {
        let region = &self.region;
        let look = |offset: u64| {
            let mut bytes = [0; HEADER as usize];
            // Offsets are inside of the ring; beyond it there is no header.
            let _ = region.read(offset as usize, &mut bytes);
            bytes
        };
        let Some(arrived) = self.reader.take(look).map_err(broken)? else { return Ok(None) };
        let (from, length) = (arrived.offset as usize, arrived.header.payload as usize);
        let payload = match length {
            0 => None,
            _ => Some(self.region.slice(from..from + length)?),
        };
        let (header, is_last, span) = (arrived.header, arrived.is_last, arrived.span);
        Ok(Some(View { header, is_last, payload, span }))
    }

    /// The chunk's bytes are not needed any more. In any order.
    pub fn release(&mut self, view: View) {
        self.reader.release(view.span);
    }

    /// Tells the writer what was released, if it is time: a watermark was passed, or
    /// nothing else is going on. True if something was told.
    ///
    /// # Errors
    /// What the fabric says.
    pub fn tell(
        &mut self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
        is_quiet: bool,
    ) -> Result<bool> {
        let Some((peer, credit)) = &self.writer else { return Ok(false) };
        // A later one tells all that an earlier one would have.
        let due = self.reader.credit(is_quiet).or(self.unsent);
        let Some(bits) = due else { return Ok(false) };
        let options = Options::token(0).patience(std::time::Duration::ZERO);
        let target = credit.slice(0..8)?;
        let word = self.word.all();
        match endpoint.write_data(queue, *peer, &word, &target, bits.into(), options) {
            Ok(_) => {
                self.unsent = None;
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.unsent = Some(bits);
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// The positions behind it.
    #[must_use]
    pub fn reader(&self) -> &Reader {
        &self.reader
    }
}

fn broken(error: super::ProtocolError) -> Error {
    Error::new(ErrorKind::ConnectionLost, "reading a ring", error.to_string())
}
