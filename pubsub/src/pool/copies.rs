//! Copies between a pool and devices, and blocks that such a copy has not let go of.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use gpu::{Event, Implementation, Point, Slice, Stream};
use ipc::{Block, Caller};

use super::Pool;
use crate::below;
use crate::error::Result;
use crate::loans::{Borrower, Loans};
use crate::lock::lock;

/// What devices do with a part of a pool, and may go on doing though nobody waits for them.
#[derive(Debug)]
pub(crate) struct Begun(
    /// None if nobody can tell.
    Vec<Option<Point>>,
);

impl Begun {
    /// What was begun before a point of a stream; if there is none, nobody can tell.
    pub(crate) fn before(point: Option<Point>) -> Self {
        Self(vec![point])
    }

    /// And something else.
    pub(crate) fn and(mut self, other: Option<Self>) -> Self {
        self.0.extend(other.into_iter().flat_map(|other| other.0));
        self
    }

    /// Has all of it ended well? What failed may be going on, for all that is known.
    pub(crate) fn is_done(&self) -> bool {
        let is_done = |point: &Option<Point>| {
            point.as_ref().is_some_and(|point| matches!(point.is_done(), Ok(true)))
        };
        self.0.iter().all(is_done)
    }
}

/// What copies of this process leave to be used again, or seen to.
#[derive(Debug, Default)]
pub(super) struct Copies {
    /// Blocks that are given back once a device has done with them. It may never have: then
    /// they are freed after this process, which takes what the device does along. Each is a loan.
    busy: Mutex<Vec<(Block, Begun, Arc<Loans>)>>,
    /// From a device, by way of these bytes of the caller's.
    ferry: Mutex<Option<(Stream, Vec<u8>)>>,
    /// The default stream of the device that was copied from last, and a point in it.
    default: Mutex<Option<(Stream, Event)>>,
}

impl Pool {
    /// After a copy into the pool has failed: what may still go on.
    pub(crate) fn begun(&self) -> Option<Begun> {
        // None was ever made for the host, where nothing goes on after a call.
        self.stream.get().map(|stream| Begun::before(stream.point().ok()))
    }

    /// Gives a block of the caller's back when nothing is copied there any more, and with it the loan
    /// that it is.
    pub(crate) fn free_after(&self, block: Block, begun: Begun, loans: Arc<Loans>) {
        lock(&self.copies.busy).push((block, begun, loans));
    }

    /// Gives back what was kept for a copy that is done by now, and what anybody left to streams.
    pub(crate) fn free_what_is_done(&self, caller: &Caller<'_>) {
        self.tend(caller);
        if let Err(error) = self.ledger().collect(caller) {
            tracing::debug!(%error, "what was left to streams cannot be freed yet");
        }
        let mut busy = lock(&self.copies.busy);
        let owner = ipc::Owner::participant(caller.me);
        for (block, _, loans) in busy.extract_if(.., |(_, begun, _)| begun.is_done()) {
            self.ledger().dispose(caller, block, owner);
            loans.give_back(Borrower::Passing);
        }
    }

    /// Is anything kept for a copy?
    pub(crate) fn keeps_anything(&self) -> bool {
        !lock(&self.copies.busy).is_empty()
    }

    /// What follows on `stream` waits for what the memory's owner began without naming a stream,
    /// such as a copy to it that seems to be over: the driver may still have the last of it.
    pub(super) fn follow_default(&self, stream: &Stream, from: &Slice) -> gpu::Result<()> {
        let device = from.memory().mapped_for();
        if device.name().implementation == Implementation::StandIn {
            return Ok(());
        }
        let mut default = lock(&self.copies.default);
        if default.as_ref().is_none_or(|(known, _)| known.device().name() != device.name()) {
            *default = Some((device.default_stream()?, device.event()?));
        }
        let Some((default, event)) = &*default else { return Ok(()) };
        default.record(event)?;
        stream.wait_for(event)
    }

    /// Memory of the host is no device's: what comes from one goes by way of the caller's.
    pub(super) fn copy_to_host(&self, to: &Slice, from: &Slice, longest: Duration) -> Result<()> {
        const AT_ONCE: u64 = 1 << 20;
        let on = |cause| below::of_device("copy into a message", cause).on(self.id());
        let device = from.memory().mapped_for();
        let kept = lock(&self.copies.ferry).take();
        let kept = kept.filter(|(stream, _)| stream.device().name() == device.name());
        let (stream, mut bytes) = match kept {
            Some(kept) => kept,
            None => (device.stream().map_err(on)?, Vec::new()),
        };
        self.follow_default(&stream, from).map_err(on)?;
        let most = AT_ONCE.min(from.length());
        if bytes.len() < most as usize {
            bytes.resize(most as usize, 0);
        }
        let mut offset = 0;
        while offset < from.length() {
            let length = AT_ONCE.min(from.length() - offset);
            let bytes = &mut bytes[..length as usize];
            let part = from.slice(offset, length).map_err(on)?;
            stream.download(&part, bytes, longest).map_err(on)?;
            self.write(&to.slice(offset, length).map_err(on)?, bytes, longest)?;
            offset += length;
        }
        *lock(&self.copies.ferry) = Some((stream, bytes));
        Ok(())
    }
}
