//! An exchange between two machines: a server waits for a client, which sends the plan.
//!
//! Both exchange the frames over TCP. The fabric uses the addresses of this connection, unless
//! others are set.

use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use super::ExchangeSide;
use super::frame::Frame;
use super::frame_channel::FrameChannel;
use super::initiator::warn_of_order;
use super::peer_watchdog::Role;
use super::plan::Plan;
use super::target::run_plan;
use crate::process::{cancel_stall_alarm, pin};
use command::exit::{Exit, Failure};

/// How long a client may take to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Waits for a client at this address, and serves its exchange. `provider` is the only one that the
/// client may request; `source` is the local address to use.
pub(crate) fn serve(
    address: &str,
    provider: &str,
    source: Option<&str>,
    check: impl FnOnce(&Plan) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let failed = |what: &str, error: std::io::Error| {
        Failure::failed(format!("{what} at {address} failed: {error}"))
    };
    let listener = TcpListener::bind(address).map_err(|e| failed("listen", e))?;
    let local = listener.local_addr().map_err(|e| failed("listen", e))?;
    eprintln!("waiting for a client at {local}");
    let (stream, client) = listener.accept().map_err(|e| failed("accept a client", e))?;
    eprintln!("client connected: {client}");
    let local = local_address_of(&stream)?;
    let mut frame_channel = frame_channel_of(stream)?;
    let plan = frame_channel.plan()?;
    if plan.offer_query.provider != provider {
        let requested = &plan.offer_query.provider;
        let why = format!("the client wants \"{requested}\", and this serves \"{provider}\"");
        return Err(report_to_client(&mut frame_channel, Failure::new(Exit::Usage, why)));
    }
    check(&plan).map_err(|failure| report_to_client(&mut frame_channel, failure))?;
    let mut plan = plan.for_client(source);
    plan.offer_query.bind_to(&local);
    let mut reporter = frame_channel.try_clone()?;
    let result = run_plan(&plan, frame_channel, Role::Remote { is_initiator: false });
    cancel_stall_alarm();
    result.map_err(|failure| report_to_client(&mut reporter, failure))
}

/// Reports a failure to the client, if it is still connected.
fn report_to_client(frame_channel: &mut FrameChannel, failure: Failure) -> Failure {
    frame_channel.report(&failure);
    failure
}

/// Connects to a server, and opens this side of the exchange.
pub(crate) fn connect(
    plan: &Plan,
    address: &str,
    core: Option<usize>,
) -> Result<ExchangeSide, Failure> {
    let failed = |why: String| Failure::failed(format!("connect to {address} failed: {why}"));
    let addresses = std::net::ToSocketAddrs::to_socket_addrs(address);
    let addresses = addresses.map_err(|error| failed(error.to_string()))?;
    let mut last = failed("there is no such address".to_owned());
    let mut stream = None;
    for candidate in addresses {
        match TcpStream::connect_timeout(&candidate, CONNECT_TIMEOUT) {
            Ok(connected) => {
                stream = Some(connected);
                break;
            }
            Err(error) => last = failed(error.to_string()),
        }
    }
    let Some(stream) = stream else { return Err(last) };
    let mut plan = plan.clone();
    plan.offer_query.bind_to(&local_address_of(&stream)?);
    let (offer, ordered) = plan.offer()?;
    warn_of_order(&offer, ordered);
    let mut frame_channel = frame_channel_of(stream)?;
    if !frame_channel.send(&Frame::Plan(plan.clone()))? {
        return Err(failed("the server closed the connection".to_owned()));
    }
    if let Some(core) = core {
        pin(core)?;
    }
    ExchangeSide::open(&plan, &offer, frame_channel, Role::Remote { is_initiator: true })
}

fn local_address_of(stream: &TcpStream) -> Result<String, Failure> {
    let local = stream.local_addr();
    local.map(|address| address.ip().to_string()).map_err(|e| Failure::failed(e.to_string()))
}

fn frame_channel_of(stream: TcpStream) -> Result<FrameChannel, Failure> {
    let failed =
        |error: std::io::Error| Failure::failed(format!("set up the connection failed: {error}"));
    stream.set_nodelay(true).map_err(failed)?;
    let other = stream.try_clone().map_err(failed)?;
    FrameChannel::new(stream, other)
}
