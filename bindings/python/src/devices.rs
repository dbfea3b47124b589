//! Devices of this process, which stay open.

use std::sync::Mutex;

use gpu::{Device, DeviceName};
use ipc::PerProcess;
use threads::lock;

static OPEN: PerProcess<Mutex<Vec<Device>>> = PerProcess::new();

/// A device, which stays open until the process ends: a call with an array would otherwise open it
/// several times, which takes 0.25 ms each. The library that made the array keeps the context of the
/// device, too.
pub(crate) fn open_device(name: DeviceName) -> gpu::Result<Device> {
    let device = Device::open(name)?;
    let mut open = lock(OPEN.get());
    if !open.iter().any(|other| other.name() == name) {
        open.push(device.clone());
    }
    Ok(device)
}
