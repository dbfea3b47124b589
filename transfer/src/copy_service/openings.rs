//! The service's socket: admits clients, imports the memory that they offer, and opens pairs.
//!
//! One thread serves the socket. It imports memory, whose descriptors the client has sent; a thread
//! for each opening asks the owner of the other memory, which may be slow.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use gpu::{Device, Importer, LegacyHandle};
use ipc::{Channel, ChannelError, DoorbellListener, Message, PidFd};

use super::clients::{Client, LocalMemory, MAX_PAIRS, Pair};
use super::owners::memory_for;
use super::shared::Shared;
use crate::agent::LocalTarget;
use crate::copy_requests::{OfferedPieces, Opening, Reply, Request, ServiceRing};
use crate::error::{Context, Error, ErrorKind, Result, failed};
use crate::host_buffer::HostBuffer;
use crate::path::{Exportability, MemoryType};
use crate::refusal::Refusal;
use crate::region::RegionDescriptor;
use crate::share::check_device;
use crate::socket_server::Handler;
use crate::wire::malformed;

const ADMIT: &str = "accept client of the copy service";
const IMPORT: &str = "import memory of client";
const OPEN: &str = "open pair of memory";
/// Clients at a time, at most.
pub(super) const MAX_CLIENTS: usize = 1024;
/// How long the owner of a region may take to answer.
const OWNER_TIMEOUT: Duration = Duration::from_secs(4);
/// How long a client may take to receive a reply.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);

/// The requests of all clients.
pub(super) struct Requests(Arc<Shared>);

impl Requests {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self(shared)
    }
}

/// A connected client, and the memory that it is offering.
pub(super) struct ConnectedClient {
    client: Arc<Client>,
    offer: Option<Offer>,
}

/// A pair whose local memory is being received.
struct Offer {
    opening: Opening,
    region: RegionDescriptor,
    received: u32,
    /// The memory so far, or why it cannot be imported. The rest is received in any case.
    import: Result<Import>,
}

enum Import {
    Device(Device, Option<Importer>),
    Host(Option<OwnedFd>),
}

/// Wakes the thread that copies.
#[derive(Debug)]
struct WakeEngine(Arc<Shared>);

impl DoorbellListener for WakeEngine {
    fn rung(&self) {
        self.0.wake();
    }

    fn check(&self) {
        self.0.wake();
    }
}

impl Handler for Requests {
    type Client = ConnectedClient;

    fn handle(&mut self, channel: &Channel, client: &mut Option<ConnectedClient>) -> bool {
        let message = match channel.receive(Duration::ZERO) {
            Ok(message) => message,
            Err(ChannelError::DeadlineExceeded { .. }) => return true,
            Err(_) => return false,
        };
        let handled = match client {
            Some(connected) => self.handle_request(connected, message),
            None => self.admit(channel, message).map(|admitted| *client = Some(admitted)),
        };
        match handled {
            Ok(()) => true,
            Err(error) => {
                tracing::debug!(%error, "a client of the copy service is disconnected");
                // A full socket loses the refusal; the connection is closed anyway.
                let _ = channel.send(&refusal(0, &error), &[], Duration::ZERO);
                false
            }
        }
    }

    fn disconnected(&mut self, client: ConnectedClient) {
        self.0.clients().remove(&client.client);
        self.0.wake();
    }
}

pub(super) fn refusal(pair: u32, error: &Error) -> Vec<u8> {
    Reply::refused(pair, Refusal::new(error.kind(), error.reason())).encode()
}

