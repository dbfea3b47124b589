//! The process that starts and kills the others, and knows what was delivered.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use fabric::Address;
use fabric::ring::{NotifyMode, RingAnswer, RingOffer};

use crate::child::Child;
use crate::child_context;
use crate::control_channel::{Instruction, ReaderMode, Report, RingPlan, WriterMode, is_readable};
use crate::failure::Failure;
use crate::fault_injection::{self, Fault};
use crate::message::Rng;
use crate::soak_result::SoakResult;

/// Longest time without a report, in any stage.
pub const STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest wait for a report before the time is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How often in a row a side may keep its endpoint. Memory of earlier epochs is freed with the
/// endpoint, so this bounds its growth.
const MAX_ENDPOINT_REUSES: u32 = 3;

/// Stage of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Draining,
    Offering,
    Answering,
    Connecting,
    Streaming,
    Closed,
}

/// A connection, or the attempt to establish one.
#[derive(Debug, Clone, Copy)]
struct Attempt {
    number: u64,
    stage: Stage,
    ring: RingPlan,
    reader_mode: ReaderMode,
    writer_mode: WriterMode,
    /// The notify mode, once the reader has offered a ring.
    mode: Option<NotifyMode>,
    /// Messages delivered since it was established.
    delivered: u64,
    /// Messages written and read according to the two sides, once the ring is closed.
    finished: Option<u64>,
    end_of_stream: Option<u64>,
}

/// A child, and its endpoint of the last attempts.
#[derive(Debug)]
struct Side {
    child: Child,
    /// Does it have an endpoint, or an instruction to open one?
    has_port: bool,
    /// Consecutive attempts with the same endpoint.
    reuses: u32,
}

impl Side {
    fn start(role: &'static str, provider: &str, seed: u64) -> Result<Self, Failure> {
        Ok(Self { child: Child::start(role, provider, seed)?, has_port: false, reuses: 0 })
    }

    /// Does it keep its endpoint, if it has one?
    fn keeps_endpoint(&mut self, wants: bool) -> bool {
        let keeps_endpoint = wants && self.has_port && self.reuses < MAX_ENDPOINT_REUSES;
        self.reuses = if keeps_endpoint { self.reuses + 1 } else { 0 };
        keeps_endpoint
    }
}

/// The supervisor of one provider's run.
#[derive(Debug)]
pub struct Supervisor {
    provider: String,
    seed: u64,
    rng: Rng,
    modes: Vec<NotifyMode>,
    soak_result: SoakResult,
    reader: Side,
    writer: Side,
    attempt: Attempt,
    /// Does the writer have the reader's previous ring?
    writer_has_ring: bool,
    /// Time of the last report.
    last_report: Instant,
}

/// Runs one provider: the result, and the failure if there was one.
pub fn run(
    provider: &str,
    seed: u64,
    time: Duration,
) -> Result<(SoakResult, Option<Failure>), Failure> {
    let begin = Instant::now();
    let mut supervisor = Supervisor::new(provider, seed)?;
    let mut rng = Rng::new(seed, 2);
    let result = supervisor
        .connect(false)
        .and_then(|()| fault_injection::inject_faults(&mut supervisor, &mut rng, time))
        .and_then(|()| supervisor.close());
    let failure = result.err().map(|failure| match failure {
        Failure::Stalled(_) => Failure::Stalled(format!("{failure}\n{}", supervisor.state_text())),
        other => other,
    });
    let Supervisor { mut soak_result, reader, writer, .. } = supervisor;
    soak_result.record_memory(false, reader.child.memory());
    soak_result.record_memory(true, writer.child.memory());
    soak_result.seconds = begin.elapsed().as_secs();
    let failure = failure.or_else(|| {
        let text = "the memory of a process grew".to_owned();
        (!soak_result.memory_stable).then_some(Failure::Defect(text))
    });
    soak_result.passed = failure.is_none();
    Ok((soak_result, failure))
}

impl Supervisor {
    fn new(provider: &str, seed: u64) -> Result<Self, Failure> {
        let modes = child_context::notify_modes(provider)?;
        let Some(best) = modes.first().copied() else {
            return Err(Failure::Usage(format!("{provider} does not support rings")));
        };
        Ok(Self {
            provider: provider.to_owned(),
            seed,
            rng: Rng::new(seed, 1),
            modes,
            soak_result: SoakResult::new(provider, seed),
            reader: Side::start("reader", provider, seed)?,
            writer: Side::start("writer", provider, seed)?,
            attempt: Attempt {
                number: 0,
                stage: Stage::Closed,
                ring: RingPlan {
                    capacity: 1 << 20,
                    watermark: 0,
                    notify: best,
                    completed_messages: 0,
                },
                reader_mode: ReaderMode::NewEndpoint,
                writer_mode: WriterMode::NewEndpoint,
                mode: None,
                delivered: 0,
                finished: None,
                end_of_stream: None,
            },
            writer_has_ring: false,
            last_report: Instant::now(),
        })
    }

    pub fn provider(&self) -> &str {
        &self.provider
    }

