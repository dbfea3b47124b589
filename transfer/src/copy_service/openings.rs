//! The service's socket: admits clients, imports the memory that they offer, and opens pairs.
//!
//! One thread serves the socket. It imports memory, whose descriptors the client has sent; a thread
//! for each opening asks the owner of the other memory, which may be slow.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use gpu::{Device, Importer, LegacyHandle, Uuid};
use ipc::{Channel, ChannelError, DoorbellListener, Message, PidFd};

use super::clients::{Client, MAX_PAIRS, OfferedMemory, Pair, RemoteSide};
use super::owners::memory_for;
use super::shared::Shared;
use crate::agent::LocalTarget;
use crate::copy_requests::{OfferedPieces, Opening, Remote, Reply, Request, ServiceRing};
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

/// A pair whose memories are being received.
struct Offer {
    opening: Opening,
    /// The local memory, or why there is none.
    local: OfferedSide,
    /// The other memory, if the client offers it, too.
    remote: Option<Incoming>,
}

enum OfferedSide {
    /// The service has it, or it was not offered.
    Known(Result<Arc<OfferedMemory>>),
    Incoming(Box<Incoming>),
}

/// Memory whose pieces are being received.
struct Incoming {
    region: RegionDescriptor,
    received: u32,
    /// The memory so far, or why it cannot be imported. The rest is received in any case.
    import: Result<Import>,
}

