//! Writes with immediates through an endpoint: what `fabricast bench fabric` measures.

use std::time::{Duration, Instant};

use fabricast::fabric::{
    Access, Address, AddressVector, Completion, CompletionKind, CompletionQueue, Domain, Endpoint,
    EndpointKind, ErrorKind, HostMemory, MemoryRegion, MrMode, Offer, Order, Peer, Progress, Query,
    QueueOptions, RemoteMemory, RemoteRegion, WaitStrategy as CompletionWait,
};
use fabricast::ipc::WaitStrategy;
use fabricast::pubsub::Settings;

use super::{Channel, Slots};
use crate::{CommonOptions, Job, Result};

/// Polls between two reads of the clock.
const POLLS: u32 = 4096;

/// An endpoint, and the memory of both sides.
#[derive(Debug)]
pub struct EndpointChannel {
    endpoint: Endpoint,
    queue: CompletionQueue,
    _addresses: AddressVector,
    region: MemoryRegion,
    /// None for a rank without a partner.
    remote: Option<(Peer, RemoteMemory)>,
    slots: Slots,
    polls: bool,
    consumes_receives: bool,
    timeout: Duration,
    sent: u64,
    in_flight: usize,
    arrived: u64,
    received: u64,
}

fn offer(provider: &str, is_one_machine: bool, options: &CommonOptions) -> Result<Offer> {
    // Both sides poll: a thread of the provider would only take a core.
    let query = Query::new(EndpointKind::Rdm).progress(Progress::Manual).provider(provider);
    let source = options.source.or(Settings::from_environment()?.network.source);
    let mut source = source.map(|source| source.to_string());
    // A provider of one machine needs no address.
    let is_network = query.first()?.capabilities().reaches_other_machines;
    if is_network && is_one_machine {
        source.get_or_insert_with(|| "127.0.0.1".to_owned());
    }
    let query = match source {
        Some(source) if is_network => query.source(source),
        _ => query,
    };
    let ordered = query.clone().order(Order::WRITE_AFTER_WRITE | Order::SEND_AFTER_WRITE);
    match ordered.first() {
        Err(error) if error.kind() == ErrorKind::NoProvider => Ok(query.first()?),
        found => Ok(found?),
    }
}

impl EndpointChannel {
    /// All ranks call it, also those without a partner.
    ///
    /// # Errors
    /// Errors of the provider.
    pub fn new(
        job: &mut Job,
        partner: Option<u32>,
        slots: Slots,
        provider: &str,
        options: &CommonOptions,
    ) -> Result<Self> {
        let timeout = job.timeout();
        let is_one_machine = job.group.local().size == job.group.size();
        let domain = Domain::open(&offer(provider, is_one_machine, options)?)?;
        let polls = job.wait_strategy() == WaitStrategy::Busy;
        let waiting = match job.wait_strategy() {
            WaitStrategy::Busy => CompletionWait::Busy,
            WaitStrategy::Block => CompletionWait::Block,
            WaitStrategy::Adaptive { .. } => CompletionWait::default(),
        };
        let size = (slots.count * 4).max(256);
        let mut queue = CompletionQueue::open_with(&domain, QueueOptions { size, waiting })?;
        let addresses = AddressVector::open(&domain)?;
        let mut endpoint =
            Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
        let region = domain.register(HostMemory::zeroed(slots.bytes())?, Access::ALL)?;
        if domain.capabilities().registration.mr_mode.contains(MrMode::ENDPOINT) {
            region.bind_endpoint(&endpoint)?;
        }
        region.enable()?;
        region.fill(0..slots.bytes(), 0)?;
        let consumes_receives = domain.capabilities().immediates_consume_receives();
        if consumes_receives {
            for _ in 0..2 * slots.count + 16 {
                endpoint.receive_immediate(&mut queue, 0)?;
            }
        }
        let address = endpoint.address()?.0;
        let addresses_of_all = job.group.all_gather(&address, timeout)?;
        let regions = job.group.all_gather(&region.describe()?.encode(), timeout)?;
        let remote = match partner.map(|partner| partner as usize) {
            None => None,
            Some(partner) => {
                let peer = addresses.insert(&Address(addresses_of_all[partner].clone()))?;
                Some((peer, domain.attach(&RemoteRegion::decode(&regions[partner])?)?))
            }
        };
        Ok(Self {
            endpoint,
            queue,
            _addresses: addresses,
            region,
            remote,
            slots,
            polls,
            consumes_receives,
            timeout,
            sent: 0,
            in_flight: 0,
            arrived: 0,
            received: 0,
        })
    }

    fn record(&mut self, completion: &Completion) -> Result<()> {
        match completion.kind {
            CompletionKind::RemoteWrite => {
                self.arrived += 1;
                if self.consumes_receives {
                    self.endpoint.receive_immediate(&mut self.queue, 0)?;
                }
            }
            CompletionKind::Write => self.in_flight -= 1,
            _ => {}
        }
        Ok(())
    }

    /// Polls until a condition holds.
    fn wait(&mut self, is_done: impl Fn(&Self) -> bool) -> Result<()> {
        let end = Instant::now() + self.timeout;
        let mut polls = 0;
        while !is_done(self) {
            if !self.polls {
                let completion = self.queue.wait(end.saturating_duration_since(Instant::now()))?;
                self.record(&completion)?;
                continue;
            }
            match self.queue.poll() {
                Some(outcome) => self.record(&outcome?)?,
                None => self.queue.pause(),
            }
            polls += 1;
            if polls % POLLS == 0 && Instant::now() >= end {
                return Err(format!("no completion within {:?}", self.timeout).into());
            }
        }
        Ok(())
    }
}

impl Channel for EndpointChannel {
    fn describe(&self) -> String {
        let provider = &self.endpoint.domain().capabilities().provider;
        format!("write with immediate over {provider}")
    }

    fn fill(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.region.write(self.slots.outgoing(self.sent), bytes)?)
    }

    fn send(&mut self, _job: &mut Job, bytes: usize) -> Result<()> {
        let (from, to) = (self.slots.outgoing(self.sent), self.slots.incoming(self.sent) as u64);
        let (peer, remote) = self.remote.as_ref().ok_or("this rank has no partner")?;
        let local = self.region.slice(from..from + bytes)?;
        let remote = remote.slice(to..to + bytes as u64)?;
        let immediate = self.sent & 0xffff_ffff;
        self.endpoint.write_data(&mut self.queue, *peer, &local, &remote, immediate, 0)?;
        self.sent += 1;
        self.in_flight += 1;
        Ok(())
    }

    fn flush(&mut self, _job: &mut Job) -> Result<()> {
        self.wait(|channel| channel.in_flight == 0)
    }

    fn receive(&mut self, _job: &mut Job, count: usize, _bytes: usize) -> Result<()> {
        self.received += count as u64;
        self.wait(|channel| channel.arrived >= channel.received)
    }

    fn read(&mut self, before_last: u64, bytes: &mut [u8]) -> Result<()> {
        Ok(self.region.read(self.slots.incoming(self.received - 1 - before_last), bytes)?)
    }
}
