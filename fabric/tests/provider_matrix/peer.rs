//! A peer in a separate process, for cells that kill it.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, ExitCode, Stdio};
use std::time::{Duration, Instant};

use fabric::{
    Address, Caps, CompletionQueue, Domain, Endpoint, EndpointKind, Event, EventQueue, Listener,
    RemoteRegion,
};

use crate::cells::Cell;
use crate::pair::{CaseResult, Setup, Side, timeout, unconnected_side};

/// Size of the region that a peer offers.
pub const REGION: usize = 8 << 20;

/// A running peer.
pub struct PeerProcess {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    pub address: Address,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn unhex(text: &str) -> CaseResult<Vec<u8>> {
    let digits: Vec<u8> = text.trim().bytes().collect();
    digits.chunks(2).map(|pair| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?)).collect()
}

impl PeerProcess {
    /// Starts a peer for this cell; it reports its address at once.
    pub fn start(cell: &Cell) -> CaseResult<Self> {
        let mut child = testkit::children::this_program()
            .arg("--peer")
            .arg(cell.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take().ok_or("no stdin")?;
        let output = BufReader::new(child.stdout.take().ok_or("no stdout")?);
        let mut peer = Self { child, input, output, address: Address(Vec::new()) };
        peer.address = Address(peer.receive_bytes()?);
        Ok(peer)
    }

    fn receive_bytes(&mut self) -> CaseResult<Vec<u8>> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        if line.is_empty() {
            return Err("the peer process exited".into());
        }
        unhex(&line)
    }

    /// Sends our address to the peer and receives its region descriptor.
    pub fn exchange_addresses(&mut self, address: &Address) -> CaseResult {
        writeln!(self.input, "{}", hex(&address.0))?;
        self.input.flush()?;
        Ok(())
    }

    pub fn region(&mut self) -> CaseResult<RemoteRegion> {
        let bytes = self.receive_bytes()?;
        Ok(RemoteRegion::decode(&bytes)?)
    }

    /// Kills the peer, at an arbitrary instruction.
    pub fn kill(&mut self) -> CaseResult {
        self.child.kill()?;
        self.child.wait()?;
        self.remove_shm_files();
        Ok(())
    }

    /// Removes the shared-memory files that a killed shm process leaves behind: a later process
    /// with the same process id could not open its endpoint.
    fn remove_shm_files(&self) {
        let number = self.child.id().to_string();
        let is_its = |name: &str| {
            name.strip_prefix(&number).is_some_and(|rest| rest.starts_with([':', '-']))
        };
        let entries = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
        for entry in entries.filter(|entry| is_its(&entry.file_name().to_string_lossy())) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.remove_shm_files();
    }
}

/// Runs in the peer's process.
pub fn serve(text: &str) -> ExitCode {
    match text.parse().map_err(Into::into).and_then(|cell| serve_cell(&cell)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("peer: {error}");
            ExitCode::FAILURE
        }
    }
}

fn send_bytes(bytes: &[u8]) -> CaseResult {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{}", hex(bytes))?;
    output.flush()?;
    Ok(())
}

fn receive_bytes() -> CaseResult<Vec<u8>> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    unhex(&line)
}

fn serve_cell(cell: &Cell) -> CaseResult {
    let offer = cell.offer(Caps::empty())?;
    if cell.kind == EndpointKind::Msg {
        return serve_connected(cell, &offer);
    }
    let (mut side, _) = unconnected_side(cell, &Setup::default(), &offer)?;
    send_bytes(&side.endpoint.address()?.0)?;
    let other = Address(receive_bytes()?);
    if let Some(addresses) = &side.addresses {
        side.peer = addresses.insert(&other)?;
    }
    let region = side.region(REGION)?;
    send_bytes(&region.describe()?.encode())?;
    receive_for_ever(&mut side.endpoint, &mut side.queue)
}

fn serve_connected(cell: &Cell, offer: &fabric::Offer) -> CaseResult {
    let domain = Domain::open(offer)?;
    let mut events = EventQueue::open(domain.fabric())?;
    let listener = Listener::open(domain.fabric(), offer, &events)?;
    send_bytes(&listener.address()?.0)?;
    let _ = receive_bytes()?;
    let request = match events.wait(timeout())? {
        Event::ConnectionRequest(request) => request,
        other => return Err(format!("{other:?}").into()),
    };
    let mut queue = CompletionQueue::open(&domain)?;
    let mut connection_events = EventQueue::open(domain.fabric())?;
    let mut endpoint = Endpoint::builder(&domain)
        .offer(&request.offer)
        .queue(&mut queue)
        .events(&connection_events)
        .open()?;
    endpoint.accept(&mut connection_events, b"", timeout())?;
    let memory = fabric::HostMemory::zeroed(REGION)?;
    let region = domain.register(memory, fabric::Access::ALL)?;
    send_bytes(&region.describe()?.encode())?;
    let _ = cell;
    receive_for_ever(&mut endpoint, &mut queue)
}

/// Receives messages until it is killed; exits by itself after a time limit.
fn receive_for_ever(endpoint: &mut Endpoint, queue: &mut CompletionQueue) -> CaseResult {
    let consume = endpoint.domain().capabilities().immediates_consume_receives();
    if consume {
        for _ in 0..64 {
            endpoint.receive_immediate(queue, 0)?;
        }
    }
    let end = Instant::now() + crate::runner::cell_limit();
    while Instant::now() < end {
        if let Ok(completion) = queue.wait(Duration::from_millis(20))
            && consume
            && completion.operation.is_some()
        {
            endpoint.receive_immediate(queue, 0)?;
        }
    }
    Ok(())
}

/// A side that communicates with a peer process, and the process.
pub fn connect_to_peer_process(cell: &Cell) -> CaseResult<(Side, PeerProcess, RemoteRegion)> {
    let offer = cell.offer(Caps::empty())?;
    let mut process = PeerProcess::start(cell)?;
    let mut side = if cell.kind == EndpointKind::Msg {
        process.exchange_addresses(&Address(vec![0]))?;
        connect(cell, &offer, &process.address)?
    } else {
        let (side, _) = unconnected_side(cell, &Setup::default(), &offer)?;
        process.exchange_addresses(&side.endpoint.address()?)?;
        side
    };
    if let Some(addresses) = &side.addresses {
        side.peer = addresses.insert(&process.address)?;
    }
    let region = process.region()?;
    Ok((side, process, region))
}

fn connect(cell: &Cell, offer: &fabric::Offer, to: &Address) -> CaseResult<Side> {
    let domain = Domain::open(offer)?;
    let mut events = EventQueue::open(domain.fabric())?;
    let mut queue = CompletionQueue::open(&domain)?;
    let mut endpoint =
        Endpoint::builder(&domain).queue(&mut queue).events(&events).towards(to).open()?;
    endpoint.connect(&mut events, to, b"", timeout())?;
    Ok(Side::from_parts(cell, domain, queue, endpoint, Some(events)))
}
