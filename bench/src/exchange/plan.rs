//! The plan of a measurement, which both processes know before they start.

use std::time::Duration;

use clap::ValueEnum;
use fabric::ring::{MAX_CHUNKS, NotifyMode, RingGeometry};
use fabric::{
    Caps, EndpointKind, ErrorKind, Offer, Order, Progress, Query, Threading,
    WaitStrategy as CompletionWait,
};
use ipc::WaitStrategy;
use serde::{Deserialize, Serialize};

use crate::local_offers;
use command::exit::{Exit, Failure};

/// The measured operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[value(rename_all = "lowercase")]
pub(crate) enum Operation {
    /// A write with an immediate, which notifies the target
    WriteData,
    /// A write; the target polls its memory
    Write,
    /// A read; the target only serves
    Read,
    /// A message
    Send,
}

/// The measured pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    /// Ping-pong: a sample is half a round trip, or all of a read
    Lat,
    /// A stream: a window of operations in flight, or messages through a ring
    Bw,
}

/// How processes wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Wait {
    /// The wait of programs that choose nothing: poll for a while, then block
    Default,
    /// Poll all the time
    Poll,
    /// Block at once
    Block,
}

impl Wait {
    /// For completions.
    pub(crate) fn completion_wait(self) -> CompletionWait {
        match self {
            Self::Poll => CompletionWait::Busy,
            Self::Default => CompletionWait::default(),
            Self::Block => CompletionWait::Block,
        }
    }

    /// For entries of a queue.
    pub(crate) fn wait_strategy(self) -> WaitStrategy {
        match self {
            Self::Poll => WaitStrategy::Busy,
            Self::Default => WaitStrategy::default(),
            Self::Block => WaitStrategy::Block,
        }
    }

    /// Pause between two messages: long enough for readers to wait again in this way.
    pub(crate) fn pause(self) -> Duration {
        match self {
            Self::Poll => Duration::from_nanos(500),
            Self::Default => Duration::from_micros(5),
            Self::Block => Duration::from_micros(100),
        }
    }
}

/// The threading model declared to libfabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ThreadingMode {
    /// Any thread at any time: the provider locks
    Safe,
    /// One thread per domain at a time: no locks
    Domain,
}

/// The name of a value on the command line.
pub(crate) fn name_of(value: impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// Where both processes find the offer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct OfferQuery {
    pub(crate) provider: String,
    /// None: the loopback address, where a provider needs one.
    pub(crate) source: Option<String>,
    pub(crate) threading: ThreadingMode,
}

/// A measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct FabricExchange {
    pub(crate) operation: Operation,
    pub(crate) mode: Mode,
    pub(crate) size: usize,
    /// Send and receive slots; in a stream, operations in flight.
    pub(crate) slots: usize,
    pub(crate) iterations: u64,
    pub(crate) warmup: u64,
}

impl FabricExchange {
    /// Bytes of all slots of one side.
    const WINDOW_BYTES: u64 = 64 << 20;

    /// Number of slots: as requested, within limits.
    pub(crate) fn slots(operation: Operation, mode: Mode, size: usize, window: u64) -> usize {
        let stride = (size as u64).next_multiple_of(64);
        let most = (Self::WINDOW_BYTES / stride).max(1);
        let slots = match (mode, operation) {
            (Mode::Bw, _) => window.min(most),
            // One receive is posted while the other's message is checked.
            (Mode::Lat, Operation::Send) => most.clamp(2, 4),
            (Mode::Lat, _) => 1,
        };
        slots as usize
    }
}

/// A measurement of messages through rings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct RingExchange {
    pub(crate) mode: Mode,
    /// Bytes of a message.
    pub(crate) size: u64,
    /// Bytes of each ring.
    pub(crate) capacity: u64,
    /// Bytes that are released before the writer gets credit; 0: after each chunk.
    pub(crate) watermark: u64,
    /// Bytes of payload in a chunk, at most.
    pub(crate) chunk: u64,
    /// How readers are notified; None: in the best way that the provider supports.
    pub(crate) notify: Option<NotifyMode>,
    pub(crate) iterations: u64,
    pub(crate) warmup: u64,
}

impl RingExchange {
    /// Messages between two samples of a stream.
    pub(super) const WINDOW: u64 = 16;
    /// Maximum bytes of all send slots together, and minimum number of slots for long messages.
    const MAX_SOURCE_BYTES: u64 = 16 << 20;
    const MIN_SLOTS: u64 = 4;

    /// Is this a valid capacity of a ring?
    pub(crate) fn has_valid_capacity(&self) -> bool {
        RingGeometry::new(self.capacity, 0).is_some()
    }

