//! Lanes that a port has beside its own endpoint, for large messages of all its rings.
//!
//! Each has a thread, which writes the chunks that it is given and hears the notices that come by
//! it. Everything else is the port's: the order of chunks, credit, ends.

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, MutexGuard, PoisonError};

use super::super::memory::{RingMemory, Site};
use super::super::notify::Notify;
use super::super::outlet::{Outlet, Title};
use super::super::shape::MOST_CHUNKS;
use super::super::terms::{LaneOffer, RingOffer};
use super::super::writer::Chunk;
use super::lane::{Ear, Event, Job, Kept, Lane, Owner, Parts};
use super::{Opened, Stripes};
use crate::{
    Address, AddressVector, Domain, Error, ErrorKind, MemoryRegion, MrMode, Peer, Result, Waker,
};

const OPENING: &str = "opening a port's lanes";

/// The lanes of a port but for its own endpoint. They are numbered from 1 on.
#[derive(Debug)]
pub(in super::super) struct Beside {
    lanes: Vec<One>,
    events: Receiver<Event>,
    owner: Arc<Owner>,
    kept: Kept,
    /// Jobs that there was no place for, and that have to be done.
    owed: VecDeque<(usize, Job)>,
    /// Why they are of no use any more.
    pub(in super::super) broken: Option<Error>,
}

#[derive(Debug)]
struct One {
    lane: Lane,
    domain: Domain,
    addresses: AddressVector,
    address: Address,
    credit_memory: MemoryRegion,
    peers: Peers,
}

/// Peers of a lane, by their addresses: what they are called stays with the lane's endpoint, whether
/// they do or not, so there are not more than a peer should need that comes again and again.
#[derive(Debug, Default)]
struct Peers(HashMap<Address, Peer>);

impl Peers {
    const MOST: usize = 4096;

    fn find(
        &mut self,
        address: &Address,
        insert: impl FnOnce(&Address) -> Result<Peer>,
    ) -> Result<Peer> {
        if let Some(peer) = self.0.get(address) {
            return Ok(*peer);
        }
        if self.0.len() >= Self::MOST {
            let detail = format!("a lane has {} addresses of peers already", Self::MOST);
            return Err(Error::new(ErrorKind::ResourceExhausted, "opening a ring", detail));
        }
        let peer = insert(address)?;
        self.0.insert(address.clone(), peer);
        Ok(peer)
    }
}

impl Beside {
    /// Starts these lanes' threads. Who sleeps in a queue with this waker is woken by them.
    pub(in super::super) fn start(stripes: Stripes, waker: Waker) -> Result<Self> {
        let refuse =
            |detail: &'static str| Err(Error::new(ErrorKind::NotSupported, OPENING, detail));
        let all = &stripes.lanes;
        let facts = || all.iter().map(|lane| lane.endpoint.domain().capabilities());
        if facts().any(|facts| facts.mr_mode.contains(MrMode::ENDPOINT)) {
            return refuse("with this provider memory belongs to an endpoint");
        }
        if facts().any(|facts| Notify::Immediate.check(facts).is_err()) {
            return refuse("this provider cannot tell of writes by immediates");
        }
        if all.iter().any(|lane| lane.queue.waker().wake().is_err()) {
            return refuse("nothing wakes a thread that sleeps at this provider's queue");
        }
        let owner = Arc::new(Owner::new(waker));
        let (sender, events) = sync_channel(MOST_CHUNKS as usize + 1024);
        let kept = Kept::default();
        let mut lanes = Vec::with_capacity(all.len());
        for (number, opened) in (1..).zip(stripes.lanes) {
            let (mut board, address) = (opened.board(), opened.endpoint.address()?);
            let Opened { mut endpoint, mut queue, addresses, credit_memory } = opened;
            let domain = endpoint.domain().clone();
            board.expect(&endpoint, Notify::Immediate)?;
            board.refill(&mut endpoint, &mut queue)?;
            let (held, kept) = (credit_memory.clone(), Kept::clone(&kept));
            let parts = Parts { endpoint, queue, board, credit_memory: held, kept };
            let ear = Ear { events: sender.clone(), owner: Arc::clone(&owner) };
            let lane = Lane::start(number, parts, ear)?;
            let peers = Peers::default();
            lanes.push(One { lane, domain, addresses, address, credit_memory, peers });
        }
        Ok(Self { lanes, events, owner, kept, owed: VecDeque::new(), broken: None })
    }

    pub(in super::super) fn len(&self) -> usize {
        self.lanes.len()
    }

    /// Where each can be reached.
    pub(in super::super) fn addresses(&self) -> impl Iterator<Item = &Address> {
        self.lanes.iter().map(|one| &one.address)
    }

    pub(in super::super) fn domain(&self, lane: usize) -> Option<&Domain> {
        self.lanes.get(lane.checked_sub(1)?).map(|one| &one.domain)
    }

