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
    let both = |registration| Fabric::Connected {
        provider: "the provider".to_owned(),
        remote_access: true,
        local: registration,
        remote: registration,
    };
    let (host_only, works) = (both(Registration::NotOffered), both(Registration::Works));
    let not_safe = both(Registration::NotSafe);
    let no_fabric = Fabric::None { why: "none was asked for".to_owned() };
    let (one, beside, far) = (Locality::SameProcess, Locality::SameMachine, Locality::OtherMachine);
    let no_way = Locality::NoWay { why: "no common directory".to_owned() };
    let (direct, unseen) = (Reach::Direct, Reach::Invisible);
    let pools = "device to device, VMM memory (pools, expandable segments)";
    let hidden_pieces = "device to device, VMM memory without an exportable handle";
    let by_itself = "other machine, device to device, registered by the fabric";
    let host_alone = "other machine, device to device, provider without device memory";
    let unreliable = "other machine, device to device, provider that cannot be relied on";
    let rows = [
        ("one process, two devices", &one, device, direct, &host_only),
        (pools, &beside, device, direct, &host_only),
        ("device to device, cudaMalloc memory", &beside, plain, Reach::Same, &host_only),
        ("device to device, no peer access", &beside, device, Reach::None, &host_only),
        ("device to device, peer's device not visible here", &beside, device, unseen, &host_only),
        ("device to device, cudaMallocAsync memory", &beside, pool, direct, &host_only),
        (hidden_pieces, &beside, hidden, direct, &host_only),
        ("device to device, no descriptor can be passed", &no_way, device, direct, &host_only),
        ("to host memory in a shared segment", &beside, segment, Reach::Same, &works),
        ("host to private host memory", &beside, private, Reach::NoDevice, &works),
        ("other machine, host to host", &far, private, Reach::NoDevice, &works),
        (by_itself, &far, device, unseen, &works),
        (host_alone, &far, device, unseen, &host_only),
        (unreliable, &far, device, unseen, &not_safe),
        ("other machine, no fabric", &far, device, unseen, &no_fabric),
    ];
    let situation = |(name, locality, remote, reach, fabric): (_, &Locality, _, _, &Fabric)| {
        let (operation, local) = (Operation::Put, device);
        let (locality, fabric) = (locality.clone(), fabric.clone());
        Situation { name, facts: Facts { operation, locality, local, remote, reach, fabric } }
    };
    rows.into_iter().map(situation).collect()
}
