//! The kinds of memory of this process and of a peer that a transfer could use.

use gpu::{Device, Implementation, Uuid};
use transfer::path::{ExportObstacle, Exportability, Locality};
use transfer::{MemoryAttributes, RegionDescriptor};

use super::NamedMemory;

/// The devices to consider: emulated ones only without others, or where the peer's region is on
/// one.
pub(super) fn devices(region: Option<&RegionDescriptor>) -> Vec<Device> {
    let mut all = Device::survey().devices;
    let peer_uuid = region.and_then(|region| region.device);
    let is_of_peer = |device: &&Device| Some(device.properties().uuid) == peer_uuid;
    let implementation = match all.iter().find(is_of_peer).or(all.first()) {
        Some(device) => device.name().implementation,
        None => Implementation::Emulated,
    };
    all.retain(|device| device.name().implementation == implementation);
    all
}

/// Kinds of memory that this process could have.
pub(super) fn local(devices: &[Device]) -> Vec<NamedMemory> {
    let host = NamedMemory {
        name: "host memory".to_owned(),
        device: None,
        memory: MemoryAttributes::on_host(Exportability::ByDescriptors),
    };
    let of_devices = devices.iter().map(|device| NamedMemory {
        name: device.name().to_string(),
        device: None,
        memory: MemoryAttributes::on_device(device.properties().uuid, Exportability::ByDescriptors),
    });
    std::iter::once(host).chain(of_devices).collect()
}

/// Kinds of memory that the peer could have, on the devices that both see.
pub(super) fn remote(devices: &[Device], locality: Option<&Locality>) -> Vec<NamedMemory> {
    let named = |name: &str, device: Option<&Device>, memory| {
        let device = device.map(|device| device.name().to_string());
        NamedMemory { name: name.to_owned(), device, memory }
    };
    let segment = MemoryAttributes::on_host(Exportability::ByDescriptors);
    let host = named("host memory of a shared segment", None, segment);
    if locality == Some(&Locality::OtherMachine) {
        let unseen = MemoryAttributes::on_device(Uuid([0xff; 16]), Exportability::ByDescriptors);
        return vec![named("device memory", None, unseen), host];
    }
    let on = |device: &Device, name, is_offered, exportability, obstacle| {
        let exportability = if is_offered { exportability } else { Exportability::Not(obstacle) };
        let memory = MemoryAttributes::on_device(device.properties().uuid, exportability);
        named(name, Some(device), memory)
    };
    let of_pools = devices.iter().map(|device| {
        let is_offered = device.properties().handle_types.file_descriptor;
        let (exportability, obstacle) =
            (Exportability::ByDescriptors, ExportObstacle::NotExportable);
        on(device, "device memory of a pool", is_offered, exportability, obstacle)
    });
    let plain = devices.iter().map(|device| {
        let is_offered = device.properties().handle_types.legacy;
        let (exportability, obstacle) =
            (Exportability::ByLegacyHandle, ExportObstacle::NoLegacyHandle);
        on(device, "device memory of cudaMalloc", is_offered, exportability, obstacle)
    });
    of_pools.chain(plain).chain([host]).collect()
}

pub(super) fn region(region: &RegionDescriptor, devices: &[Device]) -> NamedMemory {
    let on = devices.iter().find(|device| Some(device.properties().uuid) == region.device);
    NamedMemory {
        name: format!("region {}", region.number),
        device: on.map(|device| device.name().to_string()),
        memory: region.into(),
    }
}
