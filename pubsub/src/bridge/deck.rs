//! What topics do things with: an endpoint's port, and the memory that they have in common.

use fabric::RegionSlice;
use fabric::ring::{Header, Message, Port, Pushed, ReceiverId, SenderId, View};
use gpu::{Memory, Point};

use super::Place;
use super::bytes;
use super::header::Form;
use super::inbound::{Chunk, Intake};
use super::outbound::{Marks, Part, Wire};
use super::pools::{Registered, Sheets, Slots, Streams};
use super::porters::{self, Porters};
use crate::error::{Error, ErrorKind, Result};

/// Bytes of a message from which on it goes by all lanes of its ring, not by the first alone: less
/// is not worth waking a thread for.
pub(super) const STRIPED: u64 = 1 << 20;
const WRITE: &str = "write to a node";
const READ: &str = "read from a node";

/// All topics of a worker write through it.
pub(super) struct Deck {
    // The endpoint goes before the memory.
    pub(super) port: Port,
    sheets: Sheets,
    slots: Slots,
    registered: Registered,
    out: Streams,
    pub(super) into: Streams,
    pub(super) porters: Porters,
    /// Rings that topics let go of.
    pub(super) closed: Vec<SenderId>,
}

impl Deck {
    pub(super) fn new(port: Port, piece: usize, slots: usize) -> Self {
        Self {
            porters: Porters::of(port.lanes()),
            port,
            sheets: Sheets::new(),
            slots: Slots::new(piece + super::TRAILER, slots),
            registered: Registered::new(),
            out: Streams::default(),
            into: Streams::default(),
            closed: Vec::new(),
        }
    }

    /// Lets go of memory that only we still have.
    pub(super) fn sweep(&mut self) {
        self.registered.sweep();
    }

    /// Closes the endpoint, and then lets go of all memory.
    pub(super) fn close(self) -> Result<()> {
        self.port.close().map_err(|error| Error::of("close an endpoint", error))
    }

    fn start(region: &fabric::MemoryRegion, length: usize) -> Result<RegionSlice> {
        region.slice(0..length).map_err(|error| Error::of(WRITE, error))
    }
}

impl Wire for Deck {
    type Ring = SenderId;
    type Place = Place;
    type Ticket = Point;

    fn is_staged(&self, place: &Place) -> bool {
        matches!(place, Place::Device(_))
    }

    fn begin(&self, ring: SenderId, form: Form, length: u64) -> Result<Message> {
        self.port.begin(ring, form.number(), length).map_err(|error| Error::of(WRITE, error))
    }

    #[inline]
    fn push(
        &mut self,
        ring: SenderId,
        message: &mut Message,
        part: Part<'_, Place>,
        at: u64,
    ) -> Result<Pushed> {
        let of_fabric = |error| Error::of(WRITE, error);
        let lane = match part {
            Part::Sheet { .. } => 0,
            _ if message.length() < STRIPED => 0,
            _ => {
                let left = message.length() - message.written();
                match self.port.pick(ring, left).map_err(of_fabric)? {
                    Some(lane) => lane,
                    None => return Ok(Pushed::Busy),
                }
            }
        };
        let (part, at) = match part {
            Part::Sheet { sheet, length } => (Self::start(self.sheets.get(sheet)?, length)?, at),
            Part::Slot { slot, length } => {
                (Self::start(self.slots.region(slot, lane, &self.port)?, length)?, at)
            }
            Part::Direct(place) => {
                let written = message.written();
                let from = written - at;
                (self.registered.part(place.slice(), from, lane, &self.port)?, written)
            }
        };
        // Marks say it all: what was read is not asked for one by one, and not kept to be.
        while self.port.next_read(ring).map_err(of_fabric)?.is_some() {}
        self.port.push_by(lane, ring, message, &part, at).map_err(of_fabric)
    }

    fn marks(&self, ring: SenderId) -> Result<Marks> {
        let sender = self.port.sender(ring).map_err(|error| Error::of(WRITE, error))?;
        if let Some(broken) = sender.broken() {
            return Err(Error::of(WRITE, broken.clone()));
        }
        let writer = sender.writer();
        Ok(Marks { tail: writer.tail(), left: sender.left_to(), read: writer.known_head() })
    }

    fn is_silent(&mut self, ring: SenderId) -> bool {
        self.port.stop_sender(ring);
        !self.port.sender(ring).is_ok_and(|sender| sender.unfinished() > 0)
    }

    fn close(&mut self, ring: SenderId) {
        self.port.drop_sender(ring);
        self.closed.push(ring);
    }

    fn longest_whole(&self, ring: SenderId) -> Result<usize> {
        let sender = self.port.sender(ring).map_err(|error| Error::of(WRITE, error))?;
        Ok(sender.writer().longest_whole() as usize)
    }

    fn take_sheet(&mut self, is_first: bool) -> Option<u32> {
        self.sheets.take(is_first, self.port.endpoint())
    }

