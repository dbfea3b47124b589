//! Writes with immediates from one process into the memory of another.
//!
//! ```text
//! cargo run --locked --example rdm_write_immediate                  # the best provider for a ring
//! cargo run --locked --example rdm_write_immediate -- '=net'        # this one or none
//! cargo run --locked --example rdm_write_immediate -- 'tcp,^shm'    # tcp if available, never shm
//! ```
//!
//! The example starts itself again as its peer. Both exchange addresses and region descriptors
//! through pipes; from then on all data goes through the fabric. Each block is written with its
//! number as the immediate, so the peer learns which bytes have arrived without a message. It
//! answers in the same way, with the number of correct bytes.

use std::error::Error;
use std::io::{self, Read, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, process, thread};

use fabricast::fabric::{
    Access, Address, AddressVector, Choice, CompletionKind, CompletionQueue, Domain, Endpoint,
    EndpointKind, HostMemory, Locality, MemoryRegion, Peer, Policy, Query, RemoteMemory,
    RemoteRegion, Requirements, choose,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const BLOCK: usize = 4096;
const BLOCKS: usize = 16;
/// Fits the required 32 bits; no block has this number.
const ANSWER: u64 = 0xffff_ffff;
const DEADLINE: Duration = Duration::from_secs(20);

fn main() -> Result<()> {
    // Waits on the fabric have timeouts; this is the timeout of the pipes.
    thread::spawn(|| {
        thread::sleep(2 * DEADLINE);
        eprintln!("not done within {:?}", 2 * DEADLINE);
        process::exit(1);
    });
    let mut arguments = env::args().skip(1);
    match arguments.next() {
        Some(role) if role == "peer" => receive(&arguments.next().unwrap_or_default()),
        policy => write(&policy.unwrap_or_default()),
    }
}

fn write(policy: &str) -> Result<()> {
    let (mut side, choice) = Side::open(policy)?;
    print!("{choice}");
    let selected = choice.taken().ok_or("no provider selected")?;
    println!(
        "selected {} ({}): {}",
        selected.provider,
        selected.domain,
        selected.reasons.join("; ")
    );

    let mut child = Command::new(env::current_exe()?)
        .args(["peer", policy])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut to_peer = child.stdin.take().ok_or("no pipe")?;
    let mut from_peer = child.stdout.take().ok_or("no pipe")?;
    side.expect_immediates(1)?;
    side.introduce(&mut to_peer)?;
    let (peer, remote) = side.meet(&mut from_peer)?;

    let bytes: Vec<u8> = (0..BLOCK * BLOCKS).map(pattern).collect();
    let source = side.endpoint.domain().register(HostMemory::from_vec(bytes)?, Access::WRITE)?;
    for (number, at) in (0..BLOCK * BLOCKS).step_by(BLOCK).enumerate() {
        let local = source.slice(at..at + BLOCK)?;
        let target = remote.slice(at as u64..(at + BLOCK) as u64)?;
        side.endpoint.write_data(&mut side.queue, peer, &local, &target, number as u64, 0)?;
    }
    let answer = (side.drive(BLOCKS, 1)?, side.region.load_u64(0)?);
    if answer != (vec![ANSWER], (BLOCK * BLOCKS) as u64) {
        return Err(format!("immediate and number of correct bytes are {answer:?}").into());
    }
    send_frame(&mut to_peer, b"done")?;
    child.wait()?.success().then_some(()).ok_or("the peer failed")?;
    println!("{BLOCKS} blocks of {BLOCK} bytes written, each with its immediate: ok");
    Ok(())
}

fn receive(policy: &str) -> Result<()> {
    let (mut side, _) = Side::open(policy)?;
    // Before the address is sent: the first write may follow at once.
    side.expect_immediates(BLOCKS)?;
    side.introduce(&mut io::stdout())?;
    let (peer, remote) = side.meet(&mut io::stdin())?;

    // An immediate means that the bytes of its own write have arrived. Writes may be reordered, so
    // all have arrived when their number has.
    let mut arrived = side.drive(0, BLOCKS)?;
    arrived.sort_unstable();
    let mut bytes = vec![0; BLOCK * BLOCKS];
    side.region.read(0, &mut bytes)?;
    if !arrived.iter().copied().eq(0..BLOCKS as u64) {
        return Err(format!("other immediates arrived than were sent: {arrived:?}").into());
    }
    let right = bytes.iter().enumerate().filter(|(at, byte)| **byte == pattern(*at)).count() as u64;
    let answer = HostMemory::from_vec(right.to_ne_bytes().to_vec())?;
    let answer = side.endpoint.domain().register(answer, Access::WRITE)?;
    let target = remote.slice(0..8)?;
    side.endpoint.write_data(&mut side.queue, peer, &answer.all(), &target, ANSWER, 0)?;
    side.drive(1, 0)?;

    // Completed here does not mean arrived there: many providers move data only while they are
    // polled. So poll until the other side has finished.
    let peer_done = thread::spawn(|| receive_frame(&mut io::stdin()).is_ok());
    while !peer_done.is_finished() {
        if let Some(outcome) = side.queue.poll() {
            outcome?;
        }
        thread::yield_now();
    }
    if peer_done.join().unwrap_or(false) { Ok(()) } else { Err("the writer has exited".into()) }
}

/// The state of each of the two processes.
struct Side {
    endpoint: Endpoint,
    queue: CompletionQueue,
    addresses: AddressVector,
    region: MemoryRegion,
}

impl Side {
    /// Both processes choose by the same facts, so they get the same offer.
    fn open(policy: &str) -> Result<(Self, Choice)> {
        let need = Requirements::ring(Locality::SameMachine);
        let policy: Policy = policy.parse()?;
        let (offer, choice) = choose(&Query::new(EndpointKind::Rdm), &need, &policy)?;
        let domain = Domain::open(&offer)?;
        let addresses = AddressVector::open(&domain)?;
        let mut queue = CompletionQueue::open(&domain)?;
        let endpoint = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
        let region = domain.register(HostMemory::zeroed(BLOCK * BLOCKS)?, Access::REMOTE_WRITE)?;
        // With some providers a region is bound to one endpoint, and not accessible before it is
        // enabled.
        if !region.is_enabled() {
            region.bind_endpoint(&endpoint)?;
            region.enable()?;
        }
        Ok((Self { endpoint, queue, addresses, region }, choice))
    }

    /// Sends this side's address and region descriptor.
    fn introduce(&self, pipe: &mut impl Write) -> Result<()> {
        send_frame(pipe, &self.endpoint.address()?.0)?;
        send_frame(pipe, &self.region.describe()?.encode())
    }

    fn meet(&self, pipe: &mut impl Read) -> Result<(Peer, RemoteMemory)> {
        let peer = self.addresses.insert(&Address(receive_frame(pipe)?))?;
        Ok((peer, self.endpoint.domain().attach(&RemoteRegion::decode(&receive_frame(pipe)?)?)?))
    }

    /// Some providers consume a posted receive for each immediate.
    fn expect_immediates(&mut self, count: usize) -> Result<()> {
        if self.endpoint.domain().capabilities().immediates_consume_receives() {
            for _ in 0..count {
                self.endpoint.receive_immediate(&mut self.queue, 0)?;
            }
        }
        Ok(())
    }

    /// Waits until this many writes have completed and this many immediates have arrived, and
    /// returns the immediates.
    fn drive(&mut self, mut writes: usize, arrivals: usize) -> Result<Vec<u64>> {
        let end = Instant::now() + DEADLINE;
        let mut arrived = Vec::new();
        while writes > 0 || arrived.len() < arrivals {
            let completion = self.queue.wait(end.saturating_duration_since(Instant::now()))?;
            match (completion.kind, completion.data) {
                (CompletionKind::RemoteWrite, Some(data)) => arrived.push(data),
                (CompletionKind::Write, _) => writes = writes.saturating_sub(1),
                _ => {}
            }
        }
        Ok(arrived)
    }
}

fn pattern(at: usize) -> u8 {
    (at * 31 + at / 251) as u8
}

fn send_frame(pipe: &mut impl Write, bytes: &[u8]) -> Result<()> {
    pipe.write_all(&u32::try_from(bytes.len())?.to_le_bytes())?;
    pipe.write_all(bytes)?;
    Ok(pipe.flush()?)
}

fn receive_frame(pipe: &mut impl Read) -> Result<Vec<u8>> {
    let mut length = [0; 4];
    pipe.read_exact(&mut length)?;
    let mut bytes = Vec::new();
    pipe.take(u32::from_le_bytes(length).into()).read_to_end(&mut bytes)?;
    Ok(bytes)
}
