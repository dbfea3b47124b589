//! Every combination of facts, and the table in the documentation.

use super::*;

fn cause() -> String {
    "as tested".to_owned()
}

fn localities() -> [Locality; 5] {
    [
        Locality::SameProcess,
        Locality::SameMachine,
        Locality::NoDescriptorPassing { cause: cause() },
        Locality::ForcedRemote,
        Locality::OtherMachine,
    ]
}

fn memory_types() -> Vec<MemoryType> {
    let exportability = [
        Exportability::ByDescriptors,
        Exportability::ByLegacyHandle,
        Exportability::Not(ExportObstacle::NotExportable),
        Exportability::Not(ExportObstacle::NoLegacyHandle),
        Exportability::Not(ExportObstacle::StreamOrderedPool),
        Exportability::Not(ExportObstacle::Managed),
        Exportability::Not(ExportObstacle::PrivateHostMemory),
    ];
    exportability
        .into_iter()
        .flat_map(|exportability| {
            [MemoryType::Device(exportability), MemoryType::Host(exportability)]
        })
        .collect()
}

fn device_accesses() -> [DeviceAccess; 8] {
    [
        DeviceAccess::Same,
        DeviceAccess::Direct,
        DeviceAccess::NotTried,
        DeviceAccess::None,
        DeviceAccess::Refused { cause: cause() },
        DeviceAccess::NoLocalDevice,
        DeviceAccess::Foreign,
        DeviceAccess::NoDevice,
    ]
}

fn copy_services() -> [CopyServiceState; 2] {
    [CopyServiceState::Available, CopyServiceState::Unavailable { cause: cause() }]
}

fn registrations() -> [Registration; 3] {
    [Registration::Works, Registration::NotOffered, Registration::Refused { cause: cause() }]
}

fn probes() -> [Probe; 3] {
    [Probe::NotMade, Probe::Passed, Probe::Failed { cause: cause() }]
}

fn fabrics() -> Vec<Fabric> {
    let mut fabrics = vec![Fabric::None { cause: cause() }];
    for remote_access in [false, true] {
        for local in registrations() {
            for remote in registrations() {
                for probe in probes() {
                    let (local, remote) = (local.clone(), remote.clone());
                    let provider = "any".to_owned();
                    fabrics.push(Fabric::Connected {
                        provider,
                        remote_access,
                        local,
                        remote,
                        probe,
                    });
                }
            }
        }
    }
    fabrics
}

/// All facts but the operation and the local memory.
fn each(check: impl FnMut(Facts)) {
    each_of(&[Operation::Put], &[MemoryType::Device(Exportability::ByDescriptors)], check);
}

fn each_of(operations: &[Operation], locals: &[MemoryType], mut check: impl FnMut(Facts)) {
    for locality in localities() {
        for local in locals.iter().copied() {
            for remote in memory_types() {
                for device_access in device_accesses() {
                    for (fabric, operation) in fabrics_and(operations) {
                        for copy_service in copy_services() {
                            let (locality, fabric) = (locality.clone(), fabric.clone());
                            check(Facts {
                                operation,
                                locality,
                                local,
                                remote,
                                device_access: device_access.clone(),
                                copy_service,
                                fabric,
                            });
                        }
                    }
                }
            }
        }
    }
}

fn fabrics_and(operations: &[Operation]) -> impl Iterator<Item = (Fabric, Operation)> {
    let with =
        |fabric: Fabric| operations.iter().map(move |operation| (fabric.clone(), *operation));
    fabrics().into_iter().flat_map(with)
}

fn refusal(choice: &Choice, wanted: Path) -> Option<&Reason> {
    let found = choice.candidates.iter().find(|candidate| candidate.path == wanted)?;
    match &found.verdict {
        Verdict::Refused(reason) => Some(reason),
        Verdict::Taken => None,
    }
}