enum Import {
    /// The device that maps it, and the one that it is on.
    Device(Device, Uuid, Option<Importer>),
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
            // The client has given up one before, whose pieces it did not send.
            Request::Open(opening) => {
                connected.offer = Some(Offer::new(&connected.client, opening)?)
            }
            Request::Pieces(pieces) => match &mut connected.offer {
                Some(offer) => offer.add(pieces, descriptors)?,
                None => return Err(malformed(OPERATION, "pieces of no memory")),
            },
        }
        if let Some(offer) = connected.offer.take_if(|offer| offer.is_complete()) {
            let Offer { opening, local, remote } = offer;
            let local = match local {
                OfferedSide::Known(memory) => memory,
                OfferedSide::Incoming(incoming) => incoming.finish().inspect(|memory| {
                    connected.client.add_memory(opening.memory(), memory);
                }),
            };
            let remote = remote.map(Incoming::finish).transpose();
            let memories = local.and_then(|local| Ok((local, remote?)));
            self.open(&connected.client, opening, memories);
        }
        Ok(())
    }

    /// Opens a pair in a thread of its own, and sends the reply.
    fn open(&self, client: &Arc<Client>, opening: Opening, memories: Result<Memories>) {
        let pair = opening.pair();
        if !client.begin_opening() {
            let detail = "the client opens too many pairs at a time";
            let error = Error::new(OPEN, ErrorKind::TooMany, detail);
            client.reply(&refusal(pair, &error), Duration::ZERO);
            return;
        }
        let (shared, opener) = (Arc::clone(&self.0), Arc::clone(client));
        let open = move || {
            let opened =
                memories.and_then(|memories| open_pair(&shared, &opener, &opening, memories));
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

/// The local memory, and the other one, if the client offered it, too.
type Memories = (Arc<OfferedMemory>, Option<Arc<OfferedMemory>>);

fn open_pair(
    shared: &Shared,
    client: &Client,
    opening: &Opening,
    memories: Memories,
) -> Result<()> {
    let (local, offered) = memories;
    let end = ipc::deadline(OWNER_TIMEOUT);
    let nowhere = || Error::new(OPEN, ErrorKind::NoPath, "neither memory is on a device");
    let (device, remote, remote_side) = match (opening.remote(), offered) {
        (Remote::Region(name), _) => {
            let owner = shared.owners().find(name.agent(), end)?;
            let region = owner.describe(name, end)?;
            let device = match (local.device(), region.device) {
                (Some(device), _) => device.clone(),
                (None, Some(device)) => Device::for_memory_of(device).during(OPEN)?,
                (None, None) => return Err(nowhere()),
            };
            let mapped = owner.map(&region, &device, end)?;
            let remote = memory_for(OPEN, mapped, &device)?;
            (device, remote, RemoteSide::Region(region, owner))
        }
        (Remote::Offered(_), Some(offered)) => {
            let device = local.device().or(offered.device()).ok_or_else(nowhere)?.clone();
            let remote = offered.mapped_for(&device)?;
            (device, remote, RemoteSide::Offered)
        }
        (Remote::Offered(_), None) => return Err(malformed(OPEN, "the other memory is missing")),
    };
    let pair = Pair::new(device.clone(), local.mapped_for(&device)?, remote, remote_side, local);
    match client.add_pair(opening.pair(), pair) {
        true => Ok(()),
        false => {
            let detail = format!("the number is taken, or the client has {MAX_PAIRS} pairs");
            Err(Error::new(OPEN, ErrorKind::TooMany, detail))
        }
    }
}

impl Import {
    /// Prepares the import of memory as the client describes it, mapped for a device or its own.
    fn begin(region: &RegionDescriptor, by: Option<&Device>) -> Result<Self> {
        match (region.memory_type, region.device) {
            (MemoryType::Device(_), Some(device)) => {
                let own = || Device::for_memory_of(device).during(IMPORT);
                Ok(Self::Device(by.cloned().map_or_else(own, Ok)?, device, None))
            }
            _ => Ok(Self::Host(None)),
        }
    }

    fn add(&mut self, bytes: u64, descriptor: OwnedFd, length: u64) -> Result<()> {
        match self {
            Self::Device(device, of, importer) => {
                let importer = match importer {
                    Some(importer) => importer,
                    none => none.insert(device.importer_of(*of, bytes).during(IMPORT)?),
                };
                importer.add(descriptor.as_fd(), length).during(IMPORT)
            }
            Self::Host(file) => {
                *file = Some(descriptor);
                Ok(())
            }
        }
    }

    fn finish(self, region: &RegionDescriptor) -> Result<OfferedMemory> {
        let RegionDescriptor { offset, length, legacy, .. } = *region;
        let not_described = || malformed(IMPORT, "the memory is not as described");
        match (self, region.memory_type.exportability()) {
            (Self::Device(_, _, Some(importer)), Exportability::ByDescriptors) => {
                let memory = importer.finish(offset, length).during(IMPORT)?;
                check_device(IMPORT, &memory, region.device)?;
                Ok(OfferedMemory::Device(memory))
            }
            (Self::Device(device, _, None), Exportability::ByLegacyHandle) => {
                let bytes = legacy.ok_or_else(not_described)?;
                let handle = LegacyHandle { bytes, offset, length };
                device.open_legacy_handle(&handle).map(OfferedMemory::Device).during(IMPORT)
            }
            (Self::Host(Some(file)), Exportability::ByDescriptors) => {
                HostBuffer::open(file, length, true).map(OfferedMemory::Host)
            }
            _ => Err(not_described()),
        }
    }
}

impl Offer {
    fn new(client: &Client, opening: Opening) -> Result<Self> {
        let mut by = None;
        let local = match opening.local() {
            None => {
                let unknown = || Error::new(OPEN, ErrorKind::Unknown, "the memory was not offered");
                let known = client.memory(opening.memory()).ok_or_else(unknown);
                by = known.as_ref().ok().and_then(|memory| memory.device().cloned());
                OfferedSide::Known(known)
            }
            Some(described) => {
                let incoming = Incoming::new(described, None)?;
                if let Ok(Import::Device(device, ..)) = &incoming.import {
                    by = Some(device.clone());
                }
                OfferedSide::Incoming(Box::new(incoming))
            }
        };
        let remote = match opening.remote() {
            Remote::Region(_) => None,
            Remote::Offered(described) => Some(Incoming::new(described, by.as_ref())?),
        };
        Ok(Self { opening, local, remote })
    }

    /// The memories whose pieces are missing, in the order in which they arrive.
    fn incomplete(&mut self) -> impl Iterator<Item = &mut Incoming> {
        let local = match &mut self.local {
            OfferedSide::Known(_) => None,
            OfferedSide::Incoming(incoming) => Some(&mut **incoming),
        };
        local.into_iter().chain(&mut self.remote).filter(|incoming| !incoming.is_complete())
    }

    fn is_complete(&mut self) -> bool {
        self.incomplete().next().is_none()
    }

    fn add(&mut self, pieces: OfferedPieces, descriptors: Vec<OwnedFd>) -> Result<()> {
        match self.incomplete().next() {
            Some(incoming) => incoming.add(pieces, descriptors),
            None => Err(malformed(IMPORT, "more pieces than described")),
        }
    }
}

impl Incoming {
    fn new(described: &[u8], by: Option<&Device>) -> Result<Self> {
        let region = RegionDescriptor::decode(described)?;
        let import = Import::begin(&region, by);
        Ok(Self { region, received: 0, import })
    }

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

    fn finish(self) -> Result<Arc<OfferedMemory>> {
        let Self { region, import, .. } = self;
        import.and_then(|import| import.finish(&region)).map(Arc::new)
    }
}
