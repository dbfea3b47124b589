//! The reader's side before there is a ring: it listens, and answers handshakes.
//!
//! Several handshakes go on at a time, each as far as its frames have come, so a connection that says
//! nothing holds up no other one. There are at most 16; further connections wait in the system's
//! backlog. While one waits, a handshake gives way that sent no `Hello` for a second, and never one
//! that did. Each handshake has 10 s; only the time inside [`RingListener::accept`] counts.

use std::io::ErrorKind as IoKind;
use std::mem;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::super::port::ReceiverId;
use super::super::receiver::RingOptions;
use super::frame::{Frame, Link, MOST_PROVIDERS, Wire, malformed};
use super::offers::{self, Side};
use super::{OPERATION, RingReader, RingSetup};
use crate::waiting::Deadline;
use crate::{Error, ErrorKind, Peer, Result};

const ACCEPT: &str = "accepting a ring's writer";
/// Handshakes at a time.
const MOST_HANDSHAKES: usize = 16;
/// How long one may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Connections that are no writer's must not fill the log: one line in this time.
const LOG_PAUSE: Duration = Duration::from_secs(1);
/// How long one may send no `Hello` while further connections wait.
const SILENCE: Duration = Duration::from_secs(1);

/// Listens for the writers of rings: see [`listen`](super::listen).
///
/// A listener answers while [`accept`](Self::accept) runs. Several rings may come of it, one after the
/// other, each with an endpoint and a thread of its own.
#[derive(Debug)]
pub struct RingListener {
    setup: RingSetup,
    listener: TcpListener,
    address: SocketAddr,
    handshakes: Vec<Handshake>,
    /// When the last call of `accept` returned.
    returned: Instant,
    /// Why the last handshake that failed did.
    refused: Option<String>,
    /// When a refusal was logged last, and how many were not since.
    logged: Option<Instant>,
    unlogged: u64,
}

/// A writer that connects.
#[derive(Debug)]
struct Handshake {
    link: Link,
    from: SocketAddr,
    /// When it began, later by the time that passed between calls of `accept`.
    since: Instant,
    stage: Stage,
}

/// What is to come from the writer next.
#[derive(Debug)]
enum Stage {
    Hello,
    Address { side: Box<Side>, provider: Wire },
    Answer { side: Box<Side>, provider: Wire, ring: ReceiverId, writer: Peer },
    Over,
}

impl RingListener {
    pub(super) fn new(setup: RingSetup, listener: TcpListener, address: SocketAddr) -> Self {
        Self {
            setup,
            listener,
            address,
            handshakes: Vec::new(),
            returned: Instant::now(),
            refused: None,
            logged: None,
            unlogged: 0,
        }
    }

    /// The address that it listens at.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for the next writer. What connects and is no writer, or has no provider in common, is
    /// refused and logged, and holds up no writer.
    ///
    /// # Errors
    /// `DeadlineExceeded`, with why the last writer was refused, if one was; what the system says.
    pub fn accept(&mut self, timeout: Duration) -> Result<RingReader> {
        let deadline = Deadline::after(timeout);
        // Nothing answered the handshakes meanwhile.
        let pause = self.returned.elapsed();
        self.handshakes.iter_mut().for_each(|handshake| handshake.since += pause);
        let accepted = self.accept_until(&deadline, timeout);
        self.returned = Instant::now();
        accepted
    }