impl Requests {
    fn admit(&self, channel: &Channel, message: Message) -> Result<ConnectedClient> {
        let shared = &self.0;
        if shared.clients().count() >= MAX_CLIENTS {
            let detail = format!("the copy service has {MAX_CLIENTS} clients, the maximum");
            return Err(Error::new(ADMIT, ErrorKind::TooMany, detail));
        }
        let (Request::Hello(_, label), descriptors) = Request::read(message)? else {
            return Err(malformed(ADMIT, "expected a hello"));
        };
        let Ok([pidfd, doorbell]) = <[OwnedFd; 2]>::try_from(descriptors) else {
            return Err(malformed(ADMIT, "expected two descriptors"));
        };
        PidFd::of_peer(channel, pidfd).map_err(|error| malformed(ADMIT, error.to_string()))?;
        let doorbell = LocalTarget::open_doorbell(doorbell)?;
        let ring = ServiceRing::create()?;
        let of_client = ring.doorbell().ok_or("no doorbell").map_err(failed(ADMIT))?;
        let wake = Arc::new(WakeEngine(Arc::clone(shared)));
        let listener = shared.watcher().listen(of_client, wake).map_err(failed(ADMIT))?;
        let pidfd = shared.owners().local_target().pidfd();
        channel
            .send(&Reply::Welcome.encode(), &[pidfd, ring.as_fd()], Duration::ZERO)
            .during(ADMIT)?;
        let number = shared.clients().next_number();
        let replies = channel.try_clone().during(ADMIT)?;
        let client = Arc::new(Client::new(number, label, replies, doorbell, ring, listener));
        shared.clients().add(Arc::clone(&client));
        if shared.is_over() {
            client.end();
        }
        shared.wake();
        Ok(ConnectedClient { client, offer: None })
    }

    fn handle_request(&self, connected: &mut ConnectedClient, message: Message) -> Result<()> {
        const OPERATION: &str = "read request";
        let (request, descriptors) = Request::read(message)?;
        match request {
            Request::Hello(..) => return Err(malformed(OPERATION, "second hello")),
            Request::Close(pair) => connected.client.close_pair(pair),
            Request::Open(opening) => {
                // The client has given up the one before, whose pieces it did not send.
                connected.offer = None;
                let Some(described) = opening.local() else {
                    match connected.client.memory(opening.memory()) {
                        Some(memory) => self.open(&connected.client, opening, Ok(memory)),
                        None => {
                            let detail = "the memory was not offered";
                            let error = Error::new(OPEN, ErrorKind::Unknown, detail);
                            self.open(&connected.client, opening, Err(error));
                        }
                    }
                    return Ok(());
                };
                let region = RegionDescriptor::decode(described)?;
                let import = Import::begin(&region);
                connected.offer = Some(Offer { opening, region, received: 0, import });
            }
            Request::Pieces(pieces) => match &mut connected.offer {
                Some(offer) => offer.add(pieces, descriptors)?,
                None => return Err(malformed(OPERATION, "pieces of no memory")),
            },
        }
        if let Some(offer) = connected.offer.take_if(|offer| offer.is_complete()) {
            let Offer { opening, region, import, .. } = offer;
            let memory = import.and_then(|import| import.finish(&region)).map(Arc::new);
            if let Ok(memory) = &memory {
                connected.client.add_memory(opening.memory(), memory);
            }
            self.open(&connected.client, opening, memory);
        }
        Ok(())
    }

    /// Opens a pair in a thread of its own, and sends the reply.
    fn open(&self, client: &Arc<Client>, opening: Opening, local: Result<Arc<LocalMemory>>) {
        let pair = opening.pair();
        if !client.begin_opening() {
            let detail = "the client opens too many pairs at a time";
            let error = Error::new(OPEN, ErrorKind::TooMany, detail);
            client.reply(&refusal(pair, &error), Duration::ZERO);
            return;
        }
        let (shared, opener) = (Arc::clone(&self.0), Arc::clone(client));
        let open = move || {
            let opened = local.and_then(|local| open_pair(&shared, &opener, &opening, local));
            let bytes = match opened {
                Ok(()) => Reply::Opened(pair).encode(),
                Err(error) => {
                    tracing::debug!(%error, client = opener.label(), "a pair was not opened");
                    refusal(pair, &error)
                }
            };
            opener.end_opening();
            if !opener.reply(&bytes, SEND_TIMEOUT) {
                opener.close_pair(pair);
            }
        };
        if let Err(error) = threads::spawn("fabricast-open", open) {
            client.end_opening();
            client.reply(&refusal(pair, &failed(OPEN)(error)), Duration::ZERO);
        }
    }
}