    /// Where memory is registered that is written through the first so many of them.
    pub(in super::super) fn sites(&self, count: usize) -> Vec<Site<'_>> {
        self.lanes.iter().take(count).map(|one| Site::away(&one.domain)).collect()
    }

    /// Where notices without a chunk are written.
    pub(in super::super) fn credit_memories(&self) -> impl Iterator<Item = &MemoryRegion> {
        self.lanes.iter().map(|one| &one.credit_memory)
    }

    fn kept(&self) -> MutexGuard<'_, Vec<Arc<RingMemory>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A ring's memory is given out to be written through them.
    pub(in super::super) fn keep(&self, memory: Arc<RingMemory>) {
        self.sweep();
        self.kept().push(memory);
    }

    /// Lets go of what nobody else has: that was let go of when nothing more could come.
    pub(in super::super) fn sweep(&self) {
        self.kept().retain(|memory| Arc::strong_count(memory) > 1);
    }

    /// The most addresses of peers that one of them has.
    pub(in super::super) fn most_peers(&self) -> usize {
        self.lanes.iter().map(|one| one.peers.0.len()).max().unwrap_or(0)
    }

    /// Takes note of who will write by the first of them, from these addresses.
    pub(in super::super) fn insert_addresses(&mut self, writer: &[Address]) -> Result<()> {
        for (one, address) in self.lanes.iter_mut().zip(writer) {
            one.peers.find(address, |address| one.addresses.insert(address))?;
        }
        Ok(())
    }

    /// Opens a ring's writing side on the first of them, to the peers at these addresses.
    pub(in super::super) fn open(
        &mut self,
        peers: &[Address],
        offer: &RingOffer,
        title: Title,
    ) -> Result<()> {
        let shape = offer.shape()?;
        let further: Vec<&LaneOffer> = offer.lanes.iter().skip(1).collect();
        let is_possible = further.len() == peers.len()
            && peers.len() <= self.lanes.len()
            && offer.notify == Notify::Immediate;
        if !is_possible {
            let detail = format!(
                "{} addresses for {} lanes, of {} here, told of by {}",
                peers.len() + 1,
                offer.lanes.len(),
                self.lanes.len() + 1,
                offer.notify.name()
            );
            return Err(Error::new(ErrorKind::MalformedDescriptor, "opening a ring", detail));
        }
        let mut outlets = Vec::with_capacity(peers.len());
        for ((one, address), terms) in self.lanes.iter_mut().zip(peers).zip(further) {
            let peer = one.peers.find(address, |address| one.addresses.insert(address))?;
            let (site, form) = (Site::away(&one.domain), (offer.notify, offer.tagged));
            outlets.push(Outlet::new(site, peer, terms, form, shape, title)?);
        }
        for (number, outlet) in (1..).zip(outlets) {
            self.owe(number, Job::Open(Box::new(outlet)));
        }
        Ok(())
    }

    /// Gives a lane a chunk to write. False if it has too much to do.
    pub(in super::super) fn write(
        &self,
        lane: usize,
        title: Title,
        chunk: Chunk,
        payload: Option<(MemoryRegion, usize)>,
    ) -> bool {
        // What is owed may be that the ring is opened there.
        let is_owed = self.owed.iter().any(|(number, _)| *number == lane);
        let one = lane.checked_sub(1).and_then(|place| self.lanes.get(place));
        !is_owed
            && one.is_some_and(|one| one.lane.give(Job::Write { title, chunk, payload }).is_ok())
    }

    /// Nothing more will be given to be written to a ring.
    pub(in super::super) fn stop(&mut self, title: Title) {
        (1..=self.lanes.len()).for_each(|number| self.owe(number, Job::Stop(title)));
    }

    /// A ring is gone.
    pub(in super::super) fn close(&mut self, title: Title) {
        (1..=self.lanes.len()).for_each(|number| self.owe(number, Job::Close(title)));
    }

    fn owe(&mut self, lane: usize, job: Job) {
        self.owed.push_back((lane, job));
        self.settle();
    }

    /// Gives what is owed, in its order.
    fn settle(&mut self) {
        while let Some((number, job)) = self.owed.pop_front() {
            let Some(one) = self.lanes.get(number - 1) else { continue };
            if let Err(job) = one.lane.give(job) {
                if one.lane.is_over() {
                    continue;
                }
                self.owed.push_front((number, job));
                return;
            }
        }
    }

    /// The next thing that a lane told.
    #[inline]
    pub(in super::super) fn next(&mut self) -> Option<Event> {
        if !self.owed.is_empty() {
            self.settle();
        }
        self.events.try_recv().ok()
    }

    /// Has something to be done that nobody wakes us for?
    pub(in super::super) fn is_restless(&self) -> bool {
        !self.owed.is_empty()
    }

    /// Says that the port is about to sleep in its queue, and looks at what there is once more
    /// after this; or that it does not any more.
    pub(in super::super) fn sleeps(&self, is_asleep: bool) {
        self.owner.sleeps(is_asleep);
    }

    /// Ends the threads and closes the endpoints.
    ///
    /// # Errors
    /// `DeadlineExceeded` if one hangs in the provider. It keeps what peers may write to.
    pub(in super::super) fn finish(mut self) -> Result<()> {
        self.lanes.iter().for_each(|one| one.lane.end());
        let hang = self.lanes.iter_mut().filter_map(|one| (!one.lane.finish()).then_some(()));
        match hang.count() {
            0 => Ok(()),
            count => {
                let detail = format!("{count} threads hang in the provider");
                Err(Error::new(ErrorKind::DeadlineExceeded, "closing a port's lanes", detail))
            }
        }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        self.lanes.iter().for_each(|one| one.lane.end());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CompletionQueue, Endpoint, EndpointKind, Query};

    #[test]
    fn there_is_an_end_to_addresses() {
        let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
        let domain = Domain::open(&offer).unwrap();
        let addresses = AddressVector::open(&domain).unwrap();
        let mut queue = CompletionQueue::open(&domain).unwrap();
        let endpoint =
            Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open().unwrap();
        let some = addresses.insert(&endpoint.address().unwrap()).unwrap();
        let mut peers = Peers::default();
        let address = |number: usize| Address(number.to_le_bytes().to_vec());
        for number in 0..Peers::MOST {
            peers.find(&address(number), |_| Ok(some)).unwrap();
        }
        let refused = peers.find(&address(Peers::MOST), |_| Ok(some)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ResourceExhausted);
        // Those that are known come again.
        let never = |_: &Address| Err(Error::new(ErrorKind::Closed, "test", "it is known"));
        assert_eq!(peers.find(&address(0), never).unwrap(), some);
    }
}
