//! The writer's side before there is a ring: it connects, and goes through the handshake.

use std::io::ErrorKind as IoKind;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::frame::{Frame, Link, malformed};
use super::writer::SLOT;
use super::{OPERATION, RingWriter, offers};
use crate::waiting::Deadline;
use crate::{Error, ErrorKind, Policy, Result};

/// Pauses between attempts to connect.
const PAUSE: Duration = Duration::from_millis(50);

/// Connects to the first of these addresses where something listens, which the user calls `name`. Tries
/// again as long as that is of use: while nothing listens at one of them, or does not answer.
pub(super) fn connect(
    policy: &Policy,
    addresses: &[SocketAddr],
    name: &str,
    timeout: Duration,
) -> Result<RingWriter> {
    let deadline = Deadline::after(timeout);
    // Libfabric takes seconds to load its providers on some machines, and a connection that says
    // nothing for so long may have to give way to others.
    offers::usable(None, policy)?;
    let stream = open_stream(addresses, name, &deadline, timeout)?;
    let named = |error: Error| error.with_peer(name);
    shake_hands(policy, stream, &deadline, timeout).map_err(named)
}

fn open_stream(
    addresses: &[SocketAddr],
    name: &str,
    deadline: &Deadline,
    timeout: Duration,
) -> Result<TcpStream> {
    loop {
        let error = match connect_to_one(addresses, deadline) {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        let (kind, why) = match error.kind() {
            IoKind::ConnectionRefused => {
                (ErrorKind::ConnectionRefused, "nothing listens at that address")
            }
            IoKind::TimedOut => (ErrorKind::DeadlineExceeded, "the address does not answer"),
            _ => return Err(Error::of_system(OPERATION, &name, &error)),
        };
        if deadline.has_passed() {
            let detail = format!("{name}: {why}, for {timeout:?}");
            return Err(Error::new(kind, OPERATION, detail));
        }
        std::thread::sleep(PAUSE.min(deadline.left()));
    }
}

/// Tries each address once, with an equal share of the time that is left. Of the failures it gives the
/// one that tells most.
fn connect_to_one(addresses: &[SocketAddr], deadline: &Deadline) -> std::io::Result<TcpStream> {
    let mut failure = std::io::Error::from(IoKind::TimedOut);
    for (address, untried) in addresses.iter().zip((1..=addresses.len() as u32).rev()) {
        let share = (deadline.left() / untried).max(Duration::from_millis(1));
        let error = match TcpStream::connect_timeout(address, share) {
            // Where nothing listens, a port that was picked by chance can meet itself.
            Ok(stream) if stream.local_addr().ok() == stream.peer_addr().ok() => {
                IoKind::ConnectionRefused.into()
            }
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        if rank(&error) >= rank(&failure) {
            failure = error;
        }
    }
    Err(failure)
}

/// How much a failure to connect tells. A program may yet begin to listen where a connection was refused.
fn rank(error: &std::io::Error) -> u8 {
    match error.kind() {
        IoKind::TimedOut => 0,
        IoKind::ConnectionRefused => 2,
        _ => 1,
    }
}

fn shake_hands(
    policy: &Policy,
    stream: TcpStream,
    deadline: &Deadline,
    timeout: Duration,
) -> Result<RingWriter> {
    let failed = |error: std::io::Error| Error::of_system(OPERATION, &"the connection", &error);
    let (local, peer) = (stream.local_addr(), stream.peer_addr());
    let (local, peer) = (local.map_err(failed)?, peer.map_err(failed)?);
    let link = Link::new(stream).map_err(failed)?;
    let mut frames = Frames { link, deadline, timeout };

    let ours = offers::usable(offers::source_of(local), policy)?;
    let providers = ours.iter().map(|(wire, _)| wire.clone()).collect();
    frames.link.send(&Frame::Hello { providers })?;
    let Frame::Chosen { provider, address } = frames.receive("the choice of a provider")? else {
        return Err(out_of_turn());
    };
    let (provider, offer) = offers::in_common(ours, std::slice::from_ref(&provider))?;
    let mut side = offers::open(&offer)?;
    let reader = side.addresses.insert(&address)?;
    frames.link.send(&Frame::Address(side.port.endpoint().address()?))?;
    let Frame::Terms { offer, largest } = frames.receive("the ring's terms")? else {
        return Err(out_of_turn());
    };
    let accepted = side.port.accept(reader, &offer, SLOT as u64);
    let (ring, answer) = accepted.inspect_err(|error| {
        let _ = frames.link.send(&Frame::refusal(error));
    })?;
    frames.link.send(&Frame::Answer(answer))?;
    let Frame::Ready = frames.receive("the reader to be ready")? else { return Err(out_of_turn()) };
    let stream = frames.link.into_stream()?;
    RingWriter::start(side.port, ring, stream, peer, provider.name, largest)
}

fn out_of_turn() -> Error {
    malformed("a frame of the handshake that is not its turn")
}

/// The frames of one handshake.
struct Frames<'a> {
    link: Link,
    deadline: &'a Deadline,
    timeout: Duration,
}

impl Frames<'_> {
    fn receive(&mut self, what: &str) -> Result<Frame> {
        loop {
            match self.link.next()? {
                Some(Frame::Refused { is_provider, reason }) => {
                    let kind = match is_provider {
                        true => ErrorKind::NoProvider,
                        false => ErrorKind::ConnectionRefused,
                    };
                    let detail = format!("the reader refuses: {}", reason.escape_debug());
                    return Err(Error::new(kind, OPERATION, detail));
                }
                Some(frame) => return Ok(frame),
                None if self.deadline.has_passed() => {
                    let timeout = self.timeout;
                    let detail = format!(
                        "waited {timeout:?} for {what}: the program that listens may not accept now"
                    );
                    return Err(Error::new(ErrorKind::DeadlineExceeded, OPERATION, detail));
                }
                None => self.wait()?,
            }
        }
    }

    fn wait(&self) -> Result<()> {
        let mut entries = [PollFd::new(self.link.stream().as_fd(), PollFlags::POLLIN)];
        let milliseconds = self.deadline.left().as_millis().saturating_add(1);
        let timeout = PollTimeout::try_from(milliseconds).unwrap_or(PollTimeout::MAX);
        match poll(&mut entries, timeout) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(Error::of_system(OPERATION, &"the connection", &error.into())),
        }
    }
}
