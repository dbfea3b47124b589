//! A ring over several lanes, each an endpoint with its queue, its domain and a thread.
//!
//! One connection does not always fill the wire, or the memory that stands for one: a
//! software provider is bound to what one thread copies, a machine may have several cards.
//! The ring stays one: one memory, registered with each lane's domain, one order of chunks,
//! one credit. A chunk goes by the lane that is expected to be done with it first. Whoever
//! owns the ring plans and takes; the lanes post and listen.
//!
//! For latency a [`Port`](super::Port) is better: here a chunk goes through two threads more.

mod beside;
mod lane;
mod receiver;
mod sender;
mod share;
mod shares;
mod spread;

pub(super) use beside::Beside;
pub(super) use lane::Event;
pub use receiver::StripedReceiver;
pub use sender::StripedSender;
pub(super) use shares::Shares;

use std::ops::Range;
use std::sync::Arc;

use super::board::Board;
use super::memory::{Site, activate};
use super::sender::remote_memory;
use crate::{
    Access, Address, AddressVector, Capabilities, CompletionQueue, Domain, Endpoint, Error,
    ErrorKind, Memory, MemoryRegion, Offer, Peer, QueueOptions, Result, Waiting,
};

/// Looks that find nothing before a lane that has one ring goes to sleep.
const LOOKS: u32 = 2000;
/// Events of lanes that are attended to before anything else is.
const MOST_AT_ONCE: usize = 1024;

/// Bytes of the memory that notices are written to.
const SLATE: usize = 64;
/// Lanes of a ring, at most.
const MOST: usize = 64;

/// How lanes are opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StripesOptions {
    /// How the lanes' threads wait.
    pub waiting: Waiting,
}

/// Lanes that are open and belong to no ring yet.
///
/// ```
/// use std::time::Duration;
/// use fabric::ring::*;
/// use fabric::*;
///
/// let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
/// let lanes = || Stripes::open(&[offer.clone(), offer.clone()], StripesOptions::default());
/// // Two sides, in one process for once; two would exchange addresses, offer and answer.
/// let (writing, reading) = (lanes()?, lanes()?);
/// let (writers, readers) = (writing.addresses()?, reading.addresses()?);
/// let source = writing.register(HostMemory::from_vec(vec![7; 1 << 20])?)?;
/// let options = RingOptions::of(offer.capabilities(), 1 << 20)?;
/// let mut receiver = reading.receiver(&writers, &options)?;
/// let (mut sender, answer) = writing.sender(&readers, &receiver.terms()?, 64 << 10)?;
/// receiver.connect(&answer)?;
///
/// let patience = Duration::from_secs(5);
/// let writer = std::thread::spawn(move || sender.send(0, &source.all(), patience).map(|_| sender));
/// let mut length = 0;
/// loop {
///     let view = receiver.receive(patience)?;
///     length += view.len();
///     if view.is_last() {
///         break;
///     }
/// }
/// assert_eq!(length, 1 << 20);
/// drop(writer.join().unwrap()?);
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug)]
pub struct Stripes {
    lanes: Vec<Opened>,
}

/// A lane before it has a thread.
#[derive(Debug)]
struct Opened {
    endpoint: Endpoint,
    queue: CompletionQueue,
    addresses: AddressVector,
    slate: MemoryRegion,
}

impl Stripes {
    /// Opens a lane for each of the offers, with a domain each; the same offer may be there
    /// several times, for several connections.
    ///
    /// # Errors
    /// What cannot be opened; `InvalidArgument` for no offers, more than 64, or connected ones.
    pub fn open(offers: &[Offer], options: StripesOptions) -> Result<Self> {
        let refuse =
            |why: String| Err(Error::new(ErrorKind::InvalidArgument, "opening lanes", why));
        if offers.is_empty() || offers.len() > MOST {
            return refuse(format!("{} lanes, 1 to {MOST} are possible", offers.len()));
        }
        let is_connected =
            |offer: &Offer| offer.capabilities().endpoint != crate::EndpointKind::Rdm;
        if offers.iter().any(is_connected) {
            return refuse("lanes are connectionless endpoints".to_owned());
        }
        let domains = offers.iter().map(Domain::open).collect::<Result<Vec<_>>>()?;
        Self::open_on(&domains, options)
    }

    /// The same on domains that are open: what is registered with them stays so. One that is there
    /// several times has several lanes.
    ///
    /// # Errors
    /// What cannot be opened.
    pub fn open_on(domains: &[Domain], options: StripesOptions) -> Result<Self> {
        let mut lanes = Vec::with_capacity(domains.len());
        for domain in domains {
            let queue_options = QueueOptions { size: 4096, waiting: options.waiting };
            let mut queue = CompletionQueue::open_with(domain, queue_options)?;
            let addresses = AddressVector::open(domain)?;
            let builder = Endpoint::builder(domain).addresses(&addresses);
            let endpoint = builder.queue(&mut queue).open()?;
            let slate = remote_memory(&endpoint, SLATE)?;
            lanes.push(Opened { endpoint, queue, addresses, slate });
        }
        Ok(Self { lanes })
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lanes.len()
    }

