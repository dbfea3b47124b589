//! The reader's side of the handshake.
//!
//! Several handshakes progress concurrently, so a silent connection does not delay others. There
//! are at most 16; further connections wait in the system's backlog. While one waits, a handshake
//! that sent no `Hello` for a second is evicted, and never one that did. Each handshake has 10 s;
//! only the time inside [`RingListener::accept`] counts.

use std::io::ErrorKind as IoKind;
use std::mem;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::super::receiver::RingOptions;
use super::super::{Port, ReceiverId};
use super::frame::{Frame, FramedStream, MAX_PROVIDERS, malformed};
use super::{OPERATION, ProviderProtocol, RingReader, RingSetup, provider_choice, wait_readable};
use crate::waiting::Deadline;
use crate::{AddressVector, Error, ErrorKind, Peer, Result};

const ACCEPT: &str = "accept writer of ring";
const MAX_HANDSHAKES: usize = 16;
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// One line in this time, so that other connections do not fill the log.
const LOG_INTERVAL: Duration = Duration::from_secs(1);
/// Time without `Hello` after which a handshake may be evicted.
const HELLO_TIMEOUT: Duration = Duration::from_secs(1);

/// Listens for the writers of rings: see [`listen`](super::listen).
///
/// Handshakes progress while [`accept`](Self::accept) runs. Several rings can be accepted one after
/// the other, each with its own endpoint and thread.
#[derive(Debug)]
pub struct RingListener {
    setup: RingSetup,
    listener: TcpListener,
    address: SocketAddr,
    handshakes: Vec<Handshake>,
    last_accept_end: Instant,
    /// Why the last failed handshake was refused.
    refused: Option<String>,
    /// When a refusal was last logged, and the number suppressed since.
    logged: Option<Instant>,
    suppressed: u64,
}

#[derive(Debug)]
struct Handshake {
    framed: FramedStream,
    from: SocketAddr,
    /// When it began, plus the time between calls of `accept`.
    since: Instant,
    stage: Stage,
}

/// A ring that is offered to one writer, with its port and provider.
#[derive(Debug)]
struct OfferedRing {
    port: Box<Port>,
    ring: ReceiverId,
    provider: ProviderProtocol,
}

/// The frame expected next.
#[derive(Debug)]
enum Stage {
    Hello,
    Address(Box<(Port, AddressVector)>, ProviderProtocol),
    Answer(OfferedRing, Peer),
    Finished,
}

impl RingListener {
    pub(super) fn new(setup: RingSetup, listener: TcpListener, address: SocketAddr) -> Self {
        Self {
            setup,
            listener,
            address,
            handshakes: Vec::new(),
            last_accept_end: Instant::now(),
            refused: None,
            logged: None,
            suppressed: 0,
        }
    }

    /// The address at which it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for the next writer. Other connections, and writers without a common provider, are
    /// refused and logged, and do not delay writers.
    ///
    /// # Errors
    /// `DeadlineExceeded`, with the reason of the last refusal, if any; errors of the system.
    pub fn accept(&mut self, timeout: Duration) -> Result<RingReader> {
        let deadline = Deadline::after(timeout);
        // Handshakes made no progress meanwhile.
        let pause = self.last_accept_end.elapsed();
        self.handshakes.iter_mut().for_each(|handshake| handshake.since += pause);
        let accepted = self.accept_until(&deadline, timeout);
        self.last_accept_end = Instant::now();
        accepted
    }

    fn accept_until(&mut self, deadline: &Deadline, timeout: Duration) -> Result<RingReader> {
        loop {
            // Before connections are taken: a handshake whose frame has arrived is not silent.
            if let Some(reader) = self.advance() {
                return Ok(reader);
            }
            self.refuse_expired();
            self.take_connections()?;
            if let Some(reader) = self.advance() {
                return Ok(reader);
            }
            if deadline.has_passed() {
                let refused =
                    self.refused.take().map_or_else(String::new, |why| format!("; {why}"));
                let detail =
                    format!("no writer connected to {} within {timeout:?}{refused}", self.address);
                return Err(Error::new(ErrorKind::DeadlineExceeded, ACCEPT, detail));
            }
            self.wait(deadline)?;
        }
    }