fn open_pair(
    shared: &Shared,
    client: &Client,
    opening: &Opening,
    local: Arc<LocalMemory>,
) -> Result<()> {
    let end = ipc::deadline(OWNER_TIMEOUT);
    let owner = shared.owners().find(opening.remote().agent(), end)?;
    let region = owner.describe(opening.remote(), end)?;
    let device = match (&*local, region.device) {
        (LocalMemory::Device(memory), _) => memory.mapped_for().clone(),
        (LocalMemory::Host(_), Some(device)) => Device::for_memory_of(device).during(OPEN)?,
        (LocalMemory::Host(_), None) => {
            let detail = "neither memory is on a device";
            return Err(Error::new(OPEN, ErrorKind::NoPath, detail));
        }
    };
    let mapped = owner.map(&region, &device, end)?;
    let remote = memory_for(OPEN, mapped, &device)?;
    let local_memory = match &*local {
        LocalMemory::Device(memory) => memory.clone(),
        LocalMemory::Host(buffer) => buffer.pinned_for(&device)?,
    };
    let pair = Pair::new(device, local_memory, remote, region, owner, local);
    match client.add_pair(opening.pair(), pair) {
        true => Ok(()),
        false => {
            let detail = format!("the number is taken, or the client has {MAX_PAIRS} pairs");
            Err(Error::new(OPEN, ErrorKind::TooMany, detail))
        }
    }
}

impl Import {
    /// Prepares the import of memory as the client describes it.
    fn begin(region: &RegionDescriptor) -> Result<Self> {
        match (region.memory_type, region.device) {
            (MemoryType::Device(_), Some(device)) => {
                Ok(Self::Device(Device::for_memory_of(device).during(IMPORT)?, None))
            }
            _ => Ok(Self::Host(None)),
        }
    }

    fn add(&mut self, bytes: u64, descriptor: OwnedFd, length: u64) -> Result<()> {
        match self {
            Self::Device(device, importer) => {
                let importer = match importer {
                    Some(importer) => importer,
                    none => none.insert(device.importer(bytes).during(IMPORT)?),
                };
                importer.add(descriptor.as_fd(), length).during(IMPORT)
            }
            Self::Host(file) => {
                *file = Some(descriptor);
                Ok(())
            }
        }
    }

    fn finish(self, region: &RegionDescriptor) -> Result<LocalMemory> {
        let RegionDescriptor { offset, length, legacy, .. } = *region;
        let not_described = || malformed(IMPORT, "the memory is not as described");
        match (self, region.memory_type.exportability()) {
            (Self::Device(_, Some(importer)), Exportability::ByDescriptors) => {
                let memory = importer.finish(offset, length).during(IMPORT)?;
                check_device(IMPORT, &memory, region.device)?;
                Ok(LocalMemory::Device(memory))
            }
            (Self::Device(device, None), Exportability::ByLegacyHandle) => {
                let bytes = legacy.ok_or_else(not_described)?;
                let handle = LegacyHandle { bytes, offset, length };
                device.open_legacy_handle(&handle).map(LocalMemory::Device).during(IMPORT)
            }
            (Self::Host(Some(file)), Exportability::ByDescriptors) => {
                HostBuffer::open(file, length, true).map(LocalMemory::Host)
            }
            _ => Err(not_described()),
        }
    }
}

impl Offer {
    fn is_complete(&self) -> bool {
        self.received >= self.region.pieces
    }

    fn add(&mut self, pieces: OfferedPieces, descriptors: Vec<OwnedFd>) -> Result<()> {
        let (total, bytes, lengths) = (pieces.total(), pieces.bytes(), pieces.lengths());
        if total != self.region.pieces || self.received + lengths.len() as u32 > total {
            return Err(malformed(IMPORT, "more pieces than described"));
        }
        self.received += lengths.len() as u32;
        for (descriptor, length) in descriptors.into_iter().zip(lengths) {
            if let Ok(import) = &mut self.import
                && let Err(error) = import.add(bytes, descriptor, *length)
            {
                self.import = Err(error);
            }
        }
        Ok(())
    }
}