#[test]
fn every_combination_of_facts_gets_its_best_path() {
    let policy = Policy::default();
    let mut seen = 0_u64;
    each_of(&[Operation::Put, Operation::Get], &memory_types(), |facts| {
        seen += 1;
        let choice = choose(&facts, &policy);
        let paths: Vec<_> = choice.candidates.iter().map(|candidate| candidate.path).collect();
        assert_eq!(paths, Path::ALL, "each path once, in order");
        let have_access = matches!(
            facts.device_access,
            DeviceAccess::Same
                | DeviceAccess::Direct
                | DeviceAccess::NotTried
                | DeviceAccess::NoDevice
        );
        let is_exportable = !matches!(facts.remote.exportability(), Exportability::Not(_));
        let is_shareable = facts.locality == Locality::SameMachine && is_exportable && have_access;
        let (connected, reached) = match &facts.fabric {
            Fabric::Connected { remote_access, local, remote, probe, .. } => {
                let works = (local, remote) == (&Registration::Works, &Registration::Works);
                let is_reliable = *probe == Probe::Passed
                    && facts.locality != Locality::SameMachine
                    || !facts.has_device_memory();
                let is_connected = *remote_access && facts.locality != Locality::SameProcess;
                (is_connected, works && is_reliable)
            }
            Fabric::None { .. } => (false, false),
        };
        let expected = if facts.locality == Locality::SameProcess {
            have_access.then_some(Path::SameProcess)
        } else if is_shareable && facts.remote.is_device() {
            Some(Path::CudaIpc)
        } else if is_shareable {
            Some(Path::SharedMemory)
        } else if facts.locality == Locality::SameMachine {
            let is_possible = facts.has_device_memory()
                && is_exportable
                && !matches!(facts.local.exportability(), Exportability::Not(_))
                && !matches!(facts.device_access, DeviceAccess::None | DeviceAccess::Foreign)
                && facts.copy_service == CopyServiceState::Available;
            Some(if is_possible { Path::ServiceCopied } else { Path::HostStaged })
        } else if connected && reached {
            Some(Path::FabricDirect)
        } else if connected {
            Some(Path::FabricStaged)
        } else {
            None
        };
        assert_eq!(choice.taken(), expected, "{facts:?}\n{choice}");
        for candidate in &choice.candidates {
            if let Verdict::Refused(reason) = &candidate.verdict {
                assert!(!reason.to_string().is_empty() && !reason.name().is_empty());
            }
        }
    });
    assert_eq!(seen, 5 * 14 * 14 * 8 * 55 * 2 * 2);
}

#[test]
fn denied_and_unrequired_paths_are_refused_with_the_reason() {
    for wanted in Path::ALL {
        let require = Policy { require: vec![wanted], ..Policy::default() };
        let deny = Policy { deny: vec![wanted], ..Policy::default() };
        each(|facts| {
            let free = choose(&facts, &Policy::default());
            let bound = choose(&facts, &require);
            assert!(bound.taken().is_none_or(|taken| taken == wanted));
            assert!(bound.fallback().is_none() || bound.taken().is_none());
            let without = choose(&facts, &deny);
            assert_ne!(without.taken(), Some(wanted));
            match refusal(&free, wanted) {
                // An obstacle is reported whatever the policy is.
                Some(reason) if !matches!(reason, Reason::Better { .. }) => {
                    assert_eq!(refusal(&bound, wanted), Some(reason));
                    assert_eq!(refusal(&without, wanted), Some(reason));
                }
                _ => {
                    assert_eq!(bound.taken(), Some(wanted));
                    assert_eq!(refusal(&without, wanted), Some(&Reason::Denied));
                }
            }
        });
    }
}

#[test]
fn preferred_path_is_taken_or_its_fallback_is_named() {
    let policy: Policy = "fabric-staged,fabric-direct".parse().unwrap();
    each(|facts| {
        let free = choose(&facts, &Policy::default());
        let choice = choose(&facts, &policy);
        assert_eq!(choice.taken().is_some(), free.taken().is_some());
        if refusal(&free, Path::FabricStaged).is_none_or(|r| matches!(r, Reason::Better { .. })) {
            assert_eq!(choice.taken(), Some(Path::FabricStaged));
            assert_eq!(choice.fallback(), None);
        }
    });
}

fn between_devices(locality: Locality, device_access: DeviceAccess) -> Facts {
    Facts {
        operation: Operation::Put,
        locality,
        local: MemoryType::Device(Exportability::ByDescriptors),
        remote: MemoryType::Device(Exportability::ByDescriptors),
        device_access,
        copy_service: CopyServiceState::Unavailable { cause: cause() },
        fabric: Fabric::Connected {
            provider: "tcp".to_owned(),
            remote_access: true,
            local: Registration::NotOffered,
            remote: Registration::NotOffered,
            probe: Probe::NotMade,
        },
    }
}

