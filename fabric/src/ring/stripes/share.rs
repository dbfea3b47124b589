//! What one lane has of one ring that is written.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::super::outlet::{Outlet, Posted};
use super::super::writer::Chunk;
use super::lane::Event;
use crate::{CompletionQueue, Endpoint, Error, ErrorKind, MemoryRegion};

/// How long what was given for a ring that is not written any more may wait for room in the
/// provider, which never makes any for a peer that is gone.
const FAREWELL: Duration = Duration::from_secs(1);

/// A lane's share of a ring.
#[derive(Debug)]
pub(super) struct Share {
    outlet: Outlet,
    /// What is still to be posted.
    waiting: VecDeque<(Chunk, Option<(MemoryRegion, usize)>)>,
    /// A chunk was not written: no later one is.
    is_broken: bool,
    is_closed: bool,
    /// No more chunks will be given; those that are still to be posted then are not.
    ends: Option<Instant>,
}

impl Share {
    pub(super) fn new(outlet: Outlet) -> Self {
        let waiting = VecDeque::new();
        Self { outlet, waiting, is_broken: false, is_closed: false, ends: None }
    }

    /// A chunk that is to be written. True if it is the only one.
    pub(super) fn put(&mut self, chunk: Chunk, payload: Option<(MemoryRegion, usize)>) -> bool {
        if self.is_broken {
            // Whoever gave it does not know yet, and will hear that nothing is read any more.
            return false;
        }
        self.waiting.push_back((chunk, payload));
        self.waiting.len() == 1
    }

    /// No more chunks will come.
    pub(super) fn stop(&mut self) {
        self.ends.get_or_insert_with(|| Instant::now() + FAREWELL);
    }

    /// And nobody wants to hear of those that came.
    pub(super) fn close(&mut self) {
        self.is_closed = true;
        self.stop();
    }

    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Is nothing on its way, or waiting to be?
    pub(super) fn is_silent(&self) -> bool {
        self.waiting.is_empty() && self.outlet.unfinished() == 0
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_closed && self.is_silent()
    }

    /// Posts what there is room for. True if anything was.
    pub(super) fn write(
        &mut self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
        lane: usize,
        tell: impl Fn(Event),
    ) -> bool {
        let mut has_written = false;
        while let Some((chunk, payload)) = self.waiting.front() {
            let body = payload.as_ref().map(|(region, from)| (region, *from));
            match self.outlet.post(endpoint, queue, chunk, body) {
                Ok(Posted::No) if self.ends.is_some_and(|end| Instant::now() > end) => {
                    let detail = "there was no room for it in time, and it is not wanted any more";
                    let error = Error::new(ErrorKind::Closed, "writing to a ring", detail);
                    tell(self.undone(lane, error));
                    break;
                }
                Ok(Posted::No) => break,
                Ok(Posted::Sent) => {}
                Ok(Posted::Copied) => {
                    let bytes = chunk.header.payload.into();
                    tell(self.done(lane, bytes));
                }
                Err(error) => {
                    tell(self.undone(lane, error));
                    break;
                }
            }
            has_written = true;
            self.waiting.pop_front();
        }
        has_written
    }

    /// One of a slot's writes completed.
    pub(super) fn completed(&mut self, lane: usize, slot: u16) -> Option<Event> {
        match self.outlet.completed(slot) {
            Some(bytes) => Some(self.done(lane, bytes.into())),
            // It may be the first of two, of a chunk whose second one nobody will post: then there
            // is nothing that would tell that nothing is read any more.
            None => (self.is_broken && self.is_silent()).then(|| self.done(lane, 0)),
        }
    }

    /// One of a slot's writes failed.
    pub(super) fn failed(&mut self, lane: usize, slot: u16, error: Error) -> Event {
        self.outlet.failed(slot);
        self.undone(lane, error)
    }

    fn done(&self, lane: usize, bytes: u64) -> Event {
        Event::Done { lane, title: self.outlet.title(), bytes, left_to: self.left_to() }
    }

    fn undone(&mut self, lane: usize, error: Error) -> Event {
        self.is_broken = true;
        self.waiting.clear();
        Event::Undone { lane, title: self.outlet.title(), left_to: self.left_to(), error }
    }

    fn left_to(&self) -> u64 {
        match self.is_broken && self.is_silent() {
            // Of what was not posted nothing will be.
            true => u64::MAX,
            false => self.outlet.left_to(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::memory::Site;
    use super::super::super::notify::Notify;
    use super::super::super::outlet::Title;
    use super::super::super::shape::{Layout, Shape};
    use super::super::super::terms::LaneOffer;
    use super::super::super::writer::Writer;
    use super::*;
    use crate::{Access, AddressVector, Domain, EndpointKind, HostMemory, Query};

    const RING: u64 = 64 << 10;

    /// Of a ring in the memory of a device, of which headers are written first: that of a chunk was,
    /// and there was no room for its payload, nor ever will be.
    #[test]
    fn a_chunk_that_was_half_posted_holds_up_nobody_once_it_is_given_up() {
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
        let terms =
            LaneOffer { ring: place.clone(), headers: Some(place.clone()), credit_memory: place };
        let shape = Shape::new(RING, 0).unwrap().laid_out(Layout::Apart);
        let (title, form) = (Title { name: 0, generation: 1 }, (Notify::Immediate, false));
        let site = Site::of(&endpoint);
        let outlet = Outlet::new(site, peer, &terms, form, shape, title).unwrap();
        let mut writer = Writer::new(shape, 1, 1000);
        let mut message = writer.begin(0, 3000);
        let chunks = [(); 2].map(|()| {
            let chunk = writer.plan_within(&message, u64::MAX).unwrap();
            writer.commit(&mut message, &chunk);
            chunk
        });

        let mut share = Share::new(outlet);
        let slot = share.outlet.begin_half(&chunks[0]).unwrap();
        assert_eq!(chunks.map(|chunk| share.put(chunk, None)), [true, false]);
        share.close();
        let error = Error::new(ErrorKind::Closed, "test", "not wanted any more");
        // Its header may still be read.
        match share.undone(1, error) {
            Event::Undone { left_to: 0, .. } => {}
            event => panic!("{event:?}"),
        }
        assert!(!share.is_over() && share.outlet.unfinished() == 1);
        match share.completed(1, slot) {
            Some(Event::Done { lane: 1, bytes: 0, left_to: u64::MAX, .. }) => {}
            event => panic!("{event:?}"),
        }
        assert!(share.is_over());
    }
}