    /// Accepts connections as long as there is room for their handshakes.
    fn take_connections(&mut self) -> Result<()> {
        // Bounded, so that new connections do not starve the handshakes.
        for _ in 0..MAX_HANDSHAKES {
            if self.is_full() && self.evictable(Instant::now()).is_none() {
                break;
            }
            match self.listener.accept() {
                Ok((stream, from)) => self.begin(stream, from),
                Err(error) if error.kind() == IoKind::WouldBlock => return Ok(()),
                Err(error)
                    if matches!(error.kind(), IoKind::Interrupted | IoKind::ConnectionAborted) => {}
                Err(error) => return Err(Error::from_io_error(ACCEPT, &self.address, &error)),
            }
        }
        Ok(())
    }

    fn begin(&mut self, stream: TcpStream, from: SocketAddr) {
        // A connection that was already closed is not logged.
        let Ok(framed) = FramedStream::new(stream) else { return };
        let now = Instant::now();
        if self.is_full() {
            let Some(evictable) = self.evictable(now) else { return };
            let detail =
                format!("no handshake frame for {HELLO_TIMEOUT:?}, while connections waited");
            self.refuse(evictable, &Error::new(ErrorKind::DeadlineExceeded, OPERATION, detail));
        }
        self.handshakes.push(Handshake { framed, from, since: now, stage: Stage::Hello });
    }

    fn is_full(&self) -> bool {
        self.handshakes.len() >= MAX_HANDSHAKES
    }

    /// The handshake that may be evicted: the oldest without a `Hello`.
    fn evictable(&self, now: Instant) -> Option<usize> {
        let is_evictable = |it: &Handshake| it.awaits_hello() && it.age(now) >= HELLO_TIMEOUT;
        self.handshakes.iter().position(is_evictable)
    }

    fn refuse_expired(&mut self) {
        let now = Instant::now();
        let is_late = |it: &Handshake| it.age(now) >= HANDSHAKE_TIMEOUT;
        while let Some(late) = self.handshakes.iter().position(is_late) {
            let detail = format!("the handshake took longer than {HANDSHAKE_TIMEOUT:?}");
            self.refuse(late, &Error::new(ErrorKind::DeadlineExceeded, OPERATION, detail));
        }
    }

    /// Continues all handshakes, until one is complete.
    fn advance(&mut self) -> Option<RingReader> {
        let mut at = 0;
        while let Some(handshake) = self.handshakes.get_mut(at) {
            match handshake.advance(&self.setup) {
                Ok(None) => at += 1,
                Ok(Some(established)) => {
                    let Handshake { framed, from, .. } = self.handshakes.remove(at);
                    let OfferedRing { port, ring, provider } = established;
                    let started = framed.into_stream().and_then(|stream| {
                        let peer = (from, provider.name);
                        RingReader::start(*port, ring, stream, peer, self.setup.largest)
                    });
                    match started {
                        Ok(reader) => return Some(reader),
                        Err(error) => self.record_refusal(from, &error),
                    }
                }
                Err(error) => self.refuse(at, &error),
            }
        }
        None
    }

    /// Ends a handshake, and sends the reason to the peer.
    fn refuse(&mut self, at: usize, error: &Error) {
        let mut refused = self.handshakes.remove(at);
        // A peer that has disconnected gets no reason.
        let _ = refused.framed.send(&Frame::refusal(error));
        self.record_refusal(refused.from, error);
    }

    fn record_refusal(&mut self, from: SocketAddr, error: &Error) {
        let now = Instant::now();
        if self.logged.is_some_and(|logged| now.saturating_duration_since(logged) < LOG_INTERVAL) {
            self.suppressed += 1;
        } else {
            let more = mem::take(&mut self.suppressed);
            tracing::warn!(
                %from, at = %self.address, why = %error, suppressed = more,
                "refused the writer of a ring"
            );
            self.logged = Some(now);
        }
        self.refused = Some(format!("the last writer, from {from}, was refused: {error}"));
    }

