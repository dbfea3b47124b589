//! What a transfer is measured against.

use gpu::{Device, DeviceName, Slice, Stream};
use transfer::path::Operation;

use super::side::now;
use crate::cli::bench::share::of_device;
use crate::cli::exit::Failure;

/// The rival: both memories in one process, a copy, and a wait for it.
pub(super) struct Raw {
    stream: Stream,
    to: Slice,
    from: Slice,
}

impl Raw {
    pub(super) fn new(
        from: &Device,
        to: DeviceName,
        operation: Operation,
        length: u64,
    ) -> Result<Self, Failure> {
        let far = Device::open(to).map_err(of_device)?;
        from.enable_peer(&far).map_err(of_device)?;
        let mine = from.allocate(length).map_err(of_device)?.whole();
        let theirs = far.allocate(length).map_err(of_device)?.whole();
        let stream = from.stream().map_err(of_device)?;
        let (to, from) = match operation {
            Operation::Put => (theirs, mine),
            Operation::Get => (mine, theirs),
        };
        Ok(Self { stream, to, from })
    }

    pub(super) fn once(&self) -> Result<u64, Failure> {
        let begun = now()?;
        self.stream.copy(&self.to, &self.from).map_err(of_device)?;
        while !self.stream.is_done().map_err(of_device)? {
            std::hint::spin_loop();
        }
        Ok(now()? - begun)
    }
}