    pub(super) fn stride(&self) -> u64 {
        self.size.max(8).next_multiple_of(64)
    }

    /// Bytes of all send slots.
    pub(super) fn source(&self) -> u64 {
        self.slots() * self.stride()
    }

    /// Memory of the target: its ring, and its send slots if it sends.
    pub(crate) fn memory_of_target(&self) -> u64 {
        match self.mode {
            Mode::Lat => self.capacity.saturating_add(self.source()),
            Mode::Bw => self.capacity,
        }
    }

    /// Memory of the initiator.
    pub(crate) fn memory_of_initiator(&self) -> u64 {
        self.capacity.saturating_add(self.source())
    }

    /// Messages in one direction, with the warm-up.
    pub(super) fn messages(&self) -> u64 {
        self.warmup + self.iterations
    }

    /// Bytes of all of them.
    pub(super) fn bytes(&self) -> u64 {
        self.messages().saturating_mul(self.size)
    }

    /// Memory of the samples: nothing is allocated while the clock runs.
    pub(super) fn sample_buffer(&self) -> Result<Vec<u64>, Failure> {
        let count = match self.mode {
            Mode::Lat => self.iterations.max(self.warmup),
            Mode::Bw => self.iterations.max(self.warmup) / Self::WINDOW + 1,
        };
        let mut samples = Vec::new();
        samples.try_reserve_exact(usize::try_from(count).unwrap_or(usize::MAX)).map_err(|_| {
            Failure::failed(format!("allocate samples of {count} messages failed: out of memory"))
        })?;
        Ok(samples)
    }

    /// Messages in flight. Enough that credit returns before all slots are used.
    pub(super) fn slots(&self) -> u64 {
        let credit_interval = (self.watermark / self.stride()).min(MAX_CHUNKS);
        (Self::MAX_SOURCE_BYTES / self.stride()).clamp(Self::MIN_SLOTS, 2 * credit_interval + 64)
    }
}

/// The exchange of the two processes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Exchange {
    Fabric(FabricExchange),
    /// Messages through rings.
    Ring(RingExchange),
    /// Messages through memory that the reader polls.
    Polled(RingExchange),
}

/// The plan, as it is sent to the target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) offer_query: OfferQuery,
    pub(crate) waiting: Wait,
    /// The target's core; None: any.
    pub(crate) core: Option<usize>,
    pub(crate) exchange: Exchange,
}

/// The query that all queries of an exchange are based on.
fn query(threading: ThreadingMode) -> Query {
    // Both sides poll: a provider's progress thread would only take the core away.
    let query = Query::new(EndpointKind::Rdm).progress(Progress::Manual);
    match threading {
        ThreadingMode::Safe => query,
        // A client cannot request this.
        // SAFETY: one thread of each process makes, uses and drops all objects of the domain.
        #[allow(unsafe_code)]
        ThreadingMode::Domain => unsafe { query.threading(Threading::Domain) },
    }
}

