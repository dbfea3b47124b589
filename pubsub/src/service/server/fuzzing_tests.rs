//! Malformed clients with the service in one thread: the corpus of the fuzzers, and scripts of
//! arbitrary messages.

use ipc::Participant;
use proptest::prelude::*;
use testkit::processes::open_descriptors;

use super::fuzzing::{ClientOutcome, run_clients};
use crate::error::ErrorKind;
use crate::pool::{Direction, GrowthRequest, PoolId};
use crate::service::protocol::{self, Refusal, Request, VERSION};
use crate::settings::{SharedLocation, SharedSettings};
use crate::{Reliability, TopicSettings};

/// The message includes a version, or none.
const RAW: u8 = 32;

/// One message of a client, with this number of descriptors of these kinds.
fn step(client: u8, count: u8, kinds: u8, message: &[u8]) -> Vec<u8> {
    let mut bytes = vec![client, count, kinds];
    bytes.extend((message.len() as u16).to_le_bytes());
    bytes.extend(message);
    bytes
}

fn body(request: &Request) -> Vec<u8> {
    protocol::encode(request).split_off(1)
}

fn of(client: u8, count: u8, kinds: u8, request: &Request) -> Vec<u8> {
    step(client, count, kinds, &body(request))
}

/// The participant that a participant table admits first.
fn first() -> Participant {
    Participant::new(0, 1).unwrap()
}

#[test]
fn service_survives_the_fuzzers_corpus() {
    let corpus = format!("{}/../fuzz/corpus/node_clients", env!("CARGO_MANIFEST_DIR"));
    let mut count = 0;
    for entry in std::fs::read_dir(corpus).expect("the corpus is part of the repository") {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let outcome = run_clients(&std::fs::read(path).unwrap()).unwrap();
        let ClientOutcome { welcomes, answers, rejections } = outcome;
        if name.starts_with("honest") {
            assert!(welcomes + answers > 0 && rejections == 0, "{name}: {outcome:?}");
        } else if name.starts_with("refused") {
            assert!(rejections > 0, "{name}: {outcome:?}");
        }
        count += 1;
    }
    assert!(count > 0, "the corpus is empty");
}

fn number() -> impl Strategy<Value = u32> {
    prop_oneof![
        0..10_u32,
        256..260_u32,
        Just(Participant::role(0).unwrap().number()),
        any::<u32>(),
        Just(u32::MAX)
    ]
}

fn large() -> impl Strategy<Value = u64> {
    prop_oneof![0..10_u64, Just(4096), Just(1 << 20), any::<u64>(), Just(u64::MAX)]
}

fn device() -> impl Strategy<Value = [u8; 16]> {
    prop_oneof![Just([9; 16]), any::<[u8; 16]>()]
}

fn pool() -> impl Strategy<Value = PoolId> {
    let place = prop_oneof![4 => Just(SharedLocation::Host), 1 => device().prop_map(SharedLocation::Device)];
    let direction = prop_oneof![Just(Direction::Local), Just(Direction::Inbound)];
    (place, direction).prop_map(|(place, direction)| PoolId { place, direction })
}

fn settings() -> impl Strategy<Value = SharedSettings> {
    let place = prop_oneof![4 => Just(SharedLocation::Host), 1 => device().prop_map(SharedLocation::Device)];
    let reliability = prop_oneof![Just(Reliability::Reliable), Just(Reliability::DropOldest)];
    let usual = SharedSettings::of(&TopicSettings::default()).unwrap();
    let type_name = proptest::option::of(Just("Pose".parse().unwrap()));
    (place, reliability, number(), number(), large(), large(), type_name).prop_map(
        move |(place, reliability, depth, loans, largest, release, type_name)| SharedSettings {
            place,
            reliability,
            depth,
            max_held: loans,
            largest,
            loans,
            release_microseconds: release.max(usual.release_microseconds & 1),
            type_name,
        },
    )
}

