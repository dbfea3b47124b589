//! Decides whether device memory is registered with a fabric: a pure function of facts.

use gpu::{Allocator, DeviceName, GpuDirect};

use super::allocation::Allocation;
use super::registration::device_memory;
use crate::path::{DeviceFabric, Registration};
use crate::region::Buffer;

/// What the registration depends on at the fabric.
#[derive(Debug, Clone)]
pub struct FabricFacts {
    setting: DeviceFabric,
    /// Does the offer have FI_HMEM?
    registers_devices: bool,
    /// Why its endpoint refuses direct transfers of device memory, if it does.
    refusal: Option<String>,
}

impl FabricFacts {
    pub fn new(setting: DeviceFabric, registers_devices: bool, refusal: Option<String>) -> Self {
        Self { setting, registers_devices, refusal }
    }

    pub fn setting(&self) -> DeviceFabric {
        self.setting
    }

    /// What is known about device memory of a peer before it is asked: both rails have the same
    /// provider.
    pub(crate) fn of_remote_device(&self) -> Registration {
        match self {
            Self { registers_devices: false, .. } => Registration::NotOffered,
            Self { setting: DeviceFabric::Off, .. } => Registration::Off,
            _ => Registration::Works,
        }
    }
}

/// What the registration depends on at the memory.
#[derive(Debug, Clone)]
pub struct DeviceFacts {
    device: DeviceName,
    /// The device that the memory is located on, if this process sees it.
    resident: Option<DeviceName>,
    gpu_direct: GpuDirect,
    allocator: Allocator,
}

fn refused(cause: impl Into<String>) -> Registration {
    Registration::Refused { cause: cause.into() }
}

impl DeviceFacts {
    /// The facts of a buffer; None for host memory.
    pub(crate) fn of(buffer: &Buffer) -> Result<Option<Self>, Registration> {
        let Some((memory, resident)) = device_memory(buffer) else { return Ok(None) };
        let device = memory.mapped_for();
        let found = device.attributes(memory.address());
        let allocator = found.map_err(|error| refused(error.to_string()))?.allocator;
        let gpu_direct = device.properties().gpu_direct;
        let resident = Some(resident).filter(|_| !memory.is_of_hidden_device());
        Ok(Some(Self { device: device.name(), resident, gpu_direct, allocator }))
    }

    /// Hypothetical memory of a device.
    pub fn assumed(device: &gpu::Device, allocation: Option<Allocation>) -> Self {
        let allocator = match allocation {
            Some(Allocation::Plain) => Allocator::Plain,
            Some(Allocation::Mapped) => Allocator::Mapped { exportable: true },
            None => Allocator::Managed,
        };
        let (name, gpu_direct) = (device.name(), device.properties().gpu_direct);
        Self { device: name, resident: Some(name), gpu_direct, allocator }
    }

    pub(super) fn allocator(&self) -> Allocator {
        self.allocator
    }

    pub(super) fn wrong_allocator(&self) -> Registration {
        refused(match self.allocator {
            Allocator::Pool => {
                "it is of a stream-ordered pool (cudaMallocAsync), whose memory moves"
            }
            _ => "it is managed memory (cudaMallocManaged), which moves between host and device",
        })
    }
}

/// Why device memory is not registered with a rail, or None. If direct transfers are forced, only
/// the provider decides.
pub fn obstacle(rail: &FabricFacts, memory: &DeviceFacts) -> Option<Registration> {
    let DeviceFacts { device, resident, gpu_direct, .. } = memory;
    if !rail.registers_devices {
        return Some(Registration::NotOffered);
    }
    if rail.setting == DeviceFabric::Off {
        return Some(Registration::Off);
    }
    if let Some(cause) = &rail.refusal {
        return Some(refused(cause.as_str()));
    }
    let Some(allocation) = Allocation::of(memory.allocator) else {
        return Some(memory.wrong_allocator());
    };
    if *resident != Some(*device) {
        return Some(refused(format!("it is located on another device than {device}")));
    }
    if rail.setting == DeviceFabric::On {
        return None;
    }
    if !gpu_direct.rdma {
        return Some(refused(format!("{device} has no GPUDirect RDMA")));
    }
    if allocation == Allocation::Mapped && !gpu_direct.rdma_mapped {
        let cause = format!("{device} has no GPUDirect RDMA for mapped (VMM) memory");
        return Some(refused(cause));
    }
    if !gpu_direct.makes_writes_visible() {
        let cause =
            format!("remote writes to {device} must be flushed, and its driver cannot do that");
        return Some(refused(cause));
    }
    None
}

