//! The process that writes.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fabric::MemoryRegion;
use fabric::ring::{Message as Written, PortEvent, RingOffer, SenderId};

use crate::child_context::{ChildContext, LocalPort, WAIT_SLICE, is_late, supervisor_gone};
use crate::control_channel::{Instruction, Received, Report, WriterMode};
use crate::failure::Failure;
use crate::message::{MAX_MESSAGE_LENGTH, Message};

/// Bytes of the source memory.
const SOURCE: usize = MAX_MESSAGE_LENGTH as usize + (4 << 20);
/// Messages begin at multiples of this, and an empty one occupies as much.
const SOURCE_ALIGN: usize = 64;
/// How long writes in flight may take before an endpoint is closed.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// How long closing the ring may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(20);

struct Writer {
    child_context: ChildContext,
    seed: u64,
    local_port: Option<LocalPort>,
    ring: Option<SenderId>,
    attempt: u64,
    is_streaming: bool,
    source: Option<MemoryRegion>,
    source_slots: SourceSlots,
    /// The message being written, and its offset in the source memory.
    current: Option<(Written, usize)>,
}

pub fn run(provider: &str, seed: u64) -> Result<(), Failure> {
    let mut writer = Writer {
        child_context: ChildContext::new(provider)?,
        seed,
        local_port: None,
        ring: None,
        attempt: 0,
        is_streaming: false,
        source: None,
        source_slots: SourceSlots::default(),
        current: None,
    };
    let result = writer.run_until_end();
    if let Err(failure) = &result {
        let text = format!("{failure}; {}", writer.state_text());
        let _ = writer.child_context.report(&Report::Failed { is_wrong_data: false, text });
    }
    result
}

impl Writer {
    /// Writes and executes instructions, until it is asked to end.
    fn run_until_end(&mut self) -> Result<(), Failure> {
        loop {
            match self.child_context.instruction(self.local_port.as_mut(), self.is_streaming)? {
                Received::Frame(Instruction::End) => break,
                Received::Frame(instruction) => self.execute(instruction)?,
                Received::Closed => return Err(supervisor_gone()),
                Received::Nothing => {}
            }
            if self.is_streaming {
                let written = self.write();
                self.report_broken(written)?;
            }
        }
        self.local_port.take().map_or(Ok(()), LocalPort::close)
    }

    fn execute(&mut self, instruction: Instruction) -> Result<(), Failure> {
        match instruction {
            Instruction::Drain { attempt } => {
                (self.attempt, self.is_streaming) = (attempt, false);
                let unfinished = self.drain();
                self.child_context.report(&Report::Drained { attempt, unfinished })
            }
            Instruction::Write { attempt, peer, offer, chunk, mode } => {
                (self.attempt, self.is_streaming) = (attempt, false);
                if mode == WriterMode::NewEndpoint {
                    self.replace_endpoint()?;
                }
                let Some(local_port) = &self.local_port else {
                    return Err(Failure::ControlChannel(
                        "there is no endpoint to write from".to_owned(),
                    ));
                };
                let (peer, address) = (local_port.insert_peer(&peer)?, local_port.address()?);
                let answer = self.accept(peer, &offer, chunk);
                let Some(answer) = self.report_broken(answer)? else { return Ok(()) };
                self.is_streaming = true;
                self.child_context.report(&Report::Answered { attempt, address, answer })
            }
            Instruction::Finish => self.finish(),
            Instruction::ReportState => {
                let text = self.state_text();
                self.child_context.report(&Report::State { text })
            }
            instruction => Err(Failure::ControlChannel(format!(
                "the writer got an instruction for the reader: {instruction:?}"
            ))),
        }
    }

    /// Opens a new endpoint. rxm 1.17 crashes if an endpoint is closed with writes in flight, so
    /// these complete first, or fail because the reader is dead.
    fn replace_endpoint(&mut self) -> Result<(), Failure> {
        self.drain();
        self.ring = None;
        if let Some(old) = self.local_port.take() {
            old.close()?;
        }
        let local_port = self.child_context.open_port()?;
        if self.source.is_none() {
            self.source = Some(self.child_context.source(&local_port, SOURCE)?);
        }
        self.local_port = Some(local_port);
        Ok(())
    }

    fn accept(
        &mut self,
        peer: fabric::Peer,
        offer: &RingOffer,
        chunk: u64,
    ) -> fabric::Result<fabric::ring::RingAnswer> {
        (self.source_slots, self.current) = (SourceSlots::default(), None);
        let Some(LocalPort { port, .. }) = &mut self.local_port else {
            unreachable!("there is an endpoint")
        };
        if let Some(ring) = self.ring.take() {
            port.drop_sender(ring);
        }
        let (ring, answer) = port.accept(peer, offer, chunk)?;
        self.ring = Some(ring);
        Ok(answer)
    }

