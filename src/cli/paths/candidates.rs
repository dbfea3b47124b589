//! What bytes could go between: memory of this process, and of a peer.

use gpu::{Device, Implementation, Uuid};
use transfer::path::{Leaving, Locality, Stays};
use transfer::{RegionDescriptor, Whereabouts};

/// Memory, as people call it.
pub(super) struct Named {
    pub(super) name: String,
    /// The device that it is on, if that is for the reader to know.
    pub(super) device: Option<String>,
    pub(super) memory: Whereabouts,
}

/// The devices that have part in it: stand-ins only where there is nothing better, or where
/// the peer's region lies on one.
pub(super) fn devices(region: Option<&RegionDescriptor>) -> Vec<Device> {
    let mut all = Device::survey().devices;
    let theirs = region.and_then(|region| region.device);
    let is_theirs = |device: &&Device| Some(device.properties().uuid) == theirs;
    let implementation = match all.iter().find(is_theirs).or(all.first()) {
        Some(device) => device.name().implementation,
        None => Implementation::StandIn,
    };
    all.retain(|device| device.name().implementation == implementation);
    all
}

/// Memory that this process could have.
pub(super) fn local(devices: &[Device]) -> Vec<Named> {
    let host = Named {
        name: "host memory".to_owned(),
        device: None,
        memory: Whereabouts::on_host(Leaving::ByDescriptors),
    };
    let of_devices = devices.iter().map(|device| Named {
        name: device.name().to_string(),
        device: None,
        memory: Whereabouts::on_device(device.properties().uuid, Leaving::ByDescriptors),
    });
    std::iter::once(host).chain(of_devices).collect()
}

/// Memory that the peer could have, on the devices that both could see.
pub(super) fn remote(devices: &[Device], locality: Option<&Locality>) -> Vec<Named> {
    let named = |name: &str, device: Option<&Device>, memory| {
        let device = device.map(|device| device.name().to_string());
        Named { name: name.to_owned(), device, memory }
    };
    let segment = Whereabouts::on_host(Leaving::ByDescriptors);
    let host = named("host memory of a shared segment", None, segment);
    if locality == Some(&Locality::OtherMachine) {
        let unseen = Whereabouts::on_device(Uuid([0xff; 16]), Leaving::ByDescriptors);
        return vec![named("device memory", None, unseen), host];
    }
    let if_offered = |is_offered, leaving, or| match is_offered {
        true => leaving,
        false => Leaving::Not(or),
    };
    let of_pools = devices.iter().map(|device| {
        let properties = device.properties();
        let is_offered = properties.handle_types.file_descriptor;
        let leaving = if_offered(is_offered, Leaving::ByDescriptors, Stays::NotExportable);
        let memory = Whereabouts::on_device(properties.uuid, leaving);
        named("device memory of a pool", Some(device), memory)
    });
    let plain = devices.iter().map(|device| {
        let properties = device.properties();
        let is_offered = properties.handle_types.legacy;
        let leaving = if_offered(is_offered, Leaving::ByLegacyHandle, Stays::NoLegacyHandle);
        let memory = Whereabouts::on_device(properties.uuid, leaving);
        named("device memory of cudaMalloc", Some(device), memory)
    });
    of_pools.chain(plain).chain([host]).collect()
}

/// The region that was asked about.
pub(super) fn region(region: &RegionDescriptor, devices: &[Device]) -> Named {
    let on = devices.iter().find(|device| Some(device.properties().uuid) == region.device);
    Named {
        name: format!("region {}", region.number),
        device: on.map(|device| device.name().to_string()),
        memory: region.into(),
    }
}
