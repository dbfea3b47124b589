//! Connecting to agents that have ended, or do not answer.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use transfer::{AgentCard, ErrorKind};

use crate::common::{PATIENCE, alone};
use crate::house::House;
use crate::rails::tcp;

/// Far less than the timeout, and enough for a busy machine.
const SOON: Duration = Duration::from_secs(5);

/// Processor time of all threads of this process.
fn processor_time() -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let each = tasks.flatten().filter_map(|task| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(each.sum())
}

/// The error of connecting to this card, and how long that took.
fn refusal(house: &mut House, card: &[u8], timeout: Duration) -> (transfer::Error, Duration) {
    let start = Instant::now();
    let error = house.agent.connect(card, timeout).unwrap_err();
    (error, start.elapsed())
}

#[test]
fn killed_agent_is_told_at_once_by_its_socket() {
    let _alone = alone();
    let mut house = House::open();
    let mut neighbour = house.neighbour("host", &[]);
    let label = AgentCard::decode(&neighbour.card).unwrap().label;
    neighbour.other.kill();
    let (error, took) = refusal(&mut house, &neighbour.card, PATIENCE);
    assert!(took < SOON, "{took:?}");
    assert_eq!((error.kind(), error.peer()), (ErrorKind::Closed, Some(&*label)), "{error}");
    assert!(error.to_string().contains("its process has ended"), "{error}");
}

#[test]
fn killed_agent_is_told_at_once_by_its_fabric() {
    let _alone = alone();
    for provider in [tcp(), "tcp;ofi_rxm"] {
        let mut house = House::open_far(provider, 1);
        let mut neighbour = house.neighbour(&format!("far by {provider} 1: host"), &[]);
        let label = AgentCard::decode(&neighbour.card).unwrap().label;
        neighbour.other.kill();
        house.agent.disconnect(neighbour.peer, PATIENCE).unwrap();
        let mut try_again = || {
            let before = processor_time();
            let (error, took) = refusal(&mut house, &neighbour.card, PATIENCE);
            let used = processor_time() - before;
            assert!(took < SOON && used < SOON / 5, "{took:?}, {used:?} of a processor");
            assert_eq!((error.kind(), error.peer()), (ErrorKind::Closed, Some(&*label)), "{error}");
            error.to_string()
        };
        let mut text = try_again();
        // The provider may not have noticed the end of its last connection before; then it makes
        // another one the next time.
        if provider == tcp() && text.contains("connection lost") {
            text = try_again();
        }
        // The system's answer; rxm may be faster to say what became of its connection.
        let has_cause = text.contains("ECONNREFUSED")
            || (provider != tcp() && text.contains("connection lost"));
        assert!(has_cause && text.contains("127.0.0.1:"), "{provider}: {text}");
    }
}

/// A process that is stopped, or another program at its port: the connection is made, and no answer
/// comes.
#[test]
fn silent_agent_costs_little_processor_time() {
    let _alone = alone();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let timeout = Duration::from_secs(2);
    let mut house = House::open_far(tcp(), 1);
    let mut neighbour = house.neighbour(&format!("far by {} 1: host", tcp()), &[]);
    let mut card = AgentCard::decode(&neighbour.card).unwrap();
    let port = listener.local_addr().unwrap().port();
    card.fabrics[0].address[2..4].copy_from_slice(&port.to_be_bytes());
    let before = processor_time();
    let (error, took) = refusal(&mut house, &card.encode().unwrap(), timeout);
    let used = processor_time() - before;
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
    assert!(took >= timeout && took < timeout + SOON, "{took:?}");
    assert!(used < timeout / 5, "{used:?} of a processor in {took:?}");
    neighbour.other.kill();
}
