//! Two endpoints that communicate, both driven by one thread.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fabric::{
    Access, Address, AddressVector, Caps, Completion, CompletionKind, CompletionQueue,
    ConnectionRequest, Counter, Domain, Endpoint, EndpointKind, Error, ErrorKind, Event,
    EventQueue, HostMemory, Listener, MemoryRegion, Offer, OperationId, Outcome, Peer, PostOptions,
    QueueOptions, RegistrationOptions, RemoteMemory, RemoteRegion, TransferFlags,
};

use crate::cells::{Cell, Memory};
use crate::cuda;

pub type Failure = Box<dyn std::error::Error>;
pub type CaseResult<T = ()> = Result<T, Failure>;

/// The initiator and the target, by convention.
pub const A: usize = 0;
pub const B: usize = 1;

/// Time limit of one step of a case. Far above what any step needs, below the limit of a cell.
pub fn timeout() -> Duration {
    crate::runner::cell_limit() / 3
}

/// A post that does not wait: the pair makes both sides progress instead.
pub fn nonblocking(token: u64) -> PostOptions {
    PostOptions::token(token).timeout(Duration::ZERO)
}

pub struct Side {
    // Dropped in this order.
    pub endpoint: Endpoint,
    pub queue: CompletionQueue,
    pub peer: Peer,
    pub addresses: Option<AddressVector>,
    pub events: Option<EventQueue>,
    pub domain: Domain,
    outcomes: VecDeque<Outcome>,
    memory: Memory,
}

impl Side {
    pub fn from_parts(
        cell: &Cell,
        domain: Domain,
        queue: CompletionQueue,
        endpoint: Endpoint,
        events: Option<EventQueue>,
    ) -> Self {
        side(cell, domain, queue, endpoint, None, events)
    }

    /// Registers memory of the cell's kind.
    pub fn region(&self, length: usize) -> CaseResult<MemoryRegion> {
        self.region_for(length, Access::ALL)
    }

    pub fn region_for(
        &self,
        length: usize,
        options: impl Into<RegistrationOptions>,
    ) -> CaseResult<MemoryRegion> {
        let region = match self.memory {
            Memory::Host => self.domain.register(HostMemory::zeroed(length)?, options)?,
            Memory::Cuda => self.domain.register(cuda::DeviceMemory::new(length)?, options)?,
        };
        self.activate(&region)?;
        Ok(region)
    }

    /// Binds and enables where the provider requires it.
    pub fn activate(&self, region: &MemoryRegion) -> CaseResult {
        Ok(region.enable_for(&self.endpoint)?)
    }

    /// The peer's region, decoded from its region descriptor.
    pub fn attach(&self, region: &MemoryRegion) -> CaseResult<RemoteMemory> {
        let bytes = region.describe()?.encode();
        Ok(self.domain.attach(&RemoteRegion::decode(&bytes)?)?)
    }
}

pub fn put(region: &MemoryRegion, offset: usize, bytes: &[u8]) -> CaseResult {
    if region.kind().is_device() {
        return cuda::copy_in(region.as_ptr(), offset, bytes);
    }
    Ok(region.write(offset, bytes)?)
}

pub fn get(region: &MemoryRegion, offset: usize, length: usize) -> CaseResult<Vec<u8>> {
    let mut bytes = vec![0; length];
    if region.kind().is_device() {
        cuda::copy_out(region.as_ptr(), offset, &mut bytes)?;
    } else {
        region.read(offset, &mut bytes)?;
    }
    Ok(bytes)
}

/// Bytes that differ for every seed and offset.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    testkit::bytes::pattern(length, seed)
}

pub fn check_bytes(what: &str, got: &[u8], expected: &[u8]) -> CaseResult {
    if got == expected {
        return Ok(());
    }
    let at = testkit::bytes::first_difference(got, expected);
    Err(format!("{what}: wrong data, first at byte {at:?} of {}", expected.len()).into())
}

#[macro_export]
macro_rules! ensure {
    ($condition:expr, $($text:tt)*) => {
        if !$condition { return Err(format!($($text)*).into()); }
    };
}

/// Options of a pair.
#[derive(Default)]
pub struct Setup {
    pub caps: Caps,
    pub queue: QueueOptions,
    pub offer: Option<Offer>,
    /// Counters of the initiator's writes.
    pub counted: Option<Access>,
}

pub struct Pair {
    pub sides: [Side; 2],
    pub counter: Option<Counter>,
    #[allow(dead_code)] // #[allow(dead_code)] // must outlive the connection that it made
    listener: Option<Listener>,
    pub kind: EndpointKind,
}

