//! In whose memory the messages lie, and whether there is enough.

use gpu::{Device, DeviceName, Implementation};
use pubsub::MemoryPlace;

use super::cast::{MEMORY, NODES};
use crate::cli::exit::{Exit, Failure};
use crate::cli::membership::check_device;
use crate::cli::progress::amount;

/// The memory at each node: what was asked for, or a device's for each, if there is one.
pub(super) fn places(asked: Option<MemoryPlace>) -> [MemoryPlace; NODES] {
    match asked {
        Some(place) => [place; NODES],
        None => match Device::count(Implementation::Cuda) {
            Ok(0) | Err(_) => [MemoryPlace::Host; NODES],
            Ok(count) => {
                let of = |number| MemoryPlace::Device(DeviceName::cuda(number));
                [of(0), of(1.min(count - 1))]
            }
        },
    }
}

/// Refuses to begin where a device is asked for that is not there.
pub(super) fn check_places(places: &[MemoryPlace]) -> Result<(), Failure> {
    places.iter().try_for_each(|place| check_device(*place))
}

/// Refuses to begin what could take memory from others.
pub(super) fn check() -> Result<(), Failure> {
    match available() {
        Some(bytes) if bytes < MEMORY => {
            let [needs, has] = [MEMORY, bytes].map(|bytes| amount(bytes as f64));
            let why =
                format!("the demonstration takes up to {needs} of memory; {has} are available");
            Err(Failure::new(Exit::TooMuch, why))
        }
        _ => Ok(()),
    }
}

/// What the host has, or the group that this process is in may still take.
fn available() -> Option<u64> {
    let of_group = || {
        let number = |name: &str| {
            let text = std::fs::read_to_string(format!("/sys/fs/cgroup/memory.{name}")).ok()?;
            text.trim().parse::<u64>().ok()
        };
        Some(number("max")?.saturating_sub(number("current")?))
    };
    let of_host = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kibibytes << 10)
    });
    of_host.into_iter().chain(of_group()).min()
}
