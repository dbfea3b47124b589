//! Two processes that move data through the fabric and verify it.
//!
//! The first process, the initiator, starts the second, the target. They exchange [`frame`]s over
//! the target's standard input and output: the [`plan`], addresses and barriers. All data goes
//! through the fabric.
//!
//! Both are single-threaded: with a second thread the C library and libfabric take locks, which the
//! C reference benchmark does not pay for.

pub(crate) mod frame;
pub(crate) mod frame_channel;
pub(crate) mod initiator;
pub(crate) mod measurement;
pub(crate) mod peer_watchdog;
pub(crate) mod plan;
pub(crate) mod polled_exchange;
pub(crate) mod remote;
pub(crate) mod ring_exchange;
mod stamps;
pub(crate) mod target;

use std::time::Duration;

use fabric::{
    Access, AddressVector, Capabilities, Completion, CompletionQueue, Domain, Endpoint, ErrorKind,
    HostMemory, MemoryRegion, MrMode, Offer, Outcome, Peer, QueueOptions, RemoteMemory,
};

use self::frame::Frame;
use self::frame_channel::{FrameChannel, Received};
use self::measurement::Layout;
use self::peer_watchdog::{PeerWatchdog, Role, unexpected};
use self::plan::{Exchange, Mode, Plan, STALL_TIMEOUT, Wait};
use self::polled_exchange::SlotLayout;
use crate::process::{cancel_stall_alarm, processor_time, start_stall_alarm};
use crate::report::{Common, rounded};
use command::exit::{Exit, Failure};
use command::histogram::Histogram;

/// Longest block for completions before the frame channel is polled.
const SLEEP_SLICE: Duration = Duration::from_millis(10);

/// Result of a measurement.
#[derive(Debug)]
pub(crate) struct Measured {
    /// Nanoseconds: of a round trip or a read, or in a stream of a window.
    pub(crate) samples: Vec<u64>,
    /// Nanoseconds of the whole stream; 0 for a ping-pong.
    pub(crate) elapsed: u64,
    /// Was every byte correct, on both sides?
    pub(crate) verified: bool,
    pub(crate) processor_times: ProcessorTimes,
}

/// Processor time of both sides in the measured part.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ProcessorTimes {
    here: Duration,
    peer: Duration,
}

impl ProcessorTimes {
    fn new(here: Duration, peer: Duration) -> Self {
        Self { here, peer }
    }
}

/// Processor time of this process in a part of the exchange.
#[derive(Debug, Clone, Copy, Default)]
struct ProcessorTimer {
    before: Duration,
    time: Duration,
}

impl ProcessorTimer {
    fn begin(&mut self) {
        self.before = processor_time();
    }

    fn end(&mut self) {
        self.time = processor_time() - self.before;
    }
}

impl Measured {
    /// The common part of the report on this number of messages; each time is this share of a
    /// sample.
    pub(crate) fn common(self, mode: Mode, share: f64, bytes: u64, iterations: u64) -> Common {
        let samples: Histogram = self.samples.into_iter().collect();
        let percentiles = Common::of(&samples, share);
        let length = bytes as f64;
        let rate = match mode {
            Mode::Bw => length * iterations as f64 / self.elapsed as f64,
            Mode::Lat => percentiles.p50_us.map_or(0.0, |p50| length / p50 / 1e3),
        };
        let (gb_per_s, verified) = (rounded(rate), self.verified);
        let of_each = |time: Duration| Some(rounded(time.as_secs_f64() * 1e6 / iterations as f64));
        let ProcessorTimes { here, peer } = self.processor_times;
        let (cpu_us, peer_cpu_us) = (of_each(here), of_each(peer));
        Common { gb_per_s, bytes, iterations, verified, cpu_us, peer_cpu_us, ..percentiles }
    }
}

/// One side of an exchange: endpoint, completion queue, memory and peer, and how it waits.
/// Exchanges post with its fields, and wait with [`turn`](Self::turn).
#[derive(Debug)]
pub(crate) struct ExchangeSide {
    endpoint: Endpoint,
    queue: CompletionQueue,
    peer: Peer,
    region: MemoryRegion,
    remote: RemoteMemory,
    peer_watchdog: PeerWatchdog,
    processor_timer: ProcessorTimer,
}