/// The rest of a pair whose endpoints and queues were moved out.
#[allow(dead_code)] // #[allow(dead_code)] // retained
pub struct Parts {
    pub peers: [Peer; 2],
    rest: [(Option<AddressVector>, Option<EventQueue>, Domain); 2],
    listener: Option<Listener>,
}

impl Pair {
    /// Splits the pair into endpoints and queues, and the rest.
    pub fn split(self) -> ([(Endpoint, CompletionQueue); 2], Parts) {
        let peers = [A, B].map(|side| self.sides[side].peer);
        let mut rest = Vec::new();
        let sides = self.sides.map(|side| {
            rest.push((side.addresses, side.events, side.domain));
            (side.endpoint, side.queue)
        });
        let [b, a] = [rest.pop(), rest.pop()].map(|side| side.expect("there are two"));
        (sides, Parts { peers, rest: [a, b], listener: self.listener })
    }

    pub fn new(cell: &Cell) -> CaseResult<Self> {
        Self::with(cell, Setup::default())
    }

    pub fn caps(cell: &Cell, caps: Caps) -> CaseResult<Self> {
        Self::with(cell, Setup { caps, ..Setup::default() })
    }

    pub fn with(cell: &Cell, setup: Setup) -> CaseResult<Self> {
        let offer = match &setup.offer {
            Some(offer) => offer.clone(),
            None => cell.offer(setup.caps)?,
        };
        let mut pair = match cell.kind {
            EndpointKind::Msg => connected(cell, &setup, &offer)?,
            _ => connectionless(cell, &setup, &offer)?,
        };
        pair.handshake(cell)?;
        Ok(pair)
    }

    /// Sets up the connections below connectionless endpoints: a write each way, then a message
    /// each way. The write is first because `ofi_mrail` loses count of its messages if one is
    /// refused for lack of a connection.
    fn handshake(&mut self, cell: &Cell) -> CaseResult {
        for from in [A, B] {
            let to = 1 - from;
            let (source, target) = (self.sides[from].region(8)?, self.sides[to].region(8)?);
            let remote = self.sides[from].attach(&target)?;
            let options = nonblocking(0).flags(TransferFlags::DELIVERY_COMPLETE);
            let wrote = self.post(from, |s| {
                s.endpoint.write(&mut s.queue, s.peer, &source.all(), &remote.all(), options)
            })?;
            self.complete(from, wrote).map_err(|e| format!("first exchange, write: {e}"))?;
        }
        if cell.group().is_some_and(|group| !group.messages) {
            return Ok(());
        }
        for from in [A, B] {
            let to = 1 - from;
            let hello = self.sides[from].domain.register(HostMemory::zeroed(8)?, Access::LOCAL)?;
            let into = self.sides[to].domain.register(HostMemory::zeroed(8)?, Access::LOCAL)?;
            let got =
                self.post(to, |s| s.endpoint.receive(&mut s.queue, &into.all(), nonblocking(0)))?;
            let sent = self.post(from, |s| {
                s.endpoint.send(&mut s.queue, s.peer, &hello.all(), nonblocking(0))
            })?;
            self.complete(from, sent).map_err(|e| format!("first exchange, sent message: {e}"))?;
            self.complete(to, got).map_err(|e| format!("first exchange, received message: {e}"))?;
        }
        Ok(())
    }

    /// Makes both sides progress once.
    pub fn pump(&mut self) -> bool {
        let mut any = false;
        for side in &mut self.sides {
            while let Some(outcome) = side.queue.poll() {
                side.outcomes.push_back(outcome);
                any = true;
            }
        }
        any
    }

    /// Repeats a post until it is not refused for lack of space; both sides progress in
    /// between.
    pub fn act<T>(
        &mut self,
        side: usize,
        mut action: impl FnMut(&mut Side) -> Result<T, Error>,
    ) -> CaseResult<T> {
        let deadline = Instant::now() + timeout();
        let mut idle = Idle::default();
        loop {
            match action(&mut self.sides[side]) {
                Err(error)
                    if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline =>
                {
                    if self.pump() { idle.end() } else { idle.pause() }
                }
                other => return Ok(other?),
            }
        }
    }

    pub fn post(
        &mut self,
        side: usize,
        action: impl FnMut(&mut Side) -> Result<OperationId, Error>,
    ) -> CaseResult<OperationId> {
        self.act(side, action)
    }

