//! The table of paths.

use std::fmt;

use serde::Serialize;

use super::Path;
use super::facts::{
    CopyServiceState, DeviceAccess, ExportObstacle, Exportability, Fabric, Facts, Locality, Probe,
    Registration,
};
use super::policy::Policy;
use super::reason::Reason;

/// The verdict on a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", rename_all = "lowercase")]
pub enum Verdict {
    /// The path is taken.
    Taken,
    /// The path is not taken, for this reason.
    Refused(Reason),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taken => f.write_str("taken"),
            Self::Refused(reason) => write!(f, "refused: {reason}"),
        }
    }
}

/// A path and its verdict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Candidate {
    /// The path.
    pub path: Path,
    /// The verdict.
    #[serde(flatten)]
    pub verdict: Verdict,
}

/// A verdict for every path, in the order of preference.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Choice {
    /// Every path, once.
    pub candidates: Vec<Candidate>,
}

impl Choice {
    /// The path taken, if any.
    #[must_use]
    pub fn taken(&self) -> Option<Path> {
        let taken = self.candidates.iter().find(|candidate| candidate.verdict == Verdict::Taken);
        taken.map(|candidate| candidate.path)
    }

    /// The first path that was preferred and expected, but refused: its reason makes the choice a
    /// fallback.
    #[must_use]
    pub fn fallback(&self) -> Option<(Path, &Reason)> {
        self.fallbacks().next()
    }

    /// All paths that were preferred and expected, but refused, with their reasons.
    pub fn fallbacks(&self) -> impl Iterator<Item = (Path, &Reason)> {
        let wanted = self.candidates.iter();
        wanted.take_while(|candidate| candidate.verdict != Verdict::Taken).filter_map(|candidate| {
            match &candidate.verdict {
                Verdict::Refused(reason) if !reason.is_expected() => Some((candidate.path, reason)),
                _ => None,
            }
        })
    }

    /// All reasons in one line, for errors.
    #[must_use]
    pub fn reasons(&self) -> String {
        let refused = self.candidates.iter().filter_map(|candidate| match &candidate.verdict {
            Verdict::Refused(reason) => Some(format!("{}: {reason}", candidate.path)),
            Verdict::Taken => None,
        });
        refused.collect::<Vec<_>>().join("; ")
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, candidate) in self.candidates.iter().enumerate() {
            if number > 0 {
                writeln!(f)?;
            }
            write!(f, "{:<14} {}", candidate.path, candidate.verdict)?;
        }
        Ok(())
    }
}

/// Chooses among all paths.
///
/// ```
/// use transfer::path::{
///     CopyServiceState, DeviceAccess, Exportability, Fabric, Facts, Locality, MemoryType, Operation,
///     Path, Policy, choose,
/// };
/// let mut facts = Facts {
///     operation: Operation::Put,
///     locality: Locality::SameMachine,
///     local: MemoryType::Device(Exportability::ByDescriptors),
///     remote: MemoryType::Device(Exportability::ByLegacyHandle),
///     device_access: DeviceAccess::Direct,
///     copy_service: CopyServiceState::Unavailable { cause: "no socket".into() },
///     fabric: Fabric::None { cause: "none was requested".into() },
/// };
/// assert_eq!(choose(&facts, &Policy::default()).taken(), Some(Path::CudaIpc));
/// facts.device_access = DeviceAccess::None;
/// let choice = choose(&facts, &Policy::default());
/// assert_eq!(choice.taken(), Some(Path::HostStaged));
/// assert!(choice.reasons().contains("cannot reach each other")); // every path has a reason
/// ```
#[must_use]
pub fn choose(facts: &Facts, policy: &Policy) -> Choice {
    let mut taken = None;
    let mut candidates = Vec::with_capacity(Path::ALL.len());
    for path in policy.order() {
        // An obstacle says more than the wishes of the user.
        let refused = obstacle(path, facts).or_else(|| {
            if policy.deny.contains(&path) {
                Some(Reason::Denied)
            } else if !policy.require.is_empty() && !policy.require.contains(&path) {
                Some(Reason::NotRequired)
            } else {
                taken.map(|taken| Reason::Better { taken })
            }
        });
        let verdict = match refused {
            Some(reason) => Verdict::Refused(reason),
            None => {
                taken = Some(path);
                Verdict::Taken
            }
        };
        candidates.push(Candidate { path, verdict });
    }
    Choice { candidates }
}