    /// Continues a message, or begins the next one. Returns after a short time in any case.
    fn write(&mut self) -> fabric::Result<()> {
        let (Some(local_port), Some(ring), Some(source)) =
            (&mut self.local_port, self.ring, &self.source)
        else {
            return Ok(());
        };
        let port = &mut local_port.port;
        while let Some(number) = port.next_read(ring)? {
            self.source_slots.free(number);
        }
        if self.current.is_none() {
            let message = Message::new(self.seed, port.sender(ring)?.writer().messages());
            let Some(offset) = self.source_slots.take(message.number, message.length as usize)
            else {
                // The reader has to release an earlier one.
                return match port.wait(WAIT_SLICE)? {
                    PortEvent::Other(Err(failure)) => Err(failure.error),
                    _ => Ok(()),
                };
            };
            message.fill(source, offset)?;
            let begun = port.begin(ring, message.topic, message.length)?;
            self.current = Some((begun, offset));
        }
        let Some((written, offset)) = &mut self.current else { return Ok(()) };
        let payload = source.slice(*offset..*offset + written.length() as usize)?;
        match port.finish(ring, written, &payload, WAIT_SLICE) {
            Ok(()) => self.current = None,
            Err(error) if is_late(&error) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Completes the current message and one more, then closes the ring.
    fn finish(&mut self) -> Result<(), Failure> {
        let (Some(ring), true) = (self.ring, self.is_streaming) else { return Ok(()) };
        let end = Instant::now() + CLOSE_TIMEOUT;
        let mut messages = 0;
        for _ in 0..2 {
            let next = self.messages();
            while Instant::now() < end && (self.messages() == next || self.current.is_some()) {
                let written = self.write();
                if self.report_broken(written)?.is_none() {
                    return Ok(());
                }
            }
            messages = self.messages();
        }
        if self.current.is_some() {
            return Err(Failure::Stalled(format!("the last messages took {CLOSE_TIMEOUT:?}")));
        }
        self.is_streaming = false;
        let Some(local_port) = &mut self.local_port else { return Ok(()) };
        self.ring = None;
        let closed = local_port.port.close_sender(ring, CLOSE_TIMEOUT);
        if self.report_broken(closed)?.is_some() {
            self.child_context.report(&Report::Finished { messages })?;
        }
        Ok(())
    }

    fn messages(&self) -> u64 {
        let ring = self.local_port.as_ref().zip(self.ring);
        let sender = ring.and_then(|(local_port, ring)| local_port.port.sender(ring).ok());
        sender.map_or(0, |sender| sender.writer().messages())
    }

    /// Waits until no write is in flight. Returns the number that still are.
    fn drain(&mut self) -> usize {
        let (Some(local_port), Some(ring)) = (&mut self.local_port, self.ring) else { return 0 };
        let end = Instant::now() + DRAIN_TIMEOUT;
        loop {
            let unfinished = local_port.port.sender(ring).map_or(0, |sender| sender.unfinished());
            if unfinished == 0 || Instant::now() >= end {
                return unfinished;
            }
            if local_port.port.wait(WAIT_SLICE).is_err() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// The supervisor judges whether a broken ring is a failure: it knows which process was killed.
    fn report_broken<T>(&mut self, result: fabric::Result<T>) -> Result<Option<T>, Failure> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(error) => {
                self.is_streaming = false;
                let (attempt, text) = (self.attempt, format!("{error}; {}", self.state_text()));
                self.child_context.report(&Report::Broken { attempt, text })?;
                Ok(None)
            }
        }
    }

    fn state_text(&self) -> String {
        let (Some(local_port), Some(ring)) = (&self.local_port, self.ring) else {
            return "the writer has no ring".to_owned();
        };
        match local_port.port.sender(ring) {
            Err(error) => format!("the writer's ring: {error}"),
            Ok(sender) => {
                let writer = sender.writer();
                format!(
                    "the writer: streaming: {}, epoch {}, {} messages begun, at {:?}, tail {}, \
                     known head {}, {} chunks unread, {} unfinished, broken: {:?}, \
                     unmatched notices {}, {:?}",
                    self.is_streaming,
                    writer.epoch(),
                    writer.messages(),
                    self.current,
                    writer.tail(),
                    writer.known_head(),
                    writer.unread(),
                    sender.unfinished(),
                    sender.broken().map(ToString::to_string),
                    local_port.port.unmatched_notices(),
                    sender.statistics(),
                )
            }
        }
    }
}

/// Source memory of messages not known to be read: a circular buffer.
#[derive(Debug, Default)]
struct SourceSlots {
    /// Number, start and end.
    taken: VecDeque<(u64, usize, usize)>,
}

impl SourceSlots {
    fn take(&mut self, number: u64, length: usize) -> Option<usize> {
        let room = length.max(1).next_multiple_of(SOURCE_ALIGN);
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
            // Wrapped around the end.
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