#[cfg(test)]
mod tests {
    use gpu::WritesOrdering;

    use super::*;

    fn rail(setting: DeviceFabric) -> FabricFacts {
        FabricFacts::new(setting, true, None)
    }

    fn memory() -> DeviceFacts {
        let device = DeviceName::cuda(0);
        let writes_ordering = WritesOrdering::Owner;
        let gpu_direct =
            GpuDirect { rdma: true, rdma_mapped: true, can_flush: true, writes_ordering };
        DeviceFacts { device, resident: Some(device), gpu_direct, allocator: Allocator::Plain }
    }

    fn with(change: impl FnOnce(&mut DeviceFacts)) -> DeviceFacts {
        let mut facts = memory();
        change(&mut facts);
        facts
    }

    fn text(registration: Option<Registration>) -> String {
        match registration {
            Some(Registration::Refused { cause }) => cause,
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn every_fact_against_registration_has_its_text() {
        let (off, probe, on) = (DeviceFabric::Off, DeviceFabric::Probe, DeviceFabric::On);
        let good = memory();
        assert_eq!(obstacle(&rail(probe), &good), None);
        assert_eq!(obstacle(&rail(on), &good), None);
        assert_eq!(obstacle(&rail(off), &good), Some(Registration::Off));
        for setting in [off, probe, on] {
            let without = FabricFacts::new(setting, false, None);
            assert_eq!(obstacle(&without, &good), Some(Registration::NotOffered));
        }
        let refuses = FabricFacts::new(on, true, Some("no direct path".to_owned()));
        assert_eq!(text(obstacle(&refuses, &good)), "no direct path");

        // Facts of the memory, whatever the setting is.
        let of_memory = [
            (
                with(|it| it.allocator = Allocator::Pool),
                "it is of a stream-ordered pool (cudaMallocAsync), whose memory moves",
            ),
            (
                with(|it| it.allocator = Allocator::Managed),
                "it is managed memory (cudaMallocManaged), which moves between host and device",
            ),
            (
                with(|it| it.resident = Some(DeviceName::cuda(1))),
                "it is located on another device than cuda:0",
            ),
        ];
        for (facts, expected) in of_memory {
            assert_eq!(text(obstacle(&rail(probe), &facts)), expected);
            assert_eq!(text(obstacle(&rail(on), &facts)), expected);
        }
        // Facts of the device, which a forced registration ignores.
        let mapped = Allocator::Mapped { exportable: true };
        let of_device = [
            (with(|it| it.gpu_direct.rdma = false), "cuda:0 has no GPUDirect RDMA"),
            (
                with(|it| {
                    it.allocator = mapped;
                    it.gpu_direct.rdma_mapped = false;
                }),
                "cuda:0 has no GPUDirect RDMA for mapped (VMM) memory",
            ),
            (
                with(|it| it.gpu_direct.can_flush = false),
                "remote writes to cuda:0 must be flushed, and its driver cannot do that",
            ),
        ];
        for (facts, expected) in of_device {
            assert_eq!(text(obstacle(&rail(probe), &facts)), expected);
            assert_eq!(obstacle(&rail(on), &facts), None);
        }
        // An order for all devices needs no flush; mapped memory is fine where it is supported.
        let ordered = with(|it| {
            it.gpu_direct.can_flush = false;
            it.gpu_direct.writes_ordering = WritesOrdering::AllDevices;
            it.allocator = mapped;
        });
        assert_eq!(obstacle(&rail(probe), &ordered), None);
    }
}
