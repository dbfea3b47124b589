//! The process that writes.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fabric::MemoryRegion;
use fabric::ring::{Message as Written, RingOffer, SenderId, Turn};

use crate::failure::Failure;
use crate::line::{Look, Order, Report, Writing};
use crate::message::{LONGEST, Message};
use crate::station::{Berth, SLICE, Station, gone, is_late};

/// Bytes of the memory that messages are written from.
const SOURCE: usize = LONGEST as usize + (4 << 20);
/// Messages begin at multiples of this, and one without bytes takes as much.
const LINE: usize = 64;
/// How long what is on its way may take before an endpoint is closed all the same.
const DRAIN: Duration = Duration::from_secs(2);
/// How long closing the ring may take.
const FAREWELL: Duration = Duration::from_secs(20);

/// A writer.
struct Writer {
    station: Station,
    seed: u64,
    berth: Option<Berth>,
    ring: Option<SenderId>,
    attempt: u64,
    is_flowing: bool,
    source: Option<MemoryRegion>,
    places: Places,
    /// What is being written, and the place that it lies in.
    current: Option<(Written, usize)>,
}

pub fn run(provider: &str, seed: u64) -> Result<(), Failure> {
    let mut writer = Writer {
        station: Station::new(provider)?,
        seed,
        berth: None,
        ring: None,
        attempt: 0,
        is_flowing: false,
        source: None,
        places: Places::default(),
        current: None,
    };
    let result = writer.live();
    if let Err(failure) = &result {
        let text = format!("{failure}; {}", writer.stands());
        let _ = writer.station.report(&Report::Failed { is_wrong_data: false, text });
    }
    result
}

impl Writer {
    /// Writes and does as it is told, until it is told to end.
    fn live(&mut self) -> Result<(), Failure> {
        loop {
            match self.station.order(self.berth.as_mut(), self.is_flowing)? {
                Look::Frame(Order::End) => break,
                Look::Frame(order) => self.obey(order)?,
                Look::Closed => return Err(gone()),
                Look::Nothing => {}
            }
            if self.is_flowing {
                let written = self.write();
                self.heal(written)?;
            }
        }
        self.berth.take().map_or(Ok(()), Berth::close)
    }

    fn obey(&mut self, order: Order) -> Result<(), Failure> {
        match order {
            Order::Rest { attempt } => {
                (self.attempt, self.is_flowing) = (attempt, false);
                let unfinished = self.drain();
                self.station.report(&Report::Rested { attempt, unfinished })
            }
            Order::Write { attempt, peer, offer, chunk, manner } => {
                (self.attempt, self.is_flowing) = (attempt, false);
                if manner == Writing::Anew {
                    self.renew()?;
                }
                let Some(berth) = &self.berth else {
                    return Err(Failure::Line("there is no endpoint to write from".to_owned()));
                };
                let (peer, address) = (berth.meet(&peer)?, berth.address()?);
                let answer = self.accept(peer, &offer, chunk);
                let Some(answer) = self.heal(answer)? else { return Ok(()) };
                self.is_flowing = true;
                self.station.report(&Report::Answered { attempt, address, answer })
            }
            Order::Finish => self.finish(),
            Order::Stand => {
                let text = self.stands();
                self.station.report(&Report::Stands { text })
            }
            order => Err(Failure::Line(format!("a writer was told {order:?}"))),
        }
    }

    /// Another endpoint. With writes on their way, rxm 1.17 crashes when one is closed: they
    /// end first, or fail, since the reader is dead.
    fn renew(&mut self) -> Result<(), Failure> {
        self.drain();
        self.ring = None;
        if let Some(old) = self.berth.take() {
            old.close()?;
        }
        let berth = self.station.open_port()?;
        if self.source.is_none() {
            self.source = Some(self.station.source(&berth, SOURCE)?);
        }
        self.berth = Some(berth);
        Ok(())
    }

    fn accept(
        &mut self,
        peer: fabric::Peer,
        offer: &RingOffer,
        chunk: u64,
    ) -> fabric::Result<fabric::ring::RingAnswer> {
        (self.places, self.current) = (Places::default(), None);
        let Some(Berth { port, .. }) = &mut self.berth else { unreachable!("there is a berth") };
        if let Some(ring) = self.ring.take() {
            port.drop_sender(ring);
        }
        let (ring, answer) = port.accept(peer, offer, chunk)?;
        self.ring = Some(ring);
        Ok(answer)
    }

