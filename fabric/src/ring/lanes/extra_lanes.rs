//! Lanes of a port in addition to its own endpoint, for large messages of all its rings.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use threads::lock;

use super::super::chunk_poster::ChunkPoster;
use super::super::memory::{RegistrationScope, RingMemory};
use super::super::posted_receives::PostedReceives;
use super::super::{Chunk, MAX_CHUNKS, NotifyMode, RingOffer, SenderInstance};
use super::lane::{Lane, LaneJob, PortWaker, RetainedMemory};
use super::lane_event::LaneEvent;
use super::send_queue::QueuedChunk;
use super::{LaneResources, LaneSet, OpenLane};
use crate::{
    Address, AddressVector, Domain, Error, ErrorKind, MemoryRegion, MrMode, Peer, Result, Waker,
};

const OPERATION: &str = "open lanes of port";

/// The lanes of a port without its own endpoint, numbered from 1.
#[derive(Debug)]
pub(in super::super) struct ExtraLanes {
    lanes: Vec<ExtraLane>,
    events: Receiver<LaneEvent>,
    port_waker: Arc<PortWaker>,
    retained: RetainedMemory,
    /// Jobs that did not fit a lane's job queue.
    pending_jobs: VecDeque<(usize, LaneJob)>,
    broken: Option<Error>,
}

#[derive(Debug)]
struct ExtraLane {
    lane: Lane,
    domain: Domain,
    addresses: AddressVector,
    address: Address,
    credit_memory: MemoryRegion,
    peers: PeerCache,
}

/// Peers of a lane, by address. They stay until the endpoint is closed, so their number is bounded,
/// and reconnecting peers share an entry.
#[derive(Debug, Default)]
struct PeerCache(HashMap<Address, Peer>);

impl PeerCache {
    const MAX_PEERS: usize = 4096;

    fn find(
        &mut self,
        address: &Address,
        insert: impl FnOnce(&Address) -> Result<Peer>,
    ) -> Result<Peer> {
        if let Some(peer) = self.0.get(address) {
            return Ok(*peer);
        }
        if self.0.len() >= Self::MAX_PEERS {
            let detail = format!(
                "a lane has {} peer addresses, the maximum. Replace the endpoint",
                Self::MAX_PEERS
            );
            return Err(Error::new(ErrorKind::ResourceExhausted, "open ring", detail));
        }
        let peer = insert(address)?;
        self.0.insert(address.clone(), peer);
        Ok(peer)
    }
}

impl ExtraLanes {
    /// Starts the threads of these lanes, which wake the queue of this waker.
    pub(in super::super) fn start(lane_set: LaneSet, waker: Waker) -> Result<Self> {
        let refuse =
            |detail: &'static str| Err(Error::new(ErrorKind::NotSupported, OPERATION, detail));
        let all = &lane_set.lanes;
        let capabilities = || all.iter().map(|lane| lane.io.endpoint.domain().capabilities());
        if capabilities().any(|it| it.registration.mr_mode.contains(MrMode::ENDPOINT)) {
            return refuse(
                "this provider binds memory to an endpoint (FI_MR_ENDPOINT). Use one lane",
            );
        }
        if capabilities().any(|capabilities| NotifyMode::Immediate.check(capabilities).is_err()) {
            return refuse("this provider has no immediates of 32 bits with writes. Use one lane");
        }
        if all.iter().any(|lane| lane.io.queue.waker().wake().is_err()) {
            return refuse(
                "a thread that sleeps in this provider's completion queue cannot be woken. Use one lane",
            );
        }
        let port_waker = Arc::new(PortWaker::new(waker));
        let (sender, events) = sync_channel(MAX_CHUNKS as usize + 1024);
        let retained = RetainedMemory::default();
        let mut lanes = Vec::with_capacity(all.len());
        for (number, opened) in (1..).zip(lane_set.lanes) {
            let OpenLane { mut io, addresses, credit_memory } = opened;
            let (domain, address) = (io.endpoint.domain().clone(), io.endpoint.address()?);
            let mut posted_receives = PostedReceives::new(&domain);
            posted_receives.prepare_for(&mut io, NotifyMode::Immediate)?;
            let (held, retained) = (credit_memory.clone(), RetainedMemory::clone(&retained));
            let resources =
                LaneResources { io, posted_receives, _credit_memory: held, _retained: retained };
            let events = (sender.clone(), Arc::clone(&port_waker));
            let lane = Lane::start(number, resources, events)?;
            let peers = PeerCache::default();
            lanes.push(ExtraLane { lane, domain, addresses, address, credit_memory, peers });
        }
        let pending_jobs = VecDeque::new();
        Ok(Self { lanes, events, port_waker, retained, pending_jobs, broken: None })
    }

