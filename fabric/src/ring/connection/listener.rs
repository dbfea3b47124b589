//! The reader's side before there is a ring: it listens, and answers handshakes.
//!
//! Several handshakes go on at a time, each as far as its frames have come, so a connection that says
//! nothing holds up no other one. There are at most 16, and the oldest gives way; each has 10 s.

use std::io::ErrorKind as IoKind;
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
pub(super) const MOST_HANDSHAKES: usize = 16;
/// How long one may take.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(10);

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
    /// Why the last handshake that failed did.
    refused: Option<String>,
}

/// A writer that connects.
#[derive(Debug)]
struct Handshake {
    link: Link,
    from: SocketAddr,
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
        Self { setup, listener, address, handshakes: Vec::new(), refused: None }
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
        loop {
            self.take_connections()?;
            if let Some(reader) = self.advance() {
                return Ok(reader);
            }
            let now = Instant::now();
            self.handshakes.retain(|it| now.saturating_duration_since(it.since) < HANDSHAKE);
            if deadline.has_passed() {
                let refused =
                    self.refused.take().map_or_else(String::new, |why| format!("; {why}"));
                let detail =
                    format!("no writer connected to {} within {timeout:?}{refused}", self.address);
                return Err(Error::new(ErrorKind::DeadlineExceeded, ACCEPT, detail));
            }
            self.wait(&deadline)?;
        }
    }

    /// Takes all connections that the system has.
    fn take_connections(&mut self) -> Result<()> {
        loop {
            match self.listener.accept() {
                Ok((stream, from)) => self.begin(stream, from),
                Err(error) if error.kind() == IoKind::WouldBlock => return Ok(()),
                Err(error)
                    if matches!(error.kind(), IoKind::Interrupted | IoKind::ConnectionAborted) => {}
                Err(error) => return Err(Error::of_system(ACCEPT, &self.address, &error)),
            }
        }
    }

    fn begin(&mut self, stream: TcpStream, from: SocketAddr) {
        // A connection that has ended already is not worth a word.
        let Ok(link) = Link::new(stream) else { return };
        if self.handshakes.len() >= MOST_HANDSHAKES {
            let given_up = self.handshakes.remove(0);
            self.refuse(given_up.from, "others connected, and its handshake was the oldest");
        }
        self.handshakes.push(Handshake { link, from, since: Instant::now(), stage: Stage::Hello });
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
                        Err(error) => self.refuse(from, &error.to_string()),
                    }
                }
                Err(error) => {
                    let mut failed = self.handshakes.remove(at);
                    // A side that is gone is not told.
                    let _ = failed.link.send(&Frame::refusal(&error));
                    self.refuse(failed.from, &error.to_string());
                }
            }
        }
        None
    }

    fn refuse(&mut self, from: SocketAddr, why: &str) {
        tracing::warn!(%from, at = %self.address, why, "a ring's writer was refused");
        self.refused = Some(format!("the last one, from {from}, was refused: {why}"));
    }

    /// Sleeps until something came, or the time of a handshake is over.
    fn wait(&self, deadline: &Deadline) -> Result<()> {
        let now = Instant::now();
        let ends = self
            .handshakes
            .iter()
            .map(|it| HANDSHAKE.saturating_sub(now.saturating_duration_since(it.since)));
        let left = ends.min().unwrap_or(HANDSHAKE).min(deadline.left());
        let links = self.handshakes.iter().map(|it| it.link.stream().as_fd());
        let mut entries: Vec<_> = std::iter::once(self.listener.as_fd())
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
    /// Answers what has come. True if the ring is there.
    fn advance(&mut self, setup: &RingSetup) -> Result<bool> {
        while let Some(frame) = self.link.next()? {
            self.stage = match (std::mem::replace(&mut self.stage, Stage::Over), frame) {
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
