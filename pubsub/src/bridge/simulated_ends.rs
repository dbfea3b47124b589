//! Where messages come from and go to, in simulated time.

use std::sync::{Arc, Mutex};

use super::simulation::SimPlace;
use super::{Finished, MessageHeader, Metadata, Outgoing, Sink, Source, Stages};
use crate::error::Result;

/// Messages that are there from the beginning. What it has released outlives it.
pub(super) struct SimSource {
    pub(super) messages: Arc<Vec<(u64, SimPlace)>>,
    pub(super) next: usize,
    pub(super) released: Arc<Mutex<Option<u64>>>,
}

impl SimSource {
    pub(super) fn new(messages: Vec<(u64, SimPlace)>) -> Self {
        Self { messages: Arc::new(messages), next: 0, released: Arc::default() }
    }

    /// As it is after the writer was killed: what was not released is there.
    pub(super) fn reborn(&self) -> Self {
        let released = *self.released.lock().unwrap();
        let is_gone = |message: &&(u64, SimPlace)| Some(message.0) <= released;
        let next = self.messages.iter().take_while(is_gone).count();
        let (messages, released) = (Arc::clone(&self.messages), Arc::clone(&self.released));
        Self { messages, next, released }
    }
}

pub(super) fn header_of(position: u64, length: u64) -> MessageHeader {
    let metadata = vec![position as u8; (position * 37 % 257) as usize];
    MessageHeader {
        position,
        length,
        publisher: position % 5,
        sequence: position * 3,
        published: position * 11,
        posted: 0,
        metadata: Metadata::new(&metadata).unwrap(),
    }
}

impl Source<SimPlace> for SimSource {
    fn next(&mut self) -> Result<Option<Outgoing<SimPlace>>> {
        let Some((position, place)) = self.messages.get(self.next) else { return Ok(None) };
        self.next += 1;
        let length = place.bytes.lock().unwrap().len() as u64;
        Ok(Some(Outgoing { header: header_of(*position, length), place: place.clone() }))
    }

    fn release(&mut self, through: u64) {
        let mut released = self.released.lock().unwrap();
        assert!(*released < Some(through), "{through} after {released:?}");
        // Whoever still reads them finds something else.
        let gone = self
            .messages
            .iter()
            .filter(|(position, _)| *position <= through && Some(*position) > *released);
        gone.for_each(|(_, place)| place.bytes.lock().unwrap().fill(0xCC));
        *released = Some(through);
    }

    fn release_one(&mut self, position: u64) {
        assert!(*self.released.lock().unwrap() < Some(position));
        let mut messages = self.messages.iter();
        let (_, place) = messages.find(|message| message.0 == position).unwrap();
        place.bytes.lock().unwrap().fill(0xCC);
    }
}

/// A message, and its bytes.
pub(super) type Published = (MessageHeader, Vec<u8>);

/// Where messages go. What was published outlives it.
#[derive(Default)]
pub(super) struct SimSink {
    pub(super) published: Arc<Mutex<Vec<Published>>>,
    pub(super) stages: Vec<Stages>,
    begun: Vec<(MessageHeader, SimPlace)>,
    pub(super) is_device: bool,
    /// How often each message is refused first: room, and a place in the queue.
    pub(super) refusals: (u32, u32),
    refused: (u32, u32),
}

impl Sink<SimPlace> for SimSink {
    fn begin(&mut self, header: &MessageHeader) -> Result<Option<SimPlace>> {
        if self.refused.0 < self.refusals.0 {
            self.refused.0 += 1;
            return Ok(None);
        }
        self.refused.0 = 0;
        let place = SimPlace::new(vec![0; header.length as usize], self.is_device);
        self.begun.push((*header, place.clone()));
        Ok(Some(place))
    }

    fn finish(&mut self, header: &MessageHeader, stages: &Stages) -> Result<Finished> {
        assert_eq!(self.begun[0].0, *header, "in the order in which they began");
        if self.refused.1 < self.refusals.1 {
            self.refused.1 += 1;
            return Ok(Finished::NotYet);
        }
        self.refused.1 = 0;
        let (header, place) = self.begun.remove(0);
        let bytes = place.bytes.lock().unwrap().clone();
        self.published.lock().unwrap().push((header, bytes));
        self.stages.push(*stages);
        Ok(Finished::Published)
    }

    fn abandon(&mut self) {
        self.begun.clear();
        self.refused = (0, 0);
    }
}
