//! The process that reads, compares and reports.

use std::collections::VecDeque;
use std::time::Duration;

use fabric::ErrorKind;
use fabric::ring::{ChunkView, ReceiverId, RingOptions};

use crate::child_context::{ChildContext, LocalPort, WAIT_SLICE, is_late, supervisor_gone};
use crate::control_channel::{Instruction, ReaderMode, Received, Report, RingPlan};
use crate::failure::Failure;
use crate::message::{Message, Rng};
use crate::message_check::MessageCheck;

/// How long to wait for another chunk while some are held: the writer may need their room.
const SHORT_WAIT: Duration = Duration::from_micros(200);

struct Reader {
    child_context: ChildContext,
    seed: u64,
    local_port: Option<LocalPort>,
    ring: Option<ReceiverId>,
    /// The connection attempt of the ring.
    attempt: u64,
    is_streaming: bool,
    /// The next message: all before it were reported.
    message_check: Option<MessageCheck>,
    /// Chunks taken and not compared. Later chunks arrive before they are compared, so a credit
    /// that is returned too early shows as an overwritten chunk.
    unchecked: VecDeque<ChunkView>,
    max_unchecked: usize,
    /// A compared chunk that is released after a later one.
    released_later: Option<ChunkView>,
    rng: Rng,
}

pub fn run(provider: &str, seed: u64) -> Result<(), Failure> {
    let child_context = ChildContext::new(provider)?;
    let mut reader = Reader {
        child_context,
        seed,
        local_port: None,
        ring: None,
        attempt: 0,
        is_streaming: false,
        message_check: None,
        unchecked: VecDeque::new(),
        max_unchecked: 0,
        released_later: None,
        rng: Rng::new(seed, 0),
    };
    let result = reader.run_until_end();
    if let Err(failure) = &result {
        let is_wrong_data = matches!(failure, Failure::Defect(_));
        let text = format!("{failure}; {}", reader.state_text());
        let _ = reader.child_context.report(&Report::Failed { is_wrong_data, text });
    }
    result
}

impl Reader {
    /// Reads and executes instructions, until it is asked to end.
    fn run_until_end(&mut self) -> Result<(), Failure> {
        loop {
            match self.child_context.instruction(self.local_port.as_mut(), self.is_streaming)? {
                Received::Frame(Instruction::End) => break,
                Received::Frame(instruction) => self.execute(instruction)?,
                Received::Closed => return Err(supervisor_gone()),
                Received::Nothing => {}
            }
            if self.is_streaming {
                self.read()?;
            }
        }
        self.local_port.take().map_or(Ok(()), LocalPort::close)
    }

    fn execute(&mut self, instruction: Instruction) -> Result<(), Failure> {
        match instruction {
            Instruction::Offer { attempt, ring, mode } => self.offer(attempt, &ring, mode),
            Instruction::Connect { attempt, peer, answer } if attempt == self.attempt => {
                let (Some(local_port), Some(ring)) = (&mut self.local_port, self.ring) else {
                    return Err(Failure::ControlChannel("answer without an offer".to_owned()));
                };
                let peer = local_port.insert_peer(&peer)?;
                // The writer may have died since; then another attempt follows.
                let connected = local_port.port.connect(ring, peer, &answer);
                self.is_streaming = self.report_broken(connected)?.is_some();
                self.child_context.report(&Report::Connected { attempt })
            }
            Instruction::Connect { .. } => Ok(()),
            Instruction::ReportState => {
                let text = self.state_text();
                self.child_context.report(&Report::State { text })
            }
            instruction => Err(Failure::ControlChannel(format!(
                "the reader got an instruction for the writer: {instruction:?}"
            ))),
        }
    }