    /// The number of lanes; 0 after one failed.
    pub(in super::super) fn usable(&self) -> usize {
        if self.broken.is_none() { self.lanes.len() } else { 0 }
    }

    pub(in super::super) fn broken(&self) -> Option<&Error> {
        self.broken.as_ref()
    }

    /// A lane failed; the first cause stays.
    pub(in super::super) fn fail(&mut self, error: Error) {
        self.broken.get_or_insert(error);
    }

    pub(in super::super) fn addresses(&self) -> impl Iterator<Item = &Address> {
        self.lanes.iter().map(|one| &one.address)
    }

    pub(in super::super) fn domain(&self, lane: usize) -> Option<&Domain> {
        self.lanes.get(lane.checked_sub(1)?).map(|one| &one.domain)
    }

    /// Where to register memory that is written through the first `count` lanes.
    pub(in super::super) fn registration_scopes(&self, count: usize) -> Vec<RegistrationScope<'_>> {
        self.lanes
            .iter()
            .take(count)
            .map(|one| RegistrationScope::domain_only(&one.domain))
            .collect()
    }

    /// Targets of notices without a chunk.
    pub(in super::super) fn credit_memories(&self) -> impl Iterator<Item = &MemoryRegion> {
        self.lanes.iter().map(|one| &one.credit_memory)
    }

    /// Keeps a ring's memory until no lane can write it.
    pub(in super::super) fn retain_memory(&self, memory: Arc<RingMemory>) {
        self.sweep();
        lock(&self.retained).push(memory);
    }

    /// Frees memory that only the lanes hold: its ring closed when nothing was in flight.
    pub(in super::super) fn sweep(&self) {
        lock(&self.retained).retain(|memory| Arc::strong_count(memory) > 1);
    }

    pub(in super::super) fn max_peers(&self) -> usize {
        self.lanes.iter().map(|one| one.peers.0.len()).max().unwrap_or(0)
    }

    /// Inserts the addresses of a writer on the first lanes.
    pub(in super::super) fn insert_addresses(&mut self, writer: &[Address]) -> Result<()> {
        for (one, address) in self.lanes.iter_mut().zip(writer) {
            one.peers.find(address, |address| one.addresses.insert(address))?;
        }
        Ok(())
    }

    /// Opens a ring's sender on the first lanes, to the peers at these addresses: one for each extra
    /// lane of the offer, and no more than there are lanes here.
    pub(in super::super) fn open(
        &mut self,
        peers: &[Address],
        offer: &RingOffer,
        instance: SenderInstance,
    ) -> Result<()> {
        let geometry = offer.geometry()?;
        let extra = offer.lanes.iter().skip(1);
        let mut chunk_posters = Vec::with_capacity(peers.len());
        for ((one, address), ring_offer) in self.lanes.iter_mut().zip(peers).zip(extra) {
            let peer = one.peers.find(address, |address| one.addresses.insert(address))?;
            let (scope, mode) =
                (RegistrationScope::domain_only(&one.domain), (offer.notify, offer.tagged));
            chunk_posters
                .push(ChunkPoster::new(scope, peer, ring_offer, mode, geometry, instance)?);
        }
        for (number, chunk_poster) in (1..).zip(chunk_posters) {
            self.queue_job(number, LaneJob::Open(Box::new(chunk_poster)));
        }
        Ok(())
    }

    /// Passes a chunk to a lane. False if its job queue is full.
    pub(in super::super) fn write(
        &self,
        lane: usize,
        instance: SenderInstance,
        (chunk, inline): (Chunk, &[u8]),
        payload: Option<(MemoryRegion, usize)>,
    ) -> bool {
        // A pending job may be the one that opens the ring.
        let is_job_pending = self.pending_jobs.iter().any(|(number, _)| *number == lane);
        let one = lane.checked_sub(1).and_then(|index| self.lanes.get(index));
        !is_job_pending
            && one.is_some_and(|one| {
                let queued = QueuedChunk::new(chunk, payload, inline);
                one.lane.send_job(LaneJob::Write { instance, queued }).is_ok()
            })
    }

    pub(in super::super) fn stop(&mut self, instance: SenderInstance, is_closed: bool) {
        for number in 1..=self.lanes.len() {
            self.queue_job(number, LaneJob::Stop { instance, is_closed });
        }
    }

    fn queue_job(&mut self, lane: usize, job: LaneJob) {
        self.pending_jobs.push_back((lane, job));
        self.send_pending();
    }

    fn send_pending(&mut self) {
        while let Some((number, job)) = self.pending_jobs.pop_front() {
            let Some(one) = self.lanes.get(number - 1) else { continue };
            if let Err(job) = one.lane.send_job(job) {
                if one.lane.is_stopped() {
                    continue;
                }
                self.pending_jobs.push_front((number, *job));
                return;
            }
        }
    }

    #[inline]
    pub(in super::super) fn next(&mut self) -> Option<LaneEvent> {
        if !self.pending_jobs.is_empty() {
            self.send_pending();
        }
        self.events.try_recv().ok()
    }

    /// Are jobs pending, for which no wake-up arrives?
    pub(in super::super) fn needs_polling(&self) -> bool {
        !self.pending_jobs.is_empty()
    }

    pub(in super::super) fn set_sleeping(&self, is_asleep: bool) {
        self.port_waker.set_sleeping(is_asleep);
    }

    /// Ends the threads and closes the endpoints. Fails if a thread hangs in the provider: it keeps
    /// the memory that peers may write.
    pub(in super::super) fn shut_down(mut self) -> Result<()> {
        self.lanes.iter().for_each(|one| one.lane.request_stop());
        let count =
            self.lanes.iter_mut().filter_map(|it| (!it.lane.shut_down()).then_some(())).count();
        if count == 0 {
            return Ok(());
        }
        let detail = format!("{count} threads hang in the provider");
        Err(Error::new(ErrorKind::DeadlineExceeded, "close lanes of port", detail))
    }
}

impl Drop for ExtraLanes {
    fn drop(&mut self) {
        self.lanes.iter().for_each(|one| one.lane.request_stop());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CompletionQueue, Endpoint, EndpointKind, Query};

    #[test]
    fn peer_addresses_of_a_lane_are_bounded() {
        let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
        let domain = Domain::open(&offer).unwrap();
        let addresses = AddressVector::open(&domain).unwrap();
        let mut queue = CompletionQueue::open(&domain).unwrap();
        let endpoint =
            Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open().unwrap();
        let some = addresses.insert(&endpoint.address().unwrap()).unwrap();
        let mut peers = PeerCache::default();
        let address = |number: usize| Address(number.to_le_bytes().to_vec());
        for number in 0..PeerCache::MAX_PEERS {
            peers.find(&address(number), |_| Ok(some)).unwrap();
        }
        let refused = peers.find(&address(PeerCache::MAX_PEERS), |_| Ok(some)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ResourceExhausted);
        // Known addresses are still found.
        let never = |_: &Address| Err(Error::new(ErrorKind::Closed, "test", "known peer"));
        assert_eq!(peers.find(&address(0), never).unwrap(), some);
    }
}
