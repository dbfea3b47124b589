//! The memory that the messages are stored in, and whether enough is available.

use gpu::{Device, DeviceName, Implementation};
use pubsub::MemoryLocation;

use super::scenario::{MEMORY, NODES};
use crate::cli::exit::Failure;
use crate::cli::node_client::check_device;

/// The memory at each node: as requested, or of a device for each node, if there is one.
pub(super) fn places(requested: Option<MemoryLocation>) -> [MemoryLocation; NODES] {
    match requested {
        Some(place) => [place; NODES],
        None => match Device::count(Implementation::Cuda) {
            Ok(0) | Err(_) => [MemoryLocation::Host; NODES],
            Ok(count) => {
                let of = |number| MemoryLocation::Device(DeviceName::cuda(number));
                [of(0), of(1.min(count - 1))]
            }
        },
    }
}

/// Fails if a device does not exist.
pub(super) fn check_places(places: &[MemoryLocation]) -> Result<(), Failure> {
    places.iter().try_for_each(|place| check_device(*place))
}

/// Fails if too little memory is available.
pub(super) fn check() -> Result<(), Failure> {
    command::memory::check("run the demonstration", MEMORY, "End other programs first")
}
