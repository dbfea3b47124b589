//! The writer's side of the handshake.

use std::io::ErrorKind as IoKind;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use super::frame::{Frame, FramedStream, malformed};
use super::writer::SLOT_LEN;
use super::{OPERATION, RingSetup, RingWriter, provider_choice, wait_readable};
use crate::waiting::Deadline;
use crate::{Error, ErrorKind, Result};

/// Pause between attempts to connect.
const PAUSE: Duration = Duration::from_millis(50);

/// Connects to the first of these addresses where a program listens; errors name the peer `name`.
/// Tries again while nothing listens at one of them, or it does not answer.
pub(super) fn connect(
    setup: &RingSetup,
    addresses: &[SocketAddr],
    name: &str,
    timeout: Duration,
) -> Result<RingWriter> {
    let deadline = Deadline::after(timeout);
    // Libfabric takes seconds to load its providers on some machines, and a connection that stays
    // silent for so long may be evicted.
    provider_choice::usable_providers(None, &setup.policy)?;
    let stream = open_stream(addresses, name, &deadline, timeout)?;
    run_handshake(setup, stream, &deadline, timeout).map_err(|error| error.with_peer(name))
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
            _ => return Err(Error::from_io_error(OPERATION, &name, &error)),
        };
        if deadline.has_passed() {
            let detail = format!("{name}: {why} (tried for {timeout:?})");
            return Err(Error::new(kind, OPERATION, detail));
        }
        std::thread::sleep(PAUSE.min(deadline.left()));
    }
}

/// Tries each address once, with an equal share of the remaining time. Returns the most informative
/// failure.
fn connect_to_one(addresses: &[SocketAddr], deadline: &Deadline) -> std::io::Result<TcpStream> {
    let mut failure = std::io::Error::from(IoKind::TimedOut);
    for (address, untried) in addresses.iter().zip((1..=addresses.len() as u32).rev()) {
        let share = (deadline.left() / untried).max(Duration::from_millis(1));
        let error = match TcpStream::connect_timeout(address, share) {
            // Where nothing listens, a randomly picked local port can connect to itself.
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

/// How informative a failure is. Where a connection was refused, a program may yet begin to listen.
fn rank(error: &std::io::Error) -> u8 {
    match error.kind() {
        IoKind::TimedOut => 0,
        IoKind::ConnectionRefused => 2,
        _ => 1,
    }
}

fn run_handshake(
    setup: &RingSetup,
    stream: TcpStream,
    deadline: &Deadline,
    timeout: Duration,
) -> Result<RingWriter> {
    let local = stream.local_addr().map_err(failed)?;
    let peer = stream.peer_addr().map_err(failed)?;
    let mut framed = FramedStream::new(stream).map_err(failed)?;
    let receive = |framed: &mut _, what| receive(framed, what, deadline, timeout);

    let bind_address = provider_choice::bind_address(local);
    let usable = provider_choice::usable_providers(bind_address, &setup.policy)?;
    let providers = usable.iter().map(|(wire, _)| wire.clone()).collect();
    framed.send(&Frame::Hello { providers, key: setup.key.clone() })?;
    let Frame::Selected { provider, address } = receive(&mut framed, "the choice of a provider")?
    else {
        return Err(unexpected_frame());
    };
    let (provider, offer) =
        provider_choice::common_provider(usable, std::slice::from_ref(&provider))?;
    let (mut port, addresses) = provider_choice::open(&offer)?;
    let reader = addresses.insert(&address)?;
    framed.send(&Frame::Address(port.endpoint().address()?))?;
    let Frame::Offer { offer, largest } = receive(&mut framed, "the ring offer")? else {
        return Err(unexpected_frame());
    };
    let accepted = port.accept(reader, &offer, SLOT_LEN as u64);
    let (ring, answer) = accepted.inspect_err(|error| {
        let _ = framed.send(&Frame::refusal(error));
    })?;
    framed.send(&Frame::Answer(answer))?;
    let Frame::Ready = receive(&mut framed, "the reader to be ready")? else {
        return Err(unexpected_frame());
    };
    let stream = framed.into_stream()?;
    RingWriter::start(port, ring, stream, (peer, provider.name), largest)
}

fn failed(error: std::io::Error) -> Error {
    Error::from_io_error(OPERATION, &"the connection", &error)
}

fn unexpected_frame() -> Error {
    malformed("unexpected frame in the handshake")
}

/// Waits for the next frame of the reader, or its refusal.
fn receive(
    framed: &mut FramedStream,
    what: &str,
    deadline: &Deadline,
    timeout: Duration,
) -> Result<Frame> {
    loop {
        match framed.next()? {
            Some(Frame::Refused { is_provider_error, reason }) => {
                let kind = match is_provider_error {
                    true => ErrorKind::NoProvider,
                    false => ErrorKind::ConnectionRefused,
                };
                let detail =
                    format!("the reader refused the connection: {}", reason.escape_debug());
                return Err(Error::new(kind, OPERATION, detail));
            }
            Some(frame) => return Ok(frame),
            None if deadline.has_passed() => {
                let detail = format!(
                    "no answer within {timeout:?}, waiting for {what}: the listening program may not accept now"
                );
                return Err(Error::new(ErrorKind::DeadlineExceeded, OPERATION, detail));
            }
            None => {
                let socket = [framed.stream().as_fd()];
                wait_readable(socket, deadline.left()).map_err(failed)?;
            }
        }
    }
}
