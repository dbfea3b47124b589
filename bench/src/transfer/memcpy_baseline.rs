//! The baseline of a transfer.

use gpu::{Device, DeviceName, Slice, Stream};
use transfer::path::Operation;

use crate::worker_group::now;
use command::exit::Failure;

/// The baseline `memcpy`: both memories in one process, a copy, and a wait for it.
pub(super) struct MemcpyBaseline {
    stream: Stream,
    to: Slice,
    from: Slice,
}

impl MemcpyBaseline {
    pub(super) fn new(
        from: &Device,
        to: DeviceName,
        operation: Operation,
        length: u64,
    ) -> Result<Self, Failure> {
        let far = Device::open(to)?;
        from.enable_peer(&far)?;
        let local = from.allocate(length)?.whole();
        let remote = far.allocate(length)?.whole();
        let stream = from.stream()?;
        let (to, from) = match operation {
            Operation::Put => (remote, local),
            Operation::Get => (local, remote),
        };
        Ok(Self { stream, to, from })
    }

    pub(super) fn once(&self) -> Result<u64, Failure> {
        let begun = now();
        self.stream.copy(&self.to, &self.from)?;
        while !self.stream.is_done()? {
            std::hint::spin_loop();
        }
        Ok(now() - begun)
    }
}