    /// Both sides progress until this side has a matching result; None if the deadline passes.
    pub fn find(
        &mut self,
        side: usize,
        timeout: Duration,
        fits: impl Fn(&Outcome) -> bool,
    ) -> Option<Outcome> {
        let deadline = Instant::now() + timeout;
        let mut idle = Idle::default();
        loop {
            let outcomes = &mut self.sides[side].outcomes;
            if let Some(at) = outcomes.iter().position(&fits) {
                return outcomes.remove(at);
            }
            if self.pump() {
                idle.end();
                continue;
            }
            if Instant::now() > deadline {
                return None;
            }
            idle.pause();
        }
    }

    /// The result of an operation, success or failure.
    pub fn outcome(&mut self, side: usize, id: OperationId) -> CaseResult<Outcome> {
        let is_it = |outcome: &Outcome| match outcome {
            Ok(completion) => completion.operation == Some(id),
            Err(failure) => failure.operation == Some(id),
        };
        self.find(side, timeout(), is_it).ok_or_else(|| {
            format!(
                "no completion within {:?}; {} others waiting: {:?}",
                timeout(),
                self.sides[side].outcomes.len(),
                self.sides[side].outcomes.front()
            )
            .into()
        })
    }

    /// The completion of an operation that has to succeed.
    pub fn complete(&mut self, side: usize, id: OperationId) -> CaseResult<Completion> {
        Ok(self.outcome(side, id)??)
    }

    /// The next immediate that arrives.
    pub fn arrival(&mut self, side: usize) -> CaseResult<Completion> {
        let arrived =
            |outcome: &Outcome| matches!(outcome, Ok(c) if c.kind == CompletionKind::RemoteWrite);
        match self.find(side, timeout(), arrived) {
            Some(outcome) => Ok(outcome?),
            None => Err(format!(
                "no immediate within {:?}; others: {:?}",
                timeout(),
                self.sides[side].outcomes
            )
            .into()),
        }
    }

    /// Posts the receives that this many immediates will consume, if they consume receives.
    pub fn expect_immediates(&mut self, side: usize, count: usize) -> CaseResult {
        if self.sides[side].domain.capabilities().immediates_consume_receives() {
            for _ in 0..count {
                self.post(side, |s| s.endpoint.receive_immediate(&mut s.queue, nonblocking(0)))?;
            }
        }
        Ok(())
    }

    /// Both sides progress until a condition holds, or the time limit passes.
    pub fn pump_until(&mut self, holds: impl Fn() -> bool) {
        let end = Instant::now() + timeout();
        let mut idle = Idle::default();
        while !holds() && Instant::now() < end {
            if self.pump() { idle.end() } else { idle.pause() }
        }
    }

    /// Both sides progress for a fixed time.
    pub fn pump_for(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            if !self.pump() {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }
}

/// Pauses of a side that waits: cells, peers and threads of providers share the cores.
#[derive(Default)]
pub struct Idle {
    rounds: u32,
}

impl Idle {
    /// Yields at first, then sleeps.
    pub fn pause(&mut self) {
        self.rounds += 1;
        if self.rounds > 20 {
            std::thread::sleep(Duration::from_micros(50));
        } else {
            std::thread::yield_now();
        }
    }

    pub fn end(&mut self) {
        self.rounds = 0;
    }
}

fn side(
    cell: &Cell,
    domain: Domain,
    queue: CompletionQueue,
    endpoint: Endpoint,
    addresses: Option<AddressVector>,
    events: Option<EventQueue>,
) -> Side {
    Side {
        endpoint,
        queue,
        peer: Peer::CONNECTED,
        addresses,
        events,
        domain,
        outcomes: VecDeque::new(),
        memory: cell.memory,
    }
}

/// One connectionless side, without a peer yet.
pub fn unconnected_side(
    cell: &Cell,
    setup: &Setup,
    offer: &Offer,
) -> CaseResult<(Side, Option<Counter>)> {
    let domain = Domain::open(offer)?;
    let addresses = AddressVector::open(&domain)?;
    let mut queue = CompletionQueue::open_with(&domain, setup.queue)?;
    let mut builder = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue);
    let mut counter = None;
    if let Some(events) = setup.counted {
        let opened = Counter::open(&domain)?;
        builder = builder.counter(&opened, events);
        counter = Some(opened);
    }
    let endpoint = builder.open()?;
    Ok((side(cell, domain, queue, endpoint, Some(addresses), None), counter))
}