    fn offer(&mut self, attempt: u64, plan: &RingPlan, mode: ReaderMode) -> Result<(), Failure> {
        (self.attempt, self.is_streaming) = (attempt, false);
        // Afterwards every message that the ring has completed is reported.
        self.compare_all()?;
        self.rng = Rng::new(self.seed, attempt);
        self.max_unchecked = self.rng.below(5) as usize;
        let completed_messages = self
            .message_check
            .as_ref()
            .map_or(plan.completed_messages, |message_check| message_check.message().number);
        if mode == ReaderMode::NewEndpoint {
            if let Some(old) = self.local_port.take() {
                old.close()?;
            }
            self.local_port = Some(self.child_context.open_port()?);
        }
        let Some(local_port) = &mut self.local_port else {
            return Err(Failure::ControlChannel(
                "there is no endpoint to reopen the ring on".to_owned(),
            ));
        };
        if let (ReaderMode::SameEndpoint, Some(ring)) = (mode, self.ring) {
            local_port.port.forget(ring);
        }
        let RingPlan { capacity, watermark, notify, .. } = *plan;
        let options =
            RingOptions { capacity, watermark, notify, completed_messages, inline_data: 0 };
        self.ring = Some(local_port.port.offer(&options)?);
        let message = Message::new(self.seed, completed_messages);
        self.message_check.get_or_insert_with(|| MessageCheck::new(message)).begin(message);
        if let Some(ring) = self.ring {
            let offer = local_port.port.ring_offer(ring)?;
            let address = local_port.address()?;
            self.child_context.report(&Report::Offered { attempt, address, offer })?;
        }
        Ok(())
    }

    /// Takes the next chunk, and waits briefly for it.
    fn read(&mut self) -> Result<(), Failure> {
        let (Some(local_port), Some(ring)) = (&mut self.local_port, self.ring) else {
            return Ok(());
        };
        let is_holding = self.released_later.is_some() || !self.unchecked.is_empty();
        match local_port.port.receive(ring, if is_holding { SHORT_WAIT } else { WAIT_SLICE }) {
            Ok(view) => {
                self.unchecked.push_back(view);
                if self.unchecked.len() > self.max_unchecked {
                    self.compare_first()
                } else {
                    Ok(())
                }
            }
            Err(error) if is_late(&error) => self.compare_all(),
            Err(error) if error.kind() == ErrorKind::Closed => {
                self.is_streaming = false;
                let messages = local_port.port.receiver(ring)?.reader().completed_messages();
                self.compare_all()?;
                self.child_context.report(&Report::EndOfStream { messages })
            }
            Err(error) => self.report_broken::<()>(Err(error)).map(drop),
        }
    }

    fn compare_all(&mut self) -> Result<(), Failure> {
        while !self.unchecked.is_empty() {
            self.compare_first()?;
        }
        self.released_later = None;
        Ok(())
    }

    /// Compares the next chunk, and releases it or keeps it for later.
    fn compare_first(&mut self) -> Result<(), Failure> {
        let (Some(message_check), Some(view)) =
            (&mut self.message_check, self.unchecked.pop_front())
        else {
            return Ok(());
        };
        message_check.take(&view)?;
        if view.is_last() {
            let Message { number, length, .. } = message_check.message();
            let report = Report::Delivered { number, length, sum: message_check.sum() };
            message_check.begin(Message::new(self.seed, number + 1));
            // Before the writer can get the credit: the supervisor must know of each message that
            // the writer forgets.
            self.child_context.report(&report)?;
        }
        if self.max_unchecked > 0 && self.rng.percent(25) {
            self.released_later = Some(view);
        }
        Ok(())
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
            return "the reader has no ring".to_owned();
        };
        match local_port.port.receiver(ring) {
            Err(error) => format!("the reader's ring: {error}"),
            Ok(receiver) => {
                let reader = receiver.reader();
                format!(
                    "the reader: streaming: {}, epoch {}, {} messages, {} bytes of {:?}, head {}, \
                     credited {}, unsent credit: {}, unreleased {:?}, broken: {:?}, unmatched \
                     notices {}, {:?}",
                    self.is_streaming,
                    reader.epoch(),
                    reader.completed_messages(),
                    reader.received(),
                    self.message_check.as_ref().map(MessageCheck::message),
                    reader.head(),
                    reader.credited_head(),
                    receiver.has_unsent_credit(),
                    reader.unreleased(),
                    receiver.broken().map(ToString::to_string),
                    local_port.port.unmatched_notices(),
                    receiver.statistics(),
                )
            }
        }
    }
}
