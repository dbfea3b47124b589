//! What writer and reader share: a domain, and an endpoint that can be closed and opened again.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use fabric::ring::{NotifyMode, Port};
use fabric::{
    Access, Address, AddressVector, Caps, CompletionQueue, Domain, Endpoint, EndpointKind, Error,
    ErrorKind, HostMemory, MemoryRegion, Offer, Order, Peer, Query, QueueOptions,
};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;

use crate::control_channel::{ControlChannel, Instruction, Received, Report};
use crate::failure::Failure;

/// How long a child waits for its ring before it reads the control channel.
pub const WAIT_SLICE: Duration = Duration::from_millis(20);
/// How long a child without a ring waits before it reads the control channel.
const IDLE_SLICE: Duration = Duration::from_millis(2);
/// Shortest time between two reads of the control channel while busy.
const READ_INTERVAL: Duration = Duration::from_millis(1);

/// The wanted providers, or all present ones that rings are tested on.
pub fn providers(wanted: &[String]) -> Vec<String> {
    if !wanted.is_empty() {
        return wanted.to_vec();
    }
    let is_present = |provider: &&str| offer(provider).is_ok();
    // libfabric 1.18 renamed net to tcp.
    let tcp = ["tcp", "net"].into_iter().find(|provider| is_present(provider));
    let others = ["tcp;ofi_rxm", "shm"].into_iter().filter(is_present);
    tcp.into_iter().chain(others).map(str::to_owned).collect()
}

/// The notify modes that this provider supports.
pub fn notify_modes(provider: &str) -> Result<Vec<NotifyMode>, Failure> {
    let offer = offer(provider)?;
    let can = |notify: &NotifyMode| notify.check(offer.capabilities()).is_ok();
    Ok(NotifyMode::ALL.into_iter().filter(can).collect())
}

/// With ordered writes where the provider has them.
fn offer(provider: &str) -> fabric::Result<Offer> {
    let query = || {
        let query = Query::new(EndpointKind::Rdm).provider(provider);
        let query = if provider == "shm" { query } else { query.source("127.0.0.1") };
        query.caps(Caps::MESSAGE | Caps::RMA)
    };
    match query().order(Order::WRITE_AFTER_WRITE | Order::SEND_AFTER_WRITE).first() {
        Err(error) if error.kind() == ErrorKind::NoProvider => query().first(),
        offer => offer,
    }
}

/// A child's control channel to the supervisor, and its domain.
#[derive(Debug)]
pub struct ChildContext {
    pub control_channel: ControlChannel<Instruction>,
    pub domain: Domain,
    provider: String,
    read_at: Instant,
}

impl ChildContext {
    pub fn new(provider: &str) -> Result<Self, Failure> {
        // A killed child leaves nothing to clean up. If the supervisor exited before this call, the
        // control channel is closed.
        set_pdeathsig(Signal::SIGKILL)
            .map_err(|error| Failure::System("prctl(PR_SET_PDEATHSIG)", error.into()))?;
        let stdin = std::io::stdin().as_fd().try_clone_to_owned();
        let stream = stdin.map_err(|error| Failure::System("dup of stdin", error))?;
        let control_channel = ControlChannel::new(UnixStream::from(stream))?;
        let domain = Domain::open(&offer(provider)?)?;
        Ok(Self { control_channel, domain, provider: provider.to_owned(), read_at: Instant::now() })
    }

    /// Opens a port on a new endpoint.
    pub fn open_port(&self) -> Result<LocalPort, Failure> {
        // An endpoint of shm is named by its offer: a new one needs another name than the last.
        let offer = offer(&self.provider)?;
        let addresses = AddressVector::open(&self.domain)?;
        let mut queue = CompletionQueue::open_with(&self.domain, QueueOptions::default())?;
        let builder = Endpoint::builder(&self.domain).offer(&offer);
        let endpoint = builder.addresses(&addresses).queue(&mut queue).open()?;
        Ok(LocalPort { port: Port::new(endpoint, queue), addresses })
    }

    /// Source memory with all pages touched.
    pub fn source(&self, local_port: &LocalPort, length: usize) -> Result<MemoryRegion, Failure> {
        let region = self.domain.register(HostMemory::zeroed(length)?, Access::WRITE)?;
        region.enable_for(local_port.port.endpoint())?;
        region.fill(0..length, 1)?;
        Ok(region)
    }

    /// The next instruction of the supervisor, if it is time to check.
    pub fn instruction(
        &mut self,
        local_port: Option<&mut LocalPort>,
        is_busy: bool,
    ) -> Result<Received<Instruction>, Failure> {
        let timeout = match local_port {
            _ if is_busy && self.read_at.elapsed() < READ_INTERVAL => {
                return Ok(Received::Nothing);
            }
            _ if is_busy => Duration::ZERO,
            // Peers depend on its progress even while it is idle.
            Some(local_port) => local_port.wait(),
            None => IDLE_SLICE,
        };
        let receive = self.control_channel.receive(timeout);
        self.read_at = Instant::now();
        receive
    }

    /// Reports to the supervisor; an error if that has exited.
    pub fn report(&mut self, report: &Report) -> Result<(), Failure> {
        if self.control_channel.send(report)? { Ok(()) } else { Err(supervisor_gone()) }
    }
}

pub fn supervisor_gone() -> Failure {
    Failure::ControlChannel("the supervisor exited".to_owned())
}

/// A port, and the address vector of its endpoint.
#[derive(Debug)]
pub struct LocalPort {
    pub port: Port,
    addresses: AddressVector,
}

impl LocalPort {
    pub fn address(&self) -> Result<Address, Failure> {
        Ok(self.port.endpoint().address()?)
    }

    pub fn insert_peer(&self, address: &Address) -> Result<Peer, Failure> {
        Ok(self.addresses.insert(address)?)
    }

    /// Makes progress without a ring. Returns how long to wait for an instruction: a broken port
    /// fails at once.
    fn wait(&mut self) -> Duration {
        match self.port.wait(IDLE_SLICE) {
            Ok(_) => Duration::ZERO,
            Err(_) => IDLE_SLICE,
        }
    }

    /// Closes the endpoint. Memory of its transfers is freed with it, and memory of its ring only
    /// afterwards: data of a dead writer may still be in a socket.
    pub fn close(self) -> Result<(), Failure> {
        // The endpoint shares the address vector, so that is closed after it, and before the queue.
        drop(self.addresses);
        drop(self.port);
        match fabric::failed_closes() {
            0 => Ok(()),
            count => Err(Failure::Defect(format!("{count} objects could not be closed"))),
        }
    }
}

/// Did a wait end because of its deadline, and for no other reason?
pub fn is_late(error: &Error) -> bool {
    error.kind() == ErrorKind::DeadlineExceeded && error.code().is_none()
}
