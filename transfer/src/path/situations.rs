//! What readers are told of: the table of `docs/paths.md`.

use super::facts::{
    Fabric, Facts, Leaving, Locality, Operation, Place, Reach, Registration, Stays,
};

/// Something that happens between two processes, and what a choice depends on then.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Situation {
    /// As people call it.
    pub name: &'static str,
    /// What is the case.
    pub facts: Facts,
}

/// The situations that are told of in `docs/paths.md`, and by `fabricast paths`.
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
    let device = Place::Device(Leaving::ByDescriptors);
    let plain = Place::Device(Leaving::ByLegacyHandle);
    let segment = Place::Host(Leaving::ByDescriptors);
    let private = Place::Host(Leaving::Not(Stays::PrivateHostMemory));
    let pool = Place::Device(Leaving::Not(Stays::StreamOrderedPool));
    let hidden = Place::Device(Leaving::Not(Stays::NotExportable));
    let both = |local, remote| Fabric::Connected {
        provider: "the provider".to_owned(),
        remote_access: true,
        local,
        remote,
    };
    let host_only = || both(Registration::NotOffered, Registration::NotOffered);
    let (beside, far) = (Locality::SameMachine, Locality::OtherMachine);
    let rows = [
        ("one process, two devices", Locality::SameProcess, device, Reach::Direct, host_only()),
        (
            "device to device, VMM memory (pools, expandable segments)",
            beside.clone(),
            device,
            Reach::Direct,
            host_only(),
        ),
        ("device to device, cudaMalloc memory", beside.clone(), plain, Reach::Same, host_only()),
        ("device to device, no peer access", beside.clone(), device, Reach::None, host_only()),
        (
            "device to device, peer's device not visible here",
            beside.clone(),
            device,
            Reach::Invisible,
            host_only(),
        ),
        (
            "device to device, cudaMallocAsync memory",
            beside.clone(),
            pool,
            Reach::Direct,
            host_only(),
        ),
        (
            "device to device, VMM memory without an exportable handle",
            beside.clone(),
            hidden,
            Reach::Direct,
            host_only(),
        ),
        (
            "device to device, no descriptor can be passed",
            Locality::NoWay { why: "no common directory".to_owned() },
            device,
            Reach::Direct,
            host_only(),
        ),
        (
            "to host memory in a shared segment",
            beside.clone(),
            segment,
            Reach::Same,
            both(Registration::Works, Registration::Works),
        ),
        (
            "host to private host memory",
            beside,
            private,
            Reach::NoDevice,
            both(Registration::Works, Registration::Works),
        ),
        (
            "other machine, host to host",
            far.clone(),
            private,
            Reach::NoDevice,
            both(Registration::Works, Registration::Works),
        ),
        (
            "other machine, device to device, registered by the fabric",
            far.clone(),
            device,
            Reach::Invisible,
            both(Registration::Works, Registration::Works),
        ),
        (
            "other machine, device to device, provider without device memory",
            far.clone(),
            device,
            Reach::Invisible,
            host_only(),
        ),
        (
            "other machine, device to device, provider that cannot be relied on",
            far.clone(),
            device,
            Reach::Invisible,
            both(Registration::NotSafe, Registration::NotSafe),
        ),
        (
            "other machine, no fabric",
            far,
            device,
            Reach::Invisible,
            Fabric::None { why: "none was asked for".to_owned() },
        ),
    ];
    let situation = |(name, locality, remote, reach, fabric)| {
        let (operation, local) = (Operation::Put, device);
        Situation { name, facts: Facts { operation, locality, local, remote, reach, fabric } }
    };
    rows.into_iter().map(situation).collect()
}
