//! The same between two machines: one waits for a client, who brings the plan.
//!
//! The two talk over TCP, in the frames that they would send through a pipe. What goes through the
//! fabric goes between the addresses that this connection has, unless others are asked for.

use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use super::frame::Frame;
use super::initiator::warn_of_order;
use super::link::Link;
use super::plan::Plan;
use super::station::Station;
use super::target::follow;
use super::vigil::Role;
use crate::process::{pin, stop_watching};
use command::exit::{Exit, Failure};

/// How long a client may take to connect.
const PATIENCE: Duration = Duration::from_secs(10);

/// Waits for a client at this address, and does what it wants, once. `provider` is the only one
/// that it may want; `source` is the local address to use.
pub(crate) fn serve(
    address: &str,
    provider: &str,
    source: Option<&str>,
    check: impl FnOnce(&Plan) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let failed =
        |what: &str, error: std::io::Error| Failure::failed(format!("{what} {address}: {error}"));
    let listener = TcpListener::bind(address).map_err(|e| failed("listening at", e))?;
    let here = listener.local_addr().map_err(|e| failed("listening at", e))?;
    eprintln!("waiting for a client at {here}");
    let (stream, client) = listener.accept().map_err(|e| failed("accepting at", e))?;
    eprintln!("a client is there: {client}");
    let local = local_of(&stream)?;
    let mut link = link_of(stream)?;
    let plan = link.plan()?;
    if plan.place.provider != provider {
        let wanted = &plan.place.provider;
        let why = format!("the client wants \"{wanted}\", and this serves \"{provider}\"");
        return Err(tell(&mut link, Failure::new(Exit::Usage, why)));
    }
    check(&plan).map_err(|failure| tell(&mut link, failure))?;
    let mut plan = plan.for_a_client(source);
    plan.place.bind_to(&local);
    let mut reporter = link.try_clone()?;
    let result = follow(&plan, link, Role::Remote { is_initiator: false });
    stop_watching();
    result.map_err(|failure| tell(&mut reporter, failure))
}

/// Tells the client what went wrong; one that is gone is not told.
fn tell(link: &mut Link, failure: Failure) -> Failure {
    link.report(&failure);
    failure
}

/// Connects to a server, and opens this side of the exchange.
pub(crate) fn connect(plan: &Plan, address: &str, core: Option<usize>) -> Result<Station, Failure> {
    let failed = |why: String| Failure::failed(format!("connecting to {address}: {why}"));
    let addresses = std::net::ToSocketAddrs::to_socket_addrs(address);
    let addresses = addresses.map_err(|error| failed(error.to_string()))?;
    let mut last = failed("there is no such address".to_owned());
    let mut stream = None;
    for candidate in addresses {
        match TcpStream::connect_timeout(&candidate, PATIENCE) {
            Ok(connected) => {
                stream = Some(connected);
                break;
            }
            Err(error) => last = failed(error.to_string()),
        }
    }
    let Some(stream) = stream else { return Err(last) };
    let mut plan = plan.clone();
    plan.place.bind_to(&local_of(&stream)?);
    let (offer, ordered) = plan.offer()?;
    warn_of_order(&offer, ordered);
    let mut link = link_of(stream)?;
    if !link.send(&Frame::Plan(plan.clone()))? {
        return Err(failed("the server is gone".to_owned()));
    }
    if let Some(core) = core {
        pin(core)?;
    }
    Station::open(&plan, &offer, link, Role::Remote { is_initiator: true })
}

fn local_of(stream: &TcpStream) -> Result<String, Failure> {
    let local = stream.local_addr();
    local.map(|address| address.ip().to_string()).map_err(|e| Failure::failed(e.to_string()))
}

fn link_of(stream: TcpStream) -> Result<Link, Failure> {
    let failed = |error: std::io::Error| Failure::failed(format!("a connection: {error}"));
    stream.set_nodelay(true).map_err(failed)?;
    let other = stream.try_clone().map_err(failed)?;
    Link::new(stream, other)
}
