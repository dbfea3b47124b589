//! Pieces on a device that the service does not see.

use super::*;
use crate::MemoryLocation;
use crate::error::ErrorKind;
use crate::service::protocol::Refusal;

const DEVICE: [u8; 16] = [9; 16];
const MEMORY: u64 = 1 << 30;
const POOL: PoolId = PoolId { place: SharedLocation::Device(DEVICE), direction: Direction::Local };

/// Two clients of a topic on the device, which both see.
fn with_two_clients(test_dir: &TestDir) -> (Service, [(Member, Vec<Notice>); 2]) {
    let mut service = test_dir.service();
    let clients = [test_dir.member(), test_dir.member()].map(|client| {
        client.join(&mut service);
        client.send_request(&Request::SeesDevice { device: DEVICE, memory: MEMORY }, &[]);
        client.send_request(&open(), &[]);
        run_several(&mut service);
        let notices = client.receive_all();
        (client, notices)
    });
    (service, clients)
}

fn open() -> Request {
    let memory = MemoryLocation::DeviceUuid(gpu::Uuid(DEVICE));
    let settings = crate::TopicSettings { memory, ..crate::TopicSettings::default() };
    let settings = Some(SharedSettings::of(&settings).unwrap());
    Request::Open { request: 1, name: "it".into(), settings }
}

/// The length of the requested piece, if one is.
fn requested(notices: &[Notice]) -> Option<u64> {
    notices.iter().find_map(|notice| match notice {
        Notice::MakePiece { pool: POOL, number: 0, length } => Some(*length),
        _ => None,
    })
}

fn refuse(client: &Member) {
    let reason = Refusal::new(ErrorKind::Failed, "no memory");
    client.send_request(&Request::PieceRefused { pool: POOL, reason }, &[]);
}

fn is_granted(notices: &[Notice]) -> bool {
    notices.iter().any(|notice| matches!(notice, Notice::Topic { request: 1, .. }))
}

fn has_grown(client: &Member) -> bool {
    client.receive_all().iter().any(|it| matches!(it, Notice::PoolGrown { pool: POOL }))
}

#[test]
fn client_that_sees_the_device_makes_the_piece() {
    let test_dir = TestDir::new();
    let (mut service, [(first, of_first), (second, of_second)]) = with_two_clients(&test_dir);
    assert!(is_granted(&of_first) && is_granted(&of_second));
    let length = requested(&of_first).unwrap();
    assert_eq!(requested(&of_second), None);
    assert_eq!(service.broker.registry().budget(POOL.place), MEMORY / 2);
    // Its memory of the device is exhausted: the other one is asked.
    refuse(&first);
    run_several(&mut service);
    assert_eq!(requested(&second.receive_all()), Some(length));
    // A late answer of the first changes nothing.
    refuse(&first);
    let file = std::fs::File::open("/dev/null").unwrap();
    let pieces = vec![(length, 7)];
    second.send_request(&Request::Pieces { pool: POOL, first: 0, pieces }, &[file.as_fd()]);
    run_several(&mut service);
    let pool = service.broker.registry().pool(POOL).unwrap();
    assert_eq!((pool.held(), pool.admitted()), (1, 0), "admitted before all clients have it");
    let ticket = first.receive_all().into_iter().find_map(|notice| match notice {
        Notice::Piece { pool: POOL, number: 0, name: 7, ticket, .. } => Some(ticket),
        _ => None,
    });
    let ticket = ticket.expect("the first client has the piece");
    first.send_request(&Request::AcknowledgePieces { ticket }, &[]);
    run_several(&mut service);
    assert_eq!(service.broker.registry().pool(POOL).unwrap().admitted(), 1);
    assert!(has_grown(&first) && has_grown(&second));
    assert!(!service.broker.is_growing());
}

#[test]
fn piece_of_a_client_that_ends_is_made_by_another() {
    let test_dir = TestDir::new();
    let (mut service, [(first, of_first), (second, _)]) = with_two_clients(&test_dir);
    assert!(requested(&of_first).is_some());
    drop(first);
    run_several(&mut service);
    assert!(requested(&second.receive_all()).is_some());
    refuse(&second);
    run_several(&mut service);
    assert!(!service.broker.is_growing(), "no client is left");
    // As a publisher does that waits for memory.
    let request = GrowthRequest::new(POOL, 0, 4096);
    second.send_request(&Request::Grow(request), &[]);
    run_several(&mut service);
    assert!(requested(&second.receive_all()).is_some());
}

#[test]
fn topic_on_a_device_that_no_process_sees_is_refused() {
    let test_dir = TestDir::new();
    let (mut service, client, _) = test_dir.joined();
    client.send_request(&open(), &[]);
    run_several(&mut service);
    let refused = client.receive_all().into_iter().find_map(|notice| match notice {
        Notice::Refused { request: 1, reason } => Some(reason.into_error("open topic")),
        _ => None,
    });
    let error = refused.unwrap();
    assert_eq!(error.kind(), ErrorKind::NoDevice);
    assert!(error.to_string().contains("fabricast node"), "{error}");
}