    fn accept_until(&mut self, deadline: &Deadline, timeout: Duration) -> Result<RingReader> {
        loop {
            // Before connections are taken: a handshake whose frame has come is not silent.
            if let Some(reader) = self.advance() {
                return Ok(reader);
            }
            self.refuse_late();
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

    /// Takes connections that the system has, as long as there is a place for their handshakes.
    fn take_connections(&mut self) -> Result<()> {
        // Connections that come all the time must not keep the others from going on.
        for _ in 0..MOST_HANDSHAKES {
            if self.is_full() && self.silent(Instant::now()).is_none() {
                break;
            }
            match self.listener.accept() {
                Ok((stream, from)) => self.begin(stream, from),
                Err(error) if error.kind() == IoKind::WouldBlock => return Ok(()),
                Err(error)
                    if matches!(error.kind(), IoKind::Interrupted | IoKind::ConnectionAborted) => {}
                Err(error) => return Err(Error::of_system(ACCEPT, &self.address, &error)),
            }
        }
        Ok(())
    }

    fn begin(&mut self, stream: TcpStream, from: SocketAddr) {
        // A connection that has ended already is not logged.
        let Ok(link) = Link::new(stream) else { return };
        let now = Instant::now();
        if self.is_full() {
            let Some(silent) = self.silent(now) else { return };
            let detail = format!("it sent nothing for {SILENCE:?}, while others waited");
            self.refuse(silent, &Error::new(ErrorKind::DeadlineExceeded, OPERATION, detail));
        }
        self.handshakes.push(Handshake { link, from, since: now, stage: Stage::Hello });
    }

    fn is_full(&self) -> bool {
        self.handshakes.len() >= MOST_HANDSHAKES
    }

    /// The handshake that gives way to another one, if one does: the oldest without a `Hello`.
    fn silent(&self, now: Instant) -> Option<usize> {
        let gives_way = |it: &Handshake| it.is_silent() && it.age(now) >= SILENCE;
        self.handshakes.iter().position(gives_way)
    }

    /// Refuses the handshakes whose time is over.
    fn refuse_late(&mut self) {
        let now = Instant::now();
        while let Some(late) = self.handshakes.iter().position(|it| it.age(now) >= HANDSHAKE) {
            let detail = format!("the handshake took longer than {HANDSHAKE:?}");
            self.refuse(late, &Error::new(ErrorKind::DeadlineExceeded, OPERATION, detail));
        }
    }

    /// Goes on with all handshakes, until one is over.
    fn advance(&mut self) -> Option<RingReader> {
        let mut at = 0;
        while let Some(handshake) = self.handshakes.get_mut(at) {
            match handshake.advance(&self.setup) {
                Ok(false) => at += 1,
                Ok(true) => {
                    let done = self.handshakes.remove(at);
                    let from = done.from;
                    match done.into_reader(&self.setup) {
                        Ok(reader) => return Some(reader),
                        Err(error) => self.was_refused(from, &error),
                    }
                }
                Err(error) => self.refuse(at, &error),
            }
        }
        None
    }

    /// Ends a handshake, and tells the other side why.
    fn refuse(&mut self, at: usize, error: &Error) {
        let mut refused = self.handshakes.remove(at);
        // A side that is gone is not told.
        let _ = refused.link.send(&Frame::refusal(error));
        self.was_refused(refused.from, error);
    }

    fn was_refused(&mut self, from: SocketAddr, error: &Error) {
        let now = Instant::now();
        if self.logged.is_some_and(|logged| now.saturating_duration_since(logged) < LOG_PAUSE) {
            self.unlogged += 1;
        } else {
            let more = mem::take(&mut self.unlogged);
            tracing::warn!(
                %from, at = %self.address, why = %error, suppressed = more,
                "a ring's writer was refused"
            );
            self.logged = Some(now);
        }
        self.refused = Some(format!("the last one, from {from}, was refused: {error}"));
    }

    /// Sleeps until something came, the time of a handshake is over, or one gives way to others.
    fn wait(&self, deadline: &Deadline) -> Result<()> {
        let now = Instant::now();
        let takes = !self.is_full() || self.silent(now).is_some();
        let until_next = |it: &Handshake| {
            let most = if takes || !it.is_silent() { HANDSHAKE } else { SILENCE };
            most.saturating_sub(it.age(now))
        };
        let next = self.handshakes.iter().map(until_next).min();
        let left = next.unwrap_or(HANDSHAKE).min(deadline.left());
        // A connection that cannot be taken now would end every sleep at once.
        let listener = takes.then(|| self.listener.as_fd());
        let links = self.handshakes.iter().map(|it| it.link.stream().as_fd());
        let mut entries: Vec<_> = listener
            .into_iter()
            .chain(links)
            .map(|descriptor| PollFd::new(descriptor, PollFlags::POLLIN))
            .collect();
        let milliseconds = left.as_millis().saturating_add(1);
        let timeout = PollTimeout::try_from(milliseconds).unwrap_or(PollTimeout::MAX);
        match poll(&mut entries, timeout) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(Error::of_system(ACCEPT, &self.address, &error.into())),
        }
    }
}

impl Handshake {
    fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.since)
    }

    /// Did no whole frame come?
    fn is_silent(&self) -> bool {
        matches!(self.stage, Stage::Hello)
    }

    /// Answers what has come. True if the ring is there.
    fn advance(&mut self, setup: &RingSetup) -> Result<bool> {
        while let Some(frame) = self.link.next()? {
            self.stage = match (mem::replace(&mut self.stage, Stage::Over), frame) {
                (Stage::Hello, Frame::Hello { providers }) => self.choose(setup, &providers)?,
                (Stage::Address { side, provider }, Frame::Address(address)) => {
                    let writer = side.addresses.insert(&address)?;
                    self.offer(setup, side, provider, writer)?
                }
                (Stage::Answer { mut side, provider, ring, writer }, Frame::Answer(answer)) => {
                    side.port.connect(ring, writer, &answer)?;
                    self.link.send(&Frame::Ready)?;
                    self.stage = Stage::Answer { side, provider, ring, writer };
                    return Ok(true);
                }
                (_, Frame::Refused { reason, .. }) => {
                    let detail = format!("the writer gives up: {}", reason.escape_debug());
                    return Err(Error::new(ErrorKind::ConnectionRefused, OPERATION, detail));
                }
                _ => return Err(malformed("a frame of the handshake that is not its turn")),
            };
        }
        Ok(false)
    }

    fn choose(&mut self, setup: &RingSetup, theirs: &[Wire]) -> Result<Stage> {
        if theirs.len() > MOST_PROVIDERS {
            return Err(malformed(format!("{} providers", theirs.len())));
        }
        let local = self.link.stream().local_addr();
        let local = local.map_err(|error| Error::of_system(OPERATION, &self.from, &error))?;
        let ours = offers::usable(offers::source_of(local), setup.provider_policy())?;
        let (provider, offer) = offers::in_common(ours, theirs)?;
        let side = Box::new(offers::open(&offer)?);
        let address = side.port.endpoint().address()?;
        self.link.send(&Frame::Chosen { provider: provider.clone(), address })?;
        Ok(Stage::Address { side, provider })
    }

    fn offer(
        &mut self,
        setup: &RingSetup,
        mut side: Box<Side>,
        provider: Wire,
        writer: Peer,
    ) -> Result<Stage> {
        let options = RingOptions::new(side.port.endpoint(), setup.bytes())?;
        let ring = side.port.offer(&options)?;
        let offer = side.port.terms(ring)?;
        self.link.send(&Frame::Terms { offer, largest: setup.largest_message() })?;
        Ok(Stage::Answer { side, provider, ring, writer })
    }

    fn into_reader(self, setup: &RingSetup) -> Result<RingReader> {
        let Stage::Answer { side, provider, ring, .. } = self.stage else {
            return Err(malformed("the handshake is not over"));
        };
        let stream = self.link.into_stream()?;
        RingReader::start(
            side.port,
            ring,
            stream,
            self.from,
            provider.name,
            setup.largest_message(),
        )
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::super::frame::take_frame;
    use super::*;

    const SHORT: Duration = Duration::from_millis(100);

    /// Makes the listener's past longer: the beginning of its handshakes, and the end of its last call.
    fn age(listener: &mut RingListener, began: Duration, returned: Duration) {
        listener.handshakes.iter_mut().for_each(|it| it.since -= began);
        listener.returned -= returned;
    }

    /// What the reader says before it ends a connection.
    fn refusal(stream: &mut TcpStream) -> String {
        stream.set_read_timeout(Some(HANDSHAKE)).unwrap();
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
    fn handshake_has_its_time_only_while_accept_runs() {
        let mut listener = RingSetup::new().listen("127.0.0.1:0").unwrap();
        let mut silent = TcpStream::connect(listener.address()).unwrap();
        accept_in_vain(&mut listener);
        // As if no call had run for longer than a handshake has.
        age(&mut listener, HANDSHAKE + SHORT, HANDSHAKE + SHORT);
        let error = accept_in_vain(&mut listener);
        assert!(!error.contains("refused"), "{error}");
        assert_eq!(listener.handshakes.len(), 1);
        // As if calls had.
        age(&mut listener, HANDSHAKE, Duration::ZERO);
        let error = accept_in_vain(&mut listener);
        assert!(error.contains("took longer than 10s"), "{error}");
        assert_eq!(refusal(&mut silent), "the handshake took longer than 10s");
        assert!(listener.handshakes.is_empty());
    }

    #[test]
    fn refusals_are_logged_once_a_second() {
        let mut listener = RingSetup::new().listen("127.0.0.1:0").unwrap();
        let error = malformed("it does not speak the protocol of rings");
        let from = listener.address();
        for _ in 0..1000 {
            listener.was_refused(from, &error);
        }
        let (logged, unlogged) = (listener.logged.unwrap(), listener.unlogged);
        assert!(unlogged >= 900, "{unlogged}");
        listener.logged = Some(logged - LOG_PAUSE);
        listener.was_refused(from, &error);
        assert_eq!(listener.unlogged, 0);
    }

    #[test]
    fn silent_handshakes_give_way_only_to_waiting_connections() {
        let mut listener = RingSetup::new().listen("127.0.0.1:0").unwrap();
        let connect = |_| TcpStream::connect(listener.address()).unwrap();
        let mut first: Vec<_> = (0..MOST_HANDSHAKES).map(connect).collect();
        let further: Vec<_> = (0..3).map(connect).collect();
        let error = accept_in_vain(&mut listener);
        assert!(!error.contains("refused"), "{error}");
        assert_eq!(listener.handshakes.len(), MOST_HANDSHAKES);

        age(&mut listener, SILENCE, Duration::ZERO);
        accept_in_vain(&mut listener);
        assert_eq!(listener.handshakes.len(), MOST_HANDSHAKES);
        for stream in &mut first[..3] {
            assert_eq!(refusal(stream), "it sent nothing for 1s, while others waited");
        }
        // Nothing waits any more, so the others stay.
        let stays = |at: usize| listener.handshakes[at].from == first[at + 3].local_addr().unwrap();
        assert!((0..MOST_HANDSHAKES - 3).all(stays));
        drop(further);
    }
}