fn request() -> impl Strategy<Value = Request> {
    let label = prop_oneof![Just(String::new()), ".{0,80}"];
    prop_oneof![
        4 => label.prop_map(|label| Request::Hello { label }),
        4 => number().prop_map(|participant| Request::Rejoin { label: "back".into(), participant }),
        2 => proptest::collection::vec(number(), 0..70)
            .prop_map(|participants| Request::Pidfds { participants }),
        2 => pool().prop_map(|pool| Request::Pool { pool }),
        2 => (pool(), number(), proptest::collection::vec((large(), large()), 0..6))
            .prop_map(|(pool, first, pieces)| Request::Pieces { pool, first, pieces }),
        2 => number().prop_map(|number| Request::Topic { number }),
        2 => Just(Request::RejoinDone),
        4 => (large(), prop_oneof![Just("it".to_owned()), ".{0,250}"], proptest::option::of(settings()))
            .prop_map(|(request, name, settings)| Request::Open { request, name, settings }),
        2 => (number(), large()).prop_map(|(number, granted)| Request::CloseTopic { number, granted }),
        2 => (pool(), number(), large()).prop_map(|(pool, admitted, bytes)| {
            Request::Grow(GrowthRequest::new(pool, admitted, bytes))
        }),
        1 => number().prop_map(|number| Request::ParticipantsChanged { number }),
        1 => large().prop_map(|ticket| Request::AcknowledgePieces { ticket }),
        1 => large().prop_map(|request| Request::Report { request }),
        1 => Just(Request::Leave),
        2 => (device(), large()).prop_map(|(device, memory)| Request::SeesDevice { device, memory }),
        1 => pool().prop_map(|pool| {
            let reason = Refusal::new(ErrorKind::Failed, "no memory");
            Request::PieceRefused { pool, reason }
        }),
    ]
}

/// The right descriptors for a request.
fn expected_descriptors(request: &Request) -> (u8, u8) {
    match request {
        Request::Hello { .. } => (1, 0),
        Request::Rejoin { .. } => (2, 0x10),
        Request::Pidfds { participants } => (participants.len() as u8, 0),
        Request::Pool { pool } => (1, 4 + u8::from(pool.direction == Direction::Inbound)),
        Request::Pieces { pieces, .. } => (pieces.len() as u8, 7),
        Request::Topic { .. } => (1, 6),
        _ => (0, 0),
    }
}