    /// Are there none? (Never true.)
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// Where each can be reached.
    ///
    /// # Errors
    /// What the provider says.
    pub fn addresses(&self) -> Result<Vec<Address>> {
        self.lanes.iter().map(|lane| lane.endpoint.address()).collect()
    }

    /// Registers memory to write from with each lane's domain.
    ///
    /// # Errors
    /// As [`Domain::register`].
    pub fn register(&self, memory: impl Memory) -> Result<StripedRegion> {
        let memory = Arc::new(memory);
        let regions = self.lanes.iter().map(|lane| {
            let region = lane.endpoint.domain().register(Arc::clone(&memory), Access::WRITE)?;
            activate(&region, Site::of(&lane.endpoint))?;
            Ok(region)
        });
        Ok(StripedRegion { regions: regions.collect::<Result<_>>()? })
    }

    /// The peers' addresses, one for each lane.
    fn insert(&self, peers: &[Address]) -> Result<Vec<Peer>> {
        if peers.len() != self.lanes.len() {
            let why = format!("{} addresses, for {} lanes", peers.len(), self.lanes.len());
            return Err(Error::new(ErrorKind::InvalidArgument, "opening a ring", why));
        }
        let lanes = self.lanes.iter().zip(peers);
        lanes.map(|(lane, address)| lane.addresses.insert(address)).collect()
    }
}

impl Opened {
    fn board(&self) -> Board {
        let domain = self.endpoint.domain();
        Board::new(domain, domain.capabilities().receive_depth)
    }
}

/// Memory that is registered with the domains of all lanes.
#[derive(Debug, Clone)]
pub struct StripedRegion {
    regions: Vec<MemoryRegion>,
}

impl StripedRegion {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.region().len()
    }

    /// Is there nothing? (Never true.)
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The memory as one domain knows it: to be read and written here.
    #[must_use]
    pub fn region(&self) -> &MemoryRegion {
        &self.regions[0]
    }

    /// A part of it, to be sent.
    ///
    /// # Errors
    /// `OutOfBounds`.
    pub fn slice(&self, range: Range<usize>) -> Result<StripedSlice<'_>> {
        let slice = self.region().slice(range)?;
        Ok(StripedSlice { region: self, offset: slice.offset(), length: slice.len() })
    }

    /// All of it.
    #[must_use]
    pub fn all(&self) -> StripedSlice<'_> {
        StripedSlice { region: self, offset: 0, length: self.len() }
    }
}

/// A part of striped memory.
#[derive(Debug, Clone, Copy)]
pub struct StripedSlice<'a> {
    region: &'a StripedRegion,
    offset: usize,
    length: usize,
}

impl StripedSlice<'_> {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Is there nothing?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }
}

/// How many lanes are sensible, for these offers of one provider: those that a policy chose for
/// the same peer, one for each card or address.
///
/// A card fills its wire by one lane, so there is a lane for each. Without a card the provider
/// copies, and one thread does not copy as fast as the memory is: then there are several,
/// unless there are too few cores for as many threads on both sides. A provider that never
/// leaves the machine writes straight into the peer's memory, and a second lane would only
/// contend with the first.
#[must_use]
pub fn default_stripes(offers: &[Capabilities], cores: usize) -> usize {
    let Some(first) = offers.first() else { return 1 };
    let mut cards: Vec<_> = offers.iter().filter_map(|facts| facts.nic.as_ref()).collect();
    cards.sort_by(|a, b| (&a.pci, &a.name).cmp(&(&b.pci, &b.name)));
    cards.dedup_by(|a, b| (&a.pci, &a.name) == (&b.pci, &b.name));
    if !cards.is_empty() {
        return cards.len().min(MOST);
    }
    if !first.reaches_other_machines {
        return 1;
    }
    (cores * 3 / 8).clamp(1, COPYING_LANES)
}

/// The most lanes of a provider that copies that were measured to bring more, on as many cores as are
/// for both sides: see docs/ring.md.
const COPYING_LANES: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EndpointKind, Query};

    #[test]
    fn lanes_follow_cards_and_cores() {
        let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
        let mut copying = offer.capabilities().clone();
        (copying.nic, copying.reaches_other_machines) = (None, true);
        let counts = [1, 4, 8, 16, 24, 64].map(|cores| default_stripes(&[copying.clone()], cores));
        assert_eq!(counts, [1, 1, 3, 6, 8, 8]);
        let local = Capabilities { reaches_other_machines: false, ..copying.clone() };
        assert_eq!(default_stripes(&[local], 64), 1);
        let card = |name: &str| {
            let nic = crate::Nic {
                name: Some(name.to_owned()),
                pci: None,
                link_bits_per_second: 0,
                link_up: None,
            };
            Capabilities { nic: Some(nic), ..copying.clone() }
        };
        assert_eq!(default_stripes(&[card("mlx5_0"), card("mlx5_1"), card("mlx5_0")], 4), 2);
        assert_eq!(default_stripes(&[], 64), 1);
    }
}