/// Why a path is impossible, or None.
fn obstacle(path: Path, facts: &Facts) -> Option<Reason> {
    match path {
        Path::SameProcess => match facts.locality {
            Locality::SameProcess => match_devices(facts),
            _ => Some(Reason::OtherProcess),
        },
        Path::CudaIpc if !facts.remote.is_device() => Some(Reason::NoDeviceMemory),
        Path::SharedMemory if facts.remote.is_device() => Some(Reason::NoHostMemory),
        Path::CudaIpc | Path::SharedMemory => no_shared_memory(&facts.locality)
            .or_else(|| match facts.remote.exportability() {
                Exportability::Not(cause) => Some(Reason::ExportObstacle { cause }),
                Exportability::ByDescriptors | Exportability::ByLegacyHandle => None,
            })
            .or_else(|| match_devices(facts)),
        Path::ServiceCopied => no_shared_memory(&facts.locality).or_else(|| not_by_service(facts)),
        Path::HostStaged => no_shared_memory(&facts.locality),
        Path::FabricDirect => check_fabric(facts).or_else(|| not_direct(facts)),
        Path::FabricStaged => check_fabric(facts).or_else(|| match not_direct(facts) {
            None => Some(Reason::NothingToStage),
            Some(_) => None,
        }),
    }
}

/// Why the copy service does not copy between two memories of this machine, or None.
fn not_by_service(facts: &Facts) -> Option<Reason> {
    if !facts.has_device_memory() {
        return Some(Reason::NoDeviceMemory);
    }
    if let Exportability::Not(cause) = facts.remote.exportability() {
        return Some(Reason::ExportObstacle { cause });
    }
    match facts.local.exportability() {
        // Local-only memory is exported to the service, though not to peers.
        Exportability::Not(ExportObstacle::LocalOnly)
        | Exportability::ByDescriptors
        | Exportability::ByLegacyHandle => {}
        Exportability::Not(cause) => return Some(Reason::LocalExportObstacle { cause }),
    }
    match &facts.device_access {
        // The devices are as far from each other for the service.
        DeviceAccess::None => return Some(Reason::NoPeerAccess),
        DeviceAccess::Foreign => return Some(Reason::ForeignDevice),
        _ => {}
    }
    match &facts.copy_service {
        CopyServiceState::Available => None,
        CopyServiceState::Unavailable { cause } => {
            Some(Reason::NoCopyService { cause: cause.clone() })
        }
    }
}

/// Why a fabric between the two does not access both memories itself, or None.
fn not_direct(facts: &Facts) -> Option<Reason> {
    let Fabric::Connected { provider, local, remote, probe, .. } = &facts.fabric else {
        return None;
    };
    let not_local = unregistered(provider, "local", local);
    not_local.or_else(|| unregistered(provider, "remote", remote)).or_else(|| {
        if !facts.has_device_memory() {
            return None;
        }
        if facts.locality == Locality::SameMachine {
            return Some(Reason::LocalNotices);
        }
        let provider = provider.clone();
        match probe {
            Probe::NotNeeded | Probe::Passed | Probe::Skipped => None,
            Probe::NotMade => Some(Reason::NotProbed { provider }),
            Probe::Failed { cause } => Some(Reason::ProbeFailed { provider, cause: cause.clone() }),
        }
    })
}

/// Why two processes cannot share memory, or None.
fn no_shared_memory(locality: &Locality) -> Option<Reason> {
    match locality {
        Locality::SameMachine => None,
        Locality::SameProcess => Some(Reason::SameProcess),
        Locality::NoDescriptorPassing { cause } => {
            Some(Reason::NoDescriptorPassing { cause: cause.clone() })
        }
        Locality::ForcedRemote => Some(Reason::ForcedRemote),
        Locality::OtherMachine => Some(Reason::OtherMachine),
    }
}

fn match_devices(facts: &Facts) -> Option<Reason> {
    match &facts.device_access {
        DeviceAccess::Same
        | DeviceAccess::Direct
        | DeviceAccess::NotTried
        | DeviceAccess::NoDevice => None,
        DeviceAccess::None => Some(Reason::NoPeerAccess),
        DeviceAccess::Refused { cause } => Some(Reason::MappingRefused { cause: cause.clone() }),
        DeviceAccess::NoLocalDevice => Some(Reason::NoLocalDevice),
        DeviceAccess::Foreign => Some(Reason::ForeignDevice),
    }
}

/// Why no fabric carries bytes between the two, or None.
fn check_fabric(facts: &Facts) -> Option<Reason> {
    match (&facts.locality, &facts.fabric) {
        (Locality::SameProcess, _) => Some(Reason::SameProcess),
        (_, Fabric::None { cause }) => Some(Reason::NoFabric { cause: cause.clone() }),
        (_, Fabric::Connected { provider, remote_access: false, .. }) => {
            Some(Reason::NoRemoteAccess { provider: provider.clone() })
        }
        (_, Fabric::Connected { .. }) => None,
    }
}

fn unregistered(provider: &str, side: &'static str, state: &Registration) -> Option<Reason> {
    match state {
        Registration::Works => None,
        Registration::NotOffered => {
            Some(Reason::NotRegistered { provider: provider.to_owned(), side })
        }
        Registration::Off => Some(Reason::DeviceFabricOff),
        Registration::Refused { cause } => {
            Some(Reason::RegistrationRefused { side, cause: cause.clone() })
        }
    }
}