/// Every reason why a fabric does not access device memory itself, in words.
#[test]
fn reasons_against_direct_device_memory_name_their_cause() {
    let reason = |locality: Locality, local: Registration, probe: Probe| {
        let facts = Facts {
            fabric: Fabric::Connected {
                provider: "efa".to_owned(),
                remote_access: true,
                local,
                remote: Registration::Works,
                probe,
            },
            ..between_devices(locality, DeviceAccess::NotTried)
        };
        let choice = choose(&facts, &Policy::default());
        let reason = refusal(&choice, Path::FabricDirect).map(ToString::to_string);
        (choice.taken(), reason.unwrap_or_default())
    };
    let far = || Locality::OtherMachine;
    let works = || Registration::Works;
    let direct = Some(Path::FabricDirect);
    for probe in [Probe::Passed, Probe::Skipped] {
        assert_eq!(reason(far(), works(), probe), (direct, String::new()));
    }
    let staged = |locality, local, probe, text: &str| {
        let found = reason(locality, local, probe);
        assert_eq!((found.0, found.1.as_str()), (Some(Path::FabricStaged), text));
    };
    let text = "efa failed the probe: 64 KiB arrived 5 µs after its notice";
    let failed = || "64 KiB arrived 5 µs after its notice".to_owned();
    staged(far(), works(), Probe::Failed { cause: failed() }, text);
    let text = "efa was not probed with this memory yet; a join does it";
    staged(far(), works(), Probe::NotMade, text);
    let text = "the setting device_fabric is off";
    staged(far(), Registration::Off, Probe::NotMade, text);
    let refused = Registration::Refused { cause: "cuda:0 has no GPUDirect RDMA".to_owned() };
    let text = "the local memory is not registered: cuda:0 has no GPUDirect RDMA";
    staged(far(), refused, Probe::NotMade, text);
    let text = "efa does not reach the local memory";
    staged(far(), Registration::NotOffered, Probe::NotMade, text);
    let facts = Facts {
        remote: MemoryType::Device(Exportability::Not(ExportObstacle::StreamOrderedPool)),
        fabric: Fabric::Connected {
            provider: "efa".to_owned(),
            remote_access: true,
            local: works(),
            remote: works(),
            probe: Probe::Passed,
        },
        ..between_devices(Locality::SameMachine, DeviceAccess::Direct)
    };
    let choice = choose(&facts, &Policy::default());
    assert_eq!(choice.taken(), Some(Path::HostStaged));
    let text = "notices between processes of one machine do not use the fabric, and could overtake \
                device memory";
    assert_eq!(refusal(&choice, Path::FabricDirect).map(ToString::to_string).unwrap(), text);
}

#[test]
fn only_an_unexpected_refusal_makes_a_fallback() {
    let policy = Policy::default();
    let choice = choose(&between_devices(Locality::SameMachine, DeviceAccess::None), &policy);
    assert_eq!(choice.taken(), Some(Path::HostStaged));
    assert_eq!(choice.fallback(), Some((Path::CudaIpc, &Reason::NoPeerAccess)));
    let choice = choose(
        &between_devices(Locality::NoDescriptorPassing { cause: cause() }, DeviceAccess::Direct),
        &policy,
    );
    assert_eq!(choice.fallback().unwrap().1.name(), "no-descriptor-passing");
    // Other machines are expected; a provider without device memory is not.
    let choice = choose(&between_devices(Locality::OtherMachine, DeviceAccess::NotTried), &policy);
    assert_eq!(choice.fallback().unwrap().1.name(), "not-registered");
    let denied = Policy { deny: vec![Path::CudaIpc], ..policy };
    let choice = choose(&between_devices(Locality::SameMachine, DeviceAccess::Direct), &denied);
    assert_eq!(refusal(&choice, Path::CudaIpc), Some(&Reason::Denied));
}

#[test]
fn names_of_paths_are_parsed_and_wrong_ones_refused() {
    for path in Path::ALL {
        assert_eq!(Path::named(path.name()), Some(path));
        let text = serde_json::to_string(&path).unwrap();
        assert_eq!(text, format!("\"{path}\""));
    }
    assert_eq!(Path::named("nvlink"), None);
    for wrong in ["nvlink", "^", "=", "^^cuda-ipc", "=cuda-ipc,^cuda-ipc"] {
        assert!(wrong.parse::<Policy>().is_err(), "{wrong}");
    }
}

/// The table of `docs/reference/paths.md` is generated from this code, so that they never differ.
#[test]
fn the_documentation_has_this_table() {
    let table = documented();
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/paths.md");
    let page =
        std::fs::read_to_string(page).expect("docs/reference/paths.md is part of the repository");
    assert!(page.contains(&table), "docs/reference/paths.md should have this table:\n\n{table}");
}

/// Each row of the table can be reached: the facts do not contradict each other.
#[test]
fn situations_do_not_contradict_themselves() {
    for Situation { name, facts } in situations() {
        let Fabric::Connected { local, remote, probe, .. } = &facts.fabric else { continue };
        let is_registered = (local, remote) == (&Registration::Works, &Registration::Works);
        assert!(is_registered || *probe == Probe::NotMade, "{name}: probed without registration");
        assert_eq!(
            facts.device_access == DeviceAccess::NoDevice,
            !facts.has_device_memory(),
            "{name}"
        );
    }
}

fn documented() -> String {
    let mut table = "| | path | because these are refused |\n|---|---|---|\n".to_owned();
    for Situation { name, facts } in situations() {
        let choice = choose(&facts, &Policy::default());
        let taken = choice.taken();
        let taken = taken
            .map_or("**none: an error with all reasons**".to_owned(), |path| format!("`{path}`"));
        let fallbacks: Vec<_> =
            choice.fallbacks().map(|(path, reason)| format!("{path}: {reason}")).collect();
        table.push_str(&format!("| {name} | {taken} | {} |\n", fallbacks.join("; ")));
    }
    table
}
