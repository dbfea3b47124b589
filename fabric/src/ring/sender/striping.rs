//! Chunks on extra lanes.

use super::super::lanes::{ExtraLanes, StripeTracker};
use super::super::{Chunk, Message, SenderInstance};
use super::{EndNotice, Pushed, RingSender, bytes_in_part};
use crate::{Error, ErrorKind, MemoryRegion, RegionSlice, Result};

pub(super) enum Planned<'a> {
    /// A chunk, with the region and offset of its payload.
    Chunk(Chunk, Option<(&'a MemoryRegion, usize)>),
    /// None can be planned now.
    NotPlanned(Pushed),
}

impl RingSender {
    /// Like [`push_part`](Self::push_part), on an extra lane.
    pub(in super::super) fn push_on_lane(
        &mut self,
        (lanes, lane): (&ExtraLanes, usize),
        message: &mut Message,
        part: &RegionSlice,
        at: u64,
        inline: &[u8],
    ) -> Result<Pushed> {
        self.check_inline(inline)?;
        if lane >= self.lanes() {
            let detail = format!("the ring has no lane {lane}, it has {} lanes", self.lanes());
            return Err(Error::new(ErrorKind::OutOfBounds, "write to ring", detail));
        }
        let most = bytes_in_part(message, part, at)?;
        let (chunk, body) = match self.plan(message, (part, at), most)? {
            Planned::Chunk(chunk, body) => (chunk, body),
            Planned::NotPlanned(pushed) => return Ok(pushed),
        };
        let body = body.map(|(region, from)| (region.clone(), from));
        if !lanes.write(lane, self.chunk_poster.instance(), (chunk, inline), body) {
            self.statistics.busy += 1;
            return Ok(Pushed::Busy);
        }
        self.committed(message, &chunk);
        self.record_posted(lane, &chunk);
        Ok(Pushed::Posted(chunk.header.payload.into()))
    }

    /// Stripes chunks over this many lanes, of which the port's endpoint is lane 0.
    pub(in super::super) fn stripe_over(&mut self, lanes: usize) {
        self.stripe_tracker = Some(Box::new(StripeTracker::new(lanes, self.writer.max_payload())));
    }

    /// Lanes of the ring.
    #[must_use]
    pub fn lanes(&self) -> usize {
        self.stripe_tracker.as_ref().map_or(1, |it| it.lanes())
    }

    /// Stops writing. True the first time, if lanes have to be notified.
    pub(in super::super) fn stop(&mut self) -> bool {
        let is_new = self.stripe_tracker.is_some() && !self.is_stopped;
        self.is_stopped |= is_new;
        is_new
    }

    /// The lane for a chunk of this many bytes; None if all lanes are full.
    pub(in super::super) fn pick_lane(&self, bytes: u64) -> Option<usize> {
        let Some(stripe_tracker) = &self.stripe_tracker else { return Some(0) };
        stripe_tracker.pick_lane(bytes.min(self.writer.max_payload()))
    }

    pub(super) fn record_posted(&mut self, lane: usize, chunk: &Chunk) {
        if let Some(stripe_tracker) = &mut self.stripe_tracker {
            let now = self.start.elapsed().as_nanos() as u64;
            let span = (chunk.header.position, self.writer.tail());
            stripe_tracker.posted(lane, span, chunk.header.payload.into(), now);
        }
    }

    /// A lane has completed a chunk, and all its chunks up to this position.
    pub(in super::super) fn lane_completed(&mut self, lane: usize, completed_to: u64, bytes: u64) {
        if let Some(stripe_tracker) = &mut self.stripe_tracker {
            let now = self.start.elapsed().as_nanos() as u64;
            stripe_tracker.done(lane, completed_to, bytes, now);
        }
    }

    /// A lane failed to write a chunk, and reads nothing more below this position.
    pub(in super::super) fn lane_failed(&mut self, lane: usize, completed_to: u64, error: Error) {
        self.lane_completed(lane, completed_to, 0);
        self.end = EndNotice::Sent;
        self.fail(error);
    }

    /// Identifies the sender's chunks on the lanes.
    pub(in super::super) fn instance(&self) -> SenderInstance {
        self.chunk_poster.instance()
    }
}
