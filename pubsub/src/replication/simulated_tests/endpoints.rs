//! Simulated sources and sinks.

use std::sync::{Arc, Mutex};

use super::simulation::SimPayload;
use crate::error::Result;
use crate::replication::{
    FinishOutcome, MessageHeader, Metadata, OutgoingMessage, Sink, Source, StageDurations,
};

/// A source of fixed messages. Its released position outlives it.
pub(super) struct SimSource {
    pub(super) messages: Arc<Vec<(u64, SimPayload)>>,
    pub(super) next: usize,
    pub(super) released: Arc<Mutex<Option<u64>>>,
}

impl SimSource {
    pub(super) fn new(messages: Vec<(u64, SimPayload)>) -> Self {
        Self { messages: Arc::new(messages), next: 0, released: Arc::default() }
    }

    /// The source after its writer was killed: unreleased messages remain.
    pub(super) fn restarted(&self) -> Self {
        let released = *self.released.lock().unwrap();
        let is_released = |message: &&(u64, SimPayload)| Some(message.0) <= released;
        let next = self.messages.iter().take_while(is_released).count();
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

impl Source<SimPayload> for SimSource {
    fn next(&mut self) -> Result<Option<OutgoingMessage<SimPayload>>> {
        let Some((position, payload)) = self.messages.get(self.next) else { return Ok(None) };
        self.next += 1;
        let length = payload.bytes.lock().unwrap().len() as u64;
        Ok(Some(OutgoingMessage { header: header_of(*position, length), place: payload.clone() }))
    }

    fn release(&mut self, through: u64) {
        let mut released = self.released.lock().unwrap();
        assert!(*released < Some(through), "{through} after {released:?}");
        // A later read finds other bytes.
        let gone = self
            .messages
            .iter()
            .filter(|(position, _)| *position <= through && Some(*position) > *released);
        gone.for_each(|(_, payload)| payload.bytes.lock().unwrap().fill(0xCC));
        *released = Some(through);
    }

    fn release_one(&mut self, position: u64) {
        assert!(*self.released.lock().unwrap() < Some(position));
        let mut messages = self.messages.iter();
        let (_, payload) = messages.find(|message| message.0 == position).unwrap();
        payload.bytes.lock().unwrap().fill(0xCC);
    }
}

/// A header and its payload.
pub(super) type Published = (MessageHeader, Vec<u8>);

/// A sink whose published messages outlive it.
#[derive(Default)]
pub(super) struct SimSink {
    pub(super) published: Arc<Mutex<Vec<Published>>>,
    pub(super) stages: Vec<StageDurations>,
    begun: Vec<(MessageHeader, SimPayload)>,
    pub(super) is_device: bool,
    /// How often each message is refused: for memory, and by a full queue.
    pub(super) refusals: (u32, u32),
    refused: (u32, u32),
}

impl Sink<SimPayload> for SimSink {
    fn begin(&mut self, header: &MessageHeader) -> Result<Option<SimPayload>> {
        if self.refused.0 < self.refusals.0 {
            self.refused.0 += 1;
            return Ok(None);
        }
        self.refused.0 = 0;
        let payload = SimPayload::new(vec![0; header.length as usize], self.is_device);
        self.begun.push((*header, payload.clone()));
        Ok(Some(payload))
    }

    fn finish(&mut self, header: &MessageHeader, stages: &StageDurations) -> Result<FinishOutcome> {
        assert_eq!(self.begun[0].0, *header, "messages finish in the order in which they began");
        if self.refused.1 < self.refusals.1 {
            self.refused.1 += 1;
            return Ok(FinishOutcome::Retry);
        }
        self.refused.1 = 0;
        let (header, payload) = self.begun.remove(0);
        let bytes = payload.bytes.lock().unwrap().clone();
        self.published.lock().unwrap().push((header, bytes));
        self.stages.push(*stages);
        Ok(FinishOutcome::Published)
    }

    fn abandon(&mut self) {
        self.begun.clear();
        self.refused = (0, 0);
    }
}