impl Plan {
    /// The offer to use, and whether it guarantees the requested order.
    ///
    /// Without a hint for order some providers guarantee none.
    pub(crate) fn offer(&self) -> Result<(Offer, bool), Failure> {
        let mut order = Order::WRITE_AFTER_WRITE | Order::SEND_AFTER_WRITE;
        if let Exchange::Fabric(measure) = &self.exchange
            && measure.operation == Operation::Send
        {
            // The n-th posted receive gets the n-th message.
            order |= Order::SEND_AFTER_SEND;
        }
        if let Exchange::Ring(ring_exchange) = &self.exchange
            && let Some(offer) = self.tagged(order, ring_exchange.notify)
        {
            return Ok((offer, true));
        }
        match self.offer_query.first(&self.offer_query.query().order(order)) {
            Ok(offer) => Ok((offer, true)),
            Err(error) if error.kind() == ErrorKind::NoProvider => {
                self.offer_query.offer().map(|offer| (offer, false))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The plan of a client as its server follows it, with the server's local address. Both the
    /// threading model and the source address are for the server to decide.
    pub(crate) fn for_client(mut self, source: Option<&str>) -> Self {
        self.offer_query.threading = ThreadingMode::Safe;
        self.offer_query.source = source.map(str::to_owned);
        self
    }

    /// An offer with tags, if a ring's notifications are messages and the provider has tags: these
    /// separate them from other messages, and some providers deliver only tagged ones.
    fn tagged(&self, order: Order, notify: Option<NotifyMode>) -> Option<Offer> {
        let needs_messages = match notify {
            Some(notify) => notify == NotifyMode::Message,
            None => {
                let plain = self.offer_query.first(&self.offer_query.query());
                plain.is_ok_and(|offer| NotifyMode::Immediate.check(offer.capabilities()).is_err())
            }
        };
        let query =
            self.offer_query.query().caps(Caps::MESSAGE | Caps::TAGGED | Caps::RMA).order(order);
        let offer = needs_messages.then(|| self.offer_query.first(&query).ok()).flatten()?;
        offer.capabilities().caps.contains(Caps::TAGGED).then_some(offer)
    }
}

impl OfferQuery {
    pub(crate) fn new(provider: &str) -> Self {
        Self { provider: provider.to_owned(), source: None, threading: ThreadingMode::Safe }
    }

    /// Binds to this local address, if no source is set and the provider is a network.
    pub(crate) fn bind_to(&mut self, local: &str) {
        if self.source.is_none() && self.is_network() == Some(true) {
            self.source = Some(local.to_owned());
        }
    }

    /// Is the provider a network? None without an offer.
    pub(crate) fn is_network(&self) -> Option<bool> {
        let offers = local_offers::offers(&self.query(), None).ok()?;
        offers.first().map(|first| first.is_network)
    }

    fn query(&self) -> Query {
        query(self.threading).provider(&self.provider)
    }

    /// The offer to use, without a requirement of order.
    pub(crate) fn offer(&self) -> Result<Offer, Failure> {
        match self.first(&self.query()) {
            Ok(offer) => Ok(offer),
            Err(error) if error.kind() == ErrorKind::NoProvider => {
                Err(self.no_provider_failure(&error))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn first(&self, query: &Query) -> fabric::Result<Offer> {
        Ok(local_offers::offers(query, self.source.as_deref())?.remove(0).offer)
    }

    fn no_provider_failure(&self, error: &fabric::Error) -> Failure {
        let offers = local_offers::offers(&query(self.threading), self.source.as_deref());
        let mut names: Vec<String> = Vec::new();
        for name in
            offers.unwrap_or_default().iter().map(|local| local_offers::provider_name(&local.offer))
        {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let known = if names.is_empty() {
            "no provider is available".to_owned()
        } else {
            format!("available: {}", names.join(", "))
        };
        let mut message = format!(
            "no provider \"{}\" with RDM endpoints and one-sided transfers here; {known}",
            self.provider
        );
        let layered = |name: &&String| name.split(';').any(|layer| layer == self.provider);
        if let Some(name) = names.iter().find(layered) {
            message.push_str(&format!(". Did you mean \"{name}\"?"));
        }
        message.push_str(&format!(" ({error})"));
        Failure::new(Exit::NoProvider, message)
    }
}

/// How long two processes wait for each other without any progress.
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_limited_by_memory() {
        let slots =
            |mode, size, window| FabricExchange::slots(Operation::WriteData, mode, size, window);
        assert_eq!(slots(Mode::Bw, 1 << 20, 16), 16);
        assert_eq!(slots(Mode::Bw, 1 << 20, 1000), 64);
        assert_eq!(slots(Mode::Bw, 1 << 30, 16), 1);
        assert_eq!(slots(Mode::Bw, 1, 1 << 40), 1 << 20);
        assert_eq!(slots(Mode::Lat, 64, 16), 1);
        assert_eq!(FabricExchange::slots(Operation::Send, Mode::Lat, 64, 16), 4);
        assert_eq!(FabricExchange::slots(Operation::Send, Mode::Lat, 1 << 30, 16), 2);
    }

    fn plan() -> Plan {
        let offer_query = OfferQuery {
            provider: "shm".to_owned(),
            source: Some("an address".to_owned()),
            threading: ThreadingMode::Domain,
        };
        let ring_exchange = RingExchange {
            mode: Mode::Bw,
            size: 64,
            capacity: 1 << 20,
            watermark: 0,
            chunk: 64,
            notify: None,
            iterations: 1,
            warmup: 0,
        };
        let exchange = Exchange::Ring(ring_exchange);
        Plan { offer_query, waiting: Wait::Poll, core: None, exchange }
    }

    #[test]
    fn client_cannot_set_the_threading_of_the_server() {
        let followed = plan().for_client(None);
        assert_eq!(followed.offer_query.threading, ThreadingMode::Safe);
        assert_eq!(followed.offer_query.source, None);
        let bound = plan().for_client(Some("here"));
        assert_eq!(bound.offer_query.source.as_deref(), Some("here"));
    }

    #[test]
    fn names_equal_those_of_the_command_line() {
        assert_eq!(name_of(Operation::WriteData), "writedata");
        assert_eq!(name_of(Mode::Bw), "bw");
        assert_eq!(name_of(Wait::Default), "default");
    }
}