    /// Sleeps until an event, or until the time of a handshake is over or one may be evicted.
    fn wait(&self, deadline: &Deadline) -> Result<()> {
        let now = Instant::now();
        let takes = !self.is_full() || self.evictable(now).is_some();
        let until_next = |it: &Handshake| {
            let most = if takes || !it.awaits_hello() { HANDSHAKE_TIMEOUT } else { HELLO_TIMEOUT };
            most.saturating_sub(it.age(now))
        };
        let next = self.handshakes.iter().map(until_next).min();
        let left = next.unwrap_or(HANDSHAKE_TIMEOUT).min(deadline.left());
        // A connection that cannot be accepted now would end every sleep at once.
        let listener = takes.then(|| self.listener.as_fd());
        let links = self.handshakes.iter().map(|it| it.framed.stream().as_fd());
        wait_readable(listener.into_iter().chain(links), left)
            .map_err(|error| Error::from_io_error(ACCEPT, &self.address, &error))
    }
}

impl Handshake {
    fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.since)
    }

    /// Has no whole frame arrived?
    fn awaits_hello(&self) -> bool {
        matches!(self.stage, Stage::Hello)
    }

    /// Answers the frames that have arrived. Returns the ring once it is established.
    fn advance(&mut self, setup: &RingSetup) -> Result<Option<OfferedRing>> {
        while let Some(frame) = self.framed.next()? {
            self.stage = match (mem::replace(&mut self.stage, Stage::Finished), frame) {
                (Stage::Hello, Frame::Hello { providers, key }) => {
                    if setup.key.is_some() && key != setup.key {
                        let detail = "the writer does not have the reader's key";
                        return Err(Error::new(ErrorKind::ConnectionRefused, OPERATION, detail));
                    }
                    self.choose(setup, &providers)?
                }
                (Stage::Address(opened, provider), Frame::Address(address)) => {
                    let (port, addresses) = *opened;
                    let writer = addresses.insert(&address)?;
                    self.offer(setup, Box::new(port), provider, writer)?
                }
                (Stage::Answer(mut established, writer), Frame::Answer(answer)) => {
                    established.port.connect(established.ring, writer, &answer)?;
                    self.framed.send(&Frame::Ready)?;
                    return Ok(Some(established));
                }
                (_, Frame::Refused { reason, .. }) => {
                    let detail = format!("the writer refused the ring: {}", reason.escape_debug());
                    return Err(Error::new(ErrorKind::ConnectionRefused, OPERATION, detail));
                }
                _ => return Err(malformed("unexpected frame in the handshake")),
            };
        }
        Ok(None)
    }

    fn choose(&mut self, setup: &RingSetup, offered: &[ProviderProtocol]) -> Result<Stage> {
        if offered.len() > MAX_PROVIDERS {
            return Err(malformed(format!("{} providers exceed the limit", offered.len())));
        }
        let local = self.framed.stream().local_addr();
        let local = local.map_err(|error| Error::from_io_error(OPERATION, &self.from, &error))?;
        let local = provider_choice::bind_address(local);
        let usable = provider_choice::usable_providers(local, &setup.policy)?;
        let (provider, offer) = provider_choice::common_provider(usable, offered)?;
        let (port, addresses) = provider_choice::open(&offer)?;
        let address = port.endpoint().address()?;
        self.framed.send(&Frame::Selected { provider: provider.clone(), address })?;
        Ok(Stage::Address(Box::new((port, addresses)), provider))
    }

    fn offer(
        &mut self,
        setup: &RingSetup,
        mut port: Box<Port>,
        provider: ProviderProtocol,
        writer: Peer,
    ) -> Result<Stage> {
        let options = RingOptions::new(port.endpoint(), setup.capacity)?;
        let ring = port.offer(&options)?;
        let offer = port.ring_offer(ring)?;
        self.framed.send(&Frame::Offer { offer, largest: setup.largest })?;
        Ok(Stage::Answer(OfferedRing { port, ring, provider }, writer))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::super::frame::take_frame;
    use super::*;

    const SHORT: Duration = Duration::from_millis(100);

    /// Ages the handshakes, and the end of the last call.
    fn age(listener: &mut RingListener, began: Duration, last_accept_end: Duration) {
        listener.handshakes.iter_mut().for_each(|it| it.since -= began);
        listener.last_accept_end -= last_accept_end;
    }

    /// The reason that the reader sends before it closes a connection.
    fn refusal(stream: &mut TcpStream) -> String {
        stream.set_read_timeout(Some(HANDSHAKE_TIMEOUT)).unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        match take_frame(&mut bytes).unwrap() {
            Some(Frame::Refused { reason, .. }) => reason,
            other => panic!("{other:?}"),
        }
    }

    fn accept_in_vain(listener: &mut RingListener) -> String {
        let error = listener.accept(SHORT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
        error.to_string()
    }

    #[test]
    fn handshake_timeout_counts_only_while_accept_runs() {
        let mut listener = RingSetup::new().listen("127.0.0.1:0").unwrap();
        let mut evictable = TcpStream::connect(listener.address()).unwrap();
        accept_in_vain(&mut listener);
        // As if no call had run for longer than the time limit.
        age(&mut listener, HANDSHAKE_TIMEOUT + SHORT, HANDSHAKE_TIMEOUT + SHORT);
        let error = accept_in_vain(&mut listener);
        assert!(!error.contains("refused"), "{error}");
        assert_eq!(listener.handshakes.len(), 1);
        // As if calls had run for that time.
        age(&mut listener, HANDSHAKE_TIMEOUT, Duration::ZERO);
        let error = accept_in_vain(&mut listener);
        assert!(error.contains("took longer than 10s"), "{error}");
        assert_eq!(refusal(&mut evictable), "the handshake took longer than 10s");
        assert!(listener.handshakes.is_empty());
    }

    #[test]
    fn refusals_are_logged_once_a_second() {
        let mut listener = RingSetup::new().listen("127.0.0.1:0").unwrap();
        let error = malformed("the peer does not use the ring handshake");
        let from = listener.address();
        for _ in 0..1000 {
            listener.record_refusal(from, &error);
        }
        let (logged, suppressed) = (listener.logged.unwrap(), listener.suppressed);
        assert!(suppressed >= 900, "{suppressed}");
        listener.logged = Some(logged - LOG_INTERVAL);
        listener.record_refusal(from, &error);
        assert_eq!(listener.suppressed, 0);
    }

    #[test]
    fn silent_handshakes_are_evicted_only_for_waiting_connections() {
        let mut listener = RingSetup::new().listen("127.0.0.1:0").unwrap();
        let connect = |_| TcpStream::connect(listener.address()).unwrap();
        let mut first: Vec<_> = (0..MAX_HANDSHAKES).map(connect).collect();
        let waiting: Vec<_> = (0..3).map(connect).collect();
        let error = accept_in_vain(&mut listener);
        assert!(!error.contains("refused"), "{error}");
        assert_eq!(listener.handshakes.len(), MAX_HANDSHAKES);

        age(&mut listener, HELLO_TIMEOUT, Duration::ZERO);
        accept_in_vain(&mut listener);
        assert_eq!(listener.handshakes.len(), MAX_HANDSHAKES);
        for stream in &mut first[..3] {
            assert_eq!(refusal(stream), "no handshake frame for 1s, while connections waited");
        }
        // Nothing waits any more, so the others stay.
        let stays = |at: usize| listener.handshakes[at].from == first[at + 3].local_addr().unwrap();
        assert!((0..MAX_HANDSHAKES - 3).all(stays));
        drop(waiting);
    }
}
