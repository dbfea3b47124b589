//! Copies between a pool and devices, and blocks that wait for such copies.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use gpu::{Event, Implementation, Point, Slice, Stream};
use ipc::{Block, Caller};
use threads::lock;

use super::Pool;
use crate::error::Result;
use crate::error_mapping::{During, On};
use crate::loan_limit::{Borrower, LoanLimit};

/// Copies of devices to a part of a pool that may be unfinished.
#[derive(Debug)]
pub(crate) struct InFlightCopies(
    /// None if completion cannot be detected.
    Vec<Option<Point>>,
);

impl InFlightCopies {
    /// Work before a point of a stream; without a point its completion cannot be detected.
    pub(crate) fn before(point: Option<Point>) -> Self {
        Self(vec![point])
    }

    pub(crate) fn and(mut self, other: Option<Self>) -> Self {
        self.0.extend(other.into_iter().flat_map(|other| other.0));
        self
    }

    /// Returns true if all copies completed without error. Failed work may still be running.
    pub(crate) fn is_done(&self) -> bool {
        let is_done = |point: &Point| matches!(point.is_done(), Ok(true));
        self.0.iter().all(|point| point.as_ref().is_some_and(is_done))
    }
}

#[derive(Debug, Default)]
pub(super) struct Copies {
    /// Blocks that are freed once a device has finished with them. If it never does, they are freed
    /// after this process, whose end also ends the device's work. Each counts as a loan.
    busy: Mutex<Vec<(Block, InFlightCopies, Arc<LoanLimit>)>>,
    /// For copies from a device to the host, by way of these bytes.
    bounce_buffer: Mutex<Option<(Stream, Vec<u8>)>>,
    /// The default stream of the device of the last copy, and an event of it.
    default: Mutex<Option<(Stream, Event)>>,
}

impl Pool {
    /// The copies that may be unfinished after a copy into the pool failed.
    pub(crate) fn in_flight(&self) -> Option<InFlightCopies> {
        // Host pools have no stream, and no unfinished copies.
        self.stream.get().map(|stream| InFlightCopies::before(stream.point().ok()))
    }

    /// Frees a block of the caller's, and returns its loan, once no copy to it is unfinished.
    pub(crate) fn free_after(
        &self,
        block: Block,
        in_flight: InFlightCopies,
        loans: Arc<LoanLimit>,
    ) {
        lock(&self.copies.busy).push((block, in_flight, loans));
    }

    /// Frees blocks whose copies are done, and stream-owned blocks.
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

    pub(crate) fn has_pending_copies(&self) -> bool {
        !lock(&self.copies.busy).is_empty()
    }

    /// Makes `stream` wait for work that the memory's owner began on the default stream, such as a
    /// copy whose call has returned: the driver may still have to finish it.
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

    /// Host memory is not registered for devices: data of a device is copied by way of a buffer.
    pub(super) fn copy_to_host(&self, to: &Slice, from: &Slice, longest: Duration) -> Result<()> {
        const BOUNCE_BYTES: u64 = 1 << 20;
        let operation = "copy into message of pool";
        let device = from.memory().mapped_for();
        let cached = lock(&self.copies.bounce_buffer).take();
        let cached = cached.filter(|(stream, _)| stream.device().name() == device.name());
        let (stream, mut bytes) = match cached {
            Some(cached) => cached,
            None => (device.stream().during(operation).on(self.id())?, Vec::new()),
        };
        self.wait_for_default_stream(&stream, from).during(operation).on(self.id())?;
        let most = BOUNCE_BYTES.min(from.length());
        if bytes.len() < most as usize {
            bytes.resize(most as usize, 0);
        }
        let mut offset = 0;
        while offset < from.length() {
            let length = BOUNCE_BYTES.min(from.length() - offset);
            let bytes = &mut bytes[..length as usize];
            let part = from.slice(offset, length);
            let downloaded = part.and_then(|part| stream.download(&part, bytes, longest));
            let part = downloaded.and_then(|()| to.slice(offset, length));
            self.write(&part.during(operation).on(self.id())?, bytes, longest)?;
            offset += length;
        }
        *lock(&self.copies.bounce_buffer) = Some((stream, bytes));
        Ok(())
    }
}