    /// Injects a fault.
    pub fn inject(&mut self, fault: Fault) -> Result<(), Failure> {
        let (writer_dies, reader_dies) = match fault {
            Fault::KillWriter => (true, false),
            Fault::KillReader => (false, true),
            Fault::KillBoth => (true, true),
            Fault::Reconnect => (false, false),
        };
        let count = match fault {
            Fault::KillWriter => &mut self.soak_result.killed_writers,
            Fault::KillReader => &mut self.soak_result.killed_readers,
            Fault::KillBoth => &mut self.soak_result.killed_both,
            Fault::Reconnect => &mut self.soak_result.reconnects,
        };
        *count += 1;
        // Both at once, before anything else.
        if writer_dies {
            self.writer.child.kill()?;
        }
        if reader_dies {
            self.reader.child.kill()?;
            for report in self.reader.child.drain_reports()? {
                // A report counts even if its sender was killed right after.
                if let Report::Delivered { number, length, sum } = report {
                    self.soak_result.count_delivered(number, length, sum)?;
                }
            }
            self.soak_result.record_memory(false, self.reader.child.memory());
            self.reader = Side::start("reader", &self.provider, self.seed)?;
        }
        if writer_dies {
            self.writer.child.drain_reports()?;
            self.soak_result.record_memory(true, self.writer.child.memory());
            self.writer = Side::start("writer", &self.provider, self.seed)?;
            self.writer_has_ring = false;
        }
        self.connect(!writer_dies && !reader_dies)
    }

    /// Begins the next connection attempt.
    fn connect(&mut self, both_alive: bool) -> Result<(), Failure> {
        let reader_mode = match self.reader.keeps_endpoint(self.rng.percent(60)) {
            true => ReaderMode::SameEndpoint,
            false => ReaderMode::NewEndpoint,
        };
        let may_continue = self.writer_has_ring && reader_mode == ReaderMode::SameEndpoint;
        let writer_mode = match self.writer.keeps_endpoint(self.rng.percent(70)) {
            true if may_continue && self.rng.percent(80) => WriterMode::SameEndpoint,
            true => WriterMode::SameEndpointDrained,
            false => WriterMode::NewEndpoint,
        };
        let ring = if reader_mode == ReaderMode::NewEndpoint {
            self.random_ring()
        } else {
            self.attempt.ring
        };
        let number = self.attempt.number + 1;
        let stage = Stage::Draining;
        let (finished, end_of_stream) = (None, None);
        self.attempt = Attempt {
            number,
            stage,
            ring,
            reader_mode,
            writer_mode,
            mode: None,
            delivered: 0,
            finished,
            end_of_stream,
        };
        self.last_report = Instant::now();
        // libfabric may fail if an endpoint is closed while its peer is alive and writes. If both
        // keep their endpoints, the old connection may be abandoned with writes in flight.
        if both_alive
            && (reader_mode, writer_mode) != (ReaderMode::SameEndpoint, WriterMode::SameEndpoint)
        {
            return self.writer.child.send_instruction(&Instruction::Drain { attempt: number });
        }
        self.ask_for_offer()
    }

    /// A ring with random options.
    fn random_ring(&mut self) -> RingPlan {
        let capacity = self.rng.between_powers(16, 23) / 1024 * 1024;
        let watermark = match self.rng.below(3) {
            0 => 0,
            1 => capacity / 4,
            _ => self.rng.below(capacity),
        };
        let notify = self.rng.one_of(&self.modes);
        RingPlan { capacity, watermark, notify, completed_messages: self.soak_result.messages() }
    }

    fn ask_for_offer(&mut self) -> Result<(), Failure> {
        let Attempt { number, ring, reader_mode, .. } = self.attempt;
        self.attempt.stage = Stage::Offering;
        self.reader.has_port = true;
        self.writer_has_ring &= reader_mode == ReaderMode::SameEndpoint;
        let ring = RingPlan { completed_messages: self.soak_result.messages(), ..ring };
        self.reader.child.send_instruction(&Instruction::Offer {
            attempt: number,
            ring,
            mode: reader_mode,
        })
    }

    fn offered(&mut self, address: Address, offer: RingOffer) -> Result<(), Failure> {
        self.soak_result.compare("reader", offer.completed_messages)?;
        // Mostly a good part of the ring, sometimes hardly more than a header.
        let low = if self.rng.percent(10) { 8 } else { 13 };
        let chunk = self.rng.between_powers(low, 22);
        let Attempt { number: attempt, writer_mode: mode, .. } = self.attempt;
        (self.attempt.stage, self.attempt.mode) = (Stage::Answering, Some(offer.notify));
        (self.writer.has_port, self.writer_has_ring) = (true, true);
        self.writer.child.send_instruction(&Instruction::Write {
            attempt,
            peer: address,
            offer,
            chunk,
            mode,
        })
    }

    fn answered(&mut self, address: Address, answer: RingAnswer) -> Result<(), Failure> {
        self.attempt.stage = Stage::Connecting;
        let attempt = self.attempt.number;
        self.reader.child.send_instruction(&Instruction::Connect { attempt, peer: address, answer })
    }