impl ExchangeSide {
    /// Opens everything and exchanges addresses with the other side.
    fn open(
        plan: &Plan,
        offer: &Offer,
        mut frame_channel: FrameChannel,
        role: Role,
    ) -> Result<Self, Failure> {
        start_stall_alarm()?;
        let domain = Domain::open(offer)?;
        let (length, entries) = match &plan.exchange {
            Exchange::Fabric(measure) => {
                check_size(domain.capabilities(), measure.size)?;
                (Layout::new(measure).length(), measure.slots * 4)
            }
            Exchange::Polled(exchange) => {
                (SlotLayout::new(exchange, domain.capabilities())?.length(), 4096)
            }
            // Rings have their own memory.
            Exchange::Ring(_) => (4096, 4096),
        };
        let options =
            QueueOptions { size: entries.max(256), waiting: plan.waiting.completion_wait() };
        let mut queue = CompletionQueue::open_with(&domain, options)?;
        let addresses = AddressVector::open(&domain)?;
        let endpoint = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
        let region = domain.register(HostMemory::zeroed(length)?, Access::ALL)?;
        if domain.capabilities().registration.mr_mode.contains(MrMode::ENDPOINT) {
            region.bind_endpoint(&endpoint)?;
        }
        region.enable()?;
        // Pages are allocated before the clock runs.
        region.fill(0..length, 0)?;

        let hello = Frame::Hello { address: endpoint.address()?, region: region.describe()? };
        let hello = if frame_channel.send(&hello)? {
            frame_channel.wait_for("the other side's address", STALL_TIMEOUT)?
        } else {
            Received::Closed
        };
        let (address, remote) = match hello {
            Received::Frame(Frame::Hello { address, region }) => (address, region),
            Received::Frame(frame) => return Err(unexpected(frame)),
            Received::Closed | Received::Nothing => {
                return Err(match role {
                    Role::Initiator(target) => target.exit_failure(),
                    Role::Target => Failure::failed("the initiator has exited"),
                    Role::Remote { .. } => Failure::failed("the other side has exited"),
                });
            }
        };
        Ok(Self {
            peer: addresses.insert(&address)?,
            remote: domain.attach(&remote)?,
            endpoint,
            queue,
            region,
            processor_timer: ProcessorTimer::default(),
            peer_watchdog: PeerWatchdog::new(
                frame_channel,
                role,
                offer.capabilities().provider.clone(),
                plan.waiting,
            ),
        })
    }

    fn capabilities(&self) -> &Capabilities {
        self.region.domain().capabilities()
    }

    /// Moves data, and returns a completion, if there is one. All waits call this repeatedly; it
    /// fails after too long without any event.
    #[inline(always)] // what polls is measured: a call and a copy less each time
    fn turn(&mut self) -> Result<Option<Completion>, Failure> {
        let outcome = match self.peer_watchdog.waiting {
            Wait::Poll => {
                let outcome = self.queue.poll();
                if outcome.is_none() {
                    self.queue.pause();
                }
                outcome
            }
            Wait::Default | Wait::Block => self.nap()?,
        };
        self.peer_watchdog.check_peer()?;
        match outcome {
            Some(Ok(completion)) => {
                self.peer_watchdog.record_progress();
                Ok(Some(completion))
            }
            None => Ok(None),
            Some(Err(failure)) => Err(self.peer_watchdog.failed(failure.error)),
        }
    }

    /// Waits for a short while, with the wait object of the queue.
    #[inline(never)]
    fn nap(&mut self) -> Result<Option<Outcome>, Failure> {
        match self.queue.wait(SLEEP_SLICE) {
            Err(failure)
                if failure.operation.is_none()
                    && failure.error.kind() == ErrorKind::DeadlineExceeded
                    && failure.error.code().is_none() =>
            {
                self.peer_watchdog.tick()?;
                Ok(None)
            }
            outcome => Ok(Some(outcome)),
        }
    }

    /// Ends the exchange; the initiator waits for the end of the target.
    fn finish(self) -> Result<(), Failure> {
        let Self { endpoint, peer_watchdog, .. } = self;
        peer_watchdog.end()?;
        endpoint.close()?;
        cancel_stall_alarm();
        Ok(())
    }
}

fn check_size(capabilities: &Capabilities, size: usize) -> Result<(), Failure> {
    let most = capabilities.max_message_size;
    if size > most {
        let provider = &capabilities.provider;
        return Err(Failure::new(
            Exit::Usage,
            format!("{provider} transfers at most {most} bytes at once"),
        ));
    }
    Ok(())
}
