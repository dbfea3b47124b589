use super::*;
use crate::capabilities::{
    ExecutionModel, ImmediateWidths, Nic, OperationLimits, OrderGuarantees, Progress,
    RegistrationAttributes, Threading,
};
use crate::flags::{Mode, MrMode, Order};
use crate::quirks::cq_may_overrun;
use crate::version::Version;

fn offer(provider: &str) -> Capabilities {
    let order = Order::WRITE_AFTER_WRITE | Order::SEND_AFTER_WRITE;
    Capabilities {
        provider: provider.to_owned(),
        provider_version: Version { major: 1, minor: 17 },
        fabric: "fabric".to_owned(),
        domain: "domain".to_owned(),
        endpoint: EndpointKind::Rdm,
        protocol: 1,
        protocol_name: "protocol".to_owned(),
        caps: Caps::MESSAGE | Caps::RMA,
        mode: Mode::empty(),
        registration: RegistrationAttributes {
            mr_mode: MrMode::empty(),
            mr_key_size: 8,
            mr_iov_limit: 1,
        },
        immediates: ImmediateWidths { cq_data_size: 8, write_data_size: 8 },
        max_message_size: usize::MAX,
        inject_size: 64,
        order: OrderGuarantees {
            send_order: order,
            receive_order: order,
            max_ordered_write: usize::MAX,
        },
        limits: OperationLimits {
            iov_limit: 4,
            rma_iov_limit: 1,
            transmit_depth: 128,
            receive_depth: 128,
            resource_management: true,
        },
        execution: ExecutionModel {
            data_progress: Progress::Manual,
            control_progress: Progress::Manual,
            threading: Threading::Safe,
        },
        address_format: 0,
        source: None,
        reaches_other_machines: true,
        nic: None,
    }
}

fn shared_memory() -> Capabilities {
    Capabilities { reaches_other_machines: false, ..offer("shm") }
}

fn card(gigabits: u64) -> Capabilities {
    let nic = Nic {
        name: Some("mlx5_0".to_owned()),
        pci: None,
        link_bits_per_second: gigabits * 1_000_000_000,
        link_up: Some(true),
    };
    let immediates = ImmediateWidths { cq_data_size: 4, write_data_size: 4 };
    Capabilities { nic: Some(nic), immediates, ..offer("verbs;ofi_rxm") }
}

/// The results must not depend on the installed libfabric.
const RECENT: Version = Version { major: 2, minor: 1 };

fn taken(offers: &[Capabilities], need: &Requirements, policy: &str) -> Option<String> {
    taken_under(RECENT, offers, need, policy)
}

fn taken_under(
    running: Version,
    offers: &[Capabilities],
    need: &Requirements,
    policy: &str,
) -> Option<String> {
    let offers: Vec<&Capabilities> = offers.iter().collect();
    let (choice, _) = rank_for_version(running, &offers, need, &policy.parse().unwrap());
    choice.taken().map(|c| c.provider.clone())
}

fn reason(facts: &Capabilities, need: &Requirements, policy: &str) -> String {
    let (choice, _) = rank_for_version(RECENT, &[facts], need, &policy.parse().unwrap());
    assert_eq!(choice.candidates[0].verdict, Verdict::Refused, "{choice}");
    choice.candidates[0].reasons[0].clone()
}

#[test]
fn shared_memory_wins_locally_and_is_refused_for_remote_peers() {
    let offers = [offer("tcp"), shared_memory(), card(100)];
    let near = Requirements::ring(Locality::SameMachine);
    let far = Requirements::ring(Locality::OtherMachines);
    assert_eq!(taken(&offers, &near, "").as_deref(), Some("shm"));
    assert_eq!(taken(&offers, &far, "").as_deref(), Some("verbs;ofi_rxm"));
    assert!(reason(&shared_memory(), &far, "").contains("only this machine"));
}

#[test]
fn loopback_device_does_not_count_as_shared_memory() {
    // Bound to the loopback address, a network provider may report that it reaches only this
    // machine.
    let source = Some("127.0.0.1:5".to_owned());
    let loopback = Capabilities { source, reaches_other_machines: false, ..offer("net") };
    let near = Requirements::ring(Locality::SameMachine);
    assert_eq!(taken(&[loopback, shared_memory()], &near, "").as_deref(), Some("shm"));
}

