//! Devices whose memory network cards write to: their writes are flushed before they are announced.

use std::sync::Mutex;

use gpu::Device;
use threads::lock;

/// Makes writes of network cards visible, where the device demands it. Without a flush of the driver
/// such memory is used only if that is forced.
pub fn flush(device: &Device) -> gpu::Result<()> {
    match device.properties().gpu_direct.can_flush {
        true => device.flush_remote_writes(),
        false => Ok(()),
    }
}

/// The devices of an agent whose memory peers may write to. Of all peers and rails: the notice of
/// some bytes may come by another rail than the bytes, or in the next session.
#[derive(Debug, Default)]
pub(crate) struct WrittenDevices(Mutex<Vec<Device>>);

impl WrittenDevices {
    /// From now on peers may write to memory of this device.
    pub(crate) fn add(&self, device: &Device) {
        let mut devices = lock(&self.0);
        if device.properties().gpu_direct.needs_flush()
            && devices.iter().all(|known| known.name() != device.name())
        {
            devices.push(device.clone());
        }
    }

    /// Makes all writes visible that completed before.
    pub(crate) fn flush(&self) -> gpu::Result<()> {
        let devices = lock(&self.0).clone();
        devices.iter().try_for_each(flush)
    }
}
