//! Scratch memory of a probe, of the same kind as the memory of the transfers in question.

use std::time::Instant;

use fabric::MemoryRegion;
use gpu::{Memory, Stream};

use super::arrival::{Arrival, Look, Snapshot};
use super::plan::{SCRATCH_LENGTH, Step};
use crate::device_memory::{Allocation, LocalEnd, Part, Pattern};
use crate::error::{Error, ErrorKind, Result};
use crate::host_buffer::HostBuffer;
use crate::rail::staging::part as slice_of;
use crate::region::Buffer;
use crate::stream_copies::StreamCopies;

const OPERATION: &str = "probe device memory";
/// The longest [tail](Step::tail), behind the mirror of the memory.
const TAIL_LENGTH: u64 = 4096;

/// Registered memory for the bytes of a probe.
///
/// Copies of these bytes use a stream of their own: behind other copies a look would come later,
/// and see less.
pub(in crate::rail) struct Scratch {
    // First, so that it is dropped first.
    region: MemoryRegion,
    memory: ScratchMemory,
    /// When the last look began.
    began: Instant,
}

enum ScratchMemory {
    Host {
        buffer: HostBuffer,
        seen: Option<Snapshot>,
        /// An operation was begun, and not [polled](Scratch::poll).
        is_done: bool,
    },
    Device {
        memory: Memory,
        /// Pinned memory that its bytes are copied to and from.
        mirror: HostBuffer,
        copies: Box<StreamCopies<()>>,
        failure: Option<Error>,
    },
}

impl Scratch {
    /// Allocates memory, and registers it.
    pub(in crate::rail) fn new(
        end: &LocalEnd,
        register: impl FnOnce(Buffer) -> Result<MemoryRegion>,
    ) -> Result<Self> {
        let (memory, buffer) = match end {
            LocalEnd::Host => {
                let buffer = HostBuffer::new(SCRATCH_LENGTH)?;
                let memory =
                    ScratchMemory::Host { buffer: buffer.clone(), seen: None, is_done: false };
                (memory, Buffer::Host(buffer))
            }
            LocalEnd::Device(device, allocation) => {
                let allocated = match allocation {
                    Allocation::Plain => device.allocate(SCRATCH_LENGTH),
                    Allocation::Mapped => device.allocate_shared(SCRATCH_LENGTH, &[]),
                };
                let memory = allocated.map_err(|error| Error::caused_by(OPERATION, error))?;
                let mirror = HostBuffer::new(SCRATCH_LENGTH + TAIL_LENGTH)?;
                mirror.pinned_for(device)?;
                let copies = Box::new(StreamCopies::new(device)?);
                let buffer = Buffer::Device(memory.clone());
                (ScratchMemory::Device { memory, mirror, copies, failure: None }, buffer)
            }
        };
        Ok(Self { region: register(buffer)?, memory, began: Instant::now() })
    }

    pub(in crate::rail) fn region(&self) -> &MemoryRegion {
        &self.region
    }

    /// Begins to write the pattern of a step to its parts.
    pub(in crate::rail) fn begin_fill(&mut self, step: &Step, pattern: Pattern) -> Result<()> {
        match &mut self.memory {
            ScratchMemory::Host { buffer, is_done, .. } => {
                for part in step.parts() {
                    buffer.write(part.offset(), &pattern.bytes(*part))?;
                }
                *is_done = true;
            }
            ScratchMemory::Device { memory, mirror, copies, .. } => {
                let pinned = mirror.pinned_for(memory.mapped_for())?;
                for part in step.parts() {
                    let (offset, length) = (part.offset(), part.length());
                    mirror.write(offset, &pattern.bytes(*part))?;
                    let to = slice_of(memory, offset, length)?;
                    let from = slice_of(&pinned, offset, length)?;
                    copies.begin((), |stream: &Stream| stream.copy(&to, &from));
                }
            }
        }
        Ok(())
    }

    /// Begins to look at the parts of a step: the tail first.
    pub(in crate::rail) fn begin_look(&mut self, step: &Step) -> Result<()> {
        self.began = Instant::now();
        let tail = step.tail();
        match &mut self.memory {
            ScratchMemory::Host { buffer, seen, is_done } => {
                *seen = Some(snapshot(buffer, tail, tail.offset(), step)?);
                *is_done = true;
            }
            ScratchMemory::Device { memory, mirror, copies, .. } => {
                let pinned = mirror.pinned_for(memory.mapped_for())?;
                let parts = step.parts().iter().map(|part| (*part, part.offset()));
                for (part, to) in [(tail, SCRATCH_LENGTH)].into_iter().chain(parts) {
                    let from = slice_of(memory, part.offset(), part.length())?;
                    let to = slice_of(&pinned, to, part.length())?;
                    copies.begin((), |stream: &Stream| stream.copy(&to, &from));
                }
            }
        }
        Ok(())
    }

    /// Is the last operation over? True once.
    pub(in crate::rail) fn poll(&mut self) -> Result<bool> {
        match &mut self.memory {
            ScratchMemory::Host { is_done, .. } => Ok(std::mem::take(is_done)),
            ScratchMemory::Device { copies, failure, .. } => {
                let before = copies.count();
                while let Some(((), _, outcome)) = copies.next_done() {
                    if let Err(error) = outcome {
                        failure.get_or_insert(error);
                    }
                }
                let is_over = before > 0 && copies.count() == 0;
                match failure.take_if(|_| is_over) {
                    Some(error) => Err(error),
                    None => Ok(is_over),
                }
            }
        }
    }

    /// The verdict on announced bytes, when the last look at them is over. Begins another look if
    /// they are to be looked at again.
    pub(in crate::rail) fn judge(&mut self, arrival: &mut Arrival) -> Result<Option<Look>> {
        if !self.poll()? {
            return Ok(None);
        }
        let step = arrival.step();
        let seen = match &mut self.memory {
            ScratchMemory::Host { seen, .. } => seen
                .take()
                .ok_or_else(|| Error::new(OPERATION, ErrorKind::Failed, "nothing was looked at"))?,
            ScratchMemory::Device { mirror, .. } => {
                snapshot(mirror, step.tail(), SCRATCH_LENGTH, step)?
            }
        };
        let verdict = arrival.look(&seen, self.began);
        if verdict == Look::Again {
            self.begin_look(step)?;
        }
        Ok(Some(verdict))
    }
}

/// Reads the tail, which is at `tail_at`, and then the parts.
fn snapshot(buffer: &HostBuffer, tail: Part, tail_at: u64, step: &Step) -> Result<Snapshot> {
    let read = |offset, length| {
        let mut bytes = vec![0; length as usize];
        buffer.read(offset, &mut bytes).map(|()| bytes)
    };
    let tail = read(tail_at, tail.length())?;
    let parts = step.parts().iter().map(|part| read(part.offset(), part.length()));
    Ok(Snapshot::new(tail, parts.collect::<Result<_>>()?))
}
