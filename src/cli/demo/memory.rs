//! In whose memory the messages lie, and whether there is enough.

use gpu::{Device, DeviceName, Implementation};
use pubsub::MemoryLocation;

use super::scenario::{MEMORY, NODES};
use crate::cli::exit::Failure;
use crate::cli::node_client::check_device;

/// The memory at each node: what was asked for, or a device's for each, if there is one.
pub(super) fn places(asked: Option<MemoryLocation>) -> [MemoryLocation; NODES] {
    match asked {
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

/// Refuses to begin where a device is asked for that is not there.
pub(super) fn check_places(places: &[MemoryLocation]) -> Result<(), Failure> {
    places.iter().try_for_each(|place| check_device(*place))
}

/// Refuses to begin what could take memory from others.
pub(super) fn check() -> Result<(), Failure> {
    command::memory::check("run the demonstration", MEMORY, "End other programs first")
}
