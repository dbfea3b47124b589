//! Copies between a pool and devices, and blocks that such a copy has not let go of.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use gpu::{Event, Implementation, Point, Slice, Stream};
use ipc::{Block, Caller};

use super::Pool;
use crate::error::Result;
use crate::error_mapping;
use crate::loan_limit::{Borrower, LoanLimit};
use crate::lock::lock;

/// What devices do with a part of a pool, and may go on doing though nobody waits for them.
#[derive(Debug)]
pub(crate) struct InFlightCopies(
    /// None if nobody can tell.
    Vec<Option<Point>>,
);

impl InFlightCopies {
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
    busy: Mutex<Vec<(Block, InFlightCopies, Arc<LoanLimit>)>>,
    /// From a device, by way of these bytes of the caller's.
    bounce_buffer: Mutex<Option<(Stream, Vec<u8>)>>,
    /// The default stream of the device that was copied from last, and a point in it.
    default: Mutex<Option<(Stream, Event)>>,
}

impl Pool {
    /// After a copy into the pool has failed: what may still go on.
    pub(crate) fn in_flight(&self) -> Option<InFlightCopies> {
        // None was ever made for the host, where nothing goes on after a call.
        self.stream.get().map(|stream| InFlightCopies::before(stream.point().ok()))
    }

    /// Gives a block of the caller's back when nothing is copied there any more, and with it the loan
    /// that it is.
    pub(crate) fn free_after(
        &self,
        block: Block,
        in_flight: InFlightCopies,
        loans: Arc<LoanLimit>,
    ) {
        lock(&self.copies.busy).push((block, in_flight, loans));
    }

    /// Gives back what was kept for a copy that is done by now, and what anybody left to streams.
    pub(crate) fn free_completed(&self, caller: &Caller<'_>) {
        self.poll_streams(caller);
        if let Err(error) = self.control().collect(caller) {
            tracing::debug!(%error, "blocks owned by streams cannot be freed yet");
        }
        let mut busy = lock(&self.copies.busy);
        let owner = ipc::Owner::participant(caller.me);
        for (block, _, loans) in busy.extract_if(.., |(_, in_flight, _)| in_flight.is_done()) {
            self.control().dispose(caller, block, owner);
            loans.give_back(Borrower::Transient);
        }
    }

    /// Is anything kept for a copy?
    pub(crate) fn has_pending_copies(&self) -> bool {
        !lock(&self.copies.busy).is_empty()
    }

    /// What follows on `stream` waits for what the memory's owner began without naming a stream,
    /// such as a copy to it that seems to be over: the driver may still have the last of it.
    pub(super) fn wait_for_default_stream(&self, stream: &Stream, from: &Slice) -> gpu::Result<()> {
        let device = from.memory().mapped_for();
        if device.name().implementation == Implementation::Emulated {
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
        const BOUNCE_BYTES: u64 = 1 << 20;
        let on = |cause| error_mapping::from_device("copy into a message", cause).on(self.id());
        let device = from.memory().mapped_for();
        let kept = lock(&self.copies.bounce_buffer).take();
        let kept = kept.filter(|(stream, _)| stream.device().name() == device.name());
        let (stream, mut bytes) = match kept {
            Some(kept) => kept,
            None => (device.stream().map_err(on)?, Vec::new()),
        };
        self.wait_for_default_stream(&stream, from).map_err(on)?;
        let most = BOUNCE_BYTES.min(from.length());
        if bytes.len() < most as usize {
            bytes.resize(most as usize, 0);
        }
        let mut offset = 0;
        while offset < from.length() {
            let length = BOUNCE_BYTES.min(from.length() - offset);
            let bytes = &mut bytes[..length as usize];
            let part = from.slice(offset, length).map_err(on)?;
            stream.download(&part, bytes, longest).map_err(on)?;
            self.write(&to.slice(offset, length).map_err(on)?, bytes, longest)?;
            offset += length;
        }
        *lock(&self.copies.bounce_buffer) = Some((stream, bytes));
        Ok(())
    }
}
