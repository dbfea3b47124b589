//! The situations in the table of `docs/reference/paths.md`.

use super::facts::{
    CopyServiceState, DeviceAccess, ExportObstacle, Exportability, Fabric, Facts, Locality,
    MemoryType, Operation, Probe, Registration,
};

/// A situation of two processes, and its facts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Situation {
    /// The situation's name in reports.
    pub name: &'static str,
    /// What the choice depends on.
    pub facts: Facts,
}

/// The situations in `docs/reference/paths.md` and in `fabricast paths`.
///
/// ```
/// use transfer::path::{Policy, choose, situations};
/// for situation in situations() {
///     let choice = choose(&situation.facts, &Policy::default());
///     println!("{}: {:?}", situation.name, choice.taken());
/// }
/// ```
#[must_use]
pub fn situations() -> Vec<Situation> {
    let device = MemoryType::Device(Exportability::ByDescriptors);
    let plain = MemoryType::Device(Exportability::ByLegacyHandle);
    let segment = MemoryType::Host(Exportability::ByDescriptors);
    let private = MemoryType::Host(Exportability::Not(ExportObstacle::PrivateHostMemory));
    let pool = MemoryType::Device(Exportability::Not(ExportObstacle::StreamOrderedPool));
    let hidden = MemoryType::Device(Exportability::Not(ExportObstacle::NotExportable));
    let both = |registration: Registration, probe| Fabric::Connected {
        provider: "the provider".to_owned(),
        remote_access: true,
        local: registration.clone(),
        remote: registration,
        probe,
    };
    let host_only = both(Registration::NotOffered, Probe::NotMade);
    let works = both(Registration::Works, Probe::Passed);
    let cause = "64 KiB arrived 5 µs after its notice".to_owned();
    let fails_probe = both(Registration::Works, Probe::Failed { cause });
    let off = both(Registration::Off, Probe::NotMade);
    let cause = "cuda:0 has no GPUDirect RDMA".to_owned();
    let refused = both(Registration::Refused { cause }, Probe::NotMade);
    let no_fabric = Fabric::None { cause: "none was requested".to_owned() };
    let (same_process, same_machine, other_machine) =
        (Locality::SameProcess, Locality::SameMachine, Locality::OtherMachine);
    let no_descriptor_passing =
        Locality::NoDescriptorPassing { cause: "no common directory".to_owned() };
    let (direct, unseen) = (DeviceAccess::Direct, DeviceAccess::NotTried);
    let cause = "import memory on cuda:0: CUDA_ERROR_INVALID_DEVICE".to_owned();
    let refused_mapping = DeviceAccess::Refused { cause };
    let (same, none, no_device) = (DeviceAccess::Same, DeviceAccess::None, DeviceAccess::NoDevice);
    let pools = "device to device, VMM memory (pools, expandable segments)";
    let not_visible = "device to device, peer's device not visible here (CUDA_VISIBLE_DEVICES)";
    let no_file =
        "device to device, the peer's device has no device file here (a pod with one GPU)";
    let with_service = "the same, with a copy service that sees both devices";
    let hidden_pieces = "device to device, VMM memory without an exportable handle";
    let not_passed = "device to device, no descriptor can be passed";
    let private_host = "host to private host memory";
    let by_itself = "other machine, device to device, probe passed";
    let host_alone = "other machine, device to device, provider without device memory";
    let no_rdma = "other machine, device to device, memory that cannot be registered";
    let unreliable = "other machine, device to device, probe failed";
    let switched_off = "other machine, device to device, `FABRICAST_DEVICE_FABRIC=off`";
    let rows = [
        ("same process, two devices", &same_process, device, &direct, &host_only),
        (pools, &same_machine, device, &direct, &host_only),
        ("device to device, cudaMalloc memory", &same_machine, plain, &same, &host_only),
        ("device to device, no peer access", &same_machine, device, &none, &host_only),
        (not_visible, &same_machine, device, &unseen, &host_only),
        (no_file, &same_machine, device, &refused_mapping, &host_only),
        (with_service, &same_machine, device, &refused_mapping, &host_only),
        ("device to device, cudaMallocAsync memory", &same_machine, pool, &direct, &host_only),
        (hidden_pieces, &same_machine, hidden, &direct, &host_only),
        (not_passed, &no_descriptor_passing, device, &direct, &host_only),
        ("to host memory in a shared segment", &same_machine, segment, &same, &works),
        (private_host, &same_machine, private, &no_device, &works),
        ("other machine, host to host", &other_machine, private, &no_device, &works),
        (by_itself, &other_machine, device, &unseen, &works),
        (host_alone, &other_machine, device, &unseen, &host_only),
        (no_rdma, &other_machine, device, &unseen, &refused),
        (unreliable, &other_machine, device, &unseen, &fails_probe),
        (switched_off, &other_machine, device, &unseen, &off),
        ("other machine, no fabric", &other_machine, device, &unseen, &no_fabric),
    ];
    let situation = |(name, locality, remote, device_access, fabric): (
        _,
        &Locality,
        _,
        &DeviceAccess,
        &Fabric,
    )| {
        // Memory of a device, unless no device takes part.
        let local = if *device_access == no_device { segment } else { device };
        let operation = Operation::Put;
        let (locality, fabric) = (locality.clone(), fabric.clone());
        let device_access = device_access.clone();
        let copy_service = if name == with_service {
            CopyServiceState::Available
        } else {
            let cause = "no socket in the directory".to_owned();
            CopyServiceState::Unavailable { cause }
        };
        Situation {
            name,
            facts: Facts {
                operation,
                locality,
                local,
                remote,
                device_access,
                copy_service,
                fabric,
            },
        }
    };
    rows.into_iter().map(situation).collect()
}
