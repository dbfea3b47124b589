//! What both processes have to know before they begin.

use std::time::Duration;

use clap::ValueEnum;
use fabric::ring::NotifyMode;
use fabric::{
    Caps, EndpointKind, ErrorKind, Offer, Order, Progress, Query, Threading,
    WaitStrategy as CompletionWait,
};
use ipc::WaitStrategy;
use serde::{Deserialize, Serialize};

use super::ring_exchange::RingExchange;
use crate::local_offers;
use command::exit::{Exit, Failure};

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[value(rename_all = "lowercase")]
pub(crate) enum Operation {
    /// A write with an immediate, which tells the target
    WriteData,
    /// A write; the target looks at its memory
    Write,
    /// A read; the target does nothing but serve
    Read,
    /// A message
    Send,
}

/// In which pattern.
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
    /// Look all the time
    Busy,
    /// Look for a while, then sleep
    Adaptive,
    /// Sleep at once
    Block,
}

impl Wait {
    /// For completions.
    pub(crate) fn completion_wait(self) -> CompletionWait {
        match self {
            Self::Busy => CompletionWait::Busy,
            Self::Adaptive => CompletionWait::default(),
            Self::Block => CompletionWait::Block,
        }
    }

    /// For entries of a queue.
    pub(crate) fn wait_strategy(self) -> WaitStrategy {
        match self {
            Self::Busy => WaitStrategy::Busy,
            Self::Adaptive => WaitStrategy::default(),
            Self::Block => WaitStrategy::Block,
        }
    }

    /// Between two messages: long enough for readers to be waiting again, in their way.
    pub(crate) fn pause(self) -> Duration {
        match self {
            Self::Busy => Duration::from_nanos(500),
            Self::Adaptive => Duration::from_micros(5),
            Self::Block => Duration::from_micros(100),
        }
    }
}

/// What libfabric is told of the threads that will call it.
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

/// Where to find the offer that both processes use.
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
    /// Places to send from and to receive into; in a stream, operations in flight.
    pub(crate) slots: usize,
    pub(crate) iterations: u64,
    pub(crate) warmup: u64,
}

impl FabricExchange {
    /// All slots of one side together.
    const WINDOW_BYTES: u64 = 64 << 20;

    /// As many slots as are wanted and sensible.
    pub(crate) fn slots(operation: Operation, mode: Mode, size: usize, window: u64) -> usize {
        let stride = (size as u64).next_multiple_of(64);
        let most = (Self::WINDOW_BYTES / stride).max(1);
        let slots = match (mode, operation) {
            (Mode::Bw, _) => window.min(most),
            // One receive is posted while the other's message is looked at.
            (Mode::Lat, Operation::Send) => most.clamp(2, 4),
            (Mode::Lat, _) => 1,
        };
        slots as usize
    }
}

/// What the two processes do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Exchange {
    FabricExchange(FabricExchange),
    /// Messages through rings.
    RingExchange(RingExchange),
}

/// Everything the target is told.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) offer_query: OfferQuery,
    pub(crate) waiting: Wait,
    /// The target's core; None: any.
    pub(crate) core: Option<usize>,
    pub(crate) exchange: Exchange,
}

/// A question that all questions of an exchange begin with.
fn query(threading: ThreadingMode) -> Query {
    // Both sides poll: a provider's own progress thread would only take the core
    // away from them.
    let query = Query::new(EndpointKind::Rdm).progress(Progress::Manual);
    match threading {
        ThreadingMode::Safe => query,
        // A client cannot ask for this.
        // SAFETY: one thread of each process makes, uses and drops all objects of the domain.
        #[allow(unsafe_code)]
        ThreadingMode::Domain => unsafe { query.threading(Threading::Domain) },
    }
}

impl Plan {
    /// The offer to use, and whether it promises the order that was asked for.
    ///
    /// Without a hint for order some providers promise none.
    pub(crate) fn offer(&self) -> Result<(Offer, bool), Failure> {
        let mut wanted = Order::WRITE_AFTER_WRITE | Order::SEND_AFTER_WRITE;
        if let Exchange::FabricExchange(measure) = &self.exchange
            && measure.operation == Operation::Send
        {
            // The n-th receive that is posted takes the n-th message.
            wanted |= Order::SEND_AFTER_SEND;
        }
        if let Exchange::RingExchange(ring_exchange) = &self.exchange
            && let Some(offer) = self.tagged(wanted, ring_exchange.notify)
        {
            return Ok((offer, true));
        }
        match self.offer_query.first(&self.offer_query.query().order(wanted)) {
            Ok(offer) => Ok((offer, true)),
            Err(error) if error.kind() == ErrorKind::NoProvider => {
                self.offer_query.offer().map(|offer| (offer, false))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The plan as a server follows it, who was sent it by a client and uses this local
    /// address. What is promised to libfabric of this process's threads is for this process
    /// to say, and so is where it binds to.
    pub(crate) fn for_client(mut self, source: Option<&str>) -> Self {
        self.offer_query.threading = ThreadingMode::Safe;
        self.offer_query.source = source.map(str::to_owned);
        self
    }

    /// An offer with tags, if a ring's notices are to be messages, and the provider has them:
    /// by tags they are told from others, and some providers deliver no other messages.
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
    /// Binds to this local address, if none is asked for and the provider leaves the machine.
    pub(crate) fn bind_to(&mut self, local: &str) {
        if self.source.is_none() && self.is_network() == Some(true) {
            self.source = Some(local.to_owned());
        }
    }

    /// Does the provider leave the machine? None: there is none.
    pub(crate) fn is_network(&self) -> Option<bool> {
        let offers = local_offers::offers(&self.query(), None).ok()?;
        offers.first().map(|first| first.is_network)
    }

    fn query(&self) -> Query {
        query(self.threading).provider(&self.provider)
    }

    /// The offer to use where no order is asked for.
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
        let there = if names.is_empty() {
            "no provider is available".to_owned()
        } else {
            format!("available: {}", names.join(", "))
        };
        let mut message = format!(
            "no provider \"{}\" with RDM endpoints and one-sided transfers here; {there}",
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

/// How long two processes wait for each other while nothing happens at all.
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_limited_by_memory() {
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
        let exchange = Exchange::RingExchange(ring_exchange);
        Plan { offer_query, waiting: Wait::Busy, core: None, exchange }
    }

    #[test]
    fn a_client_promises_nothing_of_the_servers_threads() {
        let followed = plan().for_client(None);
        assert_eq!(followed.offer_query.threading, ThreadingMode::Safe);
        assert_eq!(followed.offer_query.source, None);
        let bound = plan().for_client(Some("here"));
        assert_eq!(bound.offer_query.source.as_deref(), Some("here"));
    }

    #[test]
    fn names_are_those_of_the_command_line() {
        assert_eq!(name_of(Operation::WriteData), "writedata");
        assert_eq!(name_of(Mode::Bw), "bw");
        assert_eq!(name_of(Wait::Adaptive), "adaptive");
    }
}
