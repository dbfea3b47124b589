//! Raw registration keys (`FI_MR_RAW`): keys that do not fit 64 bits, or that the peer must map
//! with its provider before use.
//!
//! ```text
//! cargo run --locked --example raw_key_exchange                     # net;ofi_rxm;ofi_mrail
//! cargo run --locked --example raw_key_exchange -- shm              # another: its keys are plain
//! ```
//!
//! Few providers require them. A common one is `ofi_mrail`, which combines several rails into one
//! endpoint and so several keys into one; a single rail, the loopback interface, is enough. Its
//! rails are set in an environment variable before libfabric is first used, so the example executes
//! itself again with the variable, and then starts the second process, which owns the memory.
//!
//! A raw key is exchanged like a plain one: the region's descriptor has the type, and attaching to
//! the region maps the key.

use std::error::Error;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;
use std::{env, process, thread};

use fabricast::fabric::{
    self, Access, Address, AddressVector, CompletionQueue, Domain, Endpoint, EndpointKind,
    ErrorKind, HostMemory, Locality, Offer, Peer, Policy, Query, RemoteKey, RemoteRegion,
    Requirements, choose,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const PROVIDER: &str = "net;ofi_rxm;ofi_mrail";
const RAILS: &str = "FI_OFI_MRAIL_ADDR";
const LENGTH: usize = 64 << 10;
const DEADLINE: Duration = Duration::from_secs(20);

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if env::var_os(RAILS).is_none() {
        let mut again = Command::new(env::current_exe()?);
        // Returns only on failure.
        return Err(again.args(&arguments).env(RAILS, "127.0.0.1").exec().into());
    }
    // Waits on the fabric have timeouts; this is the timeout of the pipes.
    thread::spawn(|| {
        thread::sleep(2 * DEADLINE);
        eprintln!("not done within {:?}", 2 * DEADLINE);
        process::exit(1);
    });
    match arguments.as_slice() {
        [role, provider] if role == "own" => own(provider),
        [provider, ..] => write(provider),
        [] => write(PROVIDER),
    }
}

fn write(provider: &str) -> Result<()> {
    let offer = match offer_of(provider) {
        Ok(offer) => offer,
        Err(error) if error.kind() == ErrorKind::NoProvider => {
            println!(
                "{provider} is not available; using another one, probably with plain keys: {error}"
            );
            let need =
                Requirements { immediate_bytes: 0, ..Requirements::ring(Locality::SameMachine) };
            let (other, _) = choose(&Query::new(EndpointKind::Rdm), &need, &Policy::default())?;
            offer_of(&other.capabilities().provider)?
        }
        Err(error) => return Err(error.into()),
    };
    let facts = offer.capabilities();
    println!(
        "{} requires {:?}, keys of {} bytes",
        facts.provider, facts.registration.mr_mode, facts.registration.mr_key_size
    );

    let mut child = Command::new(env::current_exe()?)
        .args(["own", facts.provider.as_str()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut to_owner = child.stdin.take().ok_or("no pipe")?;
    let mut from_owner = child.stdout.take().ok_or("no pipe")?;
    let mut side = Side::open(&offer)?;
    let owner = side.meet(&mut from_owner, &mut to_owner)?;
    let domain = side.endpoint.domain().clone();

    let region = RemoteRegion::decode(&receive_frame(&mut from_owner)?)?;
    match region.key() {
        RemoteKey::Raw(key) => println!("the descriptor has a raw key of {} bytes", key.len()),
        _ => println!("the descriptor has a plain key"),
    }
    let remote = domain.attach(&region)?;
    let how = if remote.is_mapped() { "mapped" } else { "used as it is" };
    println!("attached; the key was {how}");

    let source = domain.register(HostMemory::from_vec(pattern())?, Access::WRITE)?.all();
    let write = side.endpoint.write(&mut side.queue, owner, &source, &remote.all(), 0)?;
    side.queue.complete(write, DEADLINE)?;
    if receive_frame(&mut from_owner)? != b"found" {
        return Err("the owner found corrupted data".into());
    }

    if remote.is_mapped() {
        // This provider has no writes with immediates (`fi_writedata`); the error kind
        // distinguishes that from a full queue or an invalid argument.
        let target = remote.all();
        match side.endpoint.write_data(&mut side.queue, owner, &source, &target, 1, 0) {
            Err(error) if error.kind() == ErrorKind::NotSupported => {
                println!("not supported: {error}")
            }
            Err(error) => return Err(error.into()),
            Ok(write) => drop(side.queue.complete(write, DEADLINE)?),
        }
    }
    // The mapping is released with its last user: slices and operations count.
    drop(remote);
    send_frame(&mut to_owner, b"done")?;
    child.wait()?.success().then_some(()).ok_or("the owner failed")?;
    println!("{LENGTH} bytes written: ok");
    Ok(())
}

/// The process whose memory is written. Its standard output is the pipe.
fn own(provider: &str) -> Result<()> {
    let mut side = Side::open(&offer_of(provider)?)?;
    side.meet(&mut io::stdin(), &mut io::stdout())?;
    let memory = HostMemory::zeroed(LENGTH)?;
    let region = side.endpoint.domain().register(memory, Access::REMOTE_WRITE)?;
    if !region.is_enabled() {
        region.bind_endpoint(&side.endpoint)?;
        region.enable()?;
    }
    // For display only: the descriptor has the right key.
    match (region.key(), region.raw_key()) {
        (Err(error), Ok((_, key))) => eprintln!("owner: raw key of {} bytes; {error}", key.len()),
        (Ok(_), Err(error)) => eprintln!("owner: plain key; {error}"),
        (Ok(_), Ok((_, key))) => eprintln!("owner: plain key, and raw form of {} bytes", key.len()),
        (Err(error), Err(_)) => return Err(error.into()),
    }
    send_frame(&mut io::stdout(), &region.describe()?.encode())?;

    // A plain write is not reported to the target, and with many providers completes only if the
    // target polls: so poll and check until the writer has finished.
    let peer_done = thread::spawn(|| receive_frame(&mut io::stdin()).is_ok());
    let (mut bytes, expected, mut found) = (vec![0; LENGTH], pattern(), false);
    while !peer_done.is_finished() {
        if let Some(outcome) = side.queue.poll() {
            outcome?;
        }
        region.read(0, &mut bytes)?;
        if !found && bytes == expected {
            send_frame(&mut io::stdout(), b"found")?;
            found = true;
        }
        thread::yield_now();
    }
    if peer_done.join().unwrap_or(false) { Ok(()) } else { Err("the writer has exited".into()) }
}

/// Both processes request the same name, and so get the same offer.
fn offer_of(provider: &str) -> fabric::Result<Offer> {
    Query::new(EndpointKind::Rdm).provider(provider).first()
}

/// The state of each of the two processes.
struct Side {
    endpoint: Endpoint,
    queue: CompletionQueue,
    addresses: AddressVector,
}

impl Side {
    fn open(offer: &Offer) -> Result<Self> {
        let domain = Domain::open(offer)?;
        let addresses = AddressVector::open(&domain)?;
        let mut queue = CompletionQueue::open(&domain)?;
        let endpoint = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
        Ok(Self { endpoint, queue, addresses })
    }

    fn meet(&self, from: &mut impl Read, to: &mut impl Write) -> Result<Peer> {
        send_frame(to, &self.endpoint.address()?.0)?;
        Ok(self.addresses.insert(&Address(receive_frame(from)?))?)
    }
}

fn pattern() -> Vec<u8> {
    (0..LENGTH).map(|at| (at * 31 + at / 251) as u8).collect()
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
