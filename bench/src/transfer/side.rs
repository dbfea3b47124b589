//! A side: its memory and its notifications, and what the target does.

use std::time::Instant;

use fabric::{Caps, EndpointKind, Query};
use gpu::{Device, DeviceName, Memory, Stream};
use transfer::{Agent, AgentOptions, Event, HostBuffer, Notice, Region, Rights};

use super::{Source, TIMEOUT, Target};
use crate::local_offers;
use crate::process::processor_time;
use crate::report::{median, rounded};
use crate::worker_group::{SharedSegment, Task, WorkerResult, leave, now, take};
use command::exit::Failure;
use command::histogram::Histogram;

// Tags of notifications.
/// Timed; the data is its start time.
pub(super) const TIMED: u64 = 1;
/// To be compared; the data is the checksum.
pub(super) const VERIFY: u64 = 2;
/// Fill the memory with the pattern of this number.
pub(super) const FILL: u64 = 3;
/// Done; the data is the checksum, or 0 on failure.
pub(super) const ANSWER: u64 = 4;
/// The end.
pub(super) const END: u64 = 5;

/// Memory of a side.
pub(super) struct Side {
    pub(super) region: Region,
    memory: SideMemory,
}

enum SideMemory {
    Device(Memory, Box<Stream>),
    Host(HostBuffer),
}

impl Side {
    pub(super) fn new(
        agent: &Agent,
        device: &Device,
        source: Source,
        length: u64,
    ) -> Result<Self, Failure> {
        let memory = match source {
            Source::Shared => device.allocate_shared(length, &[])?,
            Source::Plain => device.allocate(length)?,
            Source::Host => {
                let host = HostBuffer::new(length)?;
                let region = agent.register(&host, Rights::ALL)?;
                return Ok(Self { region, memory: SideMemory::Host(host) });
            }
        };
        let region = agent.register(&memory, Rights::ALL)?;
        Ok(Self { region, memory: SideMemory::Device(memory, Box::new(device.stream()?)) })
    }

    /// Fills all of it, differently for each number, and returns its checksum.
    pub(super) fn fill(&self, number: u64, length: u64) -> Result<u64, Failure> {
        const PATTERN_BYTES: u64 = 64 << 10;
        let spot = PATTERN_BYTES.min(length);
        let bytes: Vec<u8> = (0..spot).map(|at| ((at * at + 31 * number) >> 3) as u8).collect();
        let places = [0, (length - spot) / 2, length - spot];
        let byte = (number * 37 + 1) as u8;
        match &self.memory {
            SideMemory::Device(memory, stream) => {
                stream.fill(&memory.slice(0, length)?, byte)?;
                for at in places {
                    stream.upload(&memory.slice(at, spot)?, &bytes, TIMEOUT)?;
                }
            }
            SideMemory::Host(host) => {
                host.write(0, &vec![byte; length as usize])?;
                for at in places {
                    host.write(at, &bytes)?;
                }
            }
        }
        self.checksum(length)
    }

    pub(super) fn checksum(&self, length: u64) -> Result<u64, Failure> {
        match &self.memory {
            SideMemory::Device(memory, stream) => {
                Ok(stream.checksum(&memory.slice(0, length)?, TIMEOUT)?)
            }
            SideMemory::Host(host) => {
                let mut bytes = vec![0; length as usize];
                host.read(0, &mut bytes)?;
                Ok(gpu::checksum(&bytes))
            }
        }
    }
}

pub(super) fn notice(tag: u64, number: u64) -> Result<Notice, Failure> {
    Ok(Notice::new(tag, &number.to_le_bytes())?)
}

/// Labels of the two agents.
pub(super) const INITIATOR_LABEL: &str = "initiator";
const TARGET_LABEL: &str = "target";

/// The data of the next notification; other events do not matter here.
pub(super) fn next_notice(agent: &mut Agent) -> Result<(u64, u64), Failure> {
    loop {
        match agent.next_event(TIMEOUT)? {
            Event::Notice { notice, .. } => {
                let number = notice.data().try_into().map(u64::from_le_bytes);
                return Ok((notice.tag, number.unwrap_or_default()));
            }
            // Other agents may connect and leave.
            Event::Left { label, .. }
                if [INITIATOR_LABEL, TARGET_LABEL].contains(&label.as_str()) =>
            {
                return Err(Failure::failed(format!("{label} has left")));
            }
            _ => {}
        }
    }
}

impl Target {
    /// Starts an agent, of this side or of the other one.
    pub(super) fn start_agent(&self, label: &str) -> Result<Agent, Failure> {
        let mut options = AgentOptions::new(label)
            .directory(&self.agents)
            .wait_strategy(self.waiting.wait_strategy());
        if self.is_remote {
            options = options.force_remote();
        }
        if let Some(provider) = &self.fabric {
            let query = Query::new(EndpointKind::Rdm).caps(Caps::MESSAGE | Caps::RMA);
            let offer = local_offers::first(&query.provider(provider))?;
            options = (0..self.rails).fold(options, |options, _| options.fabric(&offer));
        }
        Ok(Agent::start(options)?)
    }
}

impl Task for Target {
    const NAME: &'static str = "transfer";
    /// Processor time of an operation in microseconds.
    type Detail = Option<f64>;

    fn run(
        &self,
        _shared: &SharedSegment,
        ready: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<WorkerResult<Self::Detail>, Failure> {
        let name: DeviceName = self.device.parse()?;
        let device = Device::open(name)?;
        let mut agent = self.start_agent(TARGET_LABEL)?;
        let side = Side::new(&agent, &device, self.memory, self.length)?;
        let (card, region) = (agent.card().encode()?, side.region.descriptor().encode()?);
        leave(&self.directory, "target", &(card, region))?;
        let card: Vec<u8> = take(&self.directory, "card")?;
        let peer = agent.connect(&card, TIMEOUT)?;
        ready()?;
        let mut samples = Histogram::default();
        let (mut verified, mut iterations, start) = (true, 0, Instant::now());
        let mut processor_times = vec![];
        loop {
            let before = processor_time();
            let (tag, number) = next_notice(&mut agent)?;
            let answer = match tag {
                TIMED => {
                    let took = now().saturating_sub(number);
                    samples.add(took);
                    processor_times.push((processor_time() - before).as_secs_f64() * 1e6);
                    iterations += 1;
                    took
                }
                VERIFY => {
                    let sum = side.checksum(self.length)?;
                    verified &= sum == number;
                    sum
                }
                FILL => side.fill(number, self.length)?,
                _ => break,
            };
            let token = agent.notify(peer, notice(ANSWER, answer)?)?;
            agent.wait(token, TIMEOUT)?;
        }
        Ok(WorkerResult {
            samples,
            elapsed: start.elapsed().as_nanos() as u64,
            iterations,
            verified,
            detail: median(processor_times).map(rounded),
            ..WorkerResult::default()
        })
    }
}