fn connectionless(cell: &Cell, setup: &Setup, offer: &Offer) -> CaseResult<Pair> {
    let plain = Setup { queue: setup.queue, ..Setup::default() };
    let (mut a, counter) = unconnected_side(cell, setup, offer)?;
    let (mut b, _) = unconnected_side(cell, &plain, offer)?;
    let connect_to_peer_process = |side: &mut Side, other: &Address| -> CaseResult {
        if let Some(addresses) = &side.addresses {
            side.peer = addresses.insert(other)?;
        }
        Ok(())
    };
    let (address_a, address_b) = (a.endpoint.address()?, b.endpoint.address()?);
    connect_to_peer_process(&mut a, &address_b)?;
    connect_to_peer_process(&mut b, &address_a)?;
    Ok(Pair { sides: [a, b], counter, listener: None, kind: cell.kind })
}

/// Waits for a peer's connection request, which carries `hello`. An endpoint that connects in
/// the same thread must make progress, too: with some providers only when its event queue is
/// read.
///
/// Other requests are rejected: the port may have belonged to a killed process, whose peers, in
/// cells that run at the same time, still try to reach it.
pub fn connection_request(
    listener: &Listener,
    listening: &mut EventQueue,
    connecting: &mut EventQueue,
    hello: &[u8],
) -> CaseResult<ConnectionRequest> {
    let deadline = Instant::now() + timeout();
    while Instant::now() < deadline {
        match listening.poll()? {
            // Some providers pad the data with zeros.
            Some(Event::ConnectionRequest(request)) if request.data.starts_with(hello) => {
                return Ok(request);
            }
            Some(Event::ConnectionRequest(other)) => {
                eprintln!("a request of another process: {:?}", other.data);
                // The peer may have exited already.
                let _ = listener.reject(&other, b"");
            }
            Some(other) => return Err(format!("expected a request, got {other:?}").into()),
            None => {}
        }
        if let Some(event) = connecting.poll()? {
            return Err(format!("{event:?} before the request was answered").into());
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    Err(format!("no connection request within {:?}", timeout()).into())
}

fn connected(cell: &Cell, setup: &Setup, offer: &Offer) -> CaseResult<Pair> {
    let domain_b = Domain::open(offer)?;
    let mut listen_events = EventQueue::open(domain_b.fabric())?;
    let listener = Listener::open(domain_b.fabric(), offer, &listen_events)?;
    let to = listener.address()?;

    let domain_a = Domain::open(offer)?;
    let mut events_a = EventQueue::open(domain_a.fabric())?;
    let mut queue_a = CompletionQueue::open_with(&domain_a, setup.queue)?;
    let mut builder =
        Endpoint::builder(&domain_a).queue(&mut queue_a).events(&events_a).towards(&to);
    let mut counter = None;
    if let Some(events) = setup.counted {
        let opened = Counter::open(&domain_a)?;
        builder = builder.counter(&opened, events);
        counter = Some(opened);
    }
    let mut endpoint_a = builder.open()?;
    let hello = format!("hello from {:010}", std::process::id());
    endpoint_a.start_connecting(&to, hello.as_bytes())?;

    let request =
        connection_request(&listener, &mut listen_events, &mut events_a, hello.as_bytes())?;
    let mut queue_b = CompletionQueue::open_with(&domain_b, setup.queue)?;
    let events_b = EventQueue::open(domain_b.fabric())?;
    let mut endpoint_b = Endpoint::builder(&domain_b)
        .offer(&request.offer)
        .queue(&mut queue_b)
        .events(&events_b)
        .open()?;
    endpoint_b.start_accepting(b"welcome")?;
    let mut events_b = events_b;
    let (mut up_a, mut up_b) = (false, false);
    let mut others = Vec::new();
    let deadline = Instant::now() + timeout();
    while !(up_a && up_b) {
        for (events, endpoint, up) in
            [(&mut events_a, &endpoint_a, &mut up_a), (&mut events_b, &endpoint_b, &mut up_b)]
        {
            match events.poll()? {
                Some(Event::Connected { endpoint: of, .. }) if endpoint.is(of) => *up = true,
                Some(other) => others.push(format!("{other:?}")),
                None => {}
            }
        }
        // With some providers, connections make progress only when the queues are polled.
        let _ = (queue_a.poll(), queue_b.poll());
        ensure!(
            Instant::now() < deadline,
            "not connected within {:?}: {up_a} {up_b}, other events: {others:?}, queues: {:?} {:?}",
            timeout(),
            queue_a.poll(),
            queue_b.poll()
        );
        std::thread::sleep(Duration::from_micros(100));
    }
    let a = side(cell, domain_a, queue_a, endpoint_a, None, Some(events_a));
    let b = side(cell, domain_b, queue_b, endpoint_b, None, Some(events_b));
    let _ = listen_events;
    Ok(Pair { sides: [a, b], counter, listener: Some(listener), kind: cell.kind })
}