    /// Goes on with a message, or begins the next one. Returns after a while in any case.
    fn write(&mut self) -> fabric::Result<()> {
        let (Some(berth), Some(ring), Some(source)) = (&mut self.berth, self.ring, &self.source)
        else {
            return Ok(());
        };
        let port = &mut berth.port;
        while let Some(number) = port.next_read(ring)? {
            self.places.free(number);
        }
        if self.current.is_none() {
            let message = Message::new(self.seed, port.sender(ring)?.writer().messages());
            let Some(place) = self.places.take(message.number, message.length as usize) else {
                // The reader has to let go of an earlier one.
                return match port.rest(SLICE)? {
                    Turn::Other(Err(failure)) => Err(failure.error),
                    _ => Ok(()),
                };
            };
            message.fill(source, place)?;
            let begun = port.begin(ring, message.topic, message.length)?;
            self.current = Some((begun, place));
        }
        let Some((written, place)) = &mut self.current else { return Ok(()) };
        let payload = source.slice(*place..*place + written.length() as usize)?;
        match port.finish(ring, written, &payload, SLICE) {
            Ok(()) => self.current = None,
            Err(error) if is_late(&error) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// The message at hand, and one more; then the ring is closed.
    fn finish(&mut self) -> Result<(), Failure> {
        let (Some(ring), true) = (self.ring, self.is_flowing) else { return Ok(()) };
        let end = Instant::now() + FAREWELL;
        let mut messages = 0;
        for _ in 0..2 {
            let next = self.messages();
            while Instant::now() < end && (self.messages() == next || self.current.is_some()) {
                let written = self.write();
                if self.heal(written)?.is_none() {
                    return Ok(());
                }
            }
            messages = self.messages();
        }
        if self.current.is_some() {
            return Err(Failure::Stuck(format!("the last messages took {FAREWELL:?}")));
        }
        self.is_flowing = false;
        let Some(berth) = &mut self.berth else { return Ok(()) };
        self.ring = None;
        let closed = berth.port.close_sender(ring, FAREWELL);
        if self.heal(closed)?.is_some() {
            self.station.report(&Report::Finished { messages })?;
        }
        Ok(())
    }

    fn messages(&self) -> u64 {
        let ring = self.berth.as_ref().zip(self.ring);
        let sender = ring.and_then(|(berth, ring)| berth.port.sender(ring).ok());
        sender.map_or(0, |sender| sender.writer().messages())
    }

    /// Waits until nothing of the ring is on its way. Gives what is, all the same.
    fn drain(&mut self) -> usize {
        let (Some(berth), Some(ring)) = (&mut self.berth, self.ring) else { return 0 };
        let end = Instant::now() + DRAIN;
        loop {
            let unfinished = berth.port.sender(ring).map_or(0, |sender| sender.unfinished());
            if unfinished == 0 || Instant::now() >= end {
                return unfinished;
            }
            if berth.port.rest(SLICE).is_err() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// What the ring cannot go on with is the supervisor's to judge: it knows who died.
    fn heal<T>(&mut self, result: fabric::Result<T>) -> Result<Option<T>, Failure> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(error) => {
                self.is_flowing = false;
                let (attempt, text) = (self.attempt, format!("{error}; {}", self.stands()));
                self.station.report(&Report::Broken { attempt, text })?;
                Ok(None)
            }
        }
    }

    fn stands(&self) -> String {
        let (Some(berth), Some(ring)) = (&self.berth, self.ring) else {
            return "the writer has no ring".to_owned();
        };
        match berth.port.sender(ring) {
            Err(error) => format!("the writer's ring: {error}"),
            Ok(sender) => {
                let writer = sender.writer();
                format!(
                    "the writer: flowing: {}, epoch {}, {} messages begun, at {:?}, tail {}, \
                     known head {}, {} chunks unread, {} unfinished, broken: {:?}, strangers {}, {:?}",
                    self.is_flowing,
                    writer.epoch(),
                    writer.messages(),
                    self.current,
                    writer.tail(),
                    writer.known_head(),
                    writer.unread(),
                    sender.unfinished(),
                    sender.broken().map(ToString::to_string),
                    berth.port.strangers(),
                    sender.statistics(),
                )
            }
        }
    }
}

/// Where messages lie that are not known to be read: one after the other, around the end.
#[derive(Debug, Default)]
struct Places {
    /// Number, beginning and end.
    taken: VecDeque<(u64, usize, usize)>,
}

impl Places {
    fn take(&mut self, number: u64, length: usize) -> Option<usize> {
        let room = length.max(1).next_multiple_of(LINE);
        let from = match (self.taken.front(), self.taken.back()) {
            (Some((_, oldest, _)), Some((_, _, end))) if end > oldest => {
                if SOURCE - end >= room {
                    *end
                } else if *oldest >= room {
                    0
                } else {
                    return None;
                }
            }
            // Around the end.
            (Some((_, oldest, _)), Some((_, _, end))) => {
                if oldest - end >= room {
                    *end
                } else {
                    return None;
                }
            }
            _ => 0,
        };
        self.taken.push_back((number, from, from + room));
        Some(from)
    }

    fn free(&mut self, number: u64) {
        while self.taken.front().is_some_and(|(taken, ..)| *taken <= number) {
            self.taken.pop_front();
        }
    }
}
