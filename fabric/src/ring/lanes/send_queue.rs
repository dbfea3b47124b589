//! The send queue of one ring on one lane.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::super::EndpointIo;
use super::super::chunk_poster::{ChunkPoster, Posted};
use super::super::writer_state::Chunk;
use super::lane_event::LaneEvent;
use crate::{Error, ErrorKind, MemoryRegion, Result};

/// How long chunks of a stopped ring wait for room in the provider, which never has any for a dead
/// peer.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct QueuedChunk {
    chunk: Chunk,
    /// The chunk's payload, from an offset of a region.
    payload: Option<(MemoryRegion, usize)>,
    /// Bytes beside its header.
    inline: Box<[u8]>,
}

impl QueuedChunk {
    pub(super) fn new(chunk: Chunk, payload: Option<(MemoryRegion, usize)>, inline: &[u8]) -> Self {
        Self { chunk, payload, inline: inline.into() }
    }
}

#[derive(Debug)]
pub(super) struct LaneSendQueue {
    lane: usize,
    chunk_poster: ChunkPoster,
    waiting: VecDeque<QueuedChunk>,
    /// A chunk was not written, so no later one is.
    is_broken: bool,
    is_closed: bool,
    /// The ring is stopped; chunks not posted by then are dropped.
    stop_deadline: Option<Instant>,
}

impl LaneSendQueue {
    pub(super) fn new(lane: usize, chunk_poster: ChunkPoster) -> Self {
        let (waiting, stop_deadline) = (VecDeque::new(), None);
        Self { lane, chunk_poster, waiting, is_broken: false, is_closed: false, stop_deadline }
    }

    /// Queues a chunk. True if it is the only one.
    pub(super) fn push(&mut self, queued: QueuedChunk) -> bool {
        if self.is_broken {
            // The port does not know yet; the failure event tells it that no chunk is read any
            // more.
            return false;
        }
        self.waiting.push_back(queued);
        self.waiting.len() == 1
    }

    /// No more chunks follow. If the ring is closed, no event is wanted any more.
    pub(super) fn stop(&mut self, is_closed: bool) {
        self.is_closed |= is_closed;
        self.stop_deadline.get_or_insert_with(|| Instant::now() + CLOSE_TIMEOUT);
    }

    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Is no chunk in flight or queued?
    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.chunk_poster.unfinished() == 0
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.is_closed && self.is_idle()
    }

    /// Posts as far as there is room. True if anything was posted.
    pub(super) fn write(&mut self, io: &mut EndpointIo, report: impl Fn(LaneEvent)) -> bool {
        let mut has_written = false;
        while let Some(QueuedChunk { chunk, payload, inline }) = self.waiting.front() {
            let body = payload.as_ref().map(|(region, from)| (region, *from));
            match self.chunk_poster.post(io, chunk, body, inline) {
                Ok(Posted::Full) if self.stop_deadline.is_some_and(|end| Instant::now() > end) => {
                    let detail = "the provider had no room within 1 s after the ring was closed";
                    let error = Error::new(ErrorKind::Closed, "write to ring", detail);
                    report(self.write_failed(error));
                    break;
                }
                Ok(Posted::Full) => break,
                Ok(Posted::Sent) => {}
                Ok(Posted::Copied) => {
                    let bytes = chunk.header.payload.into();
                    report(self.event(Ok(bytes)));
                }
                Err(error) => {
                    report(self.write_failed(error));
                    break;
                }
            }
            has_written = true;
            self.waiting.pop_front();
        }
        has_written
    }

    pub(super) fn completed(&mut self, slot: u16) -> Option<LaneEvent> {
        match self.chunk_poster.completed(slot) {
            Some(bytes) => Some(self.event(Ok(bytes.into()))),
            // It may be the first write of a chunk whose second is never posted: then no other
            // event reports that the memory is free.
            None => (self.is_broken && self.is_idle()).then(|| self.event(Ok(0))),
        }
    }

    pub(super) fn failed(&mut self, slot: u16, error: Error) -> LaneEvent {
        self.chunk_poster.failed(slot);
        self.write_failed(error)
    }

    fn write_failed(&mut self, error: Error) -> LaneEvent {
        self.is_broken = true;
        self.waiting.clear();
        self.event(Err(error))
    }

    fn event(&self, bytes: Result<u64>) -> LaneEvent {
        let completed_to = match self.is_broken && self.is_idle() {
            // Chunks that were not posted never will be.
            true => u64::MAX,
            false => self.chunk_poster.completed_to(),
        };
        let (lane, instance) = (self.lane, self.chunk_poster.instance());
        LaneEvent::Written { lane, instance, completed_to, bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::SenderInstance;
    use super::super::super::geometry::{ChunkLayout, RingGeometry};
    use super::super::super::memory::RegistrationScope;
    use super::super::super::notify::NotifyMode;
    use super::super::super::ring_offer::LaneOffer;
    use super::super::super::writer_state::WriterState;
    use super::*;
    use crate::{
        Access, AddressVector, CompletionQueue, Domain, Endpoint, EndpointKind, HostMemory, Query,
    };

    const RING: u64 = 64 << 10;

    /// Separate headers are written first: the header of a chunk was posted, and there is never
    /// room for its payload.
    #[test]
    fn abandoned_partial_chunk_does_not_block_its_lane() {
        let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
        let domain = Domain::open(&offer).unwrap();
        let addresses = AddressVector::open(&domain).unwrap();
        let mut queue = CompletionQueue::open(&domain).unwrap();
        let endpoint =
            Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open().unwrap();
        let peer = addresses.insert(&endpoint.address().unwrap()).unwrap();
        let memory = HostMemory::zeroed(RING as usize).unwrap();
        let region = domain.register(memory, Access::REMOTE_WRITE).unwrap();
        let place = region.describe().unwrap();
        let ring_offer =
            LaneOffer { ring: place.clone(), headers: Some(place.clone()), credit_memory: place };
        let geometry = RingGeometry::new(RING, 0).unwrap().with_layout(ChunkLayout::SeparateHeader);
        let (instance, mode) = (SenderInstance::new(0, 1), (NotifyMode::Immediate, false));
        let scope = RegistrationScope::of(&endpoint);
        let chunk_poster =
            ChunkPoster::new(scope, peer, &ring_offer, mode, geometry, instance).unwrap();
        let mut writer = WriterState::new(geometry, 1, 1000);
        let mut message = writer.begin(0, 3000);
        let chunks = [(); 2].map(|()| {
            let chunk = writer.plan_within(&message, u64::MAX).unwrap();
            writer.commit(&mut message, &chunk);
            chunk
        });

        let mut send_queue = LaneSendQueue::new(1, chunk_poster);
        let slot = send_queue.chunk_poster.begin_partial_chunk(&chunks[0]).unwrap();
        assert_eq!(
            chunks.map(|chunk| send_queue.push(QueuedChunk::new(chunk, None, &[]))),
            [true, false]
        );
        send_queue.stop(true);
        let error = Error::new(ErrorKind::Closed, "test", "the ring is closed");
        // Its header may still be read.
        match send_queue.write_failed(error) {
            LaneEvent::Written { completed_to: 0, bytes: Err(_), .. } => {}
            event => panic!("{event:?}"),
        }
        assert!(!send_queue.is_stopped() && send_queue.chunk_poster.unfinished() == 1);
        match send_queue.completed(slot) {
            Some(LaneEvent::Written { lane: 1, bytes: Ok(0), completed_to: u64::MAX, .. }) => {}
            event => panic!("{event:?}"),
        }
        assert!(send_queue.is_stopped());
    }
}