    fn give_sheet(&mut self, sheet: u32, is_tainted: bool) {
        self.sheets.give(sheet, is_tainted);
    }

    fn write_sheet(&mut self, sheet: u32, at: usize, bytes: &[u8]) -> Result<()> {
        self.sheets.get(sheet)?.write(at, bytes).map_err(|error| Error::of(WRITE, error))
    }

    fn gather(&mut self, sheet: u32, at: usize, from: &Place, length: usize) -> Result<()> {
        bytes::gather(from.slice(), length, self.sheets.get(sheet)?, at)
    }

    fn take_slot(&mut self, like: &Place, is_first: bool) -> Result<Option<u32>> {
        let device = like.slice().memory().mapped_for();
        self.slots.take(device, is_first, &self.port)
    }

    fn give_slot(&mut self, slot: u32, is_tainted: bool) {
        self.slots.give(slot, is_tainted);
    }

    fn write_slot(&mut self, slot: u32, at: usize, bytes: &[u8]) -> Result<()> {
        self.slots
            .region(slot, 0, &self.port)?
            .write(at, bytes)
            .map_err(|error| Error::of(WRITE, error))
    }

    fn copy_out(&mut self, slot: u32, from: &Place, offset: u64, length: u64) -> Result<Point> {
        let to = self.slots.pinned(slot, length)?;
        let from = from.slice();
        let piece =
            from.slice(offset, length).map_err(|error| Error::of("copy a message out", error))?;
        self.out.copy(from.memory().mapped_for(), &to, &piece)
    }

    fn is_copied(&mut self, ticket: &Point) -> Result<bool> {
        ticket.is_done().map_err(|error| Error::of("copy a message out", error))
    }
}

/// A chunk of a ring.
pub(super) struct Arrived(View);

impl Chunk for Arrived {
    #[inline]
    fn header(&self) -> &Header {
        self.0.header()
    }

    #[inline]
    fn is_last(&self) -> bool {
        self.0.is_last()
    }

    #[inline]
    fn read(&self, at: usize, into: &mut [u8]) -> Result<()> {
        self.0.read(at, into).map_err(|error| Error::of(READ, error))
    }
}

/// A copy into a message's place that was begun.
#[derive(Debug)]
pub(super) enum Ticket {
    Device(Point),
    Porter(u64),
}

/// What one inbound topic reads through, for a turn.
pub(super) struct Reading<'a> {
    pub(super) port: &'a mut Port,
    pub(super) into: &'a mut Streams,
    pub(super) porters: &'a mut Porters,
    pub(super) ring: Option<ReceiverId>,
    /// The ring's memory, as the device of the topic knows it.
    pub(super) pinned: Option<&'a Memory>,
    pub(super) has_taken: bool,
}

impl Intake for Reading<'_> {
    type Chunk = Arrived;
    type Place = Place;
    type Ticket = Ticket;

    #[inline]
    fn take(&mut self) -> Result<Option<Arrived>> {
        let Some(ring) = self.ring else { return Ok(None) };
        let view = self.port.take(ring).map_err(|error| match error.kind() {
            fabric::ErrorKind::Closed => Error::because(READ, ErrorKind::Closed, error),
            _ => Error::of(READ, error),
        })?;
        self.has_taken |= view.is_some();
        Ok(view.map(Arrived))
    }

    #[inline]
    fn copy_in(
        &mut self,
        chunk: &Arrived,
        from: usize,
        length: usize,
        to: &Place,
        at: u64,
    ) -> Result<Option<Ticket>> {
        let to = match to {
            Place::Host(slice) => {
                if length >= porters::LARGE
                    && let Some(number) = self.porters.carry(&chunk.0, from, length, slice, at)?
                {
                    return Ok(Some(Ticket::Porter(number)));
                }
                return bytes::unload(&chunk.0, from, length, slice, at).map(|()| None);
            }
            Place::Device(slice) => slice,
        };
        let of_device = |error| Error::of("copy a message in", error);
        let (Some(pinned), Some(slice)) = (self.pinned, chunk.0.slice()) else {
            let detail = "a sink that said it has no device gave memory of one";
            return Err(Error::new("copy a message in", ErrorKind::InvalidArgument, detail));
        };
        let start = (slice.offset() + from) as u64;
        let piece = pinned.slice(start, length as u64).map_err(of_device)?;
        let target = to.slice(at, length as u64).map_err(of_device)?;
        let copy = self.into.copy(to.memory().mapped_for(), &target, &piece);
        copy.map(|point| Some(Ticket::Device(point)))
    }

    fn is_copied(&mut self, ticket: &Ticket) -> Result<bool> {
        match ticket {
            Ticket::Device(point) => {
                point.is_done().map_err(|error| Error::of("copy a message in", error))
            }
            Ticket::Porter(number) => Ok(self.porters.is_done(*number)),
        }
    }
}
