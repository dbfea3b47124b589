//! What goes by lanes beside the endpoint.

use super::super::outlet::Title;
use super::super::stripes::{Beside, Shares};
use super::super::writer::{Chunk, Message};
use super::{End, Pushed, RingSender, not_in_part};
use crate::{Error, MemoryRegion, RegionSlice, Result};

/// What came of planning a chunk.
pub(super) enum Planned<'a> {
    /// This, with payload from there.
    Chunk(Chunk, Option<(&'a MemoryRegion, usize)>),
    /// There is none now.
    No(Pushed),
}

impl RingSender {
    /// As [`push_part`](Self::push_part), by one of the lanes beside the endpoint.
    pub(in super::super) fn push_by(
        &mut self,
        (lanes, lane): (&Beside, usize),
        message: &mut Message,
        part: &RegionSlice,
        at: u64,
    ) -> Result<Pushed> {
        let end = at.saturating_add(part.len() as u64);
        let has_lane = self.shares.as_ref().is_some_and(|shares| lane < shares.lanes());
        if !has_lane || (!message.is_written() && !(at..end).contains(&message.written())) {
            return Err(not_in_part(message, at, end));
        }
        let most = end.saturating_sub(message.written());
        let (chunk, body) = match self.plan(message, (part, at), most)? {
            Planned::Chunk(chunk, body) => (chunk, body),
            Planned::No(pushed) => return Ok(pushed),
        };
        let body = body.map(|(region, from)| (region.clone(), from));
        if !lanes.write(lane, self.outlet.title(), chunk, body) {
            self.statistics.busy += 1;
            return Ok(Pushed::Busy);
        }
        self.committed(message, &chunk);
        self.gave(lane, &chunk);
        Ok(Pushed::Posted(chunk.header.payload.into()))
    }

    /// From now on chunks go by so many lanes, of which the endpoint is the first.
    pub(in super::super) fn spread(&mut self, lanes: usize) {
        self.shares = Some(Box::new(Shares::new(lanes, self.writer.longest_payload())));
    }

    /// Endpoints that it is written through.
    #[must_use]
    pub fn lanes(&self) -> usize {
        self.shares.as_ref().map_or(1, |shares| shares.lanes())
    }

    /// Nothing more is written. True the first time, if there are lanes to be told so.
    pub(in super::super) fn stop(&mut self) -> bool {
        let is_news = self.shares.is_some() && !self.is_stopped;
        self.is_stopped |= is_news;
        is_news
    }

    /// By which lane a chunk of so many bytes is to go; None if all have enough to do.
    pub(in super::super) fn pick(&self, bytes: u64) -> Option<usize> {
        let Some(shares) = &self.shares else { return Some(0) };
        shares.pick(bytes.min(self.writer.longest_payload()))
    }

    pub(super) fn gave(&mut self, lane: usize, chunk: &Chunk) {
        let now = self.now();
        let span = (chunk.header.position, self.writer.tail());
        if let Some(shares) = &mut self.shares {
            shares.posted(lane, span, chunk.header.payload.into(), now);
        }
    }

    /// A lane is done with a chunk, and with all up to there.
    pub(in super::super) fn is_done(&mut self, lane: usize, left_to: u64, bytes: u64) {
        let now = self.now();
        if let Some(shares) = &mut self.shares {
            shares.done(lane, left_to, bytes, now);
        }
    }

    /// A chunk was not written by a lane, which reads nothing more up to there.
    pub(in super::super) fn is_undone(&mut self, lane: usize, left_to: u64, error: Error) {
        self.is_done(lane, left_to, 0);
        self.end = End::Said;
        self.fail(error);
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// Whose chunks are whose, at the lanes.
    pub(in super::super) fn title(&self) -> Title {
        self.outlet.title()
    }
}