fn malformed_message() -> impl Strategy<Value = Vec<u8>> {
    let client = prop_oneof![8 => 0..4_u8, 2 => 64..68_u8, 1 => 128..132_u8];
    let files = prop_oneof![
        6 => Just(None),
        1 => (prop_oneof![0..4_u8, 60..70_u8], any::<u8>()).prop_map(Some),
    ];
    // Descriptors and message are mostly valid.
    (client, request(), files, any::<u16>(), 0..12_u8).prop_map(
        |(client, request, files, at, mutation)| {
            let (count, kinds) = files.unwrap_or_else(|| expected_descriptors(&request));
            let mut message = protocol::encode(&request);
            let at = usize::from(at) % message.len();
            match mutation {
                0 => message[at] ^= 1 << (at % 8),
                1 => message.truncate(at),
                2 => message.push(0),
                _ => {}
            }
            step(client | RAW, count, kinds, &message)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn malformed_clients_do_not_disturb_others(
        takes_over in any::<bool>(),
        steps in proptest::collection::vec(malformed_message(), 1..25),
    ) {
        let mut script = vec![u8::from(takes_over)];
        script.extend(steps.concat());
        run_clients(&script).unwrap();
    }
}

/// A repeated script leaves nothing behind.
#[test]
fn descriptors_of_malformed_clients_are_closed() {
    let hello = Request::Hello { label: "one".into() };
    let steps: Vec<Vec<u8>> = (0..60)
        .map(|number| match number % 4 {
            0 => of(128, 1, 0, &hello),
            1 => of(0, 64, 0x13, &Request::RejoinDone),
            2 => of(129, 63, 0x31, &hello),
            _ => step(130 | RAW, 5, 0x10, &[VERSION + 1]),
        })
        .collect();
    let script = [vec![0], steps.concat()].concat();
    run_clients(&script).unwrap();
    let before = open_descriptors();
    let outcome = run_clients(&script).unwrap();
    assert!(outcome.welcomes > 0 && outcome.rejections > 0, "{outcome:?}");
    // Other tests of this process may have some open.
    if std::env::var_os("NEXTEST").is_some() {
        assert_eq!(open_descriptors(), before);
    }
}

#[test]
fn requests_during_a_takeover_are_limited() {
    let back = Request::Rejoin { label: "back".into(), participant: first().number() };
    let ask = of(0, 0, 0, &Request::ParticipantsChanged { number: 1 });
    let script = |count| [vec![1], of(0, 2, 0x10, &back), ask.repeat(count)].concat();
    assert_eq!(run_clients(&script(4096)).unwrap().rejections, 0);
    assert_eq!(run_clients(&script(4097)).unwrap().rejections, 1);
}

type Script = (&'static str, bool, Vec<Vec<u8>>);

/// Initial corpus: a name, whether the service is taking over, and steps.
fn scripts() -> Vec<Script> {
    let one = Request::Hello { label: "one".into() };
    let hello = |client| of(client, 1, 0, &one);
    let alone = |count, kinds, request| vec![hello(0), of(0, count, kinds, &request)];
    let settings = TopicSettings { depth: 2, largest: 4096, ..TopicSettings::default() };
    let settings = SharedSettings::of(&settings).unwrap();
    let huge = SharedSettings { largest: u64::MAX, depth: u32::MAX, loans: u32::MAX, ..settings };
    let open = |request, settings| Request::Open { request, name: "it".into(), settings };
    let make = |request| open(request, Some(settings));
    let local = PoolId { place: SharedLocation::Host, direction: Direction::Local };
    let inbound = PoolId { direction: Direction::Inbound, ..local };
    let on_device = PoolId { place: SharedLocation::Device([9; 16]), ..local };
    let reason = Refusal::new(ErrorKind::Failed, "no memory");
    let pieces = |first, pieces| Request::Pieces { pool: local, first, pieces };
    let again = |participant| Request::Rejoin { label: "back".into(), participant };
    let first = again(first().number());
    let role = again(Participant::role(0).unwrap().number());
    let whole = body(&one);
    vec![
        (
            "honest",
            false,
            vec![
                hello(0),
                of(0, 0, 0, &make(1)),
                of(0, 0, 0, &Request::AcknowledgePieces { ticket: 9 }),
                of(0, 0, 0, &Request::ParticipantsChanged { number: 0 }),
                of(0, 0, 0, &Request::AdmitPublisher { request: 3, number: 0, publisher: 1 << 8 }),
                of(0, 0, 0, &Request::Report { request: 2 }),
                of(0, 0, 0, &Request::CloseTopic { number: 0, granted: 1 }),
                of(0, 0, 0, &Request::Leave),
            ],
        ),
        (
            "honest_two",
            false,
            vec![
                hello(0),
                hello(1),
                of(0, 0, 0, &make(1)),
                of(1, 0, 0, &open(3, None)),
                of(1, 0, 0, &Request::Grow(GrowthRequest::new(local, 0, 100_000))),
            ],
        ),
        (
            "honest_asks_without_joining",
            false,
            vec![
                of(0, 0, 0, &Request::Report { request: 2 }),
                of(0, 0, 0, &Request::Report { request: 3 }),
            ],
        ),
        (
            "honest_returns",
            true,
            vec![
                of(0, 2, 0x10, &first),
                of(0, 1, 4, &Request::Pool { pool: local }),
                of(0, 1, 5, &Request::Pool { pool: inbound }),
                of(0, 1, 7, &pieces(0, vec![(4096, 1)])),
                of(0, 1, 6, &Request::Topic { number: 4 }),
                of(0, 0, 0, &Request::RejoinDone),
                of(0, 0, 0, &Request::Report { request: 2 }),
            ],
        ),
        (
            "honest_makes_pieces",
            false,
            vec![
                hello(0),
                of(0, 0, 0, &Request::SeesDevice { device: [9; 16], memory: 1 << 30 }),
                of(0, 0, 0, &open(1, Some(SharedSettings { place: on_device.place, ..settings }))),
                of(
                    0,
                    1,
                    7,
                    &Request::Pieces { pool: on_device, first: 0, pieces: vec![(4096, 1)] },
                ),
                of(0, 0, 0, &Request::Grow(GrowthRequest::new(on_device, 1, 8192))),
                of(0, 0, 0, &Request::PieceRefused { pool: on_device, reason }),
            ],
        ),
        ("refused_empty", false, vec![step(RAW, 0, 0, b"")]),
        ("refused_version", false, vec![step(RAW, 1, 0, &[VERSION + 1, 0, 0])]),
        (
            "refused_in_two_parts",
            false,
            vec![step(0, 1, 0, &whole[..3]), step(0, 0, 0, &whole[3..])],
        ),
        ("refused_trailing", false, vec![step(0, 1, 0, &[&whole[..], &[0]].concat())]),
        ("refused_unknown", false, vec![step(0, 1, 0, &[99, 1, 2, 3])]),
        ("refused_claims_more", false, vec![step(0, 1, 0, &[0, 0xff, 0xff, 0xff, 0xff, 0x0f])]),
        ("refused_long_label", false, vec![of(0, 1, 0, &Request::Hello { label: "x".repeat(65) })]),
        ("refused_no_life", false, vec![of(0, 0, 0, &one)]),
        ("refused_two_lives", false, vec![of(0, 2, 0, &one)]),
        ("refused_most_descriptors", false, vec![of(0, 64, 0, &one)]),
        ("refused_a_file_as_life", false, vec![of(0, 1, 2, &one)]),
        ("refused_a_socket_as_life", false, vec![of(0, 1, 8, &one)]),
        ("refused_memory_as_life", false, vec![of(0, 1, 3, &one)]),
        ("refused_two_hellos", false, vec![hello(0), hello(0)]),
        ("refused_before_hello", false, vec![of(0, 0, 0, &make(1))]),
        ("refused_again_of_nobody", false, vec![of(0, 2, 0x10, &again(u32::MAX))]),
        ("refused_again_as_a_role", false, vec![of(0, 2, 0x10, &role)]),
        ("refused_short_hall", true, vec![of(0, 2, 0xa0, &first)]),
        ("refused_hall_of_nonsense", true, vec![of(0, 2, 0xb0, &first)]),
        ("refused_unsealed_hall", true, vec![of(0, 2, 0x30, &first)]),
        ("refused_short_books", false, alone(1, 12, Request::Pool { pool: local })),
        ("refused_books_of_nonsense", false, alone(1, 13, Request::Pool { pool: local })),
        ("refused_books_of_another", false, alone(1, 5, Request::Pool { pool: local })),
        ("refused_topic_of_nonsense", false, alone(1, 14, Request::Topic { number: 4 })),
        ("refused_topic_without_pools", false, alone(1, 6, Request::Topic { number: 4 })),
        ("refused_pieces_of_no_pool", false, alone(1, 7, pieces(0, vec![(4096, 1)]))),
        ("refused_files_with_a_question", false, alone(3, 2, Request::Report { request: 1 })),
        ("refused_too_few_lives", false, alone(1, 0, Request::Pidfds { participants: vec![1, 2] })),
        (
            "late_pieces",
            false,
            vec![
                hello(0),
                of(0, 1, 4, &Request::Pool { pool: local }),
                of(0, 2, 7, &pieces(u32::MAX, vec![(u64::MAX, 1), (0, 0)])),
            ],
        ),
        (
            "huge",
            false,
            vec![
                hello(0),
                of(0, 0, 0, &open(1, Some(huge))),
                of(0, 0, 0, &Request::Grow(GrowthRequest::new(local, 0, u64::MAX))),
                of(0, 0, 0, &Request::CloseTopic { number: u32::MAX, granted: u64::MAX }),
                of(0, 0, 0, &Request::AcknowledgePieces { ticket: u64::MAX }),
                of(
                    0,
                    0,
                    0,
                    &Request::AdmitPublisher { request: 2, number: u32::MAX, publisher: u64::MAX },
                ),
            ],
        ),
        (
            "does_not_listen",
            false,
            vec![
                hello(64),
                of(64, 0, 0, &make(1)),
                of(64, 0, 0, &make(2)),
                of(64, 0, 0, &Request::Report { request: 3 }),
            ],
        ),
    ]
}

#[test]
#[ignore = "writes the corpus: run it after a change of the protocol"]
fn write_the_initial_corpus() {
    let corpus = format!("{}/../fuzz/corpus/node_clients", env!("CARGO_MANIFEST_DIR"));
    for (name, takes_over, steps) in scripts() {
        let script = [vec![u8::from(takes_over)], steps.concat()].concat();
        std::fs::write(format!("{corpus}/{name}"), script).unwrap();
    }
}