#[test]
fn old_shm_is_refused_unless_required() {
    let near = Requirements::ring(Locality::SameMachine);
    let offers = [shared_memory(), offer("net")];
    for minor in [17, 18] {
        let old = Version { major: 1, minor };
        for policy in ["", "shm", "^sockets"] {
            let taken = taken_under(old, &offers, &near, policy);
            assert_eq!(taken.as_deref(), Some("net"), "{old} {policy}");
        }
        let (choice, _) = rank_for_version(old, &[&offers[0]], &near, &Policy::default());
        assert_eq!(choice.candidates[0].verdict, Verdict::Refused);
        let reason = &choice.candidates[0].reasons[0];
        assert!(reason.contains("1.19") && reason.contains("=shm"), "{reason}");
        for policy in ["=shm", "=shm,=net"] {
            let taken = taken_under(old, &offers, &near, policy);
            assert_eq!(taken.as_deref(), Some("shm"), "{old} {policy}");
        }
    }
}

#[test]
fn fixed_shm_is_selected_by_default() {
    let near = Requirements::ring(Locality::SameMachine);
    let offers = [shared_memory(), offer("tcp")];
    for fixed in [Version { major: 1, minor: 19 }, RECENT] {
        assert_eq!(taken_under(fixed, &offers, &near, "").as_deref(), Some("shm"), "{fixed}");
    }
}

#[test]
fn faster_card_wins_and_dead_link_is_refused() {
    let far = Requirements::ring(Locality::OtherMachines);
    let mut slow = card(25);
    slow.domain = "slow".to_owned();
    let fast = card(400);
    let (choice, order) = rank(&[&slow, &fast], &far, &Policy::default());
    assert_eq!((choice.taken().unwrap().domain.as_str(), order[0]), ("domain", 1));
    let mut dead = card(400);
    dead.nic.as_mut().unwrap().link_up = Some(false);
    assert!(reason(&dead, &far, "").contains("link is down"));
}

#[test]
fn native_precedes_layered_and_deprecated_is_last() {
    let near = Requirements::ring(Locality::SameMachine);
    let offers = [offer("sockets"), offer("tcp;ofi_rxm"), offer("net"), offer("udp;ofi_rxd")];
    let facts: Vec<&Capabilities> = offers.iter().collect();
    let (choice, _) = rank(&facts, &near, &Policy::default());
    let order: Vec<&str> = choice.candidates.iter().map(|c| c.provider.as_str()).collect();
    assert_eq!(order, ["net", "tcp;ofi_rxm", "udp;ofi_rxd", "sockets"]);
}

#[test]
fn policy_prefers_requires_and_denies() {
    let near = Requirements::ring(Locality::SameMachine);
    let offers = [offer("tcp"), shared_memory(), offer("tcp;ofi_rxm")];
    assert_eq!(taken(&offers, &near, "tcp").as_deref(), Some("tcp"));
    assert_eq!(taken(&offers, &near, "ofi_rxm,tcp").as_deref(), Some("tcp;ofi_rxm"));
    assert_eq!(taken(&offers, &near, "^shm,^ofi_rxm").as_deref(), Some("tcp"));
    assert_eq!(
        taken(&offers, &near, "verbs").as_deref(),
        Some("shm"),
        "a preference is not a requirement"
    );
    assert_eq!(taken(&offers, &near, "=verbs"), None);
    assert!(reason(&offer("tcp"), &near, "=verbs").contains("requires verbs"));
    assert!(reason(&offer("tcp"), &near, "^tcp").contains("denied"));
}

#[test]
fn contradictory_policies_are_refused_by_the_parser() {
    for text in ["=shm,^shm", "^", "=", "^^shm"] {
        let error = text.parse::<Policy>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{text}");
    }
    assert_eq!("".parse::<Policy>().unwrap(), Policy::default());
    assert_eq!("= shm , ^ tcp".parse::<Policy>().unwrap(), "=shm,^tcp".parse().unwrap());
}