    fn connected(&mut self) {
        self.attempt.stage = Stage::Streaming;
        self.soak_result
            .connected(self.attempt.mode, self.attempt.reader_mode == ReaderMode::SameEndpoint);
        self.reader.child.epochs += 1;
        self.writer.child.epochs += 1;
    }

    fn handle_report(&mut self, report: Report) -> Result<(), Failure> {
        let current = self.attempt.number;
        match report {
            Report::Delivered { number, length, sum } => {
                self.soak_result.count_delivered(number, length, sum)?;
                if self.attempt.delivered > 0 {
                    self.soak_result.waited(self.last_report.elapsed());
                }
                self.attempt.delivered += u64::from(self.attempt.stage == Stage::Streaming);
            }
            Report::Drained { attempt, unfinished } if attempt == current => {
                self.soak_result.drains_incomplete += u64::from(unfinished > 0);
                self.ask_for_offer()?;
            }
            Report::Offered { attempt, address, offer } if attempt == current => {
                self.offered(address, offer)?;
            }
            Report::Answered { attempt, address, answer } if attempt == current => {
                self.answered(address, answer)?;
            }
            Report::Connected { attempt } if attempt == current => self.connected(),
            Report::Broken { attempt, text } if attempt == current => {
                let text = format!("ring broke with both sides alive: {text}; {:?}", self.attempt);
                return Err(Failure::Defect(text));
            }
            Report::Failed { is_wrong_data, text } => {
                self.soak_result.corrupt += u64::from(is_wrong_data);
                return Err(Failure::Defect(text));
            }
            Report::Finished { messages } => self.attempt.finished = Some(messages),
            Report::EndOfStream { messages } => self.attempt.end_of_stream = Some(messages),
            Report::State { text } => eprintln!("{text}"),
            // Of an earlier attempt: a surviving process may have seen its ring break.
            Report::Drained { .. }
            | Report::Offered { .. }
            | Report::Answered { .. }
            | Report::Connected { .. }
            | Report::Broken { .. } => return Ok(()),
        }
        self.last_report = Instant::now();
        Ok(())
    }

    /// Handles reports for this time, or until a condition holds.
    fn listen(&mut self, time: Duration, is_met: impl Fn(&Self) -> bool) -> Result<(), Failure> {
        let end = Instant::now() + time;
        while !is_met(self) {
            let now = Instant::now();
            if now >= end {
                return Ok(());
            }
            if now - self.last_report > STALL_TIMEOUT {
                let text = format!("no report within {STALL_TIMEOUT:?} from either process");
                return Err(Failure::Stalled(text));
            }
            let channels = [
                self.reader.child.control_channel().as_fd(),
                self.writer.child.control_channel().as_fd(),
            ];
            is_readable(&channels, POLL_INTERVAL.min(end - now))?;
            // The reader first: its deliveries must be known before the writer's final report.
            while let Some(report) = self.reader.child.report()? {
                self.handle_report(report)?;
                if is_met(self) {
                    break;
                }
            }
            if let Some(report) = self.writer.child.report()? {
                self.handle_report(report)?;
            }
            self.reader.child.sample();
            self.writer.child.sample();
        }
        Ok(())
    }

    /// Handles reports for this time.
    pub fn pass(&mut self, time: Duration) -> Result<(), Failure> {
        self.listen(time, |_| false)
    }

    /// Waits until this connection has delivered this many messages, or the time is over.
    pub fn until_delivered(&mut self, messages: u64, time: Duration) -> Result<(), Failure> {
        self.listen(time, |supervisor| supervisor.attempt.delivered >= messages)
    }

    /// Ends the run: the writer closes the ring, and everything is read.
    fn close(&mut self) -> Result<(), Failure> {
        self.connect(true)?;
        self.until_delivered(1, STALL_TIMEOUT * 2)?;
        self.writer.child.send_instruction(&Instruction::Finish)?;
        let count =
            |supervisor: &Self| supervisor.attempt.finished.zip(supervisor.attempt.end_of_stream);
        self.listen(STALL_TIMEOUT * 2, |supervisor| count(supervisor).is_some())?;
        let Some((finished, end_of_stream)) = count(self) else {
            return Err(Failure::Stalled("the ring was not closed".to_owned()));
        };
        self.soak_result.compare("writer", finished)?;
        self.soak_result.compare("reader", end_of_stream)?;
        self.attempt.stage = Stage::Closed;
        self.writer.child.end()?;
        self.reader.child.end()
    }

    /// The state of all processes.
    fn state_text(&mut self) -> String {
        eprintln!("{}\n{}", self.writer.child.process_state(), self.reader.child.process_state());
        self.last_report = Instant::now();
        for side in [&mut self.reader, &mut self.writer] {
            let _ = side.child.send_instruction(&Instruction::ReportState);
        }
        // A process that does not answer is stuck in a call.
        let _ = self.pass(Duration::from_secs(2));
        format!("{:?}", self.attempt)
    }
}
