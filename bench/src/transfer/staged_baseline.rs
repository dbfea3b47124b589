//! The baseline `staged`: what the links to host memory can do.

use gpu::{Device, DeviceName, Memory, Slice, Stream};
use ipc::{Layout, Segment};
use transfer::path::Operation;

use crate::worker_group::now;
use command::exit::Failure;

const SLOTS: u64 = 8;
const MIN_CHUNK: u64 = 256 << 10;
const MAX_CHUNK: u64 = 4 << 20;

/// Both memories in one process: chunks are copied into pinned host memory and out of it, at the
/// same time. The devices wait for each other, not for the process.
pub(super) struct StagedBaseline {
    into: Stream,
    out: Stream,
    to: Slice,
    from: Slice,
    slots: Memory,
    chunk: u64,
}

impl StagedBaseline {
    pub(super) fn new(
        from: &Device,
        to: DeviceName,
        operation: Operation,
        length: u64,
    ) -> Result<Self, Failure> {
        let far = Device::open(to)?;
        let (local, remote) = (from.allocate(length)?.whole(), far.allocate(length)?.whole());
        let (local, remote) = ((local, from), (remote, &far));
        let ((to, writer), (from, reader)) = match operation {
            Operation::Put => (remote, local),
            Operation::Get => (local, remote),
        };
        // Short enough that the second copy of the last chunk takes a small part of the time.
        let chunk = (length / 32).clamp(MIN_CHUNK, MAX_CHUNK);
        let segment = Segment::create(Layout::new("staged baseline", 1), (SLOTS * chunk) as usize);
        let segment = segment.map_err(|error| Failure::failed(error.to_string()))?;
        let slots = transfer::pin(&segment, reader)?;
        Ok(Self { into: reader.stream()?, out: writer.stream()?, to, from, slots, chunk })
    }

    pub(super) fn once(&self) -> Result<u64, Failure> {
        let begun = now();
        let length = self.to.length();
        let mut copied_out = Vec::new();
        for number in 0..length.div_ceil(self.chunk) {
            let at = number * self.chunk;
            let part = self.chunk.min(length - at);
            let slot = self.slots.slice(number % SLOTS * self.chunk, part)?;
            if let Some(before) = number.checked_sub(SLOTS) {
                self.into.wait_for(&copied_out[before as usize])?;
            }
            self.into.copy(&slot, &self.from.slice(at, part)?)?;
            self.out.wait_for(&self.into.point()?)?;
            self.out.copy(&self.to.slice(at, part)?, &slot)?;
            copied_out.push(self.out.point()?);
        }
        while !self.out.is_done()? {
            std::hint::spin_loop();
        }
        Ok(now() - begun)
    }
}