#[test]
fn every_refusal_has_its_reason() {
    let near = Requirements::ring(Locality::SameMachine);
    let mut no_immediate = offer("cxi");
    no_immediate.immediates.write_data_size = 0;
    assert!(reason(&no_immediate, &near, "").contains("no immediates"));
    let wide = Requirements { immediate_bytes: 8, ..near.clone() };
    assert!(reason(&card(100), &wide, "").contains("4 bytes, 8 needed"));
    let mut unordered = offer("efa");
    unordered.order.send_order = Order::empty();
    let ordered = Requirements { ordered: true, ..near.clone() };
    assert!(reason(&unordered, &ordered, "").contains("order"));
    assert_eq!(taken(&[unordered], &near, "").as_deref(), Some("efa"));
    let device = near.clone().memory(MemoryKind::Cuda(0));
    assert!(reason(&offer("tcp"), &device, "").contains("cuda:0"));
    let connected = Requirements { endpoint: EndpointKind::Msg, ..near.clone() };
    assert!(reason(&offer("tcp"), &connected, "").contains("Msg needed"));
    let atomic = Requirements { caps: near.caps | Caps::ATOMIC, ..near };
    assert!(reason(&offer("tcp"), &atomic, "").contains("ATOMIC"));
    let local = Capabilities { source: Some("127.0.0.1:5".to_owned()), ..offer("tcp") };
    assert!(reason(&local, &Requirements::ring(Locality::OtherMachines), "").contains("loopback"));
}

/// Inputs that the fuzzer found, kept as tests on the stable toolchain.
#[test]
fn fuzz_corpus_policies_do_not_panic() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/policy");
    let mut seen = 0;
    for entry in std::fs::read_dir(corpus).expect("the corpus is part of the repository") {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        if let Ok(text) = std::str::from_utf8(&bytes) {
            let _ = text.parse::<Policy>();
        }
        seen += 1;
    }
    assert!(seen > 0, "the corpus is empty");
}

/// Two offers that differ only in the name of their fabric.
fn two_fabrics(provider: &str) -> [Offer; 2] {
    let real = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
    ["efa", "efa-direct"].map(|fabric| {
        let facts = Capabilities { fabric: fabric.to_owned(), ..offer(provider) };
        Offer { capabilities: std::sync::Arc::new(facts), ..real.clone() }
    })
}

#[test]
fn fabrics_of_one_domain_are_different_offers() {
    let [first, second] = two_fabrics("efa");
    assert!(first.is_duplicate_of(&first.clone()));
    assert!(!first.is_duplicate_of(&second));
    // This provider returns new fabric numbers at each call.
    let [first, second] = two_fabrics("tcp;ofi_rxm;ofi_mrail");
    assert!(first.is_duplicate_of(&second));
}

#[test]
fn false_claims_of_overrun_protection_are_corrected() {
    assert!(cq_may_overrun("efa"));
    assert!(!cq_may_overrun("tcp;ofi_rxm"));
    let real = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
    assert!(real.capabilities().limits.resource_management, "{}", real.capabilities().provider);
}

#[test]
fn incompatible_fabrics_keep_separate_names() {
    let facts = two_fabrics("efa").map(|offer| offer.capabilities().clone());
    assert_eq!(facts.each_ref().map(Capabilities::wire_name), ["efa", "efa-direct"]);
    // Only this provider has incompatible fabrics.
    assert_eq!(two_fabrics("tcp")[1].capabilities().wire_name(), "tcp");
    let need = Requirements::ring(Locality::OtherMachines);
    let refused = |facts: &Capabilities, policy: &str| {
        rejection_reason(RECENT, facts, &need, &policy.parse().unwrap()).is_some()
    };
    for (policy, are_refused) in [
        ("=efa", [false, false]),
        ("=efa-direct", [true, false]),
        ("^efa-direct", [false, true]),
        ("^efa", [true, true]),
    ] {
        assert_eq!(facts.each_ref().map(|facts| refused(facts, policy)), are_refused, "{policy}");
    }
    let policy: Policy = "^efa-direct".parse().unwrap();
    assert!(policy.unknown_providers(["efa"]).is_empty());
    assert_eq!(policy.unknown_providers(["tcp"]), ["efa-direct"]);
}
